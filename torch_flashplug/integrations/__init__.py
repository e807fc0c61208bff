"""Public modules for other programs. Each module is imported at its first use.

- `transformers`: Attention functions for Hugging Face models.
- `int8_cache`: An INT8 KV cache for Hugging Face models.
- `context_parallel`: The setting of torch's context_parallel.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_MODULES = ("context_parallel", "int8_cache", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
