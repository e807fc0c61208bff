"""Iterators over the KV blocks or query blocks visited by a tile, in visiting order.

An iterator also tells the ranges of blocks with masking. Producer warps, consumer warpgroups and reduction code use
the same object, so that all roles agree on the blocks.

A kernel receives a `BlockIterator` as an argument and binds the sizes of a tile with `bind(sizes, tile_m, tile_n)`.
Class attributes and Python values hold facts known at trace time. Fields hold the runtime arguments of a call. A range
of blocks (`BlockRange`) provides `subranges()`, the bounds of the loops, and `nth(j)`, the index of the block at
position j.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32

from .seqlen_info import SeqlenInfo

if TYPE_CHECKING:
    from .tile import Tile


@dataclass(frozen=True)
class BlockSubrange:
    """Subrange of a block range: the positions from `begin` to `end`.

    `masked` is True if all score stages apply in this subrange. If False, only stages with effect everywhere run.
    """

    masked: bool
    begin: Int32 | int
    end: Int32


@dataclass(frozen=True)
class BlockIterator:
    """Base class of the block iterators accepted by kernels as arguments."""

    # True if rows of a tile may see different numbers of keys. Tiles then differ in length, too.
    tile_lengths_vary = False
    # True if a fused backward on Hopper visits the query heads of a group together (`GroupQueryBlocks`).
    visits_group_together = False


@dataclass(frozen=True)
class FullBlocks(BlockIterator):
    """Block iterator for full attention: every query sees every key, and blocks are visited in order.

    The class has no fields, so a kernel needs no argument.
    """

    causal = False

    def bind(self, sizes: SeqlenInfo, tile_m: int, tile_n: int) -> BoundBlocks:
        return BoundBlocks(self.causal, sizes, tile_m, tile_n)


@dataclass(frozen=True)
class CausalBlocks(FullBlocks):
    """Block iterator for causal attention: key j is visible to query i if and only if j <= i.

    The rule also holds for Sq != Sk (top-left alignment of PyTorch).
    """

    causal = True
    tile_lengths_vary = visits_group_together = True


@dataclass(frozen=True)
class BoundBlocks:
    """Block iterator of a sequence, for blocks of `tile_m` queries and `tile_n` keys."""

    causal: bool
    sizes: SeqlenInfo
    tile_m: int
    tile_n: int

    @property
    def tile_lengths_vary(self) -> bool:
        return self.causal

    def num_visible_keys(self, end_row: Int32) -> Int32:
        """Return the number of keys visible to some row before `end_row`, at least one."""
        return (
            cutlass.min(self.sizes.seqlen_k_at_least_one, end_row) if self.causal else self.sizes.seqlen_k_at_least_one
        )

    def num_blocks(self, end_row: Int32) -> Int32:
        """Return the number of KV blocks with a key visible to some row before `end_row`, at least one."""
        return cute.ceil_div(self.num_visible_keys(end_row), self.tile_n)

    def kv_blocks(self, tile: Tile) -> KvBlockRange:
        """Return the KV blocks of a tile of `tile_m` rows."""
        return KvBlockRange(self, self.num_blocks((tile.block + 1) * self.tile_m), tile.block * self.tile_m)

    def kv_blocks_of_rows(self, tile: Tile, first_row: Int32) -> KvBlockRange:
        """Return the KV blocks of a tile of `tile_m` rows from `first_row` on.

        Row indices are computed from `first_row`, in kernels with the value at hand.
        """
        return KvBlockRange(self, self.num_blocks(first_row + self.tile_m), first_row)

    def kv_range_for_warpgroup(
        self, tile: Tile, first_row: Int32, rows: int, warpgroup_ranges_differ: bool
    ) -> WarpgroupKvRange:
        """Return the KV blocks for one warpgroup's part of a tile.

        Rows beyond the last row of the sequence take part in a single block. The results of such rows are discarded.

        Args:
            tile: the tile.
            first_row: first row of the part.
            rows: number of rows of the part.
            warpgroup_ranges_differ: True if some parts of the tile may see fewer blocks than the rest of the tile.

        Returns:
            The KV blocks of the part, and the number of skipped leading KV blocks.
        """
        tile_blocks = self.num_blocks((tile.block + 1) * self.tile_m)
        if not warpgroup_ranges_differ:
            return WarpgroupKvRange(Int32(0), KvBlockRange(self, tile_blocks, first_row))
        num_blocks = cutlass.select_(first_row < self.sizes.Sq, self.num_blocks(first_row + rows), 1)
        # Without a uniform value, ptxas recomputes `num_blocks` for every block.
        num_blocks = cute.arch.make_warp_uniform(num_blocks)
        return WarpgroupKvRange(tile_blocks - num_blocks, KvBlockRange(self, num_blocks, first_row))

    def num_kv_blocks(self) -> Int32:
        """Return the number of KV blocks visible to some query."""
        return self.num_blocks(self.sizes.Sq)

    def allocate_smem(self, smem: cutlass.memory.SmemAllocator) -> BoundBlocks:
        """Decode: return the iterator with shared memory for the results of a scan (none is needed here)."""
        return self

    def scan(self, decode_tile: object) -> None:
        """Decode: scan for visible blocks (nothing to do here). Every thread calls `scan` before roles part.

        Args:
            decode_tile: a `pack_gqa.DecodeTile`.
        """

    def split_range(self, split: Int32, num_splits: Int32) -> SplitKvRange:
        """Decode: return the KV blocks of split `split` of `num_splits` splits.

        A split without blocks gets the block behind the last block, if the sequence may be empty.
        """
        total = self.num_kv_blocks()
        split_range = SplitKvRange.create(total, split, num_splits)
        return split_range.or_block(total) if self.sizes.may_be_empty else split_range

    def masks(self, kv_range: SplitKvRange, j: Int32) -> cutlass.Boolean:
        """Decode: return whether some row cannot see all keys of the block at position j."""
        return (kv_range.nth(j) + 1) * self.tile_n > self.sizes.Sk

    @property
    def may_mask(self) -> bool:
        """Decode: True if a row may see no key of a block."""
        return self.sizes.may_be_empty

    def query_blocks(self, tile: Tile) -> QueryBlockRange:
        """Return the query blocks with visible keys in a KV block.

        If the KV block extends beyond the last key, every step is masked. Otherwise only the steps on the diagonal are
        masked.
        """
        first_key, end = tile.block * self.tile_n, cute.ceil_div(self.sizes.Sq, self.tile_m)
        begin = masked_end = Int32(0)
        if self.causal:
            begin = cutlass.min(first_key // self.tile_m, end)
            masked_end = cutlass.min(cute.ceil_div(first_key + self.tile_n - 1, self.tile_m), end)
        masked_end = cutlass.select_(first_key + self.tile_n > self.sizes.Sk, end, masked_end)
        return QueryBlockRange(begin, masked_end, end)

    def accumulation_rank(self, n_block: Int32, query_range: QueryBlockRange, j: Int32, num_n_blocks: Int32) -> Int32:
        """Return the accumulation rank of a KV block for a query block, in an order that begins with the last KV block.

        Args:
            n_block: index of the KV block.
            query_range: query blocks of the KV block.
            j: position of the query block in `query_range`.
            num_n_blocks: number of KV blocks.

        Returns:
            The number of KV blocks accumulated into the query block before KV block `n_block`.
        """
        return cutlass.min(query_range.nth(j) * self.tile_m // self.tile_n, num_n_blocks - 1) - n_block


class WarpgroupKvRange(NamedTuple):
    """KV blocks for one warpgroup's part of a tile."""

    num_leading_skipped: Int32  # leading KV blocks of the tile, needed only by the remaining rows of the tile
    kv_range: KvBlocks


