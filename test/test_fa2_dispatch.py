"""Forced fa2 and auto on its measured rows: calls that reach the kernels for every GPU, and those that cannot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from standin import OPEN_GATE, SERVE_ALL, Road, road_to
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_flashplug
from torch_flashplug import composite, configs, native, sdpa_backend
from torch_flashplug.choices import ANY, ChoiceRow
from torch_flashplug.spec import BACKENDS

CLOSE = {"atol": 2e-2, "rtol": 2e-2}


def calls(road: Road, grad: bool = False) -> dict[str, tuple[list[torch.Tensor], dict]]:
    """Every call that vector loads can read, and some that they cannot."""
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


ELEMENTWISE = ("head_dim_12", "head_dims_61_33", "last_stride", "odd_address")


def exact(args: list[torch.Tensor], kwargs: dict) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*(tensor.double() for tensor in args), **kwargs)


def test_forced_fa2_serves(any_road: Road) -> None:
    for name, (args, kwargs) in calls(any_road).items():
        any_road.took()
        with sdpa_backend("fa2"):
            plan = torch_flashplug.explain(*args, **kwargs, device="h100")
            out = F.scaled_dot_product_attention(*args, **kwargs)
        assert any_road.took().get("ours_fwd", 0) == 1, name
        assert plan.backend == "fa2" and plan.kernel.startswith("fwd_sm80"), (name, plan)
        assert plan.kernel.endswith("e") == (name in ELEMENTWISE), (name, plan)
        torch.testing.assert_close(out.double(), exact(args, kwargs), **CLOSE)


def test_gradients_of_forced_fa2(any_road: Road) -> None:
    for name, (args, kwargs) in calls(any_road, grad=True).items():
        with sdpa_backend("fa2"):
            out = F.scaled_dot_product_attention(*args, **kwargs)
        assert any_road.took().get("ours_fwd", 0) == 1, name
        got = torch.autograd.grad(out.float().square().sum(), args)
        want = torch.autograd.grad(exact(args, kwargs).square().sum(), args)
        for a, b in zip(got, want):
            assert float((a.double() - b.double()).norm() / b.double().norm()) < 2e-2, name


@pytest.mark.parametrize("why, text", [("mask", "attn_mask"), ("dropout", "dropout_p=0.5"), ("fp32", "float32")])
def test_forced_fa2_names_its_reasons(any_road: Road, why: str, text: str) -> None:
    q, k, v = any_road.qkv()
    args = [t.float() for t in (q, k, v)] if why == "fp32" else [q, k, v]
    mask = torch.ones(128, 128, dtype=torch.bool, device=q.device) if why == "mask" else None
    dropout_p = 0.5 if why == "dropout" else 0.0
    with sdpa_backend("fa2"), pytest.raises(RuntimeError, match=rf"'fa2' is forced and cannot run(.|\n)*{text}"):
        F.scaled_dot_product_attention(*args, mask, dropout_p)


# ---- the whole process: TORCH_FLASHPLUG_BACKEND ----


@pytest.fixture
def fa2_everywhere() -> Iterator[None]:
    native.set_process_backend(BACKENDS.index("fa2"))
    yield
    native.set_process_backend(0)


@pytest.mark.usefixtures("fa2_everywhere")
def test_preferred_fa2_takes_every_call_that_it_can(any_road: Road) -> None:
    q, k, v = any_road.qkv()
    with sdpa_backend("fa3"):
        plan = torch_flashplug.explain(q, k, v, device="a100")
        assert plan.backend == "fa2" and plan.reasons["stock"] == "fa2 is asked for by TORCH_FLASHPLUG_BACKEND"
        F.scaled_dot_product_attention(q, k, v)
    assert any_road.took().get("ours_fwd", 0) == 1


@pytest.mark.usefixtures("fa2_everywhere")
@pytest.mark.parametrize("name", ["mask", "dropout", "fp32", "head_dim_300"])
def test_preferred_fa2_leaves_the_rest_to_stock(any_road: Road, name: str) -> None:
    q, k, v = any_road.qkv()
    args, kwargs = {
        "mask": ([q, k, v, torch.ones(128, 128, dtype=torch.bool, device=q.device).tril()], {}),
        "dropout": ([q, k, v], {"dropout_p": 0.5}),
        "fp32": ([q.float(), k.float(), v.float()], {"is_causal": True}),
        "head_dim_300": ([F.pad(t, (0, 236)) for t in (q, k, v)], {}),
    }[name]
    plan = torch_flashplug.explain(*args, **kwargs)
    assert plan.backend == "stock" and not plan.error and plan.reasons["fa2"]
    torch.manual_seed(1)
    got = F.scaled_dot_product_attention(*args, **kwargs)
    assert any_road.took().get("ours_fwd", 0) == 0
    with any_road.off():
        torch.manual_seed(1)
        assert torch.equal(got, F.scaled_dot_product_attention(*args, **kwargs))


@pytest.mark.usefixtures("fa2_everywhere", "fresh_dynamo")
def test_preferred_fa2_in_a_graph_of_unknown_shapes(road: Road) -> None:
    compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, head_dim, taken in ((128, 64, 1), (200, 60, 1), (136, 300, 0)):
        q, k, v = (F.pad(t, (0, head_dim - 64)) for t in road.qkv(rows=rows))
        got = compiled(q, k, v)
        assert road.took().get("ours_fwd", 0) == taken, (rows, head_dim)
        torch.testing.assert_close(got.double(), exact([q, k, v], {}), **CLOSE)
    mask = torch.ones(128, 128, dtype=torch.bool, device=road.device).tril()
    q, k, v = road.qkv()
    torch.testing.assert_close(compiled(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))
    assert road.took().get("ours_fwd", 0) == 0


def test_plan_b_asks_again_when_a_kernel_turns_out_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with road_to("cpu", "plan_b") as road:
        taken, changes = [], native.missing_changes()
        for now, missing in ((changes, False), (changes, True), (changes + 1, True), (changes + 2, False)):
            monkeypatch.setattr(native, "missing_changes", lambda now=now: now)
            monkeypatch.setattr(native, "kernel_missing", lambda *call, missing=missing: missing)
            F.scaled_dot_product_attention(*road.qkv())
            taken.append(road.took().get("ours_fwd", 0))
        assert taken == [1, 1, 0, 1]  # the second time it was not asked


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("head_dim", [60, 130])
def test_odd_calls_in_a_graph_of_unknown_shapes_never_meet_math(head_dim: int) -> None:
    """No row says that ours are faster than stock's flash, which cannot follow here; math is the last resort."""
    with road_to("cuda") as road:
        compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (520, 1040):
            q, k, v = (F.pad(t, (0, head_dim - 64)).detach().requires_grad_() for t in road.qkv(rows=rows))
            out = compiled(q, k, v)
            got = torch.autograd.grad(out.float().square().sum(), (q, k, v))
            took = road.took()
            assert took["ours_fwd"] == took["ours_bwd"] == 1 and not took.keys() & {"math_fwd", "math_bwd"}, took
            want = torch.autograd.grad(exact([q, k, v], {}).square().sum(), (q, k, v))
            for a, b in zip(got, want):
                assert float((a.double() - b.double()).norm() / b.double().norm()) < 2e-2


def test_auto_takes_measured_rows_of_fa2(any_road: Road) -> None:
    """Where fa3 cannot: the router asks both families, before shapes are read too."""
    served = tuple(
        ChoiceRow("fwd", operands, 80, False, mask, 1, 256, 0, ANY, 0, ANY, 0, ratio=2.0, measured="test table")
        for operands in ("odddims", "unaligned", "columns")
        for mask in ("full", "causal")
    )
    for rows, taken in ((SERVE_ALL, 0), (served, 1), (SERVE_ALL + served, 1)):
        native.push_rows(configs.KERNEL_ROWS, rows, OPEN_GATE)
        composite._forget_decisions()
        for name in ELEMENTWISE:
            args, kwargs = calls(any_road)[name]
            any_road.took()
            F.scaled_dot_product_attention(*args, **kwargs)
            assert any_road.took().get("ours_fwd", 0) == taken, (name, taken)
