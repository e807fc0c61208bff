"""An additive bias, a value for every score: t = S * scale + bias (Press et al. 2022, Raffel et al. 2020), made of what
the operands are made of, or of fp32.

On Hopper the producer warp brings a warpgroup's part of a block into a ring of its own (bias_load.py), wherever its
rows begin. A consumer reads what it holds of the scores (fragments.py): by ldmatrix from a swizzled tile of 16 bits, by
ordinary loads from a swizzled tile of fp32, and element by element from other tiles.

Scores leave in natural units, so that any scale is right, and the softmax goes on with 1: this stage comes first, since
a scale that is not positive would turn -inf of others around. An entry of -inf hides a score; a row may be empty.

Of a bias (B, Hq, Sq, Sk) the last stride is 1; the others are arbitrary, and 0 where the bias is broadcast. Kernels of
sm_80 need rows that begin at multiples of 16 bytes (cp.async), and get one row that all queries share as many rows.

A warpgroup has one slot. The slot is free as soon as its values are in registers, a whole step before the next block is
asked for, and a second slot would take the room of Q.
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
from .bias_load import Plane, Tiles, opaque
from .bias_read import Read
from .natural_units import add, natural
from .pipeline import Form, Place, SlabForm, Stage

if TYPE_CHECKING:
    from ..call_args.operands import Scales

ROWS = sm90.ROWS_PER_WARPGROUP
CHUNK = 32  # columns of scores that are read at once; a backward has no registers for more


@dataclass(frozen=True)
class Bias(Read):
    """A bias as an argument of a kernel; kernels without room for tiles read each value where it lies."""

    def tma(self, form: Form) -> Stage:
        if not form.room:
            return self
        return MovedBias(*Tiles.of(form, self.bias.element_type).tma(self.bias), self.bias, self.scale)

    def shared(self, smem: cutlass.memory.SmemAllocator, form: Form | SlabForm) -> Stage:
        """Where TMA brings nothing."""
        return SlabBias.create(smem, form, self) if form.room else self


@dataclass(frozen=True)
class MovedBias(Stage):
    """A bias, the TMA atom that loads tiles of it and its coordinates, as arguments of a kernel."""

    atom: cute.CopyAtom
    m: cute.Tensor  # (Sq, Sk, Hq, B)
    bias: cute.Tensor  # (B, Hq, Sq, Sk)
    scale: Float32

    def shared(self, smem: cutlass.memory.SmemAllocator, form: Form) -> Stage:
        tiles = Tiles.of(form, self.bias.element_type)
        ring, buffer = sm90.Ring.create(smem, form.warpgroups, tiles.box_bytes), tiles.buffer(smem, form.warpgroups)
        return BiasTiles(form, tiles, self.atom, self.m, ring, buffer, self.bias, self.scale)


@dataclass(frozen=True)
class BiasTiles(Stage):
    """Tiles of a CTA: a slot for each warpgroup."""

    form: Form
    tiles: Tiles
    atom: cute.CopyAtom
    m: cute.Tensor  # (Sq, Sk, Hq, B)
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
        """S may be narrower than a block.

        Both kinds of tiles are read into the same words, and added outside of the branch. With an addition in each
        branch ptxas waits for all products ahead of the softmax (forward D 256: 13 % longer, on an H100).
        """
        ring, slot, dtype = self.ring_of(self.wg), self.slot_of(self.wg), self.tiles.dtype
        ring.wait(count)
        for first in cutlass.range_constexpr(0, cute.size(S, mode=[1]), CHUNK // 4):
            words = cute.make_rmem_tensor((CHUNK // 2 * dtype.width // 32,), Int32)
            if self.tiles.in_units(self.bias):
                self.read_units(words, self.tiles.tile(slot), first * 4 // CHUNK)
            else:
                self.read_elements(words, self.slot_of(opaque(self.wg)), first)
            values = cute.make_rmem_tensor((CHUNK // 2,), dtype)
            for i in cutlass.range_constexpr(cute.size(words)):
                as_words(values)[i] = opaque(words[i])  # Else LLVM unpacks elements in the branch.
            scores = cute.make_tensor(S.iterator + 2 * first, cute.make_layout(CHUNK // 2))
            add(rows_and_columns(scores), self.scale, rows_and_columns(values))
        self.release(count)

    @cute.jit
    def release(self, count: Int32):
        """A warp has read its part of the slot."""
        # An arrival does not wait for loads under way: TMA's next tile was there before the last of them (D 64, where
        # it is asked for at once, on an H100).
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.ring_of(self.wg).release(count)

    def read_units(self, words: cute.Tensor, tile: cute.Tensor, chunk: int) -> None:
        """Read a chunk of columns of scores, in an accumulator's order, from a swizzled tile."""
        if self.form.transposed:
            tile = cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=[1, 0]))
        tile = cute.local_tile(tile, (ROWS, CHUNK), (0, chunk))
        thread = self.tiles.reader(cute.arch.thread_idx()[0] % sm90.WARPGROUP, self.bias)
        dtype, mma = self.tiles.dtype, chunk_mma(self.form)
        values = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, CHUNK)), dtype)
        if self.tiles.wide:
            cute.autovec_copy(mma.get_slice(thread).partition_C(tile), values)
        else:
            copy = matrices(self.form, thread)
            cute.copy(copy, copy.partition_S(tile), copy.retile(values))
        for i in range(cute.size(words)):
            words[i] = as_words(values)[i]

    def read_elements(self, words: cute.Tensor, slot: cute.Pointer, first: int) -> None:
        """Read the same one element after the other, from a thread's column `first` on: rows are shifted.

        What addresses are made of is hidden from LLVM: computed ahead of the loop it would take registers, of which
        the backward of D 128 has none left.
        """
        row, column, pitch = opaque(self.place.row % ROWS), opaque(self.place.column), self.tiles.pitch
        if self.form.transposed:
            starts = [(column + i) * pitch + self.plane.shift(column + i) + row for i in (0, 1)]
            by_row, by_column = 8, pitch
        else:
            starts = [row * pitch + self.plane.shift(row) + column + i for i in (0, 1)]
            by_row, by_column = 8 * pitch, 1
        wide = self.tiles.wide
        memory = cute.recast_ptr(slot, dtype=Int32 if wide else Uint16)
        for pair in range(CHUNK // 4):
            ahead = column_of(first + pair // 2 * 2) * by_column + pair % 2 * by_row
            low, high = (cute.make_tensor(memory + start + ahead, cute.make_layout(1))[0] for start in starts)
            if wide:
                words[2 * pair], words[2 * pair + 1] = low, high
            else:
                words[pair] = low.to(Int32) & 0xFFFF | high.to(Int32) << 16  # The DSL extends signs.


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
            self.plane.load(queries, keys, (of.atom, of.m), of.slot_of(w), of.ring_of(w), count)


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


def chunk_mma(form: Form) -> cute.TiledMma:
    """Make a product whose accumulator has a chunk of columns."""
    return sm90.make_mma(form.element.dtype, CHUNK, "rows", "rows")


def matrices(form: Form, thread: Int32 | int) -> cute.TiledCopy:
    """Make the copy by which a thread reads (64, CHUNK) biases of 16 bits in an accumulator's order."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(form.transposed, 4), form.element.dtype)
    return cute.make_tiled_copy_C(atom, chunk_mma(form)).get_slice(thread)


def as_words(values: cute.Tensor) -> cute.Tensor:
    """The registers that elements are packed in."""
    count = cute.size(values) * values.element_type.width // 32
    return cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Int32), cute.make_layout(count))
