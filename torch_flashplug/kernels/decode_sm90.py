"""Decode for Hopper: few query rows against many keys, at the speed of memory.

The query heads that share a KV head are packed into one tile of rows, so that K and V are read once; where tiles are
fewer than SMs, each tile's keys are split among several CTAs (FlashDecoding, Dao et al. 2023). A producer warp keeps a
deep ring of K and V blocks under way; consumer warpgroups of 64 rows follow, with time to spare: padding rows are
harmless. With one split a CTA writes O itself. Up to CLUSTER splits may be a cluster, whose CTAs add up in each other's
shared memory; else they leave fp32 partials for the Combine kernel, which is launched beforehand and waits.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ..spec import L2_BYTES, ROWS_PER_WARPGROUP, HopperSpec
from .parts import fragments, sm90
from .parts.combine import AT_ONCE, Combine, Partials, Peers, Share, follow
from .parts.forward_call import DecodeCall, FewRows
from .parts.geometry import Geometry
from .parts.mask import Mask
from .parts.packed import Part
from .parts.scratch import QUAD, vector_at
from .parts.softmax import OnlineSoftmax

ROWS, SLAB = ROWS_PER_WARPGROUP, sm90.SLAB
VECTOR = 8  # elements of one 16-byte access
PAIR = 2  # neighbouring columns of a thread


class Barrier(enum.IntEnum):
    """Named barriers; 0 is sync_threads."""

    Q_THERE = 1  # + warpgroup
    V_READ = 4  # by all warpgroups


@dataclass(frozen=True)
class Work(Part):
    """What both roles follow: this CTA's part of the problem, and the rings between them."""

    ring_k: sm90.Ring
    ring_v: sm90.Ring


