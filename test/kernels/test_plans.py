"""Lists of tiles that plan() has made, in calls of kernels of ours on a GPU or interpreted: the same bits as without,
of no other call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from orders import in_order
from test_lengths import AHEAD, BACKENDS, BEHIND, SEED, SPECS, drawn
from torch import Tensor

import torch_flashplug
from torch_flashplug import attention, plan
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import assert_bitwise_equal

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Given:
    """A call of attention(): q, k, v (rows, heads, head dim), what else it has, and gradients of its results."""

    operands: tuple[Tensor, Tensor, Tensor]
    settings: dict[str, object]
    grads: tuple[Tensor, Tensor]

    def planned(self, **more: object) -> torch_flashplug.LengthsPlan:
        return plan(*self.operands, **self.settings, **more)

    def results(self, *, gradients: bool, **more: object) -> tuple[Tensor, ...]:
        """By kernels of ours, forward and backward."""
        leaves = [x.detach().requires_grad_(gradients) for x in self.operands]
        bindings.counters(reset=True)
        found = attention(*leaves, **self.settings, return_lse=True, **more)
        if gradients:
            found = (*found, *torch.autograd.grad(found, leaves, self.grads))
        counts = bindings.counters(reset=True)
        assert counts["ours_fwd"] == 1 and counts["ours_bwd"] == gradients
        return tuple(x.detach().cpu() for x in found)


def given(device: str, lengths: str, spec: KernelSpec | None = None, **settings: object) -> Given:
    dims, dtype = ((64, 64), "bf16") if spec is None else ((spec.d, spec.dv), spec.dtype)
    call = drawn(lengths, "causal", dims, dtype)
    q, k, v, do = (call.tensors[name][0].transpose(0, 1).to(device) for name in ("q", "k", "v", "do"))
    starts = {name: call.starts(side, device) for side, name in enumerate(("cu_seqlens_q", "cu_seqlens_k"))}
    return Given((q, k, v), {"causal": True} | starts | settings, (do, call.tensors["dlse"][0].to(device)))


def assert_same(found: tuple[Tensor, ...], right: tuple[Tensor, ...], apart: tuple[str, ...] = ()) -> None:
    """apart: what is added up in another order in every run."""
    for name, one, other in zip(NAMES, found, right, strict=False):
        if name in apart:
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        else:
            assert_bitwise_equal(name, one, other)


@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.name)
def test_every_kernel(kernels_on: str, spec: KernelSpec, kernel_alone: Callable[[KernelSpec], None]) -> None:
    """Several calls by one plan."""
    kernel_alone(spec)
    settings = {"window": (40, 0)} | ({"softcap": 2.0} if "softcap" in spec.features else {})
    call = given(kernels_on, ("mixed", "short")[SPECS.index(spec) // 2 % 2], spec, **settings)
    with torch_flashplug.sdpa_backend(BACKENDS[spec.arch]):
        made = call.planned(gradients=spec.is_backward)
        assert made.lists.shape[0] == 1 + spec.is_backward
        right = call.results(gradients=spec.is_backward)
        for _ in range(2):
            found = call.results(gradients=spec.is_backward, plan=made)
            assert_same(found, right, () if spec.in_parts else ("dq",))


def test_lists_are_read_and_not_made_again(kernels_on: str) -> None:
    """Of no tiles nothing is written."""
    call = given(kernels_on, "mixed")
    made, out = call.planned(), torch.full_like(call.operands[0], 7.0)
    with torch_flashplug.sdpa_backend("fa3"):
        attention(*call.operands, **call.settings, plan=made, out=out)
        assert (out != 7.0).any()
        made.lists.zero_()
        attention(*call.operands, **call.settings, plan=made, out=out.fill_(7.0))
        assert (out == 7.0).all()


def test_a_plan_makes_lists_and_nothing_else(kernels_on: str) -> None:
    """q, k, v are not read."""
    call = given(kernels_on, "mixed")
    right = call.results(gradients=True)
    bindings.counters(reset=True)
    nothing = tuple(torch.full_like(x, math.nan).requires_grad_() for x in call.operands)
    made = plan(*nothing, **call.settings)
    assert not any(bindings.counters(reset=True).values()) and made.lists.shape[0] == 2
    assert_same(call.results(gradients=True, plan=made), right, ("dq",))


def test_a_plan_of_inference_mode_has_gradients(kernels_on: str) -> None:
    call = given(kernels_on, "mixed")
    with torch.inference_mode():
        made = call.planned(gradients=True)
    assert_same(call.results(gradients=True, plan=made), call.results(gradients=True), ("dq",))


def test_keys_that_count(kernels_on: str) -> None:
    used = torch.tensor([7, 0, 0, 129, 0, 3], dtype=torch.int32, device=kernels_on)
    call = given(kernels_on, "mixed", seqused_k=used)
    assert_same(call.results(gradients=False, plan=call.planned()), call.results(gradients=False))


def test_a_backward_that_finds_no_lists_makes_them(kernels_on: str) -> None:
    """A plan may be without, or another kernel follows: gradients in order are another's."""
    call = given(kernels_on, "mixed")
    without, fused = call.planned(gradients=False), call.planned(gradients=True)
    assert without.lists.shape[0] == 1
    with in_order():
        right = call.results(gradients=True)
        assert_same(call.results(gradients=True, plan=without), right)
        assert_same(call.results(gradients=True, plan=fused), right)
        assert_same(call.results(gradients=True, plan=call.planned(gradients=True)), right)


