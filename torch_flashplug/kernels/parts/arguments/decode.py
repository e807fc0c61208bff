"""What decode kernels are called with."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from .operands import KernelCall, fake_bias, fake_mask, fake_operand, fake_scale, fake_vector, given_bias


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
    k_scale: cute.Tensor | None
    v_scale: cute.Tensor | None
    rotated: Int32 | None


class DecodeCall(KernelCall):
    """Of the kind decode."""

    def fake_tensors(self) -> dict[str, cute.Tensor]:
        tensors = super().fake_tensors()
        tensors |= {name: fake_operand(self.element.cached, *tensors[name].shape) for name in ("k", "v")}
        tensors |= {"partials": fake_vector(Float32, 16), "mask": fake_mask()}
        tensors |= {"k_scale": fake_scale(), "v_scale": fake_scale()}
        return tensors | fake_bias(self.element.dtype)

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
        k_scale: cute.Tensor | None,
        v_scale: cute.Tensor | None,
        rotated: Int32 | None,
        stream: cuda.CUstream,
    ):
        beside = (mask, given_bias(bias, bias32), k_scale, v_scale, rotated)
        self.launch(FewRows(q, k, v, o, lse, partials, scale, splits, cluster, *beside), stream)
