"""8-bit attention recipes in torch: quantized operands (quantize_reference.py) and results (testing/emulation_8bit.py).

Results are compared with fp64 and with the errors of simpler quantizations.
"""

from __future__ import annotations

import math
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_flashplug.ops import quantize_reference
from torch_flashplug.ops.quantize_reference import KEY_ORDER, SAMPLES, Quantized, quantize, rotate
from torch_flashplug.registry import quant_recipes
from torch_flashplug.registry.quant_recipes import RECIPES, Recipe
from torch_flashplug.testing import Case, Masking, attention_math, new_case
from torch_flashplug.testing.activations import MODELS, activations
from torch_flashplug.testing.emulation_8bit import attend, quantize_by_amax

BLOCK, SEED = 128, 20261125
TENSOR_CORES = 14  # bits of the accumulators of tensor cores
# Largest error of the output: relative, root mean square over draws.
ERRORS = {
    "8bit": {"fa3": 0.033, "llm": 0.045, "qwen": 0.047, "dit": 0.020, "normal": 0.043},
    "qk8": {"fa3": 0.012, "llm": 0.028, "qwen": 0.030, "dit": 0.009, "normal": 0.014},
}
# Required ratio of the error of e4m3 with one scale per tensor to the error of a recipe.
TIMES = {
    **{("fa3", D): {"8bit": 2.6, "qk8": 9.0} for D in (64, 128, 256)},
    ("llm", 128): {"8bit": 2.2, "qk8": 4.0}, ("qwen", 128): {"8bit": 8.0, "qk8": 14.0}, ("normal", 128): {"8bit": 1.25},
}  # fmt: skip
HEAVY, LIGHT = 16, 2  # draws: with errors from a few outliers, and without


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Return output and LSE in fp64."""
    results = attention_math(q, k, v, scale=scale, mask=Masking(int(causal)))
    return results.out, results.lse


def relative_error(out: Tensor, expected: Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


def quantized_attention(q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, scale: float, **settings: object) -> Tensor:
    return attend(quantize(q, k, v, recipe, BLOCK), recipe, scale, accumulator_bits=TENSOR_CORES, **settings).out


def random_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = SEED) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_qkv(Sk: int, D: int = 64, *, heads: int = 2, rows: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(random_tensor(1, heads, n, D, seed=seed) for seed, n in enumerate((rows, Sk, Sk)))


# ---- errors of the recipes ----


def rms_errors(model: str, sizes: Case, draws: int) -> dict[str, float]:
    """Return the root mean square errors of the recipes, and of e4m3 with one scale per tensor and per head."""
    squares: dict[str, list[float]] = {}
    for seed in range(draws):
        q, k, v = activations(model, sizes, seed)
        scale = sizes.D**-0.5
        expected, _ = exact_attention(q, k, v, scale)
        outs = {name: quantized_attention(q, k, v, recipe, scale) for name, recipe in RECIPES.items()}
        for name, heads in (("tensor", False), ("head", True)):
            outs[name] = attend(quantize_by_amax(q, k, v, BLOCK, heads=heads), RECIPES["e4m3"], scale).out
        for name, out in outs.items():
            squares.setdefault(name, []).append(relative_error(out, expected) ** 2)
    return {name: math.sqrt(statistics.fmean(errors)) for name, errors in squares.items()}


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("model", MODELS)
def test_recipe_errors_stay_below_limits(model: str, D: int) -> None:
    times = TIMES.get((model, D), {})
    draws = HEAVY if times and model != "normal" else LIGHT
    errors = rms_errors(model, new_case(model, (1, 4, 4), (64, 4096), (D, D)), draws)
    for name, limits in ERRORS.items():
        assert errors[name] <= limits[model], (name, errors)
        assert errors[name] * times.get(name, 0.0) <= errors["tensor"], (name, errors)
        assert model == "normal" or errors[name] <= 0.5 * errors["head"], (name, errors)
    assert errors["e4m3"] <= 1.02 * errors["tensor"], errors


def test_block_scales_of_e4m3_at_16k_keys() -> None:
    """FlashAttention-3's paper claims a factor of 2.6 for this setting."""
    errors = rms_errors("fa3", new_case("fa3", (1, 2, 2), (64, 16384), (128, 128)), 6)
    assert errors["e4m3"] * 2.3 <= errors["tensor"], errors


def test_long_sums_are_split_into_partial_sums() -> None:
    """Tensor cores truncate sums, and a mean shared by the values loses more with each key.

    Here the mean is not shared by all keys, so it cannot be subtracted beforehand.
    """
    q, k, v = random_qkv(32768, heads=1, rows=16)
    v = (v.double() + 1.0).bfloat16()
    v[:, :, ::2, :32] *= -1.0
    k[:, :, ::2] = -20.0 * q[:, :, :1]  # these keys get no weight
    q = q[:, :, :1].expand(q.shape)
    expected, _ = exact_attention(q, k, v, 0.125)
    operands = quantize(q, k, v, RECIPES["8bit"], BLOCK)
    settings = {"scale": 0.125, "accumulator_bits": TENSOR_CORES}
    lost = [
        float(1.0 - attend(operands, RECIPES["8bit"], **longest, **settings).out.mean() / expected.mean())
        for longest in ({}, {"longest": 1 << 20})
    ]
    assert abs(lost[0]) < 5e-3 and lost[1] > 1e-2


