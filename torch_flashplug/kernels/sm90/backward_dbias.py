"""Bias gradient for Hopper: dS, summed over the dimensions in which the bias is broadcast.

The order of the sums is the same in every run.

The kernel is persistent. A CTA stays on its SM and fetches tiles of the gradient, 128 queries x 64 or 128 keys, from a
dynamic tile scheduler. The mainloop visits all blocks of scores that contribute to the tile
(kernels/backward/dbias_reduce.py). Both products of each block are computed again, and dS is summed in registers. No
workspace but LSE and delta of the rows is needed, and no atomics, whatever the batch. Each of the two consumer
warpgroups owns 64 of the rows.

A step has two pairs of operands, Q and K, then dO and V, which go through a single pipeline. Three pairs of D 128 fit
into shared memory, where two steps would not. The kernel is bound by L2, since every step needs four new tiles. Masking
keys beyond the last in every block costs nothing beside the L2 traffic.
"""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from ...registry.kernel_spec import BACKWARD_WARPGROUPS, ROWS_PER_WARPGROUP, HopperSpec
from ..backward.dbias_reduce import DbiasBlock, DbiasReduce, write_pair
from ..backward.pre_post_process import (
    BackwardPreprocess,
    RowStats,
    RowStatsInputs,
    by_query,
    exponentiate,
    rows_of_thread,
    softmax_backward,
)
from ..call_args.kernel_call import KernelArgs, KernelCall, SoftmaxScale
from ..features.base import KernelFeatures
from ..primitives import fragments, sm90
from ..score_stages.pipeline import ScoreCoord, ScoreLayout, ScorePipeline
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import Tile
from .common import TmaOperands

ROWS, ROWS_PER_WARP = ROWS_PER_WARPGROUP, sm90.ROWS_PER_WARP
WARPGROUPS = BACKWARD_WARPGROUPS
TILE_M = WARPGROUPS * ROWS
WARPS = WARPGROUPS * sm90.WARPGROUP // sm90.WARP  # consumer warps


class DbiasBarrier(enum.IntEnum):
    """Named barriers of the consumer warpgroups; barrier 0 is `sync_threads`."""

    CONSUMERS = 1  # all consumer warpgroups


@dataclass(frozen=True)
class DbiasSmem:
    """Buffers of a CTA in shared memory."""

    rows: cute.Tensor  # Q or dO: (64, D, warpgroup and stage)
    keys: cute.Tensor  # K or V: (TILE_N, D, stage)
    columns: cute.Tensor  # (TILE_N,) fp32: column sums of a tile


@dataclass(frozen=True)
class DbiasWork:
    """Pipelines, tiles and blocks of scores shared by the producer warp and the consumer warpgroups."""

    pairs: sm90.Pipeline
    tile_scheduler: sm90.DynamicTileScheduler
    reduction: DbiasReduce
    sizes: SeqlenInfo
    group: Int32  # query heads of a KV head

    def rows_of(self, block: DbiasBlock) -> Tile:
        """Return the tile with a block's queries and the keys of its KV head."""
        return Tile(block.m, block.head, block.batch, self.sizes, self.group)


@dataclass(frozen=True)
class DbiasConsumerState:
    """State of a consumer warpgroup: its rows of both pairs, the keys, and the accumulators."""

    product: sm90.WgmmaProduct
    wg: Int32
    rows: cute.Tensor  # (MMA, 1, K, warpgroup and stage)
    keys: cute.Tensor  # (MMA, 1, K, stage)
    S: cute.Tensor  # S = Q K^T, then P, then dS
    dP: cute.Tensor  # dP = dO V^T
    sum: cute.Tensor  # sum of dS over the blocks of the tile

    def multiply(self, acc: cute.Tensor, stage: Int32) -> None:
        """Issue the product of a pair as a committed group of wgmmas."""
        rows, keys = self.rows[None, None, None, stage * WARPGROUPS + self.wg], self.keys[None, None, None, stage]
        self.product.issue(acc, rows, keys, accumulate=False)


