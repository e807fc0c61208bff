"""Calls with more than 65535 batches or heads, and gradients of biases shared by many small windows, on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_flashplug.dispatch import bindings

pytestmark = pytest.mark.gpu
MANY = [(70000, 2, 16, 64), (1, 70000, 16, 64), (140000, 1, 16, 40)]
MOST_MEMORY = 2.2  # relative to the memory of inputs and outputs


def reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bias: Tensor | None, mask: Tensor | None) -> list[Tensor]:
    """Return the output and the gradients of q, k, v and the bias, in fp64."""
    leaves = [None if x is None else x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    scores = leaves[0] @ leaves[1].mT * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + leaves[3]
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    out = scores.softmax(-1).nan_to_num() @ leaves[2]
    out.backward(grad.double())
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


def error_of(tensor: Tensor, expected: Tensor) -> float:
    return ((tensor.double() - expected).norm() / expected.norm()).item()


def last_part(tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Return the last 64 batches or heads, which a short grid would leave out."""
    if tensor is None:
        return None
    dim = 0 if shape[0] > shape[1] else 1
    return tensor if tensor.shape[dim] == 1 else tensor.narrow(dim, shape[dim] - 64, 64)


@pytest.mark.parametrize("kind", ["plain", "mask", "bias", "dropout"])
@pytest.mark.parametrize("shape", MANY)
def test_calls_beyond_65535_batches_or_heads_run_on_kernels(shape: tuple[int, ...], kind: str) -> None:
    batches, heads, length, _ = shape
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    grad = torch.randn_like(q)
    mask = torch.rand(batches, heads, length, length, device="cuda") > 0.4 if kind == "mask" else None
    bias = torch.randn(batches, 1, length, length, device="cuda", dtype=q.dtype) if kind == "bias" else None
    bindings.counters(reset=True)
    torch.cuda.reset_peak_memory_stats()

    out = F.scaled_dot_product_attention(
        q, k, v, bias if mask is None else mask, dropout_p=0.1 if kind == "dropout" else 0.0
    )
    out.backward(grad)

    peak = torch.cuda.max_memory_allocated()
    counters = bindings.counters()
    assert counters["ours_fwd"] == counters["ours_bwd"] == 1
    tensors = [x for x in (q, k, v, out, grad, q.grad, k.grad, v.grad, mask, bias) if x is not None]
    assert peak < MOST_MEMORY * sum(x.nbytes for x in tensors)
    if kind == "dropout":
        assert all(x.isfinite().all() for x in (out, q.grad, k.grad, v.grad))
        return
    expected = reference(*(last_part(x, shape) for x in (q, k, v, grad, bias, mask)))
    for tensor, expected_out in zip((out, q.grad, k.grad, v.grad), expected):
        assert error_of(last_part(tensor, shape), expected_out) < 1e-2


@pytest.mark.parametrize("bias_shape", [(1, 3, 49, 49), (1, 1, 49, 49), (1, 1, 1, 49), (1, 3, 1, 49)])
@pytest.mark.parametrize("batches", [97, 1024])
def test_gradient_of_a_shared_bias_is_deterministic(batches: int, bias_shape: tuple[int, ...]) -> None:
    """The batch is split over CTAs; 97 batches leave a shorter last range."""
    q, k, v = (torch.randn(batches, 3, 49, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bias = torch.randn(bias_shape, device="cuda", dtype=q.dtype, requires_grad=True)
    grad = torch.randn_like(q)

    def gradient() -> Tensor:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, bias), bias, grad)[0]

    first = gradient()

    assert error_of(first, reference(q, k, v, grad, bias, None)[4]) < 1e-2
    assert all(torch.equal(gradient(), first) for _ in range(5))
