"""Decode with a bool mask.

The kernel reads the mask directly, because mask preprocessing would take longer than decode. Each CTA first scans the
mask for its range of keys. The CTA lists, in shared memory, the groups of blocks with a key visible to some row. Empty
blocks are not read. A group is a single block, or a power of two of blocks if the list would be too long. A split
visits every n-th block, so that all splits have work in a partly filled cache.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, Uint16

from ...registry.kernel_spec import MMA_ATOM_M, WARP
from ..preprocess.mask import BEFORE, BEHIND, BYTES, bits_of_words, bytes_at, offset_of
from ..primitives.fragments import column_of
from ..primitives.vector_access import vector_at
from ..score_stages.pipeline import ScoreCoord, ScoreStage
from ..tiling.block_iterator import BlockIterator, SplitKvRange
from ..tiling.seqlen_info import SeqlenInfo
from .base import KernelFeatures

if TYPE_CHECKING:
    from ..decode.pack_gqa import DecodeTile

# Capacity of the list, stored beside the barriers (kernel_spec.py). A longer list would leave space for only a
# single CTA per SM instead of two.
MAX_GROUPS = 352
LANES_PER_BLOCK = 4  # lanes of a warp at the keys of a block. The lanes of a quad hold the same score rows.
BLOCKS_PER_WARP = WARP // LANES_PER_BLOCK
AT_ONCE = 4  # mask loads in flight per warp
INT_BITS = 32
TRUES = 0x01010101  # a word of four visible keys


class DecodeMaskFeature(KernelFeatures):
    """Kernel feature for decode with a bool mask."""

    def block_iterator(self, call: object) -> DecodeMaskIterator:
        return DecodeMaskIterator(call.mask)

    def masking_stage(self, call: object) -> ScoreStage:
        """Return the stage that applies the mask. No byte is loaded for keys beyond the end."""
        return DecodeMaskStage(call.mask)


@dataclass(frozen=True)
class MaskRow:
    """Row of a mask (B or 1, Hq or 1, Sq, Sk), with stride 0 for broadcast dimensions."""

    mask: cute.Tensor
    batch: Int32
    head: Int32
    query: Int32

    @classmethod
    def create(cls, mask: cute.Tensor, batch: Int32, head: Int32, query: Int32) -> MaskRow:
        """Return a row of the mask.

        A head beyond the last uses the last head, and a single-head mask serves every head.
        """
        batches, heads, _, _ = mask.shape
        batch = cutlass.select_(batches > 1, batch, Int32(0))
        return cls(mask, batch, cutlass.min(head, heads - 1), query)

    @cute.jit
    def load(self, key: Int32, bytes_: cute.Tensor, vectors: cutlass.Constexpr[bool]):
        """Load the mask bytes of 16 keys into (4,) words, with 0 for masked keys and keys beyond the end.

        Args:
            key: first key.
            bytes_: destination (4,) words.
            vectors: use vector loads, allowed if `by_vectors` is true. Otherwise 4-byte words are loaded if enough
                further keys lie on either side.
        """
        keys = self.mask.shape[3]
        place = (self.batch, self.head, self.query, cutlass.min(key, keys - 1))
        start, dense = self.mask.iterator + offset_of(self.mask, place), self.mask.stride[3] == 1
        bytes_.fill(0)
        if cutlass.const_expr(vectors):
            if key < keys:
                cute.autovec_copy(vector_at(start, Int32, cute.size(bytes_)), bytes_)
        elif dense & (key >= BEFORE) & (key + BYTES + BEHIND <= keys):
            words = bytes_at(start)
            for i in cutlass.range_constexpr(cute.size(bytes_)):
                bytes_[i] = words[i]
        else:
            for i in cutlass.range_constexpr(BYTES):
                byte = self.mask[self.batch, self.head, self.query, cutlass.min(key + i, keys - 1)].to(Int32)
                byte = cutlass.select_(key + i < keys, byte, Int32(0))
                bytes_[i // 4] = bytes_[i // 4] | byte << i % 4 * 8


def by_vectors(mask: cute.Tensor) -> Boolean:
    """Return whether all rows begin and end at a multiple of 16 keys, for vector loads.

    The result is uniform for a call, so only one of two code paths is ever fetched.
    """
    (*sizes, keys), (*strides, between_keys) = mask.shape, mask.stride
    offsets = [cutlass.select_(size > 1, stride, stride * 0) for size, stride in zip(sizes, strides, strict=True)]
    together = functools.reduce(operator.or_, offsets, mask.iterator.toint() | keys)
    return (between_keys == 1) & (together % BYTES == 0)


def one_for_all(mask: cute.Tensor) -> Boolean:
    """Return whether all rows of a batch use the same mask row."""
    _, heads, Sq, _ = mask.shape
    return (heads == 1) & ((Sq == 1) | (mask.stride[2] == 0))


# ---- Block iterator ----


@dataclass(frozen=True)
class DecodeMaskIterator(BlockIterator):
    """Decode iterator over the blocks with visible keys, found by a scan of the mask."""

    mask: cute.Tensor

    def bind(self, sizes: SeqlenInfo, tile_m: int, tile_n: int) -> BoundDecodeMask:
        return BoundDecodeMask(self.mask, sizes, tile_m, tile_n)


@dataclass(frozen=True)
class BoundDecodeMask:
    """Decode iterator over the blocks with visible keys in a sequence."""

    mask: cute.Tensor
    sizes: SeqlenInfo
    tile_m: int
    tile_n: int
    # Shared memory, indexed by group:
    visible: cute.Tensor | None = None  # (MAX_GROUPS // INT_BITS,) bits: whether some row sees a key of the group
    masked: cute.Tensor | None = (
        None  # (MAX_GROUPS // INT_BITS,) bits: whether a key of the group is masked for some row
    )
    groups: cute.Tensor | None = None  # (MAX_GROUPS,) visited groups: index times two, plus one if a key is masked
    count: cute.Tensor | None = None  # (1,) number of blocks in the visited groups
    may_mask = True

    def allocate_smem(self, smem: cutlass.memory.SmemAllocator) -> BoundDecodeMask:
        visible, masked = (smem.allocate_tensor(Int32, cute.make_layout(MAX_GROUPS // INT_BITS), 4) for _ in range(2))
        count = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        groups = smem.allocate_tensor(Uint16, cute.make_layout(MAX_GROUPS), 2)
        return replace(self, visible=visible, masked=masked, groups=groups, count=count)

    def blocks(self, split: Int32, splits: Int32) -> Int32:
        """Return the number of blocks of a split: split, split + splits, and so on; at least one."""
        return cute.ceil_div(cute.ceil_div(self.sizes.Sk, self.tile_n) - split, splits)

    def log_size(self, blocks: Int32) -> Int32:
        """Return the log2 of the group size: the smallest size for which the list has enough capacity."""
        return INT_BITS - cute.arch.clz((blocks - 1) // MAX_GROUPS)

    @cute.jit
    def scan(self, decode_tile: DecodeTile):
        """Scan the mask and build the list of visited groups. Every thread calls `scan` before roles part."""
        blocks, thread = self.blocks(decode_tile.split, decode_tile.splits), cute.arch.thread_idx()[0]
        log2_group_size, warp = self.log_size(blocks), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if thread < MAX_GROUPS // INT_BITS:
            self.visible[thread] = self.masked[thread] = 0
        cute.arch.sync_threads()
        if by_vectors(self.mask):
            if one_for_all(self.mask):
                self.scan_mask_of_row(decode_tile, blocks, log2_group_size)
            else:
                self.scan_mask(decode_tile, blocks, log2_group_size, vectors=True)
        else:
            self.scan_mask(decode_tile, blocks, log2_group_size, vectors=False)
        cute.arch.sync_threads()
        if warp == 0:
            self.list_groups((blocks + (1 << log2_group_size) - 1) >> log2_group_size, log2_group_size)
        cute.arch.sync_threads()

    @cute.jit
    def scan_mask_of_row(self, decode_tile: DecodeTile, blocks: Int32, log2_group_size: Int32):
        """Scan a mask with the same row for the whole batch entry, as `scan_mask`.

        Little code is fetched and executed before the first loads are in flight.
        """
        mask_row, lane = MaskRow.create(self.mask, decode_tile.batch, Int32(0), Int32(0)), cute.arch.lane_idx()
        warp, warps = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.block_dim()[0] // WARP
        steps = self.tile_n // (LANES_PER_BLOCK * BYTES)
        mask_words = cute.make_rmem_tensor((BYTES // 4, AT_ONCE, steps), Int32)
        for first in cutlass.range(warp * BLOCKS_PER_WARP, blocks, warps * AT_ONCE * BLOCKS_PER_WARP, unroll=1):
            for i in cutlass.range_constexpr(AT_ONCE):
                block = first + i * warps * BLOCKS_PER_WARP + lane // LANES_PER_BLOCK
                first_key = (
                    block * decode_tile.splits + decode_tile.split
                ) * self.tile_n + lane % LANES_PER_BLOCK * BYTES
                for step in cutlass.range_constexpr(steps):
                    mask_row.load(first_key + step * LANES_PER_BLOCK * BYTES, mask_words[None, i, step], vectors=True)
            for i in cutlass.range_constexpr(AT_ONCE):
                if first + i * warps * BLOCKS_PER_WARP < blocks:
                    self.record_block(
                        mask_words[None, i, None],
                        first + i * warps * BLOCKS_PER_WARP + lane // LANES_PER_BLOCK,
                        blocks,
                        log2_group_size,
                    )

    @cute.jit
    def scan_mask(
        self, decode_tile: DecodeTile, blocks: Int32, log2_group_size: Int32, vectors: cutlass.Constexpr[bool]
    ):
        """Scan the mask rows. Each warp handles BLOCKS_PER_WARP blocks of a row."""
        by_head = self.mask.shape[1] > 1
        begin = cutlass.select_(by_head, decode_tile.first_row, Int32(0))
        end = cutlass.select_(by_head, cutlass.min(decode_tile.rows, begin + self.tile_m), self.sizes.Sq)
        num_rows = cutlass.select_(one_for_all(self.mask), Int32(1), end - begin)
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        num_tasks, warps = cute.ceil_div(blocks, BLOCKS_PER_WARP) * num_rows, cute.arch.block_dim()[0] // WARP
        steps = self.tile_n // (LANES_PER_BLOCK * BYTES)
        mask_words = cute.make_rmem_tensor((BYTES // 4, AT_ONCE, steps), Int32)
        for first in cutlass.range(warp, num_tasks, warps * AT_ONCE, unroll=1):
            for i in cutlass.range_constexpr(AT_ONCE):
                task = first + i * warps
                head, query = decode_tile.unpack_row(begin + task % num_rows)
                mask_row = MaskRow.create(self.mask, decode_tile.batch, head, query)
                block = (
                    task // num_rows * BLOCKS_PER_WARP + lane // LANES_PER_BLOCK
                ) * decode_tile.splits + decode_tile.split
                for step in cutlass.range_constexpr(steps):
                    key = block * self.tile_n + (step * LANES_PER_BLOCK + lane % LANES_PER_BLOCK) * BYTES
                    mask_row.load(key, mask_words[None, i, step], vectors)
            for i in cutlass.range_constexpr(AT_ONCE):
                split_block = (first + i * warps) // num_rows * BLOCKS_PER_WARP + lane // LANES_PER_BLOCK
                self.record_block(mask_words[None, i, None], split_block, blocks, log2_group_size)

    @cute.jit
    def record_block(self, mask_words: cute.Tensor, block: Int32, blocks: Int32, log2_group_size: Int32):
        """Record the scan result of a warp in the group bits.

        Args:
            mask_words: (4, steps) mask words per lane. A quad of lanes holds the same block.
            block: index of the block in the split.
            blocks: number of blocks of the split.
            log2_group_size: log2 of the group size.
        """
        lane, quad_mask = cute.arch.lane_idx(), (1 << LANES_PER_BLOCK) - 1
        words = [mask_words[i] for i in range(cute.size(mask_words))]
        any_, all_ = (functools.reduce(op, words) for op in (operator.or_, operator.and_))
        # A byte with any higher bit set also means true. Such a byte counts as masked here. The only effect is to make
        # the kernel read the bits of the group.
        visible = cute.arch.vote_ballot_sync(any_ != 0) >> lane & quad_mask
        masked = cute.arch.vote_ballot_sync(all_ & TRUES != TRUES) >> lane & quad_mask
        if lane % LANES_PER_BLOCK == 0 and block < blocks:
            group = block >> log2_group_size
            word, bit = group // INT_BITS, Int32(1) << group % INT_BITS
            if visible != 0:
                cute.arch.atomic_or(self.visible.iterator + word, bit, sem="relaxed", scope="cta")
            if masked != 0:
                cute.arch.atomic_or(self.masked.iterator + word, bit, sem="relaxed", scope="cta")

    @cute.jit
    def list_groups(self, groups: Int32, log2_group_size: Int32):
        """Build the list of groups with visible keys, in order. Called by a single warp.

        Without any visible key, the list contains a single group, whose bits mask all scores.
        """
        lane, num_visible = cute.arch.lane_idx(), Int32(0)
        for first in cutlass.range(0, groups, WARP, unroll=1):
            visible, masked = self.visible[first // WARP], self.masked[first // WARP] >> lane & 1
            if (visible >> lane & 1) != 0:
                before = cute.arch.popc(visible & ((Int32(1) << lane) - 1))
                self.groups[num_visible + before] = Uint16((first + lane) * 2 + masked)
            num_visible = num_visible + cute.arch.popc(visible)
        if lane == 0:
            if num_visible == 0:
                self.groups[0] = Uint16(1)
            self.count[0] = cutlass.max(num_visible, 1) << log2_group_size

    def split_range(self, split: Int32, splits: Int32) -> DecodeMaskKvRange:
        log2_group_size = self.log_size(self.blocks(split, splits))
        return DecodeMaskKvRange(Int32(0), self.count[0], self.groups, log2_group_size, split, splits)

    def masks(self, kv_range: DecodeMaskKvRange, j: Int32) -> Boolean:
        return kv_range.group(j) & 1 != 0


@dataclass(frozen=True)
class DecodeMaskKvRange(SplitKvRange):
    """Listed KV blocks of a split. Blocks of the last group may lie behind the last key."""

    groups: cute.Tensor
    log2_group_size: Int32
    split: Int32
    splits: Int32

    def group(self, j: Int32) -> Int32:
        """Return the list entry of the group at position j."""
        return self.groups[j >> self.log2_group_size].to(Int32)

    def nth(self, j: Int32) -> Int32:
        nth = (self.group(j) >> 1 << self.log2_group_size) + (j & ((1 << self.log2_group_size) - 1))
        return nth * self.splits + self.split


# ---- Score stage ----


@dataclass(frozen=True)
class DecodeMaskStage(ScoreStage):
    """Score stage for the mask: masked scores become -inf. Each thread of a quad loads 16 keys of the quad's rows."""

    mask: cute.Tensor
    mask_words: cute.Tensor | None = (
        None  # (4, 2, words of a block / 2) registers: mask bytes of the two rows of a thread
    )
    coord: ScoreCoord | None = None

    def allocate_registers(self, columns: int) -> ScoreStage:
        assert columns % (2 * WARP) == 0, "threads of a row have 16 keys each"
        return replace(self, mask_words=cute.make_rmem_tensor((BYTES // 4, 2, columns // (2 * WARP)), Int32))

    def set_tile(self, coord: ScoreCoord) -> ScoreStage:
        """Return the stage for a tile.

        Args:
            coord: coordinate of the first row of the tile. Rows are packed, and the head is the first head of the tile.
        """
        return replace(self, coord=coord)

    def mask_row(self, row: Int32) -> MaskRow:
        """Return the mask row of a packed row. Results of rows beyond the last row are discarded."""
        Sq = self.coord.sizes.Sq
        return MaskRow.create(self.mask, self.coord.sequence, self.coord.head + row // Sq, row % Sq)

    @cute.jit
    def begin(self, block: Int32):
        """Start loading the mask bytes of a block. The first use of the bytes waits."""
        if by_vectors(self.mask):
            self.fetch(block, vectors=True)
        else:
            self.fetch(block, vectors=False)

    @cute.jit
    def fetch(self, block: Int32, vectors: cutlass.Constexpr[bool]):
        lane = cute.arch.lane_idx()
        row = self.coord.row + cute.arch.thread_idx()[0] // WARP * MMA_ATOM_M + lane // LANES_PER_BLOCK
        for part in cutlass.range_constexpr(cute.size(self.mask_words, mode=[2])):
            key = block * self.coord.block_columns + part * 2 * WARP + lane % LANES_PER_BLOCK * BYTES
            self.mask_row(row).load(key, self.mask_words[None, 0, part], vectors)
            if not one_for_all(self.mask):
                self.mask_row(row + MMA_ATOM_M // 2).load(key, self.mask_words[None, 1, part], vectors)

    @cute.jit
    def words(self, r: int, part: int) -> tuple[Int32, Int32]:
        """Return the bits of 64 keys of a row, from the four parts that a quad holds."""
        lane, bytes_ = cute.arch.lane_idx(), [self.mask_words[word, r, part] for word in range(BYTES // 4)]
        bits = bits_of_words(bytes_)
        peer_bits = cute.arch.shuffle_sync_bfly(bits, offset=1)
        low, high = (cutlass.select_(lane % 2 == 0, a, b) for a, b in ((bits, peer_bits), (peer_bits, bits)))
        own_bits = low | high << BYTES
        peer_bits = cute.arch.shuffle_sync_bfly(own_bits, offset=2)
        return tuple(
            cutlass.select_(lane % LANES_PER_BLOCK < 2, a, b) for a, b in ((own_bits, peer_bits), (peer_bits, own_bits))
        )

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        columns = WARP // 4  # columns of a thread per word
        for part in cutlass.range_constexpr(cute.size(self.mask_words, mode=[2])):
            of_rows = cute.make_rmem_tensor((2, 2), Int32)
            of_rows[0, 0], of_rows[0, 1] = self.words(0, part)
            if one_for_all(self.mask):
                of_rows[1, 0], of_rows[1, 1] = of_rows[0, 0], of_rows[0, 1]
            else:
                of_rows[1, 0], of_rows[1, 1] = self.words(1, part)
            for r, word in [(r, word) for r in range(2) for word in range(2)]:
                bits = of_rows[r, word] >> self.coord.column
                for c in cutlass.range_constexpr((2 * part + word) * columns, (2 * part + word + 1) * columns):
                    bit = column_of(c) % WARP
                    S[r, c] = cutlass.select_((bits & Int32(1 << bit)) != 0, S[r, c], -Float32.inf)
