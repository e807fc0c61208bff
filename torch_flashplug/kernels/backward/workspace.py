"""dQ's scratch in global memory, and the counters by which warps of different CTAs follow each other through it."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..primitives.vector_access import QUAD, vector_at
from ..tiling.tile import Tile

CTAS_AHEAD = 140  # a few more than run at once; with twice as many, scratch leaves L2 (-6 % at 512 keys)
UNITS = 8  # of a block of rows: one for each of Hopper's consumer warps

CLEARED, ADDED = 0, 1  # counters of a KV head


@dataclass(frozen=True)
class Ahead:
    """How far dQ writers run ahead of the steps, clearing, and behind them, writing, in KV heads.

    Tile number c is of KV head c // portions, about: tiles are ordered within sections of heads. Its writers clear one
    portion of what head c // portions + heads adds to, and write the same portion of head c // portions - heads. So
    scratch stays in L2, and every tile waits only for tiles drawn before it. The first heads are cleared and the last
    ones written by kernels of their own (pre_post_process.py).
    """

    heads: Int32
    group: Int32  # query heads of a KV head
    portions: Int32  # tiles of a KV head

    @classmethod
    def create(cls, section: Int32, portions: Int32, kv_heads: Int32, group: Int32) -> Ahead:
        return cls(cutlass.min(section + cute.ceil_div(CTAS_AHEAD, portions), kv_heads), group, portions)


@dataclass(frozen=True)
class Scratch:
    """fp32 dQ, units of it in the order of wgmma's accumulator: eight columns at a time, what 32 lanes have of them.
    A unit is 16 rows and half of the columns: what a consumer warp of Hopper's adds at once. Then Int32 counters: how
    many key blocks have added to each unit (sm_80: warps, to a block of rows), where their order is asked for; two for
    each KV head.
    """

    start: cute.Pointer
    num_m_blocks: Int32
    heads: Int32  # query heads over the whole batch
    unit_floats: int

    @property
    def units(self) -> Int32:
        return self.heads * self.num_m_blocks * UNITS

    def first_block(self, tile: Tile, nth: Int32, kv_heads: Int32) -> Int32:
        """The first block of rows of the nth query head that a tile of keys meets."""
        head = tile.batch * (tile.group * kv_heads) + tile.query_head(nth)
        return head * self.num_m_blocks + tile.first_block

    def unit(self, number: Int32 | Int64) -> cute.Pointer:
        return self.start + Int64(number) * self.unit_floats

    def add(self, unit: Int32, floats: cute.Tensor) -> None:
        """One thread: shared memory to a unit, as one group."""
        text = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};"
        size, target = Int32(self.unit_floats * 4), self.unit(unit).toint()
        cute.arch.inline_ptx(text, read_only_args=[target, floats.iterator.toint(), size])
        cute.arch.cp_async_bulk_commit_group()

    def turn(self, unit: Int32 | Int64) -> cute.Pointer:
        """Counter of a unit."""
        return cute.recast_ptr(self.unit(self.units), dtype=Int32) + unit

    def counter(self, kv_head: Int32, which: int) -> cute.Pointer:
        return self.turn(self.units) + (2 * kv_head + which)


@cute.jit
def wait_for_count(counter: cute.Pointer, expected: Int32):
    """Until others have counted that far, with all that they had written before."""
    seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    while seen < expected:
        seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")


@cute.jit
def count_up(counter: cute.Pointer):
    """One thread: what it has written, or has waited for, is there for everyone."""
    cute.arch.atomic_add(counter, Int32(1), sem="release", scope="gpu")


@cute.jit
def clear(floats: cute.Pointer, count: Int32, thread: Int32, threads: int):
    """fp32 zeros, a multiple of four, by that many threads."""
    zeros = cute.make_rmem_tensor((QUAD,), Float32)
    zeros.fill(0.0)
    for i in cutlass.range(thread, count // QUAD, threads, unroll=1):
        cute.autovec_copy(zeros, vector_at(floats + i * QUAD, Float32, QUAD))


