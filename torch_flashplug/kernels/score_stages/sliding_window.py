"""Score stage that hides keys outside of a sliding window."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..tiling.sliding_window import Reach, Window
from .kv_bounds import keep_between
from .pipeline import Place, Stage


@dataclass(frozen=True)
class InWindow(Stage):
    """Which scores of a block count: those of keys in the window, and not beyond the last. sinks (Hq,) or (0,): a
    logit of each head that is in every row's sum, and brings no value (Xiao et al. 2023; gpt-oss).
    """

    window: Window
    sinks: cute.Tensor | None = None  # forward

    def at(self, place: Place) -> Stage:
        reach = self.window.of(place.sizes)
        if place.transposed:
            return QueriesInWindow(reach, place)
        return KeysInWindow(reach, place, self.sinks)


@dataclass(frozen=True)
class KeysInWindow(Stage):
    """Sets scores of one block of keys that are out of it to -inf."""

    window: Reach
    place: Place
    sinks: cute.Tensor | None = None

    @cute.jit
    def extra_logit(self) -> Float32:
        logit = -Float32.inf
        if self.place.head < self.sinks.shape[0]:
            logit = self.sinks[self.place.head]
        return logit

    def seen(self, row: Int32) -> tuple[Int32, Int32]:
        """Of the columns that there are and others, the first that counts for a row, and the first behind them."""
        begin, end = self.window.keys(row)
        return begin, cutlass.min(end, self.place.sizes.Sk)

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        first = block * self.place.block + self.place.column
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            begin, end = self.seen(self.place.row + 8 * r)
            keep_between(S, r, begin - first, end - first)


@dataclass(frozen=True)
class QueriesInWindow(KeysInWindow):
    """The same for scores as the backward has them, (keys, queries), of one block of queries."""

    def seen(self, row: Int32) -> tuple[Int32, Int32]:
        begin, end = self.window.queries(row)
        return begin, cutlass.select_(row < self.place.sizes.Sk, end, begin)
