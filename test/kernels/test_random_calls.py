"""Random calls of attention()'s ops by our kernels, on a GPU or interpreted, against fp64 math.

The calls combine lengths, windows, softcaps, sinks, splits, plans, layouts, scales and head dims in ways covered by no
further test.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from deterministic import deterministic_gradients
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings

SEED, CALLS = 20261125, 10  # calls of a test
OP = torch.ops.torch_flashplug.attention_fwd
MATH = torch.ops.torch_flashplug._attention_math_fwd
LISTS = torch.ops.torch_flashplug._plan_lists
# Relative errors, root mean square. For gradients, a thousandth of the size of each element is allowed in addition,
# since some sums cancel. Sinks have few gradients.
NEAR = {torch.bfloat16: (8e-3, 3e-2), torch.float16: (1.5e-3, 1e-2)}
SINK_TOLERANCE = 5e-2
LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129)
SPLITS = ((0, 0), (0, 0), (1, 0), (0, 128))  # num_splits, fixed_split_size
BOUNDS = ((-1, -1), (-1, 0), (0, 0), (17, 0), (128, 0), (40, 40), (-1, 33), (70, -1))


@dataclass(frozen=True)
class RandomCall:
    tensors: tuple[Tensor, Tensor, Tensor]  # q, k, v (B, H, S, D)
    sinks: Tensor | None
    lengths: tuple[Tensor | None, Tensor | None, Tensor | None]  # cu_seqlens_q, cu_seqlens_k, seqused_k
    settings: tuple[int, int, bool, float, float | None, int, int]  # window, softcap, scale, splits
    gradients: bool
    in_order: bool
    backend: str
    planned: str  # lists made ahead: "both", "forward", or "" for none


def with_random_layout(rng: random.Random, x: Tensor) -> Tensor:
    """Return the tensor unchanged, with rows before heads, or with NaN between rows."""
    kind = rng.randrange(3)
    if kind == 1:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == 2:
        padded = torch.full((*x.shape[:-1], x.shape[-1] + 8), torch.nan, dtype=x.dtype)
        padded[..., : x.shape[-1]] = x
        return padded[..., : x.shape[-1]]
    return x


def cu_seqlens_from(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make_random_call(seed: int) -> RandomCall:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    softcap, D = rng.choice((0.0, 0.0, 5.0, 30.0)), rng.choice((8, 40, 64, 80, 128, 192, 256))
    Dv, Hkv = D if rng.random() < 0.8 else rng.choice((64, 128)), rng.choice((1, 2))
    Hq, B, used = Hkv * rng.choice((1, 2, 3)), rng.choice((1, 2)), None
    lengths: tuple[Tensor | None, ...] = (None, None, None)
    if rng.random() < 0.5:
        rows, keys = ([rng.choice((*LENGTHS, rng.randint(1, 200))) for _ in range(5)] for _ in range(2))
        used = torch.tensor([rng.randint(0, n + 2) for n in keys]).int() if rng.random() < 0.3 else None
        B, Sq, Sk = 1, sum(rows) + rng.choice((1, 70)), sum(keys) + rng.choice((1, 5))
        lengths = (cu_seqlens_from(rows), cu_seqlens_from(keys), used)
    else:
        Sq, Sk = rng.randint(1, 300), rng.randint(1, 300)
    dtype = rng.choice((*NEAR,))
    sizes = ((B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv))
    tensors = tuple(with_random_layout(rng, torch.randn(size, generator=generator).to(dtype)) for size in sizes)
    sinks = torch.randn(Hq, generator=generator) * 3 if rng.random() < 0.5 else None
    settings = (*rng.choice(BOUNDS), rng.random() < 0.7, softcap, rng.choice((None, None, 0.3, -0.2)))
    gradients = used is None and rng.random() < 0.6
    is_in_order, backend = rng.random() < 0.3, rng.choice(("fa3", "fa3", "fa2"))
    planned = "" if lengths[0] is None else rng.choice(("", "both", "forward"))
    settings = (*settings, *rng.choice(SPLITS))
    return RandomCall(tensors, sinks, lengths, settings, gradients, is_in_order, backend, planned)


def run_op(call: RandomCall, op, device: str, dtype: torch.dtype | None = None, planned: str = "") -> list[Tensor]:  # noqa: ANN001
    """Return output, LSE and gradients."""
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
def test_random_attention_calls_match_fp64(kernels_on: str, tenth: int) -> None:
    for seed in range(SEED + CALLS * tenth, SEED + CALLS * (tenth + 1)):
        call = make_random_call(seed)
        with torch_flashplug.sdpa_backend(call.backend), deterministic_gradients(call.in_order):
            results = [x.cpu().double() for x in run_op(call, OP, kernels_on, planned=call.planned)]
        counts = bindings.counters(reset=True)
        assert counts["ours_fwd"] == 1 and counts["ours_bwd"] == call.gradients, (seed, counts)
        with torch_flashplug.sdpa_backend("math"):
            exact = run_op(call, OP if call.gradients else MATH, "cpu", torch.float64)
        (out, lse, *grads), (expected_out, expected_lse, *expected_grads) = results, exact
        tolerance, grad_tolerance = NEAR[call.tensors[0].dtype]
        assert float((out - expected_out).norm()) <= tolerance * float(expected_out.norm()) + 1e-9, seed
        is_visible = expected_lse.isfinite()
        assert torch.equal(lse.isfinite(), is_visible) and out.isfinite().all(), seed
        assert not is_visible.any() or float((lse - expected_lse)[is_visible].abs().max()) < 2e-3, seed
        for i, (grad, expected_grad) in enumerate(zip(grads, expected_grads, strict=True)):
            size = float(expected_grad.norm()) + 1e-3 * expected_grad.numel() ** 0.5
            assert float((grad - expected_grad).norm()) <= (grad_tolerance if i < 3 else SINK_TOLERANCE) * size, (
                seed,
                i,
            )
