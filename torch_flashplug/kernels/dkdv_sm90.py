"""dK and dV on Hopper as a kernel of their own, from Q, K, V, dO, LSE and delta.

A CTA stays on its SM and draws blocks of 64 keys of one KV head. It keeps their dK and dV in registers while it walks
over the query rows that see them, of every query head of the group. Each of its two consumer warpgroups owns half of
the columns. The first one computes the scores and from them P, the second one dP and from it dS; both cross shared
memory, and each warpgroup multiplies its columns with its own from registers and the other's from there. Scores are
transposed (keys x queries), so that P^T and dS^T are left operands. Each warpgroup begins the next step's product of
whole rows as soon as this step's result is in 16 bits: it runs under the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ..spec import BACKWARD_WARPGROUPS, PARTS_TILE, REGISTER_SPLIT, ROWS_PER_WARPGROUP, HopperSpec
from .parts import fragments, sm90
from .parts.backward_rows import differentiate, exponentiate, load_rows, row_values
from .parts.geometry import Geometry
from .parts.key_order import KeyOrder, heads_in_turn
from .parts.mask import TransposedMask

ROWS, SLAB = ROWS_PER_WARPGROUP, sm90.SLAB
WARPGROUPS = BACKWARD_WARPGROUPS
TILE_M, TILE_N = PARTS_TILE
P, DS = 0, 1  # what crosses shared memory; its writers are the first and the second warpgroup
JOIN = 1  # named barrier, + warpgroup
# fp16 has no small numbers: P of a row with many keys would lose bits, or vanish. bf16 has all that fp32 has.
RAISED = {cutlass.BFloat16: 0, cutlass.Float16: 12}  # exponents by which P is larger on its way to the sums
STAGED_COLUMNS = 64  # of dK and dV, at most, that a warp stores at once


@dataclass(frozen=True)
class Rings:
    """From the producer warps to the consumers; `crossing` from each warpgroup to the other."""

    q: sm90.Ring
    do: sm90.Ring
    k: sm90.Ring
    v: sm90.Ring
    crossing: tuple  # P, dS


@dataclass(frozen=True)
class Work:
    """What every role follows."""

    rings: Rings
    queue: sm90.TileQueue
    order: KeyOrder
    group: Int32  # query heads of a KV head


@dataclass(frozen=True)
class Sum:
    """dV += P^T dO or dK += dS^T Q: this warpgroup's half of the columns."""

    product: sm90.Product
    left: cute.Tensor
    right: cute.Tensor  # by stage
    acc: cute.Tensor

    def issue(self, slot: Int32) -> None:
        self.product.issue(self.acc, self.left, self.right[None, None, None, slot], accumulate=True)


@dataclass(frozen=True)
class Half:
    """What a warpgroup works with."""

    wg: int
    rings: Rings
    scores: sm90.Product
    keys: cute.Tensor  # K or V: (MMA, 1, D/16)
    rows: cute.Tensor  # Q or dO with rows as columns of the scores: (MMA, 1, D/16, stage)
    acc: cute.Tensor  # S^T, or dP^T
    weights: fragments.OperandA  # P^T, or dS^T
    values: cute.Tensor  # the same registers, in the order of `acc`
    facts: cute.Tensor  # LSE * log2(e), or delta, of a step's queries: (TILE_M, stage)
    dV: Sum
    dK: Sum
    store: Callable  # the weights to shared memory
    load: Callable  # P from there

    @property
    def ring(self) -> sm90.Ring:
        """Of the steps' operand of whole rows: Q with LSE, or dO with delta."""
        return self.rings.do if self.wg else self.rings.q

    def issue_scores(self, slot: Int32) -> None:
        self.scores.issue(self.acc, self.keys, self.rows[None, None, None, slot], accumulate=False)

    @cute.jit
    def issue_next_scores(self, done: Int32, end: Int32):
        """Those of step `done`; beyond the last of the tile nobody looks at them, and a branch here would cost more."""
        if done < end:
            self.ring.wait(done)
        self.issue_scores(self.ring.slot(done))

    @cute.jit
    def hand_over(self, done: Int32):
        """The weights of this step, to the other warpgroup."""
        ring = self.rings.crossing[self.wg]
        ring.wait_free(done)
        self.store(self.values)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        ring.fill(done)

    @cute.jit
    def add_up(self, done: Int32, end: Int32):
        """dV and dK of a step whose weights of this warpgroup are there, and the next step's scores."""
        p, ds = self.rings.crossing
        slot = self.rings.q.slot(done)  # dO has as many
        if cutlass.const_expr(self.wg == 0):
            self.rings.do.wait(done)
        warpgroup.fence()
        self.dV.issue(slot)
        self.issue_next_scores(done + 1, end)
        if cutlass.const_expr(self.wg == 0):
            ds.wait(done)
        else:
            self.rings.q.wait(done)
        warpgroup.fence()
        self.dK.issue(slot)
        warpgroup.wait_group(2)  # dV
        self.rings.do.release(done)
        if cutlass.const_expr(self.wg == 1):
            p.release(done)
        warpgroup.wait_group(0)
        self.rings.q.release(done)
        if cutlass.const_expr(self.wg == 0):
            ds.release(done)


