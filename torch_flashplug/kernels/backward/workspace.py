"""Workspace of dQ in global memory, with counters that order the accesses of warps of different CTAs."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...registry.kernel_spec import FP32_BYTES, WARP
from ..primitives.vector_access import QUAD, vector_at
from ..tiling.tile import Tile

# Slightly more than the number of concurrent CTAs; with twice as many, the workspace leaves L2 (-6 % at 512 keys).
CTAS_AHEAD = 140
UNITS = 8  # units per block of rows: one for each consumer warp on Hopper

CLEARED, ADDED = 0, 1  # counters of a KV head


@dataclass(frozen=True)
class WorkspaceLayout:
    """Distance in KV heads between the dQ writers and the steps. The writers clear later heads and write earlier heads.

    Tile number c belongs to about KV head c // portions, because tiles are ordered within L2 groups of heads. The
    writers of tile c clear a portion of the workspace of head c // portions + heads, and write the same portion of head
    c // portions - heads.

    The workspace therefore stays in L2, and every tile waits only for tiles fetched earlier. Separate kernels clear the
    first heads and write the last heads (pre_post_process.py).
    """

    heads: Int32
    group: Int32  # query heads per KV head
    portions: Int32  # tiles per KV head

    @classmethod
    def create(cls, l2_group_heads: Int32, portions: Int32, kv_heads: Int32, group: Int32) -> WorkspaceLayout:
        return cls(cutlass.min(l2_group_heads + cute.ceil_div(CTAS_AHEAD, portions), kv_heads), group, portions)


@dataclass(frozen=True)
class DqWorkspace:
    """Workspace of dQ in fp32, followed by Int32 counters.

    A unit is 16 rows and half of the columns, which a consumer warp on Hopper adds at once. The floats of a unit are in
    the order of the wgmma accumulator: eight columns at a time, with the values of 32 lanes.

    In deterministic mode there is a counter per unit: the number of KV blocks already added to the unit. On sm_80, the
    counter belongs to a block of rows and counts warps. Then come two counters per KV head.
    """

    start: cute.Pointer
    num_m_blocks: Int32
    heads: Int32  # query heads over the whole batch
    unit_floats: int

    @property
    def units(self) -> Int32:
        return self.heads * self.num_m_blocks * UNITS

    def first_block(self, tile: Tile, nth: Int32, kv_heads: Int32) -> Int32:
        """Return the first block of rows of query head number `nth` of a tile of keys."""
        head = tile.batch * (tile.group * kv_heads) + tile.query_head(nth)
        return head * self.num_m_blocks + tile.first_block

    def unit(self, number: Int32 | Int64) -> cute.Pointer:
        return self.start + Int64(number) * self.unit_floats

    def add(self, unit: Int32, floats: cute.Tensor) -> None:
        """Add shared memory to a unit, as a single bulk group. A single thread calls `add`."""
        text = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};"
        size, target = Int32(self.unit_floats * 4), self.unit(unit).toint()
        cute.arch.inline_ptx(text, read_only_args=[target, floats.iterator.toint(), size])
        cute.arch.cp_async_bulk_commit_group()

    def add_registers(self, unit: Int32, acc: cute.Tensor) -> None:
        """Add the warp's part of an accumulator to a unit, by vector reductions of all lanes."""
        flat = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        target = (self.unit(unit) + cute.arch.lane_idx() * QUAD).toint()
        for i in range(0, cute.size(acc), QUAD):
            text = f"red.global.add.v4.f32 [{{$r0}}+{i * WARP * FP32_BYTES}], {{ {{$r1}}, {{$r2}}, {{$r3}}, {{$r4}} }};"
            cute.arch.inline_ptx(text, read_only_args=[target, *(flat[i + n] for n in range(QUAD))])

    def unit_counter(self, unit: Int32 | Int64) -> cute.Pointer:
        """Return the pointer to the counter of a unit."""
        return cute.recast_ptr(self.unit(self.units), dtype=Int32) + unit

    def counter(self, kv_head: Int32, which: int) -> cute.Pointer:
        return self.unit_counter(self.units) + (2 * kv_head + which)


@cute.jit
def wait_for_count(counter: cute.Pointer, expected: Int32):
    """Wait until the counter reaches `expected`. Earlier writes of the counting threads are then visible."""
    count = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    while count < expected:
        count = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")


@cute.jit
def count_up(counter: cute.Pointer):
    """Increment a counter.

    Earlier writes, or awaited results, of the thread become visible to all. A single thread calls this.
    """
    cute.arch.atomic_add(counter, Int32(1), sem="release", scope="gpu")


@cute.jit
def clear(floats: cute.Pointer, count: Int32, thread: Int32, threads: int):
    """Set `count` floats to zero, distributed over `threads` threads. `count` is a multiple of four."""
    zeros = cute.make_rmem_tensor((QUAD,), Float32)
    zeros.fill(0.0)
    for i in cutlass.range(thread, count // QUAD, threads, unroll=1):
        cute.autovec_copy(zeros, vector_at(floats + i * QUAD, Float32, QUAD))
