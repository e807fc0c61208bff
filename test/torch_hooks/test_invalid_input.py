"""Odd and wrong input to F.sdpa: the plugin gives the error or result of stock.

Each case runs twice: without and with the plugin.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from deterministic import deterministic_gradients
from device_backend import DeviceBackend, use_device_backend
from stock_bug_inputs import strides
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask

import torch_flashplug
from torch_flashplug import attention, explain, explain_varlen, sdpa_backend
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.flash_attn import flash_attn_with_kvcache
from torch_flashplug.ops import sdpa
from torch_flashplug.registry.architectures import KERNEL_BACKENDS
from torch_flashplug.torch_hooks import describe_call

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
NAN, INF = float("nan"), float("inf")
Call = tuple[list[Any], dict[str, Any]]
CASES: dict[str, Callable[[DeviceBackend], Call]] = {}


def make_operands(
    device_backend: DeviceBackend, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...] | None = None
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(size, generator=generator).to(device_backend.device, device_backend.dtype)
        for size in (q, k, v or k)
    ]


def make_masked_call(device_backend: DeviceBackend, mask: Tensor, **settings: Any) -> Call:
    return [*device_backend.qkv(), mask.to(device_backend.device)], settings


def make_changed_call(
    device_backend: DeviceBackend, operand: int, change: Callable[[Tensor], Tensor], **settings: Any
) -> Call:
    tensors = device_backend.qkv()
    tensors[operand] = change(tensors[operand])
    return list(tensors), settings


def with_entry(tensor: Tensor, where: tuple, value: float) -> Tensor:
    tensor = tensor.clone(memory_format=torch.preserve_format)
    tensor[where] = value
    return tensor


# Calls rejected by stock.
CASES |= {
    "query_of_another_dtype": lambda device_backend: make_changed_call(
        device_backend, 0, lambda t: t.to(torch.float16)
    ),
    "value_of_another_dtype": lambda device_backend: make_changed_call(device_backend, 2, lambda t: t.float()),
    "key_on_another_device": lambda device_backend: make_changed_call(device_backend, 1, lambda t: t.to("meta")),
    "value_on_the_host": lambda device_backend: make_changed_call(device_backend, 2, lambda t: t.cpu().to("cpu")),
    "all_one_dim": lambda device_backend: (make_operands(device_backend, (64,), (64,)), {}),
    "key_one_dim": lambda device_backend: make_changed_call(device_backend, 1, lambda t: t[0, 0, 0]),
    "head_dims_differ": lambda device_backend: (make_operands(device_backend, (2, 4, 128, 64), (2, 4, 128, 32)), {}),
    "key_and_value_lengths_differ": lambda device_backend: (
        make_operands(device_backend, (2, 4, 128, 64), (2, 4, 128, 64), (2, 4, 96, 64)),
        {},
    ),
    "heads_differ_without_enable_gqa": lambda device_backend: (
        make_operands(device_backend, (2, 4, 128, 64), (2, 2, 128, 64)),
        {},
    ),
    "gqa_heads_do_not_divide": lambda device_backend: (
        make_operands(device_backend, (2, 4, 128, 64), (2, 3, 128, 64)),
        {"enable_gqa": True},
    ),
    "gqa_key_and_value_heads_differ": lambda device_backend: (
        make_operands(device_backend, (2, 4, 128, 64), (2, 2, 128, 64), (2, 4, 128, 64)),
        {"enable_gqa": True},
    ),
    "batches_do_not_broadcast": lambda device_backend: (
        make_operands(device_backend, (2, 4, 128, 64), (3, 4, 128, 64)),
        {},
    ),
    "mask_and_causal": lambda device_backend: make_masked_call(
        device_backend, torch.ones(128, 128, dtype=torch.bool), is_causal=True
    ),
    "int_mask": lambda device_backend: make_masked_call(device_backend, torch.ones(128, 128, dtype=torch.int32)),
    "mask_of_another_float": lambda device_backend: make_masked_call(
        device_backend, torch.zeros(128, 128, dtype=torch.float16)
    ),
    "mask_of_wrong_shape": lambda device_backend: make_masked_call(
        device_backend, torch.ones(128, 64, dtype=torch.bool)
    ),
    "mask_of_five_dims": lambda device_backend: make_masked_call(
        device_backend, torch.ones(1, 1, 1, 128, 128, dtype=torch.bool)
    ),
    "dropout_above_one": lambda device_backend: (device_backend.qkv(), {"dropout_p": 1.5}),
    "dropout_below_zero": lambda device_backend: (device_backend.qkv(), {"dropout_p": -0.5}),
    "int_tensors": lambda device_backend: ([t.to(torch.int32) for t in device_backend.qkv()], {}),
    "bool_tensors": lambda device_backend: ([t > 0 for t in device_backend.qkv()], {}),
    "none_for_key": lambda device_backend: ([device_backend.qkv()[0], None, device_backend.qkv()[2]], {}),
    "scale_is_a_string": lambda device_backend: (device_backend.qkv(), {"scale": "large"}),
}
REFUSED_BY_CUDNN = frozenset(CASES) | {"no_batch", "no_heads", "head_dim_0", "value_head_dim_0", "dropout_one"}
# Calls that stock serves and our kernels do not.
CASES |= {
    "fp64": lambda device_backend: ([t.double() for t in device_backend.qkv()], {}),
    "fp32": lambda device_backend: ([t.float() for t in device_backend.qkv()], {"is_causal": True}),
    "two_dims": lambda device_backend: (make_operands(device_backend, (128, 64), (96, 64)), {}),
    "three_dims": lambda device_backend: (make_operands(device_backend, (4, 128, 64), (4, 96, 64)), {}),
    "five_dims": lambda device_backend: (make_operands(device_backend, (2, 2, 4, 128, 64), (2, 2, 4, 96, 64)), {}),
    "one_key_head_broadcasts": lambda device_backend: (
        make_operands(device_backend, (2, 4, 128, 64), (2, 1, 128, 64)),
        {},
    ),
    "batch_broadcasts": lambda device_backend: (make_operands(device_backend, (2, 4, 128, 64), (1, 4, 128, 64)), {}),
    "no_keys": lambda device_backend: (make_operands(device_backend, (2, 4, 128, 64), (2, 4, 0, 64)), {}),
    "no_keys_causal": lambda device_backend: (
        make_operands(device_backend, (2, 4, 128, 64), (2, 4, 0, 64)),
        {"is_causal": True},
    ),
    "no_rows": lambda device_backend: (make_operands(device_backend, (2, 4, 0, 64), (2, 4, 128, 64)), {}),
    "no_batch": lambda device_backend: (make_operands(device_backend, (0, 4, 128, 64), (0, 4, 128, 64)), {}),
    "no_heads": lambda device_backend: (make_operands(device_backend, (2, 0, 128, 64), (2, 0, 128, 64)), {}),
    "head_dim_0": lambda device_backend: (
        make_operands(device_backend, (2, 4, 128, 0), (2, 4, 128, 0), (2, 4, 128, 64)),
        {},
    ),
    "value_head_dim_0": lambda device_backend: (
        make_operands(device_backend, (2, 4, 128, 64), (2, 4, 128, 64), (2, 4, 128, 0)),
        {},
    ),
    "head_dim_not_a_multiple_of_8": lambda device_backend: (
        make_operands(device_backend, (2, 4, 128, 20), (2, 4, 128, 20)),
        {},
    ),
    "head_dim_320": lambda device_backend: (make_operands(device_backend, (1, 2, 128, 320), (1, 2, 128, 320)), {}),
    "last_dim_not_contiguous": lambda device_backend: make_changed_call(
        device_backend, 1, lambda t: t.mT.contiguous().mT
    ),
    "every_other_element": lambda device_backend: ([torch.cat((t, t), -1)[..., ::2] for t in device_backend.qkv()], {}),
    "misaligned_storage_offset": lambda device_backend: make_changed_call(device_backend, 0, shifted_by_one),
    "misaligned_row_stride": lambda device_backend: make_changed_call(
        device_backend, 2, lambda t: torch.cat((t, t[..., :4]), -1)[..., :64]
    ),
    "row_hidden_by_bool_mask": lambda device_backend: make_masked_call(
        device_backend, with_entry(torch.ones(128, 128, dtype=torch.bool), (5,), False)
    ),
    "row_hidden_by_inf_mask": lambda device_backend: make_masked_call(
        device_backend, with_entry(torch.zeros(128, 128, dtype=torch.bfloat16), (5,), -INF)
    ),
    "row_of_lowest_values": lambda device_backend: make_masked_call(
        device_backend, with_entry(torch.zeros(128, 128), (5,), torch.finfo().min).bfloat16()
    ),
    "mask_of_one_row": lambda device_backend: make_masked_call(device_backend, torch.arange(128) < 100),
    "fp32_mask": lambda device_backend: make_masked_call(device_backend, torch.randn(2, 1, 128, 128)),
    "dropout_one": lambda device_backend: (device_backend.qkv(), {"dropout_p": 1.0}),
    "dropout_half": lambda device_backend: (device_backend.qkv(), {"dropout_p": 0.5}),
}
# Calls served both by stock and by our kernels.
CASES |= {
    "value_head_dim_differs": lambda device_backend: (
        make_operands(device_backend, (2, 4, 128, 64), (2, 4, 96, 64), (2, 4, 96, 32)),
        {},
    ),
    "causal_more_rows_than_keys": lambda device_backend: (
        make_operands(device_backend, (2, 4, 128, 64), (2, 4, 72, 64)),
        {"is_causal": True},
    ),
    "causal_more_keys_than_rows": lambda device_backend: (
        make_operands(device_backend, (2, 4, 72, 64), (2, 4, 128, 64)),
        {"is_causal": True},
    ),
    "one_key": lambda device_backend: (
        make_operands(device_backend, (2, 4, 128, 64), (2, 4, 1, 64)),
        {"is_causal": True},
    ),
    "expanded_heads": lambda device_backend: make_changed_call(device_backend, 1, lambda t: t[:, :1].expand_as(t)),
    "expanded_batch": lambda device_backend: make_changed_call(device_backend, 2, lambda t: t[:1].expand_as(t)),
    "odd_stride_of_a_size_one_dim": lambda device_backend: make_changed_call(
        device_backend, 0, lambda t: odd_stride(t[:1]).expand(2, -1, -1, -1)
    ),
    "odd_stride_of_one_head": lambda device_backend: ([odd_stride(t[:, :1], 1) for t in device_backend.qkv()], {}),
    "scale_zero": lambda device_backend: (device_backend.qkv(), {"scale": 0.0}),
    "scale_negative": lambda device_backend: (device_backend.qkv(), {"scale": -0.2}),
    "scale_nan": lambda device_backend: (device_backend.qkv(), {"scale": NAN}),
    "scale_inf": lambda device_backend: (device_backend.qkv(), {"scale": INF}),
    "nan_in_one_query_row": lambda device_backend: make_changed_call(
        device_backend, 0, lambda t: with_entry(t, (0, 1, 5), NAN)
    ),
    "nan_in_one_key": lambda device_backend: make_changed_call(
        device_backend, 1, lambda t: with_entry(t, (0, 1, 5, 3), NAN)
    ),
    "nan_in_a_value_that_causal_hides": lambda device_backend: make_changed_call(
        device_backend, 2, lambda t: with_entry(t, (0, 1, 100), NAN), is_causal=True
    ),
    "large_values": lambda device_backend: ([t * 133120 for t in device_backend.qkv()], {}),
}
# A hidden entry is either multiplied by zero or skipped, and rounding decides between equal huge scores. Even the
# backends of stock differ in these cases. The NaN entries of gradients depend on the tiles of the backward.
ANY_OUTPUT_ALLOWED = {"nan_in_a_value_that_causal_hides", "large_values"}
ANY_GRADS_ALLOWED = ANY_OUTPUT_ALLOWED | {"nan_in_one_query_row", "nan_in_one_key"}
# A row without visible keys has zero output in the plugin and in all backends of stock except cuDNN. cuDNN makes all
# keys visible to such a row.
BLIND_BY_CUDNN = {"row_hidden_by_bool_mask"}
# cuDNN reads fp32 masks as 16-bit masks, and the efficient attention refuses fp32 masks. Only math is right.
WIDE_FOR_CUDNN = {"fp32_mask"}
# Without the plugin, stock silently reads the wrong elements here.
MISREAD_BY_CUDNN = {"misaligned_storage_offset", "misaligned_row_stride"}


def shifted_by_one(tensor: Tensor) -> Tensor:
    storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return storage[1:].view(tensor.shape).copy_(tensor)


def odd_stride(tensor: Tensor, dim: int = 0) -> Tensor:
    strides = list(tensor.stride())
    strides[dim] = 3
    return tensor.as_strided(tensor.shape, strides)


Outcome = list[Tensor] | tuple[type, str]


def outcome(call: Call, grad: bool) -> Outcome:
    """Return the result and the gradients, or the type and first line of the error."""
    args = [
        t.detach().requires_grad_() if grad and isinstance(t, Tensor) and t.is_floating_point() else t for t in call[0]
    ]
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of stock about fused kernels that did not run
        try:
            out = F.scaled_dot_product_attention(*args, **call[1])
            if not grad:
                return [out]
            out.float().square().sum().backward()
            return [out.detach(), *(t.grad for t in args if isinstance(t, Tensor) and t.grad is not None)]
        except Exception as error:
            return type(error), str(error).splitlines()[0]


@pytest.fixture(params=[False, True], ids=["no_grad", "grad"])
def grad(request: pytest.FixtureRequest) -> Iterator[bool]:
    with torch.set_grad_enabled(request.param):
        yield request.param


@pytest.mark.parametrize("name", CASES)
def test_error_or_result_equals_stock(
    hooked_backend: DeviceBackend, name: str, grad: bool, request: pytest.FixtureRequest
) -> None:
    if name == "no_heads" and TORCH < (2, 13):
        pytest.skip("stock's kernels divide by the number of heads")
    if hooked_backend.device == "cuda" and name in REFUSED_BY_CUDNN | BLIND_BY_CUDNN:
        # torch 2.11 keeps the null plan of a call refused by cuDNN, and crashes when the same call is repeated.
        request.addfinalizer(lambda: torch.backends.cuda.enable_cudnn_sdp(True))
        torch.backends.cuda.enable_cudnn_sdp(False)
    call = CASES[name](hooked_backend)
    hooked_backend.disable()
    stock_call = call
    if hooked_backend.device == "cuda" and name in MISREAD_BY_CUDNN:
        stock_call = [tensor.clone() for tensor in call[0]], call[1]
    with contextlib.ExitStack() as stack:
        if hooked_backend.device == "cuda" and name in WIDE_FOR_CUDNN:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        expected = outcome(stock_call, grad)
    hooked_backend.enable()
    hooked_backend.pop_path_counts()
    actual = outcome(call, grad)
    served = hooked_backend.pop_path_counts().get("ours_fwd", 0) > 0
    if name == "dropout_one" and served:  # stock refuses this call or returns NaN
        assert not any(tensor.any() for tensor in actual)
        return
    if isinstance(expected, tuple) or isinstance(actual, tuple):
        assert actual == expected
        return
    # F.sdpa gives zeros, but the math op and the composite hook give the mean of value
    if name == "head_dim_0" and TORCH == (2, 12):
        expected_out = call[0][2].float().mean(2, keepdim=True).expand(actual[0].shape) * (
            hooked_backend.hook == "composite_hook"
        )
        torch.testing.assert_close(actual[0].float(), expected_out, atol=1e-2, rtol=1e-2)
        return
    assert len(actual) == len(expected)
    for index, (a, b) in enumerate(zip(actual, expected)):
        assert a.shape == b.shape and a.dtype == b.dtype
        # Our output has the layout of the query, as torch requires for the overrideable op. The flash and efficient
        # kernels of stock, which serve calls without cuDNN, always write (B, S, H, D).
        assert strides(a) == strides(b) or (served and index == 0 and strides(a) == strides(call[0][0]))
        if not served and (index == 0 or hooked_backend.device == "cpu"):  # the result of stock, bit for bit
            assert torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))
        elif index == 0 and name not in ANY_OUTPUT_ALLOWED:
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2, equal_nan=True)
        elif index > 0 and name not in ANY_GRADS_ALLOWED:
            torch.testing.assert_close(a, b, atol=2e-1, rtol=2e-1, equal_nan=True)
    assert name != "large_values" or actual[0].isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_explain_agrees_with_the_choice_hook(device_backend: DeviceBackend, name: str) -> None:
    """Compare explain with the choice hook.

    describe_call.py reads the facts of a call from Python tensors, and sdp_choice.cpp reads the facts in C++. A rule in
    only one of the two files fails here.
    """
    args, more = CASES[name](device_backend)
    device_backend.pop_path_counts()
    result = outcome((args, more), grad=False)
    if isinstance(result, tuple):
        pytest.skip("stock refuses the call")
    served = device_backend.pop_path_counts().get("ours_fwd", 0) > 0
    plan = torch_flashplug.explain(*args, **more, device=None if device_backend.device == "cuda" else "h100")
    assert (plan.backend in KERNEL_BACKENDS) == served, plan


# ---- facts of a call ----


def batch_of_one(device_backend: DeviceBackend, **more: Any) -> list[Tensor]:
    """Return a batch of size one, whose batch stride is arbitrary."""
    return [tensor[:1] for tensor in device_backend.qkv(**more)]


def changed_batch_of_one(operand_idx: int, change: Callable[[Tensor], Tensor]) -> Callable[[DeviceBackend], Call]:
    return lambda device_backend: (
        [change(t) if i == operand_idx else t for i, t in enumerate(batch_of_one(device_backend))],
        {},
    )


# For each fact, a call in which the fact differs from a plain call.
CHANGED_OPERANDS = {
    "dtype": Tensor.half,
    "last_stride": lambda t: t.mT.contiguous().mT,
    "align": lambda t: torch.cat((t, t[..., :4]), -1)[..., :64],
    "unaligned_base": shifted_by_one,
    "unaligned_unit_dim": odd_stride,
    "broadcast": lambda t: t[:, :1].expand_as(t),
}


def scores(device_backend: DeviceBackend) -> Tensor:
    return torch.zeros(128, 128, dtype=device_backend.dtype, device=device_backend.device)


def with_shared_values(operands: list[Tensor]) -> list[Tensor]:
    """Return query, key, and the first columns of key as value."""
    query, key, _ = operands
    return [query, key, key[..., :32]]


CALL_OF_FACT: dict[str, Callable[[DeviceBackend], Call]] = {
    "B": lambda device_backend: (device_backend.qkv(), {}),
    "Hq": lambda device_backend: (batch_of_one(device_backend, heads=8, kv_heads=4), {"enable_gqa": True}),
    "Hkv": lambda device_backend: (batch_of_one(device_backend, kv_heads=2), {"enable_gqa": True}),
    "Sq": lambda device_backend: (batch_of_one(device_backend, rows=72, keys=128), {}),
    "Sk": lambda device_backend: (batch_of_one(device_backend, keys=72), {}),
    "D": lambda device_backend: (make_operands(device_backend, (1, 4, 128, 32), (1, 4, 128, 32), (1, 4, 128, 64)), {}),
    "Dv": lambda device_backend: (make_operands(device_backend, (1, 4, 128, 64), (1, 4, 128, 64), (1, 4, 128, 32)), {}),
    "needs": lambda device_backend: (batch_of_one(device_backend), {"is_causal": True}),
    "on_cuda": lambda device_backend: (batch_of_one(device_backend), {}),
    "grad": lambda device_backend: (batch_of_one(device_backend, grad=True), {}),
    "deterministic": lambda device_backend: (batch_of_one(device_backend, grad=True), {}),
    "without_cudnn": lambda device_backend: (batch_of_one(device_backend), {}),
    "shared_values": lambda device_backend: (with_shared_values(batch_of_one(device_backend)), {}),
    "scale": lambda device_backend: (batch_of_one(device_backend), {"scale": -0.2}),
    "dropout_p": lambda device_backend: (batch_of_one(device_backend), {"dropout_p": 0.5}),
    "bias_grad": lambda device_backend: (
        batch_of_one(device_backend, grad=True),
        {"attn_mask": scores(device_backend).requires_grad_()},
    ),
    **{
        f"{fact}_{x}": changed_batch_of_one(i, change)
        for fact, change in CHANGED_OPERANDS.items()
        for i, x in enumerate("qkv")
    },
}


SDPA = {"attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}  # arguments of F.sdpa except the operands


def describe_facts(call: Call, on_cuda: bool = True) -> dict[str, float]:
    args, more = call
    settings = {"dropout_p": 0.0, "is_causal": False, "scale": None} | more
    settings.pop("enable_gqa", None)
    return describe_call.describe(*args, settings.pop("attn_mask", None), **settings) | {"on_cuda": on_cuda}


def call_plugin_op(query: Tensor, key: Tensor, value: Tensor, **more: object) -> Tensor:
    """Call the op of the plugin without the checks of torch, without the choice hook, and with additional arguments."""
    plain = sdpa.ForwardArgs(query, key, value, None, 0.0, sdpa.CAUSAL_NONE, None, 0)
    return torch.ops.torch_flashplug.sdpa_fwd(*plain._replace(**more))[0]


# Facts that F.sdpa cannot express.
FACTS_OF_ATTENTION = {
    "left",
    "right",
    "bottom_right",
    "softcap",
    "sequences",
    "batch_invariant",
    "split_size",
    "cost_ratio_192",
}


@pytest.mark.parametrize("fact", [fact for fact in bindings.problem_facts() if fact not in FACTS_OF_ATTENTION])
def test_describe_call_reports_every_fact(fact: str) -> None:
    """Compare the facts of describe_call.py with the facts behind a cached plan.

    The plan cache must contain a plan for exactly these facts after the call. A fact that no code reads would be equal
    in all calls.
    """
    with use_device_backend("cpu") as device_backend, sdpa_backend("fa3"):
        call, is_on_cuda = CALL_OF_FACT[fact](device_backend), fact != "on_cuda"
        bindings.set_cpu_stub(is_on_cuda)
        torch.use_deterministic_algorithms(fact == "deterministic")
        torch.backends.cuda.enable_cudnn_sdp(fact != "without_cudnn")
        try:
            facts = describe_facts(call, is_on_cuda), DEVICES["h100"], bindings.effective_mode()
            assert not bindings.is_remembered(*facts)
            with contextlib.suppress(RuntimeError):  # fa3 is forced, so that no call leaves before its facts are read
                uses_plugin_op = fact.startswith("dtype") or not is_on_cuda or not call[1].keys() <= SDPA
                attention = call_plugin_op if uses_plugin_op else F.scaled_dot_product_attention
                attention(*call[0], **call[1])
            assert bindings.is_remembered(*facts)
        finally:
            torch.use_deterministic_algorithms(False)
            torch.backends.cuda.enable_cudnn_sdp(True)
        assert facts[0][fact] != describe_facts((batch_of_one(device_backend), {}))[fact]


IRREGULAR = {
    "batch_of_key_and_value": ((4, 4, 128, 64), (1, 4, 128, 64), (1, 4, 128, 64)),
    "batch_of_value": ((4, 4, 128, 64), (4, 4, 128, 64), (1, 4, 128, 64)),
    "heads_of_value": ((2, 8, 128, 64), (2, 8, 128, 64), (2, 1, 128, 64)),
    "heads_of_query": ((2, 1, 128, 64), (2, 8, 128, 64), (2, 8, 128, 64)),
    "heads_that_only_gqa_takes": ((2, 8, 128, 64), (2, 2, 128, 64), (2, 2, 128, 64)),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", IRREGULAR)
def test_a_graph_of_unknown_shapes_broadcasts_or_refuses_as_stock_does(
    hooked_backend: DeviceBackend, name: str
) -> None:
    call = (make_operands(hooked_backend, *IRREGULAR[name]), {})
    hooked_backend.disable()
    expected = outcome(call, False)
    hooked_backend.enable()
    compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    if isinstance(expected, tuple):
        with pytest.raises(Exception, match="must match|size|shape"):
            compiled(*call[0])
    else:
        torch.testing.assert_close(compiled(*call[0]), expected[0], atol=2e-2, rtol=2e-2)
    assert hooked_backend.pop_path_counts().get("ours_fwd", 0) == 0


def test_rows_without_visible_keys_are_zero(device_backend: DeviceBackend) -> None:
    """Without any keys, outputs and gradients are zero, both in auto and with a forced backend."""
    q, k, v = (t.requires_grad_() for t in make_operands(device_backend, (2, 4, 128, 64), (2, 4, 0, 64)))
    out = F.scaled_dot_product_attention(q, k, v)
    out.sum().backward()
    assert out.eq(0).all() and q.grad.eq(0).all() and k.grad.shape == k.shape


def test_double_backward_is_refused_or_right(hooked_backend: DeviceBackend) -> None:
    q, k, v = hooked_backend.qkv(rows=72, grad=True)

    def second() -> Tensor | type:
        try:
            (first,) = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).float().sum(), q, create_graph=True)
            return torch.autograd.grad(first.float().square().sum(), q)[0]
        except RuntimeError as error:
            return type(error)

    hooked_backend.disable()
    expected = second()
    hooked_backend.enable()
    actual = second()
    # The fused kernels of stock and our kernels have no second derivative. The math of stock has a second derivative.
    assert (
        actual is RuntimeError
        if not isinstance(expected, Tensor) or isinstance(actual, type)
        else torch.equal(actual, expected)
    )


def test_autocast_serves_fp32_operands(hooked_backend: DeviceBackend) -> None:
    tensors = [t.float() for t in hooked_backend.qkv()]
    with torch.autocast(hooked_backend.device, torch.bfloat16):
        out = F.scaled_dot_product_attention(*tensors)
    assert out.dtype == torch.bfloat16 and hooked_backend.pop_path_counts()["ours_fwd"] == 1


@pytest.mark.parametrize("training", [False, True])
def test_deterministic_mode_raises_only_where_stock_raises(device_backend: DeviceBackend, training: bool) -> None:
    """Deterministic mode must raise an error only where stock raises an error."""
    with deterministic_gradients():
        device_backend.disable()
        expected = outcome((device_backend.qkv(), {}), training)
        device_backend.enable()
        actual = outcome((device_backend.qkv(), {}), training)
    assert isinstance(actual, tuple) == isinstance(expected, tuple)


_MASKS_WITH_OBSTACLES = {
    "dtype": ((1, 1, 8, 8), torch.zeros(8, 8, dtype=torch.float64)),
    "layout": ((1, 1, 8, 8), torch.ones(8, 8, dtype=torch.bool).to_sparse()),
    "dims": ((1, 1, 8, 8), torch.ones(8, dtype=torch.bool)),
    "shape": ((1, 1, 8, 8), torch.ones(8, 4, dtype=torch.bool)),
    "device": ((1, 1, 8, 8), torch.ones(8, 8, dtype=torch.bool, device="meta")),
    # More than 2^31 - 1 numbers in a plane, and more than 2^32 - 1 in all planes.
    "size": ((1, 1, 1 << 20, 1 << 20), torch.ones(1 << 20, 1 << 20, dtype=torch.bool, device="meta")),
    "size of all planes": (
        (64, 64, 16384, 16384),
        torch.ones(64, 64, 16384, 16384, dtype=torch.bool, device="meta"),
    ),
}


@pytest.mark.parametrize("name", _MASKS_WITH_OBSTACLES)
def test_every_obstacle_of_a_mask_has_a_text(name: str) -> None:
    (B, H, Sq, Sk), mask = _MASKS_WITH_OBSTACLES[name]
    device = "meta" if name.startswith("size") else "cpu"
    query, key = (torch.empty(B, H, rows, 64, dtype=torch.bfloat16, device=device) for rows in (Sq, Sk))
    text = describe_call.misfit(query, key, mask)
    assert text is not None and text.startswith("attn_mask ")
    assert ("too large" in text) == name.startswith("size")
    assert describe_call.misfit(query, key, torch.ones(1, 1, dtype=torch.bool, device=device)) is None


def test_every_obstacle_of_a_mask_is_tested() -> None:
    assert set(bindings.names("mask obstacles")) - {"none"} <= set(_MASKS_WITH_OBSTACLES)


_SIZES_WITH_OBSTACLES = {  # sizes of query, key and value, and enable_gqa
    "batch": ((2, 4, 8, 64), (1, 4, 8, 64), (2, 4, 8, 64), False),
    "head dim": ((1, 4, 8, 64), (1, 4, 8, 32), (1, 4, 8, 64), False),
    "value heads": ((1, 4, 8, 64), (1, 4, 8, 64), (1, 2, 8, 64), False),
    "value rows": ((1, 4, 8, 64), (1, 4, 8, 64), (1, 4, 9, 64), False),
    "groups": ((1, 4, 8, 64), (1, 3, 8, 64), (1, 3, 8, 64), True),
    "heads": ((1, 4, 8, 64), (1, 2, 8, 64), (1, 2, 8, 64), False),
}


def test_every_obstacle_of_shapes_has_a_text() -> None:
    assert tuple(_SIZES_WITH_OBSTACLES) == bindings.names("shape obstacles")[1:]
    for name, (*sizes, enable_gqa) in _SIZES_WITH_OBSTACLES.items():
        assert bindings.shape_obstacle(sizes, enable_gqa) == name
        assert "but got" in describe_call.shape_obstacle(*sizes, enable_gqa)
    assert describe_call.shape_obstacle((1, 4, 8, 64), (1, 1, 8, 64), (1, 1, 8, 32), enable_gqa=False) is None


def test_explain_rejects_operands_that_are_no_tensors() -> None:
    q = torch.zeros(1, 1, 8, 64)
    with pytest.raises(TypeError, match="^explain: key must be a torch.Tensor, but got ndarray.$"):
        explain(q, q.numpy(), q)


@pytest.mark.parametrize("name", ["h100", "H100", "RTX4090"])
def test_explain_takes_device_names_in_any_case(name: str) -> None:
    q = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
    assert explain(q, q, q, device=name) == explain(q, q, q, device=name.lower())


def test_a_scale_that_is_no_number_is_refused() -> None:
    q, cu = torch.zeros(1, 128, 1, 64), torch.tensor([0, 128]).int()
    cache = torch.zeros(1, 256, 1, 64)
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 128, 128, device="cpu")
    for function, call in {
        "attention": lambda scale: attention(q, q, q, scale=scale),
        "attention (block mask)": lambda scale: attention(q, q, q, scale=scale, block_mask=mask),
        "attention (explained)": lambda scale: torch_flashplug.explain_attention(q, q, q, scale=scale),
        "attention (appended)": lambda scale: flash_attn_with_kvcache(
            q, cache, cache, q, q, cache_seqlens=4, softmax_scale=scale
        ),
        "explain": lambda scale: explain(q, q, q, scale=scale),
        "explain_varlen": lambda scale: explain_varlen(q[0], q[0], q[0], cu, cu, 128, 128, scale=scale),
    }.items():
        with pytest.raises(TypeError, match=f"^{function.split()[0]}: scale must be a number .* but got 'large'.$"):
            call("large")
        with pytest.raises(TypeError, match=r"scale must be a number .* but got a tensor of torch.float32 \(2,\).$"):
            call(torch.ones(2))
    assert not cache.any()
    assert torch.equal(attention(q, q, q, scale=np.float32(0.5)), attention(q, q, q, scale=0.5))


def test_operands_without_a_batch_dim_are_pointed_to_cu_seqlens() -> None:
    x = torch.randn(4, 8, 64)
    with pytest.raises(TypeError, match=r"q must be .*, or \(tokens, heads, head dim\) with cu_seqlens_q, but got 3-D"):
        attention(x, x, x)
