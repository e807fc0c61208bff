"""Public modules for other programs. Each module is imported at its first use.

- `transformers`: Attention functions for Hugging Face models.
- `int8_cache`: An INT8 KV cache for Hugging Face models.
- `context_parallel`: The setting of torch's context_parallel.
- `paged_batch`: Batches of servers on a paged KV cache, as calls of attention().
- `vllm`: The attention backend FLASHPLUG of vLLM.
- `sglang`: The attention backend flashplug of SGLang.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_MODULES = ("context_parallel", "int8_cache", "paged_batch", "sglang", "transformers", "vllm")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
