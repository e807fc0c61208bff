"""Reference of quantization in plain torch: 8-bit operands in the format of kernels. Tests compare the kernel with it.

Scores. Rounding of the factors of a score costs least accuracy without outlier channels. Therefore a constant key is
subtracted from all keys, which moves all scores of a row by the same amount (SageAttention, arXiv 2410.02367, section
4.2). Rows of Q and K are then rotated by random signs and a Hadamard matrix, which keeps the products (QuIP, arXiv
2307.13304; FlashAttention-3, arXiv 2407.08608, section 3.3). After the rotation, each row of Q has a scale, and each
block of keys has a scale.

Values. A constant is subtracted from each channel and added to the output, because probabilities sum to 1
(SageAttention2, arXiv 2411.10958, section 3.3). Each channel has a scale, computed from a sample: e4m3 keeps the
relative precision over 15 powers of two. V is stored transposed. The order of the keys is that in which a thread's
probabilities form the left operand of the next product.

All parts are made in one pass over the operands. The constant key and the scales of channels come from SAMPLES keys:
the first keys, the last keys and some between. So no part waits for a different part, and equal inputs give equal bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry.quant_recipes import (
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
    SIGN_BITS,
    Recipe,
)

# Number of keys whose samples are all different and lie at a fixed distance. A tensor of so many keys can hold the
# samples of any longer tensor.
SAMPLED_KEYS = (NUM_ENDS + 1) * 2 * (SAMPLES - 2 * NUM_ENDS)
_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized operands of a call.

    Scores are (q . k * q_scale * k_scale + row_shift), times the softmax scale of the call.
    """

    q: Tensor  # (B, Hq, Sq, D) in 8 bits
    k: Tensor  # (B, Hkv, Sk, D) in 8 bits
    # (B, Hkv, Dv, Sk rounded up to 16) in 8 bits, keys in KEY_ORDER, zeros after the last key; or the unchanged value.
    v: Tensor
    q_scale: Tensor  # (B, Hq, Sq) fp32
    k_scale: Tensor  # (B, Hkv, blocks of keys) fp32
    v_scale: Tensor | None  # (B, Hkv, Dv) fp32
    v_mean: Tensor | None  # (B, Hkv, Dv) fp32
    # (B, Hq, Sq) fp32: the amount by which the constant key lowers the scores of a row, before the softmax scale.
    row_shift: Tensor
    block: int  # keys of a block

    @property
    def Sk(self) -> int:
        return self.k.shape[2]

    def values(self) -> Tensor:
        """Return V minus v_mean, (B, Hkv, Sk, Dv) fp64."""
        if self.v_scale is None:
            return self.v.double()
        rows = in_natural_order(self.v.double()).mT[:, :, : self.Sk]
        return rows * self.v_scale.double().unsqueeze(2)

    def constant(self) -> Tensor:
        """Return the constant added to the output, (B, Hkv, 1, Dv) fp64."""
        if self.v_mean is None:
            return self.k_scale.new_zeros(*self.k.shape[:2], 1, 1, dtype=torch.float64)
        return self.v_mean.double().unsqueeze(2)


def quantize(q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, block: int) -> Quantized:
    """Quantize the operands of a call.

    A row of q or a block of k with a non-finite number gets NaN as scale. Non-finite numbers of v become NaN.

    Args:
        q: Query (B, Hq, Sq, D), 16 bits.
        k: Key (B, Hkv, Sk, D), 16 bits.
        v: Value (B, Hkv, Sk, Dv), 16 bits.
        recipe: Number formats.
        block: Number of keys with a common scale, equal to the keys of a kernel's tile.
    """
    shift = mean_of_finite(sample(k.float()))
    group = q.shape[1] // k.shape[1]
    rotated_q, rotated_k = rotate(q.float()), rotate(k.float() - shift)
    q_scale = _scale(rotated_q.abs().amax(-1), FORMAT_MAX[recipe.scores])
    k_scale = _scale(_blocks(rotated_k.abs().amax(-1), block).amax(-1), FORMAT_MAX[recipe.scores])
    of_keys = k_scale.repeat_interleave(block, -1)[..., : k.shape[2]]
    row_shift = (q.float() * shift.repeat_interleave(group, 1)).sum(-1)
    values, v_scale, v_mean = (v, None, None) if recipe.values is None else _values(v.float(), recipe.values)
    return Quantized(
        _rounded(rotated_q * (1.0 / q_scale.unsqueeze(-1)), recipe.scores),
        _rounded(rotated_k * (1.0 / of_keys.unsqueeze(-1)), recipe.scores),
        values, q_scale, k_scale, v_scale, v_mean, row_shift, block,
    )  # fmt: skip


def rotate(x: Tensor, by: Tensor | None = None) -> Tensor:
    """Rotate rows of D numbers. Lengths and products of rows stay.

    The rotation multiplies by the signs of `SIGN_BITS` (or by the signs `by`, if given), then by a block-diagonal
    matrix of Hadamard matrices. The size of each is the largest power of two dividing D.
    """
    return _transformed(x * (signs(int(x.shape[-1]), x.device) if by is None else by))


def unrotate(x: Tensor) -> Tensor:
    """Invert `rotate`. The Hadamard matrix is equal to the inverse matrix, so that only the signs move to the end."""
    return _transformed(x) * signs(int(x.shape[-1]), x.device)


