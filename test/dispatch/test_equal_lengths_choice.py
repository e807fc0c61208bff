"""Dense kernels ahead of packed sequences, for the case that all lengths are equal. No GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from golden_plans import Call, call

import torch_flashplug
from torch_flashplug.api import startup
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table, kernel_table

TOKENS = 16384
ALL = 1 << 20  # a window bound beyond all keys


def packed_call(sequences: int, D: int = 128, *, rows: int = TOKENS, keys: int = TOKENS, **facts: float) -> Call:
    facts = {"window": 1, "ragged": 1, "left": ALL, "right": 0, "bottom_right": 1, "sequences": sequences} | facts
    return call((1, 2048 // D, 2048 // D), (rows, keys), (D, D), **facts)


def note(problem: Call) -> str:
    with torch_flashplug.sdpa_backend("fa3"):
        return bindings.plan(problem, DEVICES["h100"], bindings.effective_mode())["note"]


@pytest.mark.parametrize(
    ("problem", "kernels"),
    [
        (packed_call(32), "fwd_sm90_bf16_d128_causal+equal_m128n128s2"),
        (packed_call(1), "fwd_sm90_bf16_d128_causal+equal_m128n160s2"),
        (packed_call(2, right=ALL), "fwd_sm90_bf16_d128_equal_m128n176s2"),
        (packed_call(8, 64, right=ALL), "fwd_sm90_bf16_d64_equal_m192n128s2"),
        # Gradients choose between the fused backward and the backward in parts as dense calls do: by the length.
        (
            packed_call(32, grad=1),
            "fwd_sm90_bf16_d128_causal+equal_m128n128s2 and partbwd_sm90_bf16_d128_causal+equal_m64n64s2",
        ),
        (
            packed_call(8, grad=1),
            "fwd_sm90_bf16_d128_causal+equal_m128n128s2 and bwd_sm90_bf16_d128_causal+equal_m64n128s2",
        ),
        (
            packed_call(32, grad=1, right=ALL),
            "fwd_sm90_bf16_d128_equal_m128n128s2 and bwd_sm90_bf16_d128_equal_m64n128s2",
        ),
    ],
)
def test_note_names_the_dense_kernels(problem: Call, kernels: str) -> None:
    least = dispatch_table.COST_MODEL.min_equal_rows
    limits = replace(dispatch_table.COST_MODEL, min_equal_rows_of_gradients=least)
    bindings.push_rows(kernel_table.KERNEL_ROWS, dispatch_table.CHOICE_ROWS, limits)
    try:
        assert note(problem).endswith(f"computed as a dense batch, by {kernels}.")
    finally:
        startup.push_tables()


def test_gradients_have_no_dense_kernel_by_default() -> None:
    assert note(packed_call(8, grad=1)).endswith("by fwd_sm90_bf16_d128_causal+equal_m128n128s2.")


@pytest.mark.parametrize(
    "problem",
    [
        packed_call(31),  # 16384 is no multiple
        packed_call(32, rows=TOKENS - 1),
        packed_call(32, keys=TOKENS // 2),  # causal, bottom right, with fewer keys than rows
        packed_call(32, left=300),
        packed_call(32, right=5),
        packed_call(32, softcap=30.0),
        packed_call(32, batch_invariant=1),
        packed_call(TOKENS // 128),  # short sequences: the kernel of packed sequences is faster
        packed_call(8, rows=2048, keys=2048),  # a short call, for which a launch in vain would count
        packed_call(8, 80),  # only dense kernels with more padding
    ],
    ids=["number", "rows", "keys", "left", "right", "softcap", "invariant", "short", "small", "d80"],
)
def test_calls_without_a_dense_kernel(problem: Call) -> None:
    assert not note(problem)


def test_unequal_numbers_of_rows_and_keys() -> None:
    """The first query of each sequence sees the first key, so the dense causal mask is the same."""
    problem = packed_call(32, keys=TOKENS // 2, bottom_right=0)
    assert "(512 rows, 256 keys)" in note(problem) and "causal+equal" in note(problem)
    assert "(512 rows, 256 keys)" in note(packed_call(32, keys=TOKENS // 2, right=ALL))


def test_explain_attention_prints_the_note() -> None:
    q, k, v = (torch.empty(TOKENS, 16, 128, dtype=torch.bfloat16, device="meta") for _ in range(3))
    cu_seqlens = torch.empty(33, dtype=torch.int32, device="meta")
    plan = torch_flashplug.explain_attention(q, k, v, causal=True, cu_seqlens_q=cu_seqlens, device="h100")
    assert plan.kernel == "fwd_sm90_bf16_d128_window+ragged_m128n128s2"
    assert "If all lengths are equal (512 rows, 512 keys)" in str(plan)


def test_limits_are_those_of_the_table() -> None:
    least = dispatch_table.COST_MODEL.min_equal_rows
    assert note(packed_call(TOKENS // least)) and not note(packed_call(TOKENS // (least // 2)))
