"""Kernels with key and value that were quantized ahead: the bits of the call that quantizes its own operands."""

from __future__ import annotations

import math

import pytest
import torch
from cuda_graphs import call_on_side_stream, capture_graph
from test_8bit_kernels import BY_RECIPE, NEAR, quantized_operands, random_qkv, relative_error, run_recipe
from torch import Tensor

from torch_flashplug import QuantizedKV, attention, explain_attention, quantize_kv
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops.quantize_reference import SAMPLED_KEYS
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.registry.quant_recipes import RECIPES
from torch_flashplug.testing.emulation_8bit import attend

ALIGNED_DIMS = (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (80, 80), (208, 48)


def rows_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views (B, S, H, D) of tensors (B, H, S, D)."""
    return tuple(x.transpose(1, 2) for x in tensors)


def run_ahead(kernels_on: str, kv: QuantizedKV, q: Tensor, **settings: object) -> Tensor:
    """Return the output (B, Hq, Sq, Dv) of attention(), computed by a kernel."""
    bindings.counters(reset=True)
    with torch.no_grad():
        out = attention(q.to(kernels_on).transpose(1, 2), kv, **settings)
    assert bindings.counters(reset=True)["ours_fwd"] == 1
    return out.transpose(1, 2).cpu()


def quantize_on(kernels_on: str, k: Tensor, v: Tensor, recipe: str) -> QuantizedKV:
    bindings.counters(reset=True)
    kv = quantize_kv(*rows_first(k.to(kernels_on), v.to(kernels_on)), precision=recipe)
    assert bindings.counters(reset=True)["math_fwd"] == 0
    return kv


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("dims", ALIGNED_DIMS)
@BY_RECIPE
def test_result_has_the_bits_of_the_self_quantizing_call(kernels_on: str, recipe: str, dims: tuple[int, int]) -> None:
    """Two queries of different lengths share key and value, full and causal, with NaN, inf and blocks of zeros."""
    _, k, v = random_qkv((2, 4, 2), (5, 200), dims)
    k[0, 0, :128], v[..., 5] = 0.0, 0.0
    k[1, 1, 150, 3], v[1, 0, 10, 9] = math.nan, math.inf
    kv = quantize_on(kernels_on, k, v, recipe)
    for Sq, scale in ((5, None), (130, 0.3)):
        q, *_ = random_qkv((2, 4, 2), (Sq, 200), dims, seed=Sq)
        q[1, 3, 2, 2] = math.inf
        for causal in (False, "top_left"):
            expected = run_recipe(kernels_on, recipe, q, k, v, is_causal=bool(causal), scale=scale)
            assert same_bits(run_ahead(kernels_on, kv, q, causal=causal, scale=scale), expected), (Sq, causal)


@pytest.mark.parametrize("Sk", [1, 17, SAMPLED_KEYS, SAMPLED_KEYS + 1, 2500])
@BY_RECIPE
def test_lengths_around_the_copy_of_the_samples(kernels_on: str, recipe: str, Sk: int) -> None:
    """Longer keys are represented by a copy of their samples. The keys have a large mean, which row shifts contain."""
    q, k, v = random_qkv((1, 2, 1), (9, Sk), (64, 64))
    k = (k.double() + 4.0 + torch.linspace(0.0, 3.0, Sk).view(-1, 1)).bfloat16()
    kv = quantize_on(kernels_on, k, v, recipe)
    assert kv.key_samples.shape[2] == min(Sk, SAMPLED_KEYS)
    assert same_bits(run_ahead(kernels_on, kv, q), run_recipe(kernels_on, recipe, q, k, v))
    with torch.no_grad():
        _, lse = attention(q.to(kernels_on).transpose(1, 2), kv, return_lse=True)
    scores = (q.double() @ k.double().mT) * 0.125
    assert float((lse.cpu() - scores.logsumexp(-1)).abs().max()) < (0.3 if recipe == "e4m3" else 0.1)


@BY_RECIPE
def test_fp16_and_views_have_the_same_bits(kernels_on: str, recipe: str) -> None:
    """Key and value are slices of a larger tensor; the value is not aligned, so kernels read a copy."""
    q, k, v = random_qkv((2, 4, 2), (70, 130), (64, 64), dtype=torch.float16)
    wide, odd = torch.cat((k, k), -1)[..., :64], torch.zeros(2, 2, 130, 65, dtype=v.dtype)[..., 1:].copy_(v)
    kv = quantize_on(kernels_on, wide, odd, recipe)
    assert same_bits(run_ahead(kernels_on, kv, q), run_recipe(kernels_on, recipe, q, k, v))


@pytest.mark.parametrize("dims", [(72, 72), (40, 24), (200, 136)])
@BY_RECIPE
def test_head_dims_between_whole_sectors(kernels_on: str, recipe: str, dims: tuple[int, int]) -> None:
    """A call that quantizes its own operands may have a different kernel, so the operands are compared."""
    q, k, v = random_qkv((1, 2, 1), (70, 200), dims)
    kv = quantize_on(kernels_on, k, v, recipe)
    spec = KernelSpec.from_name(explain_attention(*rows_first(q), kv, device="h100").kernel)
    operands = quantized_operands(recipe, spec, q, k, v)
    assert torch.equal(kv.parts["k"].cpu().view(torch.int8), operands.k.view(torch.int8))
    expected = attend(operands, RECIPES[recipe], dims[0] ** -0.5).out
    assert relative_error(run_ahead(kernels_on, kv, q), expected) <= NEAR[recipe]


@pytest.mark.parametrize("scale", [-0.1, 0.0])
@BY_RECIPE
def test_nonpositive_scales_have_the_same_bits(kernels_on: str, recipe: str, scale: float) -> None:
    q, k, v = random_qkv((1, 2, 1), (70, 130), (64, 64))
    kv = quantize_on(kernels_on, k, v, recipe)
    expected = run_recipe(kernels_on, recipe, q, k, v, scale=scale)
    assert same_bits(run_ahead(kernels_on, kv, q, scale=scale), expected)


@BY_RECIPE
def test_kernels_and_torch_math_quantize_alike(kernels_on: str, recipe: str) -> None:
    """Sums over samples are added in different orders, so a few numbers round differently."""
    _, k, v = random_qkv((2, 4, 2), (5, 200), (64, 64))
    parts = quantize_on(kernels_on, k, v, recipe).parts
    quantized = torch.ops.torch_flashplug._quantize_kv_math(k, v, list(RECIPES).index(recipe) + 1)
    expected = QuantizedKV(quantized, k, None, 200, 64, recipe).parts
    assert parts.keys() == expected.keys()
    for name, part in parts.items():
        actual, wanted = part.cpu(), expected[name]
        if actual.dtype == torch.float32:
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
        else:
            assert float((actual.view(torch.int8) != wanted.view(torch.int8)).float().mean()) < 1e-3, name


def test_ops_refuse_memory_that_kernels_would_misread(kernels_on: str) -> None:
    q, k, v = (x.to(kernels_on) for x in random_qkv((1, 2, 1), (70, 130), (64, 64)))
    ops = torch.ops.torch_flashplug
    for number, name in enumerate(RECIPES, 1):
        quantized, value = ops.quantize_kv(k, v, number), v if name == "qk8" else None
        ops.quantized_attention_fwd(q, quantized, k, value, 130, 64, number, False, None)
        unaligned = torch.cat((quantized[:1], quantized))[1:]
        for wrong in (quantized[:-1], quantized.float(), quantized.repeat_interleave(2)[::2], unaligned):
            with pytest.raises(RuntimeError, match="quantized_kv must be the result of quantize_kv"):
                ops.quantized_attention_fwd(q, wrong, k, value, 130, 64, number, False, None)
        with pytest.raises(RuntimeError, match="quantized_kv must be the result of quantize_kv"):
            ops.quantized_attention_fwd(q, quantized, k, None if value is None else value[:, :, :99], 99, 64, number,
                                        False, None)  # fmt: skip
        with pytest.raises(RuntimeError, match="value must be a tensor if precision keeps values in 16 bits"):
            ops.quantized_attention_fwd(q, quantized, k, v if value is None else None, 130, 64, number, False, None)
        with pytest.raises(RuntimeError, match="key_samples must be"):
            ops.quantized_attention_fwd(q, quantized, k.mT, value, 130, 64, number, False, None)
        with pytest.raises(RuntimeError, match="precision must be the number of a recipe"):
            ops.quantized_attention_fwd(q, quantized, k, value, 130, 64, 4, False, None)


@pytest.mark.gpu
@BY_RECIPE
def test_video_sizes_have_the_same_bits(recipe: str) -> None:
    """Long key and value, used by several calls on two streams."""
    q, k, v = (torch.randn(2, 8, S, 128, device="cuda").bfloat16() for S in (4000, 9001, 9001))
    expected = run_recipe("cuda", recipe, q, k, v)
    kv = quantize_on("cuda", k, v, recipe)
    assert same_bits(run_ahead("cuda", kv, q), expected)
    out = call_on_side_stream(lambda: attention(*rows_first(q), kv), times=3)
    assert same_bits(out.transpose(1, 2).cpu(), expected)


@pytest.mark.gpu
@BY_RECIPE
def test_cuda_graphs_hold_both_parts(recipe: str) -> None:
    """One graph quantizes and attends. A second graph attends to key and value from outside."""
    q, k, v = (torch.randn(1, 4, 600, 64, device="cuda").bfloat16() for _ in range(3))

    def both() -> Tensor:
        return attention(*rows_first(q), quantize_kv(*rows_first(k, v), precision=recipe))

    with torch.no_grad():
        call_on_side_stream(both)
        kv = quantize_kv(*rows_first(k, v), precision=recipe)
        replay_both, replay_attention = capture_graph(both), capture_graph(lambda: attention(*rows_first(q), kv))
        for _ in range(2):
            expected = run_recipe("cuda", recipe, q, k, v)
            for replay in (replay_both, replay_attention):
                assert same_bits(replay().transpose(1, 2).cpu(), expected)
            q.copy_(torch.randn_like(q))
