"""8-bit attention kernels: quantized operands, outputs and known pitfalls.

Operands must equal quantize_reference.py bit for bit. Outputs are compared with equal arithmetic in fp64
(testing/emulation_8bit.py).
"""

from __future__ import annotations

import ctypes
import math

import interpreted_kernels
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import quantize_ahead, quantize_reference
from torch_flashplug.registry.kernel_args import FORWARD
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.registry.kernel_table import KERNEL_ROWS
from torch_flashplug.registry.quant_recipes import LONGEST_SUM, RECIPES, precision_number
from torch_flashplug.testing import attention_math
from torch_flashplug.testing.direct_launch import order_arguments
from torch_flashplug.testing.emulation_8bit import attend

SEED = 20261125
SPECS = [spec for row in KERNEL_ROWS for spec in row.specs() if spec.features & set(RECIPES)]
BY_RECIPE = pytest.mark.parametrize("recipe", RECIPES)
POISON = 0x7F7F7F7F
# Error of O relative to the attention of the quantized operands: one rounding at the end, and a P of 16 bits in
# between. In tensor cores, e4m3 scores keep about 14 bits: an H100 was 0.004 to 0.008 off (interpreted 0.002). INT8
# scores are exact.
NEAR = {"qk8": 5e-3, "8bit": 4e-3, "e4m3": 1.2e-2}


def random_tensors(*sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = SEED) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def random_qkv(
    heads: tuple[int, int, int], seq: tuple[int, int], dims: tuple[int, int], **settings: object
) -> list[Tensor]:
    (B, Hq, Hkv), (Sq, Sk), (D, Dv) = heads, seq, dims
    return random_tensors((B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv), **settings)


def run_recipe(kernels_on: str, name: str, q: Tensor, k: Tensor, v: Tensor, **settings: object) -> Tensor:
    """Return the output of F.sdpa with a recipe, forced."""
    bindings.counters(reset=True)
    with torch.no_grad(), torch_flashplug.sdpa_backend("fa3", precision=name):
        out = F.scaled_dot_product_attention(*(x.to(kernels_on) for x in (q, k, v)), enable_gqa=True, **settings)
    assert bindings.counters(reset=True)["ours_fwd"] == 1
    return out.cpu()


def planned_spec(
    name: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, attn_mask: Tensor | None = None
) -> KernelSpec:
    """Return the kernel of such a call on an H100."""
    with torch_flashplug.sdpa_backend("fa3", precision=name):
        meta = [x.to("meta") for x in (q, k, v)]
        mask_args = {} if attn_mask is None else {"attn_mask": attn_mask.to("meta")}
        plan = torch_flashplug.explain(*meta, is_causal=causal, enable_gqa=True, device="h100", **mask_args)
    assert plan.precision == name, plan
    return KernelSpec.from_name(plan.kernel)


def quantized_operands(name: str, spec: KernelSpec, q: Tensor, k: Tensor, v: Tensor) -> quantize_reference.Quantized:
    """Return the quantized operands of a kernel, with padded head dims."""
    padded = [F.pad(x, (0, spec.d - x.shape[3])) for x in (q, k)]
    return quantize_reference.quantize(*padded, v, RECIPES[name], spec.tile_n)


def relative_error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


# ---- quantized operands ----

SIZES = (((1, 2, 1), (5, 70)), ((2, 4, 2), (130, 200)), ((1, 1, 1), (33, 515)))


