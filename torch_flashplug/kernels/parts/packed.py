"""Which part of a decode problem a CTA has: the query heads that share a KV head are packed into tiles of rows, whose
keys are split.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from .geometry import Geometry


@dataclass(frozen=True)
class Part:
    """A tile of packed rows of one KV head, and one split of its keys."""

    geo: Geometry
    kv_head: Int32
    batch: Int32
    first_row: Int32  # packed, of the KV head: query head of the group * Sq + query
    rows: Int32  # packed, of the KV head
    split: Int32
    splits: Int32

    @classmethod
    def of_cta(cls, geo: Geometry, heads: tuple, tile_m: int, splits: Int32) -> Part:
        """Splits of a tile are neighbours, a cluster perhaps; then tiles of a KV head, which read the same keys. heads:
        (Hq, Hkv).
        """
        Hq, Hkv = heads
        rows = Hq // Hkv * geo.Sq
        m_tiles = cute.ceil_div(rows, tile_m)
        number, split = cute.arch.block_idx()[0] // splits, cute.arch.block_idx()[0] % splits
        kv, first_row = number // m_tiles, number % m_tiles * tile_m
        return cls(geo, kv % Hkv, kv // Hkv, first_row, rows, split, splits)

    def blocks(self) -> tuple[Int32, Int32]:
        """This split's key blocks, from and to; sizes differ by one at most."""
        total = self.geo.num_blocks(self.geo.Sq)
        return total * self.split // self.splits, total * (self.split + 1) // self.splits

    def place(self, row: Int32) -> tuple[Int32, Int32]:
        """Query head and query of a packed row."""
        group = self.rows // self.geo.Sq
        return self.kv_head * group + row // self.geo.Sq, row % self.geo.Sq
