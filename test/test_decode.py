"""Decode: few query rows against many keys, and keys split among CTAs. Without a GPU: how many splits, and that traced
graphs keep them. On a GPU: numbers at the edges of blocks, tiles and splits; caches read in place; graphs, streams,
chains of calls, gradients. The named cases with tag "decode" run in test_numerics and test_gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from conftest import CUDA
from graphs import AUTO, FA3, Recorder, check_against_eager, sdpa
from standin import Road
from torch import Tensor
from torch._dynamo.utils import counters

import torch_flashplug
from torch_flashplug import choices, configs, native, sdpa_backend
from torch_flashplug.api import DEVICES
from torch_flashplug.spec import CLUSTER
from torch_flashplug.testing import (
    Case,
    Inputs,
    assert_bitwise_equal,
    assert_lse,
    assert_within_budget,
    case_named,
    make_inputs,
    make_lookup,
    new_case,
    oracle,
    oracle_grads,
    plain,
    plain_grads,
)
from torch_flashplug.testing.budget import GRAD_FACTOR

SEED = 20261122
MOST = 255  # splits that a mode word holds
CAPACITY = 1100  # keys of a cache
CAUSAL_TEXT = "num_splits=4, keys are split without is_causal only; use num_splits=1"


def forced(num_splits: int) -> int:
    """Mode word of ours with that many splits; 0: as many as the gate says."""
    return sdpa_backend("fa3", num_splits=num_splits).mode


def planned(case: Case, num_splits: int = 0, device: dict[str, int] = DEVICES["h100"]) -> dict:
    """The plan of a forced call."""
    dtypes = {f"dtype_{operand}": native.DTYPE_IDS[case.dtype] for operand in "qkv"}
    return native.plan(case.sizes() | dtypes, device, forced(num_splits))


# ---- without a GPU: how many splits ----


@pytest.fixture
def own_table() -> Iterator[None]:
    """Round figures: 1 us for a block of keys, 1.2 us for a cluster, 1.5 us for a second kernel."""
    rows = [configs.KernelRow("fwd", 90, 64, 64, mask, 64, 128, 2) for mask in ("full", "causal")]
    gate = choices.Gate(64, 0.8, cluster_ns=1200, cluster_rate=30, combine_ns=1500, combine_rate=1500, read_rate=3000)
    native.push_rows((*rows, configs.KernelRow("decode", 90, 64, 64, "full", 64, 64, 4, 1000)), (), gate)
    yield
    native.push_rows(configs.KERNEL_ROWS, choices.CHOICE_ROWS, choices.GATE)


@pytest.mark.usefixtures("own_table")
@pytest.mark.parametrize(
    "heads, rows, wanted, tiles, splits",
    [
        ((64, 32, 8), (1, 8192), 0, 512, 1),  # more tiles than SMs
        ((67, 1, 1), (1, 8192), 0, 67, 1),  # twice as many CTAs would be more than SMs
        ((66, 1, 1), (1, 8192), 0, 66, 2),
        ((1, 32, 8), (1, 8192), 0, 8, 16),
        ((1, 1, 1), (1, 1 << 20), 0, 1, 132),
        ((1, 32, 8), (16, 193), 0, 8, 4),  # no more than blocks of keys
        ((1, 32, 8), (1, 128), 0, 8, 1),  # the cluster would cost more than the block that is spared
        ((1, 32, 8), (1, 512), 0, 8, 8),
        ((1, 32, 8), (1, 1024), 0, 8, 16),  # and eight blocks cost more than the second kernel
        ((64, 32, 8), (1, 8192), 4, 512, 4),  # forced, whatever the gate says,
        ((1, 32, 8), (1, 8192), 1, 8, 1),
        ((1, 32, 8), (1, 129), MOST, 8, 3),  # yet at most one a block,
        ((1, 32, 8), (1, 1 << 20), MOST, 8, MOST),
        ((2, 8, 8), (1000, 1000), 4, 256, 4),  # of more rows than a tile has, too,
        ((1, 32, 32), (100000, 1 << 20), MOST, 50016, 10),  # and partial results are counted in 32 bits
    ],
)
def test_splits(heads, rows, wanted, tiles, splits):
    plan = planned(new_case("gate", heads, rows, (64, 64)), wanted)
    assert (plan["backend"], plan["kernel"]) == ("fa3", "decode_sm90_bf16_d64_full_m64n64s4")
    assert (plan["tiles"], plan["splits"]) == (tiles, splits)


@pytest.mark.usefixtures("own_table")
def test_other_calls_are_not_split():
    for rows in ((1, 8192), (1000, 1000)):
        causal = new_case("causal", (1, 32, 8), rows, (64, 64), "causal")
        assert planned(causal, 4)["reasons"]["fa3"] == CAUSAL_TEXT
        assert planned(causal, 1)["kernel"] == "fwd_sm90_bf16_d64_causal_m64n128s2"
    more_rows = new_case("rows", (1, 32, 8), (17, 8192), (64, 64))
    assert {planned(more_rows, wanted)["kernel"] for wanted in (0, 1)} == {"fwd_sm90_bf16_d64_full_m64n128s2"}


@pytest.mark.parametrize("backend, splits", [("fa3", 256), ("fa3", -1), ("math", 2), ("auto", 1), ("fa2", 2)])
def test_bad_num_splits(backend, splits):
    with pytest.raises(ValueError, match=rf"num_splits={splits} with '{backend}'; use 1 to 255, with 'fa3' alone"):
        sdpa_backend(backend, num_splits=splits)


def test_blocks_nest_with_their_splits():
    q, k = (torch.empty(1, heads, rows, 64, dtype=torch.bfloat16, device="meta") for heads, rows in ((8, 1), (2, 640)))
    with sdpa_backend("fa3", num_splits=3):
        for inner, splits in ((MOST, 10), (2, 2)):
            with sdpa_backend("fa3", num_splits=inner):
                assert torch_flashplug.explain(q, k, k, enable_gqa=True, device="h100").splits == splits
            assert native.mode() == FA3 | 3 << 8
    assert native.mode() == AUTO


# ---- on both roads ----


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, enable_gqa=True)


def test_causal_call_with_splits_is_an_error(any_road: Road) -> None:
    with sdpa_backend("fa3", num_splits=4), pytest.raises(RuntimeError, match=CAUSAL_TEXT):
        sdpa(*any_road.qkv(), is_causal=True)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("grad", [False, True])
def test_a_graph_keeps_the_splits(any_road: Road, grad: bool) -> None:
    recorder, function = Recorder(), sdpa_backend("fa3", num_splits=3)(attend)
    compiled = torch.compile(function, fullgraph=True, backend=recorder)
    check_against_eager(any_road, function, compiled, grad=grad, rows=200)
    assert recorder.forwards == [[("fwd", forced(3))]] and recorder.backwards == [[("bwd", forced(3))]] * grad


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["auto", "fa3"])
def test_one_graph_while_keys_grow(road: Road, backend: str) -> None:
    recorder, function = Recorder(), sdpa_backend(backend)(attend)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=recorder)
    for keys in (100, 101, 128, 129, 1000):
        inputs = road.qkv(rows=1, keys=keys, heads=8, kv_heads=2)
        want = function(*inputs)
        road.took()
        torch.testing.assert_close(compiled(*inputs), want, atol=2e-2, rtol=2e-2)
        assert road.took()["ours_fwd"] == 1
    assert len(recorder.forwards) == 1


# ---- on a GPU: numbers ----


def run(inputs: Inputs, case: Case, num_splits: int) -> tuple[Tensor, Tensor]:
    """out, lse"""
    return torch.ops.torch_flashplug.sdpa_fwd(*inputs, None, 0.0, 0, case.scale, forced(num_splits))[:2]


def bytes_needed(case: Case, splits: int) -> tuple[int, int, int]:
    """Of out, LSE and partial results, or of one float where there are none: up to a cluster."""
    rows = case.B * case.Hq * case.Sq
    return 2 * rows * case.Dv, 4 * rows, 4 * (rows * splits * (case.Dv + 1) if splits > CLUSTER else 1)


def poison(case: Case, splits: int) -> None:
    """Leaves NaN, in any dtype, in the allocator's free blocks of these sizes: what a kernel does not write shows."""
    held = [torch.full((n,), 0xFF, dtype=torch.uint8, device="cuda") for n in 2 * bytes_needed(case, splits)]
    del held


