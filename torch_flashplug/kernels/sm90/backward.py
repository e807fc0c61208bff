"""Attention backward for Hopper: dQ, dK and dV from Q, K, V, dO, LSE and delta = rowsum(dO * O).

The kernel is persistent. A CTA stays on its SM and fetches blocks of tile_n keys of a single KV head from a dynamic
tile scheduler. The CTA keeps dK and dV of the block in registers. The mainloop visits the query rows that see the
block, for every query head of the group. Each of the two consumer warpgroups owns 64 of the keys. With a causal mask,
groups of several heads have a kernel that visits all heads of the group at a block of rows (`GroupQueryBlocks`).

Scores are computed transposed (keys x queries). Therefore P^T and dS^T are already the left operands of dV += P^T dO
and dK += dS^T Q (FlashAttention-3, arXiv 2407.08608, section B; FlashAttention-2, arXiv 2307.08691, algorithm 2).

dQ = dS K needs the keys of both warpgroups, so dS crosses shared memory once. Each warpgroup multiplies dS with half of
the columns of K, a step later, so that neither warpgroup waits for its peer. The products are added to the fp32 dQ
workspace in global memory, in the order in which registers hold them.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ...registry.kernel_spec import DQ_WRITERS, FP32_BYTES, ROWS_PER_WARPGROUP, SWIZZLED_LINE, HopperSpec
from ..backward.dq_product import DS_STAGES, DqProduct, PendingDq
from ..backward.dq_writer import ADDED_STAGES, DqWriter, run_accumulator_warp
from ..backward.pre_post_process import (
    WARPGROUPS,
    BackwardPostprocess,
    BackwardPreprocess,
    RowStatsInputs,
    ScoreDerivative,
    exponentiate,
    load_rows,
    row_values,
    softmax_backward,
)
from ..backward.workspace import UNITS, DqWorkspace, WorkspaceLayout
from ..call_args.kernel_call import KernelArgs, KernelCall, SoftmaxScale
from ..features.base import KernelFeatures
from ..primitives import fragments, sm90
from ..score_stages.pipeline import ScoreCoord, ScoreLayout, ScorePipeline
from ..tiling.backward_tile_scheduler import BackwardTileScheduler, kv_heads_per_l2_group
from ..tiling.block_iterator import BlockIterator, GroupQueryBlocks, QueryBlockRange
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import Tile, TileAddressing, TileGrid
from .common import TmaOperands

ROWS, ROWS_PER_WARP = ROWS_PER_WARPGROUP, sm90.ROWS_PER_WARP  # keys of a warpgroup, keys of a warp


@dataclass(frozen=True)
class BackwardWorkspaceTensors:
    """Workspace in global memory that the three kernels of a call share."""

    row_stats: cute.Tensor  # (B, Hq, 2, rows) fp32: LSE * log2(e) and delta, padded to whole blocks
    dq_workspace: cute.Tensor  # dQ in fp32, then the Int32 counters


@dataclass(frozen=True)
class BackwardPipelines:
    """Pipelines from the producer warps to the consumers; `ds` runs between the consumer warpgroups."""

    q: sm90.Pipeline  # Q with LSE: `stages` stages of tile_m queries
    do: sm90.Pipeline  # dO with delta: `stages` stages of tile_m queries
    k: sm90.Pipeline  # K of a tile: a single stage for both warpgroups
    v: sm90.Pipeline  # V of a tile: a single stage for both warpgroups
    ds: sm90.Pipeline  # dS: DS_STAGES stages
    tile_index: sm90.TileIndexPipeline
    workspace_units: sm90.Pipeline  # units of the dQ workspace on the way to the dQ writers
    added: sm90.Pipeline  # from consumers to dQ writers, without bytes: dQ of a tile has been added
    # The dQ staging buffer, if accumulator warps do the adding; released when written by a consumer.
    staged: sm90.Pipeline | None


@dataclass(frozen=True)
class BackwardSmem:
    """Buffers of a CTA in shared memory."""

    q: cute.Tensor  # (tile_m, D, stage)
    do: cute.Tensor  # (tile_m, Dv, stage)
    k: cute.Tensor  # (64, D, warpgroup)
    v: cute.Tensor  # (64, Dv, warpgroup)
    ds: cute.Tensor  # (queries, keys of a warpgroup, stage and warpgroup)
    lse: cute.Tensor  # (tile_m, stage): LSE * log2(e) of the queries of a step
    delta: cute.Tensor  # (tile_m, stage)
    staging: cute.Tensor  # (floats, warp): dQ in fp32, later dK and dV in 16 bits
    workspace_units: cute.Tensor  # (floats of a unit, stage): dQ workspace in fp32
    dq_out: cute.Tensor  # (16 rows of each writer, columns of a unit): dQ in 16 bits


@dataclass(frozen=True)
class BackwardWork:
    """Pipelines, tiles and mainloop steps shared by all warp roles."""

    pipelines: BackwardPipelines
    tile_scheduler: sm90.DynamicTileScheduler
    tile_grid: TileGrid
    block_iterator: BlockIterator
    group: Int32  # query heads visited by a tile
    sharing: Int32  # tiles of a block of keys; all of them read the K and V of the same KV head
    tile_m: int
    tile_n: int
    group_divisor: cute.FastDivmodDivisorV2 | None = None  # `group`, if a tile visits the heads of a group together

    def query_range(self, tile: Tile) -> QueryBlockRange | GroupQueryBlocks:
        """Return the query blocks that a tile visits."""
        query_range = self.block_iterator.bind(tile.sizes, self.tile_m, self.tile_n).query_blocks(tile)
        if self.group_divisor is None:
            return query_range
        return GroupQueryBlocks.create(query_range, self.group_divisor, tile.block)


@dataclass(frozen=True)
class StepContext:
    """Position of a step in the block iteration, and the score stages at this position."""

    score_pipeline: ScorePipeline
    masked: bool
    block: Int32  # query block
    next_block: Int32  # query block of the next step


@dataclass(frozen=True)
class SmemToRegisterCopy:
    """Copy of a warpgroup's K or V from shared memory into registers."""

    copy: cute.TiledCopy
    source: cute.Tensor
    target: cute.Tensor


