"""Backward of sequences with at most a tile of rows and keys, through F.sdpa, on a GPU or interpreted.

Each gradient is compared with fp64 and is bitwise equal in every run. Further tests check the selection of these
kernels.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from forced_splits import plan_of_forced_call
from fp64_gradients import NAMES, check_gradients_of_case
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import (
    Case,
    Masking,
    assert_bitwise_equal,
    assert_within_budget,
    bias_grad_math,
    make_inputs,
    new_case,
)
from torch_flashplug.testing.budget import GRAD_FACTOR, cancelled_bias_sums

SEED = 20261127
SPECS = kernel_table.specs(90, "tilebwd")
SIZES = ((49, 49), (64, 64), (1, 5), (17, 64), (64, 3), (33, 50))
FACTS = {"grad": 1, "bias": 1, "bias_grad": 1}
# Dims of (B, Hq, Sq, Sk) in which a bias is not broadcast. The last two forms have one number for all keys, or for all
# queries.
FORMS = {"whole": "bhqk", "of_heads": "hqk", "of_batch": "bqk", "for_all": "qk", "rows": "bhq", "keys": "bk"}


def random_bias(case: Case, dims: str, dtype: torch.dtype, device: str) -> Tensor:
    """Return a bias that masks out some scores, and all keys of row 11."""
    sizes = [size if dim in dims else 1 for dim, size in zip("bhqk", (case.B, case.Hq, case.Sq, case.Sk), strict=True)]
    generator = torch.Generator().manual_seed(SEED)
    bias = torch.randn(sizes, generator=generator) * 2
    if "k" in dims:
        bias[torch.rand(sizes, generator=generator) < 0.1] = -math.inf
        bias[..., -1] = 0.5
    if sizes[2] > 11:
        bias[..., 11, :] = -math.inf
    return bias.to(device, dtype)


def run_twice(case: Case, bias: Tensor, device: str, *, bias_grad: bool) -> list[Tensor]:
    """Return dq, dk, dv and optionally dbias of a forced call, after checking that two runs give equal bits."""
    inputs = make_inputs(case, device, SEED)
    leaves = [tensor.requires_grad_() for tensor in (*inputs, *((bias,) if bias_grad else ()))]
    runs = []
    for _ in range(2):
        bindings.counters(reset=True)
        with torch_flashplug.sdpa_backend("fa3"):
            out = F.scaled_dot_product_attention(*inputs, attn_mask=bias, scale=case.scale)
            runs.append(torch.autograd.grad(out, leaves, inputs.grad_out))
        assert bindings.counters()["ours_bwd"] == 1
    for name, actual, expected in zip((*NAMES, "dbias"), runs[1], runs[0], strict=False):
        assert_bitwise_equal(f"{case.name} {name}", actual, expected)
    return list(runs[0])


def check_gradients(case: Case, dims: str, dtype: torch.dtype, device: str, *, bias_grad: bool = True) -> None:
    bias = random_bias(case, dims, dtype, device)
    grads = run_twice(case, bias, device, bias_grad=bias_grad)
    inputs, masking = make_inputs(case, device, SEED), Masking(bias=bias.detach())
    grads_by_name = dict(zip(NAMES, grads[:3], strict=True))
    check_gradients_of_case(f"{case.name} {dims}", case, inputs, grads_by_name, masking, seed=SEED)
    if not bias_grad:
        return
    expected, yardstick = (
        bias_grad_math(*inputs, inputs.grad_out, scale=case.scale, mask=masking, dtype=number)
        for number in (torch.float64, case.torch_dtype)
    )
    budget = {"factor": GRAD_FACTOR, "cancelled": float(cancelled_bias_sums(inputs.v, inputs.grad_out, bias))}
    assert_within_budget(f"{case.name} {dims} dbias", grads[3], expected, yardstick, **budget, seed=SEED)
    assert grads[3].stride() == torch.empty_like(bias).stride()


def bias_dtype(spec: KernelSpec, case: Case) -> torch.dtype:
    return torch.float32 if "bias32" in spec.features else case.torch_dtype


@pytest.mark.parametrize("dims", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.name)
def test_gradients_of_each_bias_shape(kernels_on: str, spec: KernelSpec, dims: str) -> None:
    case = new_case(f"{spec.name()}", (5, 3, 3), (49, 49), (spec.d, spec.d), dtype=spec.dtype)
    check_gradients(case, dims, bias_dtype(spec, case), kernels_on)


@pytest.mark.parametrize("bias_grad", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.name)
def test_single_tile_gradients_of_different_lengths(
    kernels_on: str, spec: KernelSpec, sizes: tuple[int, int], bias_grad: bool
) -> None:
    case = new_case(f"{spec.name()} {sizes}", (3, 2, 2), sizes, (spec.d, spec.d), dtype=spec.dtype)
    check_gradients(case, "hqk", bias_dtype(spec, case), kernels_on, bias_grad=bias_grad)


@pytest.mark.parametrize("d", [8, 24, 40, 56])
def test_gradients_with_narrow_head_dims(kernels_on: str, d: int) -> None:
    check_gradients(new_case(f"narrow {d}", (2, 2, 2), (49, 49), (d, d)), "hqk", torch.bfloat16, kernels_on)


@pytest.mark.parametrize("dims", [(24, 64), (64, 16), (32, 40)])
def test_gradients_with_a_different_value_head_dim(kernels_on: str, dims: tuple[int, int]) -> None:
    case = new_case(f"dims {dims}", (3, 2, 2), (49, 60), dims)
    assert plan_of_forced_call(case, backend="fa3", **FACTS)["gradients"].startswith("tilebwd")
    check_gradients(case, "hqk", torch.bfloat16, kernels_on)


@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_gradients_with_different_softmax_scales(kernels_on: str, scale: float) -> None:
    check_gradients(
        new_case(f"scale {scale}", (2, 2, 2), (49, 49), (32, 32), scale=scale), "qk", torch.bfloat16, kernels_on
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "heads"), [(1000, 6), (4096, 3), (2, 700), (1, 2000)])
@pytest.mark.parametrize("dims", ["hqk", "bqk"])
def test_gradients_of_large_batches_and_many_heads(batch: int, heads: int, dims: str) -> None:
    """Ranges of the batch are long, or there are more heads than concurrent CTAs."""
    case = new_case(f"{batch} of {heads}", (batch, heads, heads), (49, 49), (32, 32), dtype="fp16")
    check_gradients(case, dims, torch.float16, "cuda")


@pytest.mark.parametrize(
    ("heads", "sizes", "d", "facts", "is_selected"),
    [
        ((64, 3, 3), (49, 49), 32, FACTS, True),
        ((64, 3, 3), (64, 64), 64, FACTS, True),
        ((64, 3, 3), (65, 64), 64, FACTS, False),
        ((64, 3, 3), (64, 65), 64, FACTS, False),
        ((64, 4, 2), (49, 49), 32, FACTS, False),
        ((64, 3, 3), (49, 49), 96, FACTS, False),
        ((64, 3, 3), (49, 49), 32, {**FACTS, "batch_invariant": 1}, False),
        ((64, 3, 3), (49, 49), 32, {**FACTS, "dropout": 1, "dropout_p": 0.1}, False),
    ],
)
def test_plan_selects_the_single_tile_backward_for_small_calls(
    heads: tuple[int, int, int], sizes: tuple[int, int], d: int, facts: dict[str, float], is_selected: bool
) -> None:
    case = new_case("planned", heads, sizes, (d, d))
    gradients_by = plan_of_forced_call(case, backend="fa3", **facts)["gradients"]
    assert gradients_by.startswith("tilebwd_sm90_bf16_") == is_selected
    assert "and dbias" not in gradients_by or not is_selected
