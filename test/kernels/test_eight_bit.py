"""8-bit attention as its recipes have it, in torch: operands (quantize_reference.py) and what is made of them
(testing/eight_bit.py), against fp64 and beside what others do.
"""

from __future__ import annotations

import math
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_flashplug.ops import quantize_reference
from torch_flashplug.ops.quantize_reference import KEY_ORDER, SAMPLES, Quantised, quantise, rotate
from torch_flashplug.registry import quant_recipes
from torch_flashplug.registry.quant_recipes import RECIPES, Recipe
from torch_flashplug.testing import Case, Masking, attention_math, new_case
from torch_flashplug.testing.activations import MODELS, activations
from torch_flashplug.testing.eight_bit import attend, by_amax

BLOCK, SEED = 128, 20261125
TENSOR_CORES = 14  # digits of their sums
# Largest error of the output, relative, root mean square of draws.
ERRORS = {
    "8bit": {"fa3": 0.033, "llm": 0.045, "qwen": 0.047, "dit": 0.020, "normal": 0.043},
    "qk8": {"fa3": 0.012, "llm": 0.028, "qwen": 0.030, "dit": 0.009, "normal": 0.014},
}
# How many times less than that of e4m3 by tensor it has to be.
TIMES = {
    **{("fa3", D): {"8bit": 2.6, "qk8": 9.0} for D in (64, 128, 256)},
    ("llm", 128): {"8bit": 2.2, "qk8": 4.0}, ("qwen", 128): {"8bit": 8.0, "qk8": 14.0}, ("normal", 128): {"8bit": 1.25},
}  # fmt: skip
HEAVY, LIGHT = 16, 2  # draws: where errors of others go by a few outliers, and where not


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Output and LSE in fp64."""
    found = attention_math(q, k, v, scale=scale, mask=Masking(int(causal)))
    return found.out, found.lse


def error(out: Tensor, right: Tensor) -> float:
    return float((out - right).norm() / right.norm())


def in_eight_bits(q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, scale: float, **more: object) -> Tensor:
    return attend(quantise(q, k, v, recipe, BLOCK), recipe, scale, accumulator_bits=TENSOR_CORES, **more).out


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = SEED) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(Sk: int, D: int = 64, *, heads: int = 2, rows: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(drawn(1, heads, n, D, seed=seed) for seed, n in enumerate((rows, Sk, Sk)))


# ---- what the recipes cost ----


def errors_of(model: str, sizes: Case, draws: int) -> dict[str, float]:
    """Of recipes, and of e4m3 by tensor and by head: root mean square."""
    squares: dict[str, list[float]] = {}
    for seed in range(draws):
        q, k, v = activations(model, sizes, seed)
        scale = sizes.D**-0.5
        right, _ = exact(q, k, v, scale)
        outs = {name: in_eight_bits(q, k, v, recipe, scale) for name, recipe in RECIPES.items()}
        for name, heads in (("tensor", False), ("head", True)):
            outs[name] = attend(by_amax(q, k, v, BLOCK, heads=heads), RECIPES["e4m3"], scale).out
        for name, out in outs.items():
            squares.setdefault(name, []).append(error(out, right) ** 2)
    return {name: math.sqrt(statistics.fmean(found)) for name, found in squares.items()}


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("model", MODELS)
def test_errors_of_recipes(model: str, D: int) -> None:
    times = TIMES.get((model, D), {})
    draws = HEAVY if times and model != "normal" else LIGHT
    found = errors_of(model, new_case(model, (1, 4, 4), (64, 4096), (D, D)), draws)
    for name, most in ERRORS.items():
        assert found[name] <= most[model], (name, found)
        assert found[name] * times.get(name, 0.0) <= found["tensor"], (name, found)
        assert model == "normal" or found[name] <= 0.5 * found["head"], (name, found)
    assert found["e4m3"] <= 1.02 * found["tensor"], found


def test_blocks_of_e4m3_at_16k_keys() -> None:
    """What FlashAttention-3's paper claims 2.6 of."""
    found = errors_of("fa3", new_case("fa3", (1, 2, 2), (64, 16384), (128, 128)), 6)
    assert found["e4m3"] * 2.3 <= found["tensor"], found


