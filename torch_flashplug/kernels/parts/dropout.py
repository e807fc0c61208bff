"""Dropout: behind all that scores go through, whatever blocks they are of."""

from __future__ import annotations

from .scores.chain import Chain
from .scores.dropout import Dropout
from .seams import Seams


class Dropped(Seams):
    def chain(self, call: object) -> Chain:
        return Chain((*super().chain(call).stages, Dropout.of(call.drawn, call.q.shape[1])))
