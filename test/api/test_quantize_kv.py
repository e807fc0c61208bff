"""quantize_kv(), and attention() with key and value that were quantized ahead: torch math, errors, graphs, plans."""

from __future__ import annotations

import itertools

import pytest
import torch
from device_backend import use_device_backend
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from torch_flashplug import QuantizedKV, attention, explain_attention, quantize_kv, sdpa_backend
from torch_flashplug.ops.quantize_ahead import KvLayout, planned_head_dims, sampled_keys
from torch_flashplug.ops.quantize_reference import SAMPLED_KEYS, SAMPLES, sample
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.registry.kernel_table import KERNEL_ROWS
from torch_flashplug.registry.quant_recipes import RECIPES, precision_number
from torch_flashplug.testing import Masking, attention_math

BY_RECIPE = pytest.mark.parametrize("recipe", RECIPES)
# Errors of torch math relative to exact attention; only key and value have 8 bits there.
NEAR = {"qk8": 0.01, "8bit": 0.035, "e4m3": 0.04}


def random_qkv(
    heads: tuple[int, int] = (4, 2), seq: tuple[int, int] = (70, 200), dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(20261129)
    (Hq, Hkv), (Sq, Sk), (D, Dv) = heads, seq, dims
    sizes = (2, Sq, Hq, D), (2, Sk, Hkv, D), (2, Sk, Hkv, Dv)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


# ---- torch math, without a kernel ----


@pytest.mark.parametrize("dims", [(64, 64), (40, 24), (192, 128)])
@pytest.mark.parametrize("causal", [False, "top_left"])
@BY_RECIPE
def test_math_is_near_exact_attention(recipe: str, causal: bool | str, dims: tuple[int, int]) -> None:
    """The keys have a mean, so a missing row shift would be seen in the LSE."""
    (q, k, v), scale = random_qkv(dims=dims), 0.7 * dims[0] ** -0.5
    k += 2.0
    out, lse = attention(q, quantize_kv(k, v, precision=recipe), causal=causal, scale=scale, return_lse=True)
    turned = (x.transpose(1, 2) for x in (q, k, v))
    expected = attention_math(*turned, scale=scale, mask=Masking(int(bool(causal))))
    error = (out.transpose(1, 2).double() - expected.out).norm() / expected.out.norm()
    assert out.dtype == q.dtype and error < NEAR[recipe]
    assert lse.dtype == torch.float32 and float((lse - expected.lse).abs().max()) < 0.06


@pytest.mark.parametrize("Sk", [1, 40, SAMPLED_KEYS, SAMPLED_KEYS + 1, 1500, 16384, 100001])
def test_copy_of_samples_has_the_samples_of_all_keys(Sk: int) -> None:
    """The constant key of a copy must have the bits of the constant key of all keys."""
    key = torch.arange(Sk, dtype=torch.float64).view(1, 1, Sk, 1).expand(1, 1, Sk, 8)
    copied = sampled_keys(key)
    assert torch.equal(sample(copied), sample(key)) and copied.shape[2] == min(Sk, SAMPLED_KEYS)
    assert copied.data_ptr() != key.data_ptr()
    positions = torch.arange(SAMPLED_KEYS).view(1, 1, -1, 1)
    assert len(sample(positions).unique()) == SAMPLES


def test_result_owns_its_memory_except_16_bit_values() -> None:
    q, k, v = random_qkv()
    for recipe in RECIPES:
        kv = quantize_kv(k, v, precision=recipe)
        expected = attention(q, kv)
        k_before, k[:] = k.clone(), 7.0
        assert torch.equal(attention(q, kv), expected)
        k.copy_(k_before)
        assert (kv.value is None) == (recipe != "qk8")


def test_properties_and_parts() -> None:
    _, k, v = random_qkv(dims=(40, 24))
    kv = quantize_kv(k, v, precision="fp8")
    assert kv.precision == "8bit" and kv.key_shape == (2, 200, 2, 40) and (kv.dtype, kv.device) == (k.dtype, k.device)
    shapes = {name: tuple(part.shape) for name, part in kv.parts.items()}
    assert shapes == {
        "k": (2, 2, 200, 64), "v": (2, 2, 24, 208), "k_scale": (2, 2, 2), "v_scale": (2, 2, 64), "v_mean": (2, 2, 64)
    }  # fmt: skip
    assert repr(kv).startswith("QuantizedKV((2, 200, 2, 40), Dv=24, scores int8")


def test_out_and_autocast() -> None:
    q, k, v = random_qkv()
    kv = quantize_kv(k, v)
    expected, out = attention(q, kv, causal="top_left"), torch.empty_like(q)
    assert attention(q, kv, causal="top_left", out=out) is out and torch.equal(out, expected)
    with torch.autocast("cpu", torch.bfloat16):
        wide = quantize_kv(k.float(), v.float())
        assert wide.dtype == torch.bfloat16 and torch.equal(wide.quantized, kv.quantized)
        assert torch.equal(attention(q.float(), wide, causal="top_left"), expected)


def test_causal_with_equal_lengths() -> None:
    q, k, v = random_qkv(seq=(60, 60))
    kv = quantize_kv(k, v)
    expected = attention(q, kv, causal="top_left")
    assert torch.equal(attention(q, kv, causal=True), expected)
    assert not torch.equal(attention(q, kv), expected)


def test_stub_backend_reaches_the_same_math() -> None:
    """The C++ ops check their arguments and call the reference math in place of a kernel."""
    q, k, v = random_qkv()
    for recipe in RECIPES:
        expected = attention(q, quantize_kv(k, v, precision=recipe), causal="top_left", return_lse=True)
        with use_device_backend("cpu"):
            kv = quantize_kv(k, v, precision=recipe)
            actual = attention(q, kv, causal="top_left", return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), recipe


@BY_RECIPE
def test_flops_are_those_of_16_bit_attention(recipe: str) -> None:
    q, k, v = random_qkv(dims=(64, 32))
    kv = quantize_kv(k, v, precision=recipe)
    with FlopCounterMode(display=False) as counter:
        attention(q, kv)
    assert counter.get_total_flops() == 2 * 2 * 4 * 70 * 200 * (64 + 32)


# ---- errors ----


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"precision": "16bit"}, ValueError, "precision must be one of qk8, 8bit, e4m3, fp8, but got '16bit'. Pass k"),
        ({"precision": 8}, ValueError, "quantize_kv: precision must be one of"),
        ({"k": None}, TypeError, "quantize_kv: k must be a tensor of shape .* but got NoneType"),
        ({"k": torch.ones(200, 2, 64)}, TypeError, "quantize_kv: k must be a tensor of shape .* but got 3-D"),
        ({"v": torch.ones(2, 200, 2, 64)}, ValueError, "one dtype, torch.bfloat16 or torch.float16, but got"),
        ({"k": torch.ones(2, 200, 2, 64), "v": torch.ones(2, 200, 2, 64)}, ValueError, "float32 and torch.float32"),
        ({"v": torch.ones(2, 199, 2, 64).bfloat16()}, ValueError, "k and v must have shapes"),
        ({"v": torch.ones(2, 200, 2, 64, device="meta").bfloat16()}, ValueError, "on one device, but are on cpu and"),
        ({name: torch.ones(2, 0, 2, 64).bfloat16() for name in "kv"}, ValueError, "without empty dims"),
        ({"k": torch.ones(2, 200, 2, 60).bfloat16()}, ValueError, "head dims must be multiples of 8 up to 256"),
        ({"k": torch.ones(2, 200, 2, 264).bfloat16()}, ValueError, "head dims must be multiples of 8 up to 256"),
    ],
)
def test_quantize_kv_refuses_other_arguments(change: dict, error: type, text: str) -> None:
    _, k, v = random_qkv()
    arguments = {"k": k, "v": v} | change
    with pytest.raises(error, match=text):
        quantize_kv(arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"v": torch.ones(2, 200, 2, 64)}, TypeError, "v must be left out if k is a QuantizedKV, but got Tensor"),
        ({"window": (3, 0)}, ValueError, "a QuantizedKV must not be combined .* but got window"),
        ({"softcap": 2.0, "num_splits": 1}, ValueError, "but got softcap, num_splits. Pass k and v in 16 bits"),
        ({"sinks": torch.ones(4)}, ValueError, "but got sinks"),
        ({"k_scale": 1.0}, ValueError, "but got k_scale, v_scale"),
        ({"seqused_k": torch.ones(2, dtype=torch.int32)}, ValueError, "but got lengths"),
        ({"block_mask": object(), "plan": object()}, ValueError, "but got block_mask, plan"),
        ({"causal": True}, ValueError, "causal must be False or 'top_left' with a QuantizedKV, .* with 70 rows"),
        ({"q": torch.ones(2, 70, 4, 64)}, ValueError, "q must have the dtype of the quantized k and v, torch.bfloat16"),
        ({"q": torch.ones(2, 70, 4, 64, device="meta").bfloat16()}, ValueError, "q must be on the device"),
        ({"q": torch.ones(1, 70, 4, 64).bfloat16()}, ValueError, "q must have shape .* with B = 2, D = 64"),
        ({"q": torch.ones(2, 70, 3, 64).bfloat16()}, ValueError, "Hq a multiple of 2"),
        ({"q": torch.ones(2, 70, 4, 32).bfloat16()}, ValueError, "q must have shape"),
        ({"q": torch.ones(70, 4, 64).bfloat16()}, TypeError, "q must be a tensor of shape .* but got 3-D"),
        ({"q": [1]}, TypeError, "q must be a tensor of shape .* but got list"),
        ({"out": torch.ones(2, 70, 4, 64)}, ValueError, "out must be torch.bfloat16"),
    ],
)
def test_attention_refuses_other_arguments(change: dict, error: type, text: str) -> None:
    q, k, v = random_qkv()
    arguments, kv = {"q": q} | change, quantize_kv(k, v)
    for call in (attention, explain_attention):
        with pytest.raises(error, match=text):
            call(arguments["q"], kv, **{name: x for name, x in arguments.items() if name != "q"})


