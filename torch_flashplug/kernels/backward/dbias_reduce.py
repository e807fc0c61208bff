"""Which blocks of scores add up to a place of a bias's gradient, and in which order. Along every dim - blocks of
queries and of keys, heads, batch - a bias is broadcast, so that each tile sums all there are, or it is not, and tiles
share them.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


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
    """Which blocks of scores each tile of a launch adds up.

    Along heads and batch the gradient may have fewer planes than there are heads or batches: each plane then sums a
    range of them, `ranges` long, of which the last one may be shorter. The host adds up the planes of one place.
    """

    tiles: Block  # how many tiles along every dim
    ranges: Block  # how many blocks a tile sums along every dim
    counts: Block  # how many blocks there are along every dim

    @classmethod
    def create(cls, blocks: Block, gradient: cute.Tensor) -> Summed:
        """gradient: (1 to B, 1 to Hq, Sq or 1, Sk or 1)."""
        planes = (
            cutlass.select_(gradient.shape[3] > 1, blocks.n, Int32(1)),
            cutlass.select_(gradient.shape[2] > 1, blocks.m, Int32(1)),
            gradient.shape[1],
            gradient.shape[0],
        )
        counts = (blocks.n, blocks.m, blocks.head, blocks.batch)
        ranges = (cute.ceil_div(count, plane) for count, plane in zip(counts, planes))
        return cls(Block(*planes), Block(*ranges), blocks)

    def tile(self, number: Int32) -> Block:
        """Return the first block of a tile. Blocks of queries follow each other, so that CTAs share keys in L2."""
        tiles, ranges = self.tiles, self.ranges
        m, rest = number % tiles.m, number // tiles.m
        n, rest = rest % tiles.n, rest // tiles.n
        head, batch = rest % tiles.head, rest // tiles.head
        return Block(n * ranges.n, m * ranges.m, head * ranges.head, batch * ranges.batch)

    def plane(self, first: Block) -> tuple[Int32, Int32]:
        """Return the batch and head coordinates of the gradient's plane that a tile writes."""
        return first.batch // self.ranges.batch, first.head // self.ranges.head

    def steps(self, first: Block) -> Int32:
        """Return how many blocks a tile sums. The last range of heads or batches may be shorter."""
        heads = cutlass.min(self.ranges.head, self.counts.head - first.head)
        batches = cutlass.min(self.ranges.batch, self.counts.batch - first.batch)
        return self.ranges.n * self.ranges.m * heads * batches

    def after(self, block: Block) -> Block:
        """Return the block that follows in a tile."""
        n, over = following(block.n, self.ranges.n, self.counts.n)
        m, over = following(block.m, self.ranges.m, self.counts.m, over)
        head, over = following(block.head, self.ranges.head, self.counts.head, over)
        return Block(n, m, head, block.batch + over)


def following(number: Int32, length: Int32, count: Int32, by: int | Int32 = 1) -> tuple[Int32, Int32]:
    """Return the number that is `by` (0 or 1) further in its range, and whether that was once around.

    Numbers below `count` lie in ranges of `length`, the last of which may be shorter. The range follows from the number
    alone: what a tile began with would take registers for as long as the tile is summed.
    """
    further = number + by
    around = (further % length == 0) | (further >= count)
    if not isinstance(by, int):
        around = around & (by > 0)
    return cutlass.select_(around, number // length * length, further), Int32(around)


@cute.jit
def write_pair(plane: cute.Tensor, row: Int32, column: Int32, low: Float32, high: Float32):
    """Write two neighbours of a row of a gradient's plane (rows, keys), which may end before either of them. Rows may
    begin at any address.
    """
    dtype = plane.element_type
    pair = cute.make_rmem_tensor((2,), dtype)
    pair[0], pair[1] = low.to(dtype), high.to(dtype)
    address = (plane.iterator + Int64(row) * plane.stride[0] + column).toint()
    if (column + 1 < plane.shape[1]) & (address & (dtype.width // 4 - 1) == 0):
        there = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 4)
        cute.autovec_copy(pair, cute.make_tensor(there, cute.make_layout(2)))
    else:
        for i in cutlass.range_constexpr(2):
            if column + i < plane.shape[1]:
                plane[row, column + i] = pair[i]
