"""8-bit attention by kernels: operands that they make ahead of it, against quantize_reference.py bit for bit; what they
make of these, against the same arithmetic in fp64 (testing/eight_bit.py); and the classic ways to get it wrong.
"""

from __future__ import annotations

import ctypes
import math

import on_cpu
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import quantize_reference
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.registry.kernel_table import KERNEL_ROWS
from torch_flashplug.registry.quant_recipes import KEY_ORDER, LONGEST_SUM, RECIPES
from torch_flashplug.testing import attention_math
from torch_flashplug.testing.eight_bit import attend

SEED = 20261125
SPECS = [spec for row in KERNEL_ROWS for spec in row.specs() if spec.features & set(RECIPES)]
BY_RECIPE = pytest.mark.parametrize("recipe", RECIPES)
POISON = 0x7F7F7F7F
# Of O to what the operands make of it: rounded once in the end, and with P of 16 bits in between. Of scores in e4m3
# tensor cores keep some 14 digits: an H100 was 0.004 to 0.008 off (interpreted 0.002), those in INT8 are exact.
NEAR = {"qk8": 5e-3, "8bit": 4e-3, "e4m3": 1.2e-2}


def drawn(*sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = SEED) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def qkv(heads: tuple[int, int, int], seq: tuple[int, int], dims: tuple[int, int], **more: object) -> list[Tensor]:
    (B, Hq, Hkv), (Sq, Sk), (D, Dv) = heads, seq, dims
    return drawn((B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv), **more)


def run(kernels_on: str, name: str, q: Tensor, k: Tensor, v: Tensor, **more: object) -> Tensor:
    """F.sdpa in that recipe, forced."""
    bindings.counters(reset=True)
    with torch.no_grad(), torch_flashplug.sdpa_backend("fa3", precision=name):
        out = F.scaled_dot_product_attention(*(x.to(kernels_on) for x in (q, k, v)), enable_gqa=True, **more)
    assert bindings.counters(reset=True)["ours_fwd"] == 1
    return out.cpu()


def spec_of(
    name: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, attn_mask: Tensor | None = None
) -> KernelSpec:
    """The kernel that takes such a call on an H100."""
    with torch_flashplug.sdpa_backend("fa3", precision=name):
        meta = [x.to("meta") for x in (q, k, v)]
        more = {} if attn_mask is None else {"attn_mask": attn_mask.to("meta")}
        plan = torch_flashplug.explain(*meta, is_causal=causal, enable_gqa=True, device="h100", **more)
    assert plan.precision == name, plan
    return KernelSpec.from_name(plan.kernel)


def operands(name: str, spec: KernelSpec, q: Tensor, k: Tensor, v: Tensor) -> quantize_reference.Quantised:
    """As that kernel has them: head dims filled up."""
    padded = [F.pad(x, (0, spec.d - x.shape[3])) for x in (q, k)]
    return quantize_reference.quantise(*padded, v, RECIPES[name], spec.tile_n)


def distance(out: Tensor, right: Tensor) -> float:
    return float((out.double() - right).norm() / right.norm())


# ---- what they make ----

SIZES = (((1, 2, 1), (5, 70)), ((2, 4, 2), (130, 200)), ((1, 1, 1), (33, 515)))


