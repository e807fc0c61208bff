"""attention() of sequences of different lengths: on end, of caches of which some keys count, of pages."""

from __future__ import annotations

import torch
from torch import Tensor

from . import paged, problem
from .cached import FORMATS
from .operands import (
    Scale,
    are_few_rows,
    as_sinks,
    check_dtypes,
    check_operands,
    check_same,
    have_kernels,
    refuse_forward_mode,
    scale_of,
)

Lengths = tuple[Tensor | None, Tensor | None, Tensor | None]  # cu_seqlens_q, cu_seqlens_k, seqused_k
# seen: of Window, then softcap and scale


def on_end(
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, given: Lengths, seen: tuple
) -> tuple[Tensor, Tensor]:
    """(T, Hq, Dv) and (Hq, T)."""
    for name, x in zip("qkv", operands, strict=True):
        if not isinstance(x, Tensor) or x.dim() != 3:
            rank = f"{x.dim()}-D" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"attention: {name} is {rank}; beside cu_seqlens give a tensor (rows, heads, head dim)")
    q, (cu_q, cu_k, used_k) = operands[0], given
    check_numbers("cu_seqlens_q", cu_q, "sequences + 1", q.device)
    check_numbers("cu_seqlens_k", cu_k, "sequences + 1", q.device)
    if used_k is not None:
        check_numbers("seqused_k", used_k, "sequences", q.device)
    if cu_q.shape != cu_k.shape or not cu_q.shape[0] or (used_k is not None and used_k.shape[0] + 1 != cu_q.shape[0]):
        shapes = ", ".join(str(tuple(x.shape)) for x in given if x is not None)
        raise ValueError(f"attention: cu_seqlens and seqused_k are {shapes}; give numbers of as many sequences")
    check_same(*operands)
    refuse_forward_mode()
    batch = [x.unsqueeze(0) for x in problem.under_autocast(operands[0].device.type, *operands)]
    check_operands(*batch)
    lengths = (None if x is None else x.contiguous() for x in given)
    batch = [x.transpose(1, 2) for x in batch]
    out, lse = torch.ops.torch_flashplug.attention_fwd(*batch, as_sinks(sinks, q), *lengths, *seen)
    return out.transpose(1, 2).squeeze(0), lse.squeeze(0)


def some_of_each(
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, given: Lengths, seen: tuple
) -> tuple[Tensor, Tensor]:
    """Batches, of whose keys some count: (B, Sq, Hq, Dv) and (B, Hq, Sq)."""
    check_operands(*operands)
    q, k = operands[:2]
    check_numbers("seqused_k", given[2], "batch", q.device)
    if given[2].shape[0] != q.shape[0]:
        raise ValueError(f"attention: seqused_k is {tuple(given[2].shape)}; give (batch,) = ({q.shape[0]},)")
    turned = [x.transpose(1, 2) for x in problem.under_autocast(q.device.type, *operands)]
    if are_few_rows(*turned):  # each cache is a page
        check_same(*operands)
        refuse_forward_mode()
        pages = torch.arange(q.shape[0], dtype=torch.int32, device=q.device).unsqueeze(1)
        given = (*turned, pages, given[2].contiguous(), None, None, as_sinks(sinks, q))
        out, lse = torch.ops.torch_flashplug.paged_fwd(*given, *seen)
        return out.transpose(1, 2), lse
    of_keys = [rows_on_end(x) for x in operands[1:]]
    if of_keys[0][1] != of_keys[1][1] or not have_kernels(*(x.transpose(1, 2) for x in operands)):
        of_keys = [(x.flatten(0, 1), k.shape[1]) for x in operands[1:]]
    rows, steps, used = q.flatten(0, 1), (q.shape[1], of_keys[0][1]), given[2].clamp(max=k.shape[1])
    starts = [torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * step for step in steps]
    starts[1][-1:].clamp_(max=of_keys[0][0].shape[0])
    out, lse = on_end((rows, *(x for x, _ in of_keys)), sinks, (*starts, used), seen)
    return out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)


