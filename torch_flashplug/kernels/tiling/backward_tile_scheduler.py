"""Order in which a backward kernel processes KV blocks, and in which KV blocks are accumulated into dQ.

Without a required order, the longest KV blocks come first: most queries see the first keys.

In deterministic mode, the KV blocks of a query block are accumulated in launch order. Each KV block follows the
previous block by a few steps, so hardly any block waits. With a causal mask the order is from the last keys to the
first, because the steps of earlier keys begin earlier. Without a causal mask, all KV blocks begin at the same step.
Heads then take turns until the previous block is far enough ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..primitives.tile_scheduler import TileScheduler, balanced_group_size
from .block_iterator import BoundBlocks, QueryBlockRange

STEPS_BEHIND = 3  # steps by which a KV block follows the previous block
# Smallest number of tiles of an L2 group, if tiles visit the query heads of a group together: about one tile per CTA.
# With more tiles, rows of D 64 leave L2. With fewer tiles, the last tile of the L2 group runs alone.
TILES_PER_L2_GROUP = 128


@dataclass(frozen=True)
class BackwardTileScheduler(TileScheduler):
    """Backward tile scheduler with KV blocks of KV heads as tiles."""

    blocks: BoundBlocks
    in_order: bool = False

    @property
    def last_first(self) -> bool:
        return self.in_order and self.blocks.tile_lengths_vary

    def tile(self, number: Int32) -> tuple[Int32, Int32, Int32]:
        """Return (n_block, KV head, batch) of a linear tile index."""
        n_block, head, batch = super().tile(number)
        return n_block if self.last_first else self.num_m_blocks - 1 - n_block, head, batch

    def accumulation_rank(self, n_block: Int32, query_range: QueryBlockRange, j: Int32) -> Int32:
        """Return the accumulation rank: the number of KV blocks added to a query block before `n_block`.

        Args:
            n_block: index of the KV block.
            query_range: query blocks of the KV block.
            j: position of the query block in `query_range`.
        """
        return self.blocks.accumulation_rank(n_block, query_range, j, self.num_m_blocks) if self.last_first else n_block


def kv_heads_per_l2_group(
    blocks: BoundBlocks,
    group: Int32,
    kv_heads: Int32,
    row_bytes: int,
    num_ctas: Int32 | None = None,
    visits_group_together: bool = False,
) -> Int32:
    """Return the number of KV heads per L2 group. Tiles of these heads take turns.

    Args:
        blocks: block iterator of the call.
        group: query heads per KV head.
        kv_heads: KV heads over the whole batch.
        row_bytes: bytes read and accumulated by the steps per query row of a head.
        num_ctas: number of concurrent CTAs, given in deterministic mode.
        visits_group_together: True if tiles visit the query heads of a group together, unless `group` is 1.
    """
    Sq, Sk = blocks.sizes.Sq, blocks.sizes.Sk
    if blocks.tile_lengths_vary:
        head_bytes = Int64(Sq) * group * row_bytes
        num_n_blocks = cute.ceil_div(Sk, blocks.tile_n)
        fitting_heads = TileScheduler.heads_per_l2_group(head_bytes, num_n_blocks, 1, kv_heads)
        if not visits_group_together:
            return fitting_heads
        heads = _heads_of_equal_l2_groups(kv_heads, cute.ceil_div(Int32(TILES_PER_L2_GROUP), num_n_blocks))
        return cutlass.select_(group > 1, heads, fitting_heads)
    if num_ctas is not None:
        # Enough heads to start all CTAs, successively, in the time of a tile.
        steps = cute.ceil_div(Sq, blocks.tile_m) * group
        return cutlass.min(cute.ceil_div(num_ctas * STEPS_BEHIND, steps), kv_heads)
    return Int32(1)


@cute.jit
def _heads_of_equal_l2_groups(kv_heads: Int32, fewest: Int32) -> Int32:
    """Return the smallest number of KV heads that splits all heads into equal L2 groups of at least `fewest` heads.

    A smaller last L2 group would leave its longest tiles running alone. If equal L2 groups would need more than twice
    as many heads, the sizes of L2 groups are almost equal, near that limit.
    """
    most = 2 * fewest
    heads = balanced_group_size(kv_heads, most)
    for i in cutlass.range(fewest + 1):
        if kv_heads % (most - i) == 0:
            heads = most - i
    return heads
