"""What surrounds the backward main kernel (bwd_sm90, bwd_sm80): row facts before it, dQ in 16 bits after it.

Both work on blocks of TILE_M query rows of one head, as the main kernel steps over them.
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
from ..score_stages.pipeline import Chain, Kept
from ..tiling.seqlen_info import Sizes
from ..tiling.tile import Pieces, Tile
from .workspace import ADDED, CLEARED, UNITS, Ahead, Scratch, clear

TILE_M, TILE_N = BACKWARD_TILE  # query rows of one step of the main kernel, keys of one of its CTAs
WARPGROUPS = TILE_N // ROWS_PER_WARPGROUP
LANES = 8  # threads of one row
VECTOR = 8  # elements of one 16-byte access
# An LSE beyond it, either way, has lost its sum's digits, and exp2 of what a score is apart from it could be anything:
# keys that are all hidden by a large number (finfo.min) count as none.
LOST = float(2**24)


@dataclass(frozen=True)
class Clearing:
    """What is to be cleared before the main kernel: scratch's counters, and the scratch of the first heads."""

    scratch: cute.Tensor
    heads: Int32  # KV heads over the whole batch; the others are cleared by the main kernel
    group: Int32
    portions: Int32


@dataclass(frozen=True)
class GivenRows:
    """What the forward and autograd left of query rows."""

    o: cute.Tensor  # (B, Hq, Sq, Dv)
    do: cute.Tensor  # (B, Hq, Sq, Dv)
    lse: cute.Tensor  # (B, Hq, Sq) fp32, natural log
    dlse: cute.Tensor | None = None  # (B, Hq, Sq) fp32; of no rows: nobody differentiates the LSE


