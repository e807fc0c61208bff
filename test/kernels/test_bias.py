"""Float masks through F.sdpa, on a GPU or interpreted: results and gradients of query, key and value against fp64.

The masks include layouts that TMA cannot read. Infinities and NaN must give the results of torch's math.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from forced_splits import MAX_SPLITS, plan_of_forced_call
from masked_calls import (
    BACKENDS,
    HEADS,
    SEED,
    bias_dtype,
    check_decode,
    check_gradients,
    copy_with_strides,
    random_bias,
    run_with_references,
)
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.dtypes import ELEMENTS_16BIT
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import assert_within_budget, make_inputs, new_case

# Kernels with further features are tested in test_dropout.
BIASED = [spec for arch in BACKENDS for spec in kernel_table.specs(arch) if spec.features in ({"bias"}, {"bias32"})]


def mask_out(bias: Tensor) -> Tensor:
    """Mask out one row, a full tile of rows, a range of keys in all rows, and half of the remaining scores."""
    bias = bias.masked_fill(random_bias(*bias.shape[-2:]) < 0, -math.inf)
    bias[..., 65, :] = bias[..., 128:256, :] = bias[..., 70:100] = -math.inf
    return bias


# Biases that broadcast to (B, Hq, Sq, Sk), for 300 rows and 336 keys. A conversion of the dtype keeps the strides.
BIASES: dict[str, Callable[[], Tensor]] = {
    "for_all": lambda: random_bias(300, 336),
    "by_head": lambda: random_bias(4, 300, 336),
    "by_batch": lambda: random_bias(2, 1, 300, 336),
    "by_both": lambda: random_bias(2, 4, 300, 336),
    "expanded": lambda: random_bias(1, 4, 300, 336).expand(2, 4, 300, 336),
    "keys": lambda: random_bias(2, 1, 1, 336),
    "keys_by_head": lambda: random_bias(2, 4, 1, 336),
    "rows": lambda: random_bias(2, 1, 300, 1),
    "one": lambda: random_bias(1, 1),
    "hidden": lambda: mask_out(random_bias(2, 1, 300, 336)),
    "heads_innermost": lambda: random_bias(300, 336, 4).permute(2, 0, 1)[None],
    "transposed": lambda: random_bias(336, 300).mT,
    "odd_offset": lambda: random_bias(300, 344)[:, 7:343],
    "large": lambda: random_bias(4, 300, 336) * 1000 - 10000,
}  # fmt: skip


@pytest.mark.parametrize("wide", [False, True], ids=["16", "fp32"])
@pytest.mark.parametrize("bias", BIASES)
def test_output_of_each_bias_layout(kernels_on: str, bias: str, wide: bool) -> None:
    case = new_case(f"{bias} {wide}", HEADS, (300, 336), (64, 64), dtype=ELEMENTS_16BIT[len(bias) % 2])
    bias_tensor = copy_with_strides(BIASES[bias](), kernels_on, bias_dtype(case, wide))
    assert_within_budget(case.name, *run_with_references(case, bias_tensor, kernels_on), seed=SEED)


@pytest.mark.parametrize("bias", BIASES)
def test_output_of_each_bias_layout_on_sm80_kernels(kernels_on: str, bias: str) -> None:
    d, wide = (64, 128, 256)[len(bias) % 3], len(bias) % 2 == 0
    case = new_case(f"{bias} {d}", HEADS, (300, 336), (d, d), dtype=ELEMENTS_16BIT[len(bias) // 2 % 2])
    bias_tensor = copy_with_strides(BIASES[bias](), kernels_on, bias_dtype(case, wide))
    assert_within_budget(case.name, *run_with_references(case, bias_tensor, kernels_on, "fa2"), seed=SEED)


@pytest.mark.parametrize("spec", [spec for spec in BIASED if spec.kind == "fwd"], ids=KernelSpec.name)
def test_every_biased_forward_kernel(kernels_on: str, spec: KernelSpec) -> None:
    """Sizes are tried until the plan chooses the kernel, since several rows of the table may compete."""
    wide, backend = "bias32" in spec.features, BACKENDS[spec.arch]
    facts = {"bias32" if wide else "bias": 1}
    for heads, rows in (((1, 3, 3), 64), ((1, 2, 1), 200), ((4, 16, 16), 192), ((2, 17, 17), 256)):
        case = new_case(spec.name(), heads, (rows, 72), (spec.d, spec.dv), dtype=spec.dtype)
        if plan_of_forced_call(case, backend=backend, **facts)["kernel"] == spec.name():
            break
    else:
        pytest.fail(f"no call is planned for {spec.name()}")
    bias = mask_out(random_bias(300, 336))[100 : 100 + rows, 40:112].to(kernels_on, bias_dtype(case, wide))
    assert_within_budget(case.name, *run_with_references(case, bias, kernels_on, backend), seed=SEED)


@pytest.mark.parametrize("backend", ["fa3", "fa2"])
@pytest.mark.parametrize("wide", [False, True], ids=["16", "fp32"])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 300), (300, 1), (64, 64), (65, 129), (129, 65), (3, 7)])
def test_biased_output_of_different_lengths(kernels_on: str, sizes: tuple[int, int], wide: bool, backend: str) -> None:
    case = new_case("sizes", (1, 3, 3), sizes, (64, 64))
    bias = random_bias(1, 3, *sizes).to(kernels_on, bias_dtype(case, wide))
    assert_within_budget(f"{sizes}", *run_with_references(case, bias, kernels_on, backend), seed=SEED)


@pytest.mark.parametrize("backend", ["fa3", "fa2"])
@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_output_with_different_softmax_scales(kernels_on: str, scale: float, backend: str) -> None:
    case = new_case("scales", (1, 2, 2), (70, 136), (64, 64), scale=scale)
    bias = mask_out(random_bias(300, 336))[60:130, 20:156].to(kernels_on, case.torch_dtype)
    assert_within_budget(f"{scale}", *run_with_references(case, bias, kernels_on, backend), seed=SEED)


@pytest.mark.parametrize("backend", ["fa3", "fa2"])
@pytest.mark.parametrize("wide", [False, True], ids=["16", "fp32"])
def test_nan_and_infinity_in_a_bias_match_torch_math(kernels_on: str, wide: bool, backend: str) -> None:
    """NaN and inf spoil only their own row, and a row of -inf is 0, which agrees with torch's math.

    In a row filled with the smallest finite number, the output is the mean of all values.
    """
    case = new_case("none", (1, 2, 2), (70, 136), (64, 64))
    dtype = bias_dtype(case, wide)
    bias = random_bias(70, 136).to(kernels_on, dtype)
    bias[3, 5], bias[9, 130], bias[20], bias[21] = math.nan, math.inf, torch.finfo(dtype).min, -math.inf
    out, exact, low = run_with_references(case, bias, kernels_on, backend)
    has_nan = torch.zeros(70, dtype=torch.bool, device=kernels_on)
    has_nan[[3, 9]] = True
    assert out[..., has_nan, :].isnan().all() and exact[..., has_nan, :].isnan().all()
    assert (out[..., 21, :] == 0).all()
    assert_within_budget("others", out[..., ~has_nan, :], exact[..., ~has_nan, :], low[..., ~has_nan, :], seed=SEED)


def test_bool_mask_and_equal_float_mask_give_equal_outputs(kernels_on: str) -> None:
    """A float mask of 0 and -inf gives the result of the bool mask, also in rows without visible keys."""
    case = new_case("same", (2, 2, 2), (200, 136), (64, 64))
    visible = random_bias(2, 1, 200, 136) > 0
    visible[:, :, 70:140] = False
    visible = visible.to(kernels_on)
    inputs = make_inputs(case, kernels_on, SEED)
    with torch_flashplug.sdpa_backend("fa3"):
        masked, biased = (
            F.scaled_dot_product_attention(*inputs, attn_mask=mask)
            for mask in (visible, torch.zeros_like(visible, dtype=case.torch_dtype).masked_fill(~visible, -math.inf))
        )
    assert_within_budget("same", biased, masked.double(), masked, seed=SEED)


# Biases that broadcast to (2, 4, Sq, 333).
DECODE_BIASES: dict[str, Callable[[int], Tensor]] = {
    "for_all": lambda Sq: random_bias(Sq, 333),
    "by_head": lambda Sq: random_bias(4, Sq, 333),
    "by_both": lambda Sq: random_bias(2, 4, Sq, 333),
    "keys": lambda Sq: random_bias(2, 1, 1, 333),
    "keys_expanded": lambda Sq: random_bias(1, 1, 1, 333).expand(2, 4, Sq, 333),
    "rows": lambda Sq: random_bias(2, 1, Sq, 1),
    "filled": lambda Sq: torch.zeros(333).masked_fill(torch.arange(333) > 100, -math.inf).expand(2, 1, Sq, 333),
    "nothing": lambda Sq: torch.full((2, 1, Sq, 333), -math.inf),
    "heads_innermost": lambda Sq: random_bias(Sq, 333, 4).permute(2, 0, 1)[None],
    "odd_offset": lambda Sq: random_bias(Sq, 340)[:, 7:],
}


@pytest.mark.parametrize("spec", [spec for spec in BIASED if spec.is_decode], ids=KernelSpec.name)
def test_every_biased_decode_kernel(kernels_on: str, spec: KernelSpec) -> None:
    wide, backend = "bias32" in spec.features, BACKENDS[spec.arch]
    for Sq, keys in ((1, 1), (3, 64), (2, 200), (5, 129)):
        case = new_case(f"{spec.name()} {Sq}x{keys}", HEADS, (Sq, keys), (spec.d, spec.dv), dtype=spec.dtype)
        assert plan_of_forced_call(case, backend=backend, **{"bias32" if wide else "bias": 1})["kernel"] == spec.name()
        bias = random_bias(2, 1, Sq, keys).to(kernels_on, bias_dtype(case, wide))
        check_decode(case, make_inputs(case, kernels_on, SEED), bias, backend=backend)


@pytest.mark.parametrize("num_splits", [0, 1, 3, MAX_SPLITS])
@pytest.mark.parametrize("bias", DECODE_BIASES)
@pytest.mark.parametrize("Sq", [1, 7, 32])
def test_biased_decode_of_each_layout_and_number_of_splits(
    kernels_on: str, Sq: int, bias: str, num_splits: int
) -> None:
    wide = (len(bias) + Sq) % 2 == 0
    case = new_case(f"{bias} {Sq}", HEADS, (Sq, 333), (64, 64), dtype=ELEMENTS_16BIT[Sq % 2])
    bias_tensor = copy_with_strides(DECODE_BIASES[bias](Sq), kernels_on, bias_dtype(case, wide))
    check_decode(case, make_inputs(case, kernels_on, SEED), bias_tensor, num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("bias", DECODE_BIASES)
def test_biased_decode_of_each_layout_on_sm80_kernels(kernels_on: str, bias: str, num_splits: int) -> None:
    Sq = (1, 7, 32)[len(bias) % 3]
    case = new_case(f"{bias} {Sq}", HEADS, (Sq, 333), (64, 64), dtype=ELEMENTS_16BIT[Sq % 2])
    bias_tensor = copy_with_strides(DECODE_BIASES[bias](Sq), kernels_on, case.torch_dtype)
    check_decode(case, make_inputs(case, kernels_on, SEED), bias_tensor, num_splits, "fa2")


@pytest.mark.parametrize("backend, num_splits", [("fa3", 1), ("fa3", 3), ("fa3", 21), ("fa2", 1), ("fa2", 3)])
@pytest.mark.parametrize("value", [torch.finfo(torch.bfloat16).min, -1e9, -1e7, 1e7, 1e9])
def test_split_keys_keep_equal_weights_with_a_large_bias(
    kernels_on: str, value: float, backend: str, num_splits: int
) -> None:
    """All keys have equal weight in splits of unequal size; such an LSE has no digits left for the number of keys."""
    case = new_case("large", (1, 2, 1), (2, 1310), (128, 128))
    inputs = make_inputs(case, kernels_on, SEED)
    bias = torch.full((1, case.Sk), value, dtype=case.torch_dtype, device=kernels_on)
    with torch_flashplug.sdpa_backend(backend, num_splits=num_splits):
        out = F.scaled_dot_product_attention(torch.zeros_like(inputs.q), inputs.k, inputs.v, bias, enable_gqa=True)
    mean = inputs.v.double().mean(2, keepdim=True).expand(1, 2, 2, 128)
    torch.testing.assert_close(out.double(), mean, atol=2**-9, rtol=2**-7)


DOMINANT_BIAS_VALUES = ((torch.finfo(torch.bfloat16).min, ...), (-1e9, ...), (1e9, ...), (1e9, 5), (2e38, 5))


@pytest.mark.parametrize("backend", BACKENDS.values())
@pytest.mark.parametrize("value, key", DOMINANT_BIAS_VALUES)
def test_rows_with_a_huge_lse_have_no_gradients(kernels_on: str, value: float, key: object, backend: str) -> None:
    """The row contributes as if the output gradient were zero."""
    grads, grads_without_row = (
        gradients_with_bias_row(kernels_on, backend, *settings) for settings in ((value, key, 1.0), (0.0, key, 0.0))
    )
    assert (grads[0][:, :, 3] == 0).all()
    torch.testing.assert_close(grads, grads_without_row, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("backend", BACKENDS.values())
def test_single_dominant_key_gets_the_full_value_gradient(kernels_on: str, backend: str) -> None:
    """The value of this key gets the full output gradient, and the scores of the row get no gradient."""
    grads, grads_without_row = (gradients_with_bias_row(kernels_on, backend, 1e4, 5, share) for share in (1.0, 0.0))
    assert grads[0][:, :, 3].abs().max() < 0.1  # from the rounding of O only
    grad_value = (grads[2] - grads_without_row[2])[:, :, 5]
    expected = make_inputs(LARGE, kernels_on, SEED).grad_out[:, :, 3]
    torch.testing.assert_close(grad_value, expected, atol=0.05, rtol=0.05)


LARGE = new_case("large gradients", (1, 2, 2), (70, 130), (64, 64))


def gradients_with_bias_row(device: str, backend: str, entry: float, key: object, share: float) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v.

    Row 3 of the bias has the value `entry` at some keys, and the output gradient of row 3 is scaled by `share`.
    """
    inputs = make_inputs(LARGE, device, SEED)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    bias = torch.zeros(LARGE.Sq, LARGE.Sk, dtype=LARGE.torch_dtype, device=device)
    grad_out = inputs.grad_out.clone()
    bias[3, key], grad_out[:, :, 3] = entry, grad_out[:, :, 3] * share
    with torch_flashplug.sdpa_backend(backend):
        out = F.scaled_dot_product_attention(*leaves, attn_mask=bias)
        return torch.autograd.grad(out, leaves, grad_out)


