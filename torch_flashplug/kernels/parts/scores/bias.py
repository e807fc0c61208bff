"""An additive bias, a value for every score: t = S * scale + bias (Press et al. 2022, Raffel et al. 2020), made of what
the operands are made of, or of fp32.

TMA brings a warpgroup's part of a block into a ring of its own; a thread reads just what it holds of the scores
(fragments.py), 16 bits by ldmatrix, 32 as they lie, from the tile as it is or, for scores as the backward has them,
from its transpose.

Scores leave in natural units, so that any scale is right, and the softmax goes on with 1: this stage comes first, since
a scale that is not positive would turn -inf of others around. An entry of -inf hides a score; a row may be empty.

Of a bias (B, Hq, Sq, Sk) the last stride is 1, the others are multiples of 16 bytes, as its address is, or 0 where it
is broadcast; rows may be read to the end of their last 16 bytes (cp.async; TMA stops at Sk). One that all queries share
comes as 64 rows of it, which are read for each block of them: 64 times the same row from L2 takes TMA twice as long.

A warpgroup has one slot: it is free as soon as its pairs are in registers, a whole step before the next block's are
asked for, and another would take Q's room.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from .. import sm80, sm90
from ..element import Element
from ..fragments import rows_and_columns
from ..pieces import Tile
from .bias_read import Read
from .chain import Form, Place, SlabForm, Stage
from .natural import add, natural

if TYPE_CHECKING:
    from ..arguments.operands import Scales

ROWS = sm90.ROWS_PER_WARPGROUP


class Fp32:
    """What sm90.Input asks of an Element."""

    dtype, bytes = Float32, 4


@dataclass(frozen=True)
class Bias(Read):
    """Of a call: read where it lies by kernels that have no room for tiles of it."""

    def tma(self, form: Form) -> Stage:
        if not form.room:
            return self
        moved = MovedBias if self.bias.element_type.width == 16 else MovedBias32
        return moved(*moved.tiles(form).tma(sm90.rows_first(self.bias)), self.scale)

    def shared(self, smem: cutlass.memory.SmemAllocator, form: Form | SlabForm) -> Stage:
        """Where TMA brings nothing."""
        return SlabBias.create(smem, form, self) if form.room else self


@dataclass(frozen=True)
class MovedBias(Stage):
    """As a kernel takes it: the TMA atom that loads tiles, its coordinates (Sq, Sk, heads, batch)."""

    atom: cute.CopyAtom
    m: cute.Tensor
    scale: Float32

    @classmethod
    def tiles(cls, form: Form) -> sm90.Input:
        """How TMA brings them: rows of queries."""
        shape = (form.columns, ROWS) if form.transposed else (ROWS, form.columns)
        return sm90.Input.create(cls.made_of(form), *shape, form.warpgroups)

    @staticmethod
    def made_of(form: Form) -> Element | Fp32:
        return form.element

    def shared(self, smem: cutlass.memory.SmemAllocator, form: Form) -> Stage:
        moved = self.tiles(form)
        operand, ring = sm90.Operand(self.atom, self.m, moved.buffer(smem)), moved.ring(smem)
        return BiasTiles(form, operand, ring, self.scale)


class MovedBias32(MovedBias):
    """The same of one of fp32, whatever the operands are."""

    @staticmethod
    def made_of(form: Form) -> Element | Fp32:
        return Fp32()


@dataclass(frozen=True)
class BiasTiles(Stage):
    """In a CTA: a ring for each warpgroup."""

    form: Form
    tiles: sm90.Operand  # (queries, keys, slot and warpgroup)
    ring: sm90.Ring  # of all of them
    scale: Float32
    wg: Int32 | None = None  # a consumer's
    everywhere = True

    @property
    def atoms(self) -> tuple[cute.CopyAtom, ...]:
        return (self.tiles.atom,)

    @property
    def rings(self) -> tuple[tuple, ...]:
        return ((self.ring, sm90.WARPGROUP // sm90.WARP),)

    @property
    def slots(self) -> int:
        """Of a warpgroup."""
        return self.ring.stages // self.form.warpgroups

    def ring_of(self, wg: Int32 | int) -> sm90.Ring:
        return self.ring.part(wg, self.slots)

    def scales(self, scales: Scales) -> Scales:
        return natural(scales)

    def bring(self, tile: Tile, head: Int32) -> Stage:
        form = self.form
        shape = (form.columns, ROWS) if form.transposed else (ROWS, form.columns)
        tXsX, tXgX = self.tiles.head(head, tile.sequence).tiles(shape, (None, None))
        last_rows = cute.ceil_div(self.tiles.m.shape[0], shape[0]) - 1
        return Bringing(self, tile.block * form.warpgroups, last_rows, tXsX, tXgX)

    def hold(self, columns: int) -> Stage:
        wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // sm90.WARPGROUP - 1)
        return replace(self, wg=wg)

    @cute.jit
    def pass_over(self, count: Int32):
        ring = self.ring_of(self.wg)
        ring.wait(count)
        ring.release(count)

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        """S may be narrower than a block."""
        ring = self.ring_of(self.wg)
        ring.wait(count)
        biases = self.read(self.wg * self.slots + ring.slot(count), cute.size(S) // 2 * 4)
        # An arrival does not wait for loads under way: TMA's next tile was there before the last of them (D 64, where
        # it is asked for at once, on an H100).
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        ring.release(count)
        add(S, self.scale, biases)

    def read(self, slot: Int32, columns: int) -> cute.Tensor:
        """The first `columns` of a slot's tile, as a thread holds scores of them: (2, columns / 4)."""
        tile = sm90.transposed(self.tiles.s) if self.form.transposed else self.tiles.s
        tile = cute.local_tile(tile[None, None, slot], (ROWS, columns), (0, 0))
        thread = cute.arch.thread_idx()[0] % sm90.WARPGROUP
        if tile.element_type.width == 32:
            return rows_and_columns(words(self.form, columns, thread, tile))
        copy, values = matrices(self.form, columns, thread)
        cute.copy(copy, copy.partition_S(tile), copy.retile(values))
        return rows_and_columns(values)


