"""Masks, biases and dropout where only a GPU shows what happens: CUDA graphs whose masks change between replays,
threads with streams of their own, memory of more than 2^31 elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from threads import all_end
from torch import Tensor

from torch_flashplug import sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.testing import (
    Case,
    Inputs,
    Masking,
    assert_within_budget,
    bias_grad_math,
    make_inputs,
    new_case,
    oracle,
    oracle_grads,
    plain,
    plain_grads,
)
from torch_flashplug.testing.budget import GRAD_FACTOR, assert_dropped_alike, cancelled_sums

pytestmark = pytest.mark.gpu

SEED, GIB = 20261124, 2**30
P = 0.3


def half_hidden(*sizes: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    mask = torch.rand(sizes, generator=generator, device="cuda") < 0.5
    mask[..., 0] = True
    return mask


def padded(*sizes: int, seed: int) -> Tensor:
    """On the left; other blocks are hidden for every seed."""
    first = torch.arange(math.prod(sizes[:-2]), device="cuda").view(*sizes[:-2], 1, 1) * 70 + seed * 150
    return torch.arange(sizes[-1], device="cuda").expand(sizes) >= first % sizes[-1]


def biased(*sizes: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    bias = torch.randn(sizes, generator=generator, device="cuda") * 2
    return bias.masked_fill_(half_hidden(*sizes, seed=seed).logical_not_(), -math.inf).to(dtype)


def assert_right(
    name: str, case: Case, inputs: Inputs, mask: Tensor, out: Tensor, grads: Sequence[Tensor] = ()
) -> None:
    """Against fp64's. grads: of query, key and value, or none."""
    rule = Masking(bias=mask.detach())
    exact, low = (of(case, inputs, rule) for of in (oracle, plain))
    assert_within_budget(name, out, exact.out, low.out, seed=SEED)
    if not grads:
        return
    cancelled = cancelled_sums(*inputs, inputs.grad_out, case.scale)
    right, yardstick = (of(case, inputs, rule) for of in (oracle_grads, plain_grads))
    for which, got, *two in zip(("dq", "dk", "dv"), grads, right, yardstick, strict=True):
        budget = {"factor": GRAD_FACTOR, "cancelled": float(cancelled[which])}
        assert_within_budget(f"{name} {which}", got, *two, **budget, seed=SEED)


# ---- graphs ----

# What a mask holds, by seed: sizes as Sq and Sk are.
KINDS: dict[str, Callable[[int, int, int], Tensor]] = {
    "bool": lambda Sq, Sk, seed: half_hidden(2, 1, Sq, Sk, seed=seed),
    "padding": lambda Sq, Sk, seed: padded(2, 1, 1, Sk, seed=seed),
    "by_head": lambda Sq, Sk, seed: padded(2, 4, Sq, Sk, seed=seed),
    "bias": lambda Sq, Sk, seed: biased(4, Sq, Sk, seed=seed, dtype=torch.bfloat16),
    "bias_fp32": lambda Sq, Sk, seed: biased(2, 1, Sq, Sk, seed=seed, dtype=torch.float32),
    "bias_keys": lambda Sq, Sk, seed: biased(2, 1, 1, Sk, seed=seed, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(1, 1000), (5, 1024), (300, 333), (256, 512)])
@pytest.mark.parametrize("grad", [False, True])
def test_a_replay_reads_the_mask_of_now(kind: str, sizes: tuple[int, int], grad: bool) -> None:
    case = new_case(f"{kind} {sizes}", (2, 4, 2), sizes, (64, 64))
    held, mask = make_inputs(case, "cuda", SEED), KINDS[kind](*sizes, 0)
    wanted = [held.q, held.k, held.v] if grad else []
    for tensor in wanted:
        tensor.requires_grad_()

    def call() -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(held.q, held.k, held.v, mask, enable_gqa=True)
        return (out, *(torch.autograd.grad(out, wanted, held.grad_out) if grad else ()))

    with sdpa_backend("fa3"):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        bindings.counters(reset=True)
        with torch.cuda.graph(graph):
            results = call()
    assert bindings.counters()["ours_fwd"] == 1 and bindings.counters()["ours_bwd"] == grad
    for seed in (1, 2, 3):
        now, rule = make_inputs(case, "cuda", SEED + seed), KINDS[kind](*sizes, seed)
        with torch.no_grad():
            for old, new in zip((*held, held.grad_out, mask), (*now, now.grad_out, rule), strict=True):
                old.copy_(new)
            for result in results:
                result.fill_(math.nan)
        graph.replay()
        assert_right(f"{case.name} {seed}", case, now, rule, *results[:1], results[1:])


def test_a_replay_of_dropout_beside_a_bias_draws_anew() -> None:
    """And the backward drops what its forward did."""
    case = new_case("dropped", (2, 4, 4), (256, 384), (64, 64))
    held, bias = make_inputs(case, "cuda", SEED), biased(4, 256, 384, seed=0, dtype=torch.bfloat16)
    held.v.requires_grad_(), bias.requires_grad_()

    def call() -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(held.q, held.k, held.v, bias, dropout_p=P)
        return (out, *torch.autograd.grad(out, [held.v, bias], held.grad_out))

    with sdpa_backend("fa3"):
        for _ in range(2):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, dv, dbias = call()
    seen = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        seen.append(out.detach().clone())
        assert dbias.isfinite().all()
        assert_dropped_alike(out, held.grad_out, dv, held.v)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


