"""Paged KV cache (vLLM, arXiv 2309.06180): K and V in a pool (pages, Hkv, rows of a page, D), and a block table.

The block table has the page indices of each sequence. Keys of a sequence count up to seqused_k[batch]. Memory behind
the last key is never read.

A sequence with a single page may have a page of any number of rows. With several pages, the number of rows of a page is
a multiple of PAGE_GROUP_ROWS. A thread copies rows of a group of PAGE_GROUP_ROWS adjacent rows, which then lie in a
single page, so that the thread looks up the page once. Page indices beyond the pool are clamped. The result is then
undefined, but no memory outside the pool is accessed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64

from ...registry.kernel_spec import PAGE_GROUP_ROWS, WARP
from ..decode.kv_load import K, KvLoader
from ..primitives import sm80
from ..tiling.equal_lengths import wait_for_previous_launch
from ..tiling.tile import DenseAddressing, Tile
from ..tiling.varlen import VarlenSeqlenInfo
from .base import KernelFeatures
from .quantized_kv_cache import FLOAT_BYTES, QuantizedKvLoader, QuantizedKvScales

if TYPE_CHECKING:
    from ..decode.pack_gqa import DecodeTile


@dataclass(frozen=True)
class PageTable:
    """Block table and KV lengths of all sequences."""

    page_indices: cute.Tensor  # (B, n)
    kv_lens: cute.Tensor  # (B,)
    rows: Int32  # rows of a page

    def keys(self, batch: Int32) -> Int32:
        """Return the KV length of a sequence."""
        return cutlass.min(cutlass.max(self.kv_lens[batch], 0), self.page_indices.shape[1] * self.rows)


@dataclass(frozen=True)
class PagedAddressing(DenseAddressing):
    """Tile addressing of a paged KV cache. The number of keys of a tile is the KV length of the sequence."""

    page_table: PageTable

    @property
    def num_sequences(self) -> Int32:
        return self.page_table.kv_lens.shape[0]

    def of_batch(self, tile: Tile, kv_head: Int32, batch: Int32) -> Tile:
        wait_for_previous_launch()  # the previous kernel may write the KV lengths
        keys = self.page_table.keys(batch)
        sizes = VarlenSeqlenInfo(tile.sizes.Sq, keys, cutlass.max(keys, 1))
        return replace(tile, kv_head=kv_head, batch=batch, sizes=sizes)


@dataclass(frozen=True)
class PagedRows:
    """Rows of a head in a pool, in the order of a sequence."""

    pool: cute.Tensor  # (pages, rows of a page, columns)
    page_indices: cute.Tensor  # (n,)
    length: Int32

    def offset_of(self, row: Int32) -> Int64:
        """Return the offset of an existing row from the start of the pool, in elements."""
        rows = self.pool.shape[1]
        table_idx = cutlass.min(row // rows, self.page_indices.shape[0] - 1)
        page = cutlass.min(cutlass.max(self.page_indices[table_idx], 0), self.pool.shape[0] - 1)
        return Int64(page) * self.pool.stride[0] + Int64(row - table_idx * rows) * self.pool.stride[1]

    @cute.jit
    def load(self, copier: cutlass.Constexpr[sm80.SmemCopier], first_row: Int32, tile: sm80.SmemTile):
        """Load rows as SmemCopier.load, with zeros beyond the last row. PAGE_GROUP_ROWS divides `first_row`."""
        thread = cute.arch.lane_idx() if copier.threads == WARP else cute.arch.thread_idx()[0]
        row, unit, step = copier.partition(tile, thread)
        first_target, columns = tile.unit(row, unit), self.pool.shape[2] - unit * sm80.VECTOR
        last = cutlass.max(self.length - 1, 0) // PAGE_GROUP_ROWS * PAGE_GROUP_ROWS
        for group in cutlass.range_constexpr(0, tile.rows, max(step, PAGE_GROUP_ROWS)):
            first = cutlass.min(first_row + (group + row // PAGE_GROUP_ROWS * PAGE_GROUP_ROWS), last)
            start = self.pool.iterator.toint() + (self.offset_of(first) + unit * sm80.VECTOR) * 2
            for r in cutlass.range_constexpr(group, group + max(step, PAGE_GROUP_ROWS), step):
                row_exists = first_row + row + r < self.length
                source = start + Int64(row % PAGE_GROUP_ROWS + (r - group)) * self.pool.stride[1] * 2
                target = (first_target ^ (r % 8 * sm80.VECTOR_BYTES)) + r * tile.row_bytes
                sm80.copy_row(source, target, tile, columns, row_exists)


@dataclass(frozen=True)
class PagedKvLoader(KvLoader):
    """KV loader for a paged KV cache in 16 bits."""

    page_table: PageTable

    def of_head(self, decode_tile: DecodeTile, x: cute.Tensor) -> PagedRows:
        pool = x[None, decode_tile.tile.kv_head, None, None]
        return PagedRows(pool, self.page_table.page_indices[decode_tile.batch, None], decode_tile.sizes.Sk)

    def load(self, copier: sm80.SmemCopier, rows: PagedRows, first_row: Int32, tile: sm80.SmemTile) -> None:
        rows.load(copier, first_row, tile)


@dataclass(frozen=True)
class PagedQuantizedKvLoader(QuantizedKvLoader):
    """KV loader for a paged KV cache in 8 bits. The scales are paged, too: (pages, Hkv, rows of a page)."""

    page_table: PageTable

    def of_head(self, decode_tile: DecodeTile, x: cute.Tensor) -> PagedRows:
        head_rows = x[None, decode_tile.tile.kv_head, None, None]
        (num_pages, rows, columns), (page_stride, row_stride, _) = head_rows.shape, head_rows.stride
        layout = cute.make_layout((num_pages, rows, columns // 2), stride=(page_stride // 2, row_stride // 2, 1))
        pool = cute.make_tensor(cute.recast_ptr(head_rows.iterator, dtype=Int16), layout)
        return PagedRows(pool, self.page_table.page_indices[decode_tile.batch, None], decode_tile.sizes.Sk)

    def load(self, copier: sm80.SmemCopier, rows: PagedRows, first_row: Int32, tile: sm80.SmemTile) -> None:
        rows.load(copier, first_row, tile)

    def scale_loader(self, decode_tile: DecodeTile, start: Int32, keys: int, stages: int) -> PagedKvScales:
        page_indices = self.page_table.page_indices[decode_tile.batch, None]
        k, v = (
            PagedRows(x[None, decode_tile.tile.kv_head, None], page_indices, decode_tile.sizes.Sk)
            for x in (self.k_scale, self.v_scale)
        )
        return PagedKvScales(k, v, start, keys, stages)


class PagedKvScales(QuantizedKvScales):
    """Loader of the scales of a paged 8-bit KV cache."""

    @cute.jit
    def load(self, which: cutlass.Constexpr[int], first: Int32, stage: Int32, threads: cutlass.Constexpr[int]):
        thread = cute.arch.lane_idx() if threads == WARP else cute.arch.thread_idx()[0]
        scales = self.k if which == K else self.v
        text = "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};"
        for key in cutlass.range_constexpr(0, self.keys, threads):
            key_of_thread = key + thread
            if key_of_thread < self.keys:
                row = cutlass.min(first + key_of_thread, cutlass.max(scales.length - 1, 0))
                size = cutlass.select_(first + key_of_thread < scales.length, Int32(FLOAT_BYTES), Int32(0))
                target = self.stage_address(which, stage) + key_of_thread * FLOAT_BYTES
                source = scales.pool.iterator + scales.offset_of(row)
                cute.arch.inline_ptx(text, read_only_args=[target, source.toint(), size])


class PagedKvFeature(KernelFeatures):
    """Kernel feature for decode with a paged KV cache."""

    def page_table(self, call: object) -> PageTable:
        return PageTable(call.block_table, call.seqused_k, call.k.shape[2])

    def tile_addressing(self, call: object) -> PagedAddressing:
        return PagedAddressing(self.page_table(call))

    def kv_loader(self, call: object) -> KvLoader:
        """Return the KV loader for 8 or 16 bits, depending on the features before this feature."""
        if super().kv_loader(call) is None:
            return PagedKvLoader(self.page_table(call))
        return PagedQuantizedKvLoader(call.k_scale, call.v_scale, call.k_is_rotated, self.page_table(call))
