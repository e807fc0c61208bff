"""Masked attention of grouped heads for Hugging Face transformers, without copies of K and V; and a cache in INT8.

Where a call has a mask transformers repeats K and V for every query head (new versions pack the heads of one query
instead): a cache is read once, then written and read G times. F.scaled_dot_product_attention takes grouped heads as
they are.

    torch_flashplug.integrations.transformers.register()
    model.set_attn_implementation("sdpa_grouped")  # or from_pretrained(..., attn_implementation="sdpa_grouped")
    model.generate(..., past_key_values=Int8Cache(model.config))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .int8_cache import Int8Cache

__all__ = ["Int8Cache", "attend", "register", "unregister"]

NAME = "sdpa_grouped"  # of attn_implementation; names with "flash" in them go elsewhere
DEVICES = {"cuda"}  # elsewhere transformers' own way is the best
MOST_HEAD_DIM = 256
_PLAIN = {"position_bias", "cache", "softcap"}  # arguments that change more than what is called


def register() -> None:
    """Makes attn_implementation="sdpa_grouped" known: "sdpa" with masks like it, but for grouped heads under a mask."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def unregister() -> None:
    """As before. Models that still have that name raise transformers' own error: give them "sdpa" first."""
    AttentionInterface._global_mapping.pop(NAME, None)
    AttentionMaskInterface._global_mapping.pop(NAME, None)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    """What transformers calls. query (B, Hq, Sq, D), key (B, Hkv, Sk, D), value (B, Hkv, Sk, Dv), attention_mask as
    F.scaled_dot_product_attention takes it; (B, Sq, Hq, Dv) and no weights.
    """
    if not _is_ours(query, key, value, attention_mask, more):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _is_ours(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, more: dict[str, object]) -> bool:
    grouped = query.dim() == 4 and query.shape[1] != key.shape[1]
    taken = mask is not None and mask.dtype == torch.bool and max(query.shape[-1], value.shape[-1]) <= MOST_HEAD_DIM
    return grouped and taken and query.device.type in DEVICES and all(more.get(name) is None for name in _PLAIN)
