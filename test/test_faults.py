"""Calls on which stock torch is known to be wrong or to fail (rescues.py, src/repair.cpp): gradients whose grad_out
lies in memory in another order than an earlier one's, in every order of calls; one call of each rescue; scales that are
not positive; the math backward as a step of ring attention.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from plans import call
from standin import Road
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_flashplug
from torch_flashplug import native, ops, repair, rescues
from torch_flashplug.api import DEVICES
from torch_flashplug.testing import (
    Case,
    Inputs,
    assert_within_budget,
    new_case,
    oracle,
    oracle_grads,
    plain,
    plain_grads,
)
from torch_flashplug.testing.budget import GRAD_FACTOR, cancelled_sums

sdpa = F.scaled_dot_product_attention
ORDERS = ("bshd", "bhsd")  # of memory


def drawn(shape: tuple[int, ...], order: str, seed: int) -> Tensor:
    """(B, H, S, D) on the GPU, laid out in `order`."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return laid_out(torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16), order)


def laid_out(tensor: Tensor, order: str) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2) if order == "bshd" else tensor.contiguous()


def check(label: str, case, inputs: Inputs, out: Tensor | None, grads: tuple[Tensor, ...] = ()) -> None:
    """Within the project's budget of fp64."""
    if out is not None:
        assert_within_budget(label + " out", out, oracle(case, inputs).out, plain(case, inputs).out)
    if grads:
        cancelled = cancelled_sums(*inputs, inputs.grad_out, case.scale)
        answers = zip(cancelled, grads, oracle_grads(case, inputs), plain_grads(case, inputs), strict=True)
        for name, got, exact, low in answers:
            budget = {"factor": GRAD_FACTOR, "cancelled": float(cancelled[name])}
            assert_within_budget(f"{label} {name}", got, exact, low, **budget)


# ---- the order of grad_out ----

# (B, Hq, Hkv), S, (D, Dv), causal
SHAPES = (
    ((2, 8, 8), 256, (64, 64), False),
    ((2, 8, 2), 384, (128, 128), True),
    ((1, 6, 6), 200, (80, 80), True),
    ((2, 4, 4), 333, (96, 96), False),
    ((1, 16, 16), 130, (112, 112), True),
    ((3, 4, 4), 250, (72, 72), True),
    ((2, 4, 4), 256, (128, 64), True),
    ((1, 8, 8), 512, (256, 256), True),
)


@dataclass(frozen=True)
class Turn:
    """One gradient in a sequence: with the plugin or without, and in which order grad_out lies."""

    stock: bool
    order: str


# Fresh, then once more in the other order; and after stock ran the shapes first.
SEQUENCES = [
    turns
    for first, second in (ORDERS, ORDERS[::-1])
    for turns in (
        (Turn(False, first), Turn(False, second)),
        (Turn(True, first), Turn(False, second), Turn(False, first)),
    )
]


