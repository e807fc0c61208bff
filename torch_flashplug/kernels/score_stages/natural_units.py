"""Scores in natural units, behind a stage that adds to scores.

Any scale is allowed, and the softmax continues with scale 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..primitives.fragments import LOG2_E

if TYPE_CHECKING:
    from ..call_args.kernel_call import SoftmaxScale


def natural(scales: SoftmaxScale) -> SoftmaxScale:
    """Return the softmax scales of scores in natural units.

    log2(e) is hidden from LLVM. Otherwise LLVM would also multiply hidden scores ahead of their -inf and then subtract,
    an additional instruction per score.
    """
    text = "mov.f32 {$w0}, {$r0};"
    log2_e = cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[Float32(LOG2_E)])
    return replace(scales, log2=log2_e, natural=Float32(1.0))


@cute.jit
def add(S: cute.Tensor, scale: Float32, biases: cute.Tensor):
    """Compute S * scale + biases in place; both are (2, columns) of a thread."""
    for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            S[r, c] = S[r, c] * scale + biases[r, c].to(Float32)
