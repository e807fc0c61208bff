"""Fused backward of 96 keys on Hopper, for D 192 and (192, 128): gradients against fp64, plans and budgets.

No GPU has run the kernels, so rows of the dispatch table choose the split backward. Tests push the table without these
rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import interpreted_kernels
import pytest
import torch
import torch.nn.functional as F
from forced_splits import plan_of_forced_call
from fp64_gradients import NAMES, check_gradients_of_case

import torch_flashplug
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table, kernel_table, stock_bugs
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import Case, make_inputs, new_case

SEED = 20261129
SPECS = [spec for spec in kernel_table.specs(90, "bwd") if spec.is_backward_of_96_keys]
CASES = (
    new_case("two_blocks_of_keys", (1, 2, 2), (150, 130), (192, 128)),
    new_case("one_key", (1, 1, 1), (70, 1), (192, 128)),
    new_case("keys_that_no_query_sees", (2, 2, 2), (66, 333), (192, 128), "causal"),
    new_case("queries_behind_the_last_key", (1, 4, 2), (333, 200), (192, 128), "causal"),
    new_case("group_visited_together", (1, 6, 2), (260, 260), (192, 128), "causal"),
    new_case("tiles_share_heads", (1, 12, 1), (130, 200), (192, 128), "causal"),
    new_case("columns_filled_up", (1, 3, 1), (97, 100), (136, 120)),
    new_case("equal_dims", (1, 2, 1), (140, 200), (192, 192), "causal"),
    new_case("equal_dims_full", (1, 2, 1), (66, 97), (160, 160)),
)
# The dQ writers clear and write the workspace of heads beyond the first heads of a launch.
MANY_HEADS = new_case("more_heads_than_the_first", (1, 40, 40), (66, 300), (192, 128))


@contextlib.contextmanager
def timed_rows_only() -> Iterator[None]:
    choices = [row for row in dispatch_table.CHOICE_ROWS if row not in dispatch_table.UNTIMED_ROWS]
    bindings.push_rows(kernel_table.KERNEL_ROWS, choices, dispatch_table.COST_MODEL, stock_bugs.STOCK_BUGS)
    try:
        yield
    finally:
        startup.push_tables()


@pytest.fixture
def fused() -> Iterator[None]:
    with timed_rows_only():
        yield


def gradients(case: Case, device: str, runs: int = 1) -> list[tuple[torch.Tensor, ...]]:
    """Return the gradients of several backwards of a call by forced kernels."""
    inputs = make_inputs(case, device, SEED, requires_grad=True)
    with torch_flashplug.sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(*inputs, **case.sdpa_kwargs())
    leaves = inputs.q, inputs.k, inputs.v
    return [torch.autograd.grad(out, leaves, inputs.grad_out, retain_graph=True) for _ in range(runs)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_match_fp64(kernels_on: str, fused: None, case: Case) -> None:
    plan = plan_of_forced_call(case, grad=1)
    assert KernelSpec.from_name(plan["gradients"]) in SPECS
    assert plan["sharing"] > 1 or case.name != "tiles_share_heads"
    bindings.counters(reset=True)
    (grads,) = gradients(case, kernels_on)
    assert bindings.counters()["ours_bwd"] == 1
    check_gradients_of_case(case.name, case, make_inputs(case, kernels_on, SEED), dict(zip(NAMES, grads, strict=True)))


def test_dq_of_later_heads_is_written_by_idle_warps(kernels_on: str, fused: None) -> None:
    """A second call with the same workspace finds sums of the first call there."""
    inputs = make_inputs(MANY_HEADS, kernels_on, SEED)
    for grads in gradients(MANY_HEADS, kernels_on, runs=2):
        check_gradients_of_case(MANY_HEADS.name, MANY_HEADS, inputs, dict(zip(NAMES, grads, strict=True)))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_orders_of_independent_operations_do_not_matter(fused: None, order: int) -> None:
    """Each order delays copies, products and warps differently. dK and dV keep their bits."""
    case = CASES[4]
    results = []
    for seed in (0, order):
        with interpreted_kernels.enabled(seed), timed_rows_only():
            results.append(gradients(case, "cpu")[0])
    for name, first, second in zip(NAMES[1:], results[0][1:], results[1][1:], strict=True):
        assert torch.equal(first, second), name


# ---- without kernels: plans and budgets ----


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_untimed_kernels_are_not_chosen(case: Case) -> None:
    assert plan_of_forced_call(case, grad=1)["gradients"].startswith("partbwd")


@pytest.mark.parametrize("facts", [{"deterministic": 1}, {"batch_invariant": 1}])
def test_calls_in_a_fixed_order_keep_the_split_backward(fused: None, facts: dict[str, int]) -> None:
    assert plan_of_forced_call(CASES[0], grad=1, **facts)["gradients"].startswith("partbwd")


def test_every_kernel_is_reached_by_a_case(fused: None) -> None:
    assert {plan_of_forced_call(case, grad=1)["gradients"] for case in CASES} == {spec.name() for spec in SPECS}


def test_budgets_follow_the_buffers_and_accumulators() -> None:
    """K, V, two stages of Q and dO with row statistics, P, two stages of dS, dQ on the way out, mbarriers."""
    sizes = {(spec.d, spec.dv): spec for spec in SPECS}
    assert set(sizes) == {(192, 128), (192, 192)}
    for (d, dv), spec in sizes.items():
        operands = 96 * 2 * (d + dv) + 2 * 64 * (2 * (d + dv) + 8) + 3 * 96 * 64 * 2
        units = 2 * spec.dq_writer_units * 16 * d // 2 * 4
        assert spec.smem_bytes() == operands + units + 2 * 16 * d // 2 * 2 + 1024
        assert spec.accumulator_registers() == 192 * 96 // 128 + 48 + 24  # dK; dP or dQ; dS in 16 bits
