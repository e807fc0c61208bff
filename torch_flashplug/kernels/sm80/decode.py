"""Decode for sm_80 and later: few query rows against many keys, at the speed of memory.

The query heads of a KV head are packed into a single tile of rows (pack-GQA), so that K and V are read once. Where
tiles are fewer than SMs, the keys of each tile are split among several CTAs (split-KV; FlashDecoding, Dao et al. 2023).
The CTAs leave fp32 partial results for the `SplitKvCombine` kernel.

A CTA has four warps. For up to 16 rows each warp is a team of its own. A team takes a quarter of the keys of every
block, has its own pipeline of K and V, and waits for no other team. At the end the results of the teams are reduced in
shared memory. For 64 rows the four warps are a single team.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32

from ...registry.kernel_spec import MMA_ATOM_M, RESULT_ROW_PADDING, WARP, AmpereSpec
from ..call_args.kernel_call import KernelArgs, KernelCall, SoftmaxScale
from ..decode.kv_load import K, KvLoader, KvScaleLoader, V
from ..decode.pack_gqa import DecodeGrid, DecodeTile
from ..decode.split_kv import (
    PartialResult,
    SplitKvCombine,
    WorkspacePartials,
    loaded,
    starts_early,
    wait_for_previous_kernel,
)
from ..features.base import KernelFeatures
from ..mainloop.softmax import OnlineSoftmax
from ..primitives import fragments, sm80
from ..primitives.vector_access import QUAD
from ..score_stages.pipeline import ScoreCoord, ScorePipeline
from ..tiling.block_iterator import BlockIterator, BoundBlocks, SplitKvRange
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import TileAddressing


@dataclass(frozen=True)
class KvStages:
    """Pipeline of a team's part of K and V of every block, filled with cp.async.

    K and V have `stages` stages each in shared memory. The nth block of a split uses stage nth % stages.
    """

    copier: sm80.SmemCopier  # copies of the team's warps
    gK: cute.Tensor  # (Sk, D)
    gV: cute.Tensor  # (Sk, Dv)
    k: sm80.SmemTile  # stage 0 of K; stage 0 of V follows
    v: sm80.SmemTile
    stages: int
    kv_range: SplitKvRange  # KV blocks of the CTA
    first_key: Int32  # the team's first key in a block
    kv_loader: KvLoader  # loader of K and V
    scale_loader: KvScaleLoader  # loader of per-key data, such as the scales of a quantized cache
    block: int  # keys of a block, over all teams

    @property
    def blocks(self) -> Int32:
        """Number of KV blocks of the CTA."""
        return self.kv_range.end - self.kv_range.begin

    def stage_tile(self, tile: sm80.SmemTile, nth: Int32 | int) -> sm80.SmemTile:
        """Return the tile of stage nth % stages. `tile` is the tile of stage 0."""
        return tile.at_offset(nth % self.stages * tile.bytes)

    def load_k(self, nth: Int32 | int) -> None:
        """Start the load of K of the split's nth block."""
        self.load(K, self.gK, self.k, nth)

    def load_v(self, nth: Int32 | int) -> None:
        """Start the load of V of the split's nth block."""
        self.load(V, self.gV, self.v, nth)

    @cute.jit
    def load(self, which: cutlass.Constexpr[int], gX: cute.Tensor, tile: sm80.SmemTile, nth: Int32):
        """Start the load of K or V of the split's nth block, and commit a cp.async group.

        Rows beyond the last key become zeros. Beyond the last block nothing is loaded. A group is committed all the
        same, so that the number of groups in flight is a constant.
        """
        if nth < self.blocks:
            first = self.kv_range.nth(self.kv_range.begin + nth) * self.block + self.first_key
            self.kv_loader.load(self.copier, gX, first, self.stage_tile(tile, nth))
            self.scale_loader.load(which, first, nth % self.stages, self.copier.threads)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_first_stages(self):
        """Start the loads of all stages except the last V, which the mainloop loads. Executed by all threads.

        The function then waits for the first K and for the queries.
        The queries belong to the group of the first K. Afterwards they are visible to all threads.
        """
        for nth in cutlass.range_constexpr(self.stages):
            self.load_k(nth)
            if cutlass.const_expr(nth < self.stages - 1):
                self.load_v(nth)
        self.wait_for_oldest(everyone=True)

    @cute.jit
    def wait_for_oldest(self, everyone: cutlass.Constexpr[bool] = False):
        """Wait until the oldest load in flight (K or V of a block) is visible to the team, or to all threads.

        Afterwards the stage that was read before the call may be overwritten: the team no longer reads the stage.
        """
        cute.arch.cp_async_wait_group(2 * self.stages - 2)  # of 2 * stages - 1 loads in flight, see `load`
        if cutlass.const_expr(everyone or self.copier.threads > WARP):  # a team of several warps is the whole CTA
            cute.arch.sync_threads()
        else:
            cute.arch.sync_warp()


