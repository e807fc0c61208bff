"""Score stage that masks out keys outside of a sliding window."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..tiling.sliding_window import SlidingWindow, WindowReach
from .kv_bounds import keep_between
from .pipeline import ScoreCoord, ScoreStage


@dataclass(frozen=True)
class SlidingWindowStage(ScoreStage):
    """Score stage of a sliding window: keys outside of the window, or beyond the last key, are masked.

    `sinks` has shape (Hq,) or (0,). A sink is a logit per head that is part of every row's sum and has no value (Xiao
    et al. 2023; gpt-oss).
    """

    window: SlidingWindow
    sinks: cute.Tensor | None = None  # only in the forward
    is_shared_by_heads = True  # apart from sinks, which a backward does not have

    def set_tile(self, coord: ScoreCoord) -> ScoreStage:
        reach = self.window.reach(coord.sizes)
        if coord.transposed:
            return WindowOfQueries(reach, coord)
        return WindowOfKeys(reach, coord, self.sinks)


@dataclass(frozen=True)
class WindowOfKeys(ScoreStage):
    """Score stage that sets scores of a KV block outside of the window to -inf."""

    window: WindowReach
    coord: ScoreCoord
    sinks: cute.Tensor | None = None

    @cute.jit
    def extra_logit(self) -> Float32:
        logit = -Float32.inf
        if self.coord.head < self.sinks.shape[0]:
            logit = self.sinks[self.coord.head]
        return logit

    def visible_columns(self, row: Int32) -> tuple[Int32, Int32]:
        """Return the first visible column of a row, and the first column behind. Both may lie outside of the block."""
        begin, end = self.window.keys(row)
        return begin, cutlass.min(end, self.coord.sizes.Sk)

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        first = block * self.coord.block_columns + self.coord.column
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            begin, end = self.visible_columns(self.coord.row + 8 * r)
            keep_between(S, r, begin - first, end - first)


@dataclass(frozen=True)
class WindowOfQueries(WindowOfKeys):
    """Score stage of the backward for scores (keys, queries) of a query block: masks scores outside of the window."""

    def visible_columns(self, row: Int32) -> tuple[Int32, Int32]:
        begin, end = self.window.queries(row)
        return begin, cutlass.select_(row < self.coord.sizes.Sk, end, begin)
