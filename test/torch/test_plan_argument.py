"""plan= of attention() where no kernel runs: what it changes, which is nothing; what torch's tools make of it, what is
refused. Lists that kernels make are test_plans.py's.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_flashplug
from torch_flashplug import LengthsPlan, attention, explain_attention, plan

OPS = torch.ops.torch_flashplug


def drawn(*sizes: int, seed: int = 20261126) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def operands(rows: int = 17, device: str = "cpu") -> list[Tensor]:
    return [drawn(rows, heads, 16, seed=i).to(device) for i, heads in enumerate((4, 2, 2))]


def starts(*ends: int, device: str = "cpu") -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


def test_it_changes_nothing(device: str) -> None:
    """fp32 is mathematics everywhere."""
    leaves, cu = [x.requires_grad_() for x in operands(device=device)], starts(0, 5, 12, 17, device=device)
    made = plan(*leaves, causal=True, cu_seqlens_q=cu)
    assert isinstance(made, LengthsPlan) and made.lists is None and made.key == 0
    for more in ({}, {"return_lse": True}, {"sinks": torch.zeros(4, device=device)}):
        right, found = (attention(*leaves, causal=True, cu_seqlens_q=cu, **more, plan=one) for one in (None, made))
        for one, other in zip(right, found, strict=True):
            assert torch.equal(one, other)
    grads = (torch.autograd.grad(attention(*leaves, causal=True, cu_seqlens_q=cu, plan=one).sum(), leaves)
             for one in (None, made))  # fmt: skip
    assert all(map(torch.equal, *grads))


def test_another_call_is_refused_all_the_same() -> None:
    """Ahead of what runs: programs see on any machine what is wrong with them."""
    (q, k, v), cu = operands(), starts(0, 5, 17)
    made = plan(q, k, v, cu_seqlens_q=cu)
    for says, given, more in (
        ("q.shape.0. was 17 and is 16 now", (q[:-1], k[:-1], v[:-1]), {}),
        ("k.shape.0. was 17 and is 16 now", (q, k[:-1], v[:-1]), {}),
        (r"\(-1, -1, True\) and is \(-1, 0, True\) now", (q, k, v), {"causal": True}),
        ("from a different cu_seqlens_q tensor. Pass the same", (q, k, v), {"cu_seqlens_q": cu.clone()}),
        ("from a different seqused_k", (q, k, v), {"seqused_k": starts(5, 12)}),
    ):
        with pytest.raises(ValueError, match=f"attention: plan .*{says}"):
            attention(*given, **{"cu_seqlens_q": cu} | more, plan=made)
    cu.copy_(starts(0, 9, 17))
    with pytest.raises(ValueError, match="cu_seqlens_q was written to after plan was created. Create a new plan"):
        attention(q, k, v, cu_seqlens_q=cu, plan=made)


def test_what_autograd_does_not_count() -> None:
    """Seen all the same: other memory behind the same object, and another object of memory that was written to."""
    q, k, v = operands()

    def refused(says: str, cu: Tensor, made: LengthsPlan) -> None:
        with pytest.raises(ValueError, match=says):
            attention(q, k, v, cu_seqlens_q=cu, plan=made)

    cu = starts(0, 5, 17)
    made = plan(q, k, v, cu_seqlens_q=cu)
    attention(q, k, v, cu_seqlens_q=cu.data, plan=made)
    cu[1] = 9
    refused("cu_seqlens_q was written to", cu.data, made)
    cu = starts(0, 5, 17)
    made = plan(q, k, v, cu_seqlens_q=cu)
    cu.data = starts(0, 9, 17)
    refused("from a different cu_seqlens_q", cu, made)
    cu = starts(0, 5, 17)
    made = plan(q, k, v, cu_seqlens_q=cu)
    torch.utils.swap_tensors(cu, starts(0, 9, 17))
    refused("from a different cu_seqlens_q", cu, made)


def test_explain_attention_refuses_what_attention_does() -> None:
    (q, k, v), cu = operands(), starts(0, 5, 17)
    made = plan(q, k, v, causal=True, cu_seqlens_q=cu)
    assert explain_attention(q, k, v, causal=True, cu_seqlens_q=cu, plan=made).backend == "math"
    with pytest.raises(TypeError, match="plan must be the result .*, but got int"):
        explain_attention(q, k, v, cu_seqlens_q=cu, plan=3)
    with pytest.raises(ValueError, match="plan must be used with cu_seqlens_q"):
        explain_attention(*(x.unsqueeze(0) for x in (q, k, v)), causal=True, plan=made)
    with pytest.raises(ValueError, match="but the window .left, right, bottom_right. was"):
        explain_attention(q, k, v, cu_seqlens_q=cu, plan=made)


def test_what_is_refused() -> None:
    (q, k, v), cu = operands(), starts(0, 5, 17)
    made, batch = plan(q, k, v, cu_seqlens_q=cu), [x.unsqueeze(0) for x in (q, k, v)]
    with pytest.raises(TypeError, match="plan must be the result of torch_flashplug.plan.. or None, but got int"):
        attention(q, k, v, cu_seqlens_q=cu, plan=3)
    for more in ({}, {"seqused_k": starts(9)}):
        with pytest.raises(ValueError, match="plan must be used with cu_seqlens_q"):
            attention(*batch, **more, plan=made)
    for error, says, more in (
        (ValueError, "window must be .*, but got 3", {"window": 3}),
        (ValueError, "softcap must be .*, but got -1.0", {"softcap": -1.0}),
        (ValueError, "num_splits must be .*, but got 0", {"num_splits": 0}),
        (ValueError, "cu_seqlens_k must be an int32 tensor", {"cu_seqlens_k": cu.long()}),
        (ValueError, "the same number of sequences", {"seqused_k": cu}),
        (TypeError, "plan: gradients must be True, False or None, but got int", {"gradients": 1}),
    ):
        with pytest.raises(error, match=says):
            plan(q, k, v, **{"cu_seqlens_q": cu} | more)
    with pytest.raises(TypeError, match="q must be a tensor .*, but got 4-D"):
        plan(*batch, cu_seqlens_q=cu)


def test_opcheck(device: str) -> None:
    """Of ops that are given lists, which mathematics leaves alone."""
    q, k, v = (x.unsqueeze(0).transpose(1, 2).requires_grad_() for x in operands(device=device))
    cu, lists = starts(0, 5, 17, device=device), torch.zeros(2, 96, dtype=torch.int32, device=device)
    settings = (-1, 0, True, 0.0, None)
    torch.library.opcheck(OPS.attention_fwd, (q, k, v, None, cu, cu, None, *settings, 0, 0, lists, 5))
    out, lse = OPS.attention_fwd(q, k, v, None, cu, cu, None, *settings, 0, 0, lists, 5)
    kept = [x.detach() for x in (q, k, v, out, lse)]
    torch.library.opcheck(OPS._plan_lists, (q.detach(), k.detach(), v.detach(), cu, cu, None, *settings, 0, 0, True))
    given = (torch.ones_like(kept[3]), None, *kept, cu, cu, *settings, False, 0, 0, lists, 5)
    torch.library.opcheck(OPS.attention_bwd, given)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled(device: str) -> None:
    """A plan from outside, in one graph of all lengths."""

    def step(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, made: LengthsPlan) -> Tensor:
        first = attention(q * 1.0, k, v, causal=True, cu_seqlens_q=cu, plan=made)
        return attention(first, k, v, causal=True, cu_seqlens_q=cu, plan=made)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for ends in ((0, 5, 17), (0, 9, 20), (0, 1, 30)):
        leaves, cu = [x.requires_grad_() for x in operands(ends[-1], device)], starts(*ends, device=device)
        made = plan(*leaves, causal=True, cu_seqlens_q=cu)
        right, found = (call(*leaves, cu, made) for call in (step, compiled))
        torch.testing.assert_close(found, right)
        grads = (torch.autograd.grad(x.sum(), leaves) for x in (right, found))
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("fresh_dynamo")
def test_plans_are_made_outside_of_graphs() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> object:
        return plan(q, k, v, cu_seqlens_q=cu).lists

    with pytest.raises(Exception, match="outside of torch.compile"):
        call(*operands(), starts(0, 5, 17))


def test_vmap() -> None:
    """Sequences of all that is mapped are the same ones."""
    (q, k, v), cu = operands(), starts(0, 5, 17)
    many, made = torch.stack((q, 2 * q, 3 * q)), plan(q, k, v, cu_seqlens_q=cu)
    with pytest.raises(ValueError, match="from a different cu_seqlens_q"):
        torch.func.vmap(lambda cu: attention(q, k, v, cu_seqlens_q=cu, plan=made))(torch.stack((cu, cu)))
    found = torch.func.vmap(lambda q: attention(q, k, v, cu_seqlens_q=cu, plan=made))(many)
    for got, q in zip(found, many, strict=True):
        torch.testing.assert_close(got, attention(q, k, v, cu_seqlens_q=cu))


def test_of_autocast_and_inference() -> None:
    (q, k, v), cu = operands(), starts(0, 5, 17)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k, v, cu_seqlens_q=cu, plan=plan(q, k, v, cu_seqlens_q=cu)).dtype == torch.bfloat16
    with torch.inference_mode():
        cu = starts(0, 5, 17)  # whose versions nobody counts
        assert attention(q, k, v, cu_seqlens_q=cu, plan=plan(q, k, v, cu_seqlens_q=cu)).shape == q.shape


def test_8_bits() -> None:
    q, *pair = operands()
    k, v = (x.mul(30).to(torch.int8) for x in pair)
    given, cu = {"k_scale": 1 / 30, "v_scale": 1 / 30}, starts(0, 5, 17)
    q, made = q.bfloat16(), plan(q.bfloat16(), k, v, cu_seqlens_q=cu)
    right = attention(q, k, v, cu_seqlens_q=cu, **given)
    assert torch.equal(attention(q, k, v, cu_seqlens_q=cu, **given, plan=made), right)


def test_explained() -> None:
    """As the call without."""
    (q, k, v), cu = (x.bfloat16() for x in operands()), starts(0, 5, 17)
    made = plan(q, k, v, cu_seqlens_q=cu)
    told = [explain_attention(q, k, v, cu_seqlens_q=cu, device="h100", **more) for more in ({}, {"plan": made})]
    assert told[0] == told[1] and told[0].kernel


def test_it_is_of_the_package() -> None:
    assert {"plan", "LengthsPlan"} <= set(torch_flashplug.__all__)
