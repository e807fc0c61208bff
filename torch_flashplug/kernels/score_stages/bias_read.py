"""Bias stages in which threads read the bias directly from global memory, each thread for its own scores.

These stages serve kernels whose shared memory has no space for bias tiles, and calls whose rows are fewer than those of
a tile (score_stages/bias.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..primitives.fragments import column_of
from .natural_units import add, natural
from .pipeline import ScoreCoord, ScoreStage

if TYPE_CHECKING:
    from ..call_args.kernel_call import SoftmaxScale

PAIR = 2  # neighboring columns of a thread


@dataclass(frozen=True)
class DirectBias(ScoreStage):
    """Bias of a call, read from global memory."""

    bias: cute.Tensor  # (B, Hq, Sq, Sk), rows of any stride at any address
    scale: Float32  # softmax scale
    applies_to_full_blocks = natural_units = True

    def scales(self, scales: SoftmaxScale) -> SoftmaxScale:
        return natural(scales)

    def natural_scale(self, scale: Float32) -> Float32:
        return Float32(1.0)

    def set_tile(self, coord: ScoreCoord) -> ScoreStage:
        """Return the stage for a thread's coordinate. Rows behind the last row read the bias of the last row."""
        if coord.transposed:
            return ColumnBias(self.bias, self.scale, coord, coord.head)
        last = self.bias.shape[2] - 1
        rows = ((coord.sequence, coord.head, cutlass.min(coord.row + 8 * r, last)) for r in range(2))
        return RowBias(self.bias, self.scale, coord, starts_of(rows, self.bias))


def starts_of(rows: Iterable[tuple[Int32, Int32, Int32]], bias: cute.Tensor) -> tuple[Int64, ...]:
    """Return the element offset of each line, given by batch, head and query."""
    return tuple(sum(Int64(i) * stride for i, stride in zip(row, bias.stride[:3], strict=True)) for row in rows)


@dataclass(frozen=True)
class RowBias(DirectBias):
    """Bias stage for scores (queries, keys): a thread reads two rows."""

    coord: ScoreCoord
    starts: tuple[Int64, ...]  # element offsets of the two rows

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        values = allocate_rows(self.bias, cute.size(S, mode=[1]))
        self.read(block, values)
        add(S, self.scale, values)

    @cute.jit
    def read(self, block: Int32, values: cute.Tensor):
        """Read the bias of a block into `values` (2, columns), in pairs where alignment and bounds allow."""
        keys, first = self.bias.shape[3], block * self.coord.block_columns + self.coord.column
        is_full_block = (block + 1) * self.coord.block_columns <= keys
        pair_bytes = PAIR * self.bias.element_type.width // 8
        for r in cutlass.range_constexpr(2):
            row_start = self.bias.iterator + self.starts[r]
            in_pairs = is_full_block
            if cutlass.const_expr(self.bias.iterator.alignment < pair_bytes):
                # A thread's first column is even.
                in_pairs = is_full_block & (row_start.toint() & (pair_bytes - 1) == 0)
            for c in cutlass.range_constexpr(0, cute.size(values, mode=[1]), PAIR):
                key = first + column_of(c)
                if in_pairs:
                    pair = cute.make_tensor(values[r, None].iterator + c, cute.make_layout(PAIR))
                    cute.autovec_copy(self.pair_at(row_start + key), pair)
                else:
                    for i in cutlass.range_constexpr(PAIR):
                        element = cute.make_tensor(row_start + cutlass.min(key + i, keys - 1), cute.make_layout(1))
                        values[r, c + i] = element[0]

    def pair_at(self, start: cute.Pointer) -> cute.Tensor:
        """Return a view of an aligned pair of values in global memory."""
        dtype = self.bias.element_type
        aligned = cute.make_ptr(dtype, start.toint(), cute.AddressSpace.gmem, assumed_align=PAIR * dtype.width // 8)
        return cute.make_tensor(aligned, cute.make_layout(PAIR))


def allocate_rows(bias: cute.Tensor, columns: int) -> cute.Tensor:
    """Return registers for `columns` columns of two rows; the rows are not interleaved."""
    return cute.make_rmem_tensor(cute.make_layout((2, columns), stride=(columns, 1)), bias.element_type)


@dataclass(frozen=True)
class ColumnBias(DirectBias):
    """Bias stage for transposed scores (keys, queries), as in the backward: values are read singly."""

    coord: ScoreCoord
    head: Int32 | None = None

    def of_head(self, head: Int32) -> ScoreStage:
        return replace(self, head=head)

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        _, _, queries, keys = self.bias.shape
        plane = self.bias[self.coord.sequence, self.head, None, None]
        values = allocate_rows(self.bias, cute.size(S, mode=[1]))
        for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
            query = cutlass.min(block * self.coord.block_columns + self.coord.column + column_of(c), queries - 1)
            for r in cutlass.range_constexpr(2):
                values[r, c] = plane[query, cutlass.min(self.coord.row + 8 * r, keys - 1)]
        add(S, self.scale, values)
