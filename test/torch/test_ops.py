"""The custom ops: opcheck, fakes against real outputs, mathematics against torch's own. On CPU the reference math
serves them, on CUDA the kernels.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cpp
import pytest
import torch
import torch.nn.functional as F
from conftest import CUDA
from standin import road_to
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import sdpa
from torch_flashplug.registry.architectures import BACKENDS
from torch_flashplug.torch_hooks import sdpa_composite

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
FORCE_FA3 = BACKENDS.index("fa3")


def qkv(
    dtype: torch.dtype = torch.float32,
    *,
    heads: int = 4,
    kv_heads: int = 4,
    rows: int = 16,
    keys: int = 16,
    d: int = 8,
    dv: int = 8,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, rows, d), (kv_heads, keys, d), (kv_heads, keys, dv))
    return [torch.randn(2, n, h, w, generator=generator).to(dtype).transpose(1, 2) for h, n, w in sizes]


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    p: float = 0.0,
    causal: int = 0,
    mode: int = 0,
) -> tuple[Tensor, ...]:
    return sdpa.namespace.sdpa_fwd(query, key, value, bias, p, causal, None, mode)


CALLS = {
    "plain": ({}, None, 0),
    "causal_cross": ({"rows": 16, "keys": 24}, None, 1),
    "causal_bottom_right": ({"rows": 8, "keys": 24}, None, 2),
    "gqa_dv": ({"kv_heads": 2, "dv": 16}, None, 1),
    "mqa": ({"kv_heads": 1}, None, 0),
    "float_mask": ({}, (16, 16), 0),
    "broadcast_mask": ({}, (2, 1, 1, 16), 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_forward_and_backward(name: str) -> None:
    sizes, mask, causal = CALLS[name]
    tensors = [tensor.requires_grad_() for tensor in qkv(**sizes)]
    bias = torch.randn(mask, requires_grad=True) if mask else None
    torch.library.opcheck(sdpa.namespace.sdpa_fwd.default, (*tensors, bias, 0.0, causal, None, 0), test_utils=OPCHECKS)
    with torch.no_grad():
        results = forward(*tensors, bias, causal=causal)
    plain = [tensor.detach() for tensor in tensors]
    detached = None if bias is None else bias.detach()
    arguments = (torch.randn_like(results[0]), *plain, detached, *results, 0.0, causal, None, 0, bias is not None)
    torch.library.opcheck(sdpa.namespace.sdpa_bwd.default, arguments, test_utils=OPCHECKS)


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("causal", [0, 1])
def test_opcheck_on_cuda_kernels(causal: int, grad: bool) -> None:
    tensors = [tensor.cuda().requires_grad_(grad) for tensor in qkv(torch.bfloat16, rows=128, keys=192, d=64, dv=64)]
    torch.library.opcheck(
        sdpa.namespace.sdpa_fwd.default,
        (*tensors, None, 0.0, causal, None, FORCE_FA3),
        test_utils=OPCHECKS,
        atol=2e-2,
        rtol=2e-2,
    )


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "expanded", "sliced", "one_row"])
@pytest.mark.parametrize("dv", [64, 32])
def test_fake_has_the_strides_of_the_real_output(device: str, layout: str, dv: int) -> None:
    query, key, value = (tensor.to(device) for tensor in qkv(torch.bfloat16, rows=128, keys=128, d=64, dv=dv))
    if layout == "bhsd":
        query = query.contiguous()
    elif layout == "expanded":
        query = query[:, :1].expand(2, 4, 128, 64)
    elif layout == "sliced":
        query = torch.cat((query, query), dim=3)[..., :64]
    elif layout == "one_row":
        query = query[:, :, :1]
    real = forward(query, key, value)
    with torch._subclasses.FakeTensorMode() as fake_mode:
        fake = forward(*(fake_mode.from_tensor(tensor) for tensor in (query, key, value)))
    for name, got, want in zip(("out", "lse", "seed", "offset"), real, fake):
        assert (got.shape, got.stride(), got.dtype, got.device) == (
            want.shape,
            want.stride(),
            want.dtype,
            want.device,
        ), name
    grads = sdpa.namespace.sdpa_bwd(torch.randn_like(real[0]), query, key, value, None, *real, 0.0, 0, None, 0, False)
    for name, got, like in zip(("dq", "dk", "dv"), grads, (query, key, value)):
        assert (got.shape, got.stride(), got.dtype) == (like.shape, torch.empty_like(like).stride(), like.dtype), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "causal_bottom_right"])
def test_math_is_torchs(name: str, dtype: torch.dtype) -> None:
    sizes, mask, causal = CALLS[name]
    inputs = [tensor.requires_grad_() for tensor in qkv(dtype, **sizes)]
    inputs += [torch.randn(mask, dtype=dtype, requires_grad=True)] if mask else []
    ours = forward(*inputs, causal=causal)[0]
    stock = F.scaled_dot_product_attention(*inputs, is_causal=bool(causal), enable_gqa=True)
    torch.testing.assert_close(ours, stock)
    grad = torch.randn_like(ours)
    for got, want in zip(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(stock, inputs, grad)):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.bfloat16).min, torch.finfo(torch.float32).min])
def test_rows_of_low_scores_alone(low: float) -> None:
    """As torch's, the mean of v; no gradients, as kernels have it: an fp32 LSE has no digits left for how many."""
    inputs = [tensor.requires_grad_() for tensor in (*qkv(), torch.zeros(16, 16))]
    with torch.no_grad():
        inputs[3][5] = low
    ours, stock = forward(*inputs)[0], F.scaled_dot_product_attention(*inputs)
    torch.testing.assert_close(ours, stock)
    grad = torch.randn_like(ours)
    seen = grad.clone().index_fill_(2, torch.tensor(5), 0.0)
    for got, want in zip(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(stock, inputs, seen)):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("schema", bindings.names("schemas"), ids=lambda schema: schema.partition("(")[0])
