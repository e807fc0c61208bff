"""Tensors in many memory layouts, and checks against the right results, for the tests of stock's faults."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_flashplug.testing import Case, Inputs, assert_within_budget, oracle, oracle_grads, plain, plain_grads
from torch_flashplug.testing.budget import GRAD_FACTOR, cancelled_sums

ORDERS = ("bshd", "bhsd")  # memory orders


def drawn(shape: tuple[int, ...], order: str, seed: int) -> Tensor:
    """Return a random tensor (B, H, S, D) on the GPU, in the memory order `order`."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return laid_out(torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16), order)


def laid_out(tensor: Tensor, order: str) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2) if order == "bshd" else tensor.contiguous()


def check(label: str, case: Case, inputs: Inputs, out: Tensor | None, grads: tuple[Tensor, ...] = ()) -> None:
    """Check that results are within the project's error budget against fp64."""
    if out is not None:
        assert_within_budget(label + " out", out, oracle(case, inputs).out, plain(case, inputs).out)
    if grads:
        cancelled = cancelled_sums(*inputs, inputs.grad_out, case.scale)
        answers = zip(cancelled, grads, oracle_grads(case, inputs), plain_grads(case, inputs), strict=True)
        for name, got, exact, low in answers:
            budget = {"factor": GRAD_FACTOR, "cancelled": float(cancelled[name])}
            assert_within_budget(f"{label} {name}", got, exact, low, **budget)


def odd(shape: tuple[int, ...], offset: int = 1) -> Tensor:
    """Return a view with a base address of `offset` elements after an aligned address."""
    size = math.prod(shape)
    return torch.randn(size + offset, device="cuda").to(torch.bfloat16)[offset:].view(shape)


def half(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def strides(tensor: Tensor) -> list[int]:
    """Return the strides of all dims with more than one element. An empty tensor has no such strides."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1 and tensor.numel() > 0]
