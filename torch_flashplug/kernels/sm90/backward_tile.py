"""Backward for Hopper of sequences that fit into a single tile: dQ, dK, dV and the bias gradient in one kernel.

Vision models attend inside windows: thousands of sequences with at most 64 queries and 64 keys, which share a bias. A
single warpgroup holds all scores of such a sequence in registers. A row of the tile is a whole row of the scores, so
delta is rowsum(P * dP). Neither O nor a preprocessing kernel for the row statistics is needed. Every operand is read
once and every gradient is written once, without a workspace.

A CTA owns a single head and a range of the batch. The mainloop visits the sequences of the range while TMA loads the
next sequence. dS is summed over the range in registers. The sum is the gradient of a bias shared by the batch. An SM
holds two CTAs: one multiplies while the other waits. Sums have the same order in every run.
"""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ...registry.kernel_spec import SINGLE_TILE, HopperSpec
from ..backward.dbias_reduce import write_pair
from ..backward.pre_post_process import LOST, by_query, exponentiate, softmax_backward
from ..call_args.kernel_call import KernelArgs, KernelCall, SoftmaxScale
from ..features.base import KernelFeatures
from ..primitives import fragments, sm90
from ..score_stages.pipeline import ScoreCoord, ScoreLayout, ScorePipeline
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import Tile
from .common import TmaOperands

TILE_M, TILE_N = SINGLE_TILE  # largest numbers of queries and keys of a sequence
P, DS = 0, 1  # buffers of the weights in shared memory


class TileBarrier(enum.IntEnum):
    """Named barriers of the consumer warpgroups; barrier 0 is `sync_threads`."""

    CONSUMERS = 1  # all warps of the consumer warpgroup


@dataclass(frozen=True)
class TileSmem:
    """Buffers of a CTA in shared memory."""

    q: cute.Tensor  # (TILE_M, D, stage)
    k: cute.Tensor  # (TILE_N, D, stage)
    v: cute.Tensor  # (TILE_N, Dv, stage)
    do: cute.Tensor  # (TILE_M, Dv, stage)
    weights: cute.Tensor  # (queries, keys, P or dS); later dV and dK on the way to global memory
    staging: cute.Tensor  # (64, D): dQ on the way to global memory


@dataclass(frozen=True)
class SequenceRange:
    """Sequences of a CTA: a single head, and the batch indices from `begin` to before `end`."""

    head: Int32
    range_idx: Int32  # index of the range
    begin: Int32
    end: Int32
    sizes: SeqlenInfo

    @staticmethod
    @cute.jit
    def of_cta(heads: Int32, batches: Int32, ranges: Int32, sizes: SeqlenInfo) -> SequenceRange:
        """Return the range of this CTA. `ranges` is the number of ranges of the batch."""
        range_idx, head = cute.arch.block_idx()[0] // heads, cute.arch.block_idx()[0] % heads
        length = cute.ceil_div(batches, ranges)
        begin = cutlass.min(range_idx * length, batches)
        return SequenceRange(head, range_idx, begin, cutlass.min(begin + length, batches), sizes)

    def tile(self, batch: Int32) -> Tile:
        """Return the only tile of a sequence."""
        return Tile(Int32(0), self.head, batch, self.sizes, Int32(1))


