"""aten::_flash_attention_forward and its backward on kernels of ours (src/hooks/flash_attention_op.cpp): there arrive
nested tensors, lower-right causal masks and whoever calls these ops. Stock's kernel stays callable below, by its C++
name, so this is put in place only where torch's schemas are those that it is called by.
"""

from __future__ import annotations

import logging

import torch

from ..dispatch import bindings
from .op_owners import first_other_owner, spend_warning

NAME = "FLASHPLUG"  # in torch.nn.attention's registry
_OPS = ("_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace", "_flash_attention_backward")
_log = logging.getLogger("torch_flashplug")


def install(device: str = "CUDA", *, over_others: bool = False) -> None:
    """Not over an implementation that somebody has activated, or registered at the dispatch key, unless `over_others`:
    it is to get what it gets. "CPU" serves the tests' stand-in.
    """
    if another_is_active():
        return
    if not over_others and device != "CPU" and (place := other_owner()):
        _log.info("flash attention stays with the library that has registered its kernels at %s", place)
        return
    for name in _OPS:
        packet = getattr(torch.ops.aten, name, None)  # torch 2.11 lacks one
        if packet is not None and not bindings.know_flash(schema := str(packet.default._schema)):
            _log.debug("flash attention stays stock's: this torch has %s", schema)
            return
    spend_warning()
    if not bindings.open_flash(device):
        _log.debug("flash attention stays stock's: %s", bindings.last_error())


def uninstall() -> None:
    bindings.close_flash()


def other_owner() -> str:
    """Return where another library has registered a kernel that one of these ops runs; empty: there is none."""
    return first_other_owner(*(f"aten::{name}" for name in _OPS))


def another_is_active() -> bool:
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return current not in (None, NAME)
