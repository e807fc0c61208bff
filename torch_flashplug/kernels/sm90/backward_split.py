"""Split backward for Hopper: dQ has a kernel of its own, which computes scores and dP again.

The split backward has seven products instead of five. In return, no dQ workspace is needed, the bits are the same in
every run, and either part can be left out. The split backward is also the faster way for head dims above 128. There,
registers hold dK and dV of 64 keys. A fused kernel would send the fp32 sums of dQ from the SMs to L2 once for every 64
keys. The kernel would wait for these sums half of the time (docs/experiments/backward.md).
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute

from ...registry.kernel_spec import HopperSpec
from ..backward.pre_post_process import BackwardPreprocess, RowStatsInputs
from ..call_args.kernel_call import NEEDS_DKDV, NEEDS_DQ, KernelArgs, KernelCall
from ..features.base import KernelFeatures
from .backward_dkdv import BackwardDkdvSm90
from .backward_dq import BackwardDqSm90


class SplitBackwardSm90(KernelCall, kind="partbwd"):
    """Builder of the three kernels of a split backward, which a call launches in sequence.

    Computes dQ, dK and dV, deterministically.

    1. `BackwardPreprocess` computes LSE * log2(e) and delta per row.
    2. `BackwardDqSm90` computes dQ, if the call wants dQ.
    3. `BackwardDkdvSm90` computes dK and dV, if the call wants dK and dV.

    Inputs: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), o and do (B, Hq, Sq, Dv), lse (B, Hq, Sq) in fp32.
    Outputs: dq (B, Hq, Sq, D), dk (B, shares, Sk, D), dv (B, shares, Sk, Dv), where `shares` is Hkv or a multiple of
    Hkv. Workspace: row_stats (B, Hq, 2, padded Sq) in fp32. The kernel classes describe warp roles, pipelines and
    shared memory.
    """

    def __init__(self, spec: HopperSpec):
        self.spec, self.features = spec, KernelFeatures.from_spec(spec)
        self.element = self.features.element
        self.preprocess = BackwardPreprocess(self.element)
        self.query_gradient, self.key_gradients = BackwardDqSm90(spec), BackwardDkdvSm90(spec)

    @cute.jit
    def launch(self, call: KernelArgs, stream: cuda.CUstream):
        """Launch the preprocessing kernels of the features, then the kernels of the requested gradients."""
        self.features.launch_preprocess(call, stream)
        addressing = self.features.tile_addressing(call)
        keep_scale = self.features.score_pipeline(call).keep_scale
        row_stats_inputs = RowStatsInputs(call.o, call.do, call.lse, call.dlse)
        self.preprocess(row_stats_inputs, call.row_stats, None, None, keep_scale, addressing, stream)
        if call.needs_grad & NEEDS_DQ != 0:
            self.query_gradient(call, stream)
        if call.needs_grad & NEEDS_DKDV != 0:
            self.key_gradients(call, stream)