class BlockRange:
    """Base class of block ranges. `nth(j)` returns the block at position j."""

    def next(self, j: Int32, subrange: BlockSubrange) -> Int32:
        """Return the block of the step after j. At the last step of a subrange, return the block of step j."""
        return self.nth(cutlass.min(j + 1, subrange.end - 1))

    def step(self, j: Int32) -> QueryStep:
        """Backward: return the block and the query head at position j."""
        return QueryStep(self.nth(j), 0)


class KvBlocks(BlockRange):
    """Range of `count` KV blocks of some rows. The first `num_masked` blocks are masked."""

    tail_first = True  # True if only the first block may have keys beyond the last key
    # Number of blocks of the tile behind the last block of the range, needed only by the remaining rows of the tile.
    num_trailing_skipped: Int32 | int = 0

    @property
    def may_skip_trailing(self) -> bool:
        """True if the tile may have blocks behind the last block of the range, a fact known at trace time."""
        return not isinstance(self.num_trailing_skipped, int)

    def before(self, j: Int32) -> Int32:
        """Return the block at position j - 1. The caller has already called `nth(j)`."""
        return self.nth(j - 1)

    def has_next(self, j: Int32) -> cutlass.Boolean:
        """Return whether a position follows j.

        If so, `after(j)` returns the block there, before `nth(j + 1)` is called.
        """
        return j + 1 < self.count

    def after(self, j: Int32) -> Int32:
        return self.nth(j + 1)

    def last(self) -> Int32:
        """Return the block at the last position. The caller has already called `nth` for the last position."""
        return self.nth(self.count - 1)

    def subranges(self) -> tuple[BlockSubrange, BlockSubrange]:
        """Return the subranges after the first block: masked, then unmasked."""
        masked = self.num_masked
        return BlockSubrange(True, 1, masked), BlockSubrange(False, masked, self.count)

    def subranges_before_last(self) -> tuple[BlockSubrange, BlockSubrange]:
        """Return the subranges of all blocks except the last block, which counts as masked."""
        last = self.count - 1
        masked = cutlass.min(self.num_masked, last)
        return BlockSubrange(True, 0, masked), BlockSubrange(False, masked, last)


