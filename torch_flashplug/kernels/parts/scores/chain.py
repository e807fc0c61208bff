"""What happens to scores between the product that makes them and 16 bits, stage by stage. A kernel has a chain as an
argument and names no stage. It asks, in this order:

    chain.hold(columns)             once, every consumer: registers that stages own; columns: of a block
    chain.at(place)                 once a tile
    here.of_head(head)              backward: once a query head
    here.begin(block, masked)       once a section: what its first block needs is on its way
    here.apply(S, block, masked)    scores, before the exponential
    here.kept(masked)               None, or (r, c, value) -> value: P on its way to the next product; P itself stays
    here.signed(masked)             keys' gradients apart: P handed on once, -P where it is not kept; no derive there
    here.derive(dP, masked)         backward: dP, in place, before dS = P * (dP - delta)
    here.ahead(block, masked)       behind the last use in a step: what the next block needs is on its way

Kernels of sm_80 have one loop, and ask `begin` and `apply` for each masked block.

`masked` is known when a kernel is traced: loops over whole sections hold no code of stages that are not asked there. A
stage may keep one register across a step where the backward has few left (D 128); what is loaded ahead goes into the
register that was used last, not into a second one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..walk import Sizes


@dataclass(frozen=True)
class Place:
    """Where a thread's scores are, in a tile: rows and columns of its (2, columns) view, whose columns are numbered by
    fragments.column_of. Rows are queries and blocks are of keys; transposed: the other way round.
    """

    sizes: Sizes
    block: int  # columns of a block
    row: Int32  # this thread's first; the second one is the eighth after it
    column: Int32  # its first inside a block
    batch: Int32
    head: Int32 | None  # query head; backward: of_head says it
    transposed: bool = False
    by_row: bool = False  # which of the threads of 64 rows this one is follows from its row, not from its number


@dataclass(frozen=True)
class Kept:
    """A share, and its inverse, which a division in a kernel would keep in a register."""

    share: Float32
    inverse: Float32


class Stage:
    """What a stage need not say: it is asked in masked sections alone, holds nothing and loads nothing."""

    everywhere = False  # whole sections, too
    kept_share: Kept | None = None  # of P on its way to the next product

    def hold(self, columns: int) -> Stage:
        return self

    def at(self, place: Place) -> Stage:
        return self

    def of_head(self, head: Int32) -> Stage:
        return self

    def begin(self, block: Int32) -> None: ...

    def ahead(self, block: Int32) -> None: ...

    def apply(self, S: cute.Tensor, block: Int32) -> None: ...

    def keeps(self, r: int, c: int) -> cutlass.Boolean:
        """Whether P of a score goes to the next product; asked of stages that have a kept_share."""
        raise NotImplementedError

    def derive(self, dP: cute.Tensor) -> None: ...


@dataclass(frozen=True)
class Chain:
    """Stages in the order in which they are applied."""

    stages: tuple[Stage, ...]

    def asked(self, masked: bool) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if masked or stage.everywhere)

    def hold(self, columns: int) -> Chain:
        return Chain(tuple(stage.hold(columns) for stage in self.stages))

    def at(self, place: Place) -> Chain:
        return Chain(tuple(stage.at(place) for stage in self.stages))

    def of_head(self, head: Int32) -> Chain:
        return Chain(tuple(stage.of_head(head) for stage in self.stages))

    def begin(self, block: Int32, masked: bool) -> None:
        for stage in self.asked(masked):
            stage.begin(block)

    def ahead(self, block: Int32, masked: bool) -> None:
        for stage in self.asked(masked):
            stage.ahead(block)

    def apply(self, S: cute.Tensor, block: Int32, masked: bool) -> None:
        """S: (2, columns) of a thread, in place."""
        for stage in self.asked(masked):
            stage.apply(S, block)

    def kept(self, masked: bool) -> Callable | None:
        """(r, c, value) -> value: P, or 0; None where every stage leaves P as it is."""
        return self.chosen(masked, lambda value: Float32(0.0))

    def signed(self, masked: bool) -> Callable | None:
        """(r, c, value) -> value: P, or -P where it is not kept."""
        return self.chosen(masked, lambda value: -value)

    def chosen(self, masked: bool, otherwise: Callable) -> Callable | None:
        """P where it is kept."""
        stages = [stage for stage in self.asked(masked) if stage.kept_share is not None]
        if not stages:
            return None

        def choose(r: int, c: int, value: Float32) -> Float32:
            chosen = value
            for stage in stages:
                chosen = cutlass.select_(stage.keeps(r, c), chosen, otherwise(value))
            return chosen

        return choose

    def derive(self, dP: cute.Tensor, masked: bool) -> None:
        """dP: (2, columns) of a thread, in place."""
        for stage in self.asked(masked):
            stage.derive(dP)

    @property
    def kept_share(self) -> Kept | None:
        """Of P; None: all of it. Loops know nothing of it: results are scaled, and the backward's delta is that share
        of rowsum(dO * O).
        """
        shares = [stage.kept_share for stage in self.stages if stage.kept_share is not None]
        assert len(shares) < 2, "two stages drop scores: multiply their shares here"
        return shares[0] if shares else None

    def scaled(self, factor: Float32) -> Float32:
        """Of what was multiplied with the P that was kept."""
        return factor if self.kept_share is None else factor * self.kept_share.inverse
