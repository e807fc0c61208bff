"""Walks from lists: block-sparse attention (FlashAttention, arXiv 2205.14135, section 3.3). The lists are those of
FlexAttention's BlockMask as they are: padded, int32, blocks of LISTED queries and keys, for each row of blocks those
that hide something and those that hide nothing (a digest has lists of TALL x LISTED, too). What a masked block hides is
a stage's (scores/words.py).

A tile may be smaller than a listed block: it walks over the parts of each that are its own size. The first block of a
forward's tile and the last one of dQ's count as masked, whatever list they are in: words of a whole block are ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from ...registry.kernel_spec import LISTED, TALL
from ...registry.mask_layout import FLAGS
from ..primitives.fragments import zero_of
from .block_iterator import Run, RunOfKeys, Section, Walk
from .seqlen_info import Sizes
from .tile import Tile


@dataclass(frozen=True)
class Lists:
    """Of one direction: R rows of blocks of all planes, room for C blocks in each; contiguous. Plane (batch, head)
    begins at row batch * rows_of_batch + head * rows_of_head; 0: broadcast.
    """

    masked_count: cute.Tensor  # (R,) Int32
    masked: cute.Tensor  # (R, C) Int32
    whole_count: cute.Tensor  # (R,) Int32
    whole: cute.Tensor  # (R, C) Int32
    rows_of_batch: Int32
    rows_of_head: Int32
    # Where blocks of keys add in order, the same for each entry: of how many later SHAREs of keys it is an entry, too.
    masked_turn: cute.Tensor | None = None
    whole_turn: cute.Tensor | None = None

    def row(self, batch: Int32, head: Int32, row: Int32) -> Int32:
        """Of all rows of blocks."""
        return batch * self.rows_of_batch + head * self.rows_of_head + row

    def counts(self, row: Int32, parts: int) -> tuple[Int32, Int32]:
        """Masked blocks of a row, and all; parts: a listed block's, that are walked over one by one."""
        masked, whole = (cute.arch.load(x.iterator + row, Int32) for x in (self.masked_count, self.whole_count))
        return masked * parts, (masked + whole) * parts


@dataclass(frozen=True)
class Listed(Walk):
    """Block-sparse."""

    keys: Lists  # of each block of queries
    queries: Lists  # of each block of keys
    rows = LISTED  # queries of a block
    uneven = True

    def at(self, sizes: Sizes, tile_m: int, tile_n: int) -> BoundLists:
        return BoundLists(self, sizes, tile_m, tile_n)


@dataclass(frozen=True)
class TallListed(Listed):
    """With keys' lists for blocks of more queries."""

    rows = TALL


