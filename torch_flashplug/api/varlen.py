"""Variants of `attention()`: packed sequences, KV caches with KV lengths, paged KV caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ops import paged
from ..ops.attention import NO_PLAN, AttentionParams
from ..torch_hooks import describe_call
from .attention_args import (
    DENSE_RULE,
    NO_SCALES,
    Scales,
    call_op_with_out,
    check_dtypes,
    check_operands,
    check_rank,
    check_split_size,
    dequantize_to_16bit,
    has_kernel,
    heads_fit,
    is_decode_call,
    is_differentiated,
    is_shared_decode_call,
    normalize_kv_scales,
    normalize_sinks,
    refuse_forward_mode,
)
from .varlen_args import Lengths, check_int32_vector, check_varlen

if TYPE_CHECKING:
    from .varlen_plan import VarlenPlan

_OTHER_PLAN = "plan was made for another call"  # text of an error in src/operands/varlen_tile_list.cpp
# In the functions below, `out_buffer` is the output tensor of the caller, shaped as the result.


def varlen_attention(
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, lengths: Lengths, params: AttentionParams,
    scales: Scales = NO_SCALES, out_buffer: Tensor | None = None, plan: VarlenPlan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend within packed sequences; return the output (T, Hq, Dv) and the LSE (Hq, T)."""
    (q, k, _), is_quantized = operands, check_varlen(operands, lengths)
    if plan is not None:
        plan.check(q, k, lengths, params.window)
    batch = [x.unsqueeze(0) for x in operands]
    contiguous_lengths = (None if x is None else x.contiguous() for x in lengths)
    query, *pair = (x.transpose(1, 2) for x in batch)
    out_buffer = None if out_buffer is None else out_buffer.unsqueeze(0).transpose(1, 2)
    batch = dequantize_to_16bit(query, *pair, *normalize_kv_scales(is_quantized, scales, *pair))
    out, lse = _attended(plan, out_buffer, *batch, normalize_sinks(sinks, q), *contiguous_lengths, *params)
    out = out.transpose(1, 2).squeeze(0)
    return out.to(q.dtype) if is_quantized else out, lse.squeeze(0)


def _attended(plan: VarlenPlan | None, out_buffer: Tensor | None, *op_args: object) -> tuple[Tensor, Tensor]:
    """Call attention_fwd; raise a kernel's RuntimeError about the plan as a ValueError about the argument."""
    if plan is None or torch.compiler.is_compiling():
        return call_op_with_out("attention_fwd", out_buffer, *op_args, *(NO_PLAN if plan is None else plan.op_args))
    try:
        return call_op_with_out("attention_fwd", out_buffer, *op_args, *plan.op_args)
    except RuntimeError as error:
        if _OTHER_PLAN not in str(error):
            raise
        raise ValueError(f"attention: {_OTHER_PLAN}{str(error).partition(_OTHER_PLAN)[2].splitlines()[0]}") from None


