"""A bias of few query rows, which kernels of decode read where it lies: rows are too few for boxes of 64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ...spec import SLAB, WARP
from .fragments import column_of
from .scores.bias import add, natural
from .scores.chain import Chain, Place, Stage
from .seams import Seams
from .walk import Band, BoundBand, Sizes, Split, Walk

if TYPE_CHECKING:
    from .arguments.operands import Scales

PAIR = 2  # neighbouring keys of a thread


class BiasOfFew(Seams):
    def walk(self, call: object) -> Walk:
        return EveryBlock()

    def chain(self, call: object) -> Chain:
        """First of all, as in parts.bias."""
        return Chain((Lines(call.bias, call.scale), *super().chain(call).stages))


@dataclass(frozen=True)
class EveryBlock(Band):
    """All of them, and stages are asked in each."""

    def at(self, sizes: Sizes, tile_m: int, tile_n: int) -> BoundEveryBlock:
        return BoundEveryBlock(self.causal, sizes, tile_m, tile_n)


class BoundEveryBlock(BoundBand):
    hides = True

    def masks(self, keys: Split, j: Int32) -> Boolean:
        return Boolean(True)


@dataclass(frozen=True)
class Lines(Stage):
    """Adds to a thread's two packed rows what the bias has for them."""

    bias: cute.Tensor  # (B, Hq, Sq, Sk), rows on units of 16 bytes
    scale: Float32  # of the scores
    now: cute.Tensor | None = None  # (2, columns of a thread) registers
    place: Place | None = None
    starts: tuple[Int64, Int64] | None = None  # of both rows

    def scales(self, scales: Scales) -> Scales:
        return natural(scales)

    def hold(self, columns: int) -> Stage:
        rows_apart = cute.make_layout((2, columns // 4), stride=(columns // 4, 1))
        return replace(self, now=cute.make_rmem_tensor(rows_apart, self.bias.element_type))

    def at(self, place: Place) -> Stage:
        """place: of the tile's first row; rows are packed, and the head is that of the first of all. Those beyond the
        last go nowhere.
        """
        row, (_, heads, Sq, _) = place.row + cute.arch.thread_idx()[0] // WARP * SLAB, self.bias.shape
        row = row + cute.arch.lane_idx() // 4
        starts = []
        for r in range(2):
            head, query = cutlass.min(place.head + (row + 8 * r) // Sq, heads - 1), (row + 8 * r) % Sq
            at = (place.batch, head, query)
            starts.append(sum(Int64(i) * by for i, by in zip(at, self.bias.stride[:3], strict=True)))
        return replace(self, place=place, starts=tuple(starts))

    @cute.jit
    def begin(self, block: Int32):
        """Its numbers are on their way; who uses them waits."""
        keys, first = self.bias.shape[3], block * self.place.block + self.place.column
        whole = (block + 1) * self.place.block <= keys
        for r in cutlass.range_constexpr(2):
            line = self.bias.iterator + self.starts[r]
            for c in cutlass.range_constexpr(0, cute.size(self.now, mode=[1]), PAIR):
                key = first + column_of(c)
                if whole:
                    pair = cute.make_tensor(self.now[r, None].iterator + c, cute.make_layout(PAIR))
                    cute.autovec_copy(self.pair_at(line + key), pair)
                else:
                    for i in cutlass.range_constexpr(PAIR):
                        one = cute.make_tensor(line + cutlass.min(key + i, keys - 1), cute.make_layout(1))
                        self.now[r, c + i] = one[0]

    def pair_at(self, start: cute.Pointer) -> cute.Tensor:
        """A thread's first column is even, as what lies before it is."""
        dtype = self.bias.element_type
        aligned = cute.make_ptr(dtype, start.toint(), cute.AddressSpace.gmem, assumed_align=PAIR * dtype.width // 8)
        return cute.make_tensor(aligned, cute.make_layout(PAIR))

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        add(S, self.scale, self.now)
