"""What a bias's gradient is called with."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .operands import Drawn, KernelCall, Scales, fake_bias, fake_counter, fake_rows, fake_vector, given_bias


@dataclass(frozen=True)
class BiasGradient:
    """One call's arguments, but for the stream; tensors as BiasGradientCall says."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    do: cute.Tensor
    lse: cute.Tensor
    rows: cute.Tensor
    scales: Scales
    counter: cute.Tensor
    num_ctas: Int32
    bias: cute.Tensor | None  # of either dtype
    dbias: cute.Tensor | None  # of the same
    drawn: Drawn | None


class BiasGradientCall(KernelCall):
    """Of the kind dbias."""

    def fake_tensors(self) -> dict[str, cute.Tensor]:
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
        scales, drawn = Scales(scale_log2, scale), Drawn.of(seed, dropout_p)
        bias, dbias = given_bias(bias, bias32), given_bias(dbias, dbias32)
        tensors = (q, k, v, o, do, lse, rows)
        self.launch(BiasGradient(*tensors, scales, counter, num_ctas, bias, dbias, drawn), stream)
