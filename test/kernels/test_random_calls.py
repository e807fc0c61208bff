"""Random calls of attention()'s ops, by kernels of ours on a GPU or interpreted, against mathematics in fp64: lengths,
windows, softcaps, sinks, splits, plans, layouts, scales and head dims that no other test puts together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from orders import in_order
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings

SEED, CALLS = 20261125, 10  # of a test
OP = torch.ops.torch_flashplug.attention_fwd
MATH = torch.ops.torch_flashplug._attention_math_fwd
LISTS = torch.ops.torch_flashplug._plan_lists
# Relative, root mean square; gradients beside a thousandth of each element's size, since some sums cancel, and those of
# sinks are few.
NEAR = {torch.bfloat16: (8e-3, 3e-2), torch.float16: (1.5e-3, 1e-2)}
FEW = 5e-2
LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129)
SPLITS = ((0, 0), (0, 0), (1, 0), (0, 128))  # num_splits, fixed_split_size
BOUNDS = ((-1, -1), (-1, 0), (0, 0), (17, 0), (128, 0), (40, 40), (-1, 33), (70, -1))


@dataclass(frozen=True)
class Drawn:
    tensors: tuple[Tensor, Tensor, Tensor]  # q, k, v (B, H, S, D)
    sinks: Tensor | None
    lengths: tuple[Tensor | None, Tensor | None, Tensor | None]  # cu_q, cu_k, used_k
    settings: tuple[int, int, bool, float, float | None, int, int]  # window, softcap, scale, splits
    gradients: bool
    in_order: bool
    backend: str
    planned: str  # lists made ahead: "both", "forward", or "" for none


def laid_out(draw: random.Random, x: Tensor) -> Tensor:
    """As it is, rows before heads, or with NaN between rows."""
    kind = draw.randrange(3)
    if kind == 1:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == 2:
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), torch.nan, dtype=x.dtype)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]
    return x


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def drawn(seed: int) -> Drawn:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    softcap, D = draw.choice((0.0, 0.0, 5.0, 30.0)), draw.choice((8, 40, 64, 80, 128, 192, 256))
    Dv, Hkv = D if draw.random() < 0.8 else draw.choice((64, 128)), draw.choice((1, 2))
    Hq, B, used = Hkv * draw.choice((1, 2, 3)), draw.choice((1, 2)), None
    lengths: tuple[Tensor | None, ...] = (None, None, None)
    if draw.random() < 0.5:
        rows, keys = ([draw.choice((*LENGTHS, draw.randint(1, 200))) for _ in range(5)] for _ in range(2))
        used = torch.tensor([draw.randint(0, n + 2) for n in keys]).int() if draw.random() < 0.3 else None
        B, Sq, Sk = 1, sum(rows) + draw.choice((1, 70)), sum(keys) + draw.choice((1, 5))
        lengths = (starts(rows), starts(keys), used)
    else:
        Sq, Sk = draw.randint(1, 300), draw.randint(1, 300)
    dtype = draw.choice((*NEAR,))
    sizes = ((B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv))
    tensors = tuple(laid_out(draw, torch.randn(size, generator=generator).to(dtype)) for size in sizes)
    sinks = torch.randn(Hq, generator=generator) * 3 if draw.random() < 0.5 else None
    settings = (*draw.choice(BOUNDS), draw.random() < 0.7, softcap, draw.choice((None, None, 0.3, -0.2)))
    gradients = used is None and draw.random() < 0.6
    is_in_order, backend = draw.random() < 0.3, draw.choice(("fa3", "fa3", "fa2"))
    planned = "" if lengths[0] is None else draw.choice(("", "both", "forward"))
    settings = (*settings, *draw.choice(SPLITS))
    return Drawn(tensors, sinks, lengths, settings, gradients, is_in_order, backend, planned)


def run(call: Drawn, op, device: str, dtype: torch.dtype | None = None, planned: str = "") -> list[Tensor]:  # noqa: ANN001
    """Output, LSE and gradients."""
    leaves = [x.detach().to(device, dtype or x.dtype) for x in call.tensors]
    sinks = None if call.sinks is None else call.sinks.to(device, dtype or torch.float32)
    leaves += [] if sinks is None else [sinks]
    leaves = [x.requires_grad_(call.gradients) for x in leaves]
    lengths = [None if x is None else x.to(device) for x in call.lengths]
    with torch.no_grad():
        plan = LISTS(*leaves[:3], *lengths, *call.settings, planned == "both") if planned else ()
    bindings.counters(reset=True)
    out, lse = op(*leaves[:3], sinks, *lengths, *call.settings, *plan)
    if not call.gradients:
        return [out, lse]
    grads = (torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).to(x) for i, x in enumerate((out, lse)))
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, tuple(grads))]


@pytest.mark.parametrize("tenth", range(12))
def test_random_calls(kernels_on: str, tenth: int) -> None:
    for seed in range(SEED + CALLS * tenth, SEED + CALLS * (tenth + 1)):
        call = drawn(seed)
        with torch_flashplug.sdpa_backend(call.backend), in_order(call.in_order):
            found = [x.cpu().double() for x in run(call, OP, kernels_on, planned=call.planned)]
        counts = bindings.counters(reset=True)
        assert counts["ours_fwd"] == 1 and counts["ours_bwd"] == call.gradients, (seed, counts)
        with torch_flashplug.sdpa_backend("math"):
            exact = run(call, OP if call.gradients else MATH, "cpu", torch.float64)
        (out, lse, *grads), (right, of_rows, *wanted) = found, exact
        near, near_grads = NEAR[call.tensors[0].dtype]
        assert float((out - right).norm()) <= near * float(right.norm()) + 1e-9, seed
        seen = of_rows.isfinite()
        assert torch.equal(lse.isfinite(), seen) and out.isfinite().all(), seed
        assert not seen.any() or float((lse - of_rows)[seen].abs().max()) < 2e-3, seed
        for i, (got, one) in enumerate(zip(grads, wanted, strict=True)):
            size = float(one.norm()) + 1e-3 * one.numel() ** 0.5
            assert float((got - one).norm()) <= (near_grads if i < 3 else FEW) * size, (seed, i)
