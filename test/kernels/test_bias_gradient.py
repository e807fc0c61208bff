"""Gradient of a bias against fp64 for each broadcast form, with bitwise equal results in every run.

The kernel is tested alone in the interpreter. Through F.sdpa it runs on a GPU or interpreted, with the sizes and
strides of the bias.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import interpreted_kernels
import pytest
import torch
import torch.nn.functional as F
from forced_splits import plan_of_forced_call
from fp64_gradients import check_gradients_of_case
from masked_calls import HEADS, SEED, bias_dtype, copy_with_strides
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import dropout_reference
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.dtypes import ELEMENTS_16BIT
from torch_flashplug.registry.kernel_args import DBIAS
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import (
    Case,
    Masking,
    assert_bitwise_equal,
    assert_within_budget,
    attention_math,
    bias_grad_math,
    make_inputs,
    new_case,
)
from torch_flashplug.testing.budget import GRAD_FACTOR, cancelled_bias_sums
from torch_flashplug.testing.direct_launch import order_arguments

CTAS, DROPOUT_P = 3, 0.3
SPECS = {spec.name(): spec for spec in kernel_table.specs(90, "dbias")}
# Dims of (B, Hq, Sq, Sk) in which a bias is not broadcast.
SHAPES = {
    **{"whole": "bhqk", "over_batch": "hqk", "over_heads": "bqk", "over_both": "qk", "rows": "bhq", "keys": "bhk"},
    **{"keys_of_batch": "bk", "one_row": "k", "one_column": "q", "one_head": "h", "one": ""},
}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interpreted_kernels.build(tmp_path_factory.mktemp("dbias"), *SPECS)


def nan_padded_tensor(*sizes: int, dtype: torch.dtype, fill: float = math.nan) -> Tensor:
    """Return a tensor with rows padded to multiples of 16 bytes."""
    unit = 16 // dtype.itemsize
    return torch.full((*sizes[:-1], -(-sizes[-1] // unit) * unit), fill, dtype=dtype)[..., : sizes[-1]]


def random_bias(case: Case, dims: str, dtype: torch.dtype, seed: int = SEED) -> Tensor:
    """Return a random bias that masks out some scores, and all keys of one row."""
    sizes = [size if dim in dims else 1 for dim, size in zip("bhqk", (case.B, case.Hq, case.Sq, case.Sk), strict=True)]
    generator = torch.Generator().manual_seed(seed)
    bias = nan_padded_tensor(*sizes, dtype=dtype)
    bias.copy_(torch.randn(sizes, generator=generator) * 2)
    bias[torch.rand(sizes, generator=generator) < 0.1] = -math.inf
    if sizes[2] > 70:
        bias[..., 70, :] = -math.inf
    bias[..., -1] = 0.5
    return bias


def reference_masking(spec: KernelSpec, case: Case, bias: Tensor) -> Masking:
    """Return the masking of the reference, including the dropout of a kernel."""
    if "dropout" not in spec.features:
        return Masking(bias=bias)
    kept_scores = dropout_reference.dropout_mask(torch.tensor(SEED), case.B, case.Hq, case.Sq, case.Sk, DROPOUT_P)
    return Masking(bias=bias, kept=kept_scores, kept_share=dropout_reference.keep_probability(DROPOUT_P))


class Direct:
    """Kernel bound to a problem: call() writes `gradient`, surrounded by NaN."""

    def __init__(self, function: Callable[..., None], spec: KernelSpec, case: Case, bias: Tensor):
        inputs = make_inputs(case, "cpu", SEED)
        forward_results = attention_math(*inputs, scale=case.scale, mask=reference_masking(spec, case, bias))
        rows = -(-case.Sq // spec.workspace_block_rows) * spec.workspace_block_rows
        scale = case.D**-0.5 if case.scale is None else case.scale
        self.gradient = nan_padded_tensor(*bias.shape, dtype=bias.dtype)
        suffix = "32" * ("bias32" in spec.features)
        expanded_bias = bias
        if bias.shape[3] < case.Sk:  # TMA needs full rows
            expanded_bias = nan_padded_tensor(*bias.shape[:3], case.Sk, dtype=bias.dtype).copy_(bias)
        expanded_bias = expanded_bias.expand(case.B, case.Hq, case.Sq, case.Sk)
        self._counter = torch.zeros(1, dtype=torch.int32)
        values = dict(zip("qkv", inputs, strict=True)) | {"do": inputs.grad_out}
        values |= {
            "o": forward_results.out.to(case.torch_dtype),
            "lse": forward_results.lse.float(),
            "counter": self._counter,
        }
        values |= {"row_stats": torch.full((case.B, case.Hq, 2, rows), math.nan), "num_ctas": CTAS}
        values |= {"scale_log2": scale * math.log2(math.e), "scale": scale}
        values |= {f"bias{suffix}": expanded_bias, f"dbias{suffix}": self.gradient}
        if "dropout" in spec.features:
            values |= {"seed": torch.tensor([SEED]), "dropout_p": DROPOUT_P}
        self._values, self._function = order_arguments(DBIAS, values), function

    def call(self) -> Tensor:
        self.gradient.fill_(math.nan)
        self._function(*self._values, ctypes.c_void_p(None))
        assert self._counter.item() == 0
        return self.gradient.clone()


def check_dbias(pack: Path, spec: KernelSpec, case: Case, dims: str, seed: int = 0) -> Tensor:
    dtype = torch.float32 if "bias32" in spec.features else case.torch_dtype
    bias, inputs = random_bias(case, dims, dtype), make_inputs(case, "cpu", SEED)
    interpreted_kernels.set_order_seed(pack, seed)
    direct = Direct(interpreted_kernels.load_kernel(pack, spec.name()), spec, case, bias)
    grad = direct.call()
    exact, low = (
        bias_grad_math(
            *inputs, inputs.grad_out, scale=case.scale, mask=reference_masking(spec, case, bias), dtype=number
        )
        for number in (torch.float64, case.torch_dtype)
    )
    cancelled = float(cancelled_bias_sums(inputs.v, inputs.grad_out, bias))
    budget = {"factor": GRAD_FACTOR, "cancelled": cancelled}
    assert_within_budget(f"{spec.name()} {case.name} {dims}", grad, exact, low, **budget, seed=SEED)
    if "k" in dims:
        assert (grad[bias == -math.inf] == 0).all()
    around = direct.gradient.untyped_storage().nbytes() // dtype.itemsize - direct.gradient.numel()
    memory = torch.empty(0, dtype=dtype).set_(direct.gradient.untyped_storage())
    assert memory.isnan().sum() == around
    return grad


# ---- the kernel alone ----


@pytest.mark.interpreted
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", SPECS)
def test_gradient_of_each_broadcast_shape(pack: Path, kernel: str, shape: str) -> None:
    spec = SPECS[kernel]
    case = new_case(shape, HEADS, (150, 203), (spec.d, spec.d), dtype=spec.dtype)
    check_dbias(pack, spec, case, SHAPES[shape])


@pytest.mark.interpreted
@pytest.mark.parametrize("sizes", [(1, 1), (1, 300), (300, 1), (63, 65), (65, 63), (129, 129), (300, 333), (128, 256)])
@pytest.mark.parametrize("dims", ["bhqk", "hqk", "qk", "bhk", "hq", ""])
def test_bias_gradient_of_different_lengths(pack: Path, sizes: tuple[int, int], dims: str) -> None:
    spec = SPECS["dbias_sm90_bf16_d64_bias_m128n128s4"]
    check_dbias(pack, spec, new_case(f"{sizes}", (2, 3, 3), sizes, (64, 64)), dims)


@pytest.mark.interpreted
@pytest.mark.parametrize("d", [8, 40, 72, 128])
def test_gradient_with_narrow_head_dims(pack: Path, d: int) -> None:
    spec = SPECS[f"dbias_sm90_fp16_d{64 if d <= 64 else 128}_bias32_m128n64s4"]
    check_dbias(pack, spec, new_case(f"narrow {d}", (1, 2, 1), (100, 80), (d, d), dtype="fp16"), "hqk")


@pytest.mark.interpreted
@pytest.mark.parametrize("kernel", SPECS)
@pytest.mark.parametrize("dims", ["qk", "k", "q"])
def test_gradient_is_bitwise_equal_in_every_execution_order(pack: Path, kernel: str, dims: str) -> None:
    spec = SPECS[kernel]
    case = new_case("repeated", (2, 4, 2), (300, 200), (spec.d, spec.d), dtype=spec.dtype)
    reference, *runs = (check_dbias(pack, spec, case, dims, seed) for seed in range(4))
    for run in runs:
        assert_bitwise_equal(f"{kernel} {dims}", run, reference)


# ---- through F.sdpa ----


def random_normal(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(SEED)) * 2


# Biases that broadcast to (B, Hq, Sq, Sk), for 300 rows and 333 keys. A conversion of the dtype keeps the strides.
BIASES: dict[str, Callable[[], Tensor]] = {
    "by_both": lambda: random_normal(2, 4, 300, 333),
    "by_batch": lambda: random_normal(2, 1, 300, 333),
    "by_head": lambda: random_normal(4, 300, 333),
    "for_all": lambda: random_normal(300, 333),
    "keys": lambda: random_normal(2, 1, 1, 333),
    "keys_of_all": lambda: random_normal(1, 333),
    "rows": lambda: random_normal(2, 4, 300, 1),
    "head": lambda: random_normal(4, 1, 1),
    "one": lambda: random_normal(1, 1),
    "heads_innermost": lambda: random_normal(300, 333, 4).permute(2, 0, 1)[None],
    "transposed": lambda: random_normal(333, 300).mT,
    "odd_offset": lambda: random_normal(300, 344)[:, 7:340],
    "padded": lambda: random_normal(1, 4, 300, 336)[..., :333],
}  # fmt: skip


def masked_copy(bias: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """Return the bias with equal strides and offset in a different dtype; some scores, and one row, are masked out."""
    bias = torch.empty(0, dtype=bias.dtype).set_(bias.untyped_storage()).as_strided(bias.shape, bias.stride(), 0)
    bias[torch.rand(bias.shape, generator=torch.Generator().manual_seed(SEED)) < 0.1] = -math.inf
    if bias.shape[-2] > 70:
        bias[..., 70, :] = -math.inf
    return copy_with_strides(bias, device, dtype)


def check_gradients(
    case: Case, bias: Tensor, device: str, *, leaf_names: str = "qkvb", attn_mask: Tensor | None = None
) -> Tensor:
    """Check the gradients of the requested operands by a backward of the plugin, and return the gradient of the bias.

    Args:
        case: sizes of the call.
        bias: the leaf tensor of the bias.
        device: device of the tensors.
        leaf_names: letters of the operands that need gradients; "b" is the bias.
        attn_mask: the mask of F.sdpa, if different from the leaf.
    """
    inputs = make_inputs(case, device, SEED)
    leaves = [(bias if name == "b" else getattr(inputs, name)).requires_grad_() for name in leaf_names]
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend("fa3"):
        mask = bias if attn_mask is None else attn_mask
        out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=case.gqa, scale=case.scale)
        grads = dict(zip(leaf_names, torch.autograd.grad(out, leaves, inputs.grad_out), strict=True))
    counts = bindings.counters()
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1
    masking_rule, dbias = Masking(bias=bias.detach()), grads.pop("b")
    grads_by_name = {f"d{operand}": gradient for operand, gradient in grads.items()}
    check_gradients_of_case(case.name, case, inputs, grads_by_name, masking_rule, seed=SEED)
    exact_dbias, low_dbias = (
        bias_grad_math(*inputs, inputs.grad_out, scale=case.scale, mask=masking_rule, dtype=dtype)
        for dtype in (torch.float64, case.torch_dtype)
    )
    budget = {"factor": GRAD_FACTOR, "cancelled": float(cancelled_bias_sums(inputs.v, inputs.grad_out, bias))}
    assert_within_budget(f"{case.name} dbias", dbias, exact_dbias, low_dbias, **budget, seed=SEED)
    if attn_mask is None:
        assert dbias.stride() == torch.empty_like(bias).stride()
    return dbias


@pytest.mark.parametrize("wide", [False, True], ids=["16", "fp32"])
@pytest.mark.parametrize("bias", BIASES)
def test_gradient_of_each_bias_layout_through_sdpa(kernels_on: str, bias: str, wide: bool) -> None:
    case = new_case(f"{bias} {wide}", HEADS, (300, 333), (64, 64), dtype=ELEMENTS_16BIT[len(bias) % 2])
    bias_tensor = masked_copy(BIASES[bias](), kernels_on, bias_dtype(case, wide))
    dbias = check_gradients(case, bias_tensor, kernels_on)
    assert_bitwise_equal(case.name, check_gradients(case, bias_tensor, kernels_on), dbias)


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if "dropout" not in s.features], ids=KernelSpec.name)
def test_every_kernel_with_and_without_a_backward(kernels_on: str, spec: KernelSpec) -> None:
    """The gradient of the bias runs together with a backward, and alone."""
    wide = "bias32" in spec.features
    case = new_case(spec.name(), (2, 2, 1), (200, 333), (spec.d, spec.d), dtype=spec.dtype)
    facts = {"bias32" if wide else "bias": 1, "grad": 1, "bias_grad": 1}
    assert spec.name() in plan_of_forced_call(case, backend="fa3", **facts)["gradients"]
    bias = masked_copy(random_normal(200, 333), kernels_on, bias_dtype(case, wide))
    for leaf_names in ("qkvb", "b"):
        check_gradients(case, bias, kernels_on, leaf_names=leaf_names)


@pytest.mark.parametrize("leaf_names", ["b", "qb", "kb", "vb"])
@pytest.mark.parametrize("bias", ["for_all", "heads_innermost"])
def test_subset_of_gradients_with_a_bias_gradient(kernels_on: str, leaf_names: str, bias: str) -> None:
    case = new_case(f"{leaf_names} {bias}", HEADS, (300, 333), (128, 128))
    check_gradients(case, masked_copy(BIASES[bias](), kernels_on, case.torch_dtype), kernels_on, leaf_names=leaf_names)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 300), (300, 1), (63, 65), (65, 63), (129, 65)])
@pytest.mark.parametrize("planes", [(), (3,), (2, 1)])
def test_gradient_of_different_lengths_through_sdpa(
    kernels_on: str, sizes: tuple[int, int], planes: tuple[int, ...]
) -> None:
    case = new_case(f"sizes {sizes} {planes}", (2, 3, 3), sizes, (64, 64))
    check_gradients(case, random_normal(*planes, *sizes).to(kernels_on, case.torch_dtype), kernels_on)


@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_gradient_with_different_softmax_scales(kernels_on: str, scale: float) -> None:
    case = new_case("scales", (2, 2, 2), (70, 136), (64, 64), scale=scale)
    check_gradients(case, random_normal(70, 136).to(kernels_on, case.torch_dtype), kernels_on)


@pytest.mark.parametrize("wide", [False, True], ids=["16", "fp32"])
@pytest.mark.parametrize("keys", [49, 250, 251])
def test_gradient_of_unaligned_rows_is_written_without_copies(kernels_on: str, keys: int, wide: bool) -> None:
    """The gradient is written with the strides of the bias: nothing is copied, nothing else is written."""
    case = new_case(f"rows of {keys}", (2, 4, 4), (129, keys), (64, 64))
    bias = random_normal(4, 129, keys).to(kernels_on, bias_dtype(case, wide))
    check_gradients(case, bias, kernels_on)
    inputs = make_inputs(case, kernels_on, SEED)
    with torch_flashplug.sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=bias.requires_grad_())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.autograd.grad(out, bias, inputs.grad_out)
    assert "aten::copy_" not in {event.key for event in profile.key_averages()}


def test_gradient_of_an_expanded_bias(kernels_on: str) -> None:
    """Autograd sums the gradient of the bias from the gradient of its expanded view."""
    case = new_case("expanded", HEADS, (150, 133), (64, 64), dtype="fp16")
    bias = random_normal(1, 4, 150, 133).to(kernels_on, case.torch_dtype).requires_grad_()
    check_gradients(case, bias, kernels_on, attn_mask=bias.expand(2, 4, 150, 133))


def largest_allocation(work: Callable[[], object]) -> int:
    """Return the size of the largest allocation on the CPU, in bytes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = profile.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("bias", ["for_all", "keys_of_all", "heads_innermost"])
