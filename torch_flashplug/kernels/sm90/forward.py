"""Attention forward for Hopper: O = softmax(scale * Q K^T) V and LSE, in a single pass over the keys.

The kernel is persistent. A CTA stays on its SM and fetches tiles of tile_m query rows of a single head from a dynamic
tile scheduler. The producer warp streams Q, K and V through TMA pipelines and runs ahead into the next tile. Each
consumer warpgroup owns 64 rows of the tile, from the load of Q to the store of O. Consumer warpgroups synchronize only
in the warpgroup order barrier, which gives the tensor cores to one warpgroup at a time.

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
from ..tiling.block_iterator import BlockIterator, BlockSubrange, KvBlocks
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import TileAddressing, TileGrid
from .common import TmaOperands

ROWS, ROWS_PER_WARP = ROWS_PER_WARPGROUP, sm90.ROWS_PER_WARP
MAX_SHORT_TILE_BLOCKS = 4  # KV blocks: a tile of at most these ends within the latency of the tile scheduler's atomic
MAX_D_WITHOUT_HALF_PRODUCT = 64  # up to this D, a kernel with a score derivative has no half product


class ForwardBarrier(enum.IntEnum):
    """Named barriers of the consumer warpgroups; barrier 0 is `sync_threads`."""

    ORDER = 1  # warpgroup order barrier; the barrier of warpgroup w is ORDER + w
    Q_READ = 4  # Q_READ + w: all warps of warpgroup w have finished the last product with Q


@dataclass(frozen=True)
class ForwardSmem:
    """Operands in shared memory."""

    q: cute.Tensor  # (64, D, Q stage); D is max(D, Dv) if O leaves through the stages of Q
    k: cute.Tensor  # (tile_n, D, stage)
    v: cute.Tensor  # (Dv, tile_n, stage)
    acc_init: sm90.AccumulatorInit | None  # initial value of integer accumulators; None for fp32 accumulators


@dataclass(frozen=True)
class ForwardWork:
    """Pipelines, tiles and KV blocks shared by the producer warp and the consumer warpgroups."""

    pipeline_q: sm90.Pipeline
    pipeline_k: sm90.Pipeline
    pipeline_v: sm90.Pipeline
    tile_scheduler: sm90.DynamicTileScheduler
    tile_grid: TileGrid
    block_iterator: BlockIterator


@dataclass(frozen=True)
class ScoreProduct:
    """Product S = Q K^T of a warpgroup with a KV block, or with the first half of the block's columns."""

    product: sm90.WgmmaProduct
    keys: cute.Tensor  # (MMA, 1, D/16, stage)
    acc: cute.Tensor  # ((2, 2, columns/8), 1, 1)
    acc_init: sm90.AccumulatorInit | None
    compares_integers: bool  # True if the row maximum is searched in the integer accumulator; set for 8-bit P

    def init_accumulator(self) -> None:
        """Initialize an integer accumulator. Call before `issue` and before the warpgroup order barrier."""
        if self.acc_init is not None:
            self.acc_init.load(self.acc)

    def issue(self, my_Q: cute.Tensor, stage: Int32) -> None:
        """Issue the product with K of stage `stage` as a committed group of wgmmas."""
        keys = self.keys[None, None, None, stage]
        self.product.issue(self.acc, my_Q, keys, accumulate=self.acc_init is not None)

    def read_scores(self, masked: bool) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """Return the fp32 accumulator, its (2, columns) view, and the values of the maximum search.

        The accumulator and the view share the same registers. The row maximum is searched in integer scores where P is
        small enough in registers beside them, because a single instruction compares three integers. Otherwise the row
        maximum is searched in the fp32 view. If `masked` is False, integer scores still contain `sm90.OFFSET`
        (`Scaling.offset`).
        """
        acc = self.acc if self.acc_init is None else sm90.as_floats(self.acc, exactly=masked)
        values = fragments.rows_and_columns(acc)
        return acc, values, fragments.rows_and_columns(self.acc) if self.compares_integers else values


