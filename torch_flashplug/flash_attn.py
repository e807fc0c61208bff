"""Functions with the names and arguments of the flash_attn package (those of FlashAttention-3), based on `attention()`.

A program replaces its import by `from torch_flashplug.flash_attn import flash_attn_func`. All arguments except tensors
must be passed by name, because versions of flash_attn differ in the order of arguments.

Features without a kernel here raise NotImplementedError with a remedy. Arguments for tuning FlashAttention's kernels
(`pack_gqa`, `sm_margin`, `deterministic`) have no effect: gradients are deterministic under
torch.use_deterministic_algorithms. `num_splits` is that of `attention()`, with 0 for None: 1 promises batch-invariant
results.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from .api.attention import attention, check_before
from .api.attention_args import is_int, normalize_num_splits
from .api.kv_cache import append_kv

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def _check_positional(function: Callable) -> Callable:
    """Add a clear TypeError for arguments by position, whose order differs between FlashAttention-2 and 3."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    num_positional = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    has_lengths = "max_seqlen_q" in inspect.signature(function).parameters
    exceptions = "tensors and maximal lengths" if has_lengths else "tensors"

    @functools.wraps(function)
    def call(*arguments: object, **settings: object) -> object:
        if len(arguments) > num_positional:
            raise TypeError(
                f"{function.__name__}: all arguments except {exceptions} must be passed by name, but "
                f"got {len(arguments) - num_positional} more by position. Name them, such as dropout_p= and causal=."
            )
        return function(*arguments, **settings)

    return call


@_check_positional
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
    """Compute attention of dense batches, as `flash_attn_func` of the flash_attn package.

    Args:
        q (Tensor): Queries (B, Sq, Hq, D), bf16 or fp16 for kernels.
        k (Tensor): Keys (B, Sk, Hkv, D), dtype of `q`.
        v (Tensor): Values (B, Sk, Hkv, Dv), dtype of `q`.
        softmax_scale (float or None): Factor of the scores. None: 1 / sqrt(D).
        causal (bool): Causal mask, aligned to the bottom right.
        window_size (tuple): (left, right) in keys. -1: no bound.
        dropout_p (float): Must be 0.0.
        softcap (float): Scores become softcap * tanh(score / softcap). 0.0: no softcap.
        s_aux (Tensor or None): Sinks (Hq,).
        deterministic (bool): No effect.
        return_attn_probs (bool): Also return the LSE.
        more: Further arguments of flash_attn: `num_splits`, arguments without effect, and unsupported arguments.

    Returns:
        The output (B, Sq, Hq, Dv). With `return_attn_probs`, a pair of the output and the LSE (B, Hq, Sq), fp32,
        natural logarithm.

    Raises:
        NotImplementedError: An unsupported feature of flash_attn is requested.
        TypeError: An argument does not exist in flash_attn, or has an unsupported type.
        ValueError: `attention()` does not take an argument.
    """
    _refuse(flash_attn_func, more | {"dropout_p": dropout_p})
    settings = _settings(softmax_scale, causal, window_size, softcap, s_aux, more)
    return attention(q, k, v, **settings, return_lse=return_attn_probs)


@_check_positional
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
    """Compute attention of packed sequences, as `flash_attn_varlen_func` of the flash_attn package.

    Args:
        q (Tensor): Packed queries (T, Hq, D), bf16 or fp16 for kernels.
        k (Tensor): Packed keys (Tk, Hkv, D), dtype of `q`.
        v (Tensor): Packed values (Tk, Hkv, Dv), dtype of `q`.
        cu_seqlens_q (Tensor): (sequences + 1,) int32, cumulative lengths of the queries.
        cu_seqlens_k (Tensor): (sequences + 1,) int32, cumulative lengths of the keys.
        max_seqlen_q (int or None): Not needed.
        max_seqlen_k (int or None): Not needed.
        seqused_q (None): Must be None.
        seqused_k (Tensor or None): (sequences,) int32, KV length of each sequence. No gradients then.
        softmax_scale (float or None): Factor of the scores. None: 1 / sqrt(D).
        causal (bool): Causal mask, aligned to the bottom right of each sequence.
        window_size (tuple): (left, right) in keys. -1: no bound.
        dropout_p (float): Must be 0.0.
        softcap (float): Scores become softcap * tanh(score / softcap). 0.0: no softcap.
        s_aux (Tensor or None): Sinks (Hq,).
        deterministic (bool): No effect.
        return_attn_probs (bool): Also return the LSE.
        more: Further arguments of flash_attn: `num_splits`, arguments without effect, and unsupported arguments.

    Returns:
        The output (T, Hq, Dv). With `return_attn_probs`, a pair of the output and the LSE (Hq, T), fp32, natural
        logarithm.

    Raises:
        NotImplementedError: An unsupported feature of flash_attn is requested.
        TypeError: An argument does not exist in flash_attn, or has an unsupported type.
        ValueError: `attention()` does not take an argument.
    """
    _refuse(flash_attn_varlen_func, more | {"seqused_q": seqused_q, "dropout_p": dropout_p})
    settings = _settings(softmax_scale, causal, window_size, softcap, s_aux, more)
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    return attention(q, k, v, **settings, **lengths, return_lse=return_attn_probs)


