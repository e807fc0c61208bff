"""Roles of otherwise idle warps in the backward main kernel: dQ writers and accumulator warps.

dQ writers clear the dQ workspace before the steps that add to it, and convert the workspace to dQ after these steps. In
deterministic mode, accumulator warps add to the workspace instead of the consumers.

dQ writers work while the workspace is in L2, in parallel with the tensor-core work of the consumers. Separate kernels
would move the whole workspace through device memory: a third of the time at 512 keys (docs/experiments/backward.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ...registry.kernel_spec import DQ_WRITERS
from ..primitives import sm90
from ..primitives.dtype import Element
from ..primitives.vector_access import QUAD, vector_at
from ..tiling.tile import TileAddressing
from .workspace import ADDED, CLEARED, UNITS, DqWorkspace, WorkspaceLayout, clear, count_up, wait_for_count

ADDED_STAGES = 4  # consumers may be two tiles ahead of a dQ writer


@dataclass(frozen=True)
class WorkspaceUnits:
    """A dQ writer's units of a portion of the workspace: every DQ_WRITERS-th unit, counted from `first`."""

    first: Int64
    begin: Int32
    end: Int32
    fetched: Int32  # number of stages already filled by the warp


@dataclass(frozen=True)
class DqWriter:
    """dQ writer: one of DQ_WRITERS warps, or the view of a warp that waits for the writers."""

    workspace: DqWorkspace
    layout: WorkspaceLayout
    kv_heads: Int32  # over the whole batch
    scale: Float32
    dQ: sm90.TmaOperand  # the operand's shared-memory buffer: (16, columns of a unit) for each writer
    matrices: cute.TiledCopy  # copies an accumulator with the columns of a unit into shared memory
    element: Element
    pipeline: sm90.Pipeline  # pipeline of a single writer
    unit_stages: cute.Tensor  # (floats of a unit, stage)
    addressing: TileAddressing
    added: sm90.Pipeline  # pipeline without bytes: consumers release a stage once the last dQ of a tile has been added

    @property
    def num_m_blocks(self) -> Int32:
        return self.workspace.num_m_blocks

    @cute.jit
    def increment_counter(self, kv_head: Int32, which: int):
        """Increment a counter of a KV head. A single warp calls `arrive`."""
        with cute.arch.elect_one():
            count_up(self.workspace.counter(kv_head, which))

    @cute.jit
    def wait_for_counter(self, kv_head: Int32, which: int, expected: Int32):
        """Wait for a counter of a KV head. The warp then passes the counted data on to TMA."""
        wait_for_count(self.workspace.counter(kv_head, which), expected)
        cute.arch.fence_proxy("async")
        cute.arch.sync_warp()

    @cute.jit
    def wait_cleared(self, kv_head: Int32):
        """Wait until the workspace of a KV head is cleared, before anything is added."""
        self.wait_for_counter(kv_head, CLEARED, self.layout.portions * DQ_WRITERS)

    @cute.jit
    def run(self, tile_scheduler: sm90.DynamicTileScheduler, tile_coord: Callable, writer: Int32):
        """Run a dQ writer, one of DQ_WRITERS warps.

        Args:
            tile_scheduler: tile scheduler.
            tile_coord: function from tile index to (n_block, KV head, batch).
            writer: index of the writer.
        """
        blocks = self.num_m_blocks * self.layout.group  # blocks per KV head
        tile_count, fetched, tile_idx = Int32(0), Int32(0), tile_scheduler.receive(Int32(0))
        while tile_idx < tile_scheduler.total:
            kv_head, portion = tile_idx // self.layout.portions, tile_idx % self.layout.portions
            begin, end = blocks * portion // self.layout.portions, blocks * (portion + 1) // self.layout.portions
            has_output, first_block = kv_head >= self.layout.heads, (kv_head - self.layout.heads) * blocks
            units = WorkspaceUnits(Int64(first_block + begin) * UNITS, writer, (end - begin) * UNITS, fetched)
            if has_output:
                self.wait_for_counter(kv_head - self.layout.heads, ADDED, self.layout.portions)
                self.fetch_first(units)
            if kv_head + self.layout.heads < self.kv_heads:  # overlaps the latency of the loads above
                head = kv_head + self.layout.heads
                start = self.workspace.unit((Int64(head) * blocks + begin) * UNITS)
                thread = writer * sm90.WARP + cute.arch.lane_idx()
                floats = (end - begin) * (UNITS * self.workspace.unit_floats)
                clear(start, floats, thread, DQ_WRITERS * sm90.WARP)
                cute.arch.fence_proxy("async")
                cute.arch.sync_warp()
                self.increment_counter(head, CLEARED)
            if has_output:
                fetched = self.write(units, first_block + begin)
            self.added.producer_wait(tile_count + ADDED_STAGES)  # wait for the consumers of the tile
            if writer == 0:
                _, head, batch = tile_coord(tile_idx)
                self.increment_counter(batch * (self.dQ.m.shape[2] // self.layout.group) + head, ADDED)
            tile_count += 1
            tile_idx = tile_scheduler.receive(tile_count)
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the last store

    @cute.jit
    def fetch_first(self, units: WorkspaceUnits):
        """Load as many units as there are stages."""
        for n in cutlass.range_constexpr(self.pipeline.stages):
            self.fetch(units, units.begin + n * DQ_WRITERS, units.fetched + n)

    @cute.jit
    def fetch(self, units: WorkspaceUnits, unit: Int32, count: Int32):
        """Load a unit of the workspace, if the unit exists, into stage number `count`."""
        if unit < units.end:
            self.pipeline.producer_acquire(count)
            with cute.arch.elect_one():
                source = vector_at(self.workspace.unit(units.first + unit), Float32, self.workspace.unit_floats)
                atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
                cute.copy(
                    atom,
                    source,
                    self.unit_stages[None, self.pipeline.stage_index(count)],
                    mbar_ptr=self.pipeline.arrival(count),
                )

    @cute.jit
    def write(self, units: WorkspaceUnits, first_block: Int32) -> Int32:
        """Write dQ of the units, and return the number of stages filled so far."""
        count = units.fetched
        for unit in cutlass.range(units.begin, units.end, DQ_WRITERS, unroll=1):
            self.pipeline.consumer_wait(count)
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the previous unit has left shared memory
            cute.arch.sync_warp()
            self.convert(self.unit_stages[None, self.pipeline.stage_index(count)])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            self.pipeline.consumer_release(count)
            self.fetch(units, unit + self.pipeline.stages * DQ_WRITERS, count + self.pipeline.stages)
            block = first_block + unit // UNITS
            head, tile = block // self.num_m_blocks, self.addressing.workspace_block(block % self.num_m_blocks)
            slab = tile.block * (UNITS // 2) + unit % (UNITS // 2)
            out = tile.rows_of(self.dQ, head % self.dQ.m.shape[2], head // self.dQ.m.shape[2])
            box = tuple(cute.size(self.dQ.s, mode=[mode]) for mode in range(2))  # (16, columns of a unit)
            tQsQ, tQgQ = out.tiles(box, (None, None))
            cute.copy(out.atom, tQsQ, tQgQ[None, slab, unit % UNITS // (UNITS // 2)])
            cute.arch.cp_async_bulk_commit_group()
            count += 1
        return count

    @cute.jit
    def convert(self, unit: cute.Tensor):
        """Convert fp32 in register order to 16-bit rows in shared memory, sixteen columns at a time."""
        lane = cute.arch.lane_idx()
        copy = self.matrices.get_slice(lane)
        rows = copy.partition_D(self.dQ.s)  # ((matrices, sixteen columns), 1, 1)
        for i in cutlass.range_constexpr(cute.size(rows, mode=[0, 1])):
            pairs = cute.make_rmem_tensor((QUAD,), Int32)
            for half in cutlass.range_constexpr(2):
                four = cute.make_rmem_tensor((QUAD,), Float32)
                source = unit.iterator + (2 * i + half) * sm90.WARP * QUAD + lane * QUAD
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(QUAD)), four)
                for r in cutlass.range_constexpr(2):
                    low, high = four[2 * r] * self.scale, four[2 * r + 1] * self.scale
                    pairs[2 * half + r] = self.element.pack_pair(low, high)
            halves = cute.recast_ptr(pairs.iterator, dtype=self.dQ.s.element_type)
            cute.copy(copy, cute.make_tensor(halves, cute.make_layout((2 * QUAD, 1, 1))), rows[(None, i), None, None])


@cute.jit
def run_accumulator_warp(workspace: DqWorkspace, staged: sm90.Pipeline, staging: cute.Tensor, work, wg: Int32):
    """Run an accumulator warp, one per consumer warpgroup, in deterministic mode.

    The warp adds the four units of a step once all earlier KV blocks have added to these units. A step later, when the
    four units have arrived, the warp allows the next KV block to add.

    Args:
        workspace: dQ workspace.
        staged: pipeline of the staging buffers.
        staging: shared memory (floats, warp).
        work: object with tile_scheduler, tile_grid, group and query_range(tile).
        wg: index of the consumer warpgroup.
    """
    lane = cute.arch.lane_idx()
    tile_count, step_count, tile_idx = Int32(0), Int32(0), work.tile_scheduler.receive(Int32(0))
    while tile_idx < work.tile_grid.total:
        tile = work.tile_grid.tile(tile_idx, work.group)
        query_range = work.query_range(tile)
        first_step, unit = step_count, Int32(0)
        for g in cutlass.range(work.group, unroll=1):
            first_block = workspace.first_block(tile, g, work.tile_grid.order.heads)
            head_range = query_range.of_head(g)
            subrange = head_range.all_blocks()
            for j in cutlass.range(subrange.begin, subrange.end, unroll=1):
                m_block = head_range.nth(j)
                last_unit, unit = unit, (first_block + m_block) * UNITS + wg * 4 + lane
                if lane < 4:
                    wait_for_count(
                        workspace.unit_counter(unit), work.tile_grid.order.accumulation_rank(tile.block, head_range, j)
                    )
                    cute.arch.fence_proxy("async")
                cute.arch.sync_warp()
                staged.producer_wait(step_count + 1)  # the unit has been written to the staging buffer
                if lane < 4:
                    workspace.add(unit, staging[None, wg * 4 + lane])
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                staged.producer_commit(step_count)
                if lane < 4 and step_count > first_step:
                    cute.arch.cp_async_bulk_wait_group(1)
                    count_up(workspace.unit_counter(last_unit))
                step_count += 1
        if lane < 4 and step_count > first_step:
            cute.arch.cp_async_bulk_wait_group(0)
            count_up(workspace.unit_counter(unit))
        tile_count += 1
        tile_idx = work.tile_scheduler.receive(tile_count)
