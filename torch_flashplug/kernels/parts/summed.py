"""Which blocks of scores add up to a place of a bias's gradient, and in which order. Along every dim - blocks of
queries and of keys, heads, batch - a bias is broadcast, so that each tile sums all there are, or it is not, and tiles
share them.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class Block:
    """One of them by its number along every dim; or how many there are."""

    n: Int32  # of keys
    m: Int32  # of queries
    head: Int32
    batch: Int32

    @property
    def total(self) -> Int32:
        return self.n * self.m * self.head * self.batch


@dataclass(frozen=True)
class Summed:
    """Of a launch: tiles along every dim, and what each of them sums. One of both is 1."""

    tiles: Block
    steps: Block

    @classmethod
    def create(cls, blocks: Block, gradient: cute.Tensor) -> Summed:
        """gradient: (B or 1, Hq or 1, Sq or 1, Sk or 1)."""
        dims = ((blocks.n, 3), (blocks.m, 2), (blocks.head, 1), (blocks.batch, 0))
        wide = [(count, gradient.shape[dim] > 1) for count, dim in dims]
        tiles = (cutlass.select_(there, count, Int32(1)) for count, there in wide)
        steps = (cutlass.select_(there, Int32(1), count) for count, there in wide)
        return cls(Block(*tiles), Block(*steps))

    def tile(self, number: Int32) -> Block:
        """The first block of a tile. Blocks of queries follow each other, so that CTAs share keys in L2."""
        tiles = self.tiles
        m, rest = number % tiles.m, number // tiles.m
        n, rest = rest % tiles.n, rest // tiles.n
        return Block(n, m, rest % tiles.head, rest // tiles.head)

    def after(self, block: Block, first: Block) -> Block:
        """The next one of a tile; first: of the tile."""
        n, over = following(block.n, first.n, self.steps.n)
        m, over = following(block.m, first.m, self.steps.m, over)
        head, over = following(block.head, first.head, self.steps.head, over)
        return Block(n, m, head, block.batch + over)


def following(number: Int32, first: Int32, count: Int32, by: int | Int32 = 1) -> tuple[Int32, Int32]:
    """One of `count` numbers, `by` (0 or 1) further, and whether that was once around."""
    further = number + by
    around = further >= first + count
    return cutlass.select_(around, first, further), Int32(around)