class BackwardDbiasSm90(KernelCall, kind="dbias"):
    """Builder of the two bias-gradient kernels of a spec: the row statistics, and the gradient.

    Computes dbias = sum of dS over the dimensions in which the bias is broadcast, deterministically.

    Inputs: q (B, Hq, Sq, D), k and v (B, Hkv, Sk, D), o and do (B, Hq, Sq, D), lse (B, Hq, Sq) in fp32. Workspace: rows
    (B, Hq, 2, padded Sq) in fp32. Output: dbias (1 to B, 1 to Hq, Sq or 1, Sk or 1) in the dtype of the bias.

    Warp roles: warpgroup 0 gives its registers away, and its warp 0 is the producer warp. Warpgroups 1 and 2 are
    consumers.

    Pipelines (producer -> consumer, stages):
    - Pairs (Q and K, then dO and V): producer warp -> all consumer warps, `stages` stages of a pair each.
    - Tile indices: producer warp -> all consumer warps, `sm90.TILE_INDEX_STAGES` stages.
    - Score stages add pipelines of their own, for example for bias tiles.

    Shared memory: the stages of the pairs, the column sums (TILE_N,) in fp32, the tile indices, the mbarriers and the
    buffers of the score stages.
    """

    def __init__(self, spec: HopperSpec):
        self.spec, self.features = spec, KernelFeatures.from_spec(spec)
        self.element, self.d, self.tile_n, self.stages = self.features.element, spec.d, spec.tile_n, spec.stages
        self.producer_registers, self.consumer_registers = spec.register_split
        self.score_layout = ScoreLayout(self.element, WARPGROUPS, self.tile_n)
        self.preprocess = BackwardPreprocess(self.element)

    @property
    def inputs(self) -> tuple[sm90.TmaLoadConfig, sm90.TmaLoadConfig]:
        """TMA load configurations of the rows and the keys of a pair."""
        return (
            sm90.TmaLoadConfig.create(self.element, ROWS, self.d, WARPGROUPS * self.stages),
            sm90.TmaLoadConfig.create(self.element, self.tile_n, self.d, self.stages),
        )

    @cute.jit
    def launch(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the features' preprocessing kernels, then the kernels of the row statistics and of the gradient."""
        self.features.launch_preprocess(call, stream)
        addressing, score_pipeline = self.features.tile_addressing(call), self.features.score_pipeline(call)
        row_stats_inputs = RowStatsInputs(call.o, call.do, call.lse)
        self.preprocess(row_stats_inputs, call.row_stats, None, None, score_pipeline.keep_scale, addressing, stream)
        rows, keys = self.inputs
        operands = TmaOperands.create(
            q=rows.tma(sm90.rows_first(call.q)),
            k=keys.tma(sm90.rows_first(call.k)),
            v=keys.tma(sm90.rows_first(call.v)),
            do=rows.tma(sm90.rows_first(call.do)),
        )
        tiles = self.make_reduction(call.q, call.k, call.dbias_any_dtype).tiles.total
        self.kernel(
            operands,
            call.row_stats,
            call.scales,
            call.counter,
            call.dbias_any_dtype,
            score_pipeline.tma(self.score_layout),
        ).launch(
            grid=(cutlass.min(tiles, call.num_ctas), 1, 1),
            block=((WARPGROUPS + 1) * sm90.WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    def make_reduction(self, mQ: cute.Tensor, mK: cute.Tensor, gradient: cute.Tensor) -> DbiasReduce:
        """Return the blocks of scores that each tile sums.

        Args:
            mQ: (B, Hq, Sq, D).
            mK: (B, Hkv, Sk, D).
            gradient: (1 to B, 1 to Hq, Sq or 1, Sk or 1).
        """
        m, n = cute.ceil_div(mQ.shape[2], TILE_M), cute.ceil_div(mK.shape[2], self.tile_n)
        return DbiasReduce.create(DbiasBlock(n, m, mQ.shape[1], mQ.shape[0]), gradient)

    @cute.kernel
    def kernel(
        self,
        operands: TmaOperands,
        mRowStats: cute.Tensor,
        scales: SoftmaxScale,
        mCounter: cute.Tensor,
        mdBias: cute.Tensor,
        score_pipeline: ScorePipeline,
    ):
        """Assign the warp roles: warp 0 loads, and the consumer warpgroups multiply."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        rows, keys = self.inputs
        pairs = sm90.Pipeline.create(smem, self.stages, WARPGROUPS * rows.bytes + keys.bytes)
        tile_index = sm90.TileIndexPipeline.create(smem)
        columns = smem.allocate_tensor(Float32, cute.make_layout(self.tile_n), 16)
        score_pipeline = score_pipeline.allocate_smem(smem, self.score_layout)
        shared = DbiasSmem(rows.buffer(smem), keys.buffer(smem), columns)
        Sq, _, Hq, B = operands.tensor("q").shape
        Sk, _, Hkv, _ = operands.tensor("k").shape
        blocks = DbiasBlock(cute.ceil_div(Sk, self.tile_n), cute.ceil_div(Sq, TILE_M), Hq, B)
        reduction = DbiasReduce.create(blocks, mdBias)
        tile_scheduler = sm90.DynamicTileScheduler(mCounter.iterator, tile_index, reduction.tiles.total)
        work = DbiasWork(pairs, tile_scheduler, reduction, SeqlenInfo(Sq, Sk), Hq // Hkv)
        pipelines_and_warps = (
            sm90.PipelineWarps(pairs, WARPS),
            sm90.PipelineWarps(tile_index.pipeline, WARPS),
            *score_pipeline.pipelines,
        )
        sm90.start_cta(warp_idx, (*operands.atoms, *score_pipeline.atoms), pipelines_and_warps)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                loads = operands.with_smem(q=shared.rows, k=shared.keys, v=shared.keys, do=shared.rows)
                self.load(*loads, work, score_pipeline)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(shared, work, mdBias, mRowStats, scales, score_pipeline)

    @cute.jit
    def load(
        self, q: sm90.TmaOperand, k: sm90.TmaOperand, v: sm90.TmaOperand, do: sm90.TmaOperand, work: DbiasWork,
        score_pipeline: ScorePipeline
    ):  # fmt: skip
        """Run the producer warp: load both pairs of every step, and between them the data of the score stages."""
        tile_count, step_count, tile_idx = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while tile_idx < work.tile_scheduler.total:
            first_block = work.reduction.tile(tile_idx)
            block, steps = first_block, work.reduction.steps(first_block)
            for _ in cutlass.range(steps, unroll=1):
                rows = work.rows_of(block)
                self.load_pair(q, k, rows, block.n, work.pairs, 2 * step_count)
                score_pipeline.begin_tile_load(rows, block.head).load(block.n, step_count)
                self.load_pair(do, v, rows, block.n, work.pairs, 2 * step_count + 1)
                block = work.reduction.after(block)
                step_count += 1
            tile_idx = work.tile_scheduler.publish(tile_count, work.tile_scheduler.fetch_next())
            tile_count += 1

    @cute.jit
    def load_pair(
        self, rows: sm90.TmaOperand, keys: sm90.TmaOperand, tile: Tile, n_block: Int32, pairs: sm90.Pipeline,
        count: Int32
    ):  # fmt: skip
        """Load a pair as stage number `count` of the pipeline: 64 rows per warpgroup, and a block of keys."""
        tXsX, tXgX = tile.rows(rows).tiles((ROWS, self.d), (None, 0))
        tYsY, tYgY = tile.keys(keys).tiles((self.tile_n, self.d), (None, 0))
        pairs.producer_acquire(count)
        stage, arrival = pairs.stage_index(count), pairs.arrival(count)
        for w in cutlass.range_constexpr(WARPGROUPS):
            wg_rows = tXgX[None, tile.block * WARPGROUPS + w]
            cute.copy(rows.atom, wg_rows, tXsX[None, stage * WARPGROUPS + w], tma_bar_ptr=arrival)
        cute.copy(keys.atom, tYgY[None, n_block], tYsY[None, stage], tma_bar_ptr=arrival)

    def make_consumer_state(self, shared: DbiasSmem, wg: Int32, thread: Int32) -> DbiasConsumerState:
        """Return the operands and accumulators of a consumer warpgroup."""
        product = sm90.WgmmaProduct.create(lambda: sm90.make_mma(self.element.dtype, self.tile_n, "rows", "rows"))
        mma = product.add.get_slice(thread)
        rows = mma.make_fragment_A(mma.partition_A(shared.rows))
        keys = mma.make_fragment_B(mma.partition_B(shared.keys))
        return DbiasConsumerState(product, wg, rows, keys, *(sm90.zeros(mma, (ROWS, self.tile_n)) for _ in range(3)))

    @cute.jit
    def consume(
        self, shared: DbiasSmem, work: DbiasWork, mdBias: cute.Tensor, mRowStats: cute.Tensor, scales: SoftmaxScale,
        score_pipeline: ScorePipeline
    ):  # fmt: skip
        """Run a consumer warpgroup: compute the sums of 64 rows of every tile, step after step."""
        tidx = cute.arch.thread_idx()[0] - sm90.WARPGROUP
        wg, thread = cute.arch.make_warp_uniform(tidx // sm90.WARPGROUP), tidx % sm90.WARPGROUP
        lane = thread % sm90.WARP
        row_in_tile = wg * ROWS + thread // sm90.WARP * ROWS_PER_WARP + lane // 4  # first row of the thread in a tile
        state, score_pipeline = (
            self.make_consumer_state(shared, wg, thread),
            score_pipeline.allocate_registers(self.tile_n),
        )
        scale_log2 = score_pipeline.scales(scales).log2
        tile_count, step_count, tile_idx = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while tile_idx < work.tile_scheduler.total:
            first_block = work.reduction.tile(tile_idx)
            block, steps = first_block, work.reduction.steps(first_block)
            state.sum.fill(0.0)
            for count in cutlass.range(step_count, step_count + steps, unroll=1):
                rows, row = work.rows_of(block), block.m * TILE_M + row_in_tile
                tile_stages = score_pipeline.set_tile(
                    ScoreCoord(work.sizes, self.tile_n, row, lane % 4 * 2, block.batch, block.head)
                )
                row_stats = rows_of_thread(mRowStats, rows, row, scale_log2)
                tile_stages.begin(block.n, masked=True)
                self.step(state, row_stats, tile_stages, block.n, work.pairs, count)
                block = work.reduction.after(block)
            step_count += steps
            state.sum.store(state.sum.load() * score_pipeline.scaled(Float32(1.0)))
            self.store(state.sum, mdBias, work, first_block, row_in_tile, shared.columns)
            tile_idx = work.tile_scheduler.receive(tile_count)
            tile_count += 1

    @cute.jit
    def step(
        self,
        state: DbiasConsumerState,
        row_stats: RowStats,
        tile_stages: ScorePipeline,
        n_block: Int32,
        pairs: sm90.Pipeline,
        count: Int32,
    ):
        """Add dS of a block to the sum. P is computed while dP is multiplied."""
        warpgroup.fence()
        pairs.consumer_wait(2 * count)
        state.multiply(state.S, pairs.stage_index(2 * count))
        pairs.consumer_wait(2 * count + 1)
        state.multiply(state.dP, pairs.stage_index(2 * count + 1))
        tile_stages.prepare_stage(n_block, masked=True)
        warpgroup.wait_group(1)
        pairs.consumer_release(2 * count)
        tile_stages.apply(fragments.rows_and_columns(state.S), n_block, masked=True, count=count)
        S, dP = by_query(state.S), by_query(state.dP)
        exponentiate(S, row_stats.lse_log2, row_stats.scale_log2)
        warpgroup.wait_group(0)
        pairs.consumer_release(2 * count + 1)
        tile_stages.apply_backward(fragments.rows_and_columns(state.dP), masked=True)
        softmax_backward(S, dP, row_stats.delta, S)
        state.sum.store(state.sum.load() + state.S.load())

    @cute.jit
    def store(
        self, sums: cute.Tensor, mdBias: cute.Tensor, work: DbiasWork, first_block: DbiasBlock, row_in_tile: Int32,
        columns: cute.Tensor
    ):  # fmt: skip
        """Write a tile of the gradient, or the sums of its rows, of its columns or of the whole tile."""
        plane, values = mdBias[(*work.reduction.plane(first_block), None, None)], fragments.rows_and_columns(sums)
        row, lane = first_block.m * TILE_M + row_in_tile, cute.arch.lane_idx()
        column = first_block.n * self.tile_n + lane % 4 * 2
        over_queries = plane.shape[0] < work.sizes.Sq
        over_keys = plane.shape[1] < work.sizes.Sk
        if over_keys:
            for r in cutlass.range_constexpr(2):
                total = Float32(0.0)
                for c in cutlass.range_constexpr(cute.size(values, mode=[1])):
                    total += values[r, c]
                    values[r, c] = Float32(0.0)
                total = fragments.quad_reduce(total, operator.add)
                values[r, 0] = cutlass.select_(lane % 4 == 0, total, Float32(0.0))
        if over_queries:
            self.add_rows(values, columns)
            thread = cute.arch.thread_idx()[0] - sm90.WARPGROUP
            key = first_block.n * self.tile_n + thread
            if thread < self.tile_n and key < plane.shape[1]:
                plane[0, key] = columns[thread].to(plane.element_type)
        else:
            for r in cutlass.range_constexpr(2):
                if row + 8 * r < plane.shape[0]:
                    for c in cutlass.range_constexpr(0, cute.size(values, mode=[1]), 2):
                        write_pair(plane, row + 8 * r, column + fragments.column_of(c), values[r, c], values[r, c + 1])

    @cute.jit
    def add_rows(self, values: cute.Tensor, columns: cute.Tensor):
        """Sum all rows of a tile into shared memory, warp after warp, so that the order is the same in every run."""
        thread, lane = cute.arch.thread_idx()[0] - sm90.WARPGROUP, cute.arch.lane_idx()
        if thread < self.tile_n:
            columns[thread] = Float32(0.0)
        sm90.sync_warpgroups(DbiasBarrier.CONSUMERS, WARPGROUPS)
        for c in cutlass.range_constexpr(cute.size(values, mode=[1])):
            total = values[0, c] + values[1, c]
            for lanes in (4, 8, 16):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=lanes)
            values[0, c] = total
        for warp_idx in cutlass.range(WARPS, unroll=1):
            if thread // sm90.WARP == warp_idx and lane < 4:
                for c in cutlass.range_constexpr(cute.size(values, mode=[1])):
                    columns[lane * 2 + fragments.column_of(c)] += values[0, c]
            sm90.sync_warpgroups(DbiasBarrier.CONSUMERS, WARPGROUPS)