@dataclass(frozen=True)
class BoundLists:
    """For tiles of these sizes."""

    of: Listed
    sizes: Sizes
    tile_m: int
    tile_n: int
    uneven = True

    def keys(self, tile: Tile) -> KeysRun:
        kind, rows = (TallKeysRun, TALL) if self.of.rows == TALL else (KeysRun, LISTED)
        row = self.of.keys.row(tile.sequence, tile.head, tile.block // (rows // self.tile_m))
        return kind.create(self.of.keys, row, LISTED // self.tile_n)

    def keys_of_rows(self, tile: Tile, first_row: Int32) -> KeysRun:
        return self.keys(tile)

    def keys_of_part(self, tile: Tile, first_row: Int32, rows: int, uneven: bool) -> tuple[Int32, KeysRun]:
        """Of a tall tile, blocks ahead of the first one and behind the last one that a part sees something of are only
        the others'. Rows beyond the last take part in one block, as of a Band.
        """
        run = self.keys(tile)
        if not uneven:
            return Int32(0), run
        there = first_row < self.sizes.Sq
        begin, end = run.seen_by(first_row // rows - tile.block * (self.tile_m // rows), there)
        return begin, run.between(begin, end)

    def queries(self, tile: Tile) -> Heads:
        return Heads(self, tile)

    def turn(self, n_block: Int32, run: QueriesRun, j: Int32, num_n_blocks: Int32) -> Int32:
        """How many KV blocks add to the block of queries at a position before this one: those of later listed blocks,
        counted by SHAREs of keys (kernel_spec.py), then what follows in its own.
        """
        later = run.turn(j)
        if self.tile_n == LISTED:
            return (later + 1) >> 1
        return later + cutlass.min(1 - n_block % 2, num_n_blocks - 1 - n_block)


@dataclass(frozen=True)
class Heads:
    """The blocks of queries of a tile of keys: a list for every query head."""

    walk: BoundLists
    tile: Tile

    def of_head(self, nth: Int32) -> QueriesRun:
        return self.of_query_head(self.tile.query_head(nth))

    def of_query_head(self, head: Int32) -> QueriesRun:
        walk, tile = self.walk, self.tile
        row = walk.of.queries.row(tile.sequence, head, tile.block // (LISTED // walk.tile_n))
        return QueriesRun.create(walk.of.queries, row, LISTED // walk.tile_m)

    @cute.jit
    def total(self, heads: Int32) -> Int32:
        """Steps of so many query heads."""
        steps = Int32(0)
        for nth in cutlass.range(heads, unroll=1):
            steps += self.of_head(nth).count
        return steps

    def first(self, head: Int32, there: cutlass.Boolean) -> ListedStep:
        """For those who walk over all query heads in one loop, from `head` on. there: whether there is a step."""
        return self.seek(head, Int32(0), there)

    def after(self, step: ListedStep, there: cutlass.Boolean) -> ListedStep:
        """The next step: all of one head, then those of the next that has any."""
        return self.seek(step.head, step.j + 1, there)

    @cute.jit
    def seek(self, head: Int32, j: Int32, there: cutlass.Boolean) -> ListedStep:
        """A step, or where its head has no such the first of the next that has any, if it is there."""
        run, block = self.of_query_head(head), Int32(0)
        row, masked, count = run.row, run.num_masked, run.count
        if there:
            while j >= count:
                head, j = head + 1, Int32(0)
                other = self.of_query_head(head)
                row, masked, count = other.row, other.num_masked, other.count
            block = QueriesRun(run.lists, row, masked, count, run.parts).nth(j)
        return ListedStep(head, j, block, j < masked)

    def at(self, step: ListedStep) -> QueriesRun:
        """The run of its head."""
        return self.of_query_head(step.head)

    def masked(self, step: ListedStep) -> cutlass.Boolean:
        return step.masked


@dataclass(frozen=True)
class ListedStep:
    """walk.Step, with what the list says: of few registers."""

    head: Int32
    j: Int32
    block: Int32
    masked: cutlass.Boolean


@dataclass(frozen=True)
class ListedRun(Run):
    """`count` blocks, those that hide something first."""

    lists: Lists
    row: Int32
    num_masked: Int32
    count: Int32
    parts: int
    skipped: Int32 | int = 0  # masked ones ahead of the first

    @classmethod
    def create(cls, lists: Lists, row: Int32, parts: int) -> ListedRun:
        return cls(lists, row, *lists.counts(row, parts), parts)

    def nth(self, j: Int32) -> Int32:
        """A load: whoever follows it closely asks for it a step ahead (`next`)."""
        return self.part(self.entry(j, self.lists.masked, self.lists.whole), j)

    def next(self, j: Int32, section: Section) -> Int32:
        """All of a section is in one list."""
        j = cutlass.min(j + 1, section.end - 1)
        masked, whole = (self.lists.masked, j + self.skipped), (self.lists.whole, j - self.num_masked)
        of, position = masked if section.masked else whole
        return self.part(self.load(of.iterator, position), j)

    def part(self, listed: Int32, j: Int32) -> Int32:
        """The one at a position of those that a listed block has."""
        return listed * self.parts + (j & self.parts - 1)

    def entry(self, j: Int32, masked: cute.Tensor, whole: cute.Tensor) -> Int32:
        """At a position, of what is stored like the lists."""
        behind = j >= self.num_masked
        start = cutlass.select_(behind, *(x.iterator.toint() for x in (whole, masked)))
        of = cute.make_ptr(Int32, start, cute.AddressSpace.gmem, assumed_align=4)
        return self.load(of, cutlass.select_(behind, j - self.num_masked, j + self.skipped))

    def load(self, of: cute.Pointer, position: Int32) -> Int32:
        """Of one list. Addresses are made in every step, of numbers below 2^32."""
        row = self.row + zero_of(position)
        nth = row * self.lists.masked.shape[1] + (position >> self.parts.bit_length() - 1)
        return cute.arch.load(of + Int64(Uint32(nth)), Int32)


@dataclass(frozen=True)
class QueriesRun(ListedRun):
    """Of a block of keys."""

    def turn(self, j: Int32) -> Int32:
        """SHAREs of keys whose sums come before."""
        return self.entry(j, self.lists.masked_turn, self.lists.whole_turn)

    def sections(self) -> tuple[Section, Section]:
        return Section(True, Int32(0), self.num_masked), Section(False, self.num_masked, self.count)

    def whole(self) -> Section:
        """For those who do not see scores."""
        return Section(False, Int32(0), self.count)


@dataclass(frozen=True)
class KeysRun(ListedRun, RunOfKeys):
    """Of a block of queries."""

    behind: Int32 | int = 0
    tail_first = False

    def sections(self) -> tuple[Section, Section]:
        """After the first one. Where it is the only one they begin with it, too: lists may have no entry behind it."""
        more = cutlass.min(self.count - 1, 1)
        masked = cutlass.max(self.num_masked, 1) * more
        return Section(True, more, masked), Section(False, masked, self.count * more)

    def columns_of_first(self, rows: int) -> Int32:
        """More than a block has: all."""
        return Int32(LISTED)

    def seen_by(self, part: Int32, there: cutlass.Boolean) -> tuple[Int32, Int32]:
        """Positions, from the first to behind the last, of a part of its rows; there: whether it has any."""
        return cutlass.select_(there, 0, self.count - 1), self.count

    def between(self, begin: Int32, end: Int32) -> KeysRun:
        """Those positions. What a loop's bounds come from is uniform: else ptxas works it out again for every block."""
        begin, end = (cute.arch.make_warp_uniform(position) for position in (begin, end))
        masked = cute.arch.make_warp_uniform(cutlass.max(cutlass.min(self.num_masked, end) - begin, 0))
        return replace(self, num_masked=masked, count=end - begin, skipped=begin, behind=self.count - end)


@dataclass(frozen=True)
class TallKeysRun(KeysRun):
    """Of one of TALL queries: above a block's number a masked entry says which of three parts see something of it."""

    def part(self, listed: Int32, j: Int32) -> Int32:
        return super().part(listed & (1 << FLAGS) - 1, j)

    @cute.jit
    def seen_by(self, part: Int32, there: cutlass.Boolean) -> tuple[Int32, Int32]:
        begin, end, flag = self.count - 1, self.count, Int32(1 << FLAGS) << part
        if there:
            begin = Int32(0)
            while (begin < self.num_masked) & (self.load(self.lists.masked.iterator, begin) & flag == 0):
                begin += 1
            if self.num_masked == self.count:
                begin = cutlass.min(begin, self.count - 1)
                while (end > begin + 1) & (self.load(self.lists.masked.iterator, end - 1) & flag == 0):
                    end -= 1
        return begin, end
