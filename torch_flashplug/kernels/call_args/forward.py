"""Arguments of the forward kernels (kind fwd)."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from .operands import (
    DropoutArgs,
    KernelCall,
    SoftmaxScale,
    VarlenArgs,
    WindowArgs,
    fake_counter,
    fake_features,
    fake_sinks,
    fake_vector,
    given_bias,
)


@dataclass(frozen=True)
class ForwardArgs:
    """Arguments of a forward call, without the stream. `ForwardCall` gives the tensor forms."""

    q: cute.Tensor  # (B, Hq, Sq, D)
    k: cute.Tensor  # (B, Hkv, Sk, D)
    v: cute.Tensor  # (B, Hkv, Sk, Dv)
    o: cute.Tensor  # (B, Hq, Sq, Dv)
    lse: cute.Tensor  # (B, Hq, Sq) fp32, natural logarithm
    scales: SoftmaxScale
    counter: cute.Tensor  # (1,) Int32, from which CTAs fetch tiles
    num_ctas: Int32  # SMs of the device
    mask: cute.Tensor | None  # (B or 1, Hq or 1, rows, Sk) bool
    digest: cute.Tensor | None  # (B or 1, Hq or 1, n) Int32: the preprocessed mask
    bias: cute.Tensor | None  # (B, Hq, Sq, Sk), in the dtype of the query or in fp32
    drawn: DropoutArgs | None
    scratch8: cute.Tensor | None  # (n,) Int32 workspace: 8-bit operands
    limits: WindowArgs | None
    sinks: cute.Tensor | None  # (Hq,) fp32, or (0,) without sinks
    softcap: Float32 | None
    lengths: VarlenArgs | None


class ForwardCall(KernelCall):
    """ABI of the kernels of the kind fwd."""

    def fake_tensors(self) -> dict[str, cute.Tensor]:
        """Return the tensor arguments of a forward call by name, with symbolic sizes."""
        own = {"counter": fake_counter(), "scratch8": fake_vector(Int32, 16), "sinks": fake_sinks()}
        return super().fake_tensors() | fake_features(self.element.dtype, self.spec.arch) | own

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
        bias: cute.Tensor | None,
        bias32: cute.Tensor | None,
        seed: cute.Tensor | None,
        dropout_p: Float32 | None,
        scratch8: cute.Tensor | None,
        left: Int32 | None,
        right: Int32 | None,
        bottom_right: Int32 | None,
        sinks: cute.Tensor | None,
        softcap: Float32 | None,
        cu_q: cute.Tensor | None,
        cu_k: cute.Tensor | None,
        used_k: cute.Tensor | None,
        lists: cute.Tensor | None,
        stream: cuda.CUstream,
    ):
        """Collect the ABI arguments into a `ForwardArgs` and launch."""
        scales, drawn = SoftmaxScale(scale_log2, scale), DropoutArgs.of(seed, dropout_p)
        given = (
            mask,
            digest,
            given_bias(bias, bias32),
            drawn,
            scratch8,
            WindowArgs.of(left, right, bottom_right),
            sinks,
        )
        lengths = VarlenArgs.of(cu_q, cu_k, used_k, lists)
        self.launch(ForwardArgs(q, k, v, o, lse, scales, counter, num_ctas, *given, softcap, lengths), stream)
