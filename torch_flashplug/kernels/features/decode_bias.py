"""A bias of few query rows, which kernels of decode read where it lies: rows are too few for boxes of 64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...registry.kernel_spec import SLAB, WARP
from ..score_stages.bias_read import Lines, Read, room, starts_of
from ..score_stages.natural_units import add
from ..score_stages.pipeline import Chain, Place, Stage
from ..tiling.block_iterator import Band, BoundBand, Split, Walk
from ..tiling.seqlen_info import Sizes
from .base import Seams


class BiasOfFew(Seams):
    def walk(self, call: object) -> Walk:
        return EveryBlock()

    def chain(self, call: object) -> Chain:
        """First of all, as in parts.bias."""
        return Chain((PackedRead(call.bias, call.scale), *super().chain(call).stages))


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
class PackedRead(Read):
    """Of packed rows, one block ahead."""

    now: cute.Tensor | None = None  # (2, columns of a thread) registers

    everywhere = False

    def hold(self, columns: int) -> Stage:
        return replace(self, now=room(self.bias, columns // 4))

    def at(self, place: Place) -> Stage:
        """place: of the tile's first row; the head is that of the first of all. Those beyond the last go nowhere."""
        row, (_, heads, Sq, _) = place.row + cute.arch.thread_idx()[0] // WARP * SLAB, self.bias.shape
        row = row + cute.arch.lane_idx() // 4
        lines = []
        for r in range(2):
            head, query = cutlass.min(place.head + (row + 8 * r) // Sq, heads - 1), (row + 8 * r) % Sq
            lines.append((place.batch, head, query))
        return PackedLines(self.bias, self.scale, place, starts_of(lines, self.bias), self.now)


@dataclass(frozen=True)
class PackedLines(Lines):
    now: cute.Tensor
    everywhere = False

    def begin(self, block: Int32) -> None:
        """Its numbers are on their way; who uses them waits."""
        self.read(block, self.now)

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        add(S, self.scale, self.now)
