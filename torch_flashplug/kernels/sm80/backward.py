"""Attention backward for sm_80 and later: dQ, dK and dV from Q, K, V, dO, LSE and delta = rowsum(dO * O).

A CTA has a single block of keys of a KV head. The CTA keeps dK and dV of the block in registers. The mainloop visits
the query rows that see the block, for every query head of the group. Scores are computed transposed (keys x queries).
Therefore P^T and dS^T are the left operands of dV += P^T dO and dK += dS^T Q (FlashAttention-2, arXiv 2307.08691,
algorithm 2). dQ = dS K needs all keys of the CTA: dS crosses shared memory. The product is added to the fp32 dQ
workspace in global memory, in the order in which registers hold the product.

There are three variants:
- Up to head dim 64 a warp owns its keys with all columns of their dK and dV, from its registers alone. dQ is multiplied
  a step later. A step has a single barrier, so that warps drift apart and fill each other's gaps.
- Up to head dim 128 two warps share the columns of their keys. The two warps exchange P and dS behind barriers of their
  own.
- Above, in element-wise kernels, and with score stages that hold data of a block, no warp has enough registers. Four
  warps share the columns of 32 keys, and all warps meet several times per step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64

from ...registry.kernel_spec import FP32_BYTES, MMA_ATOM_M, WARP, AmpereSpec
from ..backward.pre_post_process import (
    BackwardPostprocess,
    BackwardPreprocess,
    RowStatsInputs,
    exponentiate,
    softmax_backward,
)
from ..backward.workspace import UNITS, DqWorkspace, WorkspaceLayout, count_up
from ..call_args.kernel_call import KernelArgs, KernelCall, SoftmaxScale
from ..features.base import KernelFeatures
from ..primitives import fragments, sm80
from ..primitives.vector_access import QUAD
from ..score_stages.pipeline import ScoreCoord, ScorePipeline
from ..tiling.backward_tile_scheduler import BackwardTileScheduler, kv_heads_per_l2_group
from ..tiling.block_iterator import BlockIterator, QueryBlockRange, QueryBlockStep
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import Tile, TileAddressing

ROW_STATS = 2  # row statistics: LSE and delta
SLABS = 2  # slabs of keys whose dK and dV a warp owns, with all or a part of the columns
ROOMY = 128  # largest number of columns for which addresses of single elements have registers of their own
HALF = 32  # queries whose scores a warp holds at once


@dataclass(frozen=True)
class QueryStages:
    """Loads of Q and dO with LSE and delta, step by step, into the stages."""

    copier: sm80.SmemCopier
    mQ: cute.Tensor  # (Hq, Sq, D)
    mdO: cute.Tensor  # (Hq, Sq, Dv)
    mRowStats: cute.Tensor  # (Hq, 2, padded Sq): LSE * log2(e) and delta
    q: sm80.SmemTile  # Q of stage 0
    do: sm80.SmemTile
    stage_bytes: int

    @property
    def rows(self) -> Int32:
        """Shared-memory address of LSE and delta of stage 0."""
        return self.do.start + self.do.bytes

    def stage_tile(self, tile: sm80.SmemTile, stage: Int32) -> sm80.SmemTile:
        """Return the tile of stage `stage`. `tile` is the tile of stage 0."""
        return tile.at_offset(stage * self.stage_bytes)

    def load_q(self, head: Int32, block: Int32, stage: Int32) -> None:
        """Start the load of a block of Q with its LSE and delta into stage `stage`."""
        self.copier.load(self.of_head(self.mQ, head), block * self.q.rows, self.stage_tile(self.q, stage))
        self.load_rows(self.mRowStats[head, None, None], block * self.q.rows, self.rows + stage * self.stage_bytes)

    def load_do(self, head: Int32, block: Int32, stage: Int32) -> None:
        """Start the load of a block of dO into stage `stage`."""
        self.copier.load(self.of_head(self.mdO, head), block * self.do.rows, self.stage_tile(self.do, stage))

    def of_head(self, mX: cute.Tensor, head: Int32) -> cute.Tensor:
        """Return the matrix (rows, columns) of a head.

        In element-wise kernels the compiler would keep the offset of each column of a thread in registers through all
        products. Wide kernels need all registers for the products, so the column stride is hidden from the compiler
        there.
        """
        gX = mX[head, None, None]
        if not self.copier.elementwise or max(self.q.columns, self.do.columns) <= ROOMY:
            return gX
        stride = (gX.stride[0], gX.stride[1] + Int64(fragments.zero_of(head)))
        return cute.make_tensor(gX.iterator, cute.make_layout(gX.shape, stride=stride))

    @cute.jit
    def load_rows(self, gRowStats: cute.Tensor, first: Int32, target: Int32):
        """Start the load of LSE and delta of a block of queries."""
        thread, units = cute.arch.thread_idx()[0], self.q.rows // QUAD
        if thread < ROW_STATS * units:
            row = first + thread % units * QUAD
            source = gRowStats.iterator.toint() + (Int64(thread // units) * gRowStats.stride[0] + row) * FP32_BYTES
            size = cutlass.select_(row < gRowStats.shape[1], Int32(sm80.VECTOR_BYTES), Int32(0))
            sm80.copy_unit(source, target + thread * sm80.VECTOR_BYTES, size)

    def row_stats(self, which: int, stage: Int32, first: Int32 | int) -> cute.Tensor:
        """Return LSE * log2(e) (0) or delta (1) of a lane's columns, for HALF queries from `first` on."""
        return row_pairs(self.rows + stage * self.stage_bytes + (which * self.q.rows + first) * FP32_BYTES, HALF)