def test_schemas_that_cpp_knows_are_torchs(schema: str) -> None:
    """It takes arguments from stacks, and leaves results there, by their names in these."""
    namespace, name = schema.partition("(")[0].split("::")
    name, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops, namespace), name)
    assert str(getattr(op, overload or "default")._schema) == schema


FORGETFUL = """
#include <cstring>
#include "core/values.h"
namespace flashplug {
void rethrow(const char* call) { throw std::runtime_error("the dispatcher was asked"); }
void rethrow_python_error() {}
bool dispatched(const char*, const char*, StableIValue*) { return false; }
}
extern "C" void forget(char* text) try {
  flashplug::OpCall op(flashplug::kSum);
  op[flashplug::kSum["self"]] = op[flashplug::kSum["dim"]] = op[flashplug::kSum["dtype"]] = 0;
  op.run();
} catch (const std::exception& error) {
  std::strcpy(text, error.what());
}
"""


def test_a_call_without_an_argument_says_which(tmp_path: Path) -> None:
    assert cpp.compiles(FORGETFUL, "-shared", "-fPIC", "-o", str(tmp_path / "forgetful.so"))
    text = ctypes.create_string_buffer(200)
    ctypes.CDLL(str(tmp_path / "forgetful.so")).forget(text)
    assert text.value.decode() == "torch_flashplug: aten::sum without its argument keepdim"


@pytest.mark.parametrize(
    "function, more", [(sdpa_composite._sdpa, set()), (torch_flashplug.explain, {"device"})], ids=["plan_b", "explain"]
)
def test_calls_are_spelled_as_torchs(function: Callable, more: set[str]) -> None:
    """F.sdpa's arguments, and those of stock's choice, which both ask."""
    spelled = [name for name in inspect.signature(function).parameters if name not in more]
    for op in (torch.ops.aten.scaled_dot_product_attention, torch.ops.aten._fused_sdp_choice):
        assert [argument.name for argument in op.default._schema.arguments] == spelled


def test_bottom_right_is_the_mask_it_says() -> None:
    tensors = qkv(rows=8, keys=24)
    mask = torch.ones(8, 24, dtype=torch.bool).tril(16)
    torch.testing.assert_close(forward(*tensors, causal=2)[0], forward(*tensors, mask)[0])


