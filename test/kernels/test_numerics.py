"""Numerics of every case of testing.CASES, in both dtypes, through unmodified F.sdpa, against fp64 math.

Each family of kernels is forced. Further tests cover output layout, reads and writes outside of the tensors,
determinism, races, graph replay, memory, and tensors of over 2^31 elements. The first tests need no GPU: they check
that the cases reach all rows of the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import interpreted_kernels
import pytest
import torch
import torch.nn.functional as F
from cuda_graphs import capture_graph
from forced_splits import plan_of_forced_call
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings, library
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.architectures import BACKENDS, FAMILIES
from torch_flashplug.registry.dtypes import ELEMENTS_16BIT, elements_of
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import (
    CASES,
    ODD_CASES,
    WIDE_CASES,
    Case,
    DirectForward,
    Inputs,
    assert_bitwise_equal,
    assert_lse,
    assert_within_budget,
    case_named,
    load_pack,
    make_inputs,
    make_lookup,
    new_case,
    oracle,
    plain,
)

SEED = 20261121
GIB = 1 << 30
HUGE = 133120.0  # scores of 1e11: the rounding of scale * score alone is hundreds of powers of two
ARCHS = {family.backend: family.arch for family in FAMILIES}
# Kernels that cases can reach; masked kernels are tested in test_bool_masks.
FORWARDS = [spec for arch in ARCHS.values() for spec in kernel_table.specs(arch, "fwd") if spec.features <= {"causal"}]
BY_FAMILY = pytest.mark.parametrize("family", ARCHS)
BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
BY_DTYPE = pytest.mark.parametrize("dtype", ELEMENTS_16BIT)


def attend(inputs: Inputs, case: Case) -> Tensor:
    return F.scaled_dot_product_attention(*inputs, **case.sdpa_kwargs())


def poison_outputs(case: Case, device: str) -> None:
    """Fill free blocks of the allocator with NaN, so that elements not written by the kernel show."""
    outputs = ((case.B, case.Hq, case.Sq, case.Dv), case.torch_dtype), ((case.B, case.Hq, case.Sq), torch.float32)
    blocks = [torch.full(shape, float("nan"), dtype=dtype, device=device) for shape, dtype in outputs for _ in "ab"]
    del blocks


def run_forced(family: str, call: Callable[[], Tensor]) -> Tensor:
    """Run an attention call with a forced family, and check the use of a plugin kernel."""
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(family):
        out = call()
    counts = bindings.counters()
    assert counts["ours_fwd"] == 1, f"the call took another path: {counts}"
    return out


def stock_strides(inputs: Inputs) -> tuple[int, ...]:
    """Return the output strides of torch's meta function."""
    q, k, v = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in inputs)
    return torch.ops.aten._scaled_dot_product_fused_attention_overrideable(q, k, v)[0].stride()


# ---- without a GPU: cases and table ----


@BY_DTYPE
@BY_FAMILY
def test_every_case_can_run_on_a_kernel(family, dtype):
    if dtype not in elements_of("fwd", ARCHS[family]):
        pytest.skip("no kernel of this family is made of it")
    plans = {case.name: plan_of_forced_call(case.with_dtype(dtype), backend=family) for case in CASES}
    assert not {name: plan["reasons"] for name, plan in plans.items() if plan["backend"] != family}


@BY_FAMILY
def test_every_forward_kernel_is_reached_by_a_case(family):
    cases = [(case.with_dtype(dtype), {}) for case in CASES for dtype in ELEMENTS_16BIT]
    if family == "fa2":
        cases += [(case.with_dtype(dtype), {"align_q": 2}) for case in ODD_CASES for dtype in ELEMENTS_16BIT]
    else:
        cases += [(case.with_dtype(dtype), {}) for case in WIDE_CASES for dtype in ELEMENTS_16BIT]
    reached = {plan_of_forced_call(case, backend=family, **facts)["kernel"] for case, facts in cases}
    specs = (*FORWARDS, *kernel_table.specs(ARCHS[family], "decode"))  # masked kernels: test_masked_decode, test_bias
    missed = {spec.name() for spec in specs if spec.arch == ARCHS[family] and not spec.features - {"causal"}} - reached
    assert not missed, f"no case in torch_flashplug/testing/cases.py reaches {sorted(missed)}"


# ---- forward ----


