"""dQ kernel of the split backward for Hopper, from Q, K, V, dO, LSE and delta. The mainloop runs over the KV blocks.

The kernel is persistent. A CTA stays on its SM and fetches tiles of 128 query rows of a single head from a dynamic tile
scheduler. Each of the two consumer warpgroups owns 64 of the rows and keeps their dQ in registers. A warpgroup issues
dQ += dS K, the next block's scores and the next block's dP back to back. The warpgroup computes dS from these
products while its peer multiplies.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from ...registry.kernel_spec import BACKWARD_WARPGROUPS, DQ_TILE_M, ROWS_PER_WARPGROUP, SPLIT_BACKWARD_TILE, HopperSpec
from ..backward.pre_post_process import (
    RowStats,
    ScoreDerivative,
    by_query,
    exponentiate,
    rows_of_thread,
    softmax_backward,
)
from ..backward.tile_grids import grid_of_rows
from ..call_args.kernel_call import KernelArgs, SoftmaxScale
from ..features.base import KernelFeatures
from ..primitives import fragments, sm90
from ..primitives.tile_scheduler import TileScheduler
from ..score_stages.pipeline import ScoreCoord, ScoreLayout, ScorePipeline
from ..tiling.block_iterator import BlockIterator
from ..tiling.tile import TileAddressing, TileGrid
from .common import TmaOperands

ROWS, ROWS_PER_WARP = ROWS_PER_WARPGROUP, sm90.ROWS_PER_WARP
WARPGROUPS = BACKWARD_WARPGROUPS
TILE_M, TILE_N = DQ_TILE_M, SPLIT_BACKWARD_TILE[1]  # query rows of a CTA, keys of a step


class DqBarrier(enum.IntEnum):
    """Named barriers of the consumer warpgroups; barrier 0 is `sync_threads`."""

    Q_READ = 1  # Q_READ + w: all warps of warpgroup w have finished the last product with Q


@dataclass(frozen=True)
class DqSmem:
    """Operands in shared memory."""

    q: cute.Tensor  # (64, D, warpgroup)
    k: cute.Tensor  # (TILE_N, D, stage)
    v: cute.Tensor  # (TILE_N, Dv, stage)
    do: cute.Tensor  # (64, Dv, warpgroup)


@dataclass(frozen=True)
class DqPipelines:
    """Pipelines from the producer warp to the consumers; Q and dO have a stage of 64 rows per warpgroup."""

    q: sm90.Pipeline
    do: sm90.Pipeline
    k: sm90.Pipeline
    v: sm90.Pipeline


@dataclass(frozen=True)
class DqWork:
    """Pipelines, tiles and KV blocks shared by the producer warp and the consumer warpgroups."""

    pipelines: DqPipelines
    tile_scheduler: sm90.DynamicTileScheduler
    tile_grid: TileGrid
    block_iterator: BlockIterator


@dataclass(frozen=True)
class DqConsumerState:
    """State of a consumer warpgroup: its rows of Q and dO, the K and V stages, and the accumulators."""

    pipelines: DqPipelines
    S: sm90.StageProduct  # S = Q K^T, then P, then dS
    dP: sm90.StageProduct  # dP = dO V^T
    dQ: sm90.StageProduct  # dQ += dS K
    dS: fragments.OperandA  # dS in 16 bits

    def issue_scores(self, count: Int32) -> None:
        """Wait for block `count` of K and V, and issue S and dP, a committed group each."""
        for product, pipeline in ((self.S, self.pipelines.k), (self.dP, self.pipelines.v)):
            pipeline.consumer_wait(count)
            product.start(pipeline.stage_index(count))


class BackwardDqSm90:
    """Builder of the dQ kernel of a split backward spec.

    Computes dQ = scale * dS K with dS = P * (dP - delta), deterministically.

    Inputs: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), do (B, Hq, Sq, Dv). Row statistics: row_stats
    (B, Hq, 2, padded Sq) in fp32, LSE * log2(e) and delta. Output: dq (B, Hq, Sq, D).

    Warp roles: warpgroup 0 gives its registers away, and its warp 0 is the producer warp. Warpgroups 1 and 2 are
    consumers.

    Pipelines (producer -> consumer, stages):
    - Q, dO: producer warp -> the warpgroup that owns the 64 rows, a stage per warpgroup.
    - K: producer warp -> all consumer warps, 2 stages of TILE_N keys.
    - V: producer warp -> all consumer warps, `dq_stages_v` stages (1 or 2) of TILE_N keys.
    - Tile indices: producer warp -> all consumer warps, `sm90.TILE_INDEX_STAGES` stages.
    - Score stages add pipelines of their own, for example for bias tiles.

    Shared memory: the stages of Q, K, V and dO, the tile indices, the mbarriers and the buffers of the score stages. dQ
    leaves through the stage of its Q.
    """

    def __init__(self, spec: HopperSpec):
        self.spec, self.features = spec, KernelFeatures.from_spec(spec)
        self.element, self.d, self.dv = self.features.element, spec.d, spec.dv
        self.producer_registers, self.consumer_registers = spec.register_split
        self.stages_k, self.stages_v = 2, spec.dq_stages_v
        self.score_layout = ScoreLayout(self.element, WARPGROUPS, TILE_N, has_smem_space=spec.dq_has_stage_smem)

    @property
    def inputs(self) -> tuple[sm90.TmaLoadConfig, sm90.TmaLoadConfig, sm90.TmaLoadConfig, sm90.TmaLoadConfig]:
        """TMA load configurations of Q, K, V and dO."""
        return (
            sm90.TmaLoadConfig.create(self.element, ROWS, self.d, WARPGROUPS),
            sm90.TmaLoadConfig.create(self.element, TILE_N, self.d, self.stages_k),
            sm90.TmaLoadConfig.create(self.element, TILE_N, self.dv, self.stages_v),
            sm90.TmaLoadConfig.create(self.element, ROWS, self.dv, WARPGROUPS),
        )

    @cute.jit
    def __call__(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the dQ kernel."""
        addressing = self.features.tile_addressing(call)
        q, k, v, do = self.inputs
        operands = TmaOperands.create(
            q=q.tma(addressing.rows_first(call.q)),
            k=k.tma(addressing.rows_first(call.k)),
            v=v.tma(addressing.rows_first(call.v)),
            do=do.tma(addressing.rows_first(call.do)),
            dq=sm90.output_tma(self.element, addressing.rows_first(call.dq), self.d),
        )
        B, Hq, Sq, _ = call.q.shape
        Hkv, Sk = call.k.shape[1], call.k.shape[2]
        num_m_blocks = addressing.max_blocks_of_rows(Sq, TILE_M)
        head_bytes = Int64(Sk) * ((self.d + self.dv) * self.element.bytes)
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
            use_pdl=self.features.overlaps_preprocess,
        )

    def create_pipelines(self, smem: cutlass.memory.SmemAllocator) -> DqPipelines:
        """Create the pipelines of Q, dO, K and V."""
        q, k, v, do = self.inputs
        return DqPipelines(
            q.create_pipeline(smem), do.create_pipeline(smem), k.create_pipeline(smem), v.create_pipeline(smem)
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
        pipelines = self.create_pipelines(smem)
        tile_index = sm90.TileIndexPipeline.create(smem)
        score_pipeline = score_pipeline.allocate_smem(smem, self.score_layout)
        shared = DqSmem(*(x.buffer(smem) for x in self.inputs))
        self.features.wait_for_preprocess()
        mQ, mK = operands.tensor("q"), operands.tensor("k")
        tile_grid = grid_of_rows(addressing, block_iterator, mQ, mK, TILE_M, l2_group_heads)
        tile_scheduler = sm90.DynamicTileScheduler(mCounter.iterator, tile_index, tile_grid.order.total)
        work = DqWork(pipelines, tile_scheduler, tile_grid, block_iterator)
        wg_pipelines, shared_pipelines = (pipelines.q, pipelines.do), (pipelines.k, pipelines.v, tile_index.pipeline)
        pipelines_and_warps = (
            *(sm90.PipelineWarps(pipeline, 4) for pipeline in wg_pipelines),
            *(sm90.PipelineWarps(pipeline, 4 * WARPGROUPS) for pipeline in shared_pipelines),
            *score_pipeline.pipelines,
        )
        sm90.start_cta(warp_idx, (*operands.atoms, *score_pipeline.atoms), pipelines_and_warps)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                loads = operands.with_smem(q=shared.q, k=shared.k, v=shared.v, do=shared.do)
                self.load(*loads, work, score_pipeline)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            (out,) = operands.with_smem(dq=shared.q)
            self.consume(shared, work, out, mRowStats, scales, score_pipeline)

    @cute.jit
    def load(
        self, q: sm90.TmaOperand, k: sm90.TmaOperand, v: sm90.TmaOperand, do: sm90.TmaOperand, work: DqWork,
        score_pipeline: ScorePipeline
    ):  # fmt: skip
        """Run the producer warp: load all tiles of the CTA.

        Q and dO of a tile are loaded behind the first K and V. Then K and V follow block after block, each with the
        data that the score stages need for the block.
        """
        pipelines, group = work.pipelines, work.tile_grid.group
        tile_count, block_count, tile_idx = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while tile_idx < work.tile_grid.total:
            tile = work.tile_grid.tile(tile_idx, group)
            kv_range = work.block_iterator.bind(tile.sizes, TILE_M, TILE_N).kv_blocks(tile)
            tQsQ, tQgQ = tile.rows(q).tiles((ROWS, self.d), (None, 0))
            tOsO, tOgO = tile.rows(do).tiles((ROWS, self.dv), (None, 0))
            tKsK, tKgK = tile.keys(k).tiles((TILE_N, self.d), (None, 0))
            tVsV, tVgV = tile.keys(v).tiles((TILE_N, self.dv), (None, 0))
            stage_loads = score_pipeline.begin_tile_load(tile, tile.head)
            block = kv_range.nth(0)
            # K goes first, because the stage of Q may have to wait for the store of a dQ.
            sm90.load_block(k.atom, tKgK, tKsK, pipelines.k, block, block_count)
            sm90.load_block(v.atom, tVgV, tVsV, pipelines.v, block, block_count)
            for w in cutlass.range_constexpr(WARPGROUPS):
                q_block, count = tile.block * WARPGROUPS + w, tile_count * WARPGROUPS + w
                sm90.load_block(do.atom, tOgO, tOsO, pipelines.do, q_block, count)
                sm90.load_block(q.atom, tQgQ, tQsQ, pipelines.q, q_block, count)
            stage_loads.load(block, block_count)
            for j in cutlass.range(1, kv_range.count, unroll=1):
                block = kv_range.nth(j)
                sm90.load_block(k.atom, tKgK, tKsK, pipelines.k, block, block_count + j)
                sm90.load_block(v.atom, tVgV, tVsV, pipelines.v, block, block_count + j)
                stage_loads.load(block, block_count + j)
            tile_idx = work.tile_scheduler.publish(tile_count, work.tile_scheduler.fetch_next())
            tile_count += 1
            block_count += kv_range.count

    def make_consumer_state(self, shared: DqSmem, pipelines: DqPipelines, wg: Int32, thread: Int32) -> DqConsumerState:
        """Return the operands and accumulators of a consumer warpgroup."""
        scores = sm90.WgmmaProduct.create(lambda: sm90.make_mma(self.element.dtype, TILE_N, "rows", "rows"))
        sums = sm90.WgmmaProduct.create(lambda: sm90.make_mma(self.element.dtype, self.d, "registers", "columns"))
        mma_s, mma_q = scores.add.get_slice(thread), sums.add.get_slice(thread)
        # Q and dO: (MMA, 1, K/16)
        rows = tuple(mma_s.make_fragment_A(mma_s.partition_A(s[None, None, wg])) for s in (shared.q, shared.do))
        # K and V: (MMA, 1, K/16, stage)
        keys = tuple(mma_s.make_fragment_B(mma_s.partition_B(s)) for s in (shared.k, shared.v))
        columns = mma_q.make_fragment_B(mma_q.partition_B(sm90.transposed(shared.k)))  # K: (MMA, 1, TILE_N/16, stage)
        S, dP = (sm90.StageProduct(scores, rows[i], keys[i], sm90.zeros(mma_s, (ROWS, TILE_N))) for i in range(2))
        dS = fragments.OperandA.create(S.acc, self.element)
        dQ = sm90.StageProduct(sums, dS.fragment, columns, sm90.zeros(mma_q, (ROWS, self.d)))
        return DqConsumerState(pipelines, S, dP, dQ, dS)

    @cute.jit
    def consume(
        self, shared: DqSmem, work: DqWork, out: sm90.TmaOperand, mRowStats: cute.Tensor, scales: SoftmaxScale,
        score_pipeline: ScorePipeline
    ):  # fmt: skip
        """Run a consumer warpgroup: compute dQ of 64 rows of every tile, block after block of the block iterator."""
        pipelines = work.pipelines
        tidx = cute.arch.thread_idx()[0] - sm90.WARPGROUP
        wg, thread = cute.arch.make_warp_uniform(tidx // sm90.WARPGROUP), tidx % sm90.WARPGROUP
        lane = thread % sm90.WARP
        state, score_pipeline = (
            self.make_consumer_state(shared, pipelines, wg, thread),
            score_pipeline.allocate_registers(TILE_N),
        )
        tile_count, block_count, tile_idx = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while tile_idx < work.tile_grid.total:
            tile = work.tile_grid.tile(tile_idx)
            wg_tile, count_q = tile.block * WARPGROUPS + wg, tile_count * WARPGROUPS + wg
            row = wg_tile * ROWS + thread // sm90.WARP * ROWS_PER_WARP + lane // 4
            tile_stages = score_pipeline.set_tile(
                ScoreCoord(tile.sizes, TILE_N, row, lane % 4 * 2, tile.sequence, tile.head)
            )
            row_stats = rows_of_thread(mRowStats, tile, row, score_pipeline.scales(scales).log2)
            bound_iterator = work.block_iterator.bind(tile.sizes, TILE_M, TILE_N)
            skipped_blocks, kv_range = bound_iterator.kv_range_for_warpgroup(
                tile, wg_tile * ROWS, ROWS, bound_iterator.tile_lengths_vary
            )
            for count in cutlass.range(block_count, block_count + skipped_blocks, unroll=1):
                for pipeline in (pipelines.k, pipelines.v):
                    pipeline.consumer_wait(count)
                    pipeline.consumer_release(count)
                tile_stages.skip_kv_blocks(count)
            block_count += skipped_blocks
            state.dQ.acc.fill(0.0)
            pipelines.q.consumer_wait(count_q)
            pipelines.do.consumer_wait(count_q)
            warpgroup.fence()
            state.issue_scores(block_count)
            warpgroup.wait_group(0)
            pipelines.v.consumer_release(block_count)
            for subrange in kv_range.subranges_before_last():
                tile_stages.begin(kv_range.nth(subrange.begin), subrange.masked)
                for j in cutlass.range(subrange.begin, subrange.end, unroll=1):
                    self.compute_ds(state, row_stats, tile_stages, kv_range.nth(j), block_count + j, subrange.masked)
                    tile_stages.prefetch(kv_range.next(j, subrange), subrange.masked)
                    warpgroup.fence()
                    state.dQ.add(pipelines.k.stage_index(block_count + j))
                    state.issue_scores(block_count + j + 1)
                    warpgroup.wait_group(2)  # wait for dQ
                    pipelines.k.consumer_release(block_count + j)
                    warpgroup.wait_group(0)
                    pipelines.v.consumer_release(block_count + j + 1)
            pipelines.do.consumer_release(count_q)
            block_count += kv_range.count - 1
            tile_stages.begin(kv_range.last(), masked=True)
            self.compute_ds(state, row_stats, tile_stages, kv_range.last(), block_count, masked=True)
            warpgroup.fence()
            state.dQ.add(pipelines.k.stage_index(block_count))
            warpgroup.wait_group(0)
            pipelines.k.consumer_release(block_count)
            block_count += 1
            if cutlass.const_expr(tile.sizes.may_be_empty):
                # Rows that belong to no sequence have no keys. Their dO may be NaN, and 0 * NaN is NaN.
                if tile.sizes.Sk == 0:
                    state.dQ.acc.fill(0.0)
            self.store(state, tile.rows(out), wg, wg_tile, score_pipeline.scaled(scales.natural))
            pipelines.q.consumer_release(count_q)
            tile_idx = work.tile_scheduler.receive(tile_count)
            tile_count += 1

    @cute.jit
    def compute_ds(
        self, state: DqConsumerState, row_stats: RowStats, tile_stages: ScorePipeline, n_block: Int32, count: Int32,
        masked: cutlass.Constexpr[bool]
    ):  # fmt: skip
        """Compute dS of a block from S and dP, and pack dS into 16 bits."""
        tile_stages.prepare_stage(n_block, masked)
        tile_stages.apply(state.S.values, n_block, masked, count)
        S, dP = by_query(state.S.acc), by_query(state.dP.acc)
        exponentiate(S, row_stats.lse_log2, row_stats.scale_log2)
        tile_stages.apply_backward(state.dP.values, masked)
        softmax_backward(
            S, dP, row_stats.delta, S, score_derivative=ScoreDerivative.create(tile_stages, lambda: row_stats.lse_log2)
        )
        state.dS.convert(state.S.acc)

    @cute.jit
    def store(self, state: DqConsumerState, out: sm90.TmaOperand, wg: Int32, wg_tile: Int32, scale: Float32):
        """Store dQ in 16 bits through the stage of its Q, and wait until the stage is free again."""
        rdQ = cute.make_rmem_tensor_like(state.dQ.acc, self.element.dtype)
        rdQ.store((state.dQ.acc.load() * scale).to(self.element.dtype))
        start = cute.slice_(out.s, (None, None, wg)).iterator
        sdQ = cute.make_tensor(start, sm90.slab_layout(self.element.dtype, ROWS, self.d).outer)
        sm90.sync_warpgroup(DqBarrier.Q_READ, wg)  # no warp of the warpgroup may still be reading Q
        sm90.store_slabs(rdQ, sdQ, out, wg_tile * (ROWS // ROWS_PER_WARP), state.dQ.product.add)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
