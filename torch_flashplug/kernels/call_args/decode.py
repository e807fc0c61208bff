"""Arguments of the decode kernels (kind decode)."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..primitives.fragments import LOG2_E
from .operands import (
    KernelCall,
    SoftmaxScale,
    WindowArgs,
    fake_bias,
    fake_mask,
    fake_operand,
    fake_scale,
    fake_sinks,
    fake_vector,
    given_bias,
)


@dataclass(frozen=True)
class DecodeArgs:
    """Arguments of a decode call, without the stream. `DecodeCall` gives the tensor forms."""

    q: cute.Tensor  # (B, Hq, Sq, D)
    k: cute.Tensor  # (B, Hkv, Sk, D), or pages (pages, Hkv, rows of a page, D)
    v: cute.Tensor  # (B, Hkv, Sk, Dv), or pages (pages, Hkv, rows of a page, Dv)
    o: cute.Tensor  # (B, Hq, Sq, Dv)
    lse: cute.Tensor  # (B, Hq, Sq) fp32, natural logarithm
    partials: cute.Tensor  # (n,) fp32 workspace: partial results of the splits
    scale: Float32  # softmax scale
    splits: Int32  # splits of the keys
    cluster: Int32  # CTAs of a cluster
    mask: cute.Tensor | None  # (B or 1, Hq or 1, Sq, Sk) bool
    bias: cute.Tensor | None  # (B, Hq, Sq, Sk), in the dtype of the query or in fp32
    k_scale: cute.Tensor | None  # (B, Hkv, Sk) fp32
    v_scale: cute.Tensor | None  # (B, Hkv, Sk) fp32
    rotated: Int32 | None  # 1 if keys are rotated (Hadamard); then queries are rotated, too
    limits: WindowArgs | None
    sinks: cute.Tensor | None  # (Hq,) fp32, or (0,) without sinks
    softcap: Float32 | None
    pages: cute.Tensor | None  # (B, n) Int32 block table: page numbers of each sequence
    used_k: cute.Tensor | None  # (sequences,) Int32: KV length of each sequence, or (0,) if all keys count
    split_size: Int32 | None  # keys of a split, a multiple of tile_n; 0: splits of equal size

    @property
    def scales(self) -> SoftmaxScale:
        """Softmax scale of the call, natural and times log2(e)."""
        return SoftmaxScale(self.scale * LOG2_E, self.scale)


class DecodeCall(KernelCall):
    """ABI of the kernels of the kind decode."""

    def fake_tensors(self) -> dict[str, cute.Tensor]:
        """Return the tensor arguments of a decode call by name, with symbolic sizes."""
        tensors = super().fake_tensors()
        # In a paged KV cache the number of pages and the rows of a page are arbitrary.
        many, rows = cute.sym_int(), cute.sym_int()
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
        """Collect the ABI arguments into a `DecodeArgs` and launch."""
        beside = (mask, given_bias(bias, bias32), k_scale, v_scale, rotated, WindowArgs.of(left, right, bottom_right))
        beside = (*beside, sinks, softcap, pages, used_k, split_size)
        self.launch(DecodeArgs(q, k, v, o, lse, partials, scale, splits, cluster, *beside), stream)
