"""Arguments of the single-tile backward kernels (kind tilebwd)."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from .operands import KernelCall, SoftmaxScale, fake_bias, given_bias


@dataclass(frozen=True)
class TileBackwardArgs:
    """Arguments of a single-tile backward call, without the stream. `TileBackwardCall` gives the tensor forms."""

    q: cute.Tensor  # (B, H, Sq, D)
    k: cute.Tensor  # (B, H, Sk, D)
    v: cute.Tensor  # (B, H, Sk, D)
    do: cute.Tensor  # (B, H, Sq, D)
    lse: cute.Tensor  # (B, H, Sq) fp32, natural logarithm
    dq: cute.Tensor  # (B, H, Sq, D)
    dk: cute.Tensor  # (B, H, Sk, D)
    dv: cute.Tensor  # (B, H, Sk, D)
    scales: SoftmaxScale
    ranges: Int32  # ranges of the batch, each with a CTA per head
    bias: cute.Tensor | None  # (B, H, Sq, Sk), in the dtype of the query or in fp32
    # (ranges or B, H, Sq, Sk), in the dtype of the bias; an empty batch dimension: no gradient is wanted.
    dbias: cute.Tensor | None


class TileBackwardCall(KernelCall):
    """ABI of the kernels of the kind tilebwd."""

    def fake_tensors(self) -> dict[str, cute.Tensor]:
        """Return the tensor arguments of a single-tile backward call by name, with symbolic sizes."""
        tensors = super().fake_tensors()
        like = {"do": "o", "dq": "q", "dk": "k", "dv": "v"}
        biases, gradients = (fake_bias(self.element.dtype, self.spec.arch) for _ in range(2))
        own = {name: self.fake_operand(*tensors[of].shape) for name, of in like.items()}
        del tensors["o"]  # delta is computed from P and dP, so O is not an argument
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
        """Collect the ABI arguments into a `TileBackwardArgs` and launch."""
        biases = given_bias(bias, bias32), given_bias(dbias, dbias32)
        tensors = (q, k, v, do, lse, dq, dk, dv)
        self.launch(TileBackwardArgs(*tensors, SoftmaxScale(scale_log2, scale), ranges, *biases), stream)
