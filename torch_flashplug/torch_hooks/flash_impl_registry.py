"""Our name among torch's flash attentions: torch.nn.attention.activate_flash_attention_impl("FLASHPLUG").

Enabled, we serve what arrives at flash attention anyway, as measured, unless another implementation was active before.
Activated by name we take that one's place, and few rows, too; restore_flash_attention_impl() ends that.
"""

from __future__ import annotations

import torch

from ..dispatch import bindings
from . import flash_attention_op


class Handle:
    """Of an activation; torch's registry ends it by remove()."""

    def __init__(self) -> None:
        bindings.prefer_flash(True)
        if bindings.enabled():
            flash_attention_op.install(over_others=True)

    def remove(self) -> None:
        bindings.prefer_flash(False)


def register() -> None:
    offer = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if offer is not None:
        offer(flash_attention_op.NAME, register_fn=Handle)
