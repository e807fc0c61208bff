"""Which KV blocks a tile of query rows visits, and which of them need a mask. Decides *which*; mask.py decides *what*.

Causal is PyTorch's top-left alignment: key j is visible to query i iff j <= i, also when Sq != Sk.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class Steps:
    """The query blocks that a KV block must see: from `begin` on, masked up to `middle`, whole up to `end`."""

    begin: Int32
    middle: Int32
    end: Int32


@dataclass(frozen=True)
class Geometry:
    """Sizes of one problem as query rows see it. KV blocks are visited from the right: the partial ones first, then the
    full ones.
    """

    mask: str
    tile_n: int
    Sq: Int32
    Sk: Int32

    def num_visible(self, end_row: Int32) -> Int32:
        """Keys visible to some row before end_row."""
        return cutlass.min(self.Sk, end_row) if self.mask == "causal" else self.Sk

    def num_blocks(self, end_row: Int32) -> Int32:
        """KV blocks that hold one of those keys; at least one."""
        return cute.ceil_div(self.num_visible(end_row), self.tile_n)

    def num_partial(self, blocks: Int32, first_row: Int32) -> Int32:
        """Those of `blocks`, counted from the right, that are masked for rows from first_row on. The first always is:
        its code is there anyway.
        """
        if self.mask == "full":
            return Int32(1)
        full = cutlass.min(self.Sk, first_row + 1) // self.tile_n  # every key visible to every row
        return cutlass.max(blocks - full, 1)

    def split_blocks(self, end_row: Int32, first: Int32, rows: int, uneven: bool) -> tuple[Int32, Int32]:
        """KV blocks of a tile of rows before end_row that only others of it need, and those that come after them, which
        its `rows` rows from `first` on see. Rows beyond the last take part in one block; their results go nowhere.
        uneven: whether some of the tile's rows may see fewer blocks than others.
        """
        blocks = self.num_blocks(end_row)
        if not uneven:
            return Int32(0), blocks
        mine = cutlass.select_(first < self.Sq, self.num_blocks(first + rows), 1)
        mine = cute.arch.make_warp_uniform(mine)  # else ptxas works it out again for every block
        return blocks - mine, mine

    def steps(self, n_block: Int32, tile_m: int) -> Steps:
        """Query blocks of a KV block. Keys beyond the last mask every step; else only the diagonal does."""
        first_key, end = n_block * self.tile_n, cute.ceil_div(self.Sq, tile_m)
        begin = middle = Int32(0)
        if self.mask == "causal":
            begin = cutlass.min(first_key // tile_m, end)
            middle = cutlass.min(cute.ceil_div(first_key + self.tile_n - 1, tile_m), end)
        middle = cutlass.select_(first_key + self.tile_n > self.Sk, end, middle)
        return Steps(begin, middle, end)