@dataclass(frozen=True)
class KvBlockRange(KvBlocks):
    """Range of `count` KV blocks of some rows, visited from right to left: the masked blocks first.

    The first block always counts as masked, because its code exists in any case.
    """

    bound_blocks: BoundBlocks
    count: Int32
    first_row: Int32

    def nth(self, j: Int32) -> Int32:
        return self.count - 1 - j

    # Overrides of KvBlocks with the same results, in a form that needs fewer instructions. The compiler does not find
    # the shorter form.

    def before(self, j: Int32) -> Int32:
        return self.count - j

    def has_next(self, j: Int32) -> cutlass.Boolean:
        return self.nth(j) > 0

    def after(self, j: Int32) -> Int32:
        return self.nth(j) - 1

    def last(self) -> Int32:
        return Int32(0)

    @property
    def num_masked(self) -> Int32:
        """Number of leading positions that count as masked."""
        if not self.bound_blocks.causal:
            return Int32(1)
        # Number of blocks visible to every row.
        full = cutlass.min(self.bound_blocks.sizes.Sk, self.first_row + 1) // self.bound_blocks.tile_n
        return cutlass.max(self.count - full, 1)

    def columns_of_first(self, rows: int) -> Int32:
        """Return the number of keys of the first block that some of `rows` rows see.

        A result larger than the block means all keys of the block.
        """
        return self.bound_blocks.num_visible_keys(self.first_row + rows) - (self.count - 1) * self.bound_blocks.tile_n


@dataclass(frozen=True)
class QueryBlockRange(BlockRange):
    """Range of the query blocks of a KV block, visited in increasing order, equal for every query head.

    The masked blocks come first.
    """

    begin: Int32
    masked_end: Int32
    end: Int32

    def nth(self, j: Int32) -> Int32:
        return j

    def total(self, heads: Int32) -> Int32:
        """Return the number of steps for `heads` query heads."""
        return heads * (self.end - self.begin)

    def outer_heads(self, group: Int32) -> Int32 | int:
        """Return the number of heads of the loop around the steps, for `group` query heads of a KV head."""
        return group

    def of_head(self, head: Int32) -> QueryBlockRange:
        return self

    def subranges(self) -> tuple[BlockSubrange, BlockSubrange]:
        return BlockSubrange(True, self.begin, self.masked_end), BlockSubrange(False, self.masked_end, self.end)

    def all_blocks(self) -> BlockSubrange:
        """Return the whole range as one unmasked subrange, for roles without scores."""
        return BlockSubrange(False, self.begin, self.end)

    def first(self, head: Int32, is_valid: cutlass.Boolean) -> QueryBlockStep:
        """Return the first step of a single loop over all query heads, from `head` on.

        Args:
            head: first query head.
            is_valid: whether there is a step.
        """
        return QueryBlockStep(head, self.begin)

    def after(self, step: QueryBlockStep, is_valid: cutlass.Boolean) -> QueryBlockStep:
        """Return the step after `step`: all blocks of a head, then the blocks of the next head."""
        last = step.j + 1 >= self.end
        return QueryBlockStep(step.head + Int32(last), cutlass.select_(last, self.begin, step.j + 1))

    def range_of(self, step: QueryBlockStep) -> QueryBlockRange:
        """Return the block range of the head of `step`."""
        return self

    def masked(self, step: QueryBlockStep) -> cutlass.Boolean:
        return step.j < self.masked_end


