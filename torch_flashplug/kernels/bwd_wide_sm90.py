"""Attention backward for Hopper where a fused one is bound by L2: head dims above 128.

With 64 keys of a CTA, all that registers hold there, dQ's fp32 sums would cross from the SMs to L2 once for every 64
keys, and half of the time would go by waiting for that (tools/results/LOG.md). So dQ has a kernel of its own, which
computes scores and dP again: seven products instead of five, no scratch, and the same bits in every run.
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


class BackwardWideSm90:
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
        stream: cuda.CUstream,
    ):
        scales, launch = (scale_log2, scale), (mCounter, num_ctas)
        self.prepare(mO, mdO, mLSE, mRows, None, None, stream)
        self.query_gradient((mQ, mK, mV, mdO, mdQ), mRows, scales, launch, stream)
        self.key_gradients((mQ, mK, mV, mdO, mdK, mdV), mRows, scales, launch, stream)
