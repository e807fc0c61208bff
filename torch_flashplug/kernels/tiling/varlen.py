"""Sequences of different lengths on end: tensors (rows, heads, columns) of torch.nn.attention.varlen, which a kernel
gets as (1, heads, rows, columns), and LSE as (1, heads, rows). The kind of pieces whose tiles come from lists.

A list has an entry for every block of rows, or of keys, that some sequence has; all heads share it. It is made on the
device, from lengths that the host does not know; the host knows its room: a sequence of n rows has at most n / tile + 1
blocks. So a tile costs one load, there are no tiles without rows, and tiles may come in any order (docs/layouts.md).

TMA stops at the end of a sequence: what lies behind it, perhaps NaN, is never read as keys nor written as rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...registry.kernel_spec import BACKWARD_TILE
from ..primitives import sm90
from ..primitives.tile_scheduler import TileOrder
from ..primitives.vector_access import vector_at
from .seqlen_info import Sizes
from .tile import Launch, Pieces, Tile

ENTRY = 8  # numbers of an entry: one sector
REACH = 1 << 30  # rows at most, of all sequences
MOST_WORTH = 1 << 16  # tiles: more are as many


@dataclass(frozen=True)
class Span:
    """Rows of one sequence among those of all."""

    start: Int32
    length: Int32

    def of_head(self, x: sm90.Operand | cute.Tensor, head: Int32) -> sm90.Operand | cute.Tensor:
        """As pieces.of_head: rows count from the first one of the sequence."""
        if isinstance(x, sm90.Operand):
            return sm90.Operand(x.atom, self.of_coordinates(x.m, head), x.s)
        rows = x[0, head, None, None]
        first = rows.iterator + Int64(self.start) * rows.stride[0]
        return cute.make_tensor(first, cute.make_layout((self.length, rows.shape[1]), stride=rows.stride))

    def of_coordinates(self, m: cute.Tensor, head: Int32) -> cute.Tensor:
        """One head of a tensor that `stopping` has made, or of its transpose."""
        first, rest = self.coordinates()
        rows_lead = type(m.shape[0]) is int  # REACH; columns are not known when traced
        return cute.domain_offset((first, 0) if rows_lead else (0, first), m[None, None, head, rest])

    def coordinates(self) -> tuple[Int32, tuple[Int32, int]]:
        """Of its first row, as `stopping` says."""
        return REACH - self.length, (self.start + self.length, REACH)


def stopping(t: cute.Tensor) -> cute.Tensor:
    """What TMA reads (rows, columns, heads, 1) with two dims instead of the last, so that it stops at the end of any
    sequence: row r of one whose `length` rows end before row `end` of all is at (REACH - length + r, ..., (end,
    REACH)). Rows from `length` on are beyond the first dim: zeros when read, not written. The last coordinate takes
    REACH rows off the address again, around 2^64: a descriptor whose own address lay that far below could not load.
    """
    row, column, head, _ = t.stride
    wrap = around(row, t.element_type.width // 8)
    shape = (REACH, t.shape[1], t.shape[2], (REACH, 2 * REACH - 1))
    return cute.make_tensor(t.iterator, cute.make_layout(shape, stride=(row, column, head, (row, wrap))))


def around(row: Int64, element_bytes: int) -> Int64:
    """What REACH of them, in elements, take REACH rows off an address with."""
    return (1 << 64) // REACH // element_bytes - row


@dataclass(frozen=True)
class MaybeEmpty(Sizes):
    """Of a sequence that may have no rows, or no keys. `or_one` comes from memory: with a maximum worked out in the
    forward ptxas serialises products.
    """

    may_be_empty = True
    or_one: Int32 | None = None  # keys

    @property
    def some_keys(self) -> Int32:
        return self.or_one


@dataclass(frozen=True)
class RaggedTile(Tile):
    """Tensors hold one batch, of all sequences."""

    own: Span | None = None  # rows, or keys where it is a block of keys
    others: Span | None = None  # what those meet
    number: Int32 | None = None  # of the sequence
    first_block: Int32 | None = None

    @property
    def sequence(self) -> Int32:
        return self.number

    def rows_of(self, x: sm90.Operand | cute.Tensor, head: Int32, batch: Int32) -> sm90.Operand | cute.Tensor:
        return self.own.of_head(x, head)

    def keys(self, x: sm90.Operand | cute.Tensor) -> sm90.Operand | cute.Tensor:
        return self.others.of_head(x, self.head_of_keys())

    def queries(self, x: sm90.Operand | cute.Tensor, nth: Int32) -> sm90.Operand | cute.Tensor:
        return self.others.of_head(x, self.query_head(nth))

    def row(self, row: Int32) -> Int32:
        return self.own.start + row

    def place_of_fact(self, which: int, row: Int32) -> tuple[Int32, Int32, int, Int32]:
        return self.batch, self.head, which, self.first_block * BACKWARD_TILE[0] + row

    def facts(self, x: cute.Tensor, nth: Int32, size: int) -> cute.Tensor:
        return cute.domain_offset((0, 0, 0, self.first_block), super().facts(x, nth, size))


@dataclass(frozen=True)
class TileList:
    """Blocks that sequences have. An entry: number of the block in its sequence; the sequence's; first row and rows of
    the side that the block is of; the same of the other side; the first of the sequence's blocks of scratch; rows of
    the other side, at least one.
    """

    entries: cute.Tensor  # (room, ENTRY) Int32, 16-byte aligned; from the last one on zeros, but for the last number: 1
    # (2,) Int32: how many there are; of a sorted list, how many times the work of the first one all of them are.
    head: cute.Tensor

    def room(self) -> Int32:
        return self.entries.shape[0]

    def count(self) -> Int32:
        return cute.arch.make_warp_uniform(self.head[0])

    def worth(self) -> Int32:
        """At least 1, also of no tiles."""
        return cutlass.min(cutlass.max(cute.arch.make_warp_uniform(self.head[1]), 1), MOST_WORTH)

    def load(self, number: Int32) -> tuple[Int32, ...]:
        entry = cute.make_rmem_tensor((ENTRY,), Int32)
        cute.autovec_copy(vector_at(self.entries.iterator + number * ENTRY, Int32, ENTRY), entry)
        return tuple(cute.arch.make_warp_uniform(entry[i]) for i in range(ENTRY))

    def tile(self, number: Int32, head: Int32, batch: Int32, group: Int32 | None, of_keys: bool) -> RaggedTile:
        """The block of an entry, of one head."""
        block, sequence, *spans, first_block, some = self.load(number)
        own, others = Span(*spans[:2]), Span(*spans[2:])
        sizes = (others.length, own.length, own.length) if of_keys else (own.length, others.length, some)
        place = (block, head, batch, MaybeEmpty(*sizes), group)
        return RaggedTile(*place, own=own, others=others, number=sequence, first_block=first_block)


@dataclass(frozen=True)
class RaggedLaunch(Launch):
    """The order's blocks are numbers of entries."""

    entries: TileList | None = None

    @property
    def of_keys(self) -> bool:
        return self.kv_heads is None

    def entry(self, number: Int32) -> tuple[Int32, Int32]:
        """Number of a tile's entry, and its head."""
        nth, head, _ = self.order.tile(number)
        return nth if self.of_keys else self.order.num_m_blocks - 1 - nth, head  # TileOrder begins with the last block

    def tile(self, number: Int32, group: Int32 | None = None) -> RaggedTile:
        nth, head = self.entry(number)
        return self.entries.tile(nth, head, Int32(0), group, self.of_keys)

    def only_tile(self, number: Int32) -> RaggedTile:
        """There may be more CTAs than tiles: the others get an entry without rows."""
        nth, head = self.entry(cutlass.min(number, self.total - 1))
        nth, group = cutlass.select_(number < self.total, nth, self.order.num_m_blocks), self.group
        return replace(self.entries.tile(nth, head, Int32(0), group, self.of_keys), kv_head=head // group)


@dataclass(frozen=True)
class Ragged(Pieces):
    """Sequences on end. A kernel has the lists that it needs: tiles of rows, or of keys, the longest first; blocks of
    rows of scratch, in the order of sequences, as they lie there.
    """

    rows: TileList | None = None
    keys: TileList | None = None
    scratch: TileList | None = None
    total_keys: Int32 | None = None
    uneven = True

    def rows_first(self, t: cute.Tensor) -> cute.Tensor:
        return stopping(sm90.rows_first(t))

    def columns_first(self, t: cute.Tensor) -> cute.Tensor:
        rows = self.rows_first(t)
        return cute.make_tensor(rows.iterator, cute.select(rows.layout, mode=[1, 0, 2, 3]))

    def batch(self, x: cute.Tensor) -> int:
        return 1

    def most_blocks_of_rows(self, Sq: Int32, size: int) -> Int32:
        return self.rows.room()

    def blocks_of_rows(self, Sq: Int32, size: int) -> Int32:
        return self.rows.count()

    def section(self, section: Int32, heads: Int32, group: Int32, of_keys: bool = False) -> Int32:
        """A tile that takes longer than the whole last section would run on alone: where that is more than a tenth of
        the launch (about what L2 is worth), as many sections as leave the last one as long as the longest tile.
        """
        worth, groups = (self.keys if of_keys else self.rows).worth(), heads // group
        ctas = cute.arch.grid_dim()[0]
        alone = ctas * 10 > worth * (heads + 10 * section)
        least = cute.ceil_div(ctas * 9, 10 * worth * group)  # groups that take 0.9 of that time
        most, found = groups // least, groups
        for fewer in (2, 1, 0):
            size = cute.ceil_div(groups, cutlass.max(most - fewer, 1))
            last = groups - (cute.ceil_div(groups, size) - 1) * size
            found = cutlass.select_(last >= least, size, found)
        return cutlass.select_(alone, cutlass.max(section, found * group), section)

    def most_blocks_of_keys(self, Sk: Int32, size: int) -> Int32:
        return self.keys.room()

    def blocks_of_keys(self, Sk: Int32, size: int) -> Int32:
        return self.keys.count()

    def of_rows(self, order: TileOrder, sizes: Sizes, kv_heads: Int32) -> RaggedLaunch:
        return RaggedLaunch(order, sizes, kv_heads, entries=self.rows)

    def block_of_rows(self, number: Int32, sizes: Sizes) -> RaggedTile:
        return self.rows.tile(number, None, None, None, of_keys=False)

    def of_keys(self, order: TileOrder, sizes: Sizes) -> RaggedLaunch:
        if order.in_order:
            raise NotImplementedError("blocks of keys of one sequence add in order if their list is in that order")
        return RaggedLaunch(order, sizes, entries=self.keys)

    def all_keys(self, x: cute.Tensor) -> Int32:
        return self.total_keys

    def block_of_scratch(
        self, number: Int32, head: Int32 | None = None, batch: Int32 | None = None, sizes: Sizes | None = None
    ) -> RaggedTile:
        return self.scratch.tile(number, head, batch, None, of_keys=False)
