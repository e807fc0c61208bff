"""A bool mask of few query rows, which kernels read where it lies: a digest would take longer than they do.

Each CTA looks at its own keys first and lists, in shared memory, the groups of blocks in which a row sees a key: what
is hidden is not read. A group is one block, or where a list would be too long a power of two of them. Splits take every
n-th block each, so that all have work where a cache is filled in part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, Uint16

from ...spec import SLAB, WARP
from .fragments import column_of
from .packed import Part
from .scores.chain import Chain, Place, Stage
from .seams import Seams
from .walk import Sizes, Split, Walk

GROUPS = 384  # of a list, which lies beside the barriers (spec.BARRIER_BYTES): more would cost a CTA of two
AT_ONCE = 8  # groups whose mask a warp has under way
LOG_BLOCKS = 24  # blocks of a split are fewer than two to this


class MaskOfFew(Seams):
    def walk(self, call: object) -> Seen:
        return Seen(call.mask)

    def chain(self, call: object) -> Chain:
        return Chain((*super().chain(call).stages, MaskBits(call.mask)))


@dataclass(frozen=True)
class Line:
    """A row of a mask (B or 1, Hq or 1, Sq, Sk), stride 0 where it is broadcast."""

    mask: cute.Tensor
    batch: Int32
    head: Int32
    query: Int32

    @classmethod
    def of(cls, mask: cute.Tensor, batch: Int32, head: Int32, query: Int32) -> Line:
        """Heads beyond the last have the last one's."""
        batches, heads, _, _ = mask.shape
        batch = cutlass.select_(batches > 1, batch, Int32(0))
        return cls(mask, batch, cutlass.min(head, heads - 1), query)

    def load(self, key: Int32) -> Int32:
        """0 where the row does not see a key, or there is none."""
        keys = self.mask.shape[3]
        byte = self.mask[self.batch, self.head, self.query, cutlass.min(key, keys - 1)].to(Int32)
        return cutlass.select_(key < keys, byte, Int32(0))


def one_for_all(mask: cute.Tensor) -> Boolean:
    """Whether all rows of a batch have the same line."""
    _, heads, Sq, _ = mask.shape
    return (heads == 1) & ((Sq == 1) | (mask.stride[2] == 0))


# ---- which blocks ----


@dataclass(frozen=True)
class Seen(Walk):
    mask: cute.Tensor

    def at(self, sizes: Sizes, tile_m: int, tile_n: int) -> BoundSeen:
        return BoundSeen(self.mask, sizes, tile_m, tile_n)


