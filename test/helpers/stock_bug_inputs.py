"""Tensors with unusual memory layouts and checks of results, for the tests of bugs in stock PyTorch."""

from __future__ import annotations

import math

import torch
from fp64_gradients import NAMES, check_gradients_of_case
from torch import Tensor

from torch_flashplug.testing import Case, Inputs, assert_within_budget, oracle, plain

ORDERS = ("bshd", "bhsd")  # memory layouts


def random_tensor(shape: tuple[int, ...], order: str, seed: int) -> Tensor:
    """Return a random bf16 tensor of shape (B, H, S, D) on the GPU, laid out in `order`."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return with_layout(torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16), order)


def with_layout(tensor: Tensor, order: str) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2) if order == "bshd" else tensor.contiguous()


def assert_matches_fp64(
    label: str, case: Case, inputs: Inputs, out: Tensor | None, grads: tuple[Tensor, ...] = ()
) -> None:
    """Check that output and gradients are within the error budget around fp64."""
    if out is not None:
        assert_within_budget(label + " out", out, oracle(case, inputs).out, plain(case, inputs).out)
    if grads:
        check_gradients_of_case(label, case, inputs, dict(zip(NAMES, grads, strict=True)))


def misaligned(shape: tuple[int, ...], offset: int = 1) -> Tensor:
    """Return a tensor whose base is `offset` elements behind an aligned address."""
    size = math.prod(shape)
    return torch.randn(size + offset, device="cuda").to(torch.bfloat16)[offset:].view(shape)


def random_bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def strides(tensor: Tensor) -> list[int]:
    """Return the strides of dims with more than one element; an empty tensor has no meaningful stride."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1 and tensor.numel() > 0]
