"""The ABI of every backward, in one place: what src/launch.cpp passes, and what a kernel file makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from . import fragments

WANT_DQ, WANT_DKDV = 1, 2  # kWantDq, kWantDkDv of src/flashplug.h


@dataclass(frozen=True)
class Call:
    """One call's arguments, but for the stream; tensors as BackwardCall says."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    do: cute.Tensor
    lse: cute.Tensor
    dq: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    rows: cute.Tensor
    scratch: cute.Tensor
    scales: tuple  # scale * log2(e), scale
    counter: cute.Tensor
    num_ctas: Int32
    wanted: Int32


class BackwardCall:
    """What cute.compile calls; launches are left to `launch` of the class that inherits."""

    dtype: type[cutlass.Numeric]
    elementwise = False  # tensors of any strides at any address

    def fake_arguments(self) -> tuple:
        """Arguments for cute.compile, sizes symbolic."""
        q, k, v, out, lse = fragments.fake_forward(self.dtype, self.elementwise)
        fake = lambda x: fragments.fake_operand(self.dtype, *x.shape, elementwise=self.elementwise)  # noqa: E731
        grad, *gradients = (fake(x) for x in (out, q, k, v))
        fp32 = cute.runtime.make_fake_tensor
        strides = (*(cute.sym_int64(divisibility=4) for _ in range(3)), 1)
        rows = fp32(Float32, (*lse.shape[:2], 2, cute.sym_int()), strides, assumed_align=16)
        counter = fp32(Int32, (1,), (1,), assumed_align=4)
        scratch = fp32(Float32, (cute.sym_int(),), (1,), assumed_align=16)
        scales = (Float32(1.0), Float32(1.0))
        tensors = (q, k, v, out, grad, lse, *gradients, rows, scratch)
        return (*tensors, *scales, counter, Int32(1), Int32(1), cute.runtime.make_fake_stream())

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
        mScratch: cute.Tensor,  # fp32 dQ in register order, and counters (scratch.py); in parts: unused
        scale_log2: Float32,
        scale: Float32,
        mCounter: cute.Tensor,  # (1,) Int32, zero; this launch's alone while it runs
        num_ctas: Int32,  # SMs of the device
        wanted: Int32,  # the sum of WANT_DQ and WANT_DKDV; one of them: only to kernels in parts
        stream: cuda.CUstream,
    ):
        tensors, scales = (mQ, mK, mV, mO, mdO, mLSE, mdQ, mdK, mdV, mRows, mScratch), (scale_log2, scale)
        self.launch(Call(*tensors, scales, mCounter, num_ctas, wanted), stream)
