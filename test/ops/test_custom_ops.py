"""The custom ops: opcheck, fakes against real outputs, and math against torch.

On CPU the reference math serves the ops, on CUDA the kernels.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import compile_cpp
import pytest
import torch
import torch.nn.functional as F
from conftest import CUDA
from device_backend import use_device_backend
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
def test_sdpa_ops_pass_opcheck(name: str) -> None:
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
def test_sdpa_ops_pass_opcheck_on_cuda_kernels(causal: int, grad: bool) -> None:
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
    for name, actual, expected in zip(("out", "lse", "seed", "offset"), real, fake):
        assert (actual.shape, actual.stride(), actual.dtype, actual.device) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
            expected.device,
        ), name
    grads = sdpa.namespace.sdpa_bwd(torch.randn_like(real[0]), query, key, value, None, *real, 0.0, 0, None, 0, False)
    for name, actual, like in zip(("dq", "dk", "dv"), grads, (query, key, value)):
        assert (actual.shape, actual.stride(), actual.dtype) == (
            like.shape,
            torch.empty_like(like).stride(),
            like.dtype,
        ), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "causal_bottom_right"])
def test_math_equals_math_of_torch(name: str, dtype: torch.dtype) -> None:
    sizes, mask, causal = CALLS[name]
    inputs = [tensor.requires_grad_() for tensor in qkv(dtype, **sizes)]
    inputs += [torch.randn(mask, dtype=dtype, requires_grad=True)] if mask else []
    plugin_out = forward(*inputs, causal=causal)[0]
    stock = F.scaled_dot_product_attention(*inputs, is_causal=bool(causal), enable_gqa=True)
    torch.testing.assert_close(plugin_out, stock)
    grad = torch.randn_like(plugin_out)
    for actual, expected in zip(
        torch.autograd.grad(plugin_out, inputs, grad), torch.autograd.grad(stock, inputs, grad)
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.bfloat16).min, torch.finfo(torch.float32).min])
def test_rows_with_only_low_scores(low: float) -> None:
    """Use rows with only very low scores: the output is the mean of v, as in torch.

    Gradients are zero, as in kernels: an fp32 LSE has no digits left for the number of keys.
    """
    inputs = [tensor.requires_grad_() for tensor in (*qkv(), torch.zeros(16, 16))]
    with torch.no_grad():
        inputs[3][5] = low
    plugin_out, stock = forward(*inputs)[0], F.scaled_dot_product_attention(*inputs)
    torch.testing.assert_close(plugin_out, stock)
    grad = torch.randn_like(plugin_out)
    grad_of_other_rows = grad.clone().index_fill_(2, torch.tensor(5), 0.0)
    for actual, expected in zip(
        torch.autograd.grad(plugin_out, inputs, grad), torch.autograd.grad(stock, inputs, grad_of_other_rows)
    ):
        torch.testing.assert_close(actual, expected)


def test_every_schema_in_cpp_is_compared_with_torch() -> None:
    """A schema outside of kSchemas could differ from torch's schema, and C++ would then read the wrong argument."""
    text = (Path(__file__).parents[2] / "src" / "core" / "schemas.h").read_text()
    named = re.findall(r"inline constexpr Schema (k\w+)\(", text)
    compared = re.findall(r"\b(k\w+)\.text\(\)", text.partition("kSchemas[] = ")[2])
    assert sorted(named) == sorted(compared)


