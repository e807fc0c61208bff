"""Attention forward for Hopper: O = softmax(scale * Q K^T) V and LSE, in a single pass over the keys.

The kernel is persistent. A CTA stays on its SM and fetches tiles of tile_m query rows of a single head from a dynamic
tile scheduler. The producer warp streams Q, K and V through TMA pipelines and runs ahead into the next tile. Each
consumer warpgroup owns 64 rows of the tile, from the load of Q to the store of O. Consumer warpgroups synchronize only
in the warpgroup order barrier, where they take turns on the tensor cores.

The scores of block j are multiplied together with the output of block j-1 (FlashAttention-3, arXiv 2407.08608, section
3.2). Therefore the softmax always runs under tensor-core work.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from ...registry.kernel_spec import ROWS_PER_WARPGROUP, HopperSpec
from ..call_args.kernel_call import KernelArgs, KernelCall, SoftmaxScale
from ..features.base import KernelFeatures
from ..mainloop.output_accumulator import OutputAccumulator, PromotedOutput
from ..mainloop.scaled_softmax import ScaledSoftmax, Scaling
from ..mainloop.softmax import NoScaling, OnlineSoftmax, write_lse
from ..primitives import fragments, sm90
from ..primitives.tile_scheduler import TileScheduler
from ..score_stages.pipeline import ScoreCoord, ScoreLayout, ScorePipeline
from ..tiling.block_iterator import BlockIterator
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import TileAddressing, TileGrid

ROWS, SLAB = ROWS_PER_WARPGROUP, sm90.SLAB
SHORT = 4  # KV blocks: a tile with at most this count ends within the latency of the tile scheduler's atomic


class ForwardBarrier(enum.IntEnum):
    """Named barriers of the consumer warpgroups; barrier 0 is `sync_threads`."""

    TURN = 1  # warpgroup order barrier; the barrier of warpgroup w is TURN + w
    Q_READ = 4  # Q_READ + w: all warps of warpgroup w have finished the last product with Q


@dataclass(frozen=True)
class ForwardOperands:
    """TMA atoms, or TMA coordinates (rows, columns, heads, batch), of the tensors moved by TMA."""

    q: cute.CopyAtom | cute.Tensor
    k: cute.CopyAtom | cute.Tensor
    v: cute.CopyAtom | cute.Tensor  # coordinates: (columns, rows, heads, batch), unless V is given transposed
    o: cute.CopyAtom | cute.Tensor


@dataclass(frozen=True)
class ForwardSmem:
    """Operands in shared memory."""

    q: cute.Tensor  # (64, D, Q stage); D is max(D, Dv) if O leaves through the stages of Q
    k: cute.Tensor  # (tile_n, D, stage)
    v: cute.Tensor  # (Dv, tile_n, stage)
    start: sm90.AccumulatorInit | None  # initial value of integer accumulators; None for fp32 accumulators


@dataclass(frozen=True)
class ForwardWork:
    """Pipelines, tiles and KV blocks shared by the producer warp and the consumer warpgroups."""

    ring_q: sm90.Pipeline
    ring_k: sm90.Pipeline
    ring_v: sm90.Pipeline
    queue: sm90.DynamicTileScheduler
    pieces: TileGrid
    walk: BlockIterator


@dataclass(frozen=True)
class ScoreProduct:
    """Product S = Q K^T of a warpgroup with a KV block, or with the first half of the block's columns."""

    product: sm90.WgmmaProduct
    keys: cute.Tensor  # (MMA, 1, D/16, stage)
    acc: cute.Tensor  # ((2, 2, columns/8), 1, 1)
    start: sm90.AccumulatorInit | None
    compares_given: bool  # True if the row maximum is taken from the accumulator itself; set for 8-bit P

    def begin(self) -> None:
        """Initialize an integer accumulator. Call before `issue` and before the warpgroup's turn."""
        if self.start is not None:
            self.start.load(self.acc)

    def issue(self, my_Q: cute.Tensor, slot: Int32) -> None:
        """Issue the product with the K stage `stage_index` as a committed group of wgmmas."""
        keys = self.keys[None, None, None, slot]
        self.product.issue(self.acc, my_Q, keys, accumulate=self.start is not None)

    def take(self, masked: bool) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """Return the fp32 accumulator, its (2, columns) view, and the values of the maximum search.

        The accumulator and the view share the same registers. The row maximum is searched in integer scores where P is
        small enough in registers beside them, because a single instruction compares three integers. Otherwise the row
        maximum is searched in the fp32 view. If `masked` is False, integer scores still contain `sm90.OFFSET`
        (`Scaling.offset`).
        """
        acc = self.acc if self.start is None else sm90.as_floats(self.acc, exactly=masked)
        values = fragments.rows_and_columns(acc)
        return acc, values, fragments.rows_and_columns(self.acc) if self.compares_given else values


