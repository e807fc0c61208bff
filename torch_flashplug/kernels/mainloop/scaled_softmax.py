"""Online softmax over scores that are whole numbers, or small ones, times scales: one for each row of Q, and for each
block of keys (quant_recipes.py).

Domains, stated once:  S scores as products give them;  factor = scale of the row * scale of the block * log2(e) times
the softmax scale;  row_max = running maximum of S * factor, in powers of two, or little less;  row_sum = sum of
exp2(S * factor - row_max), this thread's share until `finish`, raised by 2^raised as P is;  LSE = (row_max +
log2(row_sum)) / log2(e), to which comes what the constant key has taken from the row's scores.

The maximum is that of some block, and others may exceed it by SLACK: O is multiplied again only where one exceeds it
by more. The exponent is one fused multiply-add, whose product is exact, and a maximum is rounded up: no probability
exceeds 2^SLACK. Whole numbers come with an offset, which the addend has times the factor, too; where that rounds it by
more than 2^-9 (FINE) they lose it first.

Beyond COARSE that rounding would be powers of two. There scores count relative to the largest one of their block, by a
factor that is steep, and so small that the shift is exact: what is not the largest is powers of two below it anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...registry.quant_recipes import SLACK
from ..primitives.fragments import LOG2_E, column_of
from ..primitives.sm90 import OFFSET
from ..primitives.vector_access import vector_at
from ..score_stages.pipeline import Chain
from ..tiling.tile import Launch, Tile
from .softmax import ROWS, row_reduce

COARSE = float(2**24)
FINE = float(2**15)  # so large a shift by the offset of scores rounds exponents by 2^-9
PAIR = 2  # of neighbouring columns, which a thread has


@dataclass(frozen=True)
class Scaling:
    """What scores and values are multiplied by, as kernels get it."""

    q: cute.Tensor  # (B, Hq, Sq)
    k: cute.Tensor  # (B, Hkv, blocks)
    v: cute.Tensor | None  # (B, Hkv, dv)
    row_shift: cute.Tensor  # (B, Hq, Sq)
    v_mean: cute.Tensor | None  # (B, Hkv, dv): what values had, too
    largest: float | None  # number of O's format, which rounding may go beyond; None: no format of that kind
    raised: int  # powers of two by which P is larger on its way to the next product
    steep: float  # powers of two between neighbouring scores, times which the largest score is below 2^26
    offset = 0.0  # by which scores are more than they are, where nothing is hidden

    def softmax(self, scale_log2: Float32, chain: Chain) -> ScaledSoftmax:
        row_max, row_sum, correction, row_scale = (cute.make_rmem_tensor((ROWS,), Float32) for _ in range(4))
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        block_scale = cute.make_rmem_tensor((1,), Float32)
        return ScaledSoftmax(row_max, row_sum, correction, row_scale, block_scale, scale_log2, self)


@dataclass(frozen=True)
class ScalingOfWhole(Scaling):
    """Of scores that are whole numbers."""

    offset = OFFSET


@dataclass(frozen=True)
class ScaledSoftmax:
    """Running maximum and sum of two rows, kept in registers; asked as softmax.OnlineSoftmax is."""

    row_max: cute.Tensor  # (2,) fp32
    row_sum: cute.Tensor  # (2,) fp32
    correction: cute.Tensor  # (2,) fp32: what the rows of O must be multiplied by
    row_scale: cute.Tensor  # (2,) fp32
    block_scale: cute.Tensor  # (1,) fp32
    scale_log2: Float32
    scaling: Scaling
    tile: Tile | None = None
    row: Int32 | None = None
    k_scales: cute.Tensor | None = None  # (blocks,)

    @cute.jit
    def at(self, tile: Tile, row: Int32, pieces: Launch) -> ScaledSoftmax:
        """Of a tile's rows `row` and `row` + 8; pieces: where it is from."""
        for r in cutlass.range_constexpr(ROWS):
            batch, head, place = tile.place(cutlass.min(row + 8 * r, tile.sizes.Sq - 1))
            self.row_scale[r] = self.scaling.q[batch, head, place] * self.scale_log2
        tile = replace(tile, group=pieces.group)
        k_scales = self.scaling.k[tile.batch, tile.head_of_keys(), None]
        return replace(self, tile=tile, row=row, k_scales=k_scales)

    @cute.jit
    def fetch(self, block: Int32):
        """The scale of a block of keys is on its way."""
        self.block_scale[0] = self.k_scales[block]

    @cute.jit
    def step(
        self, S: cute.Tensor, first: cutlass.Constexpr[bool], masked: cutlass.Constexpr[bool], given: cute.Tensor
    ):  # fmt: skip
        """S (2, cols): scores in, probabilities out. Updates the running state and `correction`. given: the scores as
        the product left them; nothing is hidden there.
        """
        offset = self.offset(masked)
        factors, shifts, tops = (cute.make_rmem_tensor((ROWS,), Float32) for _ in range(3))
        for r in cutlass.range_constexpr(ROWS):
            factor, old_max = self.row_scale[r] * self.block_scale[0], self.row_max[r]
            top = largest(S if cutlass.const_expr(masked) else given, r) - offset
            if cutlass.const_expr(masked):  # a row that sees nothing of a block stays as it is, whatever its scale
                hidden = top == -Float32.inf
                factor = cutlass.select_(hidden, Float32(1.0), factor)
            new_max = rounded_up(top, factor)
            if cutlass.const_expr(not first):  # what has not grown by much stays, and O with it
                new_max = cutlass.select_(new_max > old_max + SLACK, new_max, old_max)
            self.row_max[r] = new_max
            base = new_max
            if cutlass.const_expr(masked):
                base = 0.0 if new_max == -Float32.inf else new_max
                top = cutlass.select_(hidden, Float32(0.0), top)
            factors[r], shifts[r], tops[r] = factor, base - self.scaling.raised, top
            self.correction[r] = 1.0
            if cutlass.const_expr(not first):
                self.correction[r] = cute.math.exp2(old_max - base, fastmath=True)
        self.make_exact(S, factors, shifts, tops, offset)
        for r in cutlass.range_constexpr(ROWS):
            for c in range(cute.size(S, mode=[1])):
                S[r, c] = cute.math.exp2(S[r, c] * factors[r] - shifts[r], fastmath=True)
            earlier = 0.0 if cutlass.const_expr(first) else self.row_sum[r] * self.correction[r]
            self.row_sum[r] = earlier + row_reduce(S, r, lambda a, b: a + b)

    @cute.jit
    def make_exact(
        self, S: cute.Tensor, factors: cute.Tensor, shifts: cute.Tensor, tops: cute.Tensor,
        offset: cutlass.Constexpr[float],
    ):  # fmt: skip
        """Shifts know of the offset, or where that would round them scores lose it; and of huge ones none is rounded.
        """
        huge = cute.arch.fmax(size_of(shifts[0]), size_of(shifts[1])) > COARSE
        if cutlass.const_expr(offset == 0.0):
            if huge:
                self.coarsen(factors, shifts, tops)
        elif huge | (cute.arch.fmax(factors[0], factors[1]) > FINE / offset):
            self.coarsen(factors, shifts, tops)
            for r in cutlass.range_constexpr(ROWS):
                for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                    S[r, c] = S[r, c] - offset
        else:
            for r in cutlass.range_constexpr(ROWS):
                shifts[r] = shifts[r] + offset * factors[r]

    def offset(self, masked: bool) -> float:
        """By which scores are more than they are."""
        return 0.0 if masked else self.scaling.offset

    def coarsen(self, factors: cute.Tensor, shifts: cute.Tensor, tops: cute.Tensor) -> None:
        """Of rows whose maximum is huge: scores relative to the block's own largest, which `tops` has."""
        for r in range(ROWS):
            behind = self.row_max[r] - rounded_up(tops[r], factors[r])
            huge = size_of(shifts[r]) > COARSE
            shift = tops[r] * self.scaling.steep + behind - self.scaling.raised
            shifts[r] = cutlass.select_(huge, shift, shifts[r])
            factors[r] = cutlass.select_(huge, Float32(self.scaling.steep), factors[r])

    @cute.jit
    def rescale(self, acc_O: cute.Tensor):
        """acc_O (2, cols): bring the output of earlier blocks to the new maximum, if there is one in the warp."""
        if cute.arch.vote_any_sync((self.correction[0] != 1.0) | (self.correction[1] != 1.0)):
            for r in cutlass.range_constexpr(ROWS):
                for c in cutlass.range_constexpr(cute.size(acc_O, mode=[1])):
                    acc_O[r, c] = acc_O[r, c] * self.correction[r]

    @cute.jit
    def finish(self, acc_O: cute.Tensor, scale: Float32, chain: Chain) -> cute.Tensor:
        """Normalise acc_O (2, cols); returns LSE (2,), natural log. chain: whose scores these were."""
        assert chain.kept_share is None and chain.extra_logit() is None, "in 8 bits nothing is dropped or added"
        lse, inverse = (cute.make_rmem_tensor((ROWS,), Float32) for _ in range(2))
        for r in cutlass.range_constexpr(ROWS):
            total = self.row_sum[r]
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
            total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
            inverse[r] = 0.0 if total == 0.0 else cute.arch.rcp_approx(total)
            batch, head, place = self.tile.place(cutlass.min(self.row + 8 * r, self.tile.sizes.Sq - 1))
            powers = self.row_max[r] - self.scaling.raised + cute.math.log2(total, fastmath=True)
            shifted = powers * (1.0 / LOG2_E) + self.scaling.row_shift[batch, head, place] * scale
            lse[r] = cutlass.select_(total == 0.0, -Float32.inf, shifted)
        if cutlass.const_expr(self.scaling.v is None):
            for r in cutlass.range_constexpr(ROWS):
                for c in cutlass.range_constexpr(cute.size(acc_O, mode=[1])):
                    acc_O[r, c] = acc_O[r, c] * inverse[r]
        else:
            self.finish_channels(acc_O, inverse)
        return lse

    @cute.jit
    def finish_channels(self, acc_O: cute.Tensor, inverse: cute.Tensor):
        """Of values that have scales and means."""
        scale, mean = (cute.make_rmem_tensor((PAIR,), Float32) for _ in range(2))
        first = self.tile.batch, self.tile.head_of_keys(), cute.arch.lane_idx() % 4 * PAIR
        for c in cutlass.range_constexpr(0, cute.size(acc_O, mode=[1]), PAIR):
            for of, into in ((self.scaling.v, scale), (self.scaling.v_mean, mean)):
                place = of.iterator + cute.crd2idx(first, of.layout) + column_of(c)
                cute.autovec_copy(vector_at(place, Float32, PAIR), into)
            for r in cutlass.range_constexpr(ROWS):
                for i in cutlass.range_constexpr(PAIR):
                    seen = cutlass.select_(inverse[r] == 0.0, Float32(0.0), mean[i])
                    out = acc_O[r, c + i] * (inverse[r] * scale[i]) + seen
                    if cutlass.const_expr(self.scaling.largest is not None):
                        out = bounded(out, self.scaling.largest)
                    acc_O[r, c + i] = out


def largest(S: cute.Tensor, row: int) -> Float32:
    """Of a row, which four threads share; whole numbers are fp32's bits of such that are positive."""
    if S.element_type is Float32:
        top = row_reduce(S, row, cute.arch.fmax)
    else:
        top = row_reduce(S, row, cutlass.max).bitcast(Float32)
    for lanes in (1, 2):
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=lanes))
    return top


def size_of(x: Float32) -> Float32:
    return cute.arch.fmax(x, -x)


def bounded(x: Float32, largest: Float32) -> Float32:
    """NaN stays."""
    text = "{ .reg .f32 low; min.NaN.f32 low, {$r0}, {$r1}; max.NaN.f32 {$w0}, low, {$r2}; }"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[x, largest, -largest])


def rounded_up(a: Float32, b: Float32) -> Float32:
    """a b, or the next number above: no other product with b of one that is not above a exceeds it."""
    return cute.arch.inline_ptx("mul.rp.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])
