"""Comparison of gradients with fp64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_flashplug.testing import Case, Inputs, Masking, assert_within_budget, oracle_grads, plain_grads
from torch_flashplug.testing.budget import GRAD_FACTOR, assert_of_sinks, cancelled_sums

NAMES = ("dq", "dk", "dv")


def check_gradients_of_case(
    label: str,
    case: Case,
    inputs: Inputs,
    grads: Mapping[str, Tensor],
    masking: Masking | None = None,
    *,
    cancelled: Mapping[str, float] | None = None,
    seed: int = 0,
) -> None:
    """Check that the gradients of a call of F.sdpa are within the error budget.

    Args:
        label: name of the call in error messages.
        case: sizes and scale of the call.
        inputs: q, k, v and dO.
        grads: gradients of our kernels by name (dq, dk, dv); names may be left out.
        masking: mask and dropout of the call; by default, those of the case.
        cancelled: magnitudes of cancelled fp32 sums by name, if different from `cancelled_sums`.
        seed: seed of the inputs, for error messages.
    """
    exact, low = (
        dict(zip(NAMES, reference(case, inputs, masking), strict=True)) for reference in (oracle_grads, plain_grads)
    )
    if cancelled is None:
        cancelled = cancelled_sums(*inputs, inputs.grad_out, case.scale)
    for name, grad in grads.items():
        budget = {"factor": GRAD_FACTOR, "cancelled": float(cancelled[name])}
        assert_within_budget(f"{label} {name}", grad, exact[name], low[name], **budget, seed=seed)


@dataclass(frozen=True)
class Results:
    """Results of a call, with gradients by name (dq, dk, dv, dsinks)."""

    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor]


def check_gradients(
    label: str, grads: Mapping[str, Tensor], exact: Results, low: Mapping[str, Tensor], operands: Sequence[Tensor],
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
