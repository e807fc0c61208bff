"""What happens to scores between the product that makes them and 16 bits, stage by stage. A kernel has a chain as an
argument and names no stage. It asks, in this order:

    chain.hold()                once, every consumer: registers that stages own
    chain.at(place)             once a tile
    here.begin(section)         once a section: what its first step needs is on its way
    here.apply(S, block, masked)    scores, before the exponential
    here.kept(masked)           None, or (r, c, value) -> value: P on its way to the next product; P itself stays
    here.derive(dP, masked)     backward: dP, in place, before dS = P * (dP - delta)
    here.ahead(section, j)      behind the last use in a step: what the next one needs is on its way

`masked` is known when a kernel is traced: loops over whole sections hold no code of stages that are not asked there.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..walk import Section, Sizes


@dataclass(frozen=True)
class Place:
    """Where a thread's scores are, in a tile: rows and columns of its (2, columns) view, whose columns are numbered by
    fragments.column_of. Rows are queries and blocks are of keys; transposed: the other way round.
    """

    sizes: Sizes
    block: int  # columns of a block
    row: Int32  # this thread's first; the second one is the eighth after it
    column: Int32  # its first inside a block
    transposed: bool = False


class Stage:
    """What a stage need not say: it is asked in masked sections alone, holds nothing and loads nothing."""

    everywhere = False  # whole sections, too
    factor: Float32 | None = None  # of P on its way to the next product, and of dP

    def hold(self) -> Stage:
        return self

    def at(self, place: Place) -> Stage:
        return self

    def begin(self, section: Section) -> None: ...

    def ahead(self, section: Section, j: Int32) -> None: ...

    def apply(self, S: cute.Tensor, block: Int32) -> None: ...

    def kept(self):
        return None

    def derive(self, dP: cute.Tensor) -> None: ...


@dataclass(frozen=True)
class Chain:
    """Stages in the order in which they are applied."""

    stages: tuple[Stage, ...]

    def asked(self, masked: bool) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if masked or stage.everywhere)

    def hold(self) -> Chain:
        return Chain(tuple(stage.hold() for stage in self.stages))

    def at(self, place: Place) -> Chain:
        return Chain(tuple(stage.at(place) for stage in self.stages))

    def begin(self, section: Section) -> None:
        for stage in self.asked(section.masked):
            stage.begin(section)

    def ahead(self, section: Section, j: Int32) -> None:
        for stage in self.asked(section.masked):
            stage.ahead(section, j)

    def apply(self, S: cute.Tensor, block: Int32, masked: bool) -> None:
        """S: (2, columns) of a thread, in place."""
        for stage in self.asked(masked):
            stage.apply(S, block)

    def kept(self, masked: bool):
        """(r, c, value) -> value, or None where every stage leaves P as it is."""
        steps = [step for step in (stage.kept() for stage in self.asked(masked)) if step is not None]
        if not steps:
            return None

        def kept(r: int, c: int, value: Float32) -> Float32:
            for step in steps:
                value = step(r, c, value)
            return value

        return kept

    def derive(self, dP: cute.Tensor, masked: bool) -> None:
        """dP: (2, columns) of a thread, in place."""
        for stage in self.asked(masked):
            stage.derive(dP)

    @property
    def factor(self) -> Float32 | None:
        """Of P on its way to the next product, and of dP; None: 1."""
        factors = [stage.factor for stage in self.stages if stage.factor is not None]
        assert len(factors) < 2, "two stages scale P: multiply their factors here"
        return factors[0] if factors else None
