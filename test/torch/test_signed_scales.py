"""Scales that are not positive, in calls of attention() and of flash_attn's names that reach torch's own CPU kernel,
which gives NaN for them under is_causal; and scales that are no number.
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
NO_NUMBERS = (math.nan, math.inf, -math.inf)
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
}
SAID = {
    "full": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left"},
    "window": {"causal": True, "window": (3, 0)},
    "both sides": {"window": (3, 2)},
    "softcap": {"causal": True, "softcap": 1.5},
}


def draw(Sq: int, Sk: int, heads: tuple[int, int] = (4, 4), dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return q, k and v, (B, S, H, D)."""
    sizes, source = ((Sq, heads[0]), (Sk, heads[1]), (Sk, heads[1])), torch.Generator().manual_seed(20261127)
    return [torch.randn(2, *size, 16, generator=source).to(dtype) for size in sizes]


def seen_of(Sq: int, Sk: int, causal: bool | str = False, window: tuple[int, int] = (-1, -1), **_: object) -> Tensor:
    """Return (Sq, Sk) bool: which keys a query sees."""
    behind = torch.arange(Sk) - torch.arange(Sq).unsqueeze(1) - (0 if causal == "top_left" else Sk - Sq)
    left, right = window[0], 0 if causal else window[1]
    return ((behind >= -left) | (left < 0)) & ((behind <= right) | (right < 0))


