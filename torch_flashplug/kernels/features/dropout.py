"""Dropout: the last score stage, applied in every block."""

from __future__ import annotations

from ..score_stages.dropout import DropoutStage
from ..score_stages.pipeline import ScorePipeline
from .base import KernelFeatures


class DropoutFeature(KernelFeatures):
    """Kernel feature for dropout: adds the dropout stage behind all stages."""

    def score_pipeline(self, call: object) -> ScorePipeline:
        return ScorePipeline(
            (*super().score_pipeline(call).stages, DropoutStage.create(call.seed, call.dropout_p, call.q.shape[1]))
        )
