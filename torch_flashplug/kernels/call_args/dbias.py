"""Arguments of the bias-gradient kernels (kind dbias)."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .operands import DropoutArgs, KernelCall, SoftmaxScale, fake_bias, fake_counter, fake_rows, fake_vector, given_bias


@dataclass(frozen=True)
class BiasGradientArgs:
    """Arguments of a bias-gradient call, without the stream. `BiasGradientCall` gives the tensor forms."""

    q: cute.Tensor  # (B, Hq, Sq, D)
    k: cute.Tensor  # (B, Hkv, Sk, D)
    v: cute.Tensor  # (B, Hkv, Sk, Dv)
    o: cute.Tensor  # (B, Hq, Sq, Dv)
    do: cute.Tensor  # (B, Hq, Sq, Dv)
    lse: cute.Tensor  # (B, Hq, Sq) fp32, natural logarithm
    rows: cute.Tensor  # (B, Hq, 2, padded Sq) fp32 workspace: LSE * log2(e) and delta
    scales: SoftmaxScale
    counter: cute.Tensor  # (1,) Int32, from which CTAs fetch tiles
    num_ctas: Int32  # SMs of the device
    bias: cute.Tensor | None  # (B, Hq, Sq, Sk), in the dtype of the query or in fp32
    dbias: cute.Tensor | None  # (1 to B, 1 to Hq, Sq or 1, Sk or 1), in the dtype of the bias
    drawn: DropoutArgs | None


class BiasGradientCall(KernelCall):
    """ABI of the kernels of the kind dbias."""

    def fake_tensors(self) -> dict[str, cute.Tensor]:
        """Return the tensor arguments of a bias-gradient call by name, with symbolic sizes."""
        tensors = super().fake_tensors()
        biases, gradients = (fake_bias(self.element.dtype, self.spec.arch) for _ in range(2))
        own = {"do": self.fake_operand(*tensors["o"].shape), "rows": fake_rows(*tensors["lse"].shape[:2])}
        own |= {"counter": fake_counter(), "seed": fake_vector(Int64, 8, size=1)}
        return tensors | own | biases | {f"d{name}": tensor for name, tensor in gradients.items()}

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        rows: cute.Tensor,
        scale_log2: Float32,
        scale: Float32,
        counter: cute.Tensor,
        num_ctas: Int32,
        bias: cute.Tensor | None,
        bias32: cute.Tensor | None,
        dbias: cute.Tensor | None,
        dbias32: cute.Tensor | None,
        seed: cute.Tensor | None,
        dropout_p: Float32 | None,
        stream: cuda.CUstream,
    ):
        """Collect the ABI arguments into a `BiasGradientArgs` and launch."""
        scales, drawn = SoftmaxScale(scale_log2, scale), DropoutArgs.of(seed, dropout_p)
        bias, dbias = given_bias(bias, bias32), given_bias(dbias, dbias32)
        tensors = (q, k, v, o, do, lse, rows)
        self.launch(BiasGradientArgs(*tensors, scales, counter, num_ctas, bias, dbias, drawn), stream)
