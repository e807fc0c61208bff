"""Stock's cuDNN attention, repaired for the calls that stay with it (src/hooks/stock_workarounds.cpp): gradients whose
grad_out lies in memory in another order than an earlier one's, in every order of calls, eager and compiled; operands
that cuDNN would misread; that what it raises is raised, and disable() takes it out.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from faults import ORDERS, check, drawn, half, laid_out, odd, strides
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_flashplug
from torch_flashplug import sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.testing import Case, Inputs, new_case
from torch_flashplug.torch_hooks import stock_workarounds

sdpa = F.scaled_dot_product_attention

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
    """Operands of one sequence of gradients; with a mask of floats, left to stock's cuDNN, or without."""

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
    mask = torch.zeros(s, s, dtype=q.dtype, device="cuda") if masked else None
    return Posed(case, q, k, v, mask + torch.full_like(mask, -torch.inf).triu(1) if masked and causal else mask)


def gradients(call: Posed, turn: Turn, compiled: bool) -> tuple[Tensor, Inputs, tuple[Tensor, ...]]:
    case = call.case
    grad_out = drawn((case.B, case.Hq, case.Sq, case.Dv), turn.order, case.Sq)
    if turn.stock:
        torch_flashplug.disable()
    attend = torch.compile(attention, dynamic=False) if compiled and not turn.stock else attention
    with sdpa_backend("auto" if call.mask is None else "stock"):
        out = attend(call.q, call.k, call.v, call.mask, case.causal)
    grads = torch.autograd.grad(out, (call.q, call.k, call.v), grad_out)
    torch_flashplug.enable()
    return out.detach(), Inputs(call.q.detach(), call.k.detach(), call.v.detach(), grad_out), grads


@pytest.mark.gpu
@pytest.mark.isolated(280)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("masked", [False, True], ids=["ours_or_stock", "stock"])
@pytest.mark.parametrize("memory", ORDERS)
def test_gradients_whatever_order_grad_out_lies_in(memory: str, masked: bool, compiled: bool) -> None:
    torch._dynamo.config.cache_size_limit = torch._dynamo.config.accumulated_cache_size_limit = 1000
    bindings.counters(reset=True)
    failed, checked = [], 0
    for number, turn in itertools.product(range(len(SHAPES)), range(len(SEQUENCES))):
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
    took = bindings.counters()
    assert took["repaired_bwd" if masked else "ours_bwd"] > checked / 2, took


@pytest.mark.gpu
@pytest.mark.isolated(120)
def test_disable_takes_the_repair_out() -> None:
    """The counter stands still: stock's own kernel answers."""
    q, k, v = (drawn((2, 4, 128, 64), "bshd", i).requires_grad_() for i in range(3))
    mask = torch.zeros(128, 128, dtype=q.dtype, device="cuda")
    for on in (True, False, True):
        (torch_flashplug.enable if on else torch_flashplug.disable)()
        bindings.counters(reset=True)
        with sdpa_backend("stock"):
            sdpa(q, k, v, attn_mask=mask).sum().backward()
        assert bindings.counters()["repaired_bwd"] == on


@pytest.mark.gpu
@pytest.mark.isolated(120)
def test_what_stock_raises_is_raised_through_the_repair() -> None:
    q = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16)
    op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    lse = torch.zeros(1, 2, 128, 1, device="cuda")
    none = torch.tensor([])
    texts, arguments = [], (none, none, None, none, none, 128, 128, 0.0, False)
    for on in (False, True):  # in this order: the repair stays
        bindings.repair(*bindings.STOCK_BACKENDS[: 3 * on])
        with pytest.raises(Exception) as raised:  # fp64 is no dtype of its
            op(q.double(), q.double(), q.double(), q.double(), q.double(), lse, *arguments)
        texts.append((type(raised.value), str(raised.value).splitlines()[0]))
    assert texts[0] == texts[1]


@pytest.mark.gpu
@pytest.mark.isolated(120)
def test_dropout_and_the_order_of_grad_out() -> None:
    """Gradients of one forward, grad_out in both orders, after stock had the first: the same numbers."""
    q, k, v = (drawn((2, 4, 256, 64), "bshd", i).requires_grad_() for i in range(3))
    grad_out = drawn((2, 4, 256, 64), "bshd", 9)
    torch_flashplug.disable()
    torch.autograd.grad(sdpa(q, k, v, dropout_p=0.125), (q, k, v), laid_out(grad_out, "bhsd"))
    torch_flashplug.enable()
    with torch_flashplug.sdpa_backend("stock"):
        out = sdpa(q, k, v, dropout_p=0.125)
    bindings.counters(reset=True)
    pairs = [torch.autograd.grad(out, (q, k, v), laid_out(grad_out, order), retain_graph=True) for order in ORDERS]
    assert bindings.counters()["repaired_bwd"] == 2
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
    assert all(grad.abs().amax() > 0.1 for grad in pairs[0])


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_without_cuda_there_is_nothing_to_repair() -> None:
    assert stock_workarounds.install() == "" and bindings.repair()
    for backends in (("cudnn",), bindings.STOCK_BACKENDS):
        assert not bindings.repair(*backends) and "lacks CUDA attention" in bindings.last_error()


