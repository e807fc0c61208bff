"""Kernels at the first use: loaded from the disk cache, or compiled now by worker processes.

A cache miss also requests the kernels needed next by the same model. The call waits only for the call's own
kernel.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from .. import env
from ..registry.architectures import TARGETS
from ..registry.kernel_spec import KernelSpec
from . import compile_pool, compiler, dsl, fingerprint, host_cpu, kernel_cache
from .kernel_request import CallConditions, KernelAnswer

log = logging.getLogger("torch_flashplug.compile")

WARM_UP = "python -m torch_flashplug warmup"
_loaded: dict[tuple[str, str], KernelAnswer] = {}  # (kernel, target) -> kernel that C++ keeps until the process ends


def provide(
    name: str, target: str, conditions: CallConditions, next_kernels: Callable[[], Iterable[str]] = tuple
) -> KernelAnswer:
    """Return a kernel from memory or from the disk cache, or compile the kernel now.

    Args:
        name: the name of a `KernelSpec`.
        target: a key of TARGETS.
        conditions: the conditions of the call.
        next_kernels: a function for the names of the kernels needed next by the same model. The function is called
            only after a cache miss.

    Returns:
        The kernel, or the reason why there is none. A missing kernel raises no error.
    """
    if (name, target) not in _loaded:
        try:
            answer = _look_up(name, target) or _compile(name, target, conditions, next_kernels)
        except KeyboardInterrupt:
            # C++ has called `provide`. So the exception cannot reach the user from here.
            threading.Timer(0.05, _thread.interrupt_main).start()
            return KernelAnswer(reason="interrupted", may_change=True)
        if not answer.has_kernel:
            return answer
        _loaded[name, target] = answer
    return _loaded[name, target]


def find_entry(name: str, target: str) -> kernel_cache.Entry | None:
    """Return the cache entry of a kernel with host code for this CPU; None if the cache has no such entry.

    An entry from a different CPU is valid if this CPU has all features of the different CPU. If no compiler is
    installed here, an entry of any compiler version is valid.
    """
    sources_key, version = _key_of_sources(name, target), dsl.version()
    if version is not None and (entry := kernel_cache.find(_entry_key(name, target))):
        return entry
    entries = kernel_cache.find_matching(f"{sources_key}-*-{version}.*" if version else f"{sources_key}-*")
    return next((entry for entry in entries if not host_cpu.missing_features(entry.facts["cpu"])), None)


def is_current(path: Path) -> bool:
    """Return whether an entry was compiled from the installed sources."""
    name, _, rest = path.stem.partition("-")
    try:
        return any(f"{name}-{rest}".startswith(f"{_key_of_sources(name, target)}-") for target in TARGETS)
    except (ValueError, KeyError):  # the name of a kernel that no longer exists
        return False


def _key_of_sources(name: str, target: str) -> str:
    spec = KernelSpec.from_name(name)
    return compiler.key_without_compiler(spec, target, _sources(spec))


def _entry_key(name: str, target: str) -> str:
    return f"{_key_of_sources(name, target)}-{host_cpu.tag()}-{dsl.version()}"


def compile_job(name: str, target: str) -> compile_pool.Job:
    """Return the compilation job of a kernel."""
    return compile_pool.Job(name, target, _entry_key(name, target))


# ---- look up ----


def _look_up(name: str, target: str) -> KernelAnswer | None:
    entry = find_entry(name, target)
    return _load(name, entry.path) if entry else None


def _load(name: str, path: Path) -> KernelAnswer:
    try:
        if path.suffix == kernel_cache.SHARED:
            return KernelAnswer.of_library(kernel_cache.load(path), name)
        dsl.make_importable()
        import cutlass.cute as cute

        module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
        return KernelAnswer(handle=module[name].__chandle__(), library=(module, module[name]))
    except Exception as error:
        return KernelAnswer(reason=f"the compiled code does not load: {error}")


_FINGERPRINT_FILE = "sources-{}.json"


def _sources(spec: KernelSpec) -> str:
    """Return the fingerprint of a kernel's sources.

    Parsing a kernel's sources takes 0.2 s. So the cache keeps the fingerprints, with a hash of the bytes of all sources
    as the key.
    """
    fingerprints = _fingerprints()
    if spec.name() not in fingerprints:
        fingerprints[spec.name()] = fingerprint.fingerprint(spec)
        _write_fingerprints(json.dumps(fingerprints).encode())
    return fingerprints[spec.name()]


@functools.cache
def _fingerprint_file() -> str:
    return _FINGERPRINT_FILE.format(fingerprint.raw_fingerprint())


@functools.cache
def _fingerprints() -> dict[str, str]:
    for folder in kernel_cache.folders():
        try:
            if not kernel_cache.distrust_reason(folder / _fingerprint_file()) and not kernel_cache.distrust_reason(
                folder
            ):
                return dict(json.loads((folder / _fingerprint_file()).read_bytes()))
        except (OSError, ValueError, TypeError):
            continue
    return {}


def _write_fingerprints(text: bytes) -> None:
    for folder in kernel_cache.writable_folders()[0]:
        with contextlib.suppress(OSError):
            kernel_cache.write_atomically(folder, _fingerprint_file(), text)
            return


# ---- compile ----


def _compile(
    name: str, target: str, conditions: CallConditions, next_kernels: Callable[[], Iterable[str]]
) -> KernelAnswer:
    mode = env.jit_mode()
    if mode == env.NEVER:
        return KernelAnswer(reason=f"{env.JIT.name}=0 forbids compiling. Unset the variable, or run `{WARM_UP}`")
    if dsl.version() is None:
        return KernelAnswer(
            reason=f"no compiler is installed. Run `{dsl.INSTALL}`, or run `{WARM_UP} --out DIR` on a different machine"
        )
    if conditions.is_capturing:
        reason = f"nothing is compiled while a CUDA graph is captured. Run `{WARM_UP}`, or make the call once earlier"
        return KernelAnswer(reason=reason, may_change=True)
    start = time.monotonic()
    pool = compile_pool.pool()
    (requested_job,) = pool.request([compile_job(name, target)], first=True)
    pool.request(
        [
            compile_job(next_name, target)
            for next_name in dict.fromkeys(next_kernels())
            if next_name != name and not find_entry(next_name, target)
        ]
    )
    if mode == env.BACKGROUND and not conditions.must_wait and not requested_job.done.is_set():
        return KernelAnswer(reason="the kernel is being compiled in the background", may_change=True)
    try:
        path = requested_job.result()
    except compile_pool.CompileError as error:
        log.debug("%s", requested_job.traceback)
        return KernelAnswer(reason=f"the kernel could not be compiled: {error}")
    seconds = time.monotonic() - start
    how = "was compiled" if requested_job.seconds else "was compiled by a different process"
    log.warning("torch_flashplug: kernel %s %s at its first use: the call waited %.1f s. `%s` compiles in advance",
                name, how, seconds, WARM_UP)  # fmt: skip
    return _load(name, path)
