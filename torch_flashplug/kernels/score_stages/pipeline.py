"""What happens to scores between the product that makes them and 16 bits, stage by stage. A kernel has a chain as an
argument and names no stage. It asks, in this order:

    chain.tma(form)                 in launch, Hopper: descriptors of what TMA brings
    chain.shared(smem, form)        in the kernel, ahead of its own buffers: rings and buffers that stages own
    chain.atoms, chain.rings        Hopper: for start_cta
    chain.bring(tile, head)         who loads: once a tile, in the backward once a query head
    brings.load(block, count)       behind the kernel's own loads for a block: what stages need of it

    chain.hold(columns)             once, every consumer: registers that stages own; columns: of a block
    chain.scales(scales)            those of the scores behind the stages
    chain.unit(scale)               decode, in launch: the same of one, the natural
    chain.sinks                     decode: None, or (Hq,) what rows' sums have beside keys
    chain.everywhere                decode: whether some stage is asked in whole blocks, too
    chain.at(place)                 once a tile
    here.of_head(head)              backward: once a query head
    here.pass_over(count)           a block that this warpgroup does not look at
    here.begin(block, masked)       once a section: what its first block needs is on its way
    here.make_ready(block, masked)  but decode: once a block, before apply: work that needs no scores
    here.apply(S, block, masked, count)     scores, before the exponential
    here.hides(masked)              whether scores may be -inf now
    here.kept(masked)               None, or (r, c, value) -> value: P on its way to the next product; P itself stays
    here.signed(masked)             keys' gradients apart: P handed on once, -P where it is not kept; no derive there
    here.slope()                    backward: None, or (P, LSE * log2 e) -> what dS of a score is multiplied with
    here.extra_logit()              forward, behind the last block: None, or what a row's sum has beside its keys
    here.derive(dP, masked)         backward: dP, in place, before dS = P * (dP - delta)
    here.ahead(block, masked)       once a step, behind make_ready: what the next block needs is on its way

`count` is the number of a block among all that a CTA works on, which slots and phases of rings follow from: the same to
who loads and to who reads. Every block that is loaded is read, or passed over, by all: a stage with a ring is asked
everywhere. What stages hold of a block costs the kernel's own buffers room: Feature.score_bytes of features.py, which
kernel_spec.py counts. Decode and sm_80's backward bring nothing, and give no count. Kernels of sm_80 have one loop, and
ask
`begin`, `make_ready` and `apply` for each block.

`masked` is known when a kernel is traced: loops over whole sections hold no code of stages that are not asked there. A
stage may keep one register across a step where the backward has few left (D 128): it asks `ahead` behind the last use,
so that what comes takes the place of what was used. The forward asks as soon as S is there: for the sake of a load
behind its later waits ptxas waited for all products before the first exponential.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32

from ..primitives.dtype import Element
from ..tiling.seqlen_info import Sizes

if TYPE_CHECKING:
    from ..call_args.operands import Scales
    from ..tiling.tile import Tile


@dataclass(frozen=True)
class Form:
    """How a CTA shares a block of scores, known when it is traced: every warpgroup has 64 rows of it."""

    element: Element
    warpgroups: int
    columns: int
    transposed: bool = False  # as in Place
    room: bool = True  # in shared memory, for what stages hold of a block


@dataclass(frozen=True)
class SlabForm:
    """The same of sm_80's kernels, where all threads load a block and every warp has slabs of its rows."""

    element: Element
    threads: int
    rows: int
    columns: int
    elementwise: bool  # tensors of any strides at any address
    room: bool = True


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
    hides = True  # may set scores to -inf where it is asked
    natural_units = False  # whether scores leave in natural units
    kept_share: Kept | None = None  # of P on its way to the next product
    sinks: cute.Tensor | None = None  # decode: (Hq,) what rows' sums have beside keys, in natural units
    atoms: tuple[cute.CopyAtom, ...] = ()
    rings: tuple[tuple, ...] = ()  # as start_cta takes them

    def tma(self, form: Form) -> Stage:
        return self

    def shared(self, smem: cutlass.memory.SmemAllocator, form: Form | SlabForm) -> Stage:
        return self

    def bring(self, tile: Tile, head: Int32) -> Stage:
        return self

    def load(self, block: Int32, count: Int32) -> None: ...

    def pass_over(self, count: Int32) -> None: ...

    def scales(self, scales: Scales) -> Scales:
        return scales

    def unit(self, scale: Float32) -> Float32:
        return scale

    def hold(self, columns: int) -> Stage:
        return self

    def at(self, place: Place) -> Stage:
        return self

    def of_head(self, head: Int32) -> Stage:
        return self

    def begin(self, block: Int32) -> None: ...

    def ahead(self, block: Int32) -> None: ...

    def make_ready(self, block: Int32) -> None: ...

    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None) -> None: ...

    def keeps(self, r: int, c: int) -> cutlass.Boolean:
        """Whether P of a score goes to the next product; asked of stages that have a kept_share."""
        raise NotImplementedError

    def slope(self) -> Callable | None:
        """Of stages that bend scores, everywhere."""
        return None

    def extra_logit(self) -> Float32 | None:
        """In natural units."""
        return None

    def derive(self, dP: cute.Tensor) -> None: ...


