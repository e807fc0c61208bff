"""Attention in plain torch, in fp32 (fp64 of fp64): what the ops compute where no kernel of ours does, memory
O(Sq * Sk). Names of dims as in ops.py.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

LOST = float(2**24)  # kernels/backward/pre_post_process.py


def compute_dtype(query: Tensor) -> torch.dtype:
    """Of sums, and of the LSE."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


class Scores(NamedTuple):
    """What forward and backward share, in the compute dtype. Heads of key and value are repeated to Hq."""

    query: Tensor  # (B, Hq, Sq, D), scaled
    key: Tensor  # (B, Hq, Sk, D)
    value: Tensor  # (B, Hq, Sk, Dv)
    scores: Tensor  # (B, Hq, Sq, Sk), scaled and masked
    scale: float

    def where(self, seen: Tensor) -> Scores:
        """seen: bool, broadcasts to the scores."""
        return self._replace(scores=self.scores.masked_fill(~seen, -math.inf))

    def capped(self, softcap: float) -> Scores:
        """Bent to be less than a cap; 0: none."""
        return self._replace(scores=softcap * torch.tanh(self.scores / softcap)) if softcap else self

    def softmax(self) -> tuple[Tensor, Tensor]:
        """Probabilities, of a row that sees no key 0, and LSE (B, Hq, Sq)."""
        lse = torch.logsumexp(self.scores, dim=-1)
        # Not exp(scores - lse): the lse of scores such as finfo.min has no digits left for their number.
        return torch.softmax(self.scores, dim=-1).masked_fill((lse == -math.inf).unsqueeze(-1), 0.0), lse

    def probabilities(self, lse: Tensor) -> Tensor:
        """exp(scores - lse), before dropout; rows that see no key (lse -inf) are 0, as kernels have it also those whose
        fp32 lse is too large, either way, to tell how many keys there are. The lse may be that of more than these keys
        (a step of ring attention, sinks).
        """
        lost = (lse.abs() > LOST) & lse.isfinite() & (lse.dtype == torch.float32)
        none = (lost | (lse == -math.inf)).unsqueeze(-1)
        shifted = self.scores - lse.to(self.scores.dtype).unsqueeze(-1).masked_fill(none, 0.0)
        return torch.exp(shifted).masked_fill(none, 0.0)


def product_of_seen(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Return weights (B, H, Sq, Sk) @ values (B, H, Sk, D), where NaN and inf reach only rows that see them.

    Weights of what is not seen are 0, and 0 times NaN would be NaN. seen: bool, broadcasts to the weights.
    """
    whole = values.isfinite()
    if values.device.type == "cpu" and whole.all():
        return weights @ values
    kinds = torch.stack((values.isnan(), values == math.inf, values == -math.inf))
    met = (seen.to(values.dtype) @ kinds.to(values.dtype)) > 0
    found = weights @ values.where(whole, 0.0)
    for kind, which in zip((math.nan, math.inf, -math.inf), met, strict=True):
        found = torch.where(which, found + kind, found)
    return found


def scores_of(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Scores:
    dtype, head_dim = compute_dtype(query), query.shape[3]
    scale = scale if scale is not None else (1.0 / math.sqrt(head_dim) if head_dim else math.inf)
    group = query.shape[1] // key.shape[1] if key.shape[1] else 1
    key, value = (t.to(dtype).repeat_interleave(group, dim=1) if group > 1 else t.to(dtype) for t in (key, value))
    query = query.to(dtype) * scale
    return Scores(query, key, value, query @ key.transpose(-2, -1), scale)


class Known(NamedTuple):
    """What the forward and autograd left."""

    grad_out: Tensor  # (B, Hq, Sq, Dv)
    out: Tensor  # (B, Hq, Sq, Dv)
    lse: Tensor  # (B, Hq, Sq)
    factors: Tensor | None = None  # of probabilities: dropout's
    grad_lse: Tensor | None = None  # (B, Hq, Sq)
    softcap: float = 0.0


class Gradients(NamedTuple):
    """Those of operands are laid out like them."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor  # (B, Hq, Sq, Sk)
    delta: Tensor  # (B, Hq, Sq): rowsum(dO O) - dLSE


def gradients(
    s: Scores, query: Tensor, key: Tensor, value: Tensor, known: Known, seen: Tensor | None = None
) -> Gradients:  # fmt: skip
    """dP = dO V^T, dS = P (dP - delta), dQ = dS K, dK = dS^T Q, dV = P^T dO (FlashAttention, arXiv 2205.14135,
    appendix B); the LSE's gradient adds P dLSE to dS, and a softcap multiplies it by 1 - (score / cap)^2.
    seen: bool, broadcasts to the scores, where NaN and inf are to reach nothing else (product_of_seen).
    """
    grad_out, kept = known.grad_out.to(s.value.dtype), 1.0 if known.factors is None else known.factors
    probabilities = s.probabilities(known.lse)
    delta = (grad_out * known.out.to(grad_out.dtype)).sum(-1)
    if known.grad_lse is not None:
        delta = delta - known.grad_lse
    grad_scores = probabilities * ((grad_out @ s.value.transpose(-2, -1)) * kept - delta.unsqueeze(-1))
    if known.softcap:
        grad_scores = grad_scores * (1.0 - (s.scores.nan_to_num(neginf=0.0) / known.softcap).square())
    by_row = by_key = torch.matmul
    if seen is not None:
        probabilities, grad_scores = (x.masked_fill(~seen, 0.0) for x in (probabilities, grad_scores))
        by_row, by_key = (functools.partial(product_of_seen, seen=x) for x in (seen, seen.mT))
    dq = by_row(grad_scores, s.key) * s.scale
    dk = _sum_groups(by_key(grad_scores.transpose(-2, -1), s.query), key)
    dv = _sum_groups(by_key((probabilities * kept).transpose(-2, -1), grad_out), value)
    return Gradients(like(dq, query), like(dk, key), like(dv, value), grad_scores, delta)


def _sum_groups(grad: Tensor, operand: Tensor) -> Tensor:
    """(B, Hq, Sk, D) -> (B, Hkv, Sk, D): the query heads of one KV head add up."""
    if grad.shape[1] == operand.shape[1]:
        return grad
    return grad.unflatten(1, (operand.shape[1], -1)).sum(2)


def like(value: Tensor, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor).copy_(value)
