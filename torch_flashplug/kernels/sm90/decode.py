"""Decode for Hopper: few query rows against many keys, at the speed of memory.

The query heads of a KV head are packed into a single tile of rows (pack-GQA), so that K and V are read once. Where
tiles are fewer than SMs, the keys of each tile are split among several CTAs (split-KV; FlashDecoding, Dao et al. 2023).
A producer warp keeps many stages of K and V in flight. Consumer warpgroups of 64 rows follow with time to spare, so
padding rows are harmless.

With a single split a CTA writes O itself. Up to `kernel_spec.MAX_CLUSTER_SIZE` splits can form a cluster, whose CTAs
reduce their results in each other's shared memory. Otherwise the CTAs leave fp32 partial results for the
`SplitKvCombine` kernel, which is launched early and waits.
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

from ...registry.kernel_spec import L2_BYTES, ROWS_PER_WARPGROUP, HopperSpec
from ..call_args.kernel_call import KernelArgs, KernelCall, SoftmaxScale
from ..decode.pack_gqa import DecodeTile
from ..decode.split_kv import (
    AT_ONCE,
    ClusterPartials,
    PartialResult,
    SplitKvCombine,
    WorkspacePartials,
    wait_for_previous_kernel,
)
from ..features.base import KernelFeatures
from ..mainloop.softmax import OnlineSoftmax
from ..primitives import fragments, sm90
from ..primitives.vector_access import QUAD, vector_at
from ..score_stages.pipeline import ScoreCoord, ScorePipeline
from ..tiling.block_iterator import BlockIterator, BoundBlocks, SplitKvRange
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import TileAddressing
from .common import TmaOperands

ROWS, ROWS_PER_WARP = ROWS_PER_WARPGROUP, sm90.ROWS_PER_WARP
VECTOR = 8  # elements of a 16-byte access
PAIR = 2  # neighboring columns of a thread


class DecodeBarrier(enum.IntEnum):
    """Named barriers of the consumer warpgroups; barrier 0 is `sync_threads`."""

    Q_LOADED = 1  # Q_LOADED + w: the 64 rows of Q of warpgroup w are in shared memory
    V_READ = 4  # all warpgroups have read V


@dataclass(frozen=True)
class DecodeSmem:
    """Operands in shared memory."""

    q: cute.Tensor  # (64, D, warpgroup)
    k: cute.Tensor  # (tile_n, D, stage)
    v: cute.Tensor  # (Dv, tile_n, stage)


@dataclass(frozen=True)
class DecodeGmem:
    """Tensors in global memory that are accessed by plain loads and stores."""

    q: cute.Tensor  # (B, Hq, Sq, D)
    o: cute.Tensor  # (B, Hq, Sq, Dv)
    lse: cute.Tensor  # (B, Hq, Sq) fp32
    partials: cute.Pointer  # fp32 partial results of the splits


@dataclass(frozen=True)
class SoftmaxRowStats:
    """Softmax maxima and sums of a thread's two rows."""

    row_max: cute.Tensor  # (2,): largest raw scores
    row_sum: cute.Tensor  # (2,): sums of exponentials
    scale: Float32

    def lse(self, r: int) -> Float32:
        """Return the LSE (natural logarithm) of row `r` of the thread."""
        return self.row_max[r] * self.scale + cute.math.log(self.row_sum[r], fastmath=True)


@dataclass(frozen=True)
class DecodeWork:
    """Part of the problem of a CTA, and the pipelines between the producer warp and the consumer warpgroups."""

    decode_tile: DecodeTile
    block_iterator: BoundBlocks
    pipeline_k: sm90.Pipeline
    pipeline_v: sm90.Pipeline

    def kv_range(self) -> SplitKvRange:
        """Return the KV blocks of this CTA."""
        return self.decode_tile.kv_range(self.block_iterator)


