"""Variants of `attention()`: packed sequences, KV caches with KV lengths, paged KV caches; and `append_kv()`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ops import paged
from ..ops.attention import NO_PLAN
from ..torch_hooks import describe_call
from .attention_args import (
    NO_SCALES,
    Scales,
    are_few_rows,
    as_sinks,
    check_dtypes,
    check_operands,
    check_rank,
    check_split_size,
    have_kernels,
    heads_fit,
    in_16_bits,
    refuse_forward_mode,
    scales_of,
    written,
)
from .varlen_args import Lengths, check_numbers, check_on_end

if TYPE_CHECKING:
    from .varlen_plan import LengthsPlan

_OTHER_PLAN = "plan was made for another call"  # text of an error in src/operands/varlen_tile_list.cpp
# In the functions below, `seen` holds the fields of Window, then softcap, scale, num_splits and fixed_split_size.
# `into` is the output tensor of the caller, shaped as the result.


def on_end(
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, given: Lengths, seen: tuple,
    scales: Scales = NO_SCALES, into: Tensor | None = None, plan: LengthsPlan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend within packed sequences; return the output (T, Hq, Dv) and the LSE (Hq, T)."""
    eight = check_on_end(operands, given)
    if plan is not None:
        plan.check(*operands[:2], given, seen[:3])
    q, batch = operands[0], [x.unsqueeze(0) for x in operands]
    lengths = (None if x is None else x.contiguous() for x in given)
    query, *pair = (x.transpose(1, 2) for x in batch)
    into = None if into is None else into.unsqueeze(0).transpose(1, 2)
    batch = in_16_bits(query, *pair, *scales_of(eight, scales, *pair))
    out, lse = _attended(plan, into, *batch, as_sinks(sinks, q), *lengths, *seen)
    out = out.transpose(1, 2).squeeze(0)
    return out.to(q.dtype) if eight else out, lse.squeeze(0)


def _attended(plan: LengthsPlan | None, into: Tensor | None, *given: object) -> tuple[Tensor, Tensor]:
    """Call attention_fwd; raise a kernel's RuntimeError about the plan as a ValueError about the argument."""
    if plan is None or torch.compiler.is_compiling():
        return written("attention_fwd", into, *given, *(NO_PLAN if plan is None else plan.of_op))
    try:
        return written("attention_fwd", into, *given, *plan.of_op)
    except RuntimeError as error:
        if _OTHER_PLAN not in str(error):
            raise
        raise ValueError(f"attention: {_OTHER_PLAN}{str(error).partition(_OTHER_PLAN)[2].splitlines()[0]}") from None




