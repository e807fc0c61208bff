"""Dropout stage: a random part of P is dropped on the way to the output, and in the gradients (Srivastava et al. 2014).

A bit per score decides. The bit is drawn in registers from the seed and from the position of the score alone. Therefore
kernels of all tile sizes, forward and backward, draw the same bits, and nothing is stored.
torch_flashplug/ops/dropout_reference.py implements the same bits in plain torch.

A word has 32 bits: of two query rows, eight apart, and sixteen keys. With this choice, both orders in which threads
hold scores (fragments.py) need only words of their own warp. For query i and key j of head n (counted over the batch)

I = i / 16,  h = i / 8 % 2,  g = i % 8      J = j / 16,  half = j / 8 % 2,  t = j / 2 % 4,  e = j % 2

the bit is number 8 t + 4 h + 2 half + e of word (n, 8 I + g, J).

The 32 draws of a word are made at once, digit by digit of their threshold. Eight words of Philox4x32 (Salmon et al.
2011) are eight binary digits of 32 uniform numbers. The Philox key is the seed; the counter is J, 8 I + g, n and the
index of the group of four words. A majority with a digit of the threshold each, from the lowest digit on, marks the
numbers below the threshold. The remainder of 1 - p beyond eight digits is the probability of the initial value of the
first majority, a coin for the whole word. So p is exact for every single score.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64

from ...registry.kernel_spec import MMA_ATOM_M
from ..primitives.fragments import single_bit, zero_of
from .pipeline import DropoutScale, ScoreCoord, ScoreStage

ROUNDS = 10  # rounds of Philox, as in torch and cuRAND
MULTIPLIERS, KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
DIGITS, BITS = 8, 32
KEYS_OF_WORD = 16
# Multipliers of the coin hash: of heads, of rows, of keys (the golden ratio, so that the coins of a row are evenly
# spread), and between two shifts.
COIN_HEAD, COIN_ROW, COIN_KEYS, COIN_MIX = 0xCD9E8D57, 0xD2511F53, 0x9E3779B9, 0x85EBCA6B


@dataclass(frozen=True)
class DropoutThreshold:
    """Threshold of the draws: draws below the threshold are kept; 1 - p in 256ths."""

    digits: tuple[Int32, ...]  # digits of the integer part, the lowest first: all ones, or zero
    coin: Uint32  # remainder, in units of 2^-32

    @staticmethod
    def from_keep_probability(keep_probability: Float32) -> DropoutThreshold:
        """Return the threshold of a probability to keep a score."""
        scaled = keep_probability * Float32(1 << DIGITS)
        # A p below half a rounding of 1 gives probability 1. The integer part is then 255, and the coin covers the
        # rest.
        integer_part = cutlass.min(Int32(scaled), (1 << DIGITS) - 1)
        rest = (scaled - Float32(integer_part)) * Float32(2.0**BITS)
        coin = Uint32(cutlass.min(rest, Float32(2.0**BITS - 2.0**8)))
        return DropoutThreshold(tuple(Int32(0) - ((integer_part >> i) & 1) for i in range(DIGITS)), coin)


@dataclass(frozen=True)
class DropoutStage(ScoreStage):
    """Dropout stage with bits Z. Each score is kept with probability c = 1 - p.

    O = (Z * P) V / c, dV = (Z * P)^T dO / c, and dS = P * (Z * dP / c - rowsum(dO * O)) = P * (Z * dP - c * rowsum(dO *
    O)) / c.
    """

    seed: cute.Tensor  # (1,) Int64
    threshold: DropoutThreshold
    heads: Int32  # query heads of a batch entry
    keep_scale: DropoutScale
    # Registers of a block's words: bytes of four words, needed by the thread's scores.
    block_words: cute.Tensor | None = None
    coord: ScoreCoord | None = None
    head: Uint32 | None = None  # query head, counted over the batch
    applies_to_full_blocks = True
    may_mask = False

    @staticmethod
    def create(seed: cute.Tensor, dropout_p: Float32, heads: Int32) -> DropoutStage:
        """Return the stage of a call; `heads` is the number of query heads of a batch entry."""
        keep_probability = Float32(1.0) - dropout_p
        inverse = cutlass.select_(keep_probability > Float32(0.0), Float32(1.0) / keep_probability, Float32(0.0))
        threshold = DropoutThreshold.from_keep_probability(keep_probability)
        return DropoutStage(seed, threshold, heads, DropoutScale(keep_probability, inverse))

    def allocate_registers(self, columns: int) -> ScoreStage:
        return replace(self, block_words=cute.make_rmem_tensor((-(-columns // (4 * KEYS_OF_WORD)),), Int32))

    def set_tile(self, coord: ScoreCoord) -> ScoreStage:
        stage = replace(self, coord=coord)
        return stage if coord.head is None else stage.of_head(coord.head)

    def of_head(self, head: Int32) -> ScoreStage:
        return replace(self, head=Uint32(self.coord.sequence * self.heads + head))

    @cute.jit
    def prepare_stage(self, block: Int32):
        """Draw the words of a block."""
        coord = self.coord
        # The backward has few registers, so no value derived from the lane and no address stays in a register across
        # steps.
        zero = zero_of(block) if cutlass.const_expr(coord.transposed) else Int32(0)
        lane, seed = cute.arch.lane_idx() + zero, self.seed[zero]
        key = Uint32(Uint64(seed)), Uint32(Uint64(seed) >> BITS)
        first = block * (coord.block_columns // MMA_ATOM_M)
        for i in cutlass.range_constexpr(cute.size(self.block_words)):
            if cutlass.const_expr(coord.transposed):
                # This thread draws the word of two query rows of the warp, whichever rows these are. The words needed
                # by a thread belong to the lanes with the same columns: lanes exchange bits in pairs, then bytes in
                # groups of four.
                rows = (first + 4 * i + lane // 8) * 8 + lane % 4 * 2 + lane // 4 % 2
                word = self.word(key, Uint32(rows), Uint32(coord.row // MMA_ATOM_M))
                self.block_words[i] = exchange_bytes(exchange_bits(word, lane, 4), lane, 8)
                if cutlass.const_expr(coord.by_row):  # the thread's scores may begin inside a block
                    self.block_words[i] = self.block_words[i] >> ((coord.column & -8) >> 1)
            else:
                rows = coord.row // MMA_ATOM_M * 8 + coord.row % 8
                word = self.word(key, Uint32(rows), Uint32(first + 4 * i + lane % 4))
                self.block_words[i] = exchange_bytes(word, lane, 1)

    def word(self, key: tuple[Uint32, Uint32], rows: Uint32, keys: Uint32) -> Int32:
        """Return a word of 32 bits: a bit is 1 where the score is kept."""
        coin = mixed(Uint32(self.head) * Uint32(COIN_HEAD) + key[0] + rows * Uint32(COIN_ROW)) ^ key[1]
        coin = coin + keys * Uint32(COIN_KEYS)
        bits = Uint32(cutlass.select_(coin < self.threshold.coin, Int32(-1), Int32(0)))
        for call in range(DIGITS // 4):
            for i, random_word in enumerate(philox((keys, rows, self.head, Uint32(call)), key)):
                digit = Uint32(self.threshold.digits[4 * call + i])
                bits = (bits & random_word) | (digit & (bits | random_word))
        return Int32(bits)

    def bit(self, r: int, c: int, swapped: bool = False) -> cutlass.Boolean:
        """Return the bit of score (r, c) of a block.

        Args:
            swapped: read the bit from the word with exchanged halves.
        """
        word, c = divmod(c, KEYS_OF_WORD)
        i = c // 4 * 8 + (c % 4 // 2 * 4 + r * 2 + c % 2 if self.coord.transposed else r * 4 + c % 4)
        value = self.block_words[word]
        if swapped:
            value, i = exchanged(value), (i + BITS // 2) % BITS
        return (value & single_bit(i)) != 0

    def keeps(self, r: int, c: int) -> cutlass.Boolean:
        return self.bit(r, c)

    @cute.jit
    def apply_backward(self, dP: cute.Tensor):
        for c in cutlass.range_constexpr(cute.size(dP, mode=[1])):
            for r in cutlass.range_constexpr(cute.size(dP, mode=[0])):
                dP[r, c] = cutlass.select_(self.bit(r, c, swapped=True), dP[r, c], Float32(0.0))


def philox(counter: tuple[Uint32, ...], key: tuple[Uint32, Uint32]) -> tuple[Uint32, ...]:
    """Return four words of Philox4x32 for a counter and a key."""
    a, b, c, d = counter
    for i in range(ROUNDS):
        low, high = (key[j] + Uint32(i * KEY_STEPS[j] % (1 << BITS)) for j in (0, 1))
        of_a, of_c = (Uint64(x) * Uint64(m) for x, m in zip((a, c), MULTIPLIERS, strict=True))
        a, b, c, d = Uint32(of_c >> BITS) ^ b ^ low, Uint32(of_c), Uint32(of_a >> BITS) ^ d ^ high, Uint32(of_a)
    return a, b, c, d


def mixed(x: Uint32) -> Uint32:
    """Return a bijective hash of a 32-bit number."""
    x = (x ^ (x >> Uint32(16))) * Uint32(COIN_MIX)
    return x ^ (x >> Uint32(13))


def exchange_bits(word: Int32, lane: Int32, apart: int) -> Int32:
    """Exchange bits between two lanes that are `apart` lanes from each other.

    The lower lane gets the even bits of both words, the upper lane the odd bits. Each bit pair of a result holds the
    bit of the lower lane, then the bit of the upper lane.
    """
    peer_word = cute.arch.shuffle_sync_bfly(word, offset=apart)
    upper = (lane & apart) != 0
    kept_bits = cutlass.select_(upper, Int32(-0x55555556), Int32(0x55555555))
    shift = cutlass.select_(upper, Int32(31), Int32(1))
    text = "shf.l.wrap.b32 {$w0}, {$r0}, {$r0}, {$r1};"
    peer_word = cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[peer_word, shift])
    return (word & kept_bits) | (peer_word & ~kept_bits)


def exchange_bytes(word: Int32, lane: Int32, apart: int) -> Int32:
    """Exchange bytes between four lanes, `apart` lanes from each other: lane i gets byte i of all four words.

    The bytes are in the order of lanes.
    """
    for step, lower, upper in ((apart, 0x6240, 0x3715), (2 * apart, 0x5410, 0x3276)):
        peer_word = cute.arch.shuffle_sync_bfly(word, offset=step)
        selector = cutlass.select_((lane & step) != 0, Int32(upper), Int32(lower))
        text = "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};"
        word = cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[word, peer_word, selector])
    return word


def exchanged(word: Int32) -> Int32:
    """Return the word with exchanged halves, for a second use of the same bits.

    For the same word, ptxas would keep the predicates of the first use until the second, packed bit by bit into a
    register. This packing costs as much as all other work and spills. ptxas does not know the exchanged word, and
    extracts the predicates again, seven at a time.
    """
    text = "prmt.b32 {$w0}, {$r0}, {$r0}, 0x1032;"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[word])
