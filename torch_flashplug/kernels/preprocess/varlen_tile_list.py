"""Kernel that builds the tile lists of packed sequences."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32

from ...registry.kernel_spec import BACKWARD_TILE, WARP
from ..primitives.vector_access import vector_at
from ..tiling.block_iterator import BlockIterator
from ..tiling.equal_lengths import has_equal_lengths, overlaps_launches, wait_for_previous_launch
from ..tiling.tile import Tile
from ..tiling.varlen import (
    ENTRY_INTS,
    EQUAL_INT,
    HEADER_PAIR,
    MAX_RELATIVE_WORK,
    TileListEntry,
    VarlenAddressing,
    VarlenSeqlenInfo,
    VarlenTileList,
)

THREADS, CLASSES = 1024, 1024
WARPS = THREADS // WARP
BLOCK = BACKWARD_TILE[0]  # rows of a workspace block, and the unit of work
EMPTY_ENTRY = TileListEntry(0, 0, 0, 0, 0, 0, 0, opposite_length_at_least_one=1)  # entry without rows


@dataclass(frozen=True)
class TileListSpec:
    """Description of a tile list: side, rows or keys per block, and whether the longest tiles come first."""

    name: str  # attribute name in `VarlenAddressing`
    of_keys: bool
    size: int
    is_sorted: bool = True


@dataclass(frozen=True)
class VarlenInputs:
    """Arguments of a call with packed sequences."""

    cu_seqlens_q: cute.Tensor  # (sequences + 1,) Int32: first row of each sequence, and the end of the last sequence
    cu_seqlens_k: cute.Tensor
    # (sequences,) Int32: KV length of each sequence, or (0,). A size equal to the size of `cu_seqlens_q` marks
    # existing lists (`lists_exist`).
    seqused_k: cute.Tensor
    rows: Int32  # rows of all sequences together
    keys: Int32
    # 1: the lengths are compared. Equal lengths then need no lists, except in a plan, because a dense kernel ran ahead
    # and has computed calls with equal lengths.
    compares_lengths: Int32
    is_plan: Int32  # 1: no kernel follows, because the lists are those of a plan

    @property
    def header_start(self) -> Int32:
        """First number of a list's header that the kernel behind reads."""
        return HEADER_PAIR * self.compares_lengths

    @property
    def sequences(self) -> Int32:
        """Number of sequences, including two extra sequences.

        The extra sequences are the rows before the first sequence and the rows behind the last sequence. They have
        rows without keys, and keys without rows. The results there are zeros.
        """
        return self.cu_seqlens_q.shape[0] + 1

    @property
    def lists_exist(self) -> cutlass.Boolean:
        """True if the lists already exist.

        Existing lists already contain the KV lengths. A tensor of the size of `cu_seqlens_q` then replaces `seqused_k`.
        """
        return self.seqused_k.shape[0] == self.cu_seqlens_q.shape[0]

    def lengths_are_equal(self) -> cutlass.Boolean:
        """Return True if all sequences have equal numbers of rows, and of keys. A whole warp calls the method."""
        count = cutlass.max(self.cu_seqlens_q.shape[0] - 1, 1)
        lengths = (self.cu_seqlens_q, self.rows // count), (self.cu_seqlens_k, self.keys // count)
        of_rows, of_keys = (has_equal_lengths(cu_seqlens, length) for cu_seqlens, length in lengths)
        return of_rows & of_keys

    @property
    def num_workspace_blocks(self) -> Int32:
        return self.rows // BLOCK + self.sequences

    def own_range(self, sequence: Int32, of_keys: bool) -> tuple[Int32, Int32]:
        """Return the first row (or key) and the length of a sequence. A nonexistent sequence has length 0."""
        starts, total = (self.cu_seqlens_k, self.keys) if of_keys else (self.cu_seqlens_q, self.rows)
        last = self.sequences - 1
        start = cutlass.select_(sequence > 0, starts[cutlass.min(cutlass.max(sequence - 1, 0), last - 1)], 0)
        end = cutlass.select_(sequence < last, starts[cutlass.min(sequence, last - 1)], total)
        start = cutlass.min(cutlass.max(start, 0), total)
        length = cutlass.min(cutlass.max(end, start), total) - start
        return start, cutlass.select_(sequence <= last, length, 0)

    def opposite_range(self, sequence: Int32, of_keys: bool) -> tuple[Int32, Int32]:
        """Return the first row (or key) and the length of the opposite side of a sequence."""
        start, length = self.own_range(sequence, of_keys)
        if of_keys:
            length = self.kv_len(sequence - 1, length)
        return start, cutlass.select_((sequence > 0) & (sequence < self.sequences - 1), length, 0)

    @cute.jit
    def kv_len(self, sequence: Int32, length: Int32) -> Int32:
        """Return the KV length of a sequence with `length` keys in the tensor."""
        if (sequence >= 0) & (sequence < self.seqused_k.shape[0]):
            length = cutlass.min(length, cutlass.max(self.seqused_k[sequence], 0))
        return length


@dataclass(frozen=True)
class LaneSequence:
    """State of a sequence, held by a lane of a warp."""

    start: Int32
    length: Int32
    opposite_start: Int32
    opposite_length: Int32
    workspace_blocks: Int32  # number of workspace blocks of the sequence
    tiles: Int32

    @classmethod
    def create(cls, inputs: VarlenInputs, sequence: Int32, list_spec: TileListSpec) -> LaneSequence:
        own_range = inputs.own_range(sequence, list_spec.of_keys)
        opposite_range = inputs.opposite_range(sequence, not list_spec.of_keys)
        rows = inputs.own_range(sequence, of_keys=False)[
            1
        ]  # sequences without an opposite side have workspace blocks, too
        return cls(*own_range, *opposite_range, cute.ceil_div(rows, BLOCK), cute.ceil_div(own_range[1], list_spec.size))


def warp_sum(value: Int32 | Float32) -> Int32 | Float32:
    for offset in (16, 8, 4, 2, 1):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=offset)
    return value


