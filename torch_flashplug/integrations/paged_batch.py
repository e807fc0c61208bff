"""Batches of a server on a paged KV cache: from the lengths of a step to calls of `attention()`.

A step of a server has sequences in decode, with a single query row each, and sequences in prefill. `split_batch()` runs
once for each step. The function divides the batch into ranges of adjacent sequences, and each range becomes a call of
`attention()` per layer. `attend()` runs the calls of a layer.

| range | call |
|---|---|
| all sequences have the same number of rows, up to 64 for each KV head | dense: a kernel reads pages in place |
| sequences with a single row at the start and at the end of the batch | dense |
| further sequences, up to MAX_GATHERED_KEYS padded keys | packed, with `cu_seqlens_q` |

`attention()` gathers the pages of a packed call. The limit bounds the memory of the copy.

The host waits for nothing: row counts and bounds of the KV lengths are host numbers of the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..api.attention import attention
from ..registry.dispatch_table import COST_MODEL

PAGE_ROWS_STEP = 16  # kernels read pages of a multiple of 16 rows in place
MAX_GROUP = COST_MODEL.max_decode_rows  # query heads of a KV head; a larger group makes decode gather all pages
# Keys in the copy of a packed call, as sequences x widest table. 2^17 keys of 8 KV heads with D 128 are 512 MiB in
# bf16. A single longer sequence is gathered alone.
MAX_GATHERED_KEYS = 1 << 17


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Sequences of a step: tensors on the device, and facts known to the host of a server."""

    cu_seqlens_q: Tensor  # (sequences + 1,) int32
    seqused_k: Tensor  # (sequences,) int32: KV lengths, with the tokens of the step
    block_table: Tensor  # (sequences, n) int32
    row_counts: Sequence[int]  # query rows of each sequence
    kv_bounds: Sequence[int]  # upper bounds of `seqused_k`
    page_rows: int
    group: int  # query heads for each KV head


@dataclass(frozen=True, slots=True)
class PagedCall:
    """Arguments of a call of `attention()` for a range of adjacent sequences."""

    rows: slice  # rows of the packed query
    seqused_k: Tensor
    block_table: Tensor
    rows_per_sequence: int = 0  # of a dense call; 0 for packed sequences
    cu_seqlens_q: Tensor | None = None  # of packed sequences, from row 0 of the range


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """Arguments of `attention()` from a layer."""

    scale: float
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: Tensor | None = None
    num_splits: int | None = None  # 1: batch-invariant results


def dense_call(seqused_k: Tensor, block_table: Tensor, rows_per_sequence: int = 1) -> PagedCall:
    """Return the call for a batch with the same number of query rows in each sequence, with the tensors unchanged.

    CUDA graphs need the unchanged tensors: a replay reads new lengths and pages from the same addresses.
    """
    return PagedCall(slice(0, len(seqused_k) * rows_per_sequence), seqused_k, block_table, rows_per_sequence)


def split_batch(batch: PagedBatch) -> tuple[PagedCall, ...]:
    """Divide a batch into calls. Sequences without rows at the end (padding) make no call."""
    counts = list(batch.row_counts)
    while counts and counts[-1] == 0:
        counts.pop()
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return tuple(_call_of(batch, starts, first, end, dense) for first, end, dense in _ranges(batch, counts))


def _ranges(batch: PagedBatch, counts: list[int]) -> Iterator[tuple[int, int, bool]]:
    """Yield (first sequence, end, is dense) of each call."""
    if not counts:
        return
    if min(counts) == max(counts) and counts[0] * batch.group <= MAX_GROUP:
        yield 0, len(counts), True
        return
    head, tail = (_num_single(x) if batch.group <= MAX_GROUP else 0 for x in (counts, counts[::-1]))
    tail = len(counts) - tail
    if head:
        yield 0, head, True
    first, widest = head, 0
    for i in range(head, tail):
        pages = _num_pages(batch, i, i + 1)
        widest = max(widest, pages)
        if i > first and (i + 1 - first) * widest * batch.page_rows > MAX_GATHERED_KEYS:
            yield first, i, False
            first, widest = i, pages
    yield first, tail, False
    if tail < len(counts):
        yield tail, len(counts), True


