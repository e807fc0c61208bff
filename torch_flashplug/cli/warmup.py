"""Compilation of a model's kernels before the first call of the model: the `warmup` verb.

A warm-up needs no GPU. Kernels in the cache are not compiled again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import env
from ..api import startup
from ..api.backend import DEVICES
from ..codegen import compile_pool, compiler, dsl, jit, kernel_cache, linker
from ..dispatch import bindings, kernel_sets
from ..dispatch import packs as installed_packs
from ..registry import architectures
from . import explain, model_config

_NO_C_COMPILER = (
    "no C compiler is installed. Kernels are kept as object files (.o), which load only where the kernel compiler is "
    "installed. Install gcc, or set CC."
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a warm-up.

    Attributes:
        compiled: names of the kernels compiled by this process.
        num_present: number of kernels that the packs or the cache had already.
        failed: names of the kernels that could not be compiled, with the reasons.
        seconds: time from the first kernel to the last.
        compiled_elsewhere: names of the kernels compiled by different processes meanwhile.
        folders: folders of the cache that hold the kernels.
    """

    compiled: tuple[str, ...]
    num_present: int
    failed: dict[str, str]
    seconds: float
    compiled_elsewhere: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()


def kernels_of_models(paths: Iterable[Path], facts: dict[str, int], **options: object) -> list[str]:
    """Return the kernels of models, as determined by configuration files and the backend of this process.

    Args:
        paths: config.json files, or folders of models.
        facts: the facts of the GPU.
        options: keyword arguments for model_config.attentions().

    Raises:
        ValueError: a file is not the configuration of a model with attention.
    """
    startup.load()
    layers = [layer for path in paths for layer in model_config.attentions(model_config.read(path), **options)]
    mode = bindings.effective_mode()
    if bindings.backend_of(mode) in {"math", "stock"}:
        return []
    return list(dict.fromkeys(name for layer in layers for name in kernel_sets.kernels_of(layer.calls(), facts, mode)))


def no_kernel_reason(facts: dict[str, int]) -> str:
    """Return the reason why no torch_flashplug kernel serves the calls, with a remedy.

    Args:
        facts: the facts of the GPU.
    """
    startup.load()
    backend = bindings.backend_of(bindings.effective_mode())
    if backend in {"math", "stock"}:
        return f"{env.BACKEND.name}={backend} passes all calls to torch. Unset the variable."
    if backend == "auto" and not architectures.is_measured(facts["cc"]):
        return (
            f"Auto selects no kernels on a GPU of compute capability {facts['cc'] / 10:.1f}, which was not measured. "
            f"Set {env.BACKEND.name}=fa2 for the warm-up and for the program."
        )
    return "`python -m torch_flashplug explain` prints the reasons."


def kernels_of_shapes(
    calls: Iterable[Sequence[tuple[int, ...]]], mask: tuple[int, ...] | None = None, **options: object
) -> list[str]:
    """Return the kernels of calls described by shapes.

    Args:
        calls: for each call, the shapes of query, key and optionally value, each (batch, heads, length, head dim).
        mask: the shape of attn_mask, or None.
        options: keyword arguments for explain.plan().

    Raises:
        ValueError: a call has not 2 or 3 shapes.
    """
    names = []
    for shapes in calls:
        if len(shapes) not in (2, 3):
            raise ValueError(f"--shapes must be 2 or 3 shapes (query, key, value), but got {len(shapes)}.")
        plan = explain.plan(explain.Shapes(shapes[0], shapes[1], shapes[-1], mask), **options)
        names += kernel_sets.kernel_names_in(f"{plan.kernel} {plan.gradients}")
    return names


def kernels_of_logs(files: Iterable[Path]) -> list[str]:
    """Return the kernels named in log files.

    Raises:
        ValueError: a file cannot be read.
    """
    names = []
    for file in files:
        try:
            names += kernel_sets.kernel_names_in(file.read_text(errors="replace"))
        except OSError as error:
            raise ValueError(f"--from-log must be a readable file, but got {file}: {error.strerror}") from None
    return names


def facts_of(device: str) -> dict[str, int]:
    """Return the facts of a GPU.

    Args:
        device: a key of DEVICES. Empty: this machine's GPU, or an H100 on a machine without a GPU.

    Raises:
        ValueError: the device is unknown.
    """
    if not device and torch.cuda.is_available():
        startup.load()
        return bindings.device_facts()
    name = (device or "h100").lower()
    if name not in DEVICES:
        raise ValueError(f"--device must be one of {', '.join(DEVICES)}, but got {device!r}.")
    return DEVICES[name]


def missing(names: Sequence[str], target: str, packs: bool = True) -> list[str]:
    """Return the kernels that the cache does not have.

    If a C compiler is installed, a kernel cached only as an object file counts as missing. The reason is that the C
    compiler can make a shared object, which loads without the kernel compiler.

    Args:
        names: names of kernels.
        target: a key of TARGETS.
        packs: whether kernels of installed packs are left out.
    """
    return [name for name, path in _entries(names, target, packs).items() if path is None]


def _entries(names: Sequence[str], target: str, packs: bool) -> dict[str, Path | None]:
    """Return the cache entry of each kernel; None for a missing kernel by the rules of missing()."""
    packed = installed_packs.packed_kernels(target) if packs else set()
    suffixes = {kernel_cache.SHARED, *(() if linker.c_compiler() else (kernel_cache.OBJECT,))}
    entries = {name: jit.find_entry(name, target) for name in names if name not in packed}
    return {name: entry.path if entry and entry.path.suffix in suffixes else None for name, entry in entries.items()}


