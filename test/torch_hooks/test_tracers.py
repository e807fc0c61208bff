"""Attention under torch.export, make_fx, torch.func, autocast, checkpoint and FLOP counting."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from conftest import CUDA
from device_backend import DeviceBackend, use_device_backend
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from traced_graphs import NESTED_MODES, TOLERANCE, attention_ops, causal, check_against_eager, nested, sdpa

from torch_flashplug import explain, sdpa_backend
from torch_flashplug.ops import sdpa as sdpa_ops
from torch_flashplug.torch_hooks import sdpa_composite, tracing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# ---- export and make_fx ----


class Nested(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nested(q, k, v)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_exported_program_keeps_plugin_ops(device_backend: DeviceBackend, strict: bool, dynamic: bool) -> None:
    inputs = tuple(device_backend.qkv())
    sizes = {name: {2: torch.export.Dim("rows", min=72, max=512)} for name in "qkv"} if dynamic else None
    program = torch.export.export(Nested(), inputs, dynamic_shapes=sizes, strict=strict)
    lowered = program.run_decompositions()
    assert attention_ops(lowered.graph) == [("fwd", mode) for mode in NESTED_MODES]
    inputs_of_export = tuple(device_backend.qkv(rows=200)) if dynamic else inputs
    expected = nested(*inputs_of_export)
    device_backend.pop_path_counts()
    torch.testing.assert_close(lowered.module()(*inputs_of_export), expected, **TOLERANCE)
    assert device_backend.pop_path_counts()["ours_fwd"] == len(NESTED_MODES)
    # the program contains `force` and aten ops
    torch.testing.assert_close(program.module()(*inputs_of_export), expected, **TOLERANCE)
    assert device_backend.pop_path_counts()["ours_fwd"] == len(NESTED_MODES)


def test_exported_program_survives_saving(device_backend: DeviceBackend, tmp_path) -> None:
    inputs = tuple(device_backend.qkv())
    path = tmp_path / "attention.pt2"
    torch.export.save(torch.export.export(Nested(), inputs).run_decompositions(), path)
    torch.testing.assert_close(torch.export.load(path).module()(*inputs), nested(*inputs), **TOLERANCE)


def test_lowered_program_can_be_differentiated(device_backend: DeviceBackend) -> None:
    q, k, v = device_backend.qkv(grad=True)
    lowered = torch.export.export(Nested(), (q, k, v)).run_decompositions().module()
    actual = torch.autograd.grad(lowered(q, k, v).float().square().sum(), (q, k, v))
    expected = torch.autograd.grad(nested(q, k, v).float().square().sum(), (q, k, v))
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b, atol=6e-1, rtol=6e-2)


def test_make_fx_keeps_the_aten_op(device_backend: DeviceBackend) -> None:
    """Without functionalization, the overrideable op is recorded unchanged and still runs our kernel."""
    q, k, v = device_backend.qkv()
    graph = make_fx(causal)(q, k, v)
    device_backend.pop_path_counts()
    torch.testing.assert_close(graph(q, k, v), causal(q, k, v), **TOLERANCE)
    assert device_backend.pop_path_counts()["ours_fwd"] == 2


def attend_with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q, k, v, mask)


region = torch.compiler.nested_compile_region(attend_with_mask)


def in_branches(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.cond(
        q.sum() > 0, attend_with_mask, lambda q, k, v, mask: attend_with_mask(q, k, v, ~mask), (q, k, v, mask)
    )


def in_regions(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    # every row has a visible key, because stock is wrong otherwise
    return region(q, k, v, mask) + region(k, q, v, mask.mT)


@pytest.mark.parametrize("function", [in_branches, in_regions])
def test_masks_in_nested_graphs(device_backend: DeviceBackend, function: Callable) -> None:
    """Trace masked calls in nested graphs.

    A separately traced region without functionalization leaves bool masks to stock. An inlined region runs on our
    kernels.
    """
    q, k, v = device_backend.qkv(grad=function is in_regions)
    mask = torch.ones(128, 128, dtype=torch.bool, device=device_backend.device).tril()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for sign in (1, -1):
        device_backend.pop_path_counts()
        actual = compiled(q * sign, k, v, mask)
        assert device_backend.pop_path_counts().get("ours_fwd", 0) or function is in_regions
        torch.testing.assert_close(actual, function(q * sign, k, v, mask), **TOLERANCE)


# ---- autocast, checkpoint, FLOPs ----


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_serves_fp32_inputs_in_16_bits(device_backend: DeviceBackend, compiled: bool) -> None:
    q, k, v = (tensor.float() for tensor in device_backend.qkv())

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(device_backend.device, torch.bfloat16):
            return sdpa(q, k, v)

    out = (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(q, k, v)
    assert out.dtype == torch.bfloat16 and device_backend.pop_path_counts()["ours_fwd"] == 1
    torch.testing.assert_close(out.float(), sdpa(q, k, v), **TOLERANCE)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients_equal_eager_mode(device_backend: DeviceBackend, reentrant: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(causal, q, k, v, use_reentrant=reentrant)

    check_against_eager(device_backend, causal, function, grad=True)


def test_selective_checkpoint_receives_the_aten_op(device_backend: DeviceBackend) -> None:
    def policy(context, op, *args, **kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is tracing.OVERRIDEABLE.default else CheckpointPolicy.PREFER_RECOMPUTE

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(
            causal, q, k, v, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )

    took = check_against_eager(device_backend, causal, function, grad=True)
    assert took.get("ours_fwd", 0) == 0 or took["ours_fwd"] == 1


def test_flop_count_equals_stock(device_backend: DeviceBackend) -> None:
    def count(function: Callable) -> int:
        with FlopCounterMode(display=False) as counter:
            function(*device_backend.qkv(grad=True)).sum().backward()
        return counter.get_total_flops()

    def call_plugin_op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa_ops.namespace.sdpa_fwd(q, k, v, None, 0.0, 1, None, 0)[0]

    batch, heads, rows, width = device_backend.qkv()[0].shape
    matmul = 2 * batch * heads * rows * rows * width
    assert count(causal) == count(call_plugin_op) == 7 * matmul  # two products forward, five backward


def test_flops_count_every_query_head_of_gqa(device_backend: DeviceBackend) -> None:
    q, k, v = device_backend.qkv(heads=4, kv_heads=2)
    with FlopCounterMode(display=False) as counter:
        sdpa(q, k, v, enable_gqa=True)
    assert counter.get_total_flops() == 2 * 2 * q.shape[0] * 4 * 128 * 128 * 64


# ---- torch.func ----


def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True).float().square().sum()


@pytest.mark.parametrize("compiled", [False, True])
def test_func_grad_equals_autograd(hooked_backend: DeviceBackend, compiled: bool) -> None:
    q, k, v = hooked_backend.qkv(grad=True)
    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    hooked_backend.pop_path_counts()
    function = torch.func.grad(loss, argnums=(0, 1, 2))
    actual = (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(
        *hooked_backend.qkv()
    )
    assert hooked_backend.pop_path_counts()["ours_fwd"] == 1
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b, atol=6e-2, rtol=6e-2)


def stack_three(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.stack([tensor, tensor * 0.5, -tensor]) for tensor in tensors]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 0, None)])
def test_vmap_equals_separate_calls(
    device_backend: DeviceBackend, compiled: bool, mapped: tuple[int | None, ...]
) -> None:
    plain = device_backend.qkv()
    inputs = [many if dim is not None else single for many, single, dim in zip(stack_three(plain), plain, mapped)]
    function = torch.vmap(causal, mapped)
    actual = (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(*inputs)
    assert device_backend.pop_path_counts().get("ours_fwd", 0) == 1
    for index in range(3):
        expected = causal(*(tensor[index] if dim is not None else tensor for tensor, dim in zip(inputs, mapped)))
        torch.testing.assert_close(actual[index], expected, **TOLERANCE)


def test_nested_vmap_equals_separate_calls(device_backend: DeviceBackend) -> None:
    inputs = stack_three(stack_three(device_backend.qkv(rows=72)))
    actual = torch.vmap(torch.vmap(causal))(*inputs)
    assert device_backend.pop_path_counts()["ours_fwd"] == 1
    torch.testing.assert_close(actual[1, 2], causal(*(tensor[1, 2] for tensor in inputs)), **TOLERANCE)


@pytest.mark.parametrize("compiled", [False, True])
def test_vmap_of_func_grad_equals_separate_calls(hooked_backend: DeviceBackend, compiled: bool) -> None:
    inputs = stack_three(hooked_backend.qkv())
    function = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))
    actual = (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(*inputs)
    assert hooked_backend.pop_path_counts()["ours_fwd"] == 1
    for index in range(3):
        leaves = [tensor[index].detach().requires_grad_() for tensor in inputs]
        for a, b in zip(actual, torch.autograd.grad(loss(*leaves), leaves)):
            torch.testing.assert_close(a[index], b, atol=6e-2, rtol=6e-2)


def test_jacrev_equals_separate_gradients(device_backend: DeviceBackend) -> None:
    # A size used by no other test, because cuDNN plans may belong to a different grad_out (src/stock/stock.cpp).
    q, k, v = device_backend.qkv(rows=104)
    jacobian = torch.func.jacrev(lambda x: sdpa(x, k, v).float().sum((0, 2, 3)))(q)
    expected = torch.func.grad(lambda x: sdpa(x, k, v).float()[:, 1].sum())(q)
    torch.testing.assert_close(jacobian[1], expected, atol=6e-2, rtol=6e-2)


# ---- compiled autograd ----


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("forced", ["auto", "fa3"])
def test_traced_backward_of_an_eager_forward(hooked_backend: DeviceBackend, masked: bool, forced: str) -> None:
    """The traced backward must use the mode and the saved mask of the eager op."""
    mask = torch.rand(128, 128, generator=torch.Generator().manual_seed(1)).to(hooked_backend.device) < 0.5
    graphs = []

    def compiler(graph: torch.fx.GraphModule) -> Callable:
        graphs.append(graph)
        return torch.compile(graph, backend="aot_eager")

    grads = []
    for context in (contextlib.nullcontext(), torch._dynamo.compiled_autograd._enable(compiler)):
        inputs = hooked_backend.qkv(grad=True)
        with context:
            with sdpa_backend(forced):
                out = sdpa(*inputs, mask if masked else None)
            out.float().square().sum().backward()
        grads.append([tensor.grad for tensor in inputs])
    assert graphs and hooked_backend.pop_path_counts()["ours_fwd"] == 2
    for actual, expected in zip(*grads):
        torch.testing.assert_close(actual, expected, atol=6e-2, rtol=6e-2)


# ---- known limits of the composite hook ----


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_composite_hook_leaves_vmap_to_stock(device: str) -> None:
    with use_device_backend(device, "composite_hook") as device_backend:
        inputs = stack_three(device_backend.qkv())
        actual = torch.vmap(causal)(*inputs)
        assert device_backend.pop_path_counts().get("ours_fwd", 0) == 0
        torch.testing.assert_close(actual[1], causal(*(tensor[1] for tensor in inputs)), **TOLERANCE)
        assert sdpa_composite.installed()


def test_explain_inside_a_transform(hooked_backend: DeviceBackend) -> None:
    """Tensors in a transform have no address."""
    plans = []

    def attend_and_explain(*inputs: Tensor) -> Tensor:
        plans.append(explain(*inputs, is_causal=True, device="h100"))
        return causal(*inputs)

    torch.vmap(attend_and_explain)(*stack_three(hooked_backend.qkv()))
    assert [plan.backend for plan in plans] == ["fa3"]
