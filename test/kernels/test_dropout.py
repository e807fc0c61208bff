"""Dropout through F.sdpa, on a GPU or interpreted: which scores are kept, bit for bit as torch_flashplug::dropout_mask
says, in every kernel of both directions; numbers and gradients against fp64 with those; and that what it says is as
random as it has to be.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from orders import in_order
from splits import planned
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import dropout_reference
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.dtypes import WHOLE
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import (
    Case,
    Inputs,
    Masking,
    assert_bitwise_equal,
    assert_within_budget,
    attention_math,
    make_inputs,
    new_case,
    oracle_grads,
    plain_grads,
)
from torch_flashplug.testing.budget import GRAD_FACTOR, cancelled_sums

SEED = 20261124
HEADS = (2, 4, 2)  # B, Hq, Hkv
BACKENDS = {90: "fa3", 80: "fa2"}
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
    """Of the mean over all dims but the first, in standard deviations of so many independent draws."""
    numbers = bits[0].numel()
    return (bits.flatten(1).double().mean(1) - share) / math.sqrt(share * (1 - share) / numbers)


@pytest.mark.parametrize("p", SHARES)
def test_the_share_is_exact(p: float) -> None:
    """Of all, and of every place in a word alone, where a threshold of eight digits would be off by up to 1 / 512."""
    bits, share = bits_of(torch.tensor(SEED), *DRAWS, p), 1 - p
    assert abs(deviations(bits[None], share)) < 4
    places = bits.unflatten(2, (-1, 16)).unflatten(-1, (-1, 16)).permute(3, 5, 0, 1, 2, 4).flatten(0, 1)
    assert deviations(places, share).abs().max() < 5  # of 256
    for lines in (bits.flatten(0, 2), bits.movedim(3, 0), bits.flatten(0, 1)):  # queries, keys, heads
        found = deviations(lines, share)
        assert found.abs().max() < 5.5 and abs(found.square().mean() - 1) < 4.5 * math.sqrt(2 / len(found))


@pytest.mark.parametrize("p", SHARES)
def test_neighbours_know_nothing_of_each_other(p: float) -> None:
    """In rows, in columns, both, in the same word, in the next one, in the next head: correlations of 1e7 pairs."""
    bits = bits_of(torch.tensor(SEED + 1), *DRAWS, p).float() - (1 - p)
    for head, row, key in itertools.product((0, 1), (0, 1, 8, 16, 64), (0, 1, 2, 8, 16, 64)):
        if head or row or key:
            B, Hq, Sq, Sk = DRAWS
            one, other = bits[:, : Hq - head, : Sq - row, : Sk - key], bits[:, head:, row:, key:]
            covariance = (one * other).double().mean().item()
            assert abs(covariance) / (p * (1 - p)) * math.sqrt(one.numel()) < 4.5, (head, row, key)


@pytest.mark.parametrize("p", SHARES)
def test_blocks_spread_as_independent_draws_do(p: float) -> None:
    """16 x 16 scores are eight words: how many of 256 are kept has the binomial's variance."""
    bits = bits_of(torch.tensor(SEED + 2), *DRAWS, p)
    blocks = bits.unflatten(2, (-1, 16)).unflatten(-1, (-1, 16)).sum((3, 5)).double()
    kurtosis = (1 - 6 * p * (1 - p)) / (256 * p * (1 - p))
    expected = 256 * p * (1 - p)
    assert abs(blocks.var().item() / expected - 1) < 4.5 * math.sqrt((2 + kurtosis) / blocks.numel())


def test_seeds_are_apart() -> None:
    """Also those that differ in their upper halves alone."""
    seeds = [0, 1, 2, 1 << 31, 1 << 32, 1 << 33, (1 << 63) - 1]
    drawn = [bits_of(torch.tensor(seed), 1, 2, 512, 512, 0.5).float() * 2 - 1 for seed in seeds]
    for one, other in itertools.combinations(drawn, 2):
        assert abs((one * other).mean().item()) < 4.5 / math.sqrt(one.numel())


@pytest.mark.parametrize("p, kept", [(1.0, False), (0.0, True), (1e-9, True)])
def test_certain_draws(p: float, kept: bool) -> None:
    assert (bits_of(torch.tensor(SEED), 2, 2, 300, 300, p) == kept).all()


def test_a_part_of_a_call_draws_what_all_of_it_does() -> None:
    whole = bits_of(torch.tensor(SEED), 2, 3, 333, 300, 0.3)
    assert torch.equal(bits_of(torch.tensor([SEED]), 1, 2, 65, 129, 0.3), whole[:1, :2, :65, :129])


