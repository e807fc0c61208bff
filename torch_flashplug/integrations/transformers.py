"""For Hugging Face transformers: masked attention of grouped heads, without copies of K and V; a cache in INT8; and
flash attention, with what "sdpa" has no words for.

Where a call has a mask transformers repeats K and V for every query head (new versions pack the heads of one query
instead): a cache is read once, then written and read G times. F.scaled_dot_product_attention takes grouped heads as
they are.

    torch_flashplug.integrations.transformers.register()
    model.set_attn_implementation("sdpa_grouped")  # or from_pretrained(..., attn_implementation="sdpa_grouped")
    model.generate(..., past_key_values=Int8Cache(model.config))

    torch_flashplug.integrations.transformers.install()
    model.set_attn_implementation("flashplug")  # lengths, windows, softcaps, sinks
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask

from .. import flash_attn
from .int8_cache import Int8Cache

__all__ = ["Int8Cache", "attend", "install", "register", "uninstall", "unregister"]

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


# ---- what "sdpa" has no words for: lengths, windows, softcaps, sinks ----

FLASH = "flashplug"  # of attn_implementation: transformers goes by "flash" in it wherever it has no mask to give


def install() -> None:
    """Makes attn_implementation="flashplug" known, to every model: transformers' flash attention (padding taken out,
    packed sequences, windows, softcaps, sinks) on flash_attn's functions of ours. uninstall() undoes it.
    """
    AttentionInterface.register(FLASH, flash_attention_forward)
    AttentionMaskInterface.register(FLASH, flash_attention_mask)
    for owner, name, wrapped in _WRAPPED:
        theirs = getattr(owner, name)
        if not hasattr(theirs, "flashplug_wraps"):
            ours = wrapped(theirs)
            ours.flashplug_wraps = theirs
            setattr(owner, name, ours)


def uninstall() -> None:
    """As before. Models that still have that name raise transformers' own error: give them "sdpa" first."""
    AttentionInterface._global_mapping.pop(FLASH, None)
    AttentionMaskInterface._global_mapping.pop(FLASH, None)
    for owner, name, _ in _WRAPPED:
        setattr(owner, name, getattr(getattr(owner, name), "flashplug_wraps", getattr(owner, name)))
    if flash_utils._loaded_implementation == FLASH:  # its functions are kept until another one is asked for
        flash_utils._loaded_implementation = None


def _loading_ours(theirs: Callable) -> Callable:
    """What loads the functions of an implementation by its name. transformers passes an argument by what the signature
    of the one for lengths has.
    """

    @functools.wraps(theirs)
    def lazy_imports(implementation: str | None, *more: object, **settings: object) -> tuple:
        if implementation != FLASH:
            return theirs(implementation, *more, **settings)
        ours = (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache)
        return *ours, flash_utils._pad_input, flash_utils._unpad_input

    return lazy_imports


def _listing_ours(theirs: Callable) -> Callable:
    """What a model makes of a name. Of those with "flash" in them it may list which it takes (gpt-oss: for sinks), and
    takes one of these instead of any other.
    """

    @functools.wraps(theirs)
    def check(model: PreTrainedModel, name: str | None, *more: object, **settings: object) -> str:
        listed = getattr(model, _LISTED, None)
        if listed is None or name not in {FLASH, f"paged|{FLASH}"}:
            return theirs(model, name, *more, **settings)
        setattr(model, _LISTED, [*listed, FLASH, name])
        try:
            return theirs(model, name, *more, **settings)
        finally:
            delattr(model, _LISTED)  # the class has its own

    return check


_LISTED = "_compatible_flash_implementations"
_WRAPPED = (
    (flash_utils, "_lazy_imports", _loading_ours),
    (PreTrainedModel, "_check_and_adjust_attn_implementation", _listing_ours),
)
