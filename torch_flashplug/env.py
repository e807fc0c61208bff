"""Environment flags: the only place that reads os.environ. Standard library only."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

OFF, ON = ("0", "off", "false", "no"), ("1", "on", "true", "yes")  # words for a switch, in any case


@dataclass(frozen=True, slots=True)
class Flag:
    """One environment variable: its name, its default and what it does (the README table is checked against this).

    `traced`: it decides what is traced, so graphs that are kept are those of its value (_cache_mark in backend.py).
    """

    name: str
    default: str
    help: str
    traced: bool
    values: tuple[str, ...] = ()  # all that are allowed beside an empty one, which is as none; none: any

    def get(self) -> str:
        """Raises ValueError for a value that is not allowed."""
        value = os.environ.get(self.name, self.default)
        if self.values and value not in ("", *self.values):
            raise ValueError(f"{self.name}={value!r}; use one of {', '.join(self.values)}")
        return value

    def is_on(self) -> bool | None:
        """Return what a switch says; None where it says nothing. Raise ValueError for an unknown word."""
        value = os.environ.get(self.name, self.default)
        word = value.strip().lower()
        if word and word not in OFF + ON:
            raise ValueError(f"{self.name}={value!r}; use one of {', '.join(OFF + ON)}")
        return word in ON if word else None

    def count(self) -> int:
        """Raises ValueError for what is no number, or less than 0."""
        value = self.get() or self.default
        if not (value.isascii() and value.isdigit()):
            raise ValueError(f"{self.name}={value!r}; use a number, 0 or more")
        return int(value)


ENABLED = Flag(
    "TORCH_FLASHPLUG",
    "",
    "0: leave torch untouched; 1: also load with every `import torch` (entry point)",
    traced=False,  # of a process without us nothing is marked
)
BACKEND = Flag(
    "TORCH_FLASHPLUG_BACKEND",
    "",
    "fa3, fa2, math or stock for the process's calls; what it cannot run stays stock",
    traced=True,
)
PRECISION = Flag(
    "TORCH_FLASHPLUG_PRECISION",
    "",
    "8bit, qk8, e4m3: calls may be multiplied in 8 bits where that is faster",
    traced=True,
)
CACHE_DIR = Flag(
    "TORCH_FLASHPLUG_CACHE_DIR",
    "",
    "where kernels compiled at run time are kept; empty: the user's cache directory",
    traced=False,
)
JIT = Flag(
    "TORCH_FLASHPLUG_JIT",
    "wait",
    "wait: calls wait for kernels; background: stock serves meanwhile; 0: never compile",
    traced=False,
)
HOOK = Flag(
    "TORCH_FLASHPLUG_HOOK",
    "stub",
    "stub: torch's choice function; composite: a Python kernel instead, the fallback",
    traced=True,
    values=("stub", "composite"),
)
REPAIR = Flag(
    "TORCH_FLASHPLUG_REPAIR",
    "1",
    "0: leave stock's attention as it is",
    traced=True,
)

RING_MARGIN = Flag("TORCH_FLASHPLUG_RING_MARGIN", "0", "SMs that rings leave to NCCL", traced=False)

FLAGS = (ENABLED, BACKEND, PRECISION, CACHE_DIR, JIT, HOOK, REPAIR, RING_MARGIN)


def check() -> None:
    """Raise ValueError for a flag with an unknown value. Importing the package calls this."""
    for switch in (ENABLED, REPAIR):
        switch.is_on()
    jit_mode()
    HOOK.get()
    RING_MARGIN.count()


def disabled() -> bool:
    return ENABLED.is_on() is False


def autoload() -> bool:
    return ENABLED.is_on() is True


def torch_is_loading_backends() -> bool:
    """True inside the loop of `import torch` that calls the entry points of its plugins.

    Being inside `import torch` is not enough: TORCH_LOGS=+torch_flashplug makes torch import us then, in earnest.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_import_device_backends":
        frame = frame.f_back
    return frame is not None


def torch_logs_us() -> bool:
    """TORCH_LOGS names us. torch sets the loggers' levels after it has imported what the variable names."""
    return "torch_flashplug" in os.environ.get("TORCH_LOGS", "")


WAIT, BACKGROUND, NEVER = "wait", "background", "never"


def jit_mode() -> str:
    """Return WAIT, BACKGROUND or NEVER. Words for switches are allowed, too: on waits, off is never.

    Raises:
        ValueError: the flag has another value.
    """
    value = JIT.get()
    words = dict.fromkeys(("", WAIT, *ON), WAIT) | dict.fromkeys(OFF, NEVER) | {BACKGROUND: BACKGROUND}
    if (mode := words.get(value.strip().lower())) is None:
        raise ValueError(f"{JIT.name}={value!r}; use one of wait, background, {', '.join(OFF + ON)}")
    return mode


def set_cache_dir(folder: str) -> None:
    """Make a folder the cache of this process and of those that it starts."""
    os.environ[CACHE_DIR.name] = folder


def c_compiler() -> list[str]:
    """Return the command that the variable CC names; empty if it names none."""
    return os.environ.get("CC", "").split()


def cpp_compiler() -> str:
    """Return the C++ compiler that the variable CXX names; c++ if it names none."""
    return os.environ.get("CXX") or "c++"


_WORKER_PATH = "FLASHPLUG_WORKER_PATH"


def for_workers(target: str) -> dict[str, str]:
    """Return the environment of a process that compiles kernels: no GPU, one target, and our packages' folders.

    Variables of the compiler (CUTE_DSL_...) are left out, because they can change the code of kernels.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUTE_DSL_", "PYTHONINSPECT"))}
    places = [place for place in sys.path if place]
    return kept | {
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "CUTE_DSL_ARCH": target,
        _WORKER_PATH: os.pathsep.join(places),
    }


def extend_path_of_worker() -> None:
    """Let a process that compiles kernels import what the process that started it can import, behind its own."""
    sys.path += [place for place in os.environ.get(_WORKER_PATH, "").split(os.pathsep) if place not in sys.path]


def compile_workers(most: int, per_host: bool = False) -> int:
    """Return how many kernels this process, or this host, compiles at once: at most so many, and at least one.

    A process takes its part of the CPUs that it may use; ranks of one host (LOCAL_WORLD_SIZE) share them.
    """
    cpus = len(os.sched_getaffinity(0))
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    ranks = int(ranks) if ranks.isascii() and ranks.isdigit() else 1
    return max(1, min(most, cpus if per_host else cpus // max(1, ranks)))


def local_rank() -> int:
    """Which process of this host it is, as torchrun says."""
    return int(os.environ.get("LOCAL_RANK", "0"))
