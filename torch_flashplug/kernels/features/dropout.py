"""Dropout: behind all that scores go through, whatever blocks they are of."""

from __future__ import annotations

from ..score_stages.dropout import Dropout
from ..score_stages.pipeline import Chain
from .base import Seams


class Dropped(Seams):
    def chain(self, call: object) -> Chain:
        return Chain((*super().chain(call).stages, Dropout.of(call.drawn, call.q.shape[1])))
