"""O of a warpgroup, to which every block's product is added: by the tensor cores, or in turns by these and in fp32."""

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
from ..tiling.block_iterator import Run
from .scaled_softmax import ScaledSoftmax
from .softmax import ROWS, OnlineSoftmax

Rows = OnlineSoftmax | ScaledSoftmax
WORDS = 4  # of 16 bytes, which a thread moves at once


@dataclass(frozen=True)
class Output:
    """O (64, Dv), to which products add."""

    product: sm90.Product
    acc: cute.Tensor

    @classmethod
    def create(cls, make_pv: Callable[[], cute.TiledMma], dv: int) -> Output:
        product = sm90.Product.create(make_pv)
        return cls(product, sm90.zeros(product.add, (ROWS_PER_WARPGROUP, dv)))

    @property
    def values(self) -> cute.Tensor:
        """(2, columns) of a thread."""
        return rows_and_columns(self.acc)

    def clear(self, run: Run) -> None:
        """Of the next tile, which has so many blocks of keys; the last one's O has left."""
        self.acc.fill(0.0)

    def add(self, P: cute.Tensor, V: cute.Tensor) -> None:
        """A block's product is under way."""
        self.product.issue(self.acc, P, V, accumulate=True)

    def settle(self, rows: Rows, blocks: Int32) -> None:
        """Behind a softmax step, while no product adds to O: what it has of so many blocks counts relative to the new
        maximum.
        """
        rows.rescale(self.values)

    def close(self, run: Run) -> None:
        """Behind the last product."""


@dataclass(frozen=True)
class Drained(Output):
    """O whose products add up in 8 bits: of few keys (recipes.LONGEST_SUM), and that in shared memory, in bf16. What
    rounding leaves stays with the tensor cores: else whole sums would vanish beside a total of many.
    """

    total: cute.Tensor  # (words, vectors) Int32, this thread's: where O leaves through later
    kept: cute.Tensor  # (2,): what the rows of the total must be multiplied by
    most: int  # blocks

    @classmethod
    def create(cls, make_pv: Callable[[], cute.TiledMma], dv: int, room: cute.Tensor, tile_n: int) -> Drained:
        """room in shared memory: where O leaves through."""
        plain = Output.create(make_pv, dv)
        pairs = cute.size(plain.acc) // 2
        thread = cute.arch.thread_idx()[0] % sm90.WARPGROUP
        warp, lane = thread // sm90.WARP, thread % sm90.WARP  # each warp's rows are contiguous, and leave on their own
        start = cute.recast_ptr(room.iterator, dtype=Int32).toint() + (warp * pairs * sm90.WARP + lane * WORDS) * 4
        pointer = cute.make_ptr(Int32, start, cute.AddressSpace.smem, assumed_align=16)
        layout = cute.make_layout((WORDS, pairs // WORDS), stride=(1, sm90.WARP * WORDS))
        total, kept = cute.make_tensor(pointer, layout), cute.make_rmem_tensor((ROWS,), Float32)
        return cls(plain.product, plain.acc, total, kept, LONGEST_SUM // tile_n)

    @cute.jit
    def clear(self, run: Run):
        self.acc.fill(0.0)
        self.kept.fill(1.0)
        if run.count > self.most:
            words = cute.make_rmem_tensor((WORDS,), Int32)
            words.fill(0)
            for i in cutlass.range_constexpr(cute.size(self.total, mode=[1])):
                cute.autovec_copy(words, self.total[None, i])

    @cute.jit
    def settle(self, rows: Rows, blocks: Int32):
        if (blocks % self.most == 0) & (blocks > 0):
            self.drain()
            self.kept.fill(1.0)
        rows.rescale(self.values)
        for r in cutlass.range_constexpr(ROWS):
            self.kept[r] = self.kept[r] * rows.correction[r]

    @cute.jit
    def drain(self):
        words = cute.make_rmem_tensor((WORDS,), Int32)
        for i in cutlass.range_constexpr(cute.size(self.total, mode=[1])):
            cute.autovec_copy(self.total[None, i], words)
            for w in cutlass.range_constexpr(WORDS):
                pair = i * WORDS + w
                low, high = self.added(words[w], pair)
                words[w] = ELEMENTS["bf16"].pack_pair(low, high)
                rounded = unpacked(words[w])
                self.pairs[0, pair], self.pairs[1, pair] = low - rounded[0], high - rounded[1]
            cute.autovec_copy(words, self.total[None, i])

    @cute.jit
    def close(self, run: Run):
        if run.count > self.most:
            words = cute.make_rmem_tensor((WORDS,), Int32)
            for i in cutlass.range_constexpr(cute.size(self.total, mode=[1])):
                cute.autovec_copy(self.total[None, i], words)
                for w in cutlass.range_constexpr(WORDS):
                    pair = i * WORDS + w
                    self.pairs[0, pair], self.pairs[1, pair] = self.added(words[w], pair)
            cute.arch.sync_warp()  # other lanes' O goes where this one's total was

    @property
    def pairs(self) -> cute.Tensor:
        """(2, pairs): the accumulator; every other pair is of the second row."""
        return cute.make_tensor(self.acc.iterator, cute.make_layout((2, cute.size(self.acc) // 2)))

    def added(self, word: Int32, pair: int) -> tuple[Float32, Float32]:
        """Two numbers of the total, packed, and what the accumulator has of them."""
        kept, (low, high) = self.kept[pair % ROWS], unpacked(word)
        return low * kept + self.pairs[0, pair], high * kept + self.pairs[1, pair]


def unpacked(word: Int32) -> tuple[Float32, Float32]:
    """Of two in bf16."""
    return (word << 16).bitcast(Float32), (word & -(2**16)).bitcast(Float32)