@dataclass(frozen=True)
class FirstBlock:
    """Rightmost KV block of a tile, processed first, before any product with V."""

    my_Q: cute.Tensor
    ring_k: sm90.Pipeline
    nth: Int32  # running count of K blocks
    turns: sm90.WarpgroupOrder
    chain: ScorePipeline
    n_block: Int32
    softmax: OnlineSoftmax | ScaledSoftmax
    P: fragments.OperandA | fragments.QuantizedOperandA

    @cute.jit
    def weigh(self, S: ScoreProduct):
        """Compute the block's scores, apply the score stages and the softmax, and pack P."""
        self.chain.begin(self.n_block, masked=True)
        self.softmax.fetch(self.n_block)
        S.begin()
        self.ring_k.consumer_wait(self.nth)
        self.turns.wait_turn()
        warpgroup.fence()
        S.issue(self.my_Q, self.ring_k.stage_index(self.nth))
        self.turns.signal_next()
        self.chain.prepare_stage(self.n_block, masked=True)
        warpgroup.wait_group(0)
        self.ring_k.consumer_release(self.nth)
        acc, values, given = S.take(masked=True)
        self.chain.apply(values, self.n_block, masked=True, count=self.nth)
        self.softmax.step(values, True, True, given)
        self.P.convert(acc, self.chain.p_transform(masked=True))


