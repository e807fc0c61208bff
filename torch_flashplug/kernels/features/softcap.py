"""Soft capping of scores: a score becomes cap * tanh(score / cap) before the mask (Gemma 2, arXiv 2408.00118).

The score stage replaces scores by their tanh, and the cap becomes the softmax scale.

tanh.approx has a relative error of 2^-11. The derivative 1 - tanh^2 is computed from P together with dS: tanh = (log2 P
+ LSE) / cap, all in powers of two. The backward therefore keeps no register for tanh. If P has 16 bits at this point
(dK of a split backward), the error of tanh is 2^-8 / cap.
"""

from __future__ import annotations

from ..score_stages.pipeline import ScorePipeline
from ..score_stages.softcap import SoftcapStage
from .base import KernelFeatures


class SoftcapFeature(KernelFeatures):
    """Kernel feature for soft capping."""

    has_score_derivative = True

    def score_pipeline(self, call: object) -> ScorePipeline:
        """Return the score stages with soft capping before the masking stages."""
        return ScorePipeline(
            (SoftcapStage(call.scales.natural / call.softcap, call.softcap), *super().score_pipeline(call).stages)
        )
