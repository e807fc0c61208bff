"""Attention backward for Hopper: dQ, dK and dV from Q, K, V, dO, LSE and delta = rowsum(dO * O).

A CTA stays on its SM and draws blocks of tile_n keys of one KV head until none is left. It keeps their dK and dV in
registers while it walks over the query rows that see them, of every query head of the group. Each of its two consumer
warpgroups owns 64 of the keys. Scores are computed transposed (keys x queries), so that P^T and dS^T are already the
left operands of dV += P^T dO and dK += dS^T Q (FlashAttention-3, arXiv 2407.08608, section B; FlashAttention-2, arXiv
2307.08691, algorithm 2). dQ = dS K needs the keys of both warpgroups: dS crosses shared memory once, each warpgroup
multiplies it with half of K's columns, one step later, so that neither waits for the other; the products are added to
fp32 scratch in global memory, in the order in which registers hold them.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ..spec import FP32_BYTES, REGISTER_SPLIT, ROWS_PER_WARPGROUP, TENDER_BYTES, TENDERS, HopperSpec
from .parts import fragments, sm90
from .parts.backstage import ADDED_SLOTS, Backstage, carry
from .parts.backward_call import BackwardCall, Call
from .parts.backward_rows import (
    WARPGROUPS,
    FinishBackward,
    PrepareBackward,
    differentiate,
    exponentiate,
    load_rows,
    row_values,
)
from .parts.geometry import Geometry
from .parts.key_order import KeyOrder, heads_in_turn
from .parts.mask import TransposedMask
from .parts.scratch import UNITS, Ahead, Scratch

ROWS, SLAB = ROWS_PER_WARPGROUP, sm90.SLAB  # keys of one warpgroup, of one warp
DS_SLOTS = 2  # a warpgroup writes the next dS while the other may still multiply with this one


@dataclass(frozen=True)
class Rings:
    """Between the producer warps and the consumers; `ds` between the consumers."""

    q: sm90.Ring
    do: sm90.Ring
    k: sm90.Ring
    v: sm90.Ring
    ds: sm90.Ring


@dataclass(frozen=True)
class Work:
    """What every role follows: the rings between them, the tiles to do, and the steps of each."""

    rings: Rings
    queue: sm90.TileQueue
    order: KeyOrder
    group: Int32  # query heads of a KV head


@dataclass(frozen=True)
class QueryGradient:
    """dQ = dS K of one step: this warpgroup's columns of 64 rows, which each warp adds to global memory on its own."""

    product: sm90.Product
    left: cute.Tensor  # dS: (MMA, 1, 64/16, slot)
    right: cute.Tensor  # K: (MMA, 1, 64/16, keys of a warpgroup)
    ring: sm90.Ring  # of dS
    acc: cute.Tensor
    staging: cute.Tensor  # (floats of a unit,) of this warp in shared memory
    scratch: Scratch
    courier: sm90.Ring | None  # of the staging, where another warp does the adding: released when it is written

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
    def send(self, unit: Int32, count: Int32, nth: Int32):
        """Add it, the nth of all, to a unit of scratch; count 0: nothing of this tile has been multiplied yet."""
        if count > 0:
            self.make_room(nth)
            quarters = cute.size(self.acc) // 4
            mine = cute.make_layout((4, quarters), stride=(1, sm90.WARP * 4))
            lanes = cute.make_tensor(self.staging.iterator + cute.arch.lane_idx() * 4, mine)
            cute.autovec_copy(cute.make_tensor(self.acc.iterator, cute.make_layout((4, quarters))), lanes)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            if cutlass.const_expr(self.courier is not None):
                self.courier.release(nth)
            else:
                with cute.arch.elect_one():
                    self.scratch.add(unit, self.staging)

    @cute.jit
    def make_room(self, nth: Int32):
        """Until what was in the staging before has left it."""
        if cutlass.const_expr(self.courier is not None):
            if nth > 0:
                self.courier.wait(nth - 1)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()


