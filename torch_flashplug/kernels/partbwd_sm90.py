"""Attention backward for Hopper in two parts: dQ has a kernel of its own, which computes scores and dP again.

Seven products instead of five, but no scratch, the same bits in every run, and either part may be left out. It is also
the faster way for head dims above 128: registers hold dK and dV of 64 keys there, so that a fused kernel would send the
fp32 sums of dQ from the SMs to L2 once for every 64 keys, and wait for them half of the time (tools/results/LOG.md).
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..spec import KernelSpec
from .dkdv_sm90 import KeyGradientsSm90
from .dq_sm90 import QueryGradientSm90
from .parts import sm90
from .parts.backward_rows import PrepareBackward, fake_arguments

WANT_DQ, WANT_DKDV = 1, 2  # src/launch.cpp


class BackwardInPartsSm90:
    """Builds the three kernels of one spec, launched one after the other by one call."""

    def __init__(self, spec: KernelSpec):
        self.dtype = sm90.DTYPES[spec.dtype]
        self.prepare = PrepareBackward(self.dtype)
        self.query_gradient, self.key_gradients = QueryGradientSm90(spec), KeyGradientsSm90(spec)

    def fake_arguments(self) -> tuple:
        return fake_arguments(self.dtype)

    @cute.jit
    def __call__(  # noqa: PLR0913, PLR0917 (the ABI that src/launch.cpp calls)
        self,
        mQ: cute.Tensor,  # (B, Hq, Sq, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv)
        mO: cute.Tensor,  # (B, Hq, Sq, Dv)
        mdO: cute.Tensor,  # (B, Hq, Sq, Dv)
        mLSE: cute.Tensor,  # (B, Hq, Sq) fp32
        mdQ: cute.Tensor,  # (B, Hq, Sq, D)
        mdK: cute.Tensor,  # (B, Hkv, Sk, D)
        mdV: cute.Tensor,  # (B, Hkv, Sk, Dv)
        mRows: cute.Tensor,  # (B, Hq, 2, Sq rounded up to tile_m) fp32: LSE * log2(e) (inf: no row or no key), delta
        mScratch: cute.Tensor,  # unused
        scale_log2: Float32,
        scale: Float32,
        mCounter: cute.Tensor,  # (1,) Int32, zero; this launch's alone while it runs
        num_ctas: Int32,  # CTAs that the device runs at once
        wanted: Int32,  # the sum of WANT_DQ and WANT_DKDV, or one of them
        stream: cuda.CUstream,
    ):
        scales, launch = (scale_log2, scale), (mCounter, num_ctas)
        self.prepare(mO, mdO, mLSE, mRows, None, None, stream)
        if wanted & WANT_DQ != 0:
            self.query_gradient((mQ, mK, mV, mdO, mdQ), mRows, scales, launch, stream)
        if wanted & WANT_DKDV != 0:
            self.key_gradients((mQ, mK, mV, mdO, mdK, mdV), mRows, scales, launch, stream)