@pytest.mark.parametrize("schema", bindings.names("schemas"), ids=lambda schema: schema.partition("(")[0])
def test_schemas_in_cpp_equal_schemas_of_torch(schema: str) -> None:
    """Compare the schemas known to C++ with torch.

    C++ takes arguments from stacks, and leaves results on stacks, by the names in these schemas.
    """
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
bool dispatch_op(const char*, const char*, StableIValue*) { return false; }
}
extern "C" void forget(char* text) try {
  flashplug::OpCall op(flashplug::kSum);
  op[flashplug::kSum["self"]] = op[flashplug::kSum["dim"]] = op[flashplug::kSum["dtype"]] = 0;
  op.run();
} catch (const std::exception& error) {
  std::strcpy(text, error.what());
}
"""


def test_missing_argument_is_named_in_the_error(tmp_path: Path) -> None:
    assert compile_cpp.compiles(FORGETFUL, "-shared", "-fPIC", "-o", str(tmp_path / "forgetful.so"))
    text = ctypes.create_string_buffer(200)
    ctypes.CDLL(str(tmp_path / "forgetful.so")).forget(text)
    assert text.value.decode() == "torch_flashplug: aten::sum without its argument keepdim"


@pytest.mark.parametrize(
    "arguments, results, fits", [(20, 20, True), (21, 1, False), (1, 21, False)], ids=["most", "arguments", "results"]
)
def test_schema_beyond_the_stack_of_a_call_does_not_compile(arguments: int, results: int, fits: bool) -> None:
    lists = (", ".join(f"Tensor {name}{i}" for i in range(count)) for name, count in (("a", arguments), ("r", results)))
    source = '#include "core/schemas.h"\nconstexpr flashplug::Schema op("aten::op({}) -> ({})");'
    assert compile_cpp.compiles(source.format(*lists)) == fits


@pytest.mark.parametrize(
    "function, more",
    [(sdpa_composite._sdpa, set()), (torch_flashplug.explain, {"device"})],
    ids=["composite_hook", "explain"],
)
def test_parameter_names_equal_names_of_torch(function: Callable, more: set[str]) -> None:
    """Compare parameter names with F.sdpa and with the choice of stock, because both functions are asked by name."""
    spelled = [name for name in inspect.signature(function).parameters if name not in more]
    for op in (torch.ops.aten.scaled_dot_product_attention, torch.ops.aten._fused_sdp_choice):
        assert [argument.name for argument in op.default._schema.arguments] == spelled


def test_bottom_right_equals_the_dense_mask() -> None:
    tensors = qkv(rows=8, keys=24)
    mask = torch.ones(8, 24, dtype=torch.bool).tril(16)
    torch.testing.assert_close(forward(*tensors, causal=2)[0], forward(*tensors, mask)[0])


def test_rows_without_visible_keys_are_zero() -> None:
    query, key, value = (tensor.requires_grad_() for tensor in qkv())
    mask = torch.ones(16, 16, dtype=torch.bool)
    mask[3] = False
    out, lse, _, _ = forward(query, key, value, mask)
    assert out[:, :, 3].eq(0).all() and lse[:, :, 3].eq(-torch.inf).all() and lse[:, :, 4].isfinite().all()
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert grads[0][:, :, 3].eq(0).all() and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("sizes", [{"keys": 0}, {"rows": 0}, {"d": 0}])
def test_empty_dims_give_the_result_of_torch(sizes: dict[str, int]) -> None:
    inputs = [tensor.requires_grad_() for tensor in qkv(**sizes)]
    plugin_out, stock = forward(*inputs)[0], F.scaled_dot_product_attention(*inputs)
    # F.sdpa gives zeros in this version, not the mean of value
    if sizes == {"d": 0} and torch.__version__.startswith("2.12."):
        stock, _ = torch.ops.aten._scaled_dot_product_attention_math(*inputs)
    torch.testing.assert_close(plugin_out, stock)
    for actual, expected in zip(
        torch.autograd.grad(plugin_out.sum(), inputs), torch.autograd.grad(stock.sum(), inputs)
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_dropout_follows_its_seed(device: str) -> None:
    query, key, value = (tensor.to(device) for tensor in qkv(rows=256, keys=256))
    eye = torch.eye(256, device=device).expand(2, 4, 256, 256)  # the output equals the probabilities after dropout
    draws = []
    for _ in range(2):
        torch.manual_seed(7)
        draws.append(sdpa.namespace._math_fwd(query, key, eye, None, 0.25, 0, None, 0))
    third_draw = sdpa.namespace._math_fwd(query, key, eye, None, 0.25, 0, None, 0)
    assert torch.equal(draws[0][0], draws[1][0]) and not torch.equal(draws[0][0], third_draw[0])
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


def test_second_derivative_is_refused_with_advice() -> None:
    query, key, value = (tensor.requires_grad_() for tensor in qkv())
    (grad,) = torch.autograd.grad(forward(query, key, value)[0].sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="SDPBackend.MATH"):
        grad.sum().backward()


@pytest.mark.parametrize("mapped", list(itertools.product((0, 1, None), (0, None), (0, 2, None))))
def test_vmap_of_the_op(mapped: tuple[int | None, ...]) -> None:
    """Map query, key and mask over any dim or not at all; check gradients too."""
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

    actual = torch.vmap(grads, mapped)(*inputs)
    for index in range(3):
        expected = grads(*(tensor if dim is None else tensor.select(dim, index) for tensor, dim in zip(inputs, mapped)))
        for name, a, b in zip(("out", "dq", "dk", "dv", "dbias"), actual, expected):
            torch.testing.assert_close(a[index], b, msg=lambda text, name=name: f"{name}: {text}")


def test_vmap_with_dropout_requires_different_randomness() -> None:
    tensors = [torch.stack([tensor, tensor]) for tensor in qkv()]
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda q, k, v: forward(q, k, v, p=0.5)[0])(*tensors)
    out = torch.vmap(lambda q, k, v: forward(q, k, v, p=0.5)[0], randomness="different")(*tensors)
    assert not torch.equal(out[0], out[1])


def test_backward_receives_every_argument_of_the_forward() -> None:
    """The backward must receive every argument of the forward. A missing argument would give wrong gradients."""
    for name in ("sdpa", "_math"):
        forward_arguments, backward_arguments = (
            {argument.name for argument in getattr(sdpa.namespace, f"{name}_{direction}").default._schema.arguments}
            for direction in ("fwd", "bwd")
        )
        assert forward_arguments <= backward_arguments


# Two values for every argument of sdpa_fwd: the value of a plain call, and a value that changes the numbers. The second
# mode changes only the backend of the call.
ARGUMENT_VALUES: dict[str, tuple[Any, Any]] = {
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
    """Return the modes passed to reference math and autograd, by any entry; modes do not change numbers."""
    recorded: list[int] = []

    def recording(kind: type) -> Callable:
        def make(*args) -> sdpa.ForwardArgs | sdpa.BackwardArgs:
            recorded.append(kind(*args).mode)
            return kind(*args)

        return make

    for kind in (sdpa.ForwardArgs, sdpa.BackwardArgs):
        monkeypatch.setattr(sdpa, kind.__name__, recording(kind))
    return recorded


def results_by_autograd(call: dict[str, Any]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the results of the op, then gradients."""
    torch.manual_seed(0)
    tensors = {name: x.detach() for name, x in call.items() if isinstance(x, Tensor)}
    leaves = [x.requires_grad_() for x in tensors.values() if x.is_floating_point()]
    results = sdpa.namespace.sdpa_fwd(**call | tensors)
    yield results
    yield torch.autograd.grad(results[0], leaves, GRAD)


