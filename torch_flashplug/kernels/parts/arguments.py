"""The ABI of every kernel, in one place: what src/launch.cpp passes, and what a kernel file makes of it.

Arguments come in the order of the tables in torch_flashplug/arguments.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .element import Element

WANT_DQ, WANT_DKDV = 1, 2  # kWantDq, kWantDkDv of src/flashplug.h


@dataclass(frozen=True)
class Scales:
    """The softmax scale of a call."""

    log2: Float32  # times log2(e)
    natural: Float32


def fake_operand(dtype: type[cutlass.Numeric], *shape, elementwise: bool = False) -> cute.Tensor:
    """Argument for cute.compile, four dims: strides 64-bit (tensors may pass 2^31 elements), rows 16-byte aligned;
    elementwise: any strides, any address.
    """
    if elementwise:
        return cute.runtime.make_fake_tensor(dtype, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=2)
    strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
    return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=16)


def fake_forward(dtype: type[cutlass.Numeric], elementwise: bool = False) -> tuple[cute.Tensor, ...]:
    """What every forward is called with first, sizes symbolic: q, k, v, o, LSE."""
    B, Hq, Hkv, Sq, Sk = (cute.sym_int() for _ in range(5))
    D, Dv = (cute.sym_int(divisibility=1 if elementwise else 8) for _ in range(2))
    strides = (cute.sym_int64(), cute.sym_int64(), 1)
    lse = cute.runtime.make_fake_tensor(Float32, (B, Hq, Sq), strides, assumed_align=4)
    sizes = ((B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv), (B, Hq, Sq, Dv))
    return (*(fake_operand(dtype, *size, elementwise=elementwise) for size in sizes), lse)


def fake_vector(dtype: type[cutlass.Numeric], align: int, size: int | None = None) -> cute.Tensor:
    """Numbers on end, as many as come."""
    return cute.runtime.make_fake_tensor(dtype, (cute.sym_int() if size is None else size,), (1,), assumed_align=align)


@dataclass(frozen=True)
class Call:
    """One call's arguments, but for the stream; tensors as ForwardCall says."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor
    scales: Scales
    counter: cute.Tensor
    num_ctas: Int32


class ForwardCall:
    """What cute.compile calls; the launch is left to `launch` of the class that inherits."""

    element: Element
    elementwise = False  # tensors of any strides at any address

    def fake_arguments(self) -> tuple:
        """Arguments for cute.compile, sizes symbolic."""
        counter, tensors = fake_vector(Int32, 4, size=1), fake_forward(self.element.dtype, self.elementwise)
        return (*tensors, Float32(1.0), Float32(1.0), counter, Int32(1), cute.runtime.make_fake_stream())

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        scale_log2: Float32,
        scale: Float32,
        counter: cute.Tensor,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        self.launch(Call(q, k, v, o, lse, Scales(scale_log2, scale), counter, num_ctas), stream)


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

    element: Element

    def fake_arguments(self) -> tuple:
        """Arguments for cute.compile, sizes symbolic."""
        tensors = (*fake_forward(self.element.dtype), fake_vector(Float32, 16))
        return (*tensors, Float32(1.0), Int32(1), Int32(1), cute.runtime.make_fake_stream())

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        partials: cute.Tensor,
        scale: Float32,
        splits: Int32,
        cluster: Int32,
        stream: cuda.CUstream,
    ):
        self.launch(FewRows(q, k, v, o, lse, partials, scale, splits, cluster), stream)


@dataclass(frozen=True)
class Gradients:
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
    scales: Scales
    counter: cute.Tensor
    num_ctas: Int32
    wanted: Int32


class BackwardCall:
    """What cute.compile calls; launches are left to `launch` of the class that inherits."""

    element: Element
    elementwise = False  # tensors of any strides at any address

    def fake_arguments(self) -> tuple:
        """Arguments for cute.compile, sizes symbolic."""
        q, k, v, out, lse = fake_forward(self.element.dtype, self.elementwise)
        fake = lambda x: fake_operand(self.element.dtype, *x.shape, elementwise=self.elementwise)  # noqa: E731
        grad, *gradients = (fake(x) for x in (out, q, k, v))
        strides = (*(cute.sym_int64(divisibility=4) for _ in range(3)), 1)
        size = (*lse.shape[:2], 2, cute.sym_int())
        rows = cute.runtime.make_fake_tensor(Float32, size, strides, assumed_align=16)
        counter, scratch = fake_vector(Int32, 4, size=1), fake_vector(Float32, 16)
        scales = (Float32(1.0), Float32(1.0))
        tensors = (q, k, v, out, grad, lse, *gradients, rows, scratch)
        return (*tensors, *scales, counter, Int32(1), Int32(1), cute.runtime.make_fake_stream())

    @cute.jit
    def __call__(  # noqa: PLR0913, PLR0917 (the ABI that src/launch.cpp calls)
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        rows: cute.Tensor,
        scratch: cute.Tensor,
        scale_log2: Float32,
        scale: Float32,
        counter: cute.Tensor,
        num_ctas: Int32,
        wanted: Int32,
        stream: cuda.CUstream,
    ):
        tensors = (q, k, v, o, do, lse, dq, dk, dv, rows, scratch)
        self.launch(Gradients(*tensors, Scales(scale_log2, scale), counter, num_ctas, wanted), stream)
