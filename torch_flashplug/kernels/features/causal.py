"""Causal attention as a kernel feature: query i sees keys 0 to i (top-left alignment of PyTorch)."""

from __future__ import annotations

from ..score_stages.kv_bounds import CausalStage
from ..tiling.block_iterator import CausalBlocks
from .base import KernelFeatures


class CausalFeature(KernelFeatures):
    """Kernel feature for causal attention."""

    tile_lengths_vary = True

    def block_iterator(self, call: object) -> CausalBlocks:
        return CausalBlocks()

    def masking_stage(self, call: object) -> CausalStage:
        return CausalStage()