@dataclass(frozen=True)
class TileConsumerState:
    """Products of the consumer warpgroup, with their operands and accumulators."""

    scores: sm90.WgmmaProduct  # S = Q K^T, dP = dO V^T
    over_queries: sm90.WgmmaProduct  # dK = dS^T Q, dV = P^T dO
    over_keys: sm90.WgmmaProduct  # dQ = dS K
    rows: tuple[cute.Tensor, cute.Tensor]  # Q and dO as left operands of `scores`: (MMA, 1, K, stage)
    keys: tuple[cute.Tensor, cute.Tensor]  # K and V as right operands of `scores`: (MMA, 1, K, stage)
    weights: cute.Tensor  # P^T and dS^T as left operands of `over_queries`: (MMA, 1, K, P or dS)
    # Q, dO and K as right operands of dK, dV and dQ: (MMA, 1, K, stage)
    columns: tuple[cute.Tensor, cute.Tensor, cute.Tensor]
    S: cute.Tensor  # (64, 64) scores, then P, then dS
    dP: cute.Tensor
    packed: fragments.OperandA  # P, then dS, in 16 bits
    dQ: cute.Tensor
    dK: cute.Tensor
    dV: cute.Tensor
    sum: cute.Tensor  # (64, 64) sum of dS over the sequences of the range

    def multiply_scores(self, stage: Int32) -> None:
        """Start S and dP of a stage; one committed group each."""
        for i, acc in enumerate((self.S, self.dP)):
            left, right = self.rows[i][None, None, None, stage], self.keys[i][None, None, None, stage]
            self.scores.issue(acc, left, right, accumulate=False)

    def multiply_sums(self, stage: Int32) -> None:
        """Start dV, dK and dQ of a stage; one committed group each."""
        q, do, k = (x[None, None, None, stage] for x in self.columns)
        self.over_queries.issue(self.dV, self.weights[None, None, None, P], do, accumulate=False)
        self.over_queries.issue(self.dK, self.weights[None, None, None, DS], q, accumulate=False)
        self.over_keys.issue(self.dQ, self.packed.fragment, k, accumulate=False)


