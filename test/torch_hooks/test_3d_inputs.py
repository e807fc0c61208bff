"""Calls of three dims, which torch 2.14 and newer pass to the choice hook with a batch dim.

explain() must agree with the choice hook.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from device_backend import DeviceBackend, use_device_backend
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend

import torch_flashplug
from torch_flashplug import sdpa_backend
from torch_flashplug.api.backend import DEVICES, Plan
from torch_flashplug.dispatch import bindings
from torch_flashplug.torch_hooks import describe_call

MASKS = {"none": None, "keys": (96,), "scores": (128, 96), "heads": (4, 128, 96), "one": (1, 128, 96),
         "four_dims": (1, 4, 128, 96), "two_batches": (2, 4, 128, 96)}  # fmt: skip
BATCHES = {"all": "qkv", "key_and_value": "kv", "query": "q", "value": "v"}  # names of the operands that have four dims


def make_operands(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, rows, 64, generator=generator).to(dtype) for rows in (128, 96, 96)]


def make_mask(name: str, dtype: torch.dtype) -> Tensor | None:
    sizes = MASKS[name]
    return None if sizes is None else torch.ones(sizes, dtype=dtype)


def assert_explain_agrees(device_backend: DeviceBackend, *call: Tensor | None, **settings: bool | float) -> Plan:
    """Run a call, and check that explain() predicts the backend."""
    plan = torch_flashplug.explain(*call, **settings, device="h100")
    device_backend.pop_path_counts()
    with contextlib.suppress(RuntimeError):  # the error of a mask with a wrong shape
        F.scaled_dot_product_attention(*call, **settings)
    took = device_backend.pop_path_counts()

    assert plan.backend == ("fa3" if took.get("ours_fwd") else "stock"), (plan, took)
    return plan


# ---- with the installed torch ----


@pytest.mark.parametrize("backend", ["auto", "fa3"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_explain_agrees_with_the_choice_hook_on_masks(mask: str, dtype: torch.dtype, backend: str) -> None:
    with use_device_backend("cpu") as device_backend, sdpa_backend(backend):
        plan = assert_explain_agrees(device_backend, *make_operands(), make_mask(mask, dtype))

    served = describe_call.adds_batch_dim() and mask != "two_batches"
    assert plan.backend == ("fa3" if served else "stock")


@pytest.mark.parametrize("with_batch", BATCHES.values(), ids=BATCHES)
def test_explain_agrees_with_the_choice_hook_for_mixed_dims(with_batch: str) -> None:
    with use_device_backend("cpu") as device_backend:
        tensors = [x[None] if name in with_batch else x for name, x in zip("qkv", make_operands())]
        plan = assert_explain_agrees(device_backend, *tensors)

    assert plan.backend == ("fa3" if with_batch == "qkv" else "stock")


# ---- with a simulated version of torch ----

CALLS: dict[str, Callable[[], tuple[list[Tensor], dict[str, object]]]] = {
    "plain": lambda: (make_operands(), {}),
    "causal": lambda: (make_operands(), {"is_causal": True}),
    "grouped": lambda: ([x[:heads] for x, heads in zip(make_operands(), (4, 2, 2))], {"enable_gqa": True}),
    "gradients": lambda: ([x.requires_grad_() for x in make_operands()], {}),
    "mask": lambda: ([*make_operands(), make_mask("heads", torch.bool)], {}),
    "bias": lambda: ([*make_operands(), make_mask("scores", torch.bfloat16)], {}),
    "fp32": lambda: (make_operands(torch.float32), {}),
}


@pytest.fixture
def adds_batch_dim(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let explain() assume that torch adds a batch dim, or adds none."""
    return lambda answer: monkeypatch.setattr(describe_call, "adds_batch_dim", lambda: answer)


@pytest.mark.parametrize("backend", ["auto", "fa3"])
@pytest.mark.parametrize("name", CALLS)
def test_three_dims_have_the_plan_of_a_batch_of_one_if_torch_adds_a_batch_dim(
    name: str, backend: str, adds_batch_dim: Callable[[bool], None]
) -> None:
    tensors, settings = CALLS[name]()
    adds_batch_dim(True)
    with use_device_backend("cpu"), sdpa_backend(backend):
        plan = torch_flashplug.explain(*tensors, **settings, device="h100")
        plan_of_four_dims = torch_flashplug.explain(
            *(x[None] for x in tensors[:3]), *tensors[3:], **settings, device="h100"
        )

    assert "q [4, 128, 64]" in plan.call  # the shape of the caller
    mask_text = plan.mask.replace("[1, 1, 128, 96]", "[128, 96]")
    assert replace(plan, call="", mask=mask_text) == replace(plan_of_four_dims, call="")
    assert plan.backend == ("stock" if name == "fp32" else "fa3")
    assert bool(plan.error) == (name == "fp32" and backend == "fa3")  # a forced backend raises


@pytest.mark.parametrize("name", CALLS)
def test_three_dims_run_stock_if_torch_adds_no_batch_dim(name: str, adds_batch_dim: Callable[[bool], None]) -> None:
    tensors, settings = CALLS[name]()
    adds_batch_dim(False)
    with use_device_backend("cpu"):
        plan = torch_flashplug.explain(*tensors, **settings, device="h100")

    assert plan.backend == "stock" and not plan.error
    assert all("must have 4 dims" in why for why in plan.reasons.values())


def test_three_dims_run_stock_under_the_composite_hook(
    adds_batch_dim: Callable[[bool], None],
) -> None:
    adds_batch_dim(True)
    with use_device_backend("cpu", "composite_hook") as device_backend:
        plan = assert_explain_agrees(device_backend, *make_operands())

    assert plan.backend == "stock" and "must have 4 dims" in plan.reasons["fa3"]


@pytest.mark.parametrize("answer", [True, False])
def test_explain_passes_the_dims_of_torch_to_the_choice_of_stock(
    answer: bool, adds_batch_dim: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes_asked: list[torch.Size] = []

    def choose(*tensors: Tensor | None, **_: object) -> int:
        sizes_asked.extend(x.shape for x in tensors if isinstance(x, Tensor))
        return SDPBackend.CUDNN_ATTENTION.value

    adds_batch_dim(answer)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    with use_device_backend("cpu"), FakeTensorMode() as mode:
        monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
        bindings.set_facts_override(DEVICES["a100"])  # on an A100, auto serves no call
        metas = (x.to("meta") for x in (*make_operands(), torch.ones(128, 96, dtype=torch.bool)))
        plan = torch_flashplug.explain(*(FakeTensor(mode, x, torch.device("cuda:0")) for x in metas))

    sizes = [(4, 128, 64), (4, 96, 64), (4, 96, 64)]
    assert sizes_asked == ([(1, *size) for size in sizes] + [(1, 1, 128, 96)] if answer else [*sizes, (128, 96)])
    assert plan.backend == "stock" and plan.stock_choice == "CUDNN_ATTENTION"


@pytest.mark.parametrize(
    ("version", "answer"), [("2.11.0", False), ("2.13.0+cpu", False), ("2.14.1", True), ("2.15.0+cu132", True)]
)
def test_torch_adds_a_batch_dim_since_2_14(version: str, answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)

    assert describe_call.adds_batch_dim() is answer