@dataclass(frozen=True)
class FirstBlock:
    """Rightmost KV block of a tile, processed first, before any product with V."""

    my_Q: cute.Tensor
    pipeline_k: sm90.Pipeline
    count: Int32  # running count of K blocks
    order_barrier: sm90.WarpgroupOrder
    score_pipeline: ScorePipeline
    n_block: Int32
    softmax: OnlineSoftmax | ScaledSoftmax
    P: fragments.OperandA | fragments.QuantizedOperandA

    @cute.jit
    def compute_p(self, S: ScoreProduct):
        """Compute the block's scores, apply the score stages and the softmax, and pack P."""
        self.score_pipeline.begin(self.n_block, masked=True)
        self.softmax.fetch(self.n_block)
        S.init_accumulator()
        self.pipeline_k.consumer_wait(self.count)
        self.order_barrier.wait_turn()
        warpgroup.fence()
        S.issue(self.my_Q, self.pipeline_k.stage_index(self.count))
        self.order_barrier.signal_next()
        self.score_pipeline.prepare_stage(self.n_block, masked=True)
        warpgroup.wait_group(0)
        self.pipeline_k.consumer_release(self.count)
        acc, values, max_values = S.read_scores(masked=True)
        self.score_pipeline.apply(values, self.n_block, masked=True, count=self.count)
        self.softmax.step(values, True, True, max_values)
        self.P.convert(acc, self.score_pipeline.p_transform(masked=True))


@dataclass(frozen=True)
class ForwardConsumerState:
    """State of a consumer warpgroup: pipelines, products and accumulators."""

    pipeline_k: sm90.Pipeline
    pipeline_v: sm90.Pipeline
    order_barrier: sm90.WarpgroupOrder
    S: ScoreProduct
    P: fragments.OperandA | fragments.QuantizedOperandA
    tOrV: cute.Tensor  # (MMA, 1, tile_n/16, stage)
    output: OutputAccumulator


@dataclass(frozen=True)
class ForwardConsumerTile:
    """The 64 rows of a consumer warpgroup in a tile, with their KV blocks, score stages and softmax."""

    my_Q: cute.Tensor
    kv_range: KvBlocks
    first_count: Int32  # running count of the first KV block
    tile_stages: ScorePipeline
    softmax: OnlineSoftmax | ScaledSoftmax