# Of Random123's known answers, philox4x32 with ten rounds: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_philox_is_philox(counter: str, key: str, result: str) -> None:
    counter, key, result = ([torch.tensor(int(word, 16)) for word in words.split()] for words in (counter, key, result))
    assert list(dropout_reference._philox(tuple(counter), tuple(key))) == result


# ---- kernels ----


def next_seed(device: str) -> Tensor:
    """That the next call draws; puts the generator where it was."""
    torch.manual_seed(SEED)
    seed = torch.empty((), dtype=torch.int64, device=device).random_()
    torch.manual_seed(SEED)
    return seed


@contextlib.contextmanager
def ours(*ways: str, order: bool = False, backend: str = "fa3") -> Iterator[None]:
    """One call, by kernels of these directions."""
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(backend), in_order(order):
        yield
    counts = bindings.counters()
    assert {name: count for name, count in counts.items() if count and not name.startswith("routed")} == dict.fromkeys(
        ways, 1
    )


def mask_of(spec: KernelSpec, Sq: int, Sk: int, device: str) -> Tensor | None:
    if "mask" not in spec.features:
        return None
    return (torch.rand(2, 1, Sq, Sk, generator=torch.Generator().manual_seed(SEED)) < 0.7).to(device)


def settings(spec: KernelSpec, p: float, mask: Tensor | None) -> dict[str, object]:
    return {"dropout_p": p, "attn_mask": mask, "is_causal": "causal" in spec.features, "enable_gqa": True}


def seen(spec: KernelSpec, shape: tuple[int, ...], mask: Tensor | None, device: str) -> Tensor:
    visible = torch.ones(shape, dtype=torch.bool, device=device)
    visible = visible.tril() if "causal" in spec.features else visible
    return visible if mask is None else visible & mask


def dtype_of(spec: KernelSpec) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[spec.dtype]


def ids(spec: KernelSpec) -> str:
    return spec.name()


@pytest.mark.parametrize("spec", [spec for spec in DROPPED if not spec.is_backward], ids=ids)
def test_every_forward_keeps_what_the_op_says(kernels_on: str, spec: KernelSpec) -> None:
    """Scores are all the same, and every value says which key it is of: the output shows the bits."""
    (B, Hq, Hkv), Sq, Sk, p = HEADS, 150, 200, 0.3
    q = torch.zeros(B, Hq, Sq, spec.d, dtype=dtype_of(spec), device=kernels_on)
    k = torch.randn(B, Hkv, Sk, spec.d, device=kernels_on).to(q.dtype)
    mask = mask_of(spec, Sq, Sk, kernels_on)
    kept = bits_of(next_seed(kernels_on), B, Hq, Sq, Sk, p) & seen(spec, (B, Hq, Sq, Sk), mask, kernels_on)
    for first in range(0, Sk, spec.dv):
        v = torch.zeros(B, Hkv, Sk, spec.dv, dtype=q.dtype, device=kernels_on)
        keys = torch.arange(first, min(first + spec.dv, Sk))
        v[:, :, keys, keys - first] = 1.0
        torch.manual_seed(SEED)
        with ours("ours_fwd", backend=BACKENDS[spec.arch]):
            out = F.scaled_dot_product_attention(q, k, v, **settings(spec, p, mask))
        assert torch.equal(out[..., : len(keys)] != 0, kept[..., keys])


def configs_dtype(spec: KernelSpec) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[spec.dtype]


