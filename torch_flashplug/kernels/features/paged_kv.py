"""Paged KV cache (vLLM, arXiv 2309.06180): K and V in a pool (pages, Hkv, rows of a page, D), and a block table.

The block table has the page indices of each sequence. Keys of a sequence count up to used_k[batch]. Memory behind the
last key is never read.

A sequence with a single page may have a page of any number of rows. With several pages, the number of rows of a page is
a multiple of GROUP. A thread copies rows of a group of GROUP adjacent rows, which then lie in a single page, so that
the thread looks up the page once. Page indices beyond the pool are clamped. The result is then undefined, but no memory
outside the pool is accessed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64

from ...registry.kernel_spec import WARP
from ..decode.kv_load import K, KvLoader
from ..primitives import sm80
from ..tiling.tile import DenseAddressing, Tile
from ..tiling.varlen import VarlenSeqlenInfo
from .base import KernelFeatures
from .quantized_kv_cache import FLOAT, QuantizedKvLoader, QuantizedKvScales

if TYPE_CHECKING:
    from ..decode.pack_gqa import DecodeTile

GROUP = 16


@dataclass(frozen=True)
class PageTable:
    """Block table and KV lengths of all sequences."""

    numbers: cute.Tensor  # (B, n)
    used: cute.Tensor  # (B,)
    rows: Int32  # rows of a page

    def keys(self, batch: Int32) -> Int32:
        """Return the KV length of a sequence."""
        return cutlass.min(cutlass.max(self.used[batch], 0), self.numbers.shape[1] * self.rows)


@dataclass(frozen=True)
class PagedAddressing(DenseAddressing):
    """Tile addressing of a paged KV cache. The number of keys of a tile is the KV length of the sequence."""

    pages: PageTable

    def of_batch(self, tile: Tile, kv_head: Int32, batch: Int32) -> Tile:
        keys = self.pages.keys(batch)
        sizes = VarlenSeqlenInfo(tile.sizes.Sq, keys, cutlass.max(keys, 1))
        return replace(tile, kv_head=kv_head, batch=batch, sizes=sizes)


@dataclass(frozen=True)
class PagedRows:
    """Rows of a head in a pool, in the order of a sequence."""

    pool: cute.Tensor  # (pages, rows of a page, columns)
    numbers: cute.Tensor  # (n,)
    length: Int32

    def place(self, row: Int32) -> Int64:
        """Return the offset of an existing row from the start of the pool, in elements."""
        rows = self.pool.shape[1]
        nth = cutlass.min(row // rows, self.numbers.shape[0] - 1)
        number = cutlass.min(cutlass.max(self.numbers[nth], 0), self.pool.shape[0] - 1)
        return Int64(number) * self.pool.stride[0] + Int64(row - nth * rows) * self.pool.stride[1]

    @cute.jit
    def load(self, mover: cutlass.Constexpr[sm80.SmemCopier], first_row: Int32, tile: sm80.SmemTile):
        """Load rows from `first_row` on, a multiple of GROUP, as Mover.load, with zeros beyond the last row."""
        thread = cute.arch.lane_idx() if mover.threads == WARP else cute.arch.thread_idx()[0]
        row, unit, step = mover.partition(tile, thread)
        place, columns = tile.unit(row, unit), self.pool.shape[2] - unit * sm80.VECTOR
        last = cutlass.max(self.length - 1, 0) // GROUP * GROUP
        for group in cutlass.range_constexpr(0, tile.rows, max(step, GROUP)):
            first = cutlass.min(first_row + (group + row // GROUP * GROUP), last)
            start = self.pool.iterator.toint() + (self.place(first) + unit * sm80.VECTOR) * 2
            for r in cutlass.range_constexpr(group, group + max(step, GROUP), step):
                there = first_row + row + r < self.length
                here = start + Int64(row % GROUP + (r - group)) * self.pool.stride[1] * 2
                target = (place ^ (r % 8 * sm80.VECTOR_BYTES)) + r * tile.row_bytes
                sm80.copy_row(here, target, tile, columns, there)


@dataclass(frozen=True)
class PagedKvLoader(KvLoader):
    """KV loader for a paged KV cache in 16 bits."""

    pages: PageTable

    def of_head(self, part: DecodeTile, x: cute.Tensor) -> PagedRows:
        pool = x[None, part.tile.kv_head, None, None]
        return PagedRows(pool, self.pages.numbers[part.batch, None], part.sizes.Sk)

    def load(self, mover: sm80.SmemCopier, rows: PagedRows, first_row: Int32, tile: sm80.SmemTile) -> None:
        rows.load(mover, first_row, tile)


@dataclass(frozen=True)
class PagedQuantizedKvLoader(QuantizedKvLoader):
    """KV loader for a paged KV cache in 8 bits. The scales are paged, too: (pages, Hkv, rows of a page)."""

    pages: PageTable

    def of_head(self, part: DecodeTile, x: cute.Tensor) -> PagedRows:
        mine = x[None, part.tile.kv_head, None, None]
        (many, rows, columns), (between, stride, _) = mine.shape, mine.stride
        layout = cute.make_layout((many, rows, columns // 2), stride=(between // 2, stride // 2, 1))
        pool = cute.make_tensor(cute.recast_ptr(mine.iterator, dtype=Int16), layout)
        return PagedRows(pool, self.pages.numbers[part.batch, None], part.sizes.Sk)

    def load(self, mover: sm80.SmemCopier, rows: PagedRows, first_row: Int32, tile: sm80.SmemTile) -> None:
        rows.load(mover, first_row, tile)

    def scale_loader(self, part: DecodeTile, start: Int32, keys: int, stages: int) -> PagedKvScales:
        numbers = self.pages.numbers[part.batch, None]
        k, v = (
            PagedRows(x[None, part.tile.kv_head, None], numbers, part.sizes.Sk) for x in (self.k_scale, self.v_scale)
        )  # fmt: skip
        return PagedKvScales(k, v, start, keys, stages)


class PagedKvScales(QuantizedKvScales):
    """Loader of the scales of a paged 8-bit KV cache."""

    @cute.jit
    def load(self, which: cutlass.Constexpr[int], first: Int32, slot: Int32, threads: cutlass.Constexpr[int]):
        thread = cute.arch.lane_idx() if threads == WARP else cute.arch.thread_idx()[0]
        scales = self.k if which == K else self.v
        text = "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};"
        for key in cutlass.range_constexpr(0, self.keys, threads):
            mine = key + thread
            if mine < self.keys:
                row = cutlass.min(first + mine, cutlass.max(scales.length - 1, 0))
                size = cutlass.select_(first + mine < scales.length, Int32(FLOAT), Int32(0))
                target, source = self.stage_index(which, slot) + mine * FLOAT, scales.pool.iterator + scales.place(row)
                cute.arch.inline_ptx(text, read_only_args=[target, source.toint(), size])


class PagedKvFeature(KernelFeatures):
    """Kernel feature for decode with a paged KV cache."""

    def pages(self, call: object) -> PageTable:
        return PageTable(call.pages, call.used_k, call.k.shape[2])

    def pieces(self, call: object) -> PagedAddressing:
        return PagedAddressing(self.pages(call))

    def stored(self, call: object) -> KvLoader:
        """Return the KV loader for 8 or 16 bits, depending on the features before this feature."""
        if super().stored(call) is None:
            return PagedKvLoader(self.pages(call))
        return PagedQuantizedKvLoader(call.k_scale, call.v_scale, call.rotated, self.pages(call))
