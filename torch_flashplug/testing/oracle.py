"""Reference formula of attention in any precision, with bounded memory.

In fp64, the formula is the oracle. In the call's own dtype, the formula is "plain low-precision torch": every
intermediate is rounded to the dtype of the inputs, as in eager PyTorch code. The result of a fused kernel is never
compared with the result of a second fused kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

MAX_SCORES = 1 << 25  # scores in memory at once: 256 MiB in fp64 per intermediate


@dataclass(frozen=True, slots=True)
class Masking:
    """Mask and dropout of a call: visible keys of each row, and kept probabilities.

    Args:
        causal_mode: 0 none, 1 top-left, 2 bottom-right.
        bias: bool mask (True is visible) or additive bias, broadcasts to (B, Hq, Sq, Sk). None masks nothing.
        kept: bool mask of the probabilities kept by dropout, broadcasts to (B, Hq, Sq, Sk).
        kept_share: expected share of kept probabilities. The kept probabilities are divided by the share.
    """

    causal_mode: int = 0
    bias: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    kept_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Attention:
    """Output and LSE of attention: out (B, Hq, Sq, Dv) and lse (B, Hq, Sq), natural log.

    A row without visible keys has out 0 and lse -inf.
    """

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, slots=True)
class _ScoreBlock:
    """Part of the problem: flat heads [h], query rows [m], and the visible parts of k and v."""

    h: slice
    m: slice
    q: torch.Tensor  # (heads, rows, D)
    k: torch.Tensor  # (heads, Sk, D)
    v: torch.Tensor  # (heads, Sk, Dv)
    kv_index: torch.Tensor  # (heads,) flat KV head of each head
    scores: torch.Tensor  # (heads, rows, Sk), masked and scaled
    kept: torch.Tensor | None  # (heads, rows, Sk) bool
    kept_share: float

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        """Return probabilities, or the gradient of probabilities, after dropout."""
        return x if self.kept is None else x * self.kept / self.kept_share


def _block_slices(heads: int, sq: int, sk: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of flat heads and query rows with bounded memory.

    The bound is on the scores and on the copies of the operands (D + Dv = width).
    """
    rows = max(1, min(sq, MAX_SCORES // max(sk, 1)))
    group = max(1, MAX_SCORES // max(rows * sk, (rows + sk) * width, 1)) if rows == sq else 1
    for h in range(0, heads, group):
        for m in range(0, sq, rows):
            yield slice(h, min(h + group, heads)), slice(m, min(m + rows, sq))


def _score_blocks(q, k, v, scale: float | None, mask: Masking, dtype: torch.dtype) -> Iterator[_ScoreBlock]:
    (B, Hq, Sq, D), (Hkv, Sk), Dv = q.shape, k.shape[1:3], v.shape[-1]
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    flat_q, flat_k, flat_v = q.reshape(B * Hq, Sq, D), k.reshape(B * Hkv, Sk, D), v.reshape(B * Hkv, Sk, Dv)
    bias, kept = (None if x is None else x.expand(B, Hq, Sq, Sk) for x in (mask.bias, mask.kept))
    columns = torch.arange(Sk, device=q.device)
    for h, m in _block_slices(B * Hq, Sq, Sk, D + Dv):
        heads = torch.arange(h.start, h.stop, device=q.device)
        kv_index = heads // Hq * Hkv + heads % Hq // (Hq // Hkv)
        qp, kp, vp = flat_q[h, m].to(dtype), flat_k[kv_index].to(dtype), flat_v[kv_index].to(dtype)
        scores = qp @ kp.transpose(1, 2) * scale
        if bias is not None:
            part = bias[heads // Hq, heads % Hq, m]
            scores = scores.masked_fill(~part, -math.inf) if part.dtype == torch.bool else scores + part.to(dtype)
        if mask.causal_mode:
            last = torch.arange(m.start, m.stop, device=q.device) + (Sk - Sq if mask.causal_mode == 2 else 0)
            scores = scores.masked_fill(columns > last[:, None], -math.inf)
        kept_part = None if kept is None else kept[heads // Hq, heads % Hq, m]
        yield _ScoreBlock(h, m, qp, kp, vp, kv_index, scores, kept_part, mask.kept_share)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """Compute the softmax; a row without visible keys becomes zeros, as in torch's _safe_softmax."""
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(blind, 0.0)


@torch.no_grad()
def attention_math(
    q, k, v, *, scale: float | None = None, mask: Masking = Masking(), dtype: torch.dtype = torch.float64
) -> Attention:
    """Compute attention with every step rounded to `dtype`.

    The operands are q (B, Hq, Sq, D), k (B, Hkv, Sk, D) and v (B, Hkv, Sk, Dv).
    """
    B, Hq, Sq, _ = q.shape
    out = torch.zeros(B * Hq, Sq, v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full((B * Hq, Sq), -math.inf, dtype=dtype, device=q.device)
    if k.shape[2]:
        for block in _score_blocks(q, k, v, scale, mask, dtype):
            out[block.h, block.m] = block.drop(_softmax(block.scores)) @ block.v
            lse[block.h, block.m] = block.scores.logsumexp(-1)
    return Attention(out.reshape(B, Hq, Sq, v.shape[-1]), lse.reshape(B, Hq, Sq))


@torch.no_grad()
def grads_math(
    q, k, v, grad_out, *, scale: float | None = None, mask: Masking = Masking(), dtype: torch.dtype = torch.float64
):
    """Return (dq, dk, dv) in `dtype`; dk and dv are summed over the query heads of a KV head in at least fp32."""
    B, Hq, Sq, D = q.shape
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    wide = dtype if dtype == torch.float64 else torch.float32
    dq = torch.zeros(B * Hq, Sq, D, dtype=dtype, device=q.device)
    dk = torch.zeros(B * k.shape[1], *k.shape[2:], dtype=wide, device=q.device)
    dv = torch.zeros(B * v.shape[1], *v.shape[2:], dtype=wide, device=q.device)
    flat_do = grad_out.reshape(B * Hq, Sq, v.shape[-1])
    for block in _score_blocks(q, k, v, scale, mask, dtype):
        do = flat_do[block.h, block.m].to(dtype)
        p = _softmax(block.scores)
        dp = block.drop(do @ block.v.transpose(1, 2))
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dq[block.h, block.m] = ds @ block.k
        dk.index_add_(0, block.kv_index, (ds.transpose(1, 2) @ block.q).to(wide))
        dv.index_add_(0, block.kv_index, (block.drop(p).transpose(1, 2) @ do).to(wide))
    return dq.reshape(q.shape), dk.to(dtype).reshape(k.shape), dv.to(dtype).reshape(v.shape)


@torch.no_grad()
def bias_grad_math(
    q, k, v, grad_out, *, scale: float | None = None, mask: Masking, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return the gradient of `mask.bias` in `dtype`, summed over broadcast dims in at least fp32."""
    Hq, flat_do = q.shape[1], grad_out.reshape(-1, *grad_out.shape[2:])
    b, h, rows, keys = shape = (*(1,) * (4 - mask.bias.dim()), *mask.bias.shape)
    wide = dtype if dtype == torch.float64 else torch.float32
    total = torch.zeros(shape, dtype=wide, device=q.device)
    for block in _score_blocks(q, k, v, scale, mask, dtype):
        dp = block.drop(flat_do[block.h, block.m].to(dtype) @ block.v.transpose(1, 2))
        p = _softmax(block.scores)
        ds = (p * (dp - (p * dp).sum(-1, keepdim=True))).to(wide)
        ds = ds.sum(-1, keepdim=True) if keys == 1 else ds
        ds = ds.sum(-2, keepdim=True) if rows == 1 else ds
        for head, part in zip(range(block.h.start, block.h.stop), ds, strict=True):
            total[head // Hq % b, head % Hq % h, slice(0, 1) if rows == 1 else block.m] += part
    return total.to(dtype).reshape(mask.bias.shape)


def oracle(case, inputs, mask: Masking | None = None) -> Attention:
    """Return the fp64 result of a case."""
    return attention_math(*inputs, scale=case.scale, mask=mask or Masking(int(case.causal)))


def plain(case, inputs, mask: Masking | None = None) -> Attention:
    """Return the result of the formula in the case's own dtype, the measure of a tolerable error.

    The LSE comes from fp32, because kernels keep the LSE in fp32.
    """
    mask = mask or Masking(int(case.causal))
    low = attention_math(*inputs, scale=case.scale, mask=mask, dtype=case.torch_dtype)
    return Attention(low.out, attention_math(*inputs, scale=case.scale, mask=mask, dtype=torch.float32).lse)


def oracle_grads(case, inputs, mask: Masking | None = None):
    return grads_math(*inputs, inputs.grad_out, scale=case.scale, mask=mask or Masking(int(case.causal)))


def plain_grads(case, inputs, mask: Masking | None = None):
    return grads_math(
        *inputs, inputs.grad_out, scale=case.scale, mask=mask or Masking(int(case.causal)), dtype=case.torch_dtype
    )