@pytest.mark.parametrize("spec", [s for s in BIASED if s.kind in {"bwd", "partbwd"}], ids=KernelSpec.name)
def test_every_biased_backward_kernel(kernels_on: str, spec: KernelSpec) -> None:
    wide, backend = "bias32" in spec.features, BACKENDS[spec.arch]
    case = new_case(spec.name(), (2, 2, 1), (200, 336), (spec.d, spec.dv), dtype=spec.dtype)
    facts = {"bias32" if wide else "bias": 1, "grad": 1, "deterministic": spec.is_split_backward}
    assert plan_of_forced_call(case, backend=backend, **facts)["gradients"] == spec.name()
    bias = random_bias(2, 1, 200, 336).to(kernels_on, bias_dtype(case, wide))
    check_gradients(case, bias, kernels_on, order=spec.is_split_backward, backend=backend)


@pytest.mark.parametrize("bias", ["by_head", "expanded", "keys", "one", "hidden", "heads_innermost", "odd_offset"])
def test_gradients_of_bias_layouts_on_sm80_kernels(kernels_on: str, bias: str) -> None:
    d = (64, 128, 256)[len(bias) % 3]
    case = new_case(f"{bias} gradients {d}", HEADS, (300, 336), (d, d), dtype=ELEMENTS_16BIT[len(bias) % 2])
    check_gradients(case, copy_with_strides(BIASES[bias](), kernels_on, case.torch_dtype), kernels_on, backend="fa2")


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("bias", [name for name in BIASES if name != "large"])
def test_gradients_of_each_bias_layout(kernels_on: str, bias: str, order: bool) -> None:
    wide = len(bias) % 3 == 0
    case = new_case(f"{bias} gradients", HEADS, (300, 336), (64, 64), dtype=ELEMENTS_16BIT[len(bias) % 2])
    check_gradients(
        case, copy_with_strides(BIASES[bias](), kernels_on, bias_dtype(case, wide)), kernels_on, order=order
    )


