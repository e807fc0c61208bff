"""Gradients: every fourth case of testing.CASES through unmodified F.sdpa with either family of kernels forced, against
fp64 math, added up in any order or, under torch.use_deterministic_algorithms, in one; repeatability, races, memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from orders import in_order
from splits import planned
from torch import Tensor

import torch_flashplug
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table, kernel_table, stock_bugs
from torch_flashplug.registry.architectures import FAMILIES, Family
from torch_flashplug.registry.dtypes import WHOLE
from torch_flashplug.testing import (
    CASES,
    ODD_CASES,
    Case,
    Inputs,
    assert_within_budget,
    case_named,
    make_inputs,
    new_case,
    oracle_grads,
    plain_grads,
)
from torch_flashplug.testing.budget import GRAD_FACTOR, cancelled_sums

SEED = 20261121
RUNS = 1000
NAMES = ("dq", "dk", "dv")
Order = Callable[[], AbstractContextManager]
# Every fourth, all whose heads or layouts are unusual, and those that ask for it.
GRAD_CASES = [c for i, c in enumerate(CASES) if i % 4 == 0 or c.gqa or c.layout != "bshd" or "grad" in c.tags]
GRAD_CASES = [case for case in GRAD_CASES if not case.tags & {"large", "many"}]
# More heads than idle warps run ahead, so that these clear and write dQ; few and long ones, where many blocks add.
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
def test_every_row_is_hit_by_a_case(family: Family) -> None:
    facts = [{"grad": 1, "deterministic": order} for order in (0, 1)]
    calls = [(case, more) for case in (*GRAD_CASES, *MANY_HEADS) for more in facts]
    calls += [(case, more | {"align_q": 2}) for case in ODD_CASES for more in facts if not family.tma]
    plans = [
        planned(case.with_dtype(dtype), backend=family.backend, **more) for case, more in calls for dtype in WHOLE
    ]
    backwards = kernel_table.specs(family.arch, "bwd", "detbwd", "partbwd")
    rows = [spec for spec in backwards if spec.features <= {"causal"}]  # others: test_masks, test_dropout, ...
    missing = {spec.name() for spec in rows} - {plan["gradients"] for plan in plans}
    # Of D 64, full, gradients in parts are faster where dQ alone is wanted: test_some_gradients.
    assert not {name for name in missing if not name.startswith("partbwd") or "_d64_full_" not in name}


BY_FAMILY = pytest.mark.parametrize("family", ["fa3", "fa2"])
ORDERS = pytest.mark.parametrize("order", [contextlib.nullcontext, in_order], ids=["any", "one"])


def forward(case: Case, family: str, device: str = "cuda") -> tuple[Tensor, Inputs]:
    inputs = make_inputs(case, device, SEED, requires_grad=True)
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(family):
        out = F.scaled_dot_product_attention(*inputs, **case.sdpa_kwargs())
    assert bindings.counters(reset=True)["ours_fwd"] == 1
    return out, inputs


def gradients(out: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.grad_out, retain_graph=True)


def check(case: Case, family: str, device: str) -> None:
    """Three gradients within the budget of plain math's errors."""
    out, inputs = forward(case, family, device)
    got = gradients(out, inputs)
    assert bindings.counters()["ours_bwd"] == 1
    exact, low = oracle_grads(case, inputs), plain_grads(case, inputs)
    cancelled = cancelled_sums(*inputs, inputs.grad_out, case.scale)
    for name, ours, fp64, yardstick in zip(NAMES, got, exact, low, strict=True):
        budget = {"factor": GRAD_FACTOR, "cancelled": float(cancelled[name])}
        assert_within_budget(f"{case.name} {case.dtype} {name}", ours, fp64, yardstick, **budget, seed=SEED)


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("case", [*GRAD_CASES, *MANY_HEADS], ids=lambda case: case.name)
@BY_FAMILY
def test_gradients(kernels_on: str, family: str, case: Case, dtype: str) -> None:
    check(case.with_dtype(dtype), family, kernels_on)


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("case", ODD_CASES, ids=lambda case: case.name)
def test_odd_gradients(kernels_on: str, case: Case, dtype: str) -> None:
    """What no vector fits."""
    check(case.with_dtype(dtype), "fa2", kernels_on)


