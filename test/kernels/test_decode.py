"""Decode: few query rows against many keys, and keys split among CTAs.

Without a GPU, the tests check the splits of traced graphs. On a GPU, the tests check results at the edges of blocks,
tiles and splits, caches read in place, graphs, streams, chains of calls, and gradients. The number of splits
is tested in test_split_heuristic.py. Named cases with the tag "decode" run in test_numerics.py and test_gradients.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from conftest import CUDA
from cuda_graphs import capture_graph
from device_backend import DeviceBackend
from forced_splits import CAUSAL_TEXT, MAX_SPLITS, forced_mode, plan_of_forced_call
from torch import Tensor
from torch._dynamo.utils import counters
from traced_graphs import Recorder, check_against_eager, sdpa

from torch_flashplug import sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import kernel_table
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
CAPACITY = 1100  # capacity of a cache in keys
FAMILIES = {90: "fa3", 80: "fa2"}  # keyed by the architecture of the kernels
BY_FAMILY = pytest.mark.parametrize("family", FAMILIES.values())
KERNELS = [spec for arch in FAMILIES for spec in kernel_table.specs(arch, "decode") if not spec.features]


# ---- with both device backends ----


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, enable_gqa=True)


def test_causal_call_with_forced_splits_raises(hooked_backend: DeviceBackend) -> None:
    with sdpa_backend("fa3", num_splits=4), pytest.raises(RuntimeError, match=re.escape(CAUSAL_TEXT)):
        sdpa(*hooked_backend.qkv(), is_causal=True)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("grad", [False, True])
def test_compiled_graph_keeps_the_number_of_splits(hooked_backend: DeviceBackend, grad: bool) -> None:
    recorder, function = Recorder(), sdpa_backend("fa3", num_splits=3)(attend)
    compiled = torch.compile(function, fullgraph=True, backend=recorder)
    check_against_eager(hooked_backend, function, compiled, grad=grad, rows=200)
    assert recorder.forwards == [[("fwd", forced_mode(3))]] and recorder.backwards == [[("bwd", forced_mode(3))]] * grad


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["auto", "fa3"])
def test_one_compiled_graph_serves_a_growing_cache(device_backend: DeviceBackend, backend: str) -> None:
    recorder, function = Recorder(), sdpa_backend(backend)(attend)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=recorder)
    for keys in (100, 101, 128, 129, 1000):
        inputs = device_backend.qkv(rows=1, keys=keys, heads=8, kv_heads=2)
        expected = function(*inputs)
        device_backend.pop_path_counts()
        torch.testing.assert_close(compiled(*inputs), expected, atol=2e-2, rtol=2e-2)
        assert device_backend.pop_path_counts()["ours_fwd"] == 1
    assert len(recorder.forwards) == 1


# ---- on a GPU: numbers ----


def run_op(inputs: Inputs, case: Case, num_splits: int, family: str = "fa3") -> tuple[Tensor, Tensor]:
    """Return the output and the LSE of the plugin op."""
    return torch.ops.torch_flashplug.sdpa_fwd(*inputs, None, 0.0, 0, case.scale, forced_mode(num_splits, family))[:2]


def num_output_bytes(case: Case, plan: dict) -> tuple[int, int, int]:
    """Return the bytes of the output, the LSE and the partial results.

    If a cluster reduces the partial results, the buffer is a single float.
    """
    rows, splits = case.B * case.Hq * case.Sq, plan["splits"]
    return 2 * rows * case.Dv, 4 * rows, 4 * (rows * splits * (case.Dv + 2) if splits > plan["cluster"] else 1)


def poison_allocator(case: Case, plan: dict, device: torch.device) -> None:
    """Fill free blocks of the allocator with NaN in any dtype, so that elements not written by the kernel show."""
    blocks = [torch.full((n,), 0xFF, dtype=torch.uint8, device=device) for n in 2 * num_output_bytes(case, plan)]
    del blocks


def check_splits(
    case: Case, inputs: Inputs, requested_splits: Iterable[int], kernel: str = "decode_", family: str = "fa3"
) -> None:
    """Check output and LSE against their budgets, once for each distinct number of splits.

    Different entries of `wanted` can give equal numbers of splits.
    """
    exact, low = oracle(case, inputs), plain(case, inputs)
    plans = {
        num_splits: plan_of_forced_call(case, num_splits, bindings.device_facts(), family)
        for num_splits in requested_splits
    }
    assert all(plan["kernel"].startswith(kernel) for plan in plans.values()), plans
    for splits, num_splits in {plan["splits"]: num_splits for num_splits, plan in plans.items()}.items():
        poison_allocator(case, plans[num_splits], inputs.q.device)
        out, lse = run_op(inputs, case, num_splits, family)
        assert_within_budget(f"{case.name} in {splits} splits", out, exact.out, low.out, seed=SEED)
        assert_lse(f"{case.name} in {splits} splits", lse, exact.lse, low.lse, seed=SEED)


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name())
def test_every_decode_kernel_at_tile_and_block_edges(kernels_on, spec):
    """Calls have one tile of rows, then several tiles.

    Tiles of 128 rows serve calls with more than 64 rows. Unsplit calls of this kind may run unpacked. Interpreted runs
    use every tenth shape.
    """
    tiles = {candidate.tile_m for candidate in KERNELS if replace(candidate, tile_m=0, tile_n=0, stages=0) == replace(
        spec, tile_m=0, tile_n=0, stages=0)}  # fmt: skip
    below = max((tile for tile in tiles if tile < spec.tile_m), default=0)  # rows covered by a smaller tile
    groups, requested_splits = ((1, 1), (4, 1), (9, 7), (4, 16), (17, 1), (5, 3)), (MAX_SPLITS, 3, 2, 1, 0)
    if below >= 64:
        groups, requested_splits = ((65, 1), (17, 4), (8, 16)), (MAX_SPLITS, 3, 2)
    groups = [(group, sq) for group, sq in groups if below < group * sq <= spec.tile_m]
    n = spec.tile_n
    keys = (1, n - 1, n, n + 1, 2 * n - 1, 2 * n + 1, 1000)
    shapes = [((2, 2 * group, 2), (sq, sk), requested_splits) for group, sq in groups for sk in keys]
    if spec.tile_m == max(tiles):
        larger = (((2, 2, 2), (65, 200)), ((1, 8, 2), (33, 1000)), ((2, 3, 1), (129, 65)), ((1, 4, 1), (32, 64)))
        shapes += [(heads, rows, (2, 3, MAX_SPLITS)) for heads, rows in larger]
    for i, (heads, rows, requested_splits) in list(enumerate(shapes))[:: 1 if kernels_on == "cuda" else 10]:
        dims = (spec.d - i % 2 * 8, spec.dv - i % 2 * 8)
        case = new_case(f"{spec.name()} heads {heads} rows {rows} dims {dims}", heads, rows, dims, dtype=spec.dtype)
        check_splits(case, make_inputs(case, kernels_on, SEED), requested_splits, spec.name(), FAMILIES[spec.arch])


@pytest.mark.gpu
@pytest.mark.parametrize("heads, rows, dim", [((1, 32, 8), (33, 8192), 128), ((2, 16, 2), (24, 4099), 64),
                                              ((4, 8, 1), (32, 2001), 96), ((1, 8, 1), (17, 1023), 256)])  # fmt: skip
@BY_FAMILY
def test_more_than_64_packed_rows(family, heads, rows, dim):
    """Calls have more than 64 rows, and nothing is forced."""
    case = new_case(f"wide_{rows}_d{dim}", heads, rows, (dim, dim))
    check_splits(case, make_inputs(case, "cuda", SEED), (0,), family=family)


@pytest.mark.gpu
@pytest.mark.parametrize("heads, rows, dim", [((1, 1, 1), 1, 128), ((2, 30, 15), 1, 40), ((1, 5, 1), 14, 256)])
@BY_FAMILY
def test_many_splits_at_switching_points_of_the_combine_kernel(family, heads, rows, dim):
    """The numbers of splits surround the switching points of the combine kernel's algorithm.

    The 257 blocks are split unevenly.
    """
    case = new_case(f"many_splits_{rows}_d{dim}", heads, (rows, 16385), (dim, dim), dtype="fp16")
    check_splits(
        case,
        make_inputs(case, "cuda", SEED),
        (2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 128, MAX_SPLITS),
        family=family,
    )


@pytest.mark.parametrize("num_splits", (0, 1, 5, 16, MAX_SPLITS))
@pytest.mark.parametrize(
    "name", ("decode_1x8k_d128_gqa4", "decode_h4x4_d64v64_64x1000", "decode_h8x2_d192v128_1x4097", "square_s513_d128")
)
@BY_FAMILY
def test_decode_lookup_is_exact(kernels_on, family, name, num_splits):
    """Each row selects one key, so a wrong index gives a wrong integer; only one split has weight."""
    inputs, expected = make_lookup(case_named(name), kernels_on, SEED)
    with sdpa_backend(family, num_splits=num_splits), torch.no_grad():
        out = sdpa(*inputs, scale=4.0, enable_gqa=True)
    assert_bitwise_equal(f"{name} lookup", out, expected)


@pytest.mark.parametrize("operand, value", [("q", torch.nan), ("k", torch.nan), ("v", torch.nan), ("v", torch.inf)])
def test_nan_and_infinity_in_the_last_split_stay_local(kernels_on, operand, value):
    """The special value is in the last row or key of the last split, where padded partial results could spread it."""
    case = case_named("decode_h8x2_d72v40_7x1000")
    inputs = make_inputs(case, kernels_on, SEED)
    getattr(inputs, operand)[1, 1, -1, 3] = value
    check_splits(case, inputs, (1, 3, MAX_SPLITS))


@pytest.mark.parametrize("num_splits", (0, 3, MAX_SPLITS))
@pytest.mark.parametrize("name", ("decode_h8x2_d64v64_16x65", "decode_1x8k_d128_gqa4", "decode_h6x2_d184v120_4x129"))
def test_gradients_after_a_split_forward(kernels_on, name, num_splits):
    case = case_named(name)
    inputs = make_inputs(case, kernels_on, SEED, requires_grad=True)
    bindings.counters(reset=True)
    with sdpa_backend("fa3", num_splits=num_splits):
        out = attend(*inputs)
    grads = torch.autograd.grad(out, tuple(inputs), inputs.grad_out)
    assert (bindings.counters()["ours_fwd"], bindings.counters()["ours_bwd"]) == (1, 1)
    for operand, grad, fp64, low in zip(
        "qkv", grads, oracle_grads(case, inputs), plain_grads(case, inputs), strict=True
    ):
        assert_within_budget(f"{name} d{operand}", grad, fp64, low, factor=GRAD_FACTOR, seed=SEED)


# ---- on a GPU: caches of real programs ----


def make_cache_views(layout: str, batch: int, heads: int, keys: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return K and V (batch, heads, keys, dim) as views of a cache that is NaN behind the keys.

    With the layout "expanded", the cache is stored once for the whole batch.
    """
    stored = 1 if layout == "expanded" else batch
    sizes, order = {
        "bshd": ((2, stored, CAPACITY, heads, dim), (0, 1, 3, 2, 4)),
        "packed": ((stored, CAPACITY, 2, heads, dim), (2, 0, 3, 1, 4)),
    }.get(layout, ((2, stored, heads, CAPACITY, dim), (0, 1, 2, 3, 4)))
    cache = torch.full(sizes, torch.nan, dtype=torch.bfloat16, device="cuda").permute(order)[:, :, :, :keys].normal_()
    return cache.expand(2, batch, heads, keys, dim).unbind(0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", (0, 1, 3, 12))
@pytest.mark.parametrize("layout", ("bhsd", "bshd", "packed", "expanded"))
def test_strided_caches_are_read_in_place(layout, num_splits):
    """The allocator provides output, LSE and partial results in blocks of 512 bytes, and nothing else."""
    torch.manual_seed(SEED)
    for sq, sk in itertools.product((1, 3), (1, 64, 65, 1000)):
        case = new_case(f"{layout} {sq}x{sk}", (3, 8, 2), (sq, sk), (128, 128))
        # q, k, v come from a single product
        projected = torch.randn(3, sq, 8 + 2 + 2, 128, dtype=torch.bfloat16, device="cuda")
        q = projected[:, :, :8].transpose(1, 2)
        inputs = Inputs(q, *make_cache_views(layout, 3, 2, sk, 128), grad_out=q)
        with sdpa_backend("fa3", num_splits=num_splits), torch.no_grad():
            attend(*inputs)  # loads the kernels
            before, out, after = torch.cuda.memory_stats(), attend(*inputs), torch.cuda.memory_stats()
        assert_within_budget(case.name, out, oracle(case, inputs).out, plain(case, inputs).out, seed=SEED)
        needed = [
            -(-n // 512) * 512
            for n in num_output_bytes(case, plan_of_forced_call(case, num_splits, bindings.device_facts()))
        ]
        for statistic, limit in (("allocation", len(needed)), ("allocated_bytes", sum(needed))):
            assert after[f"{statistic}.all.allocated"] - before[f"{statistic}.all.allocated"] <= limit, case.name


# ---- on a GPU: graphs, streams, chains ----

REPEATED = pytest.mark.parametrize(
    "name, num_splits", [("decode_1x8k_d128_gqa4", 0), ("decode_1x8k_d128_gqa4", 1), ("decode_h8x2_d72v40_7x1000", 3),
                         ("decode_h8x2_d256v256_1x4097", 33), ("gqa8_d64", 4)],
)  # fmt: skip


@pytest.mark.gpu
@REPEATED
@BY_FAMILY
def test_decode_is_bitwise_equal_in_1000_replays(family, name, num_splits):
    """A second stream keeps the SMs unevenly busy, so that CTAs meet in orders that never occur on a quiet GPU."""
    inputs = make_inputs(case_named(name), "cuda", SEED)
    noise, side = torch.randn(1 << 20, device="cuda"), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.no_grad(), sdpa_backend(family, num_splits=num_splits):
        expected, replay = attend(*inputs), capture_graph(lambda: attend(*inputs))
        torch.cuda.synchronize()
        for i in range(1000):
            if i % 3 == 0:
                with torch.cuda.stream(side):
                    noise.sin_()
            wrong += (replay() != expected).sum()
        torch.cuda.synchronize()
    assert int(wrong) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("replayed", (False, True), ids=("eager", "graphs"))
@REPEATED
@BY_FAMILY
def test_decode_on_three_concurrent_streams(family, name, num_splits, replayed):
    """Each launch has separate partial results."""
    inputs_of_streams = [make_inputs(case_named(name), "cuda", SEED + i) for i in range(3)]
    streams = [torch.cuda.Stream() for _ in inputs_of_streams]
    wrong = torch.zeros(len(inputs_of_streams), dtype=torch.int64, device="cuda")
    with torch.no_grad(), sdpa_backend(family, num_splits=num_splits):
        expected = [attend(*inputs) for inputs in inputs_of_streams]
        calls = [lambda inputs=inputs: attend(*inputs) for inputs in inputs_of_streams]
        calls = [capture_graph(call) for call in calls] if replayed else calls
        torch.cuda.synchronize()
        for _, (i, stream) in itertools.product(range(200), enumerate(streams)):
            with torch.cuda.stream(stream):
                wrong[i] += (calls[i]() != expected[i]).sum()
        torch.cuda.synchronize()
    assert wrong.tolist() == [0] * len(inputs_of_streams)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", (0, 1, 3, 10))
@BY_FAMILY
def test_chained_decode_calls_wait_for_earlier_writes(family, num_splits):
    """Kernels launched early do not read queries and last keys before earlier calls have written them.

    The large scale keeps the queries of a chain from becoming alike.
    """
    torch.manual_seed(SEED)
    start = torch.randn(2, 8, 1, 64, dtype=torch.bfloat16, device="cuda")
    caches = make_cache_views("bshd", 2, 2, CAPACITY, 64)

    def chain(pause: Callable[[], None] = lambda: None) -> Tensor:
        (k, v), q = (cache.clone() for cache in caches), start
        for keys in range(600, 624):
            for _ in range(2):
                q = sdpa(q, k[:, :, :keys], v[:, :, :keys], scale=4.0, enable_gqa=True)
                pause()
            k[:, :, keys], v[:, :, keys] = q[:, ::4, 0], q[:, 3::4, 0]
        return q

    with torch.no_grad(), sdpa_backend(family, num_splits=num_splits):
        expected, replay = chain(torch.cuda.synchronize), capture_graph(chain)
        assert expected.isfinite().all()
        for _ in range(20):
            assert_bitwise_equal("chain", chain(), expected)
            assert_bitwise_equal("chain in a graph", replay(), expected)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("device_backend", [CUDA], indirect=True)
@pytest.mark.parametrize("backend", ("auto", "fa3"))
def test_eager_compiled_and_captured_decode_are_bitwise_equal(device_backend: DeviceBackend, backend: str) -> None:
    function = sdpa_backend(backend)(attend)
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    counters.clear()
    for keys in (100, 101, 1000, 4097):
        inputs, case = (
            device_backend.qkv(rows=1, keys=keys, heads=8, kv_heads=2),
            case_named("decode_h8x2_d64v64_1x4097"),
        )
        with torch.no_grad():
            eager = function(*inputs)
            assert_bitwise_equal(f"{keys} keys compiled", compiled(*inputs), eager)
            assert_bitwise_equal(f"{keys} keys captured", capture_graph(lambda args=inputs: function(*args))(), eager)
        assert_within_budget(f"{keys} keys", eager, oracle(case, inputs).out, plain(case, inputs).out)
        assert device_backend.pop_path_counts()["ours_fwd"] == 3
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.isolated(240)
def test_first_split_call_under_graph_capture() -> None:
    """One kernel has never run, a second kernel only unsplit; the capture loads both modules and the combine kernel."""
    for name, warm, splits in (("decode_h8x2_d64v64_1x4097", False, 12), ("decode_1x8k_d128_gqa4", True, 3)):
        case = case_named(name)
        inputs = make_inputs(case, "cuda", SEED)
        if warm:
            run_op(inputs, case, 1)
        replay = capture_graph(lambda args=(inputs, case, splits): run_op(*args)[0])
        assert_bitwise_equal(case.name, replay(), run_op(inputs, case, splits)[0])