@dataclass(frozen=True)
class BoundSeen:
    """The blocks of one sequence."""

    mask: cute.Tensor
    sizes: Sizes
    tile_m: int
    tile_n: int
    groups: cute.Tensor | None = None  # (GROUPS,) in shared memory: which are walked over
    count: cute.Tensor | None = None  # (1,) in shared memory: how many
    hides = True

    def shared(self, smem: cutlass.memory.SmemAllocator) -> BoundSeen:
        count = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        return replace(self, groups=smem.allocate_tensor(Uint16, cute.make_layout(GROUPS), 2), count=count)

    def blocks(self, split: Int32, splits: Int32) -> Int32:
        """Of a split: split, split + splits, ...; at least one."""
        return cute.ceil_div(cute.ceil_div(self.sizes.Sk, self.tile_n) - split, splits)

    def log_size(self, blocks: Int32) -> Int32:
        """Of a group."""
        too_many, log = (blocks - 1) // GROUPS, Int32(0)
        for bit in range(LOG_BLOCKS):
            log = log + cutlass.select_(too_many >= 1 << bit, Int32(1), Int32(0))
        return log

    @cute.jit
    def find(self, part: Part):
        """Every thread, before roles part."""
        blocks = self.blocks(part.split, part.splits)
        log = self.log_size(blocks)
        groups = (blocks + (1 << log) - 1) >> log
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warps = cute.arch.block_dim()[0] // WARP
        for first in cutlass.range(warp, groups, warps * AT_ONCE, unroll=1):
            self.look(part, first, warps, groups, log)
        cute.arch.sync_threads()
        if warp == 0:
            self.sort(groups, log)
        cute.arch.sync_threads()

    @cute.jit
    def look(self, part: Part, first: Int32, warps: Int32, groups: Int32, log: Int32):
        """A warp at some groups: whether a row sees one of their keys, in the list's place."""
        lane, by_head = cute.arch.lane_idx(), self.mask.shape[1] > 1
        found = cute.make_rmem_tensor((AT_ONCE,), Int32)
        found.fill(0)
        begin = cutlass.select_(by_head, part.first_row, Int32(0))
        end = cutlass.select_(by_head, cutlass.min(part.rows, begin + self.tile_m), self.sizes.Sq)
        end = cutlass.select_(one_for_all(self.mask), Int32(1), end)
        for row in cutlass.range(begin, end, unroll=1):
            head, query = part.place(row)
            line = Line.of(self.mask, part.batch, cutlass.select_(by_head, head, Int32(0)), query)
            for nth in cutlass.range(1 << log, unroll=1):
                for i in cutlass.range_constexpr(AT_ONCE):
                    block = (((first + i * warps) << log) + nth) * part.splits + part.split
                    for word in cutlass.range_constexpr(self.tile_n // WARP):
                        found[i] = found[i] | line.load(block * self.tile_n + word * WARP + lane)
        for i in cutlass.range_constexpr(AT_ONCE):
            some = cute.arch.vote_any_sync(found[i] != 0)
            if first + i * warps < groups and lane == 0:
                self.groups[first + i * warps] = Uint16(cutlass.select_(some, Int32(1), Int32(0)))

    @cute.jit
    def sort(self, groups: Int32, log: Int32):
        """One warp: the numbers of groups where something is seen, in order; one where nothing is, whose bits hide all
        of it.
        """
        lane, taken = cute.arch.lane_idx(), Int32(0)
        for first in cutlass.range(0, groups, WARP, unroll=1):
            some = Int32(0)
            if first + lane < groups:
                some = self.groups[first + lane].to(Int32)
            ballot = cute.arch.vote_ballot_sync(some != 0)  # all have read what is overwritten now
            if some != 0:
                before = cute.arch.popc(ballot & ((Int32(1) << lane) - 1))
                self.groups[taken + before] = Uint16(first + lane)
            taken = taken + cute.arch.popc(ballot)
        if lane == 0:
            if taken == 0:
                self.groups[0] = Uint16(0)
            self.count[0] = cutlass.max(taken, 1) << log

    def share(self, number: Int32, parts: Int32) -> SeenKeys:
        log = self.log_size(self.blocks(number, parts))
        return SeenKeys(Int32(0), self.count[0], self.groups, log, number, parts)

    def masks(self, block: Int32) -> Boolean:
        return Boolean(True)


@dataclass(frozen=True)
class SeenKeys(Split):
    """Of a split's blocks those in the list; some of the last group may be behind the last key."""

    groups: cute.Tensor
    log: Int32
    split: Int32
    splits: Int32

    def nth(self, j: Int32) -> Int32:
        group = self.groups[j >> self.log].to(Int32)
        return ((group << self.log) + (j & ((1 << self.log) - 1))) * self.splits + self.split


# ---- which scores ----


@dataclass(frozen=True)
class MaskBits(Stage):
    """Scores that the mask hides do not count. A warp reads the bytes of its rows side by side."""

    mask: cute.Tensor
    now: cute.Tensor | None = None  # (2, words of a block) registers: bits of this thread's two rows, by key
    place: Place | None = None

    def hold(self, columns: int) -> Stage:
        return replace(self, now=cute.make_rmem_tensor((2, columns // WARP), Int32))

    def at(self, place: Place) -> Stage:
        """place: of the tile's first row; rows are packed, and the head is that of the first of all."""
        return replace(self, place=place)

    def line(self, nth: Int32) -> Line:
        """Of a row of the tile."""
        row, Sq = self.place.row + nth, self.place.sizes.Sq
        return Line.of(self.mask, self.place.batch, self.place.head + row // Sq, row % Sq)

    @cute.jit
    def begin(self, block: Int32):
        words, lane = cute.size(self.now, mode=[1]), cute.arch.lane_idx()
        key = block * self.place.block + lane
        if one_for_all(self.mask):
            line = Line.of(self.mask, self.place.batch, Int32(0), Int32(0))
            for word in cutlass.range_constexpr(words):
                ballot = cute.arch.vote_ballot_sync(line.load(key + word * WARP) != 0)
                self.now[0, word] = self.now[1, word] = ballot
        else:
            first, mine = cute.arch.thread_idx()[0] // WARP * SLAB, lane // 4
            for word in cutlass.range_constexpr(words):
                bytes_ = cute.make_rmem_tensor((SLAB,), Int32)
                for i in cutlass.range_constexpr(SLAB):
                    bytes_[i] = self.line(first + i).load(key + word * WARP)
                for i in cutlass.range_constexpr(SLAB):
                    ballot = cute.arch.vote_ballot_sync(bytes_[i] != 0)
                    self.now[i // 8, word] = cutlass.select_(mine == i % 8, ballot, self.now[i // 8, word])

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            for word in cutlass.range_constexpr(cute.size(self.now, mode=[1])):
                bits = self.now[r, word] >> self.place.column
                for c in cutlass.range_constexpr(word * (WARP // 4), (word + 1) * (WARP // 4)):
                    bit = column_of(c) % WARP
                    S[r, c] = cutlass.select_((bits & Int32(1 << bit)) != 0, S[r, c], -Float32.inf)
