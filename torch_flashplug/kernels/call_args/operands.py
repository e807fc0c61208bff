"""Arguments shared by all kinds of kernels, and the classes called by cute.compile.

Arguments have the order of torch_flashplug/registry/kernel_args.py, in which src/launch/kernel_args.cpp packs them. The
stream is last and is passed by src/launch/launch.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from ...registry import features
from ...registry.kernel_args import ARGUMENTS_BY_KIND
from ...registry.kernel_spec import KernelSpec
from ..primitives.dtype import Element

NUMBERS = {"fp32": Float32, "int32": Int32}


@dataclass(frozen=True)
class SoftmaxScale:
    """Softmax scale of a call."""

    log2: Float32  # scale * log2(e)
    natural: Float32  # scale


@dataclass(frozen=True)
class DropoutArgs:
    """Dropout arguments of a call."""

    seed: cute.Tensor  # (1,) Int64
    p: Float32  # probability of dropping a score

    @staticmethod
    def of(seed: cute.Tensor | None, p: Float32 | None) -> DropoutArgs | None:
        """Return the dropout arguments, or None for a kernel without dropout."""
        return None if seed is None else DropoutArgs(seed, p)


@dataclass(frozen=True)
class WindowArgs:
    """Sliding window of a call (window.Window)."""

    left: Int32  # visible keys before the query's own key
    right: Int32  # visible keys behind the query's own key
    bottom_right: Int32  # 1 if windows are aligned to the last query and key, 0 if to the first

    @staticmethod
    def of(left: Int32 | None, right: Int32 | None, bottom_right: Int32 | None) -> WindowArgs | None:
        """Return the window arguments, or None for a kernel without a window."""
        return None if left is None else WindowArgs(left, right, bottom_right)


@dataclass(frozen=True)
class VarlenArgs:
    """Packed sequences of a call (varlen.py)."""

    cu_q: cute.Tensor  # (sequences + 1,) Int32: where the rows of each sequence begin and end
    cu_k: cute.Tensor  # (sequences + 1,) Int32: where the keys of each sequence begin and end
    used_k: cute.Tensor  # (sequences,) Int32: KV length of each sequence, or (0,) if all keys count
    lists: cute.Tensor  # (n,) Int32 workspace: lists of tiles

    @staticmethod
    def of(
        cu_q: cute.Tensor | None, cu_k: cute.Tensor | None, used_k: cute.Tensor | None, lists: cute.Tensor | None
    ) -> VarlenArgs | None:
        """Return the packed-sequence arguments, or None for a kernel without packed sequences."""
        return None if cu_q is None else VarlenArgs(cu_q, cu_k, used_k, lists)


def given_bias(bias: cute.Tensor | None, bias32: cute.Tensor | None) -> cute.Tensor | None:
    """Return the bias argument in the dtype that the kernel takes, or None for a kernel without a bias."""
    return bias32 if bias is None else bias


def fake_operand(dtype: type[cutlass.Numeric], *shape, elementwise: bool = False) -> cute.Tensor:
    """Return a four-dimensional tensor argument for cute.compile.

    Strides are 64-bit, because tensors may exceed 2^31 elements. Rows are 16-byte aligned. With `elementwise`, any
    strides and any address are allowed.
    """
    if elementwise:
        return cute.runtime.make_fake_tensor(dtype, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=2)
    strides = (*(cute.sym_int64(divisibility=128 // dtype.width) for _ in range(3)), 1)
    return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=16)


def fake_vector(dtype: type[cutlass.Numeric], align: int, size: int | None = None) -> cute.Tensor:
    """Return a contiguous one-dimensional tensor argument; its size is symbolic unless `size` is given."""
    return cute.runtime.make_fake_tensor(dtype, (cute.sym_int() if size is None else size,), (1,), assumed_align=align)


def fake_counter() -> cute.Tensor:
    """Return the counter argument, from which CTAs fetch tiles."""
    return fake_vector(Int32, 4, size=1)


def fake_rows(B: cute.SymInt, Hq: cute.SymInt) -> cute.Tensor:
    """Return the row statistics of a backward: LSE and delta in the workspace, (B, Hq, 2, rows)."""
    strides = (*(cute.sym_int64(divisibility=4) for _ in range(3)), 1)
    return cute.runtime.make_fake_tensor(Float32, (B, Hq, 2, cute.sym_int()), strides, assumed_align=16)


def fake_mask() -> cute.Tensor:
    """Return a bool mask argument: bytes of any strides at any address."""
    sizes, strides = (tuple(make() for _ in range(4)) for make in (cute.sym_int, cute.sym_int64))
    return cute.runtime.make_fake_tensor(Uint8, sizes, strides, assumed_align=1)


def fake_digest() -> cute.Tensor:
    """Return the argument of a preprocessed mask: three dimensions, contiguous in the last."""
    strides = (cute.sym_int64(), cute.sym_int64(), 1)
    return cute.runtime.make_fake_tensor(Int32, tuple(cute.sym_int() for _ in strides), strides, assumed_align=16)


def fake_bias(dtype: type[cutlass.Numeric], arch: int) -> dict[str, cute.Tensor]:
    """Return the bias arguments of both dtypes: rows of any stride at any address.

    Kernels of sm_80 read the bias with cp.async, so their rows are 16-byte aligned.
    """

    def of(number: type[cutlass.Numeric]) -> cute.Tensor:
        element, unit = number.width // 8, 16
        divisibility, align = (unit // element, unit) if arch < 90 else (1, element)
        sizes = tuple(cute.sym_int() for _ in range(4))
        strides = (*(cute.sym_int64(divisibility=divisibility) for _ in range(3)), 1)
        return cute.runtime.make_fake_tensor(number, sizes, strides, assumed_align=align)

    return {"bias": of(dtype), "bias32": of(Float32)}


def fake_scale() -> cute.Tensor:
    """Return the argument of per-key scales, (B, Hkv, Sk), with any strides."""
    sizes, strides = (tuple(make() for _ in range(3)) for make in (cute.sym_int, cute.sym_int64))
    return cute.runtime.make_fake_tensor(Float32, sizes, strides, assumed_align=4)


def fake_sinks() -> cute.Tensor:
    """Return the argument of the sink logits, (Hq,), with any stride."""
    return cute.runtime.make_fake_tensor(Float32, (cute.sym_int(),), (cute.sym_int64(),), assumed_align=4)


def fake_features(dtype: type[cutlass.Numeric], arch: int) -> dict[str, cute.Tensor]:
    """Return the tensor arguments that features add to the kernels of long calls, by name.

    Args:
        dtype: dtype of the query.
    """
    sequences = cute.sym_int()
    lengths = {name: fake_vector(Int32, 4, size=sequences) for name in ("cu_q", "cu_k")}
    lengths |= {"used_k": fake_vector(Int32, 4), "lists": fake_vector(Int32, 16)}
    of_masks = {"mask": fake_mask(), "digest": fake_digest()} | fake_bias(dtype, arch)
    return of_masks | {"seed": fake_vector(Int64, 8, size=1)} | lengths


class KernelCall:
    """Base class of the kernel objects compiled by cute.compile.

    The class of a kind has `__call__`, whose parameters the DSL requires to be spelled out. `__call__` ends in
    `launch`, a method of the kernel class that inherits from the class of the kind.
    """

    spec: KernelSpec
    element: Element
    elementwise = False  # True if tensors may have any strides and any address

    def fake_tensors(self) -> dict[str, cute.Tensor]:
        """Return the tensor arguments of every kind by name, with symbolic sizes."""
        B, Hq, Hkv, Sq, Sk = (cute.sym_int() for _ in range(5))
        D, Dv = (cute.sym_int(divisibility=1 if self.elementwise else 8) for _ in range(2))
        sizes = {"q": (B, Hq, Sq, D), "k": (B, Hkv, Sk, D), "v": (B, Hkv, Sk, Dv), "o": (B, Hq, Sq, Dv)}
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        lse = cute.runtime.make_fake_tensor(Float32, (B, Hq, Sq), strides, assumed_align=4)
        return {name: self.fake_operand(*size) for name, size in sizes.items()} | {"lse": lse}

    def fake_operand(self, *shape) -> cute.Tensor:
        """Return a tensor argument of the kernel's element type."""
        return fake_operand(self.element.dtype, *shape, elementwise=self.elementwise)

    def fake_arguments(self) -> tuple:
        """Return the arguments for cute.compile.

        An optional argument is None if no feature of the kernel uses the argument.
        """
        tensors = self.fake_tensors()
        brought = {name for feature in features.select(self.spec.features) for name in feature.arguments}
        taken = (
            None if one.is_optional and one.name not in brought
            else NUMBERS[one.dtype](1) if one.is_scalar
            else tensors[one.name]
            for one in ARGUMENTS_BY_KIND[self.spec.kind]
        )  # fmt: skip
        return (*taken, cute.runtime.make_fake_stream())
