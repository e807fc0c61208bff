"""Odd and wrong input to F.sdpa: with the plugin the same error or the same result as without. Every case is run twice,
plugin off and on.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from faults import strides
from orders import in_order
from standin import Road, road_to
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_flashplug
from torch_flashplug import sdpa_backend
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import sdpa
from torch_flashplug.registry.architectures import KERNEL_BACKENDS
from torch_flashplug.torch_hooks import describe_call

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
NAN, INF = float("nan"), float("inf")
Call = tuple[list[Any], dict[str, Any]]
CASES: dict[str, Callable[[Road], Call]] = {}


def sized(road: Road, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...] | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator).to(road.device, road.dtype) for size in (q, k, v or k)]


def masked(road: Road, mask: Tensor, **settings: Any) -> Call:
    return [*road.qkv(), mask.to(road.device)], settings


def changed(road: Road, operand: int, change: Callable[[Tensor], Tensor], **settings: Any) -> Call:
    tensors = road.qkv()
    tensors[operand] = change(tensors[operand])
    return list(tensors), settings


def poked(tensor: Tensor, where: tuple, value: float) -> Tensor:
    tensor = tensor.clone(memory_format=torch.preserve_format)
    tensor[where] = value
    return tensor


# What stock rejects.
CASES |= {
    "query_of_another_dtype": lambda road: changed(road, 0, lambda t: t.to(torch.float16)),
    "value_of_another_dtype": lambda road: changed(road, 2, lambda t: t.float()),
    "key_on_another_device": lambda road: changed(road, 1, lambda t: t.to("meta")),
    "value_on_the_host": lambda road: changed(road, 2, lambda t: t.cpu().to("cpu")),
    "all_one_dim": lambda road: (sized(road, (64,), (64,)), {}),
    "key_one_dim": lambda road: changed(road, 1, lambda t: t[0, 0, 0]),
    "head_dims_differ": lambda road: (sized(road, (2, 4, 128, 64), (2, 4, 128, 32)), {}),
    "key_and_value_lengths_differ": lambda road: (sized(road, (2, 4, 128, 64), (2, 4, 128, 64), (2, 4, 96, 64)), {}),
    "heads_differ_without_enable_gqa": lambda road: (sized(road, (2, 4, 128, 64), (2, 2, 128, 64)), {}),
    "gqa_heads_do_not_divide": lambda road: (sized(road, (2, 4, 128, 64), (2, 3, 128, 64)), {"enable_gqa": True}),
    "gqa_key_and_value_heads_differ": lambda road: (
        sized(road, (2, 4, 128, 64), (2, 2, 128, 64), (2, 4, 128, 64)),
        {"enable_gqa": True},
    ),
    "batches_do_not_broadcast": lambda road: (sized(road, (2, 4, 128, 64), (3, 4, 128, 64)), {}),
    "mask_and_causal": lambda road: masked(road, torch.ones(128, 128, dtype=torch.bool), is_causal=True),
    "int_mask": lambda road: masked(road, torch.ones(128, 128, dtype=torch.int32)),
    "mask_of_another_float": lambda road: masked(road, torch.zeros(128, 128, dtype=torch.float16)),
    "mask_of_wrong_shape": lambda road: masked(road, torch.ones(128, 64, dtype=torch.bool)),
    "mask_of_five_dims": lambda road: masked(road, torch.ones(1, 1, 1, 128, 128, dtype=torch.bool)),
    "dropout_above_one": lambda road: (road.qkv(), {"dropout_p": 1.5}),
    "dropout_below_zero": lambda road: (road.qkv(), {"dropout_p": -0.5}),
    "int_tensors": lambda road: ([t.to(torch.int32) for t in road.qkv()], {}),
    "bool_tensors": lambda road: ([t > 0 for t in road.qkv()], {}),
    "none_for_key": lambda road: ([road.qkv()[0], None, road.qkv()[2]], {}),
    "scale_is_a_string": lambda road: (road.qkv(), {"scale": "large"}),
}
REFUSED_BY_CUDNN = frozenset(CASES) | {"no_batch", "no_heads", "head_dim_0", "value_head_dim_0", "dropout_one"}
# What stock serves, and our kernels do not.
CASES |= {
    "fp64": lambda road: ([t.double() for t in road.qkv()], {}),
    "fp32": lambda road: ([t.float() for t in road.qkv()], {"is_causal": True}),
    "two_dims": lambda road: (sized(road, (128, 64), (96, 64)), {}),
    "three_dims": lambda road: (sized(road, (4, 128, 64), (4, 96, 64)), {}),
    "five_dims": lambda road: (sized(road, (2, 2, 4, 128, 64), (2, 2, 4, 96, 64)), {}),
    "one_key_head_broadcasts": lambda road: (sized(road, (2, 4, 128, 64), (2, 1, 128, 64)), {}),
    "batch_broadcasts": lambda road: (sized(road, (2, 4, 128, 64), (1, 4, 128, 64)), {}),
    "no_keys": lambda road: (sized(road, (2, 4, 128, 64), (2, 4, 0, 64)), {}),
    "no_keys_causal": lambda road: (sized(road, (2, 4, 128, 64), (2, 4, 0, 64)), {"is_causal": True}),
    "no_rows": lambda road: (sized(road, (2, 4, 0, 64), (2, 4, 128, 64)), {}),
    "no_batch": lambda road: (sized(road, (0, 4, 128, 64), (0, 4, 128, 64)), {}),
    "no_heads": lambda road: (sized(road, (2, 0, 128, 64), (2, 0, 128, 64)), {}),
    "head_dim_0": lambda road: (sized(road, (2, 4, 128, 0), (2, 4, 128, 0), (2, 4, 128, 64)), {}),
    "value_head_dim_0": lambda road: (sized(road, (2, 4, 128, 64), (2, 4, 128, 64), (2, 4, 128, 0)), {}),
    "head_dim_not_a_multiple_of_8": lambda road: (sized(road, (2, 4, 128, 20), (2, 4, 128, 20)), {}),
    "head_dim_320": lambda road: (sized(road, (1, 2, 128, 320), (1, 2, 128, 320)), {}),
    "last_dim_not_contiguous": lambda road: changed(road, 1, lambda t: t.mT.contiguous().mT),
    "every_other_element": lambda road: ([torch.cat((t, t), -1)[..., ::2] for t in road.qkv()], {}),
    "misaligned_storage_offset": lambda road: changed(road, 0, shifted_by_one),
    "misaligned_row_stride": lambda road: changed(road, 2, lambda t: torch.cat((t, t[..., :4]), -1)[..., :64]),
    "row_hidden_by_bool_mask": lambda road: masked(road, poked(torch.ones(128, 128, dtype=torch.bool), (5,), False)),
    "row_hidden_by_inf_mask": lambda road: masked(road, poked(torch.zeros(128, 128, dtype=torch.bfloat16), (5,), -INF)),
    "row_of_lowest_values": lambda road: masked(road, poked(torch.zeros(128, 128), (5,), torch.finfo().min).bfloat16()),
    "mask_of_one_row": lambda road: masked(road, torch.arange(128) < 100),
    "fp32_mask": lambda road: masked(road, torch.randn(2, 1, 128, 128)),
    "dropout_one": lambda road: (road.qkv(), {"dropout_p": 1.0}),
    "dropout_half": lambda road: (road.qkv(), {"dropout_p": 0.5}),
}
# What both serve.
CASES |= {
    "value_head_dim_differs": lambda road: (sized(road, (2, 4, 128, 64), (2, 4, 96, 64), (2, 4, 96, 32)), {}),
    "causal_more_rows_than_keys": lambda road: (sized(road, (2, 4, 128, 64), (2, 4, 72, 64)), {"is_causal": True}),
    "causal_more_keys_than_rows": lambda road: (sized(road, (2, 4, 72, 64), (2, 4, 128, 64)), {"is_causal": True}),
    "one_key": lambda road: (sized(road, (2, 4, 128, 64), (2, 4, 1, 64)), {"is_causal": True}),
    "expanded_heads": lambda road: changed(road, 1, lambda t: t[:, :1].expand_as(t)),
    "expanded_batch": lambda road: changed(road, 2, lambda t: t[:1].expand_as(t)),
    "odd_stride_of_a_size_one_dim": lambda road: changed(road, 0, lambda t: odd_stride(t[:1]).expand(2, -1, -1, -1)),
    "odd_stride_of_one_head": lambda road: ([odd_stride(t[:, :1], 1) for t in road.qkv()], {}),
    "scale_zero": lambda road: (road.qkv(), {"scale": 0.0}),
    "scale_negative": lambda road: (road.qkv(), {"scale": -0.2}),
    "scale_nan": lambda road: (road.qkv(), {"scale": NAN}),
    "scale_inf": lambda road: (road.qkv(), {"scale": INF}),
    "nan_in_one_query_row": lambda road: changed(road, 0, lambda t: poked(t, (0, 1, 5), NAN)),
    "nan_in_one_key": lambda road: changed(road, 1, lambda t: poked(t, (0, 1, 5, 3), NAN)),
    "nan_in_a_value_that_causal_hides": lambda road: changed(
        road, 2, lambda t: poked(t, (0, 1, 100), NAN), is_causal=True
    ),
    "large_values": lambda road: ([t * 133120 for t in road.qkv()], {}),
}
# A hidden entry is multiplied by zero or not looked at, and a tie of huge scores is broken by rounding: stock's own
# backends differ there. What a NaN leaves of the gradients depends on the backward's tiles.
FREE_OUTPUT = {"nan_in_a_value_that_causal_hides", "large_values"}
FREE_GRADS = FREE_OUTPUT | {"nan_in_one_query_row", "nan_in_one_key"}
# A row that sees no key has zeros, here and from all of stock's backends but that one, which gives it all keys.
BLIND_BY_CUDNN = {"row_hidden_by_bool_mask"}
# It reads them as masks of 16 bits, and the efficient attention refuses them: math is right.
WIDE_FOR_CUDNN = {"fp32_mask"}
# Stock alone gives numbers of other elements, silently.
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
    """The result and the gradients, or the error's type and first line."""
    args = [
        t.detach().requires_grad_() if grad and isinstance(t, Tensor) and t.is_floating_point() else t for t in call[0]
    ]
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stock's notes on why a fused kernel did not run
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
def test_same_error_or_result_as_without(any_road: Road, name: str, grad: bool, request: pytest.FixtureRequest) -> None:
    if name == "no_heads" and TORCH < (2, 13):
        pytest.skip("stock's kernels divide by the number of heads")
    if any_road.device == "cuda" and name in REFUSED_BY_CUDNN | BLIND_BY_CUDNN:
        # torch 2.11 keeps the null plan of a call that cuDNN refused, and crashes when the same call comes again.
        request.addfinalizer(lambda: torch.backends.cuda.enable_cudnn_sdp(True))
        torch.backends.cuda.enable_cudnn_sdp(False)
    call = CASES[name](any_road)
    any_road.disable()
    read = call
    if any_road.device == "cuda" and name in MISREAD_BY_CUDNN:
        read = [tensor.clone() for tensor in call[0]], call[1]
    with contextlib.ExitStack() as stack:
        if any_road.device == "cuda" and name in WIDE_FOR_CUDNN:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        want = outcome(read, grad)
    any_road.enable()
    any_road.took()
    got = outcome(call, grad)
    served = any_road.took().get("ours_fwd", 0) > 0
    if name == "dropout_one" and served:  # which stock refuses, or makes NaN of
        assert not any(tensor.any() for tensor in got)
        return
    if isinstance(want, tuple) or isinstance(got, tuple):
        assert got == want
        return
    if name == "head_dim_0" and TORCH == (2, 12):  # F.sdpa gives zeros there, its math op and Plan B the mean of value
        right = call[0][2].float().mean(2, keepdim=True).expand(got[0].shape) * (any_road.hook == "plan_b")
        torch.testing.assert_close(got[0].float(), right, atol=1e-2, rtol=1e-2)
        return
    assert len(got) == len(want)
    for index, (a, b) in enumerate(zip(got, want)):
        assert a.shape == b.shape and a.dtype == b.dtype
        # Ours lays its output out as the query, which is torch's rule for the op it stands behind; stock's flash and
        # efficient kernels, which take over where cuDNN does not, write (B, S, H, D) whatever they are given.
        assert strides(a) == strides(b) or (served and index == 0 and strides(a) == strides(call[0][0]))
        if not served and (index == 0 or any_road.device == "cpu"):  # stock's own result, bit for bit
            assert torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))
        elif index == 0 and name not in FREE_OUTPUT:
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2, equal_nan=True)
        elif index > 0 and name not in FREE_GRADS:
            torch.testing.assert_close(a, b, atol=2e-1, rtol=2e-1, equal_nan=True)
    assert name != "large_values" or got[0].isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_explain_asks_what_the_router_asks(road: Road, name: str) -> None:
    """describe_call.py asks of Python's tensors what sdp_choice.cpp asks of torch's: a rule in one of them alone shows
    here.
    """
    args, more = CASES[name](road)
    road.took()
    result = outcome((args, more), grad=False)
    if isinstance(result, tuple):
        pytest.skip("stock refuses the call")
    served = road.took().get("ours_fwd", 0) > 0
    plan = torch_flashplug.explain(*args, **more, device=None if road.device == "cuda" else "h100")
    assert (plan.backend in KERNEL_BACKENDS) == served, plan