class ForwardSm90(KernelCall, kind="fwd"):
    """Builder of the Hopper forward kernel of a spec. All sizes below are compile-time constants.

    Computes O = softmax(scale * Q K^T) V and the LSE (natural logarithm).

    Inputs: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), or v transposed (B, Hkv, Dv, Sk) for 8-bit recipes.
    Outputs: o (B, Hq, Sq, Dv), lse (B, Hq, Sq) in fp32. Packed sequences have B = 1 and their rows on the row
    dimension.

    Warp roles: warpgroup 0 gives its registers away, and its warp 0 is the producer warp. The other tile_m / 64
    warpgroups are consumers.

    Pipelines (producer -> consumer, stages):
    - Q: producer warp -> the warpgroup that owns the 64 rows, `q_stages` stages of 64 rows.
    - K, V: producer warp -> all consumer warps, `stages` stages of tile_n keys each.
    - Tile indices: producer warp -> all consumer warps, `sm90.TILE_INDEX_STAGES` stages.
    - Score stages add pipelines of their own, for example for bias tiles.

    Shared memory: the stages of Q, K and V, the tile indices, the mbarriers and the buffers of the score stages. O
    leaves through the stage of its Q if both have the same element size. Otherwise O has a buffer of (64, Dv) per
    warpgroup. Kernels with integer scores also hold the accumulators' initial value.

    O of more than 256 columns does not fit in registers. Then each tile has an equal part of the columns of V and O
    (`HopperSpec.column_tiles`), and computes the scores again.
    """

    def __init__(self, spec: HopperSpec):
        self.spec, self.features = spec, KernelFeatures.from_spec(spec)
        self.element = self.features.element
        self.tile_m, self.tile_n, self.d, self.dv = spec.tile_m, spec.tile_n, spec.d, spec.tile_dv
        self.stages, self.q_stages, self.q_columns = spec.stages, spec.num_q_buffers, spec.q_columns
        self.warpgroups, self.column_tiles = spec.warpgroups, spec.column_tiles
        self.early_rescale = spec.early_rescale
        # If two tiles of Q do not fit, the next Q has to wait until O has left shared memory. Then each warpgroup waits
        # for the store of its O at once, at the end of the tile.
        self.small_smem = spec.num_q_buffers < 2 * self.warpgroups
        # Half of a diagonal block has as many keys as a warpgroup has rows. Every second warpgroup sees no more of the
        # block than this half, so a product with half of the columns is enough. The half product is not built for
        # Dv > D, for 8-bit scores and for small D with a score derivative: ptxas would serialize every product there.
        halves = self.features.tile_lengths_vary and spec.tile_n // 2 == ROWS and spec.tile_dv <= spec.d
        self.halves = (
            halves
            and self.element.scores is self.element
            and not (self.features.has_score_derivative and spec.d <= MAX_D_WITHOUT_HALF_PRODUCT)
        )
        self.producer_registers, self.consumer_registers = spec.register_split
        self.out_in_q = spec.stores_out_in_q
        self.score_layout = ScoreLayout(self.element, self.warpgroups, self.tile_n)

    @property
    def warpgroup_ranges_differ(self) -> bool:
        """True if the first warpgroups of a tile may see fewer blocks than the last, or the last often has no rows."""
        diagonal = self.features.tile_lengths_vary and self.tile_n % self.tile_m != 0
        return self.warpgroups > 1 and (diagonal or self.warpgroups == 3 or self.features.has_small_tiles)

    @property
    def inputs(self) -> tuple[sm90.TmaLoadConfig, sm90.TmaLoadConfig, sm90.TmaLoadConfig]:
        """TMA load configurations of Q, K and V."""
        scores, values = self.element.scores, self.element.values
        return (
            sm90.TmaLoadConfig.create(scores, ROWS, self.q_columns, self.q_stages),
            sm90.TmaLoadConfig.create(scores, self.tile_n, self.d, self.stages),
            sm90.TmaLoadConfig.create(values, self.dv, self.tile_n, self.stages, major=self.major_of_values),
        )

    @property
    def major_of_values(self) -> str:
        """Major mode of V as the right operand of P V."""
        return "rows" if self.features.v_is_transposed else "columns"

    @cute.jit
    def launch(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the preprocessing kernels of the features, then the forward kernel."""
        self.features.launch_preprocess(call, stream)
        q, k, v = self.inputs
        addressing, operands = self.features.tile_addressing(call), self.features.operands(call)
        tma_operands = TmaOperands.create(
            q=q.tma(addressing.rows_first(operands.q)),
            k=addressing.tma_of_keys(k, operands.k, rows_lead=True),
            v=addressing.tma_of_keys(v, operands.v, rows_lead=self.features.v_is_transposed),
            o=sm90.output_tma(self.element, addressing.rows_first(call.o), self.dv),
        )

        B, Hq, Sq = call.lse.shape
        num_m_blocks, total_heads = addressing.max_blocks_of_rows(Sq, self.tile_m), B * Hq
        key_bytes = self.spec.row_bytes("k") + self.column_tiles * self.spec.row_bytes("v")
        kv_head_bytes = addressing.keys_of_head(call.k) * key_bytes
        sizes = (kv_head_bytes, num_m_blocks, Hq // tma_operands.tensor("k").shape[2], total_heads)
        l2_group_heads = TileScheduler.heads_per_l2_group(*sizes, is_varlen=self.features.has_small_tiles)
        feature_args = (
            addressing,
            self.features.block_iterator(call),
            self.features.score_pipeline(call).tma(self.score_layout),
        )
        num_ctas = cutlass.min(self.count_tiles(num_m_blocks * total_heads), call.num_ctas * self.spec.ctas_per_sm)
        self.kernel(
            tma_operands, call.lse, call.scales, operands.scaling, call.counter, l2_group_heads, *feature_args
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(self.spec.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.spec.ctas_per_sm,  # without this bound ptxas may drop the register split
            # Percent; without a value the DSL would query a GPU.
            preferred_smem_carveout=100 if self.spec.shares_sm else None,
            use_pdl=self.features.overlaps_preprocess,
        )

    def count_tiles(self, row_tiles: Int32) -> Int32:
        """Return the number of tiles for a number of blocks of rows."""
        return row_tiles if self.column_tiles == 1 else row_tiles * self.column_tiles

    def split_tile_index(self, tile_idx: Int32) -> tuple[Int32, Int32 | int]:
        """Return the index of the block of rows, and the index of the columns of V and O, of a tile.

        Tiles of the same rows are neighbors. They run at the same time, and read Q and K from L2.
        """
        if self.column_tiles == 1:
            return tile_idx, 0
        return tile_idx // self.column_tiles, tile_idx % self.column_tiles

    def make_qk(self, columns: int) -> cute.TiledMma:
        """Return the MMA of S = Q K^T, with both operands in shared memory."""
        return sm90.make_mma(self.element.scores.dtype, columns, "rows", "rows", self.element.scores.sums)

    def make_pv(self) -> cute.TiledMma:
        """Return the MMA of O += P V, with P in registers."""
        return sm90.make_mma(self.element.values.dtype, self.dv, "registers", self.major_of_values)

    def make_output(self, smem_out: cute.Tensor) -> OutputAccumulator:
        """Return the output accumulator: a promoted fp32 output for 8-bit V, otherwise a plain accumulator.

        Args:
            smem_out: shared memory (64, Dv) through which O leaves; a promoted output keeps its total there.
        """
        if self.element.values.bytes == 1:
            return PromotedOutput.create(self.make_pv, self.dv, smem_out, self.tile_n)
        return OutputAccumulator.create(self.make_pv, self.dv)

    def make_scores(self, shared: ForwardSmem, thread: Int32, registers: cute.Tensor, columns: int) -> ScoreProduct:
        """Return the product with the first `columns` keys of a block; its accumulator is the start of `registers`."""
        product = sm90.WgmmaProduct.create(lambda: self.make_qk(columns))  # S = Q K^T: (64, columns)
        part = product.add.get_slice(thread)
        sK = cute.local_tile(shared.k, (columns, self.d, self.stages), (0, 0, 0))  # (columns, D, stage)
        keys = part.make_fragment_B(part.partition_B(sK))  # (MMA, 1, D/16, stage)
        layout = cute.make_layout(part.partition_shape_C((ROWS, columns)))
        acc = cute.make_tensor(registers.iterator, layout)
        return ScoreProduct(product, keys, acc, shared.acc_init, self.element.values.bytes == 1)

    @cute.kernel
    def kernel(
        self,
        operands: TmaOperands,
        mLSE: cute.Tensor,
        scales: SoftmaxScale,
        scaling: NoScaling | Scaling,
        mCounter: cute.Tensor,
        l2_group_heads: Int32,
        addressing: TileAddressing,
        block_iterator: BlockIterator,
        score_pipeline: ScorePipeline,
    ):
        """Assign the warp roles: warp 0 loads, and the consumer warpgroups multiply."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        pipeline_q, pipeline_k, pipeline_v = (x.create_pipeline(smem) for x in self.inputs)
        tile_index = sm90.TileIndexPipeline.create(smem)
        score_pipeline = score_pipeline.allocate_smem(smem, self.score_layout)
        has_integer_scores = self.element.scores.sums is not Float32
        shared = ForwardSmem(
            *(x.buffer(smem) for x in self.inputs), sm90.AccumulatorInit.create(smem) if has_integer_scores else None
        )
        out_config = sm90.TmaLoadConfig.create(self.element, ROWS, self.dv, self.warpgroups)
        smem_out = shared.q if self.out_in_q else out_config.buffer(smem)

        shared_pipelines = (
            sm90.PipelineWarps(pipeline, 4 * self.warpgroups)
            for pipeline in (pipeline_k, pipeline_v, tile_index.pipeline)
        )
        pipelines_and_warps = (sm90.PipelineWarps(pipeline_q, 4), *shared_pipelines, *score_pipeline.pipelines)
        sm90.start_cta(warp_idx, (*operands.atoms, *score_pipeline.atoms), pipelines_and_warps)
        self.features.wait_for_preprocess()

        B, Hq, Sq = mLSE.shape
        Sk, _, Hkv, _ = operands.tensor("k").shape
        num_m_blocks = addressing.blocks_of_rows(Sq, self.tile_m)
        longest_first = block_iterator.tile_lengths_vary or addressing.sequence_lengths_vary
        l2_group_heads = addressing.heads_per_l2_group(l2_group_heads, B * Hq, Hq // Hkv)
        order = TileScheduler(longest_first, num_m_blocks, Hq, B * Hq, l2_group_heads)
        tile_scheduler = sm90.DynamicTileScheduler(mCounter.iterator, tile_index, self.count_tiles(order.total))
        work = ForwardWork(
            pipeline_q,
            pipeline_k,
            pipeline_v,
            tile_scheduler,
            addressing.of_rows(order, SeqlenInfo(Sq, Sk), Hkv),
            block_iterator,
        )

        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                self.load(*operands.with_smem(q=shared.q, k=shared.k, v=shared.v), work, score_pipeline)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            (out,) = operands.with_smem(o=smem_out)
            self.consume(shared, work, out, mLSE, scales, scaling, score_pipeline)

    @cute.jit
    def load(
        self,
        q: sm90.TmaOperand,
        k: sm90.TmaOperand,
        v: sm90.TmaOperand,
        work: ForwardWork,
        score_pipeline: ScorePipeline,
    ):
        """Run the producer warp: load all tiles of the CTA.

        The loads of a tile are issued in the order of the products: K(0) and Q, then K(j) before V(j-1), then the last
        V. The loads of the score stages for block j follow V(j-1), whose product is issued together with the product of
        K(j).
        """
        pipeline_q, pipeline_k, pipeline_v = work.pipeline_q, work.pipeline_k, work.pipeline_v
        group = work.tile_grid.group
        tile_count, block_count = Int32(0), Int32(0)  # numbers of tiles and of KV blocks so far
        tile_idx = cute.arch.block_idx()[0]
        while tile_idx < work.tile_scheduler.total:
            row_tile, column_tile = self.split_tile_index(tile_idx)
            tile = work.tile_grid.tile(row_tile, group)
            kv_range = work.block_iterator.bind(tile.sizes, self.tile_m, self.tile_n).kv_blocks(tile)
            fetched_idx = Int32(0)
            if cutlass.const_expr(self.features.has_small_tiles):
                if kv_range.count <= MAX_SHORT_TILE_BLOCKS:
                    fetched_idx = work.tile_scheduler.fetch_next()
            tQsQ, tQgQ = tile.rows(q).tiles((ROWS, self.q_columns), (None, 0))
            k_blocks = tile.keys(k).blocks((self.tile_n, self.d), (None, 0))
            v_blocks = tile.keys(v).blocks((self.dv, self.tile_n), (column_tile, None))
            stage_loads = score_pipeline.begin_tile_load(tile, tile.head)
            first_block = kv_range.nth(0)
            # K goes first, because the stage of Q may have to wait for the store of an O.
            k_blocks.load(pipeline_k, first_block, block_count)
            for w in cutlass.range_constexpr(self.warpgroups):
                q_block, count = tile.block * self.warpgroups + w, tile_count * self.warpgroups + w
                sm90.load_block(q.atom, tQgQ, tQsQ, pipeline_q, q_block, count)
            stage_loads.load(first_block, block_count)
            for j in cutlass.range(1, kv_range.count, unroll=1):
                block = kv_range.nth(j)
                k_blocks.load(pipeline_k, block, block_count + j)
                v_blocks.load(pipeline_v, kv_range.before(j), block_count + j - 1)
                stage_loads.load(block, block_count + j)
            # The next tile is fetched as late as the latency of the atomic allows. A CTA that fetches a tile while a
            # long tile is still ahead would keep the fetched tile from CTAs that run dry first. Where tiles are short,
            # the loads of the next tile must not wait for the atomic.
            if cutlass.const_expr(self.features.has_small_tiles):
                last_v_load = (pipeline_v, kv_range.last(), block_count + kv_range.count - 1)
                if kv_range.count > MAX_SHORT_TILE_BLOCKS:
                    fetched_idx = work.tile_scheduler.fetch_next()
                    v_blocks.load(*last_v_load)
                tile_idx = work.tile_scheduler.publish(tile_count, fetched_idx)
                if kv_range.count <= MAX_SHORT_TILE_BLOCKS:
                    v_blocks.load(*last_v_load)
            else:
                fetched_idx = work.tile_scheduler.fetch_next()
                v_blocks.load(pipeline_v, kv_range.last(), block_count + kv_range.count - 1)
                tile_idx = work.tile_scheduler.publish(tile_count, fetched_idx)
            tile_count += 1
            block_count += kv_range.count

    @cute.jit
    def consume(
        self, shared: ForwardSmem, work: ForwardWork, out: sm90.TmaOperand, mLSE: cute.Tensor, scales: SoftmaxScale,
        scaling: NoScaling | Scaling, score_pipeline: ScorePipeline,
    ):  # fmt: skip
        """Run a consumer warpgroup: compute the 64 rows of every tile, block after block of the block iterator."""
        pipeline_q, pipeline_k, pipeline_v = work.pipeline_q, work.pipeline_k, work.pipeline_v
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
        scales = score_pipeline.scales(scales)
        order_barrier = sm90.WarpgroupOrder(ForwardBarrier.ORDER, wg, self.warpgroups)
        softmax = scaling.softmax(scales.log2, score_pipeline)
        order_barrier.start()
        state = ForwardConsumerState(pipeline_k, pipeline_v, order_barrier, S, P, tOrV, output)
        score_pipeline = score_pipeline.allocate_registers(self.tile_n)  # score stages with their registers

        tile_count, block_count, tile_idx = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while tile_idx < work.tile_scheduler.total:
            row_tile, column_tile = self.split_tile_index(tile_idx)
            tile = work.tile_grid.tile(row_tile)
            wg_tile = tile.block * self.warpgroups + wg
            row = wg_tile * ROWS + thread // sm90.WARP * ROWS_PER_WARP + lane // 4
            tile_stages = score_pipeline.set_tile(
                ScoreCoord(tile.sizes, self.tile_n, row, lane % 4 * 2, tile.sequence, tile.head)
            )
            row_softmax = softmax.set_tile(tile, row, work.tile_grid)
            bound_iterator = work.block_iterator.bind(tile.sizes, self.tile_m, self.tile_n)
            skipped_blocks, kv_range = bound_iterator.kv_range_for_warpgroup(
                tile, wg_tile * ROWS, ROWS, self.warpgroup_ranges_differ
            )
            block_count = skip_kv_blocks(
                skipped_blocks, pipeline_k, pipeline_v, order_barrier, tile_stages, block_count
            )
            # `count_q` is the running count of Q stages.
            subranges, count_q = kv_range.subranges(), tile_count * self.warpgroups + wg
            my_Q = tSrQ[None, None, None, pipeline_q.stage_index(count_q)]
            pipeline_q.consumer_wait(count_q)
            first_block = FirstBlock(
                my_Q, pipeline_k, block_count, order_barrier, tile_stages, kv_range.nth(0), row_softmax, P
            )
            self.first_block_softmax(first_block, S, half, kv_range.columns_of_first(ROWS))
            if cutlass.const_expr(not self.small_smem):
                release_q_stage(pipeline_q, count_q - self.warpgroups)
            output.clear(kv_range)

            consumer_tile = ForwardConsumerTile(my_Q, kv_range, block_count, tile_stages, row_softmax)
            for subrange in subranges:
                tile_stages.begin(kv_range.nth(subrange.begin), subrange.masked)
                for j in cutlass.range(subrange.begin, subrange.end, unroll=1):
                    self.step(state, consumer_tile, subrange, j)

            block_count += kv_range.count
            if cutlass.const_expr(self.early_rescale):
                output.rescale_output(row_softmax, kv_range.count - 1)
            pipeline_v.consumer_wait(block_count - 1)
            warpgroup.fence()
            output.add(P.fragment, tOrV[None, None, None, pipeline_v.stage_index(block_count - 1)])
            warpgroup.wait_group(0)
            pipeline_v.consumer_release(block_count - 1)
            output.finish(kv_range)
            if cutlass.const_expr(kv_range.may_skip_trailing):
                block_count = skip_kv_blocks(
                    kv_range.num_trailing_skipped, pipeline_k, pipeline_v, order_barrier, tile_stages, block_count
                )
            lse = row_softmax.finish(output.values, scales.natural, tile_stages)
            if cutlass.const_expr(self.column_tiles == 1):
                write_lse(mLSE, lse, tile, row)
            elif column_tile == 0:  # the softmax of the other column tiles gives the same LSE
                write_lse(mLSE, lse, tile, row)
            stage = pipeline_q.stage_index(count_q) if self.out_in_q else wg
            block = (wg_tile * (ROWS // ROWS_PER_WARP), column_tile)
            self.store(output.acc, tile.rows(out), stage, block, output.product.add)
            if cutlass.const_expr(self.small_smem):
                release_q_stage(pipeline_q, count_q)
            tile_idx = work.tile_scheduler.receive(tile_count)
            tile_count += 1
        # Shared memory must stay allocated until the last store has read from it.
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def step(self, state: ForwardConsumerState, tile: ForwardConsumerTile, subrange: BlockSubrange, j: Int32):
        """Issue the scores of block j and the output of block j - 1 together, and compute P of block j."""
        S, P, output, kv_range, tile_stages = state.S, state.P, state.output, tile.kv_range, tile.tile_stages
        count, previous, masked = tile.first_count + j, tile.first_count + j - 1, subrange.masked
        tile.softmax.fetch(kv_range.nth(j))
        S.init_accumulator()
        state.pipeline_k.consumer_wait(count)
        state.order_barrier.wait_turn()
        warpgroup.fence()
        S.issue(tile.my_Q, state.pipeline_k.stage_index(count))
        if cutlass.const_expr(self.early_rescale):
            output.rescale_output(tile.softmax, j - 1)
            warpgroup.fence()
        state.pipeline_v.consumer_wait(previous)
        output.add(P.fragment, state.tOrV[None, None, None, state.pipeline_v.stage_index(previous)])
        state.order_barrier.signal_next()
        tile_stages.prepare_stage(kv_range.nth(j), masked)
        warpgroup.wait_group(1)
        state.pipeline_k.consumer_release(count)
        tile_stages.prefetch(kv_range.next(j, subrange), masked)
        acc, values, max_values = S.read_scores(tile_stages.may_mask(masked))
        tile_stages.apply(values, kv_range.nth(j), masked, count)
        tile.softmax.step(values, False, tile_stages.may_mask(masked), max_values)
        warpgroup.wait_group(0)
        state.pipeline_v.consumer_release(previous)
        P.convert(acc, tile_stages.p_transform(masked))
        if cutlass.const_expr(not self.early_rescale):
            output.rescale_output(tile.softmax, j)

    @cute.jit
    def first_block_softmax(self, first_block: FirstBlock, S: ScoreProduct, half: ScoreProduct, visible_columns: Int32):
        """Process the rightmost block; if its rows see at most half of the block's keys, multiply only this half."""
        if cutlass.const_expr(self.halves):
            if cute.arch.make_warp_uniform(visible_columns) <= self.tile_n // 2:
                first_block.compute_p(half)
            else:
                first_block.compute_p(S)
        else:
            first_block.compute_p(S)

    @cute.jit
    def store(
        self,
        acc_O: cute.Tensor,
        out: sm90.TmaOperand,
        stage: Int32,
        block: tuple[Int32, Int32 | int],
        mma_pv: cute.TiledMma,
    ):
        """Store O in 16 bits through shared memory: the stage of its Q, or the output buffer where sizes differ.

        Each warp stores its 16 rows as soon as they are in shared memory. `block` is the first block of 16 rows and the
        block of Dv columns of the output.
        """
        wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // sm90.WARPGROUP - 1)
        rO = cute.make_rmem_tensor_like(acc_O, self.element.dtype)
        rO.store(acc_O.load().to(self.element.dtype))
        stage_start = cute.slice_(out.s, (None, None, stage)).iterator
        layout = sm90.slab_layout(self.element.dtype, ROWS, self.dv)
        if cutlass.const_expr(self.column_tiles > 1):  # a part of the columns may have another swizzle than Q
            stage_start = cute.recast_ptr(stage_start, layout.inner, dtype=self.element.dtype)
        sO = cute.make_tensor(stage_start, layout.outer)  # (64, Dv)
        if cutlass.const_expr(self.out_in_q):
            sm90.sync_warpgroup(ForwardBarrier.Q_READ, wg)  # no warp of the warpgroup may still be reading Q
        first, column_block = block
        sm90.store_slabs(rO, sO, out, first, mma_pv, column_block)


@cute.jit
def release_q_stage(pipeline_q: sm90.Pipeline, count: Int32):
    """Release the Q stage `count` once the O that left through the stage has been stored.

    Executed by a consumer warp. A negative `count` means that no such stage exists yet.
    """
    if count >= 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        pipeline_q.consumer_release(count)


@cute.jit
def skip_kv_blocks(
    num_blocks: Int32, pipeline_k: sm90.Pipeline, pipeline_v: sm90.Pipeline, order_barrier: sm90.WarpgroupOrder,
    tile_stages: ScorePipeline, block_count: Int32
) -> Int32:  # fmt: skip
    """Release KV blocks that only other warpgroups need, and return the new running count of blocks.

    Executed by a consumer warpgroup. Each skipped block passes the order barrier, and score stages release its data.
    """
    for count in cutlass.range(block_count, block_count + num_blocks, unroll=1):
        pipeline_k.consumer_wait(count)
        order_barrier.skip_turn()
        pipeline_k.consumer_release(count)
        tile_stages.skip_kv_blocks(count)
        pipeline_v.consumer_wait(count)
        pipeline_v.consumer_release(count)
    return block_count + num_blocks
