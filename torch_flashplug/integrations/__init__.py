"""What other parts of torch must be told about our ops, a module each: FLOP counting, vmap, varlen_attn, its flash
and efficient attention, the name that the first of these has, DTensor and context_parallel (on the first DTensor). The
module `transformers` is imported when it is asked for, since it imports the package of that name.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ..torch_hooks import (
    efficient_attention_op,
    flash_attention_op,
    flash_impl_registry,
    flop_counter,
    varlen_attn,
    vmap,
)
from ..torch_hooks.distributed import context_parallel, dtensor

__all__ = [
    "ALL",
    "SWITCHED",
    "context_parallel",
    "dtensor",
    "efficient_door",
    "flash_door",
    "flash_name",
    "flops",
    "varlen",
    "vmap",
]

ALL = (flop_counter, vmap, flash_impl_registry)  # each has register(), called once by _start.load()
SWITCHED = (varlen_attn, flash_attention_op, efficient_attention_op)  # each has install() and uninstall(), called by enable() and disable()


def __getattr__(name: str) -> ModuleType:
    if name == "transformers":
        return importlib.import_module(f"{__name__}.transformers")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