@dataclass(frozen=True)
class Share:
    """What a warpgroup works with: its 64 keys, a step's queries as right operands, and its registers."""

    wg: Int32
    rings: Rings
    products: tuple  # scores (and dP), dV, dK
    keys: tuple  # K and V, left operands: (MMA, 1, D/16)
    fetches: tuple  # copies of them into registers, where there is room: (copy, source, target)
    rows: tuple  # Q and dO with rows as columns of the scores: (MMA, 1, D/16, stage)
    columns: tuple  # Q and dO, summed over their rows: (MMA, 1, tile_m/16, stage)
    S: cute.Tensor  # S^T, then P^T
    dP: cute.Tensor  # dP^T, then dS^T
    dK: cute.Tensor
    dV: cute.Tensor
    P: fragments.OperandA
    dS: fragments.OperandA
    dQ: QueryGradient
    crossing: tuple  # dS into shared memory: copy, source, target by slot
    facts: tuple  # LSE * log2(e) and delta of a step's queries: (tile_m, stage)

    def fetch_keys(self) -> None:
        for copy, source, target in self.fetches:
            cute.copy(copy, source, target)

    def issue_S(self, slot: Int32) -> None:
        self.products[0].issue(self.S, self.keys[0], self.rows[0][None, None, None, slot], accumulate=False)

    def issue_dP(self, slot: Int32) -> None:
        self.products[0].issue(self.dP, self.keys[1], self.rows[1][None, None, None, slot], accumulate=False)

    def issue_dV(self, slot: Int32) -> None:
        self.products[1].issue(self.dV, self.P.fragment, self.columns[1][None, None, None, slot], accumulate=True)

    def issue_dK(self, slot: Int32) -> None:
        self.products[2].issue(self.dK, self.dS.fragment, self.columns[0][None, None, None, slot], accumulate=True)

    @cute.jit
    def share_dS(self, count: Int32):
        """This warpgroup's half of dS into shared memory, for both."""
        copy, source, target = self.crossing
        cute.copy(copy, source, target[None, None, None, self.rings.ds.slot(count) * WARPGROUPS + self.wg])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.rings.ds.release(count)


