"""Iterators over the blocks that a sliding window leaves visible."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .block_iterator import BlockIterator, BlockSubrange, KvBlocks, QueryBlockRange, WarpgroupKvRange
from .seqlen_info import SeqlenInfo
from .tile import Tile


@dataclass(frozen=True)
class SlidingWindow(BlockIterator):
    """Sliding window block iterator: window bounds of the call."""

    left: Int32
    right: Int32
    bottom_right: Int32  # 1 or 0
    tile_lengths_vary = True

    def bind(self, sizes: SeqlenInfo, tile_m: int, tile_n: int) -> BoundSlidingWindow:
        return BoundSlidingWindow(self.reach(sizes), sizes, tile_m, tile_n)

    def reach(self, sizes: SeqlenInfo) -> WindowReach:
        """Return the window of a sequence."""
        return WindowReach(self.left, self.right, self.bottom_right * (sizes.Sk - sizes.Sq))


@dataclass(frozen=True)
class WindowReach:
    """Window of a sequence: which keys the queries see."""

    left: Int32
    right: Int32
    diagonal: Int32

    def keys(self, query: Int32) -> tuple[Int32, Int32]:
        """Return the first key visible to a query, and the first key behind the window.

        Both may lie outside of the sequence.
        """
        return query + self.diagonal - self.left, query + self.diagonal + self.right + 1

    def queries(self, key: Int32) -> tuple[Int32, Int32]:
        """Return the first query that sees a key, and the first query behind. Both may lie outside of the sequence."""
        return key - self.diagonal - self.right, key - self.diagonal + self.left + 1


@dataclass(frozen=True)
class BoundSlidingWindow:
    """Sliding window block iterator of a sequence, for blocks of `tile_m` queries and `tile_n` keys."""

    window: WindowReach
    sizes: SeqlenInfo
    tile_m: int
    tile_n: int
    tile_lengths_vary = True

    def kv_blocks(self, tile: Tile) -> WindowKvBlockRange:
        return self.kv_range_of_rows(tile.block * self.tile_m, self.tile_m)

    def kv_blocks_of_rows(self, tile: Tile, first_row: Int32) -> WindowKvBlockRange:
        return self.kv_range_of_rows(first_row, self.tile_m)

    def kv_range_for_warpgroup(
        self, tile: Tile, first_row: Int32, rows: int, warpgroup_ranges_differ: bool
    ) -> WarpgroupKvRange:
        """Return the KV blocks for one warpgroup's part of a tile.

        The remaining rows of the tile may see further blocks on the right, which come first and are skipped. Blocks on
        the left beyond the part's window are visited all the same: all parts end together.

        Args:
            tile: the tile.
            first_row: first row of the part.
            rows: number of rows of the part.
            warpgroup_ranges_differ: True if some parts of the tile may see fewer blocks than the rest of the tile.

        Returns:
            The KV blocks of the part, and the number of skipped leading KV blocks.
        """
        tile_range = self.kv_blocks(tile)
        if not warpgroup_ranges_differ:
            return WarpgroupKvRange(Int32(0), replace(tile_range, first_row=first_row))
        _, end_block = self.bounds(first_row, rows)
        end_block = cutlass.select_(first_row < self.sizes.Sq, end_block, 0)
        num_skipped = cute.arch.make_warp_uniform(tile_range.end - cutlass.max(end_block, tile_range.begin + 1))
        end, right = tile_range.end - num_skipped, tile_range.right - num_skipped
        return WarpgroupKvRange(num_skipped, replace(tile_range, first_row=first_row, end=end, right=right))

    def bounds(self, first_row: Int32, rows: int) -> tuple[Int32, Int32]:
        """Return the first KV block visible to some of the rows, and the end of the visible blocks.

        The range contains a single block if no row sees any key.
        """
        first, _ = self.window.keys(first_row)
        _, end = self.window.keys(first_row + rows - 1)
        end = cute.ceil_div(cutlass.min(cutlass.max(end, 1), self.sizes.seqlen_k_at_least_one), self.tile_n)
        return cutlass.min(cutlass.max(first, 0) // self.tile_n, end - 1), end

    def kv_range_of_rows(self, first_row: Int32, rows: int) -> WindowKvBlockRange:
        begin, end = self.bounds(first_row, rows)
        _, end_of_first = self.window.keys(first_row)
        begin_of_last, _ = self.window.keys(first_row + rows - 1)
        full_end = cutlass.min(cutlass.max(end_of_first, 0), self.sizes.Sk) // self.tile_n
        right = cutlass.min(cutlass.max(end - full_end, 1), end - begin)
        left = cutlass.max(cute.ceil_div(cutlass.max(begin_of_last, 0), self.tile_n) - begin, 0)
        return WindowKvBlockRange(self, first_row, begin, end, right, cutlass.min(left, end - begin - right))

    def query_blocks(self, tile: Tile) -> WindowQueryBlockRange:
        """Return the query blocks that see some key of a KV block.

        If the KV block extends beyond the last key, every step is masked.
        """
        first_key, num_blocks = tile.block * self.tile_n, cute.ceil_div(self.sizes.Sq, self.tile_m)
        last_key = first_key + self.tile_n - 1
        (first, end_of_first), (first_of_last, end) = self.window.queries(first_key), self.window.queries(last_key)
        begin = cutlass.min(cutlass.max(first, 0) // self.tile_m, num_blocks)
        end = cutlass.min(cute.ceil_div(cutlass.max(end, 0), self.tile_m), num_blocks)
        end = cutlass.max(end, begin)
        masked_end = cutlass.min(cutlass.max(cute.ceil_div(cutlass.max(first_of_last, 0), self.tile_m), begin), end)
        masked_end = cutlass.select_(last_key < self.sizes.Sk, masked_end, end)
        masked_tail_begin = cutlass.min(cutlass.max(cutlass.max(end_of_first, 0) // self.tile_m, masked_end), end)
        return WindowQueryBlockRange(begin, masked_end, end, masked_tail_begin)

    def accumulation_rank(
        self, n_block: Int32, query_range: WindowQueryBlockRange, j: Int32, num_n_blocks: Int32
    ) -> Int32:
        """Return the accumulation rank: the number of KV blocks added to a query block before this block.

        The order begins with the last KV block.

        Args:
            n_block: index of the KV block.
            query_range: query blocks of the KV block.
            j: position of the query block in `query_range`.
            num_n_blocks: number of KV blocks.
        """
        _, end = self.window.keys(query_range.nth(j) * self.tile_m + self.tile_m - 1)
        return cutlass.min((end - 1) // self.tile_n, num_n_blocks - 1) - n_block


@dataclass(frozen=True)
class WindowKvBlockRange(KvBlocks):
    """Range of the KV blocks from `begin` to `end`.

    The order is: `right` masked blocks from the right end, `left` masked blocks from the left end, then the full blocks
    between. One warpgroup's part of a tile has the positions of the tile, except for blocks on the right that only the
    remaining rows see.
    """

    bound: BoundSlidingWindow
    first_row: Int32
    begin: Int32
    end: Int32
    right: Int32
    left: Int32

    @property
    def count(self) -> Int32:
        return self.end - self.begin

    @property
    def num_masked(self) -> Int32:
        """Number of leading positions that count as masked.

        The first block always counts, because its code exists in any case.
        """
        return cutlass.max(self.right + self.left, 1)

    def nth(self, j: Int32) -> Int32:
        num_full = self.count - self.right - self.left
        offset = cutlass.select_(j < self.right, 0, cutlass.select_(j < self.right + self.left, -num_full, self.left))
        return self.end - 1 - j + offset

    def columns_of_first(self, rows: int) -> Int32:
        """Return the number of keys of the first block that some of `rows` rows may see.

        A result larger than the block means all keys of the block.
        """
        _, end = self.bound.window.keys(self.first_row + rows - 1)
        return cutlass.min(end, self.bound.sizes.Sk) - self.nth(0) * self.bound.tile_n


@dataclass(frozen=True)
class WindowQueryBlockRange(QueryBlockRange):
    """Range of the query blocks of a KV block, in increasing order.

    Blocks before `masked_end` and from `masked_tail_begin` on are masked.
    """

    masked_tail_begin: Int32

    def masked(self, step) -> cutlass.Boolean:
        return (step.j < self.masked_end) | (step.j >= self.masked_tail_begin)

    def subranges(self) -> tuple[BlockSubrange, ...]:
        return (
            BlockSubrange(True, self.begin, self.masked_end),
            BlockSubrange(False, self.masked_end, self.masked_tail_begin),
            BlockSubrange(True, self.masked_tail_begin, self.end),
        )
