"""Environment flags: the only place that reads os.environ. Standard library only."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

OFF, ON = ("0", "off", "false", "no"), ("1", "on", "true", "yes")  # words for a switch, in any case


@dataclass(frozen=True, slots=True)
class Flag:
    """One environment variable: its name, its default and what it does (the README table is checked against this).

    `traced`: it decides what is traced, so graphs that are kept are those of its value (_cache_mark in api.py).
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
        value = self.get()
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
JIT = Flag("TORCH_FLASHPLUG_JIT", "1", "0: never compile at run time", traced=False)
HOOK = Flag(
    "TORCH_FLASHPLUG_HOOK",
    "stub",
    "stub: torch's choice function; composite: a Python kernel (Plan B)",
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
    for switch in (ENABLED, JIT, REPAIR):
        switch.is_on()
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


def local_rank() -> int:
    """Which process of this host it is, as torchrun says."""
    return int(os.environ.get("LOCAL_RANK", "0"))