@dataclass(frozen=True)
class DsSmemStore:
    """Store of the warpgroup's half of dS to shared memory, where both warpgroups read dS."""

    pipeline: sm90.Pipeline
    copy: cute.TiledCopy
    source: cute.Tensor
    target: cute.Tensor  # (..., stage and warpgroup)
    wg: Int32

    @cute.jit
    def store(self, count: Int32):
        """Store dS number `count` and signal the dS pipeline."""
        stage = self.pipeline.stage_index(count) * WARPGROUPS + self.wg
        cute.copy(self.copy, self.source, self.target[None, None, None, stage])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.pipeline.consumer_release(count)


@dataclass(frozen=True)
class ConsumerState:
    """State of a consumer warpgroup: 64 keys, the queries of a step as right operands, and the accumulators."""

    wg: Int32
    pipelines: BackwardPipelines
    S: sm90.StageProduct  # S^T = K Q^T, then P^T
    dP: sm90.StageProduct  # dP^T = V dO^T, then dS^T
    dV: sm90.StageProduct  # dV += P^T dO
    dK: sm90.StageProduct  # dK += dS^T Q
    dQ: DqProduct
    P: fragments.OperandA  # P^T in 16 bits
    dS: fragments.OperandA  # dS^T in 16 bits
    register_copies: tuple[SmemToRegisterCopy, ...]  # copies of K and V into registers, if registers hold them
    ds_store: DsSmemStore
    lse: cute.Tensor  # (tile_m, stage): LSE * log2(e) of the queries of a step
    delta: cute.Tensor

    def load_kv_registers(self) -> None:
        """Copy K and V of the tile into registers."""
        for fetch in self.register_copies:
            cute.copy(fetch.copy, fetch.source, fetch.target)


