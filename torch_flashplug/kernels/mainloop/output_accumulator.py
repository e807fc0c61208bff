"""Output accumulator O of a warpgroup: accumulated by tensor cores only, or periodically promoted to a second sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...registry.kernel_spec import ROWS_PER_WARPGROUP
from ...registry.quant_recipes import LONGEST_SUM
from ..primitives import sm90
from ..primitives.dtype import ELEMENTS
from ..primitives.fragments import rows_and_columns
from ..tiling.block_iterator import BlockRange
from .scaled_softmax import ScaledSoftmax
from .softmax import ROWS, OnlineSoftmax

Rows = OnlineSoftmax | ScaledSoftmax
WORDS = 4  # 32-bit words in the 16 bytes that a thread moves at once


@dataclass(frozen=True)
class OutputAccumulator:
    """Output accumulator O (64, Dv), to which products add."""

    product: sm90.WgmmaProduct
    acc: cute.Tensor

    @classmethod
    def create(cls, make_pv: Callable[[], cute.TiledMma], dv: int) -> OutputAccumulator:
        product = sm90.WgmmaProduct.create(make_pv)
        return cls(product, sm90.zeros(product.add, (ROWS_PER_WARPGROUP, dv)))

    @property
    def values(self) -> cute.Tensor:
        """Accumulator values of a thread, as (2, columns)."""
        return rows_and_columns(self.acc)

    def clear(self, kv_range: BlockRange) -> None:
        """Reset O for the next tile, whose KV blocks are `kv_range`. The previous O has already been stored."""
        self.acc.fill(0.0)

    def add(self, P: cute.Tensor, V: cute.Tensor) -> None:
        """Issue the product of a block, asynchronously."""
        self.product.issue(self.acc, P, V, accumulate=True)

    def rescale_output(self, rows: Rows, blocks: Int32) -> None:
        """Rescale O to the new maximum after a softmax step, while no product adds to O.

        Args:
            rows: the softmax state.
            blocks: number of blocks accumulated in O so far.
        """
        rows.rescale(self.values)

    def finish(self, kv_range: BlockRange) -> None:
        """Finish O after the last product."""


@dataclass(frozen=True)
class PromotedOutput(OutputAccumulator):
    """Output accumulator for 8-bit products, promoted to a second sum after few keys (quant_recipes.LONGEST_SUM).

    The sum lies in shared memory, in bf16. The rounding error of each addition stays in the tensor-core accumulator.
    Otherwise whole partial sums would vanish beside a sum of many keys.
    """

    total: cute.Tensor  # (words, vectors) Int32 of a thread, in the buffer through which O is later stored
    total_scale: cute.Tensor  # (2,): factor for the rows of the total
    max_blocks: int  # maximum number of blocks between promotions

    @classmethod
    def create(
        cls, make_pv: Callable[[], cute.TiledMma], dv: int, smem_out: cute.Tensor, tile_n: int
    ) -> PromotedOutput:
        """Create the accumulator.

        Args:
            make_pv: returns the tiled MMA of the product P V.
            dv: head dim of V.
            smem_out: shared-memory buffer through which O is later stored.
            tile_n: keys of a block.
        """
        plain = OutputAccumulator.create(make_pv, dv)
        pairs = cute.size(plain.acc) // 2
        thread = cute.arch.thread_idx()[0] % sm90.WARPGROUP
        # Each warp's rows are contiguous, and each warp stores its rows independently.
        warp, lane = thread // sm90.WARP, thread % sm90.WARP
        start = cute.recast_ptr(smem_out.iterator, dtype=Int32).toint() + (warp * pairs * sm90.WARP + lane * WORDS) * 4
        pointer = cute.make_ptr(Int32, start, cute.AddressSpace.smem, assumed_align=16)
        layout = cute.make_layout((WORDS, pairs // WORDS), stride=(1, sm90.WARP * WORDS))
        total, total_scale = cute.make_tensor(pointer, layout), cute.make_rmem_tensor((ROWS,), Float32)
        return cls(plain.product, plain.acc, total, total_scale, LONGEST_SUM // tile_n)

    @cute.jit
    def clear(self, kv_range: BlockRange):
        self.acc.fill(0.0)
        self.total_scale.fill(1.0)
        if kv_range.count > self.max_blocks:
            words = cute.make_rmem_tensor((WORDS,), Int32)
            words.fill(0)
            for i in cutlass.range_constexpr(cute.size(self.total, mode=[1])):
                cute.autovec_copy(words, self.total[None, i])

    @cute.jit
    def rescale_output(self, rows: Rows, blocks: Int32):
        if (blocks % self.max_blocks == 0) & (blocks > 0):
            self.promote()
            self.total_scale.fill(1.0)
        rows.rescale(self.values)
        for r in cutlass.range_constexpr(ROWS):
            self.total_scale[r] = self.total_scale[r] * rows.correction[r]

    @cute.jit
    def promote(self):
        """Promote the accumulator: add it to the total, and keep the rounding error in the accumulator."""
        words = cute.make_rmem_tensor((WORDS,), Int32)
        for i in cutlass.range_constexpr(cute.size(self.total, mode=[1])):
            cute.autovec_copy(self.total[None, i], words)
            for w in cutlass.range_constexpr(WORDS):
                pair = i * WORDS + w
                low, high = self.promoted_pair(words[w], pair)
                words[w] = ELEMENTS["bf16"].pack_pair(low, high)
                rounded = unpacked(words[w])
                self.pairs[0, pair], self.pairs[1, pair] = low - rounded[0], high - rounded[1]
            cute.autovec_copy(words, self.total[None, i])

    @cute.jit
    def finish(self, kv_range: BlockRange):
        if kv_range.count > self.max_blocks:
            words = cute.make_rmem_tensor((WORDS,), Int32)
            for i in cutlass.range_constexpr(cute.size(self.total, mode=[1])):
                cute.autovec_copy(self.total[None, i], words)
                for w in cutlass.range_constexpr(WORDS):
                    pair = i * WORDS + w
                    self.pairs[0, pair], self.pairs[1, pair] = self.promoted_pair(words[w], pair)
            cute.arch.sync_warp()  # further lanes store O over the total of the current lane

    @property
    def pairs(self) -> cute.Tensor:
        """Accumulator as (2, pairs). Every other pair belongs to the second row."""
        return cute.make_tensor(self.acc.iterator, cute.make_layout((2, cute.size(self.acc) // 2)))

    def promoted_pair(self, word: Int32, pair: int) -> tuple[Float32, Float32]:
        """Return the sum of a packed pair of the total and the matching pair of the accumulator."""
        total_scale, (low, high) = self.total_scale[pair % ROWS], unpacked(word)
        return low * total_scale + self.pairs[0, pair], high * total_scale + self.pairs[1, pair]


def unpacked(word: Int32) -> tuple[Float32, Float32]:
    """Return both bf16 numbers of a word in fp32."""
    return (word << 16).bitcast(Float32), (word & -(2**16)).bitcast(Float32)