@pytest.mark.parametrize("wide", [False, True], ids=["16", "fp32"])
@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 300), (300, 1), (65, 129), (129, 65)])
def test_biased_gradients_of_different_lengths(kernels_on: str, sizes: tuple[int, int], d: int, wide: bool) -> None:
    case = new_case(f"gradients of {sizes}", (1, 3, 3), sizes, (d, d))
    check_gradients(case, random_bias(*sizes).to(kernels_on, bias_dtype(case, wide)), kernels_on)


@pytest.mark.parametrize("bias", ["by_head", "expanded", "keys", "rows", "hidden", "heads_innermost", "odd_offset"])
@pytest.mark.parametrize("dims", [(192, 128), (136, 136), (256, 256)])
def test_gradients_with_wide_head_dims(kernels_on: str, dims: tuple[int, int], bias: str) -> None:
    """The dQ kernel has no room for bias tiles at these head dims, so threads read the bias from global memory."""
    wide = (len(bias) + dims[0]) % 3 == 0
    case = new_case(f"{bias} {dims}", HEADS, (300, 336), dims, dtype=ELEMENTS_16BIT[len(bias) % 2])
    check_gradients(case, copy_with_strides(BIASES[bias](), kernels_on, bias_dtype(case, wide)), kernels_on)


# query heads, KV heads, rows, keys, head dim; each row sees one key, alone or among keys masked out by -inf
ONE_KEY = {
    "long": (16, 4, 65, 1, 120),
    "decode": (4, 4, 5, 1, 64),
    "hidden": (4, 4, 65, 300, 128),
    "hidden_in_decode": (4, 2, 3, 300, 128),
}


@pytest.mark.parametrize("hidden_by", [-1e4, -12345.0, -65504.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("sizes", ONE_KEY.values(), ids=ONE_KEY)
@pytest.mark.parametrize("family", BACKENDS.values())
def test_single_visible_key_returns_its_exact_value(kernels_on, sizes, dtype, hidden_by, family):
    """The score does not matter: the rounded exponent of the largest P enters both the product and the sum."""
    heads, kv_heads, rows, keys, d = sizes
    generator = torch.Generator().manual_seed(SEED)
    q, k, v = (
        torch.randn(1, h, s, d, generator=generator).to(kernels_on, dtype)
        for h, s in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    )
    visible_keys = torch.randint(keys, (rows,), generator=generator)
    bias = torch.full((rows, keys), -math.inf)
    bias[torch.arange(rows), visible_keys] = hidden_by + torch.randn(rows, generator=generator)
    with torch.no_grad(), torch_flashplug.sdpa_backend(family):
        bindings.counters(reset=True)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(kernels_on, dtype), enable_gqa=True)
    assert bindings.counters()["ours_fwd"] == 1
    expected = v.repeat_interleave(heads // kv_heads, 1)[:, :, visible_keys.to(kernels_on)]
    assert torch.equal(out, expected)