@dataclass(frozen=True)
class Bringing(Stage):
    """What a producer warp loads for a tile, of one head."""

    of: BiasTiles
    first: Int32  # of the tile's parts, 64 rows each
    last_rows: Int32  # block of queries that the bias has
    shared_tiles: cute.Tensor
    global_tiles: cute.Tensor

    @cute.jit
    def load(self, block: Int32, count: Int32):
        of = self.of
        for w in cutlass.range_constexpr(of.form.warpgroups):
            ring = of.ring_of(w)
            rows, keys = (block, self.first + w) if of.form.transposed else (self.first + w, block)
            place = (cutlass.min(rows, self.last_rows), keys)
            ring.acquire(count)
            slot = self.shared_tiles[None, w * of.slots + ring.slot(count)]
            cute.copy(of.tiles.atom, self.global_tiles[(None, *place)], slot, tma_bar_ptr=ring.arrival(count))


@dataclass(frozen=True)
class SlabBias(Stage):
    """In a CTA of sm_80's kernels: a block of all rows, which all threads load (cp.async) and warps read in slabs."""

    form: SlabForm
    tile: sm80.Tile
    bias: cute.Tensor  # (B, Hq, Sq, Sk)
    scale: Float32
    matrices: sm80.Matrices | None = None  # of a slab
    everywhere = True

    @classmethod
    def create(cls, smem: cutlass.memory.SmemAllocator, form: SlabForm, of: Bias) -> SlabBias:
        tile = sm80.Tile(Int32(0), form.rows, form.columns)
        assert form.columns % tile.panel == 0, "blocks of keys are panels of shared memory"
        assert ROWS % form.rows == 0, "one that all queries share has as many"
        tile = tile.moved(Int32(smem.allocate(tile.bytes, 128).toint()))
        return cls(form, tile, of.bias, of.scale)

    def scales(self, scales: Scales) -> Scales:
        return natural(scales)

    def bring(self, tile: Tile, head: Int32) -> Stage:
        plane, rows = self.bias[tile.sequence, head, None, None], self.form.rows
        return SlabBringing(self, plane, cutlass.min(tile.block, cute.ceil_div(plane.shape[0], rows) - 1) * rows)

    def at(self, place: Place) -> Stage:
        slab = place.row % self.form.rows // sm80.SLAB * sm80.SLAB
        matrices = sm80.Matrices.create(self.tile, self.form.element.dtype, "A", first_row=slab)
        return replace(self, matrices=matrices)

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        values = cute.make_rmem_tensor((cute.size(S),), self.form.element.dtype)
        for column in cutlass.range_constexpr(0, self.tile.columns, sm80.PAIR):
            some = cute.make_tensor(values.iterator + column // 2, cute.make_layout((sm80.VECTOR, 1)))
            self.matrices.fetch(0, column, some)
        add(S, self.scale, rows_and_columns(values))


@dataclass(frozen=True)
class SlabBringing(Stage):
    """What all threads load for a tile."""

    of: SlabBias
    plane: cute.Tensor  # (Sq, Sk)
    first_row: Int32

    @cute.jit
    def load(self, block: Int32, count: Int32):
        form, first = self.of.form, block * self.of.form.columns
        rows, columns = self.plane.shape
        layout = cute.make_layout((rows, columns - first), stride=self.plane.stride)
        there = cute.make_tensor(self.plane.iterator + first * self.plane.stride[1], layout)
        sm80.Mover(form.threads, form.element, form.elementwise).load(there, self.first_row, self.of.tile)


def words(form: Form, columns: int, thread: Int32, tile: cute.Tensor) -> cute.Tensor:
    """What a thread holds of (64, columns) biases of fp32, in an accumulator's order."""
    mine = sm90.make_mma(form.element.dtype, columns, "rows", "rows").get_slice(thread).partition_C(tile)
    values = cute.make_rmem_tensor(mine.shape, Float32)
    cute.autovec_copy(mine, values)
    return values


def matrices(form: Form, columns: int, thread: Int32 | int) -> tuple[cute.TiledCopy, cute.Tensor]:
    """How a thread reads (64, columns) of biases, and registers for them, in an accumulator's order."""
    dtype = form.element.dtype
    mma = sm90.make_mma(dtype, columns, "rows", "rows")
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(form.transposed, 4), dtype)
    values = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, columns)), dtype)
    return cute.make_tiled_copy_C(atom, mma).get_slice(thread), values
