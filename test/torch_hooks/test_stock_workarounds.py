"""Workarounds for stock attention, for calls that stay with stock (src/hooks/stock_workarounds.cpp).

The tests cover gradients after an earlier call with a different memory order of `grad_out`: in every order of calls,
eager and compiled. Further tests cover operands misread by cuDNN. Errors of stock must still be raised, and `disable()`
must remove the workarounds.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from stock_bug_inputs import (
    ORDERS,
    assert_matches_fp64,
    misaligned,
    random_bf16,
    random_tensor,
    strides,
    with_layout,
)
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
class GradientStep:
    """Step of a gradient sequence: with or without the plugin, and the memory order of `grad_out`."""

    stock: bool
    order: str


# Each sequence computes a gradient in one order, then a gradient in the opposite order. The second sequence starts with
# a call of stock for the same shapes.
SEQUENCES = [
    call_orders
    for first, second in (ORDERS, ORDERS[::-1])
    for call_orders in (
        (GradientStep(False, first), GradientStep(False, second)),
        (GradientStep(True, first), GradientStep(False, second), GradientStep(False, first)),
    )
]


@dataclass(frozen=True)
class CallOperands:
    """Operands of a sequence of gradients. A call with a float mask stays with the cuDNN attention of stock."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    causal = causal and mask is None
    return sdpa(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def make_operands(number: int, memory: str, sequence_idx: int, masked: bool) -> CallOperands:
    """Return operands with a separate length for each sequence, so that no sequence reuses earlier plans."""
    (b, hq, hkv), s, (d, dv), causal = SHAPES[number]
    s += 16 * (2 * sequence_idx + ORDERS.index(memory))
    # a separate fault: with any mask, dQ of cuDNN is NaN at such lengths
    s += 8 if masked and s % 128 == 64 else 0
    case = new_case(f"{memory}_{number}_{sequence_idx}", (b, hq, hkv), (s, s), (d, dv), *["causal"] * causal)
    shapes = ((b, hq, s, d), (b, hkv, s, d), (b, hkv, s, dv))
    q, k, v = (random_tensor(shape, memory, 10 * number + i).requires_grad_() for i, shape in enumerate(shapes))
    mask = torch.zeros(s, s, dtype=q.dtype, device="cuda") if masked else None
    return CallOperands(case, q, k, v, mask + torch.full_like(mask, -torch.inf).triu(1) if masked and causal else mask)


def gradients(call: CallOperands, step: GradientStep, compiled: bool) -> tuple[Tensor, Inputs, tuple[Tensor, ...]]:
    case = call.case
    grad_out = random_tensor((case.B, case.Hq, case.Sq, case.Dv), step.order, case.Sq)
    if step.stock:
        torch_flashplug.disable()
    attend = torch.compile(attention, dynamic=False) if compiled and not step.stock else attention
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
def test_gradients_are_right_in_every_memory_order_of_grad_out(memory: str, masked: bool, compiled: bool) -> None:
    torch._dynamo.config.cache_size_limit = torch._dynamo.config.accumulated_cache_size_limit = 1000
    bindings.counters(reset=True)
    failed, checked = [], 0
    for number, sequence_idx in itertools.product(range(len(SHAPES)), range(len(SEQUENCES))):
        call = make_operands(number, memory, sequence_idx, masked)
        for step, gradient_step in enumerate(SEQUENCES[sequence_idx]):
            out, inputs, grads = gradients(call, gradient_step, compiled)
            if gradient_step.stock:
                continue
            checked += 1
            try:
                assert_matches_fp64(f"{call.case.name} step {step}", call.case, inputs, out, grads)
            except AssertionError as error:
                failed.append(str(error))
    assert not failed, f"{len(failed)} of {checked}: " + "\n".join(failed[:8])
    took = bindings.counters()
    assert took["repaired_bwd" if masked else "ours_bwd"] > checked / 2, took


@pytest.mark.gpu
@pytest.mark.isolated(120)
def test_disable_removes_the_workaround() -> None:
    """The counter must not change while the plugin is disabled, because the unmodified kernel of stock runs."""
    q, k, v = (random_tensor((2, 4, 128, 64), "bshd", i).requires_grad_() for i in range(3))
    mask = torch.zeros(128, 128, dtype=q.dtype, device="cuda")
    for is_enabled in (True, False, True):
        (torch_flashplug.enable if is_enabled else torch_flashplug.disable)()
        bindings.counters(reset=True)
        with sdpa_backend("stock"):
            sdpa(q, k, v, attn_mask=mask).sum().backward()
        assert bindings.counters()["repaired_bwd"] == is_enabled


@pytest.mark.gpu
@pytest.mark.isolated(120)
def test_errors_of_stock_pass_through_the_workaround() -> None:
    q = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16)
    op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    lse = torch.zeros(1, 2, 128, 1, device="cuda")
    none = torch.tensor([])
    texts, arguments = [], (none, none, None, none, none, 128, 128, 0.0, False)
    for is_repaired in (False, True):  # in this order, because a workaround stays installed
        bindings.enable_stock_workarounds(*bindings.STOCK_BACKENDS[: 3 * is_repaired])
        with pytest.raises(Exception) as raised:  # cuDNN attention does not support fp64
            op(q.double(), q.double(), q.double(), q.double(), q.double(), lse, *arguments)
        texts.append((type(raised.value), str(raised.value).splitlines()[0]))
    assert texts[0] == texts[1]