def test_tensors_without_a_value_are_refused() -> None:
    q, k, _ = random_qkv()
    with pytest.raises(TypeError, match="attention: v must be a tensor, but got None"):
        attention(q, k)


def test_gradients_are_refused() -> None:
    q, k, v = random_qkv()
    kv = quantize_kv(k, v)
    for x in (k, v):
        x.requires_grad_()
        with pytest.raises(RuntimeError, match="quantize_kv: gradients are not supported"):
            quantize_kv(k, v)
        with torch.no_grad():
            assert torch.equal(quantize_kv(k, v).quantized, kv.quantized)
        x.requires_grad_(False)
    q.requires_grad_()
    with pytest.raises(RuntimeError, match="attention: gradients are not supported for key and value that are"):
        attention(q, kv)
    with torch.no_grad():
        assert not attention(q, kv).requires_grad
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="gradients are not supported"):
        attention(torch.autograd.forward_ad.make_dual(q.detach(), q.detach()), kv)


def test_ops_refuse_wrong_arguments() -> None:
    q, k, v = (x.transpose(1, 2) for x in random_qkv())
    ops = torch.ops.torch_flashplug
    for precision in (0, 4):
        with pytest.raises(
            RuntimeError, match=f"precision must be the number of a recipe, 1 to 3, but got {precision}"
        ):
            ops.quantize_kv(k, v, precision)
    quantized = ops.quantize_kv(k, v, 2)
    with pytest.raises(RuntimeError, match="quantized_kv int32"):
        ops.quantized_attention_fwd(q, quantized[1:], k, None, 200, 64, 2, False, None)
    with pytest.raises(RuntimeError, match="query must be torch.bfloat16"):
        ops.quantized_attention_fwd(q.float(), quantized, k, None, 200, 64, 2, False, None)
    q.requires_grad_()
    out, _ = ops.quantized_attention_fwd(q, quantized, k, None, 200, 64, 2, False, None)
    with pytest.raises(RuntimeError, match="gradients are not supported for 8-bit key and value"):
        out.sum().backward()


