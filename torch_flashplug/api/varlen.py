"""attention() of sequences of different lengths: on end, of caches of which some keys count, of pages."""

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
    check_fit,
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

if TYPE_CHECKING:
    from .varlen_plan import LengthsPlan

Lengths = tuple[Tensor | None, Tensor | None, Tensor | None]  # cu_seqlens_q, cu_seqlens_k, seqused_k
_OTHER_PLAN = "plan was made for another call"  # src/operands/varlen_tile_list.cpp says so
# seen: of Window, then softcap, scale, splits and their size. into: where the output goes, as it is returned.


def on_end(
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, given: Lengths, seen: tuple,
    scales: Scales = NO_SCALES, into: Tensor | None = None, plan: LengthsPlan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(T, Hq, Dv) and (Hq, T)."""
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
    """What kernels say of a plan is said of an argument."""
    if plan is None or torch.compiler.is_compiling():
        return written("attention_fwd", into, *given, *(NO_PLAN if plan is None else plan.of_op))
    try:
        return written("attention_fwd", into, *given, *plan.of_op)
    except RuntimeError as error:
        if _OTHER_PLAN not in str(error):
            raise
        raise ValueError(f"attention: {_OTHER_PLAN}{str(error).partition(_OTHER_PLAN)[2].splitlines()[0]}") from None


def check_on_end(operands: tuple[Tensor, Tensor, Tensor], given: Lengths) -> bool:
    """Whether k and v have 8 bits."""
    for name, x in zip("qkv", operands, strict=True):
        check_rank(name, x, 3, "a tensor of shape (tokens, heads, head dim) with cu_seqlens_q")
    q, (cu_q, cu_k, used_k) = operands[0], given
    check_numbers("cu_seqlens_q", cu_q, "sequences + 1", q.device)
    check_numbers("cu_seqlens_k", cu_k, "sequences + 1", q.device)
    if used_k is not None:
        check_numbers("seqused_k", used_k, "sequences", q.device)
    if cu_q.shape != cu_k.shape or not cu_q.shape[0] or (used_k is not None and used_k.shape[0] + 1 != cu_q.shape[0]):
        shapes = ", ".join(str(tuple(x.shape)) for x in given if x is not None)
        raise ValueError(
            "attention: cu_seqlens_q, cu_seqlens_k and seqused_k must describe the same number of sequences, "
            f"but have shapes {shapes}. cu_seqlens have one number more than there are sequences."
        )
    eight = check_dtypes(*operands)
    refuse_forward_mode()
    check_fit(*operands, *((1, *x.shape) for x in operands))
    return eight


def some_of_each(
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, used: Tensor, seen: tuple,
    scales: Scales = NO_SCALES, into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Batches, of whose keys some count: (B, Sq, Hq, Dv) and (B, Hq, Sq)."""
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
    if are_few_rows(*turned):  # each cache is a page
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
    """Output and LSE, of batches or on end as q is. longest: rows of a sequence at most, where that is known."""
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
    found = map(_packed, scales_of(eight, scales, *pools))
    if not eight:
        query, *pools = describe_call.under_autocast(q.device.type, query, *pools)
    given = (query, *pools, block_table.contiguous(), used_k.contiguous(), *found, as_sinks(sinks, batch))
    if into is not None:
        into = (into if cu_q is None else into.unsqueeze(1)).transpose(1, 2)
    out, lse = written("paged_fwd", into, *given, *seen)
    out = out.transpose(1, 2)
    return (out, lse) if cu_q is None else (out.squeeze(1), lse.squeeze(2).transpose(0, 1))


def _of_rows(cu_q: Tensor, rows: int, block_table: Tensor, used_k: Tensor) -> tuple[Tensor, Tensor]:
    """Tables and numbers of keys of rows, of which each sequence has one at most; no keys to a row that is none's."""
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
    """Of queries on end, which may be many: (T, Hq, Dv) and (Hq, T). Memory for a copy of all that tables name."""
    (q, *pools), (cu_q, used_k) = operands, given
    pools = [x.transpose(1, 2) for x in pools]
    found = scales_of(check_dtypes(*operands), scales, *pools)
    found = tuple(None if x is None else paged.gathered(x, block_table).T.unsqueeze(0) for x in found)
    keys = block_table.shape[1] * pools[0].shape[2]
    steps = torch.arange(block_table.shape[0] + 1, dtype=torch.int32, device=q.device) * keys
    rows = (paged.gathered(x, block_table) for x in pools)
    used = used_k.clamp(0, keys if len(pools[0]) else 0)
    return on_end((q, *rows), sinks, (cu_q, steps, used), seen, found, into)


def check_pages(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, used_k: Tensor | None, B: int) -> None:
    """q (..., Hq, D) of B sequences, pools (pages, rows, Hkv, D)."""
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


@torch.no_grad()
def append_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, seqused_k: Tensor, block_table: Tensor | None = None
) -> Tensor:
    """Writes k (B, Snew, Hkv, D) and v (B, Snew, Hkv, Dv) into caches, in place, behind the seqused_k (B,) int32 rows
    of each sequence that count: (B, S, Hkv, D) and (B, S, Hkv, Dv), or beside block_table (B, n) int32 pools of pages
    (pages, rows, Hkv, D) and (pages, rows, Hkv, Dv), as attention() has them. Returns how many count now, (B,) int32:
    what there is no room for, a page that is none of the pool's too, is left out with all behind it, and not counted.
    Waits for nothing on the host. ValueError or TypeError for what does not fit; then nothing is written.
    """
    _check_appended(k, v, k_cache, v_cache, seqused_k, block_table)
    B, new, rows = k.shape[0], k.shape[1], k_cache.shape[1]
    of_sequence = 1 if block_table is None else block_table.shape[1]
    used = seqused_k.long().clamp(0, rows * of_sequence).unsqueeze(1)
    if not B * new * rows * of_sequence * len(k_cache):
        return used.squeeze(1).int()
    place = used + torch.arange(new, device=k.device)
    there, nth = place < rows * of_sequence, (place // rows).clamp(max=of_sequence - 1)
    if block_table is None:
        number = torch.arange(B, device=k.device).unsqueeze(1).expand(B, new)
    else:
        number = block_table.long().gather(1, nth)
        there = there & (number >= 0) & (number < len(k_cache))
    there = there.cumprod(1).bool()
    # What has no place repeats a write of the call that has one; if none has, it leaves what lies in some place.
    flat = (number.clamp(0, len(k_cache) - 1) * rows + place % rows).flatten()
    some = there.flatten().int().argmax(0, keepdim=True)  # (1,): the host would wait for an index of no dims
    flat = torch.where(there.flatten(), flat, flat[some])
    for x, cache in ((k, k_cache), (v, v_cache)):
        given, page, row = x.flatten(0, 1), flat // rows, flat % rows
        again = torch.where(there.any(), given[some], cache[page[some], row[some]])
        cache[page, row] = torch.where(there.flatten()[:, None, None], given, again)
    return (used.squeeze(1) + there.sum(1)).int()


def _check_appended(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, seqused_k: Tensor, block_table: Tensor | None
) -> None:  # fmt: skip
    tensors = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    for name, x in tensors.items():
        check_rank(name, x, 4, "a tensor of shape (batch or pages, rows, heads, head dim)", of="append_kv")
    numbers = {"seqused_k": (seqused_k, 1)} | ({} if block_table is None else {"block_table": (block_table, 2)})
    for name, (x, rank) in numbers.items():
        if not isinstance(x, Tensor) or x.dtype != torch.int32 or x.dim() != rank or x.shape[0] != k.shape[0]:
            given = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"append_kv: {name} must be an int32 tensor with one row for each of {k.shape[0]} sequences, "
                f"but got {given}."
            )
    if len({x.device for x in (*tensors.values(), *(x for x, _ in numbers.values()))}) > 1:
        devices = ", ".join(f"{name} on {x.device}" for name, x in tensors.items())
        raise ValueError(
            f"append_kv: all tensors, including seqused_k and block_table, must be on one device, but got {devices}."
        )
    fits = block_table is not None or len(k_cache) == len(k)
    fits = fits and all(x.shape[2:] == cache.shape[2:] for x, cache in ((k, k_cache), (v, v_cache)))
    if not fits or k.shape[:2] != v.shape[:2] or k_cache.shape[:2] != v_cache.shape[:2]:
        sizes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise ValueError(
            "append_kv: k and v (B, Snew, Hkv, D) must fit the caches (B, S, Hkv, D) or the pools of pages, "
            f"but got {sizes}."
        )
    if (k.dtype, v.dtype) != (k_cache.dtype, v_cache.dtype):
        dtypes = f"{k.dtype}, {v.dtype}, caches {k_cache.dtype}, {v_cache.dtype}"
        raise ValueError(f"append_kv: k and v must have the dtypes of the caches, but got {dtypes}. Cast k and v.")


def rows_on_end(x: Tensor) -> tuple[Tensor, int]:
    """(B, S, H, D) as (T, H, D) without a copy where batches are whole numbers of rows apart, and how many."""
    (B, S, *more), (of_batch, of_row, *strides) = x.shape, x.stride()
    if B < 2 or S < 1 or of_row < 1 or of_batch % of_row or (torch.is_grad_enabled() and x.requires_grad):
        return x.flatten(0, 1), S
    apart = of_batch // of_row
    if apart <= S:
        return x.flatten(0, 1), S
    return x.as_strided(((B - 1) * apart + S, *more), (of_row, *strides)), apart


def check_numbers(name: str, x: object, size: str, device: torch.device) -> None:
    if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype != torch.int32 or x.device != device:
        given = f"{x.dtype} {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"attention: {name} must be an int32 tensor of shape ({size},) on {device}, but got {given}.")
