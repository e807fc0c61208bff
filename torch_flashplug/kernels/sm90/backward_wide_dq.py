"""dQ kernel of the split backward for head dims above 256 on Hopper. The mainloop runs over the KV blocks.

The kernel is persistent. A CTA stays on its SM and fetches tiles of 64 query rows of a single head from a dynamic tile
scheduler. Q and dO of the tile stay in shared memory. The first consumer warpgroup computes S and from S P, the second
computes dP and from dP dS. Each warpgroup adds dS K for a part of the columns of dQ (backward/wide_tile.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64

from ...registry.kernel_spec import BACKWARD_WARPGROUPS, HopperSpec
from ..backward.pre_post_process import (
    RowStats,
    ScoreDerivative,
    by_query,
    exponentiate,
    rows_of_thread,
    softmax_backward,
)
from ..backward.tile_grids import grid_of_rows
from ..backward.wide_tile import BOX_COLUMNS, ROWS, ROWS_PER_WARP, WideConsumer, WidePipelines, WideSmem, WideTile
from ..call_args.kernel_call import KernelArgs, SoftmaxScale
from ..features.base import KernelFeatures
from ..primitives import fragments, sm90
from ..primitives.tile_scheduler import TileScheduler
from ..score_stages.pipeline import ScoreCoord, ScoreLayout, ScorePipeline
from ..tiling.block_iterator import BlockIterator, BlockSubrange, KvBlocks
from ..tiling.tile import TileAddressing, TileGrid
from .common import TmaOperands

WARPGROUPS = BACKWARD_WARPGROUPS


@dataclass(frozen=True)
class WideDqWork:
    """Pipelines, tiles and KV blocks shared by the producer warp and the consumer warpgroups."""

    pipelines: WidePipelines
    tile_scheduler: sm90.DynamicTileScheduler
    tile_grid: TileGrid
    block_iterator: BlockIterator


class WideBackwardDqSm90:
    """Builder of the dQ kernel of a split backward spec with head dims above 256.

    Computes dQ = scale * dS K with dS = P * (dP - delta), deterministically.

    Inputs: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, D), do (B, Hq, Sq, D). Row statistics: row_stats
    (B, Hq, 2, padded Sq) in fp32, LSE * log2(e) and delta. Output: dq (B, Hq, Sq, D).

    Warp roles: warpgroup 0 gives its registers away, and its warp 0 is the producer warp. Warpgroup 1 computes S and P,
    warpgroup 2 computes dP and dS, and each adds its part of the columns of dQ.

    Pipelines (producer -> consumer, stages):
    - Q: producer warp -> warpgroup 1, a single stage. dO: producer warp -> warpgroup 2, a single stage.
    - K: producer warp -> both warpgroups, `stages` stages, with a pipeline for each box of 64 columns.
    - V: producer warp -> warpgroup 2, a ring of boxes of 64 columns.
    - P: warpgroup 1 -> warpgroup 2, dS: warpgroup 2 -> warpgroup 1, in the same buffer. Neither has bytes.
    - Tile indices: producer warp -> all consumer warps, `sm90.TILE_INDEX_STAGES` stages.

    Shared memory: Q, dO, the stages of K, the ring of V, the buffer of P and dS, tile indices and mbarriers. dQ leaves
    through the buffers of Q and dO.
    """

    def __init__(self, spec: HopperSpec):
        self.spec, self.features = spec, KernelFeatures.from_spec(spec)
        self.element = self.features.element
        self.tile = WideTile.create(spec, self.element, num_held=2)
        self.producer_registers, self.consumer_registers = spec.register_split
        self.score_layout = ScoreLayout(self.element, 1, ROWS, has_smem_space=False)

    @cute.jit
    def __call__(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the dQ kernel."""
        addressing = self.features.tile_addressing(call)
        operands = TmaOperands.create(
            q=self.tile.tma(addressing.rows_first(call.q)),
            k=self.tile.tma(addressing.rows_first(call.k)),
            v=self.tile.tma(addressing.rows_first(call.v)),
            do=self.tile.tma(addressing.rows_first(call.do)),
            dq=sm90.output_tma(self.element, addressing.rows_first(call.dq), BOX_COLUMNS),
        )
        B, Hq, Sq, _ = call.q.shape
        Hkv, Sk = call.k.shape[1], call.k.shape[2]
        num_m_blocks = addressing.max_blocks_of_rows(Sq, ROWS)
        head_bytes = Int64(Sk) * (2 * self.tile.columns * self.element.bytes)
        l2_group_heads = TileScheduler.heads_per_l2_group(head_bytes, num_m_blocks, Hq // Hkv, Hq * B)
        feature_args = (
            addressing,
            self.features.block_iterator(call),
            self.features.score_pipeline(call).tma(self.score_layout),
        )
        self.kernel(operands, call.row_stats, call.scales, call.counter, l2_group_heads, *feature_args).launch(
            grid=(cutlass.min(num_m_blocks * Hq * B, call.num_ctas), 1, 1),
            block=((WARPGROUPS + 1) * sm90.WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        operands: TmaOperands,
        mRowStats: cute.Tensor,
        scales: SoftmaxScale,
        mCounter: cute.Tensor,
        l2_group_heads: Int32,
        addressing: TileAddressing,
        block_iterator: BlockIterator,
        score_pipeline: ScorePipeline,
    ):
        """Assign the warp roles: warp 0 loads, and the consumer warpgroups multiply."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        pipelines = self.tile.create_pipelines(smem)
        tile_index = sm90.TileIndexPipeline.create(smem)
        score_pipeline = score_pipeline.allocate_smem(smem, self.score_layout)
        shared = self.tile.allocate_smem(smem)
        mQ, mK = operands.tensor("q"), operands.tensor("k")
        tile_grid = grid_of_rows(addressing, block_iterator, mQ, mK, ROWS, l2_group_heads)
        tile_scheduler = sm90.DynamicTileScheduler(mCounter.iterator, tile_index, tile_grid.order.total)
        work = WideDqWork(pipelines, tile_scheduler, tile_grid, block_iterator)
        pipelines_and_warps = (
            *self.tile.pipelines_and_warps(pipelines),
            sm90.PipelineWarps(tile_index.pipeline, 4 * WARPGROUPS),
            *score_pipeline.pipelines,
        )
        sm90.start_cta(warp_idx, (*operands.atoms, *score_pipeline.atoms), pipelines_and_warps)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                loads = operands.with_smem(q=shared.held[0], do=shared.held[1], k=shared.whole, v=shared.boxed)
                self.load(*loads, work)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            (out,) = operands.with_smem(dq=shared.whole)
            if warp_idx < 8:
                consumer = self.tile.make_consumer(0, shared, pipelines)
                self.consume(consumer, shared, work, out, mRowStats, scales, score_pipeline)
            else:
                consumer = self.tile.make_consumer(1, shared, pipelines)
                self.consume(consumer, shared, work, out, mRowStats, scales, score_pipeline)

    @cute.jit
    def load(
        self, q: sm90.TmaOperand, do: sm90.TmaOperand, k: sm90.TmaOperand, v: sm90.TmaOperand, work: WideDqWork
    ):  # fmt: skip
        """Run the producer warp: load Q and dO of each tile, then K and V block after block."""
        pipelines, group = work.pipelines, work.tile_grid.group
        tile_count, step, tile_idx = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while tile_idx < work.tile_grid.total:
            tile = work.tile_grid.tile(tile_idx, group)
            kv_range = work.block_iterator.bind(tile.sizes, ROWS, ROWS).kv_blocks(tile)
            self.tile.load_held((tile.rows(q), tile.rows(do)), pipelines, tile.block, tile_count)
            keys, values = tile.keys(k), tile.keys(v)
            for j in cutlass.range(kv_range.count, unroll=1):
                self.tile.load_step(keys, values, pipelines, kv_range.nth(j), step)
                step += 1
            tile_idx = work.tile_scheduler.publish(tile_count, work.tile_scheduler.fetch_next())
            tile_count += 1

    @cute.jit
    def consume(
        self,
        consumer: WideConsumer,
        shared: WideSmem,
        work: WideDqWork,
        out: sm90.TmaOperand,
        mRowStats: cute.Tensor,
        scales: SoftmaxScale,
        score_pipeline: ScorePipeline,
    ):
        """Run a consumer warpgroup: compute a part of the columns of dQ of every tile."""
        held = work.pipelines.held[consumer.wg]
        thread = cute.arch.thread_idx()[0] % sm90.WARPGROUP
        lane = thread % sm90.WARP
        score_pipeline = score_pipeline.allocate_registers(ROWS)
        tile_count, step, tile_idx = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while tile_idx < work.tile_grid.total:
            tile = work.tile_grid.tile(tile_idx)
            row = tile.block * ROWS + thread // sm90.WARP * ROWS_PER_WARP + lane // 4
            tile_stages = score_pipeline.set_tile(
                ScoreCoord(tile.sizes, ROWS, row, lane % 4 * 2, tile.sequence, tile.head)
            )
            row_stats = rows_of_thread(mRowStats, tile, row, score_pipeline.scales(scales).log2)
            kv_range = work.block_iterator.bind(tile.sizes, ROWS, ROWS).kv_blocks(tile)
            begin = step
            consumer.output.acc.fill(0.0)
            held.consumer_wait(tile_count)
            for subrange in subranges_of(kv_range) if consumer.wg == 0 else (all_blocks(kv_range),):
                if cutlass.const_expr(consumer.wg == 0):
                    tile_stages.begin(kv_range.nth(subrange.begin), subrange.masked)
                for j in cutlass.range(subrange.begin, subrange.end, unroll=1):
                    consumer.multiply_scores(step, begin)
                    if cutlass.const_expr(consumer.wg == 0):
                        self.compute_p(consumer, row_stats, tile_stages, kv_range.nth(j), step, subrange.masked)
                        tile_stages.prefetch(kv_range.next(j, subrange), subrange.masked)
                        consumer.send_p(step)
                    else:
                        consumer.receive_p(step)
                        self.compute_ds(consumer, row_stats, tile_stages)
                        consumer.send_ds(step)
                    consumer.add_output(step)
                    step += 1
            consumer.finish(step, begin)
            if cutlass.const_expr(tile.sizes.may_be_empty):
                # Rows that belong to no sequence have no keys. Their dO may be NaN, and 0 * NaN is NaN.
                if tile.sizes.Sk == 0:
                    consumer.output.acc.fill(0.0)
            consumer.store_output(tile.rows(out), shared, tile.block, score_pipeline.scaled(scales.natural))
            held.consumer_release(tile_count)
            tile_idx = work.tile_scheduler.receive(tile_count)
            tile_count += 1

    @cute.jit
    def compute_p(
        self, consumer: WideConsumer, row_stats: RowStats, tile_stages: ScorePipeline, n_block: Int32, step: Int32,
        masked: cutlass.Constexpr[bool]
    ):  # fmt: skip
        """Compute P of a block in the first warpgroup, and pack P into 16 bits."""
        acc, p_scale_log2 = consumer.scores.acc, Float32(self.element.p_scale_log2)
        tile_stages.prepare_stage(n_block, masked)
        tile_stages.apply(fragments.rows_and_columns(acc), n_block, masked, step)
        lse_log2 = tuple(lse - p_scale_log2 for lse in row_stats.lse_log2)
        exponentiate(by_query(acc), lse_log2, row_stats.scale_log2)
        consumer.weights.convert(acc)

    @cute.jit
    def compute_ds(self, consumer: WideConsumer, row_stats: RowStats, tile_stages: ScorePipeline):
        """Compute dS = P * (dP - delta) of a block in the second warpgroup; the scale is applied to dQ."""
        P, dP = by_query(consumer.values), by_query(consumer.scores.acc)
        derivative = ScoreDerivative.create(tile_stages, lambda: row_stats.lse_log2)
        softmax_backward(P, dP, row_stats.delta, dP, self.element.p_scale_log2, score_derivative=derivative)
        consumer.weights.convert(consumer.scores.acc)


def subranges_of(kv_range: KvBlocks) -> tuple[BlockSubrange, BlockSubrange]:
    """Return the subranges of all KV blocks: masked, then unmasked. The first block counts as masked."""
    masked = cutlass.min(cutlass.max(kv_range.num_masked, 1), kv_range.count)
    return BlockSubrange(True, Int32(0), masked), BlockSubrange(False, masked, kv_range.count)


def all_blocks(kv_range: KvBlocks) -> BlockSubrange:
    """Return all KV blocks as one unmasked subrange, for the warpgroup without scores."""
    return BlockSubrange(False, Int32(0), kv_range.count)