@pytest.mark.gpu
@pytest.mark.isolated(120)
def test_dropout_gradients_do_not_depend_on_the_order_of_grad_out() -> None:
    """Compute gradients of a forward with `grad_out` in both orders, after stock ran the first order.

    Both gradients must be equal.
    """
    q, k, v = (random_tensor((2, 4, 256, 64), "bshd", i).requires_grad_() for i in range(3))
    grad_out = random_tensor((2, 4, 256, 64), "bshd", 9)
    torch_flashplug.disable()
    torch.autograd.grad(sdpa(q, k, v, dropout_p=0.125), (q, k, v), with_layout(grad_out, "bhsd"))
    torch_flashplug.enable()
    with torch_flashplug.sdpa_backend("stock"):
        out = sdpa(q, k, v, dropout_p=0.125)
    bindings.counters(reset=True)
    pairs = [torch.autograd.grad(out, (q, k, v), with_layout(grad_out, order), retain_graph=True) for order in ORDERS]
    assert bindings.counters()["repaired_bwd"] == 2
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
    assert all(grad.abs().amax() > 0.1 for grad in pairs[0])


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_no_workaround_is_installed_without_cuda() -> None:
    assert stock_workarounds.install() == "" and bindings.enable_stock_workarounds()
    for backends in (("cudnn",), bindings.STOCK_BACKENDS):
        assert not bindings.enable_stock_workarounds(*backends) and "lacks CUDA attention" in bindings.last_error()