@dataclass(frozen=True)
class Posed:
    """Operands of one sequence of gradients; with a mask, which leaves the call to stock's cuDNN, or without."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    causal = causal and mask is None
    return sdpa(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def posed(number: int, memory: str, turn: int, masked: bool) -> Posed:
    """Lengths differ between sequences, so that none meets plans of another."""
    (b, hq, hkv), s, (d, dv), causal = SHAPES[number]
    s += 16 * (2 * turn + ORDERS.index(memory))
    s += 8 if masked and s % 128 == 64 else 0  # cuDNN's dQ is NaN there with any mask: another fault
    case = new_case(f"{memory}_{number}_{turn}", (b, hq, hkv), (s, s), (d, dv), *["causal"] * causal)
    shapes = ((b, hq, s, d), (b, hkv, s, d), (b, hkv, s, dv))
    q, k, v = (drawn(shape, memory, 10 * number + i).requires_grad_() for i, shape in enumerate(shapes))
    mask = torch.ones(s, s, dtype=torch.bool, device="cuda") if masked else None
    return Posed(case, q, k, v, mask.tril() if masked and causal else mask)


def gradients(call: Posed, turn: Turn, compiled: bool) -> tuple[Tensor, Inputs, tuple[Tensor, ...]]:
    case = call.case
    grad_out = drawn((case.B, case.Hq, case.Sq, case.Dv), turn.order, case.Sq)
    if turn.stock:
        torch_flashplug.disable()
    attend = torch.compile(attention, dynamic=False) if compiled and not turn.stock else attention
    out = attend(call.q, call.k, call.v, call.mask, case.causal)
    grads = torch.autograd.grad(out, (call.q, call.k, call.v), grad_out)
    torch_flashplug.enable()
    return out.detach(), Inputs(call.q.detach(), call.k.detach(), call.v.detach(), grad_out), grads


@pytest.mark.gpu
@pytest.mark.isolated(280)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("masked", [False, True], ids=["ours_or_stock", "stock"])
def test_gradients_whatever_order_grad_out_lies_in(masked: bool, compiled: bool) -> None:
    torch._dynamo.config.cache_size_limit = torch._dynamo.config.accumulated_cache_size_limit = 1000
    native.counters(reset=True)
    failed, checked = [], 0
    for number, memory, turn in itertools.product(range(len(SHAPES)), ORDERS, range(len(SEQUENCES))):
        call = posed(number, memory, turn, masked)
        for step, each in enumerate(SEQUENCES[turn]):
            out, inputs, grads = gradients(call, each, compiled)
            if each.stock:
                continue
            checked += 1
            try:
                check(f"{call.case.name} step {step}", call.case, inputs, out, grads)
            except AssertionError as error:
                failed.append(str(error))
    assert not failed, f"{len(failed)} of {checked}: " + "\n".join(failed[:8])
    took = native.counters()
    assert took["repaired_bwd" if masked else "ours_bwd"] > checked / 2, took


@pytest.mark.gpu
@pytest.mark.isolated(120)
def test_disable_takes_the_repair_out() -> None:
    """The counter stands still, stock's kernel answers; and the override is silent (warnings are errors here)."""
    q, k, v = (drawn((2, 4, 128, 64), "bshd", i).requires_grad_() for i in range(3))
    mask = torch.ones(128, 128, dtype=torch.bool, device="cuda")
    for on in (True, False, True):
        (torch_flashplug.enable if on else torch_flashplug.disable)()
        native.counters(reset=True)
        sdpa(q, k, v, attn_mask=mask).sum().backward()
        assert native.counters()["repaired_bwd"] == on


@pytest.mark.gpu
@pytest.mark.isolated(120)
def test_what_stock_raises_is_raised_through_the_repair() -> None:
    q = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16)
    op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    lse = torch.zeros(1, 2, 128, 1, device="cuda")
    none = torch.tensor([])
    texts, arguments = [], (none, none, None, none, none, 128, 128, 0.0, False)
    for on in (False, True):  # in this order: the repair stays
        native.repair(on)
        with pytest.raises(Exception) as raised:  # fp64 is no dtype of its
            op(q.double(), q.double(), q.double(), q.double(), q.double(), lse, *arguments)
        texts.append((type(raised.value), str(raised.value).splitlines()[0]))
    assert texts[0] == texts[1]


def test_without_cudnn_there_is_nothing_to_repair() -> None:
    if torch.version.cuda is None:
        assert repair.install() == "" and not native.repair(True)
        assert "no cuDNN attention" in native.last_error()
    native.repair(False)


