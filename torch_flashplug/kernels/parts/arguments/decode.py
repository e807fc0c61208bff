"""What decode kernels are called with."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from .operands import KernelCall, fake_bias, fake_mask, fake_vector, given_bias


@dataclass(frozen=True)
class FewRows:
    """One call's arguments, but for the stream; tensors as DecodeCall says."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor
    partials: cute.Tensor
    scale: Float32
    splits: Int32
    cluster: Int32
    mask: cute.Tensor | None
    bias: cute.Tensor | None  # of either dtype


class DecodeCall(KernelCall):
    """Of the kind decode."""

    def fake_tensors(self) -> dict[str, cute.Tensor]:
        own = {"partials": fake_vector(Float32, 16), "mask": fake_mask()}
        return super().fake_tensors() | own | fake_bias(self.element.dtype)

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
        mask: cute.Tensor | None,
        bias: cute.Tensor | None,
        bias32: cute.Tensor | None,
        stream: cuda.CUstream,
    ):
        bias = given_bias(bias, bias32)
        self.launch(FewRows(q, k, v, o, lse, partials, scale, splits, cluster, mask, bias), stream)
