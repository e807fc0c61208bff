"""Score modification: stages applied to scores between the product and the packing into 16 bits.

A kernel has a `ScorePipeline` as an argument and names no stage. The kernel calls the pipeline in this order:

pipeline.tma(score_layout)                 launch, Hopper: TMA descriptors of the tensors that stages load
pipeline.allocate_smem(smem, score_layout) kernel, ahead of its own buffers: pipelines and buffers that stages own
pipeline.atoms, pipeline.pipelines         Hopper: TMA atoms and shared-memory pipelines for start_cta
pipeline.begin_tile_load(tile, head)       producer: once per tile, in the backward once per query head
producer.load(block, count)                producer, behind the kernel's own loads for a block: data of the stages

pipeline.allocate_registers(columns)       every consumer, once: registers that stages own; columns: of a block
pipeline.scales(scales)                    softmax scales of the scores behind the stages
pipeline.natural_scale(scale)              decode, in launch: the natural softmax scale of the scores behind the stages
pipeline.sinks                             decode: None, or (Hq,), extra logits in the row sums
pipeline.applies_to_full_blocks            decode: True if some stage also applies to full blocks
pipeline.set_tile(coord)                   once per tile
stages.of_head(head)                       backward: once per query head
stages.skip_kv_blocks(count)               for a block that the warpgroup skips
stages.begin(block, masked)                once per subrange: start the loads of the subrange's first block
stages.prepare_stage(block, masked)        except decode: once per block, before apply: work that needs no scores
stages.apply(S, block, masked, count)      modify the scores, before the exponential
stages.may_mask(masked)                    True if scores can be -inf afterwards
stages.p_transform(masked)                 None, or (r, c, value) -> value: P for the next product; P itself stays
stages.signed_p_transform(masked)          dK and dV kernel of the split backward: P is passed on once, as -P for
                                           dropped scores; `apply_backward` is not called in this kernel
stages.score_derivative()                  backward: None, or (P, LSE * log2 e) -> factor of dS of a score
stages.extra_logit()                       forward, behind the last block: None, or an extra logit in the row sum
stages.apply_backward(dP, masked)          backward: modify dP in place, before dS = P * (dP - delta)
stages.prefetch(block, masked)             once per step, behind prepare_stage: start the loads of the next block

`count` is the number of a block among all blocks of a CTA, from which the stages and phases of pipelines follow. The
count is the same for the producer and for the consumers. Every loaded block is read, or skipped with `skip_kv_blocks`,
by all consumers. Therefore a stage with a pipeline applies to every block. The data that stages hold of a block takes
shared memory from the kernel's own buffers: `Feature.score_bytes` of features.py, which kernel_spec.py counts. Decode
and the backward of sm_80 load no tiles and pass no count. Kernels of sm_80 have a single loop, and call `begin`,
`prepare_stage` and `apply` for each block.

`masked` is True for partial blocks, and a compile-time constant: loops over full blocks contain no code of stages that
do not apply there. The backward of D 128 has few registers left, so a stage may keep only a single register across a
step. Therefore the backward calls `prefetch` behind the last use, and the next value takes the place of the used
value. The forward calls `prefetch` as soon as S is complete. With a load behind the forward's later waits, ptxas waited
for all products before the first exponential.
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
from ..tiling.seqlen_info import SeqlenInfo

if TYPE_CHECKING:
    from ..call_args.kernel_call import SoftmaxScale
    from ..primitives import sm90
    from ..tiling.tile import Tile


@dataclass(frozen=True)
class ScoreLayout:
    """Partition of a block of scores in a CTA, a compile-time constant: every warpgroup has 64 rows."""

    element: Element
    warpgroups: int  # consumer warpgroups that hold scores
    columns: int  # columns of a block
    transposed: bool = False  # True for scores (keys, queries), as in `ScoreCoord`
    has_smem_space: bool = True  # True if shared memory has space for the data that stages hold of a block


@dataclass(frozen=True)
class SlabScoreLayout:
    """Partition of a block of scores in sm_80 kernels: all threads load a block, and warps own slabs of rows."""

    element: Element
    threads: int
    rows: int
    columns: int
    elementwise: bool  # True if tensors may have any strides and any address
    has_smem_space: bool = True


@dataclass(frozen=True)
class ScoreCoord:
    """Position of a thread's scores in a tile: rows and columns of the thread's (2, columns) view.

    `fragments.column_of` numbers the columns of the view. Rows are queries and blocks consist of keys; with
    `transposed`, rows are keys and blocks consist of queries.
    """

    sizes: SeqlenInfo
    block_columns: int
    row: Int32  # first row of the thread; the second is eight rows below
    column: Int32  # first column of the thread in a block
    sequence: Int32  # sequence index
    head: Int32 | None  # query head; None in a backward, where `of_head` sets the head
    transposed: bool = False
    # True if the index of a thread among the threads of 64 rows follows from `row`, not from the thread index.
    by_row: bool = False


@dataclass(frozen=True)
class DropoutScale:
    """Probability with which dropout keeps a score, and the inverse of the probability.

    The inverse is an argument, because a division in a kernel would keep the quotient in a register.
    """

    keep_probability: Float32
    inverse: Float32


class ScoreStage:
    """Base class of a score stage: applies to partial blocks only, holds nothing and loads nothing."""

    applies_to_full_blocks = False  # True if the stage also applies to full blocks
    may_mask = True  # True if the stage can set scores to -inf where it applies
    natural_units = False  # True if scores leave the stage in natural units
    is_shared_by_heads = False  # True if the stage is the same for all query heads
    keep_scale: DropoutScale | None = None  # probability with which P reaches the next product, and its inverse
    sinks: cute.Tensor | None = None  # decode: (Hq,) extra logits in the row sums, in natural units
    atoms: tuple[cute.CopyAtom, ...] = ()
    pipelines: tuple[sm90.PipelineWarps, ...] = ()  # pipelines for start_cta

    def tma(self, score_layout: ScoreLayout) -> ScoreStage:
        """Return the stage with the TMA descriptors of its tensors."""
        return self

    def allocate_smem(
        self, smem: cutlass.memory.SmemAllocator, score_layout: ScoreLayout | SlabScoreLayout
    ) -> ScoreStage:
        """Return the stage with its shared-memory buffers and pipelines."""
        return self

    def begin_tile_load(self, tile: Tile, head: Int32) -> ScoreStage:
        """Return the producer's view of the stage for a tile and a query head."""
        return self

    def load(self, block: Int32, count: Int32) -> None: ...

    def skip_kv_blocks(self, count: Int32) -> None: ...

    def scales(self, scales: SoftmaxScale) -> SoftmaxScale:
        """Return the softmax scales of the scores behind the stage."""
        return scales

    def natural_scale(self, scale: Float32) -> Float32:
        """Return the natural softmax scale of the scores behind the stage."""
        return scale

    def allocate_registers(self, columns: int) -> ScoreStage:
        """Return the stage with registers for blocks of `columns` columns."""
        return self

    def set_tile(self, coord: ScoreCoord) -> ScoreStage:
        """Return the stage for a thread's place in a tile."""
        return self

    def of_head(self, head: Int32) -> ScoreStage:
        """Return the stage for a query head."""
        return self

    def begin(self, block: Int32) -> None: ...

    def prefetch(self, block: Int32) -> None: ...

    def prepare_stage(self, block: Int32) -> None: ...

    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None) -> None: ...

    def keeps(self, r: int, c: int) -> cutlass.Boolean:
        """Return True if P of score (r, c) reaches the next product; called for stages with a `keep_scale`."""
        raise NotImplementedError

    def score_derivative(self) -> Callable | None:
        """Return the derivative of a stage that transforms scores, everywhere; None for other stages."""
        return None

    def extra_logit(self) -> Float32 | None:
        """Return the extra logit of the row sum in natural units, or None."""
        return None

    def apply_backward(self, dP: cute.Tensor) -> None: ...


