"""Which scores of a partial KV block count. Decides *what*; geometry.py decides *which* blocks come here."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .fragments import column_of
from .geometry import Geometry


@dataclass(frozen=True)
class Mask:
    """Sets invisible scores of one block to -inf. `row` is this thread's first row, `col` its first column inside a
    block.
    """

    geo: Geometry
    row: Int32
    col: Int32

    @cute.jit
    def apply(self, acc_S: cute.Tensor, n_block: Int32):
        """acc_S: (rows, cols) view of a warp's scores; cols are numbered by `column_of`."""
        for r in cutlass.range_constexpr(cute.size(acc_S, mode=[0])):
            # One limit per row; the column numbers are constants, so an element costs one compare and one select.
            limit = self.geo.Sk
            if cutlass.const_expr(self.geo.mask == "causal"):
                limit = cutlass.min(limit, self.row + 8 * r + 1)
            limit = limit - n_block * self.geo.tile_n - self.col
            for c in cutlass.range_constexpr(cute.size(acc_S, mode=[1])):
                acc_S[r, c] = cutlass.select_(column_of(c) < limit, acc_S[r, c], -Float32.inf)


@dataclass(frozen=True)
class TransposedMask:
    """The same for scores as the backward has them, (keys, queries). `key` is this thread's first key, `query` its
    first query inside a block of tile_m.
    """

    geo: Geometry
    tile_m: int
    key: Int32
    query: Int32

    @cute.jit
    def apply(self, acc_S: cute.Tensor, m_block: Int32):
        """acc_S: (keys, queries) view of a warp's scores; queries are numbered by `column_of`."""
        query = m_block * self.tile_m + self.query
        for r in cutlass.range_constexpr(cute.size(acc_S, mode=[0])):
            key = self.key + 8 * r
            # The first query that sees this key, counted from this thread's; tile_m: none of the block.
            first = key - query if cutlass.const_expr(self.geo.mask == "causal") else Int32(-self.tile_m)
            first = cutlass.select_(key < self.geo.Sk, first, self.tile_m)
            for c in cutlass.range_constexpr(cute.size(acc_S, mode=[1])):
                acc_S[r, c] = cutlass.select_(column_of(c) >= first, acc_S[r, c], -Float32.inf)
