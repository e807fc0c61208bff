"""Random queries, keys and values with the distributions of real models, which make 8-bit attention hard.

The distributions follow published descriptions. All tensors are drawn on the CPU and rounded to bf16: query
(B, Hq, Sq, D), key (B, Hkv, Sk, D), value (B, Hkv, Sk, D). The queries belong to the last Sq positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case

SINK_SCORE, SINK_VALUE = 9.0, 0.02  # first key: score with the queries, and factor of the value


@dataclass(frozen=True, slots=True)
class Draw:
    """Source of the random numbers of a seed."""

    sizes: Case
    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def rows(self, heads: int, rows: int) -> Tensor:
        return self.normal(self.sizes.B, heads, rows, self.sizes.D)

    def channels(self, heads: int, spread: float) -> Tensor:
        """Return a positive log-normal gain for each channel of a head."""
        return (spread * self.normal(1, heads, 1, self.sizes.D)).exp()

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        s = self.sizes
        return self.rows(s.Hq, s.Sq), self.rows(s.Hkv, s.Sk), self.rows(s.Hkv, s.Sk)


def _normal(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    return draw.operands()


def _outliers(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """Draw N(0, 1), plus N(0, 100) in 1 of 1,000 elements (FlashAttention-3, arXiv 2407.08608, section 4.3)."""

    def with_outliers(x: Tensor) -> Tensor:
        is_outlier = torch.rand(x.shape, generator=draw.generator, dtype=torch.float64) < 1e-3
        return x + 10.0 * draw.normal(*x.shape) * is_outlier

    q, k, v = (with_outliers(x) for x in draw.operands())
    return q, k, v


def _language(draw: Draw, constant: float, base: float) -> tuple[Tensor, Tensor, Tensor]:
    """Draw operands with the features of a language model's decoder.

    The features are rotary positions, channels of unequal gain, and two slow channels of keys with a large constant
    part (KIVI, arXiv 2402.02750; key biases of Qwen2.5). The first key has a high score with all queries and a value
    near zero (StreamingLLM, arXiv 2309.17453).
    """
    s = draw.sizes
    q, k, v = draw.operands()
    q, k = q * draw.channels(s.Hq, 0.4) * 1.3, k * draw.channels(s.Hkv, 0.4)
    slow = s.D // 2 - s.D // 8
    group = s.Hq // s.Hkv
    for head in range(s.Hkv):
        chosen = torch.randperm(s.D // 8, generator=draw.generator)[:2] + slow
        sign = torch.where(torch.rand(2, generator=draw.generator) < 0.5, -1.0, 1.0)
        k[:, head, :, chosen] += constant * (1.0 + 0.3 * draw.normal(2)) * sign
        q[:, head * group : (head + 1) * group, :, chosen] += 1.5 * draw.normal(2)
    positions = torch.arange(s.Sk)
    q, k = _rotary(q, positions[-s.Sq :], base), _rotary(k, positions, base)
    v = v * draw.channels(s.Hkv, 0.5) * (0.4 * draw.normal(1, s.Hkv, 1, 1)).exp()
    looked_at = q.unflatten(1, (s.Hkv, group)).mean((2, 3))
    looked_at = looked_at / looked_at.norm(dim=-1, keepdim=True)
    along = (q.unflatten(1, (s.Hkv, group)) * looked_at[:, :, None, None]).sum(-1).mean((2, 3)).clamp_min(0.5)
    k[:, :, 0] = looked_at * (SINK_SCORE * math.sqrt(s.D) / along).clamp(max=60.0).unsqueeze(-1)
    v[:, :, 0] *= SINK_VALUE
    return q, k, v


def _diffusion(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """Draw operands with the features of a diffusion transformer.

    Queries and keys are normalized and have gains. All keys share a common part, and values have offsets.
    """
    s = draw.sizes
    q, k, v = draw.operands()
    shared = 0.9 * draw.normal(1, s.Hkv, 1, s.D)
    q, k = q + 0.3 * shared.repeat_interleave(s.Hq // s.Hkv, 1), k + shared
    gain = draw.channels(s.Hkv, 0.5)
    q, k = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (q, k))
    v = (v + draw.normal(1, s.Hkv, 1, s.D)) * draw.channels(s.Hkv, 0.7)
    return q * gain.repeat_interleave(s.Hq // s.Hkv, 1) * 2.0, k * gain, v


def _rotary(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Apply rotary positions (RoFormer, arXiv 2104.09864): channel i rotates with channel i + D / 2."""
    D = x.shape[-1]
    angles = positions.double().unsqueeze(-1) * base ** (-torch.arange(0, D, 2).double() / D)
    cosine, sine, (first, second) = angles.cos(), angles.sin(), x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


MODELS: dict[str, Callable[[Draw], tuple[Tensor, Tensor, Tensor]]] = {
    "normal": _normal,
    "fa3": _outliers,
    "llm": lambda draw: _language(draw, 8.0, 5e5),
    "qwen": lambda draw: _language(draw, 60.0, 1e6),
    "dit": _diffusion,
}


def activations(model: str, sizes: Case, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw bf16 query, key and value of a distribution.

    Args:
        model: name in MODELS.
        sizes: case with the sizes of the tensors. The rest of the case is not used, and Dv counts as D.
        seed: seed of the random numbers.
    """
    q, k, v = MODELS[model](Draw(sizes, torch.Generator().manual_seed(seed)))
    return q.bfloat16(), k.bfloat16(), v.bfloat16()
