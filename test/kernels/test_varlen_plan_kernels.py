"""Tile lists of plan_varlen() in calls of our kernels, on a GPU or interpreted.

Results are bitwise equal to results without a plan, and a plan of a different call is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from cuda_graphs import call_on_side_stream
from deterministic import deterministic_gradients
from test_varlen_kernels import AHEAD, BACKENDS, BEHIND, SEED, SPECS, make_packed_call
from torch import Tensor

import torch_flashplug
from torch_flashplug import attention, plan_varlen
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import assert_bitwise_equal

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class VarlenCall:
    """Call of attention(): q, k, v (rows, heads, head dim), further arguments, and output gradients."""

    operands: tuple[Tensor, Tensor, Tensor]
    settings: dict[str, object]
    grads: tuple[Tensor, Tensor]

    def planned(self, **options: object) -> torch_flashplug.VarlenPlan:
        return plan_varlen(*self.operands, **self.settings, **options)

    def results(self, *, gradients: bool, **options: object) -> tuple[Tensor, ...]:
        """Return results and gradients of plugin kernels."""
        leaves = [x.detach().requires_grad_(gradients) for x in self.operands]
        bindings.counters(reset=True)
        results = attention(*leaves, **self.settings, return_lse=True, **options)
        if gradients:
            results = (*results, *torch.autograd.grad(results, leaves, self.grads))
        counts = bindings.counters(reset=True)
        assert counts["ours_fwd"] == 1 and counts["ours_bwd"] == gradients
        return tuple(x.detach().cpu() for x in results)


def make_varlen_call(device: str, lengths: str, spec: KernelSpec | None = None, **settings: object) -> VarlenCall:
    dims, dtype = ((64, 64), "bf16") if spec is None else ((spec.d, spec.dv), spec.dtype)
    call = make_packed_call(lengths, "causal", dims, dtype)
    q, k, v, do = (call.tensors[name][0].transpose(0, 1).to(device) for name in ("q", "k", "v", "do"))
    starts = {name: call.cu_seqlens(side, device) for side, name in enumerate(("cu_seqlens_q", "cu_seqlens_k"))}
    return VarlenCall((q, k, v), {"causal": True} | starts | settings, (do, call.tensors["dlse"][0].to(device)))


def assert_equal_results(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], apart: tuple[str, ...] = ()) -> None:
    """Check that results are bitwise equal, except results named in `apart`: sums in a random order."""
    for name, actual_tensor, expected_tensor in zip(NAMES, actual, expected, strict=False):
        if name in apart:
            torch.testing.assert_close(actual_tensor, expected_tensor, rtol=2e-2, atol=2e-2)
        else:
            assert_bitwise_equal(name, actual_tensor, expected_tensor)


@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.name)
def test_one_plan_serves_several_calls_of_every_kernel(
    kernels_on: str, spec: KernelSpec, kernel_alone: Callable[[KernelSpec], None]
) -> None:
    """A plan serves several calls."""
    kernel_alone(spec)
    settings = {"window": (40, 0)} | ({"softcap": 2.0} if "softcap" in spec.features else {})
    call = make_varlen_call(kernels_on, ("mixed", "short")[SPECS.index(spec) // 2 % 2], spec, **settings)
    with torch_flashplug.sdpa_backend(BACKENDS[spec.arch]):
        tile_plan = call.planned(gradients=spec.is_backward)
        assert tile_plan.lists.shape[0] == 1 + spec.is_backward
        expected = call.results(gradients=spec.is_backward)
        for _ in range(2):
            actual = call.results(gradients=spec.is_backward, plan=tile_plan)
            assert_equal_results(actual, expected, () if spec.is_split_backward else ("dq",))


def test_tile_lists_of_a_plan_are_read_and_not_rebuilt(kernels_on: str) -> None:
    """The kernel writes nothing if the list of tiles is empty."""
    call = make_varlen_call(kernels_on, "mixed")
    tile_plan, out = call.planned(), torch.full_like(call.operands[0], 7.0)
    with torch_flashplug.sdpa_backend("fa3"):
        attention(*call.operands, **call.settings, plan=tile_plan, out=out)
        assert (out != 7.0).any()
        tile_plan.lists.zero_()
        attention(*call.operands, **call.settings, plan=tile_plan, out=out.fill_(7.0))
        assert (out == 7.0).all()


def test_plan_builds_lists_without_reading_operands(kernels_on: str) -> None:
    """A plan does not read q, k, v."""
    call = make_varlen_call(kernels_on, "mixed")
    expected = call.results(gradients=True)
    bindings.counters(reset=True)
    nan_operands = tuple(torch.full_like(x, math.nan).requires_grad_() for x in call.operands)
    tile_plan = plan_varlen(*nan_operands, **call.settings)
    assert not any(bindings.counters(reset=True).values()) and tile_plan.lists.shape[0] == 2
    assert_equal_results(call.results(gradients=True, plan=tile_plan), expected, ("dq",))


def test_plan_made_in_inference_mode_serves_gradients(kernels_on: str) -> None:
    call = make_varlen_call(kernels_on, "mixed")
    with torch.inference_mode():
        tile_plan = call.planned(gradients=True)
    assert_equal_results(call.results(gradients=True, plan=tile_plan), call.results(gradients=True), ("dq",))


def test_plan_with_kv_lengths(kernels_on: str) -> None:
    used = torch.tensor([7, 0, 0, 129, 0, 3], dtype=torch.int32, device=kernels_on)
    call = make_varlen_call(kernels_on, "mixed", seqused_k=used)
    assert_equal_results(call.results(gradients=False, plan=call.planned()), call.results(gradients=False))


def test_backward_builds_missing_tile_lists(kernels_on: str) -> None:
    """A plan may lack lists of the backward, or the deterministic backward, a different kernel, may run."""
    call = make_varlen_call(kernels_on, "mixed")
    forward_plan, fused_plan = call.planned(gradients=False), call.planned(gradients=True)
    assert forward_plan.lists.shape[0] == 1
    with deterministic_gradients():
        expected = call.results(gradients=True)
        assert_equal_results(call.results(gradients=True, plan=forward_plan), expected)
        assert_equal_results(call.results(gradients=True, plan=fused_plan), expected)
        assert_equal_results(call.results(gradients=True, plan=call.planned(gradients=True)), expected)


def test_plans_of_different_calls_are_rejected(kernels_on: str) -> None:
    call = make_varlen_call(kernels_on, "mixed")
    (q, k, v), settings, tile_plan = call.operands, call.settings, call.planned()

    def assert_rejected(
        message: str, *operands: Tensor, plan: torch_flashplug.VarlenPlan = tile_plan, **changes: object
    ) -> None:
        with pytest.raises(ValueError, match=f"attention: .*{message}"):
            attention(*(operands or call.operands), **settings | changes, plan=plan)

    assert_rejected("plan must be made for this call, but q.shape.0. was [0-9]+ and is", q[:-BEHIND], k, v)
    assert_rejected("plan must be made for this call, but k.shape.0. was [0-9]+ and is", q, k[:-BEHIND], v[:-BEHIND])
    for window in ({"window": (AHEAD, 0)}, {"causal": False}, {"causal": "top_left"}):
        assert_rejected("but the window .left, right, bottom_right. was", **window)
    assert_rejected("from a different cu_seqlens_k", cu_seqlens_k=settings["cu_seqlens_k"].clone())
    assert_rejected("from a different seqused_k", seqused_k=torch.ones(6, dtype=torch.int32, device=kernels_on))
    assert_rejected("another call: the kernel", num_splits=1)
    assert_rejected("another call: the kernel", *(torch.cat((x, x), -1) for x in call.operands))  # head dim 128
    assert_rejected(
        "another call: the kernel", plan=tile_plan._replace(key=tile_plan.key + (1 << 24))
    )  # different facts
    equal_settings = {name: x.view(-1) for name, x in settings.items() if name != "causal"}
    attention(*call.operands, **settings | equal_settings, plan=tile_plan)  # different tensor objects with equal memory
    settings["cu_seqlens_q"].add_(0)
    assert_rejected("cu_seqlens_q was written to after")


@pytest.mark.usefixtures("fresh_dynamo")
def test_plan_is_an_argument_of_a_compiled_graph(kernels_on: str) -> None:
    """One graph serves all lengths, with plans as arguments; the graph also rejects a plan of a different kernel."""

    def layers(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, tile_plan: object) -> Tensor:
        kwargs = {"causal": True, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "plan": tile_plan}
        return attention(attention(q, k, v, **kwargs), k, v, **kwargs)

    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    for lengths in ("mixed", "equal", "odd"):
        call = make_varlen_call(kernels_on, lengths)
        leaves = [x.requires_grad_() for x in call.operands]
        starts = (call.settings["cu_seqlens_q"], call.settings["cu_seqlens_k"])
        tile_plan = call.planned()
        actual, expected = (
            run(*leaves, *starts, plan_or_none) for run, plan_or_none in ((compiled, tile_plan), (layers, None))
        )
        assert_bitwise_equal("out", actual, expected)
        for name, *grads in zip("qkv", *(torch.autograd.grad(x, leaves, call.grads[0]) for x in (actual, expected))):
            torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2, msg=name)
        with pytest.raises(RuntimeError, match="another call: the kernel"):
            compiled(*leaves, *starts, tile_plan._replace(key=tile_plan.key + (1 << 12)))


@pytest.mark.parametrize("mode", ["math", "stock"])
def test_reference_math_ignores_plans(kernels_on: str, mode: str) -> None:
    call = make_varlen_call(kernels_on, "mixed")
    tile_plan = call.planned()
    with torch_flashplug.sdpa_backend(mode):
        expected = attention(*call.operands, **call.settings)
        empty_plan = call.planned()
        assert empty_plan.lists is None and empty_plan.key == 0
        for any_plan in (tile_plan, empty_plan):
            assert_bitwise_equal("out", attention(*call.operands, **call.settings, plan=any_plan), expected)


@pytest.mark.gpu
def test_plan_does_not_synchronize_the_host() -> None:
    call = make_varlen_call("cuda", "mixed")
    call.results(gradients=True, plan=call.planned(gradients=True))
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(*call.operands, **call.settings, plan=call.planned(gradients=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True], ids=["captured", "ahead"])
def test_plan_inside_and_outside_of_a_cuda_graph(ahead: bool) -> None:
    """A captured plan follows the lengths of each replay; a plan made before the capture keeps its lengths.

    The graph has two attention layers.
    """
    call = make_varlen_call("cuda", "mixed")
    leaves, cu = [x.requires_grad_() for x in call.operands], call.settings["cu_seqlens_q"]
    fixed_plan = call.planned(gradients=True)

    def layers() -> tuple[Tensor, ...]:
        tile_plan = fixed_plan if ahead else call.planned(gradients=True)
        first_out = attention(*leaves, **call.settings, plan=tile_plan)
        second_out = attention(first_out, *leaves[1:], **call.settings, plan=tile_plan)
        return first_out, second_out, *torch.autograd.grad(second_out, leaves, call.grads[0])

    call_on_side_stream(layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers()
    starts = cu.clone()
    for moved in (0, 1, 20, 3):
        with torch.no_grad():
            cu[2:5] = starts[2:5] + moved
            for x in captured:
                x.fill_(math.nan)
        graph.replay()
        if ahead:
            cu.copy_(starts)
        first_out = attention(*leaves, **call.settings)
        second_out = attention(first_out, *leaves[1:], **call.settings)
        expected = (first_out, second_out, *torch.autograd.grad(second_out, leaves, call.grads[0]))
        assert_bitwise_equal("first", captured[0], expected[0])
        assert_bitwise_equal("second", captured[1], expected[1])
        for name, actual_grad, expected_grad in zip(("dq", "dk", "dv"), captured[2:], expected[2:], strict=True):
            torch.testing.assert_close(actual_grad, expected_grad, rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.gpu
def test_planned_call_waits_for_an_early_launching_producer() -> None:
    """Lists come from a plan, so no kernel runs between a call and the kernel writing the query."""
    draw = torch.Generator("cuda").manual_seed(SEED)
    queries, *cache = (torch.randn(64, rows, 4, 64, generator=draw, device="cuda").bfloat16() for rows in (4, 999, 999))
    used = torch.full((64,), 999, dtype=torch.int32, device="cuda")
    cu = torch.arange(0, 257, 32, dtype=torch.int32, device="cuda")
    k, v = (torch.randn(256, 4, 64, generator=draw, device="cuda").bfloat16() for _ in range(2))

    def query() -> Tensor:
        return attention(queries, *cache, seqused_k=used).flatten(0, 1)  # a decode kernel

    tile_plan = plan_varlen(query(), k, v, cu_seqlens_q=cu)
    torch.cuda.synchronize()
    expected = attention(query(), k, v, cu_seqlens_q=cu)
    outputs = [attention(query(), k, v, cu_seqlens_q=cu, plan=tile_plan) for _ in range(50)]
    assert all(torch.equal(out, expected) for out in outputs)
