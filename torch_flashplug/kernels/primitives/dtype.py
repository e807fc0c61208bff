"""The element type of a kernel, one for all operands: what they are in memory, and how fp32 becomes that. Nothing else
under kernels/ says which it is; that it has 16 bits, products and shared memory rely on.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


class Element:
    """16 bits of Q, K, V, P, O and their gradients; products add up in fp32. No dataclass: the DSL looks into those,
    and takes no types in them.
    """

    sums = Float32  # what products add up in

    def __init__(self, dtype: type[cutlass.Numeric], pack: str, raised: int = 0):
        """pack: what two packed elements are called in PTX; raised: exponents by which P is larger on its way to sums
        over many rows. fp16 has no small numbers: P of a row with many keys would lose bits, or vanish; bf16 has all
        that fp32 has.
        """
        assert dtype.width == 16, f"{dtype}: kernels take operands of 16 bits"
        self.dtype, self.pack, self.raised = dtype, pack, raised

    @property
    def bytes(self) -> int:
        return self.dtype.width // 8

    @property
    def scores(self) -> Element | EightBits:
        """What Q and K are multiplied in."""
        return self

    @property
    def values(self) -> Element | EightBits:
        """What P and V are."""
        return self

    @property
    def cached(self) -> type[cutlass.Numeric]:
        """What K and V are in memory."""
        return self.dtype

    def pack_pair(self, low: Float32, high: Float32) -> Int32:
        """Two numbers as elements, round to nearest even.

        An explicit instruction: LLVM moves a plain conversion behind a loop's back edge, so that 64 fp32 values would
        stay live across the next product instead of 32 packed ones, and everything spills.
        """
        text = f"cvt.rn.{self.pack}.f32 {{$w0}}, {{$r1}}, {{$r0}};"
        return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[low, high])

    def kept_pair(self, pair: Int32) -> Int32:
        """0 for those of two packed that are negative; NaN stays."""
        text = f"{{ .reg .b32 zero; mov.b32 zero, 0; max.NaN.{self.pack} {{$w0}}, {{$r0}}, zero; }}"
        return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[pair])


class EightBits:
    """Q and K, or P and V, of a recipe (quant_recipes.py)."""

    bytes = 1

    def __init__(self, dtype: type[cutlass.Numeric], sums: type[cutlass.Numeric], packing: str):
        """sums: what products add up in; packing: the PTX that makes {$w0} of four fp32 numbers, the first lowest."""
        self.dtype, self.sums, self.packing = dtype, sums, packing

    def pack_four(self, four: list[Float32]) -> Int32:
        """Round to nearest even; beyond the ends of a format lies its end, and NaN of e4m3 stays."""
        return cute.arch.inline_ptx(self.packing, write_only_types=[Int32], read_only_args=four)


class QuantisedElement(Element):
    """Operands and O in 16 bits, products in 8: of scores, perhaps of values."""

    def __init__(self, whole: Element, scores: EightBits, values: EightBits | None):
        super().__init__(whole.dtype, whole.pack, whole.raised)
        self.eight, self.of_values = scores, values or whole

    @property
    def scores(self) -> EightBits:
        return self.eight

    @property
    def values(self) -> Element | EightBits:
        return self.of_values


EIGHT_BITS = {
    "int8": EightBits(
        cutlass.Int8,
        Int32,
        "{ .reg .b32 n<4>; .reg .b32 high; cvt.rni.s32.f32 n0, {$r0}; cvt.rni.s32.f32 n1, {$r1}; "
        "cvt.rni.s32.f32 n2, {$r2}; cvt.rni.s32.f32 n3, {$r3}; cvt.pack.sat.s8.s32.b32 high, n3, n2, 0; "
        "cvt.pack.sat.s8.s32.b32 {$w0}, n1, n0, high; }",
    ),
    "e4m3": EightBits(
        cutlass.Float8E4M3FN,
        Float32,
        "{ .reg .b16 low; .reg .b16 high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, { low, high }; }",
    ),
}
ELEMENTS = {  # by the name of spec.DTYPES
    "bf16": Element(cutlass.BFloat16, "bf16x2"),
    "fp16": Element(cutlass.Float16, "f16x2", raised=12),
}
