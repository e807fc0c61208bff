"""Stages that read one bit a score: a mask's.

Bits are stored by tiles of 64 x 64 scores, 128 words of 32 bits each, in the order in which the threads of a warpgroup
hold them (fragments.py): thread t of warp w has word 32 w + lane, whose bit r + 2 c is its score (r, c) of the tile.
Two such arrays exist, since no order serves both: `rows` for kernels whose scores are (queries, keys), `columns`, the
same of the transposed scores, for those of the backward that have (keys, queries). A thread of one shares four pairs
at most with a thread of the other, so that one array would take eight loads in all instead of one each.

    rows[plane][ceil(Sq / 64)][ceil(Sk / 64) + 1][128]        the last tile of a row is all zeros
    columns[plane][ceil(Sk / 64)][ceil(Sq / 64) + 1][128]
    plane = batch * planes_of_batch + head * planes_of_head    0: broadcast

What lies outside the scores is 0. A mask that is the same for all queries may have words of 128 of them: rows behind
have the last tile's, and the last tile of `columns` holds what the others do. Blocks of any width that is a multiple of
16 read the same words: where 64 does not divide where a block begins, two neighbours are shifted into one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ...registry.kernel_spec import SLAB
from ...registry.mask_layout import BITS, THREADS, TILE
from ..primitives.fragments import single_bit, zero_of
from .pipeline import Place, Stage


@dataclass(frozen=True)
class Words(Stage):
    """Reads a block's words one step ahead, before the last one's are used or after: they have registers of their own,
    which cost nothing where these are free by then. `make_ready`, which decode does not ask, takes them over.
    """

    words: cute.Tensor  # (n,) Int32: rows, or columns
    planes_of_batch: Int32
    planes_of_head: Int32
    queries: Int32 | None = None  # that there are words of: those behind have the last one's; None: all
    now: cute.Tensor | None = None  # (words of a block,) registers
    coming: cute.Tensor | None = None  # the same of the block that was asked for last
    place: Place | None = None
    line: Int32 | None = None  # of tiles: plane and row

    def hold(self, columns: int) -> Stage:
        now, coming = (cute.make_rmem_tensor((-(-columns // TILE),), Int32) for _ in range(2))
        return replace(self, now=now, coming=coming)

    def at(self, place: Place) -> Stage:
        stage = replace(self, place=place)
        return stage if place.head is None else stage.of_head(place.head)

    def of_head(self, head: Int32) -> Stage:
        rows, _ = self.tiles()
        plane = self.place.batch * self.planes_of_batch + head * self.planes_of_head
        return replace(self, line=plane * rows + cutlass.min(self.place.row // TILE, rows - 1))

    def tiles(self) -> tuple[Int32, Int32]:
        """Rows and columns of a plane's tiles."""
        queries, keys = self.place.sizes.Sq if self.queries is None else self.queries, self.place.sizes.Sk
        rows, columns = (keys, queries) if self.place.transposed else (queries, keys)
        return cute.ceil_div(rows, TILE), cute.ceil_div(columns, TILE)

    def begin(self, block: Int32) -> None:
        self.fetch(cutlass.max(block, 0))  # a section without blocks may begin before the first one

    def ahead(self, block: Int32) -> None:
        self.fetch(block)

    def make_ready(self, block: Int32) -> None:
        for i in range(cute.size(self.now)):
            word = self.coming[i]
            if self.place.transposed:  # where a tile of keys has none, its words are another's
                word = cutlass.select_(self.place.row < self.place.sizes.Sk, word, Int32(0))
            self.now[i] = word

    @cute.jit
    def fetch(self, block: Int32):
        place, count = self.place, cute.size(self.coming)
        _, columns = self.tiles()
        first, line, row = block * place.block // TILE, self.line, place.row
        if cutlass.const_expr(place.transposed):
            # The backward has few registers: an address is made in every step. (In the forward ptxas would serialise
            # every product for it.)
            line, row = line + zero_of(block), row + zero_of(block)
        thread = cute.arch.thread_idx()[0] % THREADS
        if cutlass.const_expr(place.by_row):
            thread = (row & (TILE - SLAB)) * (THREADS // TILE) + cute.arch.lane_idx()  # 32 of them hold 16 rows
        begin = line * (columns + 1) * THREADS + thread
        if cutlass.const_expr(place.block % TILE == 0 and not place.transposed):
            for i in cutlass.range_constexpr(count):  # no tile is more than one behind the last
                self.coming[i] = self.word(begin + (first + i) * THREADS)
        elif cutlass.const_expr(place.block % TILE == 0):
            for i in cutlass.range_constexpr(count):
                self.coming[i] = self.word(begin + cutlass.min(first + i, columns) * THREADS)
        else:
            shift = block * place.block % TILE // 2
            below = self.word(begin + cutlass.min(first, columns) * THREADS)
            for i in cutlass.range_constexpr(count):
                above = self.word(begin + cutlass.min(first + i + 1, columns) * THREADS)
                self.coming[i] = shifted(below, above, shift)
                below = above
        if cutlass.const_expr(place.by_row and place.transposed):  # scores may begin inside a block
            self.coming[0] = self.coming[0] >> ((place.column & -8) >> 1)

    def word(self, nth: Int32) -> Int32:
        """A load. There are fewer than 2^32 words."""
        return cute.arch.load(self.words.iterator + Int64(Uint32(nth)), Int32)

    def bit(self, r: int, c: int) -> cutlass.Boolean:
        """Of score (r, c) of a block."""
        word, i = divmod(r + 2 * c, BITS)
        return (self.now[word] & single_bit(i)) != 0


def shifted(low: Int32, high: Int32, count: Int32) -> Int32:
    """32 bits of (high, low), from bit `count` on."""
    text = "shf.r.wrap.b32 {$w0}, {$r0}, {$r1}, {$r2};"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[low, high, count])


@dataclass(frozen=True)
class Bits(Words):
    """A mask: scores whose bit is 0 do not count, in any block."""

    everywhere = True

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
            for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
                S[r, c] = cutlass.select_(self.bit(r, c), S[r, c], -Float32.inf)


@dataclass(frozen=True)
class ListedBits(Bits):
    """Of a walk that knows in which blocks something is hidden (block_sparse.py)."""

    everywhere = False