def made(spec: KernelSpec, scratch: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """What the kernel has left in scratch (kernels/features/quantized_qkv.py)."""
    (B, Hq, Sq, _), (_, Hkv, Sk, Dv) = q.shape, v.shape
    recipe = RECIPES[next(name for name in RECIPES if name in spec.features)]
    types = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, None: None}
    padded = -(-Sk // len(KEY_ORDER)) * len(KEY_ORDER)
    parts = (
        ("q", types[recipe.scores], (B, Hq, Sq, spec.d)),
        ("k", types[recipe.scores], (B, Hkv, Sk, spec.d)),
        ("v", types[recipe.values], (B, Hkv, Dv, padded)),
        ("q_scale", torch.float32, (B, Hq, Sq)),
        ("row_shift", torch.float32, (B, Hq, Sq)),
        ("k_scale", torch.float32, (B, Hkv, -(-Sk // spec.tile_n))),
        *((part, torch.float32 if recipe.values else None, (B, Hkv, spec.dv)) for part in ("v_scale", "v_mean")),
    )
    found, at, memory = {}, 0, scratch.view(torch.int8)
    for part, dtype, shape in parts:
        if dtype is not None:
            size = math.prod(shape) * dtype.itemsize
            there = memory[at : at + size].view(dtype).view(shape)
            found[part] = there[..., :Dv] if part in {"v_scale", "v_mean"} else there
            at += -(-size // 128) * 128
    return found


PLAIN = [spec for spec in SPECS if spec.dtype == "bf16" and not spec.features & {"causal", "mask"}]


@pytest.mark.parametrize("spec", PLAIN, ids=str)
def test_operands_are_those_of_torch(spec: KernelSpec) -> None:
    """Bit for bit, but for sums over a sample, whose order is the kernel's own (values by what it made of them): NaN,
    inf, rows and blocks of zeros.
    """
    function = on_cpu.function(on_cpu.pack(), spec.name())
    name = next(name for name in RECIPES if name in spec.features)
    for heads, seq in SIZES:
        less = 8 * (seq[1] == 515)
        q, k, v = qkv(heads, seq, (spec.d - less, spec.dv - less))
        if heads[0] == 2:
            q[0, 1, 7], k[0, 0, :128], v[..., 5] = 0.0, 0.0, 0.0
            k[1, 1, 150, 3], q[1, 3, 9, 2], v[1, 0, 10, 9] = math.nan, math.inf, math.inf
        B, Hq, Sq, _ = q.shape
        out, lse = torch.empty(B, Hq, Sq, v.shape[3], dtype=q.dtype), torch.empty(B, Hq, Sq)
        room = torch.full((1 << 20,), POISON, dtype=torch.int32)
        scratch = room[-room.data_ptr() % 128 // 4 :]
        counter = torch.zeros(1, dtype=torch.int32)
        function(q, k, v, out, lse, 0.1, 0.07, counter, 3, *[None] * 6, scratch, *[None] * 9, ctypes.c_void_p(None))
        want, all_found = operands(name, spec, q, k, v), made(spec, scratch, q, k, v)
        for part, found in all_found.items():
            right = getattr(want, part)
            if part == "v":
                right = quantize_reference.turned(v, all_found["v_scale"], all_found["v_mean"], RECIPES[name].values)
            if part in {"q", "k", "v"}:
                nan = found.float().isnan() & right.float().isnan()
                assert bool((nan | (found.view(torch.int8) == right.view(torch.int8))).all()), (part, seq)
            else:
                torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-4, equal_nan=True, msg=f"{part} {seq}")


# ---- what they make of it ----

DIMS = (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (80, 80), (40, 24), (200, 136)
CALLS = [(name, dims) for name in RECIPES for dims in DIMS]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("recipe, dims", CALLS)
def test_output_is_that_of_its_operands(kernels_on: str, recipe: str, dims: tuple[int, int], causal: bool) -> None:
    for heads, seq in SIZES:
        q, k, v = qkv(heads, seq, dims)
        spec = spec_of(recipe, q, k, v, causal=causal)
        right = attend(operands(recipe, spec, q, k, v), RECIPES[recipe], dims[0] ** -0.5, causal=causal).out
        assert distance(run(kernels_on, recipe, q, k, v, is_causal=causal), right) <= NEAR[recipe], (heads, seq)


def masks(B: int, Hq: int, Sq: int, Sk: int) -> dict[str, Tensor]:
    """Of bools: padding behind a length of each sequence; random ones by head, whose first rows see nothing; a window,
    which hides whole blocks.
    """
    generator = torch.Generator().manual_seed(SEED)
    keys, rows = torch.arange(Sk), torch.arange(Sq).view(-1, 1)
    drawn = torch.rand((B, Hq, Sq, Sk), generator=generator) < 0.3
    drawn[:, :, :3] = False
    lengths = torch.tensor([Sk - 30, Sk // 3][:B]).view(-1, 1, 1, 1)
    return {"padding": keys < lengths, "random": drawn, "window": (keys - rows).abs() < 40}


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@BY_RECIPE
def test_masks_of_bools(kernels_on: str, recipe: str, dims: tuple[int, int]) -> None:
    q, k, v = qkv((2, 4, 2), (200, 420), dims)
    v = (v.double() + 1.0).bfloat16()  # which rows that see nothing get nothing of
    for name, mask in masks(2, 4, 200, 420).items():
        spec = spec_of(recipe, q, k, v, attn_mask=mask)
        right = attend(operands(recipe, spec, q, k, v), RECIPES[recipe], dims[0] ** -0.5, mask=mask).out
        out = run(kernels_on, recipe, q, k, v, attn_mask=mask.to(kernels_on))
        assert distance(out, right) <= NEAR[recipe], name
        blind = ~mask.any(-1).expand(2, 4, 200)
        assert not out[blind].any(), name


@BY_RECIPE
def test_lse_is_that_of_its_operands(kernels_on: str, recipe: str) -> None:
    q, k, v = qkv((1, 4, 2), (70, 300), (128, 128))
    k += 3.0
    spec = spec_of(recipe, q, k, v)
    right = attend(operands(recipe, spec, q, k, v), RECIPES[recipe], 0.1).lse
    with torch.no_grad(), torch_flashplug.sdpa_backend("fa3", precision=recipe):
        given = (x.to(kernels_on) for x in (q, k, v))
        mode = bindings.mode()
        _, lse, *_ = torch.ops.torch_flashplug.sdpa_fwd(*given, None, 0.0, 0, 0.1, mode)
    assert float((lse.cpu() - right).abs().max()) <= (1e-2 if recipe == "e4m3" else 1e-3)


# ---- the classic ways to get it wrong ----


@BY_RECIPE
@pytest.mark.parametrize("Sk", [1, 15, 16, 17, 48, 127])
def test_keys_behind_the_last_count_for_nothing(kernels_on: str, recipe: str, Sk: int) -> None:
    """One-hot values: O is P, whatever order V^T has its keys in."""
    q, k, _ = qkv((1, 1, 1), (9, Sk), (64, 64))
    v = torch.eye(Sk, max(64, -(-Sk // 8) * 8)).bfloat16().view(1, 1, Sk, -1)
    out = run(kernels_on, recipe, q, k, v)
    weights = attention_math(q, k, torch.eye(Sk, dtype=torch.float64).view(1, 1, Sk, Sk), scale=0.125).out
    assert float((out[..., :Sk].double() - weights).abs().max()) < 0.05 and not out[..., Sk:].any()


@BY_RECIPE
def test_not_a_number_stays_where_it_is(kernels_on: str, recipe: str) -> None:
    q, k, v = qkv((1, 2, 2), (300, 300), (64, 64))
    clean = run(kernels_on, recipe, q, k, v, is_causal=True)
    q[0, 0, 7, 3] = math.nan
    out = run(kernels_on, recipe, q, k, v, is_causal=True)
    assert out[0, 0, 7].isnan().all() and torch.equal(out[0, 0, 8:], clean[0, 0, 8:])
    assert torch.equal(out[0, 1], clean[0, 1])
    q[0, 0, 7, 3], k[0, 1, 280, 5] = 0.0, math.nan
    out = run(kernels_on, recipe, q, k, v, is_causal=True)
    first = 280 // (block := spec_of(recipe, q, k, v, causal=True).tile_n) * block  # all keys of a block share a scale
    assert out[0, 1, first:].isnan().all() and out[0, 1, :first].isfinite().all() and out[0, 0].isfinite().all()


@BY_RECIPE
def test_blocks_of_zeros_and_of_huge_numbers(kernels_on: str, recipe: str) -> None:
    """Scales of blocks lie 1e4 apart: the largest whole number is not the largest score."""
    q, k, v = qkv((1, 1, 1), (64, 640), (64, 64))
    k[0, 0, :256] = 0.0
    k[0, 0, 256:384] *= 1e-4
    q[0, 0, 5] = 0.0
    spec = spec_of(recipe, q, k, v)
    right = attend(operands(recipe, spec, q, k, v), RECIPES[recipe], 0.125).out
    out = run(kernels_on, recipe, q, k, v)
    assert distance(out, right) <= NEAR[recipe]
    assert distance(out[0, 0, 5], v.double().mean(2)[0, 0]) < 0.15


@pytest.mark.parametrize("size", [1.5e4, 900.0, 300.0])
@BY_RECIPE
def test_scores_beyond_all_bounds(kernels_on: str, recipe: str, size: float) -> None:
    """fp16 to its end: one key has all the weight, the one whose quantised score is the largest; beside rows of usual
    scores, which stay what they are.
    """
    q, k, v = qkv((1, 1, 1), (64, 300), (128, 128), dtype=torch.float16)
    q, k = q * size, k * size
    q[0, 0, ::3] *= 0.01 / size
    right = attend(operands(recipe, spec_of(recipe, q, k, v), q, k, v), RECIPES[recipe], 1.0).out
    out = run(kernels_on, recipe, q, k, v, scale=1.0)
    near = (out.double() - right).norm(dim=-1) < 0.1 * right.norm(dim=-1)
    assert bool(out.isfinite().all()) and float(near.float().mean()) > 0.9


@BY_RECIPE
def test_a_value_beyond_its_channels_scale_stays_local(kernels_on: str, recipe: str) -> None:
    q, k, v = qkv((1, 1, 1), (64, 640), (64, 64))
    v[0, 0, 3, 7] = 1000.0
    v[0, 0, :320, 9] = 0.0  # half of the sample
    right = attention_math(q, k, v, scale=0.125).out
    out = run(kernels_on, recipe, q, k, v).double()
    others = [c for c in range(64) if c != 7]
    assert distance(out[..., others], right[..., others]) < 0.08
    assert out.isfinite().all()


@BY_RECIPE
def test_views_and_broadcast_heads(kernels_on: str, recipe: str) -> None:
    """The same bits as of packed copies."""
    q, k, v = qkv((2, 4, 2), (70, 130), (64, 64))
    one_head = (x[:, :1].expand(2, 2, 130, 64) for x in (k, v))
    views = q.transpose(1, 2).contiguous().transpose(1, 2), *one_head
    out = run(kernels_on, recipe, *views)
    assert torch.equal(out, run(kernels_on, recipe, *(x.contiguous() for x in views)))
    odd = torch.zeros(2, 2, 130, 65, dtype=k.dtype)[..., 1:].copy_(k)
    assert torch.equal(run(kernels_on, recipe, q, odd, v), run(kernels_on, recipe, q, k, v))


@pytest.mark.parametrize("scale", [-0.1, 0.0])
@BY_RECIPE
def test_unusual_scales(kernels_on: str, recipe: str, scale: float) -> None:
    q, k, v = qkv((1, 2, 1), (70, 130), (64, 64))
    right = attention_math(q, k, v, scale=scale).out
    assert distance(run(kernels_on, recipe, q, k, v, scale=scale), right) < 0.08


@BY_RECIPE
def test_long_sums_keep_their_digits(kernels_on: str, recipe: str) -> None:
    """Values with a mean, many keys: tensor cores alone would lose percents on a GPU."""
    Sk = 131072 if kernels_on == "cuda" else 512
    q, k, v = qkv((1, 1, 1), (64, Sk), (128, 128))
    v = (v.double() + 1.0).bfloat16()
    right = attention_math(q, k, v, scale=0.1).out
    assert abs(float(run(kernels_on, recipe, q, k, v, scale=0.1).double().mean() / right.mean()) - 1.0) < 5e-3


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
@pytest.mark.parametrize("recipe", ["8bit", "e4m3"])
def test_sums_of_parts_of_the_keys(kernels_on: str, recipe: str, dims: tuple[int, int]) -> None:
    """More keys than a sum in 8 bits may have (recipes.LONGEST_SUM), whose maxima grow, on and on: parts are brought to
    the last one. And values that rows share, but not with all others: little of them is lost.
    """
    Sk = 16383 if kernels_on == "cuda" else 2500
    signs = (1.0 - torch.arange(Sk) % 2 * 2.0).view(-1, 1)
    q, k, v = qkv((1, 1, 1), (130, Sk), dims)
    k = (k.double() * torch.linspace(3.0, 0.2, Sk).view(-1, 1)).bfloat16()  # from the last key on
    right = attend(operands(recipe, spec_of(recipe, q, k, v), q, k, v), RECIPES[recipe], dims[0] ** -0.5).out
    assert distance(run(kernels_on, recipe, q, k, v), right) <= NEAR[recipe]
    k = torch.zeros_like(k)
    k[..., :1], q[..., 0] = 4.0 * signs, 16.0
    v = (v.double() * 0.1 + signs).bfloat16()
    right = attention_math(q, k, v).out
    found = run(kernels_on, recipe, q, k, v).double()
    assert float(right.mean()) > 0.9 and abs(float(found.mean() / right.mean()) - 1.0) < 0.015


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
@pytest.mark.parametrize("recipe", ["8bit", "e4m3"])
def test_maxima_that_grow_where_sums_part(kernels_on: str, recipe: str, dims: tuple[int, int]) -> None:
    """From the block on that the first part ends before, and much: what the part had left counts for nothing."""
    q, k, v = qkv((1, 1, 1), (70, 2500), dims)
    q = q[:, :, :1].expand(q.shape).contiguous()
    spec = spec_of(recipe, q, k, v)
    tile_n = spec.tile_n
    parted = -(-2500 // tile_n) - LONGEST_SUM // tile_n
    for first in (parted - 1, parted, parted + 1):
        seen = torch.arange(2500).view(-1, 1) < first * tile_n
        keys, values = torch.where(seen, 4.0 * q[:, :, :1], k), torch.where(seen, v, 100.0 * v)
        right = attend(operands(recipe, spec, q, keys, values), RECIPES[recipe], dims[0] ** -0.5).out
        assert distance(run(kernels_on, recipe, q, keys, values), right) <= NEAR[recipe], first


@pytest.mark.parametrize("recipe", ["8bit", "e4m3"])
def test_samples_that_are_padding(kernels_on: str, recipe: str) -> None:
    """All but a few keys are one vector, or zeros, behind a mask or not: the others do not saturate."""
    for there, size, far in ((15, 1.0, 1.0), (4, 1e-3, 0.0), (4, 1e3, 0.0), (4, 1.0, 0.3)):
        q, k, v = qkv((1, 2, 2), (16, 1024), (64, 64))
        v = v * size
        k[:, :, there:], v[:, :, there:] = k[:, :, there:][:, :, :1], (v[:, :, there:][:, :, :1] * far)
        mask = (torch.arange(1024) < there).view(1, 1, 1, -1)
        out = run(kernels_on, recipe, q, k, v, attn_mask=mask.to(kernels_on))
        assert distance(out, attention_math(q, k[:, :, :there], v[:, :, :there]).out) < 0.12, (there, size)


@BY_RECIPE
def test_values_at_the_ends_of_formats(kernels_on: str, recipe: str) -> None:
    """Their squares overflow fp32; what rounding would take beyond fp16 is its largest number."""
    q, k, v = qkv((1, 1, 1), (64, 300), (64, 64))
    assert run(kernels_on, recipe, q, k, v * 1e19).isfinite().all()
    q, k, v = qkv((1, 1, 1), (64, 300), (64, 64), dtype=torch.float16)
    v = (v.double() * 3e4).clamp(-65504, 65504).half()
    assert run(kernels_on, recipe, q * 8, k, v, scale=1.0).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["8bit", "e4m3"])
def test_totals_of_many_sums(recipe: str) -> None:
    """Values with a mean that is not clear enough to be taken from them: rounding must not lose what is added last."""
    q, k, v = (torch.randn(1, 1, n, 64, device="cuda") for n in (4, 1 << 20, 1 << 20))
    v = v + torch.linspace(0.2, 0.48, 64, device="cuda")
    q, k, v = (x.bfloat16() for x in (q, k, v))
    assert distance(run("cuda", recipe, q, k, v), attention_math(q, k, v).out.cpu()) < 0.03


@BY_RECIPE
def test_gradients_have_sixteen_bits(kernels_on: str, recipe: str) -> None:
    q, k, v = (x.to(kernels_on).requires_grad_() for x in qkv((1, 2, 2), (70, 130), (64, 64)))
    with torch_flashplug.sdpa_backend("fa3", precision=recipe), pytest.raises(RuntimeError, match="no backward"):
        F.scaled_dot_product_attention(q, k, v)
    with torch_flashplug.sdpa_backend("fa3"):
        whole = F.scaled_dot_product_attention(q, k, v)
    with torch_flashplug.sdpa_backend("fa3", precision="16bit"):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), whole)
