"""Quantization of Q, K and V from 16 bits to 8 bits: a single kernel that makes a single pass over the operands.

quantize_reference.py explains the mathematics, and implements the same in torch.

A CTA handles a block of keys of K, 128 keys of V, or some rows of Q (hadamard.py). Each CTA computes the required
statistics of a whole head from the same SAMPLES keys: the constant key of K, and the scales of V's channels. Therefore
no CTA waits for anything, and no sum depends on the order of CTAs. The result of a call depends only on the operands
of the call.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32

from ...registry.kernel_spec import WARP
from ...registry.quant_recipes import (
    CHANNEL_RMS,
    FORMAT_MAX,
    KEY_ORDER,
    MAX_SQUARE,
    MIN_CHANNEL,
    MIN_MEAN_SHIFT,
    MIN_SCALE,
    MIN_VARIANCE,
    NUM_ENDS,
    SAMPLES,
    Recipe,
)
from ..primitives.dtype import QuantizedElement
from ..primitives.vector_access import vector_at
from .hadamard import PITCH, UNIT, VECTOR, WORD, HadamardRows, HadamardSmem, scale_of, shared_vector, sign_of, taken

# Threads of a CTA, and limit of K units per thread. A CTA needing more units per thread gets more threads.
THREADS, MOST_ROUNDS = 256, 4
# For Q, whose rows have separate scales: units that a thread holds; limit of blocks per CTA; threads of an SM that must
# be busy before a CTA handles several blocks.
ROUNDS_OF_QUERIES, MOST_BLOCKS, ENOUGH = 2, 8, 2048
KEYS = 128  # keys of V that a CTA transposes
# Words of keys in shared memory are stored in groups of four. The groups of a channel are swizzled, so that the lanes
# of a store use different banks.
FOURS = KEYS // WORD // 4
LARGEST_FLOAT = 3.4028234663852886e38


@dataclass(frozen=True)
class QuantizedOperands:
    """Quantized operands (quantised.Quantised). Rows of q and k, and channels of v, are multiples of 16 bytes."""

    q: cute.Tensor  # (B, Hq, Sq, d) 8 bits
    k: cute.Tensor  # (B, Hkv, Sk, d)
    v: cute.Tensor | None  # (B, Hkv, Dv, Sk rounded up to 16)
    q_scale: cute.Tensor  # (B, Hq, Sq)
    k_scale: cute.Tensor  # (B, Hkv, blocks)
    v_scale: cute.Tensor | None  # (B, Hkv, dv)
    row_shift: cute.Tensor  # (B, Hq, Sq)
    v_mean: cute.Tensor | None  # (B, Hkv, dv)


class Quantize:
    """Quantization kernel for head dims d and dv and for a block size of keys.

    Smaller head dims are padded with zeros.
    """

    def __init__(self, element: QuantizedElement, recipe: Recipe, d: int, dv: int, block: int):
        self.element, self.recipe, self.d, self.dv = element, recipe, d, dv
        units = d // UNIT
        # The mapping of threads to units needs registers, too, if the number of units is not a power of two.
        more = 2 * THREADS if units & units - 1 == 0 else 3 * THREADS // 2
        self.threads = more if block * units > MOST_ROUNDS * THREADS else THREADS
        self.of_keys = HadamardRows(element, d, block, self.threads)
        self.of_queries = HadamardRows(element, d, ROUNDS_OF_QUERIES * self.threads // units, self.threads)
        self.widest = max(d, dv)

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, to: QuantizedOperands, num_sms: Int32,
        stream: cuda.CUstream
    ):  # fmt: skip
        B, Hq, Sq, _ = q.shape
        _, Hkv, Sk, _ = k.shape
        blocks = cute.ceil_div(Sq, self.of_queries.rows)
        each = cutlass.max(cutlass.min(B * Hq * blocks // (ENOUGH // self.threads * num_sms), MOST_BLOCKS), 1)
        keys, queries = B * Hkv * cute.ceil_div(Sk, self.of_keys.rows), B * Hq * cute.ceil_div(blocks, each)
        values = Int32(0) if to.v is None else B * Hkv * cute.ceil_div(Sk, KEYS)
        grid = (keys + values + queries, 1, 1)
        self.kernel(q, k, v, to, each).launch(grid=grid, block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, to: QuantizedOperands, each: Int32):
        """Run the part of the CTA: K, V or Q.

        Args:
            each: blocks of queries per CTA.
        """
        # The CTAs of the dependent kernel start once all CTAs of this grid have started.
        cute.arch.griddepcontrol_launch_dependents()
        smem = cutlass.memory.SmemAllocator()

        def floats(shape: tuple[int, ...], stride: tuple[int, ...] = (1,)) -> cute.Tensor:
            return smem.allocate_tensor(Float32, cute.make_layout(shape, stride=stride), 16)

        lanes = self.threads // (min(self.d, self.dv) // VECTOR)
        units = max(self.of_keys.room, self.of_queries.room)
        room = HadamardSmem(
            *(floats((lanes, self.widest), (self.widest, 1)) for _ in range(3)),
            *(floats((UNIT, self.widest // UNIT), (1, PITCH)) for _ in range(3)),
            *(floats((units,)) for _ in range(2)), floats((self.threads // WARP,)),
        )  # fmt: skip
        B, Hkv, Sk, _ = k.shape
        number, keys = cute.arch.block_idx()[0], B * Hkv * cute.ceil_div(Sk, self.of_keys.rows)
        if number < keys:
            self.quantize_keys(number, k, to, room)
        else:
            number -= keys
            if cutlass.const_expr(self.recipe.values is not None):
                values = B * Hkv * cute.ceil_div(Sk, KEYS)
                if number < values:
                    self.quantize_values(number, v, to, smem, room)
                number -= values
            if number >= 0:
                self.quantize_queries(number, each, q, k, to, room)

    @cute.jit
    def quantize_keys(self, number: Int32, k: cute.Tensor, to: QuantizedOperands, room: HadamardSmem):
        """Quantize a block of keys with a single scale."""
        of = self.of_keys
        block, head, batch = place_of(number, cute.ceil_div(k.shape[2], of.rows), k.shape[1])
        mine, given, held = k[batch, head, None, None], of.given(), of.held()
        of.fetch(mine, block, given)  # the loads are in flight during the sampling
        self.find_constant(mine, room)
        of.rotate(given, held, block, mine.shape[0], room, keys=True)
        cute.arch.sync_threads()
        scale = scale_of(of.largest_of_all(room), FORMAT_MAX[self.recipe.scores])
        if cute.arch.thread_idx()[0] == 0:
            to.k_scale[batch, head, block] = scale
        of.store(held, block, scale, to.k[batch, head, None, None])

    @cute.jit
    def quantize_queries(
        self, number: Int32, each: Int32, q: cute.Tensor, k: cute.Tensor, to: QuantizedOperands, room: HadamardSmem
    ):
        """Quantize blocks of query rows with a scale per row."""
        of = self.of_queries
        blocks = cute.ceil_div(q.shape[2], of.rows)
        share, head, batch = place_of(number, cute.ceil_div(blocks, each), q.shape[1])
        mine, target = q[batch, head, None, None], to.q[batch, head, None, None]
        scales, shifts = to.q_scale[batch, head, None], to.row_shift[batch, head, None]
        given, held, end = of.given(), of.held(), cutlass.min(share * each + each, blocks)
        of.fetch(mine, share * each, given)
        self.find_constant(k[batch, head // (q.shape[1] // k.shape[1]), None, None], room)
        for block in cutlass.range(share * each, end, unroll=1):
            self.of_queries.rotate(given, held, block, mine.shape[0], room, keys=False)
            if block + 1 < end:
                self.of_queries.fetch(mine, block + 1, given)
            cute.arch.sync_threads()
            self.of_queries.store_apart(held, block, FORMAT_MAX[self.recipe.scores], target, scales, shifts, room)
            cute.arch.sync_threads()

    @cute.jit
    def find_constant(self, k: cute.Tensor, room: HadamardSmem):
        """Compute the constant key of a head from K (Sk, D), and the signs of the channels."""
        thread = cute.arch.thread_idx()[0]
        if thread < self.d:
            room.signs[thread % UNIT, thread // UNIT] = sign_of(thread, self.d)
        self.sample(k, room, self.d, squares=False)
        if thread < self.d:
            room.channels[thread % UNIT, thread // UNIT] = self.sampled(room, room.sums, thread, self.d)
        cute.arch.sync_threads()

    @cute.jit
    def sample(
        self, x: cute.Tensor, room: HadamardSmem, width: cutlass.Constexpr[int], squares: cutlass.Constexpr[bool]
    ):
        """Sum over SAMPLES rows of a head (S, D), per lane: the finite numbers, and the squares of these numbers."""
        groups = width // VECTOR
        lanes = self.threads // groups
        thread = cute.arch.thread_idx()[0]
        group, lane = thread % groups, thread // groups
        if lane < lanes:
            sums, sums_of_squares, counts = (cute.make_rmem_tensor((VECTOR,), Float32) for _ in range(3))
            for found in (sums, sums_of_squares, counts):
                found.fill(0.0)
            turns = -(-SAMPLES // lanes)
            raw = cute.make_rmem_tensor((VECTOR, turns), self.element.dtype)
            for turn in cutlass.range_constexpr(turns):
                row = place_of_sample(lane + turn * lanes, x.shape[0])
                if (lane + turn * lanes < SAMPLES) & (group * VECTOR < x.shape[1]):
                    at = x[row, None].iterator + group * VECTOR
                    cute.autovec_copy(vector_at(at, self.element.dtype, VECTOR), raw[None, turn])
            for turn in cutlass.range_constexpr(turns):
                there = (lane + turn * lanes < SAMPLES) & (group * VECTOR < x.shape[1])
                for i in cutlass.range_constexpr(VECTOR):
                    number = raw[i, turn].to(Float32)
                    finite = there & (abs(number) <= LARGEST_FLOAT)
                    number = cutlass.select_(finite, number, Float32(0.0))
                    sums[i] = sums[i] + number
                    if cutlass.const_expr(squares):
                        sums_of_squares[i] = sums_of_squares[i] + number * number
                    counts[i] = counts[i] + cutlass.select_(finite, Float32(1.0), Float32(0.0))
            for found, into in ((sums, room.sums), (sums_of_squares, room.squares), (counts, room.counts)):
                cute.autovec_copy(found, shared_vector(into[lane, None].iterator + group * VECTOR, Float32, VECTOR))
        cute.arch.sync_threads()

    def sampled(self, room: HadamardSmem, sums: cute.Tensor, channel: Int32, width: int) -> Float32:
        """Return the mean of a channel."""
        total, count = Float32(0.0), Float32(0.0)
        for lane in range(self.threads // (width // VECTOR)):
            total, count = total + sums[lane, channel], count + room.counts[lane, channel]
        return total / cute.arch.fmax(count, Float32(1.0))

    @cute.jit
    def quantize_values(
        self, number: Int32, v: cute.Tensor, to: QuantizedOperands, smem: cutlass.memory.SmemAllocator,
        room: HadamardSmem
    ):  # fmt: skip
        """Quantize and transpose KEYS keys of V."""
        layout = cute.make_layout((WORD, FOURS, self.dv), stride=(1, WORD, WORD * FOURS))
        turned = smem.allocate_tensor(Int32, layout, 16)
        block, head, batch = place_of(number, cute.ceil_div(v.shape[2], KEYS), v.shape[1])
        mine = v[batch, head, None, None]
        given = cute.make_rmem_tensor((VECTOR, WORD, self.turns), self.element.dtype)
        self.fetch_values(mine, block, given)
        self.scale_values(mine, block, to.v_scale[batch, head, None], to.v_mean[batch, head, None], room)
        self.turn_values(given, turned, room, block, mine.shape[0])
        cute.arch.sync_threads()
        self.store_values(turned, block, to.v[batch, head, None, None])

    @property
    def turns(self) -> int:
        """Number of rounds in which the threads of a CTA cover all tasks.

        A task is four keys of a group of channels.
        """
        return -(-(KEYS // WORD * (self.dv // VECTOR)) // self.threads)

    def task_of(self, turn: int) -> tuple[Int32, Int32]:
        """Return the word of keys and the group of channels of a thread."""
        task, groups = cute.arch.thread_idx()[0] + turn * self.threads, self.dv // VECTOR
        return task // groups, task % groups

    @cute.jit
    def fetch_values(self, v: cute.Tensor, block: Int32, given: cute.Tensor):
        """Load V into `given` (VECTOR, WORD, turns), with zeros outside of the tensor."""
        given.fill(self.element.dtype(0.0))
        for turn in cutlass.range_constexpr(self.turns):
            word, group = self.task_of(turn)
            for i in cutlass.range_constexpr(WORD):
                key = key_of(block, word, i)
                if (word < KEYS // WORD) & (key < v.shape[0]) & (group * VECTOR < v.shape[1]):
                    found = vector_at(v[key, None].iterator + group * VECTOR, self.element.dtype, VECTOR)
                    cute.autovec_copy(found, given[None, i, turn])

    @cute.jit
    def scale_values(self, v: cute.Tensor, block: Int32, scales: cute.Tensor, means: cute.Tensor, room: HadamardSmem):
        """Compute the scale and the mean of every channel. `room` then holds the inverse scales and the means."""
        thread, mean, square = cute.arch.thread_idx()[0], Float32(0.0), Float32(0.0)
        self.sample(v, room, self.dv, squares=True)
        if thread < self.dv:
            mean = self.sampled(room, room.sums, thread, self.dv)
            square = cute.arch.fmin(self.sampled(room, room.squares, thread, self.dv), Float32(MAX_SQUARE))
        of_all = square
        for lanes in (1, 2, 4, 8, 16):
            of_all = of_all + cute.arch.shuffle_sync_bfly(of_all, offset=lanes)
        room.of_warps[thread // WARP] = of_all
        cute.arch.sync_threads()
        if thread < self.dv:
            of_all, place = Float32(0.0), (thread % UNIT, thread // UNIT)
            for warp in cutlass.range_constexpr(self.threads // WARP):
                of_all += room.of_warps[warp]
            of_all = of_all / Float32(v.shape[1])
            of_all = cutlass.select_(of_all == 0.0, Float32(CHANNEL_RMS**2), of_all)
            square = cute.arch.fmax(square, of_all * MIN_CHANNEL)
            variance = cute.arch.fmax(square - mean * mean, square * MIN_VARIANCE)
            clear = mean * mean > variance * MIN_MEAN_SHIFT
            mean = cutlass.select_(clear, mean, Float32(0.0))
            variance = cutlass.select_(clear, variance, square)
            scale = cute.arch.fmax(cute.math.sqrt(variance) / CHANNEL_RMS, Float32(MIN_SCALE))
            room.means[place], room.channels[place] = mean, Float32(1.0) / scale
            if block == 0:
                scales[thread], means[thread] = scale, mean
        cute.arch.sync_threads()

    @cute.jit
    def turn_values(self, given: cute.Tensor, turned: cute.Tensor, room: HadamardSmem, block: Int32, S: Int32):
        """Convert and transpose V.

        The result has words of four keys, swizzled groups of four words, and channels.
        """
        for turn in cutlass.range_constexpr(self.turns):
            word, group = self.task_of(turn)
            if word < KEYS // WORD:
                for c in cutlass.range_constexpr(VECTOR):
                    channel = group * VECTOR + c
                    place = channel % UNIT, channel // UNIT
                    inverse, mean = room.channels[place], room.means[place]
                    four = [(given[c, i, turn].to(Float32) - mean) * inverse for i in range(WORD)]
                    # Saturation of e4m3 also covers infinities.
                    four = [cutlass.select_(abs(x) <= LARGEST_FLOAT, x, Float32.nan) for x in four]
                    there = [key_of(block, word, i) < S for i in range(WORD)]
                    four = [cutlass.select_(is_, x, Float32(0.0)) for is_, x in zip(there, four, strict=True)]
                    turned[word % WORD, word // WORD ^ group % FOURS, channel] = self.element.values.pack_four(four)

    @cute.jit
    def store_values(self, turned: cute.Tensor, block: Int32, out: cute.Tensor):
        parts = KEYS // UNIT
        for task in cutlass.range(cute.arch.thread_idx()[0], self.dv * parts, self.threads, unroll=1):
            channel, part = task // parts, task % parts
            column = block * KEYS + part * UNIT
            if (channel < out.shape[0]) & (column < out.shape[1]):
                words = taken(turned[None, part ^ channel // VECTOR % FOURS, channel], WORD)
                cute.autovec_copy(words, vector_at(out[channel, None].iterator + column, Int32, WORD))


def place_of_sample(i: Int32, S: Int32) -> Int32:
    """Return the key index of sample i.

    Samples are some of the first and last keys, and evenly spread keys between (quantised.sample).
    """
    spread = (2 * (i - NUM_ENDS) + 1) * S // (2 * (SAMPLES - 2 * NUM_ENDS))
    first, last = cutlass.min(i, S - 1), cutlass.max(S - SAMPLES + i, 0)
    return cutlass.select_(i < NUM_ENDS, first, cutlass.select_(i < SAMPLES - NUM_ENDS, spread, last))


def key_of(block: Int32, word: Int32, i: int) -> Int32:
    """Return the i-th key of a word of V. The keys of V are in KEY_ORDER."""
    return block * KEYS + word // WORD * len(KEY_ORDER) + word % WORD * 2 + KEY_ORDER[i]


def place_of(number: Int32, blocks: Int32, heads: Int32) -> tuple[Int32, Int32, Int32]:
    """Return block, head and batch of a CTA."""
    return number % blocks, number // blocks % heads, number // blocks // heads