@pytest.mark.parametrize("name", ["8bit", "e4m3"])
def test_shared_mean_of_values_adds_no_error(name: str) -> None:
    """The mean of the values is added back to the output in full precision."""
    q, k, v = random_qkv(600, rows=600)
    for causal in (False, True):
        error_without_mean, error_with_mean = (
            quantized_attention(q, k, x, RECIPES[name], 0.125, causal=causal)
            - exact_attention(q, k, x, 0.125, causal=causal)[0]
            for x in (v, (v.double() + 4.0).bfloat16())
        )
        assert float(error_with_mean.norm()) < 1.2 * float(error_without_mean.norm())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_logsumexp_includes_the_subtracted_mean_key(name: str, causal: bool) -> None:
    q, k, v = random_qkv(300, rows=300)
    k = (k.double() + 3.0).bfloat16()
    out, lse = exact_attention(q, k, v, 0.125, causal=causal)
    operands = quantize(q, k, v, RECIPES[name], BLOCK)
    results = attend(operands, RECIPES[name], 0.125, causal=causal)
    assert float((results.lse - lse).abs().max()) < (0.15 if name == "e4m3" else 0.03)
    assert float((operands.row_shift * 0.125).abs().max()) > 1.0 and relative_error(results.out, out) < 0.08


# ---- rotation and order ----


