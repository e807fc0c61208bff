"""Operands in 8 bits as kernels read them, made in plain torch: what the quantise kernel is held against.

Scores. Rounding a score's factors costs least where no channel stands out: a constant key is taken from all keys, which
moves all scores of a row alike (SageAttention, arXiv 2410.02367, section 4.2), and rows of Q and K are rotated by
random signs and a Hadamard matrix, which leaves their products as they are (QuIP, arXiv 2307.13304; FlashAttention-3,
arXiv 2407.08608, section 3.3). Then each row of Q has a scale, and each block of keys.

Values. Of each channel a constant is taken, which the output gets back: probabilities add up to 1 (SageAttention2,
arXiv 2411.10958, section 3.3). And each has a scale, from a sample: e4m3 keeps its relative precision over 15 powers of
two. V lies transposed, its keys in the order in which a thread's probabilities are the next product's left operand.

Everything is made in one pass over the operands: the constant key and the channels' scales are those of SAMPLES keys,
the first, the last and some between, so that no part waits for another one, and equal inputs give equal bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry.quant_recipes import (
    CHANNEL_RMS,
    CLEAR_MEAN,
    ENDS,
    KEY_ORDER,
    LARGEST,
    LARGEST_SQUARE,
    LEAST_CHANNEL,
    LEAST_VARIANCE,
    ROTATION,
    SAMPLES,
    SMALLEST_SCALE,
    Recipe,
)

_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class Quantised:
    """One call's operands. Scores are q . k * q_scale * k_scale, and the softmax scale of the call, plus row_shift."""

    q: Tensor  # (B, Hq, Sq, D) in 8 bits
    k: Tensor  # (B, Hkv, Sk, D) in 8 bits
    v: Tensor  # (B, Hkv, Dv, Sk rounded up to 16) in 8 bits, keys in KEY_ORDER, zeros behind the last; or as given
    q_scale: Tensor  # (B, Hq, Sq) fp32
    k_scale: Tensor  # (B, Hkv, blocks of keys) fp32
    v_scale: Tensor | None  # (B, Hkv, Dv) fp32
    v_mean: Tensor | None  # (B, Hkv, Dv) fp32
    row_shift: Tensor  # (B, Hq, Sq) fp32: what the constant key has taken from a row's scores, before the softmax scale
    block: int  # keys of a block

    @property
    def Sk(self) -> int:
        return self.k.shape[2]

    def values(self) -> Tensor:
        """V without what v_mean has of it, (B, Hkv, Sk, Dv) fp64."""
        if self.v_scale is None:
            return self.v.double()
        rows = in_natural_order(self.v.double()).mT[:, :, : self.Sk]
        return rows * self.v_scale.double().unsqueeze(2)

    def constant(self) -> Tensor:
        """What the output gets beside, (B, Hkv, 1, Dv) fp64."""
        if self.v_mean is None:
            return self.k_scale.new_zeros(*self.k.shape[:2], 1, 1, dtype=torch.float64)
        return self.v_mean.double().unsqueeze(2)


def quantise(q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, block: int) -> Quantised:
    """Of query (B, Hq, Sq, D), key (B, Hkv, Sk, D) and value (B, Hkv, Sk, Dv) in 16 bits; block: keys that share a
    scale, those of a kernel's tile. A row of q or a block of k that holds a number which is not finite gets NaN for its
    scale, and such numbers of v are NaN.
    """
    shift = mean_of_finite(sample(k.float()))
    group = q.shape[1] // k.shape[1]
    rotated_q, rotated_k = rotate(q.float()), rotate(k.float() - shift)
    q_scale = _scale(rotated_q.abs().amax(-1), LARGEST[recipe.scores])
    k_scale = _scale(_blocks(rotated_k.abs().amax(-1), block).amax(-1), LARGEST[recipe.scores])
    of_keys = k_scale.repeat_interleave(block, -1)[..., : k.shape[2]]
    row_shift = (q.float() * shift.repeat_interleave(group, 1)).sum(-1)
    values, v_scale, v_mean = (v, None, None) if recipe.values is None else _values(v.float(), recipe.values)
    return Quantised(
        _rounded(rotated_q * (1.0 / q_scale.unsqueeze(-1)), recipe.scores),
        _rounded(rotated_k * (1.0 / of_keys.unsqueeze(-1)), recipe.scores),
        values, q_scale, k_scale, v_scale, v_mean, row_shift, block,
    )  # fmt: skip


def rotate(x: Tensor, by: Tensor | None = None) -> Tensor:
    """Rows of D numbers: signs of ROTATION (by, if they are there already), then Hadamard matrices of the largest power
    of two that divides D, on the diagonal; lengths and products of rows stay.
    """
    return _transformed(x * (signs(int(x.shape[-1]), x.device) if by is None else by))


def unrotate(x: Tensor) -> Tensor:
    """What `rotate` has made of its argument: that matrix is its own inverse."""
    return _transformed(x) * signs(int(x.shape[-1]), x.device)


