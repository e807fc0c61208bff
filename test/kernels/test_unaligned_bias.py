"""Float masks with rows that begin at any element, on a GPU or interpreted: results and gradients against fp64.

NaN surrounds the rows. Further tests check that nothing is copied.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from masked_calls import HEADS, SEED, bias_dtype, check_decode, check_gradients, random_bias, run_with_references
from torch import Tensor

import torch_flashplug
from torch_flashplug.registry.dtypes import ELEMENTS_16BIT
from torch_flashplug.testing import Case, assert_within_budget, make_inputs, new_case

# Keys, row pitch in elements, elements before the first row.
ANY_ROWS = {
    **{"pairs": (250, 250, 0), "odd": (251, 251, 0), "odd_address": (251, 251, 1), "windows": (49, 49, 0)},
    **{"gaps": (65, 70, 5), "units": (64, 72, 0), "units_behind_one": (128, 128, 3), "one_key": (1, 1, 0)},
}
PLANES = {"both": (2, 4), "heads": (1, 4), "batches": (2, 1), "one": (1, 1)}


def bias_among_nans(planes: tuple[int, ...], Sq: int, rows: str, device: str, dtype: torch.dtype) -> Tensor:
    """Return a bias with the memory layout of an `ANY_ROWS` entry, with NaN around and between its rows."""
    keys, pitch, offset = ANY_ROWS[rows]
    sizes, number = (*planes, Sq, keys), math.prod(planes) * Sq * pitch
    memory = torch.full((offset + number,), math.nan, dtype=dtype, device=device)
    bias = memory.as_strided(sizes, (planes[1] * Sq * pitch, Sq * pitch, pitch, 1), offset)
    return bias.copy_(random_bias(*sizes))


def copies_a_tensor(case: Case, bias: Tensor, device: str) -> bool:
    """Return True if a forward and a backward with the bias copy a tensor."""
    inputs = make_inputs(case, device, SEED)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    with (
        torch_flashplug.sdpa_backend("fa3"),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        out = F.scaled_dot_product_attention(*leaves, attn_mask=bias, enable_gqa=True)
        torch.autograd.grad(out, leaves, inputs.grad_out)
    return "aten::copy_" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("wide", [False, True], ids=["16", "fp32"])
@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("rows", ANY_ROWS)
def test_unaligned_bias_rows_are_read_in_place(kernels_on: str, rows: str, planes: str, wide: bool) -> None:
    """Forwards and backwards read such rows in place: they copy nothing, and use no element around the rows."""
    d, Sq = (64, 128)[len(rows + planes) % 2], (70, 129)[len(planes) % 2]
    case = new_case(f"{rows} {planes} {d}", HEADS, (Sq, ANY_ROWS[rows][0]), (d, d), dtype=ELEMENTS_16BIT[len(rows) % 2])
    bias = bias_among_nans(PLANES[planes], Sq, rows, kernels_on, bias_dtype(case, wide))
    assert not copies_a_tensor(case, bias, kernels_on)
    assert_within_budget(case.name, *run_with_references(case, bias, kernels_on), seed=SEED)
    check_gradients(case, bias, kernels_on)


ONE_ROW = {  # keys, row pitch in elements; True if rows are read in place
    "units": (120, 120, True), "cut_off": (250, 256, True), "few": (5, 8, True), "odd": (77, 77, False),
}  # fmt: skip


@pytest.mark.parametrize("wide", [False, True], ids=["16", "fp32"])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("row", ONE_ROW)
def test_bias_row_broadcast_over_queries(kernels_on: str, row: str, heads: int, wide: bool) -> None:
    """Such padding masks have one row per batch entry or head, read in place if rows begin at multiples of 16 bytes."""
    keys, pitch, in_place = ONE_ROW[row]
    d, Sq, number = (64, 128)[heads % 2], (70, 129)[keys % 2], list(ONE_ROW).index(row)
    case = new_case(f"{row} {heads} {d}", HEADS, (Sq, keys), (d, d), dtype=ELEMENTS_16BIT[(number + wide) % 2])
    memory = torch.full((2, heads, 1, pitch), math.nan, dtype=bias_dtype(case, wide), device=kernels_on)
    bias = memory[..., :keys].copy_(random_bias(2, heads, 1, keys))
    assert copies_a_tensor(case, bias, kernels_on) != in_place
    assert_within_budget(case.name, *run_with_references(case, bias, kernels_on), seed=SEED)
    check_gradients(case, bias, kernels_on)


@pytest.mark.parametrize("dims", [(192, 128), (256, 256)])
@pytest.mark.parametrize("rows", ["pairs", "odd_address", "gaps"])
def test_unaligned_bias_rows_with_wide_head_dims(kernels_on: str, rows: str, dims: tuple[int, int]) -> None:
    case = new_case(f"{rows} {dims}", HEADS, (129, ANY_ROWS[rows][0]), dims)
    bias = bias_among_nans((1, 4), 129, rows, kernels_on, bias_dtype(case, len(rows) % 2 == 0))
    assert_within_budget(case.name, *run_with_references(case, bias, kernels_on), seed=SEED)
    check_gradients(case, bias, kernels_on)


@pytest.mark.parametrize("wide", [False, True], ids=["16", "fp32"])
@pytest.mark.parametrize("Sq", [1, 7, 32])
@pytest.mark.parametrize("rows", ANY_ROWS)
def test_unaligned_bias_rows_in_decode(kernels_on: str, rows: str, Sq: int, wide: bool) -> None:
    """Decode kernels serve the calls."""
    case = new_case(f"{rows} {Sq}", HEADS, (Sq, ANY_ROWS[rows][0]), (64, 64), dtype=ELEMENTS_16BIT[Sq % 2])
    bias = bias_among_nans((2, 4), Sq, rows, kernels_on, bias_dtype(case, wide))
    check_decode(case, make_inputs(case, kernels_on, SEED), bias)
