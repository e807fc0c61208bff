"""Kernel families fa3 and fa2: forced, requested by the process, and measured fa2 rows in auto.

The tests cover calls served by the kernels, and calls without a kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from standin import OPEN_GATE, SERVE_ALL, Road, road_to
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_flashplug
from torch_flashplug import sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.architectures import BACKENDS
from torch_flashplug.registry.dispatch_table import ANY, ChoiceRow
from torch_flashplug.torch_hooks import sdpa_composite

CLOSE = {"atol": 2e-2, "rtol": 2e-2}


def make_calls(road: Road, grad: bool = False) -> dict[str, tuple[list[torch.Tensor], dict]]:
    """Return calls readable by vector loads, and calls readable only by element-wise kernels."""
    q, k, v = road.qkv(grad=grad)
    return {
        "plain": ([q, k, v], {}),
        "causal": ([q, k, v], {"is_causal": True}),
        "gqa": (road.qkv(heads=4, kv_heads=2, grad=grad), {"enable_gqa": True}),
        "head_dim_12": ([t[..., :12] for t in (q, k, v)], {}),
        "head_dims_61_33": ([q[..., :61], k[..., :61], v[..., :33]], {"is_causal": True}),
        "last_stride": ([t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (q, k, v)], {}),
        "odd_address": ([t[..., 1:41] for t in (q, k, v)], {}),
    }


ELEMENTWISE = ("head_dim_12", "head_dims_61_33", "last_stride", "odd_address")  # only fa2 kernels serve these calls
FAMILIES = {"fa3": "fwd_sm90", "fa2": "fwd_sm80"}


def calls_of_family(family: str, road: Road, grad: bool = False) -> dict[str, tuple[list[torch.Tensor], dict]]:
    all_calls = make_calls(road, grad)
    return {name: call for name, call in all_calls.items() if family == "fa2" or name not in ELEMENTWISE}


def math_in_fp64(args: list[torch.Tensor], kwargs: dict) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*(tensor.double() for tensor in args), **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_family_serves_calls(any_road: Road, family: str) -> None:
    for name, (args, kwargs) in calls_of_family(family, any_road).items():
        any_road.took()
        with sdpa_backend(family):
            plan = torch_flashplug.explain(*args, **kwargs, device="h100")
            out = F.scaled_dot_product_attention(*args, **kwargs)
        assert any_road.took().get("ours_fwd", 0) == 1, name
        assert plan.backend == family and plan.kernel.startswith(FAMILIES[family]), (name, plan)
        assert plan.kernel.endswith("e") == (name in ELEMENTWISE), (name, plan)
        torch.testing.assert_close(out.double(), math_in_fp64(args, kwargs), **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_forced_family(any_road: Road, family: str) -> None:
    for name, (args, kwargs) in calls_of_family(family, any_road, grad=True).items():
        with sdpa_backend(family):
            out = F.scaled_dot_product_attention(*args, **kwargs)
        assert any_road.took().get("ours_fwd", 0) == 1, name
        got = torch.autograd.grad(out.float().square().sum(), args)
        want = torch.autograd.grad(math_in_fp64(args, kwargs).square().sum(), args)
        for a, b in zip(got, want):
            assert float((a.double() - b.double()).norm() / b.double().norm()) < 2e-2, name


@pytest.mark.gpu
def test_forced_fa3_gradients_against_fp64(road: Road) -> None:
    q, k, v = road.qkv(rows=256, grad=True)
    with sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), grad)
    assert road.took().get("ours_fwd", 0) == 1
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(F.scaled_dot_product_attention(*wide, is_causal=True), wide, grad.double())
    plain = [t.detach().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        low = torch.autograd.grad(F.scaled_dot_product_attention(*plain, is_causal=True), plain, grad)
    for name, a, b, c in zip(("dq", "dk", "dv"), got, want, low):
        budget = 3 * (c.double() - b).abs().max() + torch.finfo(a.dtype).eps * b.abs().max()
        assert (a.double() - b).abs().max() <= budget, name


def make_impossible_call(name: str, road: Road) -> tuple[list[torch.Tensor], dict]:
    """Return a call without a kernel in a family."""
    q, k, v = road.qkv()
    return {
        "bias": ([q, k, v, torch.ones(128, 128, device=q.device).tril()], {"dropout_p": 0.5}),
        "dropout": ([F.pad(t, (0, 200)) for t in (q, k, v)], {"dropout_p": 0.5}),
        "fp32": ([q.float(), k.float(), v.float()], {"is_causal": True}),
        "head_dim_300": ([F.pad(t, (0, 236)) for t in (q, k, v)], {}),
        "head_dim_12": make_calls(road)["head_dim_12"],
        "last_stride": make_calls(road)["last_stride"],
    }[name]


OF_NO_FAMILY = {"fp32": "float32", "head_dim_300": "300"}
REASONS = {
    "fa3": OF_NO_FAMILY | {"head_dim_12": "12", "last_stride": "stride"},
    "fa2": OF_NO_FAMILY | {"bias": "this combination of features: bias32 and dropout", "dropout": "at most 256"},
}


@pytest.mark.parametrize(
    "family, name, text", [(family, *reason) for family, reasons in REASONS.items() for reason in reasons.items()]
)
def test_forced_family_raises_with_reasons(any_road: Road, family: str, name: str, text: str) -> None:
    args, kwargs = make_impossible_call(name, any_road)
    with (
        sdpa_backend(family),
        pytest.raises(RuntimeError, match=rf"'{family}' is forced and cannot run(.|\n)*{text}"),
    ):
        F.scaled_dot_product_attention(*args, **kwargs)
    F.scaled_dot_product_attention(*args, **kwargs)  # in auto, stock serves the call


# ---- the whole process: TORCH_FLASHPLUG_BACKEND ----


@contextlib.contextmanager
def process_backend(backend: str) -> Iterator[None]:
    bindings.set_process_backend(BACKENDS.index(backend))
    try:
        yield
    finally:
        bindings.set_process_backend(0)


@pytest.fixture
def fa2_for_process() -> Iterator[None]:
    with process_backend("fa2"):
        yield


@pytest.mark.parametrize("backend, num_served", [("math", 0), ("stock", 0), ("fa3", 1), ("fa2", 1)])
def test_process_backend_takes_precedence_over_blocks(any_road: Road, backend: str, num_served: int) -> None:
    q, k, v = any_road.qkv()
    with process_backend(backend), sdpa_backend("fa3" if backend != "fa3" else "stock"):
        F.scaled_dot_product_attention(q, k, v)
    assert any_road.took().get("ours_fwd", 0) == num_served


@pytest.mark.usefixtures("fa2_for_process")
def test_explain_names_the_environment_variable(any_road: Road) -> None:
    with sdpa_backend("fa3"):
        plan = torch_flashplug.explain(*any_road.qkv(), device="a100")
    assert plan.backend == "fa2" and plan.reasons["stock"] == "fa2 is requested by TORCH_FLASHPLUG_BACKEND."


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", OF_NO_FAMILY)
def test_preferred_family_leaves_unsupported_calls_to_stock(any_road: Road, name: str, family: str) -> None:
    args, kwargs = make_impossible_call(name, any_road)
    with process_backend(family):
        plan = torch_flashplug.explain(*args, **kwargs)
        assert plan.backend == "stock" and not plan.error and plan.reasons[family]
        torch.manual_seed(1)
        got = F.scaled_dot_product_attention(*args, **kwargs)
        assert any_road.took().get("ours_fwd", 0) == 0
        with any_road.off():
            torch.manual_seed(1)
            assert torch.equal(got, F.scaled_dot_product_attention(*args, **kwargs))


@pytest.mark.usefixtures("fa2_for_process", "fresh_dynamo")
def test_preferred_fa2_in_a_graph_of_unknown_shapes(road: Road) -> None:
    compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, head_dim, num_served in ((128, 64, 1), (200, 60, 1), (136, 300, 0)):
        q, k, v = (F.pad(t, (0, head_dim - 64)) for t in road.qkv(rows=rows))
        got = compiled(q, k, v)
        assert road.took().get("ours_fwd", 0) == num_served, (rows, head_dim)
        torch.testing.assert_close(got.double(), math_in_fp64([q, k, v], {}), **CLOSE)
    mask = torch.ones(128, 128, dtype=torch.bool, device=road.device).tril()
    q, k, v = road.qkv()
    got = compiled(q, k, v, mask)
    assert road.took().get("ours_fwd", 0) == 1
    torch.testing.assert_close(got.double(), math_in_fp64([q, k, v], {"attn_mask": mask}), **CLOSE)


def test_plan_b_plans_again_after_a_kernel_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with road_to("cpu", "plan_b") as road:
        num_served, changes = [], bindings.missing_changes()
        for change_count, missing in ((changes, False), (changes, True), (changes + 1, True), (changes + 2, False)):
            monkeypatch.setattr(bindings, "missing_changes", lambda change_count=change_count: change_count)
            monkeypatch.setattr(bindings, "kernel_missing", lambda *call, missing=missing: missing)
            F.scaled_dot_product_attention(*road.qkv())
            num_served.append(road.took().get("ours_fwd", 0))
        assert num_served == [1, 1, 0, 1]  # the second call did not ask again


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("head_dim", [60, 130])
def test_odd_calls_in_a_graph_of_unknown_shapes_never_run_math(head_dim: int) -> None:
    """Expect our kernels although no row measures a speedup over the flash attention of stock.

    Flash attention cannot serve the backward here, and math is the last resort.
    """
    with road_to("cuda") as road:
        compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (520, 1040):
            q, k, v = (F.pad(t, (0, head_dim - 64)).detach().requires_grad_() for t in road.qkv(rows=rows))
            out = compiled(q, k, v)
            got = torch.autograd.grad(out.float().square().sum(), (q, k, v))
            took = road.took()
            assert took["ours_fwd"] == took["ours_bwd"] == 1 and not took.keys() & {"math_fwd", "math_bwd"}, took
            want = torch.autograd.grad(math_in_fp64([q, k, v], {}).square().sum(), (q, k, v))
            for a, b in zip(got, want):
                assert float((a.double() - b.double()).norm() / b.double().norm()) < 2e-2


def test_auto_serves_measured_rows_of_fa2(any_road: Road) -> None:
    """Use calls that fa3 cannot serve: the choice hook asks both families, also before shapes are read."""
    served = tuple(
        ChoiceRow("fwd", operands, 80, False, mask, 1, 256, 0, ANY, 0, ANY, 0, ratio=2.0, measured="test table")
        for operands in ("odddims", "unaligned", "columns")
        for mask in ("full", "causal")
    )
    for rows, num_served in ((SERVE_ALL, 0), (served, 1), (SERVE_ALL + served, 1)):
        bindings.push_rows(kernel_table.KERNEL_ROWS, rows, OPEN_GATE)
        sdpa_composite._forget_decisions()
        for name in ELEMENTWISE:
            args, kwargs = make_calls(any_road)[name]
            any_road.took()
            F.scaled_dot_product_attention(*args, **kwargs)
            assert any_road.took().get("ours_fwd", 0) == num_served, (name, num_served)


@pytest.mark.parametrize("name", ["fa3", "fa2", "math"])
def test_explain_reports_that_forcing_has_no_effect_on_cpu_tensors(name: str) -> None:
    query = torch.ones(2, 4, 128, 64, dtype=torch.bfloat16)
    unasked = torch_flashplug.explain(query, query, query)
    with sdpa_backend(name):
        plan = torch_flashplug.explain(query, query, query)
        F.scaled_dot_product_attention(query, query, query)  # raises nothing

    ignored = " Forcing a backend has no effect for tensors on cpu."
    assert plan.backend == "stock" and not plan.error
    assert plan.reasons == unasked.reasons | {name: unasked.reasons[name] + ignored}