class TileBackwardSm90(KernelCall, kind="tilebwd"):
    """Builder of the single-tile backward kernel of a spec.

    Computes dQ, dK, dV and, if requested, the bias gradient, deterministically.

    Inputs: q, k, v and do (B, H, S, D) with at most 64 queries and 64 keys, lse (B, H, Sq) in fp32. Outputs: dq, dk and
    dv, and dbias (ranges or B, H, Sq, Sk).

    Warp roles: warpgroup 0 gives its registers away, and its warp 0 is the producer warp. Warpgroup 1 is the consumer.

    Pipelines (producer -> consumer, stages):
    - Q, K, V and dO of a sequence together: producer warp -> the consumer warps, `stages` (2) stages.
    - Score stages add pipelines of their own, for example for bias tiles.

    Shared memory: the stages of Q, K, V and dO, the buffers of P and dS, the staging buffer of dQ, the mbarriers and
    the buffers of the score stages. dV and dK leave through the buffers of P and dS.
    """

    def __init__(self, spec: HopperSpec):
        self.spec, self.features = spec, KernelFeatures.from_spec(spec)
        self.element, self.d, self.stages = self.features.element, spec.d, spec.stages
        self.producer_registers, self.consumer_registers = spec.register_split
        self.score_layout = ScoreLayout(self.element, 1, TILE_N)

    @property
    def input(self) -> sm90.TmaLoadConfig:
        """TMA load configuration of each of Q, K, V and dO: whole sequences."""
        return sm90.TmaLoadConfig.create(self.element, TILE_M, self.d, self.stages)

    @cute.jit
    def launch(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the preprocessing kernels of the features, then the kernel."""
        self.features.launch_preprocess(call, stream)
        operands = TmaOperands.create(
            q=self.input.tma(sm90.rows_first(call.q)),
            k=self.input.tma(sm90.rows_first(call.k)),
            v=self.input.tma(sm90.rows_first(call.v)),
            do=self.input.tma(sm90.rows_first(call.do)),
            dq=sm90.output_tma(self.element, sm90.rows_first(call.dq), self.d),
            dk=sm90.output_tma(self.element, sm90.rows_first(call.dk), self.d),
            dv=sm90.output_tma(self.element, sm90.rows_first(call.dv), self.d),
        )
        score_pipeline = self.features.score_pipeline(call).tma(self.score_layout)
        self.kernel(operands, call.lse, call.scales, call.ranges, call.dbias_any_dtype, score_pipeline).launch(
            grid=(call.q.shape[1] * call.ranges, 1, 1),
            block=(2 * sm90.WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.spec.ctas_per_sm,
            preferred_smem_carveout=100,  # percent; without a value the DSL would query a GPU
        )

    def allocate_smem(self, smem: cutlass.memory.SmemAllocator) -> TileSmem:
        """Allocate all buffers of a CTA."""
        dtype, operands = self.element.dtype, tuple(self.input.buffer(smem) for _ in range(4))
        layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (TILE_M, TILE_M, TILE_N), dtype, len((P, DS)))
        weights = smem.allocate_tensor(dtype, layout.outer, 1024, layout.inner)
        rows = sm90.slab_layout(dtype, TILE_M, self.d)
        return TileSmem(*operands, weights, smem.allocate_tensor(dtype, rows.outer, 1024, rows.inner))

    @cute.kernel
    def kernel(
        self,
        operands: TmaOperands,
        mLSE: cute.Tensor,
        scales: SoftmaxScale,
        ranges: Int32,
        mdBias: cute.Tensor | None,
        score_pipeline: ScorePipeline,
    ):
        """Assign the warp roles: warp 0 loads, and the consumer warpgroup multiplies."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        pipeline = sm90.Pipeline.create(smem, self.stages, 4 * self.input.bytes)
        score_pipeline = score_pipeline.allocate_smem(smem, self.score_layout)
        shared = self.allocate_smem(smem)
        Sq, _, heads, batches = operands.tensor("q").shape
        Sk = operands.tensor("k").shape[0]
        sequence_range = SequenceRange.of_cta(heads, batches, ranges, SeqlenInfo(Sq, Sk))
        sm90.start_cta(
            warp_idx,
            (*operands.atoms, *score_pipeline.atoms),
            (sm90.PipelineWarps(pipeline, sm90.WARPGROUP // sm90.WARP), *score_pipeline.pipelines),
        )
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                loads = operands.with_smem(q=shared.q, k=shared.k, v=shared.v, do=shared.do)
                self.load(loads, pipeline, sequence_range, score_pipeline)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(operands, shared, pipeline, sequence_range, mLSE, scales, mdBias, score_pipeline)

    @cute.jit
    def load(
        self,
        loads: tuple[sm90.TmaOperand, ...],
        pipeline: sm90.Pipeline,
        sequence_range: SequenceRange,
        score_pipeline: ScorePipeline,
    ):
        """Run the producer warp: load Q, K, V and dO of every sequence, and the data of the score stages."""
        for batch in cutlass.range(sequence_range.begin, sequence_range.end, unroll=1):
            tile, sequence_count = sequence_range.tile(batch), batch - sequence_range.begin
            pipeline.producer_acquire(sequence_count)
            stage, arrival = pipeline.stage_index(sequence_count), pipeline.arrival(sequence_count)
            for x in loads:
                tXsX, tXgX = tile.rows(x).tiles((TILE_M, self.d), (None, 0))
                cute.copy(x.atom, tXgX[None, 0], tXsX[None, stage], tma_bar_ptr=arrival)
            score_pipeline.begin_tile_load(tile, tile.head).load(Int32(0), sequence_count)

    def make_consumer_state(self, shared: TileSmem) -> TileConsumerState:
        """Return the products, operands and accumulators of the consumer warpgroup."""
        dtype, thread = self.element.dtype, cute.arch.thread_idx()[0] % sm90.WARPGROUP
        scores, over_queries, over_keys = (
            sm90.WgmmaProduct.create(lambda x=x: sm90.make_mma(dtype, *x))
            for x in ((TILE_N, "rows", "rows"), (self.d, "columns", "columns"), (self.d, "registers", "columns"))
        )
        scores_mma, queries_mma, keys_mma = (x.add.get_slice(thread) for x in (scores, over_queries, over_keys))
        S, dP, total = (sm90.zeros(scores_mma, (TILE_M, TILE_N)) for _ in range(3))  # (TILE_M, TILE_N) each
        dK, dV = (sm90.zeros(queries_mma, (TILE_N, self.d)) for _ in range(2))  # (TILE_N, D) each
        right = tuple(
            mma.make_fragment_B(mma.partition_B(sm90.transposed(x)))
            for mma, x in ((queries_mma, shared.q), (queries_mma, shared.do), (keys_mma, shared.k))
        )
        return TileConsumerState(
            scores,
            over_queries,
            over_keys,
            tuple(scores_mma.make_fragment_A(scores_mma.partition_A(x)) for x in (shared.q, shared.do)),
            tuple(scores_mma.make_fragment_B(scores_mma.partition_B(x)) for x in (shared.k, shared.v)),
            queries_mma.make_fragment_A(queries_mma.partition_A(sm90.transposed(shared.weights))),
            right,
            S,
            dP,
            fragments.OperandA.create(S, self.element),
            sm90.zeros(keys_mma, (TILE_M, self.d)),
            dK,
            dV,
            total,
        )

    @cute.jit
    def consume(
        self, operands: TmaOperands, shared: TileSmem, pipeline: sm90.Pipeline,
        sequence_range: SequenceRange, mLSE: cute.Tensor, scales: SoftmaxScale, mdBias: cute.Tensor | None,
        score_pipeline: ScorePipeline,
    ):  # fmt: skip
        """Run the consumer warpgroup: compute the gradients of every sequence of the range."""
        thread = cute.arch.thread_idx()[0] % sm90.WARPGROUP
        lane = thread % sm90.WARP
        row, column = thread // sm90.WARP * sm90.ROWS_PER_WARP + lane // 4, lane % 4 * 2
        state, score_pipeline = self.make_consumer_state(shared), score_pipeline.allocate_registers(TILE_N)
        scale_log2 = score_pipeline.scales(scales).log2
        state.sum.fill(0.0)
        lse = self.lse_of(mLSE, sequence_range, sequence_range.begin, row)
        for batch in cutlass.range(sequence_range.begin, sequence_range.end, unroll=1):
            tile, sequence_count = sequence_range.tile(batch), batch - sequence_range.begin
            tile_stages = score_pipeline.set_tile(
                ScoreCoord(sequence_range.sizes, TILE_N, row, column, tile.sequence, tile.head)
            )
            tile_stages.begin(Int32(0), masked=True)
            pipeline.consumer_wait(sequence_count)
            warpgroup.fence()
            state.multiply_scores(pipeline.stage_index(sequence_count))
            tile_stages.prepare_stage(Int32(0), masked=True)
            warpgroup.wait_group(1)
            tile_stages.apply(fragments.rows_and_columns(state.S), Int32(0), masked=True, count=sequence_count)
            exponentiate(by_query(state.S), (lse[0], lse[1]), scale_log2)
            lse.store(self.lse_of(mLSE, sequence_range, cutlass.min(batch + 1, sequence_range.end - 1), row).load())
            # Wait until the previous gradients have left shared memory: first those of this warp, then of all warps.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            sm90.sync_warpgroup(TileBarrier.CONSUMERS, Int32(0))
            state.packed.convert(state.S)
            self.write_weights(state, shared, P)
            warpgroup.wait_group(0)
            softmax_backward(by_query(state.S), by_query(state.dP), row_sums(state.S, state.dP), by_query(state.S))
            state.sum.store(state.sum.load() + state.S.load())
            state.packed.convert(state.S)
            self.write_weights(state, shared, DS)
            cute.arch.fence_proxy("async.shared", space="cta")  # Products read shared memory written by stmatrix.
            sm90.sync_warpgroup(TileBarrier.CONSUMERS, Int32(0))
            warpgroup.fence()
            state.multiply_sums(pipeline.stage_index(sequence_count))
            if cutlass.const_expr(mdBias is not None):
                # The batch does not share the bias.
                if mdBias.shape[0] > cute.arch.grid_dim()[0] // operands.tensor("q").shape[2]:
                    write_plane(mdBias[batch, sequence_range.head, None, None], state.sum, row, column)
                    state.sum.fill(0.0)
            warpgroup.wait_group(0)
            pipeline.consumer_release(sequence_count)
            sm90.sync_warpgroup(TileBarrier.CONSUMERS, Int32(0))  # No warp reads the weights any longer.
            dq, dk, dv = operands.with_smem(
                dq=shared.staging, dk=self.staging_in(shared, DS), dv=self.staging_in(shared, P)
            )
            self.store(state.dV, state.over_queries, Float32(1.0), tile.rows(dv))
            self.store(state.dK, state.over_queries, scales.natural, tile.rows(dk))
            self.store(state.dQ, state.over_keys, scales.natural, tile.rows(dq))
        if cutlass.const_expr(mdBias is not None):
            if mdBias.shape[0] == cute.arch.grid_dim()[0] // operands.tensor("q").shape[2]:
                write_plane(mdBias[sequence_range.range_idx, sequence_range.head, None, None], state.sum, row, column)
        # Shared memory must stay allocated until the last store has read from it.
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def lse_of(self, mLSE: cute.Tensor, sequence_range: SequenceRange, batch: Int32, row: Int32) -> cute.Tensor:
        """Return LSE * log2(e) of this thread's two rows; inf if a row does not exist or sees no key."""
        lse = cute.make_rmem_tensor((2,), Float32)  # (2,)
        for r in cutlass.range_constexpr(2):
            lse[r] = Float32.inf
            if row + 8 * r < sequence_range.sizes.Sq:
                lse_log2 = mLSE[batch, sequence_range.head, row + 8 * r] * fragments.LOG2_E
                lse[r] = cutlass.select_(abs(lse_log2) > LOST, Float32.inf, lse_log2)
        return lse

    def write_weights(self, state: TileConsumerState, shared: TileSmem, buffer: int) -> None:
        """Write P or dS from `packed` to shared memory, as (queries, keys)."""
        thread = cute.arch.thread_idx()[0] % sm90.WARPGROUP
        matrices = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.element.dtype)
        copy = cute.make_tiled_copy_C(matrices, state.scores.add).get_slice(thread)
        pairs = cute.recast_ptr(state.packed.pairs.iterator, dtype=self.element.dtype)
        source = copy.retile(cute.make_tensor(pairs, state.S.layout))
        cute.copy(copy, source, copy.partition_D(shared.weights[None, None, buffer]))

    def staging_in(self, shared: TileSmem, buffer: int) -> cute.Tensor:
        """Return buffer `buffer` of the weights (P or DS) as a staging buffer (64, D) of a gradient."""
        layout = sm90.slab_layout(self.element.dtype, TILE_M, self.d)
        start = shared.weights[None, None, buffer].iterator
        return cute.make_tensor(cute.recast_ptr(start, layout.inner, dtype=self.element.dtype), layout.outer)

    @cute.jit
    def store(self, acc: cute.Tensor, product: sm90.WgmmaProduct, factor: Float32, out: sm90.TmaOperand):
        """Store an accumulator in 16 bits through shared memory; each warp stores its 16 rows."""
        rX = cute.make_rmem_tensor_like(acc, self.element.dtype)
        rX.store((acc.load() * factor).to(self.element.dtype))
        sm90.store_slabs(rX, out.s, out, Int32(0), product.add)


@cute.jit
def row_sums(P: cute.Tensor, dP: cute.Tensor) -> tuple[Float32, Float32]:
    """Return delta = rowsum(P * dP) of this thread's two rows, each shared by four threads."""
    weights, gradients = fragments.rows_and_columns(P), fragments.rows_and_columns(dP)
    sums = cute.make_rmem_tensor((2,), Float32)
    for r in cutlass.range_constexpr(2):
        parts = [weights[r, c] * gradients[r, c] for c in range(4)]
        for c in cutlass.range_constexpr(4, cute.size(weights, mode=[1])):
            parts[c % 4] = parts[c % 4] + weights[r, c] * gradients[r, c]
        sums[r] = fragments.quad_reduce((parts[0] + parts[1]) + (parts[2] + parts[3]), operator.add)
    return sums[0], sums[1]


@cute.jit
def write_plane(plane: cute.Tensor, acc: cute.Tensor, row: Int32, column: Int32):
    """Write an accumulator to a plane (Sq, Sk) in global memory.

    Args:
        row: first row of the thread; the second is eight rows below.
        column: first column of the thread.
    """
    values = fragments.rows_and_columns(acc)
    for r in cutlass.range_constexpr(2):
        if row + 8 * r < plane.shape[0]:
            for c in cutlass.range_constexpr(0, cute.size(values, mode=[1]), 2):
                write_pair(plane, row + 8 * r, column + fragments.column_of(c), values[r, c], values[r, c + 1])
