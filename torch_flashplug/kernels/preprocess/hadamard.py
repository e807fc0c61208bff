"""Rotation and quantization of rows of Q or K to 8 bits, by a CTA of the quantization kernel (quantised.rotate).

Rows are held in units of 16 numbers, distributed over consecutive threads. The first four steps of the Hadamard
transform stay within a unit, and the further steps exchange units between lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...registry.kernel_spec import WARP
from ...registry.quant_recipes import MIN_SCALE, SIGN_BITS
from ..primitives.dtype import QuantizedElement
from ..primitives.vector_access import vector_at

# Numbers in a unit (a thread's part of a row), in a 16-byte load, and in a register of 8-bit numbers.
UNIT, VECTOR, WORD = 16, 8, 4
# Floats from unit to unit in shared memory, so that eight lanes with 16-byte reads use different banks.
PITCH = UNIT + 4


@dataclass(frozen=True)
class HadamardSmem:
    """Shared memory of a CTA."""

    sums: cute.Tensor  # (lanes, channels): sums of samples
    squares: cute.Tensor  # (lanes, channels): sums of squares of samples
    counts: cute.Tensor  # (lanes, channels): numbers of finite samples
    channels: cute.Tensor  # (UNIT, units): the constant key, or inverse scales of values
    means: cute.Tensor  # (UNIT, units): means subtracted from values
    signs: cute.Tensor  # (UNIT, units)
    largest: cute.Tensor  # (units,)
    dots: cute.Tensor  # (units,): products with the constant key
    of_warps: cute.Tensor  # (warps,)


class HadamardRows:
    """Blocks of `rows` rows with `d` numbers, for a CTA of `threads` threads."""

    def __init__(self, element: QuantizedElement, d: int, rows: int, threads: int):
        self.element, self.rows, self.threads = element, rows, threads
        self.size = d & -d  # size of a Hadamard matrix
        self.units = d // UNIT  # units of a row
        self.rounds = -(-rows * self.units // threads)

    @property
    def room(self) -> int:
        """Units of a block."""
        return self.rows * self.units

    def given(self) -> cute.Tensor:
        """Return registers for an unmodified block."""
        return cute.make_rmem_tensor((UNIT, self.rounds), self.element.dtype)

    def held(self) -> cute.Tensor:
        """Return registers for a rotated block."""
        return cute.make_rmem_tensor((self.rounds, UNIT), Float32)

    def unit_of(self, turn: int, block: Int32, S: Int32) -> tuple[Int32, Int32, Int32, cutlass.Boolean]:
        """Return a thread's unit: index in the block, row, first column, and whether the unit exists."""
        unit = turn * self.threads + cute.arch.thread_idx()[0]
        row = block * self.rows + unit // self.units
        return unit, row, unit % self.units * UNIT, (unit < self.room) & (row < S)

    @cute.jit
    def fetch(self, x: cute.Tensor, block: Int32, given: cute.Tensor):
        """Load a block into `given` (UNIT, rounds), with zeros outside of the tensor."""
        given.fill(self.element.dtype(0.0))
        for turn in cutlass.range_constexpr(self.rounds):
            _, row, first, there = self.unit_of(turn, block, x.shape[0])
            for part in cutlass.range_constexpr(UNIT // VECTOR):
                column = first + part * VECTOR
                if there & (column < x.shape[1]):
                    found = vector_at(x[row, None].iterator + column, self.element.dtype, VECTOR)
                    place = given[None, turn].iterator + part * VECTOR
                    cute.autovec_copy(found, cute.make_tensor(place, cute.make_layout(VECTOR)))

    @cute.jit
    def rotate(
        self,
        given: cute.Tensor,
        held: cute.Tensor,
        block: Int32,
        S: Int32,
        room: HadamardSmem,
        keys: cutlass.Constexpr[bool],
    ):
        """Rotate a block into `held` (rounds, UNIT), and store the largest magnitude of each unit.

        The magnitude is NaN if the unit contains NaN.
        """
        for turn in cutlass.range_constexpr(self.rounds):
            unit, _, first, there = self.unit_of(turn, block, S)
            dot = Float32(0.0)
            shifts, signs = (taken(x[None, first // UNIT], UNIT) for x in (room.channels, room.signs))
            for i in cutlass.range_constexpr(UNIT):
                number = given[i, turn].to(Float32)
                if cutlass.const_expr(keys):
                    number = cutlass.select_(there, number - shifts[i], Float32(0.0))
                else:
                    dot += number * shifts[i]
                held[turn, i] = number * signs[i]
            self.transform(held[turn, None])
            largest, spoiled = Float32(0.0), Float32(0.0)
            for i in cutlass.range_constexpr(UNIT):
                largest = cute.arch.fmax(largest, abs(held[turn, i]))
                spoiled += held[turn, i] * 0.0  # NaN for non-finite numbers, which fmax would ignore
            if unit < self.room:
                room.largest[unit] = largest + spoiled
                room.dots[unit] = dot

    def transform(self, held: cute.Tensor) -> None:
        """Multiply the units of a row by Hadamard matrices on the diagonal, in steps from adjacent numbers outwards."""
        step = 1
        while step < min(self.size, UNIT):
            for i in range(UNIT):
                if i & step == 0:
                    low, high = held[i], held[i + step]
                    held[i], held[i + step] = low + high, low - high
            step *= 2
        lanes = 1
        while lanes * UNIT < self.size:
            upper = cute.arch.lane_idx() & lanes != 0
            for i in range(UNIT):
                other = cute.arch.shuffle_sync_bfly(held[i], offset=lanes)
                held[i] = cutlass.select_(upper, other - held[i], held[i] + other)
            lanes *= 2
        for i in range(UNIT):
            held[i] = held[i] * self.size**-0.5

    @cute.jit
    def largest_of_all(self, room: HadamardSmem) -> Float32:
        """Return the largest magnitude of the units of a CTA, NaN if any unit contains NaN."""
        thread, largest, spoiled = cute.arch.thread_idx()[0], Float32(0.0), Float32(0.0)
        for u in cutlass.range_constexpr(self.rounds):
            unit = u * self.threads + thread
            if unit < self.room:
                largest = cute.arch.fmax(largest, room.largest[unit])
                spoiled += room.largest[unit] * 0.0
        for lanes in (1, 2, 4, 8, 16):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=lanes))
            spoiled = spoiled + cute.arch.shuffle_sync_bfly(spoiled, offset=lanes)
        room.of_warps[thread // WARP] = largest + spoiled
        cute.arch.sync_threads()
        largest, spoiled = Float32(0.0), Float32(0.0)
        for warp in cutlass.range_constexpr(self.threads // WARP):
            largest = cute.arch.fmax(largest, room.of_warps[warp])
            spoiled += room.of_warps[warp] * 0.0
        return largest + spoiled

    def of_row(self, room: HadamardSmem, unit: Int32) -> tuple[Float32, Float32]:
        """Return the largest magnitude of a row, and the product of the row with the constant key.

        The magnitude is NaN if the row contains NaN.

        Args:
            room: shared memory of the CTA.
            unit: first unit of the row.
        """
        largest, spoiled, dot = Float32(0.0), Float32(0.0), Float32(0.0)
        for i in range(self.units):
            largest = cute.arch.fmax(largest, room.largest[unit + i])
            spoiled, dot = spoiled + room.largest[unit + i] * 0.0, dot + room.dots[unit + i]
        return largest + spoiled, dot

    @cute.jit
    def store(self, held: cute.Tensor, block: Int32, scale: Float32, out: cute.Tensor):
        """Store a block in 8 bits, with a single scale."""
        for turn in cutlass.range_constexpr(self.rounds):
            _, row, first, there = self.unit_of(turn, block, out.shape[0])
            if there:
                self.store_unit(held[turn, None], Float32(1.0) / scale, out[row, None], first)

    @cute.jit
    def store_apart(
        self, held: cute.Tensor, block: Int32, of_format: float, out: cute.Tensor, scales: cute.Tensor,
        shifts: cute.Tensor, room: HadamardSmem,
    ):  # fmt: skip
        """Store each row in 8 bits with a separate scale.

        The scales are written to `scales`, and the products with the constant key to `shifts`.
        """
        for turn in cutlass.range_constexpr(self.rounds):
            unit, row, first, there = self.unit_of(turn, block, out.shape[0])
            if there:
                largest, dot = self.of_row(room, unit - unit % self.units)
                scale = scale_of(largest, of_format)
                if first == 0:
                    scales[row] = scale
                    shifts[row] = dot
                self.store_unit(held[turn, None], Float32(1.0) / scale, out[row, None], first)

    def store_unit(self, held: cute.Tensor, inverse: Float32, out: cute.Tensor, first: Int32) -> None:
        """Store a unit in 8 bits."""
        words = cute.make_rmem_tensor((UNIT // WORD,), Int32)
        for w in range(UNIT // WORD):
            words[w] = self.element.scores.pack_four([held[w * WORD + i] * inverse for i in range(WORD)])
        cute.autovec_copy(words, vector_at(out.iterator + first, Int32, UNIT // WORD))


def shared_vector(pointer: cute.Pointer, dtype: type[cutlass.Numeric], size: int) -> cute.Tensor:
    """Return `size` numbers at a 16-byte aligned address in shared memory."""
    aligned = cute.make_ptr(dtype, pointer.toint(), cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(aligned, cute.make_layout(size))


def taken(x: cute.Tensor, size: int) -> cute.Tensor:
    """Load `size` consecutive numbers from shared memory into registers."""
    found = cute.make_rmem_tensor((size,), x.element_type)
    cute.autovec_copy(shared_vector(x.iterator, x.element_type, size), found)
    return found


def sign_of(channel: Int32, d: int) -> Float32:
    """Return the sign of a channel, from SIGN_BITS."""
    word = Int32(0)
    for i in range(-(-d // 32)):
        word = cutlass.select_(channel // 32 == i, Int32(SIGN_BITS[i] - (1 << 32) * (SIGN_BITS[i] >> 31)), word)
    return cutlass.select_(word >> channel % 32 & 1 == 1, Float32(-1.0), Float32(1.0))


def scale_of(largest: Float32, of_format: float) -> Float32:
    """Return the scale for a largest magnitude. NaN stays NaN, by max.NaN."""
    scale = cutlass.select_(largest == 0.0, Float32(1.0), largest / of_format)
    text = "max.NaN.f32 {$w0}, {$r0}, {$r1};"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[scale, Float32(MIN_SCALE)])
