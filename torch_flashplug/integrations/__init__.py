"""Public modules for other programs: transformers and torch's context_parallel. Each is imported at its first use."""

from __future__ import annotations

import importlib
from types import ModuleType

_MODULES = ("context_parallel", "int8_cache", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