class DecodeSm90(DecodeCall):
    """Builds the kernel of one spec; every size below is known when it is traced."""

    def __init__(self, spec: HopperSpec):
        self.spec = spec
        self.dtype = fragments.DTYPES[spec.dtype]
        self.tile_m, self.tile_n, self.d, self.dv, self.stages = spec.tile_m, spec.tile_n, spec.d, spec.dv, spec.stages
        self.warpgroups = spec.warpgroups

    @cute.jit
    def launch(self, call: FewRows, stream: cuda.CUstream):
        B, Hq, Sq, Dv = call.o.shape
        Hkv = call.k.shape[1]
        # V seen as (Dv, Sk), the N x K operand of the second product.
        mVt = cute.make_tensor(call.v.iterator, cute.select(call.v.layout, mode=[3, 2, 1, 0]))
        row_major, col_major = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        layouts = (
            hopper.make_smem_layout_a(row_major, (ROWS, self.tile_n, self.d), self.dtype, self.warpgroups),
            hopper.make_smem_layout_b(row_major, (ROWS, self.tile_n, self.d), self.dtype, self.stages),
            hopper.make_smem_layout_b(col_major, (ROWS, self.dv, self.tile_n), self.dtype, self.stages),
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        k_slot, v_slot = (cute.slice_(layout, (None, None, 0)) for layout in layouts[1:])
        tma_k, mK = cpasync.make_tiled_tma_atom(load, sm90.rows_first(call.k), k_slot, (self.tile_n, self.d))
        tma_v, mVt = cpasync.make_tiled_tma_atom(load, mVt, v_slot, (self.dv, self.tile_n))
        m_tiles = cute.ceil_div(Hq // Hkv * Sq, self.tile_m)
        partials = Partials(call.partials.iterator, B * Hq * Sq, call.splits, Dv)
        outside = (call.q, call.o, call.lse, partials.start)
        arguments = ((tma_k, tma_v), (mK, mVt), *outside, call.scale, call.splits, layouts)
        launch = {
            "grid": (m_tiles * call.splits * Hkv * B, 1, 1),
            "block": (self.spec.threads, 1, 1),
            "stream": stream,
            "min_blocks_per_mp": self.spec.ctas_per_sm,
            "preferred_smem_carveout": 100,  # percent; else the DSL asks a GPU, and there may be none here
            "use_pdl": True,
        }
        if call.cluster > 1:
            self.kernel(*arguments, clustered=True).launch(cluster=(call.cluster, 1, 1), **launch)
        else:
            self.kernel(*arguments, clustered=False).launch(**launch)
        if call.splits > call.cluster:
            Combine(fragments.PACKS[self.dtype])(call.o, call.lse, partials, stream)

    @cute.kernel
    def kernel(
        self,
        atoms: tuple,  # TMA of k, v
        tensors: tuple,  # their TMA coordinates
        mQ: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        partials: cute.Pointer,
        scale: Float32,
        splits: Int32,
        layouts: tuple,  # shared memory of q, k, v
        clustered: cutlass.Constexpr[bool],
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        element = self.dtype.width // 8
        smem = cutlass.memory.SmemAllocator()
        ring_k = sm90.Ring.create(smem, self.stages, self.tile_n * self.d * element)
        ring_v = sm90.Ring.create(smem, self.stages, self.tile_n * self.dv * element)
        # (64, D, warpgroup), (tile_n, D, slot), (Dv, tile_n, slot)
        sQ, sK, sVt = (smem.allocate_tensor(self.dtype, x.outer, 1024, x.inner) for x in layouts)
        mK, mVt = tensors
        geo = Geometry("full", self.tile_n, mQ.shape[2], mK.shape[0])
        part = Part.of_cta(geo, (mQ.shape[1], mK.shape[2]), self.tile_m, splits)
        work = Work(**vars(part), ring_k=ring_k, ring_v=ring_v)
        sm90.start_cta(warp_idx, atoms, tuple((ring, 4 * self.warpgroups) for ring in (ring_k, ring_v)))
        follow()
        if warp_idx == 4 * self.warpgroups:
            self.load(sm90.Operand(atoms[0], mK, sK), sm90.Operand(atoms[1], mVt, sVt), work)
        else:
            self.consume((sQ, sK, sVt), work, (mQ, mO, mLSE, partials), scale, clustered)
        if cutlass.const_expr(clustered):
            sm90.join_cluster()
            if warp_idx < 4 * self.warpgroups:
                self.add_up(sVt, work, mO, mLSE)
            sm90.join_cluster()  # a peer may still read here

    @cute.jit
    def load(self, k: sm90.Operand, v: sm90.Operand, work: Work):
        """Producer warp: K and V of this split's blocks."""
        tKsK, tKgK = k.head(work.kv_head, work.batch).tiles((self.tile_n, self.d), (None, 0))
        tVsV, tVgV = v.head(work.kv_head, work.batch).tiles((self.dv, self.tile_n), (0, None))
        begin, end = work.blocks()
        policy = self.policy(k.m, v.m)
        for block in cutlass.range(begin, end, unroll=1):
            sm90.load_block(k.atom, tKgK, tKsK, work.ring_k, block, block - begin, policy)
            sm90.load_block(v.atom, tVgV, tVsV, work.ring_v, block, block - begin, policy)

    def policy(self, mK: cute.Tensor, mVt: cute.Tensor) -> Int64:
        """K and V that fit in L2 may be there when they are read again; larger ones only push out others (3 %)."""
        Sk, D, heads, batch = mK.shape
        many = Int64(Sk) * heads * batch * (D + mVt.shape[0]) * (self.dtype.width // 8) > L2_BYTES[self.spec.arch]
        return Int64(cutlass.select_(many, Int64(sm90.EVICT_FIRST), Int64(sm90.EVICT_NORMAL)))

    @cute.jit
    def consume(self, buffers: tuple, work: Work, outside: tuple, scale: Float32, clustered: cutlass.Constexpr[bool]):
        """Consumer warpgroup: its 64 packed rows against this split's keys."""
        sQ, sK, sVt = buffers
        mQ, mO, mLSE, partials = outside
        tidx = cute.arch.thread_idx()[0]
        wg, thread = cute.arch.make_warp_uniform(tidx // sm90.WARPGROUP), tidx % sm90.WARPGROUP
        lane = thread % sm90.WARP
        times_k = sm90.Product.create(lambda: sm90.make_mma(self.dtype, self.tile_n, "rows", "rows"))
        times_v = sm90.Product.create(lambda: sm90.make_mma(self.dtype, self.dv, "registers", "columns"))
        qk, pv = times_k.add.get_slice(thread), times_v.add.get_slice(thread)
        my_Q = qk.make_fragment_A(qk.partition_A(sQ))[None, None, None, wg]
        tSrK = qk.make_fragment_B(qk.partition_B(sK))  # (MMA, 1, D/16, slot)
        tOrV = pv.make_fragment_B(pv.partition_B(sVt))  # (MMA, 1, tile_n/16, slot)
        acc_S, acc_O = sm90.zeros(qk, (ROWS, self.tile_n)), sm90.zeros(pv, (ROWS, self.dv))
        S, output = fragments.rows_and_columns(acc_S), fragments.rows_and_columns(acc_O)
        P = fragments.OperandA.create(acc_S, self.dtype)
        softmax = OnlineSoftmax.create(scale * fragments.LOG2_E)
        mask = Mask(work.geo, Int32(0), lane % 4 * 2)
        first_row = work.first_row + wg * ROWS

        self.fetch_queries(mQ, sQ[None, None, wg], work, first_row)
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads what plain stores wrote
        sm90.join_warpgroup(Barrier.Q_THERE, wg)
        begin, end = work.blocks()
        work.ring_k.wait(0)
        warpgroup.fence()
        times_k.issue(acc_S, my_Q, tSrK[None, None, None, 0], accumulate=False)
        warpgroup.wait_group(0)
        work.ring_k.release(0)
        self.weigh(S, softmax, mask, begin, first=True)
        P.take(acc_S)
        for block in cutlass.range(begin + 1, end, unroll=1):  # its scores under the output of the block before
            nth, before = block - begin, block - begin - 1
            work.ring_k.wait(nth)
            warpgroup.fence()
            times_k.issue(acc_S, my_Q, tSrK[None, None, None, work.ring_k.slot(nth)], accumulate=False)
            work.ring_v.wait(before)
            times_v.issue(acc_O, P.fragment, tOrV[None, None, None, work.ring_v.slot(before)], accumulate=True)
            warpgroup.wait_group(1)
            work.ring_k.release(nth)
            self.weigh(S, softmax, mask, block, first=False)
            warpgroup.wait_group(0)
            work.ring_v.release(before)
            P.take(acc_S)
            softmax.rescale(output)
        last = end - begin - 1
        work.ring_v.wait(last)
        warpgroup.fence()
        times_v.issue(acc_O, P.fragment, tOrV[None, None, None, work.ring_v.slot(last)], accumulate=True)
        warpgroup.wait_group(0)
        lse = softmax.finish(output, scale)
        if cutlass.const_expr(clustered):
            sm90.join_warpgroups(Barrier.V_READ, self.warpgroups)  # it lay where results go
        self.leave(work, wg * ROWS + thread // sm90.WARP * SLAB + lane // 4, output, lse, (sVt, *outside), clustered)

    @cute.jit
    def leave(
        self,
        work: Work,
        row: Int32,  # of the tile: this thread's first, the other one is the eighth after it
        output: cute.Tensor,
        lse: cute.Tensor,
        outside: tuple,
        clustered: cutlass.Constexpr[bool],
    ):
        """Results of a thread's two rows: to the cluster, to O and LSE where keys are not split, or to partials."""
        sVt, _, mO, mLSE, partials = outside
        parts = Partials(partials, mLSE.shape[0] * mLSE.shape[1] * work.geo.Sq, work.splits, mO.shape[3])
        peers = Peers.create(sVt, self.tile_m, self.dv, work.splits)
        head_of_row = cute.arch.lane_idx() % 4 == 0
        for r in cutlass.range_constexpr(2):
            if work.first_row + row + 8 * r < work.rows:
                head, query = work.place(work.first_row + row + 8 * r)
                if cutlass.const_expr(clustered):
                    self.write_row(peers.output(row + 8 * r), output, r, mO.shape[3], narrow=False)
                    if head_of_row:
                        cute.make_tensor(peers.lse(row + 8 * r), cute.make_layout(1))[0] = lse[r]
                elif work.splits == 1:
                    self.write_row(mO[work.batch, head, query, None].iterator, output, r, mO.shape[3], narrow=True)
                    if head_of_row:
                        mLSE[work.batch, head, query] = lse[r]
                else:
                    index = (work.batch * mLSE.shape[1] + head) * work.geo.Sq + query
                    self.write_row(parts.output(index, work.split), output, r, mO.shape[3], narrow=False)
                    if head_of_row:
                        cute.arch.store(parts.lse(index, work.split), lse[r])

    @cute.jit
    def add_up(self, sVt: cute.Tensor, work: Work, mO: cute.Tensor, mLSE: cute.Tensor):
        """Consumers: every CTA of the cluster writes its share of the tile's columns."""
        peers, quads = Peers.create(sVt, self.tile_m, self.dv, work.splits), mO.shape[3] // QUAD
        total = cutlass.min(work.rows - work.first_row, self.tile_m) * quads
        mine, threads = cute.ceil_div(total, work.splits), sm90.WARPGROUP * self.warpgroups
        first, end = work.split * mine, cutlass.min((work.split + 1) * mine, total)
        for unit in cutlass.range(first + cute.arch.thread_idx()[0], end, threads, unroll=1):
            row, column = unit // quads, unit % quads * QUAD
            share = Share.create()
            for peer in cutlass.range(0, work.splits, AT_ONCE, unroll=1):
                share.add(peers, row, peer, 1, column)
            head, query = work.place(work.first_row + row)
            share.write(mO[work.batch, head, query, None].iterator + column, fragments.PACKS[self.dtype])
            if column == 0:
                mLSE[work.batch, head, query] = share.lse()

    @cute.jit
    def weigh(self, S: cute.Tensor, softmax: OnlineSoftmax, mask: Mask, block: Int32, first: cutlass.Constexpr[bool]):
        """Scores into probabilities; every row sees a key of every block, so none is masked out whole."""
        if (block + 1) * self.tile_n > mask.geo.Sk:
            mask.apply(S, block)
        softmax.step(S, first=first, masked=False)

    @cute.jit
    def fetch_queries(self, mQ: cute.Tensor, sQ: cute.Tensor, work: Work, first_row: Int32):
        """Consumer warpgroup: its 64 rows into shared memory, from as many heads as they are of, all loads under way at
        once. Zeros beyond the last column; rows beyond the last repeat it, and their results go nowhere.
        """
        thread, D = cute.arch.thread_idx()[0] % sm90.WARPGROUP, mQ.shape[3]
        vectors = self.d // VECTOR
        loads = ROWS * vectors // sm90.WARPGROUP
        values = cute.make_rmem_tensor((VECTOR // 2, loads), Int32)
        for i in cutlass.range_constexpr(loads):
            number = i * sm90.WARPGROUP + thread
            head, query = work.place(cutlass.min(first_row + number // vectors, work.rows - 1))
            column = cutlass.min(number % vectors * VECTOR, D - VECTOR)
            source = vector_at(mQ[work.batch, head, query, None].iterator + column, Int32, VECTOR // 2)
            cute.autovec_copy(source, values[None, i])
        for i in cutlass.range_constexpr(loads):
            number = i * sm90.WARPGROUP + thread
            row, chunk = number // vectors, number % vectors
            for pair in cutlass.range_constexpr(VECTOR // 2):
                values[pair, i] = cutlass.select_(chunk * VECTOR < D, values[pair, i], Int32(0))
            target = cute.local_tile(sQ, (1, VECTOR), (row, chunk))
            vector = cute.recast_tensor(values[None, i], self.dtype)  # not the target: its swizzle counts in elements
            cute.autovec_copy(vector, cute.make_tensor(target.iterator, cute.make_layout(VECTOR)))

    @cute.jit
    def write_row(self, start: cute.Pointer, output: cute.Tensor, r: int, Dv: Int32, narrow: cutlass.Constexpr[bool]):
        """This thread's columns of its row r, in 16 bits (narrow) or fp32."""
        column = cute.arch.lane_idx() % 4 * PAIR
        for c in cutlass.range_constexpr(0, self.dv // 4, PAIR):
            at = column + fragments.column_of(c)
            if at < Dv:
                if cutlass.const_expr(narrow):
                    pair = fragments.pack_pair(fragments.PACKS[self.dtype], output[r, c], output[r, c + 1])
                    cute.arch.store(cute.recast_ptr(start + at, dtype=Int32), pair)
                else:
                    both = cute.make_rmem_tensor((PAIR,), Float32)
                    both[0], both[1] = output[r, c], output[r, c + 1]
                    place = cute.make_ptr(Float32, (start + at).toint(), start.memspace, assumed_align=8)
                    cute.autovec_copy(both, cute.make_tensor(place, cute.make_layout(PAIR)))
