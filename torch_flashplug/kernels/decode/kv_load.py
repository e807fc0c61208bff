"""KV loader of decode kernels: the memory format of K and V, and the product that reads K and V.

The classes in this module handle 16-bit K and V, which need no conversion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass.cute as cute
from cutlass import Int32

from ..primitives import sm80
from ..primitives.dtype import Element
from ..primitives.fragments import OperandA, column_of

if TYPE_CHECKING:
    from .pack_gqa import DecodeTile

PAIR = 2  # adjacent columns of a thread
K, V = 0, 1


@dataclass(frozen=True)
class KvScaleLoader:
    """Loader of additional data per key, such as scales. This class loads nothing."""

    def load(self, which: int, first: Int32, stage: Int32, threads: int) -> None:
        """Start loading the data of a block into a stage.

        Args:
            which: K or V.
            first: first key of the block.
            stage: stage index.
            threads: threads of the team that loads the block.
        """

    def scale(self, S: cute.Tensor, stage: Int32) -> None:
        """Multiply the scores (2, columns) of a block by the scales of K, if any."""

    def weights(self, stage: Int32, columns: int) -> object:
        """Return the function applied to probabilities before the product with V, or None (OperandA.convert)."""


@dataclass(frozen=True)
class KvLoader:
    """KV loader for 16-bit K and V. The class has no fields, so a kernel needs no argument."""

    def columns(self, dim: int) -> int:
        """Return the number of 16-bit columns in shared memory for a row of `dim` numbers."""
        return dim

    def of_head(self, decode_tile: DecodeTile, x: cute.Tensor) -> cute.Tensor:
        """Return K or V of the part's KV head, (Sk, columns of 16 bits)."""
        return decode_tile.of_head(x)

    def load(self, mover: sm80.SmemCopier, x: cute.Tensor, first_row: Int32, tile: sm80.SmemTile) -> None:
        """Load rows of a tensor returned by `of_head`, as `SmemCopier.load`."""
        mover.load(x, first_row, tile)

    def scale_loader(self, decode_tile: DecodeTile, start: Int32, keys: int, stages: int) -> KvScaleLoader:
        """Return the loader of additional data per key.

        Args:
            decode_tile: tile of packed rows, and split of the keys.
            start: shared-memory address of the team's data.
            keys: keys of a stage.
            stages: number of stages.
        """
        return KvScaleLoader()

    def transform_queries(
        self, q: sm80.SmemTile, decode_tile: DecodeTile, D: Int32, element: Element, warps: int
    ) -> None:
        """Transform the queries in shared memory to the layout required by the product with K.

        All threads call `transform_queries`. The queries must be visible to all threads before
        the call, and are visible to all threads afterwards.
        """

    def product(self, element: Element) -> sm80.MmaProduct:
        return sm80.MmaProduct.create(element.dtype)

    def left_operand(self, acc: cute.Tensor, element: Element) -> OperandA:
        """Return registers for P with the columns of an accumulator."""
        return OperandA.create(acc, element)

    def output_columns(self, output: cute.Tensor, row: int) -> list[tuple[Int32, list]]:
        """Return the columns of a row of results that the thread holds.

        The product of the loader decides on the order of the columns. The decode kernel stores the values of each run
        of columns as one vector, into the fp32 results of the thread's team in shared memory.

        Args:
            output: the accumulator of the thread (2, columns).
            row: 0 for the first row of the thread, 1 for the row eight below.

        Returns:
            A list of (first column, values of consecutive columns).
        """
        first = cute.arch.lane_idx() % 4 * PAIR
        columns = range(0, cute.size(output, mode=[1]), PAIR)
        return [(first + column_of(c), [output[row, c], output[row, c + 1]]) for c in columns]
