"""The `plan` argument of attention() where no kernel runs.

A plan must not change results. The tests also cover the tools of torch and refused calls. test_varlen_plan_kernels.py
checks the lists made by kernels.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torch_flashplug
from torch_flashplug import VarlenPlan, attention, explain_attention, plan_varlen
from torch_flashplug.api import startup
from torch_flashplug.api.varlen_plan import KEY_ROW_BITS

ROOT = Path(__file__).resolve().parents[2]
OPS = torch.ops.torch_flashplug


def random_tensor(*sizes: int, seed: int = 20261126) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def make_operands(rows: int = 17, device: str = "cpu") -> list[Tensor]:
    return [random_tensor(rows, heads, 16, seed=i).to(device) for i, heads in enumerate((4, 2, 2))]


def make_cu_seqlens(*ends: int, device: str = "cpu") -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


def test_plan_does_not_change_results(device: str) -> None:
    """Use fp32, which reference math serves on every device."""
    leaves, cu = (
        [x.requires_grad_() for x in make_operands(device=device)],
        make_cu_seqlens(0, 5, 12, 17, device=device),
    )
    lengths_plan = plan_varlen(*leaves, causal=True, cu_seqlens_q=cu)
    assert isinstance(lengths_plan, VarlenPlan) and lengths_plan.lists is None and lengths_plan.key == 0
    for more in ({}, {"return_lse": True}, {"sinks": torch.zeros(4, device=device)}):
        without_plan, with_plan = (
            attention(*leaves, causal=True, cu_seqlens_q=cu, **more, plan=argument) for argument in (None, lengths_plan)
        )
        for argument, actual in zip(without_plan, with_plan, strict=True):
            assert torch.equal(argument, actual)
    grads = (torch.autograd.grad(attention(*leaves, causal=True, cu_seqlens_q=cu, plan=argument).sum(), leaves)
             for argument in (None, lengths_plan))  # fmt: skip
    assert all(map(torch.equal, *grads))


def test_plan_of_a_different_call_is_refused() -> None:
    """Refuse a plan of a different call before the dispatch, so that programs see the error on any machine."""
    (q, k, v), cu = make_operands(), make_cu_seqlens(0, 5, 17)
    lengths_plan = plan_varlen(q, k, v, cu_seqlens_q=cu)
    for says, tensors, more in (
        ("q.shape.0. was 17 and is 16 now", (q[:-1], k[:-1], v[:-1]), {}),
        ("k.shape.0. was 17 and is 16 now", (q, k[:-1], v[:-1]), {}),
        (r"\(-1, -1, True\) and is \(-1, 0, True\) now", (q, k, v), {"causal": True}),
        ("from a different cu_seqlens_q tensor. Pass the same", (q, k, v), {"cu_seqlens_q": cu.clone()}),
        ("from a different seqused_k", (q, k, v), {"seqused_k": make_cu_seqlens(5, 12)}),
    ):
        with pytest.raises(ValueError, match=f"attention: plan .*{says}"):
            attention(*tensors, **{"cu_seqlens_q": cu} | more, plan=lengths_plan)
    cu.copy_(make_cu_seqlens(0, 9, 17))
    with pytest.raises(ValueError, match="cu_seqlens_q was written to after plan was created. Create a new plan"):
        attention(q, k, v, cu_seqlens_q=cu, plan=lengths_plan)


def test_replaced_memory_of_cu_seqlens_is_detected() -> None:
    """Detect changes without a new version counter.

    One change replaces the memory behind a tensor object; the second change writes to memory through a different tensor
    object.
    """
    q, k, v = make_operands()

    def refused(says: str, cu: Tensor, lengths_plan: VarlenPlan) -> None:
        with pytest.raises(ValueError, match=says):
            attention(q, k, v, cu_seqlens_q=cu, plan=lengths_plan)

    cu = make_cu_seqlens(0, 5, 17)
    lengths_plan = plan_varlen(q, k, v, cu_seqlens_q=cu)
    attention(q, k, v, cu_seqlens_q=cu.data, plan=lengths_plan)
    cu[1] = 9
    refused("cu_seqlens_q was written to", cu.data, lengths_plan)
    cu = make_cu_seqlens(0, 5, 17)
    lengths_plan = plan_varlen(q, k, v, cu_seqlens_q=cu)
    cu.data = make_cu_seqlens(0, 9, 17)
    refused("from a different cu_seqlens_q", cu, lengths_plan)
    cu = make_cu_seqlens(0, 5, 17)
    lengths_plan = plan_varlen(q, k, v, cu_seqlens_q=cu)
    torch.utils.swap_tensors(cu, make_cu_seqlens(0, 9, 17))
    refused("from a different cu_seqlens_q", cu, lengths_plan)


def test_explain_attention_refuses_invalid_plans() -> None:
    (q, k, v), cu = make_operands(), make_cu_seqlens(0, 5, 17)
    lengths_plan = plan_varlen(q, k, v, causal=True, cu_seqlens_q=cu)
    assert explain_attention(q, k, v, causal=True, cu_seqlens_q=cu, plan=lengths_plan).backend == "math"
    with pytest.raises(TypeError, match="plan must be the result .*, but got int"):
        explain_attention(q, k, v, cu_seqlens_q=cu, plan=3)
    with pytest.raises(ValueError, match="plan must be used with cu_seqlens_q"):
        explain_attention(*(x.unsqueeze(0) for x in (q, k, v)), causal=True, plan=lengths_plan)
    with pytest.raises(ValueError, match="but the window .left, right, bottom_right. was"):
        explain_attention(q, k, v, cu_seqlens_q=cu, plan=lengths_plan)


def test_invalid_arguments_are_refused() -> None:
    (q, k, v), cu = make_operands(), make_cu_seqlens(0, 5, 17)
    lengths_plan, batch = plan_varlen(q, k, v, cu_seqlens_q=cu), [x.unsqueeze(0) for x in (q, k, v)]
    with pytest.raises(TypeError, match="result of torch_flashplug.plan_varlen.. or None, but got int"):
        attention(q, k, v, cu_seqlens_q=cu, plan=3)
    for more in ({}, {"seqused_k": make_cu_seqlens(9)}):
        with pytest.raises(ValueError, match="plan must be used with cu_seqlens_q"):
            attention(*batch, **more, plan=lengths_plan)
    for error, says, more in (
        (ValueError, "window must be .*, but got 3", {"window": 3}),
        (ValueError, "softcap must be .*, but got -1.0", {"softcap": -1.0}),
        (ValueError, "num_splits must be .*, but got 0", {"num_splits": 0}),
        (ValueError, "cu_seqlens_k must be an int32 tensor", {"cu_seqlens_k": cu.long()}),
        (ValueError, "the same number of sequences", {"seqused_k": cu}),
        (TypeError, "plan_varlen: gradients must be True, False or None, but got int", {"gradients": 1}),
    ):
        with pytest.raises(error, match=says):
            plan_varlen(q, k, v, **{"cu_seqlens_q": cu} | more)
    with pytest.raises(TypeError, match="q must be a tensor .*, but got 4-D"):
        plan_varlen(*batch, cu_seqlens_q=cu)


def test_ops_with_plan_lists_pass_opcheck(device: str) -> None:
    """Check ops that receive lists of a plan; reference math ignores the lists."""
    q, k, v = (x.unsqueeze(0).transpose(1, 2).requires_grad_() for x in make_operands(device=device))
    cu, lists = make_cu_seqlens(0, 5, 17, device=device), torch.zeros(2, 96, dtype=torch.int32, device=device)
    settings = (-1, 0, True, 0.0, None)
    torch.library.opcheck(OPS.attention_fwd, (q, k, v, None, cu, cu, None, *settings, 0, 0, lists, 5))
    out, lse = OPS.attention_fwd(q, k, v, None, cu, cu, None, *settings, 0, 0, lists, 5)
    kept = [x.detach() for x in (q, k, v, out, lse)]
    torch.library.opcheck(OPS._plan_lists, (q.detach(), k.detach(), v.detach(), cu, cu, None, *settings, 0, 0, True))
    arguments = (torch.ones_like(kept[3]), None, *kept, cu, cu, *settings, False, 0, 0, lists, 5)
    torch.library.opcheck(OPS.attention_bwd, arguments)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_call_accepts_a_plan(device: str) -> None:
    """Pass a plan from outside into a single graph for all lengths."""

    def step(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, lengths_plan: VarlenPlan) -> Tensor:
        first = attention(q * 1.0, k, v, causal=True, cu_seqlens_q=cu, plan=lengths_plan)
        return attention(first, k, v, causal=True, cu_seqlens_q=cu, plan=lengths_plan)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for ends in ((0, 5, 17), (0, 9, 20), (0, 1, 30)):
        leaves, cu = (
            [x.requires_grad_() for x in make_operands(ends[-1], device)],
            make_cu_seqlens(*ends, device=device),
        )
        lengths_plan = plan_varlen(*leaves, causal=True, cu_seqlens_q=cu)
        eager_out, compiled_out = (call(*leaves, cu, lengths_plan) for call in (step, compiled))
        torch.testing.assert_close(compiled_out, eager_out)
        grads = (torch.autograd.grad(x.sum(), leaves) for x in (eager_out, compiled_out))
        for eager_grad, compiled_grad in zip(*grads, strict=True):
            torch.testing.assert_close(eager_grad, compiled_grad)


@pytest.mark.usefixtures("fresh_dynamo")
def test_plans_are_made_outside_of_graphs() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> object:
        return plan_varlen(q, k, v, cu_seqlens_q=cu).lists

    with pytest.raises(Exception, match="outside of torch.compile"):
        call(*make_operands(), make_cu_seqlens(0, 5, 17))


def test_plan_applies_to_all_entries_of_vmap() -> None:
    """A plan is valid for all mapped entries, because all entries have the same sequences."""
    (q, k, v), cu = make_operands(), make_cu_seqlens(0, 5, 17)
    many, lengths_plan = torch.stack((q, 2 * q, 3 * q)), plan_varlen(q, k, v, cu_seqlens_q=cu)
    with pytest.raises(ValueError, match="from a different cu_seqlens_q"):
        torch.func.vmap(lambda cu: attention(q, k, v, cu_seqlens_q=cu, plan=lengths_plan))(torch.stack((cu, cu)))
    mapped = torch.func.vmap(lambda q: attention(q, k, v, cu_seqlens_q=cu, plan=lengths_plan))(many)
    for actual, q in zip(mapped, many, strict=True):
        torch.testing.assert_close(actual, attention(q, k, v, cu_seqlens_q=cu))


def test_plans_under_autocast_and_inference_mode() -> None:
    (q, k, v), cu = make_operands(), make_cu_seqlens(0, 5, 17)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k, v, cu_seqlens_q=cu, plan=plan_varlen(q, k, v, cu_seqlens_q=cu)).dtype == torch.bfloat16
    with torch.inference_mode():
        cu = make_cu_seqlens(0, 5, 17)  # inference tensors have no version counter
        assert attention(q, k, v, cu_seqlens_q=cu, plan=plan_varlen(q, k, v, cu_seqlens_q=cu)).shape == q.shape


def test_plan_of_8_bit_keys_does_not_change_results() -> None:
    q, *pair = make_operands()
    k, v = (x.mul(30).to(torch.int8) for x in pair)
    scales, cu = {"k_scale": 1 / 30, "v_scale": 1 / 30}, make_cu_seqlens(0, 5, 17)
    q, lengths_plan = q.bfloat16(), plan_varlen(q.bfloat16(), k, v, cu_seqlens_q=cu)
    expected = attention(q, k, v, cu_seqlens_q=cu, **scales)
    assert torch.equal(attention(q, k, v, cu_seqlens_q=cu, **scales, plan=lengths_plan), expected)


def test_explain_attention_does_not_change_with_a_plan() -> None:
    (q, k, v), cu = (x.bfloat16() for x in make_operands()), make_cu_seqlens(0, 5, 17)
    lengths_plan = plan_varlen(q, k, v, cu_seqlens_q=cu)
    plans = [
        explain_attention(q, k, v, cu_seqlens_q=cu, device="h100", **more) for more in ({}, {"plan": lengths_plan})
    ]
    assert plans[0] == plans[1] and plans[0].kernel


def test_explain_attention_refuses_a_plan_of_another_kernel() -> None:
    """Give a plan the lists of a kernel, as a plan made on a GPU has."""
    (q, k, v), cu = (x.bfloat16() for x in make_operands()), make_cu_seqlens(0, 5, 17)
    arguments = {"cu_seqlens_q": cu, "device": "h100"}
    row = startup.kernel_names().index(explain_attention(q, k, v, **arguments).kernel)
    empty_plan = plan_varlen(q, k, v, cu_seqlens_q=cu)
    right, wrong = (
        empty_plan._replace(lists=torch.zeros(1, 8, dtype=torch.int32), key=number + 1 << KEY_ROW_BITS)
        for number in (row, row + 1)
    )

    assert explain_attention(q, k, v, **arguments, plan=right).kernel == startup.kernel_names()[row]
    with pytest.raises(ValueError, match="attention: plan was made for another call: the kernel, the window") as raised:
        explain_attention(q, k, v, **arguments, plan=wrong)
    source = (ROOT / "src" / "operands" / "varlen_tile_list.cpp").read_text()
    assert str(raised.value).removeprefix("attention: ") in re.sub(r'"\s*\n\s*"', "", source)
    assert f"constexpr int kRowBits = {KEY_ROW_BITS};" in source


def test_package_exports_plan() -> None:
    assert {"plan_varlen", "VarlenPlan"} <= set(torch_flashplug.__all__)
