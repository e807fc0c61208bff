"""Tile order of a launch: maps a linear tile index to (m_block, head, batch).

On Hopper, CTAs fetch tile indices from a counter (sm90.DynamicTileScheduler). On older architectures, the CTA index is
the tile index.

Heads are processed in L2 groups: groups of heads whose K and V together fit in L2. Within a group, causal tiles of all
heads run longest first, so that the last tiles are short. Full tiles of a head run consecutively, for L2 reuse. Dynamic
scheduling beats static scheduling: with a static round robin, causal attention at 16k keys was 20 % slower
(docs/experiments/forward.md).

Tiles of the backward are KV blocks, in the same groups of heads. There, L2 must hold Q, dO and dQ.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32

# Bytes of K and V of an L2 group. L2 has 50 MB: the rest holds Q, O and the first blocks of the next group. Heads with
# few tiles read K and V too seldom to benefit, because Q and O evict K and V in between. Such heads get a smaller
# budget. Measured on an H100, causal, smaller against larger budget: S 512 1.05 against 0.92 x cuDNN; S 8k 1.24 against
# 1.27. Packed sequences of any lengths get the smaller budget, too. Measured at D 128 with 32, 16 and 8 MB: 32 x 512
# took 139, 121 and 116 us; lengths of texts took 246, 263 and 272 us.
L2_GROUP_BYTES = 32 * 2**20
L2_GROUP_BYTES_SHORT = 16 * 2**20
LONG_HEAD_TILES = 10


def balanced_group_size(count: Int32, size: Int32) -> Int32:
    """Return a size near `size` by which `count` heads form groups of almost equal sizes."""
    num_groups = cutlass.max((count + size // 2) // size, 1)
    return (count + num_groups - 1) // num_groups


@dataclass(frozen=True)
class TileScheduler:
    """Tile scheduler: sizes of the launch."""

    longest_first: bool
    num_m_blocks: Int32
    heads: Int32  # Hq
    total_heads: Int32  # B * Hq
    l2_group_heads: Int32  # query heads per L2 group, over the whole batch

    in_order = False  # True if tiles accumulate in a fixed order (BackwardTileScheduler)

    @staticmethod
    def heads_per_l2_group(
        kv_head_bytes: cutlass.Int64, num_m_blocks: Int32, group: Int32, total_heads: Int32, is_varlen: bool = False
    ) -> Int32:
        """Return the number of query heads per L2 group, in whole groups of a KV head; at least one such group.

        The last L2 group must not be a small remainder, because its long tiles would run alone.

        Args:
            kv_head_bytes: bytes of K and V per KV head.
            num_m_blocks: tiles per query head.
            group: query heads per KV head.
            total_heads: query heads over the whole batch.
            is_varlen: True for packed sequences.
        """
        budget = cutlass.select_(
            num_m_blocks >= LONG_HEAD_TILES, cutlass.Int64(L2_GROUP_BYTES), cutlass.Int64(L2_GROUP_BYTES_SHORT)
        )
        budget = cutlass.Int64(L2_GROUP_BYTES_SHORT) if is_varlen else budget
        fitting = cutlass.max(Int32(budget // kv_head_bytes), 1)
        return balanced_group_size(total_heads // group, fitting) * group

    @property
    def total(self) -> Int32:
        """Number of tiles of the launch."""
        return self.num_m_blocks * self.total_heads

    def tile(self, number: Int32) -> tuple[Int32, Int32, Int32]:
        """Return (m_block, head, batch) of a linear tile index."""
        if self.longest_first:
            tiles_per_group = self.l2_group_heads * self.num_m_blocks
            first_head = number // tiles_per_group * self.l2_group_heads
            heads_in_group = cutlass.min(self.l2_group_heads, self.total_heads - first_head)
            rest = number % tiles_per_group
            m_block = self.num_m_blocks - 1 - rest // heads_in_group
            head = first_head + rest % heads_in_group
        else:
            m_block = number % self.num_m_blocks
            head = number // self.num_m_blocks
        return m_block, head % self.heads, head // self.heads