def in_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (..., D) with a scale each (...), fp32; NaN for one that holds a number which is not finite."""
    x = x.float()
    scale = _scale(x.abs().amax(-1), LARGEST["int8"])
    return _rounded(x * (1.0 / scale.unsqueeze(-1)), "int8"), scale


def _transformed(x: Tensor) -> Tensor:
    D = int(x.shape[-1])  # a traced one becomes a constant
    size = D & -D
    rows = x.unflatten(-1, (-1, size))
    step = 1
    while step < size:
        pairs = rows.unflatten(-1, (-1, 2, step))
        rows = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
        step *= 2
    return rows.flatten(-2) * size**-0.5


def signs(D: int, device: torch.device | str = "cpu") -> Tensor:
    """1.0 or -1.0 for each of D channels; behind 256 the same again."""
    words = (ROTATION * -(-D // 256))[: -(-D // 32)]
    places = torch.arange(32, device=device)  # nothing is copied to the device: a CUDA graph may record it
    bits = torch.cat([torch.bitwise_right_shift(word, places) for word in words])[:D] & 1
    return 1.0 - 2.0 * bits.float()


def sample(x: Tensor) -> Tensor:
    """(B, H, SAMPLES, D): ENDS of the first rows and of the last, the others spread evenly over all S; some of them
    again where S is less.
    """
    S, between = x.shape[2], SAMPLES - 2 * ENDS
    first = torch.arange(ENDS, device=x.device)
    spread = (2 * torch.arange(between, device=x.device) + 1) * S // (2 * between)
    return x[:, :, torch.cat((first.clamp_max(S - 1), spread, (first + S - ENDS).clamp_min(0)))]


def in_key_order(rows: Tensor) -> Tensor:
    """(..., S), S a multiple of 16: keys as V^T has them."""
    return _reordered(rows, torch.tensor(KEY_ORDER))


def in_natural_order(rows: Tensor) -> Tensor:
    return _reordered(rows, torch.tensor(KEY_ORDER).argsort())


def _reordered(rows: Tensor, places: Tensor) -> Tensor:
    return rows.unflatten(-1, (-1, len(KEY_ORDER)))[..., places.to(rows.device)].flatten(-2)


def mean_of_finite(rows: Tensor) -> Tensor:
    """(B, H, 1, D): one NaN must not reach every score of the head."""
    finite = rows.isfinite()
    return rows.masked_fill(~finite, 0.0).sum(2, keepdim=True) / finite.sum(2, keepdim=True).clamp_min(1)


def _scale(largest: Tensor, of_format: float) -> Tensor:
    scale = torch.where(largest == 0.0, 1.0, largest / of_format).clamp_min(SMALLEST_SCALE)
    return torch.where(largest.isfinite(), scale, math.nan)


def _blocks(x: Tensor, block: int) -> Tensor:
    """(..., S) -> (..., blocks, block), filled up with zeros."""
    return F.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))


def _values(v: Tensor, number: str) -> tuple[Tensor, Tensor, Tensor]:
    """V^T in KEY_ORDER, scales and means of its channels."""
    found = sample(v)
    mean, finite = mean_of_finite(found).squeeze(2), found.isfinite()
    square = found.masked_fill(~finite, 0.0).square().sum(2) / finite.sum(2).clamp_min(1)
    square = square.clamp_max(LARGEST_SQUARE)  # of what is finite it may be inf
    of_all = square.mean(-1, keepdim=True)
    square = torch.maximum(square, torch.where(of_all > 0.0, of_all, CHANNEL_RMS**2) * LEAST_CHANNEL)
    variance = torch.maximum(square - mean.square(), square * LEAST_VARIANCE)
    clear = mean.square() > variance * CLEAR_MEAN
    mean, variance = torch.where(clear, mean, 0.0), torch.where(clear, variance, square)
    scale = (variance.sqrt() / CHANNEL_RMS).clamp_min(SMALLEST_SCALE)
    return turned(v, scale, mean, number), scale, mean


def turned(v: Tensor, scale: Tensor, mean: Tensor, number: str) -> Tensor:
    """V^T (B, Hkv, Dv, Sk rounded up to 16) in KEY_ORDER, by scales and means (B, Hkv, Dv) of its channels."""
    rows = ((v.float() - mean.unsqueeze(2)) * (1.0 / scale.unsqueeze(2))).mT
    return in_key_order(_rounded(F.pad(rows, (0, -rows.shape[-1] % len(KEY_ORDER))), number))


def _rounded(x: Tensor, number: str) -> Tensor:
    """To nearest, ties to even; what lies beyond the format's ends becomes its end."""
    largest = LARGEST[number]
    if number == "int8":
        return x.nan_to_num(0.0).round().clamp(-largest, largest).to(torch.int8)
    return x.masked_fill(~x.isfinite(), math.nan).clamp(-largest, largest).to(_DTYPES[number])
