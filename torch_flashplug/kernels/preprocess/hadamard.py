"""Rotation and quantization of rows of Q or K to 8 bits, by a CTA of the quantization kernel (quantize_reference.py).

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
    warp_values: cute.Tensor  # (warps,)


class HadamardRows:
    """Blocks of `rows` rows with `d` numbers, for a CTA of `threads` threads."""

    def __init__(self, element: QuantizedElement, d: int, rows: int, threads: int):
        self.element, self.rows, self.threads = element, rows, threads
        self.size = d & -d  # size of a Hadamard matrix
        self.units = d // UNIT  # units of a row
        self.rounds = -(-rows * self.units // threads)

    @property
    def num_units(self) -> int:
        """Units of a block."""
        return self.rows * self.units

    def block_registers(self) -> cute.Tensor:
        """Return registers for an unmodified block."""
        return cute.make_rmem_tensor((UNIT, self.rounds), self.element.dtype)

    def rotated_registers(self) -> cute.Tensor:
        """Return registers for a rotated block."""
        return cute.make_rmem_tensor((self.rounds, UNIT), Float32)

    def unit_of(self, round_idx: int, block: Int32, S: Int32) -> tuple[Int32, Int32, Int32, cutlass.Boolean]:
        """Return a thread's unit: index in the block, row, first column, and whether the unit exists."""
        unit = round_idx * self.threads + cute.arch.thread_idx()[0]
        row = block * self.rows + unit // self.units
        return unit, row, unit % self.units * UNIT, (unit < self.num_units) & (row < S)

    @cute.jit
    def fetch(self, x: cute.Tensor, block: Int32, block_values: cute.Tensor):
        """Load a block into `block_values` (UNIT, rounds), with zeros outside of the tensor."""
        block_values.fill(self.element.dtype(0.0))
        for round_idx in cutlass.range_constexpr(self.rounds):
            _, row, first_column, is_valid = self.unit_of(round_idx, block, x.shape[0])
            for part in cutlass.range_constexpr(UNIT // VECTOR):
                column = first_column + part * VECTOR
                if is_valid & (column < x.shape[1]):
                    source = vector_at(x[row, None].iterator + column, self.element.dtype, VECTOR)
                    target = block_values[None, round_idx].iterator + part * VECTOR
                    cute.autovec_copy(source, cute.make_tensor(target, cute.make_layout(VECTOR)))

    @cute.jit
    def rotate(
        self,
        block_values: cute.Tensor,
        rotated: cute.Tensor,
        block: Int32,
        S: Int32,
        shared: HadamardSmem,
        keys: cutlass.Constexpr[bool],
    ):
        """Rotate a block into `rotated` (rounds, UNIT), and store the largest magnitude of each unit.

        The magnitude is NaN if the unit contains NaN.
        """
        for round_idx in cutlass.range_constexpr(self.rounds):
            unit, _, first_column, is_valid = self.unit_of(round_idx, block, S)
            dot = Float32(0.0)
            shifts, signs = (
                load_registers(x[None, first_column // UNIT], UNIT) for x in (shared.channels, shared.signs)
            )
            for i in cutlass.range_constexpr(UNIT):
                number = block_values[i, round_idx].to(Float32)
                if cutlass.const_expr(keys):
                    number = cutlass.select_(is_valid, number - shifts[i], Float32(0.0))
                else:
                    dot += number * shifts[i]
                rotated[round_idx, i] = number * signs[i]
            self.transform(rotated[round_idx, None])
            largest, nan_marker = Float32(0.0), Float32(0.0)
            for i in cutlass.range_constexpr(UNIT):
                largest = cute.arch.fmax(largest, abs(rotated[round_idx, i]))
                nan_marker += rotated[round_idx, i] * 0.0  # NaN for non-finite numbers, which fmax would ignore
            if unit < self.num_units:
                shared.largest[unit] = largest + nan_marker
                shared.dots[unit] = dot

    def transform(self, units: cute.Tensor) -> None:
        """Multiply the units of a row by Hadamard matrices on the diagonal, in steps from adjacent numbers outwards."""
        step = 1
        while step < min(self.size, UNIT):
            for i in range(UNIT):
                if i & step == 0:
                    low, high = units[i], units[i + step]
                    units[i], units[i + step] = low + high, low - high
            step *= 2
        lanes = 1
        while lanes * UNIT < self.size:
            upper = cute.arch.lane_idx() & lanes != 0
            for i in range(UNIT):
                peer_value = cute.arch.shuffle_sync_bfly(units[i], offset=lanes)
                units[i] = cutlass.select_(upper, peer_value - units[i], units[i] + peer_value)
            lanes *= 2
        for i in range(UNIT):
            units[i] = units[i] * self.size**-0.5

    @cute.jit
    def largest_of_all(self, shared: HadamardSmem) -> Float32:
        """Return the largest magnitude of the units of a CTA, NaN if any unit contains NaN."""
        thread, largest, nan_marker = cute.arch.thread_idx()[0], Float32(0.0), Float32(0.0)
        for u in cutlass.range_constexpr(self.rounds):
            unit = u * self.threads + thread
            if unit < self.num_units:
                largest = cute.arch.fmax(largest, shared.largest[unit])
                nan_marker += shared.largest[unit] * 0.0
        for lanes in (1, 2, 4, 8, 16):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=lanes))
            nan_marker = nan_marker + cute.arch.shuffle_sync_bfly(nan_marker, offset=lanes)
        shared.warp_values[thread // WARP] = largest + nan_marker
        cute.arch.sync_threads()
        largest, nan_marker = Float32(0.0), Float32(0.0)
        for warp in cutlass.range_constexpr(self.threads // WARP):
            largest = cute.arch.fmax(largest, shared.warp_values[warp])
            nan_marker += shared.warp_values[warp] * 0.0
        return largest + nan_marker

    def row_statistics(self, shared: HadamardSmem, unit: Int32) -> tuple[Float32, Float32]:
        """Return the largest magnitude of a row, and the product of the row with the constant key.

        The magnitude is NaN if the row contains NaN.

        Args:
            shared: shared memory of the CTA.
            unit: first unit of the row.
        """
        largest, nan_marker, dot = Float32(0.0), Float32(0.0), Float32(0.0)
        for i in range(self.units):
            largest = cute.arch.fmax(largest, shared.largest[unit + i])
            nan_marker, dot = nan_marker + shared.largest[unit + i] * 0.0, dot + shared.dots[unit + i]
        return largest + nan_marker, dot

    @cute.jit
    def store(self, rotated: cute.Tensor, block: Int32, scale: Float32, out: cute.Tensor):
        """Store a block in 8 bits, with a single scale."""
        for round_idx in cutlass.range_constexpr(self.rounds):
            _, row, first_column, is_valid = self.unit_of(round_idx, block, out.shape[0])
            if is_valid:
                self.store_unit(rotated[round_idx, None], Float32(1.0) / scale, out[row, None], first_column)

    @cute.jit
    def store_rows(
        self, rotated: cute.Tensor, block: Int32, largest_of_format: float, out: cute.Tensor, scales: cute.Tensor,
        shifts: cute.Tensor, shared: HadamardSmem,
    ):  # fmt: skip
        """Store each row in 8 bits with a separate scale.

        The scales are written to `scales`, and the products with the constant key to `shifts`.
        """
        for round_idx in cutlass.range_constexpr(self.rounds):
            unit, row, first_column, is_valid = self.unit_of(round_idx, block, out.shape[0])
            if is_valid:
                largest, dot = self.row_statistics(shared, unit - unit % self.units)
                scale = scale_of(largest, largest_of_format)
                if first_column == 0:
                    scales[row] = scale
                    shifts[row] = dot
                self.store_unit(rotated[round_idx, None], Float32(1.0) / scale, out[row, None], first_column)

    def store_unit(self, unit: cute.Tensor, inverse: Float32, out: cute.Tensor, first_column: Int32) -> None:
        """Store a unit in 8 bits."""
        words = cute.make_rmem_tensor((UNIT // WORD,), Int32)
        for w in range(UNIT // WORD):
            words[w] = self.element.scores.pack_four([unit[w * WORD + i] * inverse for i in range(WORD)])
        cute.autovec_copy(words, vector_at(out.iterator + first_column, Int32, UNIT // WORD))


def shared_vector(pointer: cute.Pointer, dtype: type[cutlass.Numeric], size: int) -> cute.Tensor:
    """Return `size` numbers at a 16-byte aligned address in shared memory."""
    aligned = cute.make_ptr(dtype, pointer.toint(), cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(aligned, cute.make_layout(size))


def load_registers(x: cute.Tensor, size: int) -> cute.Tensor:
    """Load `size` consecutive numbers from shared memory into registers."""
    registers = cute.make_rmem_tensor((size,), x.element_type)
    cute.autovec_copy(shared_vector(x.iterator, x.element_type, size), registers)
    return registers


def sign_of(channel: Int32, d: int) -> Float32:
    """Return the sign of a channel, from SIGN_BITS."""
    word = Int32(0)
    for i in range(-(-d // 32)):
        word = cutlass.select_(channel // 32 == i, Int32(SIGN_BITS[i] - (1 << 32) * (SIGN_BITS[i] >> 31)), word)
    return cutlass.select_(word >> channel % 32 & 1 == 1, Float32(-1.0), Float32(1.0))


def scale_of(largest: Float32, largest_of_format: float) -> Float32:
    """Return the scale for a largest magnitude. NaN stays NaN, by max.NaN."""
    scale = cutlass.select_(largest == 0.0, Float32(1.0), largest / largest_of_format)
    text = "max.NaN.f32 {$w0}, {$r0}, {$r1};"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[scale, Float32(MIN_SCALE)])