@pytest.mark.parametrize("spec", [spec for spec in DROPPED if spec.is_backward], ids=ids)
def test_every_backward_keeps_what_its_forward_did(kernels_on: str, spec: KernelSpec) -> None:
    """Scores are all the same. With a column of dO for each of some queries, dV shows whose P they kept; with dP = 1
    everywhere and a column of K for each of some keys, dQ shows whose dP they kept: above the mean, or below.
    """
    B, Hq, Sq, Sk, p, device = 2, 2, 150, 200, 0.3, kernels_on
    order = spec.in_order or (spec.in_parts and "mask" in spec.features)  # what makes the plan choose it, or parts do
    every, backend = order or not spec.in_parts, BACKENDS[spec.arch]
    if every:
        case = new_case(spec.name(), (B, Hq, Hq), (Sq, Sk), (spec.d, spec.dv), dtype=spec.dtype)
        needed = dict.fromkeys(spec.features - {"dropout"}, 1)
        facts = needed | {"dropout_p": p, "grad": 1, "deterministic": int(order)}
        assert planned(case, backend=backend, **facts)["gradients"] == spec.name()
    mask = mask_of(spec, Sq, Sk, device)
    visible = seen(spec, (B, Hq, Sq, Sk), mask, device)
    kept = bits_of(next_seed(device), B, Hq, Sq, Sk, p) & visible
    q, k, v, grad = (
        torch.zeros(B, Hq, S, D, dtype=dtype_of(spec), device=device)
        for S, D in ((Sq, spec.d), (Sk, spec.d), (Sk, spec.dv), (Sq, spec.dv))
    )

    def gradient(name: str, alone: str) -> Tensor:
        wanted = "qkv" if every else alone
        leaves = {one: tensor.detach().requires_grad_(one in wanted) for one, tensor in zip("qkv", (q, k, v))}
        torch.manual_seed(SEED)
        with ours("ours_fwd", "ours_bwd", order=order, backend=backend):
            out = F.scaled_dot_product_attention(*leaves.values(), **settings(spec, p, mask))
            found = torch.autograd.grad(out, [leaves[one] for one in wanted], grad)
        return found[wanted.index(name)]

    rows, keys = torch.arange(64, min(64 + spec.dv, Sq)), torch.arange(128, min(128 + spec.d, Sk))
    grad[:, :, rows, rows - 64] = 1.0
    assert torch.equal(gradient("v", "kv")[..., : len(rows)].mT != 0, kept[:, :, rows])
    grad.zero_()
    grad[..., 0] = v[..., 0] = 1.0
    k[:, :, keys, keys - 128] = 1.0
    dq = gradient("q", "q")[..., : len(keys)]
    share = kept.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)
    told = (visible & (share > 0.02) & (share < 0.98))[..., keys]  # else no dP differs from the mean
    assert told.any() and torch.equal((dq > 0)[told], kept[..., keys][told])


def masking(case: Case, p: float, mask: Tensor | None, device: str) -> Masking:
    kept = bits_of(next_seed(device), case.B, case.Hq, case.Sq, case.Sk, p)
    return Masking(int(case.causal), bias=mask, kept=kept, kept_share=dropout_reference.share_of(p) or 1.0)


def rounded_outputs(case: Case, inputs: Inputs, out: Tensor) -> dict[str, float]:
    """A query's only key has dS = 0, as dP and rowsum(dO * O) are the same; but O = V / (1 - p) was rounded to the
    inputs' dtype, unlike without dropout, where it is V: in units of fp32's epsilon, as cancelled_sums.
    """
    unit = torch.finfo(case.torch_dtype).eps / 2 / torch.finfo(torch.float32).eps
    error = unit * float((inputs.grad_out * out).abs().sum(-1).max()) * case.D**-0.5
    q, k = (float(tensor.detach().abs().max()) for tensor in (inputs.q, inputs.k))
    return {"dq": error * k, "dk": error * q * case.Sq * case.Hq / case.Hkv, "dv": 0.0}


def check(
    case: Case, p: float, device: str, mask: Tensor | None = None, *, order: bool = False, backend: str = "fa3"
) -> Inputs:
    """Output and gradients against fp64."""
    inputs, rule = make_inputs(case, device, SEED), masking(case, p, mask, device)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    with ours("ours_fwd", "ours_bwd", order=order, backend=backend):
        out = F.scaled_dot_product_attention(
            *inputs, attn_mask=mask, dropout_p=p, is_causal=case.causal, enable_gqa=case.gqa
        )
        found = torch.autograd.grad(out, leaves, inputs.grad_out)
    exact, low = (
        attention_math(*inputs, mask=rule, dtype=dtype).out for dtype in (torch.float64, case.torch_dtype)
    )  # fmt: skip
    assert_within_budget(case.name, out.detach(), exact, low, seed=SEED)
    exact, low = (of(case, inputs, rule) for of in (oracle_grads, plain_grads))
    cancelled = cancelled_sums(*inputs, inputs.grad_out, case.scale)
    if case.Sk == 1:
        cancelled = rounded_outputs(case, inputs, out.detach())
    for name, *numbers in zip(("dq", "dk", "dv"), found, exact, low, strict=True):
        budget = {"factor": GRAD_FACTOR, "cancelled": float(cancelled[name])}
        assert_within_budget(f"{case.name} {name}", *numbers, **budget, seed=SEED)
    if p == 1.0:
        assert all((tensor == 0).all() for tensor in (out, *found))
    return inputs


