"""O of a warpgroup, to which every block's product is added: by the tensor cores, or in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32

from . import sm90
from .fragments import rows_and_columns
from .scaled import ScaledSoftmax
from .softmax import ROWS, OnlineSoftmax

Rows = OnlineSoftmax | ScaledSoftmax


@dataclass(frozen=True)
class Output:
    """O (64, Dv), to which products add."""

    product: sm90.Product
    acc: cute.Tensor

    @classmethod
    def create(cls, make_pv: Callable[[], cute.TiledMma], shape: tuple[int, int]) -> Output:
        product = sm90.Product.create(make_pv)
        return cls(product, sm90.zeros(product.add, shape))

    @property
    def values(self) -> cute.Tensor:
        """(2, columns) of a thread."""
        return rows_and_columns(self.acc)

    def clear(self) -> None:
        self.acc.fill(0.0)

    def add(self, P: cute.Tensor, V: cute.Tensor, rows: Rows) -> None:
        """A block's product is under way, ahead of the next block's softmax step."""
        self.product.issue(self.acc, P, V, accumulate=True)

    def settle(self, rows: Rows) -> None:
        """Behind that step, and behind the product."""
        rows.rescale(self.values)

    def close(self, rows: Rows) -> None:
        """Behind the last product."""


@dataclass(frozen=True)
class Promoted(Output):
    """O in fp32: of sums in 8 bits tensor cores keep some 14 digits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). Of
    8k keys whose values have a mean an H100 lost 10 %, of 128k 57 %. Each block's product is a sum of its own.
    """

    part: cute.Tensor
    kept: cute.Tensor  # (2,): the correction that the block before asked for

    @classmethod
    def create(cls, make_pv: Callable[[], cute.TiledMma], shape: tuple[int, int]) -> Promoted:
        product = sm90.Product.create(make_pv)
        acc, part = (sm90.zeros(product.add, shape) for _ in range(2))
        return cls(product, acc, part, cute.make_rmem_tensor((ROWS,), Float32))

    def add(self, P: cute.Tensor, V: cute.Tensor, rows: Rows) -> None:
        self.product.issue(self.part, P, V, accumulate=False)
        for r in range(ROWS):
            self.kept[r] = rows.correction[r]

    def settle(self, rows: Rows) -> None:
        values, part = self.values, rows_and_columns(self.part)
        for r in range(ROWS):
            for c in range(cute.size(values, mode=[1])):
                values[r, c] = values[r, c] * self.kept[r] + part[r, c]

    def close(self, rows: Rows) -> None:
        self.settle(rows)
