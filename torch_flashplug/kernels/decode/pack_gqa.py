"""Pack-GQA tiles of decode: the query heads of a KV head are packed into tiles of rows, and the keys are split."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..primitives import sm90
from ..tiling.block_iterator import BlockIterator, BoundBlocks, SplitKvRange
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import Tile, TileAddressing
from .split_kv import WorkspacePartials


@dataclass(frozen=True)
class DecodeTile:
    """Decode tile of a CTA: a tile of packed rows of a KV head, and a split of the keys."""

    tile: Tile  # its block counts packed rows
    first_row: Int32  # first packed row of the KV head: query head of the group * Sq + query
    rows: Int32  # number of packed rows of the KV head
    split: Int32
    splits: Int32
    queries: Int32  # queries per head in the tensors

    @classmethod
    def of_cta(
        cls, addressing: TileAddressing, sizes: SeqlenInfo, Hq: Int32, Hkv: Int32, tile_m: int, splits: Int32
    ) -> DecodeTile:
        """Return the decode tile of a CTA.

        Splits of a tile are adjacent CTAs, perhaps a cluster. Next come the tiles of a KV head, which read the same
        keys.
        """
        group = Hq // Hkv
        m_tiles = addressing.max_blocks_of_rows(group * sizes.Sq, tile_m)
        number, split = cute.arch.block_idx()[0] // splits, cute.arch.block_idx()[0] % splits
        kv, tile = number // m_tiles, addressing.block_of_rows(number % m_tiles, sizes)
        first_row = tile.block * tile_m
        tile = addressing.of_batch(tile, kv % Hkv, kv // Hkv)
        return cls(tile, first_row, group * tile.sizes.Sq, split, splits, sizes.Sq)

    @property
    def sizes(self) -> SeqlenInfo:
        return self.tile.sizes

    @property
    def batch(self) -> Int32:
        return self.tile.batch

    @property
    def last_row(self) -> Int32:
        """Last packed row, or the first row if there is none."""
        return cutlass.max(self.rows, 1) - 1 if self.sizes.may_be_empty else self.rows - 1

    def kv_range(self, blocks: BoundBlocks) -> SplitKvRange:
        """Return the KV blocks of the split."""
        return blocks.split_range(self.split, self.splits)

    def of_head(self, x: sm90.TmaOperand | cute.Tensor) -> sm90.TmaOperand | cute.Tensor:
        """Return the slice of K or V for the KV head."""
        return self.tile.keys(x)

    def unpack_row(self, row: Int32) -> tuple[Int32, Int32]:
        """Return the query head and the query, in the tensors, of a packed row."""
        Sq = cutlass.max(self.sizes.Sq, 1) if self.sizes.may_be_empty else self.sizes.Sq
        group = self.rows // Sq
        return self.tile.kv_head * group + row // Sq, self.tile.row(row % Sq)

    def partials(self, workspace: WorkspacePartials) -> WorkspacePartials:
        """Return the partial results of the tile's sequence. All sequences have the same number of splits."""
        return workspace

    def publish_splits(self, workspace: WorkspacePartials) -> None:
        """Tell the `SplitKvCombine` kernel the splits of the sequence. Equal numbers of splits need no message."""


@dataclass(frozen=True)
class DecodeGrid:
    """Assignment of CTAs to decode tiles. All sequences have the same number of splits.

    The class has no fields, so a kernel needs no argument.
    """

    def num_ctas(self, B: Int32, Hkv: Int32, m_tiles: Int32, splits: Int32) -> Int32:
        """Return the number of CTAs of the launch."""
        return m_tiles * splits * Hkv * B

    def workspace(self, start: cute.Pointer, rows: Int32, splits: Int32, Dv: Int32) -> WorkspacePartials:
        """Return the workspace of the partial results.

        Args:
            start: start of the workspace.
            rows: number of rows, B * Hq * Sq.
            splits: the argument `splits` of the kernel.
            Dv: columns of the output.
        """
        return WorkspacePartials(start, rows, splits, Dv)

    def tile_of_cta(
        self, addressing: TileAddressing, block_iterator: BlockIterator, sizes: SeqlenInfo, heads: tuple[Int32, Int32],
        tile_shape: tuple[int, int], splits: Int32
    ) -> DecodeTile:  # fmt: skip
        """Return the decode tile of a CTA.

        Args:
            addressing: tile addressing.
            block_iterator: iterator over KV blocks.
            sizes: sizes of the tensors.
            heads: numbers of query heads and of KV heads.
            tile_shape: rows of a tile, and keys of a block.
            splits: the argument `splits` of the kernel.
        """
        return DecodeTile.of_cta(addressing, sizes, *heads, tile_shape[0], splits)