def kv_length_attention(
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, kv_lengths: Tensor, params: AttentionParams,
    scales: Scales = NO_SCALES, out_buffer: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend to the first `kv_lengths` keys of each sequence; return (B, Sq, Hq, Dv) and the LSE (B, Hq, Sq)."""
    check_operands(*operands)
    (q, k, _), is_quantized = operands, check_dtypes(*operands)
    check_int32_vector("seqused_k", kv_lengths, "batch", q.device)
    if kv_lengths.shape[0] != q.shape[0]:
        raise ValueError(
            f"attention: seqused_k must have shape (batch,) = ({q.shape[0]},), but got {tuple(kv_lengths.shape)}. "
            "Pass one KV length for each sequence."
        )
    refuse_forward_mode()
    transposed = [x.transpose(1, 2) for x in operands]
    kv_scales = normalize_kv_scales(is_quantized, scales, *transposed[1:])
    transposed = transposed if is_quantized else describe_call.under_autocast(q.device.type, *transposed)
    if is_decode_call(*transposed) or is_shared_decode_call(*transposed):  # the cache of each sequence is one page
        check_split_size(params, transposed[0], transposed[2], k.shape[1])
        pages = torch.arange(q.shape[0], dtype=torch.int32, device=q.device).unsqueeze(1)
        out_buffer = None if out_buffer is None else out_buffer.transpose(1, 2)
        op_args = (*transposed, pages, kv_lengths.contiguous(), *map(_packed, kv_scales), normalize_sinks(sinks, q))
        out, lse = call_op_with_out("paged_fwd", out_buffer, *op_args, *params, None)
        return out.transpose(1, 2), lse
    transposed = dequantize_to_16bit(*transposed, *kv_scales)
    rows, *keys = (x.transpose(1, 2) for x in transposed)
    packed_kv = [pack_rows(x) for x in keys]
    if packed_kv[0][1] != packed_kv[1][1] or not has_kernel(*transposed):
        packed_kv = [(x.flatten(0, 1), k.shape[1]) for x in keys]
    steps = (q.shape[1], packed_kv[0][1])
    starts = [torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * step for step in steps]
    starts[1][-1:].clamp_(max=packed_kv[0][0].shape[0])
    lengths = (*starts, kv_lengths.clamp(max=k.shape[1]))
    out, lse = varlen_attention((rows.flatten(0, 1), *(x for x, _ in packed_kv)), sinks, lengths, params)
    out = out.unflatten(0, q.shape[:2]).to(q.dtype if is_quantized else out.dtype)
    return out if out_buffer is None else out_buffer.copy_(out), lse.unflatten(1, q.shape[:2]).transpose(0, 1)


def _packed(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.contiguous()


def paged_attention(  # noqa: PLR0913
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, block_table: Tensor, lengths: Lengths,
    scales: Scales, params: AttentionParams, max_seqlen_q: int | None, out_buffer: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend to a paged KV cache; return the output and the LSE, dense or packed as `q` is.

    Args:
        operands: `q` (B, Sq, Hq, D), or packed (T, Hq, D), and the pools of k and v.
        sinks: Sinks (Hq,) or None.
        block_table: Page numbers (B, n).
        lengths: `cu_seqlens_q`, `cu_seqlens_k` and `seqused_k`.
        scales: Scales of 8-bit k and v.
        params: Settings of the call.
        max_seqlen_q: Largest number of query rows of a sequence, if known.
        out_buffer: The caller's output tensor, or None.
    """
    (q, k, v), (cu_seqlens_q, cu_seqlens_k, seqused_k) = operands, lengths
    if cu_seqlens_k is not None:
        raise ValueError(
            "attention: cu_seqlens_k is not supported together with block_table. Pass seqused_k of shape (batch,)."
        )
    if cu_seqlens_q is not None:
        check_rank("q", q, 3, "a tensor of shape (tokens, heads, head dim) with cu_seqlens_q")
        check_int32_vector("cu_seqlens_q", cu_seqlens_q, "sequences + 1", q.device)
        check_pages(q.unsqueeze(0), k, v, block_table, seqused_k, cu_seqlens_q.shape[0] - 1)
        if type(max_seqlen_q) is not int or max_seqlen_q != 1:
            packed = (operands, sinks, block_table, (cu_seqlens_q, seqused_k), params)
            if check_dtypes(*operands) or is_differentiated(*operands):
                return _gather_pages_then_attend(*packed, scales, out_buffer)
            normalize_kv_scales(False, scales, k, v)  # raises an error for scales
            return _attend_to_pages(*packed, out_buffer)
        block_table, seqused_k = paged.tables_of_rows(cu_seqlens_q, q.shape[0], block_table, seqused_k)
    batch = q if cu_seqlens_q is None else q.unsqueeze(1)
    check_rank("q", batch, 4, DENSE_RULE)
    check_pages(batch, k, v, block_table, seqused_k, batch.shape[0])
    refuse_forward_mode()
    query, *pools = (x.transpose(1, 2) for x in (batch, k, v))
    is_quantized = check_dtypes(batch, k, v)
    check_split_size(params, query, pools[1], block_table.shape[1] * k.shape[1])
    kv_scales = map(_packed, normalize_kv_scales(is_quantized, scales, *pools, paged=True))
    if not is_quantized:
        query, *pools = describe_call.under_autocast(q.device.type, query, *pools)
    tables = (block_table.contiguous(), seqused_k.contiguous())
    op_args = (query, *pools, *tables, *kv_scales, normalize_sinks(sinks, batch), *params, None)
    if out_buffer is not None:
        out_buffer = (out_buffer if cu_seqlens_q is None else out_buffer.unsqueeze(1)).transpose(1, 2)
    out, lse = call_op_with_out("paged_fwd", out_buffer, *op_args)
    out = out.transpose(1, 2)
    return (out, lse) if cu_seqlens_q is None else (out.squeeze(1), lse.squeeze(2).transpose(0, 1))


def _attend_to_pages(
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, block_table: Tensor,
    lengths: tuple[Tensor, Tensor], params: AttentionParams, out_buffer: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend with packed queries to pages in 16 bits or more; return (T, Hq, Dv) and (Hq, T).

    The op selects a kernel that reads the pages in place, or gathers the pages.
    """
    (q, k, v), (cu_seqlens_q, seqused_k) = operands, lengths
    refuse_forward_mode()
    query, *pools = describe_call.under_autocast(q.device.type, *(x.transpose(-3, -2) for x in (q.unsqueeze(0), k, v)))
    tables = (block_table.contiguous(), seqused_k.contiguous())
    op_args = (query, *pools, *tables, None, None, normalize_sinks(sinks, q), *params, cu_seqlens_q.contiguous())
    out_buffer = None if out_buffer is None else out_buffer.unsqueeze(0).transpose(1, 2)
    out, lse = call_op_with_out("paged_fwd", out_buffer, *op_args)
    return out.transpose(1, 2).squeeze(0), lse.squeeze(0)


def _gather_pages_then_attend(
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, block_table: Tensor,
    lengths: tuple[Tensor, Tensor], params: AttentionParams, scales: Scales, out_buffer: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Copy all pages of the tables into packed keys and values, then attend; return (T, Hq, Dv) and (Hq, T).

    Sequences may have any number of query rows.
    """
    (q, *pools), (cu_seqlens_q, seqused_k) = operands, lengths
    pools = [x.transpose(1, 2) for x in pools]
    kv_scales = normalize_kv_scales(check_dtypes(*operands), scales, *pools, paged=True)
    kv_scales = tuple(None if x is None else paged.gathered(x, block_table).T.unsqueeze(0) for x in kv_scales)
    *rows, kv_starts, kv_lengths = paged.gathered_sequences(*pools, block_table, seqused_k)
    return varlen_attention((q, *rows), sinks, (cu_seqlens_q, kv_starts, kv_lengths), params, kv_scales, out_buffer)


def check_pages(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, seqused_k: Tensor | None, B: int) -> None:
    """Check q (..., Hq, D) of B sequences against pools of pages (pages, rows, Hkv, D)."""
    if not isinstance(block_table, Tensor) or block_table.dim() != 2 or block_table.dtype != torch.int32:
        table = f"{block_table.dtype} {tuple(block_table.shape)}" if isinstance(block_table, Tensor) else block_table
        raise ValueError(
            f"attention: block_table must be an int32 tensor of shape (batch, pages of a sequence), but got {table}."
        )
    if seqused_k is None:
        raise ValueError("attention: block_table needs seqused_k. Pass the KV lengths, shape (batch,).")
    for name, x in (("k", k), ("v", v)):
        check_rank(name, x, 4, "a pool of shape (pages, rows of a page, heads, head dim) with block_table")
    check_int32_vector("seqused_k", seqused_k, "batch", q.device)
    if not q.device == k.device == v.device == block_table.device:
        devices = f"{q.device}, {k.device}, {v.device}, {block_table.device}"
        raise ValueError(f"attention: q, k, v and block_table must be on one device, but are on {devices}.")
    (Hq, D), (*pool, Hkv, _) = q.shape[-2:], k.shape
    fits = k.shape[3] == D and v.shape[:3] == (*pool, Hkv) and heads_fit(Hq, Hkv)
    if not fits or seqused_k.shape[0] != B or block_table.shape[0] != B:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, block_table, seqused_k))
        raise ValueError(
            "attention: q (B, Sq, Hq, D), k and v (pages, rows, Hkv, D), block_table (B, n) and seqused_k (B,) must "
            f"fit, but have shapes {shapes}."
        )


def pack_rows(x: Tensor) -> tuple[Tensor, int]:
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
