"""Decode with shared values (MLA): V is the first columns of K, so that a kernel reads K alone.

DeepSeek-V2 (arXiv 2405.04434) calls the form of MLA with a single KV head absorbed. A row of the cache has 512 columns
of a latent vector, which are key and value, and 64 columns of a rotary key.

The kernel (sm90/decode_shared.py) loads K by TMA, one box for each KV block. This module tells where a block lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..decode.pack_gqa import DecodeTile
from .base import KernelFeatures
from .paged_kv import PagedAddressing, PageTable


@dataclass(frozen=True)
class BatchKvBlocks:
    """Location of KV blocks in a dense batch. The class has no fields, so a kernel needs no argument."""

    # True if memory behind the last key of a sequence may be read, whose values are undefined. TMA replaces rows beyond
    # the tensor by zeros.
    reads_undefined_rows = False

    def locate(self, decode_tile: DecodeTile, block: Int32, tile_n: int, num_pages: Int32) -> tuple[Int32, Int32]:
        """Return the index of a block in its batch or page, and the index of the batch or page.

        Args:
            decode_tile: tile of packed rows.
            block: index of the block in the sequence.
            tile_n: keys of a block.
            num_pages: number of batches or pages in the tensor.
        """
        return block, decode_tile.batch


@dataclass(frozen=True)
class PagedKvBlocks:
    """Location of KV blocks in a paged KV cache. A page is a multiple of a block, or the only page of a sequence.

    A block behind all pages lies beyond the rows of the last page, where TMA returns zeros.
    """

    page_table: PageTable

    reads_undefined_rows = True

    def locate(self, decode_tile: DecodeTile, block: Int32, tile_n: int, num_pages: Int32) -> tuple[Int32, Int32]:
        """Return the index of a block in its page, and the page. Page indices beyond the pool are clamped."""
        rows, page_indices, first_key = self.page_table.rows, self.page_table.page_indices, block * tile_n
        table_idx = cutlass.min(first_key // rows, page_indices.shape[1] - 1)
        page = cutlass.min(cutlass.max(page_indices[decode_tile.batch, table_idx], 0), num_pages - 1)
        return (first_key - table_idx * rows) // tile_n, page


KvBlocks = BatchKvBlocks | PagedKvBlocks


class SharedValuesFeature(KernelFeatures):
    """Kernel feature for decode with shared values."""

    def kv_blocks(self, call: object) -> KvBlocks:
        """Return the location of the KV blocks."""
        addressing = self.tile_addressing(call)
        return PagedKvBlocks(addressing.page_table) if isinstance(addressing, PagedAddressing) else BatchKvBlocks()


@cute.jit
def zero_rows(s: cute.Tensor, first: Int32, thread: Int32, threads: cutlass.Constexpr[int]):
    """Write zeros to the rows of a block in shared memory from row `first` on.

    All threads of a warpgroup, or of both warpgroups, take part.

    Args:
        s: rows and columns of 16-bit elements, in a layout of TMA.
        first: first row to be zeroed; negative numbers stand for 0.
        thread: index of the thread.
        threads: number of threads.
    """
    rows, columns = cute.size(s, mode=[0]), cute.size(s, mode=[1])
    vector = 8  # elements of a 16-byte store
    zeros = cute.make_rmem_tensor((vector,), s.element_type)
    zeros.fill(s.element_type(0))
    for unit in cutlass.range(thread, (rows - cutlass.max(first, 0)) * (columns // vector), threads, unroll=1):
        row, chunk = cutlass.max(first, 0) + unit // (columns // vector), unit % (columns // vector)
        target = cute.local_tile(s, (1, vector), (row, chunk))
        cute.autovec_copy(zeros, cute.make_tensor(target.iterator, cute.make_layout(vector)))