def test_backward_memory_follows_the_size_of_the_bias(kernels_on: str, bias: str) -> None:
    """No tensor has an element for each score if the bias is broadcast."""
    case = new_case("memory", (8, 4, 4), (300, 333), (64, 64))
    bias_tensor = masked_copy(BIASES[bias](), kernels_on, case.torch_dtype).requires_grad_()
    inputs = make_inputs(case, kernels_on, SEED)
    with torch_flashplug.sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=bias_tensor)

        def backward() -> None:
            bindings.counters(reset=True)
            torch.autograd.grad(out, bias_tensor, inputs.grad_out)
            assert bindings.counters()["ours_bwd"] == 1

        if kernels_on == "cpu":
            num_bytes = largest_allocation(backward)
        else:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            backward()
            num_bytes = torch.cuda.max_memory_allocated() - before
    scores = case.B * case.Hq * case.Sq * case.Sk * case.torch_dtype.itemsize
    assert num_bytes < scores / 2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("bias", ["for_all", "heads_innermost", "keys"])
def test_compiled_gradient_has_equal_bits_and_strides(kernels_on: str, bias: str) -> None:
    case = new_case(f"graph {bias}", HEADS, (300, 333), (64, 64))
    bias_tensor = masked_copy(BIASES[bias](), kernels_on, case.torch_dtype).requires_grad_()
    inputs = make_inputs(case, kernels_on, SEED)
    leaves = [tensor.requires_grad_() for tensor in (*inputs, bias_tensor)]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    grads = []
    with torch_flashplug.sdpa_backend("fa3"):
        for run in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
            bindings.counters(reset=True)
            grads.append(torch.autograd.grad(run(*leaves), leaves, inputs.grad_out)[3])
            assert bindings.counters()["ours_bwd"] == 1
    assert_bitwise_equal(case.name, grads[1], grads[0])
    assert grads[1].stride() == grads[0].stride() == torch.empty_like(bias_tensor).stride()
