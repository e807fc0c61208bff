"""Attention backward for Hopper with head dims 192 and (192, 128): dQ, dK and dV in one kernel, 96 keys per CTA.

Registers hold dK and dV of 96 keys only if each consumer warpgroup owns one of the two. The first warpgroup computes S
and from S P, and owns dV. The second warpgroup computes dP and from dP dS, and owns dK. Both gradients are transposed
(head dim x keys), so that all 96 keys are columns of a product. P and dS cross shared memory.

dQ = dS K has the same registers as S or dP. Each warpgroup multiplies half of the columns of K. The second warpgroup
multiplies dS at once, the first warpgroup a step later, so that the first warpgroup never waits for dS. Shared memory
has no space for dQ in fp32. Registers are added to the dQ workspace in global memory by vector reductions.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ...registry.kernel_spec import DQ_WRITERS, FP32_BYTES, HopperSpec
from ..backward.dq_product import DS_STAGES
from ..backward.dq_writer import ADDED_STAGES, DqWriter
from ..backward.pre_post_process import WARPGROUPS, by_query, exponentiate, softmax_backward
from ..backward.workspace import UNITS, DqWorkspace
from ..call_args.kernel_call import SoftmaxScale
from ..features.base import KernelFeatures
from ..primitives import fragments, sm90
from ..score_stages.pipeline import ScoreCoord, ScoreLayout, ScorePipeline
from ..tiling.block_iterator import GroupQueryBlocks, QueryBlockRange
from ..tiling.tile import Tile
from .backward import BackwardPipelines, BackwardSm90, BackwardWork
from .common import TmaOperands

VALUES, KEYS = 0, 1  # consumer warpgroups: owner of dV, owner of dK


class Keys96Barrier(enum.IntEnum):
    """Named barriers of the consumer warpgroups; barrier 0 is `sync_threads`."""

    K_READ = 1  # the first warpgroup has finished the last product with K of a tile
    V_READ = 2  # the second warpgroup has finished the last product with V of a tile
    STAGED = 3  # STAGED + w: warpgroup w has written a gradient to shared memory


@dataclass(frozen=True)
class Keys96Pipelines(BackwardPipelines):
    """Pipelines of a CTA. `ds` runs from the second consumer warpgroup to both, `p` from the first to both."""

    p: sm90.Pipeline


@dataclass(frozen=True)
class Keys96Smem:
    """Buffers of a CTA in shared memory. dK leaves through the buffer of K, and dV through the buffer of V."""

    q: cute.Tensor  # (tile_m, D, stage)
    do: cute.Tensor  # (tile_m, Dv, stage)
    k: cute.Tensor  # (tile_n, D, 1)
    v: cute.Tensor  # (tile_n, Dv, 1)
    p: cute.Tensor  # (keys, queries, 1)
    ds: cute.Tensor  # (keys, queries, stage)
    lse: cute.Tensor  # (tile_m, stage): LSE * log2(e) of the queries of a step
    delta: cute.Tensor  # (tile_m, stage)
    workspace_units: cute.Tensor  # (floats of a unit, stage): dQ workspace in fp32
    dq_out: cute.Tensor  # (16 rows of each writer, columns of a unit): dQ in 16 bits

    @property
    def staging(self) -> cute.Tensor:
        return self.k


@dataclass(frozen=True)
class Keys96ConsumerState:
    """State of a consumer warpgroup: the products of a step, the accumulators and P in registers."""

    wg: int  # VALUES or KEYS
    pipelines: Keys96Pipelines
    workspace: DqWorkspace
    scores: sm90.WgmmaProduct  # S = Q K^T, or dP = dO V^T
    scores_left: cute.Tensor  # Q or dO: (MMA, 1, K/16, stage)
    scores_right: cute.Tensor  # K or V: (MMA, 1, K/16)
    S: cute.Tensor  # fp32: tile_m x tile_n, S, then P, then dQ; or dP, then dS, then dQ
    gradient: sm90.WgmmaProduct  # dV^T += dO^T P, or dK^T += Q^T dS
    gradient_left: cute.Tensor  # dO^T or Q^T: (MMA, columns/64, tile_m/16, stage)
    gradient_right: cute.Tensor  # P or dS: (MMA, 1, tile_m/16, stage)
    sums: cute.Tensor  # fp32: dV^T or dK^T, columns x tile_n
    query_gradient: sm90.WgmmaProduct  # dQ = dS K, half of the columns
    dS: cute.Tensor  # (MMA, 1, tile_n/16, stage)
    K: cute.Tensor  # (MMA, 1, tile_n/16)
    dQ: cute.Tensor  # the registers of S
    weights: fragments.OperandA  # P or dS in 16 bits
    values: cute.Tensor  # the registers of `weights`, in the order of S
    to_smem: cute.TiledCopy
    crossing: cute.Tensor  # P or dS in shared memory, where the warpgroup stores: (..., stage)
    from_smem: cute.TiledCopy
    stored_p: cute.Tensor  # P in shared memory, as a source of `from_smem`

    @property
    def scores_pipeline(self) -> sm90.Pipeline:
        """Pipeline of the left operand of `scores`: Q with LSE, or dO with delta."""
        return self.pipelines.do if self.wg == KEYS else self.pipelines.q

    @property
    def gradient_pipeline(self) -> sm90.Pipeline:
        """Pipeline of the left operand of `gradient`: dO with delta, or Q with LSE."""
        return self.pipelines.q if self.wg == KEYS else self.pipelines.do

    @property
    def weights_pipeline(self) -> sm90.Pipeline:
        return self.pipelines.ds if self.wg == KEYS else self.pipelines.p

    @cute.jit
    def issue_scores(self, step_count: Int32, end: Int32):
        """Issue S or dP of step `step_count`.

        Beyond the last step of a tile nobody reads the result, and a branch around the product would cost more.
        """
        if step_count < end:
            self.scores_pipeline.consumer_wait(step_count)
        stage = self.scores_pipeline.stage_index(step_count)
        warpgroup.fence()
        self.scores.issue(self.S, self.scores_left[None, None, None, stage], self.scores_right, accumulate=False)

    @cute.jit
    def store_weights(self, step_count: Int32):
        """Store P or dS of step `step_count` to shared memory, for both warpgroups."""
        pipeline = self.weights_pipeline
        pipeline.producer_wait(step_count)
        stage = pipeline.stage_index(step_count)
        cute.copy(self.to_smem, self.to_smem.retile(self.values), self.crossing[None, None, None, stage])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        pipeline.producer_commit(step_count)

    @cute.jit
    def load_p(self, step_count: Int32):
        """Load P of step `step_count` from shared memory into the registers of `weights`."""
        self.pipelines.p.consumer_wait(step_count)
        cute.copy(self.from_smem, self.stored_p[None, None, None, 0], self.from_smem.retile(self.values))

    @cute.jit
    def issue_dq(self, count: Int32):
        """Issue dQ with dS number `count`. Before the first dS the result is undefined, and never added."""
        if count >= 0:
            self.pipelines.ds.consumer_wait(count)
        stage = self.pipelines.ds.stage_index(count)
        warpgroup.fence()
        self.query_gradient.issue(self.dQ, self.dS[None, None, None, stage], self.K, accumulate=False)

    @cute.jit
    def issue_gradient(self, step_count: Int32):
        """Issue dV^T or dK^T of step `step_count`."""
        self.gradient_pipeline.consumer_wait(step_count)
        self.weights_pipeline.consumer_wait(step_count)
        stage, crossing = self.gradient_pipeline.stage_index(step_count), self.weights_pipeline.stage_index(step_count)
        left, right = self.gradient_left[None, None, None, stage], self.gradient_right[None, None, None, crossing]
        self.gradient.issue(self.sums, left, right, accumulate=True)

    @cute.jit
    def add_dq(self, unit: Int32):
        """Add the warp's 16 rows of dQ to a unit of the dQ workspace."""
        self.workspace.add_registers(unit, self.dQ)


