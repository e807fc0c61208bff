"""A bool mask of few query rows, which kernels read where it lies: a digest would take longer than they do.

Each CTA looks at its own keys first and lists, in shared memory, the groups of blocks in which a row sees a key: what
is hidden is not read. A group is one block, or where a list would be too long a power of two of them. Splits take every
n-th block each, so that all have work where a cache is filled in part.
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

from ...registry.kernel_spec import SLAB, WARP
from ..preprocess.mask import BEFORE, BEHIND, BYTES, bits_of_words, bytes_at, offset_of
from ..primitives.fragments import column_of
from ..primitives.vector_access import vector_at
from ..score_stages.pipeline import Place, Stage
from ..tiling.block_iterator import Split, Walk
from ..tiling.seqlen_info import Sizes
from .base import Seams

if TYPE_CHECKING:
    from ..decode.pack_gqa import Part

GROUPS = 352  # of a list, which lies beside the barriers (spec.BARRIER_BYTES): more would cost a CTA of two
LANES = 4  # of a warp, at the keys of a block: those of a quad hold the same rows of scores
BLOCKS = WARP // LANES
AT_ONCE = 4  # looks at the mask that a warp has under way
INT_BITS = 32
TRUES = 0x01010101  # a word of four keys that are seen


class MaskOfFew(Seams):
    def walk(self, call: object) -> Seen:
        return Seen(call.mask)

    def visible(self, call: object) -> Stage:
        """Of keys that there are not no byte is loaded."""
        return MaskBits(call.mask)


@dataclass(frozen=True)
class Line:
    """A row of a mask (B or 1, Hq or 1, Sq, Sk), stride 0 where it is broadcast."""

    mask: cute.Tensor
    batch: Int32
    head: Int32
    query: Int32

    @classmethod
    def of(cls, mask: cute.Tensor, batch: Int32, head: Int32, query: Int32) -> Line:
        """A head beyond the last has the last one's, any head the only one's."""
        batches, heads, _, _ = mask.shape
        batch = cutlass.select_(batches > 1, batch, Int32(0))
        return cls(mask, batch, cutlass.min(head, heads - 1), query)

    @cute.jit
    def load(self, key: Int32, bytes_: cute.Tensor, vectors: cutlass.Constexpr[bool]):
        """Of 16 keys, (4,) words: 0 where the row does not see one, or there is none. vectors: as `by_vectors` says;
        else by words where there are some more keys on either side.
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
    """Whether all rows begin at a vector of 16 keys, and end at one. The same for a whole call: so one of two codes is
    never fetched.
    """
    (*sizes, keys), (*strides, between_keys) = mask.shape, mask.stride
    offsets = [cutlass.select_(size > 1, stride, stride * 0) for size, stride in zip(sizes, strides, strict=True)]
    together = functools.reduce(operator.or_, offsets, mask.iterator.toint() | keys)
    return (between_keys == 1) & (together % BYTES == 0)


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
        """Of a group: the least for which a list has room."""
        return INT_BITS - cute.arch.clz((blocks - 1) // GROUPS)

    @cute.jit
    def find(self, part: Part):
        """Every thread, before roles part."""
        blocks, thread = self.blocks(part.split, part.splits), cute.arch.thread_idx()[0]
        log, warp = self.log_size(blocks), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if thread < GROUPS // WARP:
            self.seen[thread] = self.hidden[thread] = 0
        cute.arch.sync_threads()
        if by_vectors(self.mask):
            if one_for_all(self.mask):
                self.look_at_one(part, blocks, log)
            else:
                self.look(part, blocks, log, vectors=True)
        else:
            self.look(part, blocks, log, vectors=False)
        cute.arch.sync_threads()
        if warp == 0:
            self.sort((blocks + (1 << log) - 1) >> log, log)
        cute.arch.sync_threads()

    @cute.jit
    def look_at_one(self, part: Part, blocks: Int32, log: Int32):
        """As `look`, at the one line of a batch: little is fetched and run before the bytes are under way."""
        line, lane = Line.of(self.mask, part.batch, Int32(0), Int32(0)), cute.arch.lane_idx()
        warp, warps = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.block_dim()[0] // WARP
        steps = self.tile_n // (LANES * BYTES)
        found = cute.make_rmem_tensor((BYTES // 4, AT_ONCE, steps), Int32)
        for at in cutlass.range(warp * BLOCKS, blocks, warps * AT_ONCE * BLOCKS, unroll=1):
            for i in cutlass.range_constexpr(AT_ONCE):
                nth = at + i * warps * BLOCKS + lane // LANES
                first = (nth * part.splits + part.split) * self.tile_n + lane % LANES * BYTES
                for step in cutlass.range_constexpr(steps):
                    line.load(first + step * LANES * BYTES, found[None, i, step], vectors=True)
            for i in cutlass.range_constexpr(AT_ONCE):
                if at + i * warps * BLOCKS < blocks:
                    self.note(found[None, i, None], at + i * warps * BLOCKS + lane // LANES, blocks, log)

    @cute.jit
    def look(self, part: Part, blocks: Int32, log: Int32, vectors: cutlass.Constexpr[bool]):
        """Warps at rows of the mask, at BLOCKS blocks of one each; LANES lanes at a block."""
        by_head = self.mask.shape[1] > 1
        begin = cutlass.select_(by_head, part.first_row, Int32(0))
        end = cutlass.select_(by_head, cutlass.min(part.rows, begin + self.tile_m), self.sizes.Sq)
        lines = cutlass.select_(one_for_all(self.mask), Int32(1), end - begin)
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        looks, warps = cute.ceil_div(blocks, BLOCKS) * lines, cute.arch.block_dim()[0] // WARP
        steps = self.tile_n // (LANES * BYTES)
        found = cute.make_rmem_tensor((BYTES // 4, AT_ONCE, steps), Int32)
        for first in cutlass.range(warp, looks, warps * AT_ONCE, unroll=1):
            for i in cutlass.range_constexpr(AT_ONCE):
                number = first + i * warps
                head, query = part.place(begin + number % lines)
                line = Line.of(self.mask, part.batch, head, query)
                block = (number // lines * BLOCKS + lane // LANES) * part.splits + part.split
                for step in cutlass.range_constexpr(steps):
                    key = block * self.tile_n + (step * LANES + lane % LANES) * BYTES
                    line.load(key, found[None, i, step], vectors)
            for i in cutlass.range_constexpr(AT_ONCE):
                nth = (first + i * warps) // lines * BLOCKS + lane // LANES
                self.note(found[None, i, None], nth, blocks, log)

    @cute.jit
    def note(self, found: cute.Tensor, nth: Int32, blocks: Int32, log: Int32):
        """What a warp has found, (4, steps) words a lane: a quad of one block, the nth of this split."""
        lane, quad = cute.arch.lane_idx(), (1 << LANES) - 1
        words = [found[i] for i in range(cute.size(found))]
        some, all_ = (functools.reduce(op, words) for op in (operator.or_, operator.and_))
        # Bytes of other bits than the lowest, which are true, too, count as hidden here: only their bits are looked at.
        seen = cute.arch.vote_ballot_sync(some != 0) >> lane & quad
        hidden = cute.arch.vote_ballot_sync(all_ & TRUES != TRUES) >> lane & quad
        if lane % LANES == 0 and nth < blocks:
            word, bit = (nth >> log) // WARP, Int32(1) << (nth >> log) % WARP
            if seen != 0:
                cute.arch.atomic_or(self.seen.iterator + word, bit, sem="relaxed", scope="cta")
            if hidden != 0:
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
    """Scores that the mask hides do not count. The threads of a quad bring 16 keys each of their rows."""

    mask: cute.Tensor
    now: cute.Tensor | None = None  # (4, 2, words of a block / 2) registers: bytes of this thread's two rows
    place: Place | None = None

    def hold(self, columns: int) -> Stage:
        assert columns % (2 * WARP) == 0, "threads of a row have 16 keys each"
        return replace(self, now=cute.make_rmem_tensor((BYTES // 4, 2, columns // (2 * WARP)), Int32))

    def at(self, place: Place) -> Stage:
        """place: of the tile's first row; rows are packed, and the head is that of the first of all."""
        return replace(self, place=place)

    def line(self, row: Int32) -> Line:
        """Of a packed row; those beyond the last go nowhere."""
        Sq = self.place.sizes.Sq
        return Line.of(self.mask, self.place.batch, self.place.head + row // Sq, row % Sq)

    @cute.jit
    def begin(self, block: Int32):
        """Its bytes are on their way; who uses them waits."""
        if by_vectors(self.mask):
            self.fetch(block, vectors=True)
        else:
            self.fetch(block, vectors=False)

    @cute.jit
    def fetch(self, block: Int32, vectors: cutlass.Constexpr[bool]):
        lane = cute.arch.lane_idx()
        row = self.place.row + cute.arch.thread_idx()[0] // WARP * SLAB + lane // LANES
        for part in cutlass.range_constexpr(cute.size(self.now, mode=[2])):
            key = block * self.place.block + part * 2 * WARP + lane % LANES * BYTES
            self.line(row).load(key, self.now[None, 0, part], vectors)
            if not one_for_all(self.mask):
                self.line(row + SLAB // 2).load(key, self.now[None, 1, part], vectors)

    @cute.jit
    def words(self, r: int, part: int) -> tuple[Int32, Int32]:
        """Bits of 64 keys of a row, from the four parts that a quad has of them."""
        lane, bytes_ = cute.arch.lane_idx(), [self.now[word, r, part] for word in range(BYTES // 4)]
        bits = bits_of_words(bytes_)
        other = cute.arch.shuffle_sync_bfly(bits, offset=1)
        low, high = (cutlass.select_(lane % 2 == 0, a, b) for a, b in ((bits, other), (other, bits)))
        mine = low | high << BYTES
        other = cute.arch.shuffle_sync_bfly(mine, offset=2)
        return tuple(cutlass.select_(lane % LANES < 2, a, b) for a, b in ((mine, other), (other, mine)))

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        columns = WARP // 4  # of a thread, for each word
        for part in cutlass.range_constexpr(cute.size(self.now, mode=[2])):
            of_rows = cute.make_rmem_tensor((2, 2), Int32)
            of_rows[0, 0], of_rows[0, 1] = self.words(0, part)
            if one_for_all(self.mask):
                of_rows[1, 0], of_rows[1, 1] = of_rows[0, 0], of_rows[0, 1]
            else:
                of_rows[1, 0], of_rows[1, 1] = self.words(1, part)
            for r, word in [(r, word) for r in range(2) for word in range(2)]:
                bits = of_rows[r, word] >> self.place.column
                for c in cutlass.range_constexpr((2 * part + word) * columns, (2 * part + word + 1) * columns):
                    bit = column_of(c) % WARP
                    S[r, c] = cutlass.select_((bits & Int32(1 << bit)) != 0, S[r, c], -Float32.inf)
