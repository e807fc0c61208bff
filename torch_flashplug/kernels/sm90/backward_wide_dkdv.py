"""dK kernel and dV kernel of the split backward for head dims above 256 on Hopper, over the query blocks.

Registers do not hold dK and dV of 64 keys together, so each has a launch. The kernels are persistent. A CTA stays on
its SM and fetches blocks of 64 keys of a single KV head from a dynamic tile scheduler. The mainloop visits the query
rows that see the block, for every query head of the group. Scores are transposed (keys x queries), so that P^T and dS^T
are left operands. Each consumer warpgroup adds a part of the columns of the output (backward/wide_tile.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32

from ...registry.kernel_spec import BACKWARD_WARPGROUPS, FP32_BYTES, HopperSpec
from ..backward.pre_post_process import ScoreDerivative, exponentiate, load_rows, row_values, softmax_backward
from ..backward.tile_grids import grid_of_keys
from ..backward.wide_tile import (
    BOX_COLUMNS,
    ROWS,
    ROWS_PER_WARP,
    WideConsumer,
    WidePipelines,
    WideSmem,
    WideTile,
)
from ..call_args.kernel_call import KernelArgs, SoftmaxScale
from ..features.base import KernelFeatures
from ..primitives import fragments, sm90
from ..score_stages.pipeline import ScoreCoord, ScoreLayout, ScorePipeline
from ..tiling.backward_tile_scheduler import kv_heads_per_l2_group
from ..tiling.block_iterator import BlockIterator
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import TileAddressing, TileGrid
from .common import TmaOperands

WARPGROUPS = BACKWARD_WARPGROUPS
ROW_STATS_STAGES = 2
LSE, DELTA = 0, 1  # row statistics


@dataclass(frozen=True)
class WideDkdvWork:
    """Pipelines, tiles and mainloop steps shared by all warp roles."""

    pipelines: WidePipelines
    pipeline_row_stats: sm90.Pipeline
    row_stats: cute.Tensor  # (64, stage, LSE * log2(e) or delta) of the queries of a step
    tile_scheduler: sm90.DynamicTileScheduler
    tile_grid: TileGrid
    block_iterator: BlockIterator
    group: Int32  # query heads visited by a tile
    sharing: Int32  # tiles of a block of keys; all of them read the K and V of the same KV head


class WideBackwardDkdvSm90:
    """Builder of the dK kernel or the dV kernel of a split backward spec with head dims above 256.

    Computes dV = P^T dO or dK = scale * dS^T Q, deterministically.

    Inputs: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, D), do (B, Hq, Sq, D). Row statistics: row_stats
    (B, Hq, 2, padded Sq) in fp32, LSE * log2(e) and delta. Output: dk or dv (B, shares, Sk, D), where `shares` is Hkv
    or a multiple of Hkv.

    Warp roles: warpgroup 0 gives its registers away, and its warp 0 is the producer warp. Warpgroup 1 computes S and P,
    warpgroup 2 computes dP and dS (dK), and each adds its part of the columns of the output.

    Pipelines (producer -> consumer, stages):
    - K: producer warp -> warpgroup 1 (dV: both), a single stage. V (dK): producer warp -> warpgroup 2, a single stage.
    - Q (dK) or dO (dV): producer warp -> both warpgroups, with a pipeline for each box of 64 columns.
    - dO (dK) or Q (dV): producer warp -> warpgroup 2 (dV: 1), a ring of boxes of 64 columns.
    - LSE and delta of the queries of a step: producer warp -> both warpgroups (dV: 1), `ROW_STATS_STAGES` stages.
    - P: warpgroup 1 -> warpgroup 2, dS (dK): warpgroup 2 -> warpgroup 1, in the same buffer. Neither has bytes.
    - Tile indices: producer warp -> all consumer warps, `sm90.TILE_INDEX_STAGES` stages.

    Shared memory: the operands, LSE and delta, the buffer of P and dS, tile indices and mbarriers. The output leaves
    through the buffers of K and V.
    """

    def __init__(self, spec: HopperSpec, output: str):
        """Initialize the kernel builder.

        Args:
            spec: spec of the split backward.
            output: "dk" or "dv".
        """
        self.spec, self.features = spec, KernelFeatures.from_spec(spec, transposed=True)
        self.element, self.output = self.features.element, output
        self.held = ("k", "v") if output == "dk" else ("k",)
        self.whole, self.boxed = ("q", "do") if output == "dk" else ("do", "q")
        self.tile = WideTile.create(spec, self.element, len(self.held))
        self.producer_registers, self.consumer_registers = spec.register_split
        self.score_layout = ScoreLayout(self.element, 1, ROWS, transposed=True)

    @cute.jit
    def __call__(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the kernel."""
        addressing = self.features.tile_addressing(call)
        out = call.dk if self.output == "dk" else call.dv
        loads = {name: self.tile.tma(addressing.rows_first(getattr(call, name))) for name in ("q", "k", "v", "do")}
        operands = TmaOperands.create(
            **loads, out=sm90.output_tma(self.element, addressing.rows_first(out), BOX_COLUMNS)
        )
        B, shares, Sk, _ = out.shape
        num_n_blocks, group = addressing.max_blocks_of_keys(Sk, ROWS), call.q.shape[1] // shares
        block_iterator = self.features.block_iterator(call)
        score_pipeline = self.features.score_pipeline(call).tma(self.score_layout)
        bound_iterator = block_iterator.bind(SeqlenInfo(call.q.shape[2], Sk), ROWS, ROWS)
        row_bytes = 2 * self.tile.columns * self.element.bytes
        l2_group_heads = kv_heads_per_l2_group(bound_iterator, group, B * shares, row_bytes)
        feature_args = addressing, block_iterator, score_pipeline
        self.kernel(operands, call.row_stats, call.scales, call.counter, l2_group_heads, *feature_args).launch(
            grid=(cutlass.min(num_n_blocks * B * shares, call.num_ctas), 1, 1),
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
        num_stats = len(self.held)  # dV needs no delta
        pipeline_row_stats = sm90.Pipeline.create(smem, ROW_STATS_STAGES, num_stats * ROWS * FP32_BYTES)
        tile_index = sm90.TileIndexPipeline.create(smem)
        score_pipeline = score_pipeline.allocate_smem(smem, self.score_layout)
        row_stats = smem.allocate_tensor(Float32, cute.make_layout((ROWS, ROW_STATS_STAGES, num_stats)), 128)
        shared = self.tile.allocate_smem(smem)

        mQ, mK, shares = operands.tensor("q"), operands.tensor("k"), operands.tensor("out").shape[2]
        tile_grid = grid_of_keys(addressing, block_iterator, mQ, mK, shares, (ROWS, ROWS), l2_group_heads)
        work = WideDkdvWork(
            pipelines,
            pipeline_row_stats,
            row_stats,
            sm90.DynamicTileScheduler(mCounter.iterator, tile_index, tile_grid.order.total),
            tile_grid,
            block_iterator,
            mQ.shape[2] // shares,
            shares // mK.shape[2],
        )
        pipelines_and_warps = (
            *self.tile.pipelines_and_warps(pipelines),
            sm90.PipelineWarps(pipeline_row_stats, 4 * num_stats),
            sm90.PipelineWarps(tile_index.pipeline, 4 * WARPGROUPS),
            *score_pipeline.pipelines,
        )
        sm90.start_cta(warp_idx, (*operands.atoms, *score_pipeline.atoms), pipelines_and_warps)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                buffers = {**dict(zip(self.held, shared.held)), self.whole: shared.whole, self.boxed: shared.boxed}
                *held, whole, boxed = operands.with_smem(**buffers)
                self.load(tuple(held), whole, boxed, mRowStats, work)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            (out,) = operands.with_smem(out=shared.whole)
            if warp_idx < 8:
                consumer = self.tile.make_consumer(0, shared, pipelines)
                self.consume(consumer, shared, work, out, scales, score_pipeline)
            else:
                consumer = self.tile.make_consumer(1, shared, pipelines)
                self.consume(consumer, shared, work, out, scales, score_pipeline)

    @cute.jit
    def load(
        self, held: tuple[sm90.TmaOperand, ...], whole: sm90.TmaOperand, boxed: sm90.TmaOperand,
        mRowStats: cute.Tensor, work: WideDkdvWork
    ):  # fmt: skip
        """Run the producer warp: load K (and V) of each tile, then Q, dO and row statistics step by step."""
        tile_count, step, tile_idx = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while tile_idx < work.tile_grid.total:
            tile = work.tile_grid.tile(tile_idx, work.group)
            query_range = work.block_iterator.bind(tile.sizes, ROWS, ROWS).query_blocks(tile)
            keys = tuple(tile.rows_of_shared(x, work.sharing) for x in held)
            self.tile.load_held(keys, work.pipelines, tile.block, tile_count)
            for g in cutlass.range(work.group, unroll=1):
                gRowStats = tile.row_stats(mRowStats, g, ROWS)
                head_range = query_range.of_head(g)
                subrange = head_range.all_blocks()
                for j in cutlass.range(subrange.begin, subrange.end, unroll=1):
                    m_block = head_range.nth(j)
                    self.load_row_stats(gRowStats, work, m_block, step)
                    self.tile.load_step(tile.queries(whole, g), tile.queries(boxed, g), work.pipelines, m_block, step)
                    step += 1
            tile_idx = work.tile_scheduler.publish(tile_count, work.tile_scheduler.fetch_next())
            tile_count += 1

    def load_row_stats(self, gRowStats: cute.Tensor, work: WideDkdvWork, m_block: Int32, step: Int32) -> None:
        """Load LSE, and delta for dK, of the queries of a step (producer warp)."""
        pipeline = work.pipeline_row_stats
        pipeline.producer_acquire(step)
        for which in range(len(self.held)):
            sRow = work.row_stats[None, pipeline.stage_index(step), which]
            load_rows(gRowStats[0, None, which, m_block], sRow, pipeline, step)

    @cute.jit
    def consume(
        self, consumer: WideConsumer, shared: WideSmem, work: WideDkdvWork, out: sm90.TmaOperand,
        scales: SoftmaxScale, score_pipeline: ScorePipeline
    ):  # fmt: skip
        """Run a consumer warpgroup: compute a part of the columns of the output of every tile."""
        held = work.pipelines.held[consumer.wg if self.tile.has_ds else 0]
        lane, warp_in_group = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        score_pipeline, scale_log2 = score_pipeline.allocate_registers(ROWS), score_pipeline.scales(scales).log2
        factor = score_pipeline.scaled(
            scales.natural if self.output == "dk" else Float32(2.0**-self.element.p_scale_log2)
        )
        tile_count, step, tile_idx = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while tile_idx < work.tile_grid.total:
            tile = work.tile_grid.tile(tile_idx, work.group)
            query_range = work.block_iterator.bind(tile.sizes, ROWS, ROWS).query_blocks(tile)
            key = tile.block * ROWS + warp_in_group * ROWS_PER_WARP + lane // 4
            tile_stages = score_pipeline.set_tile(
                ScoreCoord(tile.sizes, ROWS, key, lane % 4 * 2, tile.sequence, None, transposed=True)
            )
            begin = step
            consumer.output.acc.fill(0.0)
            held.consumer_wait(tile_count)
            for g in cutlass.range(work.group, unroll=1):
                head_range, head_stages = query_range.of_head(g), tile_stages.of_head(tile.query_head(g))
                for subrange in head_range.subranges() if consumer.wg == 0 else (head_range.all_blocks(),):
                    if cutlass.const_expr(consumer.wg == 0):
                        head_stages.begin(head_range.nth(subrange.begin), subrange.masked)
                    for j in cutlass.range(subrange.begin, subrange.end, unroll=1):
                        if cutlass.const_expr(consumer.scores is not None):
                            consumer.multiply_scores(step, begin)
                        if cutlass.const_expr(consumer.wg == 0):
                            m_block = head_range.nth(j)
                            self.compute_p(consumer, work, step, head_stages, m_block, subrange.masked, scale_log2)
                            head_stages.prefetch(head_range.next(j, subrange), subrange.masked)
                            consumer.send_p(step)
                        elif cutlass.const_expr(consumer.scores is not None):
                            consumer.receive_p(step)
                            self.compute_ds(consumer, work, step, head_stages)
                            consumer.send_ds(step)
                        consumer.add_output(step)
                        step += 1
            consumer.finish(step, begin)
            consumer.store_output(tile.rows(out), shared, tile.block, factor)
            held.consumer_release(tile_count)
            tile_idx = work.tile_scheduler.receive(tile_count)
            tile_count += 1

    @cute.jit
    def row_stats_of(self, work: WideDkdvWork, step: Int32, which: int) -> cute.Tensor:
        """Return LSE or delta of the queries of the thread's columns, in registers."""
        work.pipeline_row_stats.consumer_wait(step)
        return row_values(work.row_stats[None, None, which], work.pipeline_row_stats.stage_index(step))

    @cute.jit
    def compute_p(
        self,
        consumer: WideConsumer,
        work: WideDkdvWork,
        step: Int32,
        head_stages: ScorePipeline,
        m_block: Int32,
        masked: cutlass.Constexpr[bool],
        scale_log2: Float32,
    ):
        """Compute P of a step in the first warpgroup, and pack P into 16 bits."""
        scores, lse_log2 = fragments.rows_and_columns(consumer.scores.acc), self.row_stats_of(work, step, LSE)
        work.pipeline_row_stats.consumer_release(step)
        if cutlass.const_expr(self.element.p_scale_log2 != 0):
            lse_log2.store(lse_log2.load() - Float32(self.element.p_scale_log2))
        head_stages.prepare_stage(m_block, masked)
        head_stages.apply(scores, m_block, masked, step)
        exponentiate(scores, lse_log2, scale_log2)
        consumer.weights.convert(consumer.scores.acc)

    @cute.jit
    def compute_ds(self, consumer: WideConsumer, work: WideDkdvWork, step: Int32, head_stages: ScorePipeline):
        """Compute dS = P * (dP - delta) of a step in the second warpgroup; the scale is applied to dK."""
        delta = self.row_stats_of(work, step, DELTA)
        derivative = ScoreDerivative.create(head_stages, lambda: self.row_stats_of(work, step, LSE))
        work.pipeline_row_stats.consumer_release(step)
        P, dP = fragments.rows_and_columns(consumer.values), fragments.rows_and_columns(consumer.scores.acc)
        softmax_backward(P, dP, delta, dP, self.element.p_scale_log2, score_derivative=derivative)
        consumer.weights.convert(consumer.scores.acc)
