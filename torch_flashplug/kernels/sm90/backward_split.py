"""Attention backward for Hopper in two parts: dQ has a kernel of its own, which computes scores and dP again.

Seven products instead of five, but no scratch, the same bits in every run, and either part may be left out. It is also
the faster way for head dims above 128: registers hold dK and dV of 64 keys there, so that a fused kernel would send the
fp32 sums of dQ from the SMs to L2 once for every 64 keys, and wait for them half of the time (tools/results/LOG.md).
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute

from ...registry.kernel_spec import HopperSpec
from ..backward.pre_post_process import GivenRows, PrepareBackward
from ..call_args.backward import WANT_DKDV, WANT_DQ, BackwardCall, Gradients
from ..features.base import Seams
from .backward_dkdv import KeyGradientsSm90
from .backward_dq import QueryGradientSm90


class BackwardInPartsSm90(BackwardCall):
    """Builds the three kernels of one spec, launched one after the other by one call."""

    def __init__(self, spec: HopperSpec):
        self.spec, self.seams = spec, Seams.of(spec)
        self.element = self.seams.element
        self.prepare = PrepareBackward(self.element)
        self.query_gradient, self.key_gradients = QueryGradientSm90(spec), KeyGradientsSm90(spec)

    @cute.jit
    def launch(self, call: Gradients, stream: cuda.CUstream):
        self.seams.before(call, stream)
        pieces, kept = self.seams.pieces(call), self.seams.chain(call).kept_share
        given = GivenRows(call.o, call.do, call.lse, call.dlse)
        self.prepare(given, call.rows, None, None, kept, pieces, stream)
        if call.wanted & WANT_DQ != 0:
            self.query_gradient(call, stream)
        if call.wanted & WANT_DKDV != 0:
            self.key_gradients(call, stream)
