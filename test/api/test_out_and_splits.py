"""attention() with `out`, num_splits, fixed_split_size and 8-bit keys and values.

8-bit calls are combined with sequence lengths, softcap and sinks. For every implementation, the result must equal the
result of the plain call.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import torch_flashplug
from torch_flashplug import attention
from torch_flashplug.flash_attn import flash_attn_func, flash_attn_with_kvcache

OPS_WITH_OUT = (torch.ops.torch_flashplug.attention_fwd_out, torch.ops.torch_flashplug.paged_fwd_out)
HQ, HKV, D = 4, 2, 32


def random_tensor(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32_tensor(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


TABLE = {"block_table": torch.arange(6, dtype=torch.int32).flip(0).view(2, 3), "seqused_k": int32_tensor(40, 17)}
# Calls by implementation: the shape of q, the shape of k and v, and the remaining arguments.
CALLS = {
    "plain": ((2, 40), (2, 40), {}),
    "window": ((2, 40), (2, 40), {"window": (5, 0)}),
    "sinks": ((2, 40), (2, 40), {"sinks": random_tensor(HQ)}),
    "few": ((2, 1), (2, 40), {"causal": True, "sinks": random_tensor(HQ)}),
    "on_end": ((9,), (9,), {"cu_seqlens_q": int32_tensor(0, 4, 9), "causal": True}),
    "used": ((2, 40), (2, 40), {"seqused_k": int32_tensor(7, 40)}),
    "used_few": ((2, 2), (2, 40), {"seqused_k": int32_tensor(7, 40)}),
    "pages": ((2, 3), (6, 16), TABLE),
    "pages_on_end": ((5,), (6, 16), TABLE | {"cu_seqlens_q": int32_tensor(0, 3, 5)}),
    "pages_of_ones": ((2,), (6, 16), TABLE | {"cu_seqlens_q": int32_tensor(0, 1, 2), "max_seqlen_q": 1}),
}
KV_SCALES = {"k_scale": 0.03, "v_scale": torch.tensor([0.02, 0.04])}
CALLS_OF_8_BITS = {
    "eight": ((2, 3), (2, 40), KV_SCALES),
    "eight_softcap": ((2, 3), (2, 40), KV_SCALES | {"softcap": 2.0}),
    "eight_sinks": ((2, 3), (2, 40), KV_SCALES | {"sinks": random_tensor(HQ)}),
    "eight_used": ((2, 3), (2, 40), KV_SCALES | {"seqused_k": int32_tensor(7, 40), "causal": True}),
    "eight_used_many": ((2, 40), (2, 40), KV_SCALES | {"seqused_k": int32_tensor(7, 40), "causal": True}),
    "eight_on_end": ((9,), (9,), KV_SCALES | {"cu_seqlens_q": int32_tensor(0, 4, 9), "softcap": 2.0}),
    "eight_pages": ((2, 3), (6, 16), KV_SCALES | TABLE),
    "eight_pages_softcap": ((2, 3), (6, 16), KV_SCALES | TABLE | {"softcap": 2.0, "causal": True}),
    "eight_pages_on_end": ((5,), (6, 16), KV_SCALES | TABLE | {"cu_seqlens_q": int32_tensor(0, 3, 5), "softcap": 2.0}),
}


def make_call(call: str, device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], dict[str, object]]:
    rows, keys, arguments = (CALLS | CALLS_OF_8_BITS)[call]
    kv = [random_tensor(*keys, HKV, D, seed=i) for i in (1, 2)]
    kv = [(x * 30).to(torch.int8) for x in kv] if "k_scale" in arguments else [x.to(dtype) for x in kv]
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    return [x.to(device) for x in (random_tensor(*rows, HQ, D).to(dtype), *kv)], moved


@pytest.mark.parametrize("call", CALLS | CALLS_OF_8_BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_out_receives_the_result_of_the_plain_call(device: str, call: str, dtype: torch.dtype) -> None:
    """Write to outputs with arbitrary strides and unaligned addresses.

    Memory next to the output must not change.
    """
    operands, arguments = make_call(call, device, dtype)
    expected, expected_lse = attention(*operands, **arguments, return_lse=True)
    for shift in (0, 8, 1):
        buffer = torch.full((*expected.shape[:-2], HQ + 2, D + 24), -7.0, dtype=dtype, device=device)
        out = buffer[..., 1 : 1 + HQ, shift : shift + D]
        actual, lse = attention(*operands, **arguments, out=out, return_lse=True)
        assert actual is out and torch.equal(out, expected) and torch.equal(lse, expected_lse)
        out.fill_(-7.0)
        assert (buffer == -7.0).all()
    assert attention(*operands, **arguments, out=out) is out
    torch.testing.assert_close(out, attention(*operands, **arguments))


@pytest.mark.parametrize("call", CALLS | CALLS_OF_8_BITS)
@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"num_splits": 3}, {"fixed_split_size": 128}], ids=str)
def test_splits_change_results_only_by_rounding(device: str, call: str, splits: dict[str, int]) -> None:
    operands, arguments = make_call(call, device)
    expected = attention(*operands, **arguments)
    actual = attention(*operands, **arguments, **splits)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"fixed_split_size": 128}], ids=str)
def test_fixed_splits_do_not_change_gradients(device: str, splits: dict[str, int]) -> None:
    for call in ("plain", "window", "on_end"):
        operands, arguments = make_call(call, device, torch.float32)
        leaves = [x.requires_grad_() for x in operands]
        expected = torch.autograd.grad(attention(*leaves, **arguments).sum(), leaves)
        actual = torch.autograd.grad(attention(*leaves, **arguments, **splits).sum(), leaves)
        for result, exact in zip(actual, expected, strict=True):
            torch.testing.assert_close(result, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("call", CALLS_OF_8_BITS)
def test_8_bit_call_equals_dequantized_call(device: str, call: str) -> None:
    """Compare with a call of the dequantized tensors in 16 bits."""
    (q, *kv), arguments = make_call(call, device)
    pages = "block_table" in arguments
    scales = [torch.as_tensor(arguments.pop(name), device=device) for name in ("k_scale", "v_scale")]
    wide = [(x.float() * s.view(*s.shape, 1)).to(q.dtype) for x, s in zip(kv, scales, strict=True)]
    expected = attention(q, *wide, **arguments)
    actual = attention(q, *kv, **arguments, k_scale=scales[0], v_scale=scales[1])
    assert actual.dtype == q.dtype and pages == call.startswith("eight_pages")
    assert float((actual.float() - expected.float()).norm() / expected.float().norm()) < 0.02


@pytest.mark.parametrize("call", CALLS_OF_8_BITS)
def test_gradients_of_8_bit_calls_are_refused(device: str, call: str) -> None:
    (q, *kv), arguments = make_call(call, device)
    out = attention(q.requires_grad_(), *kv, **arguments)
    with pytest.raises(RuntimeError, match="gradients are not supported"):
        out.sum().backward()


@pytest.mark.parametrize(
    "op, op_kind", [(OPS_WITH_OUT[0], "on_end"), (OPS_WITH_OUT[1], "pages")], ids=["attention", "paged"]
)
def test_ops_with_out_pass_opcheck(device: str, op: torch._ops.OpOverloadPacket, op_kind: str) -> None:
    (q, k, v), arguments = make_call(op_kind, device, torch.float32)
    if op_kind == "on_end":
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        lengths = (None, arguments["cu_seqlens_q"], arguments["cu_seqlens_q"], None)
    else:
        lengths = (arguments["block_table"], arguments["seqused_k"], None, None, None)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for splits in ((), (3,), (0, 128)):
        settings = (-1, 0, True, 0.0, None, *splits)
        torch.library.opcheck(op, (torch.empty_like(turned[0]), *turned, *lengths, *settings), test_utils=tests)


def test_dequantization_op_passes_opcheck(device: str) -> None:
    (q, k, _), _ = make_call("eight", device, torch.float16)
    scale = torch.rand(k.shape[:3], device=device)
    torch.library.opcheck(torch.ops.torch_flashplug.dequantize, (q, k, scale))
    assert torch.ops.torch_flashplug.dequantize(q, k, scale).dtype == torch.bfloat16


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("call", ["plain", "window", "on_end", "pages", "eight_softcap"])
@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"fixed_split_size": 128}], ids=str)
def test_compiled_call_with_out_and_splits(device: str, call: str, splits: dict[str, int]) -> None:
    operands, arguments = make_call(call, device)
    expected = attention(*operands, **arguments, **splits)

    def into(out: Tensor, *operands: Tensor) -> Tensor:
        return attention(*operands, **arguments, **splits, out=out) * 2

    out = torch.empty_like(expected)
    actual = torch.compile(into, fullgraph=True, backend="aot_eager")(out, *operands)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(actual, expected * 2)


def test_numpy_integers_are_accepted() -> None:
    (q, k, v), _ = make_call("plain", "cpu", torch.float32)
    for name, value in (("num_splits", 1), ("fixed_split_size", 128), ("window", (7, 0)), ("max_seqlen_k", 40)):
        numbers = tuple(map(np.int64, value)) if isinstance(value, tuple) else np.int64(value)
        assert torch.equal(attention(q, k, v, **{name: numbers}), attention(q, k, v, **{name: value})), name


def test_invalid_arguments_are_refused() -> None:
    operands, _ = make_call("plain", "cpu", torch.float32)
    out = torch.empty(2, 40, HQ, D)
    for error, says, arguments in (
        (ValueError, r"out must be torch.float32 \(2, 40, 4, 32\) on cpu, but got torch.float32 \(2, 40, 4, 31\)",
         {"out": out[..., 1:]}),
        (ValueError, "out must be .*, but got torch.float16", {"out": out.half()}),
        (ValueError, "but got .* on meta", {"out": out.to("meta")}),
        (ValueError, "out must be .*, but got bool", {"out": True}),
        (RuntimeError, "gradients are not supported with out", {"out": out.clone().requires_grad_()}),
        (RuntimeError, "gradients are not supported with out",
         {"out": out, "sinks": torch.zeros(HQ, requires_grad=True)}),
        *((ValueError, f"num_splits must be an int from 1 to 255 or None, but got {x}", {"num_splits": x})
          for x in (0, 256, 1.0, True)),
        (ValueError, "must be a multiple of 128 or None", {"fixed_split_size": 2**70}),
        *((ValueError, f"fixed_split_size must be a multiple of 128 or None, but got {x}", {"fixed_split_size": x})
          for x in (0, -128, 100, 128.0, True)),
        (ValueError, "num_splits and fixed_split_size must not be passed together, but got 1 and 128. Pass one",
         {"num_splits": 1, "fixed_split_size": 128}),
        (TypeError, "max_seqlen_q must be an int or None, but got str", {"max_seqlen_q": "z"}),
        (TypeError, "max_seqlen_k must be an int or None, but got Tensor", {"max_seqlen_k": torch.tensor(3)}),
        (ValueError, "max_seqlen_k must be 0 or more, or None, but got -7", {"max_seqlen_k": -7}),
    ):  # fmt: skip
        with pytest.raises(error, match=says):
            attention(*operands, **arguments)
    with pytest.raises(TypeError, match="q must be a tensor .*, but got str"):
        attention("q", *operands[1:], out=out)


def test_more_than_255_splits_are_refused(device: str) -> None:
    """Count splits by the width of the table, not by KV lengths or the batch size.

    With a window, only keys in the window count. Calls with more query rows do not split keys.
    """

    def attend(rows: int, size: int, **more: object) -> Tensor:
        pools = [random_tensor(4, 16, HKV, D, seed=i).to(device, torch.bfloat16) for i in range(2)]
        q, table = random_tensor(2, rows, HQ, D), torch.zeros(2, 2100, dtype=torch.int32, device=device)
        lengths = {"block_table": table, "seqused_k": int32_tensor(3, 0).to(device)}
        return attention(q.to(device, torch.bfloat16), *pools, **lengths, fixed_split_size=size, **more)

    with pytest.raises(ValueError, match="must be at least 256, because 33600 keys .* at most 255 splits, but got 128"):
        attend(1, 128)
    for rows, size, more in ((1, 256, {}), (40, 128, {}), (1, 128, {"window": (500, 0)})):
        assert attend(rows, size, **more).isfinite().all()


def test_autocast_casts_no_fp64(device: str) -> None:
    """The error must report the original dtypes; `out` must have the dtype of autocast."""
    q, k, v = make_call("plain", device, torch.float32)[0]
    with torch.autocast(device, dtype=torch.bfloat16):
        for arguments in ({}, {"window": (3, 0), "return_lse": True}, {"seqused_k": int32_tensor(3, 4).to(device)}):
            with pytest.raises(ValueError, match="one dtype, but got torch.float32, torch.float64, torch.float32"):
                attention(q, k.double(), v, **arguments)
        out = torch.empty_like(q, dtype=torch.bfloat16)
        assert torch.equal(attention(q, k, v, window=(3, 0), out=out), attention(q, k, v, window=(3, 0)))


def test_num_splits_of_flash_attn_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """num_splits=0 of flash_attn means None."""
    import torch_flashplug.flash_attn as names

    with pytest.raises(TypeError, match="fixed_split_size"):
        flash_attn_func(*make_call("plain", "cpu", torch.float32)[0], fixed_split_size=128)
    recorded_splits: list[int | None] = []

    def recorded(*operands: Tensor, num_splits: int | None = None, **more: object) -> Tensor | tuple[Tensor, Tensor]:
        recorded_splits.append(num_splits)
        return attention(*operands, num_splits=num_splits, **more)

    monkeypatch.setattr(names, "attention", recorded)
    q, k, v = make_call("plain", "cpu", torch.float32)[0]
    expected = flash_attn_func(q, k, v)
    for splits in (0, 1, 4):
        torch.testing.assert_close(flash_attn_func(q, k, v, num_splits=splits), expected)
        torch.testing.assert_close(flash_attn_with_kvcache(q, k, v, num_splits=splits), expected)
    assert recorded_splits == [None, None, None, 1, 1, 4, 4]


def test_autograd_detects_a_kernel_writing_to_out(kernels_on: str) -> None:
    q, k, v = (torch.randn(75, 2, 64).to(kernels_on, torch.bfloat16) for _ in range(3))
    cu, out = torch.tensor([0, 5, 75], dtype=torch.int32, device=kernels_on), torch.zeros_like(q)
    kept = torch.ones(1, device=kernels_on, requires_grad=True) * out
    with torch.no_grad():
        attention(q, k, v, cu_seqlens_q=cu, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_q_k_v_and_out_may_be_views_of_one_tensor(device: str) -> None:
    """Use views of one tensor: split by heads, by q/k/v/out, and within rows."""
    for shape, dim in (((2, 8, 4, 2, 16), 2), ((2, 8, 2, 4, 16), 3), ((2, 8, 2, 16, 4), 4), ((4, 2, 8, 2, 16), 0)):
        *qkv, out = torch.randn(shape, device=device).unbind(dim)
        expected = attention(*(x.clone() for x in qkv), window=(3, 1))
        torch.testing.assert_close(attention(*qkv, window=(3, 1), out=out), expected)


def test_overlapping_out_is_refused() -> None:
    q = torch.randn(1, 8, 2, 16)
    for out in (torch.empty(1, 1, 2, 16).expand(1, 8, 2, 16), torch.empty(40).as_strided(q.shape, (1, 1, 16, 1)), q):
        with pytest.raises(ValueError, match="shares memory"):
            attention(q, q.clone(), q.clone(), out=out)
        with pytest.raises(ValueError, match="shares memory"):
            torch_flashplug.explain_attention(q, q.clone(), q.clone(), out=out)
    buffer, sinks, cu = torch.randn(1000), torch.zeros(2), torch.tensor([0, 8]).int()
    for offset in (1, 16, 255, -255):
        out, q = buffer[400 + offset :][:256].view(q.shape), buffer[400:][:256].view(q.shape)
        with pytest.raises(ValueError, match="shares memory"):
            attention(q, q.clone(), q.clone(), out=out)
    for arguments in ({"sinks": buffer[300:302]}, {"cu_seqlens_q": buffer.view(torch.int32)[300:302]}):
        with pytest.raises(ValueError, match="shares memory"):
            out_of_packed = buffer[46:302].view(8, 2, 16)
            attention(*(q[0].clone() for _ in range(3)), **{"cu_seqlens_q": cu, **arguments}, out=out_of_packed)
    for separate in (buffer[400:656], buffer[144:400]):
        attention(q.clone(), q.clone(), q.clone(), sinks=sinks, out=separate.view(q.shape))
    with pytest.raises(ValueError, match="lazily negated view"):
        attention(q, q, q, softcap=1.0, out=torch.empty_like(q)._neg_view())
    k8, scale = torch.ones(1, 8, 2, 16, dtype=torch.int8), torch.tensor(0.1, requires_grad=True)
    with pytest.raises(RuntimeError, match="gradients are not supported with out"):
        attention(q.bfloat16(), k8, k8, k_scale=scale, v_scale=0.1, out=torch.empty_like(q, dtype=torch.bfloat16))