def exact(leaves: list[Tensor], seen: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
    """Return the definition's result, of operands (B, S, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in leaves)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    shares = scores.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return (shares @ v).transpose(1, 2)


def assert_exact(found: Tensor, leaves: list[Tensor], right: Tensor, wide: list[Tensor]) -> None:
    """Hold a result and its gradients to those in fp64."""
    near = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), right, **near)
    back = torch.randn(right.shape, generator=torch.Generator().manual_seed(1)).to(found)
    grads = torch.autograd.grad(found, leaves, back), torch.autograd.grad(right, wide, back.double())
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one.double(), other, **near)


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("sizes", [(9, 9), (9, 14), (14, 9)], ids=str)
def test_a_scale_that_is_not_positive(device: str, sizes: tuple[int, int], said: str, scale: float) -> None:
    """Shared heads, gradients, every way to hide keys."""
    for heads in ((4, 4), (4, 2)):
        given = [x.to(device) for x in draw(*sizes, heads)]
        leaves, wide = [x.clone().requires_grad_() for x in given], [x.double().requires_grad_() for x in given]
        seen = seen_of(*sizes, **SAID[said]).to(device)
        right = exact(wide, seen, scale, SAID[said].get("softcap", 0.0))
        assert_exact(attention(*leaves, **SAID[said], scale=scale), leaves, right, wide)


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_scale_that_is_not_positive_in_every_dtype(device: str, dtype: torch.dtype, scale: float) -> None:
    """Of more rows than a block of torch's kernel has."""
    given = [(x * 0.5).to(device) for x in draw(300, 300, (2, 1), dtype)]
    leaves, wide = [x.clone().requires_grad_() for x in given], [x.double().requires_grad_() for x in given]
    right = exact(wide, seen_of(300, 300, causal=True).to(device), scale)
    assert_exact(attention(*leaves, causal=True, scale=scale), leaves, right, wide)


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_the_operand_is_one_tensor(device: str, backend: str) -> None:
    """The call that was reported: a tensor that is q, k and v gets the gradients of all three."""
    q = draw(9, 9)[0].to(device)
    for scale in (-0.2, 0.0):
        leaf, wide = q.clone().requires_grad_(), q.double().requires_grad_()
        right = exact([wide] * 3, seen_of(9, 9, causal=True).to(device), scale)
        with sdpa_backend(backend):
            assert_exact(attention(leaf, leaf, leaf, causal=True, scale=scale), [leaf], right, [wide])


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_out_and_lse_beside_such_a_scale(device: str, scale: float) -> None:
    q, k, v = (x.to(device) for x in draw(9, 9))
    wide = [x.double() for x in (q, k, v)]
    right, into = exact(wide, seen_of(9, 9, causal=True).to(device), scale), torch.empty_like(q)
    found, lse = attention(q, k, v, causal=True, scale=scale, return_lse=True)
    attention(q, k, v, causal=True, scale=scale, out=into)
    scores = (wide[0].transpose(1, 2) @ wide[1].transpose(1, 2).mT * scale).masked_fill(
        ~seen_of(9, 9, causal=True).to(device), -math.inf
    )
    for one, other in ((found, right), (into, right), (lse, scores.logsumexp(-1))):
        torch.testing.assert_close(one.double(), other, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_such_scales_by_flash_attns_names(device: str, scale: float) -> None:
    """Batches, packed sequences and a cache, of which the last query sees all keys."""
    q, k, v = (x.to(device) for x in draw(9, 9))
    right = exact([x.double() for x in (q, k, v)], seen_of(9, 9, causal=True).to(device), scale)
    cu = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    settings = {"causal": True, "softmax_scale": scale}
    packed = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu, cu, **settings)
    for found in (
        flash_attn_func(q, k, v, **settings), packed.unflatten(0, (2, 9)),
        flash_attn_with_kvcache(q, k, v, **settings), flash_attn_with_kvcache(q, k, v, cache_seqlens=9, **settings),
    ):  # fmt: skip
        torch.testing.assert_close(found.double(), right, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("hidden", ["causal", "bool", "float", "none"])
def test_such_scales_beside_keys_in_8_bits(device: str, hidden: str, scale: float) -> None:
    """F.scaled_dot_product_attention reads a cache in 8 bits by a call of ours, under masks, too."""
    q, k, v = (x.transpose(1, 2).to(device, torch.bfloat16) for x in draw(9, 9, (4, 2)))
    sizes = torch.full((2, 2, 9), 0.05, device=device)
    pair = [QuantizedTensor((x * 20).round().clamp(-127, 127).to(torch.int8), sizes, torch.bfloat16) for x in (k, v)]
    seen = seen_of(9, 9, causal=hidden != "none").to(device)
    bias = torch.zeros(9, 9, device=device, dtype=torch.bfloat16).masked_fill(~seen, -math.inf)
    mask = {"bool": seen, "float": bias}.get(hidden)
    found = F.scaled_dot_product_attention(q, *pair, mask, is_causal=hidden == "causal", scale=scale, enable_gqa=True)
    wide = [x.double().transpose(1, 2) for x in (q, *(x.dequantize() for x in pair))]
    torch.testing.assert_close(found.double().transpose(1, 2), exact(wide, seen, scale), **TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("scale", NO_NUMBERS, ids=str)
@pytest.mark.parametrize("said", ["full", "causal", "window"])
def test_a_scale_that_is_no_number_gives_what_math_gives(said: str, scale: float) -> None:
    """NaN where a row has one such score; torch's CPU kernel loses some without a mask."""
    q, k, v = draw(9, 9)
    right = exact([q, k, v], seen_of(9, 9, **SAID[said]), scale)
    assert right.isnan().any()
    torch.testing.assert_close(attention(q, k, v, **SAID[said], scale=scale), right, equal_nan=True)


@pytest.mark.usefixtures("fresh_dynamo")
def test_such_scales_in_graphs() -> None:
    """One that changes from call to call, in graphs without a break."""
    q, k, v = draw(9, 9)

    def call(scale: float) -> Tensor:
        return attention(q, k, v, causal=True, scale=scale)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for scale in (0.3, -0.2, 0.0, -0.7, math.nan):
        right = exact([q, k, v], seen_of(9, 9, causal=True), scale)
        torch.testing.assert_close(compiled(scale), right, equal_nan=True, **TOLERANCE[torch.float32])
