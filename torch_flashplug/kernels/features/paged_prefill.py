"""Packed sequences of queries over a paged KV cache, for the forward of Hopper.

K and V are in a pool (pages, Hkv, rows of a page, D). Row i of the block table has the page indices of sequence i, and
the first seqused_k[i] keys exist. The tile list of packed sequences (tiling/varlen.py) has the numbers of rows and of
keys of each tile, so the host waits for no value.

TMA loads boxes of PAGE_GROUP_ROWS rows. A box lies in a single page, and the page index is a TMA coordinate. A box
behind the last key gets a page index beyond the pool, so that TMA writes zeros. The block table is read for boxes
with keys alone. Page indices outside of the pool give wrong results, but no memory outside of the pool is accessed.

At most one box of a sequence has both keys and unused rows. The score stages mask the unused rows of K. In V, a NaN of
an unused row would reach the output, since 0 * NaN is NaN. The producer warp therefore copies the keys of the box of V
with cp.async, and writes zeros behind the last key. Consumer warpgroups work as for packed sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ...registry.kernel_spec import PAGE_GROUP_ROWS, WARP
from ..preprocess.varlen_tile_list import VarlenInputs
from ..primitives import sm80, sm90
from ..tiling.varlen import TileListEntry, VarlenAddressing, VarlenTileList
from .base import KernelFeatures
from .paged_kv import PagedRows, PageTable

# Rows and columns of a TMA box. So many columns of 16 bits fill a line of the swizzle.
BOX_ROWS, BOX_COLUMNS = PAGE_GROUP_ROWS, 64
LINE_UNITS = BOX_COLUMNS // sm80.VECTOR  # 16-byte units of a row of a box


def in_boxes(config: sm90.TmaLoadConfig, rows_lead: bool) -> sm90.TmaLoadConfig:
    """Return the load configuration of a box. The bytes of a box in shared memory are a part of a block of `config`."""
    box = (BOX_ROWS, BOX_COLUMNS) if rows_lead else (BOX_COLUMNS, BOX_ROWS)
    return sm90.TmaLoadConfig.create(config.element, *box, 1, major="rows" if rows_lead else "columns")


@dataclass(frozen=True)
class PagedBlocks:
    """Blocks of K or V of a sequence and a head, loaded box by box by the producer warp."""

    atom: cute.CopyAtom
    boxes: cute.Tensor  # global boxes: (TMA, boxes of a page, columns in boxes, pages)
    stages: cute.Tensor  # shared boxes: (TMA, boxes of a block, columns in boxes, stage)
    block_rows: int  # keys of a block
    keys: PagedKeys
    values: PagedRows | None  # V, to clear the rows behind the last key; None for K
    buffer: cute.Tensor  # shared memory of all stages

    @cute.jit
    def load(self, pipeline: sm90.Pipeline, block: Int32, count: Int32):
        """Load a block as block number `count` of the pipeline, as soon as the stage is free."""
        # Lane i looks up box i while the stage is still in use.
        box_idx, page = self.keys.find_box(block * self.block_rows + cute.arch.lane_idx() * BOX_ROWS)
        pipeline.producer_wait(count)
        if cutlass.const_expr(self.values is None):
            self.start_boxes(pipeline, count, box_idx, page, Int32(-1))
            pipeline.producer_commit(count)
        else:
            mixed_box = self.keys.mixed_box(block * self.block_rows, self.block_rows)
            self.start_boxes(pipeline, count, box_idx, page, mixed_box)
            if mixed_box >= 0:
                self.copy_keys(pipeline.stage_index(count), block, mixed_box)
            cute.arch.sync_warp()
            pipeline.producer_commit(count)

    @cute.jit
    def start_boxes(self, pipeline: sm90.Pipeline, count: Int32, box_idx: Int32, page: Int32, skipped_box: Int32):
        """Start the TMA loads of all boxes except box `skipped_box` of the block.

        Args:
            pipeline: pipeline of the operand.
            count: running count of blocks in the pipeline.
            box_idx: index of the lane's box in a page.
            page: page of the lane's box.
            skipped_box: number of a box in the block, or a negative number.
        """
        boxes, columns = cute.size(self.stages, mode=[1]), cute.size(self.stages, mode=[2])
        stage, arrival = pipeline.stage_index(count), pipeline.arrival(count)
        loaded_bytes = Int32(pipeline.stage_bytes)
        if skipped_box >= 0:
            loaded_bytes = Int32(pipeline.stage_bytes // boxes * (boxes - 1))
        with cute.arch.elect_one():
            cute.arch.mbarrier_expect_tx(arrival, loaded_bytes)
        for i in cutlass.range(boxes, unroll=1):
            box = (cute.arch.shuffle_sync(x, i) for x in (box_idx, page))
            row, source_page = (cute.arch.make_warp_uniform(x) for x in box)
            if skipped_box != i:
                for c in cutlass.range_constexpr(columns):
                    source = self.boxes[None, row, c, source_page]
                    cute.copy(self.atom, source, self.stages[None, i, c, stage], tma_bar_ptr=arrival)

    @cute.jit
    def copy_keys(self, stage: Int32, block: Int32, box: Int32):
        """Copy the keys of a box of V, and write zeros behind the last key. The TMA loads go on meanwhile."""
        columns = cute.size(self.stages, mode=[2]) * BOX_COLUMNS
        start = self.buffer[None, None, stage].iterator.toint() + box * (BOX_ROWS * BOX_COLUMNS * 2)
        tile = sm80.SmemTile(start, self.block_rows, columns)
        unit, first_key = cute.arch.lane_idx() % LINE_UNITS, block * self.block_rows + box * BOX_ROWS
        source = self.values.pool.iterator.toint() + (self.values.offset_of(first_key) + unit * sm80.VECTOR) * 2
        for row in cutlass.range_constexpr(0, BOX_ROWS, WARP // LINE_UNITS):
            nth = row + cute.arch.lane_idx() // LINE_UNITS
            exists = first_key + nth < self.values.length
            of_row = source + Int64(nth) * self.values.pool.stride[1] * 2
            sm80.copy_row(of_row, tile.unit(nth, unit), tile, self.values.pool.shape[2] - unit * sm80.VECTOR, exists)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")  # the wgmmas of the consumers read the copies


@dataclass(frozen=True)
class PagedKeys:
    """Keys of a sequence in the pools of K and V."""

    page_table: PageTable
    values: cute.Tensor  # pool of V: (pages, Hkv, rows of a page, Dv)
    sequence: Int32  # row of the block table
    length: Int32

    def of_head(self, x: sm90.TmaOperand, head: Int32) -> PagedOperand:
        return PagedOperand(x.atom, x.m[None, None, head, None], x.s, self, head)

    @cute.jit
    def find_box(self, first_key: Int32) -> tuple[Int32, Int32]:
        """Return the index of a box in a page, and the page; a page behind the pool for a box without keys."""
        box_idx, page = Int32(0), self.values.shape[0]
        if first_key < self.length:
            entry = first_key // self.page_table.rows
            box_idx = (first_key - entry * self.page_table.rows) // BOX_ROWS
            page = self.page_table.page_indices[self.sequence, entry]
        return box_idx, page

    @cute.jit
    def mixed_box(self, first_key: Int32, rows: cutlass.Constexpr[int]) -> Int32:
        """Return the number of the box with keys and unused rows in a block of `rows` keys, or -1."""
        keys, box = self.length - first_key, Int32(-1)
        if (keys < rows) & (self.length % BOX_ROWS != 0):
            box = keys // BOX_ROWS
        return box


@dataclass(frozen=True)
class PagedOperand:
    """K or V of a head in a pool, for TMA."""

    atom: cute.CopyAtom
    m: cute.Tensor  # TMA coordinates (rows of a page, columns, pages), or (columns, rows of a page, pages)
    s: cute.Tensor  # shared memory (rows, columns, stage), or (columns, rows, stage)
    keys: PagedKeys
    head: Int32

    def blocks(self, shape: tuple[int, int], coordinate: tuple[int | None, int | None]) -> PagedBlocks:
        """Return the blocks of the sequence.

        Args:
            shape: rows and columns of a block, or columns and rows.
            coordinate: None for rows, and 0 for columns, because a block has all columns.
        """
        rows_lead = coordinate[0] is None
        assert 0 in coordinate, "a block of a paged KV cache has all columns"
        box = (BOX_ROWS, BOX_COLUMNS) if rows_lead else (BOX_COLUMNS, BOX_ROWS)
        boxes, stages = (cute.local_tile(x, box, (None, None, None)) for x in (self.m, self.s))
        parts = (cute.group_modes(x, 0, 2) for x in (stages, boxes))
        shared, of_pool = cpasync.tma_partition(self.atom, 0, cute.make_layout(1), *parts)
        if not rows_lead:
            shared, of_pool = (exchange_modes(x) for x in (shared, of_pool))
        pool, table = self.keys.values[None, self.head, None, None], self.keys.page_table.page_indices
        values = None if rows_lead else PagedRows(pool, table[self.keys.sequence, None], self.keys.length)
        return PagedBlocks(self.atom, of_pool, shared, shape[0 if rows_lead else 1], self.keys, values, self.s)


def exchange_modes(x: cute.Tensor) -> cute.Tensor:
    """Return a view with modes 1 and 2 of four modes exchanged."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1, 3]))


