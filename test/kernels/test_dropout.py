"""Dropout through F.sdpa, on a GPU or interpreted.

Each kernel of both directions must keep exactly the scores kept by torch_flashplug::dropout_mask, bit for bit. Results
and gradients are compared with fp64 under equal masks. The masks must pass statistical tests of randomness.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from deterministic import deterministic_gradients
from forced_splits import plan_of_forced_call
from fp64_gradients import NAMES, check_gradients_of_case
from masked_calls import BACKENDS, HEADS, SEED
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import dropout_reference
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.dtypes import ELEMENTS_16BIT
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import (
    Case,
    Inputs,
    Masking,
    assert_bitwise_equal,
    assert_within_budget,
    make_inputs,
    new_case,
    oracle,
    plain,
)

DROPPED = [
    spec
    for arch in BACKENDS
    for spec in kernel_table.specs(arch)
    if "dropout" in spec.features and spec.kind != "dbias"
]
bits_of = torch.ops.torch_flashplug.dropout_mask


# ---- the bits ----

SHARES = (0.1, 0.3, 0.5, 0.123)
DRAWS = (4, 8, 640, 512)  # 1.05e7


def deviations(bits: Tensor, share: float) -> Tensor:
    """Return the deviation of the mean over all dims but the first, in standard deviations of independent draws."""
    numbers = bits[0].numel()
    return (bits.flatten(1).double().mean(1) - share) / math.sqrt(share * (1 - share) / numbers)


@pytest.mark.parametrize("p", SHARES)
def test_share_of_kept_scores_is_exact(p: float) -> None:
    """The share holds for all bits, and for each position in a word.

    A threshold of eight bits would be off by up to 1 / 512.
    """
    bits, share = bits_of(torch.tensor(SEED), *DRAWS, p), 1 - p
    assert abs(deviations(bits[None], share)) < 4
    places = bits.unflatten(2, (-1, 16)).unflatten(-1, (-1, 16)).permute(3, 5, 0, 1, 2, 4).flatten(0, 1)
    assert deviations(places, share).abs().max() < 5  # of 256
    for lines in (bits.flatten(0, 2), bits.movedim(3, 0), bits.flatten(0, 1)):  # queries, keys, heads
        line_deviations = deviations(lines, share)
        assert line_deviations.abs().max() < 5.5 and abs(line_deviations.square().mean() - 1) < 4.5 * math.sqrt(
            2 / len(line_deviations)
        )


@pytest.mark.parametrize("p", SHARES)
def test_neighboring_scores_are_uncorrelated(p: float) -> None:
    """Correlations of 1e7 pairs: in rows, columns, both, within a word, in the next word, in the next head."""
    bits = bits_of(torch.tensor(SEED + 1), *DRAWS, p).float() - (1 - p)
    for head, row, key in itertools.product((0, 1), (0, 1, 8, 16, 64), (0, 1, 2, 8, 16, 64)):
        if head or row or key:
            B, Hq, Sq, Sk = DRAWS
            bits_a, bits_b = bits[:, : Hq - head, : Sq - row, : Sk - key], bits[:, head:, row:, key:]
            covariance = (bits_a * bits_b).double().mean().item()
            assert abs(covariance) / (p * (1 - p)) * math.sqrt(bits_a.numel()) < 4.5, (head, row, key)


@pytest.mark.parametrize("p", SHARES)
def test_kept_scores_per_block_have_binomial_variance(p: float) -> None:
    """A block of 16 x 16 scores uses eight words; its number of kept scores of 256 has the variance of the binomial."""
    bits = bits_of(torch.tensor(SEED + 2), *DRAWS, p)
    blocks = bits.unflatten(2, (-1, 16)).unflatten(-1, (-1, 16)).sum((3, 5)).double()
    kurtosis = (1 - 6 * p * (1 - p)) / (256 * p * (1 - p))
    expected = 256 * p * (1 - p)
    assert abs(blocks.var().item() / expected - 1) < 4.5 * math.sqrt((2 + kurtosis) / blocks.numel())


def test_different_seeds_are_uncorrelated() -> None:
    """Some seeds differ only in the upper halves."""
    seeds = [0, 1, 2, 1 << 31, 1 << 32, 1 << 33, (1 << 63) - 1]
    drawn = [bits_of(torch.tensor(seed), 1, 2, 512, 512, 0.5).float() * 2 - 1 for seed in seeds]
    for bits_a, bits_b in itertools.combinations(drawn, 2):
        assert abs((bits_a * bits_b).mean().item()) < 4.5 / math.sqrt(bits_a.numel())


@pytest.mark.parametrize("p, is_kept", [(1.0, False), (0.0, True), (1e-9, True)])
def test_probabilities_near_zero_and_one_keep_all_or_no_scores(p: float, is_kept: bool) -> None:
    assert (bits_of(torch.tensor(SEED), 2, 2, 300, 300, p) == is_kept).all()


def test_smaller_call_draws_the_bits_of_the_larger_call() -> None:
    full_bits = bits_of(torch.tensor(SEED), 2, 3, 333, 300, 0.3)
    assert torch.equal(bits_of(torch.tensor([SEED]), 1, 2, 65, 129, 0.3), full_bits[:1, :2, :65, :129])


# Known answers of Random123 for philox4x32 with ten rounds: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_philox_matches_known_answers(counter: str, key: str, result: str) -> None:
    counter, key, result = ([torch.tensor(int(word, 16)) for word in words.split()] for words in (counter, key, result))
    assert list(dropout_reference._philox(tuple(counter), tuple(key))) == result


# ---- kernels ----


def next_seed(device: str) -> Tensor:
    """Return the seed that the next call draws, and restore the generator."""
    torch.manual_seed(SEED)
    seed = torch.empty((), dtype=torch.int64, device=device).random_()
    torch.manual_seed(SEED)
    return seed


@contextlib.contextmanager
def assert_kernels_run(*directions: str, order: bool = False, backend: str = "fa3") -> Iterator[None]:
    """Check that exactly one call runs on plugin kernels of the given directions."""
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(backend), deterministic_gradients(order):
        yield
    counts = bindings.counters()
    assert {name: count for name, count in counts.items() if count and not name.startswith("routed")} == dict.fromkeys(
        directions, 1
    )


def random_mask(spec: KernelSpec, Sq: int, Sk: int, device: str) -> Tensor | None:
    if "mask" not in spec.features:
        return None
    return (torch.rand(2, 1, Sq, Sk, generator=torch.Generator().manual_seed(SEED)) < 0.7).to(device)


def sdpa_settings(spec: KernelSpec, p: float, mask: Tensor | None) -> dict[str, object]:
    return {"dropout_p": p, "attn_mask": mask, "is_causal": "causal" in spec.features, "enable_gqa": True}


def visible_scores(spec: KernelSpec, shape: tuple[int, ...], mask: Tensor | None, device: str) -> Tensor:
    visible = torch.ones(shape, dtype=torch.bool, device=device)
    visible = visible.tril() if "causal" in spec.features else visible
    return visible if mask is None else visible & mask


def dtype_of(spec: KernelSpec) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[spec.dtype]


@pytest.mark.parametrize("spec", [spec for spec in DROPPED if not spec.is_backward], ids=KernelSpec.name)
def test_every_forward_keeps_the_scores_of_the_dropout_mask_op(kernels_on: str, spec: KernelSpec) -> None:
    """All scores are equal, and each value encodes its key, so the output shows the kept bits."""
    (B, Hq, Hkv), Sq, Sk, p = HEADS, 150, 200, 0.3
    q = torch.zeros(B, Hq, Sq, spec.d, dtype=dtype_of(spec), device=kernels_on)
    k = torch.randn(B, Hkv, Sk, spec.d, device=kernels_on).to(q.dtype)
    mask = random_mask(spec, Sq, Sk, kernels_on)
    kept_scores = bits_of(next_seed(kernels_on), B, Hq, Sq, Sk, p) & visible_scores(
        spec, (B, Hq, Sq, Sk), mask, kernels_on
    )
    for first_key in range(0, Sk, spec.dv):
        v = torch.zeros(B, Hkv, Sk, spec.dv, dtype=q.dtype, device=kernels_on)
        keys = torch.arange(first_key, min(first_key + spec.dv, Sk))
        v[:, :, keys, keys - first_key] = 1.0
        torch.manual_seed(SEED)
        with assert_kernels_run("ours_fwd", backend=BACKENDS[spec.arch]):
            out = F.scaled_dot_product_attention(q, k, v, **sdpa_settings(spec, p, mask))
        assert torch.equal(out[..., : len(keys)] != 0, kept_scores[..., keys])


@pytest.mark.parametrize("spec", [spec for spec in DROPPED if spec.is_backward], ids=KernelSpec.name)
def test_every_backward_keeps_the_scores_of_its_forward(kernels_on: str, spec: KernelSpec) -> None:
    """All scores are equal, so dV and dQ show the kept bits.

    For dV, dO has a column for each of some queries. For dQ, dP is 1 everywhere and K has a column for each of some
    keys; a kept dP is above the mean, a dropped dP below.
    """
    B, Hq, Sq, Sk, p, device = 2, 2, 150, 200, 0.3, kernels_on
    # needed for the plan to choose the kernel, or a split backward
    order = spec.is_deterministic or (spec.is_split_backward and "mask" in spec.features)
    has_all_gradients, backend = order or not spec.is_split_backward, BACKENDS[spec.arch]
    if has_all_gradients:
        case = new_case(spec.name(), (B, Hq, Hq), (Sq, Sk), (spec.d, spec.dv), dtype=spec.dtype)
        needed = dict.fromkeys(spec.features - {"dropout"}, 1)
        facts = needed | {"dropout_p": p, "grad": 1, "deterministic": int(order)}
        assert plan_of_forced_call(case, backend=backend, **facts)["gradients"] == spec.name()
    mask = random_mask(spec, Sq, Sk, device)
    visible = visible_scores(spec, (B, Hq, Sq, Sk), mask, device)
    kept_scores = bits_of(next_seed(device), B, Hq, Sq, Sk, p) & visible
    q, k, v, grad = (
        torch.zeros(B, Hq, S, D, dtype=dtype_of(spec), device=device)
        for S, D in ((Sq, spec.d), (Sk, spec.d), (Sk, spec.dv), (Sq, spec.dv))
    )

    def gradient(name: str, split_leaves: str) -> Tensor:
        leaf_names = "qkv" if has_all_gradients else split_leaves
        leaves = {
            operand: tensor.detach().requires_grad_(operand in leaf_names) for operand, tensor in zip("qkv", (q, k, v))
        }
        torch.manual_seed(SEED)
        with assert_kernels_run("ours_fwd", "ours_bwd", order=order, backend=backend):
            out = F.scaled_dot_product_attention(*leaves.values(), **sdpa_settings(spec, p, mask))
            grads = torch.autograd.grad(out, [leaves[operand] for operand in leaf_names], grad)
        return grads[leaf_names.index(name)]

    rows, keys = torch.arange(64, min(64 + spec.dv, Sq)), torch.arange(128, min(128 + spec.d, Sk))
    grad[:, :, rows, rows - 64] = 1.0
    assert torch.equal(gradient("v", "kv")[..., : len(rows)].mT != 0, kept_scores[:, :, rows])
    grad.zero_()
    grad[..., 0] = v[..., 0] = 1.0
    k[:, :, keys, keys - 128] = 1.0
    dq = gradient("q", "q")[..., : len(keys)]
    share = kept_scores.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)
    # with a very small or large share, no dP differs from the mean
    is_informative = (visible & (share > 0.02) & (share < 0.98))[..., keys]
    assert is_informative.any() and torch.equal((dq > 0)[is_informative], kept_scores[..., keys][is_informative])


def reference_masking(case: Case, p: float, mask: Tensor | None, device: str) -> Masking:
    kept_scores = bits_of(next_seed(device), case.B, case.Hq, case.Sq, case.Sk, p)
    return Masking(
        int(case.causal), bias=mask, kept=kept_scores, kept_share=dropout_reference.keep_probability(p) or 1.0
    )


def rounded_outputs(case: Case, inputs: Inputs, out: Tensor) -> dict[str, float]:
    """Return the error of gradients for a query with a single key, in units of fp32's epsilon (as cancelled_sums).

    The exact dS is 0, because dP equals rowsum(dO * O). With dropout, O = V / (1 - p) is rounded to the dtype of the
    inputs; without dropout, O is V.
    """
    unit = torch.finfo(case.torch_dtype).eps / 2 / torch.finfo(torch.float32).eps
    error = unit * float((inputs.grad_out * out).abs().sum(-1).max()) * case.D**-0.5
    q, k = (float(tensor.detach().abs().max()) for tensor in (inputs.q, inputs.k))
    return {"dq": error * k, "dk": error * q * case.Sq * case.Hq / case.Hkv, "dv": 0.0}


def check_call(
    case: Case, p: float, device: str, mask: Tensor | None = None, *, order: bool = False, backend: str = "fa3"
) -> Inputs:
    """Check output and gradients against fp64."""
    inputs, masking_rule = make_inputs(case, device, SEED), reference_masking(case, p, mask, device)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    with assert_kernels_run("ours_fwd", "ours_bwd", order=order, backend=backend):
        out = F.scaled_dot_product_attention(
            *inputs, attn_mask=mask, dropout_p=p, is_causal=case.causal, enable_gqa=case.gqa
        )
        grads = torch.autograd.grad(out, leaves, inputs.grad_out)
    exact, low = (reference(case, inputs, masking_rule).out for reference in (oracle, plain))
    assert_within_budget(case.name, out.detach(), exact, low, seed=SEED)
    cancelled = rounded_outputs(case, inputs, out.detach()) if case.Sk == 1 else None
    grads_by_name = dict(zip(NAMES, grads, strict=True))
    check_gradients_of_case(case.name, case, inputs, grads_by_name, masking_rule, cancelled=cancelled, seed=SEED)
    if p == 1.0:
        assert all((tensor == 0).all() for tensor in (out, *grads))
    return inputs


@pytest.mark.parametrize("p", [0.1, 0.5, 0.123, 1.0])
@pytest.mark.parametrize("sizes", [(1, 1), (63, 65), (129, 63), (65, 129), (200, 333)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_dropout_outputs_and_gradients_match_fp64(
    kernels_on: str, d: int, causal: bool, sizes: tuple[int, int], p: float
) -> None:
    tags = ("causal",) * causal
    case = new_case(f"{d} {sizes} {p}", (2, 2, 1), sizes, (d, d), *tags, dtype=ELEMENTS_16BIT[len(str(p)) % 2])
    check_call(case, p, kernels_on, order=sizes == (200, 333))


@pytest.mark.parametrize("p, sizes", [(0.1, (1, 1)), (0.123, (129, 63)), (1.0, (65, 129)), (0.5, (150, 200))])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_dropout_outputs_and_gradients_on_sm80_kernels(
    kernels_on: str, d: int, causal: bool, p: float, sizes: tuple[int, int]
) -> None:  # fmt: skip
    case = new_case(f"{d} {sizes} {p}", (2, 2, 1), sizes, (d, d), *("causal",) * causal, dtype=ELEMENTS_16BIT[causal])
    check_call(case, p, kernels_on, backend="fa2")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(72, 72), (96, 40), (192, 128), (256, 256)])
def test_dropout_with_different_head_dims(kernels_on: str, dims: tuple[int, int], causal: bool) -> None:
    case = new_case(f"{dims}", (1, 2, 2), (150, 140), dims, *("causal",) * causal, dtype=ELEMENTS_16BIT[causal])
    check_call(case, 0.2, kernels_on)


@pytest.mark.parametrize(
    "d, order, backend",
    [*((d, order, "fa3") for d in (64, 128, 256) for order in (False, True)), *((d, False, "fa2") for d in (64, 128))],
)
def test_dropout_with_a_bool_mask(kernels_on: str, d: int, order: bool, backend: str) -> None:
    case = new_case(f"masked {d}", HEADS, (200, 300), (d, d), dtype=ELEMENTS_16BIT[order])
    mask = torch.rand(2, 1, 200, 300, generator=torch.Generator().manual_seed(SEED)) < 0.6
    mask[..., 65, :] = mask[..., 128:, 128:256] = False
    mask[..., :64, 128:256] = True
    check_call(case, 0.2, kernels_on, mask.to(kernels_on), order=order, backend=backend)


@pytest.mark.parametrize("wide", [False, True], ids=["16", "fp32"])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_dropout_with_a_bias(kernels_on: str, d: int, order: bool, wide: bool) -> None:
    """The gradient of the bias is tested in test_bias_gradient."""
    case = new_case(f"biased {d}", HEADS, (200, 300), (d, d), dtype=ELEMENTS_16BIT[order])
    bias = torch.randn(4, 200, 300, generator=torch.Generator().manual_seed(SEED)) * 2
    bias[..., 65, :] = bias[..., 128:, 128:256] = -math.inf
    check_call(case, 0.2, kernels_on, bias.to(kernels_on, torch.float32 if wide else case.torch_dtype), order=order)


def test_decode_shape_with_dropout_runs_a_forward_kernel(kernels_on: str) -> None:
    """Decode kernels have no dropout."""
    case = new_case("few", (2, 4, 1), (1, 300), (64, 64))
    inputs, rule = make_inputs(case, kernels_on, SEED), reference_masking(case, 0.4, None, kernels_on)
    with assert_kernels_run("ours_fwd"):
        out = F.scaled_dot_product_attention(*inputs, dropout_p=0.4, enable_gqa=True)
    exact, low = (reference(case, inputs, rule).out for reference in (oracle, plain))
    assert_within_budget("few", out, exact, low)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_dropout_with_nonpositive_softmax_scales(kernels_on: str, scale: float) -> None:
    case = new_case(f"scale {scale}", (1, 2, 2), (130, 70), (64, 64), scale=scale)
    inputs, rule = make_inputs(case, kernels_on, SEED), reference_masking(case, 0.4, None, kernels_on)
    with assert_kernels_run("ours_fwd"):
        out = F.scaled_dot_product_attention(*inputs, dropout_p=0.4, scale=scale)
    exact, low = (reference(case, inputs, rule).out for reference in (oracle, plain))
    assert_within_budget(case.name, out, exact, low)


def test_dropout_follows_the_random_generator(kernels_on: str) -> None:
    """Two calls differ; an equal state of the generator gives an equal call."""
    case = new_case("state", (1, 2, 2), (130, 70), (64, 64))
    inputs = make_inputs(case, kernels_on, SEED)

    def attend() -> Tensor:
        with assert_kernels_run("ours_fwd"):
            return F.scaled_dot_product_attention(*inputs, dropout_p=0.5)

    torch.manual_seed(SEED)
    first_out, second_out = attend(), attend()
    assert not torch.equal(first_out, second_out)
    torch.manual_seed(SEED)
    for index, expected in enumerate((first_out, second_out)):
        assert_bitwise_equal(f"call {index}", attend(), expected)