class DecodeSm90(KernelCall, kind="decode"):
    """Builder of the Hopper decode kernel of a spec. All sizes below are compile-time constants.

    Computes O = softmax(scale * Q K^T) V and the LSE for few query rows.

    Inputs: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv). Outputs: o (B, Hq, Sq, Dv), lse (B, Hq, Sq) in
    fp32. Workspace: fp32 partial results of the splits (`WorkspacePartials`), if splits are not reduced in a cluster.

    Warp roles: the first warpgroups are consumers, each with 64 rows. The warp behind them is the producer warp. O of
    more than 256 columns does not fit in the registers of a warpgroup. Then two consumer warpgroups have the same rows.
    Both compute the scores, and each has half of the columns of O. The producer is a warpgroup that gives registers
    away.

    Pipelines (producer -> consumer, stages): K and V, producer warp -> all consumer warps, `stages` stages of tile_n
    keys each. Q is loaded by each consumer warpgroup itself with plain loads.

    Shared memory: Q (64, D) per warpgroup, the stages of K and V, the mbarriers and the lists of the block iterator. In
    a cluster the partial results take the place of the V stages after the mainloop.
    """

    def __init__(self, spec: HopperSpec):
        self.spec, self.features = spec, KernelFeatures.from_spec(spec)
        self.element = self.features.element
        self.tile_m, self.tile_n, self.d, self.dv, self.stages = spec.tile_m, spec.tile_n, spec.d, spec.dv, spec.stages
        self.warpgroups, self.column_warpgroups = spec.warpgroups, spec.column_warpgroups
        self.row_warpgroups = self.warpgroups // self.column_warpgroups
        self.warpgroup_dv = self.dv // self.column_warpgroups

    @property
    def inputs(self) -> tuple[sm90.TmaLoadConfig, sm90.TmaLoadConfig, sm90.TmaLoadConfig]:
        """Shared-memory configurations of Q, loaded with plain loads, and of K and V, loaded by TMA."""
        return (
            sm90.TmaLoadConfig.create(self.element, ROWS, self.d, self.row_warpgroups),
            sm90.TmaLoadConfig.create(self.element, self.tile_n, self.d, self.stages),
            sm90.TmaLoadConfig.create(self.element, self.dv, self.tile_n, self.stages, major="columns"),
        )

    @cute.jit
    def launch(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the decode kernel and, if the splits are not reduced in a cluster, the `SplitKvCombine` kernel."""
        B, Hq, Sq, Dv = call.o.shape
        Hkv = call.k.shape[1]
        _, k, v = self.inputs
        addressing = self.features.tile_addressing(call)
        operands = TmaOperands.create(k=k.tma(addressing.rows_first(call.k)), v=v.tma(addressing.columns_first(call.v)))
        m_tiles = addressing.max_blocks_of_rows(Hq // Hkv * Sq, self.tile_m)
        partials = WorkspacePartials(call.partials.iterator, B * Hq * Sq, call.splits, Dv)
        gmem = DecodeGmem(call.q, call.o, call.lse, partials.start)
        feature_args = (addressing, self.features.block_iterator(call), self.features.score_pipeline(call))
        arguments = (
            operands,
            gmem,
            call.scale,
            call.splits,
            *feature_args,
        )
        launch = {
            "grid": (m_tiles * call.splits * Hkv * B, 1, 1),
            "block": (self.spec.threads, 1, 1),
            "stream": stream,
            "min_blocks_per_mp": self.spec.ctas_per_sm,
            # percent; without a value the DSL would query a GPU, and the build machine may have none.
            "preferred_smem_carveout": 100,
            "use_pdl": True,
        }
        if cutlass.const_expr(not self.spec.combines_in_cluster):
            self.kernel(*arguments, clustered=False).launch(**launch)
        elif call.cluster > 1:
            self.kernel(*arguments, clustered=True).launch(cluster=(call.cluster, 1, 1), **launch)
        else:
            self.kernel(*arguments, clustered=False).launch(**launch)
        if call.splits > call.cluster:
            score_pipeline = self.features.score_pipeline(call)
            SplitKvCombine(self.element)(
                call.o, call.lse, partials, score_pipeline.natural_scale(call.scale), score_pipeline, stream
            )

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
        clustered: cutlass.Constexpr[bool],
    ):
        """Assign the warp roles, and reduce the splits of a cluster behind the mainloop."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        _, pipeline_k, pipeline_v = (x.create_pipeline(smem) if i else None for i, x in enumerate(self.inputs))
        mK = operands.tensor("k")
        sizes = SeqlenInfo(gmem.q.shape[2], mK.shape[0])
        decode_tile = DecodeTile.of_cta(addressing, sizes, gmem.q.shape[1], mK.shape[2], self.tile_m, splits)
        work = DecodeWork(
            decode_tile,
            block_iterator.bind(decode_tile.sizes, self.tile_m, self.tile_n).allocate_smem(smem),
            pipeline_k,
            pipeline_v,
        )
        shared = DecodeSmem(*(x.buffer(smem) for x in self.inputs))
        sm90.start_cta(
            warp_idx,
            operands.atoms,
            tuple(sm90.PipelineWarps(pipeline, 4 * self.warpgroups) for pipeline in (pipeline_k, pipeline_v)),
        )
        wait_for_previous_kernel()
        work.block_iterator.scan(decode_tile)
        if cutlass.const_expr(self.spec.splits_registers):
            if warp_idx >= 4 * self.warpgroups:
                cute.arch.setmaxregister_decrease(self.spec.register_split.producer)
                if warp_idx == 4 * self.warpgroups:
                    self.load(*operands.with_smem(k=shared.k, v=shared.v), work, addressing)
            else:
                cute.arch.setmaxregister_increase(self.spec.register_split.consumer)
                self.consume(shared, work, gmem, scale, score_pipeline, clustered)
        elif warp_idx == 4 * self.warpgroups:
            self.load(*operands.with_smem(k=shared.k, v=shared.v), work, addressing)
        else:
            self.consume(shared, work, gmem, scale, score_pipeline, clustered)
        if cutlass.const_expr(clustered):
            sm90.sync_cluster()
            if warp_idx < 4 * self.warpgroups:
                self.reduce_cluster(shared.v, decode_tile, gmem, score_pipeline.natural_scale(scale))
            sm90.sync_cluster()  # a peer CTA may still read from this CTA's shared memory

    @cute.jit
    def load(self, k: sm90.TmaOperand, v: sm90.TmaOperand, work: DecodeWork, addressing: TileAddressing):
        """Run the producer warp: load K and V of this split's blocks."""
        tKsK, tKgK = work.decode_tile.of_head(k).tiles((self.tile_n, self.d), (None, 0))
        tVsV, tVgV = work.decode_tile.of_head(v).tiles((self.dv, self.tile_n), (0, None))
        kv_range, policy = work.kv_range(), self.policy(k.m, v.m, addressing)
        for j in cutlass.range(kv_range.begin, kv_range.end, unroll=1):
            block = kv_range.nth(j)
            sm90.load_block(k.atom, tKgK, tKsK, work.pipeline_k, block, j - kv_range.begin, policy)
            sm90.load_block(v.atom, tVgV, tVsV, work.pipeline_v, block, j - kv_range.begin, policy)

    def policy(self, mK: cute.Tensor, mVt: cute.Tensor, addressing: TileAddressing) -> Int64:
        """Return the L2 eviction policy of the K and V loads.

        K and V that fit into L2 may still be in L2 when they are read again. Larger K and V only push out other data,
        which costs 3 %.
        """
        _, D, heads, _ = mK.shape
        exceeds_l2 = (
            Int64(addressing.all_keys(mK)) * heads * addressing.batch(mK) * (D + mVt.shape[0]) * self.element.bytes
            > L2_BYTES[self.spec.arch]
        )
        return Int64(cutlass.select_(exceeds_l2, Int64(sm90.EVICT_FIRST), Int64(sm90.EVICT_NORMAL)))

    @cute.jit
    def consume(
        self, shared: DecodeSmem, work: DecodeWork, gmem: DecodeGmem, scale: Float32, score_pipeline: ScorePipeline,
        clustered: cutlass.Constexpr[bool],
    ):  # fmt: skip
        """Run a consumer warpgroup: process 64 packed rows against this split's keys, for its columns of O."""
        decode_tile, block_iterator = work.decode_tile, work.block_iterator
        tidx = cute.arch.thread_idx()[0]
        wg, thread = cute.arch.make_warp_uniform(tidx // sm90.WARPGROUP), tidx % sm90.WARPGROUP
        lane = thread % sm90.WARP
        row_wg, part = self.split_warpgroup(wg)
        times_k = sm90.WgmmaProduct.create(lambda: sm90.make_mma(self.element.dtype, self.tile_n, "rows", "rows"))
        times_v = sm90.WgmmaProduct.create(
            lambda: sm90.make_mma(self.element.dtype, self.warpgroup_dv, "registers", "columns")
        )
        qk, pv = times_k.add.get_slice(thread), times_v.add.get_slice(thread)
        my_Q = qk.make_fragment_A(qk.partition_A(shared.q))[None, None, None, row_wg]
        tSrK = qk.make_fragment_B(qk.partition_B(shared.k))  # (MMA, 1, D/16, stage)
        tOrV = pv.make_fragment_B(pv.partition_B(self.columns_of(shared.v, part)))  # (MMA, 1, tile_n/16, stage)
        acc_S = sm90.zeros(qk, (ROWS, self.tile_n))  # (64, tile_n)
        acc_O = sm90.zeros(pv, (ROWS, self.warpgroup_dv))  # (64, Dv), or the columns of the warpgroup
        P = fragments.OperandA.create(acc_S, self.element)
        scores = sm90.StageProduct(times_k, my_Q, tSrK, acc_S)
        sums = sm90.StageProduct(times_v, P.fragment, tOrV, acc_O)
        scales = score_pipeline.scales(SoftmaxScale(scale * fragments.LOG2_E, scale))
        softmax = OnlineSoftmax.create(scales.log2, score_pipeline)
        first_head, _ = decode_tile.unpack_row(Int32(0))
        # Score stages add the rows of the warps before. Warps with equal rows must then start from equal sums.
        first_row_of_cta = decode_tile.first_row
        if cutlass.const_expr(self.column_warpgroups > 1):
            first_row_of_cta = decode_tile.first_row - (wg - row_wg) * ROWS
        coord = ScoreCoord(
            decode_tile.sizes, self.tile_n, first_row_of_cta, lane % 4 * 2, decode_tile.tile.sequence, first_head
        )
        tile_stages = score_pipeline.allocate_registers(self.tile_n).set_tile(coord)
        first_row = decode_tile.first_row + row_wg * ROWS

        self.fetch_queries(gmem.q, shared.q[None, None, row_wg], decode_tile, first_row)
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads shared memory written by plain stores
        if cutlass.const_expr(self.column_warpgroups > 1):
            sm90.sync_warpgroups(DecodeBarrier.Q_LOADED, self.warpgroups)
        else:
            sm90.sync_warpgroup(DecodeBarrier.Q_LOADED, wg)
        kv_range = work.kv_range()
        self.begin_stages(tile_stages, block_iterator, kv_range, kv_range.begin)
        work.pipeline_k.consumer_wait(0)
        warpgroup.fence()
        scores.start(0)
        warpgroup.wait_group(0)
        work.pipeline_k.consumer_release(0)
        self.softmax_block(scores.values, softmax, tile_stages, block_iterator, kv_range, kv_range.begin, first=True)
        P.convert(acc_S)
        # The scores of block j run under the output of block j-1.
        for j in cutlass.range(kv_range.begin + 1, kv_range.end, unroll=1):
            count, previous = j - kv_range.begin, j - kv_range.begin - 1
            self.begin_stages(tile_stages, block_iterator, kv_range, j)
            work.pipeline_k.consumer_wait(count)
            warpgroup.fence()
            scores.start(work.pipeline_k.stage_index(count))
            work.pipeline_v.consumer_wait(previous)
            sums.add(work.pipeline_v.stage_index(previous))
            warpgroup.wait_group(1)
            work.pipeline_k.consumer_release(count)
            self.softmax_block(scores.values, softmax, tile_stages, block_iterator, kv_range, j, first=False)
            warpgroup.wait_group(0)
            work.pipeline_v.consumer_release(previous)
            P.convert(acc_S)
            softmax.rescale(sums.values)
        last_count = kv_range.end - kv_range.begin - 1
        work.pipeline_v.consumer_wait(last_count)
        warpgroup.fence()
        sums.add(work.pipeline_v.stage_index(last_count))
        warpgroup.wait_group(0)
        row_stats = SoftmaxRowStats(*softmax.finish_split(sums.values), scales.natural)
        if cutlass.const_expr(clustered):
            sm90.sync_warpgroups(DecodeBarrier.V_READ, self.warpgroups)  # V lay where the results go
        row = row_wg * ROWS + thread // sm90.WARP * ROWS_PER_WARP + lane // 4
        self.store_rows(decode_tile, (row, part), sums.values, row_stats, shared.v, gmem, clustered)

    def split_warpgroup(self, wg: Int32) -> tuple[Int32, Int32 | int]:
        """Return the number of the 64 rows of a consumer warpgroup, and the number of its part of the columns of O."""
        if self.column_warpgroups == 1:
            return wg, 0
        return wg // self.column_warpgroups, wg % self.column_warpgroups

    def columns_of(self, sVt: cute.Tensor, part: Int32 | int) -> cute.Tensor:
        """Return a part of the columns of V in shared memory, (Dv of a warpgroup, tile_n, stage)."""
        if self.column_warpgroups == 1:
            return sVt
        return cute.local_tile(sVt, (self.warpgroup_dv, self.tile_n, self.stages), (part, 0, 0))

    @cute.jit
    def store_rows(
        self,
        decode_tile: DecodeTile,
        place: tuple[Int32, Int32 | int],  # first row of the thread in the tile (second: eight rows below), part of O
        output: cute.Tensor,
        row_stats: SoftmaxRowStats,
        sVt: cute.Tensor,  # the V stages, no longer in use
        gmem: DecodeGmem,
        clustered: cutlass.Constexpr[bool],
    ):
        """Write the results of a thread's two rows.

        The results go to the cluster's shared memory, to O and LSE if keys are not split, or to the partial results.
        """
        mO, mLSE, (row, part) = gmem.o, gmem.lse, place
        partials = WorkspacePartials(
            gmem.partials, mLSE.shape[0] * mLSE.shape[1] * decode_tile.queries, decode_tile.splits, mO.shape[3]
        )  # fmt: skip
        peers = ClusterPartials.create(sVt, self.tile_m, self.dv, decode_tile.splits) if clustered else None
        is_first_lane_of_row = cute.arch.lane_idx() % 4 == 0
        if cutlass.const_expr(self.column_warpgroups > 1):
            is_first_lane_of_row = is_first_lane_of_row & (part == 0)
        for r in cutlass.range_constexpr(2):
            if decode_tile.first_row + row + 8 * r < decode_tile.rows:
                head, query = decode_tile.unpack_row(decode_tile.first_row + row + 8 * r)
                if cutlass.const_expr(clustered):
                    self.write_row(peers.output(row + 8 * r), output, r, (mO.shape[3], part), narrow=False)
                    if is_first_lane_of_row:
                        maximum_and_sum = cute.make_tensor(peers.weight(row + 8 * r), cute.make_layout(2))
                        maximum_and_sum[0], maximum_and_sum[1] = row_stats.row_max[r], row_stats.row_sum[r]
                elif decode_tile.splits == 1:
                    self.write_row(
                        mO[decode_tile.batch, head, query, None].iterator, output, r, (mO.shape[3], part), narrow=True
                    )
                    if is_first_lane_of_row:
                        mLSE[decode_tile.batch, head, query] = row_stats.lse(r)
                else:
                    index = (decode_tile.batch * mLSE.shape[1] + head) * decode_tile.queries + query
                    self.write_row(
                        partials.output(index, decode_tile.split), output, r, (mO.shape[3], part), narrow=False
                    )
                    if is_first_lane_of_row:
                        cute.arch.store(partials.weight(index, decode_tile.split), row_stats.row_max[r])
                        cute.arch.store(partials.weight(index, decode_tile.split) + 1, row_stats.row_sum[r])

    @cute.jit
    def reduce_cluster(self, sVt: cute.Tensor, decode_tile: DecodeTile, gmem: DecodeGmem, scale: Float32):
        """Reduce the splits of a cluster: every CTA's consumers write a part of the tile's output columns."""
        mO, mLSE = gmem.o, gmem.lse
        peers, quads = ClusterPartials.create(sVt, self.tile_m, self.dv, decode_tile.splits), mO.shape[3] // QUAD
        num_units = cutlass.min(decode_tile.rows - decode_tile.first_row, self.tile_m) * quads
        units_per_cta, threads = cute.ceil_div(num_units, decode_tile.splits), sm90.WARPGROUP * self.warpgroups
        first, end = decode_tile.split * units_per_cta, cutlass.min((decode_tile.split + 1) * units_per_cta, num_units)
        for unit in cutlass.range(first + cute.arch.thread_idx()[0], end, threads, unroll=1):
            row, column = unit // quads, unit % quads * QUAD
            result = PartialResult.create(scale)
            for peer in cutlass.range(0, decode_tile.splits, AT_ONCE, unroll=1):
                result.add(peers, row, peer, 1, column)
            head, query = decode_tile.unpack_row(decode_tile.first_row + row)
            result.write(mO[decode_tile.batch, head, query, None].iterator + column, self.element)
            if column == 0:
                mLSE[decode_tile.batch, head, query] = result.lse()

    @cute.jit
    def begin_stages(self, tile_stages: ScorePipeline, block_iterator: BoundBlocks, kv_range: SplitKvRange, j: Int32):
        """Start the loads of the score stages for a block, before the block's scores."""
        if block_iterator.masks(kv_range, j):
            tile_stages.begin(kv_range.nth(j), masked=True)

    @cute.jit
    def softmax_block(
        self, S: cute.Tensor, softmax: OnlineSoftmax, tile_stages: ScorePipeline, block_iterator: BoundBlocks,
        kv_range: SplitKvRange, j: Int32,
        first: cutlass.Constexpr[bool],
    ):  # fmt: skip
        """Convert the scores of a block to probabilities, in place."""
        if block_iterator.masks(kv_range, j):
            tile_stages.apply(S, kv_range.nth(j), masked=True)
        softmax.step(S, first=first, masked=block_iterator.may_mask)

    @cute.jit
    def fetch_queries(self, mQ: cute.Tensor, sQ: cute.Tensor, decode_tile: DecodeTile, first_row: Int32):
        """Load the 64 rows of the warpgroups with equal rows into shared memory, with all loads in flight at once.

        The rows may belong to several heads. Columns beyond the last are zeros. Rows beyond the last repeat the last
        row, and their results are never stored.
        """
        threads = sm90.WARPGROUP * self.column_warpgroups
        thread, D = cute.arch.thread_idx()[0] % threads, mQ.shape[3]
        vectors = self.d // VECTOR
        loads = ROWS * vectors // threads
        values = cute.make_rmem_tensor((VECTOR // 2, loads), Int32)  # (pairs of a vector, loads)
        for i in cutlass.range_constexpr(loads):
            vector_idx = i * threads + thread
            head, query = decode_tile.unpack_row(cutlass.min(first_row + vector_idx // vectors, decode_tile.last_row))
            column = cutlass.min(vector_idx % vectors * VECTOR, D - VECTOR)
            source = vector_at(mQ[decode_tile.batch, head, query, None].iterator + column, Int32, VECTOR // 2)
            cute.autovec_copy(source, values[None, i])
        for i in cutlass.range_constexpr(loads):
            vector_idx = i * threads + thread
            row, chunk = vector_idx // vectors, vector_idx % vectors
            for pair in cutlass.range_constexpr(VECTOR // 2):
                values[pair, i] = cutlass.select_(chunk * VECTOR < D, values[pair, i], Int32(0))
            target = cute.local_tile(sQ, (1, VECTOR), (row, chunk))
            # The source is recast instead of the target, because the target's swizzle counts in elements.
            vector = cute.recast_tensor(values[None, i], self.element.dtype)
            cute.autovec_copy(vector, cute.make_tensor(target.iterator, cute.make_layout(VECTOR)))

    @cute.jit
    def write_row(
        self,
        start: cute.Pointer,
        output: cute.Tensor,
        r: int,
        columns: tuple[Int32, Int32 | int],
        narrow: cutlass.Constexpr[bool],
    ):
        """Write the thread's columns of a row of results.

        Args:
            start: column 0 of the row in O, in the workspace or in shared memory.
            output: the accumulator of the thread (2, dv / 4).
            r: 0 for the first row of the thread, 1 for the row eight below.
            columns: number of columns of O, beyond which columns of the tile are skipped; the warpgroup's part of O.
            narrow: True for 16 bits, False for fp32.
        """
        Dv, part = columns
        column = cute.arch.lane_idx() % 4 * PAIR
        if cutlass.const_expr(self.column_warpgroups > 1):
            column = part * self.warpgroup_dv + column
        for c in cutlass.range_constexpr(0, self.warpgroup_dv // 4, PAIR):
            column_of_pair = column + fragments.column_of(c)
            if column_of_pair < Dv:
                if cutlass.const_expr(narrow):
                    pair = self.element.pack_pair(output[r, c], output[r, c + 1])
                    cute.arch.store(cute.recast_ptr(start + column_of_pair, dtype=Int32), pair)
                else:
                    pair_values = cute.make_rmem_tensor((PAIR,), Float32)
                    pair_values[0], pair_values[1] = output[r, c], output[r, c + 1]
                    target = cute.make_ptr(Float32, (start + column_of_pair).toint(), start.memspace, assumed_align=8)
                    cute.autovec_copy(pair_values, cute.make_tensor(target, cute.make_layout(PAIR)))