# ---- what is read of a call ----


def one(road: Road, **more: Any) -> list[Tensor]:
    """A batch of one, whose stride may be anything."""
    return [tensor[:1] for tensor in road.qkv(**more)]


def one_changed(place: int, change: Callable[[Tensor], Tensor]) -> Callable[[Road], Call]:
    return lambda road: ([change(t) if i == place else t for i, t in enumerate(one(road))], {})


# For every fact of a call one in which it is not what it is in a plain one.
OF_OPERANDS = {
    "dtype": Tensor.half,
    "last_stride": lambda t: t.mT.contiguous().mT,
    "align": lambda t: torch.cat((t, t[..., :4]), -1)[..., :64],
    "odd_base": shifted_by_one,
    "odd_ones": odd_stride,
    "broadcast": lambda t: t[:, :1].expand_as(t),
}


def scores(road: Road) -> Tensor:
    return torch.zeros(128, 128, dtype=road.dtype, device=road.device)


OTHERWISE: dict[str, Callable[[Road], Call]] = {
    "B": lambda road: (road.qkv(), {}),
    "Hq": lambda road: (one(road, heads=8, kv_heads=4), {"enable_gqa": True}),
    "Hkv": lambda road: (one(road, kv_heads=2), {"enable_gqa": True}),
    "Sq": lambda road: (one(road, rows=72, keys=128), {}),
    "Sk": lambda road: (one(road, keys=72), {}),
    "D": lambda road: (sized(road, (1, 4, 128, 32), (1, 4, 128, 32), (1, 4, 128, 64)), {}),
    "Dv": lambda road: (sized(road, (1, 4, 128, 64), (1, 4, 128, 64), (1, 4, 128, 32)), {}),
    "needs": lambda road: (one(road), {"is_causal": True}),
    "on_cuda": lambda road: (one(road), {}),
    "grad": lambda road: (one(road, grad=True), {}),
    "deterministic": lambda road: (one(road, grad=True), {}),
    "scale": lambda road: (one(road), {"scale": -0.2}),
    "dropout_p": lambda road: (one(road), {"dropout_p": 0.5}),
    "bias_grad": lambda road: (one(road, grad=True), {"attn_mask": scores(road).requires_grad_()}),
    **{f"{fact}_{x}": one_changed(i, change) for fact, change in OF_OPERANDS.items() for i, x in enumerate("qkv")},
}


