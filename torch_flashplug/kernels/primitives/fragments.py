"""Register fragments of a thread: accumulators and left operands of a warp's 16 rows.

The layouts are the same for mma.sync and, with four warps per warpgroup, for wgmma (PTX ISA, fragments of m16n8k16 and
of wgmma's m64nNk16).
"""

from __future__ import annotations

import os

import math
from collections.abc import Callable
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.base_dsl import Arch
from cutlass.cutlass_dsl import BaseDSL

from .dtype import EightBitFormat, Element

LOG2_E = math.log2(math.e)


FLAGS = frozenset(filter(None, os.environ.get("FLASHPLUG_EIGHT", "").split(",")))


def rows_and_columns(acc: cute.Tensor) -> cute.Tensor:
    """Return a (2, cols) view of the accumulator ((2, 2, N/8), 1, 1) of 16 rows on a warp.

    Mode 0 of the fragment is the column pair, and mode 1 is the row pair.
    """
    columns = cute.size(acc) // 2
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, columns // 2)), stride=(2, (1, 4))))


def column_of(c: int) -> int:
    """Return the column of a thread's score number c, relative to the thread's first column.

    Each thread has pairs of columns, one pair in every eight columns.
    """
    return (c // 2) * 8 + c % 2


@dataclass(frozen=True)
class OperandA:
    """Left operand of the next product: probabilities in 16 bits, in registers, packed in pairs."""

    pairs: cute.Tensor  # (K/4,) Int32
    fragment: cute.Tensor  # (8, 1, K/16), the same registers in the layout of the product
    element: Element

    @classmethod
    def create(cls, acc: cute.Tensor, element: Element) -> OperandA:
        """Create registers for the fp32 accumulator `acc` of K columns. Both keep elements in the same order."""
        pairs = cute.make_rmem_tensor((cute.size(acc) // 2,), Int32)
        layout = cute.make_layout(((2, 2, 2), 1, cute.size(acc) // 8), stride=((1, 2, 4), 0, 8))
        fragment = cute.make_tensor(cute.recast_ptr(pairs.iterator, dtype=element.dtype), layout)
        return cls(pairs, fragment, element)

    def convert(self, acc: cute.Tensor, transform: Callable | None = None) -> None:
        """Convert an accumulator, with rounding to nearest even. Missing columns of a narrow accumulator become 0.

        Args:
            acc: the accumulator.
            transform: function applied to each value, (r, c, value) -> value, with r and c as in `rows_and_columns`.
        """
        flat = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        for i in range(cute.size(acc) // 2, cute.size(self.pairs)):
            self.pairs[i] = Int32(0)
        for i in range(cute.size(acc) // 2):
            low, high = flat[2 * i], flat[2 * i + 1]
            if transform is not None:
                r, c = i % 2, i // 2 * 2  # the column pair is mode 0 of a fragment, the row pair mode 1
                low, high = transform(r, c, low), transform(r, c + 1, high)
            self.pairs[i] = self.element.pack_pair(low, high)

    def copy_nonnegative(self, signed: OperandA) -> None:
        """Copy the nonnegative elements of `signed`, and replace negative elements by 0.

        `signed` may be the same operand.
        """
        for i in range(cute.size(self.pairs)):
            self.pairs[i] = self.element.kept_pair(signed.pairs[i])


@dataclass(frozen=True)
class QuantizedOperandA:
    """Left operand of the next product: probabilities in 8 bits, in registers, packed in fours.

    Thread t of four owns scores of keys 2t, 2t + 1, 2t + 8 and 2t + 9 of sixteen, while the product expects four
    consecutive keys. Therefore V has its keys in recipes.KEY_ORDER.
    """

    quads: cute.Tensor  # (K/8,) Int32
    fragment: cute.Tensor  # (16, 1, K/32), the same registers in the layout of the product
    element: EightBitFormat

    @classmethod
    def create(cls, acc: cute.Tensor, element: EightBitFormat) -> QuantizedOperandA:
        """Create registers for an accumulator of K columns."""
        quads = cute.make_rmem_tensor((cute.size(acc) // 4,), Int32)
        layout = cute.make_layout(((4, 2, 2), 1, cute.size(acc) // 16), stride=((1, 4, 8), 0, 16))
        return cls(quads, cute.make_tensor(cute.recast_ptr(quads.iterator, dtype=element.dtype), layout), element)

    def convert(self, acc: cute.Tensor, transform: Callable | None = None) -> None:
        """Convert an accumulator, with rounding to nearest even. Missing columns of a narrow accumulator become 0.

        Of sixteen columns a thread has eight scores: a pair of each row from the first eight columns, then a pair of
        each row from the last eight columns.

        Args:
            acc: the accumulator.
            transform: function applied to each value, (r, c, value) -> value, with r and c as in `rows_and_columns`.
        """
        for i in range(cute.size(acc) // 4, cute.size(self.quads)):
            self.quads[i] = Int32(0)
        for i, packed in enumerate(self.packed(acc, transform)):
            self.quads[i] = packed

    def packed(self, acc: cute.Tensor, transform: Callable | None = None) -> list[Int32]:
        """Return the converted accumulator, without a change of the operand."""
        values, quads = rows_and_columns(acc), []
        for i in range(cute.size(acc) // 4):
            r, first = i % 2, i // 4 * 8 + i // 2 % 2 * 4
            four = [values[r, first + c] for c in range(4)]
            if transform is not None:
                four = [transform(r, first + c, value) for c, value in enumerate(four)]
            if "nocvt" in FLAGS:
                quads.append(four[0].bitcast(Int32))
                continue
            quads.append(self.element.pack_four(four))
        return quads


def left_operand(acc: cute.Tensor, element: Element | EightBitFormat) -> OperandA | QuantizedOperandA:
    """Return registers for P with the columns of an accumulator."""
    return (QuantizedOperandA if element.bytes == 1 else OperandA).create(acc, element)


def quad_reduce(value: Float32, combine: Callable) -> Float32:
    """Combine the values of the four lanes of a quad, which share two rows. All four lanes get the result."""
    for distance in (1, 2):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=distance))
    return value


def zero_of(step: Int32) -> Int32:
    """Return zero, computed from a nonnegative number so that the compiler does not know the value.

    Addresses with this zero added are computed in every step of a loop, instead of occupying registers.
    """
    return cute.arch.inline_ptx("shr.u32 {$w0}, {$r0}, 31;", write_only_types=[Int32], read_only_args=[step])


def single_bit(i: int) -> Int32:
    """Return an Int32 with only bit i set, for i from 0 to 31."""
    return Int32((1 << i) - (1 << 32) * (i == 31))


def target_from(arch: Arch) -> bool:
    """Return whether the compilation target is the given architecture or a later architecture."""
    return BaseDSL._get_dsl().get_arch_enum() >= arch