@pytest.mark.parametrize("memory", ORDERS)
def test_traced_graphs_give_grad_out_in_the_order_of_out(memory: str) -> None:
    """What Inductor's C++ wrapper will call past the dispatcher; tensors that are only traced need no GPU."""
    op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

    def traced() -> list[torch.fx.Node]:
        with FakeTensorMode(), enable_python_dispatcher():
            q, k, v, out, grad_out = (torch.empty(2, 128, 4, 64, device="cuda").transpose(1, 2) for _ in range(5))
            if memory == "bhsd":
                grad_out = torch.empty(2, 4, 128, 64, device="cuda")
            lse, seed = torch.empty(2, 4, 128, 1, device="cuda"), torch.empty((), device="cuda", dtype=torch.int64)
            arguments = (grad_out, q, k, v, out, lse, seed, seed)
            graph = make_fx(lambda *given: op(*given, None, None, None, 128, 128, 0.0, True))(*arguments).graph
        return [node for node in graph.nodes if node.op == "call_function"]

    repair.in_graphs(True)
    try:
        nodes = traced()
    finally:
        repair.in_graphs(False)
    (backward,) = (node for node in nodes if node.target is op)
    assert math.copysign(1.0, backward.args[13]) == -1.0
    copies = [node for node in nodes if node.target is torch.ops.aten.clone.default]
    assert len(copies) == (memory == "bhsd")
    untouched = traced()
    assert untouched[0].target is op and math.copysign(1.0, untouched[0].args[13]) == 1.0
    repair.in_graphs(torch.version.cuda is not None)


# ---- rescues ----

# One call of each row of rescues.RESCUES, with and without what makes it one.
RESCUED = {
    "odd_base_one_row": (call((1, 32, 8), (1, 100), (16, 16)), {"odd_base_k": 1, "align_k": 2}),
    "odd_base_one_key": (call((5, 21, 3), (70, 1), (128, 128)), {"odd_base_q": 1, "align_q": 8}),
    "broadcast_query": (call((2, 3, 3), (64, 64), (80, 64)), {"broadcast_q": 1}),
    "stride_of_one_row": (call((2, 4, 4), (1, 64), (96, 96), grad=1), {"odd_ones_q": 1}),
    "stride_of_one_key": (call((2, 4, 4), (64, 1), (96, 96), grad=1), {"odd_ones_v": 1}),
    "zero_scale": (call((4, 8, 8), (4096, 4096), (64, 64), causal=1), {"scale": native.SCALE_IDS["zero"]}),
    "negative_scale": (call((4, 8, 8), (4096, 4096), (64, 64), grad=1), {"scale": native.SCALE_IDS["negative"]}),
}


@pytest.mark.parametrize("name", RESCUED)
def test_auto_takes_what_stock_fails(name: str) -> None:
    plain, fault = RESCUED[name]
    assert not native.plan(plain, DEVICES["h100"])["rescue"]
    rescued = native.plan(plain | fault, DEVICES["h100"])
    assert rescued["backend"] in {"fa3", "fa2"} and rescued["kernel"]
    assert any(rescued["rescue"] == f"{row.stock} ({row.evidence})" for row in rescues.RESCUES)
    assert rescued["row"] == "" and bool(rescued["gradients"]) == bool(plain.get("grad"))
    assert native.plan(plain | fault, DEVICES["a100"])["backend"] == "stock"  # no fault was seen there


def test_every_rescue_is_tried() -> None:
    tried = {native.plan(plain | fault, DEVICES["h100"])["rescue"] for plain, fault in RESCUED.values()}
    assert tried == {f"{row.stock} ({row.evidence})" for row in rescues.RESCUES}


def odd(shape: tuple[int, ...], offset: int = 1) -> Tensor:
    """A view whose base is `offset` elements behind an aligned address."""
    size = math.prod(shape)
    return torch.randn(size + offset, device="cuda").to(torch.bfloat16)[offset:].view(shape)


