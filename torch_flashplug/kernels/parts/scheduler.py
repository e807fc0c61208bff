"""Which tile a CTA works on: launch-order numbers are drawn from a global counter, and a number becomes (m_block, head,
batch).

Heads are taken in sections whose K and V fit in L2 together. Inside a section causal tiles run longest first, over all
its heads, so that the last ones drawn are short; full tiles of one head run one after another, for L2 reuse. Drawing
beats dealing: with tiles dealt out in fixed turns, causal at 16k keys was 20 % slower than with tiles drawn
(tools/results/LOG.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

# K and V of a section, of 50 MB: the rest holds Q, O and the next section's first blocks. Heads of few tiles read K and
# V too seldom to make up for losing them to Q and O on the way through, so they get less (H100, causal: S 512 1.05
# against 0.92 x cuDNN; S 8k 1.24 against 1.27).
L2_SECTION_BYTES = 32 * 2**20
L2_SECTION_BYTES_SHORT = 16 * 2**20
LONG_HEAD_TILES = 10
MAIL_SLOTS = 2


@dataclass(frozen=True)
class TileOrder:
    """Sizes of the launch; `section` counts query heads over the whole batch."""

    longest_first: bool
    num_m_blocks: Int32
    heads: Int32  # Hq
    total_heads: Int32  # B * Hq
    section: Int32

    @staticmethod
    def section_heads(kv_head_bytes: cutlass.Int64, num_m_blocks: Int32, group: Int32, total_heads: Int32) -> Int32:
        """Query heads (whole groups of one KV head) whose K and V fit in a section; at least one group."""
        budget = cutlass.select_(
            num_m_blocks >= LONG_HEAD_TILES, cutlass.Int64(L2_SECTION_BYTES), cutlass.Int64(L2_SECTION_BYTES_SHORT)
        )
        return cutlass.min(cutlass.max(Int32(budget // kv_head_bytes), 1) * group, total_heads)

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


@dataclass(frozen=True)
class TileQueue:
    """CTA c starts with tile c. The producer warp draws each further one from a counter in global memory and mails it
    to the consumers.

    Every tile is followed by exactly one draw, so whoever makes draw number `total` knows it is the last and puts the
    counter back to zero: a launch leaves the counter as it found it, and no host ever clears it.
    """

    counter: cute.Pointer  # global Int32
    mail: cute.Tensor  # (MAIL_SLOTS,) Int32 in shared memory
    full: cute.Pointer  # mbarriers, one per slot: the producer has written
    empty: cute.Pointer  # every consumer warp has read
    total: Int32

    def init(self, consumer_warps: int):
        """One thread, before anybody waits."""
        for slot in range(MAIL_SLOTS):
            cute.arch.mbarrier_init(self.full + slot, 1)
            cute.arch.mbarrier_init(self.empty + slot, consumer_warps)

    @cute.jit
    def draw(self) -> Int32:
        """Producer warp: the next tile's number; `total` or more when there is none."""
        ticket = Int32(0)
        if cute.arch.lane_idx() == 0:
            ticket = cute.arch.atomic_add(self.counter, Int32(1), sem="relaxed", scope="gpu")
            if ticket == self.total - 1:
                cute.arch.store(self.counter, Int32(0))
        return cute.arch.grid_dim()[0] + cute.arch.shuffle_sync(ticket, 0)

    @cute.jit
    def post(self, nth: Int32, number: Int32):
        """Producer warp: what follows this CTA's nth tile."""
        slot, phase = nth % MAIL_SLOTS, nth // MAIL_SLOTS % 2
        cute.arch.mbarrier_wait(self.empty + slot, phase ^ 1)
        with cute.arch.elect_one():
            self.mail[slot] = number
            cute.arch.mbarrier_arrive(self.full + slot)

    @cute.jit
    def take(self, nth: Int32) -> Int32:
        """Consumer warp: what follows this CTA's nth tile."""
        slot, phase = nth % MAIL_SLOTS, nth // MAIL_SLOTS % 2
        cute.arch.mbarrier_wait(self.full + slot, phase)
        number = self.mail[slot]
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + slot)
        return cute.arch.make_warp_uniform(number)
