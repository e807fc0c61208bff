"""A bool mask of few query rows, which kernels read where it lies: a digest would take longer than they do.

Each CTA looks at its own keys first and lists, in shared memory, the groups of blocks in which a row sees a key: what
is hidden is not read. A group is one block, or where a list would be too long a power of two of them. Splits take every
n-th block each, so that all have work where a cache is filled in part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, Uint16

from ...spec import SLAB, WARP
from .fragments import column_of
from .scores.chain import Chain, Place, Stage
from .seams import Seams
from .walk import Sizes, Split, Walk

if TYPE_CHECKING:
    from .packed import Part

GROUPS = 352  # of a list, which lies beside the barriers (spec.BARRIER_BYTES): more would cost a CTA of two
AT_ONCE = 8  # rows of a block's mask that a warp has under way
ROWS_AT_ONCE = 4  # the same where bits are read
LOG_BLOCKS = 24  # blocks of a split are fewer than two to this


class MaskOfFew(Seams):
    def walk(self, call: object) -> Seen:
        return Seen(call.mask)

    def chain(self, call: object) -> Chain:
        group = call.q.shape[1] // call.k.shape[1]
        return Chain((*super().chain(call).stages, MaskBits(call.mask, group)))


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
    # In shared memory, of groups:
    seen: cute.Tensor | None = None  # (GROUPS / 32,) bits: whether some row sees a key,
    hidden: cute.Tensor | None = None  # whether some row does not see one
    groups: cute.Tensor | None = None  # (GROUPS,) those that are walked over, times two, plus one where one is hidden
    count: cute.Tensor | None = None  # (1,) how many blocks these have
    hides = True

    def shared(self, smem: cutlass.memory.SmemAllocator) -> BoundSeen:
        seen, hidden = (smem.allocate_tensor(Int32, cute.make_layout(GROUPS // WARP), 4) for _ in range(2))
        count = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        groups = smem.allocate_tensor(Uint16, cute.make_layout(GROUPS), 2)
        return replace(self, seen=seen, hidden=hidden, groups=groups, count=count)

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
        blocks, thread = self.blocks(part.split, part.splits), cute.arch.thread_idx()[0]
        log, warp = self.log_size(blocks), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        by_head = self.mask.shape[1] > 1
        begin = cutlass.select_(by_head, part.first_row, Int32(0))
        end = cutlass.select_(by_head, cutlass.min(part.rows, begin + self.tile_m), self.sizes.Sq)
        lines = cutlass.select_(one_for_all(self.mask), Int32(1), end - begin)
        if thread < GROUPS // WARP:
            self.seen[thread] = self.hidden[thread] = 0
        cute.arch.sync_threads()
        step = cute.arch.block_dim()[0] // WARP * AT_ONCE
        for first in cutlass.range(warp * AT_ONCE, blocks * lines, step, unroll=1):
            self.look(part, first, blocks, begin, lines, log)
        cute.arch.sync_threads()
        if warp == 0:
            self.sort((blocks + (1 << log) - 1) >> log, log)
        cute.arch.sync_threads()

    @cute.jit
    def look(self, part: Part, first: Int32, blocks: Int32, begin: Int32, lines: Int32, log: Int32):
        """A warp at some rows of some blocks, which are numbered by block and then by row."""
        lane, by_head = cute.arch.lane_idx(), self.mask.shape[1] > 1
        some, every = (cute.make_rmem_tensor((AT_ONCE,), Int32) for _ in range(2))
        for i in cutlass.range_constexpr(AT_ONCE):
            nth = (first + i) // lines
            head, query = part.place(begin + (first + i) % lines)
            line = Line.of(self.mask, part.batch, cutlass.select_(by_head, head, Int32(0)), query)
            key = (nth * part.splits + part.split) * self.tile_n + lane
            some[i], every[i] = Int32(0), Int32(1)
            for word in cutlass.range_constexpr(self.tile_n // WARP):
                byte = line.load(key + word * WARP)
                some[i], every[i] = some[i] | byte, every[i] & byte
        for i in cutlass.range_constexpr(AT_ONCE):
            nth = (first + i) // lines
            seen, hidden = cute.arch.vote_any_sync(some[i] != 0), cute.arch.vote_any_sync(every[i] == 0)
            if lane == 0 and nth < blocks:
                word, bit = (nth >> log) // WARP, Int32(1) << (nth >> log) % WARP
                if seen:
                    cute.arch.atomic_or(self.seen.iterator + word, bit, sem="relaxed", scope="cta")
                if hidden:
                    cute.arch.atomic_or(self.hidden.iterator + word, bit, sem="relaxed", scope="cta")

    @cute.jit
    def sort(self, groups: Int32, log: Int32):
        """One warp: the groups where something is seen, in order; one where nothing is, whose bits hide all of it."""
        lane, taken = cute.arch.lane_idx(), Int32(0)
        for first in cutlass.range(0, groups, WARP, unroll=1):
            seen, hidden = self.seen[first // WARP], self.hidden[first // WARP] >> lane & 1
            if (seen >> lane & 1) != 0:
                before = cute.arch.popc(seen & ((Int32(1) << lane) - 1))
                self.groups[taken + before] = Uint16((first + lane) * 2 + hidden)
            taken = taken + cute.arch.popc(seen)
        if lane == 0:
            if taken == 0:
                self.groups[0] = Uint16(1)
            self.count[0] = cutlass.max(taken, 1) << log

    def share(self, number: Int32, parts: Int32) -> SeenKeys:
        log = self.log_size(self.blocks(number, parts))
        return SeenKeys(Int32(0), self.count[0], self.groups, log, number, parts)

    def masks(self, keys: SeenKeys, j: Int32) -> Boolean:
        return keys.group(j) & 1 != 0


@dataclass(frozen=True)
class SeenKeys(Split):
    """Of a split's blocks those in the list; some of the last group may be behind the last key."""

    groups: cute.Tensor
    log: Int32
    split: Int32
    splits: Int32

    def group(self, j: Int32) -> Int32:
        """As it is in the list."""
        return self.groups[j >> self.log].to(Int32)

    def nth(self, j: Int32) -> Int32:
        nth = (self.group(j) >> 1 << self.log) + (j & ((1 << self.log) - 1))
        return nth * self.splits + self.split


