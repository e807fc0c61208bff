"""Kernel that builds the tile lists of packed sequences."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32
from cutlass.base_dsl import Arch

from ...registry.kernel_spec import BACKWARD_TILE, WARP
from ..primitives.fragments import target_from
from ..primitives.vector_access import vector_at
from ..tiling.block_iterator import BlockIterator
from ..tiling.tile import Tile
from ..tiling.varlen import ENTRY, MAX_RELATIVE_WORK, VarlenAddressing, VarlenSeqlenInfo, VarlenTileList

THREADS, CLASSES = 1024, 1024
WARPS = THREADS // WARP
BLOCK = BACKWARD_TILE[0]  # rows of a workspace block, and the unit of work


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

    cu_q: cute.Tensor  # (sequences + 1,) Int32: first row of each sequence, and the end of the last sequence
    cu_k: cute.Tensor
    # (sequences,) Int32: KV length of each sequence, or (0,). A size equal to the size of `cu_q` marks
    # existing lists (`are_made`).
    used_k: cute.Tensor
    rows: Int32  # rows of all sequences together
    keys: Int32

    @property
    def sequences(self) -> Int32:
        """Number of sequences, including two extra sequences.

        The extra sequences are the rows before the first sequence and the rows behind the last sequence. They have
        rows without keys, and keys without rows. The results there are zeros.
        """
        return self.cu_q.shape[0] + 1

    @property
    def are_made(self) -> cutlass.Boolean:
        """True if the lists already exist.

        Existing lists already contain the KV lengths. A tensor of the size of `cu_q` then replaces `used_k`.
        """
        return self.used_k.shape[0] == self.cu_q.shape[0]

    @property
    def blocks_of_scratch(self) -> Int32:
        return self.rows // BLOCK + self.sequences

    def own(self, number: Int32, of_keys: bool) -> tuple[Int32, Int32]:
        """Return the first row (or key) and the length of a sequence. A nonexistent sequence has length 0."""
        starts, total = (self.cu_k, self.keys) if of_keys else (self.cu_q, self.rows)
        last = self.sequences - 1
        start = cutlass.select_(number > 0, starts[cutlass.min(cutlass.max(number - 1, 0), last - 1)], 0)
        end = cutlass.select_(number < last, starts[cutlass.min(number, last - 1)], total)
        start = cutlass.min(cutlass.max(start, 0), total)
        length = cutlass.min(cutlass.max(end, start), total) - start
        return start, cutlass.select_(number <= last, length, 0)

    def others(self, number: Int32, of_keys: bool) -> tuple[Int32, Int32]:
        """Return the first row (or key) and the length of the opposite side of a sequence."""
        start, length = self.own(number, of_keys)
        if of_keys:
            length = self.used(number - 1, length)
        return start, cutlass.select_((number > 0) & (number < self.sequences - 1), length, 0)

    @cute.jit
    def used(self, number: Int32, length: Int32) -> Int32:
        """Return the KV length of a sequence with `length` keys in the tensor."""
        if (number >= 0) & (number < self.used_k.shape[0]):
            length = cutlass.min(length, cutlass.max(self.used_k[number], 0))
        return length


@dataclass(frozen=True)
class LaneSequence:
    """State of a sequence, held by a lane of a warp."""

    start: Int32
    length: Int32
    other_start: Int32
    other_length: Int32
    scratch: Int32  # number of workspace blocks of the sequence
    tiles: Int32

    @classmethod
    def create(cls, given: VarlenInputs, number: Int32, wanted: TileListSpec) -> LaneSequence:
        own, other = given.own(number, wanted.of_keys), given.others(number, not wanted.of_keys)
        rows = given.own(number, of_keys=False)[1]  # sequences without an opposite side have workspace blocks, too
        return cls(*own, *other, cute.ceil_div(rows, BLOCK), cute.ceil_div(own[1], wanted.size))


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

    def __init__(self, wanted: tuple[TileListSpec, ...]):
        self.wanted = wanted

    @cute.jit
    def __call__(self, given: VarlenInputs, ragged: VarlenAddressing, walk: BlockIterator, stream: cuda.CUstream):
        if not given.are_made:
            self.kernel(given, ragged, walk).launch(grid=(len(self.wanted), 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, given: VarlenInputs, ragged: VarlenAddressing, walk: BlockIterator):
        if cutlass.const_expr(target_from(Arch.sm_90)):
            cute.arch.griddepcontrol_launch_dependents()
        smem = cutlass.memory.SmemAllocator()
        counts = smem.allocate_tensor(Int32, cute.make_layout(CLASSES), 16)
        sums = smem.allocate_tensor(Int32, cute.make_layout((WARPS, 2)), 16)
        work = smem.allocate_tensor(Float32, cute.make_layout(WARPS), 16)
        number = cute.arch.block_idx()[0]
        for i in cutlass.range_constexpr(len(self.wanted)):
            if number == i:
                TileListBuilder(
                    given, getattr(ragged, self.wanted[i].name), walk, self.wanted[i], counts, sums, work
                ).make()


class TileListBuilder:
    """Builder of a tile list. A single CTA runs the builder."""

    def __init__(
        self, given: VarlenInputs, made: VarlenTileList, walk: BlockIterator, wanted: TileListSpec,
        counts: cute.Tensor, sums: cute.Tensor,
        work: cute.Tensor,
    ):  # fmt: skip
        self.given, self.made, self.walk, self.wanted = given, made, walk, wanted
        self.counts, self.sums, self.work = counts, sums, work
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.lane, self.thread = cute.arch.lane_idx(), cute.arch.thread_idx()[0]
        groups = cute.ceil_div(given.sequences, WARP)
        self.begin, self.end = (groups * (self.warp + i) // WARPS for i in range(2))

    @cute.jit
    def make(self):
        tiles, blocks = Int32(0), Int32(0)
        for group in cutlass.range(self.begin, self.end, unroll=1):
            some = LaneSequence.create(self.given, group * WARP + self.lane, self.wanted)
            tiles, blocks = tiles + some.tiles, blocks + some.scratch
        tiles, blocks = warp_sum(tiles), warp_sum(blocks)
        sums = self.sums
        if self.lane == 0:
            sums[self.warp, 0], sums[self.warp, 1] = tiles, blocks
        self.counts[self.thread] = 0
        cute.arch.sync_threads()
        total = warp_sum(self.sums[self.lane, 0])
        before = (cutlass.select_(self.lane < self.warp, self.sums[self.lane, i], 0) for i in range(2))
        first, scratch = map(warp_sum, before)
        if cutlass.const_expr(self.wanted.is_sorted):
            self.go_over(first, scratch, placing=False)
            cute.arch.sync_threads()
            self.begin_classes()
        self.go_over(first, scratch, placing=True)
        self.fill(cutlass.min(cutlass.max(total, 0), self.made.capacity()))

    @cute.jit
    def begin_classes(self):
        """Convert the tile counts of classes to start positions, largest class first, and store the total work."""
        mine = CLASSES - 1 - self.thread
        found = self.counts[mine]
        upto, one = sum_to(found), Float32(mine + 1)
        sums, work, of_warp = self.sums, self.work, warp_sum(Float32(found) * one)
        if self.lane == WARP - 1:
            sums[self.warp, 0], work[self.warp] = upto, of_warp
        cute.arch.sync_threads()
        before = warp_sum(cutlass.select_(self.lane < self.warp, self.sums[self.lane, 0], 0))
        place, all_work = before + upto - found, warp_sum(self.work[self.lane])
        self.counts[mine] = place
        if (place == 0) & (found > 0):
            cute.arch.store(
                self.made.header.iterator + 1, Int32(cute.arch.fmin(all_work / one, float(MAX_RELATIVE_WORK)))
            )
        cute.arch.sync_threads()

    @cute.jit
    def go_over(self, first: Int32, scratch: Int32, placing: cutlass.Constexpr[bool]):
        """Count the tiles by class, or place the tiles in the list.

        Args:
            first: index of the warp's first tile.
            scratch: index of the warp's first workspace block.
            placing: True to place tiles, False to count tiles.
        """
        for group in cutlass.range(self.begin, self.end, unroll=1):
            number = group * WARP + self.lane
            some = LaneSequence.create(self.given, number, self.wanted)
            upto, blocks = sum_to(some.tiles), sum_to(some.scratch)
            last = cute.arch.shuffle_sync(upto, WARP - 1)
            values = (some.start, some.length, some.other_start, some.other_length, scratch + blocks - some.scratch)
            if cute.arch.vote_any_sync(some.tiles > 1):
                for at in cutlass.range(0, last, WARP, unroll=1):
                    nth, owner = at + self.lane, Int32(0)
                    for step in (16, 8, 4, 2, 1):  # binary search: first lane with tiles ending behind `nth`
                        ends = cute.arch.shuffle_sync(upto, owner + (step - 1))
                        owner = cutlass.select_(ends <= nth, owner + step, owner)
                    of_owner = tuple(cute.arch.shuffle_sync(value, owner) for value in values)
                    block = nth - cute.arch.shuffle_sync(upto - some.tiles, owner)
                    entry = self.entry(block, group * WARP + owner, *of_owner)
                    self.take(entry, first + nth, nth < last, placing)
            else:
                entry = self.entry(Int32(0), number, *values)
                self.take(entry, first + upto - some.tiles, some.tiles > 0, placing)
            first, scratch = first + last, scratch + cute.arch.shuffle_sync(blocks, WARP - 1)

    def entry(
        self, block: Int32, number: Int32, own: Int32, length: Int32, other: Int32, met: Int32, of_scratch: Int32
    ) -> tuple[Int32, ...]:  # fmt: skip
        """Return the eight values of an entry.

        If `cu_seqlens` values decrease, there may be more blocks than the workspace has capacity for. The excess blocks
        get no rows.
        """
        queries = met if self.wanted.of_keys else length
        there = of_scratch + cute.ceil_div(queries, BLOCK) <= self.given.blocks_of_scratch
        there = there & (of_scratch >= 0)
        if self.wanted.of_keys:
            met = cutlass.select_(there, met, 0)
        else:
            length = cutlass.select_(there, length, 0)
        return block, number, own, length, other, met, of_scratch, cutlass.max(met, 1)

    @cute.jit
    def take(
        self, entry: tuple[Int32, ...], place: Int32, there: cutlass.Boolean, placing: cutlass.Constexpr[bool]
    ):  # fmt: skip
        """Count or place a tile for each lane with a tile.

        If all tiles of the warp belong to a single class, as with short sequences, the lanes reserve positions
        together.
        """
        if cutlass.const_expr(self.wanted.is_sorted):
            kind = cutlass.select_(there, self.class_of(*entry[:6]), -1)
            lanes, of_first = cute.arch.vote_ballot_sync(there), cute.arch.shuffle_sync(kind, 0)
            alone = cute.arch.vote_any_sync(there & (kind != of_first))
            if alone:
                if there:
                    place = self.places(kind, Int32(1))
            else:
                if (self.lane == 0) & (lanes != 0):
                    place = self.places(kind, cute.arch.popc(lanes))
                before = cute.arch.popc(lanes & ((Int32(1) << self.lane) - 1))
                place = cute.arch.shuffle_sync(place, 0) + before
        if cutlass.const_expr(placing):
            if there & (place >= 0) & (place < self.made.capacity()):
                self.store(place, entry)

    def places(self, kind: Int32, count: Int32) -> Int32:
        """Reserve the next `count` positions of class `kind`."""
        return cute.arch.atomic_add(self.counts.iterator + kind, count, sem="relaxed", scope="cta")

    def class_of(self, block: Int32, _: Int32, own: Int32, length: Int32, other: Int32, met: Int32) -> Int32:
        """Return the class of a tile, from the number of blocks visited on the opposite side."""
        rows, keys = (met, length) if self.wanted.of_keys else (length, met)
        tile = Tile(block, None, None, VarlenSeqlenInfo(rows, keys, cutlass.max(keys, 1)))
        if self.wanted.of_keys:
            work, total = self.walk.bind(tile.sizes, BLOCK, self.wanted.size).queries(tile).total(1), self.given.rows
        else:
            work, total = self.walk.bind(tile.sizes, self.wanted.size, BLOCK).keys(tile).count, self.given.keys
        unit = cute.ceil_div(cute.ceil_div(total, BLOCK), CLASSES)
        return cutlass.min(work // cutlass.max(unit, 1), CLASSES - 1)

    @cute.jit
    def fill(self, total: Int32):
        """Fill the list behind the last tile with entries without rows."""
        for place in cutlass.range(total + self.thread, self.made.capacity(), THREADS, unroll=1):
            self.store(place, (0, 0, 0, 0, 0, 0, 0, 1))
        if self.thread == 0:
            cute.arch.store(self.made.header.iterator, total)

    def store(self, place: Int32, entry: tuple[Int32 | int, ...]) -> None:
        values = cute.make_rmem_tensor((ENTRY,), Int32)
        for i, value in enumerate(entry):
            values[i] = value
        cute.autovec_copy(values, vector_at(self.made.entries.iterator + place * ENTRY, Int32, ENTRY))
