"""Block-sparse iterators: attention over lists of blocks (FlashAttention, arXiv 2205.14135, section 3.3).

The lists are the tensors of a FlexAttention BlockMask, unchanged: padded, int32, for blocks of SPARSE_BLOCK queries and
keys. Each row of blocks has a list of partial blocks and a list of full blocks. The metadata of a bool mask also
contains lists for blocks of SPARSE_BLOCK_M_192 x SPARSE_BLOCK. A score stage applies the bitmask inside a partial block
(score_stages/bitmask.py).

A tile may be smaller than a listed block. The iterator then visits the parts of each listed block with the size of
the tile. The first block of a forward tile and the last block of a dQ tile count as masked in either list. No score is
lost, because the bitmask of a full block is all ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from ...registry.kernel_spec import SPARSE_BLOCK, SPARSE_BLOCK_M_192
from ...registry.mask_layout import INDEX_BITS
from ..primitives.fragments import zero_of
from .block_iterator import BlockIterator, BlockRange, BlockSubrange, KvBlocks, WarpgroupKvRange
from .seqlen_info import SeqlenInfo
from .tile import Tile


@dataclass(frozen=True)
class BlockSparseLists:
    """Contiguous block-sparse lists of one direction.

    There are R rows of blocks of all planes, with a capacity of C blocks per row.

    Plane (batch, head) begins at row batch * rows_of_batch + head * rows_of_head. A factor of 0 broadcasts the plane.
    """

    partial_count: cute.Tensor  # (R,) Int32
    partial: cute.Tensor  # (R, C) Int32
    full_count: cute.Tensor  # (R,) Int32
    full: cute.Tensor  # (R, C) Int32
    rows_of_batch: Int32
    rows_of_head: Int32
    # Set if KV blocks accumulate in a fixed order. Each value counts the later ranges of ORDER_BLOCK_N keys with the
    # same block in the list.
    partial_rank: cute.Tensor | None = None
    full_rank: cute.Tensor | None = None

    def row(self, batch: Int32, head: Int32, row: Int32) -> Int32:
        """Return the index of a block row among the rows of all planes."""
        return batch * self.rows_of_batch + head * self.rows_of_head + row

    def counts(self, row: Int32, tiles_per_block: int) -> tuple[Int32, Int32]:
        """Return the number of partial blocks and the number of all blocks in a row, in units of the visited tiles.

        Args:
            row: index of the block row among all planes.
            tiles_per_block: visited tiles per listed block.
        """
        partial, full = (cute.arch.load(x.iterator + row, Int32) for x in (self.partial_count, self.full_count))
        return partial * tiles_per_block, (partial + full) * tiles_per_block


@dataclass(frozen=True)
class BlockSparseIterator(BlockIterator):
    """Block-sparse block iterator."""

    keys: BlockSparseLists  # KV blocks of each block of queries
    queries: BlockSparseLists  # query blocks of each block of keys
    rows = SPARSE_BLOCK  # query rows of a block
    tile_lengths_vary = True

    def bind(self, sizes: SeqlenInfo, tile_m: int, tile_n: int) -> BoundBlockSparse:
        return BoundBlockSparse(self, sizes, tile_m, tile_n)


@dataclass(frozen=True)
class BlockSparse192Iterator(BlockSparseIterator):
    """Block-sparse block iterator with key lists for blocks of SPARSE_BLOCK_M_192 (192) query rows."""

    rows = SPARSE_BLOCK_M_192


@dataclass(frozen=True)
class BoundBlockSparse:
    """Block-sparse block iterator bound to the sequence lengths and tile sizes."""

    block_iterator: BlockSparseIterator
    sizes: SeqlenInfo
    tile_m: int
    tile_n: int
    tile_lengths_vary = True

    def kv_blocks(self, tile: Tile) -> SparseKvBlockRange:
        kind, rows = (
            (SparseKvBlockRange192, SPARSE_BLOCK_M_192)
            if self.block_iterator.rows == SPARSE_BLOCK_M_192
            else (SparseKvBlockRange, SPARSE_BLOCK)
        )
        row = self.block_iterator.keys.row(tile.sequence, tile.head, tile.block // (rows // self.tile_m))
        return kind.create(self.block_iterator.keys, row, SPARSE_BLOCK // self.tile_n)

    def kv_blocks_of_rows(self, tile: Tile, first_row: Int32) -> SparseKvBlockRange:
        return self.kv_blocks(tile)

    def kv_range_for_warpgroup(
        self, tile: Tile, first_row: Int32, rows: int, warpgroup_ranges_differ: bool
    ) -> WarpgroupKvRange:
        """Return the KV blocks for one warpgroup's part of a tile.

        In a tile of SPARSE_BLOCK_M_192 rows, a part skips the blocks before its first visible block and the blocks
        behind its last visible block. Only the remaining parts need the skipped blocks. Rows beyond the
        last row take part in a single block, as in full attention.

        Args:
            tile: the tile.
            first_row: first row of the part.
            rows: number of rows of the part.
            warpgroup_ranges_differ: True if some parts of the tile may see fewer blocks than the rest of the tile.

        Returns:
            The KV blocks of the part, and the number of skipped leading KV blocks.
        """
        kv_range = self.kv_blocks(tile)
        if not warpgroup_ranges_differ:
            return WarpgroupKvRange(Int32(0), kv_range)
        has_rows = first_row < self.sizes.Sq
        begin, end = kv_range.visible_positions(first_row // rows - tile.block * (self.tile_m // rows), has_rows)
        return WarpgroupKvRange(begin, kv_range.between(begin, end))

    def query_blocks(self, tile: Tile) -> SparseQueryBlocksOfHeads:
        return SparseQueryBlocksOfHeads(self, tile)

    def accumulation_rank(
        self, n_block: Int32, query_range: SparseQueryBlockRange, j: Int32, num_n_blocks: Int32
    ) -> Int32:
        """Return the accumulation rank: the number of KV blocks added to a query block before KV block `n_block`.

        The rank counts the KV tiles of later listed blocks, from ranges of ORDER_BLOCK_N keys (kernel_spec.py), and
        then the later tiles of the same listed block.
        """
        later = query_range.num_later_ranges(j)
        if self.tile_n == SPARSE_BLOCK:
            return (later + 1) >> 1
        return later + cutlass.min(1 - n_block % 2, num_n_blocks - 1 - n_block)


@dataclass(frozen=True)
class SparseQueryBlocksOfHeads:
    """Query blocks of a KV tile, with a separate list for every query head."""

    blocks: BoundBlockSparse
    tile: Tile

    def outer_heads(self, group: Int32) -> Int32:
        """Return the number of heads of the loop around the steps, for `group` query heads of a KV head."""
        return group

    def of_head(self, nth: Int32) -> SparseQueryBlockRange:
        return self.of_query_head(self.tile.query_head(nth))

    def of_query_head(self, head: Int32) -> SparseQueryBlockRange:
        blocks, tile = self.blocks, self.tile
        row = blocks.block_iterator.queries.row(tile.sequence, head, tile.block // (SPARSE_BLOCK // blocks.tile_n))
        return SparseQueryBlockRange.create(blocks.block_iterator.queries, row, SPARSE_BLOCK // blocks.tile_m)

    @cute.jit
    def total(self, heads: Int32) -> Int32:
        """Return the number of steps for `heads` query heads."""
        steps = Int32(0)
        for nth in cutlass.range(heads, unroll=1):
            steps += self.of_head(nth).count
        return steps

    def first(self, head: Int32, is_valid: cutlass.Boolean) -> SparseBlockStep:
        """Return the first step of a single loop over all query heads, from `head` on.

        Args:
            head: first query head.
            is_valid: whether there is a step.
        """
        return self.seek(head, Int32(0), is_valid)

    def after(self, step: SparseBlockStep, is_valid: cutlass.Boolean) -> SparseBlockStep:
        """Return the step after `step`: all blocks of a head, then the blocks of the next head with any block."""
        return self.seek(step.head, step.j + 1, is_valid)

    @cute.jit
    def seek(self, head: Int32, j: Int32, is_valid: cutlass.Boolean) -> SparseBlockStep:
        """Return the step (head, j), or the first step of the next head with any block if (head, j) does not exist.

        Args:
            head: query head.
            j: position in the block range of the head.
            is_valid: whether there is such a step at all.
        """
        block_range, block = self.of_query_head(head), Int32(0)
        row, masked, count = block_range.row, block_range.num_masked, block_range.count
        if is_valid:
            while j >= count:
                head, j = head + 1, Int32(0)
                next_range = self.of_query_head(head)
                row, masked, count = next_range.row, next_range.num_masked, next_range.count
            block = SparseQueryBlockRange(block_range.lists, row, masked, count, block_range.tiles_per_block).nth(j)
        return SparseBlockStep(head, j, block, j < masked)

    def range_of(self, step: SparseBlockStep) -> SparseQueryBlockRange:
        """Return the block range of the head of `step`."""
        return self.of_query_head(step.head)

    def masked(self, step: SparseBlockStep) -> cutlass.Boolean:
        return step.masked


@dataclass(frozen=True)
class SparseBlockStep:
    """Step over the lists of all query heads, as `QueryBlockStep`. The list values are kept in few registers."""

    head: Int32
    j: Int32
    block: Int32
    masked: cutlass.Boolean


@dataclass(frozen=True)
class SparseBlockRange(BlockRange):
    """Range of `count` listed blocks, the partial blocks first."""

    lists: BlockSparseLists
    row: Int32
    num_masked: Int32
    count: Int32
    tiles_per_block: int
    skipped: Int32 | int = 0  # number of partial blocks skipped ahead of the first position

    @classmethod
    def create(cls, lists: BlockSparseLists, row: Int32, tiles_per_block: int) -> SparseBlockRange:
        return cls(lists, row, *lists.counts(row, tiles_per_block), tiles_per_block)

    def nth(self, j: Int32) -> Int32:
        """Return the block at position j. Each call is a load.

        Callers with an early use of the block request the block a step ahead with `next`.
        """
        return self.tile_of(self.entry(j, self.lists.partial, self.lists.full), j)

    def next(self, j: Int32, subrange: BlockSubrange) -> Int32:
        """Return the block of the step after j. All blocks of a subrange are in the same list."""
        j = cutlass.min(j + 1, subrange.end - 1)
        partial, full = (self.lists.partial, j + self.skipped), (self.lists.full, j - self.num_masked)
        entries, position = partial if subrange.masked else full
        return self.tile_of(self.load(entries.iterator, position), j)

    def tile_of(self, listed: Int32, j: Int32) -> Int32:
        """Return the tile at position j within the tiles of a listed block."""
        return listed * self.tiles_per_block + (j & self.tiles_per_block - 1)

    def entry(self, j: Int32, partial: cute.Tensor, full: cute.Tensor) -> Int32:
        """Return the value at position j of tensors laid out as the lists."""
        is_full = j >= self.num_masked
        start = cutlass.select_(is_full, *(x.iterator.toint() for x in (full, partial)))
        entries = cute.make_ptr(Int32, start, cute.AddressSpace.gmem, assumed_align=4)
        return self.load(entries, cutlass.select_(is_full, j - self.num_masked, j + self.skipped))

    def load(self, entries: cute.Pointer, position: Int32) -> Int32:
        """Load a value of a list.

        The address is computed in every step, from an index below 2^32.
        """
        row = self.row + zero_of(position)
        nth = row * self.lists.partial.shape[1] + (position >> self.tiles_per_block.bit_length() - 1)
        return cute.arch.load(entries + Int64(Uint32(nth)), Int32)


@dataclass(frozen=True)
class SparseQueryBlockRange(SparseBlockRange):
    """Range of the listed query blocks of a KV tile."""

    def num_later_ranges(self, j: Int32) -> Int32:
        """Return the number of ranges of ORDER_BLOCK_N keys with earlier accumulation."""
        return self.entry(j, self.lists.partial_rank, self.lists.full_rank)

    def subranges(self) -> tuple[BlockSubrange, BlockSubrange]:
        return BlockSubrange(True, Int32(0), self.num_masked), BlockSubrange(False, self.num_masked, self.count)

    def all_blocks(self) -> BlockSubrange:
        """Return the whole range as one unmasked subrange, for roles without scores."""
        return BlockSubrange(False, Int32(0), self.count)


@dataclass(frozen=True)
class SparseKvBlockRange(SparseBlockRange, KvBlocks):
    """Range of the listed KV blocks of a tile of queries."""

    num_trailing_skipped: Int32 | int = 0
    tail_first = False

    def subranges(self) -> tuple[BlockSubrange, BlockSubrange]:
        """Return the subranges after the first block: masked, then unmasked.

        A range with a single block gets subranges from position 0 to position 0, because the list may have no further
        entry.
        """
        has_more = cutlass.min(self.count - 1, 1)
        masked = cutlass.max(self.num_masked, 1) * has_more
        return BlockSubrange(True, has_more, masked), BlockSubrange(False, masked, self.count * has_more)

    def columns_of_first(self, rows: int) -> Int32:
        """Return a number larger than any block. The result means all keys of the first block."""
        return Int32(SPARSE_BLOCK)

    def visible_positions(self, warpgroup: Int32, has_rows: cutlass.Boolean) -> tuple[Int32, Int32]:
        """Return the positions of the blocks visible to a part of the rows, as (begin, end).

        Args:
            warpgroup: index of the part in the tile.
            has_rows: whether the part has any rows.
        """
        return cutlass.select_(has_rows, 0, self.count - 1), self.count

    def between(self, begin: Int32, end: Int32) -> SparseKvBlockRange:
        """Return the range restricted to the positions from `begin` to `end`.

        The values behind loop bounds are made uniform. Otherwise ptxas recomputes the values for every block.
        """
        begin, end = (cute.arch.make_warp_uniform(position) for position in (begin, end))
        masked = cute.arch.make_warp_uniform(cutlass.max(cutlass.min(self.num_masked, end) - begin, 0))
        return replace(self, num_masked=masked, count=end - begin, skipped=begin, num_trailing_skipped=self.count - end)


@dataclass(frozen=True)
class SparseKvBlockRange192(SparseKvBlockRange):
    """Range of the listed KV blocks of a tile of SPARSE_BLOCK_M_192 queries.

    The bits above the block index of a partial entry mark the visible parts: three bits, a bit for each 64 queries.
    """

    def tile_of(self, listed: Int32, j: Int32) -> Int32:
        return super().tile_of(listed & (1 << INDEX_BITS) - 1, j)

    @cute.jit
    def visible_positions(self, warpgroup: Int32, has_rows: cutlass.Boolean) -> tuple[Int32, Int32]:
        begin, end, flag = self.count - 1, self.count, Int32(1 << INDEX_BITS) << warpgroup
        if has_rows:
            begin = Int32(0)
            while (begin < self.num_masked) & (self.load(self.lists.partial.iterator, begin) & flag == 0):
                begin += 1
            if self.num_masked == self.count:
                begin = cutlass.min(begin, self.count - 1)
                while (end > begin + 1) & (self.load(self.lists.partial.iterator, end - 1) & flag == 0):
                    end -= 1
        return begin, end
