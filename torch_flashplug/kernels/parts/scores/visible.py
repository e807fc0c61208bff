"""Which scores of a block count: not those of keys beyond the last, nor beyond the diagonal. Which blocks come here is
the walk's (walk.Band).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..fragments import column_of
from .chain import Place, Stage


@dataclass(frozen=True)
class Visible(Stage):
    """Keys there are."""

    causal = False

    def at(self, place: Place) -> Stage:
        bound = VisibleQueries if place.transposed else VisibleKeys
        return bound(self.causal, place)


@dataclass(frozen=True)
class CausalVisible(Visible):
    """And that are not behind the query (walk.CausalBand)."""

    causal = True


@dataclass(frozen=True)
class VisibleKeys(Stage):
    """Sets invisible scores of one block of keys to -inf."""

    causal: bool
    place: Place

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            # One limit per row; the column numbers are constants, so an element costs one compare and one select.
            limit = self.place.sizes.Sk
            if cutlass.const_expr(self.causal):
                limit = cutlass.min(limit, self.place.row + 8 * r + 1)
            limit = limit - block * self.place.block - self.place.column
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                S[r, c] = cutlass.select_(column_of(c) < limit, S[r, c], -Float32.inf)


@dataclass(frozen=True)
class VisibleQueries(Stage):
    """The same for scores as the backward has them, (keys, queries), of one block of queries."""

    causal: bool
    place: Place

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        query = block * self.place.block + self.place.column
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            key = self.place.row + 8 * r
            # The first query that sees this key, counted from this thread's; a whole block: none of it.
            first = key - query if cutlass.const_expr(self.causal) else Int32(-self.place.block)
            first = cutlass.select_(key < self.place.sizes.Sk, first, self.place.block)
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                S[r, c] = cutlass.select_(column_of(c) >= first, S[r, c], -Float32.inf)
