"""Causal attention: key j is visible to query i iff j <= i, PyTorch's top-left alignment."""

from __future__ import annotations

from .scores.visible import CausalVisible
from .seams import Seams
from .walk import CausalBand


class Causal(Seams):
    uneven = True

    def walk(self, call: object) -> CausalBand:
        return CausalBand()

    def visible(self, call: object) -> CausalVisible:
        return CausalVisible()
