"""Spec -> compiled kernel: the only module besides kernels/ that imports the DSL. Serves tools/aot.py and, behind the
packs, the JIT up-call.

Needs no GPU to compile. Compile in separate processes (spawn) to go parallel: threads break the DSL's session.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cache, features
from .arguments import OF_KIND
from .elements import ELEMENTS, NUMBERS, misfit
from .families import TARGETS, targets_of
from .spec import KernelSpec

log = logging.getLogger("torch_flashplug.compile")

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

_PACKAGE = Path(__file__).parent
_lock = threading.Lock()  # the DSL compiles one kernel at a time in a process
# (kernel name, target) -> (module, function), kept alive for as long as C++ holds the handle
_loaded: dict[tuple[str, str], Any] = {}


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
    import cutlass.cute as cute

    from .kernels import builder

    start = time.perf_counter()
    kernel = builder(spec)
    options = f"--enable-tvm-ffi --gpu-arch {target}" + (" --keep-cubin --keep-ptx" if keep else "")
    if level := _ptxas_level(spec, target):
        options += f" --ptxas-options='{level}'"
    # Without the engine that would run the kernel in this process: objects are the same, and take a tenth less time.
    function = cute.compile(kernel, *kernel.fake_arguments(), options=options, no_jit_engine=True)
    cubin, ptx = (bytes(function.__cubin__), function.__ptx__) if keep else (None, None)
    return Compiled(spec, function, time.perf_counter() - start, cubin, ptx)


def provide(name: str, target: str) -> int:
    """The JIT path: a TVM-FFI function handle for a kernel that no pack holds, from the disk cache or compiled now.

    Raises RuntimeError with one clear sentence if it cannot; any failure to import the DSL counts, not only
    ImportError.
    """
    with _lock:
        if (name, target) not in _loaded:
            try:
                _loaded[name, target] = _load(KernelSpec.from_name(name), target)
            except Exception as error:
                raise RuntimeError(
                    f"kernel {name} could not be built here ({type(error).__name__}: {error}); "
                    f"pip install torch_flashplug[jit], or build it ahead of time: "
                    f"python tools/aot.py --arch {target} --spec {name}"
                ) from error
        return _loaded[name, target][1].__chandle__()


def _load(spec: KernelSpec, target: str) -> tuple[Any, Any]:
    def build(path: Path) -> None:
        compiled = compile_spec(spec, target)
        compiled.export(path)
        log.info("compiled %s for %s in %.1f s", spec.name(), target, compiled.seconds)

    import cutlass.cute as cute

    module = cache.load_or_build(
        key(spec, target), build, lambda path: cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    )
    return module, module[spec.name()]


def key(spec: KernelSpec, target: str) -> str:
    """Of an object: the kernel, the sources that it comes from, the compiler that made it, how and what for."""
    dsl = importlib.metadata.version("nvidia-cutlass-dsl")
    return f"{spec.name()}-{fingerprint(spec)}-{dsl}-{target}{_ptxas_level(spec, target)}"


def fingerprint(spec: KernelSpec) -> str:
    """Hash of what a kernel comes from: its own module and all that it imports of ours, its features' modules, and its
    rows of the tables. A change of one kernel file, or of one feature's, leaves the objects of the others as they are.
    """
    made_of = ELEMENTS[spec.dtype].operands
    rows = [(made_of, *(NUMBERS[name] for name in made_of))]
    rows += [
        (x.tag, x.part_of(spec.kind), x.arguments, x.always, x.score_bytes, x.key_bytes, *filter(None, (x.ahead,)))
        for x in features.of(spec.features)
    ]
    rows += [(x.name, x.dtype, x.scalar, x.optional) for x in OF_KIND[spec.kind]]
    return _hash_of([path for path in sources_of(spec) if path not in _tables()], repr(rows))


def source_fingerprint() -> str:
    """Hash of everything that generated code depends on: the kernels, the spec, arguments, elements and features."""
    return _hash_of([*_tables(), _PACKAGE / "spec.py", *(_PACKAGE / "kernels").rglob("*.py")])


def _tables() -> list[Path]:
    """Of which a kernel depends on its own rows alone."""
    return [_PACKAGE / f"{table}.py" for table in ("arguments", "elements", "features")]


def sources_of(spec: KernelSpec) -> list[Path]:
    """Files of ours that a kernel's code is made by, the spec's among them; read, not imported."""
    from .kernels import BUILDERS

    module, _ = BUILDERS[spec.kind, spec.arch]
    names = [feature.part_of(spec.kind) for feature in features.of(spec.features)]
    parts = [name.rpartition(".")[0].split(".") for name in names if name]
    found: set[Path] = set()
    waiting = [_PACKAGE / "kernels" / f"{module}.py"]
    waiting += [_PACKAGE.joinpath("kernels", "parts", *part).with_suffix(".py") for part in parts]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imported_by(path, path.stat().st_mtime_ns)
    return sorted(found)


@functools.cache
def _imported_by(path: Path, changed: int) -> list[Path]:
    """Files of our modules that one imports, by relative imports: what we write. changed: when it was, in ns; a build
    asks for the same few files hundreds of times.
    """
    files = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.ImportFrom) and node.level:
            place = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            files += [place.with_suffix(".py"), *(place / f"{alias.name}.py" for alias in node.names)]
    return [file for file in files if file.is_file()]


def _hash_of(files: list[Path], more: str = "") -> str:
    digest = hashlib.sha256(more.encode())
    for path in sorted(files):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
