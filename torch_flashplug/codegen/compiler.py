"""Compilation of one kernel: the only module besides kernels/ that imports the DSL.

Compilation needs no GPU. Parallel compilation takes separate processes: threads break the DSL's session.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..registry.architectures import TARGETS, targets_of
from ..registry.dtypes import misfit
from ..registry.kernel_spec import KernelSpec
from . import dsl
from .fingerprint import fingerprint

# By target, architecture, kind and mask, perhaps an element: where ptxas at its usual level spills a few registers of
# some kernel, and at this one none.
PTXAS = dict.fromkeys(
    (
        *(("sm_80", 80, "bwd", mask) for mask in ("full", "causal", "mask", "bias")),
        *(("sm_80", 80, "detbwd", "full"), ("sm_80", 80, "decode", "bias"), ("sm_90a", 80, "bwd", "bias")),
        *(
            (target, 80, "decode", mask, element)
            for target in ("sm_80", "sm_90a")
            for mask in ("cache8", "mask+cache8")
            for element in ("bf16_e4m3", "fp16_e4m3")
        ),
    ),
    "-O2",
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel, compiled; `cubin` and `ptx` are there if asked for."""

    spec: KernelSpec
    function: Any
    seconds: float
    cubin: bytes | None
    ptx: str | None

    def export(self, path: Path) -> None:
        """Write an object file whose one visible symbol is `__tvm_ffi_<spec name>`."""
        self.function.export_to_c(str(path), function_name=self.spec.name(), export_only_tvm_ffi_symbols=True)


def target_of(cc: int) -> str:
    """The target whose code runs on GPUs of this compute capability (90 is 9.0). Raises ValueError where none does."""
    for target in targets_of(cc):
        return target
    raise ValueError(f"compute capability {cc // 10}.{cc % 10}; kernels are compiled for {', '.join(TARGETS)}")


def _misfit(spec: KernelSpec, target: str) -> str | None:
    """Why this kernel is not compiled for that target; None if it can be."""
    if target not in TARGETS:
        return f"target {target!r}; use one of {', '.join(TARGETS)}"
    if spec.arch not in TARGETS[target]:
        archs = ", ".join(f"sm_{arch}" for arch in TARGETS[target])
        return f"{spec.name()}: {target} runs kernels that are written for {archs}"
    return misfit(spec.dtype, spec.kind, spec.arch, spec.mask) or spec.check()


def _ptxas_level(spec: KernelSpec, target: str) -> str:
    """Empty: the usual one."""
    key = (target, spec.arch, spec.kind, spec.mask)
    return PTXAS.get((*key, spec.dtype)) or PTXAS.get(key, "")


def compile_spec(spec: KernelSpec, target: str, keep: bool = False) -> Compiled:
    """Compile one spec for a key of TARGETS. Raises ValueError if its tile cannot be built, or not for that target.
    `keep`: its cubin and its PTX, too, which the DSL also dumps in CUTE_DSL_DUMP_DIR.
    """
    if reason := _misfit(spec, target):
        raise ValueError(reason)
    # Ops check the architecture when they are constructed. The DSL reads this when it is imported, once: a process
    # compiles for one target, unless ops are constructed under the options below.
    os.environ.setdefault("CUTE_DSL_ARCH", target)
    dsl.make_importable()
    import cutlass.cute as cute

    from ..kernels import builder

    start = time.perf_counter()
    kernel = builder(spec)
    options = f"--enable-tvm-ffi --gpu-arch {target}" + (" --keep-cubin --keep-ptx" if keep else "")
    if level := _ptxas_level(spec, target):
        options += f" --ptxas-options='{level}'"
    # Without the engine that would run the kernel in this process: objects are the same, and take a tenth less time.
    function = cute.compile(kernel, *kernel.fake_arguments(), options=options, no_jit_engine=True)
    cubin, ptx = (bytes(function.__cubin__), function.__ptx__) if keep else (None, None)
    return Compiled(spec, function, time.perf_counter() - start, cubin, ptx)


def key(spec: KernelSpec, target: str) -> str:
    """Return a name for an object: the kernel, its sources, the compiler that made it, and what it was made for.

    The compiler's version is "none" where no compiler is installed.
    """
    return f"{key_without_compiler(spec, target)}-{dsl.version() or 'none'}"


def key_without_compiler(spec: KernelSpec, target: str, sources: str = "") -> str:
    """Return the part of a key that no compiler decides.

    Args:
        spec: the kernel.
        target: a key of TARGETS.
        sources: the fingerprint of the kernel's sources; computed if it is empty.
    """
    return f"{spec.name()}-{sources or fingerprint(spec)}-{target}{_ptxas_level(spec, target)}"
