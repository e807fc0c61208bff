"""Attention functions and an INT8 KV cache for Hugging Face transformers.

"sdpa_grouped" is masked attention of grouped heads without copies of K and V. "flashplug" is flash attention with
features missing in "sdpa". `Int8Cache` is a KV cache in INT8.

For a call with a mask, transformers repeats K and V for every query head; new versions pack the heads of a query
instead. A cache is then read once, and written and read G times, where G is the number of query heads per KV head.
F.scaled_dot_product_attention accepts grouped heads without copies.

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
from transformers.generation.continuous_batching import initialization
from transformers.integrations.flash_attention import flash_attention_forward, get_target_dtype
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask

from .. import flash_attn
from .int8_cache import Int8Cache

__all__ = ["Int8Cache", "attend", "install", "register", "uninstall", "unregister"]

NAME = "sdpa_grouped"  # attn_implementation; names with "flash" take a different path in transformers
DEVICES = {"cuda"}  # on any different device, the code of transformers is fastest
MOST_HEAD_DIM = 256
_PLAIN = {"position_bias", "cache", "softcap"}  # arguments that change more than the called function


def register() -> None:
    """Register attn_implementation="sdpa_grouped" with transformers.

    The implementation equals "sdpa" and takes the same masks. For grouped heads with a bool mask, the implementation
    makes no copies of K and V for each query head.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def unregister() -> None:
    """Remove attn_implementation="sdpa_grouped" from transformers.

    A model with the name raises transformers' own error afterwards. Set "sdpa" for such a model first.
    """
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
    """Compute attention with the signature of an attention function of transformers.

    Args:
        module (torch.nn.Module): attention layer.
        query (Tensor): query (B, Hq, Sq, D).
        key (Tensor): key (B, Hkv, Sk, D).
        value (Tensor): value (B, Hkv, Sk, Dv).
        attention_mask (Tensor | None): mask in a form of attn_mask of F.scaled_dot_product_attention.
        dropout (float): dropout probability.
        scaling (float | None): factor of the scores. None is 1 / sqrt(D).
        **more (object): further arguments of transformers' sdpa attention.

    Returns:
        tuple[Tensor, None]: the output (B, Sq, Hq, Dv), and no attention weights.
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
    is_grouped = query.dim() == 4 and query.shape[1] != key.shape[1]
    is_bool_mask = mask is not None and mask.dtype == torch.bool
    is_supported = is_bool_mask and max(query.shape[-1], value.shape[-1]) <= MOST_HEAD_DIM
    is_plain = all(more.get(name) is None for name in _PLAIN)
    return is_grouped and is_supported and query.device.type in DEVICES and is_plain


# ---- flash attention: lengths, windows, softcaps and sinks, which "sdpa" cannot express ----

FLASH = "flashplug"  # attn_implementation: transformers tests for "flash" in the name wherever a mask is not passed


def install() -> None:
    """Register attn_implementation="flashplug" with transformers, for all models.

    The implementation is transformers' flash attention (padding removed, packed sequences, windows, softcaps, sinks)
    with the functions of torch_flashplug.flash_attn. On a GPU, generate_batch() decodes in the pages of the cache.
    uninstall() reverses install().
    """
    AttentionInterface.register(FLASH, flash_attend)
    AttentionMaskInterface.register(FLASH, flash_attention_mask)
    for owner, name, wrapped in _WRAPPED:
        theirs = getattr(owner, name)
        if not hasattr(theirs, "flashplug_wraps"):
            ours = wrapped(theirs)
            ours.flashplug_wraps = theirs
            setattr(owner, name, ours)


def uninstall() -> None:
    """Remove attn_implementation="flashplug" from transformers.

    A model with the name raises transformers' own error afterwards. Set "sdpa" for such a model first.
    """
    AttentionInterface._global_mapping.pop(FLASH, None)
    AttentionMaskInterface._global_mapping.pop(FLASH, None)
    for owner, name, _ in _WRAPPED:
        setattr(owner, name, getattr(getattr(owner, name), "flashplug_wraps", getattr(owner, name)))
    if flash_utils._loaded_implementation == FLASH:  # kept by transformers until the next load
        flash_utils._loaded_implementation = None


def flash_attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: object,
) -> tuple[Tensor, None]:
    """Compute transformers' flash attention without padding the values to the head dim of the query.

    Args:
        module (torch.nn.Module): attention layer.
        query (Tensor): query (B, Hq, Sq, D).
        key (Tensor): key (B, Hkv, Sk, D).
        value (Tensor): value (B, Hkv, Sk, Dv).
        attention_mask (Tensor | None): padding mask (B, Sk), with 0 for padding.
        **settings (object): further arguments of transformers' flash attention.

    Returns:
        tuple[Tensor, None]: the output (B, Sq, Hq, Dv), and no attention weights.
    """
    has_paged_cache = any(settings.get(name) is not None for name in _OF_PAGED_CACHES)  # a cache has a single head dim
    if query.shape[-1] == value.shape[-1] or has_paged_cache:
        return flash_attention_forward(module, query, key, value, attention_mask, **settings)
    rows_first = (x.transpose(1, 2) for x in (query, key, value))
    is_causal, sinks = settings.pop("is_causal", None), settings.pop("s_aux", None)
    out = flash_utils._flash_attention_forward(
        *rows_first,
        attention_mask,
        query_length=query.shape[2],
        is_causal=module.is_causal if is_causal is None else is_causal,
        softmax_scale=settings.pop("scaling", None),
        s_aux=None if sinks is None else sinks.to(query.dtype),
        target_dtype=get_target_dtype(query, module),
        attn_implementation=FLASH,
        **settings,
    )
    return out, None


_OF_PAGED_CACHES = ("cache", "block_table")  # arguments of transformers' flash attention


def _loading_ours(theirs: Callable) -> Callable:
    """Return a wrapper of transformers' loader of flash attention functions that knows "flashplug".

    transformers passes an argument only if the signature of the varlen function has the argument.
    """

    @functools.wraps(theirs)
    def lazy_imports(implementation: str | None, *more: object, **settings: object) -> tuple:
        if implementation != FLASH:
            return theirs(implementation, *more, **settings)
        ours = (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache)
        return *ours, flash_utils._pad_input, flash_utils._unpad_input

    return lazy_imports


def _listing_ours(theirs: Callable) -> Callable:
    """Return a wrapper of a model's check of implementation names that permits "flashplug".

    A model may list the permitted names with "flash" (gpt-oss has such a list for sinks). Without the wrapper, the
    model replaces each unlisted flash name by a listed name.
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
            delattr(model, _LISTED)  # the class attribute stays

    return check


def _allowing_pages(theirs: Callable) -> Callable:
    """Return a wrapper of transformers' question for a version of flash attention that permits "flashplug".

    generate_batch() passes block tables to the functions of versions 2 and 3. For all other names, transformers gathers
    the pages before each call.
    """

    @functools.wraps(theirs)
    def is_requested(config: object = None, *more: object, **settings: object) -> bool:
        is_ours = getattr(config, "_attn_implementation", None) == FLASH
        return (is_ours and settings.get("version") is not None) or theirs(config, *more, **settings)

    return is_requested


_LISTED = "_compatible_flash_implementations"
_WRAPPED = (
    (initialization, "is_flash_attention_requested", _allowing_pages),
    (flash_utils, "_lazy_imports", _loading_ours),
    (PreTrainedModel, "_check_and_adjust_attn_implementation", _listing_ours),
)
