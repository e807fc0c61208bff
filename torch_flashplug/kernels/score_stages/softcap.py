"""Score stage that applies a softcap, and its derivative."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..primitives.fragments import LOG2_E
from .pipeline import ScoreStage

if TYPE_CHECKING:
    from ..call_args.kernel_call import SoftmaxScale


@dataclass(frozen=True)
class SoftcapStage(ScoreStage):
    """Score stage of soft capping."""

    scale: Float32  # softmax scale divided by the cap
    cap: Float32
    applies_to_full_blocks = is_shared_by_heads = True
    may_mask = False

    def scales(self, scales: SoftmaxScale) -> SoftmaxScale:
        return replace(scales, log2=self.cap * LOG2_E, natural=self.cap)

    def natural_scale(self, scale: Float32) -> Float32:
        return self.cap

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                S[r, c] = cute.math.tanh(S[r, c] * self.scale, fastmath=True)

    def score_derivative(self) -> SoftcapDerivative:
        return SoftcapDerivative(1.0 / (self.cap * LOG2_E))


@dataclass(frozen=True)
class SoftcapDerivative:
    """Derivative of soft capping: the factor for dS."""

    inverse: Float32  # inverse of the cap, in powers of two

    def __call__(self, weight: Float32, lse_log2: Float32) -> Float32:
        """Return the factor for dS, or 0 if P is 0.

        For P = 0, tanh is -inf, or NaN in a row without keys. The maximum with 0 discards both.

        Args:
            weight: P.
            lse_log2: LSE of the query, in base 2.
        """
        capped = (cute.math.log2(weight, fastmath=True) + lse_log2) * self.inverse
        return cute.arch.fmax(1.0 - capped * capped, Float32(0.0))
