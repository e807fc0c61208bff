"""Causal attention: key j is visible to query i iff j <= i, PyTorch's top-left alignment."""

from __future__ import annotations

from ..score_stages.kv_bounds import CausalVisible
from ..tiling.block_iterator import CausalBand
from .base import Seams


class Causal(Seams):
    uneven = True

    def walk(self, call: object) -> CausalBand:
        return CausalBand()

    def visible(self, call: object) -> CausalVisible:
        return CausalVisible()
