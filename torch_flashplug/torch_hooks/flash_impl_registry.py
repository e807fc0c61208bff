"""Implementation name for torch's flash attention: torch.nn.attention.activate_flash_attention_impl("FLASHPLUG").

The plugin serves flash attention calls in enabled state anyway, as measured, unless a different implementation was
active before. An activation by name replaces that implementation, and also serves short query calls (decode).
restore_flash_attention_impl() ends the activation.
"""

from __future__ import annotations

import torch

from ..dispatch import bindings
from . import flash_attention_op


class Handle:
    """Handle of an activation; torch's registry ends the activation by remove()."""

    def __init__(self) -> None:
        bindings.enable_flash_op_decode(True)
        if bindings.enabled():
            flash_attention_op.install(over_others=True)

    def remove(self) -> None:
        bindings.enable_flash_op_decode(False)


def register() -> None:
    offer = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if offer is not None:
        offer(flash_attention_op.NAME, register_fn=Handle)
