"""dK and dV kernel of the split backward for Hopper, from Q, K, V, dO, LSE and delta.

The kernel is persistent. A CTA stays on its SM and fetches blocks of 64 keys of a single KV head from a dynamic tile
scheduler. The CTA keeps dK and dV of the block in registers. The mainloop visits the query rows that see the block, for
every query head of the group.

Each of the two consumer warpgroups owns half of the columns of dK and dV. The first warpgroup computes S and from S P,
the second computes dP and from dP dS. P and dS cross shared memory. Each warpgroup multiplies its columns with its own
weights from registers and with its peer's weights from shared memory.

Scores are transposed (keys x queries), so that P^T and dS^T are left operands. As soon as a warpgroup has packed the
result of a step into 16 bits, the warpgroup issues its S or dP of the next step. This product runs under dV and dK.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ...registry.kernel_spec import BACKWARD_WARPGROUPS, FP32_BYTES, ROWS_PER_WARPGROUP, SPLIT_BACKWARD_TILE, HopperSpec
from ..backward.pre_post_process import ScoreDerivative, exponentiate, load_rows, row_values, softmax_backward
from ..backward.tile_grids import grid_of_keys
from ..call_args.kernel_call import KernelArgs, SoftmaxScale
from ..features.base import KernelFeatures
from ..primitives import fragments, sm90
from ..score_stages.pipeline import ScoreCoord, ScoreLayout, ScorePipeline
from ..tiling.backward_tile_scheduler import kv_heads_per_l2_group
from ..tiling.block_iterator import BlockIterator, BlockSubrange
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import TileAddressing, TileGrid
from .common import TmaOperands

ROWS, ROWS_PER_WARP = ROWS_PER_WARPGROUP, sm90.ROWS_PER_WARP
WARPGROUPS = BACKWARD_WARPGROUPS
TILE_M, TILE_N = SPLIT_BACKWARD_TILE
# Buffers of the weights in shared memory: P, written by the first warpgroup, and dS, written by the second.
P, DS = 0, 1
STAGED_COLUMNS = 64  # largest number of columns of dK or dV that a warp stores at once


class DkdvBarrier(enum.IntEnum):
    """Named barriers of the consumer warpgroups; barrier 0 is `sync_threads`."""

    OUTPUT_STORED = 1  # OUTPUT_STORED + w: the outputs of all warps of warpgroup w have left shared memory


@dataclass(frozen=True)
class DkdvSmem:
    """Buffers of a CTA in shared memory."""

    q: cute.Tensor  # (TILE_M, D, stage)
    k: cute.Tensor  # (TILE_N, D, 1)
    v: cute.Tensor  # (TILE_N, Dv, 1)
    do: cute.Tensor  # (TILE_M, Dv, stage)
    weights: cute.Tensor  # (queries, keys, P or dS)
    lse: cute.Tensor  # (TILE_M, stage): LSE * log2(e) of the queries of a step
    delta: cute.Tensor  # (TILE_M, stage)


@dataclass(frozen=True)
class DkdvPipelines:
    """Pipelines from the producer warps to the consumers; `crossing` runs from each warpgroup to its peer."""

    q: sm90.Pipeline
    do: sm90.Pipeline
    k: sm90.Pipeline
    v: sm90.Pipeline
    weights: tuple[sm90.Pipeline, sm90.Pipeline]  # pipelines of P and dS, a single stage each


@dataclass(frozen=True)
class DkdvWork:
    """Pipelines, tiles and mainloop steps shared by all warp roles."""

    pipelines: DkdvPipelines
    tile_scheduler: sm90.DynamicTileScheduler
    tile_grid: TileGrid
    block_iterator: BlockIterator
    group: Int32  # query heads visited by a tile
    sharing: Int32  # tiles of a block of keys; all of them read the K and V of the same KV head


@dataclass(frozen=True)
class DkdvConsumerState:
    """State of a consumer warpgroup: its product of whole rows, its weights, and its columns of dK and dV."""

    wg: int  # 0 computes P, 1 computes dS
    pipelines: DkdvPipelines
    scores: sm90.StageProduct  # S^T = K Q^T, or dP^T = V dO^T
    weights: fragments.OperandA  # P^T or dS^T in 16 bits
    values: cute.Tensor  # the registers of `weights`, in the order of the scores
    # P for dV in kernels with dropout, where P crosses shared memory with signs that mark the kept values.
    kept_p: fragments.OperandA | None
    row_stats: cute.Tensor  # (TILE_M, stage): LSE * log2(e) or delta of the queries of a step
    lse: cute.Tensor  # (TILE_M, stage): LSE * log2(e)
    dV: sm90.StageProduct  # dV += P^T dO: the warpgroup's half of the columns
    dK: sm90.StageProduct  # dK += dS^T Q: the warpgroup's half of the columns
    store: Callable  # stores the weights to shared memory
    load: Callable  # loads P from shared memory

    @property
    def operand_pipeline(self) -> sm90.Pipeline:
        """Pipeline of the right operand of `scores`: Q with LSE, or dO with delta."""
        return self.pipelines.do if self.wg else self.pipelines.q

    def lse_of(self, step_count: Int32) -> cute.Tensor:
        """Return LSE * log2(e) of step `step_count`; callable by either warpgroup."""
        self.pipelines.q.consumer_wait(step_count)
        return row_values(self.lse, self.pipelines.q.stage_index(step_count))

    @cute.jit
    def issue_next_scores(self, step_count: Int32, end: Int32):
        """Issue the S or dP product of step `step_count`.

        Beyond the last step of a tile nobody reads the result, and a branch around the product would cost more.
        """
        if step_count < end:
            self.operand_pipeline.consumer_wait(step_count)
        self.scores.start(self.operand_pipeline.stage_index(step_count))

    @cute.jit
    def send_weights(self, step_count: Int32):
        """Store the weights of step `step_count` to shared memory for the peer warpgroup."""
        pipeline = self.pipelines.weights[self.wg]
        pipeline.producer_wait(step_count)
        self.store(self.values)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        pipeline.producer_commit(step_count)
        if cutlass.const_expr(self.wg == 0 and self.kept_p is not None):
            self.kept_p.copy_nonnegative(self.weights)

    @cute.jit
    def accumulate_dkdv(self, step_count: Int32, end: Int32):
        """Issue dV and dK of a step, with own weights in registers, and the next step's S or dP between them."""
        p, ds = self.pipelines.weights
        stage = self.pipelines.q.stage_index(step_count)  # the dO pipeline has as many stages as the Q pipeline
        if cutlass.const_expr(self.wg == 0):
            self.pipelines.do.consumer_wait(step_count)
        warpgroup.fence()
        self.dV.add(stage)
        self.issue_next_scores(step_count + 1, end)
        if cutlass.const_expr(self.wg == 0):
            ds.consumer_wait(step_count)
        else:
            self.pipelines.q.consumer_wait(step_count)
        warpgroup.fence()
        self.dK.add(stage)
        warpgroup.wait_group(2)  # wait for dV; the next S or dP and dK may still be in flight
        self.pipelines.do.consumer_release(step_count)
        if cutlass.const_expr(self.wg == 1):
            p.consumer_release(step_count)
        warpgroup.wait_group(0)
        self.pipelines.q.consumer_release(step_count)
        if cutlass.const_expr(self.wg == 0):
            ds.consumer_release(step_count)


