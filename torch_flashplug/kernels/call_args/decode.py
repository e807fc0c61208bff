"""What decode kernels are called with."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..primitives.fragments import LOG2_E
from .operands import (
    KernelCall,
    Limits,
    Scales,
    fake_bias,
    fake_mask,
    fake_operand,
    fake_scale,
    fake_sinks,
    fake_vector,
    given_bias,
)


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
    limits: Limits | None
    sinks: cute.Tensor | None
    softcap: Float32 | None
    pages: cute.Tensor | None
    used_k: cute.Tensor | None
    split_size: Int32 | None

    @property
    def scales(self) -> Scales:
        return Scales(self.scale * LOG2_E, self.scale)


class DecodeCall(KernelCall):
    """Of the kind decode."""

    def fake_tensors(self) -> dict[str, cute.Tensor]:
        tensors = super().fake_tensors()
        many, rows = cute.sym_int(), cute.sym_int()  # pages may be as many as there are, and have any rows
        for name in ("k", "v"):
            _, heads, _, columns = tensors[name].shape
            tensors[name] = fake_operand(self.element.cached, many, heads, rows, columns)
        tensors |= {"partials": fake_vector(Float32, 16), "mask": fake_mask(), "sinks": fake_sinks()}
        tensors |= {"k_scale": fake_scale(), "v_scale": fake_scale(), "used_k": fake_vector(Int32, 4)}
        tensors |= {
            "pages": cute.runtime.make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1))
        }
        return tensors | fake_bias(self.element.dtype, self.spec.arch)

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
        left: Int32 | None,
        right: Int32 | None,
        bottom_right: Int32 | None,
        sinks: cute.Tensor | None,
        softcap: Float32 | None,
        pages: cute.Tensor | None,
        used_k: cute.Tensor | None,
        split_size: Int32 | None,
        stream: cuda.CUstream,
    ):
        beside = (mask, given_bias(bias, bias32), k_scale, v_scale, rotated, Limits.of(left, right, bottom_right))
        beside = (*beside, sinks, softcap, pages, used_k, split_size)
        self.launch(FewRows(q, k, v, o, lse, partials, scale, splits, cluster, *beside), stream)
