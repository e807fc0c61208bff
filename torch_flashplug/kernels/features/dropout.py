"""Dropout: the last score stage, applied in every block."""

from __future__ import annotations

from ..score_stages.dropout import Dropout
from ..score_stages.pipeline import Chain
from .base import Seams


class Dropped(Seams):
    """Kernel feature for dropout: adds the dropout stage behind all stages."""

    def chain(self, call: object) -> Chain:
        return Chain((*super().chain(call).stages, Dropout.of(call.drawn, call.q.shape[1])))