class BackwardDkdvSm90:
    """Builder of the dK and dV kernel of a split backward spec.

    Computes dV = P^T dO and dK = scale * dS^T Q, deterministically.

    Inputs: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), do (B, Hq, Sq, Dv). Row statistics: row_stats
    (B, Hq, 2, padded Sq) in fp32, LSE * log2(e) and delta. Outputs: dk (B, shares, Sk, D), dv (B, shares, Sk, Dv),
    where `shares` is Hkv or a multiple of Hkv.

    Warp roles: warpgroup 0 gives its registers away. Its warp 0 loads Q and dO and fetches tiles. Its warp 1 loads K
    and V. Warpgroup 1 computes S and P, warpgroup 2 computes dP and dS, and each adds its half of the columns of dK and
    dV.

    Pipelines (producer -> consumer, stages):
    - Q with LSE, dO with delta: warp 0 -> all consumer warps, `stages` stages each.
    - K: warp 1 -> warpgroup 1, a single stage. V: warp 1 -> warpgroup 2, a single stage.
    - P: warpgroup 1 -> warpgroup 2, a single stage. dS: warpgroup 2 -> warpgroup 1, a single stage. Neither has bytes.
    - Tile indices: warp 0 -> all consumer warps and warp 1, `sm90.TILE_INDEX_STAGES` stages.
    - Score stages add pipelines of their own, for example for bias tiles. Only warpgroup 1 reads them.

    Shared memory: the stages of Q, dO, LSE and delta; K and V; P and dS; tile indices, mbarriers and buffers of the
    score stages. dK and dV leave through the buffers of P and dS.
    """

    def __init__(self, spec: HopperSpec):
        self.spec, self.features = spec, KernelFeatures.from_spec(spec, transposed=True)
        self.element, self.d, self.dv, self.stages = self.features.element, spec.d, spec.dv, spec.stages
        self.producer_registers, self.consumer_registers = spec.register_split
        # Only the first warpgroup holds scores.
        self.score_layout = ScoreLayout(self.element, 1, TILE_M, transposed=True)

    @property
    def inputs(self) -> tuple[sm90.TmaLoadConfig, sm90.TmaLoadConfig, sm90.TmaLoadConfig, sm90.TmaLoadConfig]:
        """TMA load configurations of Q, K, V and dO, swizzled so that half of the columns are whole atoms."""
        return tuple(
            sm90.TmaLoadConfig.in_column_halves(self.element, ROWS, columns, num_stages)
            for columns, num_stages in ((self.d, self.stages), (self.d, 1), (self.dv, 1), (self.dv, self.stages))
        )

    @cute.jit
    def __call__(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the dK and dV kernel."""
        addressing = self.features.tile_addressing(call)
        q, k, v, do = self.inputs
        operands = TmaOperands.create(
            q=q.tma(addressing.rows_first(call.q)),
            k=k.tma(addressing.rows_first(call.k)),
            v=v.tma(addressing.rows_first(call.v)),
            do=do.tma(addressing.rows_first(call.do)),
            dk=sm90.output_tma(self.element, addressing.rows_first(call.dk), staged_columns(self.d)),
            dv=sm90.output_tma(self.element, addressing.rows_first(call.dv), staged_columns(self.dv)),
        )
        B, shares, Sk, _ = call.dk.shape
        num_n_blocks, group = addressing.max_blocks_of_keys(Sk, TILE_N), call.q.shape[1] // shares
        block_iterator = self.features.block_iterator(call)
        score_pipeline = self.features.score_pipeline(call).tma(self.score_layout)
        bound_iterator = block_iterator.bind(SeqlenInfo(call.q.shape[2], Sk), TILE_M, TILE_N)
        l2_group_heads = kv_heads_per_l2_group(
            bound_iterator, group, B * shares, (self.d + self.dv) * self.element.bytes
        )
        self.kernel(
            operands,
            call.row_stats,
            call.scales,
            call.counter,
            l2_group_heads,
            addressing,
            block_iterator,
            score_pipeline,
        ).launch(
            grid=(cutlass.min(num_n_blocks * B * shares, call.num_ctas), 1, 1),
            block=((WARPGROUPS + 1) * sm90.WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.features.overlaps_preprocess,
        )

    def create_pipelines(self, smem: cutlass.memory.SmemAllocator) -> DkdvPipelines:
        """Create the pipelines. A stage of Q includes its LSE, and a stage of dO includes its delta."""
        (q, k, v, do), row_stats_bytes = self.inputs, TILE_M * FP32_BYTES
        steps = (
            q.create_pipeline(smem, more_bytes=row_stats_bytes),
            do.create_pipeline(smem, more_bytes=row_stats_bytes),
        )
        keys = (k.create_pipeline(smem), v.create_pipeline(smem))
        return DkdvPipelines(*steps, *keys, tuple(sm90.Pipeline.create(smem, 1, 0) for _ in (P, DS)))

    def allocate_smem(self, smem: cutlass.memory.SmemAllocator) -> DkdvSmem:
        """Allocate all buffers of a CTA."""
        dtype, operands = self.element.dtype, (x.buffer(smem) for x in self.inputs)
        q, k, v, do = operands
        layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (TILE_M, ROWS, TILE_N), dtype, len((P, DS)))
        crossing = smem.allocate_tensor(dtype, layout.outer, 1024, layout.inner)
        row_layout = cute.make_layout((TILE_M, self.stages))  # (TILE_M, stage)
        lse, delta = (smem.allocate_tensor(Float32, row_layout, 128) for _ in range(2))
        return DkdvSmem(q, k, v, do, crossing, lse, delta)

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
        """Assign the warp roles: two producer warps load, and two consumer warpgroups multiply."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        pipelines = self.create_pipelines(smem)
        tile_index = sm90.TileIndexPipeline.create(smem)
        score_pipeline = score_pipeline.allocate_smem(smem, self.score_layout)
        shared = self.allocate_smem(smem)
        self.features.wait_for_preprocess()

        mQ, mK, shares = operands.tensor("q"), operands.tensor("k"), operands.tensor("dk").shape[2]
        tile_grid = grid_of_keys(addressing, block_iterator, mQ, mK, shares, (TILE_M, TILE_N), l2_group_heads)
        tile_scheduler = sm90.DynamicTileScheduler(mCounter.iterator, tile_index, tile_grid.order.total)
        heads = (mQ.shape[2] // shares, shares // mK.shape[2])
        work = DkdvWork(pipelines, tile_scheduler, tile_grid, block_iterator, *heads)
        consumers = 4 * WARPGROUPS
        query_pipelines = (sm90.PipelineWarps(pipeline, consumers) for pipeline in (pipelines.q, pipelines.do))
        kv_pipelines = (sm90.PipelineWarps(pipeline, 4) for pipeline in (pipelines.k, pipelines.v))
        weight_pipelines = (sm90.PipelineWarps(pipeline, 4, 4) for pipeline in pipelines.weights)
        pipelines_and_warps = (
            *query_pipelines,
            *kv_pipelines,
            *weight_pipelines,
            sm90.PipelineWarps(tile_index.pipeline, consumers + 1),
            *score_pipeline.pipelines,
        )
        sm90.start_cta(warp_idx, (*operands.atoms, *score_pipeline.atoms), pipelines_and_warps)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                self.load_queries(
                    *operands.with_smem(q=shared.q, do=shared.do), mRowStats, shared, work, score_pipeline
                )
            elif warp_idx == 1:
                self.load_keys(*operands.with_smem(k=shared.k, v=shared.v), work)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            dk, dv = operands.with_smem(dk=shared.weights, dv=shared.weights)
            if warp_idx < 8:
                self.consume(
                    self.make_consumer_state(0, shared, pipelines, score_pipeline), dk, dv, work, scales, score_pipeline
                )
            else:
                self.consume(
                    self.make_consumer_state(1, shared, pipelines, score_pipeline), dk, dv, work, scales, score_pipeline
                )

    @cute.jit
    def load_queries(
        self, q: sm90.TmaOperand, do: sm90.TmaOperand, mRowStats: cute.Tensor, shared: DkdvSmem, work: DkdvWork,
        score_pipeline: ScorePipeline
    ):  # fmt: skip
        """Run the first producer warp: load Q with LSE, dO with delta and the score stages' data, step by step.

        This warp also fetches the tiles.
        """
        tile_count, step_count, tile_idx = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while tile_idx < work.tile_grid.total:
            tile = work.tile_grid.tile(tile_idx, work.group)
            query_range = work.block_iterator.bind(tile.sizes, TILE_M, TILE_N).query_blocks(tile)
            for g in cutlass.range(work.group, unroll=1):
                gRowStats = tile.row_stats(mRowStats, g, TILE_M)
                tQsQ, tQgQ = tile.queries(q, g).tiles((TILE_M, self.d), (None, 0))
                tOsO, tOgO = tile.queries(do, g).tiles((TILE_M, self.dv), (None, 0))
                head_range = query_range.of_head(g)
                stage_loads = score_pipeline.begin_tile_load(tile, tile.query_head(g))
                subrange = head_range.all_blocks()
                for j in cutlass.range(subrange.begin, subrange.end, unroll=1):
                    m_block = head_range.nth(j)
                    for x, g_, s_, pipeline, which, sRow in (
                        (q, tQgQ, tQsQ, work.pipelines.q, 0, shared.lse),
                        (do, tOgO, tOsO, work.pipelines.do, 1, shared.delta),
                    ):
                        sm90.load_block(x.atom, g_, s_, pipeline, m_block, step_count)
                        load_rows(
                            gRowStats[0, None, which, m_block],
                            sRow[None, pipeline.stage_index(step_count)],
                            pipeline,
                            step_count,
                        )
                    stage_loads.load(m_block, step_count)
                    step_count += 1
            tile_idx = work.tile_scheduler.publish(tile_count, work.tile_scheduler.fetch_next())
            tile_count += 1

    @cute.jit
    def load_keys(self, k: sm90.TmaOperand, v: sm90.TmaOperand, work: DkdvWork):
        """Run the second producer warp: load K and V of each tile as soon as the previous tile has released them."""
        tile_count, tile_idx = Int32(0), cute.arch.block_idx()[0]
        while tile_idx < work.tile_grid.total:
            tile = work.tile_grid.tile(tile_idx)
            for x, pipeline, columns in ((k, work.pipelines.k, self.d), (v, work.pipelines.v, self.dv)):
                tXsX, tXgX = tile.rows_of_shared(x, work.sharing).tiles((ROWS, columns), (None, 0))
                sm90.load_block(x.atom, tXgX, tXsX, pipeline, tile.block, tile_count)
            tile_idx = work.tile_scheduler.receive(tile_count)
            tile_count += 1

    def make_consumer_state(
        self, wg: int, shared: DkdvSmem, pipelines: DkdvPipelines, score_pipeline: ScorePipeline
    ) -> DkdvConsumerState:
        """Return the operands and accumulators of consumer warpgroup `wg`."""
        keys, rows, row_stats = (shared.v, shared.do, shared.delta) if wg else (shared.k, shared.q, shared.lse)
        thread = cute.arch.thread_idx()[0] % sm90.WARPGROUP
        product = sm90.WgmmaProduct.create(lambda: sm90.make_mma(self.element.dtype, TILE_M, "rows", "rows"))
        mma = product.add.get_slice(thread)
        left = mma.make_fragment_A(mma.partition_A(keys[None, None, 0]))  # K or V: (MMA, 1, K/16)
        right = mma.make_fragment_B(mma.partition_B(rows))  # Q or dO: (MMA, 1, K/16, stage)
        scores = sm90.StageProduct(product, left, right, sm90.zeros(mma, (ROWS, TILE_M)))
        weights = fragments.OperandA.create(scores.acc, self.element)
        values = cute.make_tensor(cute.recast_ptr(weights.pairs.iterator, dtype=self.element.dtype), scores.acc.layout)
        kept_p = None
        if score_pipeline.keep_scale is not None:
            kept_p = weights if wg == 0 else fragments.OperandA.create(scores.acc, self.element)
        crossing = sm90.transposed(shared.weights)  # (keys, queries, P or dS)

        def make_sum(
            which: int, columns: int, sRight: cute.Tensor, register_operands: fragments.OperandA | None
        ) -> sm90.StageProduct:  # fmt: skip
            source = "columns" if register_operands is None else "registers"
            product = sm90.WgmmaProduct.create(lambda: sm90.make_mma(self.element.dtype, columns, source, "columns"))
            thread_mma = product.add.get_slice(thread)
            left = thread_mma.make_fragment_A(thread_mma.partition_A(crossing[None, None, which]))
            # (columns, TILE_M, stage)
            half = cute.local_tile(sm90.transposed(sRight), (columns, TILE_M, self.stages), (wg, 0, 0))
            right = thread_mma.make_fragment_B(thread_mma.partition_B(half))
            left = left if register_operands is None else register_operands.fragment
            return sm90.StageProduct(product, left, right, sm90.zeros(thread_mma, (ROWS, columns)))

        register_operands = (weights if wg == 0 else kept_p), (weights if wg == 1 else None)
        dV = make_sum(P, self.dv // WARPGROUPS, shared.do, register_operands[P])
        dK = make_sum(DS, self.d // WARPGROUPS, shared.q, register_operands[DS])
        to_smem, from_smem = (
            cute.make_tiled_copy_C(cute.make_copy_atom(op(True, 4), self.element.dtype), product.add).get_slice(thread)
            for op in (warp.StMatrix8x8x16bOp, warp.LdMatrix8x8x16bOp)
        )

        def store(values):
            cute.copy(to_smem, to_smem.retile(values), to_smem.partition_D(crossing[None, None, wg]))

        def load(values):
            cute.copy(from_smem, from_smem.partition_S(crossing[None, None, P]), from_smem.retile(values))

        return DkdvConsumerState(
            wg, pipelines, scores, weights, values, kept_p, row_stats, shared.lse, dV, dK, store, load
        )

    @cute.jit
    def consume(
        self, state: DkdvConsumerState, dk: sm90.TmaOperand, dv: sm90.TmaOperand, work: DkdvWork, scales: SoftmaxScale,
        score_pipeline: ScorePipeline
    ):  # fmt: skip
        """Run a consumer warpgroup: compute half of the columns of dK and dV of every tile."""
        pipelines = work.pipelines
        keys = pipelines.v if state.wg else pipelines.k
        lane, warp_in_group = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        score_pipeline, scale_log2 = score_pipeline.allocate_registers(TILE_M), score_pipeline.scales(scales).log2
        tile_count, step_count, tile_idx = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while tile_idx < work.tile_grid.total:
            tile = work.tile_grid.tile(tile_idx, work.group)
            query_range = work.block_iterator.bind(tile.sizes, TILE_M, TILE_N).query_blocks(tile)
            end = step_count + query_range.total(work.group)
            key = tile.block * TILE_N + warp_in_group * ROWS_PER_WARP + lane // 4
            tile_stages = score_pipeline.set_tile(
                ScoreCoord(tile.sizes, TILE_M, key, lane % 4 * 2, tile.sequence, None, transposed=True)
            )
            state.dK.acc.fill(0.0)
            state.dV.acc.fill(0.0)
            keys.consumer_wait(tile_count)
            warpgroup.fence()
            state.issue_next_scores(step_count, end)
            warpgroup.wait_group(0)
            self.wait_for_stores(state.wg)
            for g in cutlass.range(work.group, unroll=1):
                head_range, head_stages = query_range.of_head(g), tile_stages.of_head(tile.query_head(g))
                for subrange in head_range.subranges() if state.wg == 0 else (head_range.all_blocks(),):
                    if cutlass.const_expr(state.wg == 0):
                        head_stages.begin(head_range.nth(subrange.begin), subrange.masked)
                    for j in cutlass.range(subrange.begin, subrange.end, unroll=1):
                        if cutlass.const_expr(state.wg == 0):
                            self.compute_p(state, step_count, head_stages, head_range.nth(j), subrange, scale_log2)
                            head_stages.prefetch(head_range.next(j, subrange), subrange.masked)
                        else:
                            self.compute_ds(state, step_count, head_stages)
                        state.send_weights(step_count)
                        state.accumulate_dkdv(step_count, end)
                        step_count += 1
            keys.consumer_release(tile_count)
            pipelines.weights[state.wg].producer_wait(step_count)  # the outputs leave through this buffer
            slab = tile.block * (TILE_N // ROWS_PER_WARP)
            self.store(
                state,
                state.dV.acc,
                score_pipeline.scaled(Float32(2.0**-self.element.p_scale_log2)),
                tile.rows(dv),
                slab,
            )
            self.store(state, state.dK.acc, score_pipeline.scaled(scales.natural), tile.rows(dk), slab)
            tile_idx = work.tile_scheduler.receive(tile_count)
            tile_count += 1
        # Shared memory must stay allocated until the last store has read from it.
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def compute_p(
        self,
        state: DkdvConsumerState,
        step_count: Int32,
        head_stages: ScorePipeline,
        m_block: Int32,
        subrange: BlockSubrange,
        scale_log2: Float32,
    ):
        """Compute P of a step in the first warpgroup, and pack P into 16 bits."""
        scores, lse_log2 = state.scores.values, row_values(state.row_stats, state.pipelines.q.stage_index(step_count))
        if cutlass.const_expr(self.element.p_scale_log2 != 0):
            lse_log2.store(lse_log2.load() - Float32(self.element.p_scale_log2))
        head_stages.prepare_stage(m_block, subrange.masked)
        head_stages.apply(scores, m_block, subrange.masked, step_count)
        exponentiate(scores, lse_log2, scale_log2)
        state.weights.convert(state.scores.acc, head_stages.signed_p_transform(subrange.masked))

    @cute.jit
    def compute_ds(self, state: DkdvConsumerState, step_count: Int32, head_stages: ScorePipeline):
        """Compute dS = P * (dP - delta) of a step in the second warpgroup; the scale is applied to dK."""
        delta = row_values(state.row_stats, state.pipelines.do.stage_index(step_count))
        state.pipelines.weights[P].consumer_wait(step_count)
        state.load(state.values)
        weights, dP = fragments.rows_and_columns(state.values), state.scores.values
        if cutlass.const_expr(state.kept_p is not None):
            state.kept_p.copy_nonnegative(state.weights)
        score_derivative = ScoreDerivative.create(head_stages, lambda: state.lse_of(step_count))
        softmax_backward(weights, dP, delta, dP, self.element.p_scale_log2, state.kept_p is not None, score_derivative)
        state.weights.convert(state.scores.acc)

    @cute.jit
    def wait_for_stores(self, wg: int):
        """Wait until the outputs of the previous tile have left the weights' buffer, for all four warps."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        sm90.sync_warpgroup(DkdvBarrier.OUTPUT_STORED, wg)

    @cute.jit
    def store(self, state: DkdvConsumerState, acc: cute.Tensor, factor: Float32, out: sm90.TmaOperand, slab: Int32):
        """Store the warpgroup's columns of an output through the buffer of its weights, `staged_columns` at a time."""
        columns = staged_columns(cute.size(acc) * 2 * WARPGROUPS)
        parts = cute.size(acc) * 2 // columns
        mma = sm90.make_mma(self.element.dtype, columns, "rows", "columns")
        layout = sm90.slab_layout(self.element.dtype, ROWS, columns)
        start = out.s[None, None, state.wg].iterator
        if cutlass.const_expr(columns < STAGED_COLUMNS):
            # Each warp uses the same place for dV and for dK, although the slabs of their layouts may be smaller than
            # STAGED_COLUMNS.
            spare = ROWS_PER_WARP * (STAGED_COLUMNS - columns)
            warp_in_group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
            start = start + cute.assume(warp_in_group * spare, divby=spare)
        start = cute.recast_ptr(start, layout.inner, dtype=self.element.dtype)
        for part in cutlass.range_constexpr(parts):
            registers = cute.make_tensor(acc.iterator + part * (columns // 2), mma.partition_shape_C((ROWS, columns)))
            rX = cute.make_rmem_tensor_like(registers, self.element.dtype)
            rX.store((registers.load() * factor).to(self.element.dtype))
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the previous contents of the warp's part have been read
            cute.arch.sync_warp()
            sm90.store_slabs(rX, cute.make_tensor(start, layout.outer), out, slab, mma, state.wg * parts + part)


def staged_columns(columns: int) -> int:
    """Return the number of columns of a warpgroup's half of an output that leave at once: all or half of them."""
    wg_columns = columns // WARPGROUPS
    return wg_columns if wg_columns <= STAGED_COLUMNS else wg_columns // 2
