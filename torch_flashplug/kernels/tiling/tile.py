"""Where a tile lies: a launch-order number becomes a tile, which says where its rows and keys are, of tensors in global
memory or of what TMA reads them by.

A kernel has pieces as an argument and asks them for the tiles of its launch: `pieces.of_rows(order, ...)`. Dense is the
kind whose sequences are dims of tensors; varlen.py has another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import Int32

from ..primitives import sm90
from ..primitives.tile_scheduler import TileOrder
from .seqlen_info import Sizes


@dataclass(frozen=True)
class Tile:
    """A block of rows of one query head, or of keys of one KV head, or of one of the heads that share it."""

    block: Int32
    head: Int32
    batch: Int32
    sizes: Sizes
    group: Int32 | None = None  # query heads of a KV head
    kv_head: Int32 | None = None

    first_block = 0  # of scratch: the first one of the sequence's rows

    @property
    def sequence(self) -> Int32:
        """Its number, for stages and walks; batch is the tensors'."""
        return self.batch

    def rows(self, x: sm90.Operand | cute.Tensor) -> sm90.Operand | cute.Tensor:
        """Of its own head: those of a query head's tensors, or of a KV head's for a block of keys."""
        return self.rows_of(x, self.head, self.batch)

    def rows_of(self, x: sm90.Operand | cute.Tensor, head: Int32, batch: Int32) -> sm90.Operand | cute.Tensor:
        """The same of any head."""
        return of_head(x, head, batch)

    def rows_of_shared(self, x: sm90.Operand | cute.Tensor, sharing: Int32) -> sm90.Operand | cute.Tensor:
        """Of the KV head that so many heads like this one share."""
        return self.rows_of(x, self.head // sharing, self.batch)

    def keys(self, x: sm90.Operand | cute.Tensor) -> sm90.Operand | cute.Tensor:
        """K or V that a block of rows meets."""
        return of_head(x, self.head_of_keys(), self.batch)

    def queries(self, x: sm90.Operand | cute.Tensor, nth: Int32) -> sm90.Operand | cute.Tensor:
        """Of the nth query head that a block of keys meets."""
        return of_head(x, self.query_head(nth), self.batch)

    def head_of_keys(self) -> Int32:
        """The KV head that a block of rows meets."""
        return self.head // self.group if self.kv_head is None else self.kv_head

    def query_head(self, nth: Int32) -> Int32:
        """The nth of those that a block of keys meets."""
        return self.head * self.group + nth

    def row(self, row: Int32) -> Int32:
        """Its place in tensors."""
        return row

    def place(self, row: Int32) -> tuple[Int32, Int32, Int32]:
        """Of a row's LSE, in (batch, heads, rows)."""
        return self.batch, self.head, self.row(row)

    def place_of_fact(self, which: int, row: Int32) -> tuple[Int32, Int32, int, Int32]:
        """Of a row of its own head, in (batch, heads, 2, rows of scratch)."""
        return self.batch, self.head, which, row

    def facts(self, x: cute.Tensor, nth: Int32, size: int) -> cute.Tensor:
        """Of x (batch, heads, 2, rows of scratch), what the nth query head has that a block of keys meets: (1, size,
        which, block).
        """
        return cute.local_tile(of_head(x, self.query_head(nth), self.batch), (1, size), (None, None))


def of_head(x: sm90.Operand | cute.Tensor, head: Int32, batch: Int32) -> sm90.Operand | cute.Tensor:
    """One head of what TMA reads (rows, columns, heads, batch), or of a tensor (batch, heads, rows, columns)."""
    return x.head(head, batch) if isinstance(x, sm90.Operand) else x[batch, head, None, None]


@dataclass(frozen=True)
class Launch:
    """Tiles of a launch."""

    order: TileOrder
    sizes: Sizes
    kv_heads: Int32 | None = None  # where tiles are rows of query heads

    @property
    def group(self) -> Int32:
        """Query heads of a KV head."""
        return self.order.heads // self.kv_heads

    @property
    def total(self) -> Int32:
        """Tiles of the launch."""
        return self.order.total

    def tile(self, number: Int32, group: Int32 | None = None) -> Tile:
        """group: query heads of a KV head, for those who ask for the tile's keys or queries."""
        return Tile(*self.order.tile(number), self.sizes, group)

    def only_tile(self, number: Int32) -> Tile:
        """For a CTA that has no other: its KV head is divided out here, once, and not where it is asked for."""
        tile = replace(self.tile(number), group=self.group)
        return replace(tile, kv_head=tile.head // tile.group)


@dataclass(frozen=True)
class Pieces:
    """What a kernel takes: any of its kinds."""

    def of_batch(self, tile: Tile, kv_head: Int32, batch: Int32) -> Tile:
        """Decode: a block of rows that `block_of_rows` gave, of one KV head."""
        return replace(tile, kv_head=kv_head, batch=batch)


@dataclass(frozen=True)
class Dense(Pieces):
    """Every sequence of a batch is as long as the others: dims of four-dimensional tensors. Holds nothing, so that a
    kernel has no argument for it.
    """

    uneven = False  # whether tiles differ in length whatever they walk over

    def rows_first(self, t: cute.Tensor) -> cute.Tensor:
        """A tensor (batch, heads, rows, columns) as TMA reads it: (rows, columns, heads, batch)."""
        return sm90.rows_first(t)

    def columns_first(self, t: cute.Tensor) -> cute.Tensor:
        """The same as (columns, rows, heads, batch)."""
        return sm90.columns_first(t)

    def batch(self, x: cute.Tensor) -> Int32:
        """Of what TMA reads."""
        return x.shape[3]

    def blocks_of_rows(self, Sq: Int32, size: int) -> Int32:
        """Tiles of a head."""
        return cute.ceil_div(Sq, size)

    def blocks_of_keys(self, Sk: Int32, size: int) -> Int32:
        """Tiles of a KV head."""
        return cute.ceil_div(Sk, size)

    def section(self, section: Int32, heads: Int32, group: Int32, of_keys: bool = False) -> Int32:
        """Heads of a section, of those that fit in L2; heads: of all batches; group: that stay together; of_keys: of
        tiles of keys.
        """
        return section

    most_blocks_of_rows, most_blocks_of_keys = blocks_of_rows, blocks_of_keys  # that the host knows of

    def of_rows(self, order: TileOrder, sizes: Sizes, kv_heads: Int32) -> Launch:
        """Tiles of query heads, in that order."""
        return Launch(order, sizes, kv_heads)

    def block_of_rows(self, number: Int32, sizes: Sizes) -> Tile:
        """For a kernel that has the heads."""
        return Tile(number, None, None, sizes)

    def of_keys(self, order: TileOrder, sizes: Sizes) -> Launch:
        """Tiles of KV heads."""
        return Launch(order, sizes)

    def all_keys(self, x: cute.Tensor) -> Int32:
        """Of a KV head in what TMA reads, of all sequences that share tensors."""
        return x.shape[0]

    def block_of_scratch(
        self, number: Int32, head: Int32 | None = None, batch: Int32 | None = None, sizes: Sizes | None = None
    ) -> Tile:
        """One of the blocks of rows that a query head has in scratch, with what those who ask need of it."""
        return Tile(number, head, batch, sizes)
