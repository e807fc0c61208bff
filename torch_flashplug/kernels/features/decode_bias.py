"""Decode with a bias: the kernel reads the bias directly, because decode has too few rows for TMA boxes of 64 rows."""

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
    """Kernel feature for decode with a bias."""

    def walk(self, call: object) -> Walk:
        return EveryBlock()

    def chain(self, call: object) -> Chain:
        """Return the score stages with the bias stage first, as in parts.bias."""
        return Chain((PackedRead(call.bias, call.scale), *super().chain(call).stages))


@dataclass(frozen=True)
class EveryBlock(Band):
    """Block iterator over all KV blocks. Score stages apply in every block."""

    def at(self, sizes: Sizes, tile_m: int, tile_n: int) -> BoundEveryBlock:
        return BoundEveryBlock(self.causal, sizes, tile_m, tile_n)


class BoundEveryBlock(BoundBand):
    """Iterator over all KV blocks of a sequence. Every block is masked."""

    hides = True

    def masks(self, keys: Split, j: Int32) -> Boolean:
        return Boolean(True)


@dataclass(frozen=True)
class PackedRead(Read):
    """Bias stage for packed rows. The bias is loaded one block ahead."""

    now: cute.Tensor | None = None  # (2, columns of a thread) registers

    everywhere = False

    def hold(self, columns: int) -> Stage:
        return replace(self, now=room(self.bias, columns // 4))

    def at(self, place: Place) -> Stage:
        """Return the stage for a tile.

        Args:
            place: place of the first row of the tile. The head is the first head of the tile. Results of rows beyond
                the last row are discarded.
        """
        row, (_, heads, Sq, _) = place.row + cute.arch.thread_idx()[0] // WARP * SLAB, self.bias.shape
        row = row + cute.arch.lane_idx() // 4
        lines = []
        for r in range(2):
            head, query = cutlass.min(place.head + (row + 8 * r) // Sq, heads - 1), (row + 8 * r) % Sq
            lines.append((place.batch, head, query))
        return PackedLines(self.bias, self.scale, place, starts_of(lines, self.bias), self.now)


@dataclass(frozen=True)
class PackedLines(Lines):
    """Bias rows of a tile of packed rows. `now` holds the bias of the current block in registers."""

    now: cute.Tensor
    everywhere = False

    def begin(self, block: Int32) -> None:
        """Start loading the bias of a block. The first use of the values waits."""
        self.read(block, self.now)

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        add(S, self.scale, self.now)
