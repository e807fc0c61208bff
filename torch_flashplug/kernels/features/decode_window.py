"""Decode with a sliding window (window.py): rows of a tile are packed queries of several heads.

Splits share the blocks from the first block to the last block visible to some query. The splits have equal shares, or a
fixed size each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32

from ...registry.kernel_spec import MMA_ATOM_M, WARP, WARPGROUP
from ..score_stages.pipeline import ScoreCoord, ScoreStage
from ..score_stages.sliding_window import SlidingWindowStage, WindowOfKeys
from ..tiling.block_iterator import SplitKvRange
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.sliding_window import SlidingWindow, WindowReach
from .window import WindowFeature


class DecodeWindowFeature(WindowFeature):
    """Kernel feature for decode with a sliding window."""

    def block_iterator(self, call: object) -> SlidingWindow:
        return DecodeWindowIterator(call.left, call.right, call.bottom_right, call.split_size)

    def masking_stage(self, call: object) -> SlidingWindowStage:
        return DecodeWindowStage(super().block_iterator(call), call.sinks)


@dataclass(frozen=True)
class DecodeWindowIterator(SlidingWindow):
    """Sliding window block iterator of decode, with the size of a split."""

    split_size: Int32  # in keys; 0: splits have equal shares

    def bind(self, sizes: SeqlenInfo, tile_m: int, tile_n: int) -> BoundDecodeWindow:
        return BoundDecodeWindow(self.reach(sizes), sizes, tile_n, self.split_size // tile_n)


@dataclass(frozen=True)
class BoundDecodeWindow:
    """Iterator over the KV blocks visible to some query of a sequence, in increasing order.

    If no query sees any key, the iterator has a single block.
    """

    window: WindowReach
    sizes: SeqlenInfo
    tile_n: int
    split_blocks: Int32
    may_mask = True

    def allocate_smem(self, smem: cutlass.memory.SmemAllocator) -> BoundDecodeWindow:
        return self

    def scan(self, part: object) -> None:
        """Decode: scan for visible blocks (nothing to do here)."""

    def split_range(self, split_idx: Int32, num_splits: Int32) -> SplitKvRange:
        """Return the KV blocks of split `split_idx` of `num_splits` splits.

        A split without blocks gets the block behind all keys. Splits of a fixed size count from the first visible block
        of the sequence. A sequence therefore has the same splits in any batch and with block tables of any width.
        """
        begin, end = self.visible_blocks()
        split = self.split_of(end - begin, split_idx, num_splits)
        beyond = cute.ceil_div(self.sizes.seqlen_k_at_least_one, self.tile_n)
        return SplitKvRange(begin + split.begin, begin + split.end).or_block(beyond)

    def visible_blocks(self) -> tuple[Int32, Int32]:
        """Return the first block visible to some query, and the end of the visible blocks."""
        first, _ = self.window.keys(Int32(0))
        _, behind = self.window.keys(self.sizes.Sq - 1)
        end = cute.ceil_div(cutlass.min(cutlass.max(behind, 1), self.sizes.seqlen_k_at_least_one), self.tile_n)
        return cutlass.min(cutlass.max(first, 0) // self.tile_n, end - 1), end

    @property
    def num_blocks(self) -> Int32:
        """Number of visible blocks, at least one."""
        begin, end = self.visible_blocks()
        return end - begin

    def split_of(self, blocks: Int32, split_idx: Int32, num_splits: Int32) -> SplitKvRange:
        equal_split, size = SplitKvRange.create(blocks, split_idx, num_splits), self.split_blocks
        ends = (cutlass.min((split_idx + i) * size, blocks) for i in range(2))
        ends_of_both = zip(ends, (equal_split.begin, equal_split.end), strict=True)
        return SplitKvRange(*(cutlass.select_(size > 0, fixed_end, equal_end) for fixed_end, equal_end in ends_of_both))

    def masks(self, kv_range: SplitKvRange, j: Int32) -> cutlass.Boolean:
        """Return whether some query cannot see all keys of the block at position j."""
        key = kv_range.nth(j) * self.tile_n
        _, behind_first = self.window.keys(Int32(0))
        first_of_last, _ = self.window.keys(self.sizes.Sq - 1)
        return (key + self.tile_n > cutlass.min(behind_first, self.sizes.Sk)) | (key < first_of_last)


@dataclass(frozen=True)
class DecodeWindowStage(SlidingWindowStage):
    """Score stage of a sliding window for packed rows."""

    columns: int = 0  # columns of a block that belong to a team: warps that share a part of the keys of a block

    def allocate_registers(self, columns: int) -> ScoreStage:
        return replace(self, columns=columns)

    def set_tile(self, coord: ScoreCoord) -> ScoreStage:
        """Return the stage for a tile. Each warp of a team has 16 rows.

        Args:
            coord: coordinate of the first row of the tile.
        """
        warps = WARPGROUP // WARP * self.columns // coord.block_columns
        row = coord.row + cute.arch.warp_idx() % warps * MMA_ATOM_M + cute.arch.lane_idx() // 4
        return DecodeWindowQueries(self.window.reach(coord.sizes), replace(coord, row=row))


class DecodeWindowQueries(WindowOfKeys):
    """Score stage of a sliding window, in which the query of a packed row is the row modulo Sq."""

    def visible_columns(self, row: Int32) -> tuple[Int32, Int32]:
        """Return the first visible column of a packed row, and the first column behind."""
        return super().visible_columns(row % cutlass.max(self.coord.sizes.Sq, 1))