def read_workspaces(
    spec: KernelSpec, of_q: Tensor, of_kv: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Tensor]:
    """Return the operands that the kernel left in its two workspaces (kernels/features/quantized_qkv.py)."""
    (B, Hq, Sq, D), (_, Hkv, Sk, Dv) = q.shape, v.shape
    name = next(name for name in RECIPES if name in spec.features)
    layout = quantize_ahead.KvLayout(name, spec.d, spec.dv, spec.tile_n)
    assert spec.features & {"mask"} or layout == quantize_ahead.KvLayout.select(precision_number(name), D, Dv)
    operands = layout.views(of_kv, B, Hkv, Sk, Dv)
    operands |= {part: operands[part][..., :Dv] for part in ("v_scale", "v_mean") if part in operands}
    offset, memory = 0, of_q.view(torch.int8)
    for part, dtype, shape in (
        ("q", operands["k"].dtype, (B, Hq, Sq, spec.d)),
        ("q_scale", torch.float32, (B, Hq, Sq)),
        ("row_shift", torch.float32, (B, Hq, Sq)),
    ):
        size = math.prod(shape) * dtype.itemsize
        operands[part] = memory[offset : offset + size].view(dtype).view(shape)
        offset += -(-size // 128) * 128
    return operands


def poisoned_workspace() -> Tensor:
    memory = torch.full((1 << 20,), POISON, dtype=torch.int32)
    return memory[-memory.data_ptr() % 128 // 4 :]


PLAIN = [spec for spec in SPECS if spec.dtype == "bf16" and not spec.features & {"causal", "mask"}]


@pytest.mark.parametrize("spec", PLAIN, ids=str)
def test_quantized_operands_match_the_torch_reference(spec: KernelSpec) -> None:
    """Operands are equal bit for bit, except for sums over a sample: the kernel adds in a different order.

    Values are checked against the sums of the kernel. The tests include NaN, inf, and rows and blocks of zeros.
    """
    function = interpreted_kernels.load_kernel(interpreted_kernels.pack(), spec.name())
    name = next(name for name in RECIPES if name in spec.features)
    for heads, seq in SIZES:
        narrowing = 8 * (seq[1] == 515)
        q, k, v = random_qkv(heads, seq, (spec.d - narrowing, spec.dv - narrowing))
        if heads[0] == 2:
            q[0, 1, 7], k[0, 0, :128], v[..., 5] = 0.0, 0.0, 0.0
            k[1, 1, 150, 3], q[1, 3, 9, 2], v[1, 0, 10, 9] = math.nan, math.inf, math.inf
        B, Hq, Sq, _ = q.shape
        out, lse = torch.empty(B, Hq, Sq, v.shape[3], dtype=q.dtype), torch.empty(B, Hq, Sq)
        of_q, of_kv = poisoned_workspace(), poisoned_workspace()
        arguments = {"q": q, "k": k, "v": v, "o": out, "lse": lse, "scale_log2": 0.1, "scale": 0.07, "num_ctas": 3}
        arguments |= {"counter": torch.zeros(1, dtype=torch.int32), "quant_workspace": of_q, "quantized_kv": of_kv}
        arguments |= {"k_samples": k, "quantizes_kv": 1}
        function(*order_arguments(FORWARD, arguments), ctypes.c_void_p(None))
        expected_operands, actual_operands = (
            quantized_operands(name, spec, q, k, v),
            read_workspaces(spec, of_q, of_kv, q, k, v),
        )
        for part, actual in actual_operands.items():
            expected = getattr(expected_operands, part)
            if part == "v":
                expected = quantize_reference.turned(
                    v, actual_operands["v_scale"], actual_operands["v_mean"], RECIPES[name].values
                )
            if part in {"q", "k", "v"}:
                nan = actual.float().isnan() & expected.float().isnan()
                assert bool((nan | (actual.view(torch.int8) == expected.view(torch.int8))).all()), (part, seq)
            else:
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4, equal_nan=True, msg=f"{part} {seq}")


# ---- outputs of quantized operands ----

DIMS = (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (80, 80), (40, 24), (200, 136)
CALLS = [(name, dims) for name in RECIPES for dims in DIMS]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("recipe, dims", CALLS)
def test_output_matches_the_quantized_operands(
    kernels_on: str, recipe: str, dims: tuple[int, int], causal: bool
) -> None:
    for heads, seq in SIZES:
        q, k, v = random_qkv(heads, seq, dims)
        spec = planned_spec(recipe, q, k, v, causal=causal)
        expected = attend(
            quantized_operands(recipe, spec, q, k, v), RECIPES[recipe], dims[0] ** -0.5, causal=causal
        ).out
        assert relative_error(run_recipe(kernels_on, recipe, q, k, v, is_causal=causal), expected) <= NEAR[recipe], (
            heads,
            seq,
        )


def random_masks(B: int, Hq: int, Sq: int, Sk: int) -> dict[str, Tensor]:
    """Return bool masks: padding behind the length of a sequence, random masks per head, and a window.

    In the random masks, the first rows see no key. The window masks out full blocks.
    """
    generator = torch.Generator().manual_seed(SEED)
    keys, rows = torch.arange(Sk), torch.arange(Sq).view(-1, 1)
    drawn = torch.rand((B, Hq, Sq, Sk), generator=generator) < 0.3
    drawn[:, :, :3] = False
    lengths = torch.tensor([Sk - 30, Sk // 3][:B]).view(-1, 1, 1, 1)
    return {"padding": keys < lengths, "random": drawn, "window": (keys - rows).abs() < 40}


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@BY_RECIPE
def test_masked_output_matches_the_quantized_operands(kernels_on: str, recipe: str, dims: tuple[int, int]) -> None:
    q, k, v = random_qkv((2, 4, 2), (200, 420), dims)
    v = (v.double() + 1.0).bfloat16()  # rows without visible keys must not get the mean of the values
    for name, mask in random_masks(2, 4, 200, 420).items():
        spec = planned_spec(recipe, q, k, v, attn_mask=mask)
        expected = attend(quantized_operands(recipe, spec, q, k, v), RECIPES[recipe], dims[0] ** -0.5, mask=mask).out
        out = run_recipe(kernels_on, recipe, q, k, v, attn_mask=mask.to(kernels_on))
        assert relative_error(out, expected) <= NEAR[recipe], name
        blind = ~mask.any(-1).expand(2, 4, 200)
        assert not out[blind].any(), name


@BY_RECIPE
def test_lse_matches_the_quantized_operands(kernels_on: str, recipe: str) -> None:
    q, k, v = random_qkv((1, 4, 2), (70, 300), (128, 128))
    k += 3.0
    spec = planned_spec(recipe, q, k, v)
    expected = attend(quantized_operands(recipe, spec, q, k, v), RECIPES[recipe], 0.1).lse
    with torch.no_grad(), torch_flashplug.sdpa_backend("fa3", precision=recipe):
        tensors = (x.to(kernels_on) for x in (q, k, v))
        mode = bindings.mode()
        _, lse, *_ = torch.ops.torch_flashplug.sdpa_fwd(*tensors, None, 0.0, 0, 0.1, mode)
    assert float((lse.cpu() - expected).abs().max()) <= (1e-2 if recipe == "e4m3" else 1e-3)


# ---- known pitfalls ----


@BY_RECIPE
@pytest.mark.parametrize("Sk", [1, 15, 16, 17, 48, 127])
def test_keys_behind_the_last_key_have_no_weight(kernels_on: str, recipe: str, Sk: int) -> None:
    """Values are one-hot, so O is P in any key order of V^T."""
    q, k, _ = random_qkv((1, 1, 1), (9, Sk), (64, 64))
    v = torch.eye(Sk, max(64, -(-Sk // 8) * 8)).bfloat16().view(1, 1, Sk, -1)
    out = run_recipe(kernels_on, recipe, q, k, v)
    weights = attention_math(q, k, torch.eye(Sk, dtype=torch.float64).view(1, 1, Sk, Sk), scale=0.125).out
    assert float((out[..., :Sk].double() - weights).abs().max()) < 0.05 and not out[..., Sk:].any()


@BY_RECIPE
def test_nan_affects_only_its_row_or_its_block(kernels_on: str, recipe: str) -> None:
    q, k, v = random_qkv((1, 2, 2), (300, 300), (64, 64))
    clean = run_recipe(kernels_on, recipe, q, k, v, is_causal=True)
    q[0, 0, 7, 3] = math.nan
    out = run_recipe(kernels_on, recipe, q, k, v, is_causal=True)
    assert out[0, 0, 7].isnan().all() and torch.equal(out[0, 0, 8:], clean[0, 0, 8:])
    assert torch.equal(out[0, 1], clean[0, 1])
    q[0, 0, 7, 3], k[0, 1, 280, 5] = 0.0, math.nan
    out = run_recipe(kernels_on, recipe, q, k, v, is_causal=True)
    # all keys of a block share a scale
    first_row = 280 // (block := planned_spec(recipe, q, k, v, causal=True).tile_n) * block
    assert out[0, 1, first_row:].isnan().all() and out[0, 1, :first_row].isfinite().all() and out[0, 0].isfinite().all()


@BY_RECIPE
def test_key_blocks_of_zeros_and_of_tiny_numbers(kernels_on: str, recipe: str) -> None:
    """Scales of blocks differ by 1e4, so the largest integer is not the largest score."""
    q, k, v = random_qkv((1, 1, 1), (64, 640), (64, 64))
    k[0, 0, :256] = 0.0
    k[0, 0, 256:384] *= 1e-4
    q[0, 0, 5] = 0.0
    spec = planned_spec(recipe, q, k, v)
    expected = attend(quantized_operands(recipe, spec, q, k, v), RECIPES[recipe], 0.125).out
    out = run_recipe(kernels_on, recipe, q, k, v)
    assert relative_error(out, expected) <= NEAR[recipe]
    assert relative_error(out[0, 0, 5], v.double().mean(2)[0, 0]) < 0.15


@pytest.mark.parametrize("size", [1.5e4, 900.0, 300.0])
@BY_RECIPE
def test_huge_scores_stay_finite(kernels_on: str, recipe: str, size: float) -> None:
    """fp16 inputs up to the largest number: the key with the largest quantized score has all the weight.

    Rows with usual scores in the same tile stay unchanged.
    """
    q, k, v = random_qkv((1, 1, 1), (64, 300), (128, 128), dtype=torch.float16)
    q, k = q * size, k * size
    q[0, 0, ::3] *= 0.01 / size
    expected = attend(quantized_operands(recipe, planned_spec(recipe, q, k, v), q, k, v), RECIPES[recipe], 1.0).out
    out = run_recipe(kernels_on, recipe, q, k, v, scale=1.0)
    is_near = (out.double() - expected).norm(dim=-1) < 0.1 * expected.norm(dim=-1)
    assert bool(out.isfinite().all()) and float(is_near.float().mean()) > 0.9


@BY_RECIPE
def test_value_outlier_affects_only_its_channel(kernels_on: str, recipe: str) -> None:
    q, k, v = random_qkv((1, 1, 1), (64, 640), (64, 64))
    v[0, 0, 3, 7] = 1000.0
    v[0, 0, :320, 9] = 0.0  # half of the sample
    expected = attention_math(q, k, v, scale=0.125).out
    out = run_recipe(kernels_on, recipe, q, k, v).double()
    unaffected_channels = [c for c in range(64) if c != 7]
    assert relative_error(out[..., unaffected_channels], expected[..., unaffected_channels]) < 0.08
    assert out.isfinite().all()


@BY_RECIPE
def test_views_and_broadcast_heads_match_packed_copies(kernels_on: str, recipe: str) -> None:
    """Views give bitwise the results of packed copies."""
    q, k, v = random_qkv((2, 4, 2), (70, 130), (64, 64))
    one_head = (x[:, :1].expand(2, 2, 130, 64) for x in (k, v))
    views = q.transpose(1, 2).contiguous().transpose(1, 2), *one_head
    out = run_recipe(kernels_on, recipe, *views)
    assert torch.equal(out, run_recipe(kernels_on, recipe, *(x.contiguous() for x in views)))
    odd = torch.zeros(2, 2, 130, 65, dtype=k.dtype)[..., 1:].copy_(k)
    assert torch.equal(run_recipe(kernels_on, recipe, q, odd, v), run_recipe(kernels_on, recipe, q, k, v))


@pytest.mark.parametrize("scale", [-0.1, 0.0])
@BY_RECIPE
def test_output_with_nonpositive_softmax_scales(kernels_on: str, recipe: str, scale: float) -> None:
    q, k, v = random_qkv((1, 2, 1), (70, 130), (64, 64))
    expected = attention_math(q, k, v, scale=scale).out
    assert relative_error(run_recipe(kernels_on, recipe, q, k, v, scale=scale), expected) < 0.08


@BY_RECIPE
def test_long_sums_keep_the_mean_of_values(kernels_on: str, recipe: str) -> None:
    """Values have a mean, and there are many keys; on a GPU, tensor cores alone would lose several percent."""
    Sk = 131072 if kernels_on == "cuda" else 512
    q, k, v = random_qkv((1, 1, 1), (64, Sk), (128, 128))
    v = (v.double() + 1.0).bfloat16()
    expected = attention_math(q, k, v, scale=0.1).out
    assert abs(float(run_recipe(kernels_on, recipe, q, k, v, scale=0.1).double().mean() / expected.mean()) - 1.0) < 5e-3


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
@pytest.mark.parametrize("recipe", ["8bit", "e4m3"])
def test_partial_sums_are_rescaled_to_the_last_maximum(kernels_on: str, recipe: str, dims: tuple[int, int]) -> None:
    """Partial sums are rescaled and added, since there are more keys than one 8-bit sum may have.

    The limit is quant_recipes.LONGEST_SUM. The row maxima keep growing, and partial sums are rescaled to the last
    maximum. In the second check, rows share values with alternating signs, and little of the sums is lost.
    """
    Sk = 16383 if kernels_on == "cuda" else 2500
    signs = (1.0 - torch.arange(Sk) % 2 * 2.0).view(-1, 1)
    q, k, v = random_qkv((1, 1, 1), (130, Sk), dims)
    # the kernel visits keys from the last key on
    k = (k.double() * torch.linspace(3.0, 0.2, Sk).view(-1, 1)).bfloat16()
    expected = attend(
        quantized_operands(recipe, planned_spec(recipe, q, k, v), q, k, v), RECIPES[recipe], dims[0] ** -0.5
    ).out
    assert relative_error(run_recipe(kernels_on, recipe, q, k, v), expected) <= NEAR[recipe]
    k = torch.zeros_like(k)
    k[..., :1], q[..., 0] = 4.0 * signs, 16.0
    v = (v.double() * 0.1 + signs).bfloat16()
    expected = attention_math(q, k, v).out
    actual = run_recipe(kernels_on, recipe, q, k, v).double()
    assert float(expected.mean()) > 0.9 and abs(float(actual.mean() / expected.mean()) - 1.0) < 0.015


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
@pytest.mark.parametrize("recipe", ["8bit", "e4m3"])
def test_maximum_grows_at_the_end_of_a_partial_sum(kernels_on: str, recipe: str, dims: tuple[int, int]) -> None:
    """The maximum grows by much near the end of the first partial sum, so the earlier part has no weight."""
    q, k, v = random_qkv((1, 1, 1), (70, 2500), dims)
    q = q[:, :, :1].expand(q.shape).contiguous()
    spec = planned_spec(recipe, q, k, v)
    tile_n = spec.tile_n
    parted = -(-2500 // tile_n) - LONGEST_SUM // tile_n
    for first_block in (parted - 1, parted, parted + 1):
        is_early = torch.arange(2500).view(-1, 1) < first_block * tile_n
        keys, values = torch.where(is_early, 4.0 * q[:, :, :1], k), torch.where(is_early, v, 100.0 * v)
        expected = attend(quantized_operands(recipe, spec, q, keys, values), RECIPES[recipe], dims[0] ** -0.5).out
        assert relative_error(run_recipe(kernels_on, recipe, q, keys, values), expected) <= NEAR[recipe], first_block


@pytest.mark.parametrize("recipe", ["8bit", "e4m3"])
def test_sampled_padding_does_not_saturate_real_keys(kernels_on: str, recipe: str) -> None:
    """All but a few keys are one vector, or zeros, behind a mask or not; the remaining keys do not saturate."""
    for num_keys, size, share in ((15, 1.0, 1.0), (4, 1e-3, 0.0), (4, 1e3, 0.0), (4, 1.0, 0.3)):
        q, k, v = random_qkv((1, 2, 2), (16, 1024), (64, 64))
        v = v * size
        k[:, :, num_keys:], v[:, :, num_keys:] = k[:, :, num_keys:][:, :, :1], (v[:, :, num_keys:][:, :, :1] * share)
        mask = (torch.arange(1024) < num_keys).view(1, 1, 1, -1)
        out = run_recipe(kernels_on, recipe, q, k, v, attn_mask=mask.to(kernels_on))
        assert relative_error(out, attention_math(q, k[:, :, :num_keys], v[:, :, :num_keys]).out) < 0.12, (
            num_keys,
            size,
        )


@BY_RECIPE
def test_values_at_the_ends_of_fp32_and_fp16(kernels_on: str, recipe: str) -> None:
    """The squares overflow fp32. Results that rounding would take beyond fp16 become the largest fp16 number."""
    q, k, v = random_qkv((1, 1, 1), (64, 300), (64, 64))
    assert run_recipe(kernels_on, recipe, q, k, v * 1e19).isfinite().all()
    q, k, v = random_qkv((1, 1, 1), (64, 300), (64, 64), dtype=torch.float16)
    v = (v.double() * 3e4).clamp(-65504, 65504).half()
    assert run_recipe(kernels_on, recipe, q * 8, k, v, scale=1.0).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["8bit", "e4m3"])
def test_many_partial_sums_keep_the_last_additions(recipe: str) -> None:
    """The mean of the values is too small to be subtracted; rounding must not lose the last additions."""
    q, k, v = (torch.randn(1, 1, n, 64, device="cuda") for n in (4, 1 << 20, 1 << 20))
    v = v + torch.linspace(0.2, 0.48, 64, device="cuda")
    q, k, v = (x.bfloat16() for x in (q, k, v))
    assert relative_error(run_recipe("cuda", recipe, q, k, v), attention_math(q, k, v).out.cpu()) < 0.03


@BY_RECIPE
def test_gradients_need_16_bit_precision(kernels_on: str, recipe: str) -> None:
    q, k, v = (x.to(kernels_on).requires_grad_() for x in random_qkv((1, 2, 2), (70, 130), (64, 64)))
    with torch_flashplug.sdpa_backend("fa3", precision=recipe), pytest.raises(RuntimeError, match="no backward"):
        F.scaled_dot_product_attention(q, k, v)
    with torch_flashplug.sdpa_backend("fa3"):
        expected = F.scaled_dot_product_attention(q, k, v)
    with torch_flashplug.sdpa_backend("fa3", precision="16bit"):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), expected)
