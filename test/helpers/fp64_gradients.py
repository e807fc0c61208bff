"""Comparison of gradients with fp64, for calls with sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from torch_flashplug.testing import assert_within_budget
from torch_flashplug.testing.budget import GRAD_FACTOR, assert_of_sinks, cancelled_sums


class ExactResults(Protocol):
    """Reference results of a call, in fp64."""

    out: Tensor
    lse: Tensor
    grads: Mapping[str, Tensor]


def check_gradients(
    label: str, grads: Mapping[str, Tensor], exact: ExactResults, low: Mapping[str, Tensor], operands: Sequence[Tensor],
    sinks: Tensor | None,
) -> None:  # fmt: skip
    """Check that each gradient is within the error budget.

    Args:
        label: name of the call in error messages.
        grads: gradients of our kernels by name (dq, dk, dv, dsinks).
        exact: the fp64 reference.
        low: gradients of plain torch by name.
        operands: q, k, v and dO.
        sinks: the sinks of the call, if there are any.
    """
    cancelled = cancelled_sums(*operands, None)
    for name, grad in grads.items():
        if name == "dsinks":
            shares = torch.exp(sinks.double().view(-1, 1) - exact.lse)
            assert_of_sinks(label, grad.cpu(), exact.grads[name], shares, exact.out, operands[-1])
            continue
        budget = {"factor": GRAD_FACTOR, "cancelled": float(cancelled[name])}
        assert_within_budget(f"{label} {name}", grad.cpu(), exact.grads[name], low[name], **budget)