def some_of_each(
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, used: Tensor, seen: tuple,
    scales: Scales = NO_SCALES, into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend to the first `used` keys of each sequence; return the output (B, Sq, Hq, Dv) and the LSE (B, Hq, Sq)."""
    check_operands(*operands)
    (q, k, _), eight = operands, check_dtypes(*operands)
    check_numbers("seqused_k", used, "batch", q.device)
    if used.shape[0] != q.shape[0]:
        raise ValueError(
            f"attention: seqused_k must have shape (batch,) = ({q.shape[0]},), but got {tuple(used.shape)}. "
            "Pass one KV length for each sequence."
        )
    refuse_forward_mode()
    turned = [x.transpose(1, 2) for x in operands]
    found = scales_of(eight, scales, *turned[1:])
    turned = turned if eight else describe_call.under_autocast(q.device.type, *turned)
    if are_few_rows(*turned):  # the cache of each sequence is one page
        check_split_size(seen[-1], seen[:2], turned[0], turned[2], k.shape[1])
        pages = torch.arange(q.shape[0], dtype=torch.int32, device=q.device).unsqueeze(1)
        into = None if into is None else into.transpose(1, 2)
        given = (*turned, pages, used.contiguous(), *map(_packed, found), as_sinks(sinks, q))
        out, lse = written("paged_fwd", into, *given, *seen)
        return out.transpose(1, 2), lse
    turned = in_16_bits(*turned, *found)
    rows, *keys = (x.transpose(1, 2) for x in turned)
    of_keys = [rows_on_end(x) for x in keys]
    if of_keys[0][1] != of_keys[1][1] or not have_kernels(*turned):
        of_keys = [(x.flatten(0, 1), k.shape[1]) for x in keys]
    steps = (q.shape[1], of_keys[0][1])
    starts = [torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * step for step in steps]
    starts[1][-1:].clamp_(max=of_keys[0][0].shape[0])
    lengths = (*starts, used.clamp(max=k.shape[1]))
    out, lse = on_end((rows.flatten(0, 1), *(x for x, _ in of_keys)), sinks, lengths, seen)
    out = out.unflatten(0, q.shape[:2]).to(q.dtype if eight else out.dtype)
    return out if into is None else into.copy_(out), lse.unflatten(1, q.shape[:2]).transpose(0, 1)


def _packed(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.contiguous()


def in_pages(  # noqa: PLR0913
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, block_table: Tensor, given: Lengths,
    scales: Scales, seen: tuple, longest: int | None, into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend to a paged KV cache; return the output and the LSE, dense or packed as `q` is.

    Args:
        operands: `q` (B, Sq, Hq, D), or packed (T, Hq, D), and the pools of k and v.
        sinks: Sinks (Hq,) or None.
        block_table: Page numbers (B, n).
        given: `cu_seqlens_q`, `cu_seqlens_k` and `seqused_k`.
        scales: Scales of 8-bit k and v.
        seen: Window, softcap, scale and splits.
        longest: Largest number of query rows of a sequence, if known (`max_seqlen_q`).
        into: The caller's output tensor, or None.
    """
    (q, k, v), (cu_q, cu_k, used_k) = operands, given
    if cu_k is not None:
        raise ValueError(
            "attention: cu_seqlens_k is not supported together with block_table. Pass seqused_k of shape (batch,)."
        )
    if cu_q is not None:
        check_rank("q", q, 3, "a tensor of shape (tokens, heads, head dim) with cu_seqlens_q")
        check_numbers("cu_seqlens_q", cu_q, "sequences + 1", q.device)
        check_pages(q.unsqueeze(0), k, v, block_table, used_k, cu_q.shape[0] - 1)
        if type(longest) is not int or longest != 1:
            return _gathered(operands, sinks, block_table, (cu_q, used_k), seen, scales, into)
        block_table, used_k = _of_rows(cu_q, q.shape[0], block_table, used_k)
    batch = q if cu_q is None else q.unsqueeze(1)
    check_rank("q", batch, 4, "a tensor of shape (batch, length, heads, head dim)")
    check_pages(batch, k, v, block_table, used_k, batch.shape[0])
    refuse_forward_mode()
    query, *pools = (x.transpose(1, 2) for x in (batch, k, v))
    eight = check_dtypes(batch, k, v)
    check_split_size(seen[-1], seen[:2], query, pools[1], block_table.shape[1] * k.shape[1])
    found = map(_packed, scales_of(eight, scales, *pools, paged=True))
    if not eight:
        query, *pools = describe_call.under_autocast(q.device.type, query, *pools)
    given = (query, *pools, block_table.contiguous(), used_k.contiguous(), *found, as_sinks(sinks, batch))
    if into is not None:
        into = (into if cu_q is None else into.unsqueeze(1)).transpose(1, 2)
    out, lse = written("paged_fwd", into, *given, *seen)
    out = out.transpose(1, 2)
    return (out, lse) if cu_q is None else (out.squeeze(1), lse.squeeze(2).transpose(0, 1))


def _of_rows(cu_q: Tensor, rows: int, block_table: Tensor, used_k: Tensor) -> tuple[Tensor, Tensor]:
    """Return a block table and a KV length for each query row, where a sequence has at most one row.

    A row outside of all sequences gets KV length 0.
    """
    if not block_table.shape[0]:
        return block_table.new_zeros(rows, block_table.shape[1]), used_k.new_zeros(rows)
    number = torch.arange(rows, device=cu_q.device)
    of = torch.searchsorted(cu_q[1:].contiguous(), number, right=True).clamp(max=block_table.shape[0] - 1)
    mine = (cu_q[of] <= number) & (number < cu_q[of + 1])
    return block_table[of], torch.where(mine, used_k[of], 0)


def _gathered(
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, block_table: Tensor,
    given: tuple[Tensor, Tensor], seen: tuple, scales: Scales, into: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Copy all pages of the tables into packed keys and values, then attend; return (T, Hq, Dv) and (Hq, T).

    Sequences may have any number of query rows.
    """
    (q, *pools), (cu_q, used_k) = operands, given
    pools = [x.transpose(1, 2) for x in pools]
    found = scales_of(check_dtypes(*operands), scales, *pools, paged=True)
    found = tuple(None if x is None else paged.gathered(x, block_table).T.unsqueeze(0) for x in found)
    keys = block_table.shape[1] * pools[0].shape[2]
    steps = torch.arange(block_table.shape[0] + 1, dtype=torch.int32, device=q.device) * keys
    rows = (paged.gathered(x, block_table) for x in pools)
    used = used_k.clamp(0, keys if len(pools[0]) else 0)
    return on_end((q, *rows), sinks, (cu_q, steps, used), seen, found, into)


def check_pages(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, used_k: Tensor | None, B: int) -> None:
    """Check q (..., Hq, D) of B sequences against pools of pages (pages, rows, Hkv, D)."""
    if not isinstance(block_table, Tensor) or block_table.dim() != 2 or block_table.dtype != torch.int32:
        table = f"{block_table.dtype} {tuple(block_table.shape)}" if isinstance(block_table, Tensor) else block_table
        raise ValueError(
            f"attention: block_table must be an int32 tensor of shape (batch, pages of a sequence), but got {table}."
        )
    if used_k is None:
        raise ValueError("attention: block_table needs seqused_k. Pass the KV lengths, shape (batch,).")
    for name, x in (("k", k), ("v", v)):
        check_rank(name, x, 4, "a pool of shape (pages, rows of a page, heads, head dim) with block_table")
    check_numbers("seqused_k", used_k, "batch", q.device)
    if not q.device == k.device == v.device == block_table.device:
        devices = f"{q.device}, {k.device}, {v.device}, {block_table.device}"
        raise ValueError(f"attention: q, k, v and block_table must be on one device, but are on {devices}.")
    (Hq, D), (*pool, Hkv, _) = q.shape[-2:], k.shape
    fits = k.shape[3] == D and v.shape[:3] == (*pool, Hkv) and heads_fit(Hq, Hkv)
    if not fits or used_k.shape[0] != B or block_table.shape[0] != B:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, block_table, used_k))
        raise ValueError(
            "attention: q (B, Sq, Hq, D), k and v (pages, rows, Hkv, D), block_table (B, n) and seqused_k (B,) must "
            f"fit, but have shapes {shapes}."
        )






def rows_on_end(x: Tensor) -> tuple[Tensor, int]:
    """Return (B, S, H, D) as packed (T, H, D), and the distance of two sequences in rows.

    No copy is needed if the stride of the batch dim is a multiple of the stride of a row.
    """
    (B, S, *more), (of_batch, of_row, *strides) = x.shape, x.stride()
    if B < 2 or S < 1 or of_row < 1 or of_batch % of_row or (torch.is_grad_enabled() and x.requires_grad):
        return x.flatten(0, 1), S
    apart = of_batch // of_row
    if apart <= S:
        return x.flatten(0, 1), S
    return x.as_strided(((B - 1) * apart + S, *more), (of_row, *strides)), apart


