"""dK and dV kernel of the split backward for Hopper, from Q, K, V, dO, LSE and delta.

The kernel is persistent. A CTA stays on its SM and fetches blocks of 64 keys of a single KV head from a dynamic tile
scheduler. The CTA keeps dK and dV of the block in registers. The mainloop visits the query rows that see the block, for
every query head of the group.

Each of the two consumer warpgroups owns half of the columns of dK and dV. The first warpgroup computes S and from S P,
the second computes dP and from dP dS. P and dS cross shared memory. Each warpgroup multiplies its columns with its own
weights from registers and with its peer's weights from shared memory.

Scores are transposed (keys x queries), so that P^T and dS^T are left operands. As soon as a warpgroup has packed the
result of a step into 16 bits, the warpgroup issues its S or dP of the next step. This product runs under dV and dK.
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
from ..backward.pre_post_process import ScoreDerivative, differentiate, exponentiate, load_rows, row_values
from ..call_args.kernel_call import KernelArgs, SoftmaxScale
from ..features.base import KernelFeatures
from ..primitives import fragments, sm90
from ..score_stages.pipeline import ScoreCoord, ScoreLayout, ScorePipeline
from ..tiling.backward_tile_scheduler import BackwardTileScheduler, kv_heads_per_l2_group
from ..tiling.block_iterator import BlockIterator, BlockSubrange
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import TileAddressing, TileGrid

ROWS, SLAB = ROWS_PER_WARPGROUP, sm90.SLAB
WARPGROUPS = BACKWARD_WARPGROUPS
TILE_M, TILE_N = PARTS_TILE
# Buffers of the weights in shared memory: P, written by the first warpgroup, and dS, written by the second.
P, DS = 0, 1
JOIN = 1  # named barrier of warpgroup w: JOIN + w
STAGED_COLUMNS = 64  # largest number of columns of dK or dV that a warp stores at once


@dataclass(frozen=True)
class DkdvOperands:
    """TMA atoms, or TMA coordinates (rows, columns, heads, batch), of the tensors moved by TMA."""

    q: cute.CopyAtom | cute.Tensor
    k: cute.CopyAtom | cute.Tensor
    v: cute.CopyAtom | cute.Tensor
    do: cute.CopyAtom | cute.Tensor
    dk: cute.CopyAtom | cute.Tensor
    dv: cute.CopyAtom | cute.Tensor


@dataclass(frozen=True)
class DkdvSmem:
    """Buffers of a CTA in shared memory."""

    q: cute.Tensor  # (TILE_M, D, stage)
    k: cute.Tensor  # (TILE_N, D, 1)
    v: cute.Tensor  # (TILE_N, Dv, 1)
    do: cute.Tensor  # (TILE_M, Dv, stage)
    crossing: cute.Tensor  # (queries, keys, P or dS)
    lse: cute.Tensor  # (TILE_M, stage): LSE * log2(e) of the queries of a step
    delta: cute.Tensor  # (TILE_M, stage)


@dataclass(frozen=True)
class DkdvPipelines:
    """Pipelines from the producer warps to the consumers; `crossing` runs from each warpgroup to its peer."""

    q: sm90.Pipeline
    do: sm90.Pipeline
    k: sm90.Pipeline
    v: sm90.Pipeline
    crossing: tuple[sm90.Pipeline, sm90.Pipeline]  # pipelines of P and dS, a single stage each


@dataclass(frozen=True)
class DkdvWork:
    """Pipelines, tiles and mainloop steps shared by all warp roles."""

    rings: DkdvPipelines
    queue: sm90.DynamicTileScheduler
    pieces: TileGrid
    walk: BlockIterator
    group: Int32  # query heads visited by a tile
    sharing: Int32  # tiles of a block of keys; all of them read the K and V of the same KV head


@dataclass(frozen=True)
class DkdvConsumerState:
    """State of a consumer warpgroup: its product of whole rows, its weights, and its columns of dK and dV."""

    wg: int  # 0 computes P, 1 computes dS
    rings: DkdvPipelines
    scores: sm90.StageProduct  # S^T = K Q^T, or dP^T = V dO^T
    weights: fragments.OperandA  # P^T or dS^T in 16 bits
    values: cute.Tensor  # the registers of `weights`, in the order of the scores
    # P for dV in kernels with dropout, where P crosses shared memory with signs that mark the kept values.
    kept: fragments.OperandA | None
    facts: cute.Tensor  # (TILE_M, stage): LSE * log2(e) or delta of the queries of a step
    lse: cute.Tensor  # (TILE_M, stage): LSE * log2(e)
    dV: sm90.StageProduct  # dV += P^T dO: the warpgroup's half of the columns
    dK: sm90.StageProduct  # dK += dS^T Q: the warpgroup's half of the columns
    store: Callable  # stores the weights to shared memory
    load: Callable  # loads P from shared memory

    @property
    def ring(self) -> sm90.Pipeline:
        """Pipeline of the right operand of `scores`: Q with LSE, or dO with delta."""
        return self.rings.do if self.wg else self.rings.q

    def lse_of(self, done: Int32) -> cute.Tensor:
        """Return LSE * log2(e) of step `done`; callable by either warpgroup."""
        self.rings.q.consumer_wait(done)
        return row_values(self.lse, self.rings.q.stage_index(done))

    @cute.jit
    def issue_next_scores(self, done: Int32, end: Int32):
        """Issue the S or dP product of step `done`.

        Beyond the last step of a tile nobody reads the result, and a branch around the product would cost more.
        """
        if done < end:
            self.ring.consumer_wait(done)
        self.scores.start(self.ring.stage_index(done))

    @cute.jit
    def hand_over(self, done: Int32):
        """Store the weights of step `done` to shared memory for the peer warpgroup."""
        ring = self.rings.crossing[self.wg]
        ring.producer_wait(done)
        self.store(self.values)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        ring.producer_commit(done)
        if cutlass.const_expr(self.wg == 0 and self.kept is not None):
            self.kept.copy_nonnegative(self.weights)

    @cute.jit
    def add_up(self, done: Int32, end: Int32):
        """Issue dV and dK of step `done`, with own weights in registers, and the next step's S or dP between them."""
        p, ds = self.rings.crossing
        slot = self.rings.q.stage_index(done)  # the dO pipeline has as many stages as the Q pipeline
        if cutlass.const_expr(self.wg == 0):
            self.rings.do.consumer_wait(done)
        warpgroup.fence()
        self.dV.add(slot)
        self.issue_next_scores(done + 1, end)
        if cutlass.const_expr(self.wg == 0):
            ds.consumer_wait(done)
        else:
            self.rings.q.consumer_wait(done)
        warpgroup.fence()
        self.dK.add(slot)
        warpgroup.wait_group(2)  # wait for dV; the next S or dP and dK may still be in flight
        self.rings.do.consumer_release(done)
        if cutlass.const_expr(self.wg == 1):
            p.consumer_release(done)
        warpgroup.wait_group(0)
        self.rings.q.consumer_release(done)
        if cutlass.const_expr(self.wg == 0):
            ds.consumer_release(done)


