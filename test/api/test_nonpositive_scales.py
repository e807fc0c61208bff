"""Scales that are zero, negative, infinite or NaN, in attention() and in the names of flash_attn.

The CPU kernel of torch returns NaN for zero and negative scales with is_causal.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_flashplug import attention, sdpa_backend
from torch_flashplug.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from torch_flashplug.ops.quantized_kv import QuantizedTensor

SCALES = (-0.2, -1, 0.0, -0.0, 0, -1e-30)
NONFINITE_SCALES = (math.nan, math.inf, -math.inf)
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
}
SETTINGS = {
    "full": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left"},
    "window": {"causal": True, "window": (3, 0)},
    "both sides": {"window": (3, 2)},
    "softcap": {"causal": True, "softcap": 1.5},
}


def make_operands(
    Sq: int, Sk: int, heads: tuple[int, int] = (4, 4), dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return q, k and v, (B, S, H, D)."""
    sizes, source = ((Sq, heads[0]), (Sk, heads[1]), (Sk, heads[1])), torch.Generator().manual_seed(20261127)
    return [torch.randn(2, *size, 16, generator=source).to(dtype) for size in sizes]


def make_visibility(
    Sq: int, Sk: int, causal: bool | str = False, window: tuple[int, int] = (-1, -1), **_: object
) -> Tensor:
    """Return the visibility of keys as a bool tensor (Sq, Sk)."""
    behind = torch.arange(Sk) - torch.arange(Sq).unsqueeze(1) - (0 if causal == "top_left" else Sk - Sq)
    left, right = window[0], 0 if causal else window[1]
    return ((behind >= -left) | (left < 0)) & ((behind <= right) | (right < 0))