def half(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


FAULTS = {
    "one_row_odd_base": lambda: (odd((1, 32, 1, 16)), odd((1, 8, 1, 16)), odd((1, 8, 1, 16)), {}),
    "one_row_128": lambda: (odd((5, 21, 1, 128)), odd((5, 3, 1, 128)), odd((5, 3, 1, 128), 3), {}),
    "one_row_few_keys": lambda: (half(1, 4, 1, 128), half(1, 1, 3, 128), odd((1, 1, 3, 128)), {}),
    "one_key": lambda: (odd((2, 4, 70, 64), 7), odd((2, 4, 1, 64)), half(2, 4, 1, 64), {}),
    "broadcast_heads": lambda: (half(2, 1, 64, 80).expand(2, 3, 64, 80), half(2, 3, 64, 80), half(2, 3, 64, 64), {}),
    "broadcast_batch": lambda: (half(1, 28, 2, 16).expand(5, 28, 2, 16), half(5, 28, 2, 16), half(5, 28, 2, 64), {}),
    "stride_of_one_key": lambda: (half(2, 4, 7, 96), half(2, 4, 1, 96), half(2, 4, 96, 1).transpose(2, 3), {}),
    "stride_of_one_row": lambda: (half(2, 4, 96, 1).transpose(2, 3), half(2, 4, 9, 96), half(2, 4, 9, 96), {}),
    "zero_scale": lambda: (half(2, 8, 200, 64), half(2, 2, 333, 64), half(2, 2, 333, 64), {"scale": 0.0}),
    "zero_scale_causal": lambda: (*(half(2, 8, 200, 64) for _ in range(3)), {"scale": 0.0, "is_causal": True}),
    "negative_scale": lambda: (*(half(2, 8, 129, 128) for _ in range(3)), {"scale": -0.125}),
    "negative_scale_causal": lambda: (*(half(2, 8, 200, 96) for _ in range(3)), {"scale": -1.0, "is_causal": True}),
    "negative_scale_decode": lambda: (half(2, 8, 1, 64), half(2, 2, 999, 64), half(2, 2, 999, 64), {"scale": -1.0}),
}


@pytest.mark.gpu
@pytest.mark.isolated(120)
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("name", FAULTS)
def test_auto_is_right_where_stock_fails(name: str, grad: bool) -> None:
    torch.manual_seed(1)
    q, k, v, kwargs = FAULTS[name]()
    case = new_case(
        name, (q.shape[0], q.shape[1], k.shape[1]), (q.shape[2], k.shape[2]), (q.shape[3], v.shape[3]),
        *["causal"] * kwargs.get("is_causal", False), scale=kwargs.get("scale"),
    )  # fmt: skip
    q, k, v = (tensor.detach().requires_grad_(grad) for tensor in (q, k, v))
    native.counters(reset=True)
    for _ in range(2):  # a fault of stock's shows at the second call
        out = sdpa(q, k, v, **kwargs, enable_gqa=q.shape[1] != k.shape[1])
    inputs = Inputs(q.detach(), k.detach(), v.detach(), half(*out.shape))
    grads = torch.autograd.grad(out, (q, k, v), inputs.grad_out) if grad else ()
    took = native.counters()
    torch.cuda.synchronize()
    check(name, case, inputs, out.detach(), grads)
    assert took["ours_fwd"] == 2 and took["ours_bwd"] == grad, took
    assert torch_flashplug.explain(q, k, v, **kwargs, enable_gqa=q.shape[1] != k.shape[1]).rescue


def padded(shape: tuple[int, ...], columns: int) -> Tensor:
    """Rows whose stride is no multiple of 16 bytes; NaN between them."""
    b, h, s, d = shape
    buffer = torch.full((b, h, s, d + columns), float("nan"), device="cuda", dtype=torch.bfloat16)
    buffer[..., :d] = half(b, h, s, d)
    return buffer[..., :d]


@pytest.mark.gpu
@pytest.mark.isolated(120)
@pytest.mark.parametrize("kind", ["base", "rows", "broadcast", "grad_out"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_cudnn_reads_what_it_is_given(kind: str, masked: bool) -> None:
    """Operands that stock's cuDNN misreads, in calls that stay with it (sdpa_backend("stock") leaves the repair on)."""
    torch.manual_seed(2)
    q, k, v = half(2, 4, 200, 64), half(2, 4, 300, 64), half(2, 4, 300, 64)
    grad_out = half(2, 4, 200, 64)
    if kind == "base":
        q, v = odd(q.shape, 5), odd(v.shape, 12)
    elif kind == "rows":
        q, k = padded(q.shape, 1), padded(k.shape, 9)
    elif kind == "broadcast":
        q, v, grad_out = half(2, 1, 200, 64).expand(2, 4, 200, 64), half(2, 4, 300, 128), half(2, 4, 200, 128)
    else:
        grad_out = odd(grad_out.shape, 3)
    case = new_case(kind, (2, 4, 4), (200, 300), (64, v.shape[3]))
    mask = torch.ones(200, 300, dtype=torch.bool, device="cuda") if masked else None
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    native.counters(reset=True)
    with torch_flashplug.sdpa_backend("stock"):
        outs = [sdpa(q, k, v, attn_mask=mask) for _ in range(2)]
    grads = torch.autograd.grad(outs[1], (q, k, v), grad_out)
    assert native.counters()["repaired_bwd"] == 1
    check(kind, case, Inputs(q.detach(), k.detach(), v.detach(), grad_out), outs[1].detach(), grads)


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True], ids=["fp32", "masked"])
@pytest.mark.parametrize("scale", [0.0, -0.25, -1.0])
def test_scales_are_right_where_ours_cannot_run(scale: float, masked: bool) -> None:
    dtype = torch.bfloat16 if masked else torch.float32
    q, k, v = (torch.randn(2, 4, 129, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.ones(129, 129, dtype=torch.bool, device="cuda").tril()
    kwargs = {"attn_mask": mask} if masked else {"is_causal": True}
    out = sdpa(q, k, v, scale=scale, **kwargs)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    exact = (q.double() @ k.double().transpose(-1, -2) * scale).masked_fill(~mask, -math.inf).softmax(-1) @ v.double()
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
    assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("scale", [0.0, -0.25])
def test_such_scales_are_ours(road: Road, scale: float) -> None:
    q, k, v = road.qkv(grad=True)
    assert native.plan(torch_flashplug.problem.describe(q, k, v, None, 0.0, False, scale) | {"on_cuda": 1},
                       DEVICES["h100"])["backend"] == "fa3"  # fmt: skip
    road.took()
    out = sdpa(q, k, v, scale=scale)
    out.sum().backward()
    took = road.took()
    assert took["ours_fwd"] == 1
    exact = (q.double() @ k.double().transpose(-1, -2) * scale).softmax(-1) @ v.double()
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
    if scale == 0.0:
        assert not q.grad.any() and not k.grad.any()


# ---- the math backward is given what the forward found ----


@pytest.mark.parametrize("causal", [ops.CAUSAL_NONE, ops.CAUSAL_TOP_LEFT])
@pytest.mark.parametrize("biased", [False, True])
def test_math_backward_is_a_step_of_a_ring(causal: int, biased: bool) -> None:
    """Gradients over two halves of the keys, each with the output and LSE of all of them, add up to those of the whole.
    A row that sees no key of a half gets nothing from it.
    """
    torch.manual_seed(3)
    q, k, v, grad_out = (torch.randn(2, 4, 24, 16, dtype=torch.float64) for _ in range(4))
    bias = torch.randn(2, 1, 24, 24, dtype=torch.float64) if biased and not causal else None
    settings = (0.0, causal, None, 0)
    out, lse, seed, offset = ops.namespace.sdpa_fwd(q, k, v, bias, *settings)
    whole = ops.namespace.sdpa_bwd(grad_out, q, k, v, bias, out, lse, seed, offset, *settings, bias is not None)
    parts = []
    for keys in (slice(0, 12), slice(12, 24)):
        mask = bias[..., keys] if bias is not None else None
        if causal:  # the second half of the keys, seen from the first rows: nothing
            mask = torch.ones(24, 24, dtype=torch.bool).tril()[:, keys]
        arguments = (grad_out, q, k[:, :, keys], v[:, :, keys], mask, out, lse, seed, offset)
        parts.append(ops.namespace.sdpa_bwd(*arguments, 0.0, ops.CAUSAL_NONE, None, 0, bias is not None))
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([part[i] for part in parts], 2), whole[i])
    if bias is not None:
        torch.testing.assert_close(torch.cat([part[3] for part in parts], 3), whole[3])