class PrepareBackward:
    """delta = rowsum(dO * O) - dLSE and LSE in base 2, padded to whole blocks; scratch's counters and first heads
    cleared.
    """

    def __init__(self, element: Element, clears: int = 0, elementwise: bool = False):
        """clears: columns of dQ in scratch; 0: there is none. elementwise: O and dO of any strides at any address."""
        self.element, self.unit_floats, self.elementwise = element, TILE_M * clears // UNITS, elementwise

    @cute.jit
    def __call__(
        self,
        given: GivenRows,
        mRows: cute.Tensor,  # (B, Hq, 2, blocks * TILE_M) fp32
        mScratch: cute.Tensor | None,  # of the main kernel (scratch.Scratch)
        ahead: Ahead | None,
        kept: Kept | None,  # of P (Chain)
        pieces: Pieces,
        stream: cuda.CUstream,
    ):
        B, Hq = given.lse.shape[0], given.lse.shape[1]
        clearing = None if ahead is None else Clearing(mScratch, ahead.heads, ahead.group, ahead.portions)
        self.kernel(given, mRows, clearing, kept, pieces).launch(
            # One dim of the grid has room for 2^31 - 1 CTAs; the other two end at 65535, which B or Hq may exceed.
            grid=(mRows.shape[3] // TILE_M * Hq * B, 1, 1), block=(WARPGROUP, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, given: GivenRows, mRows: cute.Tensor, clearing: Clearing | None, kept: Kept | None, pieces: Pieces
    ):
        heads, blocks = mRows.shape[1], mRows.shape[3] // TILE_M
        linear, number = cute.arch.block_idx()[0] // blocks, cute.arch.block_idx()[0] % blocks
        batch, head = linear // heads, linear % heads
        thread = cute.arch.thread_idx()[0]
        if cutlass.const_expr(clearing is not None):
            self.clear(clearing, linear, number, blocks)

        mO, mdO, Sq, Dv = given.o, given.do, given.o.shape[2], given.o.shape[3]
        tile = pieces.block_of_scratch(number, head, batch, Sizes(Sq, Sq))
        for part in cutlass.range_constexpr(TILE_M * LANES // WARPGROUP):
            row = tile.block * TILE_M + part * (WARPGROUP // LANES) + thread // LANES
            delta, lse = Float32(0.0), Float32(Float32.inf)
            if row < tile.sizes.Sq:
                place = tile.place(row)
                if cutlass.const_expr(self.elementwise):
                    for column in cutlass.range(thread % LANES, Dv, LANES, unroll=1):
                        delta += mO[(*place, column)].to(Float32) * mdO[(*place, column)].to(Float32)
                else:
                    delta = self.product(mO[(*place, None)], mdO[(*place, None)], thread % LANES)
                lse = given.lse[place] * fragments.LOG2_E
                lse = cutlass.select_(abs(lse) > LOST, Float32.inf, lse)  # no key: exp2(S - inf) = 0
            for lanes in (1, 2, 4):
                delta = delta + cute.arch.shuffle_sync_bfly(delta, offset=lanes)
            if cutlass.const_expr(given.dlse is not None):
                if row < cutlass.min(given.dlse.shape[2], tile.sizes.Sq):
                    delta = delta - given.dlse[tile.place(row)]
            if thread % LANES == 0:
                row = number * TILE_M + part * (WARPGROUP // LANES) + thread // LANES
                mRows[batch, head, 0, row] = lse
                mRows[batch, head, 1, row] = delta if cutlass.const_expr(kept is None) else delta * kept.share

    @cute.jit
    def product(self, gO: cute.Tensor, gdO: cute.Tensor, lane: Int32) -> Float32:
        """Of one row of O and dO, a lane's part, by vectors."""
        delta = Float32(0.0)
        for column in cutlass.range(lane * VECTOR, gO.shape[0], LANES * VECTOR, unroll=1):
            o = vector_at(gO.iterator + column, self.element.dtype, VECTOR).load().to(Float32)
            do = vector_at(gdO.iterator + column, self.element.dtype, VECTOR).load().to(Float32)
            delta += (o * do).reduce(cute.ReductionOp.ADD, 0.0, 0)
        return delta

    @cute.jit
    def clear(self, clearing: Clearing, linear: Int32, block: Int32, blocks: Int32):
        """Clear this CTA's part of the workspace. linear: the query head, counted over the whole batch."""
        thread = cute.arch.thread_idx()[0]
        heads = cute.arch.grid_dim()[0] // blocks
        scratch = Scratch(clearing.scratch.iterator, blocks, heads, self.unit_floats)
        first = (linear * blocks + block) * UNITS
        kv_head, early = linear // clearing.group, linear // clearing.group < clearing.heads
        if early:
            clear(scratch.unit(first), UNITS * self.unit_floats, thread, WARPGROUP)
        if thread < UNITS:
            cute.arch.store(scratch.turn(first + thread), Int32(0))
        if linear % clearing.group == 0 and block == 0 and thread == 0:
            cleared = clearing.portions * DQ_WRITERS if early else Int32(0)
            cute.arch.store(scratch.counter(kv_head, CLEARED), cleared)
            cute.arch.store(scratch.counter(kv_head, ADDED), Int32(0))


class FinishBackward:
    """dQ = scale * scratch, from register order into rows: of the last heads, or of all of them.

    In a unit of scratch (scratch.Scratch) the four lanes of a quad have all eight columns of two rows: 64 bytes on end.
    """

    def __init__(self, element: Element, d: int, elementwise: bool = False):
        """elementwise: dQ of any strides at any address."""
        self.element, self.chunks, self.elementwise = element, d // WARPGROUPS // VECTOR, elementwise

    @cute.jit
    def __call__(
        self,
        mScratch: cute.Tensor,
        mRows: cute.Tensor,  # as PrepareBackward's
        mdQ: cute.Tensor,
        scale: Float32,
        ahead: Ahead,
        pieces: Pieces,
        stream: cuda.CUstream,
    ):
        B, Hq, _, rows = mRows.shape
        heads, blocks = ahead.heads * ahead.group, rows // TILE_M
        self.kernel(mScratch, blocks, mdQ, scale, B * Hq - heads, pieces).launch(
            grid=(blocks * heads, 1, 1), block=(WARPGROUPS * WARPGROUP, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, mScratch: cute.Tensor, blocks: Int32, mdQ: cute.Tensor, scale: Float32, first_head: Int32, pieces: Pieces
    ):  # fmt: skip
        number = cute.arch.block_idx()[0]
        block, linear = number % blocks, number // blocks + first_head
        batch, head = linear // mdQ.shape[1], linear % mdQ.shape[1]
        start = (Int64(linear) * blocks + block) * (WARPGROUPS * self.chunks * WARPGROUP * 4)
        tile = pieces.block_of_scratch(block, head, batch)
        # A task is a quad's eight columns of two rows; neighbouring threads take neighbouring columns, so that rows are
        # written in whole sectors.
        for part in cutlass.range_constexpr(cute.ceil_div(self.chunks, 4)):
            task = part * (WARPGROUPS * WARPGROUP) + cute.arch.thread_idx()[0]
            chunk, quad, warp = task % self.chunks, task // self.chunks % 8, task // (self.chunks * 8)  # of 8 warps
            at = start + ((warp * self.chunks + chunk) * 8 + quad) * 16
            row = tile.block * TILE_M + warp % 4 * 16 + quad
            column = (warp // 4 * self.chunks + chunk) * VECTOR
            if cutlass.const_expr((part + 1) * 4 <= self.chunks):
                self.write(mScratch.iterator + at, tile.rows(mdQ), row, column, scale)
            elif warp < UNITS:  # the last tasks do not need all threads
                self.write(mScratch.iterator + at, tile.rows(mdQ), row, column, scale)

    @cute.jit
    def write(self, floats: cute.Pointer, gdQ: cute.Tensor, row: Int32, column: Int32, scale: Float32):
        """A task: that place and the one eight rows below."""
        fours = [vector_at(floats + 4 * i, Float32, 4).load() for i in range(4)]
        for r in cutlass.range_constexpr(2):
            pairs = cute.make_rmem_tensor((4,), Int32)
            for i in cutlass.range_constexpr(4):
                pairs[i] = self.element.pack_pair(fours[i][2 * r] * scale, fours[i][2 * r + 1] * scale)
            there = row + 8 * r < gdQ.shape[0]
            if cutlass.const_expr(self.elementwise):
                values = cute.make_tensor(cute.recast_ptr(pairs.iterator, dtype=gdQ.element_type), cute.make_layout(8))
                for c in cutlass.range_constexpr(VECTOR):
                    if there and column + c < gdQ.shape[1]:
                        gdQ[row + 8 * r, column + c] = values[c]
            elif there and column < gdQ.shape[1]:
                cute.autovec_copy(pairs, vector_at(gdQ[row + 8 * r, None].iterator + column, Int32, 4))


@cute.jit
def load_rows(gRow: cute.Tensor, sRow: cute.Tensor, ring: sm90.Ring, count: Int32):
    """Producer warp: one fp32 per query row, counted in the slot's bytes."""
    with cute.arch.elect_one():
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        cute.copy(atom, gRow, sRow, mbar_ptr=ring.arrival(count))


@dataclass(frozen=True)
class Rows:
    """Two query rows of a thread: what makes P and dS of their scores."""

    lse_log2: tuple[Float32, Float32]
    delta: tuple[Float32, Float32]
    scale_log2: Float32


@cute.jit
def rows_of_thread(mRows: cute.Tensor, tile: Tile, row: Int32, scale_log2: Float32) -> Rows:
    """LSE and delta of them; row: the first, the second one is the eighth after it."""
    values = cute.make_rmem_tensor((2, 2), Float32)
    for r in cutlass.range_constexpr(2):
        values[r, 0], values[r, 1] = Float32.inf, Float32(0.0)
        if row + 8 * r < tile.sizes.Sq:
            for which in cutlass.range_constexpr(2):
                values[r, which] = mRows[tile.place_of_fact(which, row + 8 * r)]
    return Rows((values[0, 0], values[1, 0]), (values[0, 1], values[1, 1]), scale_log2)


def by_query(acc: cute.Tensor) -> cute.Tensor:
    """(keys, queries) view of a (queries, keys) accumulator."""
    scores = fragments.rows_and_columns(acc)
    return cute.make_tensor(scores.iterator, cute.select(scores.layout, mode=[1, 0]))


@cute.jit
def exponentiate(scores: cute.Tensor, lse_log2: cute.Tensor | tuple[Float32, ...], scale_log2: Float32):
    """P = exp2(S * scale_log2 - LSE * log2 e), in place; scores: (keys, queries), one LSE for each query."""
    for query in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        for key in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            score = scores[key, query] * scale_log2 - lse_log2[query]
            scores[key, query] = cute.math.exp2(score, fastmath=True)


@dataclass(frozen=True)
class Bent:
    """What undoes it in gradients."""

    slope: Callable  # Chain.slope
    lse_log2: cute.Tensor | tuple[Float32, ...]  # of each query

    @classmethod
    def of(cls, chain: Chain, lse_log2: Callable) -> Bent | None:
        """lse_log2: gives it, where it is asked for."""
        slope = chain.slope()
        return None if slope is None else cls(slope, lse_log2())


@cute.jit
def differentiate(
    P: cute.Tensor, dP: cute.Tensor, delta: cute.Tensor | tuple[Float32, ...], dS: cute.Tensor, raised: int = 0,
    signed: cutlass.Constexpr[bool] = False, bent: Bent | None = None,
):  # fmt: skip
    """dS = P * (dP - delta), (keys, queries), one delta for each query; dS may be P or dP. The scale comes with dQ and
    dK. raised: P is larger by that power of two. signed: P that was not kept is negative (Chain.signed), its dP is 0.
    bent: of scores that a stage has bent.
    """
    for query in cutlass.range_constexpr(cute.size(P, mode=[1])):
        for key in cutlass.range_constexpr(cute.size(P, mode=[0])):
            weight = P[key, query].to(Float32) * 2.0**-raised
            if cutlass.const_expr(bent is not None):
                weight = weight * bent.slope(weight, bent.lse_log2[query])
            if cutlass.const_expr(signed):
                kept = cute.arch.fmax(weight, Float32(0.0))
                dS[key, query] = kept * dP[key, query] - abs(weight) * delta[query]
            else:
                dS[key, query] = weight * (dP[key, query] - delta[query])


def row_values(sRow: cute.Tensor, slot: Int32) -> cute.Tensor:
    """LSE or delta of the queries of this thread's columns, in registers."""
    row, lane = sRow[None, slot], cute.arch.lane_idx()
    mine = cute.make_rmem_tensor(cute.size(row) // 4, Float32)
    for c in range(cute.size(mine)):
        mine[c] = row[fragments.column_of(c) + lane % 4 * 2]
    return mine
