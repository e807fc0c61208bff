"""Registration of kernels for aten::_flash_attention_forward and the backward op (src/hooks/flash_attention_op.cpp).

Nested tensors, lower-right causal masks and direct callers reach these ops. Stock's kernel stays callable by the C++
name. So kernels are registered only where torch's schemas match the known schemas of stock's kernel.
"""

from __future__ import annotations

import logging

import torch

from ..dispatch import bindings
from .op_owners import first_other_owner, suppress_override_warning

NAME = "FLASHPLUG"  # name in the registry of torch.nn.attention
_OPS = ("_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace", "_flash_attention_backward")
_log = logging.getLogger("torch_flashplug")


def install(device: str = "CUDA", *, over_others: bool = False) -> None:
    """Register the kernels, unless a different implementation is active or registered for the dispatch key.

    Args:
        device: dispatch key. "CPU" serves the CPU stub backend of the tests.
        over_others: whether to replace registered kernels of a different library, too. An active implementation stays
            in either case.
    """
    if another_is_active():
        return
    if not over_others and device != "CPU" and (place := other_owner()):
        _log.info("flash attention: kernels are left to the library that registered kernels at %s", place)
        return
    for name in _OPS:
        packet = getattr(torch.ops.aten, name, None)  # torch 2.11 lacks an op
        if packet is not None and not bindings.set_flash_schema(schema := str(packet.default._schema)):
            _log.debug("flash attention falls back to stock: unknown schema %s", schema)
            return
    suppress_override_warning()
    if not bindings.register_flash_op(device):
        _log.debug("flash attention falls back to stock: %s", bindings.last_error())


def uninstall() -> None:
    bindings.unregister_flash_op()


def other_owner() -> str:
    """Return the place where a different library has registered a kernel for the ops; empty without such a kernel."""
    return first_other_owner(*(f"aten::{name}" for name in _OPS))


def another_is_active() -> bool:
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return current not in (None, NAME)