@dataclass(frozen=True)
class TeamPartials:
    """Results of every team in shared memory, reduced by `split_kv.PartialResult`.

    The fp32 outputs of the rows are `pitch` floats apart. Maxima and sums follow.
    """

    start: cute.Pointer
    rows: int
    pitch: int
    splits: Int32  # number of teams

    def output(self, row: Int32, team: Int32) -> cute.Pointer:
        """Return the pointer to a team's output of a row."""
        return self.start + (team * self.rows + row) * self.pitch

    def weight(self, row: Int32, team: Int32) -> cute.Pointer:
        """Return the pointer to a team's maximum and sum of a row."""
        return self.start + self.splits * (self.rows * self.pitch) + (team * self.rows + row) * 2

    def weight_of(self, row: Int32, team: Int32) -> tuple[Float32, Float32]:
        """Return a team's maximum and sum of a row."""
        return loaded(self.weight(row, team))

    def load_quad(self, row: Int32, team: Int32, column: Int32, quad: cute.Tensor):
        """Load four columns of a team's output of a row."""
        cute.autovec_copy(shared_floats(self.output(row, team) + column, QUAD), quad)


@dataclass(frozen=True)
class DecodeGmem:
    """Tensors in global memory."""

    q: cute.Tensor  # (B, Hq, Sq, D)
    k: cute.Tensor  # (B, Hkv, Sk, D), or pages
    v: cute.Tensor  # (B, Hkv, Sk, Dv), or pages
    o: cute.Tensor  # (B, Hq, Sq, Dv)
    lse: cute.Tensor  # (B, Hq, Sq) fp32