def check(case: Case, inputs: Inputs, wanted: Iterable[int], kernel: str = "decode_") -> None:
    """Out and LSE within their budgets, once for each number of splits that `wanted` comes down to."""
    exact, low = oracle(case, inputs), plain(case, inputs)
    plans = {num_splits: planned(case, num_splits, native.device_facts()) for num_splits in wanted}
    assert all(plan["kernel"].startswith(kernel) for plan in plans.values()), plans
    for splits, num_splits in {plan["splits"]: num_splits for num_splits, plan in plans.items()}.items():
        poison(case, splits)
        out, lse = run(inputs, case, num_splits)
        assert_within_budget(f"{case.name} in {splits} splits", out, exact.out, low.out, seed=SEED)
        assert_lse(f"{case.name} in {splits} splits", lse, exact.lse, low.lse, seed=SEED)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", configs.specs(90, "decode"), ids=lambda spec: spec.name())
def test_every_kernel_at_its_edges(spec):
    """One tile of rows; then several, which forced splits alone bring here."""
    groups, keys = ((1, 1), (4, 1), (9, 7), (4, 16)), (1, 63, 64, 65, 127, 129, 1000)
    shapes = [((2, 2 * group, 2), (sq, sk), (MOST, 3, 2, 1, 0)) for group, sq in groups for sk in keys]
    larger = (((2, 2, 2), (65, 200)), ((1, 8, 2), (33, 1000)), ((2, 3, 1), (129, 65)), ((1, 4, 1), (32, 64)))
    shapes += [(heads, rows, (2, 3, MOST)) for heads, rows in larger]
    for i, (heads, rows, wanted) in enumerate(shapes):
        dims = (spec.d - i % 2 * 8, spec.dv - i % 2 * 8)
        case = new_case(f"{spec.name()} heads {heads} rows {rows} dims {dims}", heads, rows, dims, dtype=spec.dtype)
        check(case, make_inputs(case, "cuda", SEED), wanted, spec.name())


