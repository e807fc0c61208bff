"""Plans of paged calls with balanced splits. No GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from golden_plans import Call, call

from torch_flashplug.api import startup
from torch_flashplug.api.backend import BACKENDS, DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table, kernel_table

LIMIT = 512
SLOTS = 2 * DEVICES["h100"]["sm_count"]  # two CTAs of the kernels fit on an SM


@pytest.fixture
def limit() -> Iterator[int]:
    """Return the largest number of sequences with balanced splits."""
    cost_model = replace(dispatch_table.COST_MODEL, max_balanced_sequences=LIMIT)
    bindings.push_rows(kernel_table.KERNEL_ROWS, dispatch_table.CHOICE_ROWS, cost_model)
    yield LIMIT
    startup.push_tables()


def paged_call(B: int, keys: int = 9008, D: int = 128, heads: tuple[int, int] = (32, 8), **facts: float) -> Call:
    window = {"window": 1, "left": 1 << 20, "right": 0, "bottom_right": 1}
    return call((B, *heads), (1, keys), (D, D), paged=1, **(window | facts))


def plan(problem: Call, num_splits: int = 0) -> dict:
    mode = BACKENDS.index("fa2") | num_splits << 8
    return bindings.plan(problem, DEVICES["h100"], mode)


@pytest.mark.parametrize(
    ("problem", "items"),
    [
        (paged_call(17), 17 + 3 * SLOTS // 8),
        (paged_call(2, 1024), 2 + 3 * SLOTS // 8),
        (paged_call(LIMIT), LIMIT + 3 * SLOTS // 8),
        (paged_call(17, D=64, heads=(64, 1)), 17 + 3 * SLOTS),
    ],
)
def test_items_do_not_depend_on_the_width_of_the_block_table(limit: int, problem: Call, items: int) -> None:
    for keys in (problem["Sk"], 2 * problem["Sk"]):
        plan_of_call = plan({**problem, "Sk": keys})
        assert "balanced" in plan_of_call["kernel"] and (plan_of_call["splits"], plan_of_call["cluster"]) == (items, 1)


def test_explain_names_balanced_splits(limit: int) -> None:
    assert "balanced splits, 116 for all sequences, or 1 for each sequence if lengths are even, 928 CTAs" in str(
        plan(paged_call(17))
    )


@pytest.mark.parametrize(
    ("problem", "num_splits"),
    [
        (paged_call(1), 0),
        (paged_call(LIMIT + 1), 0),
        (paged_call(17), 1),
        (paged_call(17), 4),
        (paged_call(17, batch_invariant=1), 0),
        (paged_call(17, batch_invariant=1, split_size=4096), 0),
        (paged_call(17, D=256), 0),
        (paged_call(17, 1 << 28), 0),
    ],
    ids=[
        "one sequence",
        "many sequences",
        "one split",
        "4 splits",
        "batch-invariant",
        "split size",
        "D 256",
        "2^31 keys",
    ],
)
def test_calls_with_equal_splits(limit: int, problem: Call, num_splits: int) -> None:
    assert "balanced" not in plan(problem, num_splits)["kernel"]


def test_no_call_is_balanced_by_default() -> None:
    plan_of_call = plan(paged_call(17))
    assert "paged" in plan_of_call["kernel"] and "balanced" not in plan_of_call["kernel"]
