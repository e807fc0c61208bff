"""Attention backward for Hopper: dQ, dK and dV from Q, K, V, dO, LSE and delta = rowsum(dO * O).

A CTA owns tile_n keys of one KV head and keeps their dK and dV in registers while it walks over the query rows that see
them, of every query head of the group. Each of its two consumer warpgroups owns 64 of the keys. Scores are computed
transposed (keys x queries), so that P^T and dS^T are already the left operands of dV += P^T dO and dK += dS^T Q
(FlashAttention-3, arXiv 2407.08608, section B; FlashAttention-2, arXiv 2307.08691, algorithm 2). dQ = dS K needs the
keys of both warpgroups: dS crosses shared memory once, each warpgroup multiplies it with half of K's columns, one step
later, so that neither waits for the other; the products are added to fp32 scratch in global memory, in the order in
which registers hold them.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ..spec import REGISTER_SPLIT, ROWS_PER_WARPGROUP, KernelSpec
from .parts import sm90
from .parts.backward_rows import WARPGROUPS, FinishBackward, PrepareBackward
from .parts.geometry import Geometry, Steps
from .parts.mask import TransposedMask, column_of
from .parts.scheduler import TileOrder

ROWS = ROWS_PER_WARPGROUP  # keys of one warpgroup
DS_SLOTS = 2  # a warpgroup writes the next dS while the other may still multiply with this one


class Barrier(enum.IntEnum):
    """Named barriers; 0 is sync_threads."""

    LAST_PRODUCT = 1  # both warpgroups have multiplied with all of K
    WARPGROUP = 2  # + warpgroup


@dataclass(frozen=True)
class Rings:
    """Between the producer warp and the consumers; `ds` between the consumers."""

    q: sm90.Ring
    do: sm90.Ring
    kv: sm90.Ring
    ds: sm90.Ring


@dataclass(frozen=True)
class QueryGradient:
    """dQ = dS K of one step: this warpgroup's columns of 64 rows, which each warp adds to global memory on its own."""

    product: sm90.Product
    left: cute.Tensor  # dS: (MMA, 1, 64/16, slot)
    right: cute.Tensor  # K: (MMA, 1, 64/16, keys of a warpgroup)
    ring: sm90.Ring  # of dS
    acc: cute.Tensor
    staging: cute.Tensor  # (floats,) of this warp in shared memory
    scratch: cute.Pointer  # parts of that size, one for each warp of a step

    @cute.jit
    def multiply(self, nth: Int32):
        """As soon as both warpgroups have written dS number `nth`. Before the first there is none: the result of that
        is never sent.
        """
        if nth >= 0:
            self.ring.wait_free(nth + DS_SLOTS)
        first = self.ring.slot(nth) * WARPGROUPS
        for w in cutlass.range_constexpr(WARPGROUPS):
            left = self.left[None, None, None, first + w]
            self.product.multiply(self.acc, left, self.right[None, None, None, w], accumulate=w > 0)
        warpgroup.commit_group()

    @cute.jit
    def send(self, part: Int64, count: Int32):
        """Add it to a part of scratch, unless nothing has been multiplied yet (count 0)."""
        if count > 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            quarters = cute.size(self.acc) // 4
            mine = cute.make_layout((4, quarters), stride=(1, sm90.WARP * 4))
            lanes = cute.make_tensor(self.staging.iterator + cute.arch.lane_idx() * 4, mine)
            cute.autovec_copy(cute.make_tensor(self.acc.iterator, cute.make_layout((4, quarters))), lanes)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                text = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};"
                floats = cute.size(self.staging)
                target = (self.scratch + part * floats).toint()
                cute.arch.inline_ptx(text, read_only_args=[target, self.staging.iterator.toint(), Int32(floats * 4)])
                cute.arch.cp_async_bulk_commit_group()