def test_long_sums_are_parted() -> None:
    """Tensor cores cut off what they add: of a value that keys share, more with every key. Here it is none that all
    have, which would be taken from them.
    """
    q, k, v = qkv(32768, heads=1, rows=16)
    v = (v.double() + 1.0).bfloat16()
    v[:, :, ::2, :32] *= -1.0
    k[:, :, ::2] = -20.0 * q[:, :, :1]  # which the rows do not look at
    q = q[:, :, :1].expand(q.shape)
    right, _ = exact(q, k, v, 0.125)
    operands = quantise(q, k, v, RECIPES["8bit"], BLOCK)
    settings = {"scale": 0.125, "accumulator_bits": TENSOR_CORES}
    lost = [
        float(1.0 - attend(operands, RECIPES["8bit"], **longest, **settings).out.mean() / right.mean())
        for longest in ({}, {"longest": 1 << 20})
    ]
    assert abs(lost[0]) < 5e-3 and lost[1] > 1e-2


@pytest.mark.parametrize("name", ["8bit", "e4m3"])
def test_what_all_values_share_costs_nothing(name: str) -> None:
    """The output gets it back whole."""
    q, k, v = qkv(600, rows=600)
    for causal in (False, True):
        near, moved = (
            in_eight_bits(q, k, x, RECIPES[name], 0.125, causal=causal) - exact(q, k, x, 0.125, causal=causal)[0]
            for x in (v, (v.double() + 4.0).bfloat16())
        )
        assert float(moved.norm()) < 1.2 * float(near.norm())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_logsumexp_knows_the_key_that_was_taken_away(name: str, causal: bool) -> None:
    q, k, v = qkv(300, rows=300)
    k = (k.double() + 3.0).bfloat16()
    out, lse = exact(q, k, v, 0.125, causal=causal)
    operands = quantise(q, k, v, RECIPES[name], BLOCK)
    found = attend(operands, RECIPES[name], 0.125, causal=causal)
    assert float((found.lse - lse).abs().max()) < (0.15 if name == "e4m3" else 0.03)
    assert float((operands.row_shift * 0.125).abs().max()) > 1.0 and error(found.out, out) < 0.08


# ---- rotation and order ----


