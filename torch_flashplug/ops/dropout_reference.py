"""Reference of the dropout mask in plain torch: the scores kept by kernels, from a seed and the positions of scores.

The kernels draw the same bits (kernels/score_stages/dropout.py, which explains the method). The host waits for nothing.
Numbers of 32 bits are int64 here. Products of int64 wrap, and the requested low bits stay correct.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

# Rounds of Philox4x32; binary digits of a draw, with one word for each digit; bits of a word.
ROUNDS, DIGITS, BITS = 10, 8, 32
MULTIPLIERS, KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
COIN_HEAD, COIN_ROW, COIN_KEYS, COIN_MIX = 0xCD9E8D57, 0xD2511F53, 0x9E3779B9, 0x85EBCA6B
ALL = (1 << BITS) - 1
# A word holds bits of two query rows out of a group of ROWS rows, and of KEYS keys.
ROWS, KEYS = 16, 16


def keep_probability(dropout_p: float) -> float:
    """Return the share of kept scores, 1 - p, in fp32, because kernels derive everything from the fp32 probability."""
    return ctypes.c_float(1.0 - ctypes.c_float(dropout_p).value).value


def factor(dropout_p: float) -> float:
    """Return the factor of kept probabilities, 1 / (1 - p), or 0.0 if nothing is kept."""
    kept = keep_probability(dropout_p)
    return ctypes.c_float(1.0 / kept).value if kept > 0.0 else 0.0


def threshold(dropout_p: float) -> tuple[int, int]:
    """Return the threshold of kept draws: the integer part in units of 1/256, and the remainder in units of 2^-32."""
    scaled = keep_probability(dropout_p) * (1 << DIGITS)
    integer_part = min(int(scaled), (1 << DIGITS) - 1)
    return integer_part, int(min((scaled - integer_part) * 2.0**BITS, 2.0**BITS - 2.0**8))


def dropout_mask(seed: Tensor, B: int, Hq: int, Sq: int, Sk: int, dropout_p: float) -> Tensor:
    """Return the dropout mask (B, Hq, Sq, Sk) for a seed (int64, one number): bool, True for kept probabilities.

    The reference math uses the mask, and the op `dropout_mask` returns the mask to tests.
    """
    device = seed.device
    planes, row_groups, key_groups = B * Hq, -(-Sq // ROWS), -(-Sk // KEYS)
    head = torch.arange(planes, device=device).view(-1, 1, 1)
    # The letters are those of kernels/score_stages/dropout.py. 8 I + g is the index of a pair of rows.
    pair = torch.arange(row_groups * ROWS // 2, device=device).view(-1, 1)
    words = _words(seed.reshape(()), head, pair, torch.arange(key_groups, device=device), *threshold(dropout_p))
    # Bit 8 t + 4 h + 2 half + e of word (8 I + g, J) is row 16 I + 8 h + g and key 16 J + 8 half + 2 t + e.
    bits = (words.unsqueeze(-1) >> torch.arange(BITS, device=device) & 1).bool()
    places = bits.view(planes, row_groups, 8, key_groups, 4, 2, 2, 2).permute(0, 1, 5, 2, 3, 6, 4, 7)
    return places.reshape(B, Hq, row_groups * ROWS, key_groups * KEYS)[..., :Sq, :Sk].contiguous()


def _words(seed: Tensor, head: Tensor, pair: Tensor, keys: Tensor, integer_part: int, remainder: int) -> Tensor:
    key = seed & ALL, seed >> BITS & ALL
    mixed = head * COIN_HEAD + key[0] + pair * COIN_ROW & ALL
    mixed = (mixed ^ mixed >> 16) * COIN_MIX & ALL
    toss = (mixed ^ mixed >> 13 ^ key[1]) + keys * COIN_KEYS & ALL
    words = torch.where(toss < remainder, ALL, 0)
    for call in range(DIGITS // 4):
        for i, drawn in enumerate(_philox((keys, pair, head, torch.full_like(seed, call)), key)):
            words = words | drawn if integer_part >> (4 * call + i) & 1 else words & drawn
    return words


def _philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    a, b, c, d = counter
    for i in range(ROUNDS):
        low, high = (key[j] + i * KEY_STEPS[j] & ALL for j in (0, 1))
        of_a, of_c = (x * m for x, m in zip((a, c), MULTIPLIERS, strict=True))
        a, b, c, d = of_c >> BITS & ALL ^ b ^ low, of_c & ALL, of_a >> BITS & ALL ^ d ^ high, of_a & ALL
    return a, b, c, d