def results_by_math(call: dict[str, Any]) -> Iterator[tuple[Tensor, ...]]:
    torch.manual_seed(0)
    results = sdpa.namespace._math_fwd(**call)
    yield results
    kept = dict(zip(("out", "lse", "seed", "offset"), results, strict=True))
    biased = call["attn_bias"] is not None
    yield sdpa.namespace._math_bwd(grad_out=GRAD, **call, **kept, bias_grad=biased)[: 3 + biased]


@pytest.mark.parametrize("use_implementation", [nullcontext, lambda: use_device_backend("cpu")], ids=["python", "cpp"])
@pytest.mark.parametrize(
    "argument", [schema_argument.name for schema_argument in sdpa.namespace.sdpa_fwd.default._schema.arguments]
)
def test_every_argument_reaches_forward_and_backward(
    argument: str, use_implementation: Callable, modes: list[int]
) -> None:
    """Check that each argument reaches the forward and, through autograd, the backward.

    A new argument needs a row in ARGUMENT_VALUES.
    """
    plain = {name: values[0] for name, values in ARGUMENT_VALUES.items()}
    call = plain | {argument: ARGUMENT_VALUES[argument][1]}
    expected, results_of_plain = list(results_by_math(call)), list(results_by_math(plain))
    with use_implementation():
        modes.clear()
        for step, actual in enumerate(results_by_autograd(call)):
            assert set(modes) == {call["mode"]}
            assert len(actual) == len(expected[step]) and all(map(torch.equal, actual, expected[step]))
            assert argument == "mode" or not all(map(torch.equal, actual, results_of_plain[step]))
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
def test_op_refuses_invalid_arguments(change: dict, text: str) -> None:
    query, key, value = qkv()
    call = sdpa.ForwardArgs(query, key, value, None, 0.0, 0, None, 0)._replace(**change)
    with pytest.raises(RuntimeError, match=text):
        sdpa.namespace.sdpa_fwd(*call)