def sum_to(value: Int32) -> Int32:
    """Return the inclusive prefix sum over the lanes of the warp."""
    lane = cute.arch.lane_idx()
    for offset in (1, 2, 4, 8, 16):
        before = cute.arch.shuffle_sync(value, cutlass.max(lane - offset, 0))
        value = value + cutlass.select_(lane >= offset, before, 0)
    return value


class TileListKernel:
    """Launcher of the kernel for tile lists. Nothing is launched if the lists already exist."""

    def __init__(self, list_specs: tuple[TileListSpec, ...]):
        self.list_specs = list_specs

    @cute.jit
    def __call__(
        self, inputs: VarlenInputs, addressing: VarlenAddressing, block_iterator: BlockIterator, stream: cuda.CUstream
    ):
        if not inputs.lists_exist:
            self.kernel(inputs, addressing, block_iterator).launch(
                grid=(len(self.list_specs), 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=overlaps_launches()
            )

    @cute.kernel
    def kernel(self, inputs: VarlenInputs, addressing: VarlenAddressing, block_iterator: BlockIterator):
        if cutlass.const_expr(overlaps_launches()):
            cute.arch.griddepcontrol_launch_dependents()
            # A dense kernel of the same call has waited for the writer of the lengths, so the list kernel runs beside.
            if (inputs.compares_lengths == 0) | (inputs.is_plan != 0):
                wait_for_previous_launch()
        smem = cutlass.memory.SmemAllocator()
        counts = smem.allocate_tensor(Int32, cute.make_layout(CLASSES), 16)
        sums = smem.allocate_tensor(Int32, cute.make_layout((WARPS, 2)), 16)
        work = smem.allocate_tensor(Float32, cute.make_layout(WARPS), 16)
        list_idx = cute.arch.block_idx()[0]
        for i in cutlass.range_constexpr(len(self.list_specs)):
            if list_idx == i:
                TileListBuilder(
                    inputs,
                    getattr(addressing, self.list_specs[i].name),
                    block_iterator,
                    self.list_specs[i],
                    counts,
                    sums,
                    work,
                ).build()
        wait_for_previous_launch()  # the kernel behind waits only for this kernel


class TileListBuilder:
    """Builder of a tile list. A single CTA runs the builder."""

    def __init__(
        self, inputs: VarlenInputs, tile_list: VarlenTileList, block_iterator: BlockIterator, list_spec: TileListSpec,
        counts: cute.Tensor, sums: cute.Tensor,
        work: cute.Tensor,
    ):  # fmt: skip
        self.inputs, self.tile_list, self.block_iterator, self.list_spec = inputs, tile_list, block_iterator, list_spec
        self.counts, self.sums, self.work = counts, sums, work
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.lane, self.thread = cute.arch.lane_idx(), cute.arch.thread_idx()[0]
        groups = cute.ceil_div(inputs.sequences, WARP)
        self.begin, self.end = (groups * (self.warp + i) // WARPS for i in range(2))

    @cute.jit
    def build(self):
        """Make the list, unless a dense kernel has computed the call."""
        if cutlass.const_expr(overlaps_launches()):
            self.build_unless_equal()
        else:  # dense kernels of packed sequences are for Hopper, and registers are few
            self.make_list()

    @cute.jit
    def build_unless_equal(self):
        """Compare the lengths if asked to, and make the list unless a dense kernel has computed the call."""
        lengths_are_equal = cutlass.Boolean(False)
        if self.inputs.compares_lengths != 0:
            lengths_are_equal = self.inputs.lengths_are_equal()
        if self.thread == 0:
            self.store_in_header(EQUAL_INT, Int32(lengths_are_equal))
        if (not lengths_are_equal) | (self.inputs.is_plan != 0):
            self.make_list()
        if lengths_are_equal & (self.thread == 0):
            self.store_in_header(HEADER_PAIR, Int32(0))

    @cute.jit
    def make_list(self):
        tiles, blocks = Int32(0), Int32(0)
        for group in cutlass.range(self.begin, self.end, unroll=1):
            sequence = LaneSequence.create(self.inputs, group * WARP + self.lane, self.list_spec)
            tiles, blocks = tiles + sequence.tiles, blocks + sequence.workspace_blocks
        tiles, blocks = warp_sum(tiles), warp_sum(blocks)
        sums = self.sums
        if self.lane == 0:
            sums[self.warp, 0], sums[self.warp, 1] = tiles, blocks
        self.counts[self.thread] = 0
        cute.arch.sync_threads()
        total = warp_sum(self.sums[self.lane, 0])
        before = (cutlass.select_(self.lane < self.warp, self.sums[self.lane, i], 0) for i in range(2))
        first_tile, first_workspace_block = map(warp_sum, before)
        if cutlass.const_expr(self.list_spec.is_sorted):
            self.visit_tiles(first_tile, first_workspace_block, placing=False)
            cute.arch.sync_threads()
            self.begin_classes()
        self.visit_tiles(first_tile, first_workspace_block, placing=True)
        self.fill(cutlass.min(cutlass.max(total, 0), self.tile_list.capacity()))

    @cute.jit
    def begin_classes(self):
        """Convert the tile counts of classes to start positions, largest class first, and store the total work."""
        class_of_thread = CLASSES - 1 - self.thread
        num_tiles = self.counts[class_of_thread]
        inclusive_sum, class_work = sum_to(num_tiles), Float32(class_of_thread + 1)
        sums, work, warp_work = self.sums, self.work, warp_sum(Float32(num_tiles) * class_work)
        if self.lane == WARP - 1:
            sums[self.warp, 0], work[self.warp] = inclusive_sum, warp_work
        cute.arch.sync_threads()
        before = warp_sum(cutlass.select_(self.lane < self.warp, self.sums[self.lane, 0], 0))
        position, all_work = before + inclusive_sum - num_tiles, warp_sum(self.work[self.lane])
        self.counts[class_of_thread] = position
        if (position == 0) & (num_tiles > 0):
            relative_work = Int32(cute.arch.fmin(all_work / class_work, float(MAX_RELATIVE_WORK)))
            self.store_in_header(1, relative_work)
            self.store_in_header(HEADER_PAIR + 1, relative_work)
        cute.arch.sync_threads()

    @cute.jit
    def visit_tiles(self, first_tile: Int32, workspace_block: Int32, placing: cutlass.Constexpr[bool]):
        """Count the tiles by class, or place the tiles in the list.

        Args:
            first_tile: index of the warp's first tile.
            workspace_block: index of the warp's first workspace block.
            placing: True to place tiles, False to count tiles.
        """
        for group in cutlass.range(self.begin, self.end, unroll=1):
            sequence_idx = group * WARP + self.lane
            sequence = LaneSequence.create(self.inputs, sequence_idx, self.list_spec)
            inclusive_sum, blocks = sum_to(sequence.tiles), sum_to(sequence.workspace_blocks)
            last = cute.arch.shuffle_sync(inclusive_sum, WARP - 1)
            values = (
                sequence.start,
                sequence.length,
                sequence.opposite_start,
                sequence.opposite_length,
                workspace_block + blocks - sequence.workspace_blocks,
            )
            if cute.arch.vote_any_sync(sequence.tiles > 1):
                for begin in cutlass.range(0, last, WARP, unroll=1):
                    tile, owner = begin + self.lane, Int32(0)
                    for step in (16, 8, 4, 2, 1):  # binary search: first lane with tiles ending behind `tile`
                        ends = cute.arch.shuffle_sync(inclusive_sum, owner + (step - 1))
                        owner = cutlass.select_(ends <= tile, owner + step, owner)
                    owner_values = tuple(cute.arch.shuffle_sync(value, owner) for value in values)
                    block = tile - cute.arch.shuffle_sync(inclusive_sum - sequence.tiles, owner)
                    entry = self.entry(block, group * WARP + owner, *owner_values)
                    self.add_tile(entry, first_tile + tile, tile < last, placing)
            else:
                entry = self.entry(Int32(0), sequence_idx, *values)
                self.add_tile(entry, first_tile + inclusive_sum - sequence.tiles, sequence.tiles > 0, placing)
            first_tile, workspace_block = first_tile + last, workspace_block + cute.arch.shuffle_sync(blocks, WARP - 1)

    def entry(
        self, block: Int32, sequence: Int32, own_start: Int32, length: Int32, opposite_start: Int32,
        opposite_length: Int32, workspace_block: Int32
    ) -> TileListEntry:  # fmt: skip
        """Return an entry.

        If `cu_seqlens` values decrease, there may be more blocks than the workspace has capacity for. The excess blocks
        get no rows.
        """
        queries = opposite_length if self.list_spec.of_keys else length
        fits = workspace_block + cute.ceil_div(queries, BLOCK) <= self.inputs.num_workspace_blocks
        fits = fits & (workspace_block >= 0)
        if self.list_spec.of_keys:
            opposite_length = cutlass.select_(fits, opposite_length, 0)
        else:
            length = cutlass.select_(fits, length, 0)
        return TileListEntry(
            block,
            sequence,
            own_start,
            length,
            opposite_start,
            opposite_length,
            workspace_block,
            cutlass.max(opposite_length, 1),
        )

    @cute.jit
    def add_tile(
        self, entry: TileListEntry, position: Int32, is_valid: cutlass.Boolean, placing: cutlass.Constexpr[bool]
    ):  # fmt: skip
        """Count or place a tile for each lane with a tile.

        If all tiles of the warp belong to a single class, as with short sequences, the lanes reserve positions
        together.
        """
        if cutlass.const_expr(self.list_spec.is_sorted):
            class_idx = cutlass.select_(is_valid, self.class_of(entry), -1)
            lanes, first_class = cute.arch.vote_ballot_sync(is_valid), cute.arch.shuffle_sync(class_idx, 0)
            classes_differ = cute.arch.vote_any_sync(is_valid & (class_idx != first_class))
            if classes_differ:
                if is_valid:
                    position = self.reserve_positions(class_idx, Int32(1))
            else:
                if (self.lane == 0) & (lanes != 0):
                    position = self.reserve_positions(class_idx, cute.arch.popc(lanes))
                before = cute.arch.popc(lanes & ((Int32(1) << self.lane) - 1))
                position = cute.arch.shuffle_sync(position, 0) + before
        if cutlass.const_expr(placing):
            if is_valid & (position >= 0) & (position < self.tile_list.capacity()):
                self.store(position, entry)

    def reserve_positions(self, class_idx: Int32, count: Int32) -> Int32:
        """Reserve the next `count` positions of class `class_idx`."""
        return cute.arch.atomic_add(self.counts.iterator + class_idx, count, sem="relaxed", scope="cta")

    def class_of(self, entry: TileListEntry) -> Int32:
        """Return the class of a tile, from the number of blocks visited on the opposite side."""
        own_length, opposite_length = entry.own_length, entry.opposite_length
        rows, keys = (opposite_length, own_length) if self.list_spec.of_keys else (own_length, opposite_length)
        tile = Tile(entry.block, None, None, VarlenSeqlenInfo(rows, keys, cutlass.max(keys, 1)))
        if self.list_spec.of_keys:
            work = self.block_iterator.bind(tile.sizes, BLOCK, self.list_spec.size).query_blocks(tile).total(1)
            total = self.inputs.rows
        else:
            work = self.block_iterator.bind(tile.sizes, self.list_spec.size, BLOCK).kv_blocks(tile).count
            total = self.inputs.keys
        unit = cute.ceil_div(cute.ceil_div(total, BLOCK), CLASSES)
        return cutlass.min(work // cutlass.max(unit, 1), CLASSES - 1)

    @cute.jit
    def fill(self, total: Int32):
        """Fill the list behind the last tile with entries without rows."""
        for position in cutlass.range(total + self.thread, self.tile_list.capacity(), THREADS, unroll=1):
            self.store(position, EMPTY_ENTRY)
        if self.thread == 0:
            self.store_in_header(0, total)
            self.store_in_header(HEADER_PAIR, total)

    def store_in_header(self, index: int, value: Int32) -> None:
        if cutlass.const_expr(overlaps_launches()):
            cute.arch.store(self.tile_list.header.iterator + (index - self.inputs.header_start), value)
        elif cutlass.const_expr(index < HEADER_PAIR):
            cute.arch.store(self.tile_list.header.iterator + index, value)

    def store(self, position: Int32, entry: TileListEntry) -> None:
        values = cute.make_rmem_tensor((ENTRY_INTS,), Int32)
        for i, value in enumerate(entry):
            values[i] = value
        cute.autovec_copy(values, vector_at(self.tile_list.entries.iterator + position * ENTRY_INTS, Int32, ENTRY_INTS))