@dataclass(frozen=True)
class PagedTileList(VarlenTileList):
    """Tile list of packed sequences of queries with a paged KV cache."""

    page_table: PageTable | None = None
    values: cute.Tensor | None = None

    def opposite_slice(self, entry: TileListEntry) -> PagedKeys:
        # The first sequence of the list has the rows ahead of the caller's first sequence, and no keys.
        return PagedKeys(self.page_table, self.values, entry.sequence_idx - 1, entry.opposite_length)


@dataclass(frozen=True)
class PagedVarlenAddressing(VarlenAddressing):
    """Tile addressing of packed sequences of queries with a paged KV cache."""

    def tma_of_keys(
        self, config: sm90.TmaLoadConfig, x: cute.Tensor, rows_lead: bool
    ) -> tuple[cute.CopyAtom, cute.Tensor]:
        pool = sm90.rows_first(x) if rows_lead else sm90.columns_first(x)
        return in_boxes(config, rows_lead).tma(pool)

    def keys_of_head(self, k: cute.Tensor) -> Int64:
        """Return the capacity of the block table."""
        sequences, pages = self.rows.page_table.page_indices.shape
        return Int64(sequences) * pages * self.rows.page_table.rows


@dataclass(frozen=True)
class PagedInputs(VarlenInputs):
    """Lengths of a call with pages. `keys` is the capacity of a sequence."""

    def opposite_range(self, sequence: Int32, of_keys: bool) -> tuple[Int32, Int32]:
        is_sequence = (sequence > 0) & (sequence < self.sequences - 1)
        return Int32(0), self.kv_len(sequence - 1, cutlass.select_(is_sequence, self.keys, 0))


class PagedPrefillFeature(KernelFeatures):
    """Kernel feature for packed sequences over a paged KV cache. The feature of packed sequences comes first."""

    def page_table(self, call: object) -> PageTable:
        return PageTable(call.block_table, call.seqused_k, call.k.shape[2])

    def varlen_inputs(self, call: object) -> PagedInputs:
        page_table = self.page_table(call)
        capacity = page_table.page_indices.shape[1] * page_table.rows
        return PagedInputs(
            call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k, call.q.shape[2], capacity,
            compares_lengths=Int32(0), is_plan=Int32(call.num_ctas == 0),
        )  # fmt: skip

    def tile_addressing(self, call: object) -> PagedVarlenAddressing:
        plain = super().tile_addressing(call)
        rows = PagedTileList(plain.rows.entries, plain.rows.header, self.page_table(call), call.v)
        return PagedVarlenAddressing(rows=rows, total_keys=plain.total_keys)