@pytest.mark.parametrize("D", [16, 64, 80, 96, 128, 192, 256])
def test_rotation_equals_the_hadamard_matrix(D: int) -> None:
    size = D & -D
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < size:
        block = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), block)
    matrix = torch.block_diag(*[block / math.sqrt(size)] * (D // size))
    rotation = rotate(torch.eye(D))
    torch.testing.assert_close(rotation.double(), quantize_reference.signs(D).double().diag() @ matrix)
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(D), atol=1e-6, rtol=0)
    assert {-1.0, 1.0} == set(quantize_reference.signs(D).tolist())


def test_key_order_matches_the_probability_fragments() -> None:
    """A thread's own scores of sixteen keys, 2t, 2t + 1, 2t + 8 and 2t + 9, are four consecutive operands."""
    for t in range(4):
        assert KEY_ORDER[4 * t : 4 * t + 4] == (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)
    assert sorted(KEY_ORDER) == list(range(16))
    rows = torch.arange(48.0)
    assert torch.equal(quantize_reference.in_natural_order(quantize_reference.in_key_order(rows)), rows)
    assert quantize_reference.in_key_order(rows)[16:20].tolist() == [16.0, 17.0, 24.0, 25.0]


@pytest.mark.parametrize("Sk", [1, 15, 16, 17, 48, 129, 515])
def test_quantization_of_any_number_of_keys(Sk: int) -> None:
    """Operands are padded with zeros, and the scale of the last block comes from its own keys only."""
    q, k, v = random_qkv(Sk)
    k[:, :, -1] *= 50.0
    for recipe in RECIPES.values():
        operands = quantize(q, k, v, recipe, BLOCK)
        assert operands.k_scale.shape == (1, 2, -(-Sk // BLOCK))
        if recipe.values is not None:
            assert operands.v.shape == (1, 2, 64, -(-Sk // 16) * 16)
            padding = quantize_reference.in_natural_order(operands.v.double())[..., Sk:]
            assert not padding.any()
        limit = 0.2 if recipe.scores == "e4m3" else 0.1
        assert relative_error(attend(operands, recipe, 0.125).out, exact_attention(q, k, v, 0.125)[0]) < limit


def test_each_head_has_separate_scales() -> None:
    q, k, v = random_tensor(2, 6, 70, 64), random_tensor(2, 2, 300, 64), random_tensor(2, 2, 300, 64)
    q[:, 1] *= 30.0
    k[:, 1] *= 0.01
    for recipe in RECIPES.values():
        limit = 0.15 if recipe.scores == "e4m3" else 0.07
        assert relative_error(quantized_attention(q, k, v, recipe, 0.125), exact_attention(q, k, v, 0.125)[0]) < limit


# ---- known pitfalls ----


def test_quantization_of_zeros() -> None:
    """Zeros fill a block of keys, a query row, a channel of values, and entire tensors."""
    q, k, v = random_qkv(400)
    q[:, :, 3] = 0.0
    v[..., 5] = 0.0
    k = k.clone()
    k[:, :, 128:256] = 0.0
    zeros = tuple(torch.zeros_like(x) for x in (q, k, v))
    for operands in ((q, k, v), zeros):
        for recipe in RECIPES.values():
            quantized = quantize(*operands, recipe, BLOCK)
            scales = [scale for scale in (quantized.q_scale, quantized.k_scale, quantized.v_scale) if scale is not None]
            assert all((scale > 0.0).all() and scale.isfinite().all() for scale in scales)
            out = attend(quantized, recipe, 0.125, causal=True).out
            assert out.isfinite().all() and not out[..., 5].any()


def test_quantization_with_zeros_at_sampled_positions() -> None:
    """Values are zero at the sampled positions, in one channel or in all channels."""
    q, k, v = random_qkv(4096)
    places = (2 * torch.arange(SAMPLES) + 1) * 4096 // (2 * SAMPLES)
    for channels in (slice(5, 6), slice(None)):
        holes = v.clone()
        holes[:, :, places, channels] = 0.0
        expected, _ = exact_attention(q, k, holes, 0.125)
        assert relative_error(quantized_attention(q, k, holes, RECIPES["8bit"], 0.125), expected) < 0.06


def test_value_outlier_affects_only_its_channel() -> None:
    """A value above 224 times the rms is clipped, with an effect only on the same channel."""
    q, k, v = random_qkv(2048)
    expected = quantized_attention(q, k, v, RECIPES["8bit"], 0.125)
    v[:, :, 700, 9] = 1000.0
    actual = quantized_attention(q, k, v, RECIPES["8bit"], 0.125)
    unaffected_channels = torch.arange(64) != 9
    assert torch.equal(actual[..., unaffected_channels], expected[..., unaffected_channels]) and actual.isfinite().all()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", RECIPES)
def test_nonfinite_inputs_spread_as_in_math(name: str, number: float) -> None:
    """A bad query spoils a row, a bad key all rows with the block visible, a bad value a channel."""
    q, k, v = random_qkv(512, rows=512)
    recipe = RECIPES[name]
    spoiled = [x.clone() for x in (q, k, v)]
    spoiled[0][0, 0, 7, 2] = spoiled[1][0, 0, 300, 2] = spoiled[2][0, 0, 300, 2] = number
    out = attend(quantize(spoiled[0], k, v, recipe, BLOCK), recipe, 0.125, causal=True).out
    assert out[0, 0, 7].isnan().all() and out.isnan().sum() == 64
    out = attend(quantize(q, spoiled[1], v, recipe, BLOCK), recipe, 0.125, causal=True).out
    assert out[0, 0, 300:].isnan().all() and out[0, 0, :256].isfinite().all() and out[0, 1].isfinite().all()
    values = quantize(q, k, spoiled[2], recipe, BLOCK).values()
    assert not values[0, 0, 300, 2].isfinite() and values.isfinite().sum() == values.numel() - 1


def test_rotated_fp16_maximum_stays_finite() -> None:
    """Rotated rows of the largest fp16 number exceed the range of fp16."""
    q, k, v = (torch.full((1, 1, n, 256), 65504.0, dtype=torch.float16) for n in (16, 130, 130))
    k[:, :, ::2] *= -1.0
    for recipe in RECIPES.values():
        quantized = quantize(q * 1e-4, k, v, recipe, BLOCK)
        assert quantized.k_scale.isfinite().all() and quantized.k.double().abs().max() > 100.0
        assert attend(quantized, recipe, 1e-6).out.isfinite().all()


def test_running_maximum_uses_scaled_scores() -> None:
    """Scales of blocks of keys are far apart, so raw integers of different blocks are not comparable."""
    q, k, v = random_qkv(512, rows=64)
    k[:, :, 128:256] *= 1e-4
    for recipe in RECIPES.values():
        assert relative_error(quantized_attention(q, k, v, recipe, 0.125), exact_attention(q, k, v, 0.125)[0]) < 0.1


def test_single_visible_keys_return_rounded_values() -> None:
    """Each row sees a single key, so the output is the values of the key, rounded once."""
    k = F.pad(8.0 * torch.eye(48).bfloat16(), (0, 16)).view(1, 1, 48, 64)
    v = random_tensor(1, 1, 48, 64)
    for recipe in RECIPES.values():
        quantized: Quantized = quantize(8.0 * k, k, v, recipe, BLOCK)
        torch.testing.assert_close(
            attend(quantized, recipe, 8.0).out, quantized.values() + quantized.constant(), atol=1e-6, rtol=1e-6
        )


def test_precision_names_map_to_recipes() -> None:
    assert quant_recipes.recipe_name("fp8") == "8bit" and quant_recipes.recipe_name("16bit") == "16bit"
    assert [quant_recipes.recipe_name(name) for name in RECIPES] == list(RECIPES)
    with pytest.raises(ValueError, match="precision must be one of 16bit, qk8, 8bit, e4m3, fp8, but got 'int4'"):
        quant_recipes.recipe_name("int4")
