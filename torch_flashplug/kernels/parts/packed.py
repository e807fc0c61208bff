"""Which part of a decode problem a CTA has: the query heads that share a KV head are packed into tiles of rows, whose
keys are split.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from . import sm90
from .pieces import of_head
from .walk import BoundBand, Sizes, Split


@dataclass(frozen=True)
class Part:
    """A tile of packed rows of one KV head, and one split of its keys."""

    sizes: Sizes
    kv_head: Int32
    batch: Int32
    first_row: Int32  # packed, of the KV head: query head of the group * Sq + query
    rows: Int32  # packed, of the KV head
    split: Int32
    splits: Int32

    @classmethod
    def of_cta(cls, sizes: Sizes, Hq: Int32, Hkv: Int32, tile_m: int, splits: Int32) -> Part:
        """Splits of a tile are neighbours, a cluster perhaps; then tiles of a KV head, which read the same keys."""
        rows = Hq // Hkv * sizes.Sq
        m_tiles = cute.ceil_div(rows, tile_m)
        number, split = cute.arch.block_idx()[0] // splits, cute.arch.block_idx()[0] % splits
        kv, first_row = number // m_tiles, number % m_tiles * tile_m
        return cls(sizes, kv % Hkv, kv // Hkv, first_row, rows, split, splits)

    def keys(self, walk: BoundBand) -> Split:
        """This split's KV blocks."""
        return Split.create(walk.all_keys(), self.split, self.splits)

    def of_head(self, x: sm90.Operand | cute.Tensor) -> sm90.Operand | cute.Tensor:
        """K or V of its KV head."""
        return of_head(x, self.kv_head, self.batch)

    def place(self, row: Int32) -> tuple[Int32, Int32]:
        """Query head and query of a packed row."""
        group = self.rows // self.sizes.Sq
        return self.kv_head * group + row // self.sizes.Sq, row % self.sizes.Sq