def compile_all(names: Sequence[str], cc: int, workers: int = 0, packs: bool = True) -> Outcome:
    """Compile the missing kernels, and show the progress on standard error.

    Args:
        names: names of kernels.
        cc: the compute capability of the GPU; 90 is 9.0.
        workers: number of kernels compiled in parallel; 0 for the number of CPUs, at most 8.
        packs: whether kernels of installed packs count as present.

    Raises:
        ValueError: no compiler is installed, or no folder is writable.
    """
    target = compiler.target_of(cc)
    entries = _entries(names, target, packs)
    missing_names = [name for name, path in entries.items() if path is None]
    folders = [path.parent for path in entries.values() if path is not None]
    if not missing_names:
        return Outcome((), len(names), {}, 0.0, folders=tuple(dict.fromkeys(folders)))
    if dsl.version() is None:
        raise ValueError(f"no compiler is installed. {dsl.INSTALL}")
    writable, reasons = kernel_cache.writable_folders()
    if not writable:
        raise ValueError("; ".join(reasons))
    if linker.c_compiler() is None:
        print(f"warmup: {_NO_C_COMPILER}", file=sys.stderr)
    start = time.monotonic()
    pool = compile_pool.Pool(workers)
    jobs = pool.request([jit.compile_job(name, target) for name in missing_names])
    bar = _Bar(len(jobs))
    failed: dict[str, str] = {}
    waiting = list(jobs)
    while waiting:
        for job in [job for job in waiting if job.done.is_set()]:
            waiting.remove(job)
            if job.path is None:
                failed[job.name] = job.error
            bar.step(job.name, job.error)
        bar.show()
        time.sleep(0.1)
    bar.end()
    finished = [job for job in jobs if job.path is not None]
    return Outcome(
        compiled=tuple(job.name for job in finished if job.seconds),
        num_present=len(names) - len(missing_names),
        failed=failed,
        seconds=time.monotonic() - start,
        compiled_elsewhere=tuple(job.name for job in finished if not job.seconds),
        folders=tuple(dict.fromkeys([*folders, *(job.path.parent for job in finished)])),
    )


class _Bar:
    """Progress bar on a terminal; without a terminal, a line for each kernel and for each long wait."""

    _WIDTH = 30
    _SILENCE = 20.0  # seconds of silence after which a line says that the process is waiting

    def __init__(self, total: int):
        self._total, self._done, self._start = total, 0, time.monotonic()
        self._last_line = self._start
        self._on_terminal = sys.stderr.isatty()

    def step(self, name: str, error: str) -> None:
        """Record that a kernel is done."""
        self._done += 1
        if error or not self._on_terminal:
            outcome = f"failed: {error}" if error else "compiled"
            self._print(f"[{self._done}/{self._total}] {name} {outcome}, {self._seconds():.0f} s")

    def show(self) -> None:
        """Draw the bar, or print after a long silence that the process is waiting for kernels."""
        if self._on_terminal:
            filled = self._WIDTH * self._done // self._total
            left = (
                f", about {self._seconds() / self._done * (self._total - self._done):.0f} s left" if self._done else ""
            )
            text = f"[{'#' * filled}{' ' * (self._WIDTH - filled)}] {self._done} of {self._total} kernels"
            print(f"\r\033[K{text}, {self._seconds():.0f} s{left}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._last_line > self._SILENCE and self._done < self._total:
            waiting = (
                f"waiting for {self._total - self._done} kernels, some perhaps compiled by other processes of this host"
            )
            self._print(f"[{self._done}/{self._total}] {waiting}, {self._seconds():.0f} s")

    def end(self) -> None:
        """End the bar's line."""
        if self._on_terminal:
            print(file=sys.stderr)

    def _print(self, text: str) -> None:
        clear = "\r\033[K" if self._on_terminal else ""
        print(f"{clear}{text}", file=sys.stderr, flush=True)
        self._last_line = time.monotonic()

    def _seconds(self) -> float:
        return time.monotonic() - self._start


def use_folder(folder: Path) -> None:
    """Make a folder the only kernel cache of this process and of the worker processes.

    Raises:
        ValueError: the folder is not writable.
    """
    if reason := kernel_cache.use_only_folder(folder.absolute()):
        raise ValueError(f"--out must be a writable folder, but got {folder}: {reason}")


def prune() -> int:
    """Delete the cache entries of outdated kernel versions, and return the number of deleted entries."""
    paths = [entry.path for entry in kernel_cache.find_matching("*")]
    outdated = [path for path in paths if not (jit.is_current(path) or installed_packs.is_current(path))]
    for path in outdated:
        path.unlink(missing_ok=True)
    return len(outdated)


def report(outcome: Outcome) -> str:
    """Return a sentence that describes the outcome."""
    folders = ", ".join(map(str, outcome.folders or kernel_cache.folders()[:1]))
    by_others = f", {len(outcome.compiled_elsewhere)} by other processes" if outcome.compiled_elsewhere else ""
    failed = f", {len(outcome.failed)} failed" if outcome.failed else ""
    compiled = f"{len(outcome.compiled)} kernels compiled in {outcome.seconds:.1f} s"
    return f"{compiled}{by_others}, {outcome.num_present} were there{failed}. Cache: {folders}"
