"""What kernels of every kind are called with. Arguments come in the order of torch_flashplug/registry/kernel_args.py,
by which src/launch/kernel_args.cpp packs them; the stream, which src/launch/launch.cpp gives, is last.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from ...registry import features
from ...registry.kernel_args import OF_KIND
from ...registry.kernel_spec import KernelSpec
from ..primitives.dtype import Element

NUMBERS = {"fp32": Float32, "int32": Int32}


@dataclass(frozen=True)
class Scales:
    """The softmax scale of a call."""

    log2: Float32  # times log2(e)
    natural: Float32


@dataclass(frozen=True)
class Drawn:
    """What is dropped of a call."""

    seed: cute.Tensor  # (1,) Int64
    p: Float32  # probability with which a score is dropped

    @staticmethod
    def of(seed: cute.Tensor | None, p: Float32 | None) -> Drawn | None:
        return None if seed is None else Drawn(seed, p)


@dataclass(frozen=True)
class Limits:
    """Which keys a query sees (window.Window)."""

    left: Int32
    right: Int32
    bottom_right: Int32

    @staticmethod
    def of(left: Int32 | None, right: Int32 | None, bottom_right: Int32 | None) -> Limits | None:
        return None if left is None else Limits(left, right, bottom_right)


@dataclass(frozen=True)
class Lengths:
    """Sequences on end (varlen.py)."""

    cu_q: cute.Tensor
    cu_k: cute.Tensor
    used_k: cute.Tensor
    lists: cute.Tensor

    @staticmethod
    def of(
        cu_q: cute.Tensor | None, cu_k: cute.Tensor | None, used_k: cute.Tensor | None, lists: cute.Tensor | None
    ) -> Lengths | None:
        return None if cu_q is None else Lengths(cu_q, cu_k, used_k, lists)


def given_bias(bias: cute.Tensor | None, bias32: cute.Tensor | None) -> cute.Tensor | None:
    """The one of them that the kernel takes, if any."""
    return bias32 if bias is None else bias


def fake_operand(dtype: type[cutlass.Numeric], *shape, elementwise: bool = False) -> cute.Tensor:
    """Argument for cute.compile, four dims: strides 64-bit (tensors may pass 2^31 elements), rows 16-byte aligned;
    elementwise: any strides, any address.
    """
    if elementwise:
        return cute.runtime.make_fake_tensor(dtype, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=2)
    strides = (*(cute.sym_int64(divisibility=128 // dtype.width) for _ in range(3)), 1)
    return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=16)


def fake_vector(dtype: type[cutlass.Numeric], align: int, size: int | None = None) -> cute.Tensor:
    """Numbers on end, as many as come."""
    return cute.runtime.make_fake_tensor(dtype, (cute.sym_int() if size is None else size,), (1,), assumed_align=align)


def fake_counter() -> cute.Tensor:
    """From which CTAs draw their tiles."""
    return fake_vector(Int32, 4, size=1)


def fake_rows(B: cute.SymInt, Hq: cute.SymInt) -> cute.Tensor:
    """Of a backward: LSE and delta of rows in scratch."""
    strides = (*(cute.sym_int64(divisibility=4) for _ in range(3)), 1)
    return cute.runtime.make_fake_tensor(Float32, (B, Hq, 2, cute.sym_int()), strides, assumed_align=16)


def fake_mask() -> cute.Tensor:
    """Bytes of any strides at any address."""
    sizes, strides = (tuple(make() for _ in range(4)) for make in (cute.sym_int, cute.sym_int64))
    return cute.runtime.make_fake_tensor(Uint8, sizes, strides, assumed_align=1)


def fake_digest() -> cute.Tensor:
    """Three dims on end."""
    strides = (cute.sym_int64(), cute.sym_int64(), 1)
    return cute.runtime.make_fake_tensor(Int32, tuple(cute.sym_int() for _ in strides), strides, assumed_align=16)


def fake_bias(dtype: type[cutlass.Numeric], arch: int) -> dict[str, cute.Tensor]:
    """Rows of any stride at any address; for kernels of sm_80 as cp.async reads them."""

    def of(number: type[cutlass.Numeric]) -> cute.Tensor:
        element, unit = number.width // 8, 16
        divisibility, align = (unit // element, unit) if arch < 90 else (1, element)
        sizes = tuple(cute.sym_int() for _ in range(4))
        strides = (*(cute.sym_int64(divisibility=divisibility) for _ in range(3)), 1)
        return cute.runtime.make_fake_tensor(number, sizes, strides, assumed_align=align)

    return {"bias": of(dtype), "bias32": of(Float32)}


def fake_scale() -> cute.Tensor:
    """Of keys (B, Hkv, Sk), at any strides."""
    sizes, strides = (tuple(make() for _ in range(3)) for make in (cute.sym_int, cute.sym_int64))
    return cute.runtime.make_fake_tensor(Float32, sizes, strides, assumed_align=4)


def fake_sinks() -> cute.Tensor:
    """Of query heads, at any stride."""
    return cute.runtime.make_fake_tensor(Float32, (cute.sym_int(),), (cute.sym_int64(),), assumed_align=4)


def fake_features(dtype: type[cutlass.Numeric], arch: int) -> dict[str, cute.Tensor]:
    """What features bring to kernels of long calls. dtype: of the query."""
    sequences = cute.sym_int()
    lengths = {name: fake_vector(Int32, 4, size=sequences) for name in ("cu_q", "cu_k")}
    lengths |= {"used_k": fake_vector(Int32, 4), "lists": fake_vector(Int32, 16)}
    of_masks = {"mask": fake_mask(), "digest": fake_digest()} | fake_bias(dtype, arch)
    return of_masks | {"seed": fake_vector(Int64, 8, size=1)} | lengths


class KernelCall:
    """What cute.compile calls. A kind's class has `__call__`, whose parameters the DSL wants spelled out; the launch is
    left to `launch` of the class that inherits from that one.
    """

    spec: KernelSpec
    element: Element
    elementwise = False  # tensors of any strides at any address

    def fake_tensors(self) -> dict[str, cute.Tensor]:
        """Tensor arguments by name, sizes symbolic; here those of every kind."""
        B, Hq, Hkv, Sq, Sk = (cute.sym_int() for _ in range(5))
        D, Dv = (cute.sym_int(divisibility=1 if self.elementwise else 8) for _ in range(2))
        sizes = {"q": (B, Hq, Sq, D), "k": (B, Hkv, Sk, D), "v": (B, Hkv, Sk, Dv), "o": (B, Hq, Sq, Dv)}
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        lse = cute.runtime.make_fake_tensor(Float32, (B, Hq, Sq), strides, assumed_align=4)
        return {name: self.fake_operand(*size) for name, size in sizes.items()} | {"lse": lse}

    def fake_operand(self, *shape) -> cute.Tensor:
        return fake_operand(self.element.dtype, *shape, elementwise=self.elementwise)

    def fake_arguments(self) -> tuple:
        """Arguments for cute.compile; None in the place of optional ones that no feature of the kernel brings."""
        tensors = self.fake_tensors()
        brought = {name for feature in features.of(self.spec.features) for name in feature.arguments}
        taken = (
            None if one.optional and one.name not in brought
            else NUMBERS[one.dtype](1) if one.scalar
            else tensors[one.name]
            for one in OF_KIND[self.spec.kind]
        )  # fmt: skip
        return (*taken, cute.runtime.make_fake_stream())
