"""The hooks into torch, by when they are installed."""

from __future__ import annotations

from . import efficient_attention_op, flash_attention_op, flash_impl_registry, flop_counter, varlen_attn, vmap

REGISTERED_ONCE = (flop_counter, vmap, flash_impl_registry)  # register(), called once by startup.load()
SWITCHED = (varlen_attn, flash_attention_op, efficient_attention_op)  # install(), uninstall(): enable(), disable()
