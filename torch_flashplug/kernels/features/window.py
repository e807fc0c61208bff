"""A sliding window: query i sees the keys from i + diagonal - left to i + diagonal + right (Beltagy et al. 2020). left
and right together are not negative; who has no bound on one side passes a number beyond all lengths, whose sum with
them is still an Int32. diagonal: Sk - Sq of a sequence to the bottom right, where the last query goes with the last
key; else 0.

Masked blocks are at both ends of what a tile sees, whole ones between. A run of keys has the right end first, then the
left one, so that one loop masks; a run of queries has them as they lie.
"""

from __future__ import annotations

from ..score_stages.sliding_window import InWindow
from ..tiling.sliding_window import Window
from .base import Seams


class Windowed(Seams):
    uneven = True

    def walk(self, call: object) -> Window:
        return Window(call.limits.left, call.limits.right, call.limits.bottom_right)

    def visible(self, call: object) -> InWindow:
        return InWindow(self.walk(call), None if self.spec.is_backward else call.sinks)
