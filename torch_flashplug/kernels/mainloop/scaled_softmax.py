"""Online softmax over quantized scores: integers or small numbers times scales.

There is a scale per row of Q and a scale per block of keys (quant_recipes.py).

Definitions:
- S: scores as returned by the product.
- factor: scale of the row * scale of the block * softmax scale * log2(e).
- row_max: running maximum of S * factor, in powers of two, or slightly less.
- row_sum: sum of exp2(S * factor - row_max) * 2^p_scale_log2, in the units of P. Each thread holds a partial sum until
  `finish`.
- LSE: (row_max + log2(row_sum)) / log2(e), plus the amount removed from the row's scores by the constant key.

row_max is the maximum of some block, and later scores may exceed row_max by SLACK_LOG2. O is rescaled only if a score
exceeds row_max by more. The exponent is a single fused multiply-add with an exact product, and the maximum is rounded
up. Therefore no probability exceeds 2^SLACK_LOG2. Integer scores contain an offset, and the addend contains offset
times factor. If the product with the factor would round the addend by more than 2^-9 (MAX_OFFSET_SHIFT), the offset is
subtracted from the scores first.

Beyond MAX_EXACT_SHIFT the rounding of the addend would reach powers of two. In this case scores count relative to the
largest score of their block. The factor is then steep, and so small that the shift is exact. Every score below the
largest score is powers of two below in any case.
"""

from __future__ import annotations

import operator
import struct
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...registry.quant_recipes import SLACK_LOG2
from ..primitives.fragments import LOG2_E, column_of, quad_reduce
from ..primitives.sm90 import OFFSET, SoftmaxTurns
from ..primitives.vector_access import vector_at
from ..sm90.trial import FLAGS
from ..score_stages.pipeline import ScorePipeline
from ..tiling.tile import Tile, TileGrid
from .softmax import ROWS, row_reduce

MAX_EXACT_SHIFT = float(2**24)  # largest addend of an exponent that fp32 rounds by less than a power of two
MAX_OFFSET_SHIFT = float(2**15)  # largest product of offset and factor that fp32 rounds by less than 2^-9
POLYNOMIAL = (1.000443146, 0.703448059, 0.238428938)  # 2^x between -0.5 and 0.5, to 2^-9.2 of the power
PAIR = 2  # adjacent columns of a thread


@dataclass(frozen=True)
class Scaling:
    """Scales of scores and values, as a kernel receives them."""

    q: cute.Tensor  # (B, Hq, Sq)
    k: cute.Tensor  # (B, Hkv, blocks)
    v: cute.Tensor | None  # (B, Hkv, dv)
    row_shift: cute.Tensor  # (B, Hq, Sq)
    v_mean: cute.Tensor | None  # (B, Hkv, dv): mean removed from the values
    # Largest number of O's format, which rounding could exceed; None if the format needs no bound.
    output_max: float | None
    p_scale_log2: int  # powers of two by which P is larger as an operand of the PV product
    steep: float  # powers of two between adjacent scores; the largest score times `steep` is below 2^26
    offset = 0.0  # offset contained in scores, in blocks without masked scores

    def softmax(self, scale_log2: Float32, score_pipeline: ScorePipeline) -> ScaledSoftmax:
        row_max, row_sum, correction, row_scale = (cute.make_rmem_tensor((ROWS,), Float32) for _ in range(4))
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        block_scale = cute.make_rmem_tensor((1,), Float32)
        return ScaledSoftmax(row_max, row_sum, correction, row_scale, block_scale, scale_log2, self)


@dataclass(frozen=True)
class IntegerScaling(Scaling):
    """Scales of integer scores."""

    offset = OFFSET