class ForwardSm90(KernelCall, kind="fwd"):
    """Builder of the Hopper forward kernel of a spec. All sizes below are compile-time constants.

    Computes O = softmax(scale * Q K^T) V and the LSE (natural logarithm).

    Inputs: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), or v transposed (B, Hkv, Dv, Sk) for 8-bit recipes.
    Outputs: o (B, Hq, Sq, Dv), lse (B, Hq, Sq) in fp32. Packed sequences have B = 1 and their rows on the row
    dimension.

    Warp roles: warpgroup 0 gives its registers away, and its warp 0 is the producer warp. The other tile_m / 64
    warpgroups are consumers.

    Pipelines (producer -> consumer, stages):
    - Q: producer warp -> the warpgroup that owns the 64 rows, `q_slots` stages of 64 rows.
    - K, V: producer warp -> all consumer warps, `stages` stages of tile_n keys each.
    - Tile indices: producer warp -> all consumer warps, `sm90.TILE_INDEX_STAGES` stages.
    - Score stages add pipelines of their own, for example for bias tiles.

    Shared memory: the stages of Q, K and V, the tile indices, the mbarriers and the buffers of the score stages. O
    leaves through the stage of its Q if both have the same element size. Otherwise O has a buffer of (64, Dv) per
    warpgroup. Kernels with integer scores also hold the accumulators' initial value.
    """

    def __init__(self, spec: HopperSpec):
        self.spec, self.seams = spec, KernelFeatures.of(spec)
        self.element = self.seams.element
        self.tile_m, self.tile_n, self.d, self.dv = spec.tile_m, spec.tile_n, spec.d, spec.dv
        self.stages, self.q_slots, self.q_columns = spec.stages, spec.q_slots, spec.q_columns
        self.warpgroups = spec.warpgroups
        self.early_rescale = spec.early_rescale
        # If two tiles of Q do not fit, the next Q has to wait until O has left shared memory. Then each warpgroup waits
        # for the store of its O at once, at the end of the tile.
        self.small_smem = spec.q_slots < 2 * self.warpgroups
        # Half of a diagonal block is 64 keys wide. Every second warpgroup sees no more of the block than this half, so
        # a product with half of the columns is enough. The half product is not built for Dv > D, for 8-bit scores and
        # for scores of D up to 64 with a score derivative: ptxas would serialize every product there.
        halves = self.seams.tile_lengths_vary and spec.tile_n == 2 * ROWS and spec.dv <= spec.d
        self.halves = (
            halves and self.element.scores is self.element and not (self.seams.has_score_derivative and spec.d <= ROWS)
        )
        self.producer_registers, self.consumer_registers = spec.register_split
        self.out_in_q = spec.out_in_q
        self.form = ScoreLayout(self.element, self.warpgroups, self.tile_n)

    @property
    def tile_lengths_vary(self) -> bool:
        """True if the first warpgroups of a tile may see fewer blocks than the last, or the last often has no rows."""
        diagonal = self.seams.tile_lengths_vary and self.tile_n % self.tile_m != 0
        return self.warpgroups > 1 and (diagonal or self.warpgroups == 3 or self.seams.has_small_tiles)

    @property
    def inputs(self) -> tuple[sm90.TmaLoadConfig, sm90.TmaLoadConfig, sm90.TmaLoadConfig]:
        """TMA load configurations of Q, K and V."""
        scores, values = self.element.scores, self.element.values
        return (
            sm90.TmaLoadConfig.create(scores, ROWS, self.q_columns, self.q_slots),
            sm90.TmaLoadConfig.create(scores, self.tile_n, self.d, self.stages),
            sm90.TmaLoadConfig.create(values, self.dv, self.tile_n, self.stages, major=self.major_of_values),
        )

    @property
    def major_of_values(self) -> str:
        """Major mode of V as the right operand of P V."""
        return "rows" if self.seams.v_is_transposed else "columns"

    @cute.jit
    def launch(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the preprocessing kernels of the features, then the forward kernel."""
        self.seams.launch_preprocess(call, stream)
        q, k, v = self.inputs
        pieces, given = self.seams.pieces(call), self.seams.operands(call)
        tma_q, mQ = q.tma(pieces.rows_first(given.q))
        tma_k, mK = k.tma(pieces.rows_first(given.k))
        tma_v, mVt = v.tma((pieces.rows_first if self.seams.v_is_transposed else pieces.columns_first)(given.v))
        tma_o, mO = sm90.output_tma(self.element, pieces.rows_first(call.o), self.dv)

        B, Hq, Sq = call.lse.shape
        num_m_blocks, total_heads = pieces.max_blocks_of_rows(Sq, self.tile_m), B * Hq
        kv_head_bytes = cutlass.Int64(call.k.shape[2]) * (self.spec.row_bytes("k") + self.spec.row_bytes("v"))
        sizes = (kv_head_bytes, num_m_blocks, Hq // mK.shape[2], total_heads)
        section = TileScheduler.heads_per_l2_group(*sizes, is_varlen=self.seams.has_small_tiles)
        atoms, tensors = ForwardOperands(tma_q, tma_k, tma_v, tma_o), ForwardOperands(mQ, mK, mVt, mO)
        seams = (pieces, self.seams.walk(call), self.seams.chain(call).tma(self.form))
        self.kernel(atoms, tensors, call.lse, call.scales, given.scaling, call.counter, section, *seams).launch(
            grid=(cutlass.min(num_m_blocks * total_heads, call.num_ctas * self.spec.ctas_per_sm), 1, 1),
            block=(self.spec.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.spec.ctas_per_sm,  # without this bound ptxas may drop the register split
            # Percent; without a value the DSL would query a GPU.
            preferred_smem_carveout=100 if self.spec.shares_sm else None,
            use_pdl=self.seams.overlaps_preprocess,
        )

    def make_qk(self, columns: int) -> cute.TiledMma:
        """Return the MMA of S = Q K^T, with both operands in shared memory."""
        return sm90.make_mma(self.element.scores.dtype, columns, "rows", "rows", self.element.scores.sums)

    def make_pv(self) -> cute.TiledMma:
        """Return the MMA of O += P V, with P in registers."""
        return sm90.make_mma(self.element.values.dtype, self.dv, "registers", self.major_of_values)

    def make_output(self, room: cute.Tensor) -> OutputAccumulator:
        """Return the output accumulator: a promoted fp32 output for 8-bit V, otherwise a plain accumulator.

        Args:
            room: shared memory (64, Dv) through which O leaves; a promoted output keeps its total there.
        """
        if self.element.values.bytes == 1:
            return PromotedOutput.create(self.make_pv, self.dv, room, self.tile_n)
        return OutputAccumulator.create(self.make_pv, self.dv)

    def make_scores(self, shared: ForwardSmem, thread: Int32, registers: cute.Tensor, columns: int) -> ScoreProduct:
        """Return the product with the first `columns` keys of a block; its accumulator is the start of `registers`."""
        product = sm90.WgmmaProduct.create(lambda: self.make_qk(columns))  # S = Q K^T: (64, columns)
        part = product.add.get_slice(thread)
        sK = cute.local_tile(shared.k, (columns, self.d, self.stages), (0, 0, 0))  # (columns, D, stage)
        keys = part.make_fragment_B(part.partition_B(sK))  # (MMA, 1, D/16, stage)
        layout = cute.make_layout(part.partition_shape_C((ROWS, columns)))
        acc = cute.make_tensor(registers.iterator, layout)
        return ScoreProduct(product, keys, acc, shared.start, self.element.values.bytes == 1)

    @cute.kernel
    def kernel(
        self,
        atoms: ForwardOperands,
        tensors: ForwardOperands,
        mLSE: cute.Tensor,
        scales: SoftmaxScale,
        scaling: NoScaling | Scaling,
        mCounter: cute.Tensor,
        section: Int32,
        pieces: TileAddressing,
        walk: BlockIterator,
        chain: ScorePipeline,
    ):
        """Assign the warp roles: warp 0 loads, and the consumer warpgroups multiply."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        ring_q, ring_k, ring_v = (x.create_pipeline(smem) for x in self.inputs)
        mail, ring_mail = sm90.create_tile_index_pipeline(smem)
        chain = chain.allocate_smem(smem, self.form)
        whole = self.element.scores.sums is not Float32
        shared = ForwardSmem(
            *(x.buffer(smem) for x in self.inputs), sm90.AccumulatorInit.create(smem) if whole else None
        )
        own = sm90.TmaLoadConfig.create(self.element, ROWS, self.dv, self.warpgroups)
        out = shared.q if self.out_in_q else own.buffer(smem)

        by_all = ((ring, 4 * self.warpgroups) for ring in (ring_k, ring_v, ring_mail))
        all_atoms = (atoms.q, atoms.k, atoms.v, atoms.o, *chain.atoms)
        sm90.start_cta(warp_idx, all_atoms, ((ring_q, 4), *by_all, *chain.pipelines))
        self.seams.wait()

        B, Hq, Sq = mLSE.shape
        Sk, _, Hkv, _ = tensors.k.shape
        num_m_blocks, longest_first = (
            pieces.blocks_of_rows(Sq, self.tile_m),
            walk.tile_lengths_vary or pieces.tile_lengths_vary,
        )
        section = pieces.heads_per_l2_group(section, B * Hq, Hq // Hkv)
        order = TileScheduler(longest_first, num_m_blocks, Hq, B * Hq, section)
        queue = sm90.DynamicTileScheduler(mCounter.iterator, mail, ring_mail, order.total)
        work = ForwardWork(ring_q, ring_k, ring_v, queue, pieces.of_rows(order, SeqlenInfo(Sq, Sk), Hkv), walk)

        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                self.load(
                    sm90.TmaOperand(atoms.q, tensors.q, shared.q),
                    sm90.TmaOperand(atoms.k, tensors.k, shared.k),
                    sm90.TmaOperand(atoms.v, tensors.v, shared.v),
                    work,
                    chain,
                )
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(shared, work, sm90.TmaOperand(atoms.o, tensors.o, out), mLSE, scales, scaling, chain)

    @cute.jit
    def load(self, q: sm90.TmaOperand, k: sm90.TmaOperand, v: sm90.TmaOperand, work: ForwardWork, chain: ScorePipeline):
        """Run the producer warp: load all tiles of the CTA.

        The loads of a tile are issued in the order of the products: K(0) and Q, then K(j) before V(j-1), then the last
        V. The loads of the score stages for block j follow V(j-1), whose product is issued together with the product of
        K(j).
        """
        ring_q, ring_k, ring_v = work.ring_q, work.ring_k, work.ring_v
        group = work.pieces.group
        nth, done = Int32(0), Int32(0)  # numbers of tiles and of KV blocks so far
        number = cute.arch.block_idx()[0]
        while number < work.pieces.total:
            tile = work.pieces.tile(number, group)
            run = work.walk.bind(tile.sizes, self.tile_m, self.tile_n).keys(tile)
            ticket = Int32(0)
            if cutlass.const_expr(self.seams.has_small_tiles):
                if run.count <= SHORT:  # the tile ends within the latency of the scheduler's atomic
                    ticket = work.queue.fetch_next()
            tQsQ, tQgQ = tile.rows(q).tiles((ROWS, self.q_columns), (None, 0))
            tKsK, tKgK = tile.keys(k).tiles((self.tile_n, self.d), (None, 0))
            tVsV, tVgV = tile.keys(v).tiles((self.dv, self.tile_n), (0, None))
            stages = chain.begin_tile_load(tile, tile.head)
            first = run.nth(0)
            # K goes first, because the stage of Q may have to wait for the store of an O.
            sm90.load_block(k.atom, tKgK, tKsK, ring_k, first, done)
            for w in cutlass.range_constexpr(self.warpgroups):
                part, count = tile.block * self.warpgroups + w, nth * self.warpgroups + w
                sm90.load_block(q.atom, tQgQ, tQsQ, ring_q, part, count)
            stages.load(first, done)
            for j in cutlass.range(1, run.count, unroll=1):
                block = run.nth(j)
                sm90.load_block(k.atom, tKgK, tKsK, ring_k, block, done + j)
                sm90.load_block(v.atom, tVgV, tVsV, ring_v, run.before(j), done + j - 1)
                stages.load(block, done + j)
            # The next tile is fetched as late as the latency of the atomic allows. A CTA that fetches a tile while a
            # long tile is still ahead would keep the fetched tile from CTAs that run dry first. Where tiles are short,
            # the loads of the next tile must not wait for the atomic.
            if cutlass.const_expr(self.seams.has_small_tiles):
                last = (v.atom, tVgV, tVsV, ring_v, run.last(), done + run.count - 1)
                if run.count > SHORT:
                    ticket = work.queue.fetch_next()
                    sm90.load_block(*last)
                number = work.queue.publish(nth, ticket)
                if run.count <= SHORT:
                    sm90.load_block(*last)
            else:
                ticket = work.queue.fetch_next()
                sm90.load_block(v.atom, tVgV, tVsV, ring_v, run.last(), done + run.count - 1)
                number = work.queue.publish(nth, ticket)
            nth += 1
            done += run.count

    @cute.jit
    def consume(
        self, shared: ForwardSmem, work: ForwardWork, out: sm90.TmaOperand, mLSE: cute.Tensor, scales: SoftmaxScale,
        scaling: NoScaling | Scaling, chain: ScorePipeline,
    ):  # fmt: skip
        """Run a consumer warpgroup: compute the 64 rows of every tile, block after block of the block iterator."""
        ring_q, ring_k, ring_v = work.ring_q, work.ring_k, work.ring_v
        tidx = cute.arch.thread_idx()[0] - sm90.WARPGROUP
        wg, thread = cute.arch.make_warp_uniform(tidx // sm90.WARPGROUP), tidx % sm90.WARPGROUP
        lane = thread % sm90.WARP
        # ((2, 2, tile_n/8), 1, 1): the warpgroup's 64 x tile_n scores
        acc_S = sm90.zeros(self.make_qk(self.tile_n), (ROWS, self.tile_n), self.element.scores.sums)
        S, half = (self.make_scores(shared, thread, acc_S, self.tile_n // parts) for parts in (1, 1 + self.halves))
        output = self.make_output(out.s[None, None, 0 if self.out_in_q else wg])
        qk, pv = S.product.add.get_slice(thread), output.product.add.get_slice(thread)
        tSrQ = qk.make_fragment_A(qk.partition_A(shared.q))  # (MMA, 1, D/16, Q stage)
        tOrV = pv.make_fragment_B(pv.partition_B(shared.v))  # (MMA, 1, tile_n/16, stage)
        P = fragments.left_operand(S.acc, self.element.values)  # (MMA, 1, tile_n/16)
        scales, turns = chain.scales(scales), sm90.WarpgroupOrder(ForwardBarrier.TURN, wg, self.warpgroups)
        softmax = scaling.softmax(scales.log2, chain)
        turns.start()
        chain = chain.allocate_registers(self.tile_n)  # score stages with their registers

        nth, done, number = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while number < work.pieces.total:
            tile = work.pieces.tile(number)
            wg_tile = tile.block * self.warpgroups + wg
            row = wg_tile * ROWS + thread // sm90.WARP * SLAB + lane // 4
            here = chain.set_tile(ScoreCoord(tile.sizes, self.tile_n, row, lane % 4 * 2, tile.sequence, tile.head))
            rows = softmax.at(tile, row, work.pieces)
            walk = work.walk.bind(tile.sizes, self.tile_m, self.tile_n)
            others, run = walk.kv_range_for_warpgroup(tile, wg_tile * ROWS, ROWS, self.tile_lengths_vary)
            done = pass_over(others, ring_k, ring_v, turns, here, done)
            sections = run.sections()
            nth_q = nth * self.warpgroups + wg  # running count of Q stages
            my_Q = tSrQ[None, None, None, ring_q.stage_index(nth_q)]
            ring_q.consumer_wait(nth_q)
            first = FirstBlock(my_Q, ring_k, done, turns, here, run.nth(0), rows, P)
            self.first_block_softmax(first, S, half, run.columns_of_first(ROWS))
            if cutlass.const_expr(not self.small_smem):
                hand_back(ring_q, nth_q - self.warpgroups)
            output.clear(run)

            for section in sections:
                here.begin(run.nth(section.begin), section.masked)
                for j in cutlass.range(section.begin, section.end, unroll=1):
                    now, before = done + j, done + j - 1
                    rows.fetch(run.nth(j))
                    S.begin()
                    ring_k.consumer_wait(now)
                    turns.wait_turn()
                    warpgroup.fence()
                    S.issue(my_Q, ring_k.stage_index(now))
                    if cutlass.const_expr(self.early_rescale):
                        output.rescale_output(rows, j - 1)
                        warpgroup.fence()
                    ring_v.consumer_wait(before)
                    output.add(P.fragment, tOrV[None, None, None, ring_v.stage_index(before)])
                    turns.signal_next()
                    here.prepare_stage(run.nth(j), section.masked)
                    warpgroup.wait_group(1)
                    ring_k.consumer_release(now)
                    here.prefetch(run.next(j, section), section.masked)
                    acc, values, given = S.take(here.may_mask(section.masked))
                    here.apply(values, run.nth(j), section.masked, now)
                    rows.step(values, False, here.may_mask(section.masked), given)
                    warpgroup.wait_group(0)
                    ring_v.consumer_release(before)
                    P.convert(acc, here.p_transform(section.masked))
                    if cutlass.const_expr(not self.early_rescale):
                        output.rescale_output(rows, j)

            done += run.count
            if cutlass.const_expr(self.early_rescale):
                output.rescale_output(rows, run.count - 1)
            ring_v.consumer_wait(done - 1)
            warpgroup.fence()
            output.add(P.fragment, tOrV[None, None, None, ring_v.stage_index(done - 1)])
            warpgroup.wait_group(0)
            ring_v.consumer_release(done - 1)
            output.close(run)
            if cutlass.const_expr(not isinstance(run.behind, int)):
                done = pass_over(run.behind, ring_k, ring_v, turns, here, done)
            write_lse(mLSE, rows.finish(output.values, scales.natural, here), tile, row)
            slot = ring_q.stage_index(nth_q) if self.out_in_q else wg
            self.store(output.acc, tile.rows(out), slot, wg_tile, output.product.add)
            if cutlass.const_expr(self.small_smem):
                hand_back(ring_q, nth_q)
            number = work.queue.receive(nth)
            nth += 1
        # Shared memory must stay allocated until the last store has read from it.
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def first_block_softmax(self, first: FirstBlock, S: ScoreProduct, half: ScoreProduct, seen: Int32):
        """Process the rightmost block; if its rows see at most half of the block's keys, multiply only this half."""
        if cutlass.const_expr(self.halves):
            if cute.arch.make_warp_uniform(seen) <= self.tile_n // 2:
                first.weigh(half)
            else:
                first.weigh(S)
        else:
            first.weigh(S)

    @cute.jit
    def store(self, acc_O: cute.Tensor, out: sm90.TmaOperand, slot: Int32, wg_tile: Int32, mma_pv: cute.TiledMma):
        """Store O in 16 bits through shared memory: the stage of its Q, or the output buffer where sizes differ.

        Each warp stores its 16 rows as soon as they are in shared memory.
        """
        wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // sm90.WARPGROUP - 1)
        rO = cute.make_rmem_tensor_like(acc_O, self.element.dtype)
        rO.store(acc_O.load().to(self.element.dtype))
        slot_start = cute.slice_(out.s, (None, None, slot)).iterator
        sO = cute.make_tensor(slot_start, sm90.slab_layout(self.element.dtype, ROWS, self.dv).outer)  # (64, Dv)
        if cutlass.const_expr(self.out_in_q):
            sm90.sync_warpgroup(ForwardBarrier.Q_READ, wg)  # no warp of the warpgroup may still be reading Q
        sm90.store_slabs(rO, sO, out, wg_tile * (ROWS // SLAB), mma_pv)


@cute.jit
def hand_back(ring_q: sm90.Pipeline, count: Int32):
    """Release the Q stage `count` once the O that left through the stage has been stored.

    Executed by a consumer warp. A negative `count` means that no such stage exists yet.
    """
    if count >= 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        ring_q.consumer_release(count)


@cute.jit
def pass_over(
    blocks: Int32, ring_k: sm90.Pipeline, ring_v: sm90.Pipeline, turns: sm90.WarpgroupOrder, here: ScorePipeline,
    done: Int32
) -> Int32:  # fmt: skip
    """Release KV blocks that only other warpgroups need, and return the new running count of blocks.

    Executed by a consumer warpgroup. Each skipped block also skips the warpgroup's turn and the score stages' data.
    """
    for count in cutlass.range(done, done + blocks, unroll=1):
        ring_k.consumer_wait(count)
        turns.skip_turn()
        ring_k.consumer_release(count)
        here.skip_kv_blocks(count)
        ring_v.consumer_wait(count)
        ring_v.consumer_release(count)
    return done + blocks