class QueryStep(NamedTuple):
    """Block of rows and query head of a backward step."""

    block: Int32
    head: Int32 | int  # counted from the head of the loop around the steps (`outer_heads`)


@dataclass(frozen=True)
class GroupQueryBlocks(BlockRange):
    """Query blocks of a KV block, with all query heads of the group at a block before the next block.

    With a causal mask, the tiles of a KV head begin at different rows and end at the last row. In this order, from the
    last row to the diagonal, the tiles read the same rows at the same time. Tiles that visit one head after the other
    drift apart at every head by the difference of their lengths, and rows leave L2 between two tiles.

    Neighboring tiles begin with different heads of the group, so that fewer tiles add to the same dQ at the same time.
    Positions count steps.
    """

    blocks: QueryBlockRange
    group: cute.FastDivmodDivisorV2  # query heads of a KV head, at least two
    first_head: Int32

    @classmethod
    def create(cls, blocks: QueryBlockRange, group: cute.FastDivmodDivisorV2, n_block: Int32) -> GroupQueryBlocks:
        """Return the query blocks of KV block number `n_block`."""
        return cls(blocks, group, n_block % group)

    def outer_heads(self, group: Int32) -> int:
        return 1

    def of_head(self, head: Int32) -> GroupQueryBlocks:
        return self

    def step(self, j: Int32) -> QueryStep:
        blocks, nth_head = divmod(j, self.group)
        head, heads = nth_head + self.first_head, self.group.divisor
        return QueryStep(self.blocks.end - 1 - blocks, cutlass.select_(head >= heads, head - heads, head))

    def nth(self, j: Int32) -> Int32:
        return self.blocks.end - 1 - j // self.group

    def subranges(self) -> tuple[BlockSubrange, BlockSubrange]:
        full = (self.blocks.end - self.blocks.masked_end) * self.group.divisor
        return BlockSubrange(False, Int32(0), full), BlockSubrange(True, full, self.all_blocks().end)

    def all_blocks(self) -> BlockSubrange:
        return BlockSubrange(False, Int32(0), self.blocks.total(self.group.divisor))


@dataclass(frozen=True)
class QueryBlockStep:
    """Step of an iteration over the query blocks of all query heads of a KV tile."""

    head: Int32
    j: Int32  # position in the block range of the head

    @property
    def block(self) -> Int32:
        return self.j


@dataclass(frozen=True)
class SplitKvRange:
    """Range of KV blocks of a split, in increasing order.

    In split-KV decode, several CTAs share the KV blocks of a sequence.
    """

    begin: Int32
    end: Int32

    @classmethod
    def create(cls, total: Int32, split: Int32, num_splits: Int32) -> SplitKvRange:
        """Return split `split` of `num_splits` splits of `total` blocks. Sizes differ by at most a block."""
        return cls(total * split // num_splits, total * (split + 1) // num_splits)

    def or_block(self, beyond: Int32) -> SplitKvRange:
        """Return the range, or the single block `beyond` if the range is empty."""
        is_empty = self.begin == self.end
        begin, end = (cutlass.select_(is_empty, beyond + i, bound) for i, bound in enumerate((self.begin, self.end)))
        return SplitKvRange(begin, end)

    def nth(self, j: Int32) -> Int32:
        """Return the block at position j. Positions count from the first block of the whole sequence."""
        return j