def row_pairs(address: Int32, count: int) -> cute.Tensor:
    """Return the values of a row statistic of `count` queries at this lane's columns, from shared memory."""
    values = cute.make_rmem_tensor((count // 4,), Float32)  # (count/4,)
    for c in range(count // 8):
        pair_address = address + (cute.arch.lane_idx() % 4 * 2 + 8 * c) * FP32_BYTES
        source = cute.make_ptr(Float32, pair_address, cute.AddressSpace.smem, assumed_align=8)
        pair = cute.make_layout(2)
        cute.autovec_copy(cute.make_tensor(source, pair), cute.make_tensor(values.iterator + 2 * c, pair))
    return values


@dataclass(frozen=True)
class DqProduct:
    """Product dQ = dS K: a warp's rows and columns of dQ.

    A warp has `pairs` pairs of 16-byte units of every panel of a row of K.
    """

    product: sm80.MmaProduct
    left: sm80.LdmatrixView  # dS: keys x the warp's queries
    right: sm80.LdmatrixView  # K: keys x the warp's columns
    slabs: int  # slabs of rows
    pairs: int  # pairs of units per panel
    workspace: DqWorkspace
    first_slab: Int32
    column_part: Int32  # index of the warp's column part

    @cute.jit
    def add(self, stage: Int32, block: Int32, rank: Int32 | None):
        """Add the product with the dS in stage `stage` to a block of the dQ workspace.

        Args:
            rank: accumulation order: number of adds of warps to wait for before this add; None in kernels without an
                order.
        """
        k, ds = self.right.tile, self.left.tile
        accs = self.multiply(self.left.retarget(ds.at_offset(stage * ds.bytes), True))
        counter = self.workspace.unit_counter(block * UNITS)
        if cutlass.const_expr(rank is not None):
            sm80.spin_until_count(counter, rank)
        start = self.workspace.unit(block * UNITS).toint() + cute.arch.lane_idx() * (QUAD * FP32_BYTES)
        for panel in cutlass.range_constexpr(k.columns // k.panel):
            for u in cutlass.range_constexpr(self.pairs):
                column = panel * k.panel + (self.column_part * self.pairs + u) * sm80.PAIR
                for s in cutlass.range_constexpr(self.slabs):
                    self.add_pair(start, accs[s], (panel * self.pairs + u) * 2, self.first_slab + s, column)
        if cutlass.const_expr(rank is not None):
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                count_up(counter)

    def multiply(self, left: sm80.LdmatrixView) -> tuple:
        """Return an accumulator of dS K for each slab."""
        k, allocate = self.right.tile, lambda: sm80.allocate_fragment(self.product.dtype)
        panels = range(k.columns // k.panel)
        accs = tuple(sm80.accumulator(len(panels) * self.pairs * sm80.PAIR) for _ in range(self.slabs))
        lefts, right = tuple(allocate() for _ in accs), allocate()
        for key in range(0, k.rows, MMA_ATOM_M):
            for s, weights in enumerate(lefts):
                left.fetch(key, s * MMA_ATOM_M, weights)
            for p in panels:
                for u in range(self.pairs):
                    self.right.fetch(key, p * k.panel + u * sm80.PAIR, right)
                    self.product.step(accs, lefts, right, (p * self.pairs + u) * sm80.PAIR)
        return accs

    def add_pair(self, start: Int64, acc: cute.Tensor, chunk: int, slab: Int32, column: Int32) -> None:
        """Add sixteen columns of a slab to a lane's place in a block of the dQ workspace.

        Args:
            chunk: first chunk of eight columns in the accumulator.
        """
        half = self.right.tile.columns // 2
        unit = column // half * (UNITS // 2) + slab
        offset = (unit * (half // 8) + column % half // 8) * (WARP * QUAD * FP32_BYTES)
        for e in range(2):
            quad = tuple(acc[(chunk + e) * QUAD + i] for i in range(QUAD))
            sm80.add_quad(start + Int64(offset) + e * (WARP * QUAD * FP32_BYTES), quad)


@dataclass(frozen=True)
class WarpState:
    """State of a warp: its keys, and the accumulators of dK and dV."""

    product: sm80.MmaProduct
    keys: sm80.LdmatrixView  # K as left operand of the scores
    rows: sm80.LdmatrixView  # Q as right operand of the scores
    columns: sm80.LdmatrixView  # the warp's columns of Q as right operand of a sum over queries
    dK: sm80.Accumulators  # an accumulator of 16 keys per slab
    dV: sm80.Accumulators  # an accumulator of 16 keys per slab


@dataclass(frozen=True)
class BackwardSmem:
    """Tiles of a CTA in shared memory; at the end dK and dV take the place of K and V."""

    k: sm80.SmemTile  # (tile_n, D), later dK
    v: sm80.SmemTile  # (tile_n, Dv), later dV
    weights: sm80.SmemTile  # (keys, queries), the first of two: of two steps' dS, or of dS and P


@dataclass(frozen=True)
class BackwardGmem:
    """Tensors in global memory."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor


@dataclass(frozen=True)
class KvBlock:
    """Block of keys of a CTA, and the query heads that see the block."""

    tile: Tile
    first_head: Int32  # first query head of the group
    heads_before: Int32  # query heads of earlier batch entries
    group: Int32  # query heads of the KV head


@dataclass(frozen=True)
class StepContext:
    """Position of a step in the block iteration, and the score stages at this position."""

    score_pipeline: ScorePipeline
    coord: ScoreCoord  # place of the warp's first slab of keys and of the first query of its half
    query_range: QueryBlockRange
    step: QueryBlockStep

    @property
    def block(self) -> Int32:
        """The query block of the step."""
        return self.step.block

    @property
    def masked(self) -> cutlass.Boolean:
        """True if the step has a partial block."""
        return self.query_range.masked(self.step)

    def allocate_stages(self, slabs: int) -> tuple[ScorePipeline, ...]:
        """Return the score stages with registers, for each of `slabs` slabs of keys."""
        return tuple(self.score_pipeline.allocate_registers(HALF) for _ in range(slabs))

    def coord_of(self, slab: int, first_query: int) -> ScoreCoord:
        """Return the place of slab `slab` and of the queries from `first_query` on."""
        row, column = self.coord.row + slab * MMA_ATOM_M, self.coord.column + first_query
        return replace(self.coord, row=row, column=column, head=self.step.head, by_row=True)


class BackwardSm80(KernelCall, kind="bwd"):
    """Builder of the three backward kernels of a spec for sm_80, which a call launches in sequence.

    All sizes are compile-time constants. Computes dQ, dK and dV. A deterministic spec (kind `detbwd`) adds to dQ in the
    same order in every run.

    1. `BackwardPreprocess` computes LSE * log2(e) and delta per row, and clears the dQ workspace and its counters.
    2. The main kernel computes dK and dV and adds dQ to the workspace.
    3. `BackwardPostprocess` converts dQ to 16 bits.

    Inputs: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), o and do (B, Hq, Sq, Dv), lse (B, Hq, Sq) in fp32.
    Outputs: dq, dk and dv, with the shapes of q, k and v. Workspace: row_stats (B, Hq, 2, padded Sq) in fp32, and the
    dQ workspace (`DqWorkspace`).

    Warp roles: every warp loads and multiplies. `column_parts` (1, 2 or 4) warps share the columns of dK and dV of 32
    keys.

    Pipelines: Q with LSE and delta, and dO, are loaded with cp.async into `stages` stages. With two stages the load of
    the next step runs under the products of the current step.

    Shared memory: K (tile_n, D) and V (tile_n, Dv), later dK and dV; two tiles of weights (tile_n, tile_m); `stages`
    stages of Q, dO, LSE and delta.
    """

    def __init__(self, spec: AmpereSpec):
        self.spec, self.elementwise, self.features = (
            spec,
            spec.elementwise,
            KernelFeatures.from_spec(spec, transposed=True),
        )
        self.element, self.d, self.dv = self.features.element, spec.d, spec.dv
        self.tile_m, self.tile_n, self.parts = spec.tile_m, spec.tile_n, spec.column_parts
        self.in_order = spec.is_deterministic
        self.warps = spec.threads // WARP
        self.preprocess = BackwardPreprocess(self.element, clears=spec.d, elementwise=spec.elementwise)
        self.postprocess = BackwardPostprocess(self.element, spec.d, elementwise=spec.elementwise)

    @cute.jit
    def launch(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the preprocessing kernels of the features, then the three backward kernels."""
        B, Hkv, Sk, _ = call.k.shape
        num_n_blocks, group = cute.ceil_div(Sk, self.tile_n), call.q.shape[1] // Hkv
        addressing = self.features.tile_addressing(call)
        block_iterator = self.features.block_iterator(call)
        score_pipeline = self.features.score_pipeline(call)
        # Bytes per query row: Q, dO and dQ in fp32.
        row_bytes = (self.d + self.dv) * self.element.bytes + self.d * FP32_BYTES
        num_ctas = call.num_ctas if self.in_order else None
        bound_iterator = block_iterator.bind(SeqlenInfo(call.q.shape[2], Sk), self.tile_m, self.tile_n)
        l2_group_heads = kv_heads_per_l2_group(bound_iterator, group, B * Hkv, row_bytes, num_ctas)
        workspace_layout = WorkspaceLayout(B * Hkv, group, num_n_blocks)
        workspace = (call.row_stats, call.dq_workspace)
        self.features.launch_preprocess(call, stream)
        row_stats_inputs = RowStatsInputs(call.o, call.do, call.lse, call.dlse)
        self.preprocess(row_stats_inputs, *workspace, workspace_layout, score_pipeline.keep_scale, addressing, stream)
        tensors = BackwardGmem(call.q, call.k, call.v, call.do, call.dk, call.dv)
        self.kernel(
            tensors, *workspace, call.scales, l2_group_heads, addressing, block_iterator, score_pipeline
        ).launch(grid=(num_n_blocks * B * Hkv, 1, 1), block=(self.spec.threads, 1, 1), stream=stream)
        self.postprocess(
            call.dq_workspace,
            call.row_stats,
            call.dq,
            score_pipeline.scaled(call.scales.natural),
            workspace_layout,
            addressing,
            stream,
        )

    @cute.kernel
    def kernel(
        self,
        tensors: BackwardGmem,
        mRowStats: cute.Tensor,
        mDqWorkspace: cute.Tensor,
        scales: SoftmaxScale,
        l2_group_heads: Int32,
        addressing: TileAddressing,
        block_iterator: BlockIterator,
        score_pipeline: ScorePipeline,
    ):
        """Compute dK and dV of a block of keys, and add dQ to the workspace."""
        B, Hkv, Sk, _ = tensors.k.shape
        Hq, Sq = tensors.q.shape[1], tensors.q.shape[2]
        bound_iterator = block_iterator.bind(SeqlenInfo(Sq, Sk), self.tile_m, self.tile_n)
        order = BackwardTileScheduler(
            True, cute.ceil_div(Sk, self.tile_n), Hkv, B * Hkv, l2_group_heads, bound_iterator, self.in_order
        )
        tile = addressing.of_keys(order, bound_iterator.sizes).tile(cute.arch.block_idx()[0])
        first_key = tile.block * self.tile_n

        smem = cutlass.memory.SmemAllocator()
        start = Int32(smem.allocate(self.spec.smem_bytes(), 128).toint())
        k = sm80.SmemTile(start, self.tile_n, self.d)
        v = sm80.SmemTile(k.start + k.bytes, self.tile_n, self.dv)
        weights = sm80.SmemTile(v.start + v.bytes, self.tile_n, self.tile_m)  # first of two tiles
        q = sm80.SmemTile(weights.start + 2 * weights.bytes, self.tile_m, self.d)
        do = sm80.SmemTile(q.start + q.bytes, self.tile_m, self.dv)
        stage_bytes = q.bytes + do.bytes + ROW_STATS * self.tile_m * FP32_BYTES
        copier = sm80.SmemCopier(self.spec.threads, self.element, self.elementwise)
        batch_tensors = tuple(x[tile.batch, None, None, None] for x in (tensors.q, tensors.do, mRowStats))
        queries = QueryStages(copier, *batch_tensors, q, do, stage_bytes)

        copier.load(tile.rows(tensors.k), first_key, k)
        copier.load(tile.rows(tensors.v), first_key, v)
        workspace = DqWorkspace(
            mDqWorkspace.iterator, mRowStats.shape[3] // self.tile_m, B * Hq, self.tile_m * self.d // UNITS
        )
        tiles, group = BackwardSmem(k, v, weights), Hq // Hkv
        kv_block = KvBlock(replace(tile, group=group), tile.head * group, tile.batch * Hq, group)
        if cutlass.const_expr(self.parts == 4):
            self.mainloop_shared_keys(order, queries, tiles, workspace, kv_block, scales, score_pipeline)
        else:
            self.mainloop_own_keys(order, queries, tiles, workspace, kv_block, scales, score_pipeline)
        sm80.wait_for_copies()
        copier.store_tile(k, tile.rows(tensors.dk), first_key)
        copier.store_tile(v, tile.rows(tensors.dv), first_key)

    def accumulation_rank(
        self, order: BackwardTileScheduler, n_block: Int32, query_range: QueryBlockRange, step: QueryBlockStep
    ) -> Int32 | None:
        """Return how many warp adds to the queries of a step come before this CTA's, or None if there is no order."""
        return (
            order.accumulation_rank(n_block, query_range.range_of(step), step.j) * self.warps if self.in_order else None
        )

    def make_dq_product(self, tiles: BackwardSmem, workspace: DqWorkspace, warp: Int32) -> DqProduct:
        """Return the part of dQ of a warp.

        With eight warps and panels of 64 columns, the part is two slabs of rows and every fourth pair of columns. Other
        kernels have parts of a similar size.
        """
        k = tiles.k
        parts = min(4, k.panel // sm80.PAIR) if self.warps == 8 else 2  # parts of the columns
        slabs = self.tile_m // MMA_ATOM_M * parts // self.warps
        pairs = k.panel // sm80.PAIR // parts
        left = sm80.LdmatrixView.create(tiles.weights, self.element.dtype, "A", transposed=True).panel_slice(
            warp // parts, slabs
        )
        right = sm80.LdmatrixView.create(k, self.element.dtype, "B", transposed=True).panel_slice(warp % parts, pairs)
        product = sm80.MmaProduct.create(self.element.dtype)
        return DqProduct(product, left, right, slabs, pairs, workspace, warp // parts * slabs, warp % parts)

    def make_warp_state(self, k: sm80.SmemTile, slab: Int32, half: Int32 | int, part: Int32) -> WarpState:
        """Return the operands and accumulators of a warp.

        Args:
            slab: first slab of keys whose scores the warp computes.
            half: half of the queries.
            part: part of the columns of dK and dV.
        """
        key_view = sm80.LdmatrixView.create(k, self.element.dtype, "A", first_row=slab * MMA_ATOM_M)
        row_view = sm80.LdmatrixView.create(k, self.element.dtype, "B", first_row=half * HALF)
        column_view = sm80.LdmatrixView.create(k, self.element.dtype, "A").panel_slice(
            part, k.panel // sm80.PAIR // self.parts
        )
        dK, dV = (tuple(sm80.accumulator(c // self.parts) for _ in range(SLABS)) for c in (self.d, self.dv))
        return WarpState(sm80.MmaProduct.create(self.element.dtype), key_view, row_view, column_view, dK, dV)

    @cute.jit
    def mainloop_own_keys(
        self, order: BackwardTileScheduler, queries: QueryStages, tiles: BackwardSmem, workspace: DqWorkspace,
        kv_block: KvBlock, scales: SoftmaxScale,
        score_pipeline: ScorePipeline,
    ):  # fmt: skip
        """Run the mainloop where every warp, or every pair of warps, has keys of its own.

        At the end dK and dV go to the place of K and V in shared memory.
        """
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        part, first_slab = warp % self.parts, warp // self.parts * SLABS
        state = self.make_warp_state(tiles.k, first_slab, part, part)
        dq_product = self.make_dq_product(tiles, workspace, warp)
        key = kv_block.tile.block * self.tile_n + first_slab * MMA_ATOM_M + lane // 4
        column, scale_log2 = lane % 4 * 2 + part * HALF, score_pipeline.scales(scales).log2
        coord = ScoreCoord(order.blocks.sizes, self.tile_m, key, column, kv_block.tile.sequence, None, transposed=True)

        query_range = order.blocks.query_blocks(kv_block.tile)
        num_steps = query_range.total(kv_block.group)
        step, last_block = query_range.first(kv_block.first_head, num_steps > 0), Int32(0)
        last_step = replace(step, j=Int32(0))  # placeholder: no step has ended yet
        queries.load_q(step.head, step.block, Int32(0))
        queries.load_do(step.head, step.block, Int32(0))
        for i in cutlass.range(num_steps, unroll=1):
            sm80.wait_for_copies()
            next_step = query_range.after(step, i + 1 < num_steps)
            if i + 1 < num_steps:
                queries.load_q(next_step.head, next_step.block, 1 - i % 2)
                queries.load_do(next_step.head, next_step.block, 1 - i % 2)
            if i > 0:
                dq_product.add(
                    1 - i % 2, last_block, self.accumulation_rank(order, kv_block.tile.block, query_range, last_step)
                )
            context = StepContext(score_pipeline, coord, query_range, step)
            if cutlass.const_expr(self.parts == 1):
                self.step_alone(state, queries, tiles, i % 2, context, scale_log2, first_slab)
            else:
                self.step_in_pairs(state, queries, tiles, i % 2, context, scale_log2, first_slab, part)
            last_block, last_step = (kv_block.heads_before + step.head) * workspace.num_m_blocks + step.block, step
            step = next_step
        sm80.wait_for_copies()
        if num_steps > 0:
            dq_product.add(
                (num_steps - 1) % 2,
                last_block,
                self.accumulation_rank(order, kv_block.tile.block, query_range, last_step),
            )
        sm80.wait_for_copies()
        self.store_dkdv(state, tiles, first_slab * MMA_ATOM_M, scales, score_pipeline, part)

    def store_dkdv(
        self,
        state: WarpState,
        tiles: BackwardSmem,
        first_row: Int32,
        scales: SoftmaxScale,
        score_pipeline: ScorePipeline,
        part: Int32,
    ) -> None:
        """Write a warp's dK and dV to the tiles in shared memory."""
        of_dV = None if score_pipeline.keep_scale is None else score_pipeline.scaled(Float32(1.0))
        for accs, tile, factor in (
            (state.dK, tiles.k, score_pipeline.scaled(scales.natural)),
            (state.dV, tiles.v, of_dV),
        ):
            for s, acc in enumerate(accs):
                if factor is not None:
                    acc.store(acc.load() * factor)
                pairs = tile.panel // sm80.PAIR // self.parts
                sm80.store_panel_slice(acc, tile, first_row + s * MMA_ATOM_M, part, pairs, self.element)

    @cute.jit
    def compute_p(
        self, scores: sm80.Accumulators, lse: cute.Tensor, context: StepContext, slab_stages: tuple[ScorePipeline, ...],
        first: int,
        scale_log2: Float32,
    ) -> list[fragments.OperandA]:  # fmt: skip
        """Replace the scores of the queries from `first` on by P, and return P in 16 bits."""
        if context.masked:
            self.apply_score_stages(scores, context, slab_stages, first, masked=True)
        else:
            self.apply_score_stages(scores, context, slab_stages, first, masked=False)
        P = []
        for s in cutlass.range_constexpr(len(scores)):
            exponentiate(fragments.rows_and_columns(scores[s]), lse, scale_log2)
            P.append(fragments.OperandA.create(scores[s], self.element))
            P[s].convert(scores[s], slab_stages[s].set_tile(context.coord).p_transform(masked=True))
        return P

    def apply_score_stages(
        self, scores: sm80.Accumulators, context: StepContext, slab_stages: tuple[ScorePipeline, ...], first: int,
        masked: bool
    ) -> None:  # fmt: skip
        """Apply the score stages to the scores of a step.

        Score stages have no registers across steps in these kernels. Therefore `begin` and `prepare_stage` are called
        directly before `apply`.
        """
        for s, acc in enumerate(scores):
            tile_stages = slab_stages[s].set_tile(context.coord_of(s, first))
            tile_stages.begin(context.block, masked)
            tile_stages.prepare_stage(context.block, masked)
            tile_stages.apply(fragments.rows_and_columns(acc), context.block, masked)

    @cute.jit
    def compute_ds(
        self, P: sm80.Accumulators, dP: sm80.Accumulators, delta: cute.Tensor, context: StepContext,
        slab_stages: tuple[ScorePipeline, ...]
    ) -> list[fragments.OperandA]:  # fmt: skip
        """Return dS in 16 bits; `dP` is overwritten."""
        dS = []
        for s in cutlass.range_constexpr(len(P)):
            gradients = fragments.rows_and_columns(dP[s])
            slab_stages[s].set_tile(context.coord).apply_backward(gradients, masked=True)
            softmax_backward(fragments.rows_and_columns(P[s]), gradients, delta, gradients)
            dS.append(fragments.OperandA.create(dP[s], self.element))
            dS[s].convert(dP[s])
        return dS

    @cute.jit
    def step_alone(
        self, state: WarpState, queries: QueryStages, tiles: BackwardSmem, stage: Int32, context: StepContext,
        scale_log2: Float32,
        first_slab: Int32,
    ):  # fmt: skip
        """Add a block of queries to the warp's dK and dV, and write the warp's dS to shared memory."""
        k, v, weights = tiles.k, tiles.v, tiles.weights
        q, do = queries.stage_tile(queries.q, stage), queries.stage_tile(queries.do, stage)
        target = weights.at_offset(stage * weights.bytes)
        for first in cutlass.range_constexpr(0, self.tile_m, HALF):
            S, dP = (tuple(sm80.accumulator(HALF) for _ in range(SLABS)) for _ in range(2))
            zero = fragments.zero_of(stage)
            keys, rows = state.keys.retarget(k.at_offset(zero), False), state.rows.retarget(q, False)
            state.product.scores(S, keys, rows, first)
            slab_stages = context.allocate_stages(SLABS)
            P = self.compute_p(S, queries.row_stats(0, stage, first), context, slab_stages, first, scale_log2)
            columns = state.columns.retarget(q, True)
            for query in cutlass.range_constexpr(0, HALF, MMA_ATOM_M):
                lefts = tuple(x.fragment[None, 0, query // MMA_ATOM_M] for x in P)
                state.product.accumulate(state.dV, lefts, columns.rebase(do), first + query)
            state.product.scores(dP, keys.rebase(v.at_offset(zero)), rows.rebase(do), first)
            dS = self.compute_ds(S, dP, queries.row_stats(1, stage, first), context, slab_stages)
            for s in cutlass.range_constexpr(SLABS):
                sm80.store_operand(dS[s], target, (first_slab + s) * MMA_ATOM_M, first)
            for query in cutlass.range_constexpr(0, HALF, MMA_ATOM_M):
                lefts = tuple(x.fragment[None, 0, query // MMA_ATOM_M] for x in dS)
                state.product.accumulate(state.dK, lefts, columns, first + query)

    @cute.jit
    def step_in_pairs(
        self, state: WarpState, queries: QueryStages, tiles: BackwardSmem, stage: Int32, context: StepContext,
        scale_log2: Float32,
        first_slab: Int32, half: Int32,
    ):  # fmt: skip
        """Add a block of queries to dK and dV where two warps share the same keys.

        Each warp first computes the scores of half of the queries, then sums all queries for half of the columns. P,
        and then dS in the same place, cross shared memory.
        """
        q, do = queries.stage_tile(queries.q, stage), queries.stage_tile(queries.do, stage)
        rows, target = state.rows.retarget(q, False), tiles.weights.at_offset(stage * tiles.weights.bytes)
        S, dP = (tuple(sm80.accumulator(HALF) for _ in range(SLABS)) for _ in range(2))
        state.product.scores(S, state.keys, rows)
        slab_stages = context.allocate_stages(SLABS)
        P = self.compute_p(S, queries.row_stats(0, stage, half * HALF), context, slab_stages, 0, scale_log2)
        for s in cutlass.range_constexpr(SLABS):
            sm80.store_operand(P[s], target, (first_slab + s) * MMA_ATOM_M, half * HALF)
        left = sm80.LdmatrixView.create(target, self.element.dtype, "A", first_row=first_slab * MMA_ATOM_M).panel_slice(
            1 - half, 2
        )
        self.accumulate_halves(state, state.dV, P, left, state.columns.retarget(q, True).rebase(do), first_slab, half)
        state.product.scores(dP, state.keys.rebase(tiles.v), rows.rebase(do))
        dS = self.compute_ds(S, dP, queries.row_stats(1, stage, half * HALF), context, slab_stages)
        self.sync_key_warps(first_slab)  # both warps have read P
        for s in cutlass.range_constexpr(SLABS):
            sm80.store_operand(dS[s], target, (first_slab + s) * MMA_ATOM_M, half * HALF)
        self.accumulate_halves(state, state.dK, dS, left, state.columns.retarget(q, True), first_slab, half)

    def sync_key_warps(self, first_slab: Int32) -> None:
        """Wait for the warps with the same keys, on a named barrier."""
        cute.arch.barrier(barrier_id=1 + first_slab // SLABS, number_of_threads=self.parts * WARP)

    def accumulate_halves(
        self, state: WarpState, accs: sm80.Accumulators, weights_of_warp: list[fragments.OperandA],
        left: sm80.LdmatrixView, columns: sm80.LdmatrixView, first_slab: Int32, half: Int32,
    ) -> None:  # fmt: skip
        """Sum over the half of the queries held by this warp, then over the peer warp's half from shared memory."""
        lefts = tuple(sm80.allocate_fragment(self.element.dtype) for _ in weights_of_warp)
        own_columns = columns.skip_rows(half * HALF)
        for query in range(0, HALF, MMA_ATOM_M):
            state.product.accumulate(
                accs, tuple(x.fragment[None, 0, query // MMA_ATOM_M] for x in weights_of_warp), own_columns, query
            )
        self.sync_key_warps(first_slab)
        peer_columns = columns.skip_rows((1 - half) * HALF)
        for query in range(0, HALF, MMA_ATOM_M):
            for s, weights in enumerate(lefts):
                left.fetch(s * MMA_ATOM_M, query, weights)
            state.product.accumulate(accs, lefts, peer_columns, query)

    @cute.jit
    def mainloop_shared_keys(
        self, order: BackwardTileScheduler, queries: QueryStages, tiles: BackwardSmem, workspace: DqWorkspace,
        kv_block: KvBlock, scales: SoftmaxScale,
        score_pipeline: ScorePipeline,
    ):  # fmt: skip
        """Run the mainloop where four warps share the columns of 32 keys.

        Every warp computes the scores of a single slab of keys and half of the queries. Then the warp adds a quarter of
        the columns of two slabs' dK and dV. At the end dK and dV go to the place of K and V in shared memory.
        """
        k, v, weights = tiles.k, tiles.v, tiles.weights
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        part, first_slab = warp % self.parts, warp // self.parts * SLABS
        slab, half = first_slab + part // 2, part % 2
        state = self.make_warp_state(k, slab, half, part)
        dq_product = self.make_dq_product(tiles, workspace, warp)
        key = kv_block.tile.block * self.tile_n + slab * MMA_ATOM_M + lane // 4
        column, scale_log2 = lane % 4 * 2 + half * HALF, score_pipeline.scales(scales).log2
        coord = ScoreCoord(order.blocks.sizes, self.tile_m, key, column, kv_block.tile.sequence, None, transposed=True)
        left = sm80.LdmatrixView.create(weights, self.element.dtype, "A", first_row=first_slab * MMA_ATOM_M)

        query_range = order.blocks.query_blocks(kv_block.tile)
        num_steps = query_range.total(kv_block.group)
        step = query_range.first(kv_block.first_head, num_steps > 0)
        queries.load_q(step.head, step.block, Int32(0))
        cute.arch.cp_async_commit_group()
        queries.load_do(step.head, step.block, Int32(0))
        for i in cutlass.range(num_steps, unroll=1):
            next_step = query_range.after(step, i + 1 < num_steps)
            block = (kv_block.heads_before + step.head) * workspace.num_m_blocks + step.block
            zero, context = fragments.zero_of(i), StepContext(score_pipeline, coord, query_range, step)
            q, do = queries.q.at_offset(zero), queries.do.at_offset(zero)
            step_tiles = BackwardSmem(k.at_offset(zero), v.at_offset(zero), weights.at_offset(zero))
            dS, P = step_tiles.weights, step_tiles.weights.at_offset(weights.bytes)
            self.compute_p_and_ds(state, queries, step_tiles, q, do, context, scale_log2, slab, half)
            cute.arch.sync_threads()
            columns, weights_of = state.columns.retarget(q, True), left.retarget(dS, False)
            self.accumulate_all(state, state.dK, weights_of, columns)
            cute.arch.sync_threads()  # no warp reads this Q any more
            if i + 1 < num_steps:
                queries.load_q(next_step.head, next_step.block, Int32(0))
            cute.arch.cp_async_commit_group()
            self.accumulate_all(state, state.dV, weights_of.rebase(P), columns.rebase(do))
            cute.arch.sync_threads()  # no warp reads this dO any more
            if i + 1 < num_steps:
                queries.load_do(next_step.head, next_step.block, Int32(0))
            dq_product.add(zero, block, self.accumulation_rank(order, kv_block.tile.block, query_range, step))
            step = next_step
        sm80.wait_for_copies()
        first_row = first_slab * MMA_ATOM_M + (fragments.zero_of(step.head) if self.elementwise else 0)
        self.store_dkdv(state, tiles, first_row, scales, score_pipeline, part)

    @cute.jit
    def compute_p_and_ds(
        self, state: WarpState, queries: QueryStages, tiles: BackwardSmem, q: sm80.SmemTile, do: sm80.SmemTile,
        context: StepContext,
        scale_log2: Float32, slab: Int32, half: Int32,
    ):  # fmt: skip
        """Write dS and P of a slab of keys and half of the queries to shared memory, once Q and dO have landed."""
        keys, rows = state.keys.retarget(tiles.k, False), state.rows.retarget(q, False)
        S, dP = (sm80.accumulator(HALF),), (sm80.accumulator(HALF),)
        sm80.wait_for_copies(1)  # wait for Q
        state.product.scores(S, keys, rows)
        sm80.wait_for_copies()  # wait for dO
        state.product.scores(dP, keys.rebase(tiles.v), rows.rebase(do))
        slab_stages = context.allocate_stages(1)
        P = self.compute_p(S, queries.row_stats(0, Int32(0), half * HALF), context, slab_stages, 0, scale_log2)
        dS = self.compute_ds(S, dP, queries.row_stats(1, Int32(0), half * HALF), context, slab_stages)
        sm80.store_operand(dS[0], tiles.weights, slab * MMA_ATOM_M, half * HALF)
        sm80.store_operand(P[0], tiles.weights.at_offset(tiles.weights.bytes), slab * MMA_ATOM_M, half * HALF)

    def accumulate_all(
        self, state: WarpState, accs: sm80.Accumulators, left: sm80.LdmatrixView, columns: sm80.LdmatrixView
    ) -> None:
        """Add a block of queries to the warp's columns: dV += P^T dO or dK += dS^T Q."""
        lefts = tuple(sm80.allocate_fragment(self.element.dtype) for _ in accs)
        for query in range(0, self.tile_m, MMA_ATOM_M):
            for s, weights in enumerate(lefts):
                left.fetch(s * MMA_ATOM_M, query, weights)
            state.product.accumulate(accs, lefts, columns, query)
