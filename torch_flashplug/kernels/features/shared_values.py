"""Decode with shared values (MLA): V is the first columns of K, and a kernel reads K alone.

DeepSeek-V2 (arXiv 2405.04434) calls the form of MLA with a single KV head absorbed. A row of the cache has 512 columns
of a latent vector, which are key and value, and 64 columns of a rotary key.

The kernel (sm90/decode_shared.py) loads K by TMA. The module locates the boxes of a KV block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...registry.kernel_spec import PAGE_GROUP_ROWS
from ..decode.pack_gqa import DecodeTile
from ..primitives.fragments import LOG2_E
from ..score_stages.pipeline import ScorePipeline
from .base import KernelFeatures
from .paged_kv import PagedAddressing, PageTable


@dataclass(frozen=True)
class BatchKvBlocks:
    """Location of KV blocks in a dense batch. The class has no fields, so a kernel needs no argument."""

    # True if memory behind the last key of a sequence may be read, with undefined values. TMA replaces rows beyond
    # the tensor by zeros.
    reads_undefined_rows = False

    def box_rows(self, tile_n: int) -> int:
        """Return the rows of a TMA box, for blocks of `tile_n` keys."""
        return tile_n

    def locate(self, decode_tile: DecodeTile, first_key: Int32, rows: int, num_pages: Int32) -> tuple[Int32, Int32]:
        """Return the index of a box in the batch or page, and the index of the batch or page.

        Args:
            decode_tile: tile of packed rows.
            first_key: first key of the box in the sequence.
            rows: rows of the box.
            num_pages: number of batches or pages in the tensor.
        """
        return first_key // rows, decode_tile.batch


@dataclass(frozen=True)
class PagedKvBlocks:
    """Location of KV blocks in a paged KV cache.

    The rows of a page are a multiple of PAGE_GROUP_ROWS, or a sequence has a single page. A box behind all pages lies
    beyond the rows of the last page, where TMA returns zeros.
    """

    page_table: PageTable

    reads_undefined_rows = True

    def box_rows(self, tile_n: int) -> int:
        """Return the rows of a TMA box. A box lies in a single page."""
        return PAGE_GROUP_ROWS

    def locate(self, decode_tile: DecodeTile, first_key: Int32, rows: int, num_pages: Int32) -> tuple[Int32, Int32]:
        """Return the index of a box in the page, and the page. Page indices beyond the pool are clamped."""
        page_rows, page_indices = self.page_table.rows, self.page_table.page_indices
        table_idx = cutlass.min(first_key // page_rows, page_indices.shape[1] - 1)
        page = cutlass.min(cutlass.max(page_indices[decode_tile.batch, table_idx], 0), num_pages - 1)
        return (first_key - table_idx * page_rows) // rows, page


KvBlocks = BatchKvBlocks | PagedKvBlocks


class RowStats(Protocol):
    """Softmax maxima and sums of a thread's two rows."""

    row_max: cute.Tensor  # (2,): largest raw scores
    row_sum: cute.Tensor  # (2,)
    scale: Float32


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


@cute.jit
def add_extra_logits(
    score_pipeline: ScorePipeline, decode_tile: DecodeTile, row: Int32, output: cute.Tensor, row_stats: RowStats
):
    """Add the sinks, if any, to the sums of a thread's rows.

    Args:
        score_pipeline: score stages, with the sinks (Hq,) in natural units, or (0,).
        decode_tile: tile of packed rows.
        row: first row of the thread in the tile; the second is eight rows below.
        output: normalized output (2, columns).
        row_stats: maxima, sums and scale.
    """
    if cutlass.const_expr(score_pipeline.sinks is not None):
        if score_pipeline.sinks.shape[0] > 0:
            scale_log2 = row_stats.scale * LOG2_E
            for r in cutlass.range_constexpr(cute.size(output, mode=[0])):
                packed_row = cutlass.min(decode_tile.first_row + row + 8 * r, decode_tile.last_row)
                head, _ = decode_tile.unpack_row(packed_row)
                last_head, total = score_pipeline.sinks.shape[0] - 1, row_stats.row_sum[r]
                logit = score_pipeline.sinks[cutlass.min(head, last_head)] / row_stats.scale  # in units of raw scores
                old_max = cutlass.select_(total == 0.0, -Float32.inf, row_stats.row_max[r])
                new_max = cute.arch.fmax(old_max, logit)
                base = cutlass.select_(new_max == -Float32.inf, Float32(0.0), new_max)
                keys = total * cute.math.exp2((old_max - base) * scale_log2, fastmath=True)
                both = keys + cute.math.exp2((logit - base) * scale_log2, fastmath=True)
                share = cutlass.select_(both == 0.0, Float32(0.0), keys * cute.arch.rcp_approx(both))
                row_stats.row_max[r], row_stats.row_sum[r] = base, both
                for c in cutlass.range_constexpr(cute.size(output, mode=[1])):
                    output[r, c] = output[r, c] * share
