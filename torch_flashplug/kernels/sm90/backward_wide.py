"""Split backward for head dims above 256 on Hopper: a kernel for each of dQ, dK and dV.

The output of 64 rows takes half of the registers of two warpgroups. So dK and dV have separate kernels, and the three
kernels have eight products, of which five count. Results have the same bits in every run, and no workspace is needed.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute

from ...registry.kernel_spec import HopperSpec
from ..backward.pre_post_process import BackwardPreprocess, RowStatsInputs
from ..call_args.kernel_call import NEEDS_DKDV, NEEDS_DQ, KernelArgs, KernelCall
from ..features.base import KernelFeatures
from .backward_wide_dkdv import WideBackwardDkdvSm90
from .backward_wide_dq import WideBackwardDqSm90


class WideBackwardSm90(KernelCall, kind="partbwd"):
    """Builder of the four kernels of a split backward with head dims above 256, which a call launches in sequence.

    Computes dQ, dK and dV, deterministically.

    1. `BackwardPreprocess` computes LSE * log2(e) and delta per row.
    2. `WideBackwardDqSm90` computes dQ, if the call wants dQ.
    3. `WideBackwardDkdvSm90` computes dV, and in a second launch dK, if the call wants dK and dV.

    Inputs: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, D), o and do (B, Hq, Sq, D), lse (B, Hq, Sq) in fp32.
    Outputs: dq (B, Hq, Sq, D), dk and dv (B, shares, Sk, D), where `shares` is Hkv or a multiple of Hkv. Workspace:
    row_stats (B, Hq, 2, padded Sq) in fp32. The kernel classes describe warp roles, pipelines and shared memory.
    """

    def __init__(self, spec: HopperSpec):
        self.spec, self.features = spec, KernelFeatures.from_spec(spec)
        self.element = self.features.element
        self.preprocess = BackwardPreprocess(self.element)
        self.query_gradient = WideBackwardDqSm90(spec)
        self.value_gradient, self.key_gradient = (WideBackwardDkdvSm90(spec, output) for output in ("dv", "dk"))

    @cute.jit
    def launch(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the preprocessing kernels of the features, then the kernels of the requested gradients."""
        self.features.launch_preprocess(call, stream)
        addressing = self.features.tile_addressing(call)
        row_stats_inputs = RowStatsInputs(call.o, call.do, call.lse, call.dlse)
        self.preprocess(row_stats_inputs, call.row_stats, None, None, None, addressing, stream)
        if call.needs_grad & NEEDS_DQ != 0:
            self.query_gradient(call, stream)
        if call.needs_grad & NEEDS_DKDV != 0:
            self.value_gradient(call, stream)
            self.key_gradient(call, stream)
