"""Score stages that read a bitmask: a bit per score.

Bits are stored by tiles of 64 x 64 scores, 128 words of 32 bits each. Their order is the order in which the threads of
a warpgroup hold scores (fragments.py). Thread t of warp w has word 32 w + lane, whose bit r + 2 c is the thread's score
(r, c) of the tile. No order serves both score layouts, so there are two such arrays: `rows` for kernels with scores
(queries, keys), and `columns`, the bitmask of the transposed scores, for backward kernels with scores (keys, queries).
A thread of one layout shares at most four pairs with a thread of the other. Therefore a single array would take eight
loads in all instead of one each.

rows[plane][ceil(Sq / 64)][ceil(Sk / 64) + 1][128]        the last tile of a row is all zeros
columns[plane][ceil(Sk / 64)][ceil(Sq / 64) + 1][128]
plane = batch * planes_of_batch + head * planes_of_head    0: broadcast

Bits outside the scores are 0. If all queries have the same mask, the bitmask may have words of 128 queries only: later
rows use the last tile, and the last tile of `columns` repeats the others. Blocks of any width divisible by 16 read the
same words. Where a block begins at a column not divisible by 64, two neighboring words are shifted into one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ...registry.kernel_spec import MMA_ATOM_M
from ...registry.mask_layout import TILE, TILE_WORDS, WORD_BITS
from ..primitives.fragments import single_bit, zero_of
from .pipeline import ScoreCoord, ScoreStage


@dataclass(frozen=True)
class BitmaskTiles(ScoreStage):
    """Loader of a block's bitmask words, a step ahead.

    The next words are loaded before or after the last use of the current words. The next words have registers of their
    own, which cost nothing where registers are free by then. `prepare_stage`, which decode does not call, makes the
    next words current.
    """

    words: cute.Tensor  # (n,) Int32: the array `rows` or `columns`
    planes_of_batch: Int32
    planes_of_head: Int32
    # Number of queries with words; later queries use the last tile; None: all queries have words.
    queries: Int32 | None = None
    block_words: cute.Tensor | None = None  # (words of a block,) registers: words of the current block
    next_words: cute.Tensor | None = None  # (words of a block,) registers: words of the block loaded last
    coord: ScoreCoord | None = None
    tile_row: Int32 | None = None  # index of the thread's row of tiles, over all planes

    def allocate_registers(self, columns: int) -> ScoreStage:
        words, next_words = (cute.make_rmem_tensor((-(-columns // TILE),), Int32) for _ in range(2))
        return replace(self, block_words=words, next_words=next_words)

    def set_tile(self, coord: ScoreCoord) -> ScoreStage:
        stage = replace(self, coord=coord)
        return stage if coord.head is None else stage.of_head(coord.head)

    def of_head(self, head: Int32) -> ScoreStage:
        rows, _ = self.tiles()
        plane = self.coord.sequence * self.planes_of_batch + head * self.planes_of_head
        return replace(self, tile_row=plane * rows + cutlass.min(self.coord.row // TILE, rows - 1))

    def tiles(self) -> tuple[Int32, Int32]:
        """Return the number of tile rows and of tile columns of a plane."""
        queries, keys = self.coord.sizes.Sq if self.queries is None else self.queries, self.coord.sizes.Sk
        rows, columns = (keys, queries) if self.coord.transposed else (queries, keys)
        return cute.ceil_div(rows, TILE), cute.ceil_div(columns, TILE)

    def begin(self, block: Int32) -> None:
        self.fetch(cutlass.max(block, 0))  # a subrange without blocks may begin before the first block

    def prefetch(self, block: Int32) -> None:
        self.fetch(block)

    def prepare_stage(self, block: Int32) -> None:
        for i in range(cute.size(self.block_words)):
            word = self.next_words[i]
            # A tile of keys beyond the last has no words, and the loaded words belong to another tile.
            if self.coord.transposed:
                word = cutlass.select_(self.coord.row < self.coord.sizes.Sk, word, Int32(0))
            self.block_words[i] = word

    @cute.jit
    def fetch(self, block: Int32):
        """Start the loads of a block's words."""
        coord, count = self.coord, cute.size(self.next_words)
        _, columns = self.tiles()
        first, tile_row, row = block * coord.block_columns // TILE, self.tile_row, coord.row
        if cutlass.const_expr(coord.transposed):
            # The backward has few registers, so the address is computed in every step. (In the forward ptxas would
            # serialize every product for such an address.)
            tile_row, row = tile_row + zero_of(block), row + zero_of(block)
        thread = cute.arch.thread_idx()[0] % TILE_WORDS
        if cutlass.const_expr(coord.by_row):
            first_thread = (row & (TILE - MMA_ATOM_M)) * (TILE_WORDS // TILE)  # 32 threads hold 16 rows
            thread = first_thread + cute.arch.lane_idx()
        begin = tile_row * (columns + 1) * TILE_WORDS + thread
        if cutlass.const_expr(coord.block_columns % TILE == 0 and not coord.transposed):
            for i in cutlass.range_constexpr(count):  # no tile is more than one behind the last tile
                self.next_words[i] = self.word(begin + (first + i) * TILE_WORDS)
        elif cutlass.const_expr(coord.block_columns % TILE == 0):
            for i in cutlass.range_constexpr(count):
                self.next_words[i] = self.word(begin + cutlass.min(first + i, columns) * TILE_WORDS)
        else:
            shift = block * coord.block_columns % TILE // 2
            low_word = self.word(begin + cutlass.min(first, columns) * TILE_WORDS)
            for i in cutlass.range_constexpr(count):
                high_word = self.word(begin + cutlass.min(first + i + 1, columns) * TILE_WORDS)
                self.next_words[i] = shifted(low_word, high_word, shift)
                low_word = high_word
        if cutlass.const_expr(coord.by_row and coord.transposed):  # the thread's scores may begin inside a block
            self.next_words[0] = self.next_words[0] >> ((coord.column & -8) >> 1)

    def word(self, nth: Int32) -> Int32:
        """Load word `nth`. There are fewer than 2^32 words."""
        return cute.arch.load(self.words.iterator + Int64(Uint32(nth)), Int32)

    def bit(self, r: int, c: int) -> cutlass.Boolean:
        """Return the bit of score (r, c) of the current block."""
        word, i = divmod(r + 2 * c, WORD_BITS)
        return (self.block_words[word] & single_bit(i)) != 0


def shifted(low: Int32, high: Int32, count: Int32) -> Int32:
    """Return 32 bits of the pair (high, low), from bit `count` on."""
    text = "shf.r.wrap.b32 {$w0}, {$r0}, {$r1}, {$r2};"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[low, high, count])


@dataclass(frozen=True)
class BitmaskStage(BitmaskTiles):
    """Bitmask stage for all blocks: scores whose bit is 0 become -inf."""

    applies_to_full_blocks = True

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
            for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
                S[r, c] = cutlass.select_(self.bit(r, c), S[r, c], -Float32.inf)


@dataclass(frozen=True)
class BlockSparseBitmaskStage(BitmaskStage):
    """Bitmask stage for partial blocks only, where block-sparse lists mark the partial blocks (block_sparse.py)."""

    applies_to_full_blocks = False