def test_rows_that_see_no_key_are_zero() -> None:
    query, key, value = (tensor.requires_grad_() for tensor in qkv())
    mask = torch.ones(16, 16, dtype=torch.bool)
    mask[3] = False
    out, lse, _, _ = forward(query, key, value, mask)
    assert out[:, :, 3].eq(0).all() and lse[:, :, 3].eq(-torch.inf).all() and lse[:, :, 4].isfinite().all()
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert grads[0][:, :, 3].eq(0).all() and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("sizes", [{"keys": 0}, {"rows": 0}, {"d": 0}])
def test_empty_dims_are_torchs(sizes: dict[str, int]) -> None:
    inputs = [tensor.requires_grad_() for tensor in qkv(**sizes)]
    ours, stock = forward(*inputs)[0], F.scaled_dot_product_attention(*inputs)
    if sizes == {"d": 0} and torch.__version__.startswith("2.12."):  # F.sdpa gives zeros there, not the mean of value
        stock, _ = torch.ops.aten._scaled_dot_product_attention_math(*inputs)
    torch.testing.assert_close(ours, stock)
    for got, want in zip(torch.autograd.grad(ours.sum(), inputs), torch.autograd.grad(stock.sum(), inputs)):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_dropout_follows_its_seed(device: str) -> None:
    query, key, value = (tensor.to(device) for tensor in qkv(rows=256, keys=256))
    eye = torch.eye(256, device=device).expand(2, 4, 256, 256)  # the output is the dropped-out probabilities themselves
    draws = []
    for _ in range(2):
        torch.manual_seed(7)
        draws.append(sdpa.namespace._math_fwd(query, key, eye, None, 0.25, 0, None, 0))
    other = sdpa.namespace._math_fwd(query, key, eye, None, 0.25, 0, None, 0)
    assert torch.equal(draws[0][0], draws[1][0]) and not torch.equal(draws[0][0], other[0])
    assert abs(draws[0][0].eq(0).float().mean().item() - 0.25) < 0.01
    # The backward drops the same entries: the output is linear in the values, so <dv, v> = <out, grad_out>.
    out, lse, seed, offset = sdpa.namespace._math_fwd(query, key, value, None, 0.25, 0, None, 0)
    grad = torch.randn_like(out)
    dv = sdpa.namespace._math_bwd(grad, query, key, value, None, out, lse, seed, offset, 0.25, 0, None, 0, False)[2]
    torch.testing.assert_close((dv * value).sum(), (out * grad).sum(), rtol=1e-3, atol=1e-2)
    assert sdpa.namespace._math_fwd(query, key, value, None, 1.0, 0, None, 0)[0].eq(0).all()


def test_gradcheck_with_mask_and_dropout() -> None:
    query, key, value = (
        tensor.requires_grad_() for tensor in qkv(torch.float64, heads=2, kv_heads=1, rows=3, keys=4, d=2, dv=3)
    )
    bias = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def attention(*inputs: Tensor) -> Tensor:
        torch.manual_seed(0)
        return forward(*inputs, p=0.3)[0]

    assert torch.autograd.gradcheck(attention, (query, key, value, bias))


def test_second_derivative_is_refused_with_a_way_out() -> None:
    query, key, value = (tensor.requires_grad_() for tensor in qkv())
    (grad,) = torch.autograd.grad(forward(query, key, value)[0].sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="SDPBackend.MATH"):
        grad.sum().backward()


@pytest.mark.parametrize("mapped", list(itertools.product((0, 1, None), (0, None), (0, 2, None))))
def test_vmap_of_the_own_op(mapped: tuple[int | None, ...]) -> None:
    """Query, key and mask mapped over any dim or not at all; gradients too."""
    if mapped == (None, None, None):
        mapped = (0, None, None)
    query, key, value = qkv()
    mask = torch.randn(2, 1, 16, 16)

    def three(tensor: Tensor, dim: int | None) -> Tensor:
        return tensor if dim is None else torch.stack([tensor, tensor * 2, tensor - 1], dim)

    inputs = [three(tensor, dim) for tensor, dim in zip((query, key, mask), mapped)]

    def grads(q: Tensor, k: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        out, lse, seed, offset = forward(q, k, value, m)
        return out, *sdpa.namespace.sdpa_bwd(out, q, k, value, m, out, lse, seed, offset, 0.0, 0, None, 0, True)

    got = torch.vmap(grads, mapped)(*inputs)
    for index in range(3):
        want = grads(*(tensor if dim is None else tensor.select(dim, index) for tensor, dim in zip(inputs, mapped)))
        for name, a, b in zip(("out", "dq", "dk", "dv", "dbias"), got, want):
            torch.testing.assert_close(a[index], b, msg=lambda text, name=name: f"{name}: {text}")


def test_vmap_with_dropout_asks_for_different_randomness() -> None:
    tensors = [torch.stack([tensor, tensor]) for tensor in qkv()]
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda q, k, v: forward(q, k, v, p=0.5)[0])(*tensors)
    out = torch.vmap(lambda q, k, v: forward(q, k, v, p=0.5)[0], randomness="different")(*tensors)
    assert not torch.equal(out[0], out[1])


def test_a_backward_knows_all_that_its_forward_was_told() -> None:
    """Else it would give the gradients of another call."""
    for name in ("sdpa", "_math"):
        told, known = (
            {argument.name for argument in getattr(sdpa.namespace, f"{name}_{way}").default._schema.arguments}
            for way in ("fwd", "bwd")
        )
        assert told <= known