def in_pages(  # noqa: PLR0913
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, block_table: Tensor, given: Lengths,
    scales: tuple[Scale | None, Scale | None], seen: tuple, longest: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and LSE, of batches or on end as q is. longest: rows of a sequence, where that is known."""
    (q, k, v), (cu_q, cu_k, used_k) = operands, given
    if cu_k is not None or used_k is None:
        raise ValueError("attention: beside block_table give seqused_k (batch,), and no cu_seqlens_k")
    if not isinstance(block_table, Tensor) or block_table.dim() != 2 or block_table.dtype != torch.int32:
        table = f"{block_table.dtype} {tuple(block_table.shape)}" if isinstance(block_table, Tensor) else block_table
        raise ValueError(f"attention: block_table is {table}; give int32 (batch, pages of a sequence)")
    check_numbers("seqused_k", used_k, "batch", q.device)
    refuse_forward_mode()
    B = block_table.shape[0]
    one_each = cu_q is not None and longest == 1 and q.dim() == 3 and q.shape[0] == B  # so that all have one row
    if cu_q is not None and not one_each:
        return _gathered((q, k, v), sinks, block_table, (cu_q, used_k), scales, seen)
    batch = q.unsqueeze(1) if one_each else q
    if batch.dim() != 4 or k.dim() != 4 or v.dim() != 4 or used_k.shape[0] != B or batch.shape[0] != B:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, block_table, used_k))
        raise ValueError(f"attention: {shapes} do not fit; give q (B, Sq, Hq, D), k, v (pages, rows, Hkv, D), B tables")
    query, *pools = (x.transpose(1, 2) for x in (batch, k, v))
    of_scales = (None, None)
    if check_dtypes(batch, k, v):
        named = zip(("k_scale", "v_scale"), scales, pools, strict=True)
        of_scales = tuple(scale_of(name, scale, x).contiguous() for name, scale, x in named)
    else:
        query, *pools = problem.under_autocast(q.device.type, query, *pools)
    table, used = block_table.to(q.device).contiguous(), used_k.contiguous()
    given = (query, *pools, table, used, *of_scales, as_sinks(sinks, batch))
    out, lse = torch.ops.torch_flashplug.paged_fwd(*given, *seen)
    out = out.transpose(1, 2)
    return (out.squeeze(1), lse.squeeze(2).transpose(0, 1)) if one_each else (out, lse)


def _gathered(
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, block_table: Tensor,
    given: tuple[Tensor, Tensor], scales: tuple[Scale | None, Scale | None], seen: tuple,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of queries on end, which may be many: (T, Hq, Dv) and (Hq, T)."""
    (q, *pools), (cu_q, used_k) = operands, given
    if any(x is not None for x in scales) or pools[0].dtype in FORMATS:
        raise ValueError("attention: pages in 8 bits beside cu_seqlens_q are not built; give q (B, Sq, Hq, D)")
    keys = block_table.shape[1] * pools[0].shape[1]
    steps = torch.arange(block_table.shape[0] + 1, dtype=torch.int32, device=q.device) * keys
    rows = (paged.gathered(x.transpose(1, 2), block_table) for x in pools)
    with torch.no_grad():
        return on_end((q, *rows), sinks, (cu_q, steps, used_k.clamp(0, keys)), seen)


@torch.no_grad()
def append_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, seqused_k: Tensor, block_table: Tensor | None = None
) -> Tensor:
    """Writes k (B, Snew, Hkv, D) and v (B, Snew, Hkv, Dv) into caches, in place, behind the seqused_k (B,) int32 rows
    of each sequence that count: (B, S, Hkv, D) and (B, S, Hkv, Dv), or beside block_table (B, n) int32 pools of pages
    (pages, rows, Hkv, D) and (pages, rows, Hkv, Dv), as attention() has them. Returns how many count now, (B,) int32:
    what there is no room for is left out, and not counted. Waits for nothing on the host. ValueError for shapes and
    dtypes that do not fit.
    """
    paged_ones = block_table is not None
    B, new = k.shape[:2]
    rows, sizes = k_cache.shape[1], [tuple(x.shape) for x in (k, v, k_cache, v_cache)]
    check_numbers("seqused_k", seqused_k, "batch", k.device)
    fits = all(len(size) == 4 for size in sizes) and (paged_ones or len(k_cache) == B) and seqused_k.shape[0] == B
    fits = fits and all(x.shape[2:] == cache.shape[2:] for x, cache in ((k, k_cache), (v, v_cache)))
    fits = fits and k.shape[:2] == v.shape[:2] and k_cache.shape[:2] == v_cache.shape[:2]
    if not fits or (paged_ones and (block_table.dim() != 2 or len(block_table) != B)):
        raise ValueError(f"append_kv: k, v and caches are {sizes}; give (B, Snew, Hkv, D) and (B, S, Hkv, D), or pages")
    if (k.dtype, v.dtype) != (k_cache.dtype, v_cache.dtype):
        dtypes = f"{k.dtype}, {v.dtype}, caches {k_cache.dtype}, {v_cache.dtype}"
        raise ValueError(f"append_kv: k, v are {dtypes}; give the caches'")
    room = rows * (block_table.shape[1] if paged_ones else 1)
    used = seqused_k.long().clamp(0, room).unsqueeze(1)
    place = used + torch.arange(new, device=k.device)
    there = place < room
    # What has no place repeats the first row's write, or where that has none either what lies in the last place.
    first, place = there[:, :1], torch.where(there, place, torch.where(there[:, :1], used, room - 1))
    if paged_ones:
        number, place = block_table.long().gather(1, place // rows).clamp(0, len(k_cache) - 1), place % rows
    else:
        number = torch.arange(B, device=k.device).unsqueeze(1)
    for x, cache in ((k, k_cache), (v, v_cache)):
        again = torch.where(first[..., None, None], x[:, :1], cache[number[:, :1], place[:, :1]])
        cache[number, place] = torch.where(there[..., None, None], x, again)
    return (seqused_k.clamp(0, room) + new).clamp(max=room).int()


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
        raise ValueError(f"attention: {name} is {given}; give int32 ({size},) on {device}")