@dataclass(frozen=True)
class ScorePipeline:
    """Score stages in the order in which they are applied."""

    stages: tuple[ScoreStage, ...]

    def stages_applied(self, masked: bool) -> tuple[ScoreStage, ...]:
        """Return the stages that apply to partial blocks (`masked`), or to full blocks."""
        return tuple(stage for stage in self.stages if masked or stage.applies_to_full_blocks)

    def tma(self, score_layout: ScoreLayout) -> ScorePipeline:
        return ScorePipeline(tuple(stage.tma(score_layout) for stage in self.stages))

    def allocate_smem(
        self, smem: cutlass.memory.SmemAllocator, score_layout: ScoreLayout | SlabScoreLayout
    ) -> ScorePipeline:
        return ScorePipeline(tuple(stage.allocate_smem(smem, score_layout) for stage in self.stages))

    @property
    def atoms(self) -> tuple[cute.CopyAtom, ...]:
        return tuple(atom for stage in self.stages for atom in stage.atoms)

    @property
    def pipelines(self) -> tuple[sm90.PipelineWarps, ...]:
        return tuple(pipeline for stage in self.stages for pipeline in stage.pipelines)

    def begin_tile_load(self, tile: Tile, head: Int32) -> ScorePipeline:
        return ScorePipeline(tuple(stage.begin_tile_load(tile, head) for stage in self.stages))

    def load(self, block: Int32, count: Int32) -> None:
        for stage in self.stages:
            stage.load(block, count)

    def skip_kv_blocks(self, count: Int32) -> None:
        for stage in self.stages:
            stage.skip_kv_blocks(count)

    def scales(self, scales: SoftmaxScale) -> SoftmaxScale:
        for stage in self.stages:
            scales = stage.scales(scales)
        return scales

    def natural_scale(self, scale: Float32) -> Float32:
        for stage in self.stages:
            scale = stage.natural_scale(scale)
        return scale

    def allocate_registers(self, columns: int) -> ScorePipeline:
        return ScorePipeline(tuple(stage.allocate_registers(columns) for stage in self.stages))

    def set_tile(self, coord: ScoreCoord) -> ScorePipeline:
        return ScorePipeline(tuple(stage.set_tile(coord) for stage in self.stages))

    def of_head(self, head: Int32) -> ScorePipeline:
        return ScorePipeline(tuple(stage.of_head(head) for stage in self.stages))

    def begin(self, block: Int32, masked: bool) -> None:
        for stage in self.stages_applied(masked):
            stage.begin(block)

    def prefetch(self, block: Int32, masked: bool) -> None:
        for stage in self.stages_applied(masked):
            stage.prefetch(block)

    def prepare_stage(self, block: Int32, masked: bool) -> None:
        for stage in self.stages_applied(masked):
            stage.prepare_stage(block)

    def apply(self, S: cute.Tensor, block: Int32, masked: bool, count: Int32 | None = None) -> None:
        """Apply the stages to scores S, (2, columns) of a thread, in place."""
        for stage in self.stages_applied(masked):
            stage.apply(S, block, count)

    def may_mask(self, masked: bool) -> bool:
        """Return True if an applied stage can set scores to -inf."""
        return any(stage.may_mask for stage in self.stages_applied(masked))

    def p_transform(self, masked: bool) -> Callable | None:
        """Return (r, c, value) -> P or 0, or None if every stage leaves P unchanged."""
        return self.select_kept(masked, lambda value: Float32(0.0))

    def signed_p_transform(self, masked: bool) -> Callable | None:
        """Return (r, c, value) -> P, or -P for values that are not kept; None if every stage leaves P unchanged."""
        return self.select_kept(masked, lambda value: -value)

    def select_kept(self, masked: bool, otherwise: Callable) -> Callable | None:
        """Return (r, c, value) -> P for kept values and `otherwise(value)` for dropped values."""
        stages = [stage for stage in self.stages_applied(masked) if stage.keep_scale is not None]
        if not stages:
            return None

        def choose(r: int, c: int, value: Float32) -> Float32:
            chosen = value
            for stage in stages:
                chosen = cutlass.select_(stage.keeps(r, c), chosen, otherwise(value))
            return chosen

        return choose

    def score_derivative(self) -> Callable | None:
        """Return the score derivative of the only stage that has one, or None."""
        derivatives = [derivative for stage in self.stages if (derivative := stage.score_derivative()) is not None]
        assert len(derivatives) < 2, "two stages have a score derivative: multiply the derivatives here"
        return derivatives[0] if derivatives else None

    def extra_logit(self) -> Float32 | None:
        """Return the extra logit of the only stage that has one, or None."""
        logits = [logit for stage in self.stages if (logit := stage.extra_logit()) is not None]
        assert len(logits) < 2, "two stages have an extra logit of the row sum: add up the logits here"
        return logits[0] if logits else None

    def apply_backward(self, dP: cute.Tensor, masked: bool) -> None:
        """Apply the stages' backward to dP, (2, columns) of a thread, in place."""
        for stage in self.stages_applied(masked):
            stage.apply_backward(dP)

    @property
    def is_shared_by_heads(self) -> bool:
        """True if all stages are the same for all query heads."""
        return all(stage.is_shared_by_heads for stage in self.stages)

    @property
    def natural_units(self) -> bool:
        """True if scores leave the pipeline in natural units."""
        return any(stage.natural_units for stage in self.stages)

    @property
    def applies_to_full_blocks(self) -> bool:
        """True if some stage also applies to full blocks."""
        return any(stage.applies_to_full_blocks for stage in self.stages)

    @property
    def sinks(self) -> cute.Tensor | None:
        """The extra logits (Hq,) of the stage that has some (decode)."""
        return next((stage.sinks for stage in self.stages if stage.sinks is not None), None)

    @property
    def keep_scale(self) -> DropoutScale | None:
        """The probability with which dropout keeps a score, and its inverse; None if all of P is kept.

        Mainloops do not use the probability. Results are scaled instead, and the delta of the backward is rowsum(dO *
        O) times the probability.
        """
        scales = [stage.keep_scale for stage in self.stages if stage.keep_scale is not None]
        assert len(scales) < 2, "two stages drop scores: multiply the scales here"
        return scales[0] if scales else None

    def scaled(self, factor: Float32) -> Float32:
        """Return the factor of a result that was multiplied with the kept P."""
        return factor if self.keep_scale is None else factor * self.keep_scale.inverse
