"""What a thread holds of a warp's 16 rows, and what kernels take: the same for mma.sync and, with four warps a
warpgroup, for wgmma (PTX ISA, fragments of m16n8k16 and of wgmma's m64nNk16).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.base_dsl import Arch
from cutlass.cutlass_dsl import BaseDSL

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
PACKS = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}  # what two packed elements are called in PTX
LOG2_E = math.log2(math.e)


def fake_operand(dtype: type[cutlass.Numeric], *shape, elementwise: bool = False) -> cute.Tensor:
    """Argument for cute.compile, four dims: strides 64-bit (tensors may pass 2^31 elements), rows 16-byte aligned;
    elementwise: any strides, any address.
    """
    if elementwise:
        return cute.runtime.make_fake_tensor(dtype, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=2)
    strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
    return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=16)


def fake_forward(dtype: type[cutlass.Numeric], elementwise: bool = False) -> tuple[cute.Tensor, ...]:
    """What every forward is called with first, sizes symbolic: q, k, v, o, LSE."""
    B, Hq, Hkv, Sq, Sk = (cute.sym_int() for _ in range(5))
    D, Dv = (cute.sym_int(divisibility=1 if elementwise else 8) for _ in range(2))
    strides = (cute.sym_int64(), cute.sym_int64(), 1)
    lse = cute.runtime.make_fake_tensor(Float32, (B, Hq, Sq), strides, assumed_align=4)
    sizes = ((B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv), (B, Hq, Sq, Dv))
    return (*(fake_operand(dtype, *size, elementwise=elementwise) for size in sizes), lse)


def rows_and_columns(acc: cute.Tensor) -> cute.Tensor:
    """(2, cols) view of the accumulator ((2, 2, N/8), 1, 1) of 16 rows on a warp: mode 0 of the fragment is the column
    pair, mode 1 the row pair.
    """
    columns = cute.size(acc) // 2
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, columns // 2)), stride=(2, (1, 4))))


def column_of(c: int) -> int:
    """Column of a thread's c-th score, relative to its first: each thread has pairs, one pair in every eight
    columns.
    """
    return (c // 2) * 8 + c % 2


@dataclass(frozen=True)
class OperandA:
    """Probabilities in 16 bits, in registers, as the left operand of the next product; packed in pairs.

    The pack is an explicit instruction: LLVM moves a plain conversion behind the loop's back edge, so that 64 fp32
    values would stay live across the next product instead of 32 packed ones, and everything spills.
    """

    pairs: cute.Tensor  # (K/4,) Int32
    fragment: cute.Tensor  # (8, 1, K/16), the same registers as the product sees them
    pack: str  # one of PACKS

    @classmethod
    def create(cls, acc: cute.Tensor, dtype) -> OperandA:
        """Room for the fp32 accumulator `acc` of K columns; both keep elements in the same order."""
        pairs = cute.make_rmem_tensor((cute.size(acc) // 2,), Int32)
        layout = cute.make_layout(((2, 2, 2), 1, cute.size(acc) // 8), stride=((1, 2, 4), 0, 8))
        fragment = cute.make_tensor(cute.recast_ptr(pairs.iterator, dtype=dtype), layout)
        return cls(pairs, fragment, PACKS[dtype])

    def take(self, acc: cute.Tensor) -> None:
        """Convert an accumulator, round to nearest even; the columns that a narrow one lacks become 0."""
        flat = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        for i in range(cute.size(acc) // 2, cute.size(self.pairs)):
            self.pairs[i] = Int32(0)
        for i in range(cute.size(acc) // 2):
            self.pairs[i] = pack_pair(self.pack, flat[2 * i], flat[2 * i + 1])


def pack_pair(kind: str, low: Float32, high: Float32) -> Int32:
    """Two numbers in 16 bits, round to nearest even; kind: one of PACKS."""
    text = f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[low, high])


def target_from(arch: Arch) -> bool:
    """Whether what is compiled for is that architecture or a later one."""
    return BaseDSL._get_dsl().get_arch_enum() >= arch
