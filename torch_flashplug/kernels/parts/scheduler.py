"""Which tile a CTA works on: one launch-order number becomes (m_block, head, batch).

Heads are taken in sections whose K and V fit in L2 together. Inside a section causal tiles run longest first, over all its heads, so that the
last wave is made of short ones; full tiles of one head run one after another, for L2 reuse.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32

L2_SECTION_BYTES = 32 * 2**20  # of the 50 MB: the rest holds Q, O and the next section's first blocks


@dataclass(frozen=True)
class TileOrder:
    """Sizes of the launch; `section` counts query heads over the whole batch."""

    longest_first: bool
    num_m_blocks: Int32
    heads: Int32  # Hq
    total_heads: Int32  # B * Hq
    section: Int32

    @staticmethod
    def section_heads(keys: Int32, kv_bytes: int, group: Int32, total_heads: Int32) -> Int32:
        """Query heads (whole groups of one KV head) whose K and V, `kv_bytes` a key, fit in a section; at least one group."""
        per_kv_head = cutlass.Int64(keys) * kv_bytes
        return cutlass.min(cutlass.max(Int32(L2_SECTION_BYTES // per_kv_head), 1) * group, total_heads)

    def tile(self, index: Int32) -> tuple[Int32, Int32, Int32]:
        """(m_block, head, batch) of launch-order number `index`."""
        if self.longest_first:
            per_section = self.section * self.num_m_blocks
            first_head = index // per_section * self.section
            heads_here = cutlass.min(self.section, self.total_heads - first_head)
            rest = index % per_section
            m_block = self.num_m_blocks - 1 - rest // heads_here
            head = first_head + rest % heads_here
        else:
            m_block = index % self.num_m_blocks
            head = index // self.num_m_blocks
        return m_block, head % self.heads, head // self.heads


def grid(num_m_blocks: Int32, total_heads: Int32) -> tuple[Int32, int, int]:
    """One CTA per tile, along x, whose limit is 2^31 - 1."""
    return num_m_blocks * total_heads, 1, 1


