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


ELEMENTS = {  # by the name of spec.DTYPES
    "bf16": Element(cutlass.BFloat16, "bf16x2"),
    "fp16": Element(cutlass.Float16, "f16x2", raised=12),
}
