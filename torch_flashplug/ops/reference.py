"""Reference attention in plain torch, in fp32 (in fp64 for fp64 inputs), with O(Sq * Sk) memory.

The ops run these functions where no kernel serves a call. ops/sdpa.py explains the names of dims.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

LOST = float(2**24)  # same constant as in kernels/backward/pre_post_process.py


def compute_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype of sums and of the LSE."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


class Scores(NamedTuple):
    """Scaled and masked scores and their operands, in the compute dtype, for forward and backward.

    The heads of key and value are repeated to Hq.
    """

    query: Tensor  # (B, Hq, Sq, D), scaled
    key: Tensor  # (B, Hq, Sk, D)
    value: Tensor  # (B, Hq, Sk, Dv)
    scores: Tensor  # (B, Hq, Sq, Sk), scaled and masked
    scale: float

    def where(self, visible: Tensor) -> Scores:
        """Return scores with -inf where `visible` (bool, broadcasts to the scores) is False."""
        return self._replace(scores=self.scores.masked_fill(~visible, -math.inf))

    def capped(self, softcap: float) -> Scores:
        """Return scores limited by a softcap; a softcap of 0 changes nothing."""
        return self._replace(scores=softcap * torch.tanh(self.scores / softcap)) if softcap else self

    def softmax(self) -> tuple[Tensor, Tensor]:
        """Return the probabilities, 0 for a row without visible keys, and the LSE (B, Hq, Sq)."""
        lse = torch.logsumexp(self.scores, dim=-1)
        # exp(scores - lse) would be wrong: the lse of scores such as finfo.min has no digits left for the number of
        # keys.
        return torch.softmax(self.scores, dim=-1).masked_fill((lse == -math.inf).unsqueeze(-1), 0.0), lse

    def probabilities(self, lse: Tensor) -> Tensor:
        """Return exp(scores - lse), the probabilities before dropout.

        Rows without visible keys (lse -inf) are 0. Rows with an fp32 lse too large in magnitude to encode the number of
        keys are 0 too, as in the kernels. The lse may include more keys than the scores (a step of ring attention,
        sinks).
        """
        lost = (lse.abs() > LOST) & lse.isfinite() & (lse.dtype == torch.float32)
        none = (lost | (lse == -math.inf)).unsqueeze(-1)
        shifted = self.scores - lse.to(self.scores.dtype).unsqueeze(-1).masked_fill(none, 0.0)
        return torch.exp(shifted).masked_fill(none, 0.0)


def product_of_visible(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Return weights (B, H, Sq, Sk) @ values (B, H, Sk, D), where NaN and inf reach only rows with access to the value.

    Weights of hidden keys are 0, and 0 times NaN would be NaN. `visible` (bool) marks the visible pairs and broadcasts
    to the weights.
    """
    is_finite = values.isfinite()
    if values.device.type == "cpu" and is_finite.all():
        return weights @ values
    kinds = torch.stack((values.isnan(), values == math.inf, values == -math.inf))
    reached = (visible.to(values.dtype) @ kinds.to(values.dtype)) > 0
    product = weights @ values.where(is_finite, 0.0)
    for special_value, is_reached in zip((math.nan, math.inf, -math.inf), reached, strict=True):
        product = torch.where(is_reached, product + special_value, product)
    return product


def scores_of(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Scores:
    dtype, head_dim = compute_dtype(query), query.shape[3]
    scale = scale if scale is not None else (1.0 / math.sqrt(head_dim) if head_dim else math.inf)
    group = query.shape[1] // key.shape[1] if key.shape[1] else 1
    key, value = (t.to(dtype).repeat_interleave(group, dim=1) if group > 1 else t.to(dtype) for t in (key, value))
    query = query.to(dtype) * scale
    return Scores(query, key, value, query @ key.transpose(-2, -1), scale)


class BackwardInputs(NamedTuple):
    """Results of the forward and gradients from autograd: the inputs of a backward."""

    grad_out: Tensor  # (B, Hq, Sq, Dv)
    out: Tensor  # (B, Hq, Sq, Dv)
    lse: Tensor  # (B, Hq, Sq)
    factors: Tensor | None = None  # dropout factors of the probabilities
    grad_lse: Tensor | None = None  # (B, Hq, Sq)
    softcap: float = 0.0


class Gradients(NamedTuple):
    """Gradients of the operands (in the memory layout of the operands), of the scores, and delta."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor  # (B, Hq, Sq, Sk)
    delta: Tensor  # (B, Hq, Sq): rowsum(dO O) - dLSE


def gradients(
    s: Scores, query: Tensor, key: Tensor, value: Tensor, inputs: BackwardInputs, visible: Tensor | None = None
) -> Gradients:  # fmt: skip
    """Return the gradients of attention.

    dP = dO V^T, dS = P (dP - delta), dQ = dS K, dK = dS^T Q, dV = P^T dO (FlashAttention, arXiv 2205.14135,
    appendix B). The gradient of the LSE adds P dLSE to dS. A softcap multiplies dS by 1 - (score / cap)^2.

    Args:
        s: scores of the forward.
        query: query (B, Hq, Sq, D), which gives the shape and layout of dQ.
        key: key (B, Hkv, Sk, D), which gives the shape and layout of dK.
        value: value (B, Hkv, Sk, Dv), which gives the shape and layout of dV.
        inputs: results of the forward and gradients from autograd.
        visible: bool mask of the visible pairs, broadcasts to the scores. NaN and inf then reach visible pairs alone
            (`product_of_visible`). None applies no such limit.
    """
    grad_out, dropout_factors = inputs.grad_out.to(s.value.dtype), 1.0 if inputs.factors is None else inputs.factors
    probabilities = s.probabilities(inputs.lse)
    delta = (grad_out * inputs.out.to(grad_out.dtype)).sum(-1)
    if inputs.grad_lse is not None:
        delta = delta - inputs.grad_lse
    grad_scores = probabilities * ((grad_out @ s.value.transpose(-2, -1)) * dropout_factors - delta.unsqueeze(-1))
    if inputs.softcap:
        grad_scores = grad_scores * (1.0 - (s.scores.nan_to_num(neginf=0.0) / inputs.softcap).square())
    by_row = by_key = torch.matmul
    if visible is not None:
        probabilities, grad_scores = (x.masked_fill(~visible, 0.0) for x in (probabilities, grad_scores))
        by_row, by_key = (functools.partial(product_of_visible, visible=x) for x in (visible, visible.mT))
    dq = by_row(grad_scores, s.key) * s.scale
    dk = _sum_groups(by_key(grad_scores.transpose(-2, -1), s.query), key)
    dv = _sum_groups(by_key((probabilities * dropout_factors).transpose(-2, -1), grad_out), value)
    return Gradients(like(dq, query), like(dk, key), like(dv, value), grad_scores, delta)


def _sum_groups(grad: Tensor, operand: Tensor) -> Tensor:
    """Sum a gradient (B, Hq, Sk, D) over the query heads of each KV head and return (B, Hkv, Sk, D)."""
    if grad.shape[1] == operand.shape[1]:
        return grad
    return grad.unflatten(1, (operand.shape[1], -1)).sum(2)


def like(value: Tensor, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor).copy_(value)
