"""Head dims above 256: forwards, gradients and decodes on Hopper, against fp64, by F.sdpa and the op of attention().

Each of two forward tiles has half of the columns of V and O. A decode has two warpgroups with half of the columns each.
The backward has a kernel for each of dQ, dK and dV, and two warpgroups with a part of the columns each. Windows, packed
sequences and masks of the same kernels are in the tests of each feature.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from forced_splits import plan_of_forced_call
from fp64_gradients import NAMES, check_gradients_of_case
from golden_plans import call
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_flashplug
from torch_flashplug.api.attention_args import has_kernel
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.dtypes import ELEMENTS_16BIT
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import (
    WIDE_CASES,
    WIDE_GRADIENT_CASES,
    assert_bitwise_equal,
    assert_lse,
    assert_within_budget,
    case_named,
    make_inputs,
    oracle,
    plain,
)

SEED = 20261129
WIDE = (1, 8, 8), (512, 512), (512, 512)
H100, FA3 = DEVICES["h100"], torch_flashplug.sdpa_backend("fa3").mode


@pytest.mark.parametrize("dtype", ELEMENTS_16BIT)
@pytest.mark.parametrize("name", [case.name for case in WIDE_CASES])
def test_output_and_lse_of_wide_heads(kernels_on: str, name: str, dtype: str) -> None:
    """Each column tile writes half of the output, and the first column tile writes the LSE."""
    case = case_named(name).with_dtype(dtype)
    inputs = make_inputs(case, kernels_on, SEED)
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend("fa3"), torch.no_grad():
        out = F.scaled_dot_product_attention(*inputs, **case.sdpa_kwargs())
        again, lse, *_ = torch.ops.torch_flashplug.sdpa_fwd(*inputs, None, 0.0, int(case.causal), case.scale, FA3)
    assert bindings.counters(reset=True)["ours_fwd"] == 2
    exact, low = oracle(case, inputs), plain(case, inputs)
    assert_within_budget(f"{name} {dtype} out", out, exact.out, low.out, seed=SEED)
    assert_lse(f"{name} {dtype}", lse, exact.lse, low.lse, seed=SEED)
    assert torch.equal(out, again)


def test_columns_without_a_value_stay_untouched(kernels_on: str) -> None:
    """V and O have 264 of 320 columns. The rest of the second half is neither read nor written."""
    case = case_named("wide_d264v264_65x129")
    q, k, v = make_inputs(case, kernels_on, SEED)
    wider = torch.full((*v.shape[:3], 384), float("nan"), dtype=v.dtype, device=v.device)
    wider[..., :264] = v
    with torch_flashplug.sdpa_backend("fa3"), torch.no_grad():
        out = torch.full((1, 4, 65, 384), 7.0, dtype=v.dtype, device=v.device)[..., :264]
        settings = None, None, None, None, -1, -1, True, 0.0, None
        expected = torch.ops.torch_flashplug.attention_fwd(q, k, v, *settings)[0]
        torch.ops.torch_flashplug.attention_fwd_out(out, q, k, wider[..., :264], *settings)
    assert torch.equal(out, expected)
    assert (out.as_strided((1, 4, 65, 384), (4 * 65 * 384, 65 * 384, 384, 1))[..., 264:] == 7.0).all()


@pytest.mark.parametrize("dtype", ELEMENTS_16BIT)
@pytest.mark.parametrize("name", [case.name for case in WIDE_GRADIENT_CASES])
def test_gradients_of_wide_heads(kernels_on: str, name: str, dtype: str) -> None:
    """Three kernels compute dQ, dV and dK. Results have the same bits in two runs."""
    case = case_named(name).with_dtype(dtype)
    inputs = make_inputs(case, kernels_on, SEED, requires_grad=True)
    leaves = inputs.q, inputs.k, inputs.v
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(*leaves, **case.sdpa_kwargs())
    grads = torch.autograd.grad(out, leaves, inputs.grad_out, retain_graph=True)
    repeated = torch.autograd.grad(out, leaves, inputs.grad_out)
    assert bindings.counters(reset=True)["ours_bwd"] == 2
    check_gradients_of_case(f"{name} {dtype}", case, inputs, dict(zip(NAMES, grads, strict=True)), seed=SEED)
    for grad_name, first, second in zip(NAMES, grads, repeated, strict=True):
        assert_bitwise_equal(grad_name, second, first)


@pytest.mark.parametrize("wanted", [("dq",), ("dk", "dv")])
def test_part_of_the_gradients_of_wide_heads(kernels_on: str, wanted: tuple[str, ...]) -> None:
    """dQ has a launch of its own, and dK comes with dV."""
    case = case_named("wide_grad_d512v512_129x70_causal")
    inputs = make_inputs(case, kernels_on, SEED)
    names = dict(zip(NAMES, (inputs.q, inputs.k, inputs.v), strict=True))
    for name in wanted:
        names[name].requires_grad_()
    with torch_flashplug.sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(*names.values(), **case.sdpa_kwargs())
    grads = torch.autograd.grad(out, [names[name] for name in wanted], inputs.grad_out)
    check_gradients_of_case(case.name, case, inputs, dict(zip(wanted, grads, strict=True)), seed=SEED)


# ---- without kernels: plans ----


def test_the_row_with_the_next_head_dims_fills_up_with_zeros() -> None:
    for d, filled in ((257 + 7, 320), (320, 320), (328, 384), (384, 384), (392, 512), (512, 512)):
        plan = bindings.plan(call(WIDE[0], WIDE[1], (d, d)), H100, FA3)
        assert f"fwd_sm90_bf16_d{filled}_full" in plan["kernel"]
    assert bindings.plan(call(WIDE[0], WIDE[1], (520, 520)), H100, FA3)["backend"] == "stock"


def test_gradients_of_wide_heads_have_to_be_forced() -> None:
    """No GPU has timed the kernels yet, so auto mode leaves such calls to stock, even where stock has a bug."""
    for d, filled in ((264, 320), (384, 384), (392, 512)):
        plan = bindings.plan(call(WIDE[0], WIDE[1], (d, d), grad=1), H100, FA3)
        assert plan["gradients"].startswith(f"partbwd_sm90_bf16_d{filled}_full")
    plan = bindings.plan(call(*WIDE, grad=1), H100)
    assert plan["backend"] == "stock" and "Force these kernels" in plan["reasons"]["fa3"]
    plan = bindings.plan(call(*WIDE, grad=1, scale=bindings.SCALE_IDS["negative"]), H100)
    assert not plan["gradients"].startswith("partbwd")


def test_query_heads_of_a_wide_gradient_are_shared() -> None:
    """A case has so few blocks of keys that several tiles share the query heads, and results are added up."""
    case = case_named("wide_grad_shared_h8_d512")
    assert plan_of_forced_call(case, backend="fa3", grad=1)["sharing"] == case.Hq


def test_attention_leaves_wide_gradients_to_math_unless_forced() -> None:
    with FakeTensorMode():
        query = torch.empty(1, 2, 64, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    assert not has_kernel(query, query, query)
    with torch_flashplug.sdpa_backend("fa3"):
        assert has_kernel(query, query, query)
    with torch.no_grad():
        assert has_kernel(query, query, query)


@pytest.mark.parametrize("facts", [{"causal": 1}, {"mask": 1}, {"window": 1}, {"window": 1, "ragged": 1}])
def test_features_of_wide_gradients(facts: dict) -> None:
    plan = bindings.plan(call(*WIDE, grad=1, **facts), H100, FA3)
    assert plan["gradients"].startswith("partbwd_sm90_bf16_d512_" + "+".join(facts))


def test_rings_and_stages_of_wide_gradients_fit_in_shared_memory() -> None:
    specs = [spec for spec in kernel_table.specs(90, "partbwd") if spec.is_wide_backward]
    assert {spec.d for spec in specs} == {320, 384, 512}
    for spec in specs:
        assert spec.check() is None
        assert spec.wide_buffers(2).stages == spec.stages and spec.wide_buffers(1).stages == 2
    too_wide = KernelSpec("partbwd", 90, "bf16", 576, 576, "full", 64, 64, 1)
    assert "multiples of 64 up to 512" in too_wide.check()


@pytest.mark.parametrize(
    "facts",
    [{"bias": 1}, {"bias32": 1}, {"dropout": 1, "dropout_p": 0.1}, {"cache8": 1}, {"mask": 1, "dropout_p": 0.5}],
)
def test_features_without_a_wide_kernel_are_refused(facts: dict) -> None:
    plan = bindings.plan(call(*WIDE, **facts), H100, FA3)
    assert plan["backend"] == "stock" and plan["reasons"]["fa3"]


def test_faults_of_stock_are_not_assumed_for_wide_heads() -> None:
    """The evidence is of head dims up to 256: cuDNN and flash do not take larger ones."""
    for facts, backend in (({"scale": bindings.SCALE_IDS["negative"]}, "fa3"), ({"mask": 1}, "stock")):
        assert bindings.plan(call(WIDE[0], WIDE[1], (256, 256), **facts), H100)["stock_bug"]
        plan = bindings.plan(call(*WIDE, **facts), H100)
        assert plan["backend"] == backend and not plan["stock_bug"]


def test_splits_of_a_wide_decode_are_combined_in_memory() -> None:
    """The results of a CTA do not fit in its stages of V, where the CTAs of a cluster read results."""
    for keys in (256, 4096, 100000):
        plan = bindings.plan(call((1, 8, 1), (1, keys), (512, 512)), H100, FA3)
        assert plan["kernel"].startswith("decode_sm90_bf16_d512_full") and plan["cluster"] == 1 < plan["splits"]


def test_wide_kernels_are_a_pack_of_their_own() -> None:
    (pack,) = [pack for pack in kernel_table.PACKS if pack.name == "sm90a_wide"]
    others = {spec for other in kernel_table.PACKS if other is not pack for spec in other.specs()}
    assert all(max(spec.d, spec.dv) > 256 for spec in pack.specs()) and others.isdisjoint(pack.specs())
