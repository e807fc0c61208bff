"""Partial results of split keys, and the two ways in which they are added up: by the CTAs of a cluster in each
other's shared memory, by a kernel of its own in global memory.

A split s of a row has a normalised output O_s over its own keys, their largest score m_s, not yet scaled, and the sum
l_s of exp(scale (S - m_s)). With m = max m_s and w_s = l_s exp(scale (m_s - m)): O = sum w_s O_s / sum w_s, LSE = scale
m + ln(sum w_s) (FlashDecoding, Dao et al. 2023, where LSE_s stands for the two: its fp32 has lost ln(l_s) where scores
are large, finfo.min of a mask say). A split without keys has l_s = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64
from cutlass.base_dsl import Arch

from ...registry.kernel_spec import WARP
from ..primitives.dtype import Element
from ..primitives.fragments import LOG2_E, target_from
from ..primitives.vector_access import QUAD, vector_at
from ..score_stages.pipeline import Chain

COLUMN_LANES = 8  # of a warp, at 128 bytes of a partial row; the others are at other splits
WARPS = 8
PEER_PAD = 8  # floats between rows: eight rows of an accumulator lie in different banks
AT_ONCE = 4  # splits that a thread has under way
FEW = 8  # splits up to which every lane is at other columns
MANY = 33  # splits from which on a CTA's warps share a row


@dataclass(frozen=True)
class Partials:
    """fp32 in global memory: (rows, splits, Dv) outputs, then (rows, splits, 2) maxima and sums. A row is (batch * Hq +
    head) * Sq + query.
    """

    start: cute.Pointer
    rows: Int32
    splits: Int32
    Dv: Int32

    def output(self, row: Int32, split: Int32) -> cute.Pointer:
        return self.start + (Int64(row) * self.splits + split) * self.Dv

    def weight(self, row: Int32, split: Int32) -> cute.Pointer:
        """A maximum and a sum."""
        return self.start + Int64(self.rows) * self.splits * self.Dv + (Int64(row) * self.splits + split) * 2

    def weight_of(self, row: Int32, split: Int32) -> tuple[Float32, Float32]:
        return loaded(self.weight(row, split))

    def load_quad(self, row: Int32, split: Int32, column: Int32, quad: cute.Tensor):
        cute.autovec_copy(vector_at(self.output(row, split) + column, Float32, QUAD), quad)


@dataclass(frozen=True)
class Peers:
    """fp32 in the shared memory of every CTA of a cluster: outputs of rows, `pitch` floats apart, maxima and sums."""

    start: cute.Pointer
    rows: int
    pitch: int
    splits: Int32  # CTAs of the cluster

    @classmethod
    def create(cls, buffer: cute.Tensor, rows: int, columns: int, count: Int32) -> Peers:
        """buffer: nobody's any longer, and large enough for rows * (columns + PEER_PAD + 2) floats."""
        assert cute.cosize(buffer) * buffer.element_type.width >= rows * (columns + PEER_PAD + 2) * Float32.width
        start = cute.make_ptr(Float32, buffer.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
        return cls(start, rows, columns + PEER_PAD, count)

    def output(self, row: Int32) -> cute.Pointer:
        """This CTA's."""
        return self.start + row * self.pitch

    def weight(self, row: Int32) -> cute.Pointer:
        """This CTA's: a maximum and a sum."""
        return self.start + self.rows * self.pitch + row * 2

    def weight_of(self, row: Int32, peer: Int32) -> tuple[Float32, Float32]:
        return loaded(self.at_peer(self.weight(row), peer), ss="cluster")

    def load_quad(self, row: Int32, peer: Int32, column: Int32, quad: cute.Tensor):
        quad.fill(0.0)  # so that it can be read, for the type of four floats, which has no public name; not in SASS
        value = cute.arch.load(self.at_peer(self.output(row) + column, peer), quad.load().type, ss="cluster")
        quad.store(cute.TensorSSA(value, (QUAD,), Float32))

    def at_peer(self, mine: cute.Pointer, peer: Int32) -> cute.Pointer:
        """The same place in that CTA: an address for loads of the cluster's shared memory."""
        there = cute.arch.map_dsmem_ptr(mine, peer)
        return cute.make_ptr(Float32, there.toint(), cute.AddressSpace.smem, assumed_align=4)


class Combine:
    """O in 16 bits and LSE from Partials; where it can, starts while the one before is still running, and waits."""

    def __init__(self, element: Element):
        self.element = element

    @cute.jit
    def __call__(
        self, mO: cute.Tensor, mLSE: cute.Tensor, partials: Partials, scale: Float32, chain: Chain,
        stream: cuda.CUstream, split_size: Int32 | None = None,
    ):  # fmt: skip
        """mO (B, Hq, Sq, Dv), mLSE (B, Hq, Sq) fp32; scale: of the maxima; chain: the scores'; split_size: as of
        added_like().
        """
        rows, like = partials.rows, added_like(partials.splits, split_size)
        rows_of_cta = cutlass.select_(like >= MANY, Int32(1), Int32(WARPS))
        columns = cutlass.select_(like <= FEW, Int32(WARP * QUAD), Int32(COLUMN_LANES * QUAD))
        self.kernel(mO, mLSE, partials.start, partials.splits, scale, chain.sinks, split_size).launch(
            grid=(cute.ceil_div(rows, rows_of_cta), cute.ceil_div(partials.Dv, columns), 1),
            block=(WARPS * WARP, 1, 1),
            stream=stream,
            use_pdl=starts_early(),
        )

    @cute.kernel
    def kernel(
        self, mO: cute.Tensor, mLSE: cute.Tensor, start: cute.Pointer, splits: Int32, scale: Float32,
        sinks: cute.Tensor | None, split_size: Int32 | None,
    ):  # fmt: skip
        B, Hq, Sq, Dv = mO.shape
        partials = Partials(start, B * Hq * Sq, splits, Dv)
        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_ordered_layout((2 + QUAD, COLUMN_LANES, WARPS), (2, 1, 0))
        shared = smem.allocate_tensor(Float32, layout, 16)
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, chunk, _ = cute.arch.block_idx()
        like = added_like(splits, split_size)
        few, many = like <= FEW, like >= MANY
        row = cutlass.select_(many, block, block * WARPS + warp)
        lanes = cutlass.select_(few, Int32(WARP), Int32(COLUMN_LANES))
        column = (chunk * lanes + lane % lanes) * QUAD
        begin = lane // lanes + cutlass.select_(many, warp * (WARP // COLUMN_LANES), Int32(0))
        step = cutlass.select_(many, Int32(WARPS), Int32(1)) * (WARP // lanes)

        follow()
        part = Share.create(scale)
        if row < partials.rows:
            for first in cutlass.range(begin, splits, step * AT_ONCE, unroll=1):
                part.add(partials, row, first, step, cutlass.min(column, Dv - QUAD))
        if like > FEW:
            part.join_lanes()
        if many:
            part.join_warps(shared, warp)
        writes = (lane < lanes) & (row < partials.rows) & ((warp == 0) | (like < MANY))
        if writes:
            index, query = row // Sq, row % Sq
            batch, head = index // Hq, index % Hq
            lse = part.close(sinks, head)
            if column < Dv:
                part.write(mO[batch, head, query, None].iterator + column, self.element)
            if column == 0:
                mLSE[batch, head, query] = lse


def added_like(splits: Int32, split_size: Int32 | None) -> Int32:
    """How many splits are added up in the order that these are. Those of a size (more than 0) have one order, in which
    as many empty ones as there may be behind the others change no bit.
    """
    return splits if split_size is None else cutlass.select_(split_size > 0, Int32(FEW + 1), splits)


def starts_early() -> bool:
    """Whether the target can launch a kernel ahead of the end of the one before."""
    return target_from(Arch.sm_90)


def follow() -> None:
    """What the kernel before has written is there; the one after may start, and waits in turn."""
    if starts_early():
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # not before: their CTAs would sit beside those we wait for


def loaded(place: cute.Pointer, **how: str) -> tuple[Float32, Float32]:
    """Two floats on end."""
    return tuple(cute.arch.load(place + i, Float32, **how) for i in range(2))


@dataclass(frozen=True)
class Share:
    """One thread's part of a row: some splits, four columns."""

    top: cute.Tensor  # (1,) the largest score, not yet scaled
    total: cute.Tensor  # (1,) sum of the weights, relative to exp(scale * top)
    out: cute.Tensor  # (4,) weighted sum of outputs
    scale: Float32

    @classmethod
    def create(cls, scale: Float32) -> Share:
        top, total, out = (cute.make_rmem_tensor((n,), Float32) for n in (1, 1, QUAD))
        top.fill(-Float32.inf)
        total.fill(0.0)
        out.fill(0.0)
        return cls(top, total, out, scale)

    @cute.jit
    def add(self, partials: Partials | Peers, row: Int32, first: Int32, step: Int32, column: Int32):
        """The splits first, first + step, ...: AT_ONCE of them; those beyond the last count for nothing."""
        top, total = (cute.make_rmem_tensor((AT_ONCE,), Float32) for _ in range(2))
        out = cute.make_rmem_tensor((QUAD, AT_ONCE), Float32)
        for i in cutlass.range_constexpr(AT_ONCE):
            split = first + i * step
            there = cutlass.min(split, partials.splits - 1)
            highest, weight = partials.weight_of(row, there)
            top[i] = cutlass.select_(split < partials.splits, highest, -Float32.inf)
            total[i] = cutlass.select_(split < partials.splits, weight, Float32(0.0))
            partials.load_quad(row, there, column, out[None, i])
            for c in cutlass.range_constexpr(QUAD):  # it may be inf, and 0 * inf is NaN
                out[c, i] = cutlass.select_(split < partials.splits, out[c, i], Float32(0.0))
        for i in cutlass.range_constexpr(AT_ONCE):
            for c in cutlass.range_constexpr(QUAD):
                out[c, i] = out[c, i] * total[i]
            self.merge(top[i], total[i], out[None, i])

    @cute.jit
    def merge(self, top: Float32, total: Float32, out: cute.Tensor):
        """Another share of the same columns."""
        highest, scale_log2 = cute.arch.fmax(self.top[0], top), self.scale * LOG2_E
        base = 0.0 if highest == -Float32.inf else highest
        mine = cute.math.exp2((self.top[0] - base) * scale_log2, fastmath=True)
        theirs = cute.math.exp2((top - base) * scale_log2, fastmath=True)
        self.top[0] = highest
        self.total[0] = self.total[0] * mine + total * theirs
        for i in cutlass.range_constexpr(QUAD):
            self.out[i] = self.out[i] * mine + out[i] * theirs

    def lse(self) -> Float32:
        return self.top[0] * self.scale + cute.math.log(self.total[0], fastmath=True)

    def close_of(self, chain: Chain, head: Int32) -> Float32:
        return self.close(chain.sinks, head)

    @cute.jit
    def close(self, sinks: cute.Tensor | None, head: Int32) -> Float32:
        """Nothing more comes: the LSE. sinks: a logit of each head that is in the sum, too, and has no output."""
        lse = self.lse()
        if cutlass.const_expr(sinks is not None):
            if head < sinks.shape[0]:
                lse = self.with_logit(sinks[head])
        return lse

    @cute.jit
    def with_logit(self, logit: Float32) -> Float32:
        """In natural units."""
        top = cutlass.select_(self.total[0] == 0.0, -Float32.inf, self.top[0] * self.scale)
        highest = cute.arch.fmax(top, logit)
        base = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest)
        keys = cute.math.exp2((top - base) * LOG2_E, fastmath=True)
        self.total[0] = self.total[0] * keys + cute.math.exp2((logit - base) * LOG2_E, fastmath=True)
        for i in cutlass.range_constexpr(QUAD):
            self.out[i] = self.out[i] * keys
        return base + cute.math.log(self.total[0], fastmath=True)

    @cute.jit
    def write(self, target: cute.Pointer, element: cutlass.Constexpr[Element]):
        """The columns of the sum, in 16 bits."""
        inverse = 0.0 if self.total[0] == 0.0 else cute.arch.rcp_approx(self.total[0])
        place = cute.make_ptr(Int32, target.toint(), cute.AddressSpace.gmem, assumed_align=8)
        pairs = cute.make_tensor(place, cute.make_layout(2))
        for i in cutlass.range_constexpr(2):
            pairs[i] = element.pack_pair(self.out[2 * i] * inverse, self.out[2 * i + 1] * inverse)

    @cute.jit
    def leave(self, partials: Partials, row: Int32, split: Int32, column: Int32):
        """The columns of the sum, and once for a row its weight, as a partial result."""
        inverse = 0.0 if self.total[0] == 0.0 else cute.arch.rcp_approx(self.total[0])
        for i in cutlass.range_constexpr(QUAD):
            self.out[i] = self.out[i] * inverse
        cute.autovec_copy(self.out, vector_at(partials.output(row, split) + column, Float32, QUAD))
        if column == 0:
            cute.arch.store(partials.weight(row, split), self.top[0])
            cute.arch.store(partials.weight(row, split) + 1, self.total[0])

    @cute.jit
    def join_lanes(self):
        """Lanes at the same columns: afterwards all of them have the sum."""
        for bits in (COLUMN_LANES, 2 * COLUMN_LANES):
            other = cute.make_rmem_tensor((QUAD,), Float32)
            top = cute.arch.shuffle_sync_bfly(self.top[0], offset=bits)
            total = cute.arch.shuffle_sync_bfly(self.total[0], offset=bits)
            for i in cutlass.range_constexpr(QUAD):
                other[i] = cute.arch.shuffle_sync_bfly(self.out[i], offset=bits)
            self.merge(top, total, other)

    @cute.jit
    def join_warps(self, shared: cute.Tensor, warp: Int32):
        """All warps of the CTA, in their order; the first one has the sum. shared: (6, lane, warp)."""
        lane = cute.arch.lane_idx()
        if lane < COLUMN_LANES:
            shared[0, lane, warp], shared[1, lane, warp] = self.top[0], self.total[0]
            for i in cutlass.range_constexpr(QUAD):
                shared[2 + i, lane, warp] = self.out[i]
        cute.arch.sync_threads()
        if warp == 0 and lane < COLUMN_LANES:
            for w in cutlass.range_constexpr(1, WARPS):
                other = cute.make_rmem_tensor((QUAD,), Float32)
                for i in cutlass.range_constexpr(QUAD):
                    other[i] = shared[2 + i, lane, w]
                self.merge(shared[0, lane, w], shared[1, lane, w], other)
