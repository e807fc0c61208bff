"""Reduction for the bias gradient: the blocks of scores summed by a tile, and the order of the sums.

The dimensions are query blocks, key blocks, heads and batch. If the bias is broadcast along a dimension, each tile sums
all blocks of the dimension. Otherwise the blocks of the dimension are distributed over tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


@dataclass(frozen=True)
class DbiasBlock:
    """Block index along every dimension, or number of blocks along every dimension."""

    n: Int32  # key blocks
    m: Int32  # query blocks
    head: Int32
    batch: Int32

    @property
    def total(self) -> Int32:
        return self.n * self.m * self.head * self.batch


@dataclass(frozen=True)
class DbiasReduce:
    """Blocks of scores summed by each tile of a launch.

    Along heads and batch the gradient may have fewer planes than there are heads or batches. Each plane then sums a
    range of heads or batches. A range has length `ranges`, and the last range may be shorter. The host adds up the
    planes for the same place.
    """

    tiles: DbiasBlock  # number of tiles along every dimension
    ranges: DbiasBlock  # number of blocks summed by a tile along every dimension
    counts: DbiasBlock  # number of blocks along every dimension

    @classmethod
    def create(cls, blocks: DbiasBlock, gradient: cute.Tensor) -> DbiasReduce:
        """Create the reduction.

        Args:
            blocks: number of blocks along every dimension.
            gradient: gradient of the bias, (1 to B, 1 to Hq, Sq or 1, Sk or 1).
        """
        planes = (
            cutlass.select_(gradient.shape[3] > 1, blocks.n, Int32(1)),
            cutlass.select_(gradient.shape[2] > 1, blocks.m, Int32(1)),
            gradient.shape[1],
            gradient.shape[0],
        )
        counts = (blocks.n, blocks.m, blocks.head, blocks.batch)
        ranges = (cute.ceil_div(count, plane) for count, plane in zip(counts, planes))
        return cls(DbiasBlock(*planes), DbiasBlock(*ranges), blocks)

    def tile(self, number: Int32) -> DbiasBlock:
        """Return the first block of a tile. Query blocks are consecutive, so that CTAs share keys in L2."""
        tiles, ranges = self.tiles, self.ranges
        m, rest = number % tiles.m, number // tiles.m
        n, rest = rest % tiles.n, rest // tiles.n
        head, batch = rest % tiles.head, rest // tiles.head
        return DbiasBlock(n * ranges.n, m * ranges.m, head * ranges.head, batch * ranges.batch)

    def plane(self, first: DbiasBlock) -> tuple[Int32, Int32]:
        """Return the batch and head coordinates of the gradient plane written by a tile."""
        return first.batch // self.ranges.batch, first.head // self.ranges.head

    def steps(self, first: DbiasBlock) -> Int32:
        """Return the number of blocks summed by a tile. The last range of heads or batches may be shorter."""
        heads = cutlass.min(self.ranges.head, self.counts.head - first.head)
        batches = cutlass.min(self.ranges.batch, self.counts.batch - first.batch)
        return self.ranges.n * self.ranges.m * heads * batches

    def after(self, block: DbiasBlock) -> DbiasBlock:
        """Return the block that follows `block` in a tile."""
        n, over = following(block.n, self.ranges.n, self.counts.n)
        m, over = following(block.m, self.ranges.m, self.counts.m, over)
        head, over = following(block.head, self.ranges.head, self.counts.head, over)
        return DbiasBlock(n, m, head, block.batch + over)


def following(number: Int32, length: Int32, count: Int32, by: int | Int32 = 1) -> tuple[Int32, Int32]:
    """Return the index advanced by `by` (0 or 1) within its range, and 1 if the index wrapped around.

    Indices below `count` lie in ranges of `length`, the last of which may be shorter. The range follows from the index
    alone. Keeping the first index of the tile would occupy registers during the whole reduction.
    """
    further = number + by
    around = (further % length == 0) | (further >= count)
    if not isinstance(by, int):
        around = around & (by > 0)
    return cutlass.select_(around, number // length * length, further), Int32(around)


@cute.jit
def write_pair(plane: cute.Tensor, row: Int32, column: Int32, low: Float32, high: Float32):
    """Write two adjacent elements of a row of a gradient plane (rows, keys).

    The row may end before either element. Rows may begin at any address.
    """
    dtype = plane.element_type
    pair = cute.make_rmem_tensor((2,), dtype)
    pair[0], pair[1] = low.to(dtype), high.to(dtype)
    address = (plane.iterator + Int64(row) * plane.stride[0] + column).toint()
    if (column + 1 < plane.shape[1]) & (address & (dtype.width // 4 - 1) == 0):
        target = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 4)
        cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(2)))
    else:
        for i in cutlass.range_constexpr(2):
            if column + i < plane.shape[1]:
                plane[row, column + i] = pair[i]
