"""Decode with shared values for Hopper: V is the first columns of K, as in absorbed MLA.

K is read once. V is a transposed view of K in shared memory. O of 512 columns takes the registers of two warpgroups.
Each warpgroup has half of the columns of O. The scores of a KV block are computed once: the warpgroups take KV
blocks in turn, and pass their probabilities through shared memory (FlashMLA, DeepSeek 2025).

Steps of a pair of KV blocks in each warpgroup:
1. Compute the scores of the own block, and publish the maxima of the rows. Barrier MAXIMA follows.
2. Convert scores to probabilities, relative to the maximum of both blocks and all blocks before.
3. Add the product of the own probabilities, in registers, and the own block, for the own columns of O.
4. Publish the probabilities in 16 bits. Barrier PROBABILITIES follows.
5. Add the product of the opposite warpgroup's probabilities and block.

The last block of an odd number of blocks has no pair: both warpgroups compute the scores, and no barrier is needed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from ...registry.kernel_spec import L2_BYTES, ROWS_PER_WARPGROUP
from ..call_args.kernel_call import KernelArgs, SoftmaxScale
from ..decode.pack_gqa import DecodeTile
from ..decode.split_kv import SplitKvCombine, WorkspacePartials, wait_for_previous_kernel
from ..features.shared_values import KvBlocks, add_extra_logits, zero_rows
from ..mainloop.softmax import ROWS as ROWS_PER_THREAD
from ..mainloop.softmax import OnlineSoftmax, row_reduce
from ..primitives import fragments, sm90
from ..score_stages.pipeline import ScoreCoord, ScorePipeline
from ..tiling.block_iterator import BlockIterator, BoundBlocks, SplitKvRange
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import TileAddressing
from .common import TmaOperands
from .decode import DecodeGmem, DecodeSm90, SoftmaxRowStats

ROWS, ROWS_PER_WARP = ROWS_PER_WARPGROUP, sm90.ROWS_PER_WARP
WARPGROUPS = 2


class SharedDecodeBarrier(enum.IntEnum):
    """Named barriers of the consumer warpgroups; barrier 0 is `sync_threads`."""

    Q_LOADED = 1
    MAXIMA = 2  # the maxima of both blocks of a pair, or at the end the sums, are in shared memory
    PROBABILITIES = 3  # the probabilities of both blocks of a pair are in shared memory
    KEYS_READ = 4  # KEYS_READ + w: warpgroup w has computed the scores; undefined rows then become zeros
    ZEROS_WRITTEN = 6  # the undefined rows of a block of both warpgroups are zeros


@dataclass(frozen=True)
class SharedDecodeSmem:
    """Operands and exchanged values in shared memory."""

    q: cute.Tensor  # (64, D, 1)
    k: cute.Tensor  # (tile_n, D, stage)
    p: cute.Tensor  # (64, tile_n, stage): probabilities of the block in the stage
    row_values: cute.Tensor  # (64, warpgroup) fp32


@dataclass(frozen=True)
class SharedDecodeWork:
    """Part of the problem of a CTA, and the pipeline from the producer warp to both consumer warpgroups."""

    decode_tile: DecodeTile
    block_iterator: BoundBlocks
    pipeline: sm90.Pipeline
    kv_blocks: KvBlocks

    def kv_range(self) -> SplitKvRange:
        """Return the KV blocks of the CTA."""
        return self.decode_tile.kv_range(self.block_iterator)


@dataclass(frozen=True)
class PairedSoftmax(OnlineSoftmax):
    """Online softmax of a warpgroup with every second KV block. Both warpgroups have the same running maximum.

    `row_sum` has the sum of the own blocks.
    """

    row_values: cute.Tensor  # (64, warpgroup) fp32 in shared memory
    wg: Int32
    row: Int32  # first row of the thread; the second is eight rows below

    @classmethod
    def pair(cls, softmax: OnlineSoftmax, row_values: cute.Tensor, wg: Int32, row: Int32) -> PairedSoftmax:
        """Return the softmax of a warpgroup of the pair."""
        state = {field.name: getattr(softmax, field.name) for field in fields(OnlineSoftmax)}
        return cls(**state, row_values=row_values, wg=wg, row=row)

    @cute.jit
    def exchange(self, values: cute.Tensor):
        """Replace the values (2,) of the thread's rows by the values of the opposite warpgroup."""
        if cute.arch.lane_idx() % 4 == 0:
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                self.row_values[self.row + 8 * r, self.wg] = values[r]
        sm90.sync_warpgroups(SharedDecodeBarrier.MAXIMA, WARPGROUPS)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            values[r] = self.row_values[self.row + 8 * r, 1 - self.wg]

    @cute.jit
    def step_of_pair(self, S: cute.Tensor):
        """Convert the scores (2, columns) of the own block to probabilities, and update state and `correction`."""
        own, other = (cute.make_rmem_tensor((ROWS_PER_THREAD,), Float32) for _ in range(2))
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            own[r] = fragments.quad_reduce(row_reduce(S, r, cute.arch.fmax), cute.arch.fmax)
            other[r] = own[r]
        self.exchange(other)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.convert_row(S, r, cute.arch.fmax(own[r], other[r]), Float32(1.0))

    @cute.jit
    def step_of_single(self, S: cute.Tensor):
        """Convert the scores of a block of both warpgroups. Only the first warpgroup adds to the sum."""
        share = cutlass.select_(self.wg == 0, Float32(1.0), Float32(0.0))
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            top = fragments.quad_reduce(row_reduce(S, r, cute.arch.fmax), cute.arch.fmax)
            self.convert_row(S, r, top, share)

    @cute.jit
    def convert_row(self, S: cute.Tensor, r: cutlass.Constexpr[int], top: Float32, share: Float32):
        """Convert a row of scores to probabilities.

        Args:
            S: scores (2, columns).
            r: number of the row.
            top: largest score of the blocks of the step.
            share: factor of the sum of the probabilities.
        """
        old_max, new_max = self.row_max[r], cute.arch.fmax(self.row_max[r], top)
        self.row_max[r] = new_max
        base = 0.0 if new_max == -Float32.inf else new_max
        block_sum = self.exponentiate_row(S, r, base)
        self.correction[r] = cute.math.exp2((old_max - base) * self.scale_log2, fastmath=True)
        self.row_sum[r] = self.row_sum[r] * self.correction[r] + block_sum * share

    @cute.jit
    def join_sums(self):
        """Add the sums of the opposite warpgroup. Afterwards each thread has a quarter of the sum of a row."""
        own, other = (cute.make_rmem_tensor((ROWS_PER_THREAD,), Float32) for _ in range(2))
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            own[r] = self.total(r)
            other[r] = own[r]
        self.exchange(other)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            # `total` adds up four lanes. A quarter is exact.
            self.row_sum[r] = (own[r] + other[r]) * 0.25


