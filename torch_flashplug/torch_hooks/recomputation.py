"""Small backward to show C++ where libtorch stores the numbers of an evaluated node (src/core/block_mode.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..dispatch.library import lib


class _Probe(torch.autograd.Function):
    """Autograd node with a backward that passes the node's own number to learn_node()."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        lib().flashplug_learn_node(ctx._sequence_nr())
        return grad


def run_probe() -> None:
    """Run a backward on the CPU, possibly inside the evaluation of a different node or under foreign dispatch modes."""
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), requires_grad=True)
        torch.autograd.grad(_Probe.apply(x), x)
