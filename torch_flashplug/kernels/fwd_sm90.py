"""Attention forward for Hopper: O = softmax(scale * Q K^T) V and LSE, from one pass over the keys.

A CTA stays on its SM and draws tiles of tile_m query rows of one head until none is left. Its producer warp streams Q,
K and V through rings of TMA buffers, running ahead into the next tile; each consumer warpgroup owns 64 of the rows,
from its Q to its O, and never talks to the others except to take turns on the tensor cores. Block j's scores are
multiplied while block j-1's output is (FlashAttention-3, arXiv 2407.08608, section 3.2), so softmax always has tensor
work under it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ..spec import REGISTER_SPLIT, ROWS_PER_WARPGROUP, HopperSpec
from .parts import fragments, sm90
from .parts.forward_call import Call, ForwardCall
from .parts.geometry import Geometry
from .parts.mask import Mask
from .parts.scheduler import TileOrder
from .parts.softmax import OnlineSoftmax, write_lse

ROWS, SLAB = ROWS_PER_WARPGROUP, sm90.SLAB


class Barrier(enum.IntEnum):
    """Named barriers; 0 is sync_threads."""

    TURN = 1  # + warpgroup
    Q_READ = 4  # + warpgroup: its last product with Q is done


@dataclass(frozen=True)
class Work:
    """What both roles follow: the rings between them, the tiles to do, and the blocks of each."""

    ring_q: sm90.Ring
    ring_k: sm90.Ring
    ring_v: sm90.Ring
    queue: sm90.TileQueue
    order: TileOrder
    geo: Geometry


@dataclass(frozen=True)
class Scores:
    """S = Q K^T of a warpgroup with a KV block, or with its first columns only."""

    product: sm90.Product
    keys: cute.Tensor  # (MMA, 1, D/16, slot)
    acc: cute.Tensor
    values: cute.Tensor  # (2, columns), the same registers

    def issue(self, my_Q: cute.Tensor, slot: Int32) -> None:
        self.product.issue(self.acc, my_Q, self.keys[None, None, None, slot], accumulate=False)


@dataclass(frozen=True)
class FirstBlock:
    """The rightmost block of a tile, which nothing comes before."""

    my_Q: cute.Tensor
    ring_k: sm90.Ring
    nth: Int32  # of the K's
    turns: sm90.Turns
    mask: Mask
    n_block: Int32
    softmax: OnlineSoftmax
    P: fragments.OperandA

    @cute.jit
    def weigh(self, S: Scores):
        self.ring_k.wait(self.nth)
        self.turns.take()
        warpgroup.fence()
        S.issue(self.my_Q, self.ring_k.slot(self.nth))
        self.turns.pass_on()
        warpgroup.wait_group(0)
        self.ring_k.release(self.nth)
        self.mask.apply(S.values, self.n_block)
        self.softmax.step(S.values, first=True, masked=True)
        self.P.take(S.acc)


class ForwardSm90(ForwardCall):
    """Builds the kernel of one spec; every size below is known when it is traced."""

    def __init__(self, spec: HopperSpec):
        self.spec = spec
        self.dtype = fragments.DTYPES[spec.dtype]
        self.tile_m, self.tile_n, self.d, self.dv = spec.tile_m, spec.tile_n, spec.d, spec.dv
        self.stages, self.q_slots, self.q_columns = spec.stages, spec.q_slots, spec.q_columns
        self.warpgroups = spec.warpgroups
        self.early_rescale = spec.early_rescale
        # Without room for two tiles of Q the next one waits for O to leave: each warpgroup sees to that at once.
        self.hasty = spec.q_slots < 2 * self.warpgroups
        # The first warpgroups of a tile may see fewer blocks than the last, and of three the last often has no rows.
        diagonal = spec.mask == "causal" and spec.tile_n % spec.tile_m != 0
        self.uneven = self.warpgroups > 1 and (diagonal or self.warpgroups == 3)
        # Half a diagonal block is 64 wide: all that every other warpgroup sees of it. (At Dv > D ptxas would serialise
        # every product.)
        self.halves = spec.mask == "causal" and spec.tile_n == 2 * ROWS and spec.dv <= spec.d
        self.producer_registers, self.consumer_registers = REGISTER_SPLIT[self.warpgroups]

    @cute.jit
    def launch(self, call: Call, stream: cuda.CUstream):
        # V seen as (Dv, Sk), the N x K operand of the second product.
        mQ, mK, mO = (sm90.rows_first(t) for t in (call.q, call.k, call.o))
        mVt = cute.make_tensor(call.v.iterator, cute.select(call.v.layout, mode=[3, 2, 1, 0]))
        row_major, col_major = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        layouts = (
            hopper.make_smem_layout_a(row_major, (ROWS, self.tile_n, self.q_columns), self.dtype, self.q_slots),
            hopper.make_smem_layout_b(row_major, (ROWS, self.tile_n, self.d), self.dtype, self.stages),
            hopper.make_smem_layout_b(col_major, (ROWS, self.dv, self.tile_n), self.dtype, self.stages),
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        one_slot = [cute.slice_(layout, (None, None, 0)) for layout in layouts]
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, mQ, one_slot[0], (ROWS, self.q_columns))
        tma_k, mK = cpasync.make_tiled_tma_atom(load, mK, one_slot[1], (self.tile_n, self.d))
        tma_v, mVt = cpasync.make_tiled_tma_atom(load, mVt, one_slot[2], (self.dv, self.tile_n))
        tma_o, mO = cpasync.make_tiled_tma_atom(store, mO, sm90.slab_layout(self.dtype, SLAB, self.dv), (SLAB, self.dv))

        B, Hq, Sq = call.lse.shape
        num_m_blocks, total_heads = cute.ceil_div(Sq, self.tile_m), B * Hq
        kv_head_bytes = cutlass.Int64(mK.shape[0]) * ((self.d + self.dv) * self.dtype.width // 8)
        section = TileOrder.section_heads(kv_head_bytes, num_m_blocks, Hq // mK.shape[2], total_heads)
        self.kernel(
            (tma_q, tma_k, tma_v, tma_o), (mQ, mK, mVt, mO), call.lse, call.scales, call.counter, section, layouts
        ).launch(
            grid=(cutlass.min(num_m_blocks * total_heads, call.num_ctas), 1, 1),
            block=(self.spec.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,  # without it ptxas may drop the register split
        )

    def make_qk(self, columns: int) -> cute.TiledMma:
        """S = Q K^T, both from shared memory."""
        return sm90.make_mma(self.dtype, columns, "rows", "rows")

    def make_pv(self) -> cute.TiledMma:
        """O += P V, P from registers."""
        return sm90.make_mma(self.dtype, self.dv, "registers", "columns")

    def make_scores(self, sK: cute.Tensor, thread: Int32, registers: cute.Tensor, columns: int) -> Scores:
        """S of the first `columns` keys of a block, kept in the first of `registers`."""
        product = sm90.Product.create(lambda: self.make_qk(columns))
        part = product.add.get_slice(thread)
        keys = part.make_fragment_B(part.partition_B(cute.local_tile(sK, (columns, self.d, self.stages), (0, 0, 0))))
        layout = cute.make_layout(part.partition_shape_C((ROWS, columns)))
        acc = cute.make_tensor(registers.iterator, layout)
        return Scores(product, keys, acc, fragments.rows_and_columns(acc))

    @cute.kernel
    def kernel(
        self,
        atoms: tuple,  # TMA of q, k, v, o
        tensors: tuple,  # their TMA coordinates
        mLSE: cute.Tensor,
        scales: tuple,  # scale * log2(e), scale
        mCounter: cute.Tensor,
        section: Int32,
        layouts: tuple,  # shared memory of q, k, v
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        element = self.dtype.width // 8
        smem = cutlass.memory.SmemAllocator()

        def buffer(layout: cute.ComposedLayout) -> cute.Tensor:
            return smem.allocate_tensor(self.dtype, layout.outer, 1024, layout.inner)

        ring_q = sm90.Ring.create(smem, self.q_slots, ROWS * self.q_columns * element)
        ring_k = sm90.Ring.create(smem, self.stages, self.tile_n * self.d * element)
        ring_v = sm90.Ring.create(smem, self.stages, self.tile_n * self.dv * element)
        ring_mail = sm90.Ring.create(smem, sm90.MAIL_SLOTS, 0)
        mail = cute.make_tensor(smem.allocate_array(Int32, sm90.MAIL_SLOTS), cute.make_layout(sm90.MAIL_SLOTS))
        # (64, D, q_slot), (tile_n, D, slot), (Dv, tile_n, slot)
        sQ, sK, sVt = (buffer(layout) for layout in layouts)

        mQ, mK, mVt, mO = tensors
        B, Hq, Sq = mLSE.shape
        order = TileOrder(self.spec.mask == "causal", cute.ceil_div(Sq, self.tile_m), Hq, B * Hq, section)
        queue = sm90.TileQueue(mCounter.iterator, mail, ring_mail, order.total)
        geo = Geometry(self.spec.mask, self.tile_n, Sq, mK.shape[0])
        work = Work(ring_q, ring_k, ring_v, queue, order, geo)
        shared = ((ring, 4 * self.warpgroups) for ring in (ring_k, ring_v, ring_mail))
        sm90.start_cta(warp_idx, atoms, ((ring_q, 4), *shared))

        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                self.load(
                    sm90.Operand(atoms[0], mQ, sQ),
                    sm90.Operand(atoms[1], mK, sK),
                    sm90.Operand(atoms[2], mVt, sVt),
                    work,
                )
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume((sQ, sK, sVt), work, sm90.Operand(atoms[3], mO, sQ), mLSE, scales)

    @cute.jit
    def load(self, q: sm90.Operand, k: sm90.Operand, v: sm90.Operand, work: Work):
        """Producer warp. A tile's loads, in the order in which they are multiplied: K(0) and Q, then K(j) ahead of
        V(j-1), V of the last.
        """
        ring_q, ring_k, ring_v = work.ring_q, work.ring_k, work.ring_v
        group = work.order.heads // k.m.shape[2]
        nth, done = Int32(0), Int32(0)  # tiles and KV blocks so far
        number = cute.arch.block_idx()[0]
        while number < work.order.total:
            m_block, head, batch = work.order.tile(number)
            blocks = work.geo.num_blocks((m_block + 1) * self.tile_m)
            tQsQ, tQgQ = q.head(head, batch).tiles((ROWS, self.q_columns), (None, 0))
            tKsK, tKgK = k.head(head // group, batch).tiles((self.tile_n, self.d), (None, 0))
            tVsV, tVgV = v.head(head // group, batch).tiles((self.dv, self.tile_n), (0, None))
            sm90.load_block(k.atom, tKgK, tKsK, ring_k, blocks - 1, done)  # ahead of Q, which may wait for an O
            for w in cutlass.range_constexpr(self.warpgroups):
                sm90.load_block(q.atom, tQgQ, tQsQ, ring_q, m_block * self.warpgroups + w, nth * self.warpgroups + w)
            for j in cutlass.range(1, blocks, unroll=1):
                sm90.load_block(k.atom, tKgK, tKsK, ring_k, blocks - 1 - j, done + j)
                sm90.load_block(v.atom, tVgV, tVsV, ring_v, blocks - j, done + j - 1)
            # As late as the atomic's latency allows: a CTA that draws while it has a long tile before it keeps the next
            # one from CTAs that run dry first.
            ticket = work.queue.draw()
            sm90.load_block(v.atom, tVgV, tVsV, ring_v, Int32(0), done + blocks - 1)
            number = work.queue.post(nth, ticket)
            nth += 1
            done += blocks

    @cute.jit
    def consume(self, buffers: tuple, work: Work, out: sm90.Operand, mLSE: cute.Tensor, scales: tuple):
        """Consumer warpgroup: its 64 rows of every tile, KV blocks from the right: the masked ones first."""
        sQ, sK, sVt = buffers
        ring_q, ring_k, ring_v = work.ring_q, work.ring_k, work.ring_v
        tidx = cute.arch.thread_idx()[0] - sm90.WARPGROUP
        wg, thread = cute.arch.make_warp_uniform(tidx // sm90.WARPGROUP), tidx % sm90.WARPGROUP
        lane = thread % sm90.WARP
        acc_S = sm90.zeros(self.make_qk(self.tile_n), (ROWS, self.tile_n))
        S, half = (self.make_scores(sK, thread, acc_S, self.tile_n // parts) for parts in (1, 2))
        times_v = sm90.Product.create(self.make_pv)
        qk, pv = S.product.add.get_slice(thread), times_v.add.get_slice(thread)
        tSrQ = qk.make_fragment_A(qk.partition_A(sQ))  # (MMA, 1, D/16, slot)
        tOrV = pv.make_fragment_B(pv.partition_B(sVt))  # (MMA, 1, tile_n/16, slot)
        acc_O = sm90.zeros(pv, (ROWS, self.dv))
        P = fragments.OperandA.create(S.acc, self.dtype)  # (MMA, 1, tile_n/16)
        output = fragments.rows_and_columns(acc_O)
        softmax = OnlineSoftmax.create(scales[0])
        turns = sm90.Turns(Barrier.TURN, wg, self.warpgroups)
        turns.start()

        nth, done, number = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while number < work.order.total:
            m_block, head, batch = work.order.tile(number)
            wg_tile = m_block * self.warpgroups + wg
            row = wg_tile * ROWS + thread // sm90.WARP * SLAB + lane // 4
            mask = Mask(work.geo, row, lane % 4 * 2)
            foreign, blocks = work.geo.split_blocks((m_block + 1) * self.tile_m, wg_tile * ROWS, ROWS, self.uneven)
            done = pass_over(foreign, ring_k, ring_v, turns, done)
            partial = work.geo.num_partial(blocks, wg_tile * ROWS)
            nth_q = nth * self.warpgroups + wg  # of the Q's
            my_Q = tSrQ[None, None, None, ring_q.slot(nth_q)]

            ring_q.wait(nth_q)
            first = FirstBlock(my_Q, ring_k, done, turns, mask, blocks - 1, softmax, P)
            seen = work.geo.num_visible((wg_tile + 1) * ROWS) - (blocks - 1) * self.tile_n
            self.weigh_first(first, S, half, seen)
            acc_O.fill(0.0)
            if cutlass.const_expr(not self.hasty):
                hand_back(ring_q, nth_q - self.warpgroups)

            for masked in cutlass.range_constexpr(1, -1, -1):
                begin, end = (1, partial) if masked else (partial, blocks)
                for j in cutlass.range(begin, end, unroll=1):
                    now, before = done + j, done + j - 1
                    ring_k.wait(now)
                    turns.take()
                    warpgroup.fence()
                    S.issue(my_Q, ring_k.slot(now))
                    if cutlass.const_expr(self.early_rescale):
                        softmax.rescale(output)
                        warpgroup.fence()
                    ring_v.wait(before)
                    times_v.issue(acc_O, P.fragment, tOrV[None, None, None, ring_v.slot(before)], accumulate=True)
                    turns.pass_on()
                    warpgroup.wait_group(1)
                    ring_k.release(now)
                    if cutlass.const_expr(masked):
                        mask.apply(S.values, blocks - 1 - j)
                    softmax.step(S.values, first=False, masked=bool(masked))
                    warpgroup.wait_group(0)
                    ring_v.release(before)
                    P.take(S.acc)
                    if cutlass.const_expr(not self.early_rescale):
                        softmax.rescale(output)

            done += blocks
            if cutlass.const_expr(self.early_rescale):
                softmax.rescale(output)
            ring_v.wait(done - 1)
            warpgroup.fence()
            times_v.issue(acc_O, P.fragment, tOrV[None, None, None, ring_v.slot(done - 1)], accumulate=True)
            warpgroup.wait_group(0)
            ring_v.release(done - 1)
            lse = softmax.finish(output, scales[1])
            write_lse(mLSE, lse, (batch, head, row), work.geo.Sq)
            self.store(acc_O, out.head(head, batch), ring_q.slot(nth_q), wg_tile, times_v.add)
            if cutlass.const_expr(self.hasty):
                hand_back(ring_q, nth_q)
            number = work.queue.take(nth)
            nth += 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the last store

    @cute.jit
    def weigh_first(self, first: FirstBlock, S: Scores, half: Scores, seen: Int32):
        """The rightmost block; rows that see no more than half of it do half of the work."""
        if cutlass.const_expr(self.halves):
            if cute.arch.make_warp_uniform(seen) <= self.tile_n // 2:
                first.weigh(half)
            else:
                first.weigh(S)
        else:
            first.weigh(S)

    @cute.jit
    def store(self, acc_O: cute.Tensor, out: sm90.Operand, slot: Int32, wg_tile: Int32, mma_pv: cute.TiledMma):
        """O in 16 bits through its Q's slot of shared memory to global memory; each warp sends its 16 rows when it has
        them.
        """
        wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // sm90.WARPGROUP - 1)
        rO = cute.make_rmem_tensor_like(acc_O, self.dtype)
        rO.store(acc_O.load().to(self.dtype))
        slot_start = cute.slice_(out.s, (None, None, slot)).iterator
        sO = cute.make_tensor(slot_start, sm90.slab_layout(self.dtype, ROWS, self.dv).outer)  # (64, Dv)
        sm90.join_warpgroup(Barrier.Q_READ, wg)  # no warp of the group may still be reading Q
        sm90.store_slabs(rO, sO, out, wg_tile * (ROWS // SLAB), mma_pv)


@cute.jit
def hand_back(ring_q: sm90.Ring, count: Int32):
    """Consumer warp: the O of this Q, if there is one, has left shared memory; the slot may take another Q."""
    if count >= 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        ring_q.release(count)


@cute.jit
def pass_over(blocks: Int32, ring_k: sm90.Ring, ring_v: sm90.Ring, turns: sm90.Turns, done: Int32) -> Int32:
    """Consumer warpgroup: let go of KV blocks that only others need; the count of blocks done after them."""
    for count in cutlass.range(done, done + blocks, unroll=1):
        ring_k.wait(count)
        turns.skip()
        ring_k.release(count)
        ring_v.wait(count)
        ring_v.release(count)
    return done + blocks