def tile_edges(spec: KernelSpec) -> list[tuple[int, int]]:
    """Return (Sq, Sk) at the edges of a kernel's tiles, next to the edges, and across several tiles."""
    m, n = spec.tile_m, spec.tile_n
    square = [(a + i, b + j) for a, b in ((m, n), (2 * m, 2 * n)) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    return [*square, (1, n + 1), (m + 1, 1), (3 * m + 1, 7 * n - 1), (5 * m, 2 * n + 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("spec", FORWARDS, ids=KernelSpec.name)
def test_every_kernel_at_its_tile_edges(spec):
    """The kernels are called directly, because the dispatcher selects some rows only for large grids."""
    pack = library.find_built(next(p.file for p in kernel_table.PACKS if p.target == "sm_90a" and spec in p.specs()))
    check_tile_edges(spec, load_pack(pack)[spec.name()], "cuda", (2, 4, 2), tile_edges(spec))


@pytest.mark.interpreted
@pytest.mark.parametrize("spec", FORWARDS, ids=KernelSpec.name)
def test_every_kernel_in_the_interpreter(spec):
    m, n = spec.tile_m, spec.tile_n
    check_tile_edges(
        spec,
        interpreted_kernels.load_kernel(interpreted_kernels.pack(), spec.name()),
        "cpu",
        (1, 2, 1),
        [(m + 1, 2 * n - 1)],
    )


def check_tile_edges(
    spec: KernelSpec, function: Callable, device: str, heads: tuple[int, int, int], edges: list
) -> None:
    for (sq, sk), less in itertools.product(edges, (0, 5 if spec.elementwise else 8)):
        dims, seed = (spec.d - less, spec.dv - less), SEED + sq + sk
        case = new_case(f"{spec.name()} {sq}x{sk}", heads, (sq, sk), dims, spec.mask, dtype=spec.dtype)
        inputs = make_inputs(case, device, seed)
        forward = DirectForward(function, case, inputs)
        forward.call()
        exact, low = oracle(case, inputs), plain(case, inputs)
        assert_within_budget(case.name, forward.out, exact.out, low.out, seed=seed)
        assert_lse(case.name, forward.lse, exact.lse, low.lse, seed=seed)


@BY_DTYPE
@BY_NAME
@BY_FAMILY
def test_forward_matches_fp64(kernels_on, family, case, dtype):
    check_forward(kernels_on, family, case.with_dtype(dtype))


@BY_DTYPE
@pytest.mark.parametrize("case", ODD_CASES, ids=lambda case: case.name)
def test_forward_of_layouts_without_vector_loads(kernels_on, case, dtype):
    """Fused kernels serve layouts that vector loads cannot read."""
    check_forward(kernels_on, "fa2", case.with_dtype(dtype))


def check_forward(device: str, family: str, case: Case) -> None:
    inputs = make_inputs(case, device, SEED)
    poison_outputs(case, device)
    with torch.no_grad():
        out = run_forced(family, lambda: attend(inputs, case))
    exact, low = oracle(case, inputs), plain(case, inputs)
    assert_within_budget(f"{case.name} {case.dtype} out", out, exact.out, low.out, seed=SEED)
    promised = stock_strides(inputs)
    assert all(
        size == 1 or stride == promised_stride
        for size, stride, promised_stride in zip(out.shape, out.stride(), promised, strict=True)
    )
    poison_outputs(case, device)
    mode = BACKENDS.index(family)
    again, lse, _, _ = torch.ops.torch_flashplug.sdpa_fwd(*inputs, None, 0.0, int(case.causal), case.scale, mode)
    assert_lse(f"{case.name} {case.dtype}", lse, exact.lse, low.lse, seed=SEED)
    assert_bitwise_equal(f"{case.name} {case.dtype} op against F.sdpa", again, out)


@BY_DTYPE
@pytest.mark.parametrize(
    "name",
    ("gqa4_d64_causal", "gqa3_d128", "rect_799x3_d128", "rect_64x4099_d64_causal", "rect_1024x129_d128_causal",
     "square_s193_d128", "many_heads_h70000_d64", "odd_tail_sq4099_d128_causal", "head_d128v64",
     "decode_1x8k_d128_gqa4"),
)  # fmt: skip
@BY_FAMILY
def test_forward_lookup_is_exact(kernels_on, name, dtype, family):
    """Each row selects a single key, so a wrong index gives a wrong integer, where a tolerance could hide an error."""
    case = case_named(name).with_dtype(dtype)
    inputs, expected = make_lookup(case, kernels_on, SEED)
    with torch.no_grad():
        out = run_forced(
            family, lambda: F.scaled_dot_product_attention(*inputs, **(case.sdpa_kwargs() | {"scale": 4.0}))
        )
    assert_bitwise_equal(f"{case.name} {dtype} lookup", out, expected)


@pytest.mark.parametrize("operand", ("q", "k"))
@pytest.mark.parametrize("name", ("square_s193_d64", "square_s193_d128_causal"))
@BY_FAMILY
def test_nan_spreads_as_in_math(kernels_on, name, operand, family):
    case = case_named(name)
    inputs = make_inputs(case, kernels_on, SEED)
    getattr(inputs, operand)[0, 1, 150, 3] = float("nan")
    with torch.no_grad():
        out = run_forced(family, lambda: attend(inputs, case))
    exact, low = oracle(case, inputs), plain(case, inputs)
    assert_within_budget(f"{name} nan in {operand}", out, exact.out, low.out, seed=SEED)


@BY_FAMILY
def test_equal_huge_scores_have_equal_weights(kernels_on, family):
    q, k, v = (torch.full_like(tensor, HUGE) for tensor in make_inputs(case_named("square_s256_d64"), kernels_on, SEED))
    with torch.no_grad():
        out = run_forced(family, lambda: F.scaled_dot_product_attention(q, k, v))
    assert torch.equal(out, v)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@BY_FAMILY
def test_largest_of_huge_scores_has_all_weight(kernels_on, causal, family):
    q, k, v = make_inputs(case_named("square_s256_d64"), kernels_on, SEED)
    q, k = q * HUGE, k * HUGE
    with torch.no_grad():
        out = run_forced(family, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    scores = q.double() @ k.double().mT
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    largest, second_largest = scores.topk(2).values.unbind(-1)
    has_clear_winner = largest - second_largest > 1e-5 * largest.abs()  # no tie breakable by the fp32 sum over D
    winners = v.gather(2, scores.argmax(-1, keepdim=True).expand_as(v))
    assert has_clear_winner.float().mean() > 0.9
    assert torch.equal(out[has_clear_winner], winners[has_clear_winner])


# ---- repeatability ----

REPEATED = (
    "gqa4_d64_causal",
    "odd_tail_sq4099_d64",
    "odd_tail_sq4099_d128_causal",
    "rect_799x3_d128",
    "many_heads_d64",
)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REPEATED)
@BY_FAMILY
def test_forward_is_bitwise_repeatable(name, family):
    case = case_named(name)
    inputs = make_inputs(case, "cuda", SEED)
    with torch.no_grad():
        expected = run_forced(family, lambda: attend(inputs, case))
        for _ in range(20):
            poison_outputs(case, "cuda")
            assert_bitwise_equal(name, run_forced(family, lambda: attend(inputs, case)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REPEATED)
@BY_FAMILY
def test_forward_has_no_race_in_1000_runs(name, family):
    """Two streams keep the SMs unevenly busy, so that warps meet in orders that never occur on a quiet GPU."""
    case = case_named(name)
    inputs = make_inputs(case, "cuda", SEED)
    noise = torch.randn(1024, 1024, device="cuda")
    side = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.no_grad(), torch_flashplug.sdpa_backend(family):
        expected = attend(inputs, case)
        torch.cuda.synchronize()
        for i in range(1000):
            if i % 3 == 0:
                with torch.cuda.stream(side):
                    noise @ noise
            wrong += (attend(inputs, case) != expected).sum()
    torch.cuda.synchronize()
    assert int(wrong) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("replayed", (False, True), ids=("eager", "graphs"))
@pytest.mark.parametrize("name", ("gqa4_d64_causal", "odd_tail_sq4099_d128_causal", "many_heads_d64"))
@BY_FAMILY
def test_forwards_on_three_concurrent_streams(name, replayed, family):
    """One kernel runs on three streams at once; state shared between CTAs belongs to a single launch."""
    case = case_named(name)
    streams = [torch.cuda.Stream() for _ in range(3)]
    inputs_of_streams = [make_inputs(case, "cuda", SEED + i) for i in range(len(streams))]
    wrong = torch.zeros(len(streams), dtype=torch.int64, device="cuda")
    with torch.no_grad(), torch_flashplug.sdpa_backend(family):
        expected = [attend(inputs, case) for inputs in inputs_of_streams]
        torch.cuda.synchronize()
        calls = [lambda inputs=inputs: attend(inputs, case) for inputs in inputs_of_streams]
        if replayed:
            calls = [capture_graph(call) for call in calls]
        for _ in range(100):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    wrong[i] += (calls[i]() != expected[i]).sum()
        torch.cuda.synchronize()
    assert wrong.tolist() == [0] * len(streams)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("gqa4_d64_causal", "square_s513_d128", "cross_77_d128"))
@BY_FAMILY
def test_graph_replay_equals_eager_mode(name, family):
    case = case_named(name)
    inputs, new_inputs = make_inputs(case, "cuda", SEED), make_inputs(case, "cuda", SEED + 1)
    with torch.no_grad(), torch_flashplug.sdpa_backend(family):
        expected, expected_new = attend(inputs, case), attend(new_inputs, case)
        torch.cuda.synchronize()
        replay = capture_graph(lambda: attend(inputs, case))
    assert_bitwise_equal(f"{name} replay", replay(), expected)
    for captured, replacement in zip(inputs, new_inputs, strict=True):
        captured.copy_(replacement)
    assert_bitwise_equal(f"{name} replay on new inputs", replay(), expected_new)


# ---- memory and size ----


@pytest.mark.gpu
@pytest.mark.parametrize("length", (65536, 131072))
@BY_FAMILY
def test_memory_is_outputs_and_a_constant(length, family):
    case = new_case("long", (1, 4, 2), (length, length), (128, 128), "causal")
    inputs = make_inputs(case, "cuda", SEED)
    with torch.no_grad():
        run_forced(family, lambda: attend(inputs, case))  # modules are loaded before the measurement
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = run_forced(family, lambda: attend(inputs, case))
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    lse_bytes = case.B * case.Hq * case.Sq * 4
    assert peak <= out.numel() * out.element_size() + lse_bytes + (1 << 20), f"{peak} bytes over the inputs"


def _check_heads(inputs: Inputs, out: Tensor, case: Case, heads: tuple[tuple[int, int], ...]) -> None:
    for batch, head in heads:
        kv_head = head // (case.Hq // case.Hkv)
        head_inputs = Inputs(
            inputs.q[batch, head][None, None], *(t[batch, kv_head][None, None] for t in (inputs.k, inputs.v)), inputs.q
        )
        exact, low = oracle(case, head_inputs), plain(case, head_inputs)
        assert_within_budget(
            f"{case.name} at {batch}, {head}", out[batch, head][None, None], exact.out, low.out, seed=SEED
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    (new_case("over_2g_batch", (33000, 4, 4), (128, 128), (128, 128)),
     new_case("over_2g_rows", (1, 128, 128), (131200, 131), (128, 128)),
     new_case("over_2g_keys", (2, 64, 64), (65, 131200), (128, 128))),
    ids=lambda case: case.name,
)  # fmt: skip
@BY_FAMILY
def test_tensors_of_more_than_2g_elements(case, family):
    elements = max(case.B * case.Hq * case.Sq * case.D, case.B * case.Hkv * case.Sk * case.D)
    assert elements > 2**31
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < 24 * GIB:
        pytest.skip(f"{free / GIB:.0f} GiB free, needs 24")
    shapes = [(case.B, case.Hq, case.Sq, case.D)] + 2 * [(case.B, case.Hkv, case.Sk, case.D)]
    tensors = [torch.empty(shape, dtype=case.torch_dtype, device="cuda").normal_() for shape in shapes]
    inputs = Inputs(*tensors, grad_out=tensors[0])
    with torch.no_grad():
        out = run_forced(family, lambda: attend(inputs, case))
    _check_heads(inputs, out, case, ((0, 0), (case.B - 1, case.Hq - 1), (case.B // 2, case.Hq // 2)))


@pytest.mark.gpu
@BY_FAMILY
def test_strides_of_more_than_2g_elements(family):
    """A small view of a large buffer: the offset of a batch entry does not fit into 32 bits."""
    case = new_case("far_apart", (3, 2, 2), (130, 130), (64, 64))
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < 12 * GIB:
        pytest.skip(f"{free / GIB:.0f} GiB free, needs 12")
    far = 2**31 + 64
    buffer = torch.empty(2 * far + 2 * 130 * 64, dtype=case.torch_dtype, device="cuda")
    near = make_inputs(case, "cuda", SEED)
    q = buffer.as_strided((3, 2, 130, 64), (far, 130 * 64, 64, 1))
    q.copy_(near.q)
    inputs = Inputs(q, near.k, near.v, near.grad_out)
    with torch.no_grad():
        out = run_forced(family, lambda: attend(inputs, case))
    exact, low = oracle(case, near), plain(case, near)
    assert_within_budget("far_apart out", out, exact.out, low.out, seed=SEED)
