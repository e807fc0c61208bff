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
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ...registry.kernel_spec import BACKWARD_WARPGROUPS, FP32_BYTES, PARTS_TILE, ROWS_PER_WARPGROUP, HopperSpec
from ..backward.pre_post_process import Bent, differentiate, exponentiate, load_rows, row_values
from ..call_args.backward import Gradients
from ..call_args.operands import Scales
from ..features.base import Seams
from ..primitives import fragments, sm90
from ..score_stages.pipeline import Chain, Form, Place
from ..tiling.backward_tile_scheduler import KeyOrder, heads_in_turn
from ..tiling.block_iterator import Section, Walk
from ..tiling.seqlen_info import Sizes
from ..tiling.tile import Launch, Pieces

ROWS, SLAB = ROWS_PER_WARPGROUP, sm90.SLAB
WARPGROUPS = BACKWARD_WARPGROUPS
TILE_M, TILE_N = PARTS_TILE
P, DS = 0, 1  # what crosses shared memory; its writers are the first and the second warpgroup
JOIN = 1  # named barrier, + warpgroup
STAGED_COLUMNS = 64  # of dK and dV, at most, that a warp stores at once


@dataclass(frozen=True)
class Operands:
    """One of each that TMA moves: its atom, or its coordinates."""

    q: cute.CopyAtom | cute.Tensor
    k: cute.CopyAtom | cute.Tensor
    v: cute.CopyAtom | cute.Tensor
    do: cute.CopyAtom | cute.Tensor
    dk: cute.CopyAtom | cute.Tensor
    dv: cute.CopyAtom | cute.Tensor


@dataclass(frozen=True)
class Shared:
    """What lies in shared memory."""

    q: cute.Tensor  # (TILE_M, D, stage)
    k: cute.Tensor  # (TILE_N, D, 1)
    v: cute.Tensor  # (TILE_N, Dv, 1)
    do: cute.Tensor  # (TILE_M, Dv, stage)
    crossing: cute.Tensor  # (queries, keys, P or dS)
    lse: cute.Tensor  # LSE * log2(e) of a step's queries: (TILE_M, stage)
    delta: cute.Tensor  # (TILE_M, stage)


@dataclass(frozen=True)
class Rings:
    """From the producer warps to the consumers; `crossing` from each warpgroup to the other."""

    q: sm90.Ring
    do: sm90.Ring
    k: sm90.Ring
    v: sm90.Ring
    crossing: tuple[sm90.Ring, sm90.Ring]  # P, dS


@dataclass(frozen=True)
class Work:
    """What every role follows."""

    rings: Rings
    queue: sm90.TileQueue
    pieces: Launch
    walk: Walk
    group: Int32  # query heads that a tile meets
    sharing: Int32  # tiles of a block of keys, which share those of its KV head


