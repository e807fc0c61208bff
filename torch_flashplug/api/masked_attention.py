"""Calls of `attention()` as dense calls with a bool mask: sinks beside a mask, and draft trees.

A draft tree (speculative decoding) has several candidate tokens for the same position. `tree_mask` names the candidates
that each candidate descends from. Kernels read the tree as part of a dense mask over all keys of the cache, so pages
are gathered first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import paged
from ..ops.attention import AttentionParams
from ..torch_hooks import describe_call
from .attention_args import (
    DENSE_RULE,
    Scales,
    check_dtypes,
    check_operands,
    check_rank,
    dequantize_to_16bit,
    normalize_kv_scales,
    normalize_sinks,
    refuse_forward_mode,
)
from .varlen import check_pages
from .varlen_args import check_int32_vector


def attend_beside_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Run an op without sinks, then scale the output by the share of the keys in each row's sum with the sinks."""
    out, lse, *_ = torch.ops.torch_flashplug.sdpa_fwd(
        query, key, value, mask, dropout_p=0.0, causal_mode=0, scale=scale, mode=0
    )
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.unsqueeze(-1))
    share = torch.exp(lse - total).masked_fill(lse == -torch.inf, 0.0)
    return (out * share.unsqueeze(-1)).to(out.dtype), total


def tree_attention(  # noqa: PLR0913
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, tree_mask: Tensor, seqused_k: Tensor | None,
    block_table: Tensor | None, scales: Scales, params: AttentionParams, conflicts: list[str],
    out_buffer: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend to caches or pages whose last Sq keys are a draft tree; return (B, Sq, Hq, Dv) and the LSE (B, Hq, Sq).

    Args:
        operands: `q` (B, Sq, Hq, D), and caches (B, Sk, Hkv, D) or pools of pages.
        sinks: Sinks (Hq,) or None.
        tree_mask: bool (B, Sq, Sq), the visible keys of the tree for each query row.
        seqused_k: KV lengths (B,) including the keys of the tree; None for whole caches.
        block_table: Page numbers (B, n), or None for caches.
        scales: Scales of 8-bit k and v.
        params: Settings of the call. The window may have a left bound.
        conflicts: Names of passed arguments that cannot be combined with a tree.
        out_buffer: The caller's output tensor, or None.
    """
    q, k, v = operands
    if conflicts:
        raise ValueError(
            f"attention: {', '.join(conflicts)} must be left out with tree_mask. The tree says which of the last keys "
            "are visible, and a window may only have a left bound."
        )
    if describe_call.wants_grad(q, k, v):
        raise RuntimeError(
            "attention: gradients are not supported with tree_mask. Call attention() under torch.no_grad()."
        )
    refuse_forward_mode()
    check_rank("q", q, 4, DENSE_RULE)
    _check_tree(tree_mask, q)
    if block_table is None:
        check_operands(q, k, v)
        kv_lengths = _kv_lengths(q, k, seqused_k)
    else:
        check_pages(q, k, v, block_table, seqused_k, q.shape[0])
        kv_lengths = seqused_k if len(k) else seqused_k * 0  # a pool without pages has no keys
    is_quantized = check_dtypes(q, k, v)
    query, key, value = (x.transpose(1, 2) for x in operands)
    kv_scales = normalize_kv_scales(is_quantized, scales, key, value, paged=block_table is not None)
    if block_table is not None:
        paged.check_page_numbers(block_table, kv_lengths, *k.shape[:2])
        pools = (key, value, *kv_scales)
        key, value, *kv_scales = (None if x is None else _gathered(x, block_table) for x in pools)
    query, key, value = dequantize_to_16bit(query, key, value, *kv_scales)
    is_used = torch.arange(key.shape[2], device=q.device) < kv_lengths.unsqueeze(1)  # (B, Sk)
    key, value = (x.masked_fill(~is_used[:, None, :, None], 0.0) for x in (key, value))  # unused keys may be NaN
    mask = tree_visibility(tree_mask, kv_lengths, is_used, params.left)
    out, lse = attend_beside_sinks(query, key, value, normalize_sinks(sinks, q), mask.unsqueeze(1), params.scale)
    out = out.transpose(1, 2).to(q.dtype)
    return out if out_buffer is None else out_buffer.copy_(out), lse


def tree_visibility(tree_mask: Tensor, kv_lengths: Tensor, is_used: Tensor, left: int) -> Tensor:
    """Return a bool mask (B, Sq, Sk): True for a key that is visible to a query row.

    Args:
        tree_mask: bool (B, Sq, Sq).
        kv_lengths: KV lengths (B,), including the keys of the tree.
        is_used: bool (B, Sk), True for keys before the KV length.
        left: Left bound of the window, counted from the key of the row itself; -1 for no bound.
    """
    (B, Sq, _), Sk = tree_mask.shape, is_used.shape[1]
    if not B * Sq * Sk:
        return tree_mask.new_empty(B, Sq, Sk)
    key = torch.arange(Sk, device=tree_mask.device)
    first = (kv_lengths.long().clamp(0, Sk) - Sq).view(B, 1, 1)  # key of row 0
    column = (key - first).clamp(max=Sq - 1)  # (B, 1, Sk); negative before the tree
    in_tree = tree_mask.gather(2, column.clamp(min=0).expand(B, Sq, Sk))
    mask = (in_tree | (column < 0)) & is_used.unsqueeze(1)
    if left >= 0:
        mask &= key >= first + torch.arange(Sq, device=tree_mask.device).unsqueeze(1) - left
    return mask


def _kv_lengths(q: Tensor, k: Tensor, seqused_k: Tensor | None) -> Tensor:
    """Return checked KV lengths (B,); without `seqused_k`, all keys count."""
    if seqused_k is None:
        return torch.full(q.shape[:1], k.shape[1], dtype=torch.int32, device=q.device)
    check_int32_vector("seqused_k", seqused_k, "batch", q.device)
    if seqused_k.shape != q.shape[:1]:
        raise ValueError(
            f"attention: seqused_k must have shape (batch,) = ({q.shape[0]},), but got {tuple(seqused_k.shape)}. "
            "Pass one KV length for each sequence."
        )
    return seqused_k


def _gathered(pool: Tensor, block_table: Tensor) -> Tensor:
    """Copy pages (pages, Hkv, rows, ...) into a batch (B, Hkv, n * rows, ...)."""
    capacity = block_table.shape[1] * pool.shape[2]
    return paged.gathered(pool, block_table).unflatten(0, (block_table.shape[0], capacity)).transpose(1, 2)


def _check_tree(tree_mask: object, q: Tensor) -> None:
    B, Sq = q.shape[:2]
    is_tensor = isinstance(tree_mask, Tensor)
    fits = is_tensor and tree_mask.dtype == torch.bool and tree_mask.shape == (B, Sq, Sq)
    if not fits or tree_mask.device != q.device:
        actual = type(tree_mask).__name__
        if is_tensor:
            actual = f"{tree_mask.dtype} {tuple(tree_mask.shape)} on {tree_mask.device}"
        raise ValueError(
            f"attention: tree_mask must be a bool tensor of shape (B, Sq, Sq) = ({B}, {Sq}, {Sq}) on {q.device}, "
            f"but got {actual}. Pass a row for each query, with True for each visible key of the tree."
        )