@pytest.mark.parametrize("D", [16, 64, 80, 96, 128, 192, 256])
def test_rotation_is_what_it_says(D: int) -> None:
    size = D & -D
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < size:
        block = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), block)
    matrix = torch.block_diag(*[block / math.sqrt(size)] * (D // size))
    found = rotate(torch.eye(D))
    torch.testing.assert_close(found.double(), quantize_reference.signs(D).double().diag() @ matrix)
    torch.testing.assert_close(found @ found.mT, torch.eye(D), atol=1e-6, rtol=0)
    assert {-1.0, 1.0} == set(quantize_reference.signs(D).tolist())


def test_keys_lie_as_products_want_probabilities() -> None:
    """A thread's own scores of sixteen keys, 2t, 2t + 1, 2t + 8 and 2t + 9, are four operands on end."""
    for t in range(4):
        assert KEY_ORDER[4 * t : 4 * t + 4] == (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)
    assert sorted(KEY_ORDER) == list(range(16))
    rows = torch.arange(48.0)
    assert torch.equal(quantize_reference.in_natural_order(quantize_reference.in_key_order(rows)), rows)
    assert quantize_reference.in_key_order(rows)[16:20].tolist() == [16.0, 17.0, 24.0, 25.0]


@pytest.mark.parametrize("Sk", [1, 15, 16, 17, 48, 129, 515])
def test_any_number_of_keys(Sk: int) -> None:
    """Zeros behind the last, and a last block's scale is that of its own keys."""
    q, k, v = qkv(Sk)
    k[:, :, -1] *= 50.0
    for recipe in RECIPES.values():
        operands = quantise(q, k, v, recipe, BLOCK)
        assert operands.k_scale.shape == (1, 2, -(-Sk // BLOCK))
        if recipe.values is not None:
            assert operands.v.shape == (1, 2, 64, -(-Sk // 16) * 16)
            padding = quantize_reference.in_natural_order(operands.v.double())[..., Sk:]
            assert not padding.any()
        most = 0.2 if recipe.scores == "e4m3" else 0.1
        assert error(attend(operands, recipe, 0.125).out, exact(q, k, v, 0.125)[0]) < most


def test_heads_have_scales_of_their_own() -> None:
    q, k, v = drawn(2, 6, 70, 64), drawn(2, 2, 300, 64), drawn(2, 2, 300, 64)
    q[:, 1] *= 30.0
    k[:, 1] *= 0.01
    for recipe in RECIPES.values():
        most = 0.15 if recipe.scores == "e4m3" else 0.07
        assert error(in_eight_bits(q, k, v, recipe, 0.125), exact(q, k, v, 0.125)[0]) < most


# ---- what has gone wrong elsewhere ----


def test_nothing_but_zeros() -> None:
    """A block of keys, a row of the query, a channel of values, and whole tensors."""
    q, k, v = qkv(400)
    q[:, :, 3] = 0.0
    v[..., 5] = 0.0
    k = k.clone()
    k[:, :, 128:256] = 0.0
    zeros = tuple(torch.zeros_like(x) for x in (q, k, v))
    for operands in ((q, k, v), zeros):
        for recipe in RECIPES.values():
            made = quantise(*operands, recipe, BLOCK)
            scales = [scale for scale in (made.q_scale, made.k_scale, made.v_scale) if scale is not None]
            assert all((scale > 0.0).all() and scale.isfinite().all() for scale in scales)
            out = attend(made, recipe, 0.125, causal=True).out
            assert out.isfinite().all() and not out[..., 5].any()


def test_samples_of_nothing() -> None:
    """Values that are zeros where samples are taken, in one channel or in all."""
    q, k, v = qkv(4096)
    places = (2 * torch.arange(SAMPLES) + 1) * 4096 // (2 * SAMPLES)
    for channels in (slice(5, 6), slice(None)):
        holes = v.clone()
        holes[:, :, places, channels] = 0.0
        right, _ = exact(q, k, holes, 0.125)
        assert error(in_eight_bits(q, k, holes, RECIPES["8bit"], 0.125), right) < 0.06


def test_an_outlier_of_values_stays_where_it_is() -> None:
    """Beyond 224 times the rms it is cut off, in its channel alone."""
    q, k, v = qkv(2048)
    plain = in_eight_bits(q, k, v, RECIPES["8bit"], 0.125)
    v[:, :, 700, 9] = 1000.0
    found = in_eight_bits(q, k, v, RECIPES["8bit"], 0.125)
    others = torch.arange(64) != 9
    assert torch.equal(found[..., others], plain[..., others]) and found.isfinite().all()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_not_finite_reaches_what_it_does_in_math(name: str, number: float) -> None:
    """A row of the query itself; of a key rows that see its block; of a value its channel."""
    q, k, v = qkv(512, rows=512)
    recipe = RECIPES[name]
    spoiled = [x.clone() for x in (q, k, v)]
    spoiled[0][0, 0, 7, 2] = spoiled[1][0, 0, 300, 2] = spoiled[2][0, 0, 300, 2] = number
    out = attend(quantise(spoiled[0], k, v, recipe, BLOCK), recipe, 0.125, causal=True).out
    assert out[0, 0, 7].isnan().all() and out.isnan().sum() == 64
    out = attend(quantise(q, spoiled[1], v, recipe, BLOCK), recipe, 0.125, causal=True).out
    assert out[0, 0, 300:].isnan().all() and out[0, 0, :256].isfinite().all() and out[0, 1].isfinite().all()
    made = quantise(q, k, spoiled[2], recipe, BLOCK).values()
    assert not made[0, 0, 300, 2].isfinite() and made.isfinite().sum() == made.numel() - 1


def test_large_numbers_of_16_bits() -> None:
    """Rotated rows of fp16's largest number fit in no fp16."""
    q, k, v = (torch.full((1, 1, n, 256), 65504.0, dtype=torch.float16) for n in (16, 130, 130))
    k[:, :, ::2] *= -1.0
    for recipe in RECIPES.values():
        made = quantise(q * 1e-4, k, v, recipe, BLOCK)
        assert made.k_scale.isfinite().all() and made.k.double().abs().max() > 100.0
        assert attend(made, recipe, 1e-6).out.isfinite().all()


def test_the_running_maximum_is_of_scaled_scores() -> None:
    """Blocks of keys whose scales are far apart: raw integers say nothing of each other."""
    q, k, v = qkv(512, rows=64)
    k[:, :, 128:256] *= 1e-4
    for recipe in RECIPES.values():
        assert error(in_eight_bits(q, k, v, recipe, 0.125), exact(q, k, v, 0.125)[0]) < 0.1


def test_values_come_back() -> None:
    """One key each is looked at: the output is its values, rounded once."""
    k = F.pad(8.0 * torch.eye(48).bfloat16(), (0, 16)).view(1, 1, 48, 64)
    v = drawn(1, 1, 48, 64)
    for recipe in RECIPES.values():
        made: Quantised = quantise(8.0 * k, k, v, recipe, BLOCK)
        torch.testing.assert_close(attend(made, recipe, 8.0).out, made.values() + made.constant(), atol=1e-6, rtol=1e-6)


def test_precisions_have_names() -> None:
    assert quant_recipes.named("fp8") == "8bit" and quant_recipes.named("16bit") == "16bit"
    assert [quant_recipes.named(name) for name in RECIPES] == list(RECIPES)
    with pytest.raises(ValueError, match="precision must be one of 16bit, qk8, 8bit, e4m3, fp8, but got 'int4'"):
        quant_recipes.named("int4")
