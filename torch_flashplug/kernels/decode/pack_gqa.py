"""Which part of a decode problem a CTA has: the query heads that share a KV head are packed into tiles of rows, whose
keys are split.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..primitives import sm90
from ..tiling.block_iterator import BoundBand, Split
from ..tiling.seqlen_info import Sizes
from ..tiling.tile import Pieces, Tile


@dataclass(frozen=True)
class Part:
    """A tile of packed rows of one KV head, and one split of its keys."""

    tile: Tile  # its block: of packed rows
    first_row: Int32  # packed, of the KV head: query head of the group * Sq + query
    rows: Int32  # packed, of the KV head
    split: Int32
    splits: Int32
    queries: Int32  # of a head in tensors

    @classmethod
    def of_cta(cls, pieces: Pieces, sizes: Sizes, Hq: Int32, Hkv: Int32, tile_m: int, splits: Int32) -> Part:
        """Splits of a tile are neighbours, a cluster perhaps; then tiles of a KV head, which read the same keys."""
        group = Hq // Hkv
        m_tiles = pieces.most_blocks_of_rows(group * sizes.Sq, tile_m)
        number, split = cute.arch.block_idx()[0] // splits, cute.arch.block_idx()[0] % splits
        kv, tile = number // m_tiles, pieces.block_of_rows(number % m_tiles, sizes)
        first_row = tile.block * tile_m
        tile = pieces.of_batch(tile, kv % Hkv, kv // Hkv)
        return cls(tile, first_row, group * tile.sizes.Sq, split, splits, sizes.Sq)

    @property
    def sizes(self) -> Sizes:
        return self.tile.sizes

    @property
    def batch(self) -> Int32:
        return self.tile.batch

    @property
    def last_row(self) -> Int32:
        """Packed; the first where there is none."""
        return cutlass.max(self.rows, 1) - 1 if self.sizes.may_be_empty else self.rows - 1

    def keys(self, walk: BoundBand) -> Split:
        """This split's KV blocks."""
        return walk.share(self.split, self.splits)

    def of_head(self, x: sm90.Operand | cute.Tensor) -> sm90.Operand | cute.Tensor:
        """K or V of its KV head."""
        return self.tile.keys(x)

    def place(self, row: Int32) -> tuple[Int32, Int32]:
        """Query head and query, in tensors, of a packed row."""
        Sq = cutlass.max(self.sizes.Sq, 1) if self.sizes.may_be_empty else self.sizes.Sq
        group = self.rows // Sq
        return self.tile.kv_head * group + row // Sq, self.tile.row(row % Sq)