class BackwardSm90(KernelCall, kind="bwd"):
    """Builder of the three backward kernels of a spec, which a call launches in sequence.

    All sizes are compile-time constants. Computes dQ, dK and dV. A deterministic spec (kind `detbwd`) adds to dQ in the
    same order in every run.

    1. `BackwardPreprocess` computes LSE * log2(e) and delta per row, and clears the counters and the first heads of the
       dQ workspace.
    2. The main kernel computes dK and dV and adds dQ to the workspace. Unless the spec is deterministic, its dQ writers
       also clear the workspace before the mainloop and convert finished dQ to 16 bits.
    3. `BackwardPostprocess` converts the dQ of the last heads, or of all heads of a deterministic spec.

    Inputs: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), o and do (B, Hq, Sq, Dv), lse (B, Hq, Sq) in fp32.
    Outputs: dq (B, Hq, Sq, D), dk (B, shares, Sk, D), dv (B, shares, Sk, Dv), where `shares` is Hkv or a multiple of
    Hkv. Workspace: row_stats (B, Hq, 2, padded Sq) in fp32, and the dQ workspace (`DqWorkspace`).

    Warp roles of the main kernel: warpgroup 0 gives its registers away. Its warp 0 loads Q and dO and fetches tiles.
    Its warp 1 loads K and V. Its warps 2 and 3 are dQ writers, or accumulator warps if the spec is deterministic.
    Warpgroups 1 and 2 are consumers.

    Pipelines (producer -> consumer, stages):
    - Q with LSE, dO with delta: warp 0 -> all consumer warps, `stages` stages each.
    - K, V: warp 1 -> all consumer warps, a single stage each.
    - dS: both consumer warpgroups -> both consumer warpgroups, `DS_STAGES` stages, without bytes.
    - Tile indices: warp 0 -> consumer warps, warp 1 and warps 2 and 3, `sm90.TILE_INDEX_STAGES` stages.
    - `workspace_units`: TMA loads by a dQ writer -> the same dQ writer, `dq_writer_units` stages per writer.
    - `added`: consumer warps -> dQ writers, `ADDED_STAGES` stages, without bytes.
    - `staged`, deterministic only: consumer warpgroup -> its accumulator warp, a single stage each, without bytes.

    Shared memory:
    - The stages of Q, dO, LSE and delta; K and V; two stages of dS.
    - The fp32 staging buffer of dQ, through which dK and dV leave, too.
    - Workspace units of the dQ writers, in fp32 and in 16 bits.
    - Tile indices, mbarriers and buffers of the score stages.
    """

    def __init__(self, spec: HopperSpec):
        self.spec, self.features = spec, KernelFeatures.from_spec(spec, transposed=True)
        self.element, self.d, self.dv = self.features.element, spec.d, spec.dv
        self.tile_m, self.tile_n, self.stages = spec.tile_m, spec.tile_n, spec.stages
        self.half = spec.d // WARPGROUPS  # columns of dQ computed by a warpgroup
        self.unit = ROWS_PER_WARP * self.half  # floats of dQ that a consumer warp adds to the workspace at once
        self.writer_stages = spec.dq_writer_units  # stages of the `workspace_units` pipeline per dQ writer
        self.in_order = spec.is_deterministic
        # True if K, V and every product of a step have registers of their own. Then all products of a step can be in
        # flight at once.
        self.kv_in_registers = spec.kv_in_registers
        self.producer_registers, self.consumer_registers = spec.register_split
        self.score_layout = ScoreLayout(self.element, WARPGROUPS, self.tile_m, transposed=True)
        self.preprocess, self.postprocess = (
            BackwardPreprocess(self.element, clears=spec.d),
            BackwardPostprocess(self.element, spec.d),
        )

    @property
    def inputs(self) -> tuple[sm90.TmaLoadConfig, sm90.TmaLoadConfig, sm90.TmaLoadConfig, sm90.TmaLoadConfig]:
        """TMA load configurations of Q, dO, K and V: stages of tile_m queries, and 64 keys per warpgroup.

        dQ multiplies halves of the columns of K.
        """
        q, do = (sm90.TmaLoadConfig.create(self.element, self.tile_m, x, self.stages) for x in (self.d, self.dv))
        k, v = (sm90.TmaLoadConfig.create(self.element, ROWS, x, WARPGROUPS) for x in (self.d, self.dv))
        if self.d % (SWIZZLED_LINE // self.element.bytes):
            k = sm90.TmaLoadConfig.in_column_halves(self.element, ROWS, self.d, WARPGROUPS)
        return q, do, k, v

    @cute.jit
    def launch(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the preprocessing kernels of the features, then the three backward kernels."""
        self.features.launch_preprocess(call, stream)
        B, shares, Sk, _ = call.dk.shape
        addressing, group = self.features.tile_addressing(call), call.q.shape[1] // shares
        num_n_blocks = addressing.max_blocks_of_keys(Sk, self.tile_n)
        bound_iterator = self.features.block_iterator(call).bind(
            SeqlenInfo(call.q.shape[2], Sk), self.tile_m, self.tile_n
        )
        visits_group_together = self.features.visits_group_together(call) and not self.in_order
        # Bytes per query row: Q, dO and dQ in fp32.
        row_bytes = (self.d + self.dv) * self.element.bytes + self.d * FP32_BYTES
        num_ctas = call.num_ctas if self.in_order else None
        l2_group_heads = kv_heads_per_l2_group(
            bound_iterator, group, B * shares, row_bytes, num_ctas, visits_group_together
        )
        heads_ahead = B * shares if self.in_order else l2_group_heads
        layout = WorkspaceLayout.create(heads_ahead, num_n_blocks, B * shares, group)
        score_pipeline = self.features.score_pipeline(call)
        row_inputs = RowStatsInputs(call.o, call.do, call.lse, call.dlse)
        self.preprocess(
            row_inputs, call.row_stats, call.dq_workspace, layout, score_pipeline.keep_scale, addressing, stream
        )
        if cutlass.const_expr(visits_group_together):
            if group > 1:
                self.launch_main_kernel(call, l2_group_heads, layout, cute.FastDivmodDivisorV2(group), stream)
            else:
                self.launch_main_kernel(call, l2_group_heads, layout, None, stream)
        else:
            self.launch_main_kernel(call, l2_group_heads, layout, None, stream)
        scale = score_pipeline.scaled(call.scales.natural)
        self.postprocess(call.dq_workspace, call.row_stats, call.dq, scale, layout, addressing, stream)

    @cute.jit
    def launch_main_kernel(
        self, call: KernelArgs, l2_group_heads: Int32, layout: WorkspaceLayout,
        group_divisor: cute.FastDivmodDivisorV2 | None, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch the main kernel.

        Args:
            call: arguments of the call.
            l2_group_heads: KV heads per L2 group.
            layout: layout of the dQ workspace.
            group_divisor: query heads of a KV head, if a tile visits them together. None: one head after the other.
            stream: CUDA stream.
        """
        addressing = self.features.tile_addressing(call)
        q, do, k, v = self.inputs
        operands = TmaOperands.create(
            q=q.tma(addressing.rows_first(call.q)),
            do=do.tma(addressing.rows_first(call.do)),
            k=k.tma(addressing.rows_first(call.k)),
            v=v.tma(addressing.rows_first(call.v)),
            dk=sm90.output_tma(self.element, addressing.rows_first(call.dk), self.d),
            dv=sm90.output_tma(self.element, addressing.rows_first(call.dv), self.dv),
            dq=sm90.output_tma(self.element, addressing.rows_first(call.dq), self.half),
        )
        feature_args = (
            addressing,
            self.features.block_iterator(call),
            self.features.score_pipeline(call).tma(self.score_layout),
        )
        workspace = BackwardWorkspaceTensors(call.row_stats, call.dq_workspace)
        self.kernel(
            operands, workspace, call.scales, call.counter, l2_group_heads, layout.heads, *feature_args, group_divisor
        ).launch(
            grid=(cutlass.min(layout.portions * call.dk.shape[1] * call.dk.shape[0], call.num_ctas), 1, 1),
            block=((WARPGROUPS + 1) * sm90.WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.features.overlaps_preprocess,
        )

    def create_pipelines(self, smem: cutlass.memory.SmemAllocator) -> BackwardPipelines:
        """Create all pipelines of a CTA.

        A stage of Q includes its LSE, and a stage of dO includes its delta.
        """
        (q, do, k, v), row_stats_bytes = self.inputs, self.tile_m * FP32_BYTES
        steps = (
            q.create_pipeline(smem, more_bytes=row_stats_bytes),
            do.create_pipeline(smem, more_bytes=row_stats_bytes),
        )
        keys = (k.create_pipeline(smem, boxes=WARPGROUPS), v.create_pipeline(smem, boxes=WARPGROUPS))
        ds = sm90.Pipeline.create(smem, DS_STAGES, 0)
        tile_index = sm90.TileIndexPipeline.create(smem)
        workspace_units = sm90.Pipeline.create(smem, self.writer_stages * DQ_WRITERS, self.unit * FP32_BYTES)
        added = sm90.Pipeline.create(smem, ADDED_STAGES, 0)
        staged = sm90.Pipeline.create(smem, WARPGROUPS, 0) if self.in_order else None
        return BackwardPipelines(*steps, *keys, ds, tile_index, workspace_units, added, staged)

    def allocate_smem(self, smem: cutlass.memory.SmemAllocator) -> BackwardSmem:
        """Allocate all buffers of a CTA."""
        dtype, operands = self.element.dtype, tuple(x.buffer(smem) for x in self.inputs)
        sizes = (self.tile_m, ROWS, ROWS)
        ds_layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, sizes, dtype, DS_STAGES * WARPGROUPS)
        ds = smem.allocate_tensor(dtype, ds_layout.outer, 1024, ds_layout.inner)
        row_layout = cute.make_layout((self.tile_m, self.stages))  # (tile_m, stage)
        lse, delta = (smem.allocate_tensor(Float32, row_layout, 128) for _ in range(2))
        staging = smem.allocate_tensor(Float32, cute.make_layout((self.unit, 4 * WARPGROUPS)), 1024)
        workspace_units = smem.allocate_tensor(
            Float32, cute.make_layout((self.unit, self.writer_stages * DQ_WRITERS)), 128
        )
        unit_rows = sm90.slab_layout(dtype, ROWS_PER_WARP * DQ_WRITERS, self.half)
        dq_out = smem.allocate_tensor(dtype, unit_rows.outer, 1024, unit_rows.inner)
        return BackwardSmem(*operands, ds, lse, delta, staging, workspace_units, dq_out)

    def start_cta(
        self,
        warp_idx: Int32,
        operands: TmaOperands,
        pipelines: BackwardPipelines,
        score_pipeline: ScorePipeline,
    ) -> None:
        """Prefetch the TMA descriptors and initialize the mbarriers; all threads take part."""
        consumers = 4 * WARPGROUPS
        shared_pipelines = (pipelines.q, pipelines.do, pipelines.k, pipelines.v, pipelines.ds, pipelines.added)
        pipelines_and_warps = (
            *(sm90.PipelineWarps(pipeline, consumers) for pipeline in shared_pipelines),
            sm90.PipelineWarps(pipelines.tile_index.pipeline, consumers + 1 + DQ_WRITERS),
            sm90.PipelineWarps(pipelines.workspace_units, 1),
            *((sm90.PipelineWarps(pipelines.staged, 4),) if self.in_order else ()),
            *score_pipeline.pipelines,
        )
        sm90.start_cta(warp_idx, (*operands.atoms, *score_pipeline.atoms), pipelines_and_warps)

    @cute.kernel
    def kernel(
        self,
        operands: TmaOperands,
        workspace: BackwardWorkspaceTensors,
        scales: SoftmaxScale,
        mCounter: cute.Tensor,
        l2_group_heads: Int32,
        heads_ahead: Int32,
        addressing: TileAddressing,
        block_iterator: BlockIterator,
        score_pipeline: ScorePipeline,
        group_divisor: cute.FastDivmodDivisorV2 | None,
    ):
        """Assign the warp roles of the main kernel."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        pipelines = self.create_pipelines(smem)
        score_pipeline = score_pipeline.allocate_smem(smem, self.score_layout)
        shared = self.allocate_smem(smem)
        self.start_cta(warp_idx, operands, pipelines, score_pipeline)
        self.features.wait_for_preprocess()

        mQ, mK = operands.tensor("q"), operands.tensor("k")
        Sq, _, Hq, _ = mQ.shape
        Sk, _, Hkv, _ = mK.shape
        shares = operands.tensor("dk").shape[2]
        num_n_blocks, all_shares = addressing.blocks_of_keys(Sk, self.tile_n), shares * addressing.batch(mK)
        sizes = SeqlenInfo(Sq, Sk)
        bound_iterator = block_iterator.bind(sizes, self.tile_m, self.tile_n)
        order = BackwardTileScheduler(
            True, num_n_blocks, shares, all_shares, l2_group_heads, bound_iterator, self.in_order
        )
        tile_scheduler = sm90.DynamicTileScheduler(
            mCounter.iterator, pipelines.tile_index, order.total, fetches_first_tile=True
        )
        tile_grid, heads = addressing.of_keys(order, sizes), (Hq // shares, shares // Hkv)
        work = BackwardWork(
            pipelines, tile_scheduler, tile_grid, block_iterator, *heads, self.tile_m, self.tile_n, group_divisor
        )
        writer = warp_idx % DQ_WRITERS
        matrices = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.element.dtype)
        unit_mma = sm90.make_mma(self.element.dtype, self.half, "rows", "columns")
        (dQ,) = operands.with_smem(dq=cute.local_tile(shared.dq_out, (ROWS_PER_WARP, self.half), (writer, 0)))
        dq_writer = DqWriter(
            workspace=DqWorkspace(
                workspace.dq_workspace.iterator,
                workspace.row_stats.shape[3] // self.tile_m,
                Hq * addressing.batch(mQ),
                self.unit,
            ),
            layout=WorkspaceLayout(heads_ahead, work.group, num_n_blocks),
            kv_heads=all_shares,
            scale=score_pipeline.scaled(scales.natural),
            dQ=dQ,
            matrices=cute.make_tiled_copy_C(matrices, unit_mma),
            element=self.element,
            pipeline=pipelines.workspace_units.sub_pipeline(writer, self.writer_stages),
            unit_stages=cute.local_tile(shared.workspace_units, (self.unit, self.writer_stages), (0, writer)),
            addressing=addressing,
            added=pipelines.added,
        )
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                q, do = operands.with_smem(q=shared.q, do=shared.do)
                self.load_queries(q, do, workspace.row_stats, shared, work, dq_writer, score_pipeline)
            elif warp_idx == 1:
                self.load_keys(*operands.with_smem(k=shared.k, v=shared.v), work)
            elif cutlass.const_expr(self.in_order):
                run_accumulator_warp(
                    dq_writer.workspace, pipelines.staged.sub_pipeline(writer, 1), shared.staging, work, writer
                )
            else:
                dq_writer.run(tile_scheduler, order.tile, writer)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            dk, dv = operands.with_smem(dk=shared.staging, dv=shared.staging)
            self.consume(shared, dk, dv, dq_writer, work, scales, score_pipeline)

    @cute.jit
    def load_queries(
        self, q: sm90.TmaOperand, do: sm90.TmaOperand, mRowStats: cute.Tensor, shared: BackwardSmem, work: BackwardWork,
        dq_writer: DqWriter, score_pipeline: ScorePipeline,
    ):  # fmt: skip
        """Run the first producer warp: load Q with LSE, dO with delta and the score stages' data, step by step.

        This warp also fetches the tiles.
        """
        pipeline_q, pipeline_do = work.pipelines.q, work.pipelines.do
        tile_count = Int32(0)
        count = Int32(0)
        tile_idx = work.tile_scheduler.publish(Int32(0), work.tile_scheduler.fetch_next())
        while tile_idx < work.tile_grid.total:
            tile = work.tile_grid.tile(tile_idx, work.group)
            query_range = work.query_range(tile)
            if cutlass.const_expr(not self.in_order):
                dq_writer.wait_cleared(tile.batch * work.tile_grid.order.heads + tile.head)
            for g in cutlass.range(query_range.outer_heads(work.group), unroll=1):
                head_range = query_range.of_head(g)
                stage_loads = score_pipeline.begin_tile_load(tile, tile.query_head(g))
                subrange = head_range.all_blocks()
                for j in cutlass.range(subrange.begin, subrange.end, unroll=1):
                    block, nth_head = head_range.step(j)
                    head = g + nth_head
                    tQsQ, tQgQ = tile.queries(q, head).tiles((self.tile_m, self.d), (None, 0))
                    tOsO, tOgO = tile.queries(do, head).tiles((self.tile_m, self.dv), (None, 0))
                    gRowStats = tile.row_stats(mRowStats, head, self.tile_m)
                    sm90.load_block(q.atom, tQgQ, tQsQ, pipeline_q, block, count)
                    load_rows(
                        gRowStats[0, None, 0, block], shared.lse[None, pipeline_q.stage_index(count)], pipeline_q, count
                    )
                    sm90.load_block(do.atom, tOgO, tOsO, pipeline_do, block, count)
                    load_rows(
                        gRowStats[0, None, 1, block],
                        shared.delta[None, pipeline_do.stage_index(count)],
                        pipeline_do,
                        count,
                    )
                    stage_loads.load(block, count)
                    count += 1
            tile_count += 1
            tile_idx = work.tile_scheduler.publish(tile_count, work.tile_scheduler.fetch_next())

    @cute.jit
    def load_keys(self, k: sm90.TmaOperand, v: sm90.TmaOperand, work: BackwardWork):
        """Run the second producer warp: load K and V of each tile as soon as the previous tile has released them."""
        tile_count, tile_idx = Int32(0), work.tile_scheduler.receive(Int32(0))
        while tile_idx < work.tile_grid.total:
            tile = work.tile_grid.tile(tile_idx)
            for x, pipeline, columns in ((k, work.pipelines.k, self.d), (v, work.pipelines.v, self.dv)):
                tXsX, tXgX = tile.rows_of_shared(x, work.sharing).tiles((ROWS, columns), (None, 0))
                pipeline.producer_acquire(tile_count)
                for w in cutlass.range_constexpr(WARPGROUPS):
                    block = tile.block * WARPGROUPS + w
                    cute.copy(x.atom, tXgX[None, block], tXsX[None, w], tma_bar_ptr=pipeline.arrival(tile_count))
            tile_count += 1
            tile_idx = work.tile_scheduler.receive(tile_count)

    def make_consumer_state(
        self, shared: BackwardSmem, pipelines: BackwardPipelines, workspace: DqWorkspace
    ) -> ConsumerState:
        """Return the operands and accumulators of a consumer warpgroup."""
        tidx = cute.arch.thread_idx()[0] - sm90.WARPGROUP
        wg, thread = cute.arch.make_warp_uniform(tidx // sm90.WARPGROUP), tidx % sm90.WARPGROUP
        keys_from = "registers" if self.kv_in_registers else "rows"
        scores, for_dV, for_dK, for_dQ = (
            sm90.WgmmaProduct.create(lambda x=x: sm90.make_mma(self.element.dtype, *x))
            for x in (
                (self.tile_m, keys_from, "rows"),
                (self.dv, "registers", "columns"),
                (self.d, "registers", "columns"),
                (self.half, "rows", "columns"),
            )
        )
        mma_s, mma_v, mma_k, mma_q = (x.add.get_slice(thread) for x in (scores, for_dV, for_dK, for_dQ))
        (K, V), fetches = self.kv_operands((shared.k[None, None, wg], shared.v[None, None, wg]), scores.add, thread)
        # Right operands of S^T and dP^T: (MMA, 1, K/16, stage)
        tSrQ, tdPrdO = (mma_s.make_fragment_B(mma_s.partition_B(x)) for x in (shared.q, shared.do))
        # Right operands of dK and dV: (MMA, 1, tile_m/16, stage)
        tdKrQ, tdVrdO = (
            m.make_fragment_B(m.partition_B(sm90.transposed(x))) for m, x in ((mma_k, shared.q), (mma_v, shared.do))
        )
        acc_S, acc_dP = (sm90.zeros(mma_s, (ROWS, self.tile_m)) for _ in range(2))  # 64 keys x tile_m queries each
        acc_dK, acc_dV = sm90.zeros(mma_k, (ROWS, self.d)), sm90.zeros(mma_v, (ROWS, self.dv))  # (64, D) and (64, Dv)
        P = dS = fragments.OperandA.create(acc_S, self.element)
        acc_dQ = sm90.zeros(mma_q, (ROWS, self.half))
        if self.spec.shares_dq_registers:
            acc_dQ = cute.make_tensor(acc_dP.iterator, acc_dQ.layout)
        if self.kv_in_registers:
            dS = fragments.OperandA.create(acc_S, self.element)
        # (D/2, 64, 2)
        wg_columns = cute.local_tile(sm90.transposed(shared.k), (self.half, ROWS, WARPGROUPS), (wg, 0, 0))
        tdQrK = mma_q.make_fragment_B(mma_q.partition_B(wg_columns))  # (MMA, 1, 64/16, warpgroup)
        tdQrdS = mma_q.make_fragment_A(mma_q.partition_A(shared.ds))  # (MMA, 1, 64/16, stage and warpgroup)
        staging = shared.staging[None, cute.arch.make_warp_uniform(tidx // sm90.WARP)]
        staged = None if pipelines.staged is None else pipelines.staged.sub_pipeline(wg, 1)
        return ConsumerState(
            wg,
            pipelines,
            sm90.StageProduct(scores, K, tSrQ, acc_S),
            sm90.StageProduct(scores, V, tdPrdO, acc_dP),
            sm90.StageProduct(for_dV, P.fragment, tdVrdO, acc_dV),
            sm90.StageProduct(for_dK, dS.fragment, tdKrQ, acc_dK),
            DqProduct(for_dQ, tdQrdS, tdQrK, pipelines.ds, acc_dQ, staging, workspace, staged),
            P,
            dS,
            fetches,
            self.make_ds_store(pipelines.ds, dS, acc_S, shared.ds, scores.add, thread, wg),
            shared.lse,
            shared.delta,
        )

    def make_ds_store(
        self, pipeline: sm90.Pipeline, dS: fragments.OperandA, like: cute.Tensor, sdS: cute.Tensor, mma: cute.TiledMma,
        thread: Int32, wg: Int32,
    ) -> DsSmemStore:  # fmt: skip
        """Return the store of dS to shared memory.

        Args:
            pipeline: pipeline of dS.
            dS: the warpgroup's half of dS in registers.
            like: accumulator with the element order of dS.
            sdS: dS in shared memory.
            mma: product with the layout of dS.
            thread: thread of the warpgroup.
            wg: index of the warpgroup.
        """
        matrices = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.element.dtype)
        copy = cute.make_tiled_copy_C(matrices, mma).get_slice(thread)
        halves = cute.make_tensor(cute.recast_ptr(dS.pairs.iterator, dtype=self.element.dtype), like.layout)
        return DsSmemStore(pipeline, copy, copy.retile(halves), copy.partition_D(sm90.transposed(sdS)), wg)

    @cute.jit
    def consume(
        self, shared: BackwardSmem, dk: sm90.TmaOperand, dv: sm90.TmaOperand, dq_writer: DqWriter, work: BackwardWork,
        scales: SoftmaxScale, score_pipeline: ScorePipeline,
    ):  # fmt: skip
        """Run a consumer warpgroup: compute dK and dV of 64 keys, and half of the columns of dQ of each step."""
        pipelines, workspace = work.pipelines, dq_writer.workspace
        state = self.make_consumer_state(shared, pipelines, workspace)
        wg, thread = state.wg, cute.arch.thread_idx()[0] % sm90.WARPGROUP
        warp_idx, lane = cute.arch.make_warp_uniform(thread // sm90.WARP), thread % sm90.WARP
        score_pipeline, scale_log2 = score_pipeline.allocate_registers(self.tile_m), score_pipeline.scales(scales).log2

        tile_count, step_count, tile_idx = Int32(0), Int32(0), work.tile_scheduler.receive(Int32(0))
        while tile_idx < work.tile_grid.total:
            tile = work.tile_grid.tile(tile_idx, work.group)
            query_range = work.query_range(tile)
            key = tile.block * self.tile_n + wg * ROWS + warp_idx * ROWS_PER_WARP + lane // 4
            tile_stages = score_pipeline.set_tile(
                ScoreCoord(tile.sizes, self.tile_m, key, lane % 4 * 2, tile.sequence, None, transposed=True)
            )
            pipelines.k.consumer_wait(tile_count)
            pipelines.v.consumer_wait(tile_count)
            state.load_kv_registers()
            state.dK.acc.fill(0.0)
            state.dV.acc.fill(0.0)
            first_step, unit = step_count, Int32(0)
            for g in cutlass.range(query_range.outer_heads(work.group), unroll=1):
                first_block = workspace.first_block(tile, g, work.tile_grid.order.heads)
                head_range, head_stages = query_range.of_head(g), tile_stages.of_head(tile.query_head(g))
                for subrange in head_range.subranges():
                    head_stages.begin(head_range.nth(subrange.begin), subrange.masked)
                    for j in cutlass.range(subrange.begin, subrange.end, unroll=1):
                        block, nth_head = head_range.step(j)
                        step = StepContext(head_stages, subrange.masked, block, head_range.next(j, subrange))
                        pending_dq = PendingDq(unit, step_count - first_step)
                        if cutlass.const_expr(self.kv_in_registers):
                            self.step_all_products_in_flight(state, step_count, pending_dq, step, scale_log2)
                        else:
                            self.step_reuse_registers(state, step_count, pending_dq, step, scale_log2)
                        pipelines.do.consumer_release(step_count)
                        pipelines.q.consumer_release(step_count)
                        unit = (first_block + nth_head * workspace.num_m_blocks + block) * UNITS + wg * 4 + warp_idx
                        step_count += 1
            warpgroup.wait_group(0)
            pipelines.v.consumer_release(tile_count)
            warpgroup.fence()
            state.dQ.multiply(step_count - 1)
            warpgroup.wait_group(0)
            pipelines.k.consumer_release(tile_count)
            state.dQ.send(unit, step_count - first_step, step_count - 1)
            state.dQ.wait_for_staging(step_count)
            slab = tile.block * (self.tile_n // ROWS_PER_WARP) + wg * 4
            self.store(state.dV, score_pipeline.scaled(Float32(1.0)), tile.rows(dv), slab)
            self.store(state.dK, score_pipeline.scaled(scales.natural), tile.rows(dk), slab)
            if cutlass.const_expr(not self.in_order):
                # Wait for all groups but the stores of dK and dV: the last dQ has been added.
                cute.arch.cp_async_bulk_wait_group(2)
                cute.arch.sync_warp()
                dq_writer.added.consumer_release(tile_count)
            tile_count += 1
            tile_idx = work.tile_scheduler.receive(tile_count)
        # Shared memory must stay allocated until the last transfer has ended.
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def step_all_products_in_flight(
        self, state: ConsumerState, step_count: Int32, pending_dq: PendingDq, step: StepContext, scale_log2: Float32
    ):
        """Run a step in which every product has registers of its own."""
        masked, stage = step.masked, state.pipelines.q.stage_index(step_count)
        state.pipelines.q.consumer_wait(step_count)
        warpgroup.fence()
        state.S.start(stage)
        state.pipelines.do.consumer_wait(step_count)
        state.dP.start(stage)
        # LSE is read before more products are issued: behind them the read costs 10 %.
        lse = row_values(state.lse, stage)
        state.dQ.multiply(step_count - 1)
        step.score_pipeline.prepare_stage(step.block, masked)
        warpgroup.wait_group(2)  # wait for S
        step.score_pipeline.apply(state.S.values, step.block, masked, step_count)
        exponentiate(state.S.values, lse, scale_log2)
        state.P.convert(state.S.acc, step.score_pipeline.p_transform(masked))
        warpgroup.fence()
        state.dV.add(stage)
        delta = row_values(state.delta, stage)
        # Wait for dP and for dQ. The dS stage read by dQ may be overwritten once the dS of this step has been put.
        warpgroup.wait_group(1)
        step.score_pipeline.apply_backward(state.dP.values, masked)
        score_derivative = ScoreDerivative.create(step.score_pipeline, lambda: row_values(state.lse, stage))
        softmax_backward(state.S.values, state.dP.values, delta, state.dP.values, score_derivative=score_derivative)
        state.dS.convert(state.dP.acc)
        step.score_pipeline.prefetch(step.next_block, masked)
        state.ds_store.store(step_count)
        warpgroup.fence()
        state.dK.add(stage)
        state.dQ.send(pending_dq.unit, pending_dq.earlier_steps, step_count - 1)
        warpgroup.wait_group(0)

    @cute.jit
    def step_reuse_registers(
        self, state: ConsumerState, step_count: Int32, pending_dq: PendingDq, step: StepContext, scale_log2: Float32
    ):
        """Run a step in which dS reuses the registers of P.

        dP also reuses the registers of the previous dQ, if both have equal sizes (`HopperSpec.shares_dq_registers`).
        """
        masked, stage = step.masked, state.pipelines.q.stage_index(step_count)
        state.pipelines.q.consumer_wait(step_count)
        warpgroup.fence()
        state.S.start(stage)
        step.score_pipeline.prepare_stage(step.block, masked)
        # LSE is read here, before more products are issued, for the same reason as in `step_all_products_in_flight`.
        lse = row_values(state.lse, stage)
        state.dQ.multiply(step_count - 1)
        warpgroup.wait_group(1)  # wait for S
        step.score_pipeline.apply(state.S.values, step.block, masked, step_count)
        exponentiate(state.S.values, lse, scale_log2)
        state.P.convert(state.S.acc, step.score_pipeline.p_transform(masked))
        warpgroup.wait_group(0)  # wait for dQ
        state.dQ.send(pending_dq.unit, pending_dq.earlier_steps, step_count - 1)
        state.pipelines.do.consumer_wait(step_count)
        warpgroup.fence()
        state.dP.start(stage)
        state.dV.add(stage)
        warpgroup.wait_group(1)  # wait for dP
        step.score_pipeline.apply_backward(state.dP.values, masked)
        score_derivative = ScoreDerivative.create(step.score_pipeline, lambda: row_values(state.lse, stage))
        values, dP = state.S.values, state.dP.values
        softmax_backward(values, dP, row_values(state.delta, stage), dP, score_derivative=score_derivative)
        warpgroup.wait_group(0)
        state.dS.convert(state.dP.acc)
        step.score_pipeline.prefetch(step.next_block, masked)
        state.ds_store.store(step_count)
        warpgroup.fence()
        state.dK.add(stage)
        # ptxas serializes every product if a product is in flight across the end of a loop.
        warpgroup.wait_group(0)

    def kv_operands(
        self, sources: tuple[cute.Tensor, ...], mma: cute.TiledMma, thread: Int32
    ) -> tuple[tuple[cute.Tensor, ...], tuple[SmemToRegisterCopy, ...]]:
        """Return the warpgroup's K and V as left operands, and the copies that load these operands.

        The operands are in registers if registers have room for them, which halves the shared-memory reads. Otherwise
        the operands stay in shared memory, and no copies are returned.
        """
        thread_mma = mma.get_slice(thread)
        fragments = tuple(thread_mma.make_fragment_A(thread_mma.partition_A(s)) for s in sources)
        if not self.kv_in_registers:
            return fragments, ()
        matrices = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.element.dtype)
        copy = cute.make_tiled_copy_A(matrices, mma).get_slice(thread)
        return fragments, tuple(
            SmemToRegisterCopy(copy, copy.partition_S(s), copy.retile(x))
            for s, x in zip(sources, fragments, strict=True)
        )

    @cute.jit
    def store(self, result: sm90.StageProduct, factor: Float32, out: sm90.TmaOperand, slab: Int32):
        """Store an accumulator in 16 bits through the warps' staging buffers to global memory.

        Each warp stores its 16 rows.
        """
        acc = result.acc
        columns = cute.size(acc) * 2  # the accumulator holds 64 rows in 128 threads
        wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // sm90.WARPGROUP - 1)
        rX = cute.make_rmem_tensor_like(acc, self.element.dtype)
        rX.store((acc.load() * factor).to(self.element.dtype))
        layout = sm90.slab_layout(self.element.dtype, ROWS, columns)
        start = cute.recast_ptr(out.s[None, wg * 4].iterator, layout.inner, dtype=self.element.dtype)
        # The previous contents of the warp's staging buffer have been read.
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        sm90.store_slabs(rX, cute.make_tensor(start, layout.outer), out, slab, result.product.add)