# ---- graphs ----


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("recipe", ["qk8", "8bit"])
def test_compiled_functions_have_the_same_bits(recipe: str) -> None:
    """A graph quantizes and attends, for all lengths; another graph takes key and value from outside."""

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kv = quantize_kv(k, v, precision=recipe)
        return attention(q, kv, return_lse=True)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    attend = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for Sk in (200, 1500):
        q, k, v = random_qkv(seq=(70, Sk))
        for actual, expected in zip(compiled(q, k, v), both(q, k, v), strict=True):
            assert torch.equal(actual, expected)
        kv = quantize_kv(k, v, precision=recipe)
        assert torch.equal(attend(q, kv, causal="top_left"), attention(q, kv, causal="top_left"))


@BY_RECIPE
def test_exported_program_has_the_same_bits(recipe: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, quantize_kv(k, v, precision=recipe))

    inputs = tuple(random_qkv())
    assert torch.equal(torch.export.export(Model(), inputs).module()(*inputs), Model()(*inputs))


@BY_RECIPE
def test_ops_pass_opcheck(recipe: str) -> None:
    q, k, v = (x.transpose(1, 2) for x in random_qkv())
    ops, number = torch.ops.torch_flashplug, precision_number(recipe)
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.quantize_kv, (k, v, number), test_utils=utils)
    value = v if recipe == "qk8" else None
    arguments = (q, ops.quantize_kv(k, v, number), sampled_keys(k), value, 200, 64, number, True, 0.1)
    torch.library.opcheck(ops.quantized_attention_fwd, arguments, test_utils=utils)


