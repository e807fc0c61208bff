"""Which scores dropout keeps, from a seed and the scores' places alone: in plain torch what kernels draw
(kernels/parts/scores/dropout.py, which says how and why). Nothing synchronises.

Numbers of 32 bits are int64 here, whose products wrap and lose nothing that is asked for.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

ROUNDS, DIGITS, BITS = 10, 8, 32  # of Philox4x32; binary digits of a draw, one word each; of a word
MULTIPLIERS, KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
COIN_HEAD, COIN_ROW, COIN_KEYS, COIN_MIX = 0xCD9E8D57, 0xD2511F53, 0x9E3779B9, 0x85EBCA6B
ALL = (1 << BITS) - 1
ROWS, KEYS = 16, 16  # of queries, whose pairs words are of; of a word


def share_of(dropout_p: float) -> float:
    """Kept of all scores, in fp32 as everything that kernels make of the probability."""
    return ctypes.c_float(1.0 - ctypes.c_float(dropout_p).value).value


def factor(dropout_p: float) -> float:
    """What is kept is multiplied with it."""
    share = share_of(dropout_p)
    return ctypes.c_float(1.0 / share).value if share > 0.0 else 0.0


def threshold(dropout_p: float) -> tuple[int, int]:
    """Draws below it are kept, in 256ths, and the rest of it in 2^-32."""
    scaled = share_of(dropout_p) * (1 << DIGITS)
    whole = min(int(scaled), (1 << DIGITS) - 1)
    return whole, int(min((scaled - whole) * 2.0**BITS, 2.0**BITS - 2.0**8))


def dropout_mask(seed: Tensor, B: int, Hq: int, Sq: int, Sk: int, dropout_p: float) -> Tensor:
    """(B, Hq, Sq, Sk) bool, True where a probability is kept, of attention that drew `seed` (int64, one number)."""
    device = seed.device
    heads, rows, keys = B * Hq, -(-Sq // ROWS), -(-Sk // KEYS)
    head = torch.arange(heads, device=device).view(-1, 1, 1)
    pair = torch.arange(rows * ROWS // 2, device=device).view(-1, 1)  # of rows: 8 I + g
    words = _words(seed.reshape(()), head, pair, torch.arange(keys, device=device), *threshold(dropout_p))
    # Bit 8 t + 4 h + 2 half + e of word (8 I + g, J) is row 16 I + 8 h + g and key 16 J + 8 half + 2 t + e.
    bits = (words.unsqueeze(-1) >> torch.arange(BITS, device=device) & 1).bool()
    places = bits.view(heads, rows, 8, keys, 4, 2, 2, 2).permute(0, 1, 5, 2, 3, 6, 4, 7)
    return places.reshape(B, Hq, rows * ROWS, keys * KEYS)[..., :Sq, :Sk].contiguous()


def _words(seed: Tensor, head: Tensor, pair: Tensor, keys: Tensor, whole: int, coin: int) -> Tensor:
    key = seed & ALL, seed >> BITS & ALL
    mixed = head * COIN_HEAD + key[0] + pair * COIN_ROW & ALL
    mixed = (mixed ^ mixed >> 16) * COIN_MIX & ALL
    toss = (mixed ^ mixed >> 13 ^ key[1]) + keys * COIN_KEYS & ALL
    words = torch.where(toss < coin, ALL, 0)
    for call in range(DIGITS // 4):
        for i, drawn in enumerate(_philox((keys, pair, head, torch.full_like(seed, call)), key)):
            words = words | drawn if whole >> (4 * call + i) & 1 else words & drawn
    return words


def _philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    a, b, c, d = counter
    for i in range(ROUNDS):
        low, high = (key[j] + i * KEY_STEPS[j] & ALL for j in (0, 1))
        of_a, of_c = (x * m for x, m in zip((a, c), MULTIPLIERS, strict=True))
        a, b, c, d = of_c >> BITS & ALL ^ b ^ low, of_c & ALL, of_a >> BITS & ALL ^ d ^ high, of_a & ALL
    return a, b, c, d
