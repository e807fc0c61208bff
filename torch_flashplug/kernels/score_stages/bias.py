"""Score stage of an additive bias: t = S * scale + bias (Press et al. 2022, Raffel et al. 2020).

A bias has a value for every score, in the dtype of the operands or in fp32.

On Hopper the producer warp loads a warpgroup's part of a block into a dedicated pipeline (bias_load.py), wherever the
rows of the bias begin. A consumer reads the values of its scores (fragments.py): with ldmatrix from a swizzled tile of
16 bits, with ordinary loads from a swizzled tile of fp32, and element by element from other tiles.

Scores leave in natural units, so that any scale is allowed, and the softmax continues with scale 1. The bias stage
comes first, since a zero or negative scale would turn the -inf of later stages around. An entry of -inf masks out a
score; a row may be empty.

A bias has shape (B, Hq, Sq, Sk). The last stride is 1; the other strides are arbitrary, and 0 where the bias is
broadcast. Kernels of sm_80 need rows that begin at multiples of 16 bytes (cp.async). A row shared by all queries is
passed to these kernels as 64 copies of the row.

A warpgroup has a single pipeline stage. The pipeline stage is free as soon as the values are in registers, a whole step
before the next block is requested. A second stage would take the shared memory of Q.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Uint16
from cutlass.cute.nvgpu import warp

from ..primitives import sm80, sm90
from ..primitives.fragments import column_of, rows_and_columns
from ..tiling.tile import Tile
from .bias_load import BiasPlane, BiasTileLayout, opaque
from .bias_read import DirectBias
from .natural_units import add, natural
from .pipeline import ScoreCoord, ScoreLayout, ScoreStage, SlabScoreLayout

if TYPE_CHECKING:
    from ..call_args.kernel_call import SoftmaxScale

ROWS = sm90.ROWS_PER_WARPGROUP
CHUNK = 32  # columns of scores that are read at once; a backward has no registers for more


@dataclass(frozen=True)
class BiasConfig(DirectBias):
    """Bias as an argument of a kernel; kernels without shared memory for tiles read each value from global memory."""

    def tma(self, score_layout: ScoreLayout) -> ScoreStage:
        """Return the stage for TMA loads, or the stage itself if shared memory has no space for tiles."""
        if not score_layout.has_smem_space:
            return self
        return TmaBias(
            *BiasTileLayout.for_warpgroup(score_layout, self.bias.element_type).tma(self.bias), self.bias, self.scale
        )

    def allocate_smem(
        self, smem: cutlass.memory.SmemAllocator, score_layout: ScoreLayout | SlabScoreLayout
    ) -> ScoreStage:
        """Return the stage with a tile in shared memory, for sm_80 kernels, which use no TMA.

        If shared memory has no space for tiles, the stage itself is returned.
        """
        return SlabBiasLoad.create(smem, score_layout, self) if score_layout.has_smem_space else self


@dataclass(frozen=True)
class TmaBias(ScoreStage):
    """Bias as an argument of a kernel: the tensor, the TMA atom of the tile loads, and the TMA coordinates."""

    atom: cute.CopyAtom
    m: cute.Tensor  # (Sq, Sk, Hq, B)
    bias: cute.Tensor  # (B, Hq, Sq, Sk)
    scale: Float32

    def allocate_smem(self, smem: cutlass.memory.SmemAllocator, score_layout: ScoreLayout) -> ScoreStage:
        """Return the stage with its pipeline and its buffer, a stage per warpgroup."""
        tiles = BiasTileLayout.for_warpgroup(score_layout, self.bias.element_type)
        pipeline = sm90.Pipeline.create(smem, score_layout.warpgroups, tiles.box_bytes)
        buffer = tiles.buffer(smem, score_layout.warpgroups)
        return BiasTileLoad(score_layout, tiles, self.atom, self.m, pipeline, buffer, self.bias, self.scale)


@dataclass(frozen=True)
class BiasTileLoad(ScoreStage):
    """Bias tiles of a CTA in shared memory: a pipeline stage for each warpgroup."""

    score_layout: ScoreLayout
    tiles: BiasTileLayout
    atom: cute.CopyAtom
    m: cute.Tensor  # (Sq, Sk, Hq, B)
    pipeline: sm90.Pipeline  # pipelines of all warpgroups, created as one
    buffer: cute.Tensor  # (elements of a stage, warpgroup)
    bias: cute.Tensor  # (B, Hq, Sq, Sk)
    scale: Float32
    wg: Int32 | None = None  # warpgroup of a consumer
    coord: ScoreCoord | None = None
    plane: BiasPlane | None = None
    applies_to_full_blocks = natural_units = True

    @property
    def atoms(self) -> tuple[cute.CopyAtom, ...]:
        return (self.atom,)

    @property
    def pipelines(self) -> tuple[sm90.PipelineWarps, ...]:
        return (sm90.PipelineWarps(self.pipeline, sm90.WARPGROUP // sm90.WARP),)

    def pipeline_of(self, wg: Int32 | int) -> sm90.Pipeline:
        """Return the single-stage pipeline of a warpgroup."""
        return self.pipeline.sub_pipeline(wg, 1)

    def stage_of(self, wg: Int32 | int) -> cute.Pointer:
        """Return the pointer to the stage of a warpgroup."""
        return self.buffer[None, wg].iterator

    def scales(self, scales: SoftmaxScale) -> SoftmaxScale:
        return natural(scales)

    def begin_tile_load(self, tile: Tile, head: Int32) -> ScoreStage:
        return BiasProducer(
            self, tile.block * self.score_layout.warpgroups, BiasPlane(self.tiles, self.bias, tile.sequence, head)
        )

    def allocate_registers(self, columns: int) -> ScoreStage:
        wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // sm90.WARPGROUP - 1)
        return replace(self, wg=wg)

    def set_tile(self, coord: ScoreCoord) -> ScoreStage:
        stage = replace(self, coord=coord)
        return stage if coord.head is None else stage.of_head(coord.head)

    def of_head(self, head: Int32) -> ScoreStage:
        return replace(self, plane=BiasPlane(self.tiles, self.bias, self.coord.sequence, head))

    @cute.jit
    def skip_kv_blocks(self, count: Int32):
        pipeline = self.pipeline_of(self.wg)
        pipeline.consumer_wait(count)
        pipeline.consumer_release(count)

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        """Compute S * scale + bias in place. S may be narrower than a block.

        Both kinds of tiles are read into the same words, and added outside of the branch. With an addition in each
        branch ptxas waits for all products ahead of the softmax (forward D 256: 13 % longer, on an H100).
        """
        pipeline, stage, dtype = self.pipeline_of(self.wg), self.stage_of(self.wg), self.tiles.dtype
        pipeline.consumer_wait(count)
        for first in cutlass.range_constexpr(0, cute.size(S, mode=[1]), CHUNK // 4):
            words = cute.make_rmem_tensor((CHUNK // 2 * dtype.width // 32,), Int32)
            if self.tiles.is_unit_aligned(self.bias):
                self.read_units(words, self.tiles.tile(stage), first * 4 // CHUNK)
            else:
                self.read_elements(words, self.stage_of(opaque(self.wg)), first)
            values = cute.make_rmem_tensor((CHUNK // 2,), dtype)
            for i in cutlass.range_constexpr(cute.size(words)):
                as_words(values)[i] = opaque(words[i])  # Otherwise LLVM would unpack elements in the branch.
            scores = cute.make_tensor(S.iterator + 2 * first, cute.make_layout(CHUNK // 2))
            add(rows_and_columns(scores), self.scale, rows_and_columns(values))
        self.release(count)

    @cute.jit
    def release(self, count: Int32):
        """Release the warp's part of the stage to the producer."""
        # An arrival does not wait for loads in flight. Without the fence the next tile of TMA was in shared memory
        # before the last of these loads (D 64, where the next tile is requested at once, on an H100).
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.pipeline_of(self.wg).consumer_release(count)

    def read_units(self, words: cute.Tensor, tile: cute.Tensor, chunk: int) -> None:
        """Read a chunk of columns, in an accumulator's order, from a swizzled tile."""
        if self.score_layout.transposed:
            tile = cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=[1, 0]))
        tile = cute.local_tile(tile, (ROWS, CHUNK), (0, chunk))
        thread = self.tiles.reader(cute.arch.thread_idx()[0] % sm90.WARPGROUP, self.bias)
        dtype, mma = self.tiles.dtype, chunk_mma(self.score_layout)
        values = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, CHUNK)), dtype)
        if self.tiles.wide:
            cute.autovec_copy(mma.get_slice(thread).partition_C(tile), values)
        else:
            copy = matrices(self.score_layout, thread)
            cute.copy(copy, copy.partition_S(tile), copy.retile(values))
        for i in range(cute.size(words)):
            words[i] = as_words(values)[i]

    def read_elements(self, words: cute.Tensor, stage: cute.Pointer, first: int) -> None:
        """Read a chunk element by element from a tile of shifted rows, from the thread's column `first` on.

        The parts of the addresses are hidden from LLVM. Computed ahead of the loop, the addresses would take registers,
        of which the backward of D 128 has none left.
        """
        row, column, pitch = opaque(self.coord.row % ROWS), opaque(self.coord.column), self.tiles.pitch
        if self.score_layout.transposed:
            starts = [(column + i) * pitch + self.plane.shift(column + i) + row for i in (0, 1)]
            by_row, by_column = 8, pitch
        else:
            starts = [row * pitch + self.plane.shift(row) + column + i for i in (0, 1)]
            by_row, by_column = 8 * pitch, 1
        wide = self.tiles.wide
        memory = cute.recast_ptr(stage, dtype=Int32 if wide else Uint16)
        for pair in range(CHUNK // 4):
            offset = column_of(first + pair // 2 * 2) * by_column + pair % 2 * by_row
            low, high = (cute.make_tensor(memory + start + offset, cute.make_layout(1))[0] for start in starts)
            if wide:
                words[2 * pair], words[2 * pair + 1] = low, high
            else:
                words[pair] = low.to(Int32) & 0xFFFF | high.to(Int32) << 16  # The DSL extends signs.


@dataclass(frozen=True)
class BiasProducer(ScoreStage):
    """Producer's view of the bias for a tile and a query head."""

    tile_load: BiasTileLoad
    first: Int32  # first part of the tile; a part has 64 rows of scores
    plane: BiasPlane

    @cute.jit
    def load(self, block: Int32, count: Int32):
        """Load the bias of a block, a tile per warpgroup."""
        tile_load = self.tile_load
        for w in cutlass.range(tile_load.score_layout.warpgroups, unroll_full=tile_load.tiles.has_spare_registers):
            queries, keys = (block, self.first + w) if tile_load.score_layout.transposed else (self.first + w, block)
            self.plane.load(
                queries, keys, (tile_load.atom, tile_load.m), tile_load.stage_of(w), tile_load.pipeline_of(w), count
            )


@dataclass(frozen=True)
class SlabBiasLoad(ScoreStage):
    """Bias stage of sm_80 kernels: all threads load a block of all rows with cp.async, and warps read slabs.

    The bias has 16 bits; DirectBias reads a bias in fp32.
    """

    score_layout: SlabScoreLayout
    tile: sm80.SmemTile
    bias: cute.Tensor  # (B, Hq, Sq, Sk)
    scale: Float32  # softmax scale
    matrices: sm80.LdmatrixView | None = None  # ldmatrix view of a slab; `set_tile` sets the view
    applies_to_full_blocks = natural_units = True

    @classmethod
    def create(
        cls, smem: cutlass.memory.SmemAllocator, score_layout: SlabScoreLayout, config: BiasConfig
    ) -> SlabBiasLoad:
        """Return the stage with a tile of 16 bits (rows of a tile, columns of a block) in shared memory."""
        tile = sm80.SmemTile(Int32(0), score_layout.rows, score_layout.columns)
        assert score_layout.columns % tile.panel == 0, "block columns must be whole panels of shared memory"
        assert ROWS % score_layout.rows == 0, (
            f"a row shared by all queries is passed as {ROWS} copies, so a tile must divide {ROWS} rows"
        )
        tile = tile.at_offset(Int32(smem.allocate(tile.bytes, 128).toint()))
        return cls(score_layout, tile, config.bias, config.scale)

    def scales(self, scales: SoftmaxScale) -> SoftmaxScale:
        return natural(scales)

    def begin_tile_load(self, tile: Tile, head: Int32) -> ScoreStage:
        plane, rows = self.bias[tile.sequence, head, None, None], self.score_layout.rows
        return SlabBiasProducer(self, plane, cutlass.min(tile.block, cute.ceil_div(plane.shape[0], rows) - 1) * rows)

    def set_tile(self, coord: ScoreCoord) -> ScoreStage:
        slab = coord.row % self.score_layout.rows // sm80.MMA_ATOM_M * sm80.MMA_ATOM_M
        matrices = sm80.LdmatrixView.create(self.tile, self.score_layout.element.dtype, "A", first_row=slab)
        return replace(self, matrices=matrices)

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        values = cute.make_rmem_tensor((cute.size(S),), self.score_layout.element.dtype)
        for column in cutlass.range_constexpr(0, self.tile.columns, sm80.PAIR):
            fragment = cute.make_tensor(values.iterator + column // 2, cute.make_layout((sm80.VECTOR, 1)))
            self.matrices.fetch(0, column, fragment)
        add(S, self.scale, rows_and_columns(values))


@dataclass(frozen=True)
class SlabBiasProducer(ScoreStage):
    """Producer's view of the bias for a tile in sm_80 kernels, used by all threads."""

    tile_load: SlabBiasLoad
    plane: cute.Tensor  # (Sq, Sk)
    first_row: Int32

    @cute.jit
    def load(self, block: Int32, count: Int32):
        """Start the load of the bias of a block."""
        score_layout, first = self.tile_load.score_layout, block * self.tile_load.score_layout.columns
        rows, columns = self.plane.shape
        layout = cute.make_layout((rows, columns - first), stride=self.plane.stride)
        block_bias = cute.make_tensor(self.plane.iterator + first * self.plane.stride[1], layout)
        sm80.SmemCopier(score_layout.threads, score_layout.element, score_layout.elementwise).load(
            block_bias, self.first_row, self.tile_load.tile
        )


def chunk_mma(score_layout: ScoreLayout) -> cute.TiledMma:
    """Return an MMA whose accumulator has a chunk of columns."""
    return sm90.make_mma(score_layout.element.dtype, CHUNK, "rows", "rows")


def matrices(score_layout: ScoreLayout, thread: Int32 | int) -> cute.TiledCopy:
    """Return the copy with which a thread reads (64, CHUNK) biases of 16 bits in an accumulator's order."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(score_layout.transposed, 4), score_layout.element.dtype)
    return cute.make_tiled_copy_C(atom, chunk_mma(score_layout)).get_slice(thread)


def as_words(values: cute.Tensor) -> cute.Tensor:
    """Return a view of the 32-bit registers in which elements are packed."""
    count = cute.size(values) * values.element_type.width // 32
    return cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Int32), cute.make_layout(count))
