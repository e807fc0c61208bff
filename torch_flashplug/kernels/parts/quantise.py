"""Operands in 8 bits, from 16: one kernel, in one pass (quantised.py has the mathematics, and the same in torch).

A CTA has a block of keys of K, 128 keys of V, or as many rows of Q as a block has keys. Each finds for itself what it
needs of a whole head, from the same SAMPLES keys: the constant key of K, the scales of V's channels. So nothing waits
for anything, no sum depends on who comes first, and a call's result on nothing but its own operands.

Rows of Q and K are held in units of 16 numbers, one after the other among threads: four steps of the Hadamard transform
are a unit's own, the others exchange units between lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32

from ...recipes import CHANNEL_RMS, KEY_ORDER, LARGEST, ROTATION, SAMPLES, SMALLEST_SCALE, Recipe
from ...spec import WARP
from .element import QuantisedElement
from .scratch import vector_at

THREADS = 256
WARPS = THREADS // WARP
UNIT, VECTOR, WORD = 16, 8, 4  # numbers: of a row that a thread holds, of a 16-byte load, 8-bit ones of a register
KEYS = 128  # of V that a CTA turns
# In shared memory: floats from unit to unit, so that eight lanes read sixteen bytes each from other banks; words of a
# channel's keys, of which fours are exchanged (swizzled) so that lanes store to other banks.
PITCH, FOURS = UNIT + 4, KEYS // WORD // 4
LARGEST_FLOAT = 3.4028234663852886e38


@dataclass(frozen=True)
class Made:
    """What comes of it (quantised.Quantised). Rows of q and k, and channels of v, are whole 16 bytes."""

    q: cute.Tensor  # (B, Hq, Sq, d) 8 bits
    k: cute.Tensor  # (B, Hkv, Sk, d)
    v: cute.Tensor | None  # (B, Hkv, Dv, Sk rounded up to 16)
    q_scale: cute.Tensor  # (B, Hq, Sq)
    k_scale: cute.Tensor  # (B, Hkv, blocks)
    v_scale: cute.Tensor | None  # (B, Hkv, Dv)
    row_shift: cute.Tensor  # (B, Hq, Sq)


@dataclass(frozen=True)
class Room:
    """Of a CTA in shared memory."""

    sums: cute.Tensor  # (lanes, channels): of samples
    counts: cute.Tensor  # (lanes, channels): how many of them are finite
    channels: cute.Tensor  # (UNIT, units): the constant key, or what values are multiplied with
    signs: cute.Tensor  # (UNIT, units)
    largest: cute.Tensor  # (units,)
    dots: cute.Tensor  # (units,): with the constant key
    of_warps: cute.Tensor  # (WARPS,)


class Quantise:
    """Builds the kernel for head dims d and dv, to which smaller ones are filled up with zeros, and blocks of keys."""

    def __init__(self, element: QuantisedElement, recipe: Recipe, d: int, dv: int, block: int):
        self.element, self.recipe, self.d, self.dv, self.block = element, recipe, d, dv, block
        self.size = d & -d  # of a Hadamard matrix
        self.units = d // UNIT  # of a row
        self.rounds = -(-block * self.units // THREADS)
        self.widest = max(d, dv)

    @cute.jit
    def __call__(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, to: Made, stream: cuda.CUstream):
        B, Hq, Sq, _ = q.shape
        _, Hkv, Sk, _ = k.shape
        of_keys, of_rows = B * Hkv * cute.ceil_div(Sk, self.block), B * Hq * cute.ceil_div(Sq, self.block)
        of_values = Int32(0) if to.v is None else B * Hkv * cute.ceil_div(Sk, KEYS)
        grid = (of_keys + of_values + of_rows, 1, 1)
        self.kernel(q, k, v, to).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, to: Made):
        smem = cutlass.memory.SmemAllocator()

        def floats(shape: tuple[int, ...], stride: tuple[int, ...] = (1,)) -> cute.Tensor:
            return smem.allocate_tensor(Float32, cute.make_layout(shape, stride=stride), 16)

        lanes = THREADS // (min(self.d, self.dv) // VECTOR)
        units = self.block * self.units
        room = Room(
            *(floats((lanes, self.widest), (self.widest, 1)) for _ in range(2)),
            *(floats((UNIT, self.widest // UNIT), (1, PITCH)) for _ in range(2)),
            *(floats((units,)) for _ in range(2)), floats((WARPS,)),
        )  # fmt: skip
        B, Hkv, Sk, _ = k.shape
        number, of_keys = cute.arch.block_idx()[0], B * Hkv * cute.ceil_div(Sk, self.block)
        if number < of_keys:
            self.quantise_rows(number, k, k, to.k, to, room, keys=True)
        else:
            number -= of_keys
            if cutlass.const_expr(self.recipe.values is not None):
                of_values = B * Hkv * cute.ceil_div(Sk, KEYS)
                if number < of_values:
                    self.quantise_values(number, v, to, smem, room)
                else:
                    self.quantise_rows(number - of_values, q, k, to.q, to, room, keys=False)
            else:
                self.quantise_rows(number, q, k, to.q, to, room, keys=False)

    @cute.jit
    def quantise_rows(
        self, number: Int32, x: cute.Tensor, k: cute.Tensor, out: cute.Tensor, to: Made, room: Room,
        keys: cutlass.Constexpr[bool],
    ):  # fmt: skip
        """Rows of K, of one scale, or of Q, of one each."""
        thread = cute.arch.thread_idx()[0]
        block, head, batch = place_of(number, cute.ceil_div(x.shape[2], self.block), x.shape[1])
        mine, target = x[batch, head, None, None], out[batch, head, None, None]
        kv_head = head if cutlass.const_expr(keys) else head // (x.shape[1] // k.shape[1])
        given = cute.make_rmem_tensor((UNIT, self.rounds), self.element.dtype)
        self.fetch_rows(mine, block, given)  # on their way while samples are added up
        if thread < self.d:
            room.signs[thread % UNIT, thread // UNIT] = sign_of(thread, self.d)
        self.sample(k[batch, kv_head, None, None], room, self.d, squares=False)
        if thread < self.d:
            total, count = self.sampled(room, thread, self.d)
            room.channels[thread % UNIT, thread // UNIT] = total / cute.arch.fmax(count, Float32(1.0))
        cute.arch.sync_threads()
        held = cute.make_rmem_tensor((self.rounds, UNIT), Float32)
        self.rotate_rows(given, held, block, mine.shape[0], room, keys)
        cute.arch.sync_threads()
        if cutlass.const_expr(keys):
            scale = scale_of(self.largest_of_all(room), LARGEST[self.recipe.scores])
            if thread == 0:
                to.k_scale[batch, head, block] = scale
            for turn in cutlass.range_constexpr(self.rounds):
                _, row, first, there = self.unit_of(turn, block, mine.shape[0])
                if there:
                    self.store(held[turn, None], Float32(1.0) / scale, target[row, None], first)
        else:
            scales, shifts = to.q_scale[batch, head, None], to.row_shift[batch, head, None]
            self.finish_rows_of_q(held, block, target, scales, shifts, room)

    def unit_of(self, turn: int, block: Int32, S: Int32) -> tuple[Int32, Int32, Int32, cutlass.Boolean]:
        """A thread's: its number in the block, its row, its first column, and whether there is one."""
        unit = turn * THREADS + cute.arch.thread_idx()[0]
        row = block * self.block + unit // self.units
        return unit, row, unit % self.units * UNIT, (unit < self.block * self.units) & (row < S)

    @cute.jit
    def fetch_rows(self, x: cute.Tensor, block: Int32, given: cute.Tensor):
        """given (UNIT, rounds): zeros where there is nothing."""
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
    def rotate_rows(
        self, given: cute.Tensor, held: cute.Tensor, block: Int32, S: Int32, room: Room, keys: cutlass.Constexpr[bool]
    ):
        """held (rounds, UNIT), and of each unit its largest number, NaN if it has one."""
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
                spoiled += held[turn, i] * 0.0  # NaN of what is not finite, which fmax would pass over
            if unit < self.block * self.units:
                room.largest[unit] = largest + spoiled
                room.dots[unit] = dot

    @cute.jit
    def finish_rows_of_q(
        self, held: cute.Tensor, block: Int32, out: cute.Tensor, scales: cute.Tensor, shifts: cute.Tensor, room: Room
    ):
        for turn in cutlass.range_constexpr(self.rounds):
            unit, row, first, there = self.unit_of(turn, block, out.shape[0])
            if there:
                largest, dot = self.of_row(room, unit - unit % self.units)
                scale = scale_of(largest, LARGEST[self.recipe.scores])
                if first == 0:
                    scales[row] = scale
                    shifts[row] = dot
                self.store(held[turn, None], Float32(1.0) / scale, out[row, None], first)

    def transform(self, held: cute.Tensor) -> None:
        """A row's units times Hadamard matrices on the diagonal, their steps from neighbours outwards."""
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
    def largest_of_all(self, room: Room) -> Float32:
        """Of a CTA's units; NaN if one is."""
        thread, largest, spoiled = cute.arch.thread_idx()[0], Float32(0.0), Float32(0.0)
        for u in cutlass.range_constexpr(self.rounds):
            unit = u * THREADS + thread
            if unit < self.block * self.units:
                largest = cute.arch.fmax(largest, room.largest[unit])
                spoiled += room.largest[unit] * 0.0
        for lanes in (1, 2, 4, 8, 16):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=lanes))
            spoiled = spoiled + cute.arch.shuffle_sync_bfly(spoiled, offset=lanes)
        room.of_warps[thread // WARP] = largest + spoiled
        cute.arch.sync_threads()
        largest, spoiled = Float32(0.0), Float32(0.0)
        for warp in cutlass.range_constexpr(WARPS):
            largest = cute.arch.fmax(largest, room.of_warps[warp])
            spoiled += room.of_warps[warp] * 0.0
        return largest + spoiled

    def of_row(self, room: Room, unit: Int32) -> tuple[Float32, Float32]:
        """The largest number of a row that begins with this unit, NaN if it has one; and the row's dot."""
        largest, spoiled, dot = Float32(0.0), Float32(0.0), Float32(0.0)
        for i in range(self.units):
            largest = cute.arch.fmax(largest, room.largest[unit + i])
            spoiled, dot = spoiled + room.largest[unit + i] * 0.0, dot + room.dots[unit + i]
        return largest + spoiled, dot

    def store(self, held: cute.Tensor, inverse: Float32, out: cute.Tensor, first: Int32) -> None:
        """A unit in 8 bits."""
        words = cute.make_rmem_tensor((UNIT // WORD,), Int32)
        for w in range(UNIT // WORD):
            words[w] = self.element.scores.pack_four([held[w * WORD + i] * inverse for i in range(WORD)])
        cute.autovec_copy(words, vector_at(out.iterator + first, Int32, UNIT // WORD))

    @cute.jit
    def sample(self, x: cute.Tensor, room: Room, width: cutlass.Constexpr[int], squares: cutlass.Constexpr[bool]):
        """Sums over SAMPLES rows of a head (S, D) spread evenly, by lane: of finite numbers, or of their squares."""
        groups = width // VECTOR
        lanes = THREADS // groups
        thread = cute.arch.thread_idx()[0]
        group, lane = thread % groups, thread // groups
        if lane < lanes:
            sums, counts = (cute.make_rmem_tensor((VECTOR,), Float32) for _ in range(2))
            sums.fill(0.0)
            counts.fill(0.0)
            turns = -(-SAMPLES // lanes)
            raw = cute.make_rmem_tensor((VECTOR, turns), self.element.dtype)
            for turn in cutlass.range_constexpr(turns):
                row = (2 * (lane + turn * lanes) + 1) * x.shape[0] // (2 * SAMPLES)
                if (lane + turn * lanes < SAMPLES) & (group * VECTOR < x.shape[1]):
                    at = x[row, None].iterator + group * VECTOR
                    cute.autovec_copy(vector_at(at, self.element.dtype, VECTOR), raw[None, turn])
            for turn in cutlass.range_constexpr(turns):
                there = (lane + turn * lanes < SAMPLES) & (group * VECTOR < x.shape[1])
                for i in cutlass.range_constexpr(VECTOR):
                    number = raw[i, turn].to(Float32)
                    finite = there & (abs(number) <= LARGEST_FLOAT)
                    number = cutlass.select_(finite, number, Float32(0.0))
                    sums[i] = sums[i] + (number * number if cutlass.const_expr(squares) else number)
                    counts[i] = counts[i] + cutlass.select_(finite, Float32(1.0), Float32(0.0))
            for found, into in ((sums, room.sums), (counts, room.counts)):
                cute.autovec_copy(found, shared_vector(into[lane, None].iterator + group * VECTOR, Float32, VECTOR))
        cute.arch.sync_threads()

    def sampled(self, room: Room, channel: Int32, width: int) -> tuple[Float32, Float32]:
        """Sum and count of a channel."""
        total, count = Float32(0.0), Float32(0.0)
        for lane in range(THREADS // (width // VECTOR)):
            total, count = total + room.sums[lane, channel], count + room.counts[lane, channel]
        return total, count

    @cute.jit
    def quantise_values(
        self, number: Int32, v: cute.Tensor, to: Made, smem: cutlass.memory.SmemAllocator, room: Room
    ):  # fmt: skip
        """KEYS keys of V, turned."""
        layout = cute.make_layout((WORD, FOURS, self.dv), stride=(1, WORD, WORD * FOURS))
        turned = smem.allocate_tensor(Int32, layout, 16)
        block, head, batch = place_of(number, cute.ceil_div(v.shape[2], KEYS), v.shape[1])
        mine = v[batch, head, None, None]
        given = cute.make_rmem_tensor((VECTOR, WORD, self.turns), self.element.dtype)
        self.fetch_values(mine, block, given)
        self.scale_values(mine, block, to.v_scale[batch, head, None], room)
        self.turn_values(given, turned, room)
        cute.arch.sync_threads()
        self.store_values(turned, block, to.v[batch, head, None, None])

    @property
    def turns(self) -> int:
        """Of a CTA's threads over four keys of a group of channels each."""
        return -(-(KEYS // WORD * (self.dv // VECTOR)) // THREADS)

    def task_of(self, turn: int) -> tuple[Int32, Int32]:
        """A thread's word of the keys, and group of channels."""
        task, groups = cute.arch.thread_idx()[0] + turn * THREADS, self.dv // VECTOR
        return task // groups, task % groups

    @cute.jit
    def fetch_values(self, v: cute.Tensor, block: Int32, given: cute.Tensor):
        """given (VECTOR, WORD, turns): zeros where there is nothing."""
        given.fill(self.element.dtype(0.0))
        for turn in cutlass.range_constexpr(self.turns):
            word, group = self.task_of(turn)
            for i in cutlass.range_constexpr(WORD):
                key = block * KEYS + word // WORD * len(KEY_ORDER) + word % WORD * 2 + KEY_ORDER[i]
                if (word < KEYS // WORD) & (key < v.shape[0]) & (group * VECTOR < v.shape[1]):
                    found = vector_at(v[key, None].iterator + group * VECTOR, self.element.dtype, VECTOR)
                    cute.autovec_copy(found, given[None, i, turn])

    @cute.jit
    def scale_values(self, v: cute.Tensor, block: Int32, scales: cute.Tensor, room: Room):
        """Of every channel; room has their inverses."""
        thread = cute.arch.thread_idx()[0]
        self.sample(v, room, self.dv, squares=True)
        if thread < self.dv:
            total, count = self.sampled(room, thread, self.dv)
            mean = total / cute.arch.fmax(count, Float32(1.0))
            room.signs[thread % UNIT, thread // UNIT] = mean  # for a moment
        cute.arch.sync_threads()
        if thread < self.dv:
            mean = room.signs[thread % UNIT, thread // UNIT]
            if mean == 0.0:
                for channel in cutlass.range(self.dv, unroll=1):
                    mean += room.signs[channel % UNIT, channel // UNIT]
                mean = mean / Float32(v.shape[1])
                mean = cutlass.select_(mean == 0.0, Float32(CHANNEL_RMS**2), mean)
            scale = cute.arch.fmax(cute.math.sqrt(mean) / CHANNEL_RMS, Float32(SMALLEST_SCALE))
            room.channels[thread % UNIT, thread // UNIT] = Float32(1.0) / scale
            if (block == 0) & (thread < v.shape[1]):
                scales[thread] = scale
        cute.arch.sync_threads()

    @cute.jit
    def turn_values(self, given: cute.Tensor, turned: cute.Tensor, room: Room):
        """turned (words of four keys, fours of these, exchanged, channels)."""
        for turn in cutlass.range_constexpr(self.turns):
            word, group = self.task_of(turn)
            if word < KEYS // WORD:
                for c in cutlass.range_constexpr(VECTOR):
                    channel = group * VECTOR + c
                    inverse = room.channels[channel % UNIT, channel // UNIT]
                    four = [given[c, i, turn].to(Float32) * inverse for i in range(WORD)]
                    # e4m3 saturates, infinities too
                    four = [cutlass.select_(abs(x) <= LARGEST_FLOAT, x, Float32.nan) for x in four]
                    turned[word % WORD, word // WORD ^ group % FOURS, channel] = self.element.values.pack_four(four)

    @cute.jit
    def store_values(self, turned: cute.Tensor, block: Int32, out: cute.Tensor):
        parts = KEYS // UNIT
        for task in cutlass.range(cute.arch.thread_idx()[0], self.dv * parts, THREADS, unroll=1):
            channel, part = task // parts, task % parts
            column = block * KEYS + part * UNIT
            if (channel < out.shape[0]) & (column < out.shape[1]):
                words = taken(turned[None, part ^ channel // VECTOR % FOURS, channel], WORD)
                cute.autovec_copy(words, vector_at(out[channel, None].iterator + column, Int32, WORD))


def shared_vector(pointer: cute.Pointer, dtype: type[cutlass.Numeric], size: int) -> cute.Tensor:
    """`size` numbers from an address in shared memory of whole 16 bytes."""
    aligned = cute.make_ptr(dtype, pointer.toint(), cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(aligned, cute.make_layout(size))


def taken(x: cute.Tensor, size: int) -> cute.Tensor:
    """So many numbers on end in shared memory, in registers."""
    found = cute.make_rmem_tensor((size,), x.element_type)
    cute.autovec_copy(shared_vector(x.iterator, x.element_type, size), found)
    return found


def place_of(number: Int32, blocks: Int32, heads: Int32) -> tuple[Int32, Int32, Int32]:
    """Block, head, batch of a CTA."""
    return number % blocks, number // blocks % heads, number // blocks // heads


def sign_of(channel: Int32, d: int) -> Float32:
    """Of ROTATION."""
    word = Int32(0)
    for i in range(-(-d // 32)):
        word = cutlass.select_(channel // 32 == i, Int32(ROTATION[i] - (1 << 32) * (ROTATION[i] >> 31)), word)
    return cutlass.select_(word >> channel % 32 & 1 == 1, Float32(-1.0), Float32(1.0))


def scale_of(largest: Float32, of_format: float) -> Float32:
    """NaN stays: max.NaN."""
    scale = cutlass.select_(largest == 0.0, Float32(1.0), largest / of_format)
    text = "max.NaN.f32 {$w0}, {$r0}, {$r1};"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[scale, Float32(SMALLEST_SCALE)])
