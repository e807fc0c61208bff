"""Calls with float masks in replayed CUDA graphs and on two streams at once: aligned rows, rows that begin at any
element, and masks of one tile take turns, so state that one call leaves behind shows in the next.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_flashplug
from torch_flashplug.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu
# Sizes of q (B, H, S, D), and of the planes (B, H) of the mask.
CALLS = {
    "aligned": ((2, 4, 256, 64), (2, 4)),
    "any_element": ((2, 4, 251, 64), (1, 4)),
    "one_tile": ((96, 3, 49, 32), (1, 3)),
    "wide_heads": ((1, 2, 130, 128), (1, 1)),
}
ROUNDS = 8


@pytest.fixture(autouse=True)
def in_one_order() -> Iterator[None]:
    """Make gradients add up in one order, so that equal inputs give equal bits."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def drawn(call: str, seed: int) -> list[Tensor]:
    """Draw q, k, v, the mask and the gradient of the output."""
    sizes, planes = CALLS[call]
    torch.manual_seed(seed)
    shapes = [sizes] * 3 + [(*planes, sizes[2], sizes[2]), sizes]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def trained(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    """Return the output and all four gradients."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, mask)]
    with torch_flashplug.sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(*leaves[:3], attn_mask=leaves[3])
    return (out.detach(), *torch.autograd.grad(out, leaves, grad_out))


def check(call: str, found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for name, got, want in zip(("out", "dq", "dk", "dv", "dmask"), found, right, strict=True):
        assert want.isfinite().all()
        assert_bitwise_equal(f"{call}: {name}", got, want)


def test_calls_take_turns_in_one_graph() -> None:
    """Each replay is given new numbers in the same memory."""
    held = {call: drawn(call, 0) for call in CALLS}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in (*CALLS, *CALLS):
            trained(*held[call])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [(call, trained(*held[call])) for call in (*CALLS, *reversed(CALLS))]
    for seed in range(1, 4):
        for call, inputs in held.items():
            torch._foreach_copy_(inputs, drawn(call, seed))
        right = {call: trained(*inputs) for call, inputs in held.items()}
        graph.replay()
        for call, results in found:
            check(call, results, right[call])


def test_calls_on_two_streams() -> None:
    """The same calls in two orders, at the same time."""
    inputs = {(call, seed): drawn(call, seed) for call in CALLS for seed in range(ROUNDS)}
    right = {key: trained(*given) for key, given in inputs.items()}
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found: list[tuple[str, int, tuple[Tensor, ...]]] = []
    for pair in zip(inputs, reversed(inputs), strict=True):
        for stream, key in zip(streams, pair, strict=True):
            with torch.cuda.stream(stream):
                found.append((*key, trained(*inputs[key])))
    torch.cuda.synchronize()
    for call, seed, results in found:
        check(call, results, right[call, seed])
