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
from .hadamard import (
    PITCH,
    UNIT,
    VECTOR,
    WORD,
    HadamardRows,
    HadamardSmem,
    load_registers,
    scale_of,
    shared_vector,
    sign_of,
)

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
    """Quantized operands (quantize_reference.py). Rows of q and k, and channels of v, are multiples of 16 bytes."""

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
        more_threads = 2 * THREADS if units & units - 1 == 0 else 3 * THREADS // 2
        self.threads = more_threads if block * units > MOST_ROUNDS * THREADS else THREADS
        self.key_rows = HadamardRows(element, d, block, self.threads)
        self.query_rows = HadamardRows(element, d, ROUNDS_OF_QUERIES * self.threads // units, self.threads)
        self.widest = max(d, dv)

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: QuantizedOperands, num_sms: Int32,
        stream: cuda.CUstream
    ):  # fmt: skip
        """Launch the kernel.

        Args:
            q: query (B, Hq, Sq, D).
            k: key (B, Hkv, Sk, D); or of batch size 0, if K and V are quantized already.
            v: value (B, Hkv, Sk, Dv).
            out: quantized operands.
            num_sms: SMs of the device; 0 if Q is not quantized.
            stream: CUDA stream.
        """
        B, Hq, Sq, _ = q.shape
        Sk, kv_heads = k.shape[2], k.shape[0] * k.shape[1]
        blocks = cute.ceil_div(Sq, self.query_rows.rows)
        enough = ENOUGH // self.threads * cutlass.max(num_sms, 1)
        blocks_per_cta = cutlass.max(cutlass.min(B * Hq * blocks // enough, MOST_BLOCKS), 1)
        keys, queries = kv_heads * cute.ceil_div(Sk, self.key_rows.rows), B * Hq * cute.ceil_div(blocks, blocks_per_cta)
        queries = cutlass.select_(num_sms > 0, queries, Int32(0))
        values = Int32(0) if out.v is None else kv_heads * cute.ceil_div(Sk, KEYS)
        grid = (keys + values + queries, 1, 1)
        self.kernel(q, k, v, out, blocks_per_cta).launch(grid=grid, block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: QuantizedOperands, blocks_per_cta: Int32):
        """Run the part of the CTA: K, V or Q.

        Args:
            blocks_per_cta: blocks of queries per CTA.
        """
        # The CTAs of the dependent kernel start once all CTAs of this grid have started.
        cute.arch.griddepcontrol_launch_dependents()
        smem = cutlass.memory.SmemAllocator()

        def floats(shape: tuple[int, ...], stride: tuple[int, ...] = (1,)) -> cute.Tensor:
            return smem.allocate_tensor(Float32, cute.make_layout(shape, stride=stride), 16)

        lanes = self.threads // (min(self.d, self.dv) // VECTOR)
        units = max(self.key_rows.num_units, self.query_rows.num_units)
        shared = HadamardSmem(
            *(floats((lanes, self.widest), (self.widest, 1)) for _ in range(3)),
            *(floats((UNIT, self.widest // UNIT), (1, PITCH)) for _ in range(3)),
            *(floats((units,)) for _ in range(2)), floats((self.threads // WARP,)),
        )  # fmt: skip
        B, Hkv, Sk, _ = k.shape
        cta, keys = cute.arch.block_idx()[0], B * Hkv * cute.ceil_div(Sk, self.key_rows.rows)
        if cta < keys:
            self.quantize_keys(cta, k, out, shared)
        else:
            cta -= keys
            if cutlass.const_expr(self.recipe.values is not None):
                values = B * Hkv * cute.ceil_div(Sk, KEYS)
                if cta < values:
                    self.quantize_values(cta, v, out, smem, shared)
                cta -= values
            if cta >= 0:
                self.quantize_queries(cta, blocks_per_cta, q, k, out, shared)

    @cute.jit
    def quantize_keys(self, cta: Int32, k: cute.Tensor, out: QuantizedOperands, shared: HadamardSmem):
        """Quantize a block of keys with a single scale."""
        hadamard = self.key_rows
        block, head, batch = block_coord(cta, cute.ceil_div(k.shape[2], hadamard.rows), k.shape[1])
        head_k = k[batch, head, None, None]
        block_values = hadamard.block_registers()
        rotated = hadamard.rotated_registers()
        hadamard.fetch(head_k, block, block_values)  # the loads are in flight during the sampling
        self.find_constant(head_k, shared)
        hadamard.rotate(block_values, rotated, block, head_k.shape[0], shared, keys=True)
        cute.arch.sync_threads()
        scale = scale_of(hadamard.largest_of_all(shared), FORMAT_MAX[self.recipe.scores])
        if cute.arch.thread_idx()[0] == 0:
            out.k_scale[batch, head, block] = scale
        hadamard.store(rotated, block, scale, out.k[batch, head, None, None])

    @cute.jit
    def quantize_queries(
        self,
        cta: Int32,
        blocks_per_cta: Int32,
        q: cute.Tensor,
        k: cute.Tensor,
        out: QuantizedOperands,
        shared: HadamardSmem,
    ):
        """Quantize blocks of query rows with a scale per row."""
        hadamard = self.query_rows
        blocks = cute.ceil_div(q.shape[2], hadamard.rows)
        block_range, head, batch = block_coord(cta, cute.ceil_div(blocks, blocks_per_cta), q.shape[1])
        head_q, target = q[batch, head, None, None], out.q[batch, head, None, None]
        scales, shifts = out.q_scale[batch, head, None], out.row_shift[batch, head, None]
        block_values = hadamard.block_registers()
        rotated = hadamard.rotated_registers()
        end = cutlass.min(block_range * blocks_per_cta + blocks_per_cta, blocks)
        hadamard.fetch(head_q, block_range * blocks_per_cta, block_values)
        self.find_constant(k[batch, head // (q.shape[1] // k.shape[1]), None, None], shared)
        for block in cutlass.range(block_range * blocks_per_cta, end, unroll=1):
            self.query_rows.rotate(block_values, rotated, block, head_q.shape[0], shared, keys=False)
            if block + 1 < end:
                self.query_rows.fetch(head_q, block + 1, block_values)
            cute.arch.sync_threads()
            self.query_rows.store_rows(rotated, block, FORMAT_MAX[self.recipe.scores], target, scales, shifts, shared)
            cute.arch.sync_threads()

    @cute.jit
    def find_constant(self, k: cute.Tensor, shared: HadamardSmem):
        """Compute the constant key of a head from K (Sk, D), and the signs of the channels."""
        thread = cute.arch.thread_idx()[0]
        if thread < self.d:
            shared.signs[thread % UNIT, thread // UNIT] = sign_of(thread, self.d)
        self.sample(k, shared, self.d, squares=False)
        if thread < self.d:
            shared.channels[thread % UNIT, thread // UNIT] = self.sampled(shared, shared.sums, thread, self.d)
        cute.arch.sync_threads()

    @cute.jit
    def sample(
        self, x: cute.Tensor, shared: HadamardSmem, width: cutlass.Constexpr[int], squares: cutlass.Constexpr[bool]
    ):
        """Sum over SAMPLES rows of a head (S, D), per lane: the finite numbers, and the squares of these numbers."""
        groups = width // VECTOR
        lanes = self.threads // groups
        thread = cute.arch.thread_idx()[0]
        group, lane = thread % groups, thread // groups
        if lane < lanes:
            sums, sums_of_squares, counts = (cute.make_rmem_tensor((VECTOR,), Float32) for _ in range(3))
            for statistic in (sums, sums_of_squares, counts):
                statistic.fill(0.0)
            rounds = -(-SAMPLES // lanes)
            samples = cute.make_rmem_tensor((VECTOR, rounds), self.element.dtype)
            for round_idx in cutlass.range_constexpr(rounds):
                row = sample_key(lane + round_idx * lanes, x.shape[0])
                if (lane + round_idx * lanes < SAMPLES) & (group * VECTOR < x.shape[1]):
                    source = x[row, None].iterator + group * VECTOR
                    cute.autovec_copy(vector_at(source, self.element.dtype, VECTOR), samples[None, round_idx])
            for round_idx in cutlass.range_constexpr(rounds):
                is_valid = (lane + round_idx * lanes < SAMPLES) & (group * VECTOR < x.shape[1])
                for i in cutlass.range_constexpr(VECTOR):
                    value = samples[i, round_idx].to(Float32)
                    finite = is_valid & (abs(value) <= LARGEST_FLOAT)
                    value = cutlass.select_(finite, value, Float32(0.0))
                    sums[i] = sums[i] + value
                    if cutlass.const_expr(squares):
                        sums_of_squares[i] = sums_of_squares[i] + value * value
                    counts[i] = counts[i] + cutlass.select_(finite, Float32(1.0), Float32(0.0))
            for statistic, target in ((sums, shared.sums), (sums_of_squares, shared.squares), (counts, shared.counts)):
                cute.autovec_copy(
                    statistic, shared_vector(target[lane, None].iterator + group * VECTOR, Float32, VECTOR)
                )
        cute.arch.sync_threads()

    def sampled(self, shared: HadamardSmem, sums: cute.Tensor, channel: Int32, width: int) -> Float32:
        """Return the mean of a channel."""
        total, count = Float32(0.0), Float32(0.0)
        for lane in range(self.threads // (width // VECTOR)):
            total, count = total + sums[lane, channel], count + shared.counts[lane, channel]
        return total / cute.arch.fmax(count, Float32(1.0))

    @cute.jit
    def quantize_values(
        self, cta: Int32, v: cute.Tensor, out: QuantizedOperands, smem: cutlass.memory.SmemAllocator,
        shared: HadamardSmem
    ):  # fmt: skip
        """Quantize and transpose KEYS keys of V."""
        layout = cute.make_layout((WORD, FOURS, self.dv), stride=(1, WORD, WORD * FOURS))
        transposed = smem.allocate_tensor(Int32, layout, 16)
        block, head, batch = block_coord(cta, cute.ceil_div(v.shape[2], KEYS), v.shape[1])
        head_v = v[batch, head, None, None]
        block_values = cute.make_rmem_tensor((VECTOR, WORD, self.rounds), self.element.dtype)
        self.fetch_values(head_v, block, block_values)
        self.scale_values(head_v, block, out.v_scale[batch, head, None], out.v_mean[batch, head, None], shared)
        self.transpose_values(block_values, transposed, shared, block, head_v.shape[0])
        cute.arch.sync_threads()
        self.store_values(transposed, block, out.v[batch, head, None, None])

    @property
    def rounds(self) -> int:
        """Number of rounds in which the threads of a CTA cover all tasks.

        A task is four keys of a group of channels.
        """
        return -(-(KEYS // WORD * (self.dv // VECTOR)) // self.threads)

    def task_of(self, round_idx: int) -> tuple[Int32, Int32]:
        """Return the word of keys and the group of channels of a thread."""
        task, groups = cute.arch.thread_idx()[0] + round_idx * self.threads, self.dv // VECTOR
        return task // groups, task % groups

    @cute.jit
    def fetch_values(self, v: cute.Tensor, block: Int32, block_values: cute.Tensor):
        """Load V into `block_values` (VECTOR, WORD, rounds), with zeros outside of the tensor."""
        block_values.fill(self.element.dtype(0.0))
        for round_idx in cutlass.range_constexpr(self.rounds):
            word, group = self.task_of(round_idx)
            for i in cutlass.range_constexpr(WORD):
                key = key_of(block, word, i)
                if (word < KEYS // WORD) & (key < v.shape[0]) & (group * VECTOR < v.shape[1]):
                    source = vector_at(v[key, None].iterator + group * VECTOR, self.element.dtype, VECTOR)
                    cute.autovec_copy(source, block_values[None, i, round_idx])

    @cute.jit
    def scale_values(self, v: cute.Tensor, block: Int32, scales: cute.Tensor, means: cute.Tensor, shared: HadamardSmem):
        """Compute the scale and the mean of every channel. `shared` then holds the inverse scales and the means."""
        thread, mean, square = cute.arch.thread_idx()[0], Float32(0.0), Float32(0.0)
        self.sample(v, shared, self.dv, squares=True)
        if thread < self.dv:
            mean = self.sampled(shared, shared.sums, thread, self.dv)
            square = cute.arch.fmin(self.sampled(shared, shared.squares, thread, self.dv), Float32(MAX_SQUARE))
        mean_square = square
        for lanes in (1, 2, 4, 8, 16):
            mean_square = mean_square + cute.arch.shuffle_sync_bfly(mean_square, offset=lanes)
        shared.warp_values[thread // WARP] = mean_square
        cute.arch.sync_threads()
        if thread < self.dv:
            mean_square, coord = Float32(0.0), (thread % UNIT, thread // UNIT)
            for warp in cutlass.range_constexpr(self.threads // WARP):
                mean_square += shared.warp_values[warp]
            mean_square = mean_square / Float32(v.shape[1])
            mean_square = cutlass.select_(mean_square == 0.0, Float32(CHANNEL_RMS**2), mean_square)
            square = cute.arch.fmax(square, mean_square * MIN_CHANNEL)
            variance = cute.arch.fmax(square - mean * mean, square * MIN_VARIANCE)
            has_clear_mean = mean * mean > variance * MIN_MEAN_SHIFT
            mean = cutlass.select_(has_clear_mean, mean, Float32(0.0))
            variance = cutlass.select_(has_clear_mean, variance, square)
            scale = cute.arch.fmax(cute.math.sqrt(variance) / CHANNEL_RMS, Float32(MIN_SCALE))
            shared.means[coord], shared.channels[coord] = mean, Float32(1.0) / scale
            if block == 0:
                scales[thread], means[thread] = scale, mean
        cute.arch.sync_threads()

    @cute.jit
    def transpose_values(
        self, block_values: cute.Tensor, transposed: cute.Tensor, shared: HadamardSmem, block: Int32, S: Int32
    ):
        """Convert and transpose V.

        The result has words of four keys, swizzled groups of four words, and channels.
        """
        for round_idx in cutlass.range_constexpr(self.rounds):
            word, group = self.task_of(round_idx)
            if word < KEYS // WORD:
                for c in cutlass.range_constexpr(VECTOR):
                    channel = group * VECTOR + c
                    coord = channel % UNIT, channel // UNIT
                    inverse, mean = shared.channels[coord], shared.means[coord]
                    four = [(block_values[c, i, round_idx].to(Float32) - mean) * inverse for i in range(WORD)]
                    # Saturation of e4m3 also covers infinities.
                    four = [cutlass.select_(abs(x) <= LARGEST_FLOAT, x, Float32.nan) for x in four]
                    exists = [key_of(block, word, i) < S for i in range(WORD)]
                    four = [
                        cutlass.select_(key_exists, x, Float32(0.0)) for key_exists, x in zip(exists, four, strict=True)
                    ]
                    transposed[word % WORD, word // WORD ^ group % FOURS, channel] = self.element.values.pack_four(four)

    @cute.jit
    def store_values(self, transposed: cute.Tensor, block: Int32, v_out: cute.Tensor):
        parts = KEYS // UNIT
        for task in cutlass.range(cute.arch.thread_idx()[0], self.dv * parts, self.threads, unroll=1):
            channel, part = task // parts, task % parts
            column = block * KEYS + part * UNIT
            if (channel < v_out.shape[0]) & (column < v_out.shape[1]):
                words = load_registers(transposed[None, part ^ channel // VECTOR % FOURS, channel], WORD)
                cute.autovec_copy(words, vector_at(v_out[channel, None].iterator + column, Int32, WORD))


def sample_key(i: Int32, S: Int32) -> Int32:
    """Return the key index of sample i.

    Samples are some of the first and last keys, and evenly spread keys between (quantize_reference.py).
    """
    spread = (2 * (i - NUM_ENDS) + 1) * S // (2 * (SAMPLES - 2 * NUM_ENDS))
    first, last = cutlass.min(i, S - 1), cutlass.max(S - SAMPLES + i, 0)
    return cutlass.select_(i < NUM_ENDS, first, cutlass.select_(i < SAMPLES - NUM_ENDS, spread, last))


def key_of(block: Int32, word: Int32, i: int) -> Int32:
    """Return the i-th key of a word of V. The keys of V are in KEY_ORDER."""
    return block * KEYS + word // WORD * len(KEY_ORDER) + word % WORD * 2 + KEY_ORDER[i]


def block_coord(cta: Int32, blocks: Int32, heads: Int32) -> tuple[Int32, Int32, Int32]:
    """Return block, head and batch of a CTA."""
    return cta % blocks, cta // blocks % heads, cta // blocks // heads