# Whose query heads may be shared among tiles of a block of keys: 4, 3 and 6 of a KV head.
SHARED = (
    new_case("shared_gqa4_d64", (2, 8, 2), (150, 70), (64, 64)),
    new_case("shared_gqa4_d64_causal", (1, 8, 2), (200, 200), (64, 64), "causal"),
    new_case("shared_mqa3_d128_causal", (2, 3, 1), (90, 130), (128, 128), "causal"),
    new_case("shared_mqa6_d256", (1, 6, 1), (70, 65), (256, 256)),
    new_case("shared_gqa4_d192_v128", (1, 4, 1), (70, 130), (192, 128)),
)


@contextlib.contextmanager
def spared(rows: int) -> Iterator[None]:
    """Heads are shared where that spares a tile so many rows."""
    gate = dataclasses.replace(dispatch_table.GATE, rows_spared=rows)
    bindings.push_rows(kernel_table.KERNEL_ROWS, dispatch_table.CHOICE_ROWS, gate, stock_bugs.RESCUES)
    try:
        yield
    finally:
        startup.push_tables()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "alone"])
@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
@ORDERS
def test_query_heads_are_shared(kernels_on: str, case: Case, order: Order, shared: bool) -> None:
    """Where few blocks of keys leave SMs idle: each tile leaves dK and dV of its own heads, which are added up."""
    facts = {"grad": 1, "deterministic": order is in_order}
    with spared(1 if shared else 1 << 40), order():
        assert planned(case, backend="fa3", **facts)["sharing"] == (case.Hq // case.Hkv if shared else 1)
        check(case, "fa3", kernels_on)


def test_heads_that_cancel_in_fp16(kernels_on: str) -> None:
    """Each head's part of dV lies beyond fp16, their sum is 0."""
    q, k, v = (torch.zeros(1, heads, S, 64) for heads, S in ((2, 512), (1, 64), (1, 64)))
    q[..., 0], k[..., 0, 0] = 8.0, 30.0
    q, k, v = (x.half().to(kernels_on).requires_grad_() for x in (q, k, v + 1.0))
    grad_out = torch.full((1, 2, 512, 64), 200.0, dtype=torch.half, device=kernels_on)
    grad_out[:, 1] = -200.0
    with torch_flashplug.sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert not torch.autograd.grad(out, v, grad_out)[0].any()


@pytest.mark.parametrize("extra", ["mask", "bias", "dropout"])
def test_shared_query_heads_have_stages_of_their_own(kernels_on: str, extra: str) -> None:
    """The same gradients as where one tile works through them all, but for roundings: each its own rows of a mask."""
    case = SHARED[0]
    scores = (case.B, case.Hq, case.Sq, case.Sk)
    drawn = torch.randn(scores, generator=torch.Generator().manual_seed(SEED)).to(kernels_on)
    mask = {"mask": drawn > 0, "bias": drawn.bfloat16(), "dropout": None}[extra]
    found = []
    for rows in (1, 1 << 40):
        inputs = make_inputs(case, kernels_on, SEED, requires_grad=True)
        torch.manual_seed(SEED)
        with spared(rows), torch_flashplug.sdpa_backend("fa3"):
            dropout_p = 0.3 * (extra == "dropout")
            out = F.scaled_dot_product_attention(*inputs, mask, dropout_p, enable_gqa=True)
            found.append(gradients(out, inputs))
    for name, shared, alone in zip(NAMES, *found, strict=True):
        assert float((shared - alone).norm()) < 6e-3 * float(alone.norm()), name


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv", "qv"])
@pytest.mark.parametrize("case", PARTIAL, ids=lambda case: case.name)
@BY_FAMILY
def test_some_gradients(family: str, case: Case, wanted: str) -> None:
    """Those that are wanted are as exact as all; kernels in parts take no memory for the others."""
    inputs = make_inputs(case, "cuda", SEED)
    operands = dict(zip("qkv", inputs, strict=True))
    leaves = [operands[name].requires_grad_() for name in wanted]
    with torch_flashplug.sdpa_backend(family):
        out = F.scaled_dot_product_attention(*inputs, **case.sdpa_kwargs())
    bindings.counters(reset=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = torch.autograd.grad(out, leaves, inputs.grad_out)
    taken = torch.cuda.max_memory_allocated() - before
    assert bindings.counters()["ours_bwd"] == 1
    everything = make_inputs(case, "cuda", SEED, requires_grad=True)
    exact, low = oracle_grads(case, everything), plain_grads(case, everything)
    cancelled = cancelled_sums(*inputs, inputs.grad_out, case.scale)
    for name, ours in zip(wanted, got, strict=True):
        which = "qkv".index(name)
        budget = {"factor": GRAD_FACTOR, "cancelled": float(cancelled[NAMES[which]])}
        assert_within_budget(f"{case.name} {NAMES[which]}", ours, exact[which], low[which], **budget, seed=SEED)
    if family == "fa2" or set(wanted) & set("kv") and ("q" in wanted or case.D <= 64):
        return  # all three, by a fused kernel
    written = ("q" if "q" in wanted else "") + ("kv" if set(wanted) & set("kv") else "")
    facts = 2 * 4 * case.B * case.Hq * (case.Sq + 64)
    rounding = 2**20  # a block of the allocator may be so much larger than what was asked for
    assert taken <= facts + rounding + sum(operands[name].nbytes + rounding for name in written)


@pytest.mark.parametrize("case", [*GRAD_CASES, *MANY_HEADS], ids=lambda case: case.name)
@BY_FAMILY
def test_gradients_in_one_order(kernels_on: str, family: str, case: Case) -> None:
    with in_order():
        check(case, family, kernels_on)


@pytest.mark.gpu
@ORDERS
@pytest.mark.parametrize("case", REPEATED, ids=lambda case: case.name)
@BY_FAMILY
def test_the_same_in_1000_runs(family: str, case: Case, order) -> None:
    """dK and dV, and dQ where an order is asked for, bit for bit; dQ in any order to a rounding of its sums. A second
    stream keeps the SMs unevenly busy, so that warps meet in orders that a quiet GPU never shows.
    """
    out, inputs = forward(case, family)
    noise, side = torch.randn(1 << 20, device="cuda"), torch.cuda.Stream()
    wrong = torch.zeros(len(NAMES), dtype=torch.int64, device="cuda")
    with order():
        first = gradients(out, inputs)
        slack = 0.0 if order is in_order else 2**-7 * float(first[0].abs().max())
        torch.cuda.synchronize()
        for i in range(RUNS):
            if i % 3 == 0:
                with torch.cuda.stream(side):
                    noise.sin_()
            again = gradients(out, inputs)
            for n, (a, b) in enumerate(zip(again, first, strict=True)):
                wrong[n] += ((a - b).abs() > (slack if n == 0 else 0.0)).sum() + (a.isnan() != b.isnan()).sum()
    torch.cuda.synchronize()
    assert bindings.counters()["ours_bwd"] == RUNS + 1
    assert wrong.tolist() == [0] * len(NAMES)


@pytest.mark.gpu
@ORDERS
@BY_FAMILY
def test_streams_side_by_side(family: str, order) -> None:
    """CTAs of one launch wait for each other: never for one that another launch keeps from running."""
    cases = (MANY_HEADS[4], MANY_HEADS[5], MANY_HEADS[0])
    streams = [torch.cuda.Stream() for _ in cases]
    calls, first = [], []
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in cases]
    torch.cuda.synchronize()
    with order():
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):  # autograd runs a backward on the stream of its forward
                calls.append(forward(case, family))
                first.append(gradients(*calls[-1]))
            torch.cuda.synchronize()
        for _ in range(100):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    for a, b in zip(gradients(*calls[i])[1:], first[i][1:], strict=True):
                        wrong[i] += (a != b).sum()
        torch.cuda.synchronize()
    assert [int(w) for w in wrong] == [0] * len(cases)


@pytest.mark.gpu
@ORDERS
@BY_FAMILY
def test_memory_is_linear_in_32k_keys(family: str, order) -> None:
    case = new_case("long_32k_d128_causal", (1, 2, 2), (32768, 32768), (128, 128), "causal")
    out, inputs = forward(case, family)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with order():
        gradients(out, inputs)
    torch.cuda.synchronize()
    assert bindings.counters()["ours_bwd"] == 1
    rows, elements = case.B * case.Hq * case.Sq, out.numel()
    # Three gradients; dQ in fp32 with its counters, LSE and delta.
    assert torch.cuda.max_memory_allocated() - before <= 3 * 2 * elements + 4 * elements + 12 * rows + (1 << 20)
