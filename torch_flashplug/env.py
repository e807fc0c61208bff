"""Environment flags.

Only this module reads os.environ. The module imports the standard library alone.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

OFF, ON = ("0", "off", "false", "no"), ("1", "on", "true", "yes")  # words for a switch, in upper or lower case


@dataclass(frozen=True, slots=True)
class Flag:
    """An environment variable with a name, a default and a description.

    A test compares the table in README with the flags.

    Attributes:
        name: the name of the variable.
        default: the value if the variable is not set.
        help: the description of the variable.
        affects_graphs: whether the flag affects traced graphs. Cached graphs are then kept separately for each value
            of the flag (_cache_mark in backend.py).
        values: all allowed values. An empty value is allowed, too, and means the default. An empty tuple allows every
            value.
    """

    name: str
    default: str
    help: str
    affects_graphs: bool
    values: tuple[str, ...] = ()

    def get(self) -> str:
        """Return the value of the variable, or the default.

        Raises:
            ValueError: the value is not allowed.
        """
        value = os.environ.get(self.name, self.default)
        if self.values and value not in ("", *self.values):
            raise ValueError(f"{self.name} must be one of {', '.join(self.values)}, but got {value!r}.")
        return value

    def is_on(self) -> bool | None:
        """Return whether a switch is on; None if the variable is empty.

        Raises:
            ValueError: the value is an unknown word.
        """
        value = os.environ.get(self.name, self.default)
        word = value.strip().lower()
        if word and word not in OFF + ON:
            raise ValueError(f"{self.name} must be one of {', '.join(OFF + ON)}, but got {value!r}.")
        return word in ON if word else None

    def count(self) -> int:
        """Return the value as a number.

        Raises:
            ValueError: the value is not a whole number, or is less than 0.
        """
        value = self.get() or self.default
        if not (value.isascii() and value.isdigit()):
            raise ValueError(f"{self.name} must be a whole number, 0 or more, but got {value!r}.")
        return int(value)


ENABLED = Flag(
    "TORCH_FLASHPLUG",
    "",
    "0: leave torch untouched; 1: also load with every `import torch` (entry point)",
    affects_graphs=False,  # without the plugin, the process marks no graphs
)
BACKEND = Flag(
    "TORCH_FLASHPLUG_BACKEND",
    "",
    "fa3, fa2, math or stock for the process's calls; what it cannot run stays stock",
    affects_graphs=True,
)
PRECISION = Flag(
    "TORCH_FLASHPLUG_PRECISION",
    "",
    "8bit, qk8, e4m3: calls may be multiplied in 8 bits where that is faster",
    affects_graphs=True,
)
CACHE_DIR = Flag(
    "TORCH_FLASHPLUG_CACHE_DIR",
    "",
    "where kernels compiled at run time are kept; empty: the user's cache directory",
    affects_graphs=False,
)
JIT = Flag(
    "TORCH_FLASHPLUG_JIT",
    "wait",
    "wait: calls wait for kernels; background: stock serves meanwhile; 0: never compile",
    affects_graphs=False,
)
HOOK = Flag(
    "TORCH_FLASHPLUG_HOOK",
    "stub",
    "stub: torch's choice function; composite: Python instead, the fallback",
    affects_graphs=True,
    values=("stub", "composite"),
)
REPAIR = Flag(
    "TORCH_FLASHPLUG_REPAIR",
    "1",
    "0: leave stock's attention as it is",
    affects_graphs=True,
)

RING_MARGIN = Flag(
    "TORCH_FLASHPLUG_RING_MARGIN", "0", "number of SMs that ring attention leaves free for NCCL", affects_graphs=False
)

FLAGS = (ENABLED, BACKEND, PRECISION, CACHE_DIR, JIT, HOOK, REPAIR, RING_MARGIN)


def check() -> None:
    """Check the values of the flags. Importing the package calls `check`.

    Raises:
        ValueError: a flag has an unknown value.
    """
    for switch in (ENABLED, REPAIR):
        switch.is_on()
    jit_mode()
    HOOK.get()
    RING_MARGIN.count()


def is_disabled() -> bool:
    return ENABLED.is_on() is False


def is_autoload() -> bool:
    return ENABLED.is_on() is True


def torch_is_loading_backends() -> bool:
    """Return whether `import torch` is in the loop that calls the entry points of plugins.

    A test for a running `import torch` is not enough. With TORCH_LOGS=+torch_flashplug, torch imports the package
    during `import torch`, and such an import must be complete.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_import_device_backends":
        frame = frame.f_back
    return frame is not None


