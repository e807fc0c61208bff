"""Online softmax over KV blocks (Milakov and Gimelshein 2018; FlashAttention, arXiv 2205.14135), one row pair per
thread.

Domains, stated once:  S raw scores;  row_max = running max of S, raw;  scale_log2 = scale * log2(e);
row_sum = sum of exp2((S - row_max) * scale_log2), this thread's share until `finish`;
LSE = row_max * scale + ln(row_sum), natural log, fp32.
A row with no visible key has row_max = -inf, row_sum = 0: O = 0, LSE = -inf.

The exponent is one fused multiply-add, S * scale_log2 - shift, whose product is exact and whose shift was rounded. Once
half a rounding of the shift is a power of two to be noticed, even the maximum itself would not give 1, and beyond 2^128
inf: there scale_log2 loses its mantissa. Products with a power of two are exact, and neighbouring fp32 scores are then
so far apart that every one below the maximum counts for little or nothing under either factor.

Scores in natural units (scores/natural.py) may be far below zero by design, such as a bias of -1e4 that hides keys.
Their exponent is (S - row_max) * scale_log2: one instruction more, and the maximum gives exactly 1 at every magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..score_stages.pipeline import Chain
from ..tiling.tile import Launch, Tile

ROWS = 2  # rows of a wgmma accumulator that one thread holds
SLACK = 8.0  # powers of two by which probabilities may exceed 1 before O is brought to a new maximum
COARSE_SHIFT = float(2**26)  # neighbouring fp32 numbers are 4 apart here
SIGN_AND_EXPONENT = -(2**23)  # 0xFF800000 as Int32


@dataclass(frozen=True)
class Unscaled:
    """Operands that nothing is multiplied by; others have a scaled.Scaling. Holds nothing, so that a kernel has no
    argument for it.
    """

    def softmax(self, scale_log2: Float32, chain: Chain) -> OnlineSoftmax:
        return OnlineSoftmax.create(scale_log2, chain)


@dataclass(frozen=True)
class OnlineSoftmax:
    """Running maximum and sum of two rows, kept in registers."""

    row_max: cute.Tensor  # (2,) fp32
    row_sum: cute.Tensor  # (2,) fp32
    correction: cute.Tensor  # (2,) fp32: what the rows of O must be multiplied by; after `grows` the new maximum
    scale_log2: Float32
    coarse_scale: Float32  # scale_log2 rounded down to a power of two
    natural_units: bool  # whether scores are in natural units

    @classmethod
    def create(cls, scale_log2: Float32, chain: Chain) -> OnlineSoftmax:
        row_max, row_sum, correction = (cute.make_rmem_tensor((ROWS,), Float32) for _ in range(3))
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        coarse_scale = (scale_log2.bitcast(Int32) & SIGN_AND_EXPONENT).bitcast(Float32)
        return cls(row_max, row_sum, correction, scale_log2, coarse_scale, chain.natural_units)

    def at(self, tile: Tile, row: Int32, pieces: Launch) -> OnlineSoftmax:
        """Of a tile's rows `row` and `row` + 8; pieces: where it is from."""
        return self

    def fetch(self, block: Int32) -> None:
        """What a block of keys has of its own is on its way."""

    @cute.jit
    def step(
        self, acc_S: cute.Tensor, first: cutlass.Constexpr[bool], masked: cutlass.Constexpr[bool], given: object = None
    ):
        """acc_S (2, cols): scores in, probabilities out. Updates the running state and `correction`. given: as of
        scaled.ScaledSoftmax.
        """
        for r in cutlass.range_constexpr(ROWS):
            old_max = self.row_max[r]
            new_max = row_reduce(acc_S, r, cute.arch.fmax)
            if cutlass.const_expr(not first):
                new_max = cute.arch.fmax(new_max, old_max)
            new_max = cute.arch.fmax(new_max, cute.arch.shuffle_sync_bfly(new_max, offset=1))
            new_max = cute.arch.fmax(new_max, cute.arch.shuffle_sync_bfly(new_max, offset=2))
            self.row_max[r] = new_max
            # -inf minus -inf is NaN: a row that has seen no key yet subtracts 0, and its exponentials are all 0.
            base = new_max
            if cutlass.const_expr(masked):
                base = 0.0 if new_max == -Float32.inf else new_max
            block_sum = self.weigh_row(acc_S, r, base)
            if cutlass.const_expr(first):
                self.row_sum[r] = block_sum
                self.correction[r] = 1.0
            else:
                correction = cute.math.exp2((old_max - base) * self.scale_log2, fastmath=True)
                self.correction[r] = correction
                self.row_sum[r] = self.row_sum[r] * correction + block_sum

    @cute.jit
    def grows(self, acc_S: cute.Tensor) -> cutlass.Boolean:
        """acc_S (2, cols): whether a row of this block, which any lane of the warp may hold, exceeds its running
        maximum by so much that `raise_to` must follow.
        """
        grown = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(ROWS):
            top = row_reduce(acc_S, r, cute.arch.fmax)
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
            self.correction[r] = cute.arch.fmax(top, self.row_max[r])
            grown = grown | ((top - self.row_max[r]) * self.scale_log2 > SLACK)
        return grown

    @cute.jit
    def raise_to(self, acc_O: cute.Tensor):
        """The maximum that `grows` has seen becomes the one that O (2, cols) and the sum are relative to."""
        for r in cutlass.range_constexpr(ROWS):
            top = self.correction[r]
            base = 0.0 if top == -Float32.inf else top
            self.correction[r] = cute.math.exp2((self.row_max[r] - base) * self.scale_log2, fastmath=True)
            self.row_max[r] = top
            self.row_sum[r] = self.row_sum[r] * self.correction[r]
        self.rescale(acc_O)

    @cute.jit
    def weigh(self, acc_S: cute.Tensor):
        """acc_S (2, cols): scores in, probabilities out, up to 2^SLACK."""
        for r in cutlass.range_constexpr(ROWS):
            base = 0.0 if self.row_max[r] == -Float32.inf else self.row_max[r]
            self.row_sum[r] = self.row_sum[r] + self.weigh_row(acc_S, r, base)

    def weigh_row(self, acc_S: cute.Tensor, row: int, base: Float32) -> Float32:
        """A row's scores become probabilities relative to `base`; returns their sum."""
        if self.natural_units:
            for c in range(cute.size(acc_S, mode=[1])):
                acc_S[row, c] = cute.math.exp2((acc_S[row, c] - base) * self.scale_log2, fastmath=True)
            return row_reduce(acc_S, row, lambda a, b: a + b)
        shift = base * self.scale_log2
        factor = cutlass.select_(cute.arch.fmax(shift, -shift) > COARSE_SHIFT, self.coarse_scale, self.scale_log2)
        shift = base * factor
        for c in range(cute.size(acc_S, mode=[1])):
            acc_S[row, c] = cute.math.exp2(acc_S[row, c] * factor - shift, fastmath=True)
        return row_reduce(acc_S, row, lambda a, b: a + b)

    @cute.jit
    def rescale(self, acc_O: cute.Tensor):
        """acc_O (2, cols): bring the output of earlier blocks to the new maximum."""
        for r in cutlass.range_constexpr(ROWS):
            for c in cutlass.range_constexpr(cute.size(acc_O, mode=[1])):
                acc_O[r, c] = acc_O[r, c] * self.correction[r]

    @cute.jit
    def finish(self, acc_O: cute.Tensor, scale: Float32, chain: Chain) -> cute.Tensor:
        """Normalise acc_O (2, cols); returns LSE (2,), natural log. chain: whose scores these were."""
        lse, kept, extra = cute.make_rmem_tensor((ROWS,), Float32), chain.kept_share, chain.extra_logit()
        for r in cutlass.range_constexpr(ROWS):
            total, top, share = self.total(r), self.row_max[r] * scale, Float32(1.0)
            if cutlass.const_expr(extra is not None):
                highest = cute.arch.fmax(top, extra)
                base = 0.0 if highest == -Float32.inf else highest
                share = cute.math.exp(top - base, fastmath=True)  # of what keys have, relative to the new maximum
                total, top = total * share + cute.math.exp(extra - base, fastmath=True), base
            inverse = 0.0 if total == 0.0 else cute.arch.rcp_approx(total) * share
            if cutlass.const_expr(kept is not None):
                inverse = inverse * kept.inverse
            lse[r] = top + cute.math.log(total, fastmath=True)
            for c in cutlass.range_constexpr(cute.size(acc_O, mode=[1])):
                acc_O[r, c] = acc_O[r, c] * inverse
        return lse

    @cute.jit
    def part(self, acc_O: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """Normalise acc_O (2, cols), of a part of the keys: zeros where a row sees none of them, whatever v held there.
        Returns maxima, raw, and sums, (2,) each: of large scores an LSE, one number, would have lost the sum's digits.
        """
        tops, totals = (cute.make_rmem_tensor((ROWS,), Float32) for _ in range(2))
        for r in cutlass.range_constexpr(ROWS):
            total = self.total(r)
            tops[r], totals[r] = self.row_max[r], total
            inverse = cute.arch.rcp_approx(total)
            for c in cutlass.range_constexpr(cute.size(acc_O, mode=[1])):
                acc_O[r, c] = cutlass.select_(total == 0.0, Float32(0.0), acc_O[r, c] * inverse)
        return tops, totals

    def total(self, row: int) -> Float32:
        """A row's sum, of the four threads that share it."""
        total = self.row_sum[row]
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
        return total + cute.arch.shuffle_sync_bfly(total, offset=2)


def row_reduce(acc: cute.Tensor, row: int, combine):
    """Reduce one row of a thread's fragment with four independent chains, so that latency overlaps."""
    columns = cute.size(acc, mode=[1])
    chains = [acc[row, c] for c in range(4)]
    for c in range(4, columns):
        chains[c % 4] = combine(chains[c % 4], acc[row, c])
    return combine(combine(chains[0], chains[1]), combine(chains[2], chains[3]))


@cute.jit
def write_lse(mLSE: cute.Tensor, lse: cute.Tensor, tile: Tile, row: Int32):
    """The two rows of a thread, where they exist, from one thread of the four; row: its first."""
    writes = cute.arch.lane_idx() % 4 == 0
    for r in cutlass.range_constexpr(2):
        if writes and row + 8 * r < tile.sizes.Sq:
            mLSE[tile.place(row + 8 * r)] = lse[r]