@dataclass(frozen=True)
class Half:
    """What a warpgroup works with."""

    wg: int
    rings: Rings
    scores: sm90.SlotProduct  # S^T = K Q^T, or dP^T = V dO^T
    weights: fragments.OperandA  # P^T, or dS^T
    values: cute.Tensor  # the same registers, in the order of the scores
    kept: fragments.OperandA | None  # P for dV where not all of it is kept: P crosses with signs that say which
    facts: cute.Tensor  # LSE * log2(e), or delta, of a step's queries: (TILE_M, stage)
    lse: cute.Tensor  # the former
    dV: sm90.SlotProduct  # += P^T dO: this warpgroup's half of the columns
    dK: sm90.SlotProduct  # += dS^T Q
    store: Callable  # the weights to shared memory
    load: Callable  # P from there

    @property
    def ring(self) -> sm90.Ring:
        """Of the steps' operand of whole rows: Q with LSE, or dO with delta."""
        return self.rings.do if self.wg else self.rings.q

    def lse_of(self, done: Int32) -> cute.Tensor:
        """To either warpgroup."""
        self.rings.q.wait(done)
        return row_values(self.lse, self.rings.q.slot(done))

    @cute.jit
    def issue_next_scores(self, done: Int32, end: Int32):
        """Those of step `done`; beyond the last of the tile nobody looks at them, and a branch here would cost more."""
        if done < end:
            self.ring.wait(done)
        self.scores.start(self.ring.slot(done))

    @cute.jit
    def hand_over(self, done: Int32):
        """The weights of this step, to the other warpgroup."""
        ring = self.rings.crossing[self.wg]
        ring.wait_free(done)
        self.store(self.values)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        ring.fill(done)
        if cutlass.const_expr(self.wg == 0 and self.kept is not None):
            self.kept.keep(self.weights)

    @cute.jit
    def add_up(self, done: Int32, end: Int32):
        """dV and dK of a step whose weights of this warpgroup are there, and the next step's scores."""
        p, ds = self.rings.crossing
        slot = self.rings.q.slot(done)  # dO has as many
        if cutlass.const_expr(self.wg == 0):
            self.rings.do.wait(done)
        warpgroup.fence()
        self.dV.add(slot)
        self.issue_next_scores(done + 1, end)
        if cutlass.const_expr(self.wg == 0):
            ds.wait(done)
        else:
            self.rings.q.wait(done)
        warpgroup.fence()
        self.dK.add(slot)
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
        self.spec, self.seams = spec, Seams.of(spec, transposed=True)
        self.element, self.d, self.dv, self.stages = self.seams.element, spec.d, spec.dv, spec.stages
        self.producer_registers, self.consumer_registers = spec.register_split
        self.form = Form(self.element, 1, TILE_M, transposed=True)  # the first warpgroup has the scores

    @property
    def inputs(self) -> tuple[sm90.Input, sm90.Input, sm90.Input, sm90.Input]:
        """Q, K, V and dO as TMA brings them, swizzled so that half of the columns are whole atoms."""
        return tuple(
            sm90.Input(self.element, ROWS, columns, slots, self.operand_layout(columns, slots))
            for columns, slots in ((self.d, self.stages), (self.d, 1), (self.dv, 1), (self.dv, self.stages))
        )

    @cute.jit
    def __call__(self, call: Gradients, stream: cuda.CUstream):
        pieces = self.seams.pieces(call)
        tensors = (pieces.rows_first(x) for x in (call.q, call.k, call.v, call.do))
        loads = tuple(x.tma(m) for x, m in zip(self.inputs, tensors, strict=True))
        stores = tuple(
            sm90.output_tma(self.element, pieces.rows_first(x), staged_columns(columns))
            for x, columns in ((call.dk, self.d), (call.dv, self.dv))
        )
        atoms, tensors = (Operands(*(x[i] for x in (*loads, *stores))) for i in (0, 1))
        B, shares, Sk, _ = call.dk.shape
        num_n_blocks, group = pieces.most_blocks_of_keys(Sk, TILE_N), call.q.shape[1] // shares
        walk, chain = self.seams.walk(call), self.seams.chain(call).tma(self.form)
        bound = walk.at(Sizes(call.q.shape[2], Sk), TILE_M, TILE_N)
        section = heads_in_turn(bound, group, B * shares, (self.d + self.dv) * self.element.bytes)
        self.kernel(atoms, tensors, call.rows, call.scales, call.counter, section, pieces, walk, chain).launch(
            grid=(cutlass.min(num_n_blocks * B * shares, call.num_ctas), 1, 1),
            block=((WARPGROUPS + 1) * sm90.WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def operand_layout(self, columns: int, slots: int) -> cute.ComposedLayout:
        """(64, columns, slot) in shared memory."""
        kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.element.dtype, columns // WARPGROUPS)
        atom = warpgroup.make_smem_layout_atom(kind, self.element.dtype)
        return cute.tile_to_shape(atom, (ROWS, columns, slots), order=(0, 1, 2))

    def rings(self, smem: cutlass.memory.SmemAllocator) -> Rings:
        """Q comes with its LSE, dO with its delta."""
        (q, k, v, do), facts = self.inputs, TILE_M * FP32_BYTES
        steps = (q.ring(smem, more_bytes=facts), do.ring(smem, more_bytes=facts))
        keys = (k.ring(smem), v.ring(smem))
        return Rings(*steps, *keys, tuple(sm90.Ring.create(smem, 1, 0) for _ in (P, DS)))

    def shared(self, smem: cutlass.memory.SmemAllocator) -> Shared:
        """All buffers of a CTA."""
        dtype, operands = self.element.dtype, (x.buffer(smem) for x in self.inputs)
        q, k, v, do = operands
        layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (TILE_M, ROWS, TILE_N), dtype, len((P, DS)))
        crossing = smem.allocate_tensor(dtype, layout.outer, 1024, layout.inner)
        row_layout = cute.make_layout((TILE_M, self.stages))
        lse, delta = (smem.allocate_tensor(Float32, row_layout, 128) for _ in range(2))
        return Shared(q, k, v, do, crossing, lse, delta)

    @cute.kernel
    def kernel(
        self,
        atoms: Operands,
        tensors: Operands,
        mRows: cute.Tensor,
        scales: Scales,
        mCounter: cute.Tensor,
        section: Int32,
        pieces: Pieces,
        walk: Walk,
        chain: Chain,
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        rings = self.rings(smem)
        mail, ring_mail = sm90.create_mail(smem)
        chain = chain.shared(smem, self.form)
        shared = self.shared(smem)

        Sk, _, Hkv, _ = tensors.k.shape
        sizes, num_n_blocks = Sizes(tensors.q.shape[0], Sk), pieces.blocks_of_keys(Sk, TILE_N)
        shares = tensors.dk.shape[2]
        all_shares = pieces.batch(tensors.k) * shares
        section = pieces.section(section, all_shares, 1, of_keys=True)
        order = KeyOrder(True, num_n_blocks, shares, all_shares, section, walk.at(sizes, TILE_M, TILE_N))
        queue = sm90.TileQueue(mCounter.iterator, mail, ring_mail, order.total)
        heads = (tensors.q.shape[2] // shares, shares // Hkv)
        work = Work(rings, queue, pieces.of_keys(order, sizes), walk, *heads)
        consumers = 4 * WARPGROUPS
        streams, keys = ((ring, consumers) for ring in (rings.q, rings.do)), ((ring, 4) for ring in (rings.k, rings.v))
        crossing = ((ring, 4, 4) for ring in rings.crossing)
        all_atoms = (atoms.q, atoms.k, atoms.v, atoms.do, atoms.dk, atoms.dv, *chain.atoms)
        counted = (*streams, *keys, *crossing, (ring_mail, consumers + 1), *chain.rings)
        sm90.start_cta(warp_idx, all_atoms, counted)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                q, do = sm90.Operand(atoms.q, tensors.q, shared.q), sm90.Operand(atoms.do, tensors.do, shared.do)
                self.load_queries(q, do, mRows, shared, work, chain)
            elif warp_idx == 1:
                k, v = sm90.Operand(atoms.k, tensors.k, shared.k), sm90.Operand(atoms.v, tensors.v, shared.v)
                self.load_keys(k, v, work)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            dk = sm90.Operand(atoms.dk, tensors.dk, shared.crossing)
            dv = sm90.Operand(atoms.dv, tensors.dv, shared.crossing)
            if warp_idx < 8:
                self.consume(self.hold(0, shared, rings, chain), dk, dv, work, scales, chain)
            else:
                self.consume(self.hold(1, shared, rings, chain), dk, dv, work, scales, chain)

    @cute.jit
    def load_queries(
        self, q: sm90.Operand, do: sm90.Operand, mRows: cute.Tensor, shared: Shared, work: Work, chain: Chain
    ):  # fmt: skip
        """First producer warp: Q with its LSE and dO with its delta, then what stages bring, step by step. It draws the
        tiles.
        """
        nth, done, number = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while number < work.pieces.total:
            tile = work.pieces.tile(number, work.group)
            run = work.walk.at(tile.sizes, TILE_M, TILE_N).queries(tile)
            for g in cutlass.range(work.group, unroll=1):
                gRows = tile.facts(mRows, g, TILE_M)
                tQsQ, tQgQ = tile.queries(q, g).tiles((TILE_M, self.d), (None, 0))
                tOsO, tOgO = tile.queries(do, g).tiles((TILE_M, self.dv), (None, 0))
                mine, stages = run.of_head(g), chain.bring(tile, tile.query_head(g))
                whole = mine.whole()
                for j in cutlass.range(whole.begin, whole.end, unroll=1):
                    step = mine.nth(j)
                    for x, g_, s_, ring, which, sRow in (
                        (q, tQgQ, tQsQ, work.rings.q, 0, shared.lse),
                        (do, tOgO, tOsO, work.rings.do, 1, shared.delta),
                    ):
                        sm90.load_block(x.atom, g_, s_, ring, step, done)
                        load_rows(gRows[0, None, which, step], sRow[None, ring.slot(done)], ring, done)
                    stages.load(step, done)
                    done += 1
            number = work.queue.post(nth, work.queue.draw())
            nth += 1

    @cute.jit
    def load_keys(self, k: sm90.Operand, v: sm90.Operand, work: Work):
        """Second producer warp: each tile's K and V, as soon as the tile before has no more use for its own."""
        nth, number = Int32(0), cute.arch.block_idx()[0]
        while number < work.pieces.total:
            tile = work.pieces.tile(number)
            for x, ring, columns in ((k, work.rings.k, self.d), (v, work.rings.v, self.dv)):
                tXsX, tXgX = tile.rows_of_shared(x, work.sharing).tiles((ROWS, columns), (None, 0))
                sm90.load_block(x.atom, tXgX, tXsX, ring, tile.block, nth)
            number = work.queue.take(nth)
            nth += 1

    def hold(self, wg: int, shared: Shared, rings: Rings, chain: Chain) -> Half:
        """A consumer warpgroup's operands and registers."""
        keys, rows, facts = (shared.v, shared.do, shared.delta) if wg else (shared.k, shared.q, shared.lse)
        thread = cute.arch.thread_idx()[0] % sm90.WARPGROUP
        product = sm90.Product.create(lambda: sm90.make_mma(self.element.dtype, TILE_M, "rows", "rows"))
        mma = product.add.get_slice(thread)
        left = mma.make_fragment_A(mma.partition_A(keys[None, None, 0]))
        right = mma.make_fragment_B(mma.partition_B(rows))
        scores = sm90.SlotProduct(product, left, right, sm90.zeros(mma, (ROWS, TILE_M)))
        weights = fragments.OperandA.create(scores.acc, self.element)
        values = cute.make_tensor(cute.recast_ptr(weights.pairs.iterator, dtype=self.element.dtype), scores.acc.layout)
        kept = None
        if chain.kept_share is not None:
            kept = weights if wg == 0 else fragments.OperandA.create(scores.acc, self.element)
        crossing = sm90.transposed(shared.crossing)  # (keys, queries, P or dS)

        def make_sum(
            which: int, columns: int, sRight: cute.Tensor, own: fragments.OperandA | None
        ) -> sm90.SlotProduct:  # fmt: skip
            source = "columns" if own is None else "registers"
            product = sm90.Product.create(lambda: sm90.make_mma(self.element.dtype, columns, source, "columns"))
            part = product.add.get_slice(thread)
            left = part.make_fragment_A(part.partition_A(crossing[None, None, which]))
            half = cute.local_tile(sm90.transposed(sRight), (columns, TILE_M, self.stages), (wg, 0, 0))
            right = part.make_fragment_B(part.partition_B(half))
            left = left if own is None else own.fragment
            return sm90.SlotProduct(product, left, right, sm90.zeros(part, (ROWS, columns)))

        own = (weights if wg == 0 else kept), (weights if wg == 1 else None)
        dV = make_sum(P, self.dv // WARPGROUPS, shared.do, own[P])
        dK = make_sum(DS, self.d // WARPGROUPS, shared.q, own[DS])
        to_smem, from_smem = (
            cute.make_tiled_copy_C(cute.make_copy_atom(op(True, 4), self.element.dtype), product.add).get_slice(thread)
            for op in (warp.StMatrix8x8x16bOp, warp.LdMatrix8x8x16bOp)
        )

        def store(values):
            cute.copy(to_smem, to_smem.retile(values), to_smem.partition_D(crossing[None, None, wg]))

        def load(values):
            cute.copy(from_smem, from_smem.partition_S(crossing[None, None, P]), from_smem.retile(values))

        return Half(wg, rings, scores, weights, values, kept, facts, shared.lse, dV, dK, store, load)

    @cute.jit
    def consume(
        self, my: Half, dk: sm90.Operand, dv: sm90.Operand, work: Work, scales: Scales, chain: Chain
    ):  # fmt: skip
        """Consumer warpgroup: half of the columns of dK and dV of every tile."""
        rings = work.rings
        keys = rings.v if my.wg else rings.k
        lane, warp_in_group = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        chain, scale_log2 = chain.hold(TILE_M), chain.scales(scales).log2
        nth, done, number = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while number < work.pieces.total:
            tile = work.pieces.tile(number, work.group)
            run = work.walk.at(tile.sizes, TILE_M, TILE_N).queries(tile)
            end = done + run.total(work.group)
            key = tile.block * TILE_N + warp_in_group * SLAB + lane // 4
            of_tile = chain.at(Place(tile.sizes, TILE_M, key, lane % 4 * 2, tile.sequence, None, transposed=True))
            my.dK.acc.fill(0.0)
            my.dV.acc.fill(0.0)
            keys.wait(nth)
            warpgroup.fence()
            my.issue_next_scores(done, end)
            warpgroup.wait_group(0)
            self.reclaim(my.wg)
            for g in cutlass.range(work.group, unroll=1):
                mine, here = run.of_head(g), of_tile.of_head(tile.query_head(g))
                for section in mine.sections() if my.wg == 0 else (mine.whole(),):
                    if cutlass.const_expr(my.wg == 0):
                        here.begin(mine.nth(section.begin), section.masked)
                    for j in cutlass.range(section.begin, section.end, unroll=1):
                        if cutlass.const_expr(my.wg == 0):
                            self.weigh(my, done, here, mine.nth(j), section, scale_log2)
                            here.ahead(mine.next(j, section), section.masked)
                        else:
                            self.differentiate(my, done, here)
                        my.hand_over(done)
                        my.add_up(done, end)
                        done += 1
            keys.release(nth)
            rings.crossing[my.wg].wait_free(done)  # outputs leave through its place
            slab = tile.block * (TILE_N // SLAB)
            self.store(my, my.dV.acc, chain.scaled(Float32(2.0**-self.element.raised)), tile.rows(dv), slab)
            self.store(my, my.dK.acc, chain.scaled(scales.natural), tile.rows(dk), slab)
            number = work.queue.take(nth)
            nth += 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the last store

    @cute.jit
    def weigh(self, my: Half, done: Int32, here: Chain, step: Int32, section: Section, scale_log2: Float32):
        """First warpgroup: P."""
        scores, lse_log2 = my.scores.values, row_values(my.facts, my.rings.q.slot(done))
        if cutlass.const_expr(self.element.raised != 0):
            lse_log2.store(lse_log2.load() - Float32(self.element.raised))
        here.make_ready(step, section.masked)
        here.apply(scores, step, section.masked, done)
        exponentiate(scores, lse_log2, scale_log2)
        my.weights.take(my.scores.acc, here.signed(section.masked))

    @cute.jit
    def differentiate(self, my: Half, done: Int32, here: Chain):
        """Second warpgroup: dS = P * (dP - delta); the scale comes with dK."""
        delta = row_values(my.facts, my.rings.do.slot(done))
        my.rings.crossing[P].wait(done)
        my.load(my.values)
        weights, dP = fragments.rows_and_columns(my.values), my.scores.values
        if cutlass.const_expr(my.kept is not None):
            my.kept.keep(my.weights)
        bent = Bent.of(here, lambda: my.lse_of(done))
        differentiate(weights, dP, delta, dP, self.element.raised, my.kept is not None, bent)
        my.weights.take(my.scores.acc)

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
        mma = sm90.make_mma(self.element.dtype, columns, "rows", "columns")
        layout = sm90.slab_layout(self.element.dtype, ROWS, columns)
        start = out.s[None, None, my.wg].iterator
        if cutlass.const_expr(columns < STAGED_COLUMNS):
            # Each warp has the same place for dV and for dK, whose slabs may be smaller.
            spare = SLAB * (STAGED_COLUMNS - columns)
            warp_in_group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
            start = start + cute.assume(warp_in_group * spare, divby=spare)
        start = cute.recast_ptr(start, layout.inner, dtype=self.element.dtype)
        for part in cutlass.range_constexpr(parts):
            registers = cute.make_tensor(acc.iterator + part * (columns // 2), mma.partition_shape_C((ROWS, columns)))
            rX = cute.make_rmem_tensor_like(registers, self.element.dtype)
            rX.store((registers.load() * factor).to(self.element.dtype))
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # what was in this warp's part has left it
            cute.arch.sync_warp()
            sm90.store_slabs(rX, cute.make_tensor(start, layout.outer), out, slab, mma, my.wg * parts + part)


def staged_columns(columns: int) -> int:
    """Of a warpgroup's half of an output: what leaves at once, all or half of it."""
    mine = columns // WARPGROUPS
    return mine if mine <= STAGED_COLUMNS else mine // 2
