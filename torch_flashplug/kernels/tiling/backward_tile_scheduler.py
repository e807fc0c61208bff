"""In which order a backward works on blocks of keys, and in which they add to dQ where that order is asked for.

In any order, the longest come first: most queries see the first keys. In order, the key blocks that see a block of
queries add to it one after the other, as they are launched: each follows the one before it a few steps behind, so that
hardly any waits. With a causal mask that is from the last keys to the first, whose steps begin earlier; without one all
begin at the same step, and heads take turns, until the block before is so far ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..primitives.tile_scheduler import TileOrder
from .block_iterator import BoundBand, Downward

STEPS_BEHIND = 3  # that a key block follows the one before it


@dataclass(frozen=True)
class KeyOrder(TileOrder):
    """A launch whose tiles are blocks of keys of a KV head."""

    walk: BoundBand
    in_order: bool = False

    @property
    def last_first(self) -> bool:
        return self.in_order and self.walk.uneven

    def tile(self, number: Int32) -> tuple[Int32, Int32, Int32]:
        """(n_block, KV head, batch) of a launch-order number."""
        n_block, head, batch = super().tile(number)
        return n_block if self.last_first else self.num_m_blocks - 1 - n_block, head, batch

    def turn(self, n_block: Int32, run: Downward, j: Int32) -> Int32:
        """In order: how many key blocks add to the block of queries at a position of a run before this one."""
        return self.walk.turn(n_block, run, j, self.num_m_blocks) if self.last_first else n_block


def heads_in_turn(
    walk: BoundBand, group: Int32, kv_heads: Int32, row_bytes: int, num_ctas: Int32 | None = None
) -> Int32:
    """KV heads whose tiles take turns, the section of a launch. group: query heads of each; row_bytes: of a query of
    one head, all that its steps read and add to; num_ctas: those that run at once, where blocks add in order.
    """
    Sq, Sk = walk.sizes.Sq, walk.sizes.Sk
    if walk.uneven:
        head_bytes = Int64(Sq) * group * row_bytes
        return TileOrder.section_heads(head_bytes, cute.ceil_div(Sk, walk.tile_n), 1, kv_heads)
    if num_ctas is not None:
        # As many as are needed to start all CTAs, one after the other, in the time of one tile.
        steps = cute.ceil_div(Sq, walk.tile_m) * group
        return cutlass.min(cute.ceil_div(num_ctas * STEPS_BEHIND, steps), kv_heads)
    return Int32(1)
