"""In which order tiles are worked on: a launch-order number becomes (m_block, head, batch). Hopper's CTAs
draw the numbers from a counter (sm90.TileQueue); elsewhere a CTA has the number that it is launched with.

Heads are taken in sections whose K and V fit in L2 together. Inside a section causal tiles run longest first, over all
its heads, so that the last ones drawn are short; full tiles of one head run one after another, for L2 reuse. Drawing
beats dealing: with tiles dealt out in fixed turns, causal at 16k keys was 20 % slower than with tiles drawn
(tools/results/LOG.md).

The backward's tiles are blocks of keys, in the same sections of heads: there Q, dO and dQ are what L2 has to keep.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32

# K and V of a section, of 50 MB: the rest holds Q, O and the next section's first blocks. Heads of few tiles read K and
# V too seldom to make up for losing them to Q and O on the way through, so they get less (H100, causal: S 512 1.05
# against 0.92 x cuDNN; S 8k 1.24 against 1.27). So do sequences on end, of whatever lengths (D 128, by 32, 16 and 8 MB:
# 32 x 512 139, 121 and 116 us, lengths of texts 246, 263 and 272 us).
L2_SECTION_BYTES = 32 * 2**20
L2_SECTION_BYTES_SHORT = 16 * 2**20
LONG_HEAD_TILES = 10


@dataclass(frozen=True)
class TileOrder:
    """Sizes of the launch; `section` counts query heads over the whole batch."""

    longest_first: bool
    num_m_blocks: Int32
    heads: Int32  # Hq
    total_heads: Int32  # B * Hq
    section: Int32

    in_order = False  # whether tiles add up one after the other (key_order.KeyOrder)

    @staticmethod
    def section_heads(
        kv_head_bytes: cutlass.Int64, num_m_blocks: Int32, group: Int32, total_heads: Int32, on_end: bool = False
    ) -> Int32:
        """Query heads (whole groups of one KV head) whose K and V about fit in a section; at least one group. The last
        section must not be a small rest: its long tiles would run alone.
        """
        budget = cutlass.select_(
            num_m_blocks >= LONG_HEAD_TILES, cutlass.Int64(L2_SECTION_BYTES), cutlass.Int64(L2_SECTION_BYTES_SHORT)
        )
        budget = cutlass.Int64(L2_SECTION_BYTES_SHORT) if on_end else budget
        groups, fitting = total_heads // group, cutlass.max(Int32(budget // kv_head_bytes), 1)
        sections = cutlass.max((groups + fitting // 2) // fitting, 1)
        return (groups + sections - 1) // sections * group

    @property
    def total(self) -> Int32:
        """Tiles of the launch."""
        return self.num_m_blocks * self.total_heads

    def tile(self, number: Int32) -> tuple[Int32, Int32, Int32]:
        """(m_block, head, batch) of a launch-order number."""
        if self.longest_first:
            per_section = self.section * self.num_m_blocks
            first_head = number // per_section * self.section
            heads_here = cutlass.min(self.section, self.total_heads - first_head)
            rest = number % per_section
            m_block = self.num_m_blocks - 1 - rest // heads_here
            head = first_head + rest % heads_here
        else:
            m_block = number % self.num_m_blocks
            head = number // self.num_m_blocks
        return m_block, head % self.heads, head // self.heads
