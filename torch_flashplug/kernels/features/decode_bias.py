"""Decode with a bias: the kernel reads the bias directly, because TMA boxes have 64 rows, more than a decode tile."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...registry.kernel_spec import MMA_ATOM_M, WARP
from ..score_stages.bias_read import DirectBias, RowBias, allocate_rows, starts_of
from ..score_stages.natural_units import add
from ..score_stages.pipeline import ScoreCoord, ScorePipeline, ScoreStage
from ..tiling.block_iterator import BlockIterator, BoundBlocks, FullBlocks, SplitKvRange
from ..tiling.seqlen_info import SeqlenInfo
from .base import KernelFeatures


class DecodeBiasFeature(KernelFeatures):
    """Kernel feature for decode with a bias."""

    def block_iterator(self, call: object) -> BlockIterator:
        return AllBlocks()

    def score_pipeline(self, call: object) -> ScorePipeline:
        """Return the score stages with the bias stage first, as in features/bias.py."""
        return ScorePipeline((DecodeDirectBias(call.bias_any_dtype, call.scale), *super().score_pipeline(call).stages))


@dataclass(frozen=True)
class AllBlocks(FullBlocks):
    """Block iterator over all KV blocks. Score stages apply in every block."""

    def bind(self, sizes: SeqlenInfo, tile_m: int, tile_n: int) -> BoundAllBlocks:
        return BoundAllBlocks(self.causal, sizes, tile_m, tile_n)


class BoundAllBlocks(BoundBlocks):
    """Iterator over all KV blocks of a sequence. Every block is masked."""

    may_mask = True

    def masks(self, kv_range: SplitKvRange, j: Int32) -> Boolean:
        return Boolean(True)


@dataclass(frozen=True)
class DecodeDirectBias(DirectBias):
    """Bias stage for packed rows. The bias is loaded one block ahead."""

    bias_values: cute.Tensor | None = None  # (2, columns of a thread) registers

    applies_to_full_blocks = False

    def allocate_registers(self, columns: int) -> ScoreStage:
        return replace(self, bias_values=allocate_rows(self.bias, columns // 4))

    def set_tile(self, coord: ScoreCoord) -> ScoreStage:
        """Return the stage for a tile.

        Args:
            coord: coordinate of the first row of the tile. The head is the first head of the tile. Results of rows
                beyond the last row are discarded.
        """
        row, (_, heads, Sq, _) = coord.row + cute.arch.thread_idx()[0] // WARP * MMA_ATOM_M, self.bias.shape
        row = row + cute.arch.lane_idx() // 4
        lines = []
        for r in range(2):
            head, query = cutlass.min(coord.head + (row + 8 * r) // Sq, heads - 1), (row + 8 * r) % Sq
            lines.append((coord.sequence, head, query))
        return DecodeRowBias(self.bias, self.scale, coord, starts_of(lines, self.bias), self.bias_values)


@dataclass(frozen=True)
class DecodeRowBias(RowBias):
    """Bias rows of a tile of packed rows. `bias_values` holds the bias of the current block in registers."""

    bias_values: cute.Tensor
    applies_to_full_blocks = False

    def begin(self, block: Int32) -> None:
        """Start loading the bias of a block. The first use of the values waits."""
        self.read(block, self.bias_values)

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        add(S, self.scale, self.bias_values)