@dataclass(frozen=True)
class ScaledSoftmax:
    """Running maximum and sum of two rows, held in registers, with the interface of softmax.OnlineSoftmax."""

    row_max: cute.Tensor  # (2,) fp32
    row_sum: cute.Tensor  # (2,) fp32
    correction: cute.Tensor  # (2,) fp32: factor for the rows of O
    row_scale: cute.Tensor  # (2,) fp32
    block_scale: cute.Tensor  # (1,) fp32
    scale_log2: Float32
    scaling: Scaling
    tile: Tile | None = None
    row: Int32 | None = None
    k_scales: cute.Tensor | None = None  # (blocks,)

    @cute.jit
    def set_tile(self, tile: Tile, row: Int32, tile_grid: TileGrid) -> ScaledSoftmax:
        """Return the softmax state for the rows `row` and `row` + 8 of a tile.

        Args:
            tile: the tile.
            row: first row of the thread.
            tile_grid: tile grid of the tile.
        """
        for r in cutlass.range_constexpr(ROWS):
            batch, head, tensor_row = tile.lse_coord(cutlass.min(row + 8 * r, tile.sizes.Sq - 1))
            self.row_scale[r] = self.scaling.q[batch, head, tensor_row] * self.scale_log2
        tile = replace(tile, group=tile_grid.group)
        k_scales = self.scaling.k[tile.batch, tile.head_of_keys(), None]
        return replace(self, tile=tile, row=row, k_scales=k_scales)

    @cute.jit
    def fetch(self, block: Int32):
        """Start loading the scale of a block of keys."""
        self.block_scale[0] = self.k_scales[block]

    @cute.jit
    def step(
        self, S: cute.Tensor, first: cutlass.Constexpr[bool], masked: cutlass.Constexpr[bool], max_values: cute.Tensor,
        turns: SoftmaxTurns | None,
    ):  # fmt: skip
        """Convert a block of scores to probabilities, and update the running state and `correction`.

        Args:
            S: (2, cols), scores before the call and probabilities after the call.
            first: True for the first block of a tile.
            masked: True if scores may be -inf.
            max_values: scores as the product left them, used in blocks without masked scores.
        """
        factors, shifts, tops = (cute.make_rmem_tensor((ROWS,), Float32) for _ in range(3))
        if cutlass.const_expr(not first and not masked and "lazy" in FLAGS):
            self.prepare_lazily(S, max_values, factors, shifts, tops)
        else:
            self.prepare(S, first, masked, max_values, factors, shifts, tops)
        if cutlass.const_expr(turns is not None):
            zero = turns.wait()
            for r in cutlass.range_constexpr(ROWS):
                shifts[r] = shifts[r] + zero
        self.exponentiate(S, first, masked, factors, shifts)
        if cutlass.const_expr(turns is not None):
            turns.signal(self.row_sum[0] + self.row_sum[1])

    @cute.jit
    def prepare_lazily(
        self, S: cute.Tensor, max_values: cute.Tensor, factors: cute.Tensor, shifts: cute.Tensor, tops: cute.Tensor
    ):  # fmt: skip
        """Keep the maxima unless a score of the warp exceeds its maximum by more than SLACK_LOG2.

        The test needs no exchange between the lanes of a row.
        """
        offset = self.offset(False)
        for r in cutlass.range_constexpr(ROWS):
            factors[r] = self.row_scale[r] * self.block_scale[0]
            shifts[r] = self.row_max[r] - self.scaling.p_scale_log2
        special = cute.arch.fmax(magnitude(shifts[0]), magnitude(shifts[1])) > MAX_EXACT_SHIFT
        if cutlass.const_expr(offset != 0.0):
            special = special | (cute.arch.fmax(factors[0], factors[1]) > MAX_OFFSET_SHIFT / offset)
            for r in cutlass.range_constexpr(ROWS):
                shifts[r] = shifts[r] + offset * factors[r]
        limit = self.scaling.p_scale_log2 + SLACK_LOG2
        if cutlass.const_expr("nomax" in FLAGS):
            max_values = cute.make_tensor(max_values.iterator, cute.make_layout((2, (2, 2)), stride=(2, (1, 4))))
        above = [lane_max_of(max_values, r) * factors[r] - shifts[r] > limit for r in range(ROWS)]
        self.correction.fill(1.0)
        if cute.arch.vote_any_sync(special | above[0] | above[1]):
            self.prepare(S, False, False, max_values, factors, shifts, tops)

    @cute.jit
    def prepare(
        self, S: cute.Tensor, first: cutlass.Constexpr[bool], masked: cutlass.Constexpr[bool], max_values: cute.Tensor,
        factors: cute.Tensor, shifts: cute.Tensor, tops: cute.Tensor,
    ):  # fmt: skip
        """Update the maxima and `correction`, and set the factor and the shift of each row's exponents."""
        offset = self.offset(masked)
        for r in cutlass.range_constexpr(ROWS):
            factor, old_max = self.row_scale[r] * self.block_scale[0], self.row_max[r]
            top = row_max_of(S if cutlass.const_expr(masked) else max_values, r) - offset
            # A row without visible keys in the block stays unchanged, whatever its scale.
            if cutlass.const_expr(masked):
                hidden = top == -Float32.inf
                factor = cutlass.select_(hidden, Float32(1.0), factor)
            new_max = product_rounded_up(top, factor)
            # The maximum, and so O, stays unchanged unless the growth exceeds SLACK_LOG2.
            if cutlass.const_expr(not first):
                new_max = cutlass.select_(new_max > old_max + SLACK_LOG2, new_max, old_max)
            self.row_max[r] = new_max
            base = new_max
            if cutlass.const_expr(masked):
                base = 0.0 if new_max == -Float32.inf else new_max
                top = cutlass.select_(hidden, Float32(0.0), top)
            factors[r], shifts[r], tops[r] = factor, base - self.scaling.p_scale_log2, top
            self.correction[r] = 1.0
            if cutlass.const_expr(not first):
                self.correction[r] = cute.math.exp2(old_max - base, fastmath=True)
        self.apply_offset(S, factors, shifts, tops, offset)

    @cute.jit
    def exponentiate(
        self, S: cute.Tensor, first: cutlass.Constexpr[bool], masked: cutlass.Constexpr[bool], factors: cute.Tensor,
        shifts: cute.Tensor,
    ):  # fmt: skip
        """Convert scores to probabilities, and add the probabilities to the sums."""
        for r in cutlass.range_constexpr(ROWS):
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                if cutlass.const_expr(not masked and "noexp" in FLAGS):
                    S[r, c] = S[r, c] * factors[r] - shifts[r]
                elif cutlass.const_expr(not masked and "fma" in FLAGS and c % 4 == 3):
                    S[r, c] = exp2_by_fma(S[r, c], factors[r], shifts[r])
                else:
                    S[r, c] = cute.math.exp2(S[r, c] * factors[r] - shifts[r], fastmath=True)
            earlier = 0.0 if cutlass.const_expr(first) else self.row_sum[r] * self.correction[r]
            if cutlass.const_expr("nosum" in FLAGS and not masked):
                self.row_sum[r] = earlier + S[r, 0]
            else:
                self.row_sum[r] = earlier + row_reduce(S, r, operator.add)

    @cute.jit
    def apply_offset(
        self, S: cute.Tensor, factors: cute.Tensor, shifts: cute.Tensor, tops: cute.Tensor,
        offset: cutlass.Constexpr[float],
    ):  # fmt: skip
        """Apply the offset of the scores to the shifts, or subtract the offset from the scores.

        On entry S includes the offset, and the shifts do not. The offset times the factor is added to the shifts. If
        the sum would be rounded noticeably, the offset is subtracted from the scores instead. Huge
        shifts are made exact by `coarsen`.
        """
        huge = cute.arch.fmax(magnitude(shifts[0]), magnitude(shifts[1])) > MAX_EXACT_SHIFT
        if cutlass.const_expr(offset == 0.0):
            if huge:
                self.coarsen(factors, shifts, tops)
        elif huge | (cute.arch.fmax(factors[0], factors[1]) > MAX_OFFSET_SHIFT / offset):
            self.coarsen(factors, shifts, tops)
            for r in cutlass.range_constexpr(ROWS):
                for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                    S[r, c] = S[r, c] - offset
        else:
            for r in cutlass.range_constexpr(ROWS):
                shifts[r] = shifts[r] + offset * factors[r]

    def offset(self, masked: bool) -> float:
        """Return the offset contained in the scores."""
        return 0.0 if masked else self.scaling.offset

    def coarsen(self, factors: cute.Tensor, shifts: cute.Tensor, tops: cute.Tensor) -> None:
        """Make scores of rows with a huge maximum relative to the largest score of the block, held in `tops`."""
        for r in range(ROWS):
            behind = self.row_max[r] - product_rounded_up(tops[r], factors[r])
            huge = magnitude(shifts[r]) > MAX_EXACT_SHIFT
            shift = tops[r] * self.scaling.steep + behind - self.scaling.p_scale_log2
            shifts[r] = cutlass.select_(huge, shift, shifts[r])
            factors[r] = cutlass.select_(huge, Float32(self.scaling.steep), factors[r])

    @cute.jit
    def rescale(self, acc_O: cute.Tensor):
        """Rescale the output of earlier blocks (2, cols), if any row in the warp has a new maximum."""
        if cute.arch.vote_any_sync((self.correction[0] != 1.0) | (self.correction[1] != 1.0)):
            for r in cutlass.range_constexpr(ROWS):
                for c in cutlass.range_constexpr(cute.size(acc_O, mode=[1])):
                    acc_O[r, c] = acc_O[r, c] * self.correction[r]

    @cute.jit
    def finish(self, acc_O: cute.Tensor, scale: Float32, score_pipeline: ScorePipeline) -> cute.Tensor:
        """Normalize O and return the LSE.

        Args:
            acc_O: output (2, cols).
            scale: softmax scale.
            score_pipeline: stages of the scores.

        Returns:
            The LSE (2,), natural log.
        """
        assert score_pipeline.keep_scale is None and score_pipeline.extra_logit() is None, (
            "in 8 bits nothing is dropped or added"
        )
        lse, inverse = (cute.make_rmem_tensor((ROWS,), Float32) for _ in range(2))
        for r in cutlass.range_constexpr(ROWS):
            total = quad_reduce(self.row_sum[r], operator.add)
            inverse[r] = 0.0 if total == 0.0 else cute.arch.rcp_approx(total)
            batch, head, tensor_row = self.tile.lse_coord(cutlass.min(self.row + 8 * r, self.tile.sizes.Sq - 1))
            powers = self.row_max[r] - self.scaling.p_scale_log2 + cute.math.log2(total, fastmath=True)
            shifted = powers * (1.0 / LOG2_E) + self.scaling.row_shift[batch, head, tensor_row] * scale
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
        """Normalize O for values with scales and means per channel."""
        scale, mean = (cute.make_rmem_tensor((PAIR,), Float32) for _ in range(2))
        first = self.tile.batch, self.tile.head_of_keys(), cute.arch.lane_idx() % 4 * PAIR
        for c in cutlass.range_constexpr(0, cute.size(acc_O, mode=[1]), PAIR):
            for channels, registers in ((self.scaling.v, scale), (self.scaling.v_mean, mean)):
                source = channels.iterator + cute.crd2idx(first, channels.layout) + column_of(c)
                cute.autovec_copy(vector_at(source, Float32, PAIR), registers)
            for r in cutlass.range_constexpr(ROWS):
                for i in cutlass.range_constexpr(PAIR):
                    visible_mean = cutlass.select_(inverse[r] == 0.0, Float32(0.0), mean[i])
                    out = acc_O[r, c + i] * (inverse[r] * scale[i]) + visible_mean
                    if cutlass.const_expr(self.scaling.output_max is not None):
                        out = bounded(out, self.scaling.output_max)
                    acc_O[r, c + i] = out