def test_what_another_torch_has_changed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's functions are called by names that say nothing of what they return. One op has other results here, one is
    gone.
    """
    known, asked = bindings.names("schemas"), []
    other = [schema.replace("Tensor unused", "Tensor used") for schema in known]
    other += [schema.replace("_efficient_", "_efficient_no_more_") for schema in known if "_efficient_" in schema]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for schemas, repaired in ((known, bindings.STOCK_BACKENDS), (other, ("cudnn",))):
        monkeypatch.setattr(bindings, "names", lambda of, schemas=schemas: tuple(schemas))
        monkeypatch.setattr(bindings, "repair", lambda *backends: asked.append(backends) or True)
        said = stock_workarounds.install()
        stock_workarounds.in_graphs(False)
        assert asked.pop() == repaired
        assert ("_flash_attention" in said) == ("_efficient_no_more_" in said) == (schemas is other), said


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

    stock_workarounds.in_graphs(True)
    try:
        nodes = traced()
    finally:
        stock_workarounds.in_graphs(False)
    (backward,) = (node for node in nodes if node.target is op)
    assert math.copysign(1.0, backward.args[13]) == -1.0
    given, _, _, _, out = (node.meta["val"] for node in backward.args[:5])
    assert given.stride() == out.stride()
    assert any(node.target is torch.ops.aten.clone.default for node in nodes) == (memory == "bhsd")
    untouched = traced()
    assert untouched[0].target is op and math.copysign(1.0, untouched[0].args[13]) == 1.0
    stock_workarounds.in_graphs(torch.version.cuda is not None)


# ---- operands ----


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
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend("stock"):
        outs = [sdpa(q, k, v, attn_mask=mask) for _ in range(2)]
    grads = torch.autograd.grad(outs[1], (q, k, v), grad_out)
    assert bindings.counters()["repaired_bwd"] == 1
    assert [grad.stride() for grad in grads] == [torch.empty_like(tensor).stride() for tensor in (q, k, v)]
    check(kind, case, Inputs(q.detach(), k.detach(), v.detach(), grad_out), outs[1].detach(), grads)


# What lies where: operands that begin off 16 bytes, rows that do, a stride of one row or key, what a sum's gradient is.
ELSEWHERE = {
    "query": lambda: (odd((2, 4, 150, 80), 12), half(2, 4, 150, 80), half(2, 4, 150, 80), half(2, 4, 150, 80)),
    "all": lambda: tuple(odd((2, 4, 150, 64), offset) for offset in (1, 2, 4, 7)),
    "rows": lambda: tuple(padded((2, 4, 150, 80), columns) for columns in (1, 2, 4, 12)),
    "one_row": lambda: (odd((2, 4, 1, 128)), *(odd((2, 4, 40, 128), 3) for _ in "kv"), odd((2, 4, 1, 128))),
    "one_key": lambda: (odd((2, 4, 40, 96)), *(odd((2, 4, 1, 96), 3) for _ in "kv"), half(2, 4, 40, 96)),
    "stride_of_one": lambda: (half(2, 4, 7, 96), half(2, 4, 1, 96), half(2, 4, 96, 1).mT, half(2, 4, 7, 96)),
    "broadcast": lambda: (half(2, 4, 70, 64), *(odd((2, 1, 70, 64)).expand(2, 4, 70, 64) for _ in "kv"),
                          odd((2, 4, 70, 64))),
    "broadcast_query": lambda: (odd((1, 70, 4, 64)).transpose(1, 2).expand(2, 4, 70, 64),
                                *(half(2, 4, 70, 64) for _ in "kv"), half(2, 4, 70, 64)),
    "sum": lambda: (*(half(2, 4, 70, 64) for _ in "qkv"), half(1).expand(2, 4, 70, 64)),
}  # fmt: skip
FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION


def by(backend: SDPBackend, *operands: Tensor, **kwargs: object) -> Tensor:
    """A call that stays with this one of stock's kernels."""
    with torch_flashplug.sdpa_backend("stock"), sdpa_kernel(backend):
        return sdpa(*operands, **kwargs)