@_check_positional
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
    """Append new keys and values to KV caches, then attend, as `flash_attn_with_kvcache` of the flash_attn package.

    There are no gradients.

    Args:
        q (Tensor): Queries (B, Sq, Hq, D), bf16 or fp16 for kernels.
        k_cache (Tensor): Cache (B, S, Hkv, D), or a pool of pages (pages, rows of a page, Hkv, D).
        v_cache (Tensor): Cache (B, S, Hkv, Dv), or a pool of pages (pages, rows of a page, Hkv, Dv).
        k (Tensor or None): New keys (B, Snew, Hkv, D), written in place after the first `cache_seqlens` keys by
            `append_kv()`. The new keys are visible in the same call.
        v (Tensor or None): New values (B, Snew, Hkv, Dv), passed together with `k`.
        cache_seqlens (Tensor, int or None): (B,) int32 or one number: the KV lengths before the call.
        block_table (Tensor or None): (B, n) int32, the page numbers of each sequence.
        page_table (Tensor or None): Alternative name of `block_table`.
        softmax_scale (float or None): Factor of the scores. None: 1 / sqrt(D).
        causal (bool): Causal mask, aligned to the bottom right.
        window_size (tuple): (left, right) in keys. -1: no bound.
        dropout_p (float): Must be 0.0.
        softcap (float): Scores become softcap * tanh(score / softcap). 0.0: no softcap.
        s_aux (Tensor or None): Sinks (Hq,).
        return_softmax_lse (bool): Also return the LSE.
        more: Further arguments of flash_attn: `num_splits`, arguments without effect, and unsupported arguments.

    Returns:
        The output (B, Sq, Hq, Dv). With `return_softmax_lse`, a pair of the output and the LSE (B, Hq, Sq), fp32,
        natural logarithm.

    Raises:
        NotImplementedError: An unsupported feature of flash_attn is requested.
        TypeError: An argument does not exist in flash_attn, or has an unsupported type (`cache_seqlens` as a list or a
            bool, for example).
        ValueError: KV lengths, tables or new keys do not fit, or `attention()` does not take an argument. The caches
            are not written then.
    """
    _refuse(flash_attn_with_kvcache, more | {"dropout_p": dropout_p})
    if block_table is not None and page_table is not None:
        raise ValueError(
            "flash_attn_with_kvcache: block_table and page_table must not be passed together, "
            "because both name the same table. Pass one of the two."
        )
    table = page_table if block_table is None else block_table
    B = q.shape[0]
    cache_seqlens = _as_lengths(cache_seqlens, B, q.device)
    settings = _settings(softmax_scale, causal, window_size, softcap, s_aux, more)
    if k is not None or v is not None:
        if k is None or v is None or cache_seqlens is None:
            raise ValueError(
                "flash_attn_with_kvcache: k, v and cache_seqlens must be passed together, because new keys go after "
                "the first cache_seqlens keys. Pass all three, or leave out k and v."
            )
        check_settings = {name: x for name, x in settings.items() if name != "num_splits"}
        check_before(q, k_cache, v_cache, **check_settings, seqused_k=cache_seqlens, block_table=table)
        cache_seqlens = append_kv(k, v, k_cache, v_cache, cache_seqlens, table)
    settings |= {"seqused_k": cache_seqlens, "block_table": table, "return_lse": return_softmax_lse}
    with torch.no_grad():
        return attention(q, k_cache, v_cache, **settings)


