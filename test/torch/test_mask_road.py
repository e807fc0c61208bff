"""The way of a bool mask from F.sdpa to our op, which is given floats that torch made of it: the mask of one call never
meets another.
"""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from standin import Road
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_flashplug
from torch_flashplug import native

CARRIER = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
CAUSAL = torch.ones(128, 128, dtype=torch.bool).tril()


def right(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q.double() @ k.double().mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v.double()


def check(out: Tensor, *call: Tensor) -> None:
    torch.testing.assert_close(out.double(), right(*call), atol=2e-2, rtol=2e-2)


class Swallows(TorchDispatchMode):
    """The op of a call never runs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is CARRIER.default:
            return CARRIER(*(x.clone() for x in args[:3]))
        return func(*args, **(kwargs or {}))


class Passes(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def mask_on(road: Road) -> Tensor:
    return CAUSAL.to(road.device)


def test_masked_calls_are_ours(any_road: Road) -> None:
    q, k, v = any_road.qkv()
    for mask in (mask_on(any_road), ~mask_on(any_road), mask_on(any_road)[None], mask_on(any_road)[:1]):
        check(F.scaled_dot_product_attention(q, k, v, mask), q, k, v, mask)
        assert any_road.took()["ours_fwd"] == 1


def test_a_mask_is_for_one_call(road: Road) -> None:
    """Then calls of the same query with a mask of floats, with none, and of the op itself."""
    q, k, v = road.qkv()
    mask, every = mask_on(road), torch.ones_like(mask_on(road))
    zeros = torch.zeros(128, 128, dtype=q.dtype, device=q.device)
    for call in (
        lambda: F.scaled_dot_product_attention(q, k, v, zeros),
        lambda: F.scaled_dot_product_attention(q, k, v),
        lambda: CARRIER(q, k, v, zeros)[0],
        lambda: CARRIER(q, k, v)[0],
    ):
        check(F.scaled_dot_product_attention(q, k, v, mask), q, k, v, mask)
        check(call(), q, k, v, every)


def test_a_mask_whose_op_never_ran_is_forgotten(road: Road) -> None:
    q, k, v = road.qkv()
    mask, zeros = mask_on(road), torch.zeros(128, 128, dtype=q.dtype, device=q.device)
    with Swallows():
        F.scaled_dot_product_attention(q, k, v, mask)
    check(CARRIER(q, k, v, zeros)[0], q, k, v, torch.ones_like(mask))


def test_under_a_mode_masked_calls_are_stocks(road: Road) -> None:
    q, k, v = road.qkv()
    mask = mask_on(road)
    road.took()
    with Passes():
        check(F.scaled_dot_product_attention(q, k, v, mask), q, k, v, mask)
    assert road.took().get("ours_fwd", 0) == 0


def test_threads_have_their_own(road: Road) -> None:
    """All of the same query."""
    q, k, v = road.qkv()
    masks = [mask_on(road).roll(shift, 0) for shift in range(4)]
    outs: dict[int, list[Tensor]] = {}

    def work(number: int) -> None:
        outs[number] = [F.scaled_dot_product_attention(q, k, v, masks[number]) for _ in range(50)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(masks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, found in outs.items():
        for out in found:
            check(out, q, k, v, masks[number])


def test_a_mask_is_not_held(road: Road) -> None:
    """Neither after its call, nor after one whose op never ran and another."""
    q, k, v = road.qkv()
    mask = mask_on(road).clone()
    before = mask.untyped_storage()._use_count() if hasattr(mask.untyped_storage(), "_use_count") else None
    F.scaled_dot_product_attention(q, k, v, mask)
    F.scaled_dot_product_attention(q, k, v)
    if before is not None:
        assert mask.untyped_storage()._use_count() == before


def test_gradients_of_a_masked_call_are_right(road: Road) -> None:
    """Auto leaves them to stock; forced, math's backward follows our forward."""
    for forced in ("auto", "fa3"):
        q, k, v = road.qkv(grad=True)
        mask = mask_on(road)
        mask[5] = False
        with torch_flashplug.sdpa_backend(forced):
            out = F.scaled_dot_product_attention(q, k, v, mask)
            grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
        exact = right(*exact_inputs, mask)
        for got, want in zip(grads, torch.autograd.grad(exact.square().sum(), exact_inputs), strict=True):
            torch.testing.assert_close(got.double(), want.nan_to_num(), atol=0.2, rtol=0.2)
    assert native.last_error() is not None