# ---- plans ----


@pytest.mark.parametrize("causal", [False, "top_left"])
@BY_RECIPE
def test_plan_says_that_key_and_value_were_quantized_ahead(recipe: str, causal: bool | str) -> None:
    q, k, v = random_qkv()
    plan = explain_attention(q, quantize_kv(k, v, precision=recipe), causal=causal, device="h100")
    assert plan.backend == "fa3" and plan.precision == recipe and plan.kernel.startswith("fwd_sm90_bf16_d64")
    assert ("causal" in plan.kernel) == bool(causal) and recipe in plan.kernel
    text = "Key and value were quantized ahead. The call quantizes the query only."
    assert plan.copies == text and text in str(plan) and f"precision={recipe}" in plan.call
    with sdpa_backend("math"):  # the result of quantize_kv() has 8 bits under any backend
        assert explain_attention(q, quantize_kv(k, v, precision=recipe), device="h100").backend == "fa3"


def test_plan_without_a_kernel() -> None:
    q, k, v = random_qkv()
    plan = explain_attention(q, quantize_kv(k, v), device="a100")
    assert plan.backend == "math" and not plan.kernel and not plan.precision
    assert plan.copies == "Key and value were quantized ahead." and "exactly 9.0" in plan.reasons["fa3"]


@BY_RECIPE
def test_all_calls_have_kernels_with_the_layout_of_quantize_kv(recipe: str) -> None:
    """Scales of key blocks belong to the tile of a kernel, which must not depend on the lengths or on the mask."""
    for D, Dv in itertools.product(range(8, 257, 8), range(8, 257, 40)):
        layout = KvLayout.select(precision_number(recipe), D, Dv)
        for Sq, Sk, causal in ((1, 40000, False), (64, 64, "top_left"), (5000, 1, False), (5000, 5000, "top_left")):
            q, k, v = (
                torch.empty(1, S, 2, size, dtype=torch.bfloat16, device="meta")
                for S, size in ((Sq, D), (Sk, D), (Sk, Dv))
            )
            samples = torch.empty(1, 2, min(Sk, SAMPLED_KEYS), D, dtype=torch.bfloat16, device="meta")
            value = v.transpose(1, 2) if recipe == "qk8" else None
            words = torch.empty(layout.words(1, 2, Sk, Dv), dtype=torch.int32, device="meta")
            kv = QuantizedKV(words, samples, value, Sk, Dv, recipe)
            spec = KernelSpec.from_name(explain_attention(q, kv, causal=causal, device="h100").kernel)
            assert (spec.d, spec.dv, spec.tile_n) == layout[1:], (D, Dv, Sq, Sk, causal)


def test_kernels_of_a_recipe_and_head_dims_have_one_block_size() -> None:
    blocks: dict[tuple, set[int]] = {}
    for row in KERNEL_ROWS:
        for tag in row.features:
            recipe = next((name for name in RECIPES if tag in (name, f"causal+{name}")), None)
            if recipe is not None:
                blocks.setdefault((recipe, row.d_max, row.dv_max), set()).add(row.tile_n)
    assert len(blocks) == 18 and all(len(sizes) == 1 for sizes in blocks.values())
    assert planned_head_dims(72, 128) == (80, 128)
