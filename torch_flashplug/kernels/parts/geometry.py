"""Which KV blocks a tile of query rows visits, and which of them need a mask. Decides *which*; mask.py decides *what*.

Causal is PyTorch's top-left alignment: key j is visible to query i iff j <= i, also when Sq != Sk.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class Geometry:
    """Sizes of one problem as one CTA tile sees it. KV blocks are visited from the right: the partial ones first, then
    the full ones.
    """

    mask: str
    tile_m: int
    tile_n: int
    Sq: Int32
    Sk: Int32

    def num_blocks(self, m_block: Int32) -> Int32:
        """KV blocks that hold a key visible to some row of the tile; at least one."""
        stop = self.Sk
        if self.mask == "causal":
            stop = cutlass.min(stop, (m_block + 1) * self.tile_m)
        return cute.ceil_div(stop, self.tile_n)

    def num_full(self, m_block: Int32) -> Int32:
        """Those of them, counted from the left, whose every key is visible to every row."""
        stop = self.Sk
        if self.mask == "causal":
            stop = cutlass.min(stop, m_block * self.tile_m + 1)
        return stop // self.tile_n
