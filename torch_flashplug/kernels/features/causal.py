"""Causal attention as a kernel feature: query i sees keys 0 to i (top-left alignment of PyTorch)."""

from __future__ import annotations

from ..score_stages.kv_bounds import CausalVisible
from ..tiling.block_iterator import CausalBand
from .base import Seams


class Causal(Seams):
    """Kernel feature for causal attention."""

    uneven = True

    def walk(self, call: object) -> CausalBand:
        return CausalBand()

    def visible(self, call: object) -> CausalVisible:
        return CausalVisible()
