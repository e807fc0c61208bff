"""A window of few query rows (window.py), packed: rows of a tile are queries of several heads. Splits share the blocks
from the first that some query sees to the last: alike, or a size each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32

from ...registry.kernel_spec import SLAB, WARP, WARPGROUP
from ..score_stages.pipeline import Place, Stage
from ..score_stages.sliding_window import InWindow, KeysInWindow
from ..tiling.block_iterator import Split
from ..tiling.seqlen_info import Sizes
from ..tiling.sliding_window import Reach, Window
from .window import Windowed


class WindowOfFew(Windowed):
    def walk(self, call: object) -> Window:
        return FewInWindow(call.limits.left, call.limits.right, call.limits.bottom_right, call.split_size)

    def visible(self, call: object) -> InWindow:
        return PackedInWindow(super().walk(call), call.sinks)


@dataclass(frozen=True)
class FewInWindow(Window):
    split_size: Int32  # keys; 0: splits are alike

    def at(self, sizes: Sizes, tile_m: int, tile_n: int) -> BoundFew:
        return BoundFew(self.of(sizes), sizes, tile_n, self.split_size // tile_n)


@dataclass(frozen=True)
class BoundFew:
    """KV blocks that some query of a sequence sees, from the left; one where none sees any."""

    window: Reach
    sizes: Sizes
    tile_n: int
    split_blocks: Int32
    hides = True

    def shared(self, smem: cutlass.memory.SmemAllocator) -> BoundFew:
        return self

    def find(self, part: object) -> None:
        """Nothing is looked for."""

    def share(self, number: Int32, parts: Int32) -> Split:
        """A split's; one behind all keys where there are none for it. Those of a size are counted from the sequence's
        first block, so that it has the same ones beside any others, in tables of any width.
        """
        first, _ = self.window.keys(Int32(0))
        _, behind = self.window.keys(self.sizes.Sq - 1)
        end = cute.ceil_div(cutlass.min(cutlass.max(behind, 1), self.sizes.some_keys), self.tile_n)
        begin = cutlass.min(cutlass.max(first, 0) // self.tile_n, end - 1)
        mine = self.split_of(end - begin, number, parts)
        beyond = cute.ceil_div(self.sizes.some_keys, self.tile_n)
        return Split(begin + mine.begin, begin + mine.end).or_block(beyond)

    def split_of(self, blocks: Int32, number: Int32, parts: Int32) -> Split:
        alike, size = Split.create(blocks, number, parts), self.split_blocks
        ends = (cutlass.min((number + i) * size, blocks) for i in range(2))
        of_size = zip(ends, (alike.begin, alike.end), strict=True)
        return Split(*(cutlass.select_(size > 0, mine, other) for mine, other in of_size))

    def masks(self, keys: Split, j: Int32) -> cutlass.Boolean:
        """Whether some query does not see all of the block at a position."""
        key = keys.nth(j) * self.tile_n
        _, behind_first = self.window.keys(Int32(0))
        first_of_last, _ = self.window.keys(self.sizes.Sq - 1)
        return (key + self.tile_n > cutlass.min(behind_first, self.sizes.Sk)) | (key < first_of_last)


@dataclass(frozen=True)
class PackedInWindow(InWindow):
    columns: int = 0  # of a block that a team has

    def hold(self, columns: int) -> Stage:
        return replace(self, columns=columns)

    def at(self, place: Place) -> Stage:
        """place: of the tile's first row. Warps of a team have 16 rows each."""
        warps = WARPGROUP // WARP * self.columns // place.block
        row = place.row + cute.arch.warp_idx() % warps * SLAB + cute.arch.lane_idx() // 4
        return QueriesOfFew(self.window.of(place.sizes), replace(place, row=row))


class QueriesOfFew(KeysInWindow):
    def seen(self, row: Int32) -> tuple[Int32, Int32]:
        """Of a packed row."""
        return super().seen(row % cutlass.max(self.place.sizes.Sq, 1))
