"""Batch-invariant kernels: a sequence has bitwise equal results and gradients alone and in any batch.

Calls have num_splits=1 or fixed_split_size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from torch_flashplug.dispatch import bindings
from torch_flashplug.ops.quantize_reference import in_int8
from torch_flashplug.testing import assert_bitwise_equal

OPS = torch.ops.torch_flashplug
HQ, HKV = 2, 1
CAUSAL, EVERYTHING = (-1, 0, True), (-1, -1, True)


def random_tensor(*sizes: int, seed: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run_on_kernels(call: Callable[[], tuple[Tensor, ...]], directions: int = 1) -> tuple[Tensor, ...]:
    bindings.counters(reset=True)
    results = call()
    counts = bindings.counters(reset=True)
    assert (
        counts["ours_fwd"] == 1 and counts["ours_bwd"] == directions - 1 and not counts["math_fwd"] + counts["math_bwd"]
    )
    return tuple(x.cpu() for x in results)


def forward_and_backward(
    operands: list[Tensor], grads: list[Tensor], lengths: tuple[Tensor | None, ...], window: tuple
) -> tuple:
    """Return output, LSE, and gradients of query, key and value."""
    out, lse = OPS.attention_fwd(*operands, None, *lengths, None, *window, 0.0, None, 1)
    saved_tensors = (*grads, *operands, out, lse, *lengths)
    return out, lse, *OPS.attention_bwd(*saved_tensors, *window, 0.0, None, False, 1)[:3]


# ---- packed sequences ----

OWN_LENGTH = 150
NEIGHBORS = {"alone": ([], []), "short": ([4] * 9, [3] * 30), "long": ([], [400]), "none": ([0, 0], [0]),
          "many": ([1] * 70, [65, 64, 63])}  # fmt: skip


def results_in_batch(before: list[int], after: list[int], device: str, D: int, window: tuple) -> list[Tensor]:
    """Return the results of a middle sequence between sequences with the given numbers of rows."""
    start, rows = sum(before), OWN_LENGTH + sum(before) + sum(after)
    heads = (HQ, HKV, HKV, HQ)
    operands_of_batch = [random_tensor(1, num_heads, rows, D, seed=7 + i) for i, num_heads in enumerate(heads)]
    for i, (x, num_heads) in enumerate(zip(operands_of_batch, heads, strict=True)):
        x[:, :, start : start + OWN_LENGTH] = random_tensor(1, num_heads, OWN_LENGTH, D, seed=100 + i)
    grad_lse = torch.zeros(1, HQ, rows)
    cu = torch.tensor([0, *before, OWN_LENGTH, *after]).cumsum(0).int()
    *operands, grad_out, grad_lse, cu = (x.to(device) for x in (*operands_of_batch, grad_lse, cu))
    results = run_on_kernels(lambda: forward_and_backward(operands, [grad_out, grad_lse], (cu, cu), window), 2)
    return [x[:, :, start : start + OWN_LENGTH] for x in results]


@pytest.mark.parametrize("window", [CAUSAL, (40, 3, True)], ids=str)
@pytest.mark.parametrize("D", [64, 128])
def test_packed_sequence_is_bitwise_equal_in_any_batch(kernels_on: str, D: int, window: tuple) -> None:
    results_by_batch = {name: results_in_batch(*lengths, kernels_on, D, window) for name, lengths in NEIGHBORS.items()}
    for name, results in results_by_batch.items():
        for result, actual, expected in zip(
            ("out", "lse", "dq", "dk", "dv"), results, results_by_batch["alone"], strict=True
        ):
            assert_bitwise_equal(f"{name} {result}", actual, expected)


@pytest.mark.parametrize("window", [CAUSAL, EVERYTHING, (700, 0, True)], ids=str)
def test_packed_sequence_with_more_keys_than_queries_is_bitwise_equal(kernels_on: str, window: tuple) -> None:
    """A tile has rows behind the last row of the sequence, which see different keys than the existing rows."""
    runs, sequence = (
        [],
        [
            random_tensor(1, num_heads, n, 64, seed=i)
            for i, (num_heads, n) in enumerate(((HQ, 80), (HKV, 400), (HKV, 400)))
        ],
    )
    for further_lengths in ([], [(5, 7)], [(200, 3000)]):
        further_tensors = [
            random_tensor(1, x.shape[1], sum(pair[min(i, 1)] for pair in further_lengths), 64, seed=9 + i)
            for i, x in enumerate(sequence)
        ]
        operands = [torch.cat(pair, 2).to(kernels_on) for pair in zip(sequence, further_tensors, strict=True)]
        cu = [
            torch.tensor([0, *n]).cumsum(0).int().to(kernels_on) for n in zip((80, 400), *further_lengths, strict=True)
        ]
        results = run_on_kernels(lambda: OPS.attention_fwd(*operands, None, *cu, None, *window, 0.0, None, 1))  # noqa: B023
        runs.append([x[:, :, :80] for x in results])
    assert_equal_runs(runs)


# ---- batches ----


@pytest.mark.parametrize("rows", [70, 200])
def test_batch_entry_is_bitwise_equal_in_any_batch(kernels_on: str, rows: int) -> None:
    runs = []
    for B in (1, 2, 5):
        operands = [random_tensor(B, num_heads, rows, 64, seed=i) for i, num_heads in enumerate((HQ, HKV, HKV, HQ))]
        for i, x in enumerate(operands):
            x[B // 2] = random_tensor(x.shape[1], rows, 64, seed=50 + i)
        *operands, grad_out = (x.to(kernels_on) for x in operands)
        grads = [grad_out, None]
        results = run_on_kernels(lambda: forward_and_backward(operands, grads, (None, None), CAUSAL), 2)  # noqa: B023
        runs.append([x[B // 2] for x in results])
    for results in runs[1:]:
        for result, actual, expected in zip(("out", "lse", "dq", "dk", "dv"), results, runs[0], strict=True):
            assert_bitwise_equal(result, actual, expected)


# ---- pages ----


@dataclass(frozen=True)
class PagedSettings:
    """Settings of a call with paged KV caches."""

    Sq: int = 8
    window: tuple = CAUSAL
    eight: bool = False
    softcap: float = 0.0
    sinks: Tensor | None = None


def results_in_batches(
    num_keys: int, batches: list[tuple[list[int], int]], settings: PagedSettings, device: str, **splits: int
) -> list[tuple[Tensor, ...]]:  # fmt: skip
    """Return the results of a sequence in several batches, whose lengths and widths of block tables are given.

    The sequence has different page numbers in each batch.
    """
    results, pages = [], -(-num_keys // 16)
    for used, width in batches:
        batch_idx, B = used.index(num_keys), len(used)
        order = torch.randperm(B * width, generator=torch.Generator().manual_seed(B + width)).view(B, width).int()
        pools = [random_tensor(B * width, 16, 64, seed=90 + i).unsqueeze(1) for i in range(2)]
        q = random_tensor(B, HQ, settings.Sq, 64, seed=3)
        q[batch_idx] = random_tensor(HQ, settings.Sq, 64, seed=33)
        for i, pool in enumerate(pools):
            pool[order[batch_idx, :pages].long()] = random_tensor(pages, 1, 16, 64, seed=60 + i)
        scales = [None, None]
        if settings.eight:
            pools, scales = map(list, zip(*(in_int8(x.float()) for x in pools), strict=True))
        operands = (q, *pools, order, torch.tensor(used).int(), *scales, settings.sinks)
        operands = [None if x is None else x.to(device) for x in operands]
        numeric_settings = (*settings.window, settings.softcap, None)
        out, lse = run_on_kernels(lambda: OPS.paged_fwd(*operands, *numeric_settings, **splits))  # noqa: B023
        results.append((out[batch_idx], lse[batch_idx]))
    return results


def assert_equal_runs(runs: list[tuple[Tensor, ...]]) -> None:
    for results in runs[1:]:
        for result, actual, expected in zip(("out", "lse"), results, runs[0], strict=True):
            assert_bitwise_equal(result, actual, expected)


@pytest.mark.parametrize("is_quantized", [False, True], ids=["16", "8"])
@pytest.mark.parametrize("Sq", [1, 5])
@pytest.mark.parametrize("window", [CAUSAL, (50, 0, True)], ids=str)
def test_paged_sequence_is_bitwise_equal_in_any_batch(
    kernels_on: str, Sq: int, is_quantized: bool, window: tuple
) -> None:
    """The remaining sequences are shorter or longer."""
    batches = [([130], 9), ([130], 40), ([3, 130, 0], 9), ([130, 600], 38), ([20] * 9 + [130], 12)]
    assert_equal_runs(
        results_in_batches(130, batches, PagedSettings(Sq, window, is_quantized), kernels_on, num_splits=1)
    )


PAGED_SETTINGS = {  # some rows: two LSEs may be equal in any order of their sums
    "causal": PagedSettings(), "24 rows": PagedSettings(Sq=24), "window": PagedSettings(window=(200, 0, True)),
    "softcap": PagedSettings(softcap=3.0), "sinks": PagedSettings(sinks=torch.tensor([0.5, -1.0])),
    "8 bits": PagedSettings(eight=True),
}  # fmt: skip


@pytest.mark.parametrize("num_keys", [0, 1, 127, 128, 129, 600])
@pytest.mark.parametrize("settings", PAGED_SETTINGS)
def test_paged_sequence_with_fixed_split_size_is_bitwise_equal(kernels_on: str, settings: str, num_keys: int) -> None:
    """Block tables have capacity for as many splits as the sequence needs, for 10, and for 36.

    Numbers of splits that depended on the table would add equal parts in three orders.
    """
    width = max(1, -(-num_keys // 16))
    batches = [
        ([num_keys], width),
        ([num_keys], 80),
        ([num_keys], 288),
        ([5, num_keys, 0], max(width, 9)),
        ([num_keys, 640], 80),
    ]
    assert_equal_runs(results_in_batches(num_keys, batches, PAGED_SETTINGS[settings], kernels_on, fixed_split_size=128))
