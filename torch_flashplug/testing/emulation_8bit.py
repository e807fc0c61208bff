"""Model of 8-bit attention: the arithmetic of the kernels in fp64, with the same roundings as the kernels.

The recipes of further libraries are modeled by the same arithmetic.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.quantize_reference import Quantized, in_key_order
from ..registry.quant_recipes import FORMAT_MAX, LONGEST_SUM, PROB_SCALE_LOG2, SLACK_LOG2, Recipe
from .oracle import Attention

KEYS_PER_SUM = 32  # keys summed at once by a tensor core in 8 bits


def attend(
    operands: Quantized, recipe: Recipe, scale: float, *, causal: bool = False, mask: Tensor | None = None,
    longest: int = LONGEST_SUM, accumulator_bits: int | None = None,
) -> Attention:  # fmt: skip
    """Compute attention of 8-bit operands with the roundings of the kernels.

    The blocks of keys are iterated from the last to the first, or from the first to the last with a mask. The kernels
    use the same order.

    Args:
        operands: quantized operands.
        recipe: 8-bit recipe.
        scale: factor of the scores.
        causal: whether the causal mask (top-left) applies.
        mask: bool mask in the form of attn_mask of F.sdpa, or None.
        longest: number of keys in a sum of O before O is promoted.
        accumulator_bits: digits of the sums of O, because wgmma truncates the sums after so many digits (DeepSeek-V3,
            arXiv 2412.19437, section 3.3.2). None truncates nothing.
    """
    q, k, v = operands.q.double(), operands.k.double(), operands.values()
    group, (B, Hq, Sq, _) = q.shape[1] // k.shape[1], q.shape
    k, v, constant = (x.repeat_interleave(group, 1) for x in (k, v, operands.constant()))
    factor = operands.q_scale.double().unsqueeze(-1) * scale
    k_scale = operands.k_scale.double().repeat_interleave(group, 1)
    row_max = q.new_full((B, Hq, Sq, 1), -math.inf)
    total, slack, most = torch.zeros_like(row_max), SLACK_LOG2 * math.log(2.0), longest // operands.block
    out, promoted = (q.new_zeros(B, Hq, Sq, v.shape[3]) for _ in range(2))
    rows = torch.arange(Sq, device=q.device).unsqueeze(-1)
    blocks = range(k_scale.shape[2])
    for step, block in enumerate(blocks if mask is not None else reversed(blocks)):
        keys = slice(block * operands.block, min((block + 1) * operands.block, operands.Sk))
        scores = q @ k[:, :, keys].mT * factor * k_scale[:, :, block, None, None]
        if causal:
            scores = scores.masked_fill(torch.arange(keys.start, keys.stop, device=q.device) > rows, -math.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask[..., keys], -math.inf)
        before, largest = row_max, scores.amax(-1, keepdim=True)
        row_max = torch.where(largest > row_max + slack, largest, row_max)
        base = row_max.masked_fill(row_max == -math.inf, 0.0)
        weights, correction = (scores - base).exp(), (before - base).exp()
        total = total * correction + weights.sum(-1, keepdim=True)
        weights = _round_weights(weights, recipe)
        out, promoted = out * correction, promoted * correction
        if recipe.values is not None and step > 0 and step % most == 0:
            exact = promoted + out
            promoted = exact.bfloat16().double()
            out = exact - promoted
        values = v[:, :, keys]
        out = (
            out + weights @ values
            if accumulator_bits is None
            else _add_truncated(out, weights, values, accumulator_bits)
        )
    lse = (row_max + total.log()).squeeze(-1) + operands.row_shift.double() * scale
    has_no_key = total == 0.0
    out = ((out + promoted) / total.masked_fill(has_no_key, 1.0) + constant).masked_fill(has_no_key, 0.0)
    return Attention(out, lse.masked_fill(has_no_key.squeeze(-1), -math.inf))


def _round_weights(weights: Tensor, recipe: Recipe) -> Tensor:
    if recipe.values is None:
        return weights.bfloat16().double()
    return (weights * 2.0**PROB_SCALE_LOG2).to(torch.float8_e4m3fn).double() / 2.0**PROB_SCALE_LOG2


def _add_truncated(out: Tensor, weights: Tensor, values: Tensor, bits: int) -> Tensor:
    for first in range(0, values.shape[2], KEYS_PER_SUM):
        part = slice(first, first + KEYS_PER_SUM)
        mantissa, exponent = torch.frexp(out + weights[..., part] @ values[:, :, part])
        out = torch.ldexp(torch.trunc(mantissa * 2.0**bits), exponent - bits)
    return out


def quantize_by_amax(q: Tensor, k: Tensor, v: Tensor, block: int, *, heads: bool = False) -> Quantized:
    """Quantize to e4m3 by the largest absolute entry of each tensor, or of each head with `heads`.

    The scales by head follow the interface of FlashAttention-3, with a descale for each KV head. The operands are
    neither shifted nor rotated.
    """
    dims = (2, 3) if heads else (0, 1, 2, 3)
    q_scale, k_scale, v_scale = (x.float().abs().amax(dims, keepdim=True) / FORMAT_MAX["e4m3"] for x in (q, k, v))
    cast = [(x.float() / scale).to(torch.float8_e4m3fn) for x, scale in ((q, q_scale), (k, k_scale), (v, v_scale))]
    blocks, Sk = -(-k.shape[2] // block), k.shape[2]
    transposed = F.pad(cast[2].view(torch.int8), (0, 0, 0, -Sk % 16)).mT
    return Quantized(
        cast[0], cast[1], in_key_order(transposed).view(torch.float8_e4m3fn),
        q_scale.squeeze(-1).expand(q.shape[:3]), k_scale.squeeze(-1).expand(*k.shape[:2], blocks),
        v_scale.squeeze(2).expand(*v.shape[:2], v.shape[3]), None, torch.zeros(q.shape[:3], device=q.device), block,
    )  # fmt: skip
