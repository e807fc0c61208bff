"""Dilated sliding window: of the keys in the window, a query sees every second key (Beltagy et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..primitives.fragments import column_of
from ..score_stages.pipeline import ScoreCoord, ScorePipeline, ScoreStage
from .base import KernelFeatures

DILATION = 2


class DilatedWindowFeature(KernelFeatures):
    """Kernel feature for the dilation of a window."""

    def score_pipeline(self, call: object) -> ScorePipeline:
        return ScorePipeline((*super().score_pipeline(call).stages, DilationStage()))


@dataclass(frozen=True)
class DilationStage(ScoreStage):
    """Score stage that masks keys whose distance from the query is no multiple of DILATION (top-left alignment)."""

    coord: ScoreCoord | None = None
    applies_to_full_blocks = True

    def set_tile(self, coord: ScoreCoord) -> ScoreStage:
        return replace(self, coord=coord)

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        first_key = block * self.coord.block + self.coord.column
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                distance = first_key + column_of(c) - self.coord.row - 8 * r
                S[r, c] = cutlass.select_((distance & (DILATION - 1)) == 0, S[r, c], -Float32.inf)