def in_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows (..., D) to INT8 with fp32 scales (...) of rows; NaN for a row with a non-finite number."""
    x = x.float()
    scale = _scale(x.abs().amax(-1), FORMAT_MAX["int8"])
    return _rounded(x * (1.0 / scale.unsqueeze(-1)), "int8"), scale


def _transformed(x: Tensor) -> Tensor:
    D = int(x.shape[-1])  # a traced size becomes a constant
    size = D & -D
    rows = x.unflatten(-1, (-1, size))
    step = 1
    while step < size:
        pairs = rows.unflatten(-1, (-1, 2, step))
        rows = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
        step *= 2
    return rows.flatten(-2) * size**-0.5


def signs(D: int, device: torch.device | str = "cpu") -> Tensor:
    """Return 1.0 or -1.0 for each of D channels, with a period of 256 channels."""
    words = (SIGN_BITS * -(-D // 256))[: -(-D // 32)]
    places = torch.arange(32, device=device)  # no copy to the device, so that a CUDA graph can record the call
    bits = torch.cat([torch.bitwise_right_shift(word, places) for word in words])[:D] & 1
    return 1.0 - 2.0 * bits.float()


def sample(x: Tensor) -> Tensor:
    """Return a sample of rows, (B, H, SAMPLES, D).

    The sample has the first `NUM_ENDS` rows, the last `NUM_ENDS` rows, and rows spread evenly over all S. If S is too
    small, rows occur more than once.
    """
    S, between = x.shape[2], SAMPLES - 2 * NUM_ENDS
    first = torch.arange(NUM_ENDS, device=x.device)
    spread = (2 * torch.arange(between, device=x.device) + 1) * S // (2 * between)
    return x[:, :, torch.cat((first.clamp_max(S - 1), spread, (first + S - NUM_ENDS).clamp_min(0)))]


def spread_samples(x: Tensor) -> Tensor:
    """Return (B, H, SAMPLED_KEYS, D) with the samples of `x`, which has more rows, and zeros between."""
    samples, distance = sample(x), NUM_ENDS + 1
    spread = x.new_zeros(*x.shape[:2], SAMPLED_KEYS, x.shape[3])
    spread[:, :, :NUM_ENDS] = samples[:, :, :NUM_ENDS]
    spread[:, :, distance : SAMPLED_KEYS - NUM_ENDS : 2 * distance] = samples[:, :, NUM_ENDS:-NUM_ENDS]
    spread[:, :, SAMPLED_KEYS - NUM_ENDS :] = samples[:, :, -NUM_ENDS:]
    return spread


def in_key_order(rows: Tensor) -> Tensor:
    """Reorder keys (..., S) to the order of V^T, where S is a multiple of 16."""
    return _reordered(rows, torch.tensor(KEY_ORDER))


def in_natural_order(rows: Tensor) -> Tensor:
    return _reordered(rows, torch.tensor(KEY_ORDER).argsort())


def _reordered(rows: Tensor, places: Tensor) -> Tensor:
    return rows.unflatten(-1, (-1, len(KEY_ORDER)))[..., places.to(rows.device)].flatten(-2)


def mean_of_finite(rows: Tensor) -> Tensor:
    """Return the mean (B, H, 1, D) of the finite numbers, so that one NaN cannot reach every score of the head."""
    finite = rows.isfinite()
    return rows.masked_fill(~finite, 0.0).sum(2, keepdim=True) / finite.sum(2, keepdim=True).clamp_min(1)


def _scale(largest: Tensor, of_format: float) -> Tensor:
    scale = torch.where(largest == 0.0, 1.0, largest / of_format).clamp_min(MIN_SCALE)
    return torch.where(largest.isfinite(), scale, math.nan)


def _blocks(x: Tensor, block: int) -> Tensor:
    """Split (..., S) into (..., blocks, block), padded with zeros."""
    return F.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))


def _values(v: Tensor, number: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return V^T with keys in `KEY_ORDER`, and the scales and means of the channels."""
    sampled = sample(v)
    mean, finite = mean_of_finite(sampled).squeeze(2), sampled.isfinite()
    square = sampled.masked_fill(~finite, 0.0).square().sum(2) / finite.sum(2).clamp_min(1)
    square = square.clamp_max(MAX_SQUARE)  # the square of a finite number may be inf
    of_all = square.mean(-1, keepdim=True)
    square = torch.maximum(square, torch.where(of_all > 0.0, of_all, CHANNEL_RMS**2) * MIN_CHANNEL)
    variance = torch.maximum(square - mean.square(), square * MIN_VARIANCE)
    clear = mean.square() > variance * MIN_MEAN_SHIFT
    mean, variance = torch.where(clear, mean, 0.0), torch.where(clear, variance, square)
    scale = (variance.sqrt() / CHANNEL_RMS).clamp_min(MIN_SCALE)
    return turned(v, scale, mean, number), scale, mean


def turned(v: Tensor, scale: Tensor, mean: Tensor, number: str) -> Tensor:
    """Return V^T (B, Hkv, Dv, Sk rounded up to 16) in `KEY_ORDER`, for scales and means (B, Hkv, Dv) of channels."""
    rows = ((v.float() - mean.unsqueeze(2)) * (1.0 / scale.unsqueeze(2))).mT
    return in_key_order(_rounded(F.pad(rows, (0, -rows.shape[-1] % len(KEY_ORDER))), number))


def _rounded(x: Tensor, number: str) -> Tensor:
    """Round to nearest, ties to even. Numbers beyond the range of the format become the end of the range."""
    largest = FORMAT_MAX[number]
    if number == "int8":
        return x.nan_to_num(0.0).round().clamp(-largest, largest).to(torch.int8)
    return x.masked_fill(~x.isfinite(), math.nan).clamp(-largest, largest).to(_DTYPES[number])
