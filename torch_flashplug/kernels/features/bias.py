"""Float attention masks: a bias is added to the scores in every block."""

from __future__ import annotations

from ..score_stages.bias import BiasConfig as Added
from ..score_stages.pipeline import ScorePipeline
from .base import KernelFeatures


class BiasFeature(KernelFeatures):
    """Kernel feature for float attention masks: adds the bias stage."""

    def score_pipeline(self, call: object) -> ScorePipeline:
        """Return the score stages with the bias stage first.

        Later stages mask scores. A bias stage behind such a stage could negate the masked scores.
        """
        return ScorePipeline((Added(call.bias_any_dtype, call.scales.natural), *super().score_pipeline(call).stages))
