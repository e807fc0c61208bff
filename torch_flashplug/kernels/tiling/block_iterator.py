"""Which blocks a tile walks over, in which order, and in which of them something may be hidden. Loaders, consumers and
whoever adds up their results ask the same object, so that they agree.

A kernel has a walk as an argument and binds it to the sizes of a tile: `walk.at(sizes, tile_m, tile_n)`. What is known
when a kernel is traced are class attributes and Python values; what a call brings are fields. A run of blocks is asked
for `sections()`, which loops follow, and for `nth(j)`, the number of the block at a position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32

from .seqlen_info import Sizes

if TYPE_CHECKING:
    from .tile import Tile




@dataclass(frozen=True)
class Section:
    """Positions from `begin` to `end` of a run. masked: stages of the scores are asked there; else only those that are
    asked everywhere.
    """

    masked: bool
    begin: Int32 | int
    end: Int32


@dataclass(frozen=True)
class Walk:
    """What a kernel takes: any of its kinds."""

    uneven = False  # whether rows of a tile may see different numbers of keys: then tiles differ in length, too


@dataclass(frozen=True)
class Band(Walk):
    """Every query sees every key: blocks follow each other. Holds nothing, so that a kernel has no argument for it."""

    causal = False

    def at(self, sizes: Sizes, tile_m: int, tile_n: int) -> BoundBand:
        return BoundBand(self.causal, sizes, tile_m, tile_n)


@dataclass(frozen=True)
class CausalBand(Band):
    """Key j is visible to query i iff j <= i, also when Sq != Sk: PyTorch's top-left alignment."""

    causal = True
    uneven = True