@pytest.mark.parametrize("p", [0.1, 0.5, 0.123, 1.0])
@pytest.mark.parametrize("sizes", [(1, 1), (63, 65), (129, 63), (65, 129), (200, 333)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_numbers(kernels_on: str, d: int, causal: bool, sizes: tuple[int, int], p: float) -> None:
    tags = ("causal",) * causal
    case = new_case(f"{d} {sizes} {p}", (2, 2, 1), sizes, (d, d), *tags, dtype=WHOLE[len(str(p)) % 2])
    check(case, p, kernels_on, order=sizes == (200, 333))


@pytest.mark.parametrize("p, sizes", [(0.1, (1, 1)), (0.123, (129, 63)), (1.0, (65, 129)), (0.5, (150, 200))])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_numbers_of_every_gpus_kernels(
    kernels_on: str, d: int, causal: bool, p: float, sizes: tuple[int, int]
) -> None:  # fmt: skip
    case = new_case(f"{d} {sizes} {p}", (2, 2, 1), sizes, (d, d), *("causal",) * causal, dtype=WHOLE[causal])
    check(case, p, kernels_on, backend="fa2")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(72, 72), (96, 40), (192, 128), (256, 256)])
def test_other_head_dims(kernels_on: str, dims: tuple[int, int], causal: bool) -> None:
    case = new_case(f"{dims}", (1, 2, 2), (150, 140), dims, *("causal",) * causal, dtype=WHOLE[causal])
    check(case, 0.2, kernels_on)


@pytest.mark.parametrize(
    "d, order, backend",
    [*((d, order, "fa3") for d in (64, 128, 256) for order in (False, True)), *((d, False, "fa2") for d in (64, 128))],
)
def test_beside_a_mask(kernels_on: str, d: int, order: bool, backend: str) -> None:
    case = new_case(f"masked {d}", HEADS, (200, 300), (d, d), dtype=WHOLE[order])
    mask = torch.rand(2, 1, 200, 300, generator=torch.Generator().manual_seed(SEED)) < 0.6
    mask[..., 65, :] = mask[..., 128:, 128:256] = False
    mask[..., :64, 128:256] = True
    check(case, 0.2, kernels_on, mask.to(kernels_on), order=order, backend=backend)


@pytest.mark.parametrize("wide", [False, True], ids=["16", "fp32"])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_beside_a_bias(kernels_on: str, d: int, order: bool, wide: bool) -> None:
    """Its own gradient: test_bias_gradient."""
    case = new_case(f"biased {d}", HEADS, (200, 300), (d, d), dtype=WHOLE[order])
    bias = torch.randn(4, 200, 300, generator=torch.Generator().manual_seed(SEED)) * 2
    bias[..., 65, :] = bias[..., 128:, 128:256] = -math.inf
    check(case, 0.2, kernels_on, bias.to(kernels_on, torch.float32 if wide else case.torch_dtype), order=order)


def test_few_rows_are_a_forward(kernels_on: str) -> None:
    """Decode's kernels have no dropout."""
    case = new_case("few", (2, 4, 1), (1, 300), (64, 64))
    inputs, rule = make_inputs(case, kernels_on, SEED), masking(case, 0.4, None, kernels_on)
    with ours("ours_fwd"):
        out = F.scaled_dot_product_attention(*inputs, dropout_p=0.4, enable_gqa=True)
    exact, low = (attention_math(*inputs, mask=rule, dtype=dtype).out for dtype in (torch.float64, case.torch_dtype))
    assert_within_budget("few", out, exact, low)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_are_not_positive(kernels_on: str, scale: float) -> None:
    case = new_case(f"scale {scale}", (1, 2, 2), (130, 70), (64, 64), scale=scale)
    inputs, rule = make_inputs(case, kernels_on, SEED), masking(case, 0.4, None, kernels_on)
    with ours("ours_fwd"):
        out = F.scaled_dot_product_attention(*inputs, dropout_p=0.4, scale=scale)
    exact, low = (
        attention_math(*inputs, scale=scale, mask=rule, dtype=dtype).out for dtype in (torch.float64, case.torch_dtype)
    )
    assert_within_budget(case.name, out, exact, low)


def test_draws_follow_the_generator(kernels_on: str) -> None:
    """Two calls differ, the same state of the generator gives the same call."""
    case = new_case("state", (1, 2, 2), (130, 70), (64, 64))
    inputs = make_inputs(case, kernels_on, SEED)

    def attend() -> Tensor:
        with ours("ours_fwd"):
            return F.scaled_dot_product_attention(*inputs, dropout_p=0.5)

    torch.manual_seed(SEED)
    first, second = attend(), attend()
    assert not torch.equal(first, second)
    torch.manual_seed(SEED)
    for index, before in enumerate((first, second)):
        assert_bitwise_equal(f"call {index}", attend(), before)