def row_max_of(S: cute.Tensor, row: int) -> Float32:
    """Return the largest score of a row, shared by four threads."""
    return quad_reduce(lane_max_of(S, row), cute.arch.fmax)


def lane_max_of(S: cute.Tensor, row: int) -> Float32:
    """Return the largest score of a row among the columns of a thread.

    Integer scores are compared as the bits of positive fp32 numbers.
    """
    if S.element_type is Float32:
        return row_reduce(S, row, cute.arch.fmax)
    return row_reduce(S, row, cutlass.max).bitcast(Float32)


def exp2_by_fma(score: Float32, factor: Float32, shift: Float32) -> Float32:
    """Return 2^(score * factor - shift) with a relative error of 2^-9, without the special function unit.

    The exponent is split into an integer and a rest between -0.5 and 0.5. A polynomial of degree 2 gives the power of
    the rest.
    """
    text = (
        "{ .reg .f32 x; .reg .f32 t; .reg .f32 n; .reg .f32 p; .reg .b32 m; .reg .b32 e; neg.f32 n, {$r2}; fma.rn.f32 x, {$r0}, {$r1}, n; "
        "max.f32 x, x, 0fC2C80000; add.rn.f32 t, x, 0f4B400000; sub.rn.f32 n, t, 0f4B400000; sub.rn.f32 x, x, n; "
        f"fma.rn.f32 p, x, {hex_float(POLYNOMIAL[2])}, {hex_float(POLYNOMIAL[1])}; "
        f"fma.rn.f32 p, p, x, {hex_float(POLYNOMIAL[0])}; "
        "mov.b32 m, p; mov.b32 e, t; shl.b32 e, e, 23; add.s32 m, m, e; mov.b32 {$w0}, m; }"
    )
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[score, factor, shift])


def hex_float(x: float) -> str:
    """Return a number as an fp32 literal of PTX."""
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


def magnitude(x: Float32) -> Float32:
    return cute.arch.fmax(x, -x)


def bounded(x: Float32, limit: Float32) -> Float32:
    """Return x, limited to the range from -limit to limit. NaN stays NaN."""
    text = "{ .reg .f32 low; min.NaN.f32 low, {$r0}, {$r1}; max.NaN.f32 {$w0}, low, {$r2}; }"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[x, limit, -limit])


def product_rounded_up(a: Float32, b: Float32) -> Float32:
    """Return a * b, rounded up. No product of b with a number up to a exceeds the result."""
    return cute.arch.inline_ptx("mul.rp.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])
