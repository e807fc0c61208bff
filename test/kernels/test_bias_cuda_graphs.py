"""Calls with float masks in replayed CUDA graphs and on two streams at once.

Aligned rows, rows that begin at any element, and masks of one tile alternate, so that state left behind by a call shows
in the next call.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from cuda_graphs import call_on_side_stream
from torch import Tensor

import torch_flashplug
from torch_flashplug.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu
# Sizes of q (B, H, S, D), and planes (B, H) of the mask.
CALLS = {
    "aligned": ((2, 4, 256, 64), (2, 4)),
    "any_element": ((2, 4, 251, 64), (1, 4)),
    "one_tile": ((96, 3, 49, 32), (1, 3)),
    "wide_heads": ((1, 2, 130, 128), (1, 1)),
}
ROUNDS = 8


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms, so that equal inputs give equal bits."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random_inputs(call: str, seed: int) -> list[Tensor]:
    """Draw q, k, v, the mask and the gradient of the output."""
    sizes, planes = CALLS[call]
    torch.manual_seed(seed)
    shapes = [sizes] * 3 + [(*planes, sizes[2], sizes[2]), sizes]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def run_forward_and_backward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    """Return the output and all four gradients."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, mask)]
    with torch_flashplug.sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(*leaves[:3], attn_mask=leaves[3])
    return (out.detach(), *torch.autograd.grad(out, leaves, grad_out))


def assert_equal_results(call: str, results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, actual_tensor, expected_tensor in zip(("out", "dq", "dk", "dv", "dmask"), results, expected, strict=True):
        assert expected_tensor.isfinite().all()
        assert_bitwise_equal(f"{call}: {name}", actual_tensor, expected_tensor)


def test_biased_calls_alternate_in_one_cuda_graph() -> None:
    """New inputs are copied into the captured memory before each replay."""
    inputs_of_calls = {call: random_inputs(call, 0) for call in CALLS}
    call_on_side_stream(lambda: [run_forward_and_backward(*inputs) for inputs in inputs_of_calls.values()], 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [(call, run_forward_and_backward(*inputs_of_calls[call])) for call in (*CALLS, *reversed(CALLS))]
    for seed in range(1, 4):
        for call, inputs in inputs_of_calls.items():
            torch._foreach_copy_(inputs, random_inputs(call, seed))
        expected = {call: run_forward_and_backward(*inputs) for call, inputs in inputs_of_calls.items()}
        graph.replay()
        for call, results in outputs:
            assert_equal_results(call, results, expected[call])


def test_biased_calls_run_on_two_streams() -> None:
    """Two streams run equal calls in opposite orders at the same time."""
    inputs = {(call, seed): random_inputs(call, seed) for call in CALLS for seed in range(ROUNDS)}
    expected = {key: run_forward_and_backward(*tensors) for key, tensors in inputs.items()}
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs: list[tuple[str, int, tuple[Tensor, ...]]] = []
    for pair in zip(inputs, reversed(inputs), strict=True):
        for stream, key in zip(streams, pair, strict=True):
            with torch.cuda.stream(stream):
                outputs.append((*key, run_forward_and_backward(*inputs[key])))
    torch.cuda.synchronize()
    for call, seed, results in outputs:
        assert_equal_results(call, results, expected[call, seed])
