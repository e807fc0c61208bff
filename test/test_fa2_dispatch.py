"""Forced fa2 and auto on its measured rows: calls that reach the kernels for every GPU, and those that cannot."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from standin import OPEN_GATE, SERVE_ALL, Road
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


def test_process_backend_fa2_takes_every_call(any_road: Road) -> None:
    q, k, v = any_road.qkv()
    native.set_process_backend(BACKENDS.index("fa2"))
    try:
        with sdpa_backend("fa3"):
            assert torch_flashplug.explain(q, k, v, device="a100").backend == "fa2"
            F.scaled_dot_product_attention(q, k, v)
    finally:
        native.set_process_backend(0)
    assert any_road.took().get("ours_fwd", 0) == 1


def test_auto_takes_measured_rows_of_fa2(any_road: Road) -> None:
    """Where fa3 cannot: the router asks both families, before shapes are read too."""
    served = tuple(
        ChoiceRow(kind, 80, False, mask, 1, 256, 0, ANY, 0, ANY, 0, ratio=2.0, measured="test table")
        for kind in ("odddims", "unaligned", "columns")
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