def is_loaded_as_entry_point() -> bool:
    """Return whether the package is imported only because a program loads an entry point of `_autoload`.

    vLLM and SGLang load the entry points of all installed plugins in each process, even if nothing uses the package.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "load" and frame.f_globals.get("__name__") in _METADATA_MODULES:
            entry_point = frame.f_locals.get("self")
            return str(getattr(entry_point, "value", "")).startswith(f"{__package__}._autoload:")
        frame = frame.f_back
    return False


_METADATA_MODULES = {"importlib.metadata", "importlib_metadata"}


def names_plugin_in_torch_logs() -> bool:
    """Return whether TORCH_LOGS names torch_flashplug.

    The levels of the loggers do not tell, because torch sets the levels after importing the packages in TORCH_LOGS.
    """
    return "torch_flashplug" in os.environ.get("TORCH_LOGS", "")


WAIT, BACKGROUND, NEVER = "wait", "background", "never"


def jit_mode() -> str:
    """Return WAIT, BACKGROUND or NEVER. Words for switches are allowed, too: "on" means WAIT, and "off" means NEVER.

    Raises:
        ValueError: the value is unknown.
    """
    value = JIT.get()
    words = dict.fromkeys(("", WAIT, *ON), WAIT) | dict.fromkeys(OFF, NEVER) | {BACKGROUND: BACKGROUND}
    if (mode := words.get(value.strip().lower())) is None:
        raise ValueError(f"{JIT.name} must be one of wait, background, {', '.join(OFF + ON)}, but got {value!r}.")
    return mode


def set_cache_dir(folder: str) -> None:
    """Make a folder the kernel cache of this process and of all child processes."""
    os.environ[CACHE_DIR.name] = folder


def c_compiler() -> list[str]:
    """Return the command in the variable CC as a list of words; an empty list if CC is not set."""
    return os.environ.get("CC", "").split()


def cpp_compiler() -> str:
    """Return the C++ compiler in the variable CXX; "c++" if CXX is not set."""
    return os.environ.get("CXX") or "c++"


_WORKER_PATH = "FLASHPLUG_WORKER_PATH"


def worker_environment(target: str) -> dict[str, str]:
    """Return the environment of a worker process: no GPU, a single target, and the import paths of this process.

    Variables of the compiler (CUTE_DSL_...) are left out, because such variables can change the code of kernels.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUTE_DSL_", "PYTHONINSPECT"))}
    import_paths = [path for path in sys.path if path]
    return kept | {
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "CUTE_DSL_ARCH": target,
        _WORKER_PATH: os.pathsep.join(import_paths),
    }


def extend_path_of_worker() -> None:
    """Append the import paths of the parent process to the import paths of a worker process."""
    sys.path += [path for path in os.environ.get(_WORKER_PATH, "").split(os.pathsep) if path not in sys.path]


def num_compile_workers(most: int, per_host: bool = False) -> int:
    """Return how many kernels this process, or this host, compiles in parallel.

    The ranks of one host (LOCAL_WORLD_SIZE) share the CPUs that a process may use.

    Args:
        most: the upper limit. The lower limit is 1.
        per_host: whether the number is for the whole host instead of this process.
    """
    cpus = len(os.sched_getaffinity(0))
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    ranks = int(ranks) if ranks.isascii() and ranks.isdigit() else 1
    return max(1, min(most, cpus if per_host else cpus // max(1, ranks)))


def local_rank() -> int:
    """Return the index of this process among the processes of this host, from torchrun's LOCAL_RANK."""
    return int(os.environ.get("LOCAL_RANK", "0"))
