"""Packed sequences of equal lengths as a kernel feature: a dense kernel without work if lengths differ.

The tensors are views (B, heads, S, columns) of packed rows. The kernel of packed sequences (varlen.py) is launched
behind, and has no work if all lengths are equal.
"""

from __future__ import annotations

from ..tiling.equal_lengths import EqualLengthsAddressing, wait_for_previous_launch
from .base import KernelFeatures


class EqualLengthsFeature(KernelFeatures):
    """Kernel feature for packed sequences of equal lengths."""

    overlaps_preprocess = True

    def wait_for_preprocess(self) -> None:
        wait_for_previous_launch()

    def tile_addressing(self, call: object) -> EqualLengthsAddressing:
        return EqualLengthsAddressing(call.cu_seqlens_q, call.cu_seqlens_k, call.q.shape[2], call.k.shape[2])