# Of every argument of sdpa_fwd what a plain call says, and what matters: to numbers, or, of the mode, to who serves it.
TOLD: dict[str, tuple[Any, Any]] = {
    **{
        name: (tensor, -tensor)
        for name, tensor in zip(sdpa.ForwardArgs._fields, qkv(torch.bfloat16, rows=32, keys=48, d=64, dv=64))
    },
    "attn_bias": (None, torch.linspace(-2, 2, 48).expand(32, 48)),
    "dropout_p": (0.0, 0.5),
    "causal_mode": (sdpa.CAUSAL_NONE, sdpa.CAUSAL_BOTTOM_RIGHT),
    "scale": (None, 0.5),
    "mode": (0, BACKENDS.index("math")),
}
GRAD = torch.linspace(-1, 1, 2 * 4 * 32 * 64).view(2, 4, 32, 64).to(torch.bfloat16)


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those that the mathematics and autograd are told, by whichever way; they change no number."""
    told: list[int] = []

    def noted(kind: type) -> Callable:
        def make(*args) -> sdpa.ForwardArgs | sdpa.BackwardArgs:
            told.append(kind(*args).mode)
            return kind(*args)

        return make

    for kind in (sdpa.ForwardArgs, sdpa.BackwardArgs):
        monkeypatch.setattr(sdpa, kind.__name__, noted(kind))
    return told


def by_autograd(call: dict[str, Any]) -> Iterator[tuple[Tensor, ...]]:
    """Results of the own op, then gradients."""
    torch.manual_seed(0)
    tensors = {name: x.detach() for name, x in call.items() if isinstance(x, Tensor)}
    leaves = [x.requires_grad_() for x in tensors.values() if x.is_floating_point()]
    results = sdpa.namespace.sdpa_fwd(**call | tensors)
    yield results
    yield torch.autograd.grad(results[0], leaves, GRAD)


def by_math(call: dict[str, Any]) -> Iterator[tuple[Tensor, ...]]:
    torch.manual_seed(0)
    results = sdpa.namespace._math_fwd(**call)
    yield results
    kept = dict(zip(("out", "lse", "seed", "offset"), results, strict=True))
    biased = call["attn_bias"] is not None
    yield sdpa.namespace._math_bwd(grad_out=GRAD, **call, **kept, bias_grad=biased)[: 3 + biased]


@pytest.mark.parametrize("road", [nullcontext, lambda: road_to("cpu")], ids=["python", "cpp"])
@pytest.mark.parametrize("argument", [one.name for one in sdpa.namespace.sdpa_fwd.default._schema.arguments])
def test_every_argument_arrives(argument: str, road: Callable, modes: list[int]) -> None:
    """In the forward and, by way of autograd, in the backward; a new one needs its row of TOLD."""
    plain = {name: values[0] for name, values in TOLD.items()}
    told = plain | {argument: TOLD[argument][1]}
    wanted, without = list(by_math(told)), list(by_math(plain))
    with road():
        modes.clear()
        for step, got in enumerate(by_autograd(told)):
            assert set(modes) == {told["mode"]}
            assert len(got) == len(wanted[step]) and all(map(torch.equal, got, wanted[step]))
            assert argument == "mode" or not all(map(torch.equal, got, without[step]))
            modes.clear()


@pytest.mark.parametrize(
    "change, text",
    [
        ({"key": torch.randn(2, 4, 16, 4)}, "all other sizes must match"),
        ({"key": torch.randn(2, 3, 16, 8), "value": torch.randn(2, 3, 16, 8)}, "must divide"),
        ({"value": torch.randn(2, 4, 12, 8)}, "all other sizes must match"),
        ({"value": torch.randn(2, 4, 16, 8).double()}, "same dtype"),
        ({"query": torch.randn(4, 16, 8)}, "dims"),
        ({"attn_bias": torch.zeros(16, 16, dtype=torch.int32)}, "mask dtype"),
        ({"attn_bias": torch.zeros(16, 16), "causal_mode": 1}, "Explicit attn_mask"),
        ({"dropout_p": 1.5}, "between 0 and 1"),
        ({"causal_mode": 3}, "causal_mode must be 0 .none., 1 .top-left. or 2 .bottom-right., but got 3"),
        ({"mode": 0x7F}, "mode must name a backend of .*, but got 127"),
    ],
)
def test_own_op_refuses_what_has_no_meaning(change: dict, text: str) -> None:
    query, key, value = qkv()
    call = sdpa.ForwardArgs(query, key, value, None, 0.0, 0, None, 0)._replace(**change)
    with pytest.raises(RuntimeError, match=text):
        sdpa.namespace.sdpa_fwd(*call)
