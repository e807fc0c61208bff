"""Arguments of the backward kernels of the kinds bwd, detbwd and partbwd."""

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
    fake_rows,
    fake_vector,
    given_bias,
)

WANT_DQ, WANT_DKDV = 1, 2  # bits of `wanted`: kWantDq, kWantDkDv of src/dispatch/dispatch.h


@dataclass(frozen=True)
class BackwardArgs:
    """Arguments of a backward call, without the stream. `BackwardCall` gives the tensor forms.

    dK and dV have as many heads as K and V, or a multiple. With a multiple, a block of keys consists of several tiles,
    which share the query heads of the block's KV head. Each tile writes the gradients of its own query heads, and the
    caller sums the tiles.
    """

    q: cute.Tensor  # (B, Hq, Sq, D)
    k: cute.Tensor  # (B, Hkv, Sk, D)
    v: cute.Tensor  # (B, Hkv, Sk, Dv)
    o: cute.Tensor  # (B, Hq, Sq, Dv)
    do: cute.Tensor  # (B, Hq, Sq, Dv)
    lse: cute.Tensor  # (B, Hq, Sq) fp32, natural logarithm
    dq: cute.Tensor  # (B, Hq, Sq, D)
    dk: cute.Tensor  # (B, shares, Sk, D)
    dv: cute.Tensor  # (B, shares, Sk, Dv)
    rows: cute.Tensor  # (B, Hq, 2, padded Sq) fp32 workspace: LSE * log2(e) and delta
    scratch: cute.Tensor  # (n,) fp32 workspace of dQ, with counters
    scales: SoftmaxScale
    counter: cute.Tensor  # (1,) Int32, from which CTAs fetch tiles
    num_ctas: Int32  # SMs of the device
    wanted: Int32  # WANT_DQ and WANT_DKDV
    mask: cute.Tensor | None  # (B or 1, Hq or 1, rows, Sk) bool
    digest: cute.Tensor | None  # (B or 1, Hq or 1, n) Int32: the preprocessed mask
    bias: cute.Tensor | None  # (B, Hq, Sq, Sk), in the dtype of the query or in fp32
    drawn: DropoutArgs | None
    limits: WindowArgs | None
    dlse: cute.Tensor | None  # (B, Hq, Sq) fp32, or (B, Hq, 0) if the LSE has no gradient
    softcap: Float32 | None
    lengths: VarlenArgs | None


class BackwardCall(KernelCall):
    """ABI of the kernels of the kinds bwd, detbwd and partbwd."""

    def fake_tensors(self) -> dict[str, cute.Tensor]:
        """Return the tensor arguments of a backward call by name, with symbolic sizes."""
        tensors = super().fake_tensors()
        shares = cute.sym_int()
        sizes = {name: tensors[of].shape for name, of in {"do": "o", "dq": "q", "dk": "k", "dv": "v"}.items()}
        sizes |= {name: (B, shares, Sk, D) for name in ("dk", "dv") for B, _, Sk, D in (sizes[name],)}
        tensors |= {name: self.fake_operand(*size) for name, size in sizes.items()}
        rows = fake_rows(*tensors["lse"].shape[:2])
        B, Hq, Sq = tensors["lse"].shape
        dlse = cute.runtime.make_fake_tensor(
            Float32, (B, Hq, cute.sym_int()), tuple(cute.sym_int64() for _ in range(3)), assumed_align=4
        )
        own = {"dlse": dlse, "rows": rows, "scratch": fake_vector(Float32, 16), "counter": fake_counter()}
        return tensors | own | fake_features(self.element.dtype, self.spec.arch)

    @cute.jit
    def __call__(
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
        mask: cute.Tensor | None,
        digest: cute.Tensor | None,
        bias: cute.Tensor | None,
        bias32: cute.Tensor | None,
        seed: cute.Tensor | None,
        dropout_p: Float32 | None,
        left: Int32 | None,
        right: Int32 | None,
        bottom_right: Int32 | None,
        dlse: cute.Tensor | None,
        softcap: Float32 | None,
        cu_q: cute.Tensor | None,
        cu_k: cute.Tensor | None,
        used_k: cute.Tensor | None,
        lists: cute.Tensor | None,
        stream: cuda.CUstream,
    ):
        """Collect the ABI arguments into a `BackwardArgs` and launch."""
        tensors = (q, k, v, o, do, lse, dq, dk, dv, rows, scratch)
        scales, drawn = SoftmaxScale(scale_log2, scale), DropoutArgs.of(seed, dropout_p)
        given = (mask, digest, given_bias(bias, bias32), drawn, WindowArgs.of(left, right, bottom_right), dlse)
        lengths = VarlenArgs.of(cu_q, cu_k, used_k, lists)
        self.launch(BackwardArgs(*tensors, scales, counter, num_ctas, wanted, *given, softcap, lengths), stream)
