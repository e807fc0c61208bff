"""An additive bias, a value for every score: t = S * scale + bias (Press et al. 2022, Raffel et al. 2020), made of what
the operands are made of, or of fp32.

On Hopper the producer warp brings a warpgroup's part of a block into a ring of its own (bias_tiles.py), wherever its
rows begin. A consumer reads what it holds of the scores (fragments.py) by ldmatrix where all rows have 16 bits and
begin at multiples of 16 bytes, and element by element otherwise.

Scores leave in natural units, so that any scale is right, and the softmax goes on with 1: this stage comes first, since
a scale that is not positive would turn -inf of others around. An entry of -inf hides a score; a row may be empty.

Of a bias (B, Hq, Sq, Sk) the last stride is 1; the others are arbitrary, and 0 where the bias is broadcast. Kernels of
sm_80 need rows that begin at multiples of 16 bytes (cp.async). One row that all queries share comes as 64 rows, which
are read for each block of queries: 64 times the same row from L2 takes TMA twice as long.

A warpgroup has one slot. The slot is free as soon as its values are in registers, a whole step before the next block is
asked for, and a second slot would take the room of Q.
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
from ..fragments import column_of, rows_and_columns
from ..pieces import Tile
from .bias_read import Read
from .bias_tiles import Plane, Tiles
from .chain import Form, Place, SlabForm, Stage
from .natural import add, natural

if TYPE_CHECKING:
    from ..arguments.operands import Scales

ROWS = sm90.ROWS_PER_WARPGROUP


@dataclass(frozen=True)
class Bias(Read):
    """A bias as an argument of a kernel; kernels without room for tiles read each value where it lies."""

    def tma(self, form: Form) -> Stage:
        if not form.room:
            return self
        tiles = Tiles.of(form, self.bias.element_type)
        return MovedBias(tiles.tma(self.bias), self.bias, self.scale)

    def shared(self, smem: cutlass.memory.SmemAllocator, form: Form | SlabForm) -> Stage:
        """Where TMA brings nothing."""
        return SlabBias.create(smem, form, self) if form.room else self


@dataclass(frozen=True)
class MovedBias(Stage):
    """A bias and the TMA atom that loads boxes of it, as arguments of a kernel."""

    atom: cute.CopyAtom
    bias: cute.Tensor  # (B, Hq, Sq, Sk)
    scale: Float32

    def shared(self, smem: cutlass.memory.SmemAllocator, form: Form) -> Stage:
        tiles = Tiles.of(form, self.bias.element_type)
        ring = sm90.Ring.create(smem, form.warpgroups, tiles.bytes)
        return BiasTiles(form, tiles, self.atom, ring, tiles.buffer(smem, form.warpgroups), self.bias, self.scale)


@dataclass(frozen=True)
class BiasTiles(Stage):
    """Tiles of a CTA: a slot for each warpgroup."""

    form: Form
    tiles: Tiles
    atom: cute.CopyAtom
    ring: sm90.Ring  # of all warpgroups
    buffer: cute.Tensor  # (elements of a slot, warpgroup)
    bias: cute.Tensor  # (B, Hq, Sq, Sk)
    scale: Float32
    wg: Int32 | None = None  # a consumer's
    place: Place | None = None
    plane: Plane | None = None
    everywhere = natural_units = True

    @property
    def atoms(self) -> tuple[cute.CopyAtom, ...]:
        return (self.atom,)

    @property
    def rings(self) -> tuple[tuple, ...]:
        return ((self.ring, sm90.WARPGROUP // sm90.WARP),)

    def ring_of(self, wg: Int32 | int) -> sm90.Ring:
        return self.ring.part(wg, 1)

    def slot_of(self, wg: Int32 | int) -> cute.Pointer:
        return self.buffer[None, wg].iterator

    def scales(self, scales: Scales) -> Scales:
        return natural(scales)

    def bring(self, tile: Tile, head: Int32) -> Stage:
        return Bringing(self, tile.block * self.form.warpgroups, Plane(self.tiles, self.bias, tile.sequence, head))

    def hold(self, columns: int) -> Stage:
        wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // sm90.WARPGROUP - 1)
        return replace(self, wg=wg)

    def at(self, place: Place) -> Stage:
        here = replace(self, place=place)
        return here if place.head is None else here.of_head(place.head)

    def of_head(self, head: Int32) -> Stage:
        return replace(self, plane=Plane(self.tiles, self.bias, self.place.batch, head))

    @cute.jit
    def pass_over(self, count: Int32):
        ring = self.ring_of(self.wg)
        ring.wait(count)
        ring.release(count)

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        """S may be narrower than a block."""
        ring, columns = self.ring_of(self.wg), cute.size(S) // 2 * 4
        start = self.slot_of(self.wg)
        ring.wait(count)
        if self.tiles.in_units(self.bias):
            values = self.read_units(self.tiles.tile(start), columns)
            self.release(count)
            add(S, self.scale, rows_and_columns(values))
        else:
            self.add_elements(S, start)
            self.release(count)

    @cute.jit
    def release(self, count: Int32):
        """A warp has read its part of the slot."""
        # An arrival does not wait for loads under way: TMA's next tile was there before the last of them (D 64, where
        # it is asked for at once, on an H100).
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.ring_of(self.wg).release(count)

    def read_units(self, tile: cute.Tensor, columns: int) -> cute.Tensor:
        """Read the first `columns` columns of scores from a tile whose rows begin at units."""
        if self.form.transposed:
            tile = cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=[1, 0]))
        tile = cute.local_tile(tile, (ROWS, columns), (0, 0))
        thread = cute.arch.thread_idx()[0] % sm90.WARPGROUP
        if self.tiles.dtype.width == 32:
            return words(self.form, columns, thread, tile)
        copy, values = matrices(self.form, columns, thread)
        cute.copy(copy, copy.partition_S(tile), copy.retile(values))
        return values

    def add_elements(self, S: cute.Tensor, start: cute.Pointer) -> None:
        """Add to the (2, columns) scores of a thread, one element after the other."""
        place, pitch = self.place, self.tiles.pitch
        row = place.row % ROWS
        if self.form.transposed:
            firsts = [start + (place.column + i) * pitch + self.plane.shift(place.column + i) + row for i in (0, 1)]
            by_row, by_column = 8, pitch
        else:
            firsts = [start + row * pitch + self.plane.shift(row) + place.column + i for i in (0, 1)]
            by_row, by_column = 8 * pitch, 1
        for c in range(cute.size(S, mode=[1])):
            for r in range(2):
                one = firsts[c % 2] + (column_of(c) - c % 2) * by_column + r * by_row
                bias = cute.make_tensor(one, cute.make_layout(1))[0]
                S[r, c] = S[r, c] * self.scale + bias.to(Float32)


@dataclass(frozen=True)
class Bringing(Stage):
    """What a producer warp loads for a tile, of one head."""

    of: BiasTiles
    first: Int32  # of the tile's parts, 64 rows of scores each
    plane: Plane

    @cute.jit
    def load(self, block: Int32, count: Int32):
        of = self.of
        for w in cutlass.range(of.form.warpgroups, unroll_full=of.tiles.roomy):
            queries, keys = (block, self.first + w) if of.form.transposed else (self.first + w, block)
            first = (queries * of.tiles.rows, keys * of.tiles.columns)
            self.plane.load(of.atom, *first, of.slot_of(w), of.ring_of(w), count)


@dataclass(frozen=True)
class SlabBias(Stage):
    """In a CTA of sm_80's kernels: a block of all rows, which all threads load (cp.async) and warps read in slabs."""

    form: SlabForm
    tile: sm80.Tile
    bias: cute.Tensor  # (B, Hq, Sq, Sk)
    scale: Float32
    matrices: sm80.Matrices | None = None  # of a slab
    everywhere = natural_units = True

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
    """Read what a thread holds of (64, columns) biases of fp32, in an accumulator's order."""
    mine = sm90.make_mma(form.element.dtype, columns, "rows", "rows").get_slice(thread).partition_C(tile)
    values = cute.make_rmem_tensor(mine.shape, Float32)
    cute.autovec_copy(mine, values)
    return values


def matrices(form: Form, columns: int, thread: Int32 | int) -> tuple[cute.TiledCopy, cute.Tensor]:
    """Make the copy by which a thread reads (64, columns) of biases, and registers, in an accumulator's order."""
    dtype = form.element.dtype
    mma = sm90.make_mma(dtype, columns, "rows", "rows")
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(form.transposed, 4), dtype)
    values = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, columns)), dtype)
    return cute.make_tiled_copy_C(atom, mma).get_slice(thread), values
