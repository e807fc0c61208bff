"""dQ on Hopper as a kernel of its own, from Q, K, V, dO, LSE and delta: a walk over the keys, as the forward's.

A CTA stays on its SM and draws tiles of 128 query rows of one head. Each of its two consumer warpgroups owns 64 of the
rows and their dQ in registers. It multiplies dQ += dS K, the next block's scores and its dP on end, and turns these
into dS while the other warpgroup multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ..spec import BACKWARD_WARPGROUPS, PARTS_TILE, REGISTER_SPLIT, ROWS_PER_WARPGROUP, HopperSpec
from .parts import fragments, sm90
from .parts.backward_rows import differentiate, exponentiate
from .parts.geometry import Geometry
from .parts.mask import Mask
from .parts.scheduler import TileOrder

ROWS, SLAB = ROWS_PER_WARPGROUP, sm90.SLAB
WARPGROUPS = BACKWARD_WARPGROUPS
TILE_M, TILE_N = WARPGROUPS * ROWS, PARTS_TILE[1]  # query rows of a CTA, keys of a step
JOIN = 1  # named barrier, + warpgroup


@dataclass(frozen=True)
class Rings:
    """From the producer warp to the consumers; Q and dO by 64 rows, one slot for each warpgroup."""

    q: sm90.Ring
    do: sm90.Ring
    k: sm90.Ring
    v: sm90.Ring


@dataclass(frozen=True)
class Work:
    """What both roles follow."""

    rings: Rings
    queue: sm90.TileQueue
    order: TileOrder
    geo: Geometry


@dataclass(frozen=True)
class Share:
    """What a warpgroup works with: its rows of Q and dO, the ring of K and V, its registers."""

    rings: Rings
    scores: sm90.Product  # of Q and K, and of dO and V
    sums: sm90.Product  # dQ += dS K
    rows: tuple  # Q and dO: (MMA, 1, D/16)
    keys: tuple  # K and V with keys as columns of the scores: (MMA, 1, D/16, slot)
    columns: cute.Tensor  # K, summed over its keys: (MMA, 1, TILE_N/16, slot)
    S: cute.Tensor  # then P, then dS
    dP: cute.Tensor
    dS: fragments.OperandA
    dQ: cute.Tensor

    def issue_scores(self, count: Int32) -> None:
        """Both products of a block, one group each."""
        for acc, rows, keys, ring in (
            (self.S, self.rows[0], self.keys[0], self.rings.k),
            (self.dP, self.rows[1], self.keys[1], self.rings.v),
        ):
            ring.wait(count)
            self.scores.issue(acc, rows, keys[None, None, None, ring.slot(count)], accumulate=False)

    def issue_dQ(self, count: Int32) -> None:
        slot = self.rings.k.slot(count)
        self.sums.issue(self.dQ, self.dS.fragment, self.columns[None, None, None, slot], accumulate=True)


@dataclass(frozen=True)
class Rows:
    """Two query rows of a thread: what makes P and dS of their scores."""

    lse_log2: tuple
    delta: tuple
    scale_log2: Float32


class QueryGradientSm90:
    """Builds the kernel of one spec."""

    def __init__(self, spec: HopperSpec):
        self.spec, self.dtype, self.d, self.dv = spec, fragments.DTYPES[spec.dtype], spec.d, spec.dv
        self.producer_registers, self.consumer_registers = REGISTER_SPLIT[WARPGROUPS]
        self.stages_k, self.stages_v = 2, spec.dq_stages_v

    @cute.jit
    def __call__(self, tensors: tuple, mRows: cute.Tensor, scales: tuple, launch: tuple, stream: cuda.CUstream):
        """tensors: q, k, v, do, dq as the forward has them; launch: counter, CTAs at once."""
        mQ, mK, mV, mdO, mdQ = (sm90.rows_first(t) for t in tensors)
        slots = (WARPGROUPS, self.stages_k, self.stages_v, WARPGROUPS)
        columns = (self.d, self.d, self.dv, self.dv)
        layouts = tuple(
            hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, ROWS, columns[i]), self.dtype, slots[i])
            for i in range(4)
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        loads = tuple(
            cpasync.make_tiled_tma_atom(load, m, cute.slice_(layout, (None, None, 0)), (ROWS, width))
            for m, layout, width in zip((mQ, mK, mV, mdO), layouts, columns, strict=True)
        )
        out = cpasync.make_tiled_tma_atom(store, mdQ, sm90.slab_layout(self.dtype, SLAB, self.d), (SLAB, self.d))
        Sq, _, Hq, B = mQ.shape
        num_m_blocks = cute.ceil_div(Sq, TILE_M)
        head_bytes = Int64(mK.shape[0]) * ((self.d + self.dv) * self.dtype.width // 8)
        section = TileOrder.section_heads(head_bytes, num_m_blocks, Hq // mK.shape[2], Hq * B)
        self.kernel(
            tuple(x[0] for x in (*loads, out)), tuple(x[1] for x in (*loads, out)), mRows, scales, launch[0], section,
            layouts,
        ).launch(
            grid=(cutlass.min(num_m_blocks * Hq * B, launch[1]), 1, 1),
            block=((WARPGROUPS + 1) * sm90.WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        atoms: tuple,  # TMA of q, k, v, do, dq
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
            sm90.Ring.create(smem, WARPGROUPS, ROWS * self.d * element),
            sm90.Ring.create(smem, WARPGROUPS, ROWS * self.dv * element),
            sm90.Ring.create(smem, self.stages_k, TILE_N * self.d * element),
            sm90.Ring.create(smem, self.stages_v, TILE_N * self.dv * element),
        )
        ring_mail = sm90.Ring.create(smem, sm90.MAIL_SLOTS, 0)
        mail = cute.make_tensor(smem.allocate_array(Int32, sm90.MAIL_SLOTS), cute.make_layout(sm90.MAIL_SLOTS))
        sQ, sK, sV, sdO = (smem.allocate_tensor(self.dtype, x.outer, 1024, x.inner) for x in layouts)
        mQ, mK, mV, mdO, mdQ = tensors
        Sq, _, Hq, B = mQ.shape
        order = TileOrder(self.spec.mask == "causal", cute.ceil_div(Sq, TILE_M), Hq, Hq * B, section)
        queue = sm90.TileQueue(mCounter.iterator, mail, ring_mail, order.total)
        work = Work(rings, queue, order, Geometry(self.spec.mask, TILE_N, Sq, mK.shape[0]))
        own, shared = (rings.q, rings.do), (rings.k, rings.v, ring_mail)
        counted = (*((ring, 4) for ring in own), *((ring, 4 * WARPGROUPS) for ring in shared))
        sm90.start_cta(warp_idx, atoms, counted)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                q, k, v, do = (
                    sm90.Operand(atoms[i], m, s) for i, (m, s) in enumerate(((mQ, sQ), (mK, sK), (mV, sV), (mdO, sdO)))
                )
                self.load(q, k, v, do, work)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume((sQ, sK, sV, sdO), work, sm90.Operand(atoms[4], mdQ, sQ), mRows, scales)

    @cute.jit
    def load(self, q: sm90.Operand, k: sm90.Operand, v: sm90.Operand, do: sm90.Operand, work: Work):
        """Producer warp: a tile's Q and dO under its first K and V, then K and V to the left."""
        rings, group = work.rings, work.order.heads // k.m.shape[2]
        nth, done, number = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while number < work.order.total:
            m_block, head, batch = work.order.tile(number)
            blocks = work.geo.num_blocks((m_block + 1) * TILE_M)
            tQsQ, tQgQ = q.head(head, batch).tiles((ROWS, self.d), (None, 0))
            tOsO, tOgO = do.head(head, batch).tiles((ROWS, self.dv), (None, 0))
            tKsK, tKgK = k.head(head // group, batch).tiles((TILE_N, self.d), (None, 0))
            tVsV, tVgV = v.head(head // group, batch).tiles((TILE_N, self.dv), (None, 0))
            sm90.load_block(k.atom, tKgK, tKsK, rings.k, blocks - 1, done)  # ahead of Q, which may wait for a dQ
            sm90.load_block(v.atom, tVgV, tVsV, rings.v, blocks - 1, done)
            for w in cutlass.range_constexpr(WARPGROUPS):
                block, count = m_block * WARPGROUPS + w, nth * WARPGROUPS + w
                sm90.load_block(do.atom, tOgO, tOsO, rings.do, block, count)
                sm90.load_block(q.atom, tQgQ, tQsQ, rings.q, block, count)
            for j in cutlass.range(1, blocks, unroll=1):
                sm90.load_block(k.atom, tKgK, tKsK, rings.k, blocks - 1 - j, done + j)
                sm90.load_block(v.atom, tVgV, tVsV, rings.v, blocks - 1 - j, done + j)
            number = work.queue.post(nth, work.queue.draw())
            nth += 1
            done += blocks

    def hold(self, buffers: tuple, work: Work, wg: Int32, thread: Int32) -> Share:
        """Consumer warpgroup: its operands and registers."""
        sQ, sK, sV, sdO = buffers
        scores = sm90.Product.create(lambda: sm90.make_mma(self.dtype, TILE_N, "rows", "rows"))
        sums = sm90.Product.create(lambda: sm90.make_mma(self.dtype, self.d, "registers", "columns"))
        mma_s, mma_q = scores.add.get_slice(thread), sums.add.get_slice(thread)
        rows = tuple(mma_s.make_fragment_A(mma_s.partition_A(s[None, None, wg])) for s in (sQ, sdO))
        keys = tuple(mma_s.make_fragment_B(mma_s.partition_B(s)) for s in (sK, sV))
        columns = mma_q.make_fragment_B(mma_q.partition_B(sm90.transposed(sK)))
        S, dP = (sm90.zeros(mma_s, (ROWS, TILE_N)) for _ in range(2))
        dQ = sm90.zeros(mma_q, (ROWS, self.d))
        return Share(work.rings, scores, sums, rows, keys, columns, S, dP, fragments.OperandA.create(S, self.dtype), dQ)

    @cute.jit
    def consume(self, buffers: tuple, work: Work, out: sm90.Operand, mRows: cute.Tensor, scales: tuple):
        """Consumer warpgroup: its 64 rows of every tile, KV blocks from the right: the masked ones first."""
        rings, geo = work.rings, work.geo
        tidx = cute.arch.thread_idx()[0] - sm90.WARPGROUP
        wg, thread = cute.arch.make_warp_uniform(tidx // sm90.WARPGROUP), tidx % sm90.WARPGROUP
        lane = thread % sm90.WARP
        my = self.hold(buffers, work, wg, thread)
        nth, done, number = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while number < work.order.total:
            m_block, head, batch = work.order.tile(number)
            wg_tile, nth_q = m_block * WARPGROUPS + wg, nth * WARPGROUPS + wg
            row = wg_tile * ROWS + thread // sm90.WARP * SLAB + lane // 4
            mask, two = Mask(geo, row, lane % 4 * 2), self.my_rows(mRows, (batch, head, row), geo.Sq, scales[0])
            foreign, blocks = geo.split_blocks((m_block + 1) * TILE_M, wg_tile * ROWS, ROWS, geo.mask == "causal")
            for count in cutlass.range(done, done + foreign, unroll=1):
                for ring in (rings.k, rings.v):
                    ring.wait(count)
                    ring.release(count)
            done += foreign
            my.dQ.fill(0.0)
            rings.q.wait(nth_q)
            rings.do.wait(nth_q)
            warpgroup.fence()
            my.issue_scores(done)
            warpgroup.wait_group(0)
            rings.v.release(done)
            last = blocks - 1
            partial = cutlass.min(geo.num_partial(blocks, wg_tile * ROWS), last)
            for masked in cutlass.range_constexpr(1, -1, -1):
                begin, end = (0, partial) if masked else (partial, last)
                for j in cutlass.range(begin, end, unroll=1):
                    self.weigh(my, two, (mask, last - j) if masked else None)
                    warpgroup.fence()
                    my.issue_dQ(done + j)
                    my.issue_scores(done + j + 1)
                    warpgroup.wait_group(2)  # dQ
                    rings.k.release(done + j)
                    warpgroup.wait_group(0)
                    rings.v.release(done + j + 1)
            rings.do.release(nth_q)
            done += last
            self.weigh(my, two, (mask, Int32(0)))
            warpgroup.fence()
            my.issue_dQ(done)
            warpgroup.wait_group(0)
            rings.k.release(done)
            done += 1
            self.store(my, out.head(head, batch), wg, wg_tile, scales[1])
            rings.q.release(nth_q)
            number = work.queue.take(nth)
            nth += 1

    @cute.jit
    def weigh(self, my: Share, two: Rows, hidden: tuple | None):
        """dS of a block from its two products."""
        if cutlass.const_expr(hidden is not None):
            mask, n_block = hidden
            mask.apply(fragments.rows_and_columns(my.S), n_block)
        S, dP = by_query(my.S), by_query(my.dP)
        exponentiate(S, two.lse_log2, two.scale_log2)
        differentiate(S, dP, two.delta, S)
        my.dS.take(my.S)

    @cute.jit
    def my_rows(self, mRows: cute.Tensor, at: tuple, Sq: Int32, scale_log2: Float32) -> Rows:
        """LSE and delta of a thread's two rows; at: (batch, head, its first row)."""
        batch, head, row = at
        values = cute.make_rmem_tensor((2, 2), Float32)
        for r in cutlass.range_constexpr(2):
            values[r, 0], values[r, 1] = Float32.inf, Float32(0.0)
            if row + 8 * r < Sq:
                for which in cutlass.range_constexpr(2):
                    values[r, which] = mRows[batch, head, which, row + 8 * r]
        return Rows((values[0, 0], values[1, 0]), (values[0, 1], values[1, 1]), scale_log2)

    @cute.jit
    def store(self, my: Share, out: sm90.Operand, wg: Int32, wg_tile: Int32, scale: Float32):
        """dQ in 16 bits through its Q's place in shared memory, until that is free again."""
        rdQ = cute.make_rmem_tensor_like(my.dQ, self.dtype)
        rdQ.store((my.dQ.load() * scale).to(self.dtype))
        start = cute.slice_(out.s, (None, None, wg)).iterator
        sdQ = cute.make_tensor(start, sm90.slab_layout(self.dtype, ROWS, self.d).outer)
        sm90.join_warpgroup(JOIN, wg)  # no warp of the group may still be reading Q
        sm90.store_slabs(rdQ, sdQ, out, wg_tile * (ROWS // SLAB), my.sums.add)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()


def by_query(acc: cute.Tensor) -> cute.Tensor:
    """(keys, queries) view of a (queries, keys) accumulator."""
    scores = fragments.rows_and_columns(acc)
    return cute.make_tensor(scores.iterator, cute.select(scores.layout, mode=[1, 0]))
