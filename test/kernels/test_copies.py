"""Operands that no kernel with a mask or dropout reads as they lie: they are copied, and the numbers are those of the
copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from orders import in_order
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings
from torch_flashplug.testing import Case, assert_bitwise_equal, make_inputs, new_case

SEED = 20261124


def at_odd_address(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def in_odd_rows(tensor: Tensor) -> Tensor:
    return torch.cat((tensor, tensor[..., :4]), -1)[..., : tensor.shape[-1]]


def in_columns(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT


LAYOUTS = {"odd_address": at_odd_address, "odd_rows": in_odd_rows, "columns": in_columns}


def drawn(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(SEED))


# What a call of 100 rows and 136 keys, two heads, brings; rows that see nothing among them.
CALLS: dict[str, Callable[[torch.dtype], dict]] = {
    "mask": lambda dtype: {"attn_mask": (drawn(100, 136) < 0.3) & (torch.arange(100) != 7)[:, None]},
    "bias": lambda dtype: {"attn_mask": drawn(2, 100, 136).to(dtype)},
    "bias32": lambda dtype: {"attn_mask": drawn(2, 100, 136)},
    "dropout": lambda dtype: {"dropout_p": 0.3},
    "causal_dropout": lambda dtype: {"dropout_p": 0.3, "is_causal": True},
    "mask_dropout": lambda dtype: {"attn_mask": drawn(100, 136) < 0.3, "dropout_p": 0.3},
}


def on(device: str, call: dict) -> dict:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in call.items()}


def outputs(operands: list[Tensor], grad_out: Tensor | None, backend: str, call: dict) -> list[Tensor]:
    """Out and, where grad_out is given, gradients, by kernels of ours."""
    torch.manual_seed(SEED)
    leaves = [tensor.detach().requires_grad_(grad_out is not None) for tensor in operands]
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(backend), in_order():
        out = F.scaled_dot_product_attention(*leaves, **call)
        grads = [] if grad_out is None else list(torch.autograd.grad(out, leaves, grad_out))
    counts = bindings.counters()
    assert counts["ours_fwd"] == 1 and counts["ours_bwd"] == (grad_out is not None)
    return [out.detach(), *grads]


def same_but_for_layout(device: str, case: Case, which: str, layout: str, backend: str, call: dict, grad: bool) -> None:
    inputs = make_inputs(case, device, SEED)
    lying = [LAYOUTS[layout](x) if name in which else x for name, x in zip("qkv", inputs, strict=True)]
    found, plain = (
        outputs(list(operands), inputs.grad_out if grad else None, backend, call) for operands in (lying, inputs)
    )
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, plain, strict=False):
        assert_bitwise_equal(f"{case.name} {layout} {name}", one, other)
    for one, operand in zip(found[1:], lying, strict=False):
        assert one.stride() == torch.empty_like(operand).stride()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", CALLS)
def test_copies_are_what_kernels_read(kernels_on: str, kind: str, layout: str) -> None:
    case = new_case(f"copied {kind}", (1, 2, 2), (100, 136), (64, 64))
    which = ("q", "k", "v", "qkv")[(len(kind) + len(layout)) % 4]
    call = on(kernels_on, CALLS[kind](case.torch_dtype))
    same_but_for_layout(kernels_on, case, which, layout, "fa3", call, grad=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gpus_kernels(kernels_on: str, layout: str) -> None:
    case = new_case("copied", (1, 2, 2), (100, 136), (128, 128), dtype="fp16")
    call = on(kernels_on, CALLS["mask"](case.torch_dtype))
    same_but_for_layout(kernels_on, case, "qkv", layout, "fa2", call, grad=True)


@pytest.mark.parametrize("kind", ["mask", "bias", "bias32"])
def test_few_rows_in_auto(kernels_on: str, kind: str) -> None:
    """Decode, where stock's cuDNN is wrong for rows that see nothing, whatever it is given."""
    case = new_case(f"copied few {kind}", (2, 4, 4), (1, 136), (128, 128))
    mask = CALLS[kind](case.torch_dtype)["attn_mask"][..., :1, :]
    call = on(kernels_on, {"attn_mask": mask[:1] if mask.dim() == 3 else mask})
    same_but_for_layout(kernels_on, case, "kv", "odd_address", "auto", call, grad=False)


def test_a_bias_whose_gradient_is_wanted(kernels_on: str) -> None:
    case = new_case("copied learned", (2, 2, 2), (100, 136), (64, 64))
    inputs = make_inputs(case, kernels_on, SEED)
    bias = CALLS["bias"](case.torch_dtype)["attn_mask"].to(kernels_on)
    found = []
    for change in (at_odd_address, Tensor.clone):
        learned = bias.clone().requires_grad_()
        with torch_flashplug.sdpa_backend("fa3"):
            out = F.scaled_dot_product_attention(*map(change, inputs), attn_mask=learned)
        found += torch.autograd.grad(out, [learned], inputs.grad_out)
    assert_bitwise_equal("dbias", *found)


PRESET = functools.partial(torch_flashplug.explain, device="h100")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_explain_names_them(layout: str) -> None:
    q, k, v = torch.zeros(3, 2, 8, 256, 128, dtype=torch.bfloat16).unbind()
    mask = torch.ones(256, 256, dtype=torch.bool)
    call = functools.partial(PRESET, q, LAYOUTS[layout](k), v, attn_mask=mask)
    with torch_flashplug.sdpa_backend("fa3"):
        plan = call()
    assert plan.backend == "fa3" and "mask" in plan.kernel
    assert plan.copies == "key: copied first into rows aligned to 16 bytes, 1.049 MB" and plan.copies in str(plan)
    assert not PRESET(q, k, v, attn_mask=mask).copies
    if layout == "columns":  # stock's math is right, and was not timed
        assert call().backend == "stock" and "No measured entry" in call().reasons["fa3"]
    else:
        assert call().backend == "fa3" and "without a visible key" in call().rescue


def test_what_is_broadcast_is_copied_once(kernels_on: str) -> None:
    case = new_case("copied heads", (2, 4, 4), (100, 136), (64, 64))
    inputs = make_inputs(case, kernels_on, SEED)
    call = on(kernels_on, CALLS["mask"](case.torch_dtype))
    k, v = (at_odd_address(x[:, :1]).expand(2, 4, 136, 64) for x in (inputs.k, inputs.v))
    odd, plain = (outputs([inputs.q, *kv], None, "fa3", call) for kv in ((k, v), (k.clone(), v.clone())))
    assert_bitwise_equal("heads", *odd, *plain)
    plan = torch_flashplug.explain(inputs.q, k, v, device="h100", **call)
    assert plan.copies.endswith("minus the broadcast part")


def test_plain_calls_are_not_copied() -> None:
    """They have kernels that go element by element."""
    q = torch.zeros(1, 2, 60, 64, dtype=torch.bfloat16)
    plan = PRESET(at_odd_address(q), q, q)
    assert plan.backend == "fa2" and plan.kernel.endswith("e") and not plan.copies


def test_other_head_dims_stay_with_stock() -> None:
    q = torch.zeros(1, 2, 60, 20, dtype=torch.bfloat16)
    plan = PRESET(q, q, q, attn_mask=torch.ones(60, 60, dtype=torch.bool))
    assert plan.backend == "stock" and "multiples of 8" in plan.reasons["fa3"] and not plan.copies
