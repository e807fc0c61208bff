"""Sliding window attention: block iterator and score stage (Beltagy et al. 2020).

Query i sees the keys from i + diagonal - left to i + diagonal + right. left + right is not negative. An unbounded side
uses a number beyond all lengths, small enough that the sums above still fit in an Int32. `diagonal` is Sk - Sq of a
sequence for bottom-right alignment, where the last query is aligned with the last key. Otherwise `diagonal` is 0.

Masked blocks lie at both ends of the visible range of a tile, and full blocks lie between. A range of KV blocks has the
right end first, then the left end, so that a single loop handles all masked blocks. A range of query blocks is visited
in increasing order.
"""

from __future__ import annotations

from ..score_stages.sliding_window import SlidingWindowStage
from ..tiling.sliding_window import SlidingWindow
from .base import KernelFeatures


class WindowFeature(KernelFeatures):
    """Kernel feature for a sliding window, with optional sinks in the forward."""

    tile_lengths_vary = True

    def block_iterator(self, call: object) -> SlidingWindow:
        return SlidingWindow(call.left, call.right, call.bottom_right)

    def masking_stage(self, call: object) -> SlidingWindowStage:
        return SlidingWindowStage(self.block_iterator(call), None if self.spec.is_backward else call.sinks)