SDPA = {"attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}  # what F.sdpa can say beside operands


def described(call: Call, on_cuda: bool = True) -> dict[str, float]:
    args, more = call
    settings = {"dropout_p": 0.0, "is_causal": False, "scale": None} | more
    settings.pop("enable_gqa", None)
    return describe_call.describe(*args, settings.pop("attn_mask", None), **settings) | {"on_cuda": on_cuda}


def own_op(query: Tensor, key: Tensor, value: Tensor, **more: object) -> Tensor:
    """F.sdpa without torch's own checks, nor a router, and with arguments that it does not have."""
    plain = sdpa.ForwardArgs(query, key, value, None, 0.0, sdpa.CAUSAL_NONE, None, 0)
    return torch.ops.torch_flashplug.sdpa_fwd(*plain._replace(**more))[0]


# Which F.sdpa has no words for.
OF_ATTENTION = {"left", "right", "bottom_right", "softcap", "sequences", "batch_invariant", "split_size", "tall"}


@pytest.mark.parametrize("fact", [fact for fact in bindings.problem_facts() if fact not in OF_ATTENTION])
def test_every_fact_is_read_and_said_by_problem_py(fact: str) -> None:
    """The plan that a call leaves in the memory of plans is that of the facts that describe_call.py says of its
    tensors. A fact without a reader is the same in all calls.
    """
    with road_to("cpu") as road, sdpa_backend("fa3"):
        call, here = OTHERWISE[fact](road), fact != "on_cuda"
        bindings.set_cpu_stub(here)
        torch.use_deterministic_algorithms(fact == "deterministic")
        try:
            facts = described(call, here), DEVICES["h100"], bindings.effective_mode()
            assert not bindings.is_remembered(*facts)
            with contextlib.suppress(RuntimeError):  # fa3 is forced, so that no call is let out unread
                ours = fact.startswith("dtype") or not here or not call[1].keys() <= SDPA
                attention = own_op if ours else F.scaled_dot_product_attention
                attention(*call[0], **call[1])
            assert bindings.is_remembered(*facts)
        finally:
            torch.use_deterministic_algorithms(False)
        assert facts[0][fact] != described((one(road), {}))[fact]


IRREGULAR = {
    "batch_of_key_and_value": ((4, 4, 128, 64), (1, 4, 128, 64), (1, 4, 128, 64)),
    "batch_of_value": ((4, 4, 128, 64), (4, 4, 128, 64), (1, 4, 128, 64)),
    "heads_of_value": ((2, 8, 128, 64), (2, 8, 128, 64), (2, 1, 128, 64)),
    "heads_of_query": ((2, 1, 128, 64), (2, 8, 128, 64), (2, 8, 128, 64)),
    "heads_that_only_gqa_takes": ((2, 8, 128, 64), (2, 2, 128, 64), (2, 2, 128, 64)),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", IRREGULAR)
def test_a_graph_of_unknown_shapes_broadcasts_or_refuses_as_stock_does(any_road: Road, name: str) -> None:
    call = (sized(any_road, *IRREGULAR[name]), {})
    any_road.disable()
    want = outcome(call, False)
    any_road.enable()
    compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    if isinstance(want, tuple):
        with pytest.raises(Exception, match="must match|size|shape"):
            compiled(*call[0])
    else:
        torch.testing.assert_close(compiled(*call[0]), want[0], atol=2e-2, rtol=2e-2)
    assert any_road.took().get("ours_fwd", 0) == 0


def test_rows_that_may_see_nothing_stay_zero(road: Road) -> None:
    """No keys at all: zeros and zero gradients, forced or not."""
    q, k, v = (t.requires_grad_() for t in sized(road, (2, 4, 128, 64), (2, 4, 0, 64)))
    out = F.scaled_dot_product_attention(q, k, v)
    out.sum().backward()
    assert out.eq(0).all() and q.grad.eq(0).all() and k.grad.shape == k.shape


def test_double_backward_is_refused_or_right(any_road: Road) -> None:
    q, k, v = any_road.qkv(rows=72, grad=True)

    def second() -> Tensor | type:
        try:
            (first,) = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).float().sum(), q, create_graph=True)
            return torch.autograd.grad(first.float().square().sum(), q)[0]
        except RuntimeError as error:
            return type(error)

    any_road.disable()
    want = second()
    any_road.enable()
    got = second()
    # Stock's fused kernels and ours have no second derivative; stock math has one.
    assert got is RuntimeError if not isinstance(want, Tensor) or isinstance(got, type) else torch.equal(got, want)


def test_autocast_takes_fp32(any_road: Road) -> None:
    tensors = [t.float() for t in any_road.qkv()]
    with torch.autocast(any_road.device, torch.bfloat16):
        out = F.scaled_dot_product_attention(*tensors)
    assert out.dtype == torch.bfloat16 and any_road.took()["ours_fwd"] == 1


@pytest.mark.parametrize("training", [False, True])
def test_deterministic_algorithms(road: Road, training: bool) -> None:
    """Strict determinism raises nothing that stock does not raise."""
    with in_order():
        road.disable()
        want = outcome((road.qkv(), {}), training)
        road.enable()
        got = outcome((road.qkv(), {}), training)
    assert isinstance(got, tuple) == isinstance(want, tuple)
