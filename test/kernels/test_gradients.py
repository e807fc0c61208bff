"""Gradients of every fourth case of testing.CASES through unmodified F.sdpa, against fp64 math.

Each family of kernels is forced. Gradients are accumulated in any order or, under torch.use_deterministic_algorithms,
in a fixed order. Further tests cover repeatability, races and memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from deterministic import deterministic_gradients
from forced_splits import plan_of_forced_call
from fp64_gradients import NAMES, check_gradients_of_case
from torch import Tensor

import torch_flashplug
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table, kernel_table, stock_bugs
from torch_flashplug.registry.architectures import FAMILIES, Family
from torch_flashplug.registry.dtypes import ELEMENTS_16BIT
from torch_flashplug.testing import (
    CASES,
    ODD_CASES,
    WIDE_GRADIENT_CASES,
    Case,
    Inputs,
    case_named,
    make_inputs,
    new_case,
)

SEED = 20261121
RUNS = 1000
Order = Callable[[], AbstractContextManager]
# Every fourth case, all cases with unusual heads or layouts, and all cases with the tag "grad".
GRAD_CASES = [c for i, c in enumerate(CASES) if i % 4 == 0 or c.gqa or c.layout != "bshd" or "grad" in c.tags]
GRAD_CASES = [case for case in GRAD_CASES if not case.tags & {"large", "many"}]
# The first cases have more heads than idle warps can run ahead of, so these warps clear and write dQ. The last cases
# have few long heads with many blocks adding to dQ.
MANY_HEADS = (
    new_case("heads_640_sq256_d64", (40, 16, 16), (256, 256), (64, 64)),
    new_case("heads_640_sq256_d64_causal", (40, 16, 16), (256, 256), (64, 64), "causal"),
    new_case("heads_640_gqa2_sq300x200_d128", (80, 8, 4), (300, 200), (128, 128)),
    new_case("heads_900_sq100x77_d64", (900, 1, 1), (100, 77), (64, 64)),
    new_case("heads_48_sq2048_d128", (3, 16, 16), (2048, 2048), (128, 128)),
    new_case("heads_48_sq2048_d64_causal", (3, 16, 16), (2048, 2048), (64, 64), "causal"),
    new_case("heads_64_gqa4_sq700x900_d256_causal", (4, 16, 4), (700, 900), (256, 256), "causal"),
    new_case("heads_64_sq500x300_d192_v128", (4, 16, 16), (500, 300), (192, 128)),
)
REPEATED = (
    case_named("gqa4_d64_causal"),
    case_named("odd_tail_sq4099_d128_causal"),
    case_named("rect_799x3_d128"),
    MANY_HEADS[0],
    MANY_HEADS[2],
    MANY_HEADS[5],
    MANY_HEADS[6],
)
PARTIAL = (case_named("gqa4_d64_causal"), case_named("gqa3_d64"), case_named("rect_799x3_d128"), *MANY_HEADS[6:])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.backend)
def test_every_backward_kernel_is_reached_by_a_case(family: Family) -> None:
    facts = [{"grad": 1, "deterministic": order} for order in (0, 1)]
    wide = WIDE_GRADIENT_CASES if family.has_tma else ()
    calls = [(case, flags) for case in (*GRAD_CASES, *MANY_HEADS, *wide) for flags in facts]
    calls += [(case, flags | {"align_q": 2}) for case in ODD_CASES for flags in facts if not family.has_tma]
    plans = [
        plan_of_forced_call(case.with_dtype(dtype), backend=family.backend, **flags)
        for case, flags in calls
        for dtype in ELEMENTS_16BIT
    ]
    backwards = kernel_table.specs(family.arch, "bwd", "detbwd", "partbwd")
    # further features: test_bool_masks, test_dropout, ...
    # fused backwards of 96 keys: test_backward_96_keys
    rows = [spec for spec in backwards if spec.features <= {"causal"} and not spec.is_backward_of_96_keys]
    missing = {spec.name() for spec in rows} - {plan["gradients"] for plan in plans}
    # For D 64 without a mask, the split backward is faster only if dQ alone is wanted:
    # test_subset_of_gradients_is_exact_and_saves_memory.
    assert not {name for name in missing if not name.startswith("partbwd") or "_d64_full_" not in name}


BY_FAMILY = pytest.mark.parametrize("family", ["fa3", "fa2"])
ORDERS = pytest.mark.parametrize("order", [contextlib.nullcontext, deterministic_gradients], ids=["any", "one"])


def run_forward(case: Case, family: str, device: str = "cuda") -> tuple[Tensor, Inputs]:
    inputs = make_inputs(case, device, SEED, requires_grad=True)
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(family):
        out = F.scaled_dot_product_attention(*inputs, **case.sdpa_kwargs())
    assert bindings.counters(reset=True)["ours_fwd"] == 1
    return out, inputs


def run_backward(out: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.grad_out, retain_graph=True)


def check_gradients(case: Case, family: str, device: str) -> None:
    """Check three gradients against the error budget of plain math."""
    out, inputs = run_forward(case, family, device)
    grads = dict(zip(NAMES, run_backward(out, inputs), strict=True))
    assert bindings.counters()["ours_bwd"] == 1
    check_gradients_of_case(f"{case.name} {case.dtype}", case, inputs, grads, seed=SEED)


@pytest.mark.parametrize("dtype", ELEMENTS_16BIT)
@pytest.mark.parametrize("case", [*GRAD_CASES, *MANY_HEADS], ids=lambda case: case.name)
@BY_FAMILY
def test_gradients_match_fp64(kernels_on: str, family: str, case: Case, dtype: str) -> None:
    check_gradients(case.with_dtype(dtype), family, kernels_on)


@pytest.mark.parametrize("dtype", ELEMENTS_16BIT)
@pytest.mark.parametrize("case", ODD_CASES, ids=lambda case: case.name)
def test_gradients_of_layouts_without_vector_loads(kernels_on: str, case: Case, dtype: str) -> None:
    """Vector loads cannot read the layouts."""
    check_gradients(case.with_dtype(dtype), "fa2", kernels_on)


# Cases with query heads shared by several tiles of a block of keys: 4, 3 and 6 heads of a KV head.
SHARED = (
    new_case("shared_gqa4_d64", (2, 8, 2), (150, 70), (64, 64)),
    new_case("shared_gqa4_d64_causal", (1, 8, 2), (200, 200), (64, 64), "causal"),
    new_case("shared_mqa3_d128_causal", (2, 3, 1), (90, 130), (128, 128), "causal"),
    new_case("shared_mqa6_d256", (1, 6, 1), (70, 65), (256, 256)),
    new_case("shared_gqa4_d192_v128", (1, 4, 1), (70, 130), (192, 128)),
)


@contextlib.contextmanager
def shared_heads_from(rows: int) -> Iterator[None]:
    """Share query heads if sharing saves a tile at least the given number of rows."""
    cost_model = dataclasses.replace(dispatch_table.COST_MODEL, min_rows_saved=rows, rows_per_sum=0)
    bindings.push_rows(kernel_table.KERNEL_ROWS, dispatch_table.CHOICE_ROWS, cost_model, stock_bugs.STOCK_BUGS)
    try:
        yield
    finally:
        startup.push_tables()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "alone"])
@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
@ORDERS
def test_query_heads_of_a_key_block_are_shared_among_tiles(
    kernels_on: str, case: Case, order: Order, shared: bool
) -> None:
    """Few blocks of keys leave SMs idle.

    Each tile computes dK and dV of its own heads, and a reduction adds the parts.
    """
    facts = {"grad": 1, "deterministic": order is deterministic_gradients}
    with shared_heads_from(1 if shared else 1 << 40), order():
        assert plan_of_forced_call(case, backend="fa3", **facts)["sharing"] == (case.Hq // case.Hkv if shared else 1)
        check_gradients(case, "fa3", kernels_on)


def test_canceling_value_gradients_of_heads_do_not_overflow_fp16(kernels_on: str) -> None:
    """The part of dV of each head exceeds the range of fp16, but the sum is 0."""
    q, k, v = (torch.zeros(1, heads, S, 64) for heads, S in ((2, 512), (1, 64), (1, 64)))
    q[..., 0], k[..., 0, 0] = 8.0, 30.0
    q, k, v = (x.half().to(kernels_on).requires_grad_() for x in (q, k, v + 1.0))
    grad_out = torch.full((1, 2, 512, 64), 200.0, dtype=torch.half, device=kernels_on)
    grad_out[:, 1] = -200.0
    with torch_flashplug.sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert not torch.autograd.grad(out, v, grad_out)[0].any()


@pytest.mark.parametrize("stage", ["mask", "bias", "dropout"])
def test_shared_query_heads_use_separate_mask_rows(kernels_on: str, stage: str) -> None:
    """Except for rounding, gradients equal the gradients of a tile with all heads.

    Each head uses its own mask rows.
    """
    case = SHARED[0]
    scores = (case.B, case.Hq, case.Sq, case.Sk)
    drawn = torch.randn(scores, generator=torch.Generator().manual_seed(SEED)).to(kernels_on)
    mask = {"mask": drawn > 0, "bias": drawn.bfloat16(), "dropout": None}[stage]
    runs = []
    for rows in (1, 1 << 40):
        inputs = make_inputs(case, kernels_on, SEED, requires_grad=True)
        torch.manual_seed(SEED)
        with shared_heads_from(rows), torch_flashplug.sdpa_backend("fa3"):
            dropout_p = 0.3 * (stage == "dropout")
            out = F.scaled_dot_product_attention(*inputs, mask, dropout_p, enable_gqa=True)
            runs.append(run_backward(out, inputs))
    for name, shared, alone in zip(NAMES, *runs, strict=True):
        assert float((shared - alone).norm()) < 6e-3 * float(alone.norm()), name


@pytest.mark.gpu
@pytest.mark.parametrize("leaf_names", ["q", "k", "v", "kv", "qv"])
@pytest.mark.parametrize("case", PARTIAL, ids=lambda case: case.name)
@BY_FAMILY
def test_subset_of_gradients_is_exact_and_saves_memory(family: str, case: Case, leaf_names: str) -> None:
    """A subset of gradients is as exact as all gradients.

    A split backward allocates no memory for unwanted gradients.
    """
    inputs = make_inputs(case, "cuda", SEED)
    operands = dict(zip("qkv", inputs, strict=True))
    leaves = [operands[name].requires_grad_() for name in leaf_names]
    with torch_flashplug.sdpa_backend(family):
        out = F.scaled_dot_product_attention(*inputs, **case.sdpa_kwargs())
    bindings.counters(reset=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, leaves, inputs.grad_out)
    num_bytes = torch.cuda.max_memory_allocated() - before
    assert bindings.counters()["ours_bwd"] == 1
    grads_by_name = dict(zip((f"d{name}" for name in leaf_names), grads, strict=True))
    check_gradients_of_case(case.name, case, inputs, grads_by_name, seed=SEED)
    if family == "fa2" or set(leaf_names) & set("kv") and ("q" in leaf_names or case.D <= 64):
        return  # a fused kernel computes all three gradients
    written = ("q" if "q" in leaf_names else "") + ("kv" if set(leaf_names) & set("kv") else "")
    facts = 2 * 4 * case.B * case.Hq * (case.Sq + 64)
    rounding = 2**20  # a block of the allocator may exceed the requested size by this amount
    assert num_bytes <= facts + rounding + sum(operands[name].nbytes + rounding for name in written)


@pytest.mark.parametrize("case", [*GRAD_CASES, *MANY_HEADS], ids=lambda case: case.name)
@BY_FAMILY
def test_deterministic_gradients_match_fp64(kernels_on: str, family: str, case: Case) -> None:
    with deterministic_gradients():
        check_gradients(case, family, kernels_on)


@pytest.mark.gpu
@ORDERS
@pytest.mark.parametrize("case", REPEATED, ids=lambda case: case.name)
@BY_FAMILY
def test_gradients_are_repeatable_in_1000_runs(family: str, case: Case, order) -> None:
    """dK and dV, and dQ in deterministic mode, are bitwise equal in all runs.

    In nondeterministic mode, dQ is equal up to a rounding of sums. A second stream keeps the SMs unevenly busy, so
    that warps meet in orders that never occur on a quiet GPU.
    """
    out, inputs = run_forward(case, family)
    noise, side = torch.randn(1 << 20, device="cuda"), torch.cuda.Stream()
    wrong = torch.zeros(len(NAMES), dtype=torch.int64, device="cuda")
    with order():
        expected = run_backward(out, inputs)
        slack = 0.0 if order is deterministic_gradients else 2**-7 * float(expected[0].abs().max())
        torch.cuda.synchronize()
        for i in range(RUNS):
            if i % 3 == 0:
                with torch.cuda.stream(side):
                    noise.sin_()
            again = run_backward(out, inputs)
            for n, (a, b) in enumerate(zip(again, expected, strict=True)):
                wrong[n] += ((a - b).abs() > (slack if n == 0 else 0.0)).sum() + (a.isnan() != b.isnan()).sum()
    torch.cuda.synchronize()
    assert bindings.counters()["ours_bwd"] == RUNS + 1
    assert wrong.tolist() == [0] * len(NAMES)


@pytest.mark.gpu
@ORDERS
@BY_FAMILY
def test_backwards_on_three_concurrent_streams(family: str, order) -> None:
    """CTAs of a launch wait for each other, but never for a CTA blocked by a different launch."""
    cases = (MANY_HEADS[4], MANY_HEADS[5], MANY_HEADS[0])
    streams = [torch.cuda.Stream() for _ in cases]
    calls, expected = [], []
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in cases]
    torch.cuda.synchronize()
    with order():
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):  # autograd runs a backward on the stream of the forward
                calls.append(run_forward(case, family))
                expected.append(run_backward(*calls[-1]))
            torch.cuda.synchronize()
        for _ in range(100):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    for a, b in zip(run_backward(*calls[i])[1:], expected[i][1:], strict=True):
                        wrong[i] += (a != b).sum()
        torch.cuda.synchronize()
    assert [int(w) for w in wrong] == [0] * len(cases)


@pytest.mark.gpu
@ORDERS
@BY_FAMILY
def test_backward_memory_is_linear_at_32k_keys(family: str, order) -> None:
    case = new_case("long_32k_d128_causal", (1, 2, 2), (32768, 32768), (128, 128), "causal")
    out, inputs = run_forward(case, family)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with order():
        run_backward(out, inputs)
    torch.cuda.synchronize()
    assert bindings.counters()["ours_bwd"] == 1
    rows, elements = case.B * case.Hq * case.Sq, out.numel()
    # Three gradients; dQ in fp32 with counters; LSE and delta.
    assert torch.cuda.max_memory_allocated() - before <= 3 * 2 * elements + 4 * elements + 12 * rows + (1 << 20)