def test_ops_with_changed_schemas_get_no_workaround(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install no workaround for an op with a changed schema.

    Functions of stock are called by C++ names, and C++ names do not contain the return type. In the test, an op has
    different results and a second op is missing.
    """
    old_schemas, requests = bindings.names("schemas"), []
    new_schemas = [schema.replace("Tensor unused", "Tensor used") for schema in old_schemas]
    new_schemas += [
        schema.replace("_efficient_", "_efficient_no_more_") for schema in old_schemas if "_efficient_" in schema
    ]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for schemas, repaired in ((old_schemas, bindings.STOCK_BACKENDS), (new_schemas, ("cudnn",))):
        monkeypatch.setattr(bindings, "names", lambda name, schemas=schemas: tuple(schemas))
        monkeypatch.setattr(bindings, "enable_stock_workarounds", lambda *backends: requests.append(backends) or True)
        message = stock_workarounds.install()
        stock_workarounds.set_graph_workaround(False)
        assert requests.pop() == repaired
        assert ("_flash_attention" in message) == ("_efficient_no_more_" in message) == (schemas is new_schemas), (
            message
        )


@pytest.mark.parametrize("memory", ORDERS)
def test_traced_graphs_give_grad_out_in_the_order_of_out(memory: str) -> None:
    """Check the graph that the C++ wrapper of Inductor calls without the dispatcher. Traced tensors need no GPU."""
    op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

    def traced() -> list[torch.fx.Node]:
        with FakeTensorMode(), enable_python_dispatcher():
            q, k, v, out, grad_out = (torch.empty(2, 128, 4, 64, device="cuda").transpose(1, 2) for _ in range(5))
            if memory == "bhsd":
                grad_out = torch.empty(2, 4, 128, 64, device="cuda")
            lse, seed = torch.empty(2, 4, 128, 1, device="cuda"), torch.empty((), device="cuda", dtype=torch.int64)
            arguments = (grad_out, q, k, v, out, lse, seed, seed)
            graph = make_fx(lambda *args: op(*args, None, None, None, 128, 128, 0.0, True))(*arguments).graph
        return [node for node in graph.nodes if node.op == "call_function"]

    stock_workarounds.set_graph_workaround(True)
    try:
        nodes = traced()
    finally:
        stock_workarounds.set_graph_workaround(False)
    (backward,) = (node for node in nodes if node.target is op)
    assert math.copysign(1.0, backward.args[13]) == -1.0
    traced_grad_out, _, _, _, out = (node.meta["val"] for node in backward.args[:5])
    assert traced_grad_out.stride() == out.stride()
    assert any(node.target is torch.ops.aten.clone.default for node in nodes) == (memory == "bhsd")
    untouched = traced()
    assert untouched[0].target is op and math.copysign(1.0, untouched[0].args[13]) == 1.0
    stock_workarounds.set_graph_workaround(torch.version.cuda is not None)


# ---- operands ----


def make_unaligned_rows(shape: tuple[int, ...], columns: int) -> Tensor:
    """Return rows with a stride not divisible by 16 bytes, and with NaN between the rows."""
    b, h, s, d = shape
    buffer = torch.full((b, h, s, d + columns), float("nan"), device="cuda", dtype=torch.bfloat16)
    buffer[..., :d] = random_bf16(b, h, s, d)
    return buffer[..., :d]


@pytest.mark.gpu
@pytest.mark.isolated(120)
@pytest.mark.parametrize("kind", ["base", "rows", "broadcast", "grad_out"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_cudnn_reads_misaligned_and_broadcast_operands(kind: str, masked: bool) -> None:
    """Pass operands misread by the cuDNN attention of stock, in calls served by stock.

    `sdpa_backend("stock")` leaves the workaround active.
    """
    torch.manual_seed(2)
    q, k, v = random_bf16(2, 4, 200, 64), random_bf16(2, 4, 300, 64), random_bf16(2, 4, 300, 64)
    grad_out = random_bf16(2, 4, 200, 64)
    if kind == "base":
        q, v = misaligned(q.shape, 5), misaligned(v.shape, 12)
    elif kind == "rows":
        q, k = make_unaligned_rows(q.shape, 1), make_unaligned_rows(k.shape, 9)
    elif kind == "broadcast":
        q, v, grad_out = (
            random_bf16(2, 1, 200, 64).expand(2, 4, 200, 64),
            random_bf16(2, 4, 300, 128),
            random_bf16(2, 4, 200, 128),
        )
    else:
        grad_out = misaligned(grad_out.shape, 3)
    case = new_case(kind, (2, 4, 4), (200, 300), (64, v.shape[3]))
    mask = torch.ones(200, 300, dtype=torch.bool, device="cuda") if masked else None
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend("stock"):
        outs = [sdpa(q, k, v, attn_mask=mask) for _ in range(2)]
    grads = torch.autograd.grad(outs[1], (q, k, v), grad_out)
    assert bindings.counters()["repaired_bwd"] == 1
    assert [grad.stride() for grad in grads] == [torch.empty_like(tensor).stride() for tensor in (q, k, v)]
    assert_matches_fp64(kind, case, Inputs(q.detach(), k.detach(), v.detach(), grad_out), outs[1].detach(), grads)


# Memory layouts: bases and rows without 16-byte alignment, a stride of one row or key, and the expanded gradient of a
# sum.
OPERANDS_OF_LAYOUT = {
    "query": lambda: (
        misaligned((2, 4, 150, 80), 12),
        random_bf16(2, 4, 150, 80),
        random_bf16(2, 4, 150, 80),
        random_bf16(2, 4, 150, 80),
    ),
    "all": lambda: tuple(misaligned((2, 4, 150, 64), offset) for offset in (1, 2, 4, 7)),
    "rows": lambda: tuple(make_unaligned_rows((2, 4, 150, 80), columns) for columns in (1, 2, 4, 12)),
    "one_row": lambda: (
        misaligned((2, 4, 1, 128)),
        *(misaligned((2, 4, 40, 128), 3) for _ in "kv"),
        misaligned((2, 4, 1, 128)),
    ),
    "one_key": lambda: (
        misaligned((2, 4, 40, 96)),
        *(misaligned((2, 4, 1, 96), 3) for _ in "kv"),
        random_bf16(2, 4, 40, 96),
    ),
    "stride_of_one": lambda: (
        random_bf16(2, 4, 7, 96),
        random_bf16(2, 4, 1, 96),
        random_bf16(2, 4, 96, 1).mT,
        random_bf16(2, 4, 7, 96),
    ),
    "broadcast": lambda: (
        random_bf16(2, 4, 70, 64),
        *(misaligned((2, 1, 70, 64)).expand(2, 4, 70, 64) for _ in "kv"),
        misaligned((2, 4, 70, 64)),
    ),
    "broadcast_query": lambda: (
        misaligned((1, 70, 4, 64)).transpose(1, 2).expand(2, 4, 70, 64),
        *(random_bf16(2, 4, 70, 64) for _ in "kv"),
        random_bf16(2, 4, 70, 64),
    ),
    "sum": lambda: (*(random_bf16(2, 4, 70, 64) for _ in "qkv"), random_bf16(1).expand(2, 4, 70, 64)),
}
FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION


def run_on_backend(backend: SDPBackend, *operands: Tensor, **kwargs: object) -> Tensor:
    """Run a call on one backend of stock."""
    with torch_flashplug.sdpa_backend("stock"), sdpa_kernel(backend):
        return sdpa(*operands, **kwargs)


@pytest.mark.gpu
@pytest.mark.isolated(120)
@pytest.mark.parametrize("kind", OPERANDS_OF_LAYOUT)
@pytest.mark.parametrize("backend", [FLASH, EFFICIENT], ids=["flash", "efficient"])
def test_flash_and_efficient_read_operands_of_any_layout(backend: SDPBackend, kind: str) -> None:
    """Without the workaround, most of these calls end the CUDA context and the remaining calls raise.

    Stock copies the expanded gradient of a sum without help.
    """
    torch.manual_seed(3)
    *operands, grad_out = OPERANDS_OF_LAYOUT[kind]()
    q, k, v = (tensor.detach().requires_grad_() for tensor in operands)
    out = run_on_backend(backend, q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
    if backend == FLASH:  # strides promised by the meta functions of torch
        assert [strides(tensor) for tensor in (out, *grads)] == [strides(torch.empty_like(t)) for t in (q, q, k, v)]
    case = new_case(kind, (2, 4, 4), (q.shape[2], k.shape[2]), (q.shape[3], v.shape[3]))
    assert_matches_fp64(kind, case, Inputs(*operands, grad_out), out.detach(), grads)


@pytest.mark.gpu
@pytest.mark.isolated(120)
@pytest.mark.parametrize("kind", ["masked", "fp32", "dropout", "deterministic", "graph"])
def test_auto_serves_misaligned_operands(kind: str) -> None:
    """Call F.scaled_dot_product_attention in auto with misaligned operands.

    Without the plugin, these calls ended the CUDA context or raised. Masked calls now run on our kernels with copied
    operands; all remaining calls stay with stock.
    """
    torch.manual_seed(4)
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    rows = {"deterministic": 200, "fp32": 1}.get(kind, 40)
    shapes = ((2, 4, rows, 64), *[(2, 4, {"deterministic": 200, "fp32": 40}.get(kind, 1), 64)] * 2)
    operands = [torch.randn(math.prod(shape) + 1, device="cuda", dtype=dtype)[1:].view(shape) for shape in shapes]
    q, k, v = (tensor.requires_grad_(kind != "graph") for tensor in operands)
    mask = torch.ones(rows, k.shape[2], dtype=torch.bool, device="cuda") if kind == "masked" else None
    attend = sdpa
    if kind == "graph":  # traced with operands readable for the flash attention of stock
        attend = torch.compile(functools.partial(run_on_backend, FLASH), backend="aot_eager", dynamic=False)
        attend(*(random_bf16(*shape) for shape in shapes))
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
    for actual, expected in zip((out, *grads), answers):
        if kind == "dropout":
            assert actual.isfinite().all()
        else:
            torch.testing.assert_close(actual.double(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
@pytest.mark.isolated(120)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradient_of_a_float_mask_without_operand_gradients(heads: int, offset: int, compiled: bool) -> None:
    """Check calls failing without the workaround: a single head ends the CUDA context.

    Calls with several heads raise "LSE is not correctly aligned".
    """
    torch.manual_seed(5)
    q, k, v = misaligned((1, heads, 257, 64), offset), random_bf16(1, heads, 9, 64), random_bf16(1, heads, 9, 64)
    mask, grad_out = random_bf16(257, 9).requires_grad_(), random_bf16(1, heads, 257, 64)
    attend = torch.compile(run_on_backend, backend="aot_eager", dynamic=False) if compiled else run_on_backend
    out = attend(EFFICIENT, q, k, v, attn_mask=mask)
    (grad,) = torch.autograd.grad(out, mask, grad_out)
    wide = mask.detach().double().requires_grad_()
    exact = (q.double() @ k.double().mT * 0.125 + wide).softmax(-1) @ v.double()
    (expected,) = torch.autograd.grad(exact, wide, grad_out.double())
    torch.testing.assert_close(grad.double(), expected, atol=5e-2, rtol=5e-2)


# ---- dropout and log output ----


@pytest.mark.gpu
@pytest.mark.isolated(120)
def test_backward_uses_the_dropout_mask_of_the_forward() -> None:
    """Check dV against the dropout mask of the forward.

    The repaired backward passes a different dropout_p than the forward. V is the identity, so the output is P with its
    dropout mask, and dV must equal out^T grad_out.
    """
    for number, p in enumerate((0.0625, 0.1, 0.125, 0.2, 0.3, 0.43, 0.5, 0.625, 0.75, 0.9375)):
        rows = 256 + 64 * number  # new lengths get a new plan
        q, k = random_bf16(2, 4, rows, 128).requires_grad_(), random_bf16(2, 4, 128, 128).requires_grad_()
        v = torch.eye(128, device="cuda", dtype=torch.bfloat16).expand(2, 4, 128, 128).contiguous().requires_grad_()
        bindings.counters(reset=True)
        with torch_flashplug.sdpa_backend("stock"):
            out = sdpa(q, k, v, dropout_p=p)
        grad_out = random_bf16(*out.shape)
        (grad_v,) = torch.autograd.grad(out, v, grad_out)
        assert bindings.counters()["repaired_bwd"] == 1
        exact = out.detach().double().mT @ grad_out.double()
        assert float((grad_v.double() - exact).norm() / exact.norm()) < 1e-2, p


@pytest.mark.gpu
@pytest.mark.isolated(120)
def test_transforms_log_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Tensors wrapped by functorch have no address.

    The choice hook must not ask for the address, because torch up to 2.12 logs the failure.
    """
    q, k, v = (random_bf16(2, 4, 64, 300).mT for _ in range(3))
    torch.func.grad(lambda x: sdpa(x, k, v).float().sum())(q)
    torch.vmap(lambda x: sdpa(x, k, v, scale=-1.0, dropout_p=0.1), randomness="same")(torch.stack([q, q]))
    torch.cuda.synchronize()
    assert "Exception" not in capfd.readouterr().err