class Backward96KeysSm90(BackwardSm90):
    """Builder of the backward kernels of a spec with 96 keys per CTA, which a call launches in sequence.

    Launches, inputs, outputs and workspace are the same as those of `BackwardSm90`.

    Warp roles of the main kernel: warpgroup 0 gives its registers away. Its warp 0 loads Q and dO and fetches tiles.
    Its warp 1 loads K and V. Its warps 2 and 3 are dQ writers. Warpgroup 1 computes S, P and dV, warpgroup 2 computes
    dP, dS and dK, and each computes half of the columns of dQ.

    Pipelines (producer -> consumer, stages):
    - Q with LSE, dO with delta: warp 0 -> all consumer warps, `stages` stages each.
    - K, V: warp 1 -> all consumer warps, a single stage each.
    - P: warpgroup 1 -> both consumer warpgroups, a single stage, without bytes.
    - dS: warpgroup 2 -> both consumer warpgroups, `DS_STAGES` stages, without bytes.
    - Tile indices, `workspace_units`, `added`: as in `BackwardSm90`.

    Shared memory: the stages of Q, dO, LSE and delta; K and V, through which dK and dV leave; P; two stages of dS;
    workspace units of the dQ writers, in fp32 and in 16 bits; tile indices, mbarriers and buffers of the score stages.
    """

    def __init__(self, spec: HopperSpec):
        super().__init__(spec)
        self.features = KernelFeatures.from_spec(spec)
        self.score_layout = ScoreLayout(self.element, 1, self.tile_n)

    @property
    def inputs(self) -> tuple[sm90.TmaLoadConfig, sm90.TmaLoadConfig, sm90.TmaLoadConfig, sm90.TmaLoadConfig]:
        """TMA load configurations of Q, dO, K and V. dQ multiplies halves of the columns of K."""
        q, do = (sm90.TmaLoadConfig.create(self.element, self.tile_m, x, self.stages) for x in (self.d, self.dv))
        k = sm90.TmaLoadConfig.in_column_halves(self.element, self.tile_n, self.d, 1)
        return q, do, k, sm90.TmaLoadConfig.create(self.element, self.tile_n, self.dv, 1)

    def create_pipelines(self, smem: cutlass.memory.SmemAllocator) -> Keys96Pipelines:
        """Create all pipelines of a CTA. A stage of Q includes its LSE, and a stage of dO includes its delta."""
        (q, do, k, v), row_stats_bytes = self.inputs, self.tile_m * FP32_BYTES
        steps = (
            q.create_pipeline(smem, more_bytes=row_stats_bytes),
            do.create_pipeline(smem, more_bytes=row_stats_bytes),
        )
        keys = (k.create_pipeline(smem), v.create_pipeline(smem))
        ds = sm90.Pipeline.create(smem, DS_STAGES, 0)
        tile_index = sm90.TileIndexPipeline.create(smem)
        workspace_units = sm90.Pipeline.create(smem, self.writer_stages * DQ_WRITERS, self.unit * FP32_BYTES)
        added = sm90.Pipeline.create(smem, ADDED_STAGES, 0)
        p = sm90.Pipeline.create(smem, 1, 0)
        return Keys96Pipelines(*steps, *keys, ds, tile_index, workspace_units, added, None, p)

    def allocate_smem(self, smem: cutlass.memory.SmemAllocator) -> Keys96Smem:
        """Allocate all buffers of a CTA."""
        dtype, operands = self.element.dtype, tuple(x.buffer(smem) for x in self.inputs)
        sizes = (self.tile_m, self.tile_n, self.tile_m)  # of a product with (keys, queries) as its right operand
        layouts = (hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, sizes, dtype, stages) for stages in (1, DS_STAGES))
        p, ds = (smem.allocate_tensor(dtype, layout.outer, 1024, layout.inner) for layout in layouts)
        row_layout = cute.make_layout((self.tile_m, self.stages))  # (tile_m, stage)
        lse, delta = (smem.allocate_tensor(Float32, row_layout, 128) for _ in range(2))
        unit_layout = cute.make_layout((self.unit, self.writer_stages * DQ_WRITERS))
        workspace_units = smem.allocate_tensor(Float32, unit_layout, 128)
        unit_rows = sm90.slab_layout(dtype, sm90.ROWS_PER_WARP * DQ_WRITERS, self.half)
        dq_out = smem.allocate_tensor(dtype, unit_rows.outer, 1024, unit_rows.inner)
        return Keys96Smem(*operands, p, ds, lse, delta, workspace_units, dq_out)

    def start_cta(
        self, warp_idx: Int32, operands: TmaOperands, pipelines: Keys96Pipelines, score_pipeline: ScorePipeline
    ) -> None:
        """Prefetch the TMA descriptors and initialize the mbarriers; all threads take part."""
        consumers = 4 * WARPGROUPS
        loaded = (pipelines.q, pipelines.do, pipelines.k, pipelines.v, pipelines.added)
        pipelines_and_warps = (
            *(sm90.PipelineWarps(pipeline, consumers) for pipeline in loaded),
            *(sm90.PipelineWarps(pipeline, consumers, 4) for pipeline in (pipelines.p, pipelines.ds)),
            sm90.PipelineWarps(pipelines.tile_index.pipeline, consumers + 1 + DQ_WRITERS),
            sm90.PipelineWarps(pipelines.workspace_units, 1),
            *score_pipeline.pipelines,
        )
        sm90.start_cta(warp_idx, (*operands.atoms, *score_pipeline.atoms), pipelines_and_warps)

    @cute.jit
    def load_keys(self, k: sm90.TmaOperand, v: sm90.TmaOperand, work: BackwardWork):
        """Run the second producer warp: load K and V of each tile as soon as the previous tile has released them."""
        tile_count, tile_idx = Int32(0), work.tile_scheduler.receive(Int32(0))
        while tile_idx < work.tile_grid.total:
            tile = work.tile_grid.tile(tile_idx)
            for x, pipeline, columns in ((k, work.pipelines.k, self.d), (v, work.pipelines.v, self.dv)):
                tXsX, tXgX = tile.rows_of_shared(x, work.sharing).tiles((self.tile_n, columns), (None, 0))
                sm90.load_block(x.atom, tXgX, tXsX, pipeline, tile.block, tile_count)
            tile_count += 1
            tile_idx = work.tile_scheduler.receive(tile_count)

    def make_gradient_state(
        self, wg: int, shared: Keys96Smem, pipelines: Keys96Pipelines, workspace: DqWorkspace
    ) -> Keys96ConsumerState:
        """Return the operands and accumulators of consumer warpgroup `wg`."""
        dtype, thread = self.element.dtype, cute.arch.thread_idx()[0] % sm90.WARPGROUP
        left, right, gradient_left, weights, columns = (
            (shared.do, shared.v, shared.q, shared.ds, self.d)
            if wg == KEYS
            else (shared.q, shared.k, shared.do, shared.p, self.dv)
        )
        scores, gradient, query_gradient = (
            sm90.WgmmaProduct.create(lambda x=x: sm90.make_mma(dtype, *x))
            for x in (
                (self.tile_n, "rows", "rows"),
                (self.tile_n, "columns", "rows"),
                (self.half, "columns", "columns"),
            )
        )
        mma_s, mma_g, mma_q = (x.add.get_slice(thread) for x in (scores, gradient, query_gradient))
        S = sm90.zeros(mma_s, (self.tile_m, self.tile_n))
        packed = fragments.OperandA.create(S, self.element)
        dQ_layout = sm90.zeros(mma_q, (self.tile_m, self.half)).layout
        half_of_k = cute.local_tile(sm90.transposed(shared.k), (self.half, self.tile_n), (wg, 0, 0))  # (D/2, keys)
        to_smem, from_smem = (
            cute.make_tiled_copy_C(cute.make_copy_atom(op(True, 4), dtype), scores.add).get_slice(thread)
            for op in (warp.StMatrix8x8x16bOp, warp.LdMatrix8x8x16bOp)
        )
        return Keys96ConsumerState(
            wg,
            pipelines,
            workspace,
            scores,
            mma_s.make_fragment_A(mma_s.partition_A(left)),
            mma_s.make_fragment_B(mma_s.partition_B(right[None, None, 0])),
            S,
            gradient,
            mma_g.make_fragment_A(mma_g.partition_A(sm90.transposed(gradient_left))),
            mma_g.make_fragment_B(mma_g.partition_B(weights)),
            sm90.zeros(mma_g, (columns, self.tile_n)),
            query_gradient,
            mma_q.make_fragment_A(mma_q.partition_A(sm90.transposed(shared.ds))),
            mma_q.make_fragment_B(mma_q.partition_B(half_of_k)),
            cute.make_tensor(S.iterator, dQ_layout),
            packed,
            cute.make_tensor(cute.recast_ptr(packed.pairs.iterator, dtype=dtype), S.layout),
            to_smem,
            to_smem.partition_D(sm90.transposed(weights)),
            from_smem,
            from_smem.partition_S(sm90.transposed(shared.p)),
        )

    @cute.jit
    def consume(
        self, shared: Keys96Smem, dk: sm90.TmaOperand, dv: sm90.TmaOperand, dq_writer: DqWriter, work: BackwardWork,
        scales: SoftmaxScale, score_pipeline: ScorePipeline,
    ):  # fmt: skip
        """Run a consumer warpgroup. The first warpgroup computes dV and the second dK, each with half of dQ."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < 8:
            state = self.make_gradient_state(VALUES, shared, work.pipelines, dq_writer.workspace)
            self.compute_gradient(state, shared, dv, dq_writer, work, scales, score_pipeline)
        else:
            state = self.make_gradient_state(KEYS, shared, work.pipelines, dq_writer.workspace)
            self.compute_gradient(state, shared, dk, dq_writer, work, scales, score_pipeline)

    @cute.jit
    def compute_gradient(
        self, state: Keys96ConsumerState, shared: Keys96Smem, out: sm90.TmaOperand, dq_writer: DqWriter,
        work: BackwardWork, scales: SoftmaxScale, score_pipeline: ScorePipeline,
    ):  # fmt: skip
        """Compute dV or dK of all tiles of the CTA, and half of the columns of dQ of each step."""
        pipelines, workspace = work.pipelines, state.workspace
        lane, warp_in_group = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        row = warp_in_group * sm90.ROWS_PER_WARP + lane // 4
        score_pipeline = score_pipeline.allocate_registers(self.tile_n)
        scale_log2 = score_pipeline.scales(scales).log2
        # The gradient leaves through the buffer of `keys`, which only the peer has read last.
        is_keys = state.wg == KEYS
        buffer, keys, read = (shared.k, pipelines.k, pipelines.v) if is_keys else (shared.v, pipelines.v, pipelines.k)
        barriers = (Keys96Barrier.V_READ, Keys96Barrier.K_READ)
        has_read, peer_has_read = barriers if is_keys else barriers[::-1]
        factor = scales.natural if is_keys else Float32(2.0**-self.element.p_scale_log2)

        tile_count, step_count, tile_idx = Int32(0), Int32(0), work.tile_scheduler.receive(Int32(0))
        while tile_idx < work.tile_grid.total:
            tile = work.tile_grid.tile(tile_idx, work.group)
            query_range = work.query_range(tile)
            end = step_count + num_steps(query_range, work.group)
            state.sums.fill(0.0)
            pipelines.k.consumer_wait(tile_count)
            pipelines.v.consumer_wait(tile_count)
            state.issue_scores(step_count, end)
            warpgroup.wait_group(0)
            first_step, unit = step_count, Int32(0)
            for g in cutlass.range(query_range.outer_heads(work.group), unroll=1):
                head_range = query_range.of_head(g)
                first_block = workspace.first_block(tile, g, work.tile_grid.order.heads)
                for subrange in (head_range.all_blocks(),) if state.wg == KEYS else head_range.subranges():
                    for j in cutlass.range(subrange.begin, subrange.end, unroll=1):
                        block, nth_head = head_range.step(j)
                        this_unit = (first_block + nth_head * workspace.num_m_blocks + block) * UNITS
                        this_unit += state.wg * 4 + warp_in_group
                        if cutlass.const_expr(state.wg == VALUES):
                            coord = ScoreCoord(
                                tile.sizes, self.tile_n, block * self.tile_m + row, lane % 4 * 2, tile.sequence, None
                            )
                            stages = score_pipeline.set_tile(coord)
                            stage = pipelines.q.stage_index(step_count)
                            lse = (shared.lse[row, stage], shared.lse[row + 8, stage])
                            stages.apply(fragments.rows_and_columns(state.S), tile.block, subrange.masked, step_count)
                            self.step_of_values(state, step_count, end, lse, scale_log2, unit, first_step)
                        else:
                            stage = pipelines.do.stage_index(step_count)
                            delta = (shared.delta[row, stage], shared.delta[row + 8, stage])
                            self.step_of_keys(state, step_count, end, delta, this_unit)
                        unit = this_unit
                        step_count += 1
            if cutlass.const_expr(state.wg == VALUES):
                state.issue_dq(step_count - 1)
                warpgroup.wait_group(0)
                if step_count > first_step:
                    state.add_dq(unit)
                    pipelines.ds.consumer_release(step_count - 1)
            # All adds of the warp to the workspace are visible before the dQ writers count the tile.
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_warp()
            dq_writer.added.consumer_release(tile_count)
            cute.arch.barrier_arrive(barrier_id=has_read, number_of_threads=WARPGROUPS * sm90.WARPGROUP)
            read.consumer_release(tile_count)
            cute.arch.barrier(barrier_id=peer_has_read, number_of_threads=WARPGROUPS * sm90.WARPGROUP)
            self.store_transposed(state, buffer, score_pipeline.scaled(factor), tile.rows(out), tile)
            keys.consumer_release(tile_count)
            tile_count += 1
            tile_idx = work.tile_scheduler.receive(tile_count)
        # Shared memory must stay allocated until the last transfer has ended.
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def step_of_values(
        self, state: Keys96ConsumerState, step_count: Int32, end: Int32, lse: tuple[Float32, Float32],
        scale_log2: Float32, pending_unit: Int32, first_step: Int32,
    ):  # fmt: skip
        """Run a step of the first warpgroup, with masked S in registers: P, dQ of the step before, dV, the next S."""
        pipelines = state.pipelines
        if cutlass.const_expr(self.element.p_scale_log2 != 0):
            lse = tuple(x - Float32(self.element.p_scale_log2) for x in lse)
        exponentiate(by_query(state.S), lse, scale_log2)
        state.weights.convert(state.S)
        state.store_weights(step_count)
        pipelines.q.consumer_release(step_count)
        state.issue_dq(step_count - 1)
        state.issue_gradient(step_count)
        warpgroup.wait_group(1)  # wait for dQ
        if step_count > first_step:
            state.add_dq(pending_unit)
            pipelines.ds.consumer_release(step_count - 1)
        state.issue_scores(step_count + 1, end)
        warpgroup.wait_group(1)  # wait for dV
        pipelines.do.consumer_release(step_count)
        pipelines.p.consumer_release(step_count)
        # ptxas serializes every product if a product is in flight across the end of a loop.
        warpgroup.wait_group(0)

    @cute.jit
    def step_of_keys(
        self, state: Keys96ConsumerState, step_count: Int32, end: Int32, delta: tuple[Float32, Float32], unit: Int32
    ):  # fmt: skip
        """Run a step of the second warpgroup, with dP in registers: dS, dQ, dK, the next dP."""
        pipelines = state.pipelines
        state.load_p(step_count)
        weights, dP = by_query(state.values), by_query(state.S)
        softmax_backward(weights, dP, delta, dP, self.element.p_scale_log2)
        pipelines.p.consumer_release(step_count)
        state.weights.convert(state.S)
        state.store_weights(step_count)
        pipelines.do.consumer_release(step_count)
        state.issue_dq(step_count)
        state.issue_gradient(step_count)
        warpgroup.wait_group(1)  # wait for dQ
        state.add_dq(unit)
        state.issue_scores(step_count + 1, end)
        warpgroup.wait_group(1)  # wait for dK
        pipelines.q.consumer_release(step_count)
        pipelines.ds.consumer_release(step_count)
        # ptxas serializes every product if a product is in flight across the end of a loop.
        warpgroup.wait_group(0)

    @cute.jit
    def store_transposed(
        self, state: Keys96ConsumerState, buffer: cute.Tensor, factor: Float32, out: sm90.TmaOperand, tile: Tile
    ):
        """Store the warpgroup's gradient in 16 bits through a buffer (keys, columns) to global memory."""
        dtype, thread = self.element.dtype, cute.arch.thread_idx()[0] % sm90.WARPGROUP
        columns = cute.size(state.sums) * sm90.WARPGROUP // self.tile_n
        layout = sm90.slab_layout(dtype, self.tile_n, columns)
        rows = cute.make_tensor(cute.recast_ptr(buffer.iterator, layout.inner, dtype=dtype), layout.outer)
        by_column = cute.make_tensor(rows.iterator, cute.select(rows.layout, mode=[1, 0]))
        rX = cute.make_rmem_tensor_like(state.sums, dtype)
        rX.store((state.sums.load() * factor).to(dtype))
        matrices = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), dtype)
        copy = cute.make_tiled_copy_C(matrices, state.gradient.add).get_slice(thread)
        cute.copy(copy, copy.retile(rX), copy.partition_D(by_column))
        cute.arch.fence_proxy("async.shared", space="cta")
        sm90.sync_warpgroup(Keys96Barrier.STAGED, Int32(state.wg))
        warp_in_group, slabs = cute.arch.make_warp_uniform(thread // sm90.WARP), self.tile_n // sm90.ROWS_PER_WARP
        for first in cutlass.range_constexpr(0, slabs, 4):
            slab = first + warp_in_group
            if slab < slabs:
                box = (sm90.ROWS_PER_WARP, columns)
                part = sm90.TmaOperand(out.atom, out.m, cute.local_tile(rows, box, (slab, 0)))
                tXsX, tXgX = part.tiles(box, (None, 0))
                cute.copy(out.atom, tXsX, tXgX[None, tile.block * slabs + slab])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()


def num_steps(query_range: QueryBlockRange | GroupQueryBlocks, group: Int32) -> Int32:
    """Return the number of steps of a tile, for `group` query heads of a KV head."""
    blocks = query_range.all_blocks()
    return query_range.outer_heads(group) * (blocks.end - blocks.begin)
