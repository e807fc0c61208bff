"""Tile addressing of packed sequences: several sequences of different lengths in one tensor.

The tensors follow torch.nn.attention.varlen, (rows, heads, columns). A kernel receives each tensor as (1, heads,
rows, columns), and the LSE as (1, heads, rows). The tiles come from tile lists.

A tile list has an entry for every block of rows, or of keys, of some sequence. All heads share the list. The list is
made on the device, from lengths unknown to the host. The host knows only the capacity: a sequence of n rows has at most
n / tile + 1 blocks. A tile therefore costs one load, no tile is without rows, and tiles may come in any order
(docs/layouts.md).

TMA stops at the end of a sequence. Memory behind the end, perhaps NaN, is never read as keys and never written as rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...registry.kernel_spec import BACKWARD_TILE, MAX_TOTAL_ROWS
from ..primitives import sm90
from ..primitives.tile_scheduler import TileScheduler
from ..primitives.vector_access import vector_at
from .equal_lengths import ConditionalAddressing
from .seqlen_info import SeqlenInfo
from .tile import Tile, TileGrid

HEADER_PAIR, EQUAL_INT, HEADER_INTS = 2, 4, 5  # second pair, number that tells of equal lengths, all (`header`)
MAX_RELATIVE_WORK = 1 << 16  # limit of `VarlenTileList.relative_work`, in tiles. A larger value has no further effect.


class TileListEntry(NamedTuple):
    """Entry of a tile list: a block of rows or of keys, with the values in memory order."""

    block: Int32  # index of the block in the sequence
    sequence_idx: Int32
    own_start: Int32  # first row on the side of the block
    own_length: Int32  # number of rows on the side of the block
    opposite_start: Int32  # first row on the opposite side
    opposite_length: Int32  # number of rows on the opposite side
    first_workspace_block: Int32  # index of the first workspace block of the sequence
    opposite_length_at_least_one: Int32


ENTRY_INTS = len(TileListEntry._fields)  # Int32 values of an entry, 32 bytes: a sector


@dataclass(frozen=True)
class SequenceSlice:
    """Row range of a sequence in the packed tensor."""

    start: Int32
    length: Int32

    def of_head(self, x: sm90.TmaOperand | cute.Tensor, head: Int32) -> sm90.TmaOperand | cute.Tensor:
        """Return a head of `x`, with rows counted from the first row of the sequence.

        Args:
            x: TMA operand (rows, columns, heads, batch) or tensor (batch, heads, rows, columns).
            head: head index.
        """
        if isinstance(x, sm90.TmaOperand):
            return sm90.TmaOperand(x.atom, self.of_coordinates(x.m, head), x.s)
        rows = x[0, head, None, None]
        first = rows.iterator + Int64(self.start) * rows.stride[0]
        return cute.make_tensor(first, cute.make_layout((self.length, rows.shape[1]), stride=rows.stride))

    def of_coordinates(self, m: cute.Tensor, head: Int32) -> cute.Tensor:
        """Return a head of a view created by `bounded_tma_view`, or of the transposed view."""
        first, rest = self.coordinates()
        # The mode of rows has the static size MAX_TOTAL_ROWS. The number of columns is not known at trace time.
        rows_lead = type(m.shape[0]) is int
        return cute.domain_offset((first, 0) if rows_lead else (0, first), m[None, None, head, rest])

    def coordinates(self) -> tuple[Int32, tuple[Int32, int]]:
        """Return the TMA coordinates of the first row of the sequence, in a view created by `bounded_tma_view`."""
        return MAX_TOTAL_ROWS - self.length, (self.start + self.length, MAX_TOTAL_ROWS)


def bounded_tma_view(t: cute.Tensor) -> cute.Tensor:
    """Return a TMA view with a stop at the end of any sequence.

    The batch dimension of `t` (rows, columns, heads, 1) is replaced by two dimensions. Consider a sequence of `length`
    rows ending before row `end` of the packed tensor. Row r of the sequence is at (MAX_TOTAL_ROWS - length + r, ...,
    (end, MAX_TOTAL_ROWS)). Rows from `length` on lie beyond the first dimension. There, loads return zeros and stores
    are dropped.

    The last coordinate subtracts MAX_TOTAL_ROWS rows from the address by wrapping around 2^64. A descriptor with a base
    address so far below the tensor could not load.
    """
    row, column, head, _ = t.stride
    wrap = wrap_stride(row, t.element_type.width // 8)
    shape = (MAX_TOTAL_ROWS, t.shape[1], t.shape[2], (MAX_TOTAL_ROWS, 2 * MAX_TOTAL_ROWS - 1))
    return cute.make_tensor(t.iterator, cute.make_layout(shape, stride=(row, column, head, (row, wrap))))


def wrap_stride(row: Int64, element_bytes: int) -> Int64:
    """Return the stride whose MAX_TOTAL_ROWS steps wrap around 2^64 and subtract MAX_TOTAL_ROWS rows from an address.

    Args:
        row: stride of a row, in elements.
        element_bytes: bytes of an element.
    """
    return (1 << 64) // MAX_TOTAL_ROWS // element_bytes - row


@dataclass(frozen=True)
class VarlenSeqlenInfo(SeqlenInfo):
    """Sequence lengths of a sequence, perhaps without rows or keys.

    `seqlen_k_at_least_one` is loaded from memory. If the forward kernel computed the maximum instead, ptxas would
    serialize products.
    """

    may_be_empty = True
    seqlen_k_at_least_one: Int32 | None = None  # number of keys, at least one; overrides the property of the base class


@dataclass(frozen=True)
class VarlenTile(Tile):
    """Tile coordinate in packed sequences. The tensors have a single batch with all sequences."""

    own_slice: SequenceSlice | None = None  # row range of the tile's own side: rows, or keys for a block of keys
    opposite_slice: SequenceSlice | None = None  # row range of the opposite side: keys, or rows for a block of keys
    sequence_idx: Int32 | None = None
    first_block: Int32 | None = None

    @property
    def sequence(self) -> Int32:
        return self.sequence_idx

    def rows_of(self, x: sm90.TmaOperand | cute.Tensor, head: Int32, batch: Int32) -> sm90.TmaOperand | cute.Tensor:
        return self.own_slice.of_head(x, head)

    def keys(self, x: sm90.TmaOperand | cute.Tensor) -> sm90.TmaOperand | cute.Tensor:
        return self.opposite_slice.of_head(x, self.head_of_keys())

    def queries(self, x: sm90.TmaOperand | cute.Tensor, nth: Int32) -> sm90.TmaOperand | cute.Tensor:
        return self.opposite_slice.of_head(x, self.query_head(nth))

    def row(self, row: Int32) -> Int32:
        return self.own_slice.start + row

    def row_stats_coord(self, which: int, row: Int32) -> tuple[Int32, Int32, int, Int32]:
        return self.batch, self.head, which, self.first_block * BACKWARD_TILE[0] + row

    def row_stats(self, x: cute.Tensor, nth: Int32, size: int) -> cute.Tensor:
        return cute.domain_offset((0, 0, 0, self.first_block), super().row_stats(x, nth, size))


@dataclass(frozen=True)
class VarlenTileList:
    """List of the blocks of all sequences (`TileListEntry`). All heads share the list."""

    # (capacity, ENTRY_INTS) Int32, 16-byte aligned. Entries behind the last entry are zero, except for a last value of
    # 1.
    entries: cute.Tensor
    # (HEADER_INTS,) Int32: number of entries; for a sorted list, the total work as a multiple of the work of the first
    # entry; the same two numbers, but no entries if all lengths are equal; 1 if all lengths are equal. The last number
    # is set only if the lengths have been compared. Behind a dense kernel, the tensor starts at the second pair.
    header: cute.Tensor

    def capacity(self) -> Int32:
        return self.entries.shape[0]

    def count(self) -> Int32:
        return cute.arch.make_warp_uniform(self.header[0])

    def lengths_differ(self) -> cutlass.Boolean:
        """Return True if not all lengths are equal. A dense kernel must have run ahead."""
        return cute.arch.make_warp_uniform(self.header[EQUAL_INT - HEADER_PAIR]) == 0

    def relative_work(self) -> Int32:
        """Return the total work as a multiple of the longest tile. The result is at least 1, even without tiles."""
        return cutlass.min(cutlass.max(cute.arch.make_warp_uniform(self.header[1]), 1), MAX_RELATIVE_WORK)

    def load(self, number: Int32) -> TileListEntry:
        entry = cute.make_rmem_tensor((ENTRY_INTS,), Int32)
        cute.autovec_copy(vector_at(self.entries.iterator + number * ENTRY_INTS, Int32, ENTRY_INTS), entry)
        return TileListEntry(*(cute.arch.make_warp_uniform(entry[i]) for i in range(ENTRY_INTS)))

    def opposite_slice(self, entry: TileListEntry) -> SequenceSlice:
        """Return the rows, or keys, on the opposite side of an entry."""
        return SequenceSlice(entry.opposite_start, entry.opposite_length)

    def tile(self, number: Int32, head: Int32, batch: Int32, group: Int32 | None, of_keys: bool) -> VarlenTile:
        """Return the block of an entry, for one head."""
        entry = self.load(number)
        own_slice = SequenceSlice(entry.own_start, entry.own_length)
        opposite_slice = self.opposite_slice(entry)
        sizes = (
            (opposite_slice.length, own_slice.length, own_slice.length)
            if of_keys
            else (own_slice.length, opposite_slice.length, entry.opposite_length_at_least_one)
        )
        coord = (entry.block, head, batch, VarlenSeqlenInfo(*sizes), group)
        return VarlenTile(
            *coord,
            own_slice=own_slice,
            opposite_slice=opposite_slice,
            sequence_idx=entry.sequence_idx,
            first_block=entry.first_workspace_block,
        )


@dataclass(frozen=True)
class VarlenTileGrid(TileGrid):
    """Tile grid of packed sequences. A block index of the tile order is the index of an entry."""

    entries: VarlenTileList | None = None

    @property
    def of_keys(self) -> bool:
        return self.kv_heads is None

    def entry(self, number: Int32) -> tuple[Int32, Int32]:
        """Return the entry index and the head of a tile."""
        nth, head, _ = self.order.tile(number)
        # TileScheduler begins with the last block of rows.
        return (nth if self.of_keys else self.order.num_m_blocks - 1 - nth), head

    def tile(self, number: Int32, group: Int32 | None = None) -> VarlenTile:
        nth, head = self.entry(number)
        return self.entries.tile(nth, head, Int32(0), group, self.of_keys)

    def only_tile(self, number: Int32) -> VarlenTile:
        """Return the only tile of a CTA. CTAs without a tile get an entry without rows.

        A launch may have more CTAs than tiles.
        """
        nth, head = self.entry(cutlass.min(number, self.total - 1))
        nth, group = cutlass.select_(number < self.total, nth, self.order.num_m_blocks), self.group
        return replace(self.entries.tile(nth, head, Int32(0), group, self.of_keys), kv_head=head // group)


@dataclass(frozen=True)
class VarlenAddressing(ConditionalAddressing):
    """Tile addressing of packed sequences.

    Each kernel has only the required lists. `rows` and `keys` are tile lists, with the longest tiles first. `workspace`
    lists the workspace blocks of rows, in the order of sequences, equal to the order in memory.
    """

    rows: VarlenTileList | None = None
    keys: VarlenTileList | None = None
    workspace: VarlenTileList | None = None
    total_keys: Int32 | None = None
    skips_equal_lengths: Int32 | int = 0  # 1: a dense kernel ran ahead, which has computed calls with equal lengths
    sequence_lengths_vary = True

    def lengths_have_work(self) -> cutlass.Boolean:
        tile_list = self.keys if self.rows is None else self.rows
        return (self.skips_equal_lengths == 0) | tile_list.lengths_differ()

    def rows_first(self, t: cute.Tensor) -> cute.Tensor:
        return bounded_tma_view(sm90.rows_first(t))

    def columns_first(self, t: cute.Tensor) -> cute.Tensor:
        rows = self.rows_first(t)
        return cute.make_tensor(rows.iterator, cute.select(rows.layout, mode=[1, 0, 2, 3]))

    def batch(self, x: cute.Tensor) -> int:
        return 1

    def max_blocks_of_rows(self, Sq: Int32, size: int) -> Int32:
        return self.rows.capacity()

    def blocks_of_rows(self, Sq: Int32, size: int) -> Int32:
        return self.rows.count()

    def heads_per_l2_group(self, fitting_heads: Int32, heads: Int32, group: Int32, of_keys: bool = False) -> Int32:
        """Return the number of heads per L2 group, large enough to keep the last tile from running on alone.

        A tile longer than the whole last L2 group would run on alone. The sizes change if such a time exceeds a tenth
        of the launch, about the benefit of L2 reuse. The result then has as many groups as possible. The last group
        must still take as long as the longest tile.
        """
        work, groups = (self.keys if of_keys else self.rows).relative_work(), heads // group
        ctas = cute.arch.grid_dim()[0]
        runs_alone = ctas * 10 > work * (heads + 10 * fitting_heads)
        # Number of query groups with 0.9 of the time of the longest tile.
        least = cute.ceil_div(ctas * 9, 10 * work * group)
        most, chosen_size = groups // least, groups
        for fewer in (2, 1, 0):
            size = cute.ceil_div(groups, cutlass.max(most - fewer, 1))
            last = groups - (cute.ceil_div(groups, size) - 1) * size
            chosen_size = cutlass.select_(last >= least, size, chosen_size)
        return cutlass.select_(runs_alone, cutlass.max(fitting_heads, chosen_size * group), fitting_heads)

    def max_blocks_of_keys(self, Sk: Int32, size: int) -> Int32:
        return self.keys.capacity()

    def blocks_of_keys(self, Sk: Int32, size: int) -> Int32:
        return self.keys.count()

    def of_rows(self, order: TileScheduler, sizes: SeqlenInfo, kv_heads: Int32) -> VarlenTileGrid:
        return VarlenTileGrid(order, sizes, kv_heads, entries=self.rows)

    def block_of_rows(self, number: Int32, sizes: SeqlenInfo) -> VarlenTile:
        return self.rows.tile(number, None, None, None, of_keys=False)

    def of_keys(self, order: TileScheduler, sizes: SeqlenInfo) -> VarlenTileGrid:
        if order.in_order:
            raise NotImplementedError(
                "a deterministic backward of packed sequences needs a tile list in the order of sequences"
            )
        return VarlenTileGrid(order, sizes, entries=self.keys)

    def all_keys(self, x: cute.Tensor) -> Int32:
        return self.total_keys

    def workspace_block(
        self, number: Int32, head: Int32 | None = None, batch: Int32 | None = None, sizes: SeqlenInfo | None = None
    ) -> VarlenTile:
        return self.workspace.tile(number, head, batch, None, of_keys=False)
