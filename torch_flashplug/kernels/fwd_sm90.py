"""Attention forward for Hopper: O = softmax(scale * Q K^T) V and LSE, from one pass over the keys.

One CTA computes tile_m query rows of one head. A producer warp streams K and V blocks through two rings of TMA buffers; each consumer warpgroup
owns 64 of the rows, from its Q tile to its O tile, and never talks to the others except to take turns on the tensor cores. Block j's scores are
multiplied while block j-1's output is (FlashAttention-3, arXiv 2407.08608, section 3.2), so softmax always has tensor work under it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ..spec import REGISTER_SPLIT, KernelSpec
from .parts import sm90
from .parts.geometry import Geometry
from .parts.mask import Mask
from .parts.scheduler import TileOrder, grid
from .parts.softmax import OnlineSoftmax

ROWS = 64  # of one consumer warpgroup
Q_SLOTS = 4  # barriers for the warpgroups' Q tiles: at most 3, and a ring counts in powers of two
SLAB = 16  # rows of one warp's part of O, stored by one TMA instruction per 64 columns
DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


class Barrier(enum.IntEnum):
    """Named barriers; 0 is sync_threads."""

    OUTPUT = 1  # + warpgroup: the warpgroup has finished reading Q, whose place O takes
    TURN = 4  # + warpgroup


@dataclass(frozen=True)
class Operand:
    """One global tensor with the TMA atom that moves its tiles, and its place in shared memory."""

    atom: cute.CopyAtom
    m: cute.Tensor  # TMA coordinates of the whole tensor
    s: cute.Tensor  # shared memory


class ForwardSm90:
    """Builds the kernel of one spec; every size below is known when it is traced."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        self.tile_m, self.tile_n, self.d, self.dv = spec.tile_m, spec.tile_n, spec.d, spec.dv
        self.stages = spec.stages
        self.warpgroups = spec.warpgroups
        self.producer_registers, self.consumer_registers = REGISTER_SPLIT[self.warpgroups]

    def fake_arguments(self) -> tuple:
        """Arguments for cute.compile: sizes symbolic, strides 64-bit (tensors may pass 2^31 elements), rows 16-byte aligned."""

        def operand(*shape):
            strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
            return cute.runtime.make_fake_tensor(self.dtype, shape, strides, assumed_align=16)

        B, Hq, Hkv, Sq, Sk = (cute.sym_int() for _ in range(5))
        D, Dv = (cute.sym_int(divisibility=8) for _ in range(2))
        lse = cute.runtime.make_fake_tensor(Float32, (B, Hq, Sq), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)
        return (
            operand(B, Hq, Sq, D),
            operand(B, Hkv, Sk, D),
            operand(B, Hkv, Sk, Dv),
            operand(B, Hq, Sq, Dv),
            lse,
            Float32(1.0),
            Float32(1.0),
            cute.runtime.make_fake_stream(),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, Hq, Sq, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv)
        mO: cute.Tensor,  # (B, Hq, Sq, Dv)
        mLSE: cute.Tensor,  # (B, Hq, Sq) fp32
        scale_log2: Float32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        # Rows and columns first, as tiles want them; V seen as (Dv, Sk), the N x K operand of the second product.
        mQ, mK, mO = (cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0])) for t in (mQ, mK, mO))
        mVt = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[3, 2, 1, 0]))
        row_major, col_major = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        layouts = (
            hopper.make_smem_layout_a(row_major, (ROWS, self.tile_n, self.d), self.dtype, self.warpgroups),
            hopper.make_smem_layout_b(row_major, (ROWS, self.tile_n, self.d), self.dtype, self.stages),
            hopper.make_smem_layout_b(col_major, (ROWS, self.dv, self.tile_n), self.dtype, self.stages),
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        first = [cute.slice_(layout, (None, None, 0)) for layout in layouts]
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, mQ, first[0], (ROWS, self.d))
        tma_k, mK = cpasync.make_tiled_tma_atom(load, mK, first[1], (self.tile_n, self.d))
        tma_v, mVt = cpasync.make_tiled_tma_atom(load, mVt, first[2], (self.dv, self.tile_n))
        store = cpasync.CopyBulkTensorTileS2GOp()
        tma_o, mO = cpasync.make_tiled_tma_atom(store, mO, self.output_layout(SLAB), (SLAB, self.dv))

        num_m_blocks = cute.ceil_div(mLSE.shape[2], self.tile_m)
        total_heads = mLSE.shape[0] * mLSE.shape[1]
        group = mLSE.shape[1] // mK.shape[2]
        section = TileOrder.section_heads(mK.shape[0], (self.d + self.dv) * 2, group, total_heads)
        self.kernel((tma_q, tma_k, tma_v, tma_o), mQ, mK, mVt, mO, mLSE, scale_log2, scale, section, layouts).launch(
            grid=grid(num_m_blocks, total_heads),
            block=(self.spec.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,  # without it ptxas may drop the register split
        )

    def output_layout(self, *shape: int) -> cute.ComposedLayout:
        """O in shared memory, (rows, Dv[, warpgroup]): each warp's 16 rows are contiguous, so that a warp stores them on its own."""
        rows, *rest = shape
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (rows, self.dv, *rest), order=(1, 0, 2)[: 2 + len(rest)])

    def make_qk(self) -> cute.TiledMma:
        """S = Q K^T, both from shared memory."""
        major = OperandMajorMode.K
        return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, major, major, Float32, (1, 1, 1), (ROWS, self.tile_n))

    def make_pv(self) -> cute.TiledMma:
        """O += P V, P from registers."""
        major, source = OperandMajorMode, warpgroup.OperandSource.RMEM
        return hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, major.K, major.MN, Float32, (1, 1, 1), (ROWS, self.dv), source
        )

    @cute.kernel
    def kernel(
        self,
        atoms: tuple,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mVt: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        scale_log2: Float32,
        scale: Float32,
        section: Int32,
        layouts: tuple,
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tma_q, tma_k, tma_v, tma_o = atoms
        sQ_layout, sK_layout, sV_layout = layouts

        smem = cutlass.memory.SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 4 * self.stages + 2 * Q_SLOTS)
        sQ = smem.allocate_tensor(self.dtype, sQ_layout.outer, 1024, sQ_layout.inner)  # (64, D, warpgroup)
        sK = smem.allocate_tensor(self.dtype, sK_layout.outer, 1024, sK_layout.inner)  # (tile_n, D, slot)
        sVt = smem.allocate_tensor(self.dtype, sV_layout.outer, 1024, sV_layout.inner)  # (Dv, tile_n, slot)

        element = self.dtype.width // 8
        ring_k = sm90.Ring(barriers, barriers + self.stages, self.stages, self.tile_n * self.d * element)
        ring_v = sm90.Ring(barriers + 2 * self.stages, barriers + 3 * self.stages, self.stages, self.tile_n * self.dv * element)
        q_barriers = barriers + 4 * self.stages
        ring_q = sm90.Ring(q_barriers, q_barriers + Q_SLOTS, Q_SLOTS, ROWS * self.d * element)
        if warp_idx == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                ring_k.init(4 * self.warpgroups)
                ring_v.init(4 * self.warpgroups)
                ring_q.init(4)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        B, Hq, Sq = mLSE.shape
        geo = Geometry(self.spec.mask, self.tile_m, self.tile_n, Sq, mK.shape[0])
        order = TileOrder(self.spec.mask == "causal", cute.ceil_div(Sq, self.tile_m), Hq, B * Hq, section)
        m_block, head, batch = order.tile(cute.arch.block_idx()[0])
        kv_head = head // (Hq // mK.shape[2])
        blocks = geo.num_blocks(m_block)

        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                q = Operand(tma_q, mQ[None, None, head, batch], sQ)
                k = Operand(tma_k, mK[None, None, kv_head, batch], sK)
                v = Operand(tma_v, mVt[None, None, kv_head, batch], sVt)
                self.load(q, k, v, (ring_q, ring_k, ring_v), m_block, blocks)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            out = Operand(tma_o, mO[None, None, head, batch], sQ)
            self.consume(sQ, sK, sVt, (ring_q, ring_k, ring_v), geo, m_block, out, mLSE[batch, head, None], (scale_log2, scale))

    @cute.jit
    def load(self, q: Operand, k: Operand, v: Operand, rings: tuple, m_block: Int32, blocks: Int32):
        """Producer warp: every warpgroup's Q once, then K(j) one block ahead of V(j), the order in which they are multiplied."""
        ring_q, ring_k, ring_v = rings
        tQsQ, tQgQ = tiles_of(q, (ROWS, self.d), (None, 0))  # (TMA, warpgroup), (TMA, num_m_tiles)
        tKsK, tKgK = tiles_of(k, (self.tile_n, self.d), (None, 0))  # (TMA, slot), (TMA, num_n_blocks)
        tVsV, tVgV = tiles_of(v, (self.dv, self.tile_n), (0, None))
        for w in cutlass.range_constexpr(self.warpgroups):
            ring_q.acquire(w)
            cute.copy(q.atom, tQgQ[None, m_block * self.warpgroups + w], tQsQ[None, w], tma_bar_ptr=ring_q.arrival(w))
            if cutlass.const_expr(w == 0):
                self.load_block(k, tKgK, tKsK, ring_k, blocks, Int32(0))
        for j in cutlass.range(1, blocks, unroll=1):
            self.load_block(k, tKgK, tKsK, ring_k, blocks, j)
            self.load_block(v, tVgV, tVsV, ring_v, blocks, j - 1)
        self.load_block(v, tVgV, tVsV, ring_v, blocks, blocks - 1)

    @cute.jit
    def load_block(self, operand: Operand, tXgX: cute.Tensor, tXsX: cute.Tensor, ring: sm90.Ring, blocks: Int32, j: Int32):
        """The j-th visited block, counted from the right."""
        ring.acquire(j)
        cute.copy(operand.atom, tXgX[None, blocks - 1 - j], tXsX[None, ring.slot(j)], tma_bar_ptr=ring.arrival(j))

    @cute.jit
    def consume(
        self,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sVt: cute.Tensor,
        rings: tuple,
        geo: Geometry,
        m_block: Int32,
        out: Operand,
        mLSE: cute.Tensor,  # (Sq,)
        scales: tuple,
    ):
        """Consumer warpgroup: 64 rows of the tile, all KV blocks."""
        tidx = cute.arch.thread_idx()[0] - sm90.WARPGROUP
        wg = cute.arch.make_warp_uniform(tidx // sm90.WARPGROUP)
        thread = tidx % sm90.WARPGROUP
        lane = thread % sm90.WARP
        ring_q, ring_k, ring_v = rings
        times_kt, times_v = sm90.Product.create(self.make_qk), sm90.Product.create(self.make_pv)
        qk, pv = times_kt.add.get_slice(thread), times_v.add.get_slice(thread)
        tSrQ = qk.make_fragment_A(qk.partition_A(sQ))[None, None, None, wg]  # (MMA, 1, D/16)
        tSrK = qk.make_fragment_B(qk.partition_B(sK))  # (MMA, 1, D/16, slot)
        tOrV = pv.make_fragment_B(pv.partition_B(sVt))  # (MMA, 1, tile_n/16, slot)
        acc_S = sm90.zeros(qk, (ROWS, self.tile_n))
        acc_O = sm90.zeros(pv, (ROWS, self.dv))
        P = sm90.OperandA.create(acc_S, self.dtype)  # (MMA, 1, tile_n/16)
        scores, output = sm90.rows_and_columns(acc_S), sm90.rows_and_columns(acc_O)

        row = (m_block * self.warpgroups + wg) * ROWS + thread // sm90.WARP * SLAB + lane // 4
        mask = Mask(geo, row, lane % 4 * 2)
        softmax = OnlineSoftmax.create(scales[0])
        turn = sm90.Turn(Barrier.TURN, wg, self.warpgroups)
        turn.start()

        blocks = geo.num_blocks(m_block)
        partial = cutlass.max(blocks - geo.num_full(m_block), 1)  # the first block is always masked: its code is there anyway

        ring_q.wait(wg)
        ring_k.wait(0)
        turn.take()
        warpgroup.fence()
        times_kt.issue(acc_S, tSrQ, tSrK[None, None, None, 0], accumulate=False)
        turn.pass_on()
        warpgroup.wait_group(0)
        ring_k.release(0)
        mask.apply(scores, blocks - 1)
        softmax.step(scores, first=True, masked=True)
        P.take(acc_S)

        for stretch in cutlass.range_constexpr(2):
            masked = stretch == 0
            begin, end = (1, partial) if masked else (partial, blocks)
            for j in cutlass.range(begin, end, unroll=1):
                ring_k.wait(j)
                turn.take()
                warpgroup.fence()
                times_kt.issue(acc_S, tSrQ, tSrK[None, None, None, ring_k.slot(j)], accumulate=False)
                ring_v.wait(j - 1)
                times_v.issue(acc_O, P.fragment, tOrV[None, None, None, ring_v.slot(j - 1)], accumulate=True)
                turn.pass_on()
                warpgroup.wait_group(1)
                ring_k.release(j)
                if cutlass.const_expr(masked):
                    mask.apply(scores, blocks - 1 - j)
                softmax.step(scores, first=False, masked=masked)
                warpgroup.wait_group(0)
                ring_v.release(j - 1)
                P.take(acc_S)
                softmax.rescale(output)

        ring_v.wait(blocks - 1)
        warpgroup.fence()
        times_v.issue(acc_O, P.fragment, tOrV[None, None, None, ring_v.slot(blocks - 1)], accumulate=True)
        lse = cute.make_rmem_tensor((2,), Float32)
        warpgroup.wait_group(0)
        softmax.finish(output, lse, scales[1])
        if lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                if row + 8 * r < geo.Sq:
                    mLSE[row + 8 * r] = lse[r]
        self.store(acc_O, out, times_v.add, m_block, wg)

    @cute.jit
    def store(self, acc_O: cute.Tensor, out: Operand, mma_pv: cute.TiledMma, m_block: Int32, wg: Int32):
        """O to 16 bits, through the warpgroup's own Q buffer, to global memory; each warp sends its 16 rows when it has them."""
        thread = (cute.arch.thread_idx()[0]) % sm90.WARPGROUP
        warp_in_group = cute.arch.make_warp_uniform(thread // sm90.WARP)
        sO = cute.make_tensor(out.s.iterator, self.output_layout(ROWS, self.warpgroups).outer)[None, None, wg]  # (64, Dv)
        rO = cute.make_rmem_tensor_like(acc_O, self.dtype)
        rO.store(acc_O.load().to(self.dtype))
        to_smem = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_pv)
        thr_copy = to_smem.get_slice(thread)
        # All four warps have waited for their last read of Q before any of them overwrites it.
        cute.arch.barrier(barrier_id=Barrier.OUTPUT + wg, number_of_threads=sm90.WARPGROUP)
        cute.copy(to_smem, thr_copy.retile(rO), thr_copy.partition_D(sO))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        slab = (m_block * self.warpgroups + wg) * (ROWS // SLAB) + warp_in_group
        gO = cute.local_tile(out.m, (SLAB, self.dv), (slab, 0))
        sO_slab = cute.local_tile(sO, (SLAB, self.dv), (warp_in_group, 0))
        tOsO, tOgO = cpasync.tma_partition(
            out.atom, 0, cute.make_layout(1), cute.group_modes(sO_slab, 0, 2), cute.group_modes(gO, 0, 2)
        )
        cute.copy(out.atom, tOsO, tOgO)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def tiles_of(operand: Operand, tile: tuple[int, int], coordinate: tuple) -> tuple[cute.Tensor, cute.Tensor]:
    """Shared and global tiles of one operand as TMA moves them: (TMA, slot) and (TMA, tiles along the free mode)."""
    g = cute.local_tile(operand.m, tile, coordinate)  # (rows, cols, tiles)
    return cpasync.tma_partition(
        operand.atom, 0, cute.make_layout(1), cute.group_modes(operand.s, 0, 2), cute.group_modes(g, 0, 2)
    )
