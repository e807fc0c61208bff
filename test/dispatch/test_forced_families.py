"""Kernel families fa3 and fa2: forced, requested by the process, and measured fa2 rows in auto.

The tests cover calls served by the kernels, and calls without a kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from device_backend import OPEN_GATE, SERVE_ALL, DeviceBackend, use_device_backend
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_flashplug
from torch_flashplug import sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.architectures import BACKENDS
from torch_flashplug.registry.dispatch_table import ANY, ChoiceRow
from torch_flashplug.torch_hooks import sdpa_composite

CLOSE = {"atol": 2e-2, "rtol": 2e-2}


def make_calls(device_backend: DeviceBackend, grad: bool = False) -> dict[str, tuple[list[torch.Tensor], dict]]:
    """Return calls readable by vector loads, and calls readable only by element-wise kernels."""
    q, k, v = device_backend.qkv(grad=grad)
    return {
        "plain": ([q, k, v], {}),
        "causal": ([q, k, v], {"is_causal": True}),
        "gqa": (device_backend.qkv(heads=4, kv_heads=2, grad=grad), {"enable_gqa": True}),
        "head_dim_12": ([t[..., :12] for t in (q, k, v)], {}),
        "head_dims_61_33": ([q[..., :61], k[..., :61], v[..., :33]], {"is_causal": True}),
        "last_stride": ([t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (q, k, v)], {}),
        "odd_address": ([t[..., 1:41] for t in (q, k, v)], {}),
    }


ELEMENTWISE = ("head_dim_12", "head_dims_61_33", "last_stride", "odd_address")  # only fa2 kernels serve these calls
FAMILIES = {"fa3": "fwd_sm90", "fa2": "fwd_sm80"}


def calls_of_family(
    family: str, device_backend: DeviceBackend, grad: bool = False
) -> dict[str, tuple[list[torch.Tensor], dict]]:
    all_calls = make_calls(device_backend, grad)
    return {name: call for name, call in all_calls.items() if family == "fa2" or name not in ELEMENTWISE}


def math_in_fp64(args: list[torch.Tensor], kwargs: dict) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*(tensor.double() for tensor in args), **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_family_serves_calls(hooked_backend: DeviceBackend, family: str) -> None:
    for name, (args, kwargs) in calls_of_family(family, hooked_backend).items():
        hooked_backend.pop_path_counts()
        with sdpa_backend(family):
            plan = torch_flashplug.explain(*args, **kwargs, device="h100")
            out = F.scaled_dot_product_attention(*args, **kwargs)
        assert hooked_backend.pop_path_counts().get("ours_fwd", 0) == 1, name
        assert plan.backend == family and plan.kernel.startswith(FAMILIES[family]), (name, plan)
        assert plan.kernel.endswith("e") == (name in ELEMENTWISE), (name, plan)
        torch.testing.assert_close(out.double(), math_in_fp64(args, kwargs), **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_forced_family(hooked_backend: DeviceBackend, family: str) -> None:
    for name, (args, kwargs) in calls_of_family(family, hooked_backend, grad=True).items():
        with sdpa_backend(family):
            out = F.scaled_dot_product_attention(*args, **kwargs)
        assert hooked_backend.pop_path_counts().get("ours_fwd", 0) == 1, name
        actual = torch.autograd.grad(out.float().square().sum(), args)
        expected = torch.autograd.grad(math_in_fp64(args, kwargs).square().sum(), args)
        for a, b in zip(actual, expected):
            assert float((a.double() - b.double()).norm() / b.double().norm()) < 2e-2, name


@pytest.mark.gpu
def test_forced_fa3_gradients_against_fp64(device_backend: DeviceBackend) -> None:
    q, k, v = device_backend.qkv(rows=256, grad=True)
    with sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grad = torch.randn_like(out)
    actual = torch.autograd.grad(out, (q, k, v), grad)
    assert device_backend.pop_path_counts().get("ours_fwd", 0) == 1
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*wide, is_causal=True), wide, grad.double())
    plain = [t.detach().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        low = torch.autograd.grad(F.scaled_dot_product_attention(*plain, is_causal=True), plain, grad)
    for name, a, b, c in zip(("dq", "dk", "dv"), actual, expected, low):
        budget = 3 * (c.double() - b).abs().max() + torch.finfo(a.dtype).eps * b.abs().max()
        assert (a.double() - b).abs().max() <= budget, name


def make_impossible_call(name: str, device_backend: DeviceBackend) -> tuple[list[torch.Tensor], dict]:
    """Return a call without a kernel in a family."""
    q, k, v = device_backend.qkv()
    return {
        "bias": ([q, k, v, torch.ones(128, 128, device=q.device).tril()], {"dropout_p": 0.5}),
        "dropout": ([F.pad(t, (0, 200)) for t in (q, k, v)], {"dropout_p": 0.5}),
        "fp32": ([q.float(), k.float(), v.float()], {"is_causal": True}),
        "head_dim_300": ([F.pad(t, (0, 236)) for t in (q, k, v)], {}),
        "head_dim_12": make_calls(device_backend)["head_dim_12"],
        "last_stride": make_calls(device_backend)["last_stride"],
    }[name]


UNSUPPORTED_BY_ALL_FAMILIES = {"fp32": "float32", "head_dim_300": "300"}
REASONS = {
    "fa3": UNSUPPORTED_BY_ALL_FAMILIES | {"head_dim_12": "12", "last_stride": "stride"},
    "fa2": UNSUPPORTED_BY_ALL_FAMILIES
    | {"bias": "this combination of features: bias32 and dropout", "dropout": "at most 256"},
}


@pytest.mark.parametrize(
    "family, name, text", [(family, *reason) for family, reasons in REASONS.items() for reason in reasons.items()]
)
def test_forced_family_raises_with_reasons(hooked_backend: DeviceBackend, family: str, name: str, text: str) -> None:
    args, kwargs = make_impossible_call(name, hooked_backend)
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
def test_process_backend_takes_precedence_over_blocks(
    hooked_backend: DeviceBackend, backend: str, num_served: int
) -> None:
    q, k, v = hooked_backend.qkv()
    with process_backend(backend), sdpa_backend("fa3" if backend != "fa3" else "stock"):
        F.scaled_dot_product_attention(q, k, v)
    assert hooked_backend.pop_path_counts().get("ours_fwd", 0) == num_served


@pytest.mark.usefixtures("fa2_for_process")
def test_explain_names_the_environment_variable(hooked_backend: DeviceBackend) -> None:
    with sdpa_backend("fa3"):
        plan = torch_flashplug.explain(*hooked_backend.qkv(), device="a100")
    assert plan.backend == "fa2" and plan.reasons["stock"] == "fa2 is requested by TORCH_FLASHPLUG_BACKEND."


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", UNSUPPORTED_BY_ALL_FAMILIES)
def test_preferred_family_leaves_unsupported_calls_to_stock(
    hooked_backend: DeviceBackend, name: str, family: str
) -> None:
    args, kwargs = make_impossible_call(name, hooked_backend)
    with process_backend(family):
        plan = torch_flashplug.explain(*args, **kwargs)
        assert plan.backend == "stock" and not plan.error and plan.reasons[family]
        torch.manual_seed(1)
        actual = F.scaled_dot_product_attention(*args, **kwargs)
        assert hooked_backend.pop_path_counts().get("ours_fwd", 0) == 0
        with hooked_backend.disabled():
            torch.manual_seed(1)
            assert torch.equal(actual, F.scaled_dot_product_attention(*args, **kwargs))


@pytest.mark.usefixtures("fa2_for_process", "fresh_dynamo")
def test_preferred_fa2_in_a_graph_of_unknown_shapes(device_backend: DeviceBackend) -> None:
    compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, head_dim, num_served in ((128, 64, 1), (200, 60, 1), (136, 300, 0)):
        q, k, v = (F.pad(t, (0, head_dim - 64)) for t in device_backend.qkv(rows=rows))
        actual = compiled(q, k, v)
        assert device_backend.pop_path_counts().get("ours_fwd", 0) == num_served, (rows, head_dim)
        torch.testing.assert_close(actual.double(), math_in_fp64([q, k, v], {}), **CLOSE)
    mask = torch.ones(128, 128, dtype=torch.bool, device=device_backend.device).tril()
    q, k, v = device_backend.qkv()
    actual = compiled(q, k, v, mask)
    assert device_backend.pop_path_counts().get("ours_fwd", 0) == 1
    torch.testing.assert_close(actual.double(), math_in_fp64([q, k, v], {"attn_mask": mask}), **CLOSE)


def test_composite_hook_plans_again_after_a_kernel_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with use_device_backend("cpu", "composite_hook") as device_backend:
        num_served, changes = [], bindings.missing_changes()
        for change_count, missing in ((changes, False), (changes, True), (changes + 1, True), (changes + 2, False)):
            monkeypatch.setattr(bindings, "missing_changes", lambda change_count=change_count: change_count)
            monkeypatch.setattr(bindings, "kernel_missing", lambda *call, missing=missing: missing)
            F.scaled_dot_product_attention(*device_backend.qkv())
            num_served.append(device_backend.pop_path_counts().get("ours_fwd", 0))
        assert num_served == [1, 1, 0, 1]  # the second call did not ask again


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("head_dim", [60, 130])
def test_odd_calls_in_a_graph_of_unknown_shapes_never_run_math(head_dim: int) -> None:
    """Expect our kernels although no row measures a speedup over the flash attention of stock.

    Flash attention cannot serve the backward here, and math is the last resort.
    """
    with use_device_backend("cuda") as device_backend:
        compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (520, 1040):
            q, k, v = (F.pad(t, (0, head_dim - 64)).detach().requires_grad_() for t in device_backend.qkv(rows=rows))
            out = compiled(q, k, v)
            actual = torch.autograd.grad(out.float().square().sum(), (q, k, v))
            took = device_backend.pop_path_counts()
            assert took["ours_fwd"] == took["ours_bwd"] == 1 and not took.keys() & {"math_fwd", "math_bwd"}, took
            expected = torch.autograd.grad(math_in_fp64([q, k, v], {}).square().sum(), (q, k, v))
            for a, b in zip(actual, expected):
                assert float((a.double() - b.double()).norm() / b.double().norm()) < 2e-2


def test_auto_serves_measured_rows_of_fa2(hooked_backend: DeviceBackend) -> None:
    """Use calls that fa3 cannot serve: the choice hook asks both families, also before shapes are read."""
    served = tuple(
        ChoiceRow("fwd", operands, 80, False, mask, 1, 256, 0, ANY, 0, ANY, 0, ratio=2.0, measured="test table")
        for operands in ("odd_dims", "unaligned", "strided")
        for mask in ("full", "causal")
    )
    for rows, num_served in ((SERVE_ALL, 0), (served, 1), (SERVE_ALL + served, 1)):
        bindings.push_rows(kernel_table.KERNEL_ROWS, rows, OPEN_GATE)
        sdpa_composite._clear_caches()
        for name in ELEMENTWISE:
            args, kwargs = make_calls(hooked_backend)[name]
            hooked_backend.pop_path_counts()
            F.scaled_dot_product_attention(*args, **kwargs)
            assert hooked_backend.pop_path_counts().get("ours_fwd", 0) == num_served, (name, num_served)


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