@dataclass(frozen=True)
class SharedDecodeState:
    """State of a consumer warpgroup."""

    wg: Int32
    softmax: PairedSoftmax
    scores: sm90.StageProduct
    sums: sm90.StageProduct  # with the own probabilities, in registers
    other_sums: sm90.WgmmaProduct  # with the opposite warpgroup's probabilities, in shared memory
    other_p: cute.Tensor  # (MMA, 1, tile_n/16, stage)
    own_p: fragments.OperandA
    p_copy: object  # tiled copy of a thread from registers to shared memory
    p_smem: cute.Tensor  # destination of the copy, (.., stage)
    k: cute.Tensor  # (tile_n, D, stage)


class SharedDecodeSm90(DecodeSm90):
    """Builder of the Hopper decode kernel with shared values of a spec.

    Computes O = softmax(scale * Q K^T) K[:, :Dv] and the LSE for few query rows. The argument v is not read.

    Warp roles: two consumer warpgroups with the same 64 rows, each with half of the columns of O; a producer
    warpgroup with few registers, where the first warp loads.

    Pipelines (producer -> consumer, stages): K, producer warp -> all consumer warps, `stages` stages of tile_n keys
    each. A warpgroup reads every stage, as K or only as V. Q is loaded by the consumer warpgroups with plain loads.

    Shared memory: Q (64, D), the stages of K, the probabilities, and a value of each row and warpgroup. If K has
    columns beyond V, then the probabilities of a block replace the columns once the scores are complete.
    """

    @property
    def inputs(self) -> tuple[sm90.TmaLoadConfig, sm90.TmaLoadConfig]:
        """Shared-memory configurations of Q, loaded with plain loads, and of K, loaded by TMA."""
        return (
            sm90.TmaLoadConfig.create(self.element, ROWS, self.d, 1),
            sm90.TmaLoadConfig.create(self.element, self.tile_n, self.d, self.stages),
        )

    @cute.jit
    def launch(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the decode kernel and, with several splits, the `SplitKvCombine` kernel."""
        B, Hq, Sq, Dv = call.o.shape
        Hkv = call.k.shape[1]
        addressing, score_pipeline = self.features.tile_addressing(call), self.features.score_pipeline(call)
        kv_blocks = self.features.kv_blocks(call)
        operands = TmaOperands.create(k=self.key_boxes(addressing.rows_first(call.k), kv_blocks.box_rows(self.tile_n)))
        m_tiles = addressing.max_blocks_of_rows(Hq // Hkv * Sq, self.tile_m)
        partials = WorkspacePartials(call.partials.iterator, B * Hq * Sq, call.splits, Dv)
        self.kernel(
            operands,
            DecodeGmem(call.q, call.o, call.lse, partials.start),
            call.scale,
            call.splits,
            addressing,
            self.features.block_iterator(call),
            score_pipeline,
            kv_blocks,
        ).launch(
            grid=(m_tiles * call.splits * Hkv * B, 1, 1),
            block=(self.spec.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            # percent; without a value the DSL would query a GPU, and the build machine may have none.
            preferred_smem_carveout=100,
            use_pdl=True,
        )
        if call.splits > 1:
            scale = score_pipeline.natural_scale(call.scale)
            combine = SplitKvCombine(self.element)
            combine(call.o, call.lse, partials, scale, score_pipeline, stream, call.split_size)

    def key_boxes(self, mK: cute.Tensor, rows: int) -> tuple[cute.CopyAtom, cute.Tensor]:
        """Return the atom to load `rows` rows of a block of K (rows, columns, heads, batch), and the coordinates of K.

        A part of a block lies in the same place as in the whole block.
        """
        stage = cute.slice_(self.inputs[1].layout, (None, None, 0))
        box = (rows, self.d)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mK, cute.composition(stage, box), box)

    @cute.kernel
    def kernel(
        self,
        operands: TmaOperands,
        gmem: DecodeGmem,
        scale: Float32,
        splits: Int32,
        addressing: TileAddressing,
        block_iterator: BlockIterator,
        score_pipeline: ScorePipeline,
        kv_blocks: KvBlocks,
    ):
        """Assign the warp roles."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        q, k = self.inputs
        pipeline = k.create_pipeline(smem)
        row_values = smem.allocate_tensor(Float32, cute.make_layout((ROWS, WARPGROUPS)), 16)
        mK = operands.tensor("k")
        sizes = SeqlenInfo(gmem.q.shape[2], mK.shape[0])
        decode_tile = DecodeTile.of_cta(addressing, sizes, gmem.q.shape[1], mK.shape[2], self.tile_m, splits)
        bound_iterator = block_iterator.bind(decode_tile.sizes, self.tile_m, self.tile_n).allocate_smem(smem)
        work = SharedDecodeWork(decode_tile, bound_iterator, pipeline, kv_blocks)
        sQ, sK = q.buffer(smem), k.buffer(smem)
        shared = SharedDecodeSmem(sQ, sK, self.probabilities(smem, sK), row_values)
        sm90.start_cta(warp_idx, operands.atoms, (sm90.PipelineWarps(pipeline, 4 * WARPGROUPS),))
        wait_for_previous_kernel()
        bound_iterator.scan(decode_tile)
        if warp_idx >= 4 * WARPGROUPS:
            cute.arch.setmaxregister_decrease(self.spec.register_split.producer)
            if warp_idx == 4 * WARPGROUPS:
                self.load(*operands.with_smem(k=shared.k), work, addressing)
        else:
            cute.arch.setmaxregister_increase(self.spec.register_split.consumer)
            self.consume(shared, work, gmem, scale, score_pipeline)

    def probabilities(self, smem: cutlass.memory.SmemAllocator, sK: cute.Tensor) -> cute.Tensor:
        """Return the probabilities in shared memory, (64, tile_n, stage).

        The columns of K beyond V are a box of as many bytes, if there are any.
        """
        layout = sm90.TmaLoadConfig.create(self.element, ROWS, self.tile_n, self.stages)
        if self.spec.shared_p_bytes:
            return layout.buffer(smem)
        box = cute.local_tile(sK, (self.tile_n, self.d - self.dv, self.stages), (0, self.dv // (self.d - self.dv), 0))
        start = cute.recast_ptr(box.iterator, layout.layout.inner, dtype=self.element.dtype)
        stage = cute.slice_(layout.layout.outer, (None, None, 0))
        strides = cute.make_layout(self.stages, stride=self.tile_n * self.d)
        return cute.make_tensor(start, cute.append(stage, strides))

    @cute.jit
    def load(self, k: sm90.TmaOperand, work: SharedDecodeWork, addressing: TileAddressing):
        """Run the producer warp: load K of the split's blocks."""
        decode_tile, kv_blocks = work.decode_tile, work.kv_blocks
        rows = kv_blocks.box_rows(self.tile_n)
        boxes = cute.local_tile(k.s, (rows, self.d), (None, 0, None))  # (rows, D, box, stage)
        head = replace(k, m=k.m[None, None, decode_tile.tile.kv_head, None], s=boxes)
        tKsK, tKgK = head.tiles((rows, self.d), (None, 0, None))  # (TMA, box, stage), (TMA, box of a page, page)
        kv_range, policy, pipeline = work.kv_range(), self.policy(k.m, addressing), work.pipeline
        for j in cutlass.range(kv_range.begin, kv_range.end, unroll=1):
            count = j - kv_range.begin
            stage, arrival = pipeline.stage_index(count), pipeline.arrival(count)
            pipeline.producer_acquire(count)
            for i in cutlass.range_constexpr(self.tile_n // rows):
                first_key = kv_range.nth(j) * self.tile_n + i * rows
                box, page = kv_blocks.locate(decode_tile, first_key, rows, k.m.shape[3])
                source, target = tKgK[None, box, page], tKsK[None, i, stage]
                cute.copy(k.atom, source, target, tma_bar_ptr=arrival, cache_policy=policy)

    def policy(self, mK: cute.Tensor, addressing: TileAddressing) -> Int64:
        """Return the L2 eviction policy of the loads of K (`DecodeSm90.policy`)."""
        _, D, heads, _ = mK.shape
        num_bytes = Int64(addressing.all_keys(mK)) * heads * addressing.batch(mK) * D * self.element.bytes
        exceeds_l2 = num_bytes > L2_BYTES[self.spec.arch]
        return Int64(cutlass.select_(exceeds_l2, Int64(sm90.EVICT_FIRST), Int64(sm90.EVICT_NORMAL)))

    @cute.jit
    def consume(
        self,
        shared: SharedDecodeSmem,
        work: SharedDecodeWork,
        gmem: DecodeGmem,
        scale: Float32,
        score_pipeline: ScorePipeline,
    ):
        """Run a consumer warpgroup: process 64 packed rows against the split's keys, for half of the columns of O."""
        decode_tile, tidx = work.decode_tile, cute.arch.thread_idx()[0]
        wg, thread = cute.arch.make_warp_uniform(tidx // sm90.WARPGROUP), tidx % sm90.WARPGROUP
        lane = thread % sm90.WARP
        row = thread // sm90.WARP * ROWS_PER_WARP + lane // 4
        scales = score_pipeline.scales(SoftmaxScale(scale * fragments.LOG2_E, scale))
        softmax = PairedSoftmax.pair(OnlineSoftmax.create(scales.log2, score_pipeline), shared.row_values, wg, row)
        state = self.consumer_state(shared, softmax, wg, thread)
        first_head, _ = decode_tile.unpack_row(Int32(0))
        coord = ScoreCoord(
            decode_tile.sizes, self.tile_n, decode_tile.first_row, lane % 4 * 2, decode_tile.tile.sequence, first_head
        )
        tile_stages = score_pipeline.allocate_registers(self.tile_n).set_tile(coord)

        self.fetch_queries(gmem.q, shared.q[None, None, 0], decode_tile, decode_tile.first_row)
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads shared memory written by plain stores
        sm90.sync_warpgroups(SharedDecodeBarrier.Q_LOADED, WARPGROUPS)
        kv_range = work.kv_range()
        blocks = kv_range.end - kv_range.begin
        for pair in cutlass.range(blocks // WARPGROUPS, unroll=1):
            self.step_of_pair(state, work, tile_stages, kv_range, pair * WARPGROUPS)
        if blocks % WARPGROUPS != 0:
            self.step_of_single(state, work, tile_stages, kv_range, blocks - 1)
        softmax.join_sums()
        maxima, sums = softmax.finish_split(state.sums.values)
        row_stats = SoftmaxRowStats(maxima, sums, scales.natural)
        if decode_tile.splits == 1:  # otherwise, `SplitKvCombine` adds the extra logits
            add_extra_logits(score_pipeline, decode_tile, row, state.sums.values, row_stats)
        self.store_rows(decode_tile, (row, wg), state.sums.values, row_stats, shared.k, gmem, clustered=False)

    def consumer_state(
        self, shared: SharedDecodeSmem, softmax: PairedSoftmax, wg: Int32, thread: Int32
    ) -> SharedDecodeState:
        """Return the products and buffers of a consumer warpgroup."""
        dtype = self.element.dtype
        times_k = sm90.WgmmaProduct.create(lambda: sm90.make_mma(dtype, self.tile_n, "rows", "rows"))
        times_v, times_v_from_smem = (
            sm90.WgmmaProduct.create(lambda left=left: sm90.make_mma(dtype, self.warpgroup_dv, left, "columns"))
            for left in ("registers", "rows")
        )
        qk, pv, pv_from_smem = (x.add.get_slice(thread) for x in (times_k, times_v, times_v_from_smem))
        queries = qk.make_fragment_A(qk.partition_A(shared.q))[None, None, None, 0]
        keys = qk.make_fragment_B(qk.partition_B(shared.k))  # (MMA, 1, D/16, stage)
        own_columns = cute.local_tile(
            sm90.transposed(shared.k), (self.warpgroup_dv, self.tile_n, self.stages), (wg, 0, 0)
        )
        values = pv.make_fragment_B(pv.partition_B(own_columns))  # (MMA, 1, tile_n/16, stage)
        acc_S, acc_O = sm90.zeros(qk, (ROWS, self.tile_n)), sm90.zeros(pv, (ROWS, self.warpgroup_dv))
        own_p = fragments.OperandA.create(acc_S, self.element)
        matrices = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        p_copy = cute.make_tiled_copy_C(matrices, times_k.add).get_slice(thread)
        return SharedDecodeState(
            wg,
            softmax,
            scores=sm90.StageProduct(times_k, queries, keys, acc_S),
            sums=sm90.StageProduct(times_v, own_p.fragment, values, acc_O),
            other_sums=times_v_from_smem,
            other_p=pv_from_smem.make_fragment_A(pv_from_smem.partition_A(shared.p)),
            own_p=own_p,
            p_copy=p_copy,
            p_smem=p_copy.partition_D(shared.p),
            k=shared.k,
        )

    @cute.jit
    def step_of_pair(
        self, state: SharedDecodeState, work: SharedDecodeWork, tile_stages: ScorePipeline, kv_range: SplitKvRange,
        first: Int32,
    ):  # fmt: skip
        """Process blocks number `first` and `first` + 1 of the CTA. Each warpgroup computes the scores of a block."""
        pipeline, own, other = work.pipeline, first + state.wg, first + 1 - state.wg
        self.compute_scores(state, work, tile_stages, kv_range, own)
        # Behind barrier MAXIMA, both warpgroups read the zeros.
        self.zero_undefined_rows(state, work, kv_range, own, of_both=False)
        state.softmax.step_of_pair(state.scores.values)
        state.own_p.convert(state.scores.acc)
        state.softmax.rescale(state.sums.values)
        own_stage, other_stage = pipeline.stage_index(own), pipeline.stage_index(other)
        warpgroup.fence()
        state.sums.add(own_stage)
        pairs = cute.recast_ptr(state.own_p.pairs.iterator, dtype=self.element.dtype)
        source = state.p_copy.retile(cute.make_tensor(pairs, state.scores.acc.layout))
        cute.copy(state.p_copy, source, state.p_smem[None, None, None, own_stage])
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads shared memory written by stmatrix
        sm90.sync_warpgroups(SharedDecodeBarrier.PROBABILITIES, WARPGROUPS)
        pipeline.consumer_wait(other)
        state.other_sums.issue(
            state.sums.acc,
            state.other_p[None, None, None, other_stage],
            state.sums.right[None, None, None, other_stage],
            accumulate=True,
        )
        warpgroup.wait_group(1)
        pipeline.consumer_release(own)
        warpgroup.wait_group(0)
        pipeline.consumer_release(other)

    @cute.jit
    def step_of_single(
        self, state: SharedDecodeState, work: SharedDecodeWork, tile_stages: ScorePipeline, kv_range: SplitKvRange,
        count: Int32,
    ):  # fmt: skip
        """Process block number `count` of the CTA. Both warpgroups compute the scores."""
        self.compute_scores(state, work, tile_stages, kv_range, count)
        self.zero_undefined_rows(state, work, kv_range, count, of_both=True)
        state.softmax.step_of_single(state.scores.values)
        state.own_p.convert(state.scores.acc)
        state.softmax.rescale(state.sums.values)
        warpgroup.fence()
        state.sums.add(work.pipeline.stage_index(count))
        warpgroup.wait_group(0)
        work.pipeline.consumer_release(count)

    @cute.jit
    def compute_scores(
        self, state: SharedDecodeState, work: SharedDecodeWork, tile_stages: ScorePipeline, kv_range: SplitKvRange,
        count: Int32,
    ):  # fmt: skip
        """Compute the scores of block number `count` of the CTA, and mask invisible scores."""
        block_iterator, j = work.block_iterator, kv_range.begin + count
        self.begin_stages(tile_stages, block_iterator, kv_range, j)
        work.pipeline.consumer_wait(count)
        stage = work.pipeline.stage_index(count)
        warpgroup.fence()
        state.scores.start(stage)
        warpgroup.wait_group(0)
        if block_iterator.masks(kv_range, j):
            tile_stages.apply(state.scores.values, kv_range.nth(j), masked=True)

    @cute.jit
    def zero_undefined_rows(
        self, state: SharedDecodeState, work: SharedDecodeWork, kv_range: SplitKvRange, count: Int32,
        of_both: cutlass.Constexpr[bool],
    ):  # fmt: skip
        """Write zeros to the values behind the last key, where 0 times inf or NaN would be NaN.

        Args:
            state: state of the warpgroup.
            work: part of the problem of the CTA.
            kv_range: KV blocks of the CTA.
            count: number of the block.
            of_both: True if both warpgroups computed the scores of the block, and wait here for the zeros.
        """
        if cutlass.const_expr(work.kv_blocks.reads_undefined_rows):
            first_undefined = work.decode_tile.sizes.Sk - kv_range.nth(kv_range.begin + count) * self.tile_n
            if first_undefined < self.tile_n:
                tidx, stage = cute.arch.thread_idx()[0], work.pipeline.stage_index(count)
                values = cute.local_tile(state.k, (self.tile_n, self.dv, self.stages), (0, 0, 0))[None, None, stage]
                if cutlass.const_expr(of_both):
                    sm90.sync_warpgroups(SharedDecodeBarrier.ZEROS_WRITTEN, WARPGROUPS)  # all scores are complete
                    zero_rows(values, first_undefined, tidx, WARPGROUPS * sm90.WARPGROUP)
                else:
                    sm90.sync_warpgroup(SharedDecodeBarrier.KEYS_READ, state.wg)
                    zero_rows(values, first_undefined, tidx % sm90.WARPGROUP, sm90.WARPGROUP)
                cute.arch.fence_proxy("async.shared", space="cta")
                if cutlass.const_expr(of_both):
                    sm90.sync_warpgroups(SharedDecodeBarrier.ZEROS_WRITTEN, WARPGROUPS)