class BackwardSm90(BackwardCall):
    """Builds the three kernels of one spec, launched one after the other by one call; every size below is known when
    they are traced.
    """

    def __init__(self, spec: HopperSpec):
        self.spec = spec
        self.dtype, self.d, self.dv, self.mask = fragments.DTYPES[spec.dtype], spec.d, spec.dv, spec.mask
        self.tile_m, self.tile_n, self.stages = spec.tile_m, spec.tile_n, spec.stages
        self.half = spec.d // WARPGROUPS  # columns of dQ that a warpgroup multiplies
        self.in_order = spec.in_order
        # Registers for K and V, and for every product of a step on its own, so that all can be under way at once.
        self.roomy = spec.roomy
        self.producer_registers, self.consumer_registers = REGISTER_SPLIT[WARPGROUPS]
        self.prepare, self.finish = PrepareBackward(self.dtype, clears=spec.d), FinishBackward(self.dtype, spec.d)

    @cute.jit
    def launch(self, call: Call, stream: cuda.CUstream):
        B, Hkv, Sk, _ = call.k.shape
        num_n_blocks, group, element = cute.ceil_div(Sk, self.tile_n), call.q.shape[1] // Hkv, self.dtype.width // 8
        geo = Geometry(self.mask, self.tile_n, call.q.shape[2], Sk)
        row_bytes = (self.d + self.dv) * element + self.d * FP32_BYTES  # Q, dO, dQ in fp32
        num_ctas = call.num_ctas if self.in_order else None
        section = heads_in_turn(geo, self.tile_m, (group, B * Hkv), row_bytes, num_ctas)
        ahead = Ahead.create(B * Hkv if self.in_order else section, num_n_blocks, B * Hkv, group)
        self.prepare(call.o, call.do, call.lse, call.rows, call.scratch, ahead, stream)
        tensors = (call.q, call.k, call.v, call.do, call.dq, call.dk, call.dv)
        launch = (call.counter, call.num_ctas, section, ahead)
        self.step_over_keys(tensors, call.rows, call.scratch, call.scales, launch, stream)
        self.finish(call.scratch, call.dq, call.scales[1], ahead, stream)

    @cute.jit
    def step_over_keys(
        self, tensors: tuple, mRows: cute.Tensor, mScratch: cute.Tensor, scales: tuple, launch: tuple,
        stream: cuda.CUstream,
    ):  # fmt: skip
        mQ, mK, mV, mdO, mdQ, mdK, mdV = (sm90.rows_first(t) for t in tensors)
        layout = lambda rows, columns, slots: hopper.make_smem_layout_a(  # noqa: E731
            LayoutEnum.ROW_MAJOR, (rows, ROWS, columns), self.dtype, slots
        )
        steps, keys = (self.tile_m, self.stages), (ROWS, WARPGROUPS)
        layouts = tuple(layout(rows, columns, slots) for rows, slots in (steps, keys) for columns in (self.d, self.dv))
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        one = [cute.slice_(layout, (None, None, 0)) for layout in layouts]
        box_k, box_v = (ROWS, self.d), (ROWS, self.dv)
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, mQ, one[0], (self.tile_m, self.d))
        tma_do, mdO = cpasync.make_tiled_tma_atom(load, mdO, one[1], (self.tile_m, self.dv))
        tma_k, mK = cpasync.make_tiled_tma_atom(load, mK, one[2], box_k)
        tma_v, mV = cpasync.make_tiled_tma_atom(load, mV, one[3], box_v)
        tma_dk, mdK = cpasync.make_tiled_tma_atom(
            store, mdK, sm90.slab_layout(self.dtype, SLAB, self.d), (SLAB, self.d)
        )
        tma_dv, mdV = cpasync.make_tiled_tma_atom(
            store, mdV, sm90.slab_layout(self.dtype, SLAB, self.dv), (SLAB, self.dv)
        )
        unit = (SLAB, self.half)
        tma_dq, mdQ = cpasync.make_tiled_tma_atom(store, mdQ, sm90.slab_layout(self.dtype, *unit), unit)
        mCounter, num_ctas, section, ahead = launch
        self.kernel(
            (tma_q, tma_do, tma_k, tma_v, tma_dk, tma_dv, tma_dq),
            (mQ, mdO, mK, mV, mdK, mdV, mdQ),
            mRows,
            mScratch,
            scales,
            mCounter,
            section,
            ahead.heads,
            layouts,
        ).launch(
            grid=(cutlass.min(ahead.portions * mK.shape[2] * mK.shape[3], num_ctas), 1, 1),
            block=((WARPGROUPS + 1) * sm90.WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        atoms: tuple,  # TMA of q, do, k, v, dk, dv, dq
        tensors: tuple,  # their TMA coordinates
        mRows: cute.Tensor,
        mScratch: cute.Tensor,
        scales: tuple,  # scale * log2(e), scale
        mCounter: cute.Tensor,
        section: Int32,
        heads_ahead: Int32,
        layouts: tuple,  # shared memory of q, do, k, v
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        element = self.dtype.width // 8
        smem = cutlass.memory.SmemAllocator()
        rings = Rings(
            sm90.Ring.create(smem, self.stages, self.tile_m * (self.d * element + 4)),
            sm90.Ring.create(smem, self.stages, self.tile_m * (self.dv * element + 4)),
            sm90.Ring.create(smem, 1, self.tile_n * self.d * element),
            sm90.Ring.create(smem, 1, self.tile_n * self.dv * element),
            sm90.Ring.create(smem, DS_SLOTS, 0),
        )
        ring_mail = sm90.Ring.create(smem, sm90.MAIL_SLOTS, 0)
        mail = cute.make_tensor(smem.allocate_array(Int32, sm90.MAIL_SLOTS), cute.make_layout(sm90.MAIL_SLOTS))
        unit = SLAB * self.half  # of dQ: what a consumer warp adds to scratch at once
        slots = TENDER_BYTES // (unit * 4)
        ring_back = sm90.Ring.create(smem, slots * TENDERS, unit * 4)
        ring_added = sm90.Ring.create(smem, ADDED_SLOTS, 0)
        couriers = sm90.Ring.create(smem, WARPGROUPS, 0) if self.in_order else None
        sQ, sdO, sK, sV = (smem.allocate_tensor(self.dtype, y.outer, 1024, y.inner) for y in layouts)
        ds_layout = hopper.make_smem_layout_a(
            LayoutEnum.ROW_MAJOR, (self.tile_m, ROWS, ROWS), self.dtype, DS_SLOTS * WARPGROUPS
        )
        sdS = smem.allocate_tensor(self.dtype, ds_layout.outer, 1024, ds_layout.inner)  # (queries, keys, slot)
        row_layout = cute.make_layout((self.tile_m, self.stages))
        sLse, sDelta = (smem.allocate_tensor(Float32, row_layout, 128) for _ in range(2))
        sdQ = smem.allocate_tensor(Float32, cute.make_layout((self.half * 16, 4 * WARPGROUPS)), 1024)  # (floats, warp)
        sBack = smem.allocate_tensor(Float32, cute.make_layout((unit, slots * TENDERS)), 128)
        unit_rows = sm90.slab_layout(self.dtype, SLAB * TENDERS, self.half)
        sUnits = smem.allocate_tensor(self.dtype, unit_rows.outer, 1024, unit_rows.inner)

        consumers = 4 * WARPGROUPS
        shared = (rings.q, rings.do, rings.k, rings.v, rings.ds, ring_added)
        waited_for = (
            (ring_mail, consumers + 1 + TENDERS),
            (ring_back, 1),
            *(((couriers, 4),) if self.in_order else ()),
        )
        sm90.start_cta(warp_idx, atoms, (*((ring, consumers) for ring in shared), *waited_for))

        mQ, mdO, mK, mV, mdK, mdV, mdQ = tensors
        num_n_blocks, kv_heads = cute.ceil_div(mK.shape[0], self.tile_n), mK.shape[2] * mK.shape[3]
        geo = Geometry(self.mask, self.tile_n, mQ.shape[0], mK.shape[0])
        order = KeyOrder(True, num_n_blocks, mK.shape[2], kv_heads, section, geo, self.tile_m, self.in_order)
        queue = sm90.TileQueue(mCounter.iterator, mail, ring_mail, order.total, first_drawn=True)
        work = Work(rings, queue, order, mQ.shape[2] // mK.shape[2])
        tender = warp_idx % TENDERS
        matrices = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        backstage = Backstage(
            scratch=Scratch(mScratch.iterator, mRows.shape[3] // self.tile_m, mQ.shape[2] * mQ.shape[3], unit),
            ahead=Ahead(heads_ahead, work.group, num_n_blocks),
            kv_heads=kv_heads,
            scale=scales[1],
            dQ=sm90.Operand(atoms[6], mdQ, cute.local_tile(sUnits, (SLAB, self.half), (tender, 0))),
            matrices=cute.make_tiled_copy_C(matrices, sm90.make_mma(self.dtype, self.half, "rows", "columns")),
            pack=fragments.PACKS[self.dtype],
            ring=ring_back.part(tender, slots),
            slots=cute.local_tile(sBack, (unit, slots), (0, tender)),
            added=ring_added,
        )
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                q, do = sm90.Operand(atoms[0], mQ, sQ), sm90.Operand(atoms[1], mdO, sdO)
                self.load_queries(q, do, (mRows, sLse, sDelta), work, backstage)
            elif warp_idx == 1:
                self.load_keys(sm90.Operand(atoms[2], mK, sK), sm90.Operand(atoms[3], mV, sV), work)
            elif cutlass.const_expr(self.in_order):
                carry(backstage.scratch, couriers.part(tender, 1), sdQ, work, tender)
            else:
                backstage.tend(queue, order.tile, tender)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            outputs = (sm90.Operand(atoms[4], mdK, sdQ), sm90.Operand(atoms[5], mdV, sdQ))
            buffers = (sQ, sdO, sK, sV, sdS, sLse, sDelta, sdQ)
            self.consume(buffers, outputs, backstage, work, scales, couriers)

    @cute.jit
    def load_queries(self, q: sm90.Operand, do: sm90.Operand, rows: tuple, work: Work, backstage: Backstage):
        """First producer warp: Q with its LSE and dO with its delta, step by step. It draws the tiles."""
        mRows, sLse, sDelta = rows
        ring_q, ring_do = work.rings.q, work.rings.do
        nth, done, number = Int32(0), Int32(0), work.queue.post(Int32(0), work.queue.draw())
        while number < work.order.total:
            n_block, head, batch = work.order.tile(number)
            steps = work.order.steps(n_block)
            if cutlass.const_expr(not self.in_order):
                backstage.wait_cleared(batch * work.order.heads + head)
            for g in cutlass.range(work.group, unroll=1):
                q_head = head * work.group + g
                tQsQ, tQgQ = q.head(q_head, batch).tiles((self.tile_m, self.d), (None, 0))
                tOsO, tOgO = do.head(q_head, batch).tiles((self.tile_m, self.dv), (None, 0))
                gRows = cute.local_tile(mRows[batch, q_head, None, None], (1, self.tile_m), (None, None))
                for step in cutlass.range(steps.begin, steps.end, unroll=1):
                    sm90.load_block(q.atom, tQgQ, tQsQ, ring_q, step, done)
                    load_rows(gRows[0, None, 0, step], sLse[None, ring_q.slot(done)], ring_q, done)
                    sm90.load_block(do.atom, tOgO, tOsO, ring_do, step, done)
                    load_rows(gRows[0, None, 1, step], sDelta[None, ring_do.slot(done)], ring_do, done)
                    done += 1
            nth += 1
            number = work.queue.post(nth, work.queue.draw())

    @cute.jit
    def load_keys(self, k: sm90.Operand, v: sm90.Operand, work: Work):
        """Second producer warp: each tile's K and V, as soon as the tile before has no more use for its own."""
        nth, number = Int32(0), work.queue.take(Int32(0))
        while number < work.order.total:
            n_block, head, batch = work.order.tile(number)
            for x, ring, columns in ((k, work.rings.k, self.d), (v, work.rings.v, self.dv)):
                tXsX, tXgX = x.head(head, batch).tiles((ROWS, columns), (None, 0))
                ring.acquire(nth)
                for w in cutlass.range_constexpr(WARPGROUPS):
                    block = n_block * WARPGROUPS + w
                    cute.copy(x.atom, tXgX[None, block], tXsX[None, w], tma_bar_ptr=ring.arrival(nth))
            nth += 1
            number = work.queue.take(nth)

    def hold(self, buffers: tuple, rings: Rings, scratch: Scratch, couriers: sm90.Ring | None) -> Share:
        """Consumer warpgroup: its operands and registers."""
        sQ, sdO, sK, sV, sdS, sLse, sDelta, sdQ = buffers
        tidx = cute.arch.thread_idx()[0] - sm90.WARPGROUP
        wg, thread = cute.arch.make_warp_uniform(tidx // sm90.WARPGROUP), tidx % sm90.WARPGROUP
        keys_from = "registers" if self.roomy else "rows"
        scores = sm90.Product.create(lambda: sm90.make_mma(self.dtype, self.tile_m, keys_from, "rows"))
        for_dV = sm90.Product.create(lambda: sm90.make_mma(self.dtype, self.dv, "registers", "columns"))
        for_dK = sm90.Product.create(lambda: sm90.make_mma(self.dtype, self.d, "registers", "columns"))
        for_dQ = sm90.Product.create(lambda: sm90.make_mma(self.dtype, self.half, "rows", "columns"))
        mma_s, mma_v, mma_k, mma_q = (x.add.get_slice(thread) for x in (scores, for_dV, for_dK, for_dQ))
        (K, V), fetches = self.my_keys((sK[None, None, wg], sV[None, None, wg]), scores.add, thread)
        rows = tuple(mma_s.make_fragment_B(mma_s.partition_B(x)) for x in (sQ, sdO))
        columns = tuple(m.make_fragment_B(m.partition_B(sm90.transposed(x))) for m, x in ((mma_k, sQ), (mma_v, sdO)))
        S, dP = (sm90.zeros(mma_s, (ROWS, self.tile_m)) for _ in range(2))
        dK, dV = sm90.zeros(mma_k, (ROWS, self.d)), sm90.zeros(mma_v, (ROWS, self.dv))
        P = dS = fragments.OperandA.create(S, self.dtype)
        acc_dQ = cute.make_tensor(dP.iterator, cute.make_layout(mma_q.partition_shape_C((ROWS, self.half))))
        if self.roomy:
            dS, acc_dQ = fragments.OperandA.create(S, self.dtype), sm90.zeros(mma_q, (ROWS, self.half))
        my_columns = cute.local_tile(sm90.transposed(sK), (self.half, ROWS, WARPGROUPS), (wg, 0, 0))
        tQrK, tQrS = mma_q.make_fragment_B(mma_q.partition_B(my_columns)), mma_q.make_fragment_A(mma_q.partition_A(sdS))
        staging = sdQ[None, cute.arch.make_warp_uniform(tidx // sm90.WARP)]
        courier = None if couriers is None else couriers.part(wg, 1)
        dQ = QueryGradient(for_dQ, tQrS, tQrK, rings.ds, acc_dQ, staging, scratch, courier)
        matrices = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype)
        to_dS = cute.make_tiled_copy_C(matrices, scores.add).get_slice(thread)
        rdS = to_dS.retile(cute.make_tensor(cute.recast_ptr(dS.pairs.iterator, dtype=self.dtype), S.layout))
        crossing = (to_dS, rdS, to_dS.partition_D(sm90.transposed(sdS)))
        products, facts = (scores, for_dV, for_dK), (sLse, sDelta)
        return Share(wg, rings, products, (K, V), fetches, rows, columns, S, dP, dK, dV, P, dS, dQ, crossing, facts)

    @cute.jit
    def consume(
        self, buffers: tuple, outputs: tuple, backstage: Backstage, work: Work, scales: tuple,
        couriers: sm90.Ring | None,
    ):  # fmt: skip
        """Consumer warpgroup: dK and dV of its 64 keys, and half of the columns of each step's dQ."""
        rings = work.rings
        my = self.hold(buffers, rings, backstage.scratch, couriers)
        wg, thread = my.wg, cute.arch.thread_idx()[0] % sm90.WARPGROUP
        warp_idx, lane = cute.arch.make_warp_uniform(thread // sm90.WARP), thread % sm90.WARP

        nth, done, number = Int32(0), Int32(0), work.queue.take(Int32(0))
        while number < work.order.total:
            n_block, head, batch = work.order.tile(number)
            steps = work.order.steps(n_block)
            key = n_block * self.tile_n + wg * ROWS + warp_idx * SLAB + lane // 4
            mask = TransposedMask(work.order.geo, self.tile_m, key, lane % 4 * 2)
            rings.k.wait(nth)
            rings.v.wait(nth)
            my.fetch_keys()
            my.dK.fill(0.0)
            my.dV.fill(0.0)
            before, unit = done, Int32(0)
            for g in cutlass.range(work.group, unroll=1):
                q_head = head * work.group + g
                first_block = (batch * (work.group * work.order.heads) + q_head) * backstage.num_m_blocks
                for masked in cutlass.range_constexpr(1, -1, -1):
                    begin, end = (steps.begin, steps.middle) if masked else (steps.middle, steps.end)
                    for step in cutlass.range(begin, end, unroll=1):
                        hidden = (mask, step) if masked else None
                        if cutlass.const_expr(self.roomy):
                            self.step_at_once(my, done, (unit, done - before), hidden, scales[0])
                        else:
                            self.step_in_turn(my, done, (unit, done - before), hidden, scales[0])
                        rings.do.release(done)
                        rings.q.release(done)
                        unit = (first_block + step) * UNITS + wg * 4 + warp_idx
                        done += 1
            warpgroup.wait_group(0)
            rings.v.release(nth)
            warpgroup.fence()
            my.dQ.multiply(done - 1)
            warpgroup.wait_group(0)
            rings.k.release(nth)
            my.dQ.send(unit, done - before, done - 1)
            my.dQ.make_room(done)
            slab = n_block * (self.tile_n // SLAB) + wg * 4
            self.store(my.dV, Float32(1.0), outputs[1].head(head, batch), slab, my.products[1].add)
            self.store(my.dK, scales[1], outputs[0].head(head, batch), slab, my.products[2].add)
            if cutlass.const_expr(not self.in_order):
                cute.arch.cp_async_bulk_wait_group(2)  # all but the two stores: the last dQ has been added
                cute.arch.sync_warp()
                backstage.added.release(nth)
            nth += 1
            number = work.queue.take(nth)
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the last transfer

    @cute.jit
    def step_at_once(self, my: Share, done: Int32, last: tuple, hidden: tuple | None, scale_log2: Float32):
        """One step where every product has registers of its own."""
        slot = my.rings.q.slot(done)
        my.rings.q.wait(done)
        warpgroup.fence()
        my.issue_S(slot)
        my.rings.do.wait(done)
        my.issue_dP(slot)
        lse = row_values(my.facts[0], slot)  # before more products: behind them it costs 10 %
        my.dQ.multiply(done - 1)
        warpgroup.wait_group(2)  # S
        self.weigh(my, lse, hidden, scale_log2)
        my.P.take(my.S)
        warpgroup.fence()
        my.issue_dV(slot)
        delta = row_values(my.facts[1], slot)
        warpgroup.wait_group(1)  # dP, and dQ: the slot of its dS may be written again once this step's is there
        dP = fragments.rows_and_columns(my.dP)
        differentiate(fragments.rows_and_columns(my.S), dP, delta, dP)
        my.dS.take(my.dP)
        my.share_dS(done)
        warpgroup.fence()
        my.issue_dK(slot)
        my.dQ.send(*last, done - 1)
        warpgroup.wait_group(0)

    @cute.jit
    def step_in_turn(self, my: Share, done: Int32, last: tuple, hidden: tuple | None, scale_log2: Float32):
        """One step where dP takes the place of the dQ before, and dS that of P."""
        slot = my.rings.q.slot(done)
        my.rings.q.wait(done)
        warpgroup.fence()
        my.issue_S(slot)
        lse = row_values(my.facts[0], slot)  # here, as above
        my.dQ.multiply(done - 1)
        warpgroup.wait_group(1)  # S
        self.weigh(my, lse, hidden, scale_log2)
        my.P.take(my.S)
        warpgroup.wait_group(0)  # dQ
        my.dQ.send(*last, done - 1)
        my.rings.do.wait(done)
        warpgroup.fence()
        my.issue_dP(slot)
        my.issue_dV(slot)
        warpgroup.wait_group(1)  # dP
        dP = fragments.rows_and_columns(my.dP)
        differentiate(fragments.rows_and_columns(my.S), dP, row_values(my.facts[1], slot), dP)
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
        scores = fragments.rows_and_columns(my.S)
        if cutlass.const_expr(hidden is not None):
            mask, step = hidden
            mask.apply(scores, step)
        exponentiate(scores, lse_log2, scale_log2)

    def my_keys(self, sources: tuple, mma: cute.TiledMma, thread: Int32) -> tuple[tuple, tuple]:
        """A warpgroup's 64 keys as left operands of a product, and the copies that bring them there: in registers where
        there is room, which halves what is read from shared memory; else where they are.
        """
        part = mma.get_slice(thread)
        fragments = tuple(part.make_fragment_A(part.partition_A(s)) for s in sources)
        if not self.roomy:
            return fragments, ()
        matrices = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_A(matrices, mma).get_slice(thread)
        return fragments, tuple(
            (copy, copy.partition_S(s), copy.retile(x)) for s, x in zip(sources, fragments, strict=True)
        )

    @cute.jit
    def store(self, acc: cute.Tensor, factor: Float32, out: sm90.Operand, slab: Int32, mma: cute.TiledMma):
        """An accumulator in 16 bits through its warps' staging to global memory; each warp sends its 16 rows."""
        columns = cute.size(acc) * 2  # of 64 rows, by 128 threads
        wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // sm90.WARPGROUP - 1)
        rX = cute.make_rmem_tensor_like(acc, self.dtype)
        rX.store((acc.load() * factor).to(self.dtype))
        layout = sm90.slab_layout(self.dtype, ROWS, columns)
        start = cute.recast_ptr(out.s[None, wg * 4].iterator, layout.inner, dtype=self.dtype)
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # what was in this warp's staging has left it
        cute.arch.sync_warp()
        sm90.store_slabs(rX, cute.make_tensor(start, layout.outer), out, slab, mma)