class KeyGradientsSm90:
    """Builds the kernel of one spec."""

    def __init__(self, spec: HopperSpec):
        self.spec, self.dtype, self.d, self.dv = spec, fragments.DTYPES[spec.dtype], spec.d, spec.dv
        self.stages, self.raised = spec.stages, RAISED[self.dtype]
        self.producer_registers, self.consumer_registers = REGISTER_SPLIT[WARPGROUPS]

    @cute.jit
    def __call__(self, tensors: tuple, mRows: cute.Tensor, scales: tuple, launch: tuple, stream: cuda.CUstream):
        """tensors: q, k, v, do, dk, dv as the forward has them; launch: counter, CTAs at once."""
        mQ, mK, mV, mdO, mdK, mdV = (sm90.rows_first(t) for t in tensors)
        operands = (
            (mQ, self.d, self.stages),
            (mK, self.d, 1),
            (mV, self.dv, 1),
            (mdO, self.dv, self.stages),
        )
        layouts = tuple(self.operand_layout(columns, slots) for _, columns, slots in operands)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        loads = tuple(
            cpasync.make_tiled_tma_atom(load, m, cute.slice_(layout, (None, None, 0)), (ROWS, columns))
            for (m, columns, _), layout in zip(operands, layouts, strict=True)
        )
        stores = tuple(
            cpasync.make_tiled_tma_atom(store, m, sm90.slab_layout(self.dtype, SLAB, columns), (SLAB, columns))
            for m, columns in ((mdK, staged_columns(self.d)), (mdV, staged_columns(self.dv)))
        )
        Sk, _, Hkv, B = mK.shape
        num_n_blocks, group = cute.ceil_div(Sk, TILE_N), mQ.shape[2] // Hkv
        geo = Geometry(self.spec.mask, TILE_N, mQ.shape[0], Sk)
        section = heads_in_turn(geo, TILE_M, (group, B * Hkv), (self.d + self.dv) * self.dtype.width // 8)
        self.kernel(
            tuple(x[0] for x in (*loads, *stores)), tuple(x[1] for x in (*loads, *stores)), mRows, scales, launch[0],
            section, layouts,
        ).launch(
            grid=(cutlass.min(num_n_blocks * B * Hkv, launch[1]), 1, 1),
            block=((WARPGROUPS + 1) * sm90.WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    def operand_layout(self, columns: int, slots: int) -> cute.ComposedLayout:
        """(64, columns, slot) in shared memory, swizzled so that half of the columns are whole atoms."""
        kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, columns // WARPGROUPS)
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, (ROWS, columns, slots), order=(0, 1, 2))

    @cute.kernel
    def kernel(
        self,
        atoms: tuple,  # TMA of q, k, v, do, dk, dv
        tensors: tuple,  # their TMA coordinates
        mRows: cute.Tensor,
        scales: tuple,  # scale * log2(e), scale
        mCounter: cute.Tensor,
        section: Int32,
        layouts: tuple,  # shared memory of q, k, v, do
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        element = self.dtype.width // 8
        smem = cutlass.memory.SmemAllocator()
        rings = Rings(
            sm90.Ring.create(smem, self.stages, TILE_M * (self.d * element + 4)),
            sm90.Ring.create(smem, self.stages, TILE_M * (self.dv * element + 4)),
            sm90.Ring.create(smem, 1, TILE_N * self.d * element),
            sm90.Ring.create(smem, 1, TILE_N * self.dv * element),
            tuple(sm90.Ring.create(smem, 1, 0) for _ in (P, DS)),
        )
        ring_mail = sm90.Ring.create(smem, sm90.MAIL_SLOTS, 0)
        mail = cute.make_tensor(smem.allocate_array(Int32, sm90.MAIL_SLOTS), cute.make_layout(sm90.MAIL_SLOTS))
        sQ, sK, sV, sdO = (smem.allocate_tensor(self.dtype, x.outer, 1024, x.inner) for x in layouts)
        crossing = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (TILE_M, ROWS, TILE_N), self.dtype, len((P, DS)))
        sX = smem.allocate_tensor(self.dtype, crossing.outer, 1024, crossing.inner)  # (queries, keys, P or dS)
        row_layout = cute.make_layout((TILE_M, self.stages))
        sLse, sDelta = (smem.allocate_tensor(Float32, row_layout, 128) for _ in range(2))

        mQ, mK, mV, mdO, mdK, mdV = tensors
        Sk, _, Hkv, B = mK.shape
        geo = Geometry(self.spec.mask, TILE_N, mQ.shape[0], Sk)
        order = KeyOrder(True, cute.ceil_div(Sk, TILE_N), Hkv, B * Hkv, section, geo, TILE_M)
        queue = sm90.TileQueue(mCounter.iterator, mail, ring_mail, order.total)
        work = Work(rings, queue, order, mQ.shape[2] // Hkv)
        consumers = 4 * WARPGROUPS
        streams, keys = ((ring, consumers) for ring in (rings.q, rings.do)), ((ring, 4) for ring in (rings.k, rings.v))
        crossing = ((ring, 4, 4) for ring in rings.crossing)
        sm90.start_cta(warp_idx, atoms, (*streams, *keys, *crossing, (ring_mail, consumers + 1)))
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                q, do = sm90.Operand(atoms[0], mQ, sQ), sm90.Operand(atoms[3], mdO, sdO)
                self.load_queries(q, do, (mRows, sLse, sDelta), work)
            elif warp_idx == 1:
                self.load_keys(sm90.Operand(atoms[1], mK, sK), sm90.Operand(atoms[2], mV, sV), work)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            out = (sm90.Operand(atoms[4], mdK, sX), sm90.Operand(atoms[5], mdV, sX))
            if warp_idx < 8:
                self.consume(self.hold(0, (sQ, sdO, sX), sK, sQ, sLse, rings), out, work, scales)
            else:
                self.consume(self.hold(1, (sQ, sdO, sX), sV, sdO, sDelta, rings), out, work, scales)

    @cute.jit
    def load_queries(self, q: sm90.Operand, do: sm90.Operand, rows: tuple, work: Work):
        """First producer warp: Q with its LSE and dO with its delta, step by step. It draws the tiles."""
        mRows, sLse, sDelta = rows
        nth, done, number = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while number < work.order.total:
            n_block, head, batch = work.order.tile(number)
            steps = work.order.steps(n_block)
            for g in cutlass.range(work.group, unroll=1):
                q_head = head * work.group + g
                gRows = cute.local_tile(mRows[batch, q_head, None, None], (1, TILE_M), (None, None))
                tQsQ, tQgQ = q.head(q_head, batch).tiles((TILE_M, self.d), (None, 0))
                tOsO, tOgO = do.head(q_head, batch).tiles((TILE_M, self.dv), (None, 0))
                for step in cutlass.range(steps.begin, steps.end, unroll=1):
                    for x, g_, s_, ring, which, sRow in (
                        (q, tQgQ, tQsQ, work.rings.q, 0, sLse),
                        (do, tOgO, tOsO, work.rings.do, 1, sDelta),
                    ):
                        sm90.load_block(x.atom, g_, s_, ring, step, done)
                        load_rows(gRows[0, None, which, step], sRow[None, ring.slot(done)], ring, done)
                    done += 1
            number = work.queue.post(nth, work.queue.draw())
            nth += 1

    @cute.jit
    def load_keys(self, k: sm90.Operand, v: sm90.Operand, work: Work):
        """Second producer warp: each tile's K and V, as soon as the tile before has no more use for its own."""
        nth, number = Int32(0), cute.arch.block_idx()[0]
        while number < work.order.total:
            n_block, head, batch = work.order.tile(number)
            for x, ring, columns in ((k, work.rings.k, self.d), (v, work.rings.v, self.dv)):
                tXsX, tXgX = x.head(head, batch).tiles((ROWS, columns), (None, 0))
                sm90.load_block(x.atom, tXgX, tXsX, ring, n_block, nth)
            number = work.queue.take(nth)
            nth += 1

    def hold(
        self, wg: int, shared: tuple, sKeys: cute.Tensor, sRows: cute.Tensor, facts: cute.Tensor, rings: Rings
    ) -> Half:
        """A consumer warpgroup's operands and registers."""
        sQ, sdO, sX = shared
        thread = cute.arch.thread_idx()[0] % sm90.WARPGROUP
        scores = sm90.Product.create(lambda: sm90.make_mma(self.dtype, TILE_M, "rows", "rows"))
        mma = scores.add.get_slice(thread)
        keys = mma.make_fragment_A(mma.partition_A(sKeys[None, None, 0]))
        rows = mma.make_fragment_B(mma.partition_B(sRows))
        acc = sm90.zeros(mma, (ROWS, TILE_M))
        weights = fragments.OperandA.create(acc, self.dtype)
        values = cute.make_tensor(cute.recast_ptr(weights.pairs.iterator, dtype=self.dtype), acc.layout)
        crossing = sm90.transposed(sX)  # (keys, queries, P or dS)

        def make_sum(which: int, columns: int, sRight: cute.Tensor) -> Sum:
            own = which == wg
            product = sm90.Product.create(
                lambda: sm90.make_mma(self.dtype, columns, "registers" if own else "columns", "columns")
            )
            part = product.add.get_slice(thread)
            left = part.make_fragment_A(part.partition_A(crossing[None, None, which]))
            half = cute.local_tile(sm90.transposed(sRight), (columns, TILE_M, self.stages), (wg, 0, 0))
            right = part.make_fragment_B(part.partition_B(half))
            return Sum(product, weights.fragment if own else left, right, sm90.zeros(part, (ROWS, columns)))

        dV, dK = make_sum(P, self.dv // WARPGROUPS, sdO), make_sum(DS, self.d // WARPGROUPS, sQ)
        to_smem, from_smem = (
            cute.make_tiled_copy_C(cute.make_copy_atom(op(True, 4), self.dtype), scores.add).get_slice(thread)
            for op in (warp.StMatrix8x8x16bOp, warp.LdMatrix8x8x16bOp)
        )

        def store(values):
            cute.copy(to_smem, to_smem.retile(values), to_smem.partition_D(crossing[None, None, wg]))

        def load(values):
            cute.copy(from_smem, from_smem.partition_S(crossing[None, None, P]), from_smem.retile(values))

        return Half(wg, rings, scores, keys, rows, acc, weights, values, facts, dV, dK, store, load)

    @cute.jit
    def consume(self, my: Half, out: tuple, work: Work, scales: tuple):
        """Consumer warpgroup: half of the columns of dK and dV of every tile."""
        rings = work.rings
        keys = rings.v if my.wg else rings.k
        lane, warp_in_group = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        nth, done, number = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while number < work.order.total:
            n_block, head, batch = work.order.tile(number)
            steps = work.order.steps(n_block)
            end = done + work.group * (steps.end - steps.begin)
            key = n_block * TILE_N + warp_in_group * SLAB + lane // 4
            mask = TransposedMask(work.order.geo, TILE_M, key, lane % 4 * 2)
            my.dK.acc.fill(0.0)
            my.dV.acc.fill(0.0)
            keys.wait(nth)
            warpgroup.fence()
            my.issue_next_scores(done, end)
            warpgroup.wait_group(0)
            self.reclaim(my.wg)
            masked, whole = (steps.begin, steps.middle, mask), (steps.middle, steps.end, None)
            parts = (masked, whole) if my.wg == 0 else ((steps.begin, steps.end, None),)
            for _ in cutlass.range(work.group, unroll=1):
                for begin, stop, hiding in parts:
                    for step in cutlass.range(begin, stop, unroll=1):
                        if cutlass.const_expr(my.wg == 0):
                            self.weigh(my, done, hiding, step, scales[0])
                        else:
                            self.differentiate(my, done)
                        my.hand_over(done)
                        my.add_up(done, end)
                        done += 1
            keys.release(nth)
            rings.crossing[my.wg].wait_free(done)  # outputs leave through its place
            slab = n_block * (TILE_N // SLAB)
            self.store(my, my.dV.acc, Float32(2.0**-self.raised), out[1].head(head, batch), slab)
            self.store(my, my.dK.acc, scales[1], out[0].head(head, batch), slab)
            number = work.queue.take(nth)
            nth += 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the last store

    @cute.jit
    def weigh(self, my: Half, done: Int32, mask: TransposedMask | None, step: Int32, scale_log2: Float32):
        """First warpgroup: P."""
        scores, lse_log2 = fragments.rows_and_columns(my.acc), row_values(my.facts, my.rings.q.slot(done))
        if cutlass.const_expr(self.raised != 0):
            lse_log2.store(lse_log2.load() - Float32(self.raised))
        if cutlass.const_expr(mask is not None):
            mask.apply(scores, step)
        exponentiate(scores, lse_log2, scale_log2)
        my.weights.take(my.acc)

    @cute.jit
    def differentiate(self, my: Half, done: Int32):
        """Second warpgroup: dS = P * (dP - delta); the scale comes with dK."""
        delta = row_values(my.facts, my.rings.do.slot(done))
        my.rings.crossing[P].wait(done)
        my.load(my.values)
        weights, dP = fragments.rows_and_columns(my.values), fragments.rows_and_columns(my.acc)
        differentiate(weights, dP, delta, dP, self.raised)
        my.weights.take(my.acc)

    @cute.jit
    def reclaim(self, wg: int):
        """What outputs of the tile before left through is free for all four warps to write weights into."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        sm90.join_warpgroup(JOIN, wg)

    @cute.jit
    def store(self, my: Half, acc: cute.Tensor, factor: Float32, out: sm90.Operand, slab: Int32):
        """This warpgroup's columns of an output through the place of its weights, some columns at a time."""
        columns = staged_columns(cute.size(acc) * 2 * WARPGROUPS)
        parts = cute.size(acc) * 2 // columns
        mma = sm90.make_mma(self.dtype, columns, "rows", "columns")
        layout = sm90.slab_layout(self.dtype, ROWS, columns)
        start = out.s[None, None, my.wg].iterator
        if cutlass.const_expr(columns < STAGED_COLUMNS):
            # Each warp has the same place for dV and for dK, whose slabs may be smaller.
            spare = SLAB * (STAGED_COLUMNS - columns)
            warp_in_group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
            start = start + cute.assume(warp_in_group * spare, divby=spare)
        start = cute.recast_ptr(start, layout.inner, dtype=self.dtype)
        for part in cutlass.range_constexpr(parts):
            registers = cute.make_tensor(acc.iterator + part * (columns // 2), mma.partition_shape_C((ROWS, columns)))
            rX = cute.make_rmem_tensor_like(registers, self.dtype)
            rX.store((registers.load() * factor).to(self.dtype))
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # what was in this warp's part has left it
            cute.arch.sync_warp()
            sm90.store_slabs(rX, cute.make_tensor(start, layout.outer), out, slab, mma, my.wg * parts + part)


def staged_columns(columns: int) -> int:
    """Of a warpgroup's half of an output: what leaves at once, all or half of it."""
    mine = columns // WARPGROUPS
    return mine if mine <= STAGED_COLUMNS else mine // 2
