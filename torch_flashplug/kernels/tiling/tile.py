"""Mapping of linear tile indices to tiles: block, head and batch indices, and slices of the global tensors.

The slices are taken from tensors in global memory or from TMA operands. A kernel receives a `TileAddressing` object as
an argument and requests the tiles of a launch: `addressing.of_rows(order, ...)`. `DenseAddressing` addresses sequences
as dimensions of tensors. varlen.py addresses packed sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import Int32, Int64

from ..primitives import sm90
from ..primitives.tile_scheduler import TileScheduler
from .seqlen_info import SeqlenInfo


@dataclass(frozen=True)
class Tile:
    """Tile coordinate: a block of rows of a query head, or a block of keys of a KV head.

    A block of keys can also belong to one of several heads sharing a KV head.
    """

    block: Int32
    head: Int32
    batch: Int32
    sizes: SeqlenInfo
    group: Int32 | None = None  # query heads of a KV head
    kv_head: Int32 | None = None

    first_block = 0  # index of the first workspace block of the rows of the sequence

    @property
    def sequence(self) -> Int32:
        """Sequence index, used by score stages and block iterators. `batch` is the batch index of the tensors."""
        return self.batch

    def rows(self, x: sm90.TmaOperand | cute.Tensor) -> sm90.TmaOperand | cute.Tensor:
        """Return the slice of `x` for the head of the tile.

        The head is a query head for a block of rows and a KV head for a block of keys.
        """
        return self.rows_of(x, self.head, self.batch)

    def rows_of(self, x: sm90.TmaOperand | cute.Tensor, head: Int32, batch: Int32) -> sm90.TmaOperand | cute.Tensor:
        """Return the slice of `x` for a given head and batch."""
        return of_head(x, head, batch)

    def rows_of_shared(self, x: sm90.TmaOperand | cute.Tensor, sharing: Int32) -> sm90.TmaOperand | cute.Tensor:
        """Return the slice of `x` for the KV head shared by `sharing` consecutive heads."""
        return self.rows_of(x, self.head // sharing, self.batch)

    def keys(self, x: sm90.TmaOperand | cute.Tensor) -> sm90.TmaOperand | cute.Tensor:
        """Return the slice of K or V attended by a block of rows."""
        return of_head(x, self.head_of_keys(), self.batch)

    def queries(self, x: sm90.TmaOperand | cute.Tensor, nth: Int32) -> sm90.TmaOperand | cute.Tensor:
        """Return the slice of `x` for query head number `nth` of a block of keys."""
        return of_head(x, self.query_head(nth), self.batch)

    def head_of_keys(self) -> Int32:
        """Return the KV head attended by a block of rows."""
        return self.head // self.group if self.kv_head is None else self.kv_head

    def query_head(self, nth: Int32) -> Int32:
        """Return the index of query head number `nth` of a block of keys."""
        return self.head * self.group + nth

    def row(self, row: Int32) -> Int32:
        """Return the row index in the tensors for a row of the sequence."""
        return row

    def lse_coord(self, row: Int32) -> tuple[Int32, Int32, Int32]:
        """Return the coordinate of the LSE of a row, in (batch, heads, rows)."""
        return self.batch, self.head, self.row(row)

    def row_stats_coord(self, which: int, row: Int32) -> tuple[Int32, Int32, int, Int32]:
        """Return the coordinate of a row statistic for the head of the tile.

        Args:
            which: index of the statistic (LSE or delta).
            row: row of the sequence.

        Returns:
            A coordinate in (batch, heads, 2, rows of the workspace).
        """
        return self.batch, self.head, which, row

    def row_stats(self, x: cute.Tensor, nth: Int32, size: int) -> cute.Tensor:
        """Return the row statistics of query head number `nth` of a block of keys, in blocks of `size` rows.

        Args:
            x: row statistics (batch, heads, 2, rows of the workspace).
            nth: number of the query head within the group.
            size: rows of a block.

        Returns:
            A tensor (1, size, which, block).
        """
        return cute.local_tile(of_head(x, self.query_head(nth), self.batch), (1, size), (None, None))


def of_head(x: sm90.TmaOperand | cute.Tensor, head: Int32, batch: Int32) -> sm90.TmaOperand | cute.Tensor:
    """Return a head of a TMA operand or a tensor.

    Args:
        x: TMA operand (rows, columns, heads, batch) or tensor (batch, heads, rows, columns).
        head: head index.
        batch: batch index.
    """
    return x.head(head, batch) if isinstance(x, sm90.TmaOperand) else x[batch, head, None, None]


@dataclass(frozen=True)
class TileGrid:
    """Tile grid of a launch: the tile order, the sequence lengths and the number of KV heads."""

    order: TileScheduler
    sizes: SeqlenInfo
    kv_heads: Int32 | None = None  # set if tiles are rows of query heads

    @property
    def group(self) -> Int32:
        """Number of query heads of a KV head."""
        return self.order.heads // self.kv_heads

    @property
    def total(self) -> Int32:
        """Number of tiles of the launch."""
        return self.order.total

    def tile(self, number: Int32, group: Int32 | None = None) -> Tile:
        """Return the tile with linear index `number`.

        Args:
            number: linear tile index.
            group: query heads of a KV head, required by callers slicing the keys or queries of the tile.
        """
        return Tile(*self.order.tile(number), self.sizes, group)

    def only_tile(self, number: Int32) -> Tile:
        """Return the only tile of a CTA with a single tile.

        The KV head is computed here once by division, instead of at each use.
        """
        tile = replace(self.tile(number), group=self.group)
        return replace(tile, kv_head=tile.head // tile.group)


@dataclass(frozen=True)
class TileAddressing:
    """Base class of the tile addressing accepted by kernels as arguments."""

    def of_batch(self, tile: Tile, kv_head: Int32, batch: Int32) -> Tile:
        """Decode: return a block of rows from `block_of_rows` with a KV head and a batch index."""
        return replace(tile, kv_head=kv_head, batch=batch)

    def tma_of_keys(
        self, config: sm90.TmaLoadConfig, x: cute.Tensor, rows_lead: bool
    ) -> tuple[cute.CopyAtom, cute.Tensor]:
        """Return the TMA atom to load blocks of K or V, and the TMA coordinates.

        Args:
            config: load configuration of a block.
            x: K or V, (batch, heads, rows, columns).
            rows_lead: True for coordinates (rows, columns, ...), False for coordinates (columns, rows, ...).
        """
        return config.tma(self.rows_first(x) if rows_lead else self.columns_first(x))

    def keys_of_head(self, k: cute.Tensor) -> Int64:
        """Return the number of keys of a KV head, at most, on the host."""
        return Int64(k.shape[2])


@dataclass(frozen=True)
class DenseAddressing(TileAddressing):
    """Tile addressing of dense batches: all sequences have equal lengths and are dimensions of 4-D tensors.

    The class has no fields, so a kernel needs no argument.
    """

    sequence_lengths_vary = False  # True if tiles differ in length under every block iterator

    def rows_first(self, t: cute.Tensor) -> cute.Tensor:
        """Return a (rows, columns, heads, batch) view of (batch, heads, rows, columns), the order read by TMA."""
        return sm90.rows_first(t)

    def columns_first(self, t: cute.Tensor) -> cute.Tensor:
        """Return a (columns, rows, heads, batch) view of (batch, heads, rows, columns), for TMA."""
        return sm90.columns_first(t)

    def batch(self, x: cute.Tensor) -> Int32:
        """Return the batch size of a TMA operand."""
        return x.shape[3]

    def blocks_of_rows(self, Sq: Int32, size: int) -> Int32:
        """Return the number of tiles of a query head."""
        return cute.ceil_div(Sq, size)

    def blocks_of_keys(self, Sk: Int32, size: int) -> Int32:
        """Return the number of tiles of a KV head."""
        return cute.ceil_div(Sk, size)

    def heads_per_l2_group(self, fitting_heads: Int32, heads: Int32, group: Int32, of_keys: bool = False) -> Int32:
        """Return the number of heads per L2 group for the tile scheduler.

        Args:
            fitting_heads: number of heads whose data fits in L2.
            heads: heads of all batches.
            group: heads to be kept together.
            of_keys: True if the tiles are blocks of keys.
        """
        return fitting_heads

    max_blocks_of_rows, max_blocks_of_keys = blocks_of_rows, blocks_of_keys  # upper bounds known to the host

    def of_rows(self, order: TileScheduler, sizes: SeqlenInfo, kv_heads: Int32) -> TileGrid:
        """Return the tile grid of query heads in the given tile order."""
        return TileGrid(order, sizes, kv_heads)

    def block_of_rows(self, number: Int32, sizes: SeqlenInfo) -> Tile:
        """Return the row block, in a kernel with known head and batch."""
        return Tile(number, None, None, sizes)

    def of_keys(self, order: TileScheduler, sizes: SeqlenInfo) -> TileGrid:
        """Return the tile grid of KV heads."""
        return TileGrid(order, sizes)

    def all_keys(self, x: cute.Tensor) -> Int32:
        """Return the number of keys of a KV head in a TMA operand, summed over all sequences in the tensor."""
        return x.shape[0]

    def workspace_block(
        self, number: Int32, head: Int32 | None = None, batch: Int32 | None = None, sizes: SeqlenInfo | None = None
    ) -> Tile:
        """Return a workspace block of rows of a query head, with the fields needed by callers."""
        return Tile(number, head, batch, sizes)
