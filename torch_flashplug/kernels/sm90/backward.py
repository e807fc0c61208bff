"""Attention backward for Hopper: dQ, dK and dV from Q, K, V, dO, LSE and delta = rowsum(dO * O).

The kernel is persistent. A CTA stays on its SM and fetches blocks of tile_n keys of a single KV head from a dynamic
tile scheduler. The CTA keeps dK and dV of the block in registers. The mainloop visits the query rows that see the
block, for every query head of the group. Each of the two consumer warpgroups owns 64 of the keys.

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

from ...registry.kernel_spec import DQ_WRITERS, FP32_BYTES, ROWS_PER_WARPGROUP, HopperSpec
from ..backward.dq_writer import ADDED_SLOTS, DqWriter, add_in_order
from ..backward.pre_post_process import (
    WARPGROUPS,
    BackwardPostprocess,
    BackwardPreprocess,
    RowStatsInputs,
    ScoreDerivative,
    differentiate,
    exponentiate,
    load_rows,
    row_values,
)
from ..backward.workspace import UNITS, DqWorkspace, WorkspaceLayout
from ..call_args.kernel_call import KernelArgs, KernelCall, SoftmaxScale
from ..features.base import KernelFeatures
from ..primitives import fragments, sm90
from ..score_stages.pipeline import ScoreCoord, ScoreLayout, ScorePipeline
from ..tiling.backward_tile_scheduler import BackwardTileScheduler, kv_heads_per_l2_group
from ..tiling.block_iterator import BlockIterator, QueryBlockRange
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import Tile, TileAddressing, TileGrid

ROWS, SLAB = ROWS_PER_WARPGROUP, sm90.SLAB  # keys of a warpgroup, keys of a warp
DS_SLOTS = 2  # stages of dS: a warpgroup writes the next dS while its peer may still multiply with the previous dS


@dataclass(frozen=True)
class BackwardOperands:
    """TMA atoms, or TMA coordinates (rows, columns, heads, batch), of the tensors moved by TMA."""

    q: cute.CopyAtom | cute.Tensor
    do: cute.CopyAtom | cute.Tensor
    k: cute.CopyAtom | cute.Tensor
    v: cute.CopyAtom | cute.Tensor
    dk: cute.CopyAtom | cute.Tensor
    dv: cute.CopyAtom | cute.Tensor
    dq: cute.CopyAtom | cute.Tensor

    @property
    def all(self) -> tuple:
        """All atoms or coordinates, in the order of the fields."""
        return self.q, self.do, self.k, self.v, self.dk, self.dv, self.dq


@dataclass(frozen=True)
class BackwardWorkspaceTensors:
    """Workspace in global memory that the three kernels of a call share."""

    rows: cute.Tensor  # (B, Hq, 2, rows) fp32: LSE * log2(e) and delta, padded to whole blocks
    scratch: cute.Tensor  # dQ in fp32, then the Int32 counters


@dataclass(frozen=True)
class BackwardPipelines:
    """Pipelines from the producer warps to the consumers; `ds` runs between the consumer warpgroups."""

    q: sm90.Pipeline  # Q with LSE: `stages` stages of tile_m queries
    do: sm90.Pipeline  # dO with delta: `stages` stages of tile_m queries
    k: sm90.Pipeline  # K of a tile: a single stage for both warpgroups
    v: sm90.Pipeline  # V of a tile: a single stage for both warpgroups
    ds: sm90.Pipeline  # dS: DS_SLOTS stages
    back: sm90.Pipeline  # units of the dQ workspace on the way to the dQ writers
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
    back: cute.Tensor  # (floats of a unit, stage): dQ workspace in fp32
    units: cute.Tensor  # (16 rows of each writer, columns of a unit): dQ in 16 bits


@dataclass(frozen=True)
class BackwardWork:
    """Pipelines, tiles and mainloop steps shared by all warp roles."""

    rings: BackwardPipelines
    queue: sm90.DynamicTileScheduler
    pieces: TileGrid
    walk: BlockIterator
    group: Int32  # query heads visited by a tile
    sharing: Int32  # tiles of a block of keys; all of them read the K and V of the same KV head
    tile_m: int
    tile_n: int

    def run(self, tile: Tile) -> QueryBlockRange:
        """Return the query blocks that a tile visits."""
        return self.walk.bind(tile.sizes, self.tile_m, self.tile_n).queries(tile)


@dataclass(frozen=True)
class DqProduct:
    """Product dQ = dS K of a step: 64 rows and the warpgroup's half of the columns.

    Each warp adds its 16 rows to global memory on its own.
    """

    product: sm90.WgmmaProduct
    left: cute.Tensor  # dS: (MMA, 1, 64/16, stage and warpgroup)
    right: cute.Tensor  # K: (MMA, 1, 64/16, warpgroup whose keys are summed)
    ring: sm90.Pipeline  # pipeline of dS
    acc: cute.Tensor  # fp32: 64 x half of the columns
    staging: cute.Tensor  # (floats of a unit,): the warp's part of the staging buffer
    scratch: DqWorkspace
    # Pipeline of the staging buffer, if an accumulator warp does the adding; released when written.
    staged: sm90.Pipeline | None

    @cute.jit
    def multiply(self, nth: Int32):
        """Issue the product with dS number `nth` as soon as both warpgroups have written this dS.

        Before the first dS (`nth` is -1) the product reads undefined data, and its result is never sent.
        """
        if nth >= 0:
            self.ring.producer_wait(nth + DS_SLOTS)
        first = self.ring.stage_index(nth) * WARPGROUPS
        for w in cutlass.range_constexpr(WARPGROUPS):
            left = self.left[None, None, None, first + w]
            self.product.multiply(self.acc, left, self.right[None, None, None, w], accumulate=w > 0)
        warpgroup.commit_group()

    @cute.jit
    def send(self, unit: Int32, count: Int32, nth: Int32):
        """Add the product, the nth of the CTA, to a unit of the dQ workspace.

        A count of 0 means that no dS of the tile has been multiplied yet. Nothing is sent then.
        """
        if count > 0:
            self.make_room(nth)
            quarters = cute.size(self.acc) // 4
            mine = cute.make_layout((4, quarters), stride=(1, sm90.WARP * 4))
            lanes = cute.make_tensor(self.staging.iterator + cute.arch.lane_idx() * 4, mine)
            cute.autovec_copy(cute.make_tensor(self.acc.iterator, cute.make_layout((4, quarters))), lanes)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            if cutlass.const_expr(self.staged is not None):
                self.staged.consumer_release(nth)
            else:
                with cute.arch.elect_one():
                    self.scratch.add(unit, self.staging)

    @cute.jit
    def make_room(self, nth: Int32):
        """Wait until the previous contents of the staging buffer have been read."""
        if cutlass.const_expr(self.staged is not None):
            if nth > 0:
                self.staged.consumer_wait(nth - 1)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()


@dataclass(frozen=True)
class PendingDq:
    """Product dQ of the previous step, which still has to be added to the workspace."""

    unit: Int32  # unit of the dQ workspace
    count: Int32  # earlier steps of the same tile


@dataclass(frozen=True)
class StepContext:
    """Position of a step in the block iteration, and the score stages at this position."""

    chain: ScorePipeline
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

    ring: sm90.Pipeline
    copy: cute.TiledCopy
    source: cute.Tensor
    target: cute.Tensor  # (..., stage and warpgroup)
    wg: Int32

    @cute.jit
    def put(self, count: Int32):
        """Store dS number `count` and signal the dS pipeline."""
        slot = self.ring.stage_index(count) * WARPGROUPS + self.wg
        cute.copy(self.copy, self.source, self.target[None, None, None, slot])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.ring.consumer_release(count)


@dataclass(frozen=True)
class ConsumerState:
    """State of a consumer warpgroup: 64 keys, the queries of a step as right operands, and the accumulators."""

    wg: Int32
    rings: BackwardPipelines
    S: sm90.StageProduct  # S^T = K Q^T, then P^T
    dP: sm90.StageProduct  # dP^T = V dO^T, then dS^T
    dV: sm90.StageProduct  # dV += P^T dO
    dK: sm90.StageProduct  # dK += dS^T Q
    dQ: DqProduct
    P: fragments.OperandA  # P^T in 16 bits
    dS: fragments.OperandA  # dS^T in 16 bits
    fetches: tuple[SmemToRegisterCopy, ...]  # copies of K and V into registers, if registers hold them
    crossing: DsSmemStore
    lse: cute.Tensor  # (tile_m, stage): LSE * log2(e) of the queries of a step
    delta: cute.Tensor

    def fetch_keys(self) -> None:
        """Copy K and V of the tile into registers."""
        for fetch in self.fetches:
            cute.copy(fetch.copy, fetch.source, fetch.target)


class BackwardSm90(KernelCall, kind="bwd"):
    """Builder of the three backward kernels of a spec, which a call launches in sequence.

    All sizes are compile-time constants. Computes dQ, dK and dV. A deterministic spec (kind `detbwd`) adds to dQ in the
    same order in every run.

    1. `BackwardPreprocess` computes LSE * log2(e) and delta per row, and clears the counters and the first heads of the
    dQ
       workspace.
    2. The main kernel computes dK and dV and adds dQ to the workspace. Unless the spec is deterministic, its dQ writers
       also clear the workspace ahead of the mainloop and convert finished dQ to 16 bits.
    3. `BackwardPostprocess` converts the dQ of the last heads, or of all heads of a deterministic spec.

    Inputs: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), o and do (B, Hq, Sq, Dv), lse (B, Hq, Sq) in fp32.
    Outputs: dq (B, Hq, Sq, D), dk (B, shares, Sk, D), dv (B, shares, Sk, Dv), where `shares` is Hkv or a multiple of
    Hkv. Workspace: rows (B, Hq, 2, padded Sq) in fp32, and the dQ workspace (`DqWorkspace`).

    Warp roles of the main kernel: warpgroup 0 gives its registers away. Its warp 0 loads Q and dO and fetches tiles.
    Its warp 1 loads K and V. Its warps 2 and 3 are dQ writers, or accumulator warps if the spec is deterministic.
    Warpgroups 1 and 2 are consumers.

    Pipelines (producer -> consumer, stages):
    - Q with LSE, dO with delta: warp 0 -> all consumer warps, `stages` stages each.
    - K, V: warp 1 -> all consumer warps, a single stage each.
    - dS: both consumer warpgroups -> both consumer warpgroups, `DS_SLOTS` stages, without bytes.
    - Tile indices: warp 0 -> consumer warps, warp 1 and warps 2 and 3, `sm90.TILE_INDEX_STAGES` stages.
    - `back`: TMA loads of workspace units by a dQ writer -> the same dQ writer, `dq_writer_units` stages per writer.
    - `added`: consumer warps -> dQ writers, `ADDED_SLOTS` stages, without bytes.
    - `staged`, deterministic only: consumer warpgroup -> its accumulator warp, a single stage each, without bytes.

    Shared memory:
    - The stages of Q, dO, LSE and delta; K and V; two stages of dS.
    - The fp32 staging buffer of dQ, through which dK and dV leave, too.
    - Workspace units of the dQ writers, in fp32 and in 16 bits.
    - Tile indices, mbarriers and buffers of the score stages.
    """

    def __init__(self, spec: HopperSpec):
        self.spec, self.seams = spec, KernelFeatures.of(spec, transposed=True)
        self.element, self.d, self.dv = self.seams.element, spec.d, spec.dv
        self.tile_m, self.tile_n, self.stages = spec.tile_m, spec.tile_n, spec.stages
        self.half = spec.d // WARPGROUPS  # columns of dQ computed by a warpgroup
        self.unit = SLAB * self.half  # floats of dQ that a consumer warp adds to the workspace at once
        self.back_slots = spec.dq_writer_units  # stages of the `back` pipeline per dQ writer
        self.in_order = spec.in_order
        # True if K, V and every product of a step have registers of their own. Then all products of a step can be in
        # flight at once.
        self.kv_in_registers = spec.kv_in_registers
        self.producer_registers, self.consumer_registers = spec.register_split
        self.form = ScoreLayout(self.element, WARPGROUPS, self.tile_m, transposed=True)
        self.prepare, self.finish = (
            BackwardPreprocess(self.element, clears=spec.d),
            BackwardPostprocess(self.element, spec.d),
        )

    @property
    def inputs(self) -> tuple[sm90.TmaLoadConfig, sm90.TmaLoadConfig, sm90.TmaLoadConfig, sm90.TmaLoadConfig]:
        """TMA load configurations of Q, dO, K and V: stages of tile_m queries, and 64 keys per warpgroup."""
        return tuple(
            sm90.TmaLoadConfig.create(self.element, rows, columns, slots)
            for rows, slots in ((self.tile_m, self.stages), (ROWS, WARPGROUPS))
            for columns in (self.d, self.dv)
        )

    @cute.jit
    def launch(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the preprocessing kernels of the features, then the three backward kernels."""
        self.seams.launch_preprocess(call, stream)
        B, shares, Sk, _ = call.dk.shape
        pieces, group = self.seams.pieces(call), call.q.shape[1] // shares
        num_n_blocks = pieces.max_blocks_of_keys(Sk, self.tile_n)
        walk = self.seams.walk(call).bind(SeqlenInfo(call.q.shape[2], Sk), self.tile_m, self.tile_n)
        # Bytes per query row: Q, dO and dQ in fp32.
        row_bytes = (self.d + self.dv) * self.element.bytes + self.d * FP32_BYTES
        num_ctas = call.num_ctas if self.in_order else None
        section = kv_heads_per_l2_group(walk, group, B * shares, row_bytes, num_ctas)
        ahead = WorkspaceLayout.create(B * shares if self.in_order else section, num_n_blocks, B * shares, group)
        chain, given = self.seams.chain(call), RowStatsInputs(call.o, call.do, call.lse, call.dlse)
        self.prepare(given, call.rows, call.scratch, ahead, chain.keep_probability, pieces, stream)
        self.step_over_keys(call, section, ahead, stream)
        self.finish(call.scratch, call.rows, call.dq, chain.scaled(call.scales.natural), ahead, pieces, stream)

    @cute.jit
    def step_over_keys(self, call: KernelArgs, section: Int32, ahead: WorkspaceLayout, stream: cuda.CUstream):
        """Launch the main kernel."""
        pieces = self.seams.pieces(call)
        tensors = (pieces.rows_first(x) for x in (call.q, call.do, call.k, call.v))
        loads = tuple(x.tma(m) for x, m in zip(self.inputs, tensors, strict=True))
        stores = tuple(
            sm90.output_tma(self.element, pieces.rows_first(x), columns)
            for x, columns in ((call.dk, self.d), (call.dv, self.dv), (call.dq, self.half))
        )
        atoms, tensors = (BackwardOperands(*(x[i] for x in (*loads, *stores))) for i in (0, 1))
        seams = (pieces, self.seams.walk(call), self.seams.chain(call).tma(self.form))
        between = BackwardWorkspaceTensors(call.rows, call.scratch)
        self.kernel(atoms, tensors, between, call.scales, call.counter, section, ahead.heads, *seams).launch(
            grid=(cutlass.min(ahead.portions * call.dk.shape[1] * call.dk.shape[0], call.num_ctas), 1, 1),
            block=((WARPGROUPS + 1) * sm90.WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def rings(self, smem: cutlass.memory.SmemAllocator) -> tuple[BackwardPipelines, cute.Tensor, sm90.Pipeline]:
        """Create all pipelines of a CTA and the tile-index pipeline.

        A stage of Q includes its LSE, and a stage of dO includes its delta.
        """
        (q, do, k, v), facts = self.inputs, self.tile_m * FP32_BYTES
        steps = (q.create_pipeline(smem, more_bytes=facts), do.create_pipeline(smem, more_bytes=facts))
        keys = (k.create_pipeline(smem, boxes=WARPGROUPS), v.create_pipeline(smem, boxes=WARPGROUPS))
        ds = sm90.Pipeline.create(smem, DS_SLOTS, 0)
        mail, ring_mail = sm90.create_tile_index_pipeline(smem)
        back = sm90.Pipeline.create(smem, self.back_slots * DQ_WRITERS, self.unit * FP32_BYTES)
        added = sm90.Pipeline.create(smem, ADDED_SLOTS, 0)
        staged = sm90.Pipeline.create(smem, WARPGROUPS, 0) if self.in_order else None
        return BackwardPipelines(*steps, *keys, ds, back, added, staged), mail, ring_mail

    def shared(self, smem: cutlass.memory.SmemAllocator) -> BackwardSmem:
        """Allocate all buffers of a CTA."""
        dtype, operands = self.element.dtype, tuple(x.buffer(smem) for x in self.inputs)
        sizes = (self.tile_m, ROWS, ROWS)
        ds_layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, sizes, dtype, DS_SLOTS * WARPGROUPS)
        ds = smem.allocate_tensor(dtype, ds_layout.outer, 1024, ds_layout.inner)
        row_layout = cute.make_layout((self.tile_m, self.stages))  # (tile_m, stage)
        lse, delta = (smem.allocate_tensor(Float32, row_layout, 128) for _ in range(2))
        staging = smem.allocate_tensor(Float32, cute.make_layout((self.half * 16, 4 * WARPGROUPS)), 1024)
        back = smem.allocate_tensor(Float32, cute.make_layout((self.unit, self.back_slots * DQ_WRITERS)), 128)
        unit_rows = sm90.slab_layout(dtype, SLAB * DQ_WRITERS, self.half)
        units = smem.allocate_tensor(dtype, unit_rows.outer, 1024, unit_rows.inner)
        return BackwardSmem(*operands, ds, lse, delta, staging, back, units)

    def start(
        self,
        warp_idx: Int32,
        atoms: BackwardOperands,
        rings: BackwardPipelines,
        ring_mail: sm90.Pipeline,
        chain: ScorePipeline,
    ) -> None:
        """Prefetch the TMA descriptors and initialize the mbarriers; all threads take part."""
        consumers = 4 * WARPGROUPS
        by_all = (rings.q, rings.do, rings.k, rings.v, rings.ds, rings.added)
        counted = (
            *((ring, consumers) for ring in by_all),
            (ring_mail, consumers + 1 + DQ_WRITERS),
            (rings.back, 1),
            *(((rings.staged, 4),) if self.in_order else ()),
            *chain.pipelines,
        )
        sm90.start_cta(warp_idx, (*atoms.all, *chain.atoms), counted)

    @cute.kernel
    def kernel(
        self,
        atoms: BackwardOperands,
        tensors: BackwardOperands,
        between: BackwardWorkspaceTensors,
        scales: SoftmaxScale,
        mCounter: cute.Tensor,
        section: Int32,
        heads_ahead: Int32,
        pieces: TileAddressing,
        walk: BlockIterator,
        chain: ScorePipeline,
    ):
        """Assign the warp roles of the main kernel."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        rings, mail, ring_mail = self.rings(smem)
        chain = chain.allocate_smem(smem, self.form)
        shared = self.shared(smem)
        self.start(warp_idx, atoms, rings, ring_mail, chain)

        Sq, _, Hq, _ = tensors.q.shape
        Sk, _, Hkv, _ = tensors.k.shape
        shares = tensors.dk.shape[2]
        num_n_blocks, all_shares = pieces.blocks_of_keys(Sk, self.tile_n), shares * pieces.batch(tensors.k)
        sizes = SeqlenInfo(Sq, Sk)
        bound = walk.bind(sizes, self.tile_m, self.tile_n)
        order = BackwardTileScheduler(True, num_n_blocks, shares, all_shares, section, bound, self.in_order)
        queue = sm90.DynamicTileScheduler(mCounter.iterator, mail, ring_mail, order.total, fetches_first_tile=True)
        tiles, heads = pieces.of_keys(order, sizes), (Hq // shares, shares // Hkv)
        work = BackwardWork(rings, queue, tiles, walk, *heads, self.tile_m, self.tile_n)
        writer = warp_idx % DQ_WRITERS
        matrices = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.element.dtype)
        of_unit = sm90.make_mma(self.element.dtype, self.half, "rows", "columns")
        dq_writer = DqWriter(
            scratch=DqWorkspace(
                between.scratch.iterator, between.rows.shape[3] // self.tile_m, Hq * pieces.batch(tensors.q), self.unit
            ),
            ahead=WorkspaceLayout(heads_ahead, work.group, num_n_blocks),
            kv_heads=all_shares,
            scale=chain.scaled(scales.natural),
            dQ=sm90.TmaOperand(atoms.dq, tensors.dq, cute.local_tile(shared.units, (SLAB, self.half), (writer, 0))),
            matrices=cute.make_tiled_copy_C(matrices, of_unit),
            element=self.element,
            ring=rings.back.sub_pipeline(writer, self.back_slots),
            slots=cute.local_tile(shared.back, (self.unit, self.back_slots), (0, writer)),
            pieces=pieces,
            added=rings.added,
        )
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                q, do = sm90.TmaOperand(atoms.q, tensors.q, shared.q), sm90.TmaOperand(atoms.do, tensors.do, shared.do)
                self.load_queries(q, do, between.rows, shared, work, dq_writer, chain)
            elif warp_idx == 1:
                k, v = sm90.TmaOperand(atoms.k, tensors.k, shared.k), sm90.TmaOperand(atoms.v, tensors.v, shared.v)
                self.load_keys(k, v, work)
            elif cutlass.const_expr(self.in_order):
                add_in_order(dq_writer.scratch, rings.staged.sub_pipeline(writer, 1), shared.staging, work, writer)
            else:
                dq_writer.run(queue, order.tile, writer)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            dk = sm90.TmaOperand(atoms.dk, tensors.dk, shared.staging)
            dv = sm90.TmaOperand(atoms.dv, tensors.dv, shared.staging)
            self.consume(shared, dk, dv, dq_writer, work, scales, chain)

    @cute.jit
    def load_queries(
        self, q: sm90.TmaOperand, do: sm90.TmaOperand, mRows: cute.Tensor, shared: BackwardSmem, work: BackwardWork,
        dq_writer: DqWriter,
        chain: ScorePipeline,
    ):  # fmt: skip
        """Run the first producer warp: load Q with LSE, dO with delta and the score stages' data, step by step.

        This warp also fetches the tiles.
        """
        ring_q, ring_do = work.rings.q, work.rings.do
        nth, done, number = Int32(0), Int32(0), work.queue.publish(Int32(0), work.queue.fetch_next())
        while number < work.pieces.total:
            tile = work.pieces.tile(number, work.group)
            run = work.run(tile)
            if cutlass.const_expr(not self.in_order):
                dq_writer.wait_cleared(tile.batch * work.pieces.order.heads + tile.head)
            for g in cutlass.range(work.group, unroll=1):
                tQsQ, tQgQ = tile.queries(q, g).tiles((self.tile_m, self.d), (None, 0))
                tOsO, tOgO = tile.queries(do, g).tiles((self.tile_m, self.dv), (None, 0))
                gRows = tile.row_stats(mRows, g, self.tile_m)
                mine, stages = run.of_head(g), chain.begin_tile_load(tile, tile.query_head(g))
                whole = mine.all_blocks()
                for j in cutlass.range(whole.begin, whole.end, unroll=1):
                    step = mine.nth(j)
                    sm90.load_block(q.atom, tQgQ, tQsQ, ring_q, step, done)
                    load_rows(gRows[0, None, 0, step], shared.lse[None, ring_q.stage_index(done)], ring_q, done)
                    sm90.load_block(do.atom, tOgO, tOsO, ring_do, step, done)
                    load_rows(gRows[0, None, 1, step], shared.delta[None, ring_do.stage_index(done)], ring_do, done)
                    stages.load(step, done)
                    done += 1
            nth += 1
            number = work.queue.publish(nth, work.queue.fetch_next())

    @cute.jit
    def load_keys(self, k: sm90.TmaOperand, v: sm90.TmaOperand, work: BackwardWork):
        """Run the second producer warp: load K and V of each tile as soon as the previous tile has released them."""
        nth, number = Int32(0), work.queue.receive(Int32(0))
        while number < work.pieces.total:
            tile = work.pieces.tile(number)
            for x, ring, columns in ((k, work.rings.k, self.d), (v, work.rings.v, self.dv)):
                tXsX, tXgX = tile.rows_of_shared(x, work.sharing).tiles((ROWS, columns), (None, 0))
                ring.producer_acquire(nth)
                for w in cutlass.range_constexpr(WARPGROUPS):
                    block = tile.block * WARPGROUPS + w
                    cute.copy(x.atom, tXgX[None, block], tXsX[None, w], tma_bar_ptr=ring.arrival(nth))
            nth += 1
            number = work.queue.receive(nth)

    def hold(self, shared: BackwardSmem, rings: BackwardPipelines, scratch: DqWorkspace) -> ConsumerState:
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
        (K, V), fetches = self.my_keys((shared.k[None, None, wg], shared.v[None, None, wg]), scores.add, thread)
        # Right operands of S^T and dP^T: (MMA, 1, K/16, stage)
        rows = tuple(mma_s.make_fragment_B(mma_s.partition_B(x)) for x in (shared.q, shared.do))
        columns = tuple(
            m.make_fragment_B(m.partition_B(sm90.transposed(x))) for m, x in ((mma_k, shared.q), (mma_v, shared.do))
        )
        acc_S, acc_dP = (sm90.zeros(mma_s, (ROWS, self.tile_m)) for _ in range(2))  # 64 keys x tile_m queries each
        acc_dK, acc_dV = sm90.zeros(mma_k, (ROWS, self.d)), sm90.zeros(mma_v, (ROWS, self.dv))  # (64, D) and (64, Dv)
        P = dS = fragments.OperandA.create(acc_S, self.element)
        acc_dQ = cute.make_tensor(acc_dP.iterator, cute.make_layout(mma_q.partition_shape_C((ROWS, self.half))))
        if self.kv_in_registers:
            dS, acc_dQ = fragments.OperandA.create(acc_S, self.element), sm90.zeros(mma_q, (ROWS, self.half))
        # (D/2, 64, 2)
        my_columns = cute.local_tile(sm90.transposed(shared.k), (self.half, ROWS, WARPGROUPS), (wg, 0, 0))
        tQrK = mma_q.make_fragment_B(mma_q.partition_B(my_columns))  # (MMA, 1, 64/16, warpgroup)
        tQrS = mma_q.make_fragment_A(mma_q.partition_A(shared.ds))  # (MMA, 1, 64/16, stage and warpgroup)
        staging = shared.staging[None, cute.arch.make_warp_uniform(tidx // sm90.WARP)]
        staged = None if rings.staged is None else rings.staged.sub_pipeline(wg, 1)
        return ConsumerState(
            wg,
            rings,
            sm90.StageProduct(scores, K, rows[0], acc_S),
            sm90.StageProduct(scores, V, rows[1], acc_dP),
            sm90.StageProduct(for_dV, P.fragment, columns[1], acc_dV),
            sm90.StageProduct(for_dK, dS.fragment, columns[0], acc_dK),
            DqProduct(for_dQ, tQrS, tQrK, rings.ds, acc_dQ, staging, scratch, staged),
            P,
            dS,
            fetches,
            DsSmemStore(rings.ds, *self.crossing(dS, acc_S, shared.ds, scores.add, thread), wg),
            shared.lse,
            shared.delta,
        )

    def crossing(
        self, dS: fragments.OperandA, like: cute.Tensor, sdS: cute.Tensor, mma: cute.TiledMma, thread: Int32
    ) -> tuple[cute.TiledCopy, cute.Tensor, cute.Tensor]:
        """Return the copy, source and target of the dS store to shared memory.

        Args:
            like: accumulator with the element order of dS.
        """
        matrices = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.element.dtype)
        copy = cute.make_tiled_copy_C(matrices, mma).get_slice(thread)
        halves = cute.make_tensor(cute.recast_ptr(dS.pairs.iterator, dtype=self.element.dtype), like.layout)
        return copy, copy.retile(halves), copy.partition_D(sm90.transposed(sdS))

    @cute.jit
    def consume(
        self, shared: BackwardSmem, dk: sm90.TmaOperand, dv: sm90.TmaOperand, dq_writer: DqWriter,
        work: BackwardWork, scales: SoftmaxScale,
        chain: ScorePipeline,
    ):  # fmt: skip
        """Run a consumer warpgroup: compute dK and dV of 64 keys, and half of the columns of dQ of each step."""
        rings, scratch = work.rings, dq_writer.scratch
        my = self.hold(shared, rings, scratch)
        wg, thread = my.wg, cute.arch.thread_idx()[0] % sm90.WARPGROUP
        warp_idx, lane = cute.arch.make_warp_uniform(thread // sm90.WARP), thread % sm90.WARP
        chain, scale_log2 = chain.allocate_registers(self.tile_m), chain.scales(scales).log2

        nth, done, number = Int32(0), Int32(0), work.queue.receive(Int32(0))
        while number < work.pieces.total:
            tile = work.pieces.tile(number, work.group)
            run = work.run(tile)
            key = tile.block * self.tile_n + wg * ROWS + warp_idx * SLAB + lane // 4
            of_tile = chain.set_tile(
                ScoreCoord(tile.sizes, self.tile_m, key, lane % 4 * 2, tile.sequence, None, transposed=True)
            )
            rings.k.consumer_wait(nth)
            rings.v.consumer_wait(nth)
            my.fetch_keys()
            my.dK.acc.fill(0.0)
            my.dV.acc.fill(0.0)
            before, unit = done, Int32(0)
            for g in cutlass.range(work.group, unroll=1):
                first_block = scratch.first_block(tile, g, work.pieces.order.heads)
                mine, stages = run.of_head(g), of_tile.of_head(tile.query_head(g))
                for section in mine.sections():
                    stages.begin(mine.nth(section.begin), section.masked)
                    for j in cutlass.range(section.begin, section.end, unroll=1):
                        here = StepContext(stages, section.masked, mine.nth(j), mine.next(j, section))
                        last = PendingDq(unit, done - before)
                        if cutlass.const_expr(self.kv_in_registers):
                            self.step_all_products_in_flight(my, done, last, here, scale_log2)
                        else:
                            self.step_reuse_registers(my, done, last, here, scale_log2)
                        rings.do.consumer_release(done)
                        rings.q.consumer_release(done)
                        unit = (first_block + here.block) * UNITS + wg * 4 + warp_idx
                        done += 1
            warpgroup.wait_group(0)
            rings.v.consumer_release(nth)
            warpgroup.fence()
            my.dQ.multiply(done - 1)
            warpgroup.wait_group(0)
            rings.k.consumer_release(nth)
            my.dQ.send(unit, done - before, done - 1)
            my.dQ.make_room(done)
            slab = tile.block * (self.tile_n // SLAB) + wg * 4
            self.store(my.dV, chain.scaled(Float32(1.0)), tile.rows(dv), slab)
            self.store(my.dK, chain.scaled(scales.natural), tile.rows(dk), slab)
            if cutlass.const_expr(not self.in_order):
                # Wait for all groups but the stores of dK and dV: the last dQ has been added.
                cute.arch.cp_async_bulk_wait_group(2)
                cute.arch.sync_warp()
                dq_writer.added.consumer_release(nth)
            nth += 1
            number = work.queue.receive(nth)
        # Shared memory must stay allocated until the last transfer has ended.
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def step_all_products_in_flight(
        self, my: ConsumerState, done: Int32, last: PendingDq, here: StepContext, scale_log2: Float32
    ):
        """Run a step in which every product has registers of its own."""
        masked, slot = here.masked, my.rings.q.stage_index(done)
        my.rings.q.consumer_wait(done)
        warpgroup.fence()
        my.S.start(slot)
        my.rings.do.consumer_wait(done)
        my.dP.start(slot)
        lse = row_values(my.lse, slot)  # LSE is read before more products are issued: behind them the read costs 10 %
        my.dQ.multiply(done - 1)
        here.chain.prepare_stage(here.block, masked)
        warpgroup.wait_group(2)  # wait for S
        here.chain.apply(my.S.values, here.block, masked, done)
        exponentiate(my.S.values, lse, scale_log2)
        my.P.convert(my.S.acc, here.chain.p_transform(masked))
        warpgroup.fence()
        my.dV.add(slot)
        delta = row_values(my.delta, slot)
        # Wait for dP and for dQ. The dS stage read by dQ may be overwritten once the dS of this step has been put.
        warpgroup.wait_group(1)
        here.chain.apply_backward(my.dP.values, masked)
        score_derivative = ScoreDerivative.of(here.chain, lambda: row_values(my.lse, slot))
        differentiate(my.S.values, my.dP.values, delta, my.dP.values, score_derivative=score_derivative)
        my.dS.convert(my.dP.acc)
        here.chain.prefetch(here.next_block, masked)
        my.crossing.put(done)
        warpgroup.fence()
        my.dK.add(slot)
        my.dQ.send(last.unit, last.count, done - 1)
        warpgroup.wait_group(0)

    @cute.jit
    def step_reuse_registers(
        self, my: ConsumerState, done: Int32, last: PendingDq, here: StepContext, scale_log2: Float32
    ):
        """Run a step in which dP reuses the registers of the previous dQ, and dS those of P."""
        masked, slot = here.masked, my.rings.q.stage_index(done)
        my.rings.q.consumer_wait(done)
        warpgroup.fence()
        my.S.start(slot)
        here.chain.prepare_stage(here.block, masked)
        # LSE is read here, ahead of more products, for the same reason as in `step_all_products_in_flight`.
        lse = row_values(my.lse, slot)
        my.dQ.multiply(done - 1)
        warpgroup.wait_group(1)  # wait for S
        here.chain.apply(my.S.values, here.block, masked, done)
        exponentiate(my.S.values, lse, scale_log2)
        my.P.convert(my.S.acc, here.chain.p_transform(masked))
        warpgroup.wait_group(0)  # wait for dQ
        my.dQ.send(last.unit, last.count, done - 1)
        my.rings.do.consumer_wait(done)
        warpgroup.fence()
        my.dP.start(slot)
        my.dV.add(slot)
        warpgroup.wait_group(1)  # wait for dP
        here.chain.apply_backward(my.dP.values, masked)
        score_derivative = ScoreDerivative.of(here.chain, lambda: row_values(my.lse, slot))
        values, dP = my.S.values, my.dP.values
        differentiate(values, dP, row_values(my.delta, slot), dP, score_derivative=score_derivative)
        warpgroup.wait_group(0)
        my.dS.convert(my.dP.acc)
        here.chain.prefetch(here.next_block, masked)
        my.crossing.put(done)
        warpgroup.fence()
        my.dK.add(slot)
        # ptxas serializes every product if a product is in flight across the end of a loop.
        warpgroup.wait_group(0)

    def my_keys(
        self, sources: tuple[cute.Tensor, ...], mma: cute.TiledMma, thread: Int32
    ) -> tuple[tuple[cute.Tensor, ...], tuple[SmemToRegisterCopy, ...]]:
        """Return the warpgroup's K and V as left operands, and the copies that load these operands.

        The operands are in registers if registers have room for them, which halves the shared-memory reads. Otherwise
        the operands stay in shared memory, and no copies are returned.
        """
        part = mma.get_slice(thread)
        fragments = tuple(part.make_fragment_A(part.partition_A(s)) for s in sources)
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
