"""The op torch_flashplug::paged_fwd: attention to a paged KV cache (vLLM, arXiv 2309.06180), forward only.

Each sequence has its pages, and the first seqused_k[i] keys of sequence i are visible. A decode kernel reads the pages
in place, in 16 or 8 bits (src/ops/attention_ops.cpp). For more query rows, and on a CPU, the pages are first gathered
into contiguous tensors for the kernels of packed sequences. There are no gradients.

torch's varlen_attn packs queries of several sequences (src/hooks/varlen_attn.cpp). The ops `_tables_of_rows` and
`_gathered_pages` bring the pages of such a call into the forms of kernels.

A pool is (pages, Hkv, rows of a page, D). The argument `block_table` (B, n) int32 has the page numbers of each
sequence. Page numbers after the visible keys may have any value. On a CPU, a page number of a visible key outside the
pool raises ValueError. On a GPU such a number gives wrong results, but no access outside the pool.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .attention import (
    NUM_PARAMS,
    OPTIONAL_PARAMS,
    REQUIRED_PARAMS,
    AttentionForwardArgs,
    AttentionParams,
    namespace,
)
from .quantized_kv import dequantized, multiplied_in
from .sdpa import empty_in_layout_of, empty_results, held, without_own_graph

_library = torch.library.Library("torch_flashplug", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_ARGS = (
    "Tensor query, Tensor key, Tensor value, Tensor block_table, Tensor seqused_k, Tensor? k_scale, Tensor? v_scale, "
    f"Tensor? sinks, {REQUIRED_PARAMS}, {OPTIONAL_PARAMS}, Tensor? cu_seqlens_q=None, "
    "int block_mode=0"
)
for _name in ("paged_fwd", "_paged_math"):
    _library.define(f"{_name}({_ARGS}) -> (Tensor out, Tensor lse)", tags=_TAGS)
_library.define(f"paged_fwd_out(Tensor(a!) out, {_ARGS}) -> Tensor lse", tags=_TAGS)
_library.define(
    "_tables_of_rows(Tensor cu_seqlens_q, int rows, Tensor block_table, Tensor seqused_k) -> (Tensor block_table, "
    "Tensor seqused_k)"
)
_library.define(
    "_gathered_pages(Tensor key, Tensor value, Tensor block_table, Tensor seqused_k) -> (Tensor key, Tensor value, "
    "Tensor cu_seqlens_k, Tensor seqused_k)"
)


class PagedForwardArgs(NamedTuple):
    """Arguments of paged_fwd, in schema order, with the settings as one field."""

    query: Tensor  # (B, Hq, Sq, D), or packed (1, Hq, T, D) with cu_seqlens_q
    key: Tensor  # (pages, Hkv, rows of a page, D)
    value: Tensor  # (pages, Hkv, rows of a page, Dv)
    block_table: Tensor  # (B, n) int32
    seqused_k: Tensor  # (B,) int32
    k_scale: Tensor | None  # (pages, Hkv, rows of a page) fp32
    v_scale: Tensor | None
    sinks: Tensor | None  # (Hq,)
    params: AttentionParams
    cu_seqlens_q: Tensor | None = None  # (B + 1,) int32
    block_mode: int = 0

    @classmethod
    def from_op(cls, *args: Tensor | int | float | None) -> PagedForwardArgs:
        """Return the arguments of a call of the op, which may lack defaults at the end."""
        tensors, end = 8, 8 + NUM_PARAMS
        return cls(*args[:tensors], AttentionParams(*args[tensors:end]), *args[end:])

    def as_attention(self, **packed: Tensor) -> AttentionForwardArgs:
        """Return the arguments of attention_fwd for the settings of this call, and for the tensors in `packed`."""
        tensors = {"query": self.query, "key": self.key, "value": self.value, "sinks": self.sinks}
        lengths = {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_k": None, "seqused_k": self.seqused_k}
        args = tensors | lengths | packed
        return AttentionForwardArgs(**args, params=self.params, block_mode=self.block_mode)


def gathered(pool: Tensor, block_table: Tensor) -> Tensor:
    """Copy pages of a pool (pages, Hkv, rows of a page, ...) into (B * n * rows, Hkv, ...), sequence by sequence."""
    if not pool.shape[0]:
        return pool.new_zeros(block_table.numel() * pool.shape[2], pool.shape[1], *pool.shape[3:])
    rows = pool.transpose(1, 2)
    rows = rows.view(torch.uint8) if rows.element_size() == 1 else rows  # index_select supports few 8-bit dtypes
    rows = rows.index_select(0, block_table.flatten().long().clamp(0, pool.shape[0] - 1))
    return rows.view(pool.dtype).flatten(0, 1)


def tables_of_rows(
    cu_seqlens_q: Tensor, rows: int, block_table: Tensor, seqused_k: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return a block table and a KV length for each query row, where a sequence has at most one row.

    A row outside of all sequences gets KV length 0.
    """
    if not block_table.shape[0]:
        return block_table.new_zeros(rows, block_table.shape[1]), seqused_k.new_zeros(rows)
    row = torch.arange(rows, device=cu_seqlens_q.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), row, right=True).clamp(max=block_table.shape[0] - 1)
    in_sequence = (cu_seqlens_q[sequence] <= row) & (row < cu_seqlens_q[sequence + 1])
    return block_table[sequence], torch.where(in_sequence, seqused_k[sequence], 0)


