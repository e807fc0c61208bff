"""Compilation of one kernel. Besides kernels/, only this module imports the CuTe DSL.

Compilation needs no GPU. Parallel compilation requires separate processes, because threads break the session of the
DSL.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..registry.architectures import TARGETS, targets_of
from ..registry.dtypes import unsupported_element_reason
from ..registry.kernel_spec import KernelSpec
from . import dsl
from .fingerprint import fingerprint

# Optimization levels of ptxas, by target, architecture, kind, mask and optionally dtype. With the default level, ptxas
# spills a few registers of some kernel with these keys. With the level given here, ptxas spills none.
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
    """Compiled kernel; `cubin` and `ptx` are None unless requested."""

    spec: KernelSpec
    function: Any
    seconds: float
    cubin: bytes | None
    ptx: str | None

    def export(self, path: Path) -> None:
        """Write an object file with `__tvm_ffi_<spec name>` as the only visible symbol."""
        self.function.export_to_c(str(path), function_name=self.spec.name(), export_only_tvm_ffi_symbols=True)


def target_of(cc: int) -> str:
    """Return the target for GPUs of a compute capability.

    Args:
        cc: the compute capability; 90 is 9.0.

    Raises:
        ValueError: the code of no target runs on such a GPU.
    """
    for target in targets_of(cc):
        return target
    raise ValueError(
        f"kernels are compiled for {', '.join(TARGETS)}, but the GPU has compute capability {cc // 10}.{cc % 10}"
    )


def _unsupported_reason(spec: KernelSpec, target: str) -> str | None:
    """Return why a kernel cannot be compiled for a target; None if the kernel can be compiled."""
    if target not in TARGETS:
        return f"target must be one of {', '.join(TARGETS)}, but got {target!r}."
    if spec.arch not in TARGETS[target]:
        archs = ", ".join(f"sm_{arch}" for arch in TARGETS[target])
        return f"{spec.name()}: {target} runs kernels that are written for {archs}"
    return unsupported_element_reason(spec.dtype, spec.kind, spec.arch, spec.mask) or spec.check()


def _ptxas_level(spec: KernelSpec, target: str) -> str:
    """Return the optimization level for ptxas; empty for the default level."""
    key = (target, spec.arch, spec.kind, spec.mask)
    return PTXAS.get((*key, spec.dtype)) or PTXAS.get(key, "")


def compile_spec(spec: KernelSpec, target: str, keep_code: bool = False) -> Compiled:
    """Compile one kernel spec.

    Args:
        spec: the kernel.
        target: a key of TARGETS.
        keep_code: whether the result also has the cubin and the PTX. The DSL also writes both to CUTE_DSL_DUMP_DIR.

    Raises:
        ValueError: the tile of the kernel cannot be built, or not for this target.
    """
    if reason := _unsupported_reason(spec, target):
        raise ValueError(reason)
    # DSL ops check the architecture in the constructor. The DSL reads this variable once, at the import of the DSL.
    # So a process compiles for one target, unless ops are constructed under the options below.
    os.environ.setdefault("CUTE_DSL_ARCH", target)
    dsl.make_importable()
    import cutlass.cute as cute

    from ..kernels import builder

    start = time.perf_counter()
    kernel = builder(spec)
    options = f"--enable-tvm-ffi --gpu-arch {target}" + (" --keep-cubin --keep-ptx" if keep_code else "")
    if level := _ptxas_level(spec, target):
        options += f" --ptxas-options='{level}'"
    # no_jit_engine leaves out the engine for running the kernel in this process. The objects are the same, and
    # compilation takes a tenth less time.
    function = cute.compile(kernel, *kernel.fake_arguments(), options=options, no_jit_engine=True)
    cubin, ptx = (bytes(function.__cubin__), function.__ptx__) if keep_code else (None, None)
    return Compiled(spec, function, time.perf_counter() - start, cubin, ptx)


def key(spec: KernelSpec, target: str) -> str:
    """Return a name for an object, from the kernel, the sources of the kernel, the target and the compiler.

    The version of the compiler is "none" if no compiler is installed.
    """
    return f"{key_without_compiler(spec, target)}-{dsl.version() or 'none'}"


def key_without_compiler(spec: KernelSpec, target: str, sources: str = "") -> str:
    """Return the part of a key that does not depend on the compiler.

    Args:
        spec: the kernel.
        target: a key of TARGETS.
        sources: the fingerprint of the kernel's sources; empty to compute the fingerprint.
    """
    return f"{spec.name()}-{sources or fingerprint(spec)}-{target}{_ptxas_level(spec, target)}"