def _num_single(counts: list[int]) -> int:
    """Return the number of leading sequences with a single row."""
    return next(i for i, count in enumerate([*counts, 0]) if count != 1)


def _num_pages(batch: PagedBatch, first: int, end: int) -> int:
    """Return the width of a table for the keys of the sequences of a range."""
    pages = -(-max(batch.kv_bounds[first:end]) // batch.page_rows)
    return min(max(pages, 1), batch.block_table.shape[1])


def _call_of(batch: PagedBatch, starts: list[int], first: int, end: int, is_dense: bool) -> PagedCall:
    block_table = batch.block_table[first:end, : _num_pages(batch, first, end)].contiguous()
    rows, seqused_k = slice(starts[first], starts[end]), batch.seqused_k[first:end]
    if is_dense:
        return PagedCall(rows, seqused_k, block_table, starts[first + 1] - starts[first])
    cu_seqlens_q = batch.cu_seqlens_q[first : end + 1] - starts[first]
    return PagedCall(rows, seqused_k, block_table, cu_seqlens_q=cu_seqlens_q)


def attend(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, calls: Sequence[PagedCall], out: Tensor, settings: LayerSettings
) -> None:
    """Compute causal attention of a layer.

    Args:
        q: Queries (T, Hq, D).
        k_pool: Pages of keys (pages, rows of a page, Hkv, D), with the keys of the step.
        v_pool: Pages of values (pages, rows of a page, Hkv, Dv).
        calls: The result of `split_batch()`, or a `dense_call()`.
        out: Output (T, Hq, Dv), written to. Rows outside of all calls stay unchanged.
        settings: Settings of the layer.
    """
    for call in calls:
        q_rows, out_rows = q[call.rows], out[call.rows]
        if call.rows_per_sequence:
            shape = (len(call.seqused_k), call.rows_per_sequence)
            q_rows, out_rows = q_rows.unflatten(0, shape), out_rows.unflatten(0, shape)
        attention(
            q_rows, k_pool, v_pool, causal=True, window=settings.window, softcap=settings.softcap, sinks=settings.sinks,
            scale=settings.scale, cu_seqlens_q=call.cu_seqlens_q, seqused_k=call.seqused_k,
            block_table=call.block_table, num_splits=settings.num_splits, out=out_rows,
        )  # fmt: skip


def check_page_rows(page_rows: int, remedy: str) -> None:
    """Raise ValueError unless kernels read pages of the size in place."""
    if page_rows % PAGE_ROWS_STEP:
        raise ValueError(
            f"flashplug: the page size must be a multiple of {PAGE_ROWS_STEP}, but got {page_rows}. {remedy}"
        )


def check_group(num_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError if a KV head has more query heads than the decode kernels take."""
    if num_heads > MAX_GROUP * num_kv_heads:
        raise ValueError(
            f"flashplug: a KV head must have at most {MAX_GROUP} query heads, but got {num_heads} query heads and "
            f"{num_kv_heads} KV heads. Select a different attention backend."
        )


def write_rows(x: Tensor, pool: Tensor, pool_rows: Tensor) -> None:
    """Write rows of new tokens into a pool of pages, at the row numbers page * rows of a page + row.

    Servers give negative row numbers to padding tokens. A negative number writes nothing. The host waits for nothing.

    Args:
        x: Keys or values of the tokens (T, Hkv, D). Tokens after the last row number are not read.
        pool: Pages (pages, rows of a page, Hkv, D), written in place.
        pool_rows: (tokens,) integers.
    """
    if not len(pool_rows):
        return
    pool_rows, x = pool_rows.long(), x[: len(pool_rows)]
    is_token = pool_rows >= 0
    # The number of writes is fixed, so a padding token repeats the write of the first token. Without any token, each
    # write stores the present contents of row 0.
    first = is_token.int().argmax(0, keepdim=True)  # shape (1,): the host would wait for an index without dims
    pool_rows = torch.where(is_token, pool_rows, pool_rows[first].clamp(min=0))
    page, row = pool_rows // pool.shape[1], pool_rows % pool.shape[1]
    repeated = torch.where(is_token.any(), x[first], pool[page[:1], row[:1]])
    pool[page, row] = torch.where(is_token[:, None, None], x, repeated)