def gathered_sequences(
    key: Tensor, value: Tensor, block_table: Tensor, seqused_k: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Copy all pages of the tables into packed keys and values.

    Returns:
        Keys (B * n * rows, Hkv, D), values (B * n * rows, Hkv, Dv), cu_seqlens_k (B + 1,) and KV lengths (B,), which
        are at most the capacity of a sequence.
    """
    check_page_numbers(block_table, seqused_k, key.shape[0], key.shape[2])
    capacity = block_table.shape[1] * key.shape[2]
    starts = torch.arange(block_table.shape[0] + 1, dtype=torch.int32, device=key.device) * capacity
    lengths = seqused_k.clamp(0, capacity if len(key) else 0)
    return gathered(key, block_table), gathered(value, block_table), starts, lengths


def check_page_numbers(block_table: Tensor, seqused_k: Tensor, num_pages: int, page_rows: int) -> None:
    """Raise ValueError if a page of visible keys is outside the pool. Checks plain CPU tensors only.

    On a GPU the host would wait for the values, and tracers know no values. A pool without pages has no visible keys.
    """
    is_plain = type(block_table) is Tensor and block_table.device.type == "cpu" and not torch.compiler.is_compiling()
    is_traced = torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.is_functorch_wrapped_tensor(block_table)
    if not num_pages or not is_plain or is_traced:
        return
    first_key = torch.arange(block_table.shape[1], device=block_table.device) * page_rows
    is_outside = (first_key < seqused_k.unsqueeze(1)) & ((block_table < 0) | (block_table >= num_pages))
    if is_outside.any():
        raise ValueError(
            f"attention: block_table must have page numbers from 0 to {num_pages - 1} for the first seqused_k keys, "
            f"but got {int(block_table[is_outside][0])}. Page numbers after these keys may have any value."
        )


def _check(a: PagedForwardArgs) -> None:
    """Raise RuntimeError if the arguments do not fit together. Reads sizes, hence for real tensors only."""
    query, key, value = a.query, a.key, a.value
    torch._check(
        query.dim() == key.dim() == value.dim() == 4 and key.shape[:3] == value.shape[:3]
        and query.shape[3] == key.shape[3] and key.shape[1] > 0 and query.shape[1] % key.shape[1] == 0,
        lambda: "paged_fwd: query, key and value must have shapes (B, Hq, Sq, D), (pages, Hkv, rows, D) and "
        "(pages, Hkv, rows, Dv), Hq a multiple of Hkv, "
        f"but got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}.",
    )  # fmt: skip
    table, lengths = a.block_table, a.seqused_k
    B = query.shape[0] if a.cu_seqlens_q is None else a.cu_seqlens_q.shape[0] - 1
    torch._check(
        table.dim() == 2 and lengths.shape == table.shape[:1] == (B,) and table.dtype == lengths.dtype == torch.int32
        and (a.cu_seqlens_q is None or query.shape[0] == 1),
        lambda: f"paged_fwd: block_table and seqused_k must be int32 (B, n) and (B,) with B = {B}, and packed queries "
        f"one batch, but got {table.dtype} {tuple(table.shape)}, {lengths.dtype} {tuple(lengths.shape)} and "
        f"{tuple(query.shape)}.",
    )  # fmt: skip


@held
@without_own_graph
def _math(*args: Tensor | int | float | None) -> tuple[Tensor, Tensor]:
    """Compute paged_fwd by gathering all pages."""
    a = PagedForwardArgs.from_op(*args)
    _check(a)
    B, Hq, Sq, _ = a.query.shape
    k, v, kv_starts, kv_lengths = gathered_sequences(a.key, a.value, a.block_table, a.seqused_k)
    cast_query = a.query
    if a.k_scale is not None:
        dtype = multiplied_in(a.query)
        scales = (gathered(s, a.block_table) for s in (a.k_scale, a.v_scale))
        k, v = (dequantized(x, s, dtype) for x, s in zip((k, v), scales, strict=True))
        cast_query = a.query.to(dtype)
    row_starts = torch.arange(B + 1, dtype=torch.int32, device=a.query.device) * Sq
    packed_args = a.as_attention(
        query=cast_query.transpose(0, 1).flatten(1, 2).unsqueeze(0),
        key=k.transpose(0, 1).unsqueeze(0),
        value=v.transpose(0, 1).unsqueeze(0),
        cu_seqlens_q=row_starts if a.cu_seqlens_q is None else a.cu_seqlens_q,
        cu_seqlens_k=kv_starts,
        seqused_k=kv_lengths,
    )
    result, lse = namespace.attention_fwd(*packed_args.to_op())
    out = empty_in_layout_of(a.query, (B, Hq, Sq, a.value.shape[3]))
    out.copy_(result.squeeze(0).unflatten(1, (B, Sq)).transpose(0, 1))
    return out, lse.squeeze(0).unflatten(1, (B, Sq)).transpose(0, 1).contiguous()


def _check_tables(cu_seqlens_q: Tensor | None, block_table: Tensor, seqused_k: Tensor) -> None:
    """Raise RuntimeError if tables and lengths do not fit together."""
    dtypes = {x.dtype for x in (cu_seqlens_q, block_table, seqused_k) if x is not None}
    dims = (1 if cu_seqlens_q is None else cu_seqlens_q.dim(), block_table.dim(), seqused_k.dim())
    fits = dtypes == {torch.int32} and dims == (1, 2, 1) and len(seqused_k) == len(block_table)
    torch._check(
        fits and (cu_seqlens_q is None or len(cu_seqlens_q) == len(block_table) + 1),
        lambda: (
            "varlen_attn: block_table (B, n), seqused_k (B,) and cu_seq_q (B + 1,) must be int32 and fit, but got "
            f"{block_table.dtype} {tuple(block_table.shape)}, {seqused_k.dtype} {tuple(seqused_k.shape)} and "
            + ("none" if cu_seqlens_q is None else f"{cu_seqlens_q.dtype} {tuple(cu_seqlens_q.shape)}")
            + ". Pass tables and lengths of the same sequences."
        ),
    )


@held
@without_own_graph
def _tables_of_rows(cu_seqlens_q: Tensor, rows: int, block_table: Tensor, seqused_k: Tensor) -> tuple[Tensor, Tensor]:
    _check_tables(cu_seqlens_q, block_table, seqused_k)
    tables, lengths = tables_of_rows(cu_seqlens_q, rows, block_table, seqused_k)
    return tables.contiguous(), lengths


@held
@without_own_graph
def _gathered_pages(
    key: Tensor, value: Tensor, block_table: Tensor, seqused_k: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check_tables(None, block_table, seqused_k)
    return gathered_sequences(key, value, block_table, seqused_k)


def _math_out(out: Tensor, *args: object) -> Tensor:
    result, lse = _math(*args)
    out.copy_(result)
    return lse


def _out_fake(out: Tensor, *args: object) -> Tensor:
    return empty_results(*args)[1]


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    """Save nothing for the backward."""


def _backward(ctx, *grads: Tensor | None) -> tuple:
    raise RuntimeError(
        "attention: gradients are not supported with block_table. Call attention() under torch.no_grad()."
    )


def _register() -> None:
    _library.impl("paged_fwd", _math, "CPU")
    _library.impl("paged_fwd_out", _math_out, "CPU")
    torch.library.register_fake("torch_flashplug::paged_fwd_out", _out_fake, lib=_library)
    _library.impl("_paged_math", _math, "CompositeExplicitAutograd")
    _library.impl("_tables_of_rows", _tables_of_rows, "CompositeExplicitAutograd")
    _library.impl("_gathered_pages", _gathered_pages, "CompositeExplicitAutograd")
    for name in ("paged_fwd", "_paged_math"):
        torch.library.register_fake(f"torch_flashplug::{name}", empty_results, lib=_library)
    torch.library.register_autograd(
        "torch_flashplug::paged_fwd", _backward, setup_context=_setup_context, lib=_library
    )  # fmt: skip


_register()
