"""K and V of a decode as they lie in memory, and what multiplies them; here in 16 bits, as they are multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass.cute as cute
from cutlass import Int32

from ..primitives import sm80
from ..primitives.dtype import Element
from ..primitives.fragments import OperandA, column_of

if TYPE_CHECKING:
    from .pack_gqa import Part

PAIR = 2  # neighbouring columns of a thread
K, V = 0, 1


@dataclass(frozen=True)
class Beside:
    """What keys of a ring's blocks have beside K and V: nothing."""

    def load(self, which: int, first: Int32, slot: Int32, threads: int) -> None:
        """A team's of one block, from its first key on, on their way into a slot; which: K or V."""

    def scale(self, S: cute.Tensor, slot: Int32) -> None:
        """Scores (2, columns) of a block."""

    def weights(self, slot: Int32, columns: int) -> object:
        """What happens to probabilities on their way to the product with V (OperandA.take)."""


@dataclass(frozen=True)
class Stored:
    """How a kernel with this seam reads K and V. Holds nothing, so that a kernel has no argument for it."""

    def columns(self, dim: int) -> int:
        """Of 16 bits, in shared memory, of a row of so many numbers."""
        return dim

    def of_head(self, part: Part, x: cute.Tensor) -> cute.Tensor:
        """K or V of a part's KV head, (Sk, columns of 16 bits)."""
        return part.of_head(x)

    def load(self, mover: sm80.Mover, x: cute.Tensor, first_row: Int32, tile: sm80.Tile) -> None:
        """Rows of what `of_head` gave, as Mover.load."""
        mover.load(x, first_row, tile)

    def beside(self, part: Part, start: Int32, keys: int, stages: int) -> Beside:
        """start: of what a team has in shared memory for so many keys of every stage."""
        return Beside()

    def turn(self, q: sm80.Tile, part: Part, D: Int32, element: Element, warps: int) -> None:
        """All threads: queries, there for all, as the product with K wants them; there for all again afterwards."""

    def product(self, element: Element) -> sm80.Product:
        return sm80.Product.create(element.dtype)

    def left_operand(self, acc: cute.Tensor, element: Element) -> OperandA:
        """Room for P of an accumulator's columns."""
        return OperandA.create(acc, element)

    def pieces(self, output: cute.Tensor, row: int) -> list[tuple[Int32, list]]:
        """Columns that a thread has of a row of O (2, columns): the first, and what lies there on end."""
        first = cute.arch.lane_idx() % 4 * PAIR
        columns = range(0, cute.size(output, mode=[1]), PAIR)
        return [(first + column_of(c), [output[row, c], output[row, c + 1]]) for c in columns]