# ---- which scores ----


@dataclass(frozen=True)
class MaskBits(Stage):
    """Scores that the mask hides do not count. A warp reads the bytes of its rows side by side."""

    mask: cute.Tensor
    group: Int32  # query heads of a KV head
    now: cute.Tensor | None = None  # (2, words of a block) registers: bits of this thread's two rows, by key
    place: Place | None = None

    def hold(self, columns: int) -> Stage:
        return replace(self, now=cute.make_rmem_tensor((2, columns // WARP), Int32))

    def at(self, place: Place) -> Stage:
        """place: of the tile's first row; rows are packed, and the head is that of the first of all."""
        return replace(self, place=place)

    def line(self, row: Int32) -> Line:
        """Of a packed row."""
        Sq = self.place.sizes.Sq
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
            self.now.fill(0)
            first = self.place.row + cute.arch.thread_idx()[0] // WARP * SLAB
            rows = cutlass.min(self.group * self.place.sizes.Sq - first, SLAB)  # those beyond the last go nowhere
            for row in cutlass.range(0, rows, ROWS_AT_ONCE, unroll=1):
                self.fetch(first, row, key)

    @cute.jit
    def fetch(self, first: Int32, row: Int32, key: Int32):
        """Some of a warp's rows, from `row` on."""
        words, mine = cute.size(self.now, mode=[1]), cute.arch.lane_idx() // 4
        bytes_ = cute.make_rmem_tensor((ROWS_AT_ONCE, words), Int32)
        for i in cutlass.range_constexpr(ROWS_AT_ONCE):
            line = self.line(first + row + i)
            for word in cutlass.range_constexpr(words):
                bytes_[i, word] = line.load(key + word * WARP)
        for i in cutlass.range_constexpr(ROWS_AT_ONCE):
            for word in cutlass.range_constexpr(words):
                ballot = cute.arch.vote_ballot_sync(bytes_[i, word] != 0)
                for r in cutlass.range_constexpr(2):
                    self.now[r, word] = cutlass.select_(row + i == mine + 8 * r, ballot, self.now[r, word])

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            for word in cutlass.range_constexpr(cute.size(self.now, mode=[1])):
                bits = self.now[r, word] >> self.place.column
                for c in cutlass.range_constexpr(word * (WARP // 4), (word + 1) * (WARP // 4)):
                    bit = column_of(c) % WARP
                    S[r, c] = cutlass.select_((bits & Int32(1 << bit)) != 0, S[r, c], -Float32.inf)
