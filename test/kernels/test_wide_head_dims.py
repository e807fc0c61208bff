"""Head dims above 256: forwards and decodes on Hopper, against fp64, through F.sdpa and the op of attention().

Each of two forward tiles has half of the columns of V and O. A decode has two warpgroups with half of the columns each.
Windows, packed sequences and masks of the same kernels are in the tests of each feature.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from golden_plans import call

import torch_flashplug
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.dtypes import ELEMENTS_16BIT
from torch_flashplug.testing import WIDE_CASES, assert_lse, assert_within_budget, case_named, make_inputs, oracle, plain

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


# ---- without kernels: plans ----


def test_the_row_with_the_next_head_dims_fills_up_with_zeros() -> None:
    for d, filled in ((257 + 7, 320), (320, 320), (328, 384), (384, 384), (392, 512), (512, 512)):
        plan = bindings.plan(call(WIDE[0], WIDE[1], (d, d)), H100, FA3)
        assert f"fwd_sm90_bf16_d{filled}_full" in plan["kernel"]
    assert bindings.plan(call(WIDE[0], WIDE[1], (520, 520)), H100, FA3)["backend"] == "stock"


def test_gradients_of_wide_heads_are_computed_by_stock() -> None:
    plan = bindings.plan(call(*WIDE, grad=1), H100, FA3)
    assert plan["backend"] == "fa3" and "tock" in plan["gradients"]
    plan = bindings.plan(call(*WIDE, grad=1), H100)
    assert plan["backend"] == "stock" and "no backward kernel" in plan["reasons"]["fa3"]


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
