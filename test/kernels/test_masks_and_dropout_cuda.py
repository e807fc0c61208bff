"""Masks, biases and dropout, for behavior visible only on a GPU.

CUDA graphs with masks that change between replays, threads on separate streams, and tensors of more than 2^31 elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from cuda_graphs import call_on_side_stream
from fp64_gradients import NAMES, check_gradients_of_case
from threads import run_threads
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
    plain,
)
from torch_flashplug.testing.budget import GRAD_FACTOR, assert_dropped_alike

pytestmark = pytest.mark.gpu

SEED, GIB = 20261124, 2**30
P = 0.3


def random_mask(*sizes: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    mask = torch.rand(sizes, generator=generator, device="cuda") < 0.5
    mask[..., 0] = True
    return mask


def left_padded_mask(*sizes: int, seed: int) -> Tensor:
    """Return a mask with padding on the left; each seed masks out different blocks."""
    first = torch.arange(math.prod(sizes[:-2]), device="cuda").view(*sizes[:-2], 1, 1) * 70 + seed * 150
    return torch.arange(sizes[-1], device="cuda").expand(sizes) >= first % sizes[-1]


def random_bias(*sizes: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    bias = torch.randn(sizes, generator=generator, device="cuda") * 2
    return bias.masked_fill_(random_mask(*sizes, seed=seed).logical_not_(), -math.inf).to(dtype)


def assert_near_fp64(
    case_name: str, case: Case, inputs: Inputs, mask: Tensor, out: Tensor, grads: Sequence[Tensor] = ()
) -> None:
    """Compare with fp64; `grads` are the gradients of query, key and value, or empty."""
    rule = Masking(bias=mask.detach())
    exact, low = (function(case, inputs, rule) for function in (oracle, plain))
    assert_within_budget(case_name, out, exact.out, low.out, seed=SEED)
    if not grads:
        return
    check_gradients_of_case(case_name, case, inputs, dict(zip(NAMES, grads, strict=True)), rule, seed=SEED)


# ---- graphs ----

# Mask contents by seed, for sizes Sq and Sk.
KINDS: dict[str, Callable[[int, int, int], Tensor]] = {
    "bool": lambda Sq, Sk, seed: random_mask(2, 1, Sq, Sk, seed=seed),
    "padding": lambda Sq, Sk, seed: left_padded_mask(2, 1, 1, Sk, seed=seed),
    "by_head": lambda Sq, Sk, seed: left_padded_mask(2, 4, Sq, Sk, seed=seed),
    "bias": lambda Sq, Sk, seed: random_bias(4, Sq, Sk, seed=seed, dtype=torch.bfloat16),
    "bias_fp32": lambda Sq, Sk, seed: random_bias(2, 1, Sq, Sk, seed=seed, dtype=torch.float32),
    "bias_keys": lambda Sq, Sk, seed: random_bias(2, 1, 1, Sk, seed=seed, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(1, 1000), (5, 1024), (300, 333), (256, 512)])
@pytest.mark.parametrize("grad", [False, True])
def test_graph_replay_reads_the_current_mask(kind: str, sizes: tuple[int, int], grad: bool) -> None:
    case = new_case(f"{kind} {sizes}", (2, 4, 2), sizes, (64, 64))
    buffers, mask = make_inputs(case, "cuda", SEED), KINDS[kind](*sizes, 0)
    leaves = [buffers.q, buffers.k, buffers.v] if grad else []
    for tensor in leaves:
        tensor.requires_grad_()

    def call() -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(buffers.q, buffers.k, buffers.v, mask, enable_gqa=True)
        return (out, *(torch.autograd.grad(out, leaves, buffers.grad_out) if grad else ()))

    with sdpa_backend("fa3"):
        call_on_side_stream(call, 2)
        graph = torch.cuda.CUDAGraph()
        bindings.counters(reset=True)
        with torch.cuda.graph(graph):
            results = call()
    assert bindings.counters()["ours_fwd"] == 1 and bindings.counters()["ours_bwd"] == grad
    for seed in (1, 2, 3):
        current, rule = make_inputs(case, "cuda", SEED + seed), KINDS[kind](*sizes, seed)
        with torch.no_grad():
            for old, new in zip((*buffers, buffers.grad_out, mask), (*current, current.grad_out, rule), strict=True):
                old.copy_(new)
            for result in results:
                result.fill_(math.nan)
        graph.replay()
        assert_near_fp64(f"{case.name} {seed}", case, current, rule, *results[:1], results[1:])


def test_graph_replay_of_dropout_with_a_bias_draws_new_bits() -> None:
    """The backward must use the dropout mask of the forward in each replay."""
    case = new_case("dropped", (2, 4, 4), (256, 384), (64, 64))
    buffers, bias = make_inputs(case, "cuda", SEED), random_bias(4, 256, 384, seed=0, dtype=torch.bfloat16)
    buffers.v.requires_grad_(), bias.requires_grad_()

    def call() -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(buffers.q, buffers.k, buffers.v, bias, dropout_p=P)
        return (out, *torch.autograd.grad(out, [buffers.v, bias], buffers.grad_out))

    with sdpa_backend("fa3"):
        for _ in range(2):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, dv, dbias = call()
    outs = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        outs.append(out.detach().clone())
        assert dbias.isfinite().all()
        assert_dropped_alike(out, buffers.grad_out, dv, buffers.v)
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])


# ---- threads ----


def test_threads_on_separate_streams() -> None:
    """Run masks, biases with gradients, and dropout concurrently.

    Threads must not share workspaces, masks or dropout bits.
    """
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
                    grads = torch.autograd.grad(out, leaves, inputs.grad_out)
                    first = first or (out.detach(), *grads)
                    assert torch.equal(out, first[0]), "another output"
                    assert torch.equal(grads[1], first[2]) and torch.equal(grads[2], first[3]), "another dK or dV"
                    dropped = F.scaled_dot_product_attention(*leaves, mask, enable_gqa=True, dropout_p=P)
                    (dv,) = torch.autograd.grad(dropped, leaves[2:], inputs.grad_out)
                    assert_dropped_alike(dropped, inputs.grad_out, dv, inputs.v)
                assert_near_fp64(case.name, case, inputs, mask, first[0], first[1:])
        except Exception as error:
            errors.append(f"{number} {kind}: {type(error).__name__}: {error}")

    run_threads(work, 12)
    assert not errors, "\n".join(errors)


# ---- more than 2^31 elements ----

LARGE = new_case("over_2g", (1, 33, 33), (8192, 8000), (64, 64))
ONE_HEAD = new_case("one head of it", (1, 1, 1), (8192, 8000), (64, 64))
HEADS = (0, 16, 32)


@pytest.fixture
def enough_memory() -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < 40 * GIB:
        pytest.skip(f"{free / GIB:.0f} GiB free, needs 40")


def slice_head(tensor: Tensor, head: int) -> Tensor:
    return tensor.detach()[:, head : head + 1]


def select_head(inputs: Inputs, head: int) -> Inputs:
    return Inputs(*(slice_head(tensor, head) for tensor in (*inputs, inputs.grad_out)))


@pytest.mark.parametrize("wide", [False, True], ids=["16", "fp32"])
def test_a_bias_of_more_than_2g_elements(enough_memory: None, wide: bool) -> None:
    """Compute the gradient of the bias too, if the kernel exists for the bias."""
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
        head_inputs, rule = select_head(inputs, head), Masking(bias=bias.detach()[:, head : head + 1])
        head_results = (slice_head(tensor, head) for tensor in (out, *grads))
        assert_near_fp64(f"head {head}", ONE_HEAD, head_inputs, rule.bias, next(head_results), tuple(head_results))
        bias_grads = [
            bias_grad_math(
                head_inputs.q,
                head_inputs.k,
                head_inputs.v,
                head_inputs.grad_out,
                scale=ONE_HEAD.scale,
                mask=rule,
                dtype=number,
            )
            for number in (torch.float64, ONE_HEAD.torch_dtype)
        ]
        assert_within_budget(f"head {head} dbias", slice_head(dbias, head), *bias_grads, factor=GRAD_FACTOR, seed=SEED)


@pytest.mark.parametrize("grad", [False, True])
def test_a_mask_of_more_than_2g_elements(enough_memory: None, grad: bool) -> None:
    inputs, mask = make_inputs(LARGE, "cuda", SEED), random_mask(1, LARGE.Hq, LARGE.Sq, LARGE.Sk, seed=SEED)
    assert mask.numel() > 2**31
    leaves = [tensor.requires_grad_(grad) for tensor in (inputs.q, inputs.k, inputs.v)]
    bindings.counters(reset=True)
    with sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(*leaves, mask)
        grads = torch.autograd.grad(out, leaves, inputs.grad_out) if grad else ()
    assert bindings.counters()["ours_fwd"] == 1
    for head in HEADS:
        head_results = (slice_head(tensor, head) for tensor in (out, *grads))
        assert_near_fp64(
            f"head {head}",
            ONE_HEAD,
            select_head(inputs, head),
            slice_head(mask, head),
            next(head_results),
            tuple(head_results),
        )
