"""Balanced splits: decode of paged KV caches, in which long sequences have more splits than short sequences.

KV lengths are in device memory, so the host knows neither the longest sequence nor the total number of keys. The grid
has a fixed number of items for each KV head and tile of rows. An item is a split of a sequence. Every warp reads all KV
lengths and finds the item of its CTA:

- Uneven lengths: a split has about total / (items - sequences) blocks. Sequence b with n_b blocks has
  ceil(n_b / size) splits. The sum over all sequences never exceeds the number of items.
- Even lengths (the longest at most 5/4 of the mean): the longest sequence has the number of splits that the host
  chooses for equal lengths, `even_splits`.

Items are in the order of the sequences, so sequences that share pages read the pages at about the same time. CTAs
without an item have no rows. A sequence with one split writes O and LSE itself. The splits of the remaining sequences
leave partial results for the `SplitKvCombine` kernel, which reads the numbers of splits from the workspace. The
accumulation order depends only on the KV lengths, the sizes of the call and the number of SMs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ...registry.kernel_spec import WARP
from ..decode.pack_gqa import DecodeGrid, DecodeTile
from ..decode.split_kv import WorkspacePartials
from ..preprocess.varlen_tile_list import sum_to, warp_sum
from ..tiling.block_iterator import BlockIterator
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import Tile, TileAddressing
from ..tiling.varlen import VarlenSeqlenInfo
from .base import KernelFeatures

MIN_KEYS = 256  # keys of a split of uneven lengths, at least: fewer keys take less time than their partial results
EVEN_RATIO = (5, 4)  # lengths are even if the longest has at most this ratio to the mean
COUNTS = 2  # integers of a sequence in the workspace: first item, number of splits


@dataclass(frozen=True)
class SequencePartials(WorkspacePartials):
    """Partial results of a sequence in the workspace of `BalancedPartials`."""

    all_outputs: Int64  # outputs in the workspace, of all sequences
    first_output: Int64  # index of the first output of the sequence
    first_row: Int32  # first row of the sequence

    @property
    def outputs(self) -> Int64:
        return self.all_outputs

    def index(self, row: Int32, split: Int32) -> Int64:
        return self.first_output + Int64(row - self.first_row) * self.splits + split

    def has(self, row: Int32) -> Boolean:
        return (row < self.rows) & (self.splits > 1)


@dataclass(frozen=True)
class BalancedPartials(WorkspacePartials):
    """Workspace of balanced splits. `splits` is the number of items of a KV head and a tile of rows.

    The outputs of a sequence are (rows of a sequence, splits of the sequence, Dv). The sequences follow each other in
    the order of their items. Maxima and sums are in the same order behind all outputs, then the counts (B, 2) as
    integers: first item and number of splits of each sequence.
    """

    def of_sequence(self, batch: Int32, rows_of_sequence: Int32, first_item: Int32, splits: Int32) -> SequencePartials:
        """Return the partial results of a sequence."""
        all_outputs = Int64(rows_of_sequence) * self.splits
        first_output = Int64(rows_of_sequence) * first_item
        first_row = batch * rows_of_sequence
        return SequencePartials(self.start, self.rows, splits, self.Dv, all_outputs, first_output, first_row)

    def counts(self, batch: Int32, rows_of_sequence: Int32) -> cute.Pointer:
        """Return the pointer to the counts of a sequence."""
        floats = Int64(rows_of_sequence) * self.splits * (self.Dv + 2) + batch * COUNTS
        address = (self.start + floats).toint()
        return cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)

    def of_row(self, row: Int32, rows_of_sequence: Int32) -> SequencePartials:
        batch = cutlass.min(row, self.rows - 1) // rows_of_sequence
        counts = self.counts(batch, rows_of_sequence)
        first_item, splits = (cute.arch.load(counts + i, Int32) for i in range(COUNTS))
        return self.of_sequence(batch, rows_of_sequence, first_item, splits)

    def order_splits(self, split_size: Int32 | None) -> Int32:
        """Return the number for splits of a fixed size: a warp adds up a row, however many splits the row has."""
        return super().order_splits(self.splits)


@dataclass(frozen=True)
class BalancedTile(DecodeTile):
    """Decode tile of a launch with balanced splits."""

    first_item: Int32  # first item of the sequence
    rows_of_sequence: Int32  # Hq * Sq
    is_publisher: Boolean  # True for a single CTA of each sequence

    def partials(self, workspace: BalancedPartials) -> SequencePartials:
        return workspace.of_sequence(self.batch, self.rows_of_sequence, self.first_item, self.splits)

    @cute.jit
    def publish_splits(self, workspace: BalancedPartials):
        """Store the counts of the sequence, read by `BalancedPartials.of_row`."""
        if self.is_publisher & (cute.arch.thread_idx()[0] == 0):
            counts = workspace.counts(self.batch, self.rows_of_sequence)
            cute.arch.store(counts, self.first_item)
            cute.arch.store(counts + 1, self.splits)


def quotient_above(dividend: Int32, divisor: Int32) -> Int32:
    """Return the quotient, rounded up. Unlike `cute.ceil_div`, the divisor may be computed from loaded numbers."""
    return (dividend + divisor - 1) // divisor


@dataclass(frozen=True)
class SplitItem:
    """Item of a CTA: a split of a sequence. Without an item, `splits` is 0."""

    batch: Int32
    first_item: Int32  # first item of the sequence
    splits: Int32
    split: Int32


@dataclass(frozen=True)
class SequenceBlocks:
    """Numbers of KV blocks of all sequences, as read by a warp: 32 sequences at a time, a sequence per lane."""

    addressing: TileAddressing
    block_iterator: BlockIterator
    tile: Tile
    tile_shape: tuple[int, int]
    B: Int32

    def of_lane(self, first: Int32) -> Int32:
        """Return the number of blocks of sequence `first` + lane, or 0 behind the last sequence."""
        sequence = first + cute.arch.lane_idx()
        sizes = self.addressing.of_batch(self.tile, Int32(0), cutlass.min(sequence, self.B - 1)).sizes
        return cutlass.select_(sequence < self.B, self.block_iterator.bind(sizes, *self.tile_shape).num_blocks, 0)

    @cute.jit
    def split_blocks(self, items: Int32, even_splits: Int32) -> Int32:
        """Return the largest number of blocks of a split.

        Args:
            items: items of a KV head and a tile of rows.
            even_splits: splits of the longest sequence, if lengths are even.
        """
        total, longest = Int32(0), Int32(0)
        for first in cutlass.range(0, self.B, WARP, unroll=1):
            blocks = self.of_lane(first)
            total, longest = total + blocks, cutlass.max(longest, blocks)
        total = warp_sum(total)
        for offset in (16, 8, 4, 2, 1):
            longest = cutlass.max(longest, cute.arch.shuffle_sync_bfly(longest, offset=offset))
        most, least = EVEN_RATIO
        is_even = Int64(longest) * self.B * least <= Int64(total) * most
        uneven_blocks = cutlass.max(quotient_above(total, items - self.B), max(MIN_KEYS // self.tile_shape[1], 1))
        return cutlass.select_(is_even, quotient_above(longest, even_splits), uneven_blocks)

    @cute.jit
    def find_item(self, item: Int32, split_blocks: Int32) -> SplitItem:
        """Return the split with the number `item`, in the order of the sequences."""
        batch, first_item, splits, before = Int32(0), Int32(0), Int32(0), Int32(0)
        for first in cutlass.range(0, self.B, WARP, unroll=1):
            count = quotient_above(self.of_lane(first), split_blocks)
            inclusive_sum = sum_to(count)
            begin = before + inclusive_sum - count
            is_owner = (begin <= item) & (item < begin + count)
            batch = batch + cutlass.select_(is_owner, first + cute.arch.lane_idx(), 0)
            first_item = first_item + cutlass.select_(is_owner, begin, 0)
            splits = splits + cutlass.select_(is_owner, count, 0)
            before = before + cute.arch.shuffle_sync(inclusive_sum, WARP - 1)
        batch, first_item, splits = (
            cute.arch.make_warp_uniform(warp_sum(value)) for value in (batch, first_item, splits)
        )
        return SplitItem(batch, first_item, splits, item - first_item)


@dataclass(frozen=True)
class BalancedGrid(DecodeGrid):
    """Assignment of CTAs to splits of sequences, by the KV lengths in device memory.

    The kernel argument `splits` is the number of items of a KV head and a tile of rows. The tiles of rows and the KV
    heads of an item are adjacent CTAs.
    """

    even_splits: Int32  # splits of the longest sequence, if lengths are even

    def num_ctas(self, B: Int32, Hkv: Int32, m_tiles: Int32, splits: Int32) -> Int32:
        return m_tiles * Hkv * splits

    def workspace(self, start: cute.Pointer, rows: Int32, splits: Int32, Dv: Int32) -> BalancedPartials:
        return BalancedPartials(start, rows, splits, Dv)

    def tile_of_cta(
        self, addressing: TileAddressing, block_iterator: BlockIterator, sizes: SeqlenInfo, heads: tuple[Int32, Int32],
        tile_shape: tuple[int, int], splits: Int32
    ) -> BalancedTile:  # fmt: skip
        (Hq, Hkv), cta = heads, cute.arch.block_idx()[0]
        group = Hq // Hkv
        m_tiles = addressing.max_blocks_of_rows(group * sizes.Sq, tile_shape[0])
        number, m_block = cta // m_tiles, cta % m_tiles
        kv_head, item_number = number % Hkv, number // Hkv
        tile = addressing.block_of_rows(m_block, sizes)
        blocks = SequenceBlocks(addressing, block_iterator, tile, tile_shape, addressing.num_sequences)
        item = blocks.find_item(item_number, blocks.split_blocks(splits, self.even_splits))
        tile = addressing.of_batch(tile, kv_head, item.batch)
        has_item = item.splits > 0
        lengths = tile.sizes.Sq, tile.sizes.Sk
        Sq, Sk = (cutlass.select_(has_item, length, 0) for length in lengths)
        tile = replace(tile, sizes=VarlenSeqlenInfo(Sq, Sk, cutlass.max(Sk, 1)))
        is_publisher = has_item & (item.split == 0) & (kv_head == 0) & (m_block == 0)
        return BalancedTile(
            tile, m_block * tile_shape[0], group * Sq, item.split, cutlass.max(item.splits, 1), sizes.Sq,
            item.first_item, Hq * sizes.Sq, is_publisher
        )  # fmt: skip


class BalancedSplitsFeature(KernelFeatures):
    """Kernel feature for decode with balanced splits."""

    def decode_grid(self, call: object) -> BalancedGrid:
        return BalancedGrid(call.even_splits)