@dataclass(frozen=True)
class Share:
    """What a warpgroup works with: its 64 keys, a step's queries as right operands, and its registers."""

    wg: Int32
    rings: Rings
    products: tuple  # scores (and dP), dV, dK
    keys: tuple  # K and V, left operands: (MMA, 1, D/16)
    rows: tuple  # Q and dO with rows as columns of the scores: (MMA, 1, D/16, stage)
    columns: tuple  # Q and dO, summed over their rows: (MMA, 1, tile_m/16, stage)
    S: cute.Tensor  # S^T, then P^T
    dP: cute.Tensor  # dP^T, then dS^T
    dK: cute.Tensor
    dV: cute.Tensor
    P: sm90.OperandA
    dS: sm90.OperandA
    dQ: QueryGradient
    crossing: tuple  # dS into shared memory: copy, source, target by slot
    facts: tuple  # LSE * log2(e) and delta of a step's queries: (tile_m, stage)

    def issue_S(self, slot: Int32) -> None:
        self.products[0].issue(self.S, self.keys[0], self.rows[0][None, None, None, slot], accumulate=False)

    def issue_dP(self, slot: Int32) -> None:
        self.products[0].issue(self.dP, self.keys[1], self.rows[1][None, None, None, slot], accumulate=False)

    def issue_dV(self, slot: Int32) -> None:
        self.products[1].issue(self.dV, self.P.fragment, self.columns[1][None, None, None, slot], accumulate=True)

    def issue_dK(self, slot: Int32) -> None:
        self.products[2].issue(self.dK, self.dS.fragment, self.columns[0][None, None, None, slot], accumulate=True)

    def row_values(self, which: int, slot: Int32) -> cute.Tensor:
        """LSE (0) or delta (1) of the queries of this thread's columns, in registers."""
        row, lane = self.facts[which][None, slot], cute.arch.lane_idx()
        mine = cute.make_rmem_tensor(cute.size(row) // 4, Float32)
        for c in range(cute.size(mine)):
            mine[c] = row[column_of(c) + lane % 4 * 2]
        return mine

    @cute.jit
    def share_dS(self, count: Int32):
        """This warpgroup's half of dS into shared memory, for both."""
        copy, source, target = self.crossing
        cute.copy(copy, source, target[None, None, None, self.rings.ds.slot(count) * WARPGROUPS + self.wg])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.rings.ds.release(count)


class BackwardSm90:
    """Builds the three kernels of one spec, launched one after the other by one call; every size below is known when
    they are traced.
    """

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.dtype, self.d, self.dv, self.mask = sm90.DTYPES[spec.dtype], spec.d, spec.dv, spec.mask
        self.tile_m, self.tile_n, self.stages = spec.tile_m, spec.tile_n, spec.stages
        self.half = spec.d // WARPGROUPS  # columns of dQ that a warpgroup multiplies
        # Registers for K and V, and for every product of a step on its own, so that all can be under way at once.
        self.roomy = spec.roomy
        self.producer_registers, self.consumer_registers = REGISTER_SPLIT[WARPGROUPS]
        self.prepare, self.finish = PrepareBackward(self.dtype), FinishBackward(self.dtype, spec.d)

    def fake_arguments(self) -> tuple:
        operand = functools.partial(sm90.fake_operand, self.dtype)
        B, Hq, Hkv, Sq, Sk, padded, size = (cute.sym_int() for _ in range(7))
        D, Dv = (cute.sym_int(divisibility=8) for _ in range(2))
        strides = (*(cute.sym_int64(divisibility=4) for _ in range(3)), 1)
        fp32 = cute.runtime.make_fake_tensor
        lse = fp32(Float32, (B, Hq, Sq), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)
        rows = fp32(Float32, (B, Hq, 2, padded), strides, assumed_align=16)
        scratch = fp32(Float32, (size,), (1,), assumed_align=16)
        q, k, v = operand(B, Hq, Sq, D), operand(B, Hkv, Sk, D), operand(B, Hkv, Sk, Dv)
        out, grad = operand(B, Hq, Sq, Dv), operand(B, Hq, Sq, Dv)
        gradients = (operand(B, Hq, Sq, D), operand(B, Hkv, Sk, D), operand(B, Hkv, Sk, Dv))
        scales = (Float32(1.0), Float32(1.0))
        return (q, k, v, out, grad, lse, *gradients, rows, scratch, *scales, cute.runtime.make_fake_stream())

    @cute.jit
    def __call__(  # noqa: PLR0913, PLR0917 (the ABI that src/launch.cpp calls)
        self,
        mQ: cute.Tensor,  # (B, Hq, Sq, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv)
        mO: cute.Tensor,  # (B, Hq, Sq, Dv)
        mdO: cute.Tensor,  # (B, Hq, Sq, Dv)
        mLSE: cute.Tensor,  # (B, Hq, Sq) fp32
        mdQ: cute.Tensor,  # (B, Hq, Sq, D)
        mdK: cute.Tensor,  # (B, Hkv, Sk, D)
        mdV: cute.Tensor,  # (B, Hkv, Sk, Dv)
        mRows: cute.Tensor,  # (B, Hq, 2, Sq rounded up to tile_m) fp32: LSE * log2(e) (inf: no row or no key), delta
        mScratch: cute.Tensor,  # fp32 dQ: B * Hq * blocks of tile_m rows * tile_m * d, in register order
        scale_log2: Float32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        self.prepare(mO, mdO, mLSE, mRows, mScratch, stream)
        self.step_over_keys(mQ, mK, mV, mdO, mdK, mdV, mRows, mScratch, (scale_log2, scale), stream)
        self.finish(mScratch, mdQ, scale, stream)

    @cute.jit
    def step_over_keys(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mdO: cute.Tensor, mdK: cute.Tensor, mdV: cute.Tensor,
        mRows: cute.Tensor, mScratch: cute.Tensor, scales: tuple, stream: cuda.CUstream,
    ):  # fmt: skip
        # Rows and columns first, as tiles want them.
        mQ, mK, mV, mdO, mdK, mdV = (
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0])) for t in (mQ, mK, mV, mdO, mdK, mdV)
        )
        layout = lambda rows, columns, slots: hopper.make_smem_layout_a(  # noqa: E731
            LayoutEnum.ROW_MAJOR, (rows, ROWS, columns), self.dtype, slots
        )
        steps, keys = (self.tile_m, self.stages), (ROWS, WARPGROUPS)
        layouts = tuple(
            layout(rows, columns, slots) for rows, slots in (steps, keys) for columns in (self.d, self.dv)
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        one = [cute.slice_(layout, (None, None, 0)) for layout in layouts]
        box_k, box_v = (ROWS, self.d), (ROWS, self.dv)
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, mQ, one[0], (self.tile_m, self.d))
        tma_do, mdO = cpasync.make_tiled_tma_atom(load, mdO, one[1], (self.tile_m, self.dv))
        tma_k, mK = cpasync.make_tiled_tma_atom(load, mK, one[2], box_k)
        tma_v, mV = cpasync.make_tiled_tma_atom(load, mV, one[3], box_v)
        tma_dk, mdK = cpasync.make_tiled_tma_atom(store, mdK, one[2], box_k)
        tma_dv, mdV = cpasync.make_tiled_tma_atom(store, mdV, one[3], box_v)
        num_n_blocks, kv_heads = cute.ceil_div(mK.shape[0], self.tile_n), mK.shape[2] * mK.shape[3]
        group, element = mQ.shape[2] // mK.shape[2], self.dtype.width // 8
        head_bytes = Int64(mQ.shape[0]) * group * ((self.d + self.dv) * element + self.d * 4)  # Q, dO, dQ in fp32
        section = TileOrder.section_heads(head_bytes, num_n_blocks, 1, kv_heads)
        self.kernel(
            (tma_q, tma_do, tma_k, tma_v, tma_dk, tma_dv),
            (mQ, mdO, mK, mV, mdK, mdV),
            mRows,
            mScratch,
            scales,
            section,
            layouts,
        ).launch(
            grid=(num_n_blocks * kv_heads, 1, 1),
            block=((WARPGROUPS + 1) * sm90.WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def make_mma(self, columns: int, left: str, right: str) -> cute.TiledMma:
        """64 x columns, operands from "rows" (K-major in shared memory), "columns" (MN-major) or "registers"."""
        major = {"rows": OperandMajorMode.K, "columns": OperandMajorMode.MN, "registers": OperandMajorMode.K}
        source = warpgroup.OperandSource.RMEM if left == "registers" else warpgroup.OperandSource.SMEM
        return hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, major[left], major[right], Float32, (1, 1, 1), (ROWS, columns), source
        )

    @cute.kernel
    def kernel(
        self,
        atoms: tuple,  # TMA of q, do, k, v, dk, dv
        tensors: tuple,  # their TMA coordinates
        mRows: cute.Tensor,
        mScratch: cute.Tensor,
        scales: tuple,  # scale * log2(e), scale
        section: Int32,
        layouts: tuple,  # shared memory of q, do, k, v
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        element = self.dtype.width // 8
        smem = cutlass.memory.SmemAllocator()
        rings = Rings(
            sm90.Ring.create(smem, self.stages, self.tile_m * (self.d * element + 4)),
            sm90.Ring.create(smem, self.stages, self.tile_m * (self.dv * element + 4)),
            sm90.Ring.create(smem, 1, self.tile_n * (self.d + self.dv) * element),
            sm90.Ring.create(smem, DS_SLOTS, 0),
        )
        sQ, sdO, sK, sV = (smem.allocate_tensor(self.dtype, y.outer, 1024, y.inner) for y in layouts)
        ds_layout = hopper.make_smem_layout_a(
            LayoutEnum.ROW_MAJOR, (self.tile_m, ROWS, ROWS), self.dtype, DS_SLOTS * WARPGROUPS
        )
        sdS = smem.allocate_tensor(self.dtype, ds_layout.outer, 1024, ds_layout.inner)  # (queries, keys, slot)
        row_layout = cute.make_layout((self.tile_m, self.stages))
        sLse, sDelta = (smem.allocate_tensor(Float32, row_layout, 128) for _ in range(2))
        sdQ = smem.allocate_tensor(Float32, cute.make_layout((self.half * 16, 4 * WARPGROUPS)), 128)  # (floats, warp)

        if warp_idx == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for shared in (rings.q, rings.do, rings.kv, rings.ds):
                    shared.init(4 * WARPGROUPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        mQ, mdO, mK, mV, mdK, mdV = tensors
        causal, num_n_blocks = self.mask == "causal", cute.ceil_div(mK.shape[0], self.tile_n)
        order = TileOrder(causal, num_n_blocks, mK.shape[2], mK.shape[2] * mK.shape[3], section)
        n_block, head, batch = order.tile(cute.arch.block_idx()[0])
        n_block = num_n_blocks - 1 - n_block if causal else n_block  # the first keys are seen by most queries
        group = mQ.shape[2] // mK.shape[2]
        geo = Geometry(self.mask, self.tile_n, mQ.shape[0], mK.shape[0])
        steps = geo.steps(n_block, self.tile_m)
        at = (head, batch, n_block, group)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                operands = tuple(
                    sm90.Operand(atom, m, s)
                    for atom, m, s in zip(atoms, (mQ, mdO, mK, mV), (sQ, sdO, sK, sV), strict=False)
                )
                self.load(operands, (mRows, sLse, sDelta), rings, steps, at)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            outputs = (sm90.Operand(atoms[4], mdK, sK), sm90.Operand(atoms[5], mdV, sV))
            buffers = (sQ, sdO, sK, sV, sdS, sLse, sDelta, sdQ)
            m_blocks = mRows.shape[3] // self.tile_m
            self.consume(buffers, outputs, mScratch, rings, steps, at, scales, geo, m_blocks)

    @cute.jit
    def load(self, operands: tuple, rows: tuple, rings: Rings, steps: Steps, at: tuple):
        """Producer warp: K and V once, then Q with its LSE and dO with its delta, step by step."""
        q, do, k, v = operands
        mRows, sLse, sDelta = rows
        head, batch, n_block, group = at
        tKsK, tKgK = k.head(head, batch).tiles((ROWS, self.d), (None, 0))
        tVsV, tVgV = v.head(head, batch).tiles((ROWS, self.dv), (None, 0))
        rings.kv.acquire(Int32(0))
        for w in cutlass.range_constexpr(WARPGROUPS):
            cute.copy(k.atom, tKgK[None, n_block * 2 + w], tKsK[None, w], tma_bar_ptr=rings.kv.arrival(Int32(0)))
            cute.copy(v.atom, tVgV[None, n_block * 2 + w], tVsV[None, w], tma_bar_ptr=rings.kv.arrival(Int32(0)))
        done = Int32(0)
        for g in cutlass.range(group, unroll=1):
            q_head = head * group + g
            tQsQ, tQgQ = q.head(q_head, batch).tiles((self.tile_m, self.d), (None, 0))
            tOsO, tOgO = do.head(q_head, batch).tiles((self.tile_m, self.dv), (None, 0))
            gRows = cute.local_tile(mRows[batch, q_head, None, None], (1, self.tile_m), (None, None))
            for step in cutlass.range(steps.begin, steps.end, unroll=1):
                sm90.load_block(q.atom, tQgQ, tQsQ, rings.q, step, done)
                load_rows(gRows[0, None, 0, step], sLse[None, rings.q.slot(done)], rings.q, done)
                sm90.load_block(do.atom, tOgO, tOsO, rings.do, step, done)
                load_rows(gRows[0, None, 1, step], sDelta[None, rings.do.slot(done)], rings.do, done)
                done += 1

    def hold(self, buffers: tuple, rings: Rings, scratch: cute.Pointer) -> Share:
        """Consumer warpgroup: its operands and registers, once K and V are there."""
        sQ, sdO, sK, sV, sdS, sLse, sDelta, sdQ = buffers
        tidx = cute.arch.thread_idx()[0] - sm90.WARPGROUP
        wg, thread = cute.arch.make_warp_uniform(tidx // sm90.WARPGROUP), tidx % sm90.WARPGROUP
        keys_from = "registers" if self.roomy else "rows"
        scores = sm90.Product.create(lambda: self.make_mma(self.tile_m, keys_from, "rows"))
        for_dV = sm90.Product.create(lambda: self.make_mma(self.dv, "registers", "columns"))
        for_dK = sm90.Product.create(lambda: self.make_mma(self.d, "registers", "columns"))
        for_dQ = sm90.Product.create(lambda: self.make_mma(self.half, "rows", "columns"))
        mma_s, mma_v, mma_k, mma_q = (x.add.get_slice(thread) for x in (scores, for_dV, for_dK, for_dQ))
        K, V = (self.my_keys(x[None, None, wg], scores.add, thread) for x in (sK, sV))
        rows = tuple(mma_s.make_fragment_B(mma_s.partition_B(x)) for x in (sQ, sdO))
        columns = tuple(m.make_fragment_B(m.partition_B(transposed(x))) for m, x in ((mma_k, sQ), (mma_v, sdO)))
        S, dP = (sm90.zeros(mma_s, (ROWS, self.tile_m)) for _ in range(2))
        dK, dV = sm90.zeros(mma_k, (ROWS, self.d)), sm90.zeros(mma_v, (ROWS, self.dv))
        P = dS = sm90.OperandA.create(S, self.dtype)
        acc_dQ = cute.make_tensor(dP.iterator, cute.make_layout(mma_q.partition_shape_C((ROWS, self.half))))
        if self.roomy:
            dS, acc_dQ = sm90.OperandA.create(S, self.dtype), sm90.zeros(mma_q, (ROWS, self.half))
        my_columns = cute.local_tile(transposed(sK), (self.half, ROWS, WARPGROUPS), (wg, 0, 0))
        tQrK, tQrS = mma_q.make_fragment_B(mma_q.partition_B(my_columns)), mma_q.make_fragment_A(mma_q.partition_A(sdS))
        staging = sdQ[None, cute.arch.make_warp_uniform(tidx // sm90.WARP)]
        dQ = QueryGradient(for_dQ, tQrS, tQrK, rings.ds, acc_dQ, staging, scratch)
        matrices = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype)
        to_dS = cute.make_tiled_copy_C(matrices, scores.add).get_slice(thread)
        rdS = to_dS.retile(cute.make_tensor(cute.recast_ptr(dS.pairs.iterator, dtype=self.dtype), S.layout))
        crossing = (to_dS, rdS, to_dS.partition_D(transposed(sdS)))
        products, facts = (scores, for_dV, for_dK), (sLse, sDelta)
        return Share(wg, rings, products, (K, V), rows, columns, S, dP, dK, dV, P, dS, dQ, crossing, facts)

    @cute.jit
    def consume(
        self, buffers: tuple, outputs: tuple, mScratch: cute.Tensor, rings: Rings, steps: Steps, at: tuple,
        scales: tuple, geo: Geometry, m_blocks: Int32,
    ):  # fmt: skip
        """Consumer warpgroup: dK and dV of its 64 keys, and half of the columns of each step's dQ."""
        head, batch, n_block, group = at
        rings.kv.wait(Int32(0))
        my = self.hold(buffers, rings, mScratch.iterator)
        wg, thread = my.wg, cute.arch.thread_idx()[0] % sm90.WARPGROUP
        warp_idx, lane = cute.arch.make_warp_uniform(thread // sm90.WARP), thread % sm90.WARP
        key = n_block * self.tile_n + wg * ROWS + warp_idx * 16 + lane // 4
        mask = TransposedMask(geo, self.tile_m, key, lane % 4 * 2)

        done, part = Int32(0), Int64(0)
        for g in cutlass.range(group, unroll=1):
            q_head = head * group + g
            out_block = (Int64(batch) * (group * outputs[0].m.shape[2]) + q_head) * m_blocks
            for masked in cutlass.range_constexpr(1, -1, -1):
                begin, end = (steps.begin, steps.middle) if masked else (steps.middle, steps.end)
                for step in cutlass.range(begin, end, unroll=1):
                    hidden = (mask, step) if masked else None
                    if cutlass.const_expr(self.roomy):
                        self.step_at_once(my, done, part, hidden, scales[0])
                    else:
                        self.step_in_turn(my, done, part, hidden, scales[0])
                    rings.do.release(done)
                    rings.q.release(done)
                    part = ((out_block + step) * WARPGROUPS + wg) * 4 + warp_idx
                    done += 1
        warpgroup.wait_group(0)
        warpgroup.fence()
        my.dQ.multiply(done - 1)
        warpgroup.wait_group(0)
        my.dQ.send(part, done)

        # Both warpgroups have multiplied with all of K: dK and dV may take its place and V's.
        cute.arch.barrier(barrier_id=Barrier.LAST_PRODUCT, number_of_threads=WARPGROUPS * sm90.WARPGROUP)
        for i in cutlass.range_constexpr(cute.size(my.dK)):
            my.dK[i] = my.dK[i] * scales[1]
        for acc, out, mma in ((my.dK, outputs[0], my.products[2].add), (my.dV, outputs[1], my.products[1].add)):
            self.put(acc, cute.slice_(out.s, (None, None, wg)), mma, thread)
        sm90.join_warpgroup(Barrier.WARPGROUP, wg)
        if cute.arch.make_warp_uniform(thread // sm90.WARP) == 0:
            for out, columns in ((outputs[0], self.d), (outputs[1], self.dv)):
                tXsX, tXgX = out.head(head, batch).tiles((ROWS, columns), (None, 0))
                cute.copy(out.atom, tXsX[None, wg], tXgX[None, n_block * 2 + wg])
            cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the last transfer

    @cute.jit
    def step_at_once(self, my: Share, done: Int32, part: Int64, hidden: tuple | None, scale_log2: Float32):
        """One step where every product has registers of its own."""
        slot = my.rings.q.slot(done)
        my.rings.q.wait(done)
        warpgroup.fence()
        my.issue_S(slot)
        my.rings.do.wait(done)
        my.issue_dP(slot)
        lse = my.row_values(0, slot)  # before more products: behind them it costs 10 %
        my.dQ.multiply(done - 1)
        warpgroup.wait_group(2)  # S
        self.weigh(my, lse, hidden, scale_log2)
        my.P.take(my.S)
        warpgroup.fence()
        my.issue_dV(slot)
        delta = my.row_values(1, slot)
        warpgroup.wait_group(1)  # dP, and dQ: the slot of its dS may be written again once this step's is there
        differentiate(my.S, my.dP, delta)
        my.dS.take(my.dP)
        my.share_dS(done)
        warpgroup.fence()
        my.issue_dK(slot)
        my.dQ.send(part, done)
        warpgroup.wait_group(0)

    @cute.jit
    def step_in_turn(self, my: Share, done: Int32, part: Int64, hidden: tuple | None, scale_log2: Float32):
        """One step where dP takes the place of the dQ before, and dS that of P."""
        slot = my.rings.q.slot(done)
        my.rings.q.wait(done)
        warpgroup.fence()
        my.issue_S(slot)
        lse = my.row_values(0, slot)  # here, as above
        my.dQ.multiply(done - 1)
        warpgroup.wait_group(1)  # S
        self.weigh(my, lse, hidden, scale_log2)
        my.P.take(my.S)
        warpgroup.wait_group(0)  # dQ
        my.dQ.send(part, done)
        my.rings.do.wait(done)
        warpgroup.fence()
        my.issue_dP(slot)
        my.issue_dV(slot)
        warpgroup.wait_group(1)  # dP
        differentiate(my.S, my.dP, my.row_values(1, slot))
        warpgroup.wait_group(0)
        my.dS.take(my.dP)
        my.share_dS(done)
        warpgroup.fence()
        my.issue_dK(slot)
        # ptxas serialises every product where one is under way across the end of a loop.
        warpgroup.wait_group(0)

    @cute.jit
    def weigh(self, my: Share, lse_log2: cute.Tensor, hidden: tuple | None, scale_log2: Float32):
        """P in place of S; hidden: mask and number of this step, where some are hidden."""
        scores = sm90.rows_and_columns(my.S)
        if cutlass.const_expr(hidden is not None):
            mask, step = hidden
            mask.apply(scores, step)
        exponentiate(scores, lse_log2, scale_log2)

    def my_keys(self, s: cute.Tensor, mma: cute.TiledMma, thread: Int32) -> cute.Tensor:
        """A warpgroup's 64 keys as left operand of a product: in registers where there is room, which halves what is
        read from shared memory; else where they are.
        """
        part = mma.get_slice(thread)
        fragment = part.make_fragment_A(part.partition_A(s))
        if self.roomy:
            matrices = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
            copy = cute.make_tiled_copy_A(matrices, mma).get_slice(thread)
            cute.copy(copy, copy.partition_S(s), copy.retile(fragment))
        return fragment

    @cute.jit
    def put(self, acc: cute.Tensor, sX: cute.Tensor, mma: cute.TiledMma, thread: Int32):
        """An accumulator in 16 bits into shared memory."""
        rX = cute.make_rmem_tensor_like(acc, self.dtype)
        rX.store(acc.load().to(self.dtype))
        matrices = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        to_smem = cute.make_tiled_copy_C(matrices, mma).get_slice(thread)
        cute.copy(to_smem, to_smem.retile(rX), to_smem.partition_D(sX))
        cute.arch.fence_proxy("async.shared", space="cta")


def transposed(s: cute.Tensor) -> cute.Tensor:
    """(columns, rows, slot) view of (rows, columns, slot): the same bytes, as the other major mode reads them."""
    return cute.make_tensor(s.iterator, cute.select(s.layout, mode=[1, 0, 2]))


@cute.jit
def load_rows(gRow: cute.Tensor, sRow: cute.Tensor, ring: sm90.Ring, count: Int32):
    """Producer warp: one fp32 per query row, counted in the slot's bytes."""
    with cute.arch.elect_one():
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        cute.copy(atom, gRow, sRow, mbar_ptr=ring.arrival(count))


@cute.jit
def exponentiate(scores: cute.Tensor, lse_log2: cute.Tensor, scale_log2: Float32):
    """P = exp2(S * scale_log2 - LSE * log2 e), (keys, queries)."""
    for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        for r in cutlass.range_constexpr(2):
            scores[r, c] = cute.math.exp2(scores[r, c] * scale_log2 - lse_log2[c], fastmath=True)


@cute.jit
def differentiate(acc_P: cute.Tensor, acc_dP: cute.Tensor, delta: cute.Tensor):
    """dS = P * (dP - delta), (keys, queries), in place of dP; the scale comes with dQ and dK."""
    P, dP = sm90.rows_and_columns(acc_P), sm90.rows_and_columns(acc_dP)
    for c in cutlass.range_constexpr(cute.size(P, mode=[1])):
        for r in cutlass.range_constexpr(2):
            dP[r, c] = P[r, c] * (dP[r, c] - delta[c])