def test_plans_of_other_calls(kernels_on: str) -> None:
    call = given(kernels_on, "mixed")
    (q, k, v), settings, made = call.operands, call.settings, call.planned()

    def refused(says: str, *operands: Tensor, plan: torch_flashplug.LengthsPlan = made, **more: object) -> None:
        with pytest.raises(ValueError, match=f"attention: .*{says}"):
            attention(*(operands or call.operands), **settings | more, plan=plan)

    refused("plan must be made for this call, but q.shape.0. was [0-9]+ and is", q[:-BEHIND], k, v)
    refused("plan must be made for this call, but k.shape.0. was [0-9]+ and is", q, k[:-BEHIND], v[:-BEHIND])
    for seen in ({"window": (AHEAD, 0)}, {"causal": False}, {"causal": "top_left"}):
        refused("but the window .left, right, bottom_right. was", **seen)
    refused("from a different cu_seqlens_k", cu_seqlens_k=settings["cu_seqlens_k"].clone())
    refused("from a different seqused_k", seqused_k=torch.ones(6, dtype=torch.int32, device=kernels_on))
    refused("another kernel", num_splits=1)
    refused("another kernel", *(torch.cat((x, x), -1) for x in call.operands))  # of D 128
    refused("another kernel", plan=made._replace(key=made.key + (1 << 24)))  # of other facts
    same = {name: x.view(-1) for name, x in settings.items() if name != "causal"}
    attention(*call.operands, **settings | same, plan=made)  # other objects, the same numbers
    settings["cu_seqlens_q"].add_(0)
    refused("cu_seqlens_q was written to after")


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled(kernels_on: str) -> None:
    """One graph of all lengths, whose plans come from outside; one of another kernel is refused in it, too."""

    def layers(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, made: object) -> Tensor:
        seen = {"causal": True, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "plan": made}
        return attention(attention(q, k, v, **seen), k, v, **seen)

    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    for lengths in ("mixed", "equal", "odd"):
        call = given(kernels_on, lengths)
        leaves = [x.requires_grad_() for x in call.operands]
        starts = (call.settings["cu_seqlens_q"], call.settings["cu_seqlens_k"])
        made = call.planned()
        found, right = (run(*leaves, *starts, one) for run, one in ((compiled, made), (layers, None)))
        assert_bitwise_equal("out", found, right)
        for name, *both in zip("qkv", *(torch.autograd.grad(x, leaves, call.grads[0]) for x in (found, right))):
            torch.testing.assert_close(*both, rtol=2e-2, atol=2e-2, msg=name)
        with pytest.raises(RuntimeError, match="another kernel"):
            compiled(*leaves, *starts, made._replace(key=made.key + (1 << 12)))


@pytest.mark.parametrize("mode", ["math", "stock"])
def test_mathematics_needs_no_plan(kernels_on: str, mode: str) -> None:
    call = given(kernels_on, "mixed")
    made = call.planned()
    with torch_flashplug.sdpa_backend(mode):
        right = attention(*call.operands, **call.settings)
        none = call.planned()
        assert none.lists is None and none.key == 0
        for one in (made, none):
            assert_bitwise_equal("out", attention(*call.operands, **call.settings, plan=one), right)


@pytest.mark.gpu
def test_the_host_waits_for_nothing() -> None:
    call = given("cuda", "mixed")
    call.results(gradients=True, plan=call.planned(gradients=True))
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(*call.operands, **call.settings, plan=call.planned(gradients=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True], ids=["captured", "ahead"])
def test_graphs(ahead: bool) -> None:
    """A plan that is captured, too, follows the lengths of each replay; one from ahead keeps its own. Two layers."""
    call = given("cuda", "mixed")
    leaves, cu = [x.requires_grad_() for x in call.operands], call.settings["cu_seqlens_q"]
    kept = call.planned(gradients=True)

    def layers() -> tuple[Tensor, ...]:
        made = kept if ahead else call.planned(gradients=True)
        first = attention(*leaves, **call.settings, plan=made)
        second = attention(first, *leaves[1:], **call.settings, plan=made)
        return first, second, *torch.autograd.grad(second, leaves, call.grads[0])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layers()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers()
    starts = cu.clone()
    for moved in (0, 1, 20, 3):
        with torch.no_grad():
            cu[2:5] = starts[2:5] + moved
            for x in found:
                x.fill_(math.nan)
        graph.replay()
        if ahead:
            cu.copy_(starts)
        first = attention(*leaves, **call.settings)
        second = attention(first, *leaves[1:], **call.settings)
        right = (first, second, *torch.autograd.grad(second, leaves, call.grads[0]))
        assert_bitwise_equal("first", found[0], right[0])
        assert_bitwise_equal("second", found[1], right[1])
        for name, got, one in zip(("dq", "dk", "dv"), found[2:], right[2:], strict=True):
            torch.testing.assert_close(got, one, rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.gpu
def test_behind_a_kernel_that_lets_others_start_early() -> None:
    """Of lists that are there already nothing stands between a call and the kernel that its query comes from."""
    draw = torch.Generator("cuda").manual_seed(SEED)
    few, *cache = (torch.randn(64, rows, 4, 64, generator=draw, device="cuda").bfloat16() for rows in (4, 999, 999))
    used = torch.full((64,), 999, dtype=torch.int32, device="cuda")
    cu = torch.arange(0, 257, 32, dtype=torch.int32, device="cuda")
    k, v = (torch.randn(256, 4, 64, generator=draw, device="cuda").bfloat16() for _ in range(2))

    def query() -> Tensor:
        return attention(few, *cache, seqused_k=used).flatten(0, 1)  # of few rows: decode's

    made = plan(query(), k, v, cu_seqlens_q=cu)
    torch.cuda.synchronize()
    right = attention(query(), k, v, cu_seqlens_q=cu)
    found = [attention(query(), k, v, cu_seqlens_q=cu, plan=made) for _ in range(50)]
    assert all(torch.equal(out, right) for out in found)
