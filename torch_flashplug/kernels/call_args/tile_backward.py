"""What a backward of sequences that fit into one tile is called with."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from .operands import KernelCall, Scales, fake_bias, given_bias


@dataclass(frozen=True)
class TileGradients:
    """One call's arguments, but for the stream; tensors as TileBackwardCall says."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    lse: cute.Tensor
    dq: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    scales: Scales
    ranges: Int32  # of the batch
    bias: cute.Tensor | None  # of either dtype
    dbias: cute.Tensor | None  # of the same; (ranges or B, Hq, Sq, Sk), or of no batch: not wanted


class TileBackwardCall(KernelCall):
    """The arguments of kernels of the kind tilebwd."""

    def fake_tensors(self) -> dict[str, cute.Tensor]:
        tensors = super().fake_tensors()
        like = {"do": "o", "dq": "q", "dk": "k", "dv": "v"}
        biases, gradients = (fake_bias(self.element.dtype, self.spec.arch) for _ in range(2))
        own = {name: self.fake_operand(*tensors[of].shape) for name, of in like.items()}
        del tensors["o"]  # delta comes from P and dP
        return tensors | own | biases | {f"d{name}": tensor for name, tensor in gradients.items()}

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale_log2: Float32,
        scale: Float32,
        ranges: Int32,
        bias: cute.Tensor | None,
        bias32: cute.Tensor | None,
        dbias: cute.Tensor | None,
        dbias32: cute.Tensor | None,
        stream: cuda.CUstream,
    ):
        biases = given_bias(bias, bias32), given_bias(dbias, dbias32)
        tensors = (q, k, v, do, lse, dq, dk, dv)
        self.launch(TileGradients(*tensors, Scales(scale_log2, scale), ranges, *biases), stream)