@pytest.mark.gpu
@pytest.mark.isolated(120)
@pytest.mark.parametrize("kind", ELSEWHERE)
@pytest.mark.parametrize("backend", [FLASH, EFFICIENT], ids=["flash", "efficient"])
def test_flash_and_efficient_read_what_they_are_given(backend: SDPBackend, kind: str) -> None:
    """Of stock alone most of these end the CUDA context, others raise; a sum's gradient it copies itself."""
    torch.manual_seed(3)
    *operands, grad_out = ELSEWHERE[kind]()
    q, k, v = (tensor.detach().requires_grad_() for tensor in operands)
    out = by(backend, q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
    if backend == FLASH:  # as torch's meta functions promise
        assert [strides(tensor) for tensor in (out, *grads)] == [strides(torch.empty_like(t)) for t in (q, q, k, v)]
    case = new_case(kind, (2, 4, 4), (q.shape[2], k.shape[2]), (q.shape[3], v.shape[3]))
    check(kind, case, Inputs(*operands, grad_out), out.detach(), grads)


@pytest.mark.gpu
@pytest.mark.isolated(120)
@pytest.mark.parametrize("kind", ["masked", "fp32", "dropout", "deterministic", "graph"])
def test_what_auto_is_given_may_lie_anywhere(kind: str) -> None:
    """Calls that ended the CUDA context, or raised; with a mask they are ours now, as copies, the others stock's."""
    torch.manual_seed(4)
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    rows = {"deterministic": 200, "fp32": 1}.get(kind, 40)
    shapes = ((2, 4, rows, 64), *[(2, 4, {"deterministic": 200, "fp32": 40}.get(kind, 1), 64)] * 2)
    given = [torch.randn(math.prod(shape) + 1, device="cuda", dtype=dtype)[1:].view(shape) for shape in shapes]
    q, k, v = (tensor.requires_grad_(kind != "graph") for tensor in given)
    mask = torch.ones(rows, k.shape[2], dtype=torch.bool, device="cuda") if kind == "masked" else None
    attend = sdpa
    if kind == "graph":  # traced with operands that stock's flash can read
        attend = torch.compile(functools.partial(by, FLASH), backend="aot_eager", dynamic=False)
        attend(*(half(*shape) for shape in shapes))
    bindings.counters(reset=True)
    torch.use_deterministic_algorithms(kind == "deterministic", warn_only=False)
    out = attend(q, k, v, attn_mask=mask, dropout_p=0.5 * (kind == "dropout"))
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), grad_out) if kind != "graph" else ()
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    assert bindings.counters()["ours_fwd"] == (kind == "masked")
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    exact = (wide[0] @ wide[1].mT * 0.125).softmax(-1) @ wide[2]
    answers = (exact, *torch.autograd.grad(exact, wide, grad_out.double()))
    for got, right in zip((out, *grads), answers):
        if kind == "dropout":
            assert got.isfinite().all()
        else:
            torch.testing.assert_close(got.double(), right, atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
@pytest.mark.isolated(120)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_masks_gradient_alone(heads: int, offset: int, compiled: bool) -> None:
    """Of stock alone: one head ends the CUDA context, more raise (LSE is not correctly aligned)."""
    torch.manual_seed(5)
    q, k, v = odd((1, heads, 257, 64), offset), half(1, heads, 9, 64), half(1, heads, 9, 64)
    mask, grad_out = half(257, 9).requires_grad_(), half(1, heads, 257, 64)
    attend = torch.compile(by, backend="aot_eager", dynamic=False) if compiled else by
    out = attend(EFFICIENT, q, k, v, attn_mask=mask)
    (grad,) = torch.autograd.grad(out, mask, grad_out)
    wide = mask.detach().double().requires_grad_()
    exact = (q.double() @ k.double().mT * 0.125 + wide).softmax(-1) @ v.double()
    (right,) = torch.autograd.grad(exact, wide, grad_out.double())
    torch.testing.assert_close(grad.double(), right, atol=5e-2, rtol=5e-2)


# ---- dropout, and what nobody should see ----


@pytest.mark.gpu
@pytest.mark.isolated(120)
def test_the_backward_drops_what_the_forward_dropped() -> None:
    """The repaired backward is told another dropout_p than the forward. With V = 1 the output is P with its mask, so dV
    has to be out^T grad_out.
    """
    for number, p in enumerate((0.0625, 0.1, 0.125, 0.2, 0.3, 0.43, 0.5, 0.625, 0.75, 0.9375)):
        rows = 256 + 64 * number  # a plan of its own
        q, k = half(2, 4, rows, 128).requires_grad_(), half(2, 4, 128, 128).requires_grad_()
        v = torch.eye(128, device="cuda", dtype=torch.bfloat16).expand(2, 4, 128, 128).contiguous().requires_grad_()
        bindings.counters(reset=True)
        with torch_flashplug.sdpa_backend("stock"):
            out = sdpa(q, k, v, dropout_p=p)
        grad_out = half(*out.shape)
        (grad_v,) = torch.autograd.grad(out, v, grad_out)
        assert bindings.counters()["repaired_bwd"] == 1
        exact = out.detach().double().mT @ grad_out.double()
        assert float((grad_v.double() - exact).norm() / exact.norm()) < 1e-2, p


@pytest.mark.gpu
@pytest.mark.isolated(120)
def test_transforms_leave_no_word_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    """Tensors that functorch wraps have no address: the router must not ask aloud (torch up to 2.12 logs it)."""
    q, k, v = (half(2, 4, 64, 300).mT for _ in range(3))
    torch.func.grad(lambda x: sdpa(x, k, v).float().sum())(q)
    torch.vmap(lambda x: sdpa(x, k, v, scale=-1.0, dropout_p=0.1), randomness="same")(torch.stack([q, q]))
    torch.cuda.synchronize()
    assert "Exception" not in capfd.readouterr().err
