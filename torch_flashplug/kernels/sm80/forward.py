"""Attention forward for sm_80 and later: O = softmax(scale * Q K^T) V and LSE, in a single pass over the keys.

A CTA has a single tile of query rows. A warp owns one or two slabs of 16 rows, from Q to O, and no warp needs the
results of another warp (FlashAttention-2, arXiv 2307.08691, section 3.3). K and V are loaded with cp.async, each while
the product with the other runs. Where an SM holds two CTAs, they fill each other's gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64

from ...registry.kernel_spec import MMA_ATOM_M, AmpereSpec
from ..call_args.kernel_call import KernelArgs, KernelCall, SoftmaxScale
from ..features.base import KernelFeatures
from ..mainloop.softmax import OnlineSoftmax, write_lse
from ..primitives import fragments, sm80
from ..primitives.dtype import Element
from ..primitives.tile_scheduler import TileScheduler
from ..score_stages.pipeline import ScoreCoord, ScorePipeline, SlabScoreLayout
from ..tiling.block_iterator import BlockIterator, BoundBlocks
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import Tile, TileAddressing


@dataclass(frozen=True)
class KvStages:
    """Loads of K and V of a head, block by block."""

    copier: sm80.SmemCopier
    gK: cute.Tensor  # (Sk, D)
    gV: cute.Tensor  # (Sk, Dv)
    k: sm80.SmemTile  # (tile_n, D) in shared memory
    v: sm80.SmemTile  # (tile_n, Dv) in shared memory
    stages: ScorePipeline  # score stages, with the data that they load

    def load_k(self, block: Int32, all_rows_exist: bool) -> None:
        """Start the load of a block of K."""
        self.copier.load(self.gK, block * self.k.rows, self.k, all_rows_exist)

    def load_v(self, block: Int32, count: Int32, all_rows_exist: bool) -> None:
        """Start the load of a block of V and of the data of the score stages.

        Both loads have landed behind the scores, and are read before those of the next block.
        """
        self.copier.load(self.gV, block * self.v.rows, self.v, all_rows_exist)
        self.stages.load(block, count)


@dataclass(frozen=True)
class WarpRows:
    """State of a warp for 16 of its rows: accumulators, softmax and score stages."""

    S: cute.Tensor  # 16 x tile_n scores, then probabilities
    out: cute.Tensor  # 16 x Dv output
    P: fragments.OperandA  # P in 16 bits
    softmax: OnlineSoftmax
    score_pipeline: ScorePipeline
    row: Int32  # first row of the thread

    @classmethod
    def create(
        cls, element: Element, tile_n: int, dv: int, scale_log2: Float32, score_pipeline: ScorePipeline, row: Int32
    ) -> WarpRows:
        """Create cleared accumulators and the softmax state of a slab."""
        S, out = sm80.accumulator(tile_n), sm80.accumulator(dv)
        return cls(
            S,
            out,
            fragments.OperandA.create(S, element),
            OnlineSoftmax.create(scale_log2, score_pipeline),
            score_pipeline,
            row,
        )

    @property
    def scores(self) -> cute.Tensor:
        """The (2, columns) view of S of a thread."""
        return fragments.rows_and_columns(self.S)

    @property
    def output(self) -> cute.Tensor:
        """The (2, columns) view of the output of a thread."""
        return fragments.rows_and_columns(self.out)


class ForwardSm80(KernelCall, kind="fwd"):
    """Builder of the sm_80 forward kernel of a spec. All sizes below are compile-time constants.

    Computes O = softmax(scale * Q K^T) V and the LSE (natural logarithm).

    Inputs: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv). Outputs: o (B, Hq, Sq, Dv), lse (B, Hq, Sq) in
    fp32.

    Warp roles: every warp loads, multiplies and stores. A warp owns `slabs` slabs of 16 rows.

    Pipelines: K and V have a single buffer each. The cp.async load of K of the next block runs under the softmax and P
    V. The load of V runs under Q K^T.

    Shared memory: Q (tile_m, D), later O (tile_m, Dv) in the same place; K (tile_n, D); V (tile_n, Dv); and the buffers
    of the score stages.
    """

    def __init__(self, spec: AmpereSpec):
        self.spec, self.elementwise, self.features = spec, spec.elementwise, KernelFeatures.from_spec(spec)
        self.element = self.features.element
        self.tile_m, self.tile_n, self.d, self.dv = spec.tile_m, spec.tile_n, spec.d, spec.dv
        self.score_layout = SlabScoreLayout(
            self.element, spec.threads, self.tile_m, self.tile_n, self.elementwise, spec.has_stage_smem
        )

    @cute.jit
    def launch(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the preprocessing kernels of the features, then the forward kernel with a CTA per tile.

        The tile counter and the number of CTAs in the call are for the Hopper kernels and are not used.
        """
        B, Hq, Sq = call.lse.shape
        addressing = self.features.tile_addressing(call)
        num_m_blocks = addressing.max_blocks_of_rows(Sq, self.tile_m)
        kv_head_bytes = Int64(call.k.shape[2]) * ((self.d + self.dv) * self.element.bytes)
        l2_group_heads = TileScheduler.heads_per_l2_group(kv_head_bytes, num_m_blocks, Hq // call.k.shape[1], B * Hq)
        tensors = (call.q, call.k, call.v, call.o, call.lse)
        feature_args = (addressing, self.features.block_iterator(call), self.features.score_pipeline(call))
        self.features.launch_preprocess(call, stream)
        self.kernel(*tensors, call.scales, l2_group_heads, *feature_args).launch(
            grid=(num_m_blocks * B * Hq, 1, 1), block=(self.spec.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        scales: SoftmaxScale,
        l2_group_heads: Int32,
        addressing: TileAddressing,
        block_iterator: BlockIterator,
        score_pipeline: ScorePipeline,
    ):
        """Compute a tile: load Q, run the mainloop, and store O and LSE."""
        B, Hq, Sq = mLSE.shape
        num_m_blocks = addressing.blocks_of_rows(Sq, self.tile_m)
        longest_first = block_iterator.tile_lengths_vary or addressing.sequence_lengths_vary
        order = TileScheduler(longest_first, num_m_blocks, Hq, B * Hq, l2_group_heads)
        tile_grid = addressing.of_rows(order, SeqlenInfo(Sq, mK.shape[2]), mK.shape[1])
        tile = tile_grid.only_tile(cute.arch.block_idx()[0])
        first_row = tile.block * self.tile_m

        smem = cutlass.memory.SmemAllocator()
        start = Int32(smem.allocate(self.spec.operand_bytes(), 128).toint())
        q, o = sm80.SmemTile(start, self.tile_m, self.d), sm80.SmemTile(start, self.tile_m, self.dv)
        k = sm80.SmemTile(start + max(q.bytes, o.bytes), self.tile_n, self.d)
        v = sm80.SmemTile(k.start + k.bytes, self.tile_n, self.dv)
        copier = sm80.SmemCopier(self.spec.threads, self.element, self.elementwise)
        score_pipeline = score_pipeline.allocate_smem(smem, self.score_layout)
        kv_stages = KvStages(
            copier, tile.keys(mK), tile.keys(mV), k, v, score_pipeline.begin_tile_load(tile, tile.head)
        )

        slab = cute.arch.make_warp_uniform(cute.arch.warp_idx()) * self.spec.slabs  # the warp's first slab
        lane, scales = cute.arch.lane_idx(), score_pipeline.scales(scales)
        slabs = []
        for i in cutlass.range_constexpr(self.spec.slabs):
            row = first_row + (slab + i) * MMA_ATOM_M + lane // 4
            tile_stages = score_pipeline.allocate_registers(self.tile_n)
            tile_stages = tile_stages.set_tile(
                ScoreCoord(tile.sizes, self.tile_n, row, lane % 4 * 2, tile.sequence, tile.head, by_row=True)
            )
            slabs.append(WarpRows.create(self.element, self.tile_n, self.dv, scales.log2, tile_stages, row))
        left_q = sm80.LdmatrixView.create(q, self.element.dtype, "A", first_row=slab * MMA_ATOM_M)

        copier.load(tile.rows(mQ), first_row, q)
        self.attend(
            block_iterator.bind(tile.sizes, self.tile_m, self.tile_n), tile, kv_stages, first_row, left_q, slabs
        )

        for i in cutlass.range_constexpr(self.spec.slabs):
            lse = slabs[i].softmax.finish(slabs[i].output, scales.natural, slabs[i].score_pipeline)
            write_lse(mLSE, lse, tile, slabs[i].row)
            row = first_row + (slab + i) * MMA_ATOM_M
            copier.store(slabs[i].out, tile.rows(mO), row, o, slab + i)

    @cute.jit
    def attend(
        self, bound_iterator: BoundBlocks, tile: Tile, kv_stages: KvStages, first_row: Int32, left_q: sm80.LdmatrixView,
        slabs: list[WarpRows]
    ):  # fmt: skip
        """Run the mainloop over all KV blocks visible to a row of the tile: the partial blocks first."""
        product = sm80.MmaProduct.create(self.element.dtype)
        right_k = sm80.LdmatrixView.create(kv_stages.k, self.element.dtype, "B")
        right_v = sm80.LdmatrixView.create(kv_stages.v, self.element.dtype, "B", transposed=True)
        kv_range = bound_iterator.kv_blocks_of_rows(tile, first_row)
        num_masked = kv_range.num_masked
        kv_stages.load_k(kv_range.nth(0), all_rows_exist=False)
        sm80.wait_for_copies()
        for j in cutlass.range(kv_range.count, unroll=1):
            block = kv_range.nth(j)
            kv_stages.load_v(block, j, all_rows_exist=False)
            product.scores(tuple(slab.S for slab in slabs), left_q, right_k)
            sm80.wait_for_copies()
            if kv_range.has_next(j):
                kv_stages.load_k(kv_range.after(j), all_rows_exist=kv_range.tail_first)
            if j < num_masked:
                apply_score_stages(slabs, block, j, masked=True)
            else:
                apply_score_stages(slabs, block, j, masked=False)
            grown = cutlass.Boolean(False)
            for i in cutlass.range_constexpr(len(slabs)):
                grown = grown | slabs[i].softmax.needs_rescale(slabs[i].scores)
            if cute.arch.vote_any_sync(grown):
                for i in cutlass.range_constexpr(len(slabs)):
                    slabs[i].softmax.rescale_to_new_max(slabs[i].output)
            for i in cutlass.range_constexpr(len(slabs)):
                slabs[i].softmax.exponentiate(slabs[i].scores)
                slabs[i].P.convert(slabs[i].S, slabs[i].score_pipeline.p_transform(masked=True))
            for key in cutlass.range_constexpr(0, self.tile_n, MMA_ATOM_M):
                lefts = tuple(slab.P.fragment[None, 0, key // MMA_ATOM_M] for slab in slabs)
                product.accumulate(tuple(slab.out for slab in slabs), lefts, right_v, key)
            sm80.wait_for_copies()


def apply_score_stages(slabs: list[WarpRows], block: Int32, count: Int32, masked: bool) -> None:
    """Apply the score stages to a block's scores.

    Score stages have no registers across blocks in these kernels. Therefore `begin` and `prepare_stage` are called
    directly before `apply`.
    """
    for slab in slabs:
        slab.score_pipeline.begin(block, masked)
        slab.score_pipeline.prepare_stage(block, masked)
    for slab in slabs:
        slab.score_pipeline.apply(slab.scores, block, masked, count)
