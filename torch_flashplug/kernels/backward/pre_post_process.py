"""Backward preprocess and postprocess kernels, before and after the main kernel (sm90/backward.py, sm80/backward.py).

The preprocess kernel computes the row statistics. The postprocess kernel converts dQ to 16 bits. Both
kernels work on blocks of TILE_M query rows of a head, equal to the steps of the main kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ...registry.kernel_spec import BACKWARD_TILE, DQ_WRITERS, ROWS_PER_WARPGROUP, WARPGROUP
from ..primitives import fragments, sm90
from ..primitives.dtype import Element
from ..primitives.vector_access import vector_at
from ..score_stages.pipeline import DropoutScale, ScorePipeline
from ..tiling.equal_lengths import ConditionalAddressing, wait_for_previous_launch
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import Tile, TileAddressing
from .workspace import ADDED, CLEARED, UNITS, DqWorkspace, WorkspaceLayout, clear

TILE_M, TILE_N = BACKWARD_TILE  # query rows per step of the main kernel, keys per CTA of the main kernel
WARPGROUPS = TILE_N // ROWS_PER_WARPGROUP
LANES = 8  # threads per row
VECTOR = 8  # elements of a 16-byte access
# An LSE beyond LOST in magnitude has lost the digits of the sum, and exp2 of the difference to a score could be
# anything. Keys all masked by a large number (finfo.min) therefore count as no keys.
LOST = float(2**24)


@dataclass(frozen=True)
class WorkspaceClear:
    """Workspace to clear before the main kernel: the counters, and the dQ workspace of the first heads."""

    workspace: cute.Tensor
    heads: Int32  # KV heads over the whole batch; the main kernel clears the remaining heads
    group: Int32
    portions: Int32


@dataclass(frozen=True)
class RowStatsInputs:
    """Row tensors from the forward pass and autograd."""

    o: cute.Tensor  # (B, Hq, Sq, Dv)
    do: cute.Tensor  # (B, Hq, Sq, Dv)
    lse: cute.Tensor  # (B, Hq, Sq) fp32, natural log
    dlse: cute.Tensor | None = None  # (B, Hq, Sq) fp32; empty if no gradient flows into the LSE


class BackwardPreprocess:
    """Backward preprocess: delta = rowsum(dO * O) - dLSE, and the LSE in base 2, padded to whole blocks.

    The kernel also clears the counters of the workspace, and the dQ workspace of the first heads.
    """

    def __init__(self, element: Element, clears: int = 0, elementwise: bool = False):
        """Initialize the kernel builder.

        Args:
            element: element type of O and dO.
            clears: columns of dQ in the workspace, or 0 without a dQ workspace.
            elementwise: O and dO may have any strides and any address.
        """
        self.element, self.unit_floats, self.elementwise = element, TILE_M * clears // UNITS, elementwise

    @cute.jit
    def __call__(
        self,
        inputs: RowStatsInputs,
        mRowStats: cute.Tensor,  # (B, Hq, 2, blocks * TILE_M) fp32
        mDqWorkspace: cute.Tensor | None,  # dQ workspace (DqWorkspace)
        workspace_layout: WorkspaceLayout | None,
        keep_scale: DropoutScale | None,  # kept share of P
        addressing: TileAddressing,
        stream: cuda.CUstream,
    ):
        B, Hq = inputs.lse.shape[0], inputs.lse.shape[1]
        clearing = (
            None
            if workspace_layout is None
            else WorkspaceClear(mDqWorkspace, workspace_layout.heads, workspace_layout.group, workspace_layout.portions)
        )
        self.kernel(inputs, mRowStats, clearing, keep_scale, addressing).launch(
            # The first grid dimension has a limit of 2^31 - 1 CTAs. The limit of the further dimensions is 65535, and B
            # or Hq may exceed this limit.
            grid=(mRowStats.shape[3] // TILE_M * Hq * B, 1, 1),
            block=(WARPGROUP, 1, 1),
            stream=stream,
            use_pdl=isinstance(addressing, ConditionalAddressing),
        )

    @cute.kernel
    def kernel(
        self,
        inputs: RowStatsInputs,
        mRowStats: cute.Tensor,
        clearing: WorkspaceClear | None,
        keep_scale: DropoutScale | None,
        addressing: TileAddressing,
    ):
        if cutlass.const_expr(isinstance(addressing, ConditionalAddressing)):
            wait_for_previous_launch()
            if addressing.has_work():
                self.compute_row_stats(inputs, mRowStats, clearing, keep_scale, addressing)
        else:
            self.compute_row_stats(inputs, mRowStats, clearing, keep_scale, addressing)

    @cute.jit
    def compute_row_stats(
        self,
        inputs: RowStatsInputs,
        mRowStats: cute.Tensor,
        clearing: WorkspaceClear | None,
        keep_scale: DropoutScale | None,
        addressing: TileAddressing,
    ):
        """Compute the row statistics of a block of rows, and clear the CTA's part of the workspace."""
        heads, blocks = mRowStats.shape[1], mRowStats.shape[3] // TILE_M
        linear, workspace_block = cute.arch.block_idx()[0] // blocks, cute.arch.block_idx()[0] % blocks
        batch, head = linear // heads, linear % heads
        thread = cute.arch.thread_idx()[0]
        if cutlass.const_expr(clearing is not None):
            self.clear(clearing, linear, workspace_block, blocks)

        mO, mdO, Sq, Dv = inputs.o, inputs.do, inputs.o.shape[2], inputs.o.shape[3]
        tile = addressing.workspace_block(workspace_block, head, batch, SeqlenInfo(Sq, Sq))
        for part in cutlass.range_constexpr(TILE_M * LANES // WARPGROUP):
            row = tile.block * TILE_M + part * (WARPGROUP // LANES) + thread // LANES
            delta, lse = Float32(0.0), Float32(Float32.inf)
            if row < tile.sizes.Sq:
                coord = tile.lse_coord(row)
                if cutlass.const_expr(self.elementwise):
                    for column in cutlass.range(thread % LANES, Dv, LANES, unroll=1):
                        delta += mO[(*coord, column)].to(Float32) * mdO[(*coord, column)].to(Float32)
                else:
                    delta = self.product(mO[(*coord, None)], mdO[(*coord, None)], thread % LANES)
                lse = inputs.lse[coord] * fragments.LOG2_E
                lse = cutlass.select_(abs(lse) > LOST, Float32.inf, lse)  # no visible key: exp2(S - inf) = 0
            for lanes in (1, 2, 4):
                delta = delta + cute.arch.shuffle_sync_bfly(delta, offset=lanes)
            if cutlass.const_expr(inputs.dlse is not None):
                if row < cutlass.min(inputs.dlse.shape[2], tile.sizes.Sq):
                    delta = delta - inputs.dlse[tile.lse_coord(row)]
            if thread % LANES == 0:
                row = workspace_block * TILE_M + part * (WARPGROUP // LANES) + thread // LANES
                mRowStats[batch, head, 0, row] = lse
                mRowStats[batch, head, 1, row] = (
                    delta if cutlass.const_expr(keep_scale is None) else delta * keep_scale.keep_probability
                )

    @cute.jit
    def product(self, gO: cute.Tensor, gdO: cute.Tensor, lane: Int32) -> Float32:
        """Return a lane's part of the product of a row of O and dO, with vector loads."""
        delta = Float32(0.0)
        for column in cutlass.range(lane * VECTOR, gO.shape[0], LANES * VECTOR, unroll=1):
            o = vector_at(gO.iterator + column, self.element.dtype, VECTOR).load().to(Float32)
            do = vector_at(gdO.iterator + column, self.element.dtype, VECTOR).load().to(Float32)
            delta += (o * do).reduce(cute.ReductionOp.ADD, 0.0, 0)
        return delta

    @cute.jit
    def clear(self, clearing: WorkspaceClear, linear: Int32, block: Int32, blocks: Int32):
        """Clear the CTA's part of the workspace.

        Args:
            clearing: workspace to clear.
            linear: query head, counted over the whole batch.
            block: block of rows.
            blocks: number of blocks of a head.
        """
        thread = cute.arch.thread_idx()[0]
        heads = cute.arch.grid_dim()[0] // blocks
        workspace = DqWorkspace(clearing.workspace.iterator, blocks, heads, self.unit_floats)
        first = (linear * blocks + block) * UNITS
        kv_head, early = linear // clearing.group, linear // clearing.group < clearing.heads
        if early:
            clear(workspace.unit(first), UNITS * self.unit_floats, thread, WARPGROUP)
        if thread < UNITS:
            cute.arch.store(workspace.unit_counter(first + thread), Int32(0))
        if linear % clearing.group == 0 and block == 0 and thread == 0:
            cleared = clearing.portions * DQ_WRITERS if early else Int32(0)
            cute.arch.store(workspace.counter(kv_head, CLEARED), cleared)
            cute.arch.store(workspace.counter(kv_head, ADDED), Int32(0))


class BackwardPostprocess:
    """Backward postprocess: dQ = scale * workspace, from register order into rows, for the last heads or for all heads.

    In a unit of the workspace (DqWorkspace) the four lanes of a quad hold all eight columns of two rows: 64
    consecutive bytes.
    """

    def __init__(self, element: Element, d: int, elementwise: bool = False):
        """Initialize the kernel builder.

        Args:
            element: element type of dQ.
            d: head dim.
            elementwise: dQ may have any strides and any address.
        """
        self.element, self.chunks, self.elementwise = element, d // WARPGROUPS // VECTOR, elementwise

    @cute.jit
    def __call__(
        self,
        mDqWorkspace: cute.Tensor,
        mRowStats: cute.Tensor,  # (B, Hq, 2, blocks * TILE_M) fp32
        mdQ: cute.Tensor,
        scale: Float32,
        workspace_layout: WorkspaceLayout,
        addressing: TileAddressing,
        stream: cuda.CUstream,
    ):
        B, Hq, _, rows = mRowStats.shape
        heads, blocks = workspace_layout.heads * workspace_layout.group, rows // TILE_M
        self.kernel(mDqWorkspace, blocks, mdQ, scale, B * Hq - heads, addressing).launch(
            grid=(blocks * heads, 1, 1),
            block=(WARPGROUPS * WARPGROUP, 1, 1),
            stream=stream,
            use_pdl=isinstance(addressing, ConditionalAddressing),
        )

    @cute.kernel
    def kernel(
        self, mDqWorkspace: cute.Tensor, blocks: Int32, mdQ: cute.Tensor, scale: Float32, first_head: Int32,
        addressing: TileAddressing
    ):  # fmt: skip
        if cutlass.const_expr(isinstance(addressing, ConditionalAddressing)):
            wait_for_previous_launch()
            if addressing.has_work():
                self.write_block(mDqWorkspace, blocks, mdQ, scale, first_head, addressing)
        else:
            self.write_block(mDqWorkspace, blocks, mdQ, scale, first_head, addressing)

    @cute.jit
    def write_block(
        self, mDqWorkspace: cute.Tensor, blocks: Int32, mdQ: cute.Tensor, scale: Float32, first_head: Int32,
        addressing: TileAddressing
    ):  # fmt: skip
        """Write dQ of a block of rows of a head."""
        cta = cute.arch.block_idx()[0]
        block, linear = cta % blocks, cta // blocks + first_head
        batch, head = linear // mdQ.shape[1], linear % mdQ.shape[1]
        start = (Int64(linear) * blocks + block) * (WARPGROUPS * self.chunks * WARPGROUP * 4)
        tile = addressing.workspace_block(block, head, batch)
        # A task is a quad's eight columns of two rows. Neighboring threads take neighboring columns, so that rows are
        # written in whole sectors.
        for part in cutlass.range_constexpr(cute.ceil_div(self.chunks, 4)):
            task = part * (WARPGROUPS * WARPGROUP) + cute.arch.thread_idx()[0]
            chunk, quad, warp = task % self.chunks, task // self.chunks % 8, task // (self.chunks * 8)  # of 8 warps
            source = start + ((warp * self.chunks + chunk) * 8 + quad) * 16
            row = tile.block * TILE_M + warp % 4 * 16 + quad
            column = (warp // 4 * self.chunks + chunk) * VECTOR
            if cutlass.const_expr((part + 1) * 4 <= self.chunks):
                self.write(mDqWorkspace.iterator + source, tile.rows(mdQ), row, column, scale)
            elif warp < UNITS:  # the last tasks do not need all threads
                self.write(mDqWorkspace.iterator + source, tile.rows(mdQ), row, column, scale)

    @cute.jit
    def write(self, floats: cute.Pointer, gdQ: cute.Tensor, row: Int32, column: Int32, scale: Float32):
        """Write the rows of a task: `row` and `row` + 8."""
        fours = [vector_at(floats + 4 * i, Float32, 4).load() for i in range(4)]
        for r in cutlass.range_constexpr(2):
            pairs = cute.make_rmem_tensor((4,), Int32)
            for i in cutlass.range_constexpr(4):
                pairs[i] = self.element.pack_pair(fours[i][2 * r] * scale, fours[i][2 * r + 1] * scale)
            row_exists = row + 8 * r < gdQ.shape[0]
            if cutlass.const_expr(self.elementwise):
                values = cute.make_tensor(cute.recast_ptr(pairs.iterator, dtype=gdQ.element_type), cute.make_layout(8))
                for c in cutlass.range_constexpr(VECTOR):
                    if row_exists and column + c < gdQ.shape[1]:
                        gdQ[row + 8 * r, column + c] = values[c]
            elif row_exists and column < gdQ.shape[1]:
                cute.autovec_copy(pairs, vector_at(gdQ[row + 8 * r, None].iterator + column, Int32, 4))


@cute.jit
def load_rows(gRow: cute.Tensor, sRow: cute.Tensor, pipeline: sm90.Pipeline, count: Int32):
    """Load an fp32 value per query row. The bytes are included in the bytes of the stage (producer warp)."""
    with cute.arch.elect_one():
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        cute.copy(atom, gRow, sRow, mbar_ptr=pipeline.arrival(count))


@dataclass(frozen=True)
class RowStats:
    """Row statistics of the two query rows of a thread, required to compute P and dS from scores."""

    lse_log2: tuple[Float32, Float32]
    delta: tuple[Float32, Float32]
    scale_log2: Float32


@cute.jit
def rows_of_thread(mRowStats: cute.Tensor, tile: Tile, row: Int32, scale_log2: Float32) -> RowStats:
    """Load LSE and delta of the rows `row` and `row` + 8."""
    values = cute.make_rmem_tensor((2, 2), Float32)
    for r in cutlass.range_constexpr(2):
        values[r, 0], values[r, 1] = Float32.inf, Float32(0.0)
        if row + 8 * r < tile.sizes.Sq:
            for which in cutlass.range_constexpr(2):
                values[r, which] = mRowStats[tile.row_stats_coord(which, row + 8 * r)]
    return RowStats((values[0, 0], values[1, 0]), (values[0, 1], values[1, 1]), scale_log2)


def by_query(acc: cute.Tensor) -> cute.Tensor:
    """Return a (keys, queries) view of a (queries, keys) accumulator."""
    scores = fragments.rows_and_columns(acc)
    return cute.make_tensor(scores.iterator, cute.select(scores.layout, mode=[1, 0]))


@cute.jit
def exponentiate(scores: cute.Tensor, lse_log2: cute.Tensor | tuple[Float32, ...], scale_log2: Float32):
    """Compute P = exp2(S * scale_log2 - LSE * log2 e) in place.

    Args:
        scores: scores (keys, queries).
        lse_log2: LSE of each query, in base 2.
        scale_log2: softmax scale times log2(e).
    """
    for query in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        for key in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            score = scores[key, query] * scale_log2 - lse_log2[query]
            scores[key, query] = cute.math.exp2(score, fastmath=True)


@dataclass(frozen=True)
class ScoreDerivative:
    """Derivative of score modifications, as required by the gradients."""

    slope: Callable  # (P, LSE in base 2) -> factor for dS; from ScorePipeline.score_derivative()
    lse_log2: cute.Tensor | tuple[Float32, ...]  # LSE of each query

    @classmethod
    def create(cls, score_pipeline: ScorePipeline, lse_log2: Callable) -> ScoreDerivative | None:
        """Return the derivative, or None if no score stage has a derivative.

        Args:
            score_pipeline: the score stages.
            lse_log2: function that returns the LSE, called only if required.
        """
        slope = score_pipeline.score_derivative()
        return None if slope is None else cls(slope, lse_log2())


@cute.jit
def softmax_backward(
    P: cute.Tensor, dP: cute.Tensor, delta: cute.Tensor | tuple[Float32, ...], dS: cute.Tensor, p_scale_log2: int = 0,
    signed: cutlass.Constexpr[bool] = False, score_derivative: ScoreDerivative | None = None,
):  # fmt: skip
    """Compute dS = P * (dP - delta), for tensors (keys, queries).

    The softmax scale is applied later, with dQ and dK.

    Args:
        P: probabilities.
        dP: gradient of the probabilities.
        delta: delta of each query.
        dS: destination, which may be P or dP.
        p_scale_log2: P is larger by this power of two.
        signed: dropped elements of P are negative (ScorePipeline.signed_p_transform). Their dP is ignored.
        score_derivative: derivative of the score modifications, if any.
    """
    for query in cutlass.range_constexpr(cute.size(P, mode=[1])):
        for key in cutlass.range_constexpr(cute.size(P, mode=[0])):
            weight = P[key, query].to(Float32) * 2.0**-p_scale_log2
            if cutlass.const_expr(score_derivative is not None):
                weight = weight * score_derivative.slope(weight, score_derivative.lse_log2[query])
            if cutlass.const_expr(signed):
                kept_weight = cute.arch.fmax(weight, Float32(0.0))
                dS[key, query] = kept_weight * dP[key, query] - abs(weight) * delta[query]
            else:
                dS[key, query] = weight * (dP[key, query] - delta[query])


def row_values(sRow: cute.Tensor, stage: Int32) -> cute.Tensor:
    """Return LSE or delta of the queries of the thread's columns, in registers."""
    row, lane = sRow[None, stage], cute.arch.lane_idx()
    values = cute.make_rmem_tensor(cute.size(row) // 4, Float32)
    for c in range(cute.size(values)):
        values[c] = row[fragments.column_of(c) + lane % 4 * 2]
    return values
