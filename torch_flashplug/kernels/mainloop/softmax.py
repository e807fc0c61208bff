"""Online softmax over KV blocks, for two rows per thread.

References: Milakov and Gimelshein 2018; FlashAttention, arXiv 2205.14135.

Definitions:
- S: raw scores.
- row_max: running maximum of S, raw.
- scale_log2: scale * log2(e).
- row_sum: sum of exp2((S - row_max) * scale_log2). Each thread holds a partial sum until `finish`.
- LSE: row_max * scale + ln(row_sum), natural log, fp32.

A row with no visible key has row_max = -inf, row_sum = 0, O = 0 and LSE = -inf.

The exponent is a single fused multiply-add, S * scale_log2 - shift. Its product is exact, and its shift was rounded.
For a large shift, half a rounding step becomes a noticeable power of two. Then even the maximum itself would not give
1, and beyond 2^128 the result would be inf. In this case the mantissa of scale_log2 is dropped, because products with a
power of two are exact. Neighboring fp32 scores are then so far apart that each score below the maximum has little or no
weight under either factor.

Scores in natural units (score_stages/natural_units.py) may be far below zero by design, for example with a bias of -1e4
to mask keys. Their exponent is (S - row_max) * scale_log2. This form costs an extra instruction, and the maximum gives
exactly 1 at every magnitude.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..primitives.fragments import quad_reduce
from ..score_stages.pipeline import ScorePipeline
from ..tiling.tile import Tile, TileGrid

ROWS = 2  # rows of a wgmma accumulator per thread
SLACK = 8.0  # O is rescaled to a new maximum once probabilities exceed 1 by more than this power of two
COARSE_SHIFT = float(2**26)  # neighboring fp32 numbers are 4 apart here
SIGN_AND_EXPONENT = -(2**23)  # 0xFF800000 as Int32


@dataclass(frozen=True)
class NoScaling:
    """Scaling configuration for operands without scales. Quantized operands use scaled_softmax.Scaling.

    The class has no fields, so a kernel needs no argument.
    """

    def softmax(self, scale_log2: Float32, score_pipeline: ScorePipeline) -> OnlineSoftmax:
        return OnlineSoftmax.create(scale_log2, score_pipeline)


@dataclass(frozen=True)
class OnlineSoftmax:
    """Running maximum and sum of two rows, held in registers."""

    row_max: cute.Tensor  # (2,) fp32
    row_sum: cute.Tensor  # (2,) fp32
    correction: cute.Tensor  # (2,) fp32: factor for the rows of O; after `needs_rescale`, the new maximum
    scale_log2: Float32
    coarse_scale: Float32  # scale_log2 rounded down to a power of two
    natural_units: bool  # True if scores are in natural units

    @classmethod
    def create(cls, scale_log2: Float32, score_pipeline: ScorePipeline) -> OnlineSoftmax:
        row_max, row_sum, correction = (cute.make_rmem_tensor((ROWS,), Float32) for _ in range(3))
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        coarse_scale = (scale_log2.bitcast(Int32) & SIGN_AND_EXPONENT).bitcast(Float32)
        return cls(row_max, row_sum, correction, scale_log2, coarse_scale, score_pipeline.natural_units)

    def set_tile(self, tile: Tile, row: Int32, tile_grid: TileGrid) -> OnlineSoftmax:
        """Return the softmax state for the rows `row` and `row` + 8 of a tile.

        Args:
            tile: the tile.
            row: first row of the thread.
            tile_grid: tile grid of the tile.
        """
        return self

    def fetch(self, block: Int32) -> None:
        """Start loading the data of a KV block (nothing to load here)."""

    @cute.jit
    def step(
        self,
        acc_S: cute.Tensor,
        first: cutlass.Constexpr[bool],
        masked: cutlass.Constexpr[bool],
        max_values: object = None,
    ):
        """Convert a block of scores to probabilities, and update the running state and `correction`.

        Args:
            acc_S: (2, cols), scores before the call and probabilities after the call.
            first: True for the first block of a tile.
            masked: True if scores may be -inf.
            max_values: see scaled_softmax.ScaledSoftmax.
        """
        for r in cutlass.range_constexpr(ROWS):
            old_max = self.row_max[r]
            new_max = row_reduce(acc_S, r, cute.arch.fmax)
            if cutlass.const_expr(not first):
                new_max = cute.arch.fmax(new_max, old_max)
            new_max = quad_reduce(new_max, cute.arch.fmax)
            self.row_max[r] = new_max
            # -inf minus -inf is NaN. A row without a visible key so far subtracts 0, and all exponentials of the row
            # are 0.
            base = new_max
            if cutlass.const_expr(masked):
                base = 0.0 if new_max == -Float32.inf else new_max
            block_sum = self.exponentiate_row(acc_S, r, base)
            if cutlass.const_expr(first):
                self.row_sum[r] = block_sum
                self.correction[r] = 1.0
            else:
                correction = cute.math.exp2((old_max - base) * self.scale_log2, fastmath=True)
                self.correction[r] = correction
                self.row_sum[r] = self.row_sum[r] * correction + block_sum

    @cute.jit
    def needs_rescale(self, acc_S: cute.Tensor) -> cutlass.Boolean:
        """Return whether one of this thread's two rows exceeds its running maximum by more than SLACK.

        The four lanes of a quad share the two rows and get the same result. Callers vote over the warp, and then all
        lanes call `rescale_to_new_max`.

        Args:
            acc_S: scores (2, cols).
        """
        grown = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(ROWS):
            top = quad_reduce(row_reduce(acc_S, r, cute.arch.fmax), cute.arch.fmax)
            self.correction[r] = cute.arch.fmax(top, self.row_max[r])
            grown = grown | ((top - self.row_max[r]) * self.scale_log2 > SLACK)
        return grown

    @cute.jit
    def rescale_to_new_max(self, acc_O: cute.Tensor):
        """Rescale O (2, cols) and the sum to the maximum found by `needs_rescale`."""
        for r in cutlass.range_constexpr(ROWS):
            top = self.correction[r]
            base = 0.0 if top == -Float32.inf else top
            self.correction[r] = cute.math.exp2((self.row_max[r] - base) * self.scale_log2, fastmath=True)
            self.row_max[r] = top
            self.row_sum[r] = self.row_sum[r] * self.correction[r]
        self.rescale(acc_O)

    @cute.jit
    def exponentiate(self, acc_S: cute.Tensor):
        """Convert scores (2, cols) to probabilities of up to 2^SLACK, in place."""
        for r in cutlass.range_constexpr(ROWS):
            base = 0.0 if self.row_max[r] == -Float32.inf else self.row_max[r]
            self.row_sum[r] = self.row_sum[r] + self.exponentiate_row(acc_S, r, base)

    def exponentiate_row(self, acc_S: cute.Tensor, row: int, base: Float32) -> Float32:
        """Convert the scores of a row to probabilities relative to `base`, and return their sum."""
        if self.natural_units:
            for c in range(cute.size(acc_S, mode=[1])):
                acc_S[row, c] = cute.math.exp2((acc_S[row, c] - base) * self.scale_log2, fastmath=True)
            return row_reduce(acc_S, row, operator.add)
        shift = base * self.scale_log2
        factor = cutlass.select_(cute.arch.fmax(shift, -shift) > COARSE_SHIFT, self.coarse_scale, self.scale_log2)
        shift = base * factor
        for c in range(cute.size(acc_S, mode=[1])):
            acc_S[row, c] = cute.math.exp2(acc_S[row, c] * factor - shift, fastmath=True)
        return row_reduce(acc_S, row, operator.add)

    @cute.jit
    def rescale(self, acc_O: cute.Tensor):
        """Rescale the output of earlier blocks (2, cols) to the new maximum."""
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
        lse = cute.make_rmem_tensor((ROWS,), Float32)
        keep_scale = score_pipeline.keep_scale
        extra = score_pipeline.extra_logit()
        for r in cutlass.range_constexpr(ROWS):
            total, top, share = self.total(r), self.row_max[r] * scale, Float32(1.0)
            if cutlass.const_expr(extra is not None):
                highest = cute.arch.fmax(top, extra)
                base = 0.0 if highest == -Float32.inf else highest
                share = cute.math.exp(top - base, fastmath=True)  # weight of the keys relative to the new maximum
                total, top = total * share + cute.math.exp(extra - base, fastmath=True), base
            inverse = 0.0 if total == 0.0 else cute.arch.rcp_approx(total) * share
            if cutlass.const_expr(keep_scale is not None):
                inverse = inverse * keep_scale.inverse
            lse[r] = top + cute.math.log(total, fastmath=True)
            for c in cutlass.range_constexpr(cute.size(acc_O, mode=[1])):
                acc_O[r, c] = acc_O[r, c] * inverse
        return lse

    @cute.jit
    def finish_split(self, acc_O: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """Normalize O for a split of the keys, and return the maxima and the sums.

        A row without visible keys gets zeros, whatever values V held there.

        Args:
            acc_O: output (2, cols).

        Returns:
            The raw maxima (2,) and the sums (2,). For large scores, a single LSE value would lose the digits of the
                sum.
        """
        maxima, sums = (cute.make_rmem_tensor((ROWS,), Float32) for _ in range(2))
        for r in cutlass.range_constexpr(ROWS):
            total = self.total(r)
            maxima[r], sums[r] = self.row_max[r], total
            inverse = cute.arch.rcp_approx(total)
            for c in cutlass.range_constexpr(cute.size(acc_O, mode=[1])):
                acc_O[r, c] = cutlass.select_(total == 0.0, Float32(0.0), acc_O[r, c] * inverse)
        return maxima, sums

    def total(self, row: int) -> Float32:
        """Return the sum of a row over the four threads that share the row."""
        return quad_reduce(self.row_sum[row], operator.add)


def row_reduce(acc: cute.Tensor, row: int, combine):
    """Reduce one row of a thread's fragment in four independent partial results, so that latencies overlap."""
    columns = cute.size(acc, mode=[1])
    partials = [acc[row, c] for c in range(4)]
    for c in range(4, columns):
        partials[c % 4] = combine(partials[c % 4], acc[row, c])
    return combine(combine(partials[0], partials[1]), combine(partials[2], partials[3]))


@cute.jit
def write_lse(mLSE: cute.Tensor, lse: cute.Tensor, tile: Tile, row: Int32):
    """Write the LSE of the two rows of a thread, if the rows exist. One of four threads writes.

    Args:
        mLSE: LSE tensor.
        lse: values (2,).
        tile: the tile.
        row: first row of the thread.
    """
    writes = cute.arch.lane_idx() % 4 == 0
    for r in cutlass.range_constexpr(2):
        if writes and row + 8 * r < tile.sizes.Sq:
            mLSE[tile.lse_coord(row + 8 * r)] = lse[r]
