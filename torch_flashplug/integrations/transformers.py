"""For Hugging Face transformers: masked attention of grouped heads, without copies of K and V; a cache in INT8; and
flash attention, with what "sdpa" has no words for.

Where a call has a mask transformers repeats K and V for every query head (new versions pack the heads of one query
instead): a cache is read once, then written and read G times. F.scaled_dot_product_attention takes grouped heads as
they are.

    torch_flashplug.integrations.transformers.register()
    model.set_attn_implementation("sdpa_grouped")  # or from_pretrained(..., attn_implementation="sdpa_grouped")
    model.generate(..., past_key_values=Int8Cache(model.config))

    torch_flashplug.integrations.transformers.install()
    model.set_attn_implementation("flashplug")  # lengths, windows, softcaps, sinks; gpt-oss: "fplug"
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
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

# Of attn_implementation. Names with "flash" in them are flash_attn's functions to transformers: it then goes by lists
# of such names that some models have (gpt-oss), and gives them one of those instead. The other name is for these.
FLASH, OTHER = "flashplug", "fplug"


def install() -> None:
    """Makes attn_implementation="flashplug" known, and "fplug" for models that list which flash implementations they
    take: transformers' flash attention (padding taken out, packed sequences, windows, softcaps, sinks) on flash_attn's
    functions of ours (flash_attn.py). Undone by uninstall().
    """
    for name in (FLASH, OTHER):
        AttentionInterface.register(name, flash_attention_forward)
        AttentionMaskInterface.register(name, flash_attention_mask)
    if not hasattr(flash_utils._lazy_imports, "flashplug_wraps"):
        flash_utils._lazy_imports = _loading_ours(flash_utils._lazy_imports)


def uninstall() -> None:
    """As before. Models that still have such a name raise transformers' own error: give them "sdpa" first."""
    for name in (FLASH, OTHER):
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
    flash_utils._lazy_imports = getattr(flash_utils._lazy_imports, "flashplug_wraps", flash_utils._lazy_imports)
    if flash_utils._loaded_implementation in (FLASH, OTHER):  # its functions are kept until another one is asked for
        flash_utils._loaded_implementation = None


def _loading_ours(theirs: Callable) -> Callable:
    """What loads the functions of an implementation by its name. transformers passes an argument by what the signature
    of the one for lengths has.
    """

    def lazy_imports(implementation: str | None, *more: object, **settings: object) -> tuple:
        if implementation not in (FLASH, OTHER):
            return theirs(implementation, *more, **settings)
        ours = (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache)
        return *ours, flash_utils._pad_input, flash_utils._unpad_input

    lazy_imports.flashplug_wraps = theirs
    return lazy_imports
