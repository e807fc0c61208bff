"""The functions of the flash_attn package by their names and arguments (those of FlashAttention-3), for programs that
call it: `from torch_flashplug.flash_attn import flash_attn_func`. They are attention() with other words. Versions of
flash_attn differ in the order of arguments, so that all that is no tensor has to be named.

What these kernels do not have raises NotImplementedError and says what to do; what only tunes FlashAttention's own
kernels (pack_gqa, sm_margin, deterministic) has no effect: gradients are in order where
torch.use_deterministic_algorithms is on. num_splits is attention()'s, 0 its None: 1 promises the same bits in any
batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .api.attention import attention, check_before
from .api.attention_args import splits_of
from .api.kv_cache import append_kv

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **more: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv); returns (B, Sq, Hq, Dv) and, with return_attn_probs, the
    LSE (B, Hq, Sq), fp32, natural. causal is to the bottom right; window_size (left, right) in keys, -1: no bound;
    s_aux: sinks (Hq,). more: _refuse().
    """
    _refuse(more | {"dropout_p": dropout_p})
    settings = _settings(softmax_scale, causal, window_size, softcap, s_aux, more)
    return attention(q, k, v, **settings, return_lse=return_attn_probs)


def flash_attn_varlen_func(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **more: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same of sequences of different lengths on end: q (T, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv), cu_seqlens
    (sequences + 1,) int32; returns (T, Hq, Dv) and the LSE (Hq, T). seqused_k (sequences,) int32: how many keys of each
    count. max_seqlen_q and max_seqlen_k are not needed.
    """
    _refuse(more | {"seqused_q": seqused_q, "dropout_p": dropout_p})
    settings = _settings(softmax_scale, causal, window_size, softcap, s_aux, more)
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    return attention(q, k, v, **settings, **lengths, return_lse=return_attn_probs)


def flash_attn_with_kvcache(  # noqa: PLR0913
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor | int | None = None,
    block_table: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    return_softmax_lse: bool = False,
    **more: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """q (B, Sq, Hq, D) on caches (B, S, Hkv, D) and (B, S, Hkv, Dv), of whose rows the first cache_seqlens (B,) int32,
    or a number, count; with block_table, or page_table, (B, n) int32 on pools of pages (pages, rows, Hkv, D). k (B,
    Snew, Hkv, D) and v: written into the caches behind those, in place, and counted (sequences.append_kv). Returns
    (B, Sq, Hq, Dv) and the LSE (B, Hq, Sq). No gradients.
    """
    _refuse(more | {"dropout_p": dropout_p})
    if block_table is not None and page_table is not None:
        raise ValueError("flash_attn_with_kvcache: block_table and page_table are two names of one; give one of them")
    table = page_table if block_table is None else block_table
    B = q.shape[0]
    if isinstance(cache_seqlens, int):
        if cache_seqlens < 0:
            raise ValueError(f"flash_attn_with_kvcache: cache_seqlens is {cache_seqlens}; give 0 or more")
        cache_seqlens = torch.full((B,), cache_seqlens, dtype=torch.int32, device=q.device)
    if cache_seqlens is not None and (cache_seqlens.shape != (B,) or cache_seqlens.dtype != torch.int32):
        given = f"{cache_seqlens.dtype} {tuple(cache_seqlens.shape)}"
        raise ValueError(f"flash_attn_with_kvcache: cache_seqlens is {given}; give int32 (batch,) = ({B},) or a number")
    settings = _settings(softmax_scale, causal, window_size, softcap, s_aux, more)
    if k is not None or v is not None:
        if k is None or v is None or cache_seqlens is None:
            raise ValueError("flash_attn_with_kvcache: give k, v and cache_seqlens, behind which they go, or neither")
        said = {name: x for name, x in settings.items() if name != "num_splits"}
        check_before(q, k_cache, v_cache, **said, seqused_k=cache_seqlens, block_table=table)
        cache_seqlens = append_kv(k, v, k_cache, v_cache, cache_seqlens, table)
    settings |= {"seqused_k": cache_seqlens, "block_table": table, "return_lse": return_softmax_lse}
    with torch.no_grad():
        return attention(q, k_cache, v_cache, **settings)


def _settings(
    softmax_scale: float | None, causal: bool, window_size: tuple[int, int], softcap: float, s_aux: Tensor | None,
    more: dict[str, object],
) -> dict[str, object]:  # fmt: skip
    """In attention()'s words."""
    said = {"causal": causal, "window": window_size, "softcap": softcap, "sinks": s_aux, "scale": softmax_scale}
    splits = more.get("num_splits") or None
    splits_of(splits)  # what is wrong with it is said before caches are written
    return said | {"num_splits": splits}


_NO_EFFECT = {"pack_gqa", "sm_margin", "scheduler_metadata", "rotary_interleaved", "max_seqlen_q"}
_NOT_BUILT = {
    *("dropout_p", "alibi_slopes", "qv", "q_descale", "k_descale", "v_descale", "attention_chunk", "seqused_q"),
    *("cache_batch_idx", "cache_leftpad", "rotary_cos", "rotary_sin", "rotary_seqlens"),
    *("cu_seqlens_q", "cu_seqlens_k_new"),
}


def _refuse(more: dict[str, object]) -> None:
    """TypeError for what flash_attn's functions do not have either, NotImplementedError for what these do not do."""
    for name, value in more.items():
        if name not in _NOT_BUILT | _NO_EFFECT | {"num_splits"}:
            raise TypeError(f"no argument is named {name!r}")
        is_off = value is None or (not isinstance(value, Tensor) and value == 0)
        if name in _NOT_BUILT and not is_off:
            raise NotImplementedError(f"{name} is not built; leave it out, or call the flash_attn package")
