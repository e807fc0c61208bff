"""Score stages for KV bounds: keys beyond the last, and keys beyond the causal diagonal, get a score of -inf.

The block iterator selects the blocks to which these stages apply.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...registry.mask_layout import WORD_BITS
from ..primitives.fragments import column_of, single_bit
from .pipeline import ScoreCoord, ScoreStage


def scores_before(column: Int32) -> Int32:
    """Return how many of a thread's scores are in columns before `column`; 0 or less for negative columns.

    `fragments.column_of` numbers the columns.
    """
    return (column >> 3) * 2 + cutlass.min(column & 7, 2)


def bits_between(begin: Int32, end: Int32) -> Int32:
    """Return a word with the bits from `begin` to before `end` set; values outside the word are clamped to its ends."""
    begin = cutlass.max(begin, 0)
    text, operands = "bmsk.clamp.b32 {$w0}, {$r0}, {$r1};", [begin, cutlass.max(end - begin, 0)]
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=operands)


@cute.jit
def keep_between(S: cute.Tensor, r: cutlass.Constexpr[int], begin: Int32, end: Int32):
    """Set scores of row `r` to -inf, except the columns from `begin` to before `end`, counted from the thread's first.

    Each score has a bit: an instruction (R2P) tests seven bits, whereas comparing each score with both bounds would
    take two instructions per score.
    """
    columns, begin, end = cute.size(S, mode=[1]), scores_before(begin), scores_before(end)
    for first in cutlass.range_constexpr(0, columns, WORD_BITS):
        bits = bits_between(begin - first, end - first)
        for i in cutlass.range_constexpr(min(WORD_BITS, columns - first)):
            is_visible = (bits & single_bit(i)) != 0
            S[r, first + i] = cutlass.select_(is_visible, S[r, first + i], -Float32.inf)


@dataclass(frozen=True)
class KvBoundsStage(ScoreStage):
    """Mask of keys beyond the last key."""

    causal = False
    is_shared_by_heads = True

    def set_tile(self, coord: ScoreCoord) -> ScoreStage:
        bound = KvBoundsOfQueries if coord.transposed else KvBoundsOfKeys
        return bound(self.causal, coord)


@dataclass(frozen=True)
class CausalStage(KvBoundsStage):
    """Mask of keys beyond the last key and of keys behind the query (block_iterator.CausalBlocks)."""

    causal = True


@dataclass(frozen=True)
class KvBoundsOfKeys(ScoreStage):
    """Mask of a KV block: sets invisible scores to -inf."""

    causal: bool
    coord: ScoreCoord

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            # Each row has a single limit. The column numbers are constants, so an element costs one compare and one
            # select.
            limit = self.coord.sizes.Sk
            if cutlass.const_expr(self.causal):
                limit = cutlass.min(limit, self.coord.row + 8 * r + 1)
            limit = limit - block * self.coord.block_columns - self.coord.column
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                S[r, c] = cutlass.select_(column_of(c) < limit, S[r, c], -Float32.inf)


@dataclass(frozen=True)
class KvBoundsOfQueries(ScoreStage):
    """Mask of a query block for transposed scores (keys, queries), as in the backward."""

    causal: bool
    coord: ScoreCoord

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        query = block * self.coord.block_columns + self.coord.column
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            key = self.coord.row + 8 * r
            # The first query that sees this key, counted from the thread's first query. The block size stands for no
            # query of the block.
            first = key - query if cutlass.const_expr(self.causal) else Int32(-self.coord.block_columns)
            first = cutlass.select_(key < self.coord.sizes.Sk, first, self.coord.block_columns)
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                S[r, c] = cutlass.select_(column_of(c) >= first, S[r, c], -Float32.inf)