@dataclass(frozen=True)
class Chain:
    """Stages in the order in which they are applied."""

    stages: tuple[Stage, ...]

    def asked(self, masked: bool) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if masked or stage.everywhere)

    def tma(self, form: Form) -> Chain:
        return Chain(tuple(stage.tma(form) for stage in self.stages))

    def shared(self, smem: cutlass.memory.SmemAllocator, form: Form | SlabForm) -> Chain:
        return Chain(tuple(stage.shared(smem, form) for stage in self.stages))

    @property
    def atoms(self) -> tuple[cute.CopyAtom, ...]:
        return tuple(atom for stage in self.stages for atom in stage.atoms)

    @property
    def rings(self) -> tuple[tuple, ...]:
        return tuple(ring for stage in self.stages for ring in stage.rings)

    def bring(self, tile: Tile, head: Int32) -> Chain:
        return Chain(tuple(stage.bring(tile, head) for stage in self.stages))

    def load(self, block: Int32, count: Int32) -> None:
        for stage in self.stages:
            stage.load(block, count)

    def pass_over(self, count: Int32) -> None:
        for stage in self.stages:
            stage.pass_over(count)

    def scales(self, scales: Scales) -> Scales:
        for stage in self.stages:
            scales = stage.scales(scales)
        return scales

    def unit(self, scale: Float32) -> Float32:
        for stage in self.stages:
            scale = stage.unit(scale)
        return scale

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

    def make_ready(self, block: Int32, masked: bool) -> None:
        for stage in self.asked(masked):
            stage.make_ready(block)

    def apply(self, S: cute.Tensor, block: Int32, masked: bool, count: Int32 | None = None) -> None:
        """S: (2, columns) of a thread, in place."""
        for stage in self.asked(masked):
            stage.apply(S, block, count)

    def hides(self, masked: bool) -> bool:
        return any(stage.hides for stage in self.asked(masked))

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

    def slope(self) -> Callable | None:
        found = [slope for stage in self.stages if (slope := stage.slope()) is not None]
        assert len(found) < 2, "two stages bend scores: multiply their slopes here"
        return found[0] if found else None

    def extra_logit(self) -> Float32 | None:
        found = [logit for stage in self.stages if (logit := stage.extra_logit()) is not None]
        assert len(found) < 2, "two stages add to a row's sum: add up what they add here"
        return found[0] if found else None

    def derive(self, dP: cute.Tensor, masked: bool) -> None:
        """dP: (2, columns) of a thread, in place."""
        for stage in self.asked(masked):
            stage.derive(dP)

    @property
    def natural_units(self) -> bool:
        return any(stage.natural_units for stage in self.stages)

    @property
    def everywhere(self) -> bool:
        return any(stage.everywhere for stage in self.stages)

    @property
    def sinks(self) -> cute.Tensor | None:
        """decode: of the stage that has some."""
        return next((stage.sinks for stage in self.stages if stage.sinks is not None), None)

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