class DecodeSm80(KernelCall, kind="decode"):
    """Builder of the sm_80 decode kernel of a spec. All sizes below are compile-time constants.

    Computes O = softmax(scale * Q K^T) V and the LSE for few query rows.

    Inputs: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv). With a paged KV cache, k and v are (pages, Hkv,
    rows of a page, D or Dv). Outputs: o (B, Hq, Sq, Dv), lse (B, Hq, Sq) in fp32. Workspace: fp32 partial results of
    the splits (`split_kv.WorkspacePartials`), if there are several splits.

    Warp roles: four warps, each of which loads and multiplies. Up to 16 rows every warp is a team. With 64 rows the
    four warps are a single team, and each owns 16 of the rows.

    Pipelines: K and V of a team, filled by the team itself with cp.async, `stages` stages each.

    Shared memory: Q (tile_m, D), then for each team the stages of K and V and the per-key data. At the end the results
    of the teams take the place of all of them.
    """

    def __init__(self, spec: AmpereSpec):
        self.spec, self.features = spec, KernelFeatures.from_spec(spec)
        self.element = self.features.element
        self.tile_m, self.tile_n, self.d, self.dv, self.stages = spec.tile_m, spec.tile_n, spec.d, spec.dv, spec.stages
        self.team_warps = spec.tile_m // MMA_ATOM_M
        self.keys = spec.tile_n // spec.teams  # keys of a team in every block

    @cute.jit
    def launch(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the decode kernel and, with several splits, the `SplitKvCombine` kernel."""
        B, Hq, Sq, Dv = call.o.shape
        Hkv = call.k.shape[1]
        addressing = self.features.tile_addressing(call)
        m_tiles = addressing.max_blocks_of_rows(Hq // Hkv * Sq, self.tile_m)
        decode_grid = self.decode_grid(call)
        partials = decode_grid.workspace(call.partials.iterator, B * Hq * Sq, call.splits, Dv)
        tensors = DecodeGmem(call.q, call.k, call.v, call.o, call.lse)
        feature_args = (
            addressing,
            self.features.block_iterator(call),
            self.features.score_pipeline(call),
            self.kv_loader(call),
            decode_grid,
        )
        self.kernel(tensors, partials.start, call.scale, call.splits, *feature_args).launch(
            grid=(decode_grid.num_ctas(B, Hkv, m_tiles, call.splits), 1, 1),
            block=(self.spec.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.spec.ctas_per_sm,
            # percent; without a value the DSL would query a GPU, and the build machine may have none.
            preferred_smem_carveout=100,
            use_pdl=starts_early(),
        )
        if call.splits > 1:
            score_pipeline = self.features.score_pipeline(call)
            SplitKvCombine(self.element)(
                call.o,
                call.lse,
                partials,
                score_pipeline.natural_scale(call.scale),
                score_pipeline,
                stream,
                call.split_size,
            )

    def kv_loader(self, call: KernelArgs) -> KvLoader:
        """Return the loader of K and V of the spec's features."""
        kv_loader = self.features.kv_loader(call)
        return KvLoader() if kv_loader is None else kv_loader

    def decode_grid(self, call: KernelArgs) -> DecodeGrid:
        """Return the assignment of CTAs to tiles of the spec's features."""
        decode_grid = self.features.decode_grid(call)
        return DecodeGrid() if decode_grid is None else decode_grid

    @cute.kernel
    def kernel(
        self,
        tensors: DecodeGmem,
        partials: cute.Pointer,
        scale: Float32,
        splits: Int32,
        addressing: TileAddressing,
        block_iterator: BlockIterator,
        score_pipeline: ScorePipeline,
        kv_loader: KvLoader,
        decode_grid: DecodeGrid,
    ):
        """Process a tile of packed rows against the keys of a split."""
        smem = cutlass.memory.SmemAllocator()
        start = Int32(smem.allocate(self.spec.smem_bytes(), 128).toint())
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        team, slab = warp // self.team_warps, warp % self.team_warps
        sizes = SeqlenInfo(tensors.q.shape[2], tensors.k.shape[2])
        heads, tile_shape = (tensors.q.shape[1], tensors.k.shape[1]), (self.tile_m, self.tile_n)
        decode_tile = decode_grid.tile_of_cta(addressing, block_iterator, sizes, heads, tile_shape, splits)
        q = sm80.SmemTile(start, self.tile_m, self.d)
        bound_iterator = block_iterator.bind(decode_tile.sizes, self.tile_m, self.tile_n).allocate_smem(smem)
        first_head, _ = decode_tile.unpack_row(Int32(0))
        scales = score_pipeline.scales(SoftmaxScale(scale * fragments.LOG2_E, scale))
        out, softmax = sm80.accumulator(self.dv), OnlineSoftmax.create(scales.log2, score_pipeline)
        column = team * self.keys + lane % 4 * 2
        # The row of the coordinate is the first packed row of the tile.
        coord = ScoreCoord(
            decode_tile.sizes, self.tile_n, decode_tile.first_row, column, decode_tile.tile.sequence, first_head
        )
        tile_stages = score_pipeline.allocate_registers(self.keys).set_tile(coord)

        wait_for_previous_kernel()
        bound_iterator.scan(decode_tile)
        kv_stages = self.make_kv_stages(
            tensors.k, tensors.v, decode_tile, bound_iterator, kv_loader, start + q.bytes, team
        )
        self.load_queries(tensors.q, q, decode_tile)
        kv_stages.load_first_stages()
        kv_loader.transform_queries(q, decode_tile, tensors.q.shape[3], self.element, self.spec.threads // WARP)
        left_q = sm80.LdmatrixView.create(q, self.element.dtype, "A", first_row=slab * MMA_ATOM_M)
        self.attend(kv_stages, left_q, out, softmax, tile_stages, bound_iterator, kv_loader)
        row_stats = softmax.finish_split(fragments.rows_and_columns(out))

        cute.arch.sync_threads()  # no warp reads shared memory any more where the results go
        floats = cute.make_ptr(Float32, start, cute.AddressSpace.smem, assumed_align=16)
        teams = TeamPartials(floats, self.tile_m, self.dv + RESULT_ROW_PADDING, Int32(self.spec.teams))
        store_team_results(
            fragments.rows_and_columns(out), row_stats, teams, team, slab * MMA_ATOM_M + lane // 4, kv_loader
        )
        cute.arch.sync_threads()
        B, Hq, Sq, Dv = tensors.o.shape
        workspace = decode_grid.workspace(partials, B * Hq * Sq, splits, Dv)
        self.reduce_teams(teams, decode_tile, tensors.o, tensors.lse, workspace, scales.natural, score_pipeline)

    def make_kv_stages(
        self, mK: cute.Tensor, mV: cute.Tensor, decode_tile: DecodeTile, bound_iterator: BoundBlocks,
        kv_loader: KvLoader, start: Int32, team: Int32
    ) -> KvStages:  # fmt: skip
        """Return the K and V pipeline of this warp's team."""
        kv_range = decode_tile.kv_range(bound_iterator)
        team_offset = team * (self.spec.kv_bytes() // self.spec.teams)
        k = sm80.SmemTile(start + team_offset, self.keys, kv_loader.columns(self.d))
        v = sm80.SmemTile(start + (team_offset + self.stages * k.bytes), self.keys, kv_loader.columns(self.dv))
        scale_loader = kv_loader.scale_loader(decode_tile, v.start + self.stages * v.bytes, self.keys, self.stages)
        copier = sm80.SmemCopier(self.team_warps * WARP, self.element, elementwise=False)
        # (Sk, D) and (Sk, Dv), or the form of K and V that `kv_loader` loads from.
        gK, gV = kv_loader.of_head(decode_tile, mK), kv_loader.of_head(decode_tile, mV)
        return KvStages(
            copier, gK, gV, k, v, self.stages, kv_range, team * self.keys, kv_loader, scale_loader, self.tile_n
        )

    @cute.jit
    def load_queries(self, mQ: cute.Tensor, q: sm80.SmemTile, decode_tile: DecodeTile):
        """Start the load of the tile's rows, executed by all threads.

        The rows may belong to several heads. Rows beyond the last become zeros.
        """
        copier = sm80.SmemCopier(self.spec.threads, self.element, elementwise=False)
        row, unit, step = copier.partition(q, cute.arch.thread_idx()[0])
        for r in cutlass.range_constexpr(0, q.rows, step):
            packed_row = decode_tile.first_row + row + r
            head, query = decode_tile.unpack_row(cutlass.min(packed_row, decode_tile.last_row))
            source = mQ[decode_tile.batch, head, query, None].iterator.toint() + unit * sm80.VECTOR_BYTES
            target = q.unit(row, unit) + r * q.row_bytes
            sm80.copy_row(source, target, q, mQ.shape[3] - unit * sm80.VECTOR, packed_row < decode_tile.rows)

    @cute.jit
    def attend(
        self, kv_stages: KvStages, left_q: sm80.LdmatrixView, out: cute.Tensor, softmax: OnlineSoftmax,
        tile_stages: ScorePipeline, bound_iterator: BoundBlocks, kv_loader: KvLoader,
    ):  # fmt: skip
        """Run the mainloop: a warp's 16 rows against the team's keys of this split's blocks."""
        product = kv_loader.product(self.element)
        right_k = sm80.LdmatrixView.create(kv_stages.k, self.element.dtype, "B")
        right_v = sm80.LdmatrixView.create(kv_stages.v, self.element.dtype, "B", transposed=True)
        acc_S = sm80.accumulator(self.keys)  # 16 x keys of a team
        S, output = fragments.rows_and_columns(acc_S), fragments.rows_and_columns(out)
        P = kv_loader.left_operand(acc_S, self.element)
        for nth in cutlass.range(kv_stages.blocks, unroll=1):
            j = kv_stages.kv_range.begin + nth
            kv_stages.load_v(nth + self.stages - 1)
            if bound_iterator.masks(kv_stages.kv_range, j):
                tile_stages.begin(kv_stages.kv_range.nth(j), masked=True)
            product.scores((acc_S,), left_q, right_k.retarget(kv_stages.stage_tile(kv_stages.k, nth), transposed=False))
            kv_stages.scale_loader.scale(S, nth % self.stages)
            kv_stages.wait_for_oldest()
            kv_stages.load_k(nth + self.stages)
            if cutlass.const_expr(tile_stages.applies_to_full_blocks):
                if bound_iterator.masks(kv_stages.kv_range, j):
                    tile_stages.apply(S, kv_stages.kv_range.nth(j), masked=True)
                else:
                    tile_stages.apply(S, kv_stages.kv_range.nth(j), masked=False)
            elif bound_iterator.masks(kv_stages.kv_range, j):
                tile_stages.apply(S, kv_stages.kv_range.nth(j), masked=True)
            if cute.arch.vote_any_sync(softmax.needs_rescale(S)):
                softmax.rescale_to_new_max(output)
            softmax.exponentiate(S)
            P.convert(acc_S, kv_stages.scale_loader.weights(nth % self.stages, cute.size(S, mode=[1])))
            values = right_v.retarget(kv_stages.stage_tile(kv_stages.v, nth), transposed=True)
            for key in cutlass.range_constexpr(0, self.keys, MMA_ATOM_M):
                product.accumulate((out,), (P.fragment[None, 0, key // MMA_ATOM_M],), values, key)
            kv_stages.wait_for_oldest()

    @cute.jit
    def reduce_teams(
        self, teams: TeamPartials, decode_tile: DecodeTile, mO: cute.Tensor, mLSE: cute.Tensor,
        workspace: WorkspacePartials, scale: Float32, score_pipeline: ScorePipeline,
    ):  # fmt: skip
        """Reduce the teams' results, executed by all threads.

        The rows go to O and LSE if keys are not split, and to the partial results otherwise.
        """
        B, Hq, Sq, Dv = mO.shape
        split_partials, quads = decode_tile.partials(workspace), Dv // QUAD
        decode_tile.publish_splits(workspace)
        num_units = cutlass.min(decode_tile.rows - decode_tile.first_row, self.tile_m) * quads
        for unit in cutlass.range(cute.arch.thread_idx()[0], num_units, self.spec.threads, unroll=1):
            row, column = unit // quads, unit % quads * QUAD
            result = PartialResult.create(scale)
            result.add(teams, row, 0, 1, column)
            head, query = decode_tile.unpack_row(decode_tile.first_row + row)
            if decode_tile.splits == 1:
                lse = result.finalize_row(score_pipeline, head)
                result.write(mO[decode_tile.batch, head, query, None].iterator + column, self.element)
                if column == 0:
                    mLSE[decode_tile.batch, head, query] = lse
            else:
                index = (decode_tile.batch * Hq + head) * Sq + query
                result.store_partial(split_partials, index, decode_tile.split, column)


@cute.jit
def store_team_results(
    output: cute.Tensor, row_stats: tuple[cute.Tensor, cute.Tensor], teams: TeamPartials, team: Int32, row: Int32,
    kv_loader: KvLoader
):  # fmt: skip
    """Write a thread's two rows, with their maxima and sums, to the results of its team.

    Args:
        row: first row of the thread in the tile; the second is eight rows below.
    """
    lane = cute.arch.lane_idx()
    for r in cutlass.range_constexpr(2):
        start = teams.output(row + 8 * r, team)
        for column, values in kv_loader.output_columns(output, r):
            registers = cute.make_rmem_tensor((len(values),), Float32)
            for i, value in enumerate(values):
                registers[i] = value
            cute.autovec_copy(registers, shared_floats(start + column, len(values)))
        if lane % 4 == 0:
            for i, of_row in enumerate(row_stats):
                cute.arch.store(teams.weight(row + 8 * r, team) + i, of_row[r])


def shared_floats(address: cute.Pointer, size: int) -> cute.Tensor:
    """Return a tensor of `size` floats in shared memory, aligned for a single access."""
    aligned = cute.make_ptr(Float32, address.toint(), cute.AddressSpace.smem, assumed_align=size * 4)
    return cute.make_tensor(aligned, cute.make_layout(size))
