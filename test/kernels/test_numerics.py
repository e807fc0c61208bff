"""Numbers: every case of testing.CASES, in both dtypes, through unmodified F.sdpa with either family of kernels forced,
against fp64 math.

Also what must hold of a kernel beside its numbers: output layout, no read or write outside its tensors, determinism,
no races, graph replay, memory, over 2^31 elements. The first tests need no GPU: they hold table and cases together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import on_cpu
import pytest
import torch
import torch.nn.functional as F
from splits import planned
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings, library
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.architectures import BACKENDS, FAMILIES
from torch_flashplug.registry.dtypes import WHOLE, elements_of
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import (
    CASES,
    ODD_CASES,
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
# Of what cases can say; masked ones: test_masks.
FORWARDS = [spec for arch in (90, 80) for spec in kernel_table.specs(arch, "fwd") if spec.features <= {"causal"}]
BY_FAMILY = pytest.mark.parametrize("family", ARCHS)
BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
BY_DTYPE = pytest.mark.parametrize("dtype", WHOLE)


def attend(inputs: Inputs, case: Case) -> Tensor:
    return F.scaled_dot_product_attention(*inputs, **case.sdpa_kwargs())


def poison_outputs(case: Case, device: str) -> None:
    """Leaves NaN in the allocator's free blocks of these sizes: what a kernel does not write shows."""
    outputs = ((case.B, case.Hq, case.Sq, case.Dv), case.torch_dtype), ((case.B, case.Hq, case.Sq), torch.float32)
    blocks = [torch.full(shape, float("nan"), dtype=dtype, device=device) for shape, dtype in outputs for _ in "ab"]
    del blocks


def forced(family: str, call: Callable[[], Tensor]) -> Tensor:
    """Runs one attention call on our kernel and makes sure that it was ours."""
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(family):
        out = call()
    taken = bindings.counters()
    assert taken["ours_fwd"] == 1, f"the call took another path: {taken}"
    return out


def stock_strides(inputs: Inputs) -> tuple[int, ...]:
    """Strides that torch's meta function promises for the output."""
    q, k, v = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in inputs)
    return torch.ops.aten._scaled_dot_product_fused_attention_overrideable(q, k, v)[0].stride()


# ---- without a GPU: cases and table ----


@BY_DTYPE
@BY_FAMILY
def test_every_case_can_run_on_a_kernel(family, dtype):
    if dtype not in elements_of("fwd", ARCHS[family]):
        pytest.skip("no kernel of this family is made of it")
    plans = {case.name: planned(case.with_dtype(dtype), backend=family) for case in CASES}
    assert not {name: plan["reasons"] for name, plan in plans.items() if plan["backend"] != family}


@BY_FAMILY
def test_every_row_is_hit_by_a_case(family):
    cases = [(case.with_dtype(dtype), {}) for case in CASES for dtype in WHOLE]
    if family == "fa2":
        cases += [(case.with_dtype(dtype), {"align_q": 2}) for case in ODD_CASES for dtype in WHOLE]
    hit = {planned(case, backend=family, **facts)["kernel"] for case, facts in cases}
    known = (*FORWARDS, *kernel_table.specs(ARCHS[family], "decode"))  # with masks: test_masked_decode, test_biases
    missed = {one.name() for one in known if one.arch == ARCHS[family] and not one.features - {"causal"}} - hit
    assert not missed, f"no case in torch_flashplug/testing/cases.py reaches {sorted(missed)}"


# ---- forward ----