def attend_by_definition(leaves: list[Tensor], visible: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
    """Return the result by the definition of softmax, for operands (B, S, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in leaves)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    shares = scores.masked_fill(~visible, -math.inf).softmax(-1).masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return (shares @ v).transpose(1, 2)


def assert_exact(actual: Tensor, leaves: list[Tensor], expected: Tensor, wide: list[Tensor]) -> None:
    """Compare a result and its gradients with fp64."""
    near = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, **near)
    back = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(actual)
    grads = torch.autograd.grad(actual, leaves, back), torch.autograd.grad(expected, wide, back.double())
    for actual_grad, expected_grad in zip(*grads, strict=True):
        torch.testing.assert_close(actual_grad.double(), expected_grad, **near)


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("sizes", [(9, 9), (9, 14), (14, 9)], ids=str)
def test_nonpositive_scales_equal_fp64(device: str, sizes: tuple[int, int], setting: str, scale: float) -> None:
    """Check grouped heads, gradients and every kind of mask."""
    for heads in ((4, 4), (4, 2)):
        tensors = [x.to(device) for x in make_operands(*sizes, heads)]
        leaves, wide = [x.clone().requires_grad_() for x in tensors], [x.double().requires_grad_() for x in tensors]
        visible = make_visibility(*sizes, **SETTINGS[setting]).to(device)
        expected = attend_by_definition(wide, visible, scale, SETTINGS[setting].get("softcap", 0.0))
        assert_exact(attention(*leaves, **SETTINGS[setting], scale=scale), leaves, expected, wide)


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_nonpositive_scales_in_every_dtype(device: str, dtype: torch.dtype, scale: float) -> None:
    """Use more rows than a block of the CPU kernel of torch."""
    tensors = [(x * 0.5).to(device) for x in make_operands(300, 300, (2, 1), dtype)]
    leaves, wide = [x.clone().requires_grad_() for x in tensors], [x.double().requires_grad_() for x in tensors]
    expected = attend_by_definition(wide, make_visibility(300, 300, causal=True).to(device), scale)
    assert_exact(attention(*leaves, causal=True, scale=scale), leaves, expected, wide)


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_shared_operand_gets_the_sum_of_gradients(device: str, backend: str) -> None:
    """Pass the same tensor as q, k and v, as in a bug report. The tensor must get the sum of all three gradients."""
    q = make_operands(9, 9)[0].to(device)
    for scale in (-0.2, 0.0):
        leaf, wide = q.clone().requires_grad_(), q.double().requires_grad_()
        expected = attend_by_definition([wide] * 3, make_visibility(9, 9, causal=True).to(device), scale)
        with sdpa_backend(backend):
            assert_exact(attention(leaf, leaf, leaf, causal=True, scale=scale), [leaf], expected, [wide])


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_out_and_lse_with_nonpositive_scales(device: str, scale: float) -> None:
    q, k, v = (x.to(device) for x in make_operands(9, 9))
    wide = [x.double() for x in (q, k, v)]
    expected_out, written = (
        attend_by_definition(wide, make_visibility(9, 9, causal=True).to(device), scale),
        torch.empty_like(q),
    )
    out, lse = attention(q, k, v, causal=True, scale=scale, return_lse=True)
    attention(q, k, v, causal=True, scale=scale, out=written)
    scores = (wide[0].transpose(1, 2) @ wide[1].transpose(1, 2).mT * scale).masked_fill(
        ~make_visibility(9, 9, causal=True).to(device), -math.inf
    )
    for actual, expected in ((out, expected_out), (written, expected_out), (lse, scores.logsumexp(-1))):
        torch.testing.assert_close(actual.double(), expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_nonpositive_scales_in_flash_attn_functions(device: str, scale: float) -> None:
    """Check batches, packed sequences and a cache, in which the last query sees all keys."""
    q, k, v = (x.to(device) for x in make_operands(9, 9))
    expected = attend_by_definition(
        [x.double() for x in (q, k, v)], make_visibility(9, 9, causal=True).to(device), scale
    )
    cu = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    settings = {"causal": True, "softmax_scale": scale}
    packed = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu, cu, **settings)
    for actual in (
        flash_attn_func(q, k, v, **settings), packed.unflatten(0, (2, 9)),
        flash_attn_with_kvcache(q, k, v, **settings), flash_attn_with_kvcache(q, k, v, cache_seqlens=9, **settings),
    ):  # fmt: skip
        torch.testing.assert_close(actual.double(), expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("hidden", ["causal", "bool", "float", "none"])
def test_nonpositive_scales_with_8_bit_keys(device: str, hidden: str, scale: float) -> None:
    """F.scaled_dot_product_attention reads an 8-bit cache by an op of the plugin, also with masks."""
    q, k, v = (x.transpose(1, 2).to(device, torch.bfloat16) for x in make_operands(9, 9, (4, 2)))
    sizes = torch.full((2, 2, 9), 0.05, device=device)
    pair = [QuantizedTensor((x * 20).round().clamp(-127, 127).to(torch.int8), sizes, torch.bfloat16) for x in (k, v)]
    visible = make_visibility(9, 9, causal=hidden != "none").to(device)
    bias = torch.zeros(9, 9, device=device, dtype=torch.bfloat16).masked_fill(~visible, -math.inf)
    mask = {"bool": visible, "float": bias}.get(hidden)
    actual = F.scaled_dot_product_attention(q, *pair, mask, is_causal=hidden == "causal", scale=scale, enable_gqa=True)
    wide = [x.double().transpose(1, 2) for x in (q, *(x.dequantize() for x in pair))]
    torch.testing.assert_close(
        actual.double().transpose(1, 2), attend_by_definition(wide, visible, scale), **TOLERANCE[torch.bfloat16]
    )


@pytest.mark.parametrize("scale", NONFINITE_SCALES, ids=str)
@pytest.mark.parametrize("setting", ["full", "causal", "window"])
def test_nan_and_infinite_scales_give_the_result_of_math(setting: str, scale: float) -> None:
    """A row with a NaN score is NaN; the CPU kernel of torch loses some NaN rows without a mask."""
    q, k, v = make_operands(9, 9)
    expected = attend_by_definition([q, k, v], make_visibility(9, 9, **SETTINGS[setting]), scale)
    assert expected.isnan().any()
    torch.testing.assert_close(attention(q, k, v, **SETTINGS[setting], scale=scale), expected, equal_nan=True)


@pytest.mark.usefixtures("fresh_dynamo")
def test_nonpositive_scales_in_compiled_graphs() -> None:
    """Use a scale that changes from call to call, in graphs without a break."""
    q, k, v = make_operands(9, 9)

    def call(scale: float) -> Tensor:
        return attention(q, k, v, causal=True, scale=scale)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for scale in (0.3, -0.2, 0.0, -0.7, math.nan):
        expected = attend_by_definition([q, k, v], make_visibility(9, 9, causal=True), scale)
        torch.testing.assert_close(compiled(scale), expected, equal_nan=True, **TOLERANCE[torch.float32])
