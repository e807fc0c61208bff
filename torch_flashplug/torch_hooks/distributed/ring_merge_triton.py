"""Triton kernels of ring_merge.py.

A Triton program processes some rows of one head. Each element is read once and written once. The module imports Triton,
so the import comes with the first merge on a GPU and not before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096  # elements per Triton program


@triton.jit
def _merge(
    out, lse, step_out, step_lse, heads, rows, all_rows, first, dims,
    out_b, out_h, out_s, step_b, step_h, step_s, ROWS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    lse_index = head * all_rows + first + row
    old = tl.load(lse + lse_index, mask=row < rows, other=0.0)
    new = tl.load(step_lse + head * rows + row, mask=row < rows, other=0.0)
    max_lse = tl.maximum(old, new)
    max_lse = tl.where(max_lse == float("-inf"), 0.0, max_lse)
    old_sum, new_sum = tl.exp(old - max_lse), tl.exp(new - max_lse)
    sum_ = old_sum + new_sum
    is_visible = sum_ > 0.0
    weight = tl.where(is_visible, new_sum / tl.where(is_visible, sum_, 1.0), 0.0)
    tl.store(lse + lse_index, tl.where(is_visible, max_lse + tl.log(sum_), float("-inf")), mask=row < rows)
    in_bounds = (row < rows)[:, None] & (dim < dims)[None, :]
    out_address = out + b * out_b + h * out_h + (first + row).to(tl.int64)[:, None] * out_s + dim[None, :]
    step_address = step_out + b * step_b + h * step_h + row.to(tl.int64)[:, None] * step_s + dim[None, :]
    out_value = tl.load(out_address, mask=in_bounds, other=0.0).to(tl.float32)
    step_value = tl.load(step_address, mask=in_bounds, other=0.0).to(tl.float32)
    tl.store(
        out_address, (out_value + weight[:, None] * (step_value - out_value)).to(out.dtype.element_ty), mask=in_bounds
    )


@triton.jit
def _add(
    total, part, heads, rows, first, dims,
    total_b, total_h, total_s, part_b, part_h, part_s, ROWS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    dim = tl.arange(0, DIMS)
    in_bounds = (row < rows)[:, None] & (dim < dims)[None, :]
    total_address = total + b * total_b + h * total_h + (first + row)[:, None] * total_s + dim[None, :]
    part_address = part + b * part_b + h * part_h + row[:, None] * part_s + dim[None, :]
    sum_ = tl.load(total_address, mask=in_bounds, other=0.0).to(tl.float32) + tl.load(
        part_address, mask=in_bounds, other=0.0
    ).to(tl.float32)
    tl.store(total_address, sum_.to(total.dtype.element_ty), mask=in_bounds)


def _grid(part: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    B, H, S, D = part.shape
    dims = triton.next_power_of_2(D)
    rows = max(1, _ELEMENTS // dims)
    return (B * H, triton.cdiv(S, rows)), {"ROWS": rows, "DIMS": dims}


def merge(out: Tensor, lse: Tensor, step_out: Tensor, step_lse: Tensor, first: int) -> None:
    """Merge a step's output and LSE in place by the Triton kernel; the arguments are explained at merge_in_torch."""
    _, H, S, D = step_out.shape
    grid, sizes = _grid(step_out)
    with torch.cuda.device_of(out):
        _merge[grid](out, lse, step_out, step_lse, H, S, out.shape[2], first, D, *out.stride()[:3],
                     *step_out.stride()[:3], **sizes)  # fmt: skip


def add(total: Tensor, part: Tensor, first: int) -> None:
    """Add `part` to the rows of `total` from `first` on, in place, by the Triton kernel."""
    _, H, S, D = part.shape
    grid, sizes = _grid(part)
    with torch.cuda.device_of(total):
        _add[grid](total, part, H, S, first, D, *total.stride()[:3], *part.stride()[:3], **sizes)


def try_out(device: str) -> None:
    """Run both kernels once; a kernel that does not compile raises."""
    out, lse = torch.zeros(1, 2, 4, 8, device=device), torch.zeros(1, 2, 4, device=device)
    merge(out, lse, out.bfloat16(), lse.clone(), 0)
    add(out, out.bfloat16(), 0)