class KeyGradientsSm90:
    """Builder of the dK and dV kernel of a split backward spec.

    Computes dV = P^T dO and dK = scale * dS^T Q, deterministically.

    Inputs: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), do (B, Hq, Sq, Dv). Row statistics: rows (B, Hq, 2,
    padded Sq) in fp32, LSE * log2(e) and delta. Outputs: dk (B, shares, Sk, D), dv (B, shares, Sk, Dv), where `shares`
    is Hkv or a multiple of Hkv.

    Warp roles: warpgroup 0 gives its registers away. Its warp 0 loads Q and dO and fetches tiles. Its warp 1 loads K
    and V. Warpgroup 1 computes S and P, warpgroup 2 computes dP and dS, and each adds its half of the columns of dK and
    dV.

    Pipelines (producer -> consumer, stages):
    - Q with LSE, dO with delta: warp 0 -> all consumer warps, `stages` stages each.
    - K: warp 1 -> warpgroup 1, a single stage. V: warp 1 -> warpgroup 2, a single stage.
    - P: warpgroup 1 -> warpgroup 2, a single stage. dS: warpgroup 2 -> warpgroup 1, a single stage. Neither has bytes.
    - Tile indices: warp 0 -> all consumer warps and warp 1, `sm90.TILE_INDEX_STAGES` stages.
    - Score stages add pipelines of their own, for example for bias tiles. Only warpgroup 1 reads them.

    Shared memory: the stages of Q, dO, LSE and delta; K and V; P and dS; tile indices, mbarriers and buffers of the
    score stages. dK and dV leave through the buffers of P and dS.
    """

    def __init__(self, spec: HopperSpec):
        self.spec, self.seams = spec, KernelFeatures.of(spec, transposed=True)
        self.element, self.d, self.dv, self.stages = self.seams.element, spec.d, spec.dv, spec.stages
        self.producer_registers, self.consumer_registers = spec.register_split
        self.form = ScoreLayout(self.element, 1, TILE_M, transposed=True)  # only the first warpgroup holds scores

    @property
    def inputs(self) -> tuple[sm90.TmaLoadConfig, sm90.TmaLoadConfig, sm90.TmaLoadConfig, sm90.TmaLoadConfig]:
        """TMA load configurations of Q, K, V and dO, swizzled so that half of the columns are whole atoms."""
        return tuple(
            sm90.TmaLoadConfig(self.element, ROWS, columns, slots, self.operand_layout(columns, slots))
            for columns, slots in ((self.d, self.stages), (self.d, 1), (self.dv, 1), (self.dv, self.stages))
        )

    @cute.jit
    def __call__(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the dK and dV kernel."""
        pieces = self.seams.pieces(call)
        tensors = (pieces.rows_first(x) for x in (call.q, call.k, call.v, call.do))
        loads = tuple(x.tma(m) for x, m in zip(self.inputs, tensors, strict=True))
        stores = tuple(
            sm90.output_tma(self.element, pieces.rows_first(x), staged_columns(columns))
            for x, columns in ((call.dk, self.d), (call.dv, self.dv))
        )
        atoms, tensors = (DkdvOperands(*(x[i] for x in (*loads, *stores))) for i in (0, 1))
        B, shares, Sk, _ = call.dk.shape
        num_n_blocks, group = pieces.max_blocks_of_keys(Sk, TILE_N), call.q.shape[1] // shares
        walk, chain = self.seams.walk(call), self.seams.chain(call).tma(self.form)
        bound = walk.bind(SeqlenInfo(call.q.shape[2], Sk), TILE_M, TILE_N)
        section = kv_heads_per_l2_group(bound, group, B * shares, (self.d + self.dv) * self.element.bytes)
        self.kernel(atoms, tensors, call.rows, call.scales, call.counter, section, pieces, walk, chain).launch(
            grid=(cutlass.min(num_n_blocks * B * shares, call.num_ctas), 1, 1),
            block=((WARPGROUPS + 1) * sm90.WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def operand_layout(self, columns: int, slots: int) -> cute.ComposedLayout:
        """Return the swizzled layout (64, columns, stage) of an operand in shared memory."""
        kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.element.dtype, columns // WARPGROUPS)
        atom = warpgroup.make_smem_layout_atom(kind, self.element.dtype)
        return cute.tile_to_shape(atom, (ROWS, columns, slots), order=(0, 1, 2))

    def rings(self, smem: cutlass.memory.SmemAllocator) -> DkdvPipelines:
        """Create the pipelines. A stage of Q includes its LSE, and a stage of dO includes its delta."""
        (q, k, v, do), facts = self.inputs, TILE_M * FP32_BYTES
        steps = (q.create_pipeline(smem, more_bytes=facts), do.create_pipeline(smem, more_bytes=facts))
        keys = (k.create_pipeline(smem), v.create_pipeline(smem))
        return DkdvPipelines(*steps, *keys, tuple(sm90.Pipeline.create(smem, 1, 0) for _ in (P, DS)))

    def shared(self, smem: cutlass.memory.SmemAllocator) -> DkdvSmem:
        """Allocate all buffers of a CTA."""
        dtype, operands = self.element.dtype, (x.buffer(smem) for x in self.inputs)
        q, k, v, do = operands
        layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (TILE_M, ROWS, TILE_N), dtype, len((P, DS)))
        crossing = smem.allocate_tensor(dtype, layout.outer, 1024, layout.inner)
        row_layout = cute.make_layout((TILE_M, self.stages))  # (TILE_M, stage)
        lse, delta = (smem.allocate_tensor(Float32, row_layout, 128) for _ in range(2))
        return DkdvSmem(q, k, v, do, crossing, lse, delta)

    @cute.kernel
    def kernel(
        self,
        atoms: DkdvOperands,
        tensors: DkdvOperands,
        mRows: cute.Tensor,
        scales: SoftmaxScale,
        mCounter: cute.Tensor,
        section: Int32,
        pieces: TileAddressing,
        walk: BlockIterator,
        chain: ScorePipeline,
    ):
        """Assign the warp roles: two producer warps load, and two consumer warpgroups multiply."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        rings = self.rings(smem)
        mail, ring_mail = sm90.create_tile_index_pipeline(smem)
        chain = chain.allocate_smem(smem, self.form)
        shared = self.shared(smem)

        Sk, _, Hkv, _ = tensors.k.shape
        sizes, num_n_blocks = SeqlenInfo(tensors.q.shape[0], Sk), pieces.blocks_of_keys(Sk, TILE_N)
        shares = tensors.dk.shape[2]
        all_shares = pieces.batch(tensors.k) * shares
        section = pieces.heads_per_l2_group(section, all_shares, 1, of_keys=True)
        order = BackwardTileScheduler(True, num_n_blocks, shares, all_shares, section, walk.bind(sizes, TILE_M, TILE_N))
        queue = sm90.DynamicTileScheduler(mCounter.iterator, mail, ring_mail, order.total)
        heads = (tensors.q.shape[2] // shares, shares // Hkv)
        work = DkdvWork(rings, queue, pieces.of_keys(order, sizes), walk, *heads)
        consumers = 4 * WARPGROUPS
        streams, keys = ((ring, consumers) for ring in (rings.q, rings.do)), ((ring, 4) for ring in (rings.k, rings.v))
        crossing = ((ring, 4, 4) for ring in rings.crossing)
        all_atoms = (atoms.q, atoms.k, atoms.v, atoms.do, atoms.dk, atoms.dv, *chain.atoms)
        counted = (*streams, *keys, *crossing, (ring_mail, consumers + 1), *chain.pipelines)
        sm90.start_cta(warp_idx, all_atoms, counted)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                q, do = sm90.TmaOperand(atoms.q, tensors.q, shared.q), sm90.TmaOperand(atoms.do, tensors.do, shared.do)
                self.load_queries(q, do, mRows, shared, work, chain)
            elif warp_idx == 1:
                k, v = sm90.TmaOperand(atoms.k, tensors.k, shared.k), sm90.TmaOperand(atoms.v, tensors.v, shared.v)
                self.load_keys(k, v, work)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            dk = sm90.TmaOperand(atoms.dk, tensors.dk, shared.crossing)
            dv = sm90.TmaOperand(atoms.dv, tensors.dv, shared.crossing)
            if warp_idx < 8:
                self.consume(self.hold(0, shared, rings, chain), dk, dv, work, scales, chain)
            else:
                self.consume(self.hold(1, shared, rings, chain), dk, dv, work, scales, chain)

    @cute.jit
    def load_queries(
        self, q: sm90.TmaOperand, do: sm90.TmaOperand, mRows: cute.Tensor, shared: DkdvSmem, work: DkdvWork,
        chain: ScorePipeline
    ):  # fmt: skip
        """Run the first producer warp: load Q with LSE, dO with delta and the score stages' data, step by step.

        This warp also fetches the tiles.
        """
        nth, done, number = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while number < work.pieces.total:
            tile = work.pieces.tile(number, work.group)
            run = work.walk.bind(tile.sizes, TILE_M, TILE_N).queries(tile)
            for g in cutlass.range(work.group, unroll=1):
                gRows = tile.row_stats(mRows, g, TILE_M)
                tQsQ, tQgQ = tile.queries(q, g).tiles((TILE_M, self.d), (None, 0))
                tOsO, tOgO = tile.queries(do, g).tiles((TILE_M, self.dv), (None, 0))
                mine, stages = run.of_head(g), chain.begin_tile_load(tile, tile.query_head(g))
                whole = mine.all_blocks()
                for j in cutlass.range(whole.begin, whole.end, unroll=1):
                    step = mine.nth(j)
                    for x, g_, s_, ring, which, sRow in (
                        (q, tQgQ, tQsQ, work.rings.q, 0, shared.lse),
                        (do, tOgO, tOsO, work.rings.do, 1, shared.delta),
                    ):
                        sm90.load_block(x.atom, g_, s_, ring, step, done)
                        load_rows(gRows[0, None, which, step], sRow[None, ring.stage_index(done)], ring, done)
                    stages.load(step, done)
                    done += 1
            number = work.queue.publish(nth, work.queue.fetch_next())
            nth += 1

    @cute.jit
    def load_keys(self, k: sm90.TmaOperand, v: sm90.TmaOperand, work: DkdvWork):
        """Run the second producer warp: load K and V of each tile as soon as the previous tile has released them."""
        nth, number = Int32(0), cute.arch.block_idx()[0]
        while number < work.pieces.total:
            tile = work.pieces.tile(number)
            for x, ring, columns in ((k, work.rings.k, self.d), (v, work.rings.v, self.dv)):
                tXsX, tXgX = tile.rows_of_shared(x, work.sharing).tiles((ROWS, columns), (None, 0))
                sm90.load_block(x.atom, tXgX, tXsX, ring, tile.block, nth)
            number = work.queue.receive(nth)
            nth += 1

    def hold(self, wg: int, shared: DkdvSmem, rings: DkdvPipelines, chain: ScorePipeline) -> DkdvConsumerState:
        """Return the operands and accumulators of consumer warpgroup `wg`."""
        keys, rows, facts = (shared.v, shared.do, shared.delta) if wg else (shared.k, shared.q, shared.lse)
        thread = cute.arch.thread_idx()[0] % sm90.WARPGROUP
        product = sm90.WgmmaProduct.create(lambda: sm90.make_mma(self.element.dtype, TILE_M, "rows", "rows"))
        mma = product.add.get_slice(thread)
        left = mma.make_fragment_A(mma.partition_A(keys[None, None, 0]))  # K or V: (MMA, 1, K/16)
        right = mma.make_fragment_B(mma.partition_B(rows))  # Q or dO: (MMA, 1, K/16, stage)
        scores = sm90.StageProduct(product, left, right, sm90.zeros(mma, (ROWS, TILE_M)))
        weights = fragments.OperandA.create(scores.acc, self.element)
        values = cute.make_tensor(cute.recast_ptr(weights.pairs.iterator, dtype=self.element.dtype), scores.acc.layout)
        kept = None
        if chain.keep_probability is not None:
            kept = weights if wg == 0 else fragments.OperandA.create(scores.acc, self.element)
        crossing = sm90.transposed(shared.crossing)  # (keys, queries, P or dS)

        def make_sum(
            which: int, columns: int, sRight: cute.Tensor, own: fragments.OperandA | None
        ) -> sm90.StageProduct:  # fmt: skip
            source = "columns" if own is None else "registers"
            product = sm90.WgmmaProduct.create(lambda: sm90.make_mma(self.element.dtype, columns, source, "columns"))
            part = product.add.get_slice(thread)
            left = part.make_fragment_A(part.partition_A(crossing[None, None, which]))
            # (columns, TILE_M, stage)
            half = cute.local_tile(sm90.transposed(sRight), (columns, TILE_M, self.stages), (wg, 0, 0))
            right = part.make_fragment_B(part.partition_B(half))
            left = left if own is None else own.fragment
            return sm90.StageProduct(product, left, right, sm90.zeros(part, (ROWS, columns)))

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

        return DkdvConsumerState(wg, rings, scores, weights, values, kept, facts, shared.lse, dV, dK, store, load)

    @cute.jit
    def consume(
        self, my: DkdvConsumerState, dk: sm90.TmaOperand, dv: sm90.TmaOperand, work: DkdvWork, scales: SoftmaxScale,
        chain: ScorePipeline
    ):  # fmt: skip
        """Run a consumer warpgroup: compute half of the columns of dK and dV of every tile."""
        rings = work.rings
        keys = rings.v if my.wg else rings.k
        lane, warp_in_group = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        chain, scale_log2 = chain.allocate_registers(TILE_M), chain.scales(scales).log2
        nth, done, number = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while number < work.pieces.total:
            tile = work.pieces.tile(number, work.group)
            run = work.walk.bind(tile.sizes, TILE_M, TILE_N).queries(tile)
            end = done + run.total(work.group)
            key = tile.block * TILE_N + warp_in_group * SLAB + lane // 4
            of_tile = chain.set_tile(
                ScoreCoord(tile.sizes, TILE_M, key, lane % 4 * 2, tile.sequence, None, transposed=True)
            )
            my.dK.acc.fill(0.0)
            my.dV.acc.fill(0.0)
            keys.consumer_wait(nth)
            warpgroup.fence()
            my.issue_next_scores(done, end)
            warpgroup.wait_group(0)
            self.reclaim(my.wg)
            for g in cutlass.range(work.group, unroll=1):
                mine, here = run.of_head(g), of_tile.of_head(tile.query_head(g))
                for section in mine.sections() if my.wg == 0 else (mine.all_blocks(),):
                    if cutlass.const_expr(my.wg == 0):
                        here.begin(mine.nth(section.begin), section.masked)
                    for j in cutlass.range(section.begin, section.end, unroll=1):
                        if cutlass.const_expr(my.wg == 0):
                            self.weigh(my, done, here, mine.nth(j), section, scale_log2)
                            here.prefetch(mine.next(j, section), section.masked)
                        else:
                            self.differentiate(my, done, here)
                        my.hand_over(done)
                        my.add_up(done, end)
                        done += 1
            keys.consumer_release(nth)
            rings.crossing[my.wg].producer_wait(done)  # the outputs leave through this buffer
            slab = tile.block * (TILE_N // SLAB)
            self.store(my, my.dV.acc, chain.scaled(Float32(2.0**-self.element.raised)), tile.rows(dv), slab)
            self.store(my, my.dK.acc, chain.scaled(scales.natural), tile.rows(dk), slab)
            number = work.queue.receive(nth)
            nth += 1
        # Shared memory must stay allocated until the last store has read from it.
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def weigh(
        self,
        my: DkdvConsumerState,
        done: Int32,
        here: ScorePipeline,
        step: Int32,
        section: BlockSubrange,
        scale_log2: Float32,
    ):
        """Compute P of a step in the first warpgroup, and pack P into 16 bits."""
        scores, lse_log2 = my.scores.values, row_values(my.facts, my.rings.q.stage_index(done))
        if cutlass.const_expr(self.element.raised != 0):
            lse_log2.store(lse_log2.load() - Float32(self.element.raised))
        here.prepare_stage(step, section.masked)
        here.apply(scores, step, section.masked, done)
        exponentiate(scores, lse_log2, scale_log2)
        my.weights.convert(my.scores.acc, here.signed_p_transform(section.masked))

    @cute.jit
    def differentiate(self, my: DkdvConsumerState, done: Int32, here: ScorePipeline):
        """Compute dS = P * (dP - delta) of a step in the second warpgroup; the scale is applied to dK."""
        delta = row_values(my.facts, my.rings.do.stage_index(done))
        my.rings.crossing[P].consumer_wait(done)
        my.load(my.values)
        weights, dP = fragments.rows_and_columns(my.values), my.scores.values
        if cutlass.const_expr(my.kept is not None):
            my.kept.copy_nonnegative(my.weights)
        score_derivative = ScoreDerivative.of(here, lambda: my.lse_of(done))
        differentiate(weights, dP, delta, dP, self.element.raised, my.kept is not None, score_derivative)
        my.weights.convert(my.scores.acc)

    @cute.jit
    def reclaim(self, wg: int):
        """Wait until the outputs of the previous tile have left the weights' buffer, for all four warps."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        sm90.sync_warpgroup(JOIN, wg)

    @cute.jit
    def store(self, my: DkdvConsumerState, acc: cute.Tensor, factor: Float32, out: sm90.TmaOperand, slab: Int32):
        """Store the warpgroup's columns of an output through the buffer of its weights, `staged_columns` at a time."""
        columns = staged_columns(cute.size(acc) * 2 * WARPGROUPS)
        parts = cute.size(acc) * 2 // columns
        mma = sm90.make_mma(self.element.dtype, columns, "rows", "columns")
        layout = sm90.slab_layout(self.element.dtype, ROWS, columns)
        start = out.s[None, None, my.wg].iterator
        if cutlass.const_expr(columns < STAGED_COLUMNS):
            # Each warp uses the same place for dV and for dK, although the slabs of their layouts may be smaller than
            # STAGED_COLUMNS.
            spare = SLAB * (STAGED_COLUMNS - columns)
            warp_in_group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
            start = start + cute.assume(warp_in_group * spare, divby=spare)
        start = cute.recast_ptr(start, layout.inner, dtype=self.element.dtype)
        for part in cutlass.range_constexpr(parts):
            registers = cute.make_tensor(acc.iterator + part * (columns // 2), mma.partition_shape_C((ROWS, columns)))
            rX = cute.make_rmem_tensor_like(registers, self.element.dtype)
            rX.store((registers.load() * factor).to(self.element.dtype))
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the previous contents of the warp's part have been read
            cute.arch.sync_warp()
            sm90.store_slabs(rX, cute.make_tensor(start, layout.outer), out, slab, mma, my.wg * parts + part)


def staged_columns(columns: int) -> int:
    """Return the number of columns of a warpgroup's half of an output that leave at once: all or half of them."""
    mine = columns // WARPGROUPS
    return mine if mine <= STAGED_COLUMNS else mine // 2