@pytest.mark.gpu
@pytest.mark.parametrize("heads, rows, dim", [((1, 1, 1), 1, 128), ((3, 3, 1), 1, 40), ((1, 5, 1), 14, 256)])
def test_many_splits(heads, rows, dim):
    """At and beside where the combining kernel changes its ways; unequal splits of 257 blocks."""
    case = new_case(f"many_splits_{rows}_d{dim}", heads, (rows, 16385), (dim, dim), dtype="fp16")
    check(case, make_inputs(case, "cuda", SEED), (2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 128, MOST))


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", (0, 1, 5, 16, MOST))
@pytest.mark.parametrize(
    "name", ("decode_1x8k_d128_gqa4", "decode_h4x4_d64v64_64x1000", "decode_h8x2_d192v128_1x4097", "square_s513_d128")
)
def test_lookup_is_exact(name, num_splits):
    """Each row selects one key, so a wrong index is a wrong integer; and all splits but one weigh nothing."""
    inputs, expected = make_lookup(case_named(name), "cuda", SEED)
    with sdpa_backend("fa3", num_splits=num_splits), torch.no_grad():
        out = sdpa(*inputs, scale=4.0, enable_gqa=True)
    assert_bitwise_equal(f"{name} lookup", out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("operand, value", [("q", torch.nan), ("k", torch.nan), ("v", torch.nan), ("v", torch.inf)])
def test_special_values_stay_where_math_puts_them(operand, value):
    """In the last row or key: of the last split, whose partial results others may be padded with."""
    case = case_named("decode_h8x2_d72v40_7x1000")
    inputs = make_inputs(case, "cuda", SEED)
    getattr(inputs, operand)[1, 1, -1, 3] = value
    check(case, inputs, (1, 3, MOST))


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", (0, 3, MOST))
@pytest.mark.parametrize("name", ("decode_h8x2_d64v64_16x65", "decode_1x8k_d128_gqa4", "decode_h6x2_d184v120_4x129"))
def test_gradients_follow_split_forwards(name, num_splits):
    case = case_named(name)
    inputs = make_inputs(case, "cuda", SEED, requires_grad=True)
    native.counters(reset=True)
    with sdpa_backend("fa3", num_splits=num_splits):
        out = attend(*inputs)
    got = torch.autograd.grad(out, tuple(inputs), inputs.grad_out)
    assert (native.counters()["ours_fwd"], native.counters()["ours_bwd"]) == (1, 1)
    for which, ours, fp64, low in zip("qkv", got, oracle_grads(case, inputs), plain_grads(case, inputs), strict=True):
        assert_within_budget(f"{name} d{which}", ours, fp64, low, factor=GRAD_FACTOR, seed=SEED)


# ---- on a GPU: caches as programs keep them ----


def cache_views(layout: str, batch: int, heads: int, keys: int, dim: int) -> tuple[Tensor, Tensor]:
    """K and V (batch, heads, keys, dim) in a cache that is NaN beyond; "expanded": stored once for the whole batch."""
    stored = 1 if layout == "expanded" else batch
    sizes, order = {
        "bshd": ((2, stored, CAPACITY, heads, dim), (0, 1, 3, 2, 4)),
        "packed": ((stored, CAPACITY, 2, heads, dim), (2, 0, 3, 1, 4)),
    }.get(layout, ((2, stored, heads, CAPACITY, dim), (0, 1, 2, 3, 4)))
    both = torch.full(sizes, torch.nan, dtype=torch.bfloat16, device="cuda").permute(order)[:, :, :, :keys].normal_()
    return both.expand(2, batch, heads, keys, dim).unbind(0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", (0, 1, 3, 12))
@pytest.mark.parametrize("layout", ("bhsd", "bshd", "packed", "expanded"))
def test_caches_are_read_in_place(layout, num_splits):
    """The allocator is asked for out, LSE and partial results, in blocks of 512 bytes, and for nothing else."""
    torch.manual_seed(SEED)
    for sq, sk in itertools.product((1, 3), (1, 64, 65, 1000)):
        case = new_case(f"{layout} {sq}x{sk}", (3, 8, 2), (sq, sk), (128, 128))
        projected = torch.randn(3, sq, 8 + 2 + 2, 128, dtype=torch.bfloat16, device="cuda")  # q, k, v of one product
        q = projected[:, :, :8].transpose(1, 2)
        inputs = Inputs(q, *cache_views(layout, 3, 2, sk, 128), grad_out=q)
        with sdpa_backend("fa3", num_splits=num_splits), torch.no_grad():
            attend(*inputs)  # loads kernels
            before, out, after = torch.cuda.memory_stats(), attend(*inputs), torch.cuda.memory_stats()
        assert_within_budget(case.name, out, oracle(case, inputs).out, plain(case, inputs).out, seed=SEED)
        splits = planned(case, num_splits, native.device_facts())["splits"]
        needed = [-(-n // 512) * 512 for n in bytes_needed(case, splits)]
        for what, most in (("allocation", len(needed)), ("allocated_bytes", sum(needed))):
            assert after[f"{what}.all.allocated"] - before[f"{what}.all.allocated"] <= most, case.name


# ---- on a GPU: graphs, streams, chains ----

REPEATED = pytest.mark.parametrize(
    "name, num_splits", [("decode_1x8k_d128_gqa4", 0), ("decode_1x8k_d128_gqa4", 1), ("decode_h8x2_d72v40_7x1000", 3),
                         ("decode_h8x2_d256v256_1x4097", 33), ("gqa8_d64", 4)],
)  # fmt: skip


def graph_of(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Replays one captured call, whose output is poisoned before; it is the same tensor each time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> Tensor:
        out.fill_(torch.nan)
        graph.replay()
        return out

    return replay


@pytest.mark.gpu
@REPEATED
def test_same_bits_in_1000_replays(name, num_splits):
    """Another stream keeps the SMs unevenly busy, so that CTAs meet in orders that a quiet GPU never shows."""
    inputs = make_inputs(case_named(name), "cuda", SEED)
    noise, side = torch.randn(1 << 20, device="cuda"), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.no_grad(), sdpa_backend("fa3", num_splits=num_splits):
        first, replay = attend(*inputs), graph_of(lambda: attend(*inputs))
        torch.cuda.synchronize()
        for i in range(1000):
            if i % 3 == 0:
                with torch.cuda.stream(side):
                    noise.sin_()
            wrong += (replay() != first).sum()
        torch.cuda.synchronize()
    assert int(wrong) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("replayed", (False, True), ids=("eager", "graphs"))
@REPEATED
def test_streams_side_by_side(name, num_splits, replayed):
    """Partial results belong to one launch alone."""
    every = [make_inputs(case_named(name), "cuda", SEED + i) for i in range(3)]
    streams = [torch.cuda.Stream() for _ in every]
    wrong = torch.zeros(len(every), dtype=torch.int64, device="cuda")
    with torch.no_grad(), sdpa_backend("fa3", num_splits=num_splits):
        expected = [attend(*inputs) for inputs in every]
        calls = [lambda inputs=inputs: attend(*inputs) for inputs in every]
        calls = [graph_of(call) for call in calls] if replayed else calls
        torch.cuda.synchronize()
        for _, (i, stream) in itertools.product(range(200), enumerate(streams)):
            with torch.cuda.stream(stream):
                wrong[i] += (calls[i]() != expected[i]).sum()
        torch.cuda.synchronize()
    assert wrong.tolist() == [0] * len(every)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", (0, 1, 3, 10))
def test_a_chain_of_calls(num_splits):
    """What calls wrote, as query and as last key, is not read too early by kernels that are launched ahead of time. The
    large scale keeps a chain far from where all queries are alike.
    """
    torch.manual_seed(SEED)
    start = torch.randn(2, 8, 1, 64, dtype=torch.bfloat16, device="cuda")
    caches = cache_views("bshd", 2, 2, CAPACITY, 64)

    def chain(pause: Callable[[], None] = lambda: None) -> Tensor:
        (k, v), q = (cache.clone() for cache in caches), start
        for keys in range(600, 624):
            for _ in range(2):
                q = sdpa(q, k[:, :, :keys], v[:, :, :keys], scale=4.0, enable_gqa=True)
                pause()
            k[:, :, keys], v[:, :, keys] = q[:, ::4, 0], q[:, 3::4, 0]
        return q

    with torch.no_grad(), sdpa_backend("fa3", num_splits=num_splits):
        expected, replay = chain(torch.cuda.synchronize), graph_of(chain)
        assert expected.isfinite().all()
        for _ in range(20):
            assert_bitwise_equal("chain", chain(), expected)
            assert_bitwise_equal("chain in a graph", replay(), expected)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("road", [CUDA], indirect=True)
@pytest.mark.parametrize("backend", ("auto", "fa3"))
def test_eager_compiled_and_captured_give_the_same_bits(road: Road, backend: str) -> None:
    function = sdpa_backend(backend)(attend)
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    counters.clear()
    for keys in (100, 101, 1000, 4097):
        inputs, case = road.qkv(rows=1, keys=keys, heads=8, kv_heads=2), case_named("decode_h8x2_d64v64_1x4097")
        with torch.no_grad():
            eager = function(*inputs)
            assert_bitwise_equal(f"{keys} keys compiled", compiled(*inputs), eager)
            assert_bitwise_equal(f"{keys} keys captured", graph_of(lambda args=inputs: function(*args))(), eager)
        assert_within_budget(f"{keys} keys", eager, oracle(case, inputs).out, plain(case, inputs).out)
        assert road.took()["ours_fwd"] == 3
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.isolated(240)
def test_split_for_the_first_time_under_capture() -> None:
    """One kernel has never run, the other only unsplit: their modules and the combining kernel's are loaded here."""
    for name, warm, splits in (("decode_h8x2_d64v64_1x4097", False, 12), ("decode_1x8k_d128_gqa4", True, 3)):
        inputs = make_inputs(case := case_named(name), "cuda", SEED)
        if warm:
            run(inputs, case, 1)
        replay = graph_of(lambda args=(inputs, case, splits): run(*args)[0])
        assert_bitwise_equal(case.name, replay(), run(inputs, case, splits)[0])