@dataclass(frozen=True)
class BoundBand:
    """The blocks of one sequence: tile_m queries, tile_n keys each."""

    causal: bool
    sizes: Sizes
    tile_m: int
    tile_n: int

    @property
    def uneven(self) -> bool:
        return self.causal

    def num_visible(self, end_row: Int32) -> Int32:
        """Keys visible to some row before end_row; at least one."""
        return cutlass.min(self.sizes.some_keys, end_row) if self.causal else self.sizes.some_keys

    def num_blocks(self, end_row: Int32) -> Int32:
        """KV blocks that hold one of those keys; at least one."""
        return cute.ceil_div(self.num_visible(end_row), self.tile_n)

    def keys(self, tile: Tile) -> Leftward:
        """KV blocks of a tile of tile_m rows."""
        return Leftward(self, self.num_blocks((tile.block + 1) * self.tile_m), tile.block * self.tile_m)

    def keys_of_rows(self, tile: Tile, first_row: Int32) -> Leftward:
        """The same; first_row: the tile's, from which sums of rows are formed where a kernel has it at hand."""
        return Leftward(self, self.num_blocks(first_row + self.tile_m), first_row)

    def keys_of_part(self, tile: Tile, first_row: Int32, rows: int, uneven: bool) -> tuple[Int32, Leftward]:
        """How many KV blocks of a tile only other rows of it need, which come first, and the run of its `rows` rows
        from first_row on. Rows beyond the last take part in one block; their results go nowhere. uneven: whether some
        of the tile's parts may see fewer blocks than others.
        """
        blocks = self.num_blocks((tile.block + 1) * self.tile_m)
        if not uneven:
            return Int32(0), Leftward(self, blocks, first_row)
        mine = cutlass.select_(first_row < self.sizes.Sq, self.num_blocks(first_row + rows), 1)
        mine = cute.arch.make_warp_uniform(mine)  # else ptxas works it out again for every block
        return blocks - mine, Leftward(self, mine, first_row)

    def all_keys(self) -> Int32:
        """KV blocks that some query sees."""
        return self.num_blocks(self.sizes.Sq)

    def shared(self, smem: cutlass.memory.SmemAllocator) -> BoundBand:
        """decode: with room for what is found out."""
        return self

    def find(self, part: object) -> None:
        """decode: every thread, before roles part; of a packed.Part."""

    def share(self, number: Int32, parts: Int32) -> Split:
        """decode: a split's KV blocks; one behind the last where there are fewer blocks than splits."""
        total = self.all_keys()
        mine = Split.create(total, number, parts)
        return mine.or_block(total) if self.sizes.may_be_empty else mine

    def masks(self, keys: Split, j: Int32) -> cutlass.Boolean:
        """decode: whether some row does not see all of the block at a position."""
        return (keys.nth(j) + 1) * self.tile_n > self.sizes.Sk

    @property
    def hides(self) -> bool:
        """decode: whether a row may see nothing of a block."""
        return self.sizes.may_be_empty

    def queries(self, tile: Tile) -> Downward:
        """Query blocks that see a KV block. Keys beyond the last mask every step; else only the diagonal does."""
        first_key, end = tile.block * self.tile_n, cute.ceil_div(self.sizes.Sq, self.tile_m)
        begin = middle = Int32(0)
        if self.causal:
            begin = cutlass.min(first_key // self.tile_m, end)
            middle = cutlass.min(cute.ceil_div(first_key + self.tile_n - 1, self.tile_m), end)
        middle = cutlass.select_(first_key + self.tile_n > self.sizes.Sk, end, middle)
        return Downward(begin, middle, end)

    def turn(self, n_block: Int32, run: Downward, j: Int32, num_n_blocks: Int32) -> Int32:
        """How many KV blocks add to the block of queries at a position before this one, where the last begins."""
        return cutlass.min(run.nth(j) * self.tile_m // self.tile_n, num_n_blocks - 1) - n_block


class Run:
    """Blocks of a tile, by position: nth(j)."""

    def next(self, j: Int32, section: Section) -> Int32:
        """The block of the next step; of the last one of a section, its own."""
        return self.nth(cutlass.min(j + 1, section.end - 1))


class RunOfKeys(Run):
    """`count` KV blocks of some rows, the first `num_masked` of them masked."""

    tail_first = True  # whether only the first one may have keys beyond the last
    behind: Int32 | int = 0  # blocks of the tile behind the last one that only other rows need

    def before(self, j: Int32) -> Int32:
        """The block at the position before, behind nth(j)."""
        return self.nth(j - 1)

    def more(self, j: Int32) -> cutlass.Boolean:
        """Whether a position follows; the block there, ahead of its nth(j)."""
        return j + 1 < self.count

    def after(self, j: Int32) -> Int32:
        return self.nth(j + 1)

    def last(self) -> Int32:
        """The block at the last position, behind its nth(j)."""
        return self.nth(self.count - 1)

    def sections(self) -> tuple[Section, Section]:
        """After the first one."""
        masked = self.num_masked
        return Section(True, 1, masked), Section(False, masked, self.count)

    def sections_before_last(self) -> tuple[Section, Section]:
        """All but the last one, which counts as masked."""
        last = self.count - 1
        masked = cutlass.min(self.num_masked, last)
        return Section(True, 0, masked), Section(False, masked, last)


@dataclass(frozen=True)
class Leftward(RunOfKeys):
    """`count` KV blocks of some rows from the right: the masked ones first. The first always counts as one: its code is
    there anyway.
    """

    band: BoundBand
    count: Int32
    first_row: Int32

    def nth(self, j: Int32) -> Int32:
        return self.count - 1 - j

    # What RunOfKeys says, in instructions that the compiler does not find by itself.

    def before(self, j: Int32) -> Int32:
        return self.count - j

    def more(self, j: Int32) -> cutlass.Boolean:
        return self.nth(j) > 0

    def after(self, j: Int32) -> Int32:
        return self.nth(j) - 1

    def last(self) -> Int32:
        return Int32(0)

    @property
    def num_masked(self) -> Int32:
        """Positions before this one count as masked."""
        if not self.band.causal:
            return Int32(1)
        full = cutlass.min(self.band.sizes.Sk, self.first_row + 1) // self.band.tile_n  # whole for every row
        return cutlass.max(self.count - full, 1)

    def columns_of_first(self, rows: int) -> Int32:
        """Keys of the first block that some of `rows` rows see; more than it has: all."""
        return self.band.num_visible(self.first_row + rows) - (self.count - 1) * self.band.tile_n


@dataclass(frozen=True)
class Downward(Run):
    """Query blocks of a KV block, one after the other, the same of every query head: the masked ones first."""

    begin: Int32
    middle: Int32
    end: Int32

    def nth(self, j: Int32) -> Int32:
        return j

    def total(self, heads: Int32) -> Int32:
        """Steps of so many query heads."""
        return heads * (self.end - self.begin)

    def of_head(self, head: Int32) -> Downward:
        return self

    def sections(self) -> tuple[Section, Section]:
        return Section(True, self.begin, self.middle), Section(False, self.middle, self.end)

    def whole(self) -> Section:
        """For those who do not see scores."""
        return Section(False, self.begin, self.end)

    def first(self, head: Int32, there: cutlass.Boolean) -> Step:
        """For those who walk over all query heads in one loop, from `head` on. there: whether there is a step."""
        return Step(head, self.begin)

    def after(self, step: Step, there: cutlass.Boolean) -> Step:
        """The next step: all of one head, then those of the next."""
        last = step.j + 1 >= self.end
        return Step(step.head + Int32(last), cutlass.select_(last, self.begin, step.j + 1))

    def at(self, step: Step) -> Downward:
        """The run of its head."""
        return self

    def masked(self, step: Step) -> cutlass.Boolean:
        return step.j < self.middle


@dataclass(frozen=True)
class Step:
    """Of a walk over the blocks of all query heads of a tile of keys."""

    head: Int32
    j: Int32  # position in the head's run

    @property
    def block(self) -> Int32:
        return self.j


@dataclass(frozen=True)
class Split:
    """A share of all KV blocks, from the left: decode's, one of several CTAs'."""

    begin: Int32
    end: Int32

    @classmethod
    def create(cls, total: Int32, number: Int32, parts: Int32) -> Split:
        """Sizes differ by one at most."""
        return cls(total * number // parts, total * (number + 1) // parts)

    def or_block(self, beyond: Int32) -> Split:
        """That block where there is none."""
        none = self.begin == self.end
        begin, end = (cutlass.select_(none, beyond + i, at) for i, at in enumerate((self.begin, self.end)))
        return Split(begin, end)

    def nth(self, j: Int32) -> Int32:
        """Positions are those of the whole walk."""
        return j
