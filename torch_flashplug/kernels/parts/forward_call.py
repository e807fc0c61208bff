"""The ABI of every forward and decode, in one place: what src/launch.cpp passes, and what a kernel file makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from . import fragments


@dataclass(frozen=True)
class Call:
    """One call's arguments, but for the stream; tensors as ForwardCall says."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor
    scales: tuple  # scale * log2(e), scale
    counter: cute.Tensor
    num_ctas: Int32


class ForwardCall:
    """What cute.compile calls; the launch is left to `launch` of the class that inherits."""

    dtype: type[cutlass.Numeric]
    elementwise = False  # tensors of any strides at any address

    def fake_arguments(self) -> tuple:
        """Arguments for cute.compile, sizes symbolic."""
        counter = cute.runtime.make_fake_tensor(Int32, (1,), (1,), assumed_align=4)
        tensors = fragments.fake_forward(self.dtype, self.elementwise)
        return (*tensors, Float32(1.0), Float32(1.0), counter, Int32(1), cute.runtime.make_fake_stream())

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, Hq, Sq, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv)
        mO: cute.Tensor,  # (B, Hq, Sq, Dv)
        mLSE: cute.Tensor,  # (B, Hq, Sq) fp32
        scale_log2: Float32,
        scale: Float32,
        mCounter: cute.Tensor,  # (1,) Int32, zero; this launch's alone while it runs
        num_ctas: Int32,  # CTAs that the device runs at once
        stream: cuda.CUstream,
    ):
        self.launch(Call(mQ, mK, mV, mO, mLSE, (scale_log2, scale), mCounter, num_ctas), stream)


@dataclass(frozen=True)
class FewRows:
    """One decode call's arguments, but for the stream; tensors as DecodeCall says."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor
    partials: cute.Tensor
    scale: Float32
    splits: Int32
    cluster: Int32


class DecodeCall:
    """The same for decode."""

    dtype: type[cutlass.Numeric]

    def fake_arguments(self) -> tuple:
        """Arguments for cute.compile, sizes symbolic."""
        partials = cute.runtime.make_fake_tensor(Float32, (cute.sym_int(),), (1,), assumed_align=16)
        tensors = (*fragments.fake_forward(self.dtype), partials)
        return (*tensors, Float32(1.0), Int32(1), Int32(1), cute.runtime.make_fake_stream())

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, Hq, Sq, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv)
        mO: cute.Tensor,  # (B, Hq, Sq, Dv)
        mLSE: cute.Tensor,  # (B, Hq, Sq) fp32
        mPartials: cute.Tensor,  # fp32: B * Hq * Sq * splits * (Dv + 1) of them, where splits > cluster
        scale: Float32,
        splits: Int32,  # CTAs that share the keys of a tile of rows; at most one for each block of keys
        cluster: Int32,  # CTAs that add up in shared memory: all splits of a tile, at most CLUSTER; or 1
        stream: cuda.CUstream,
    ):
        self.launch(FewRows(mQ, mK, mV, mO, mLSE, mPartials, scale, splits, cluster), stream)