def tile_edges(spec: KernelSpec) -> list[tuple[int, int]]:
    """(Sq, Sk) at and beside the edges of a kernel's tiles, and through several of them."""
    m, n = spec.tile_m, spec.tile_n
    square = [(a + i, b + j) for a, b in ((m, n), (2 * m, 2 * n)) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    return [*square, (1, n + 1), (m + 1, 1), (3 * m + 1, 7 * n - 1), (5 * m, 2 * n + 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("spec", FORWARDS, ids=KernelSpec.name)
def test_every_kernel_at_its_tile_edges(spec):
    """Past the dispatcher, which picks some rows for large grids only."""
    pack = library.find_built(next(p.file for p in kernel_table.PACKS if p.target == "sm_90a" and spec in p.specs()))
    at_edges(spec, load_pack(pack)[spec.name()], "cuda", (2, 4, 2), tile_edges(spec))


@pytest.mark.interpreted
@pytest.mark.parametrize("spec", FORWARDS, ids=KernelSpec.name)
def test_every_kernel_interpreted(spec):
    m, n = spec.tile_m, spec.tile_n
    at_edges(spec, on_cpu.function(on_cpu.pack(), spec.name()), "cpu", (1, 2, 1), [(m + 1, 2 * n - 1)])


def at_edges(spec: KernelSpec, function: Callable, device: str, heads: tuple[int, int, int], edges: list) -> None:
    for (sq, sk), less in itertools.product(edges, (0, 5 if spec.elementwise else 8)):
        dims, seed = (spec.d - less, spec.dv - less), SEED + sq + sk
        case = new_case(f"{spec.name()} {sq}x{sk}", heads, (sq, sk), dims, spec.mask, dtype=spec.dtype)
        inputs = make_inputs(case, device, seed)
        run = DirectForward(function, case, inputs)
        run.call()
        exact, low = oracle(case, inputs), plain(case, inputs)
        assert_within_budget(case.name, run.out, exact.out, low.out, seed=seed)
        assert_lse(case.name, run.lse, exact.lse, low.lse, seed=seed)


@BY_DTYPE
@BY_NAME
@BY_FAMILY
def test_forward(kernels_on, family, case, dtype):
    check_forward(kernels_on, family, case.with_dtype(dtype))


@BY_DTYPE
@pytest.mark.parametrize("case", ODD_CASES, ids=lambda case: case.name)
def test_odd_forward(kernels_on, case, dtype):
    """What no vector fits runs fused all the same."""
    check_forward(kernels_on, "fa2", case.with_dtype(dtype))


def check_forward(device: str, family: str, case: Case) -> None:
    inputs = make_inputs(case, device, SEED)
    poison_outputs(case, device)
    with torch.no_grad():
        out = forced(family, lambda: attend(inputs, case))
    exact, low = oracle(case, inputs), plain(case, inputs)
    assert_within_budget(f"{case.name} {case.dtype} out", out, exact.out, low.out, seed=SEED)
    promised = stock_strides(inputs)
    assert all(size == 1 or had == want for size, had, want in zip(out.shape, out.stride(), promised, strict=True))
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
def test_lookup_is_exact(kernels_on, name, dtype, family):
    """Each row selects one key: a wrong index, which a tolerance can hide, is a wrong integer."""
    case = case_named(name).with_dtype(dtype)
    inputs, expected = make_lookup(case, kernels_on, SEED)
    with torch.no_grad():
        out = forced(family, lambda: F.scaled_dot_product_attention(*inputs, **(case.sdpa_kwargs() | {"scale": 4.0})))
    assert_bitwise_equal(f"{case.name} {dtype} lookup", out, expected)


@pytest.mark.parametrize("operand", ("q", "k"))
@pytest.mark.parametrize("name", ("square_s193_d64", "square_s193_d128_causal"))
@BY_FAMILY
def test_nan_stays_where_math_puts_it(kernels_on, name, operand, family):
    case = case_named(name)
    inputs = make_inputs(case, kernels_on, SEED)
    getattr(inputs, operand)[0, 1, 150, 3] = float("nan")
    with torch.no_grad():
        out = forced(family, lambda: attend(inputs, case))
    exact, low = oracle(case, inputs), plain(case, inputs)
    assert_within_budget(f"{name} nan in {operand}", out, exact.out, low.out, seed=SEED)


@BY_FAMILY
def test_equal_huge_scores_weigh_alike(kernels_on, family):
    q, k, v = (torch.full_like(tensor, HUGE) for tensor in make_inputs(case_named("square_s256_d64"), kernels_on, SEED))
    with torch.no_grad():
        out = forced(family, lambda: F.scaled_dot_product_attention(q, k, v))
    assert torch.equal(out, v)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@BY_FAMILY
def test_the_largest_of_huge_scores_takes_all(kernels_on, causal, family):
    q, k, v = make_inputs(case_named("square_s256_d64"), kernels_on, SEED)
    q, k = q * HUGE, k * HUGE
    with torch.no_grad():
        out = forced(family, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    scores = q.double() @ k.double().mT
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    first, second = scores.topk(2).values.unbind(-1)
    clear = first - second > 1e-5 * first.abs()  # no tie that the fp32 sum over D could have broken
    winners = v.gather(2, scores.argmax(-1, keepdim=True).expand_as(v))
    assert clear.float().mean() > 0.9
    assert torch.equal(out[clear], winners[clear])


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
def test_same_bits_every_time(name, family):
    case = case_named(name)
    inputs = make_inputs(case, "cuda", SEED)
    with torch.no_grad():
        first = forced(family, lambda: attend(inputs, case))
        for _ in range(20):
            poison_outputs(case, "cuda")
            assert_bitwise_equal(name, forced(family, lambda: attend(inputs, case)), first)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REPEATED)
@BY_FAMILY
def test_no_race_in_1000_runs(name, family):
    """Two streams keep the SMs unevenly busy, so that warps meet in orders that a quiet GPU never shows."""
    case = case_named(name)
    inputs = make_inputs(case, "cuda", SEED)
    noise = torch.randn(1024, 1024, device="cuda")
    side = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.no_grad(), torch_flashplug.sdpa_backend(family):
        first = attend(inputs, case)
        torch.cuda.synchronize()
        for i in range(1000):
            if i % 3 == 0:
                with torch.cuda.stream(side):
                    noise @ noise
            wrong += (attend(inputs, case) != first).sum()
    torch.cuda.synchronize()
    assert int(wrong) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("replayed", (False, True), ids=("eager", "graphs"))
@pytest.mark.parametrize("name", ("gqa4_d64_causal", "odd_tail_sq4099_d128_causal", "many_heads_d64"))
@BY_FAMILY
def test_streams_side_by_side(name, replayed, family):
    """One kernel in flight on three streams at once: what it keeps between its CTAs belongs to one launch alone."""
    case = case_named(name)
    streams = [torch.cuda.Stream() for _ in range(3)]
    every = [make_inputs(case, "cuda", SEED + i) for i in range(len(streams))]
    wrong = torch.zeros(len(streams), dtype=torch.int64, device="cuda")
    with torch.no_grad(), torch_flashplug.sdpa_backend(family):
        expected = [attend(inputs, case) for inputs in every]
        torch.cuda.synchronize()
        calls = [lambda inputs=inputs: attend(inputs, case) for inputs in every]
        if replayed:
            calls = [_graph_of(call) for call in calls]
        for _ in range(100):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    wrong[i] += (calls[i]() != expected[i]).sum()
        torch.cuda.synchronize()
    assert wrong.tolist() == [0] * len(streams)


def _graph_of(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Replays one captured call; the output is the same tensor each time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("gqa4_d64_causal", "square_s513_d128", "cross_77_d128"))
@BY_FAMILY
def test_graph_replay_equals_eager(name, family):
    case = case_named(name)
    inputs, others = make_inputs(case, "cuda", SEED), make_inputs(case, "cuda", SEED + 1)
    with torch.no_grad(), torch_flashplug.sdpa_backend(family):
        expected, expected_others = attend(inputs, case), attend(others, case)
        torch.cuda.synchronize()
        replay = _graph_of(lambda: attend(inputs, case))
    assert_bitwise_equal(f"{name} replay", replay(), expected)
    for held, new in zip(inputs, others, strict=True):
        held.copy_(new)
    assert_bitwise_equal(f"{name} replay on new inputs", replay(), expected_others)


# ---- memory and size ----


@pytest.mark.gpu
@pytest.mark.parametrize("length", (65536, 131072))
@BY_FAMILY
def test_memory_is_outputs_and_a_constant(length, family):
    case = new_case("long", (1, 4, 2), (length, length), (128, 128), "causal")
    inputs = make_inputs(case, "cuda", SEED)
    with torch.no_grad():
        forced(family, lambda: attend(inputs, case))  # modules are loaded before the measurement
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = forced(family, lambda: attend(inputs, case))
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    lse_bytes = case.B * case.Hq * case.Sq * 4
    assert peak <= out.numel() * out.element_size() + lse_bytes + (1 << 20), f"{peak} bytes over the inputs"


def _heads_checked(inputs: Inputs, out: Tensor, case: Case, where: tuple[tuple[int, int], ...]) -> None:
    for batch, head in where:
        kv_head = head // (case.Hq // case.Hkv)
        few = Inputs(
            inputs.q[batch, head][None, None], *(t[batch, kv_head][None, None] for t in (inputs.k, inputs.v)), inputs.q
        )
        exact, low = oracle(case, few), plain(case, few)
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
def test_more_than_2g_elements(case, family):
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
        out = forced(family, lambda: attend(inputs, case))
    _heads_checked(inputs, out, case, ((0, 0), (case.B - 1, case.Hq - 1), (case.B // 2, case.Hq // 2)))


@pytest.mark.gpu
@BY_FAMILY
def test_strides_of_more_than_2g_elements(family):
    """A small view of a large buffer: the offset of a batch entry does not fit 32 bits."""
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
        out = forced(family, lambda: attend(inputs, case))
    exact, low = oracle(case, near), plain(case, near)
    assert_within_budget("far_apart out", out, exact.out, low.out, seed=SEED)