def _as_lengths(cache_seqlens: Tensor | int | None, B: int, device: torch.device) -> Tensor | None:
    """Return the KV lengths of the caches as int32 (B,), or None."""
    if cache_seqlens is None:
        return None
    if is_int(cache_seqlens):
        if cache_seqlens < 0:
            raise ValueError(f"flash_attn_with_kvcache: cache_seqlens must be 0 or more, but got {cache_seqlens}.")
        return torch.full((B,), int(cache_seqlens), dtype=torch.int32, device=device)
    is_tensor = isinstance(cache_seqlens, Tensor)
    if not is_tensor or cache_seqlens.shape != (B,) or cache_seqlens.dtype != torch.int32:
        actual = f"{cache_seqlens.dtype} {tuple(cache_seqlens.shape)}" if is_tensor else type(cache_seqlens).__name__
        raise (ValueError if is_tensor else TypeError)(
            "flash_attn_with_kvcache: cache_seqlens must be an int or an int32 tensor of shape "
            f"(batch,) = ({B},), but got {actual}."
        )
    return cache_seqlens


def _settings(
    softmax_scale: float | None, causal: bool, window_size: tuple[int, int], softcap: float, s_aux: Tensor | None,
    more: dict[str, object],
) -> dict[str, object]:  # fmt: skip
    """Return the arguments of `attention()` for these arguments of flash_attn."""
    settings = {"causal": causal, "window": window_size, "softcap": softcap, "sinks": s_aux, "scale": softmax_scale}
    splits = more.get("num_splits") or None
    normalize_num_splits(splits)  # raise errors about num_splits before caches are written
    return settings | {"num_splits": splits}


_NO_EFFECT = {"pack_gqa", "sm_margin", "scheduler_metadata", "rotary_interleaved", "max_seqlen_q"}
_CALL_FLASH_ATTN = "Call the flash_attn package."
_ROTATE_FIRST = "Rotate q and k before the call."
_SCALE_CACHES = "Call torch_flashplug.attention with k_scale and v_scale."
# Arguments of flash_attn without support, and the remedy for each. Values that switch the feature off are accepted.
_REMEDIES = {
    "dropout_p": "Call torch.nn.functional.scaled_dot_product_attention. "
    "In transformers, use attn_implementation='sdpa'.",
    "alibi_slopes": "Call torch.nn.functional.scaled_dot_product_attention with a float mask.",
    "qv": _CALL_FLASH_ATTN,
    "q_descale": _SCALE_CACHES,
    "k_descale": _SCALE_CACHES,
    "v_descale": _SCALE_CACHES,
    "attention_chunk": "Call the flash_attn package, or torch_flashplug.attention with a block mask.",
    "seqused_q": "Pack only the used rows.",
    "block_table": "Call torch_flashplug.attention with cu_seqlens_q, block_table and seqused_k.",
    "cache_batch_idx": "Select the caches before the call, or pass block_table.",
    "cache_leftpad": _CALL_FLASH_ATTN,
    "rotary_cos": _ROTATE_FIRST,
    "rotary_sin": _ROTATE_FIRST,
    "rotary_seqlens": _ROTATE_FIRST,
    "cu_seqlens_q": "Call torch_flashplug.attention with cu_seqlens_q and block_table.",
    "cu_seqlens_k_new": "Call torch_flashplug.append_kv for each sequence.",
}


def _refuse(function: Callable, more: dict[str, object]) -> None:
    """Raise TypeError for arguments unknown to flash_attn, and NotImplementedError for unsupported features."""
    for name, value in more.items():
        if name not in _REMEDIES and name not in _NO_EFFECT and name != "num_splits":
            raise TypeError(f"{function.__name__}: arguments must be those of flash_attn, but got {name!r}.")
        is_off = value is None or (not isinstance(value, Tensor) and value == 0)
        if name in _REMEDIES and not is_off:
            actual = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(
                f"{function.__name__}: {name} must be None, 0 or False, but got {actual}. {_REMEDIES[name]}"
            )
