"""Element type of a kernel, common to all operands: the type in memory, and the conversion from fp32.

No further module under kernels/ names the type. Products and shared memory rely on a size of 16 bits.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


class Element:
    """16-bit element type of Q, K, V, P, O and the gradients. Products accumulate in fp32.

    The class is no dataclass, because the DSL inspects dataclasses and accepts no types as fields.
    """

    sums = Float32  # accumulator type of products

    def __init__(self, dtype: type[cutlass.Numeric], pack: str, p_scale_log2: int = 0):
        """Initialize the element type.

        fp16 has no small numbers: P of a row with many keys would lose bits, or vanish. bf16 has the exponent range of
        fp32.

        Args:
            dtype: 16-bit type.
            pack: PTX type of two packed elements.
            p_scale_log2: power of two by which P is larger as an operand of sums over many rows.
        """
        assert dtype.width == 16, f"{dtype}: kernels take operands of 16 bits"
        self.dtype, self.pack, self.p_scale_log2 = dtype, pack, p_scale_log2

    @property
    def bytes(self) -> int:
        return self.dtype.width // 8

    @property
    def scores(self) -> Element | EightBitFormat:
        """Element type of Q and K in the product."""
        return self

    @property
    def values(self) -> Element | EightBitFormat:
        """Element type of P and V in the product."""
        return self

    @property
    def cached(self) -> type[cutlass.Numeric]:
        """Type of K and V in memory."""
        return self.dtype

    def pack_pair(self, low: Float32, high: Float32) -> Int32:
        """Return two numbers as packed elements, rounded to nearest even.

        The instruction is explicit, because LLVM moves a plain conversion behind the back edge of a loop. Then 64 fp32
        values would stay live across the next product instead of 32 packed values, and everything spills.
        """
        text = f"cvt.rn.{self.pack}.f32 {{$w0}}, {{$r1}}, {{$r0}};"
        return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[low, high])

    def kept_pair(self, pair: Int32) -> Int32:
        """Return two packed elements with negative elements replaced by 0. NaN stays NaN."""
        text = f"{{ .reg .b32 zero; mov.b32 zero, 0; max.NaN.{self.pack} {{$w0}}, {{$r0}}, zero; }}"
        return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[pair])


class EightBitFormat:
    """8-bit element type of Q and K, or of P and V, in a recipe (quant_recipes.py)."""

    bytes = 1

    def __init__(self, dtype: type[cutlass.Numeric], sums: type[cutlass.Numeric], packing: str):
        """Initialize the element type.

        Args:
            dtype: 8-bit type.
            sums: accumulator type of products.
            packing: PTX that converts four fp32 numbers to {$w0}, the first number in the lowest byte.
        """
        self.dtype, self.sums, self.packing = dtype, sums, packing

    def pack_four(self, four: list[Float32]) -> Int32:
        """Return four numbers as packed elements, rounded to nearest even.

        Numbers beyond the range saturate, and NaN stays NaN in e4m3.
        """
        return cute.arch.inline_ptx(self.packing, write_only_types=[Int32], read_only_args=four)


class QuantizedElement(Element):
    """Element type with operands and O in 16 bits, and 8-bit products of scores and perhaps of values."""

    def __init__(self, operand_element: Element, scores: EightBitFormat, values: EightBitFormat | None):
        super().__init__(operand_element.dtype, operand_element.pack, operand_element.p_scale_log2)
        self.eight, self.of_values = scores, values or operand_element

    @property
    def scores(self) -> EightBitFormat:
        return self.eight

    @property
    def values(self) -> Element | EightBitFormat:
        return self.of_values


EIGHT_BITS = {
    "int8": EightBitFormat(
        cutlass.Int8,
        Int32,
        "{ .reg .b32 n<4>; .reg .b32 high; cvt.rni.s32.f32 n0, {$r0}; cvt.rni.s32.f32 n1, {$r1}; "
        "cvt.rni.s32.f32 n2, {$r2}; cvt.rni.s32.f32 n3, {$r3}; cvt.pack.sat.s8.s32.b32 high, n3, n2, 0; "
        "cvt.pack.sat.s8.s32.b32 {$w0}, n1, n0, high; }",
    ),
    "e4m3": EightBitFormat(
        cutlass.Float8E4M3FN,
        Float32,
        "{ .reg .b16 low; .reg .b16 high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, { low, high }; }",
    ),
}
ELEMENTS = {  # by the names in KERNEL_DTYPES of registry/dtypes.py
    "bf16": Element(cutlass.BFloat16, "bf16x2"),
    "fp16": Element(cutlass.Float16, "f16x2", p_scale_log2=12),
}