# ---- threads ----


def test_threads_on_streams_of_their_own() -> None:
    """Masks, biases with gradients, dropout, all at once; nobody's scratch, mask or bits are another's."""
    errors: list[str] = []

    def work(number: int) -> None:
        kind, sizes = list(KINDS)[number % len(KINDS)], ((300, 333), (1, 1000), (129, 257))[number % 3]
        case = new_case(f"thread {number} {kind}", (2, 4, 2), sizes, (64, 64))
        inputs, mask = make_inputs(case, "cuda", SEED + number), KINDS[kind](*sizes, number)
        leaves = [tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream), sdpa_backend("fa3"):
                first = None
                for _ in range(30):
                    out = F.scaled_dot_product_attention(*leaves, mask, enable_gqa=True)
                    found = torch.autograd.grad(out, leaves, inputs.grad_out)
                    first = first or (out.detach(), *found)
                    assert torch.equal(out, first[0]), "another output"
                    assert torch.equal(found[1], first[2]) and torch.equal(found[2], first[3]), "another dK or dV"
                    dropped = F.scaled_dot_product_attention(*leaves, mask, enable_gqa=True, dropout_p=P)
                    (dv,) = torch.autograd.grad(dropped, leaves[2:], inputs.grad_out)
                    assert_dropped_alike(dropped, inputs.grad_out, dv, inputs.v)
                assert_right(case.name, case, inputs, mask, first[0], first[1:])
        except Exception as error:
            errors.append(f"{number} {kind}: {type(error).__name__}: {error}")

    all_end(work, 12)
    assert not errors, "\n".join(errors)


# ---- more than 2^31 elements ----

LARGE = new_case("over_2g", (1, 33, 33), (8192, 8000), (64, 64))
ONE = new_case("one head of it", (1, 1, 1), (8192, 8000), (64, 64))
HEADS = (0, 16, 32)


@pytest.fixture
def room() -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < 40 * GIB:
        pytest.skip(f"{free / GIB:.0f} GiB free, needs 40")


def one_head(tensor: Tensor, head: int) -> Tensor:
    return tensor.detach()[:, head : head + 1]


def head_of(inputs: Inputs, head: int) -> Inputs:
    return Inputs(*(one_head(tensor, head) for tensor in (*inputs, inputs.grad_out)))


@pytest.mark.parametrize("wide", [False, True], ids=["16", "fp32"])
def test_a_bias_of_more_than_2g_elements(room: None, wide: bool) -> None:
    """Its own gradient, too, where it has a kernel."""
    inputs, dtype = make_inputs(LARGE, "cuda", SEED), torch.float32 if wide else LARGE.torch_dtype
    sizes = (1, LARGE.Hq, LARGE.Sq, LARGE.Sk)
    bias = torch.empty(sizes, dtype=dtype, device="cuda").normal_().requires_grad_()
    assert bias.numel() > 2**31
    leaves = [tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    bindings.counters(reset=True)
    with sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(*leaves, bias)
        *grads, dbias = torch.autograd.grad(out, [*leaves, bias], inputs.grad_out)
    assert bindings.counters()["ours_fwd"] == bindings.counters()["ours_bwd"] == 1
    for head in HEADS:
        few, rule = head_of(inputs, head), Masking(bias=bias.detach()[:, head : head + 1])
        of_head = (one_head(tensor, head) for tensor in (out, *grads))
        assert_right(f"head {head}", ONE, few, rule.bias, next(of_head), tuple(of_head))
        of_bias = [
            bias_grad_math(few.q, few.k, few.v, few.grad_out, scale=ONE.scale, mask=rule, dtype=number)
            for number in (torch.float64, ONE.torch_dtype)
        ]
        assert_within_budget(f"head {head} dbias", one_head(dbias, head), *of_bias, factor=GRAD_FACTOR, seed=SEED)


@pytest.mark.parametrize("grad", [False, True])
def test_a_mask_of_more_than_2g_elements(room: None, grad: bool) -> None:
    inputs, mask = make_inputs(LARGE, "cuda", SEED), half_hidden(1, LARGE.Hq, LARGE.Sq, LARGE.Sk, seed=SEED)
    assert mask.numel() > 2**31
    leaves = [tensor.requires_grad_(grad) for tensor in (inputs.q, inputs.k, inputs.v)]
    bindings.counters(reset=True)
    with sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(*leaves, mask)
        grads = torch.autograd.grad(out, leaves, inputs.grad_out) if grad else ()
    assert bindings.counters()["ours_fwd"] == 1
    for head in HEADS:
        of_head = (one_head(tensor, head) for tensor in (out, *grads))
        assert_right(f"head {head}", ONE, head_of(inputs, head), one_head(mask, head), next(of_head), tuple(of_head))
