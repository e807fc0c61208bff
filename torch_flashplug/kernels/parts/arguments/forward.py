"""What forward kernels are called with."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from .operands import KernelCall, Scales, fake_counter, fake_digest, fake_mask


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
    mask: cute.Tensor | None
    digest: cute.Tensor | None


class ForwardCall(KernelCall):
    """Of the kind fwd."""

    def fake_tensors(self) -> dict[str, cute.Tensor]:
        masked = {"mask": fake_mask(), "digest": fake_digest()}
        return super().fake_tensors() | masked | {"counter": fake_counter()}

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
        mask: cute.Tensor | None,
        digest: cute.Tensor | None,
        stream: cuda.CUstream,
    ):
        self.launch(Call(q, k, v, o, lse, Scales(scale_log2, scale), counter, num_ctas, mask, digest), stream)
