"""attention() of lengths and pages where only a GPU shows what happens: graphs captured once and replayed with other
tables and lengths, several streams, the host that waits for nothing, the memory that gathering takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from threads import all_end
from torch import Tensor

from torch_flashplug import attention, explain_attention
from torch_flashplug.ops.quantize_reference import in_int8

pytestmark = pytest.mark.gpu

HQ, HKV, D, PAGE, WIDTH, B = 8, 2, 128, 16, 20, 4
SAME_BITS = ({"num_splits": 1}, {"fixed_split_size": 128})
NEAR = 0.01  # relative, root mean square
Given = dict[str, Tensor]


def lengths(total: int, parts: int, draw: torch.Generator) -> Tensor:
    """Starts of some sequences, which may be empty, and not reach the end."""
    return torch.cat((torch.zeros(1), torch.randint(0, total + 1, (parts,), generator=draw).sort()[0])).int()


def drawn(rows: tuple[int, ...], keys: tuple[int, ...], draw: torch.Generator) -> Given:
    sizes = {"q": (*rows, HQ, D), "k": (*keys, HKV, D), "v": (*keys, HKV, D)}
    return {name: torch.randn(size, generator=draw).bfloat16() for name, size in sizes.items()}


def paged(rows: tuple[int, ...], draw: torch.Generator) -> Given:
    """Numbers behind the last page say anything."""
    given = drawn(rows, (B * WIDTH + 5, PAGE), draw)
    table = torch.randperm(B * WIDTH + 5, generator=draw)[: B * WIDTH].view(B, WIDTH).int()
    used = torch.randint(0, WIDTH * PAGE + 1, (B,), generator=draw).int()
    for i, count in enumerate(used.tolist()):
        table[i, -(-count // PAGE) :] = (-1, 2**31 - 1)[i % 2]
    return given | {"block_table": table, "seqused_k": used}


def eight(given: Given) -> Given:
    for name in "kv":
        given[name], given[f"{name}_scale"] = in_int8(given[name].float().transpose(1, 2))
        given[name] = given[name].transpose(1, 2)
    return given


def used(rows: int, draw: torch.Generator) -> Given:
    return drawn((B, rows), (B, 300), draw) | {"seqused_k": torch.randint(0, 301, (B,), generator=draw).int()}


def on_end(draw: torch.Generator) -> Given:
    starts = {name: lengths(total, 9, draw) for name, total in (("cu_seqlens_q", 1000), ("cu_seqlens_k", 1200))}
    return drawn((1000,), (1200,), draw) | starts


ROADS: dict[str, Callable[[torch.Generator], Given]] = {
    "pages": lambda draw: paged((B, 3), draw),
    "pages_8_bits": lambda draw: eight(paged((B, 1), draw)),
    "pages_many_rows": lambda draw: paged((B, 40), draw),
    "pages_on_end": lambda draw: paged((90,), draw) | {"cu_seqlens_q": lengths(90, B, draw)},
    "pages_on_end_8_bits": lambda draw: eight(paged((90,), draw)) | {"cu_seqlens_q": lengths(90, B, draw)},
    "caches": lambda draw: used(2, draw),
    "caches_many_rows": lambda draw: used(70, draw),
    "on_end": on_end,
}


def state(road: str, seed: int) -> Given:
    return {name: x.cuda() for name, x in ROADS[road](torch.Generator().manual_seed(seed)).items()}


def attend(given: Given, **more: object) -> Tensor:
    return attention(**given, causal=True, **more)


def right(given: Given) -> Tensor:
    """By fp32's mathematics of what 8 bits say."""
    wide = {name: x.float() if x.dtype == torch.bfloat16 else x for name, x in given.items()}
    for name in "kv":
        if f"{name}_scale" in wide:
            wide[name] = wide[name].float() * wide.pop(f"{name}_scale").transpose(1, 2).unsqueeze(-1)
    return attend(wide)


def assert_near(got: Tensor, given: Given, near: float = NEAR) -> None:
    exact = right(given)
    assert got.isfinite().all()
    assert float((got.float() - exact).norm()) <= near * float(exact.norm()) + 1e-6


def put(held: Given, now: Given) -> None:
    for name, x in now.items():
        held[name].copy_(x)


def warm(call: Callable[[], object]) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("splits", [{}, *SAME_BITS], ids=str)
@pytest.mark.parametrize("into", [False, True], ids=["made", "given"])
@pytest.mark.parametrize("road", ROADS)
def test_a_replay_reads_the_tables_and_lengths_of_now(road: str, into: bool, splits: dict[str, int]) -> None:
    held = state(road, 0)
    out = torch.empty_like(held["q"]) if into else None

    def call() -> Tensor:
        return attend(held, **splits, out=out)

    warm(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    assert result is out or not into
    for seed in range(1, 6):
        now = state(road, seed)
        put(held, now)
        result.fill_(math.nan)
        graph.replay()
        assert_near(result, now, 0.02 if "8_bits" in road else NEAR)


def test_tables_alone_change_between_replays() -> None:
    """Pages are moved, as a server swaps them: the same bits."""
    held = state("pages", 1)
    before = attend(held, num_splits=1)
    warm(lambda: attend(held, num_splits=1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(held, num_splits=1)
    pools, table = {name: held[name].clone() for name in "kv"}, held["block_table"].clone()
    for seed in range(3):
        order = torch.randperm(len(pools["k"]), generator=torch.Generator().manual_seed(seed)).cuda()
        there = (table >= 0) & (table < len(order))
        held["block_table"].copy_(torch.where(there, order[table.clamp(0, len(order) - 1).long()].int(), table))
        for name, pool in pools.items():
            held[name][order] = pool
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, before)


def test_a_training_step_of_lists_is_replayed_with_other_lengths() -> None:
    held = state("on_end", 0)
    leaves = [held[name].requires_grad_() for name in "qkv"]
    grad_out = torch.randn_like(held["q"])

    def call() -> tuple[Tensor, ...]:
        out = attend(held)
        return out, *torch.autograd.grad(out, leaves, grad_out)

    warm(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for seed in range(1, 4):
        now = state("on_end", seed)
        with torch.no_grad():
            put(held, now)
            for result in results:
                result.fill_(math.nan)
        graph.replay()
        wide = {name: x.float().requires_grad_() if name in "qkv" else x for name, x in now.items()}
        out = attend(wide)
        exact = (out, *torch.autograd.grad(out, [wide[name] for name in "qkv"], grad_out.float()))
        for got, one in zip(results, exact, strict=True):
            assert float((got.float() - one).norm()) <= 2 * NEAR * float(one.norm())


def test_streams_of_their_own() -> None:
    """A thread each, whose tables and lengths change from call to call: nobody's lists are another's."""
    errors: list[str] = []

    def work(number: int) -> None:
        road = list(ROADS)[number % len(ROADS)]
        states = [state(road, 10 * number + i) for i in range(2)]
        held, expected = {name: x.clone() for name, x in states[0].items()}, [attend(one) for one in states]
        torch.cuda.current_stream().synchronize()
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                for turn in range(40):
                    put(held, states[turn % 2])
                    assert torch.equal(attend(held), expected[turn % 2]), f"turn {turn}"
            stream.synchronize()
            for one, out in zip(states, expected, strict=True):
                assert_near(out, one, 0.02)
        except Exception as error:
            errors.append(f"{number} {road}: {type(error).__name__}: {error}")

    all_end(work, 12)
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("road", ROADS)
def test_streams_at_the_same_time(road: str) -> None:
    """One thread, nothing waits in between."""
    states = [state(road, seed) for seed in range(4)]
    expected = [attend(one) for one in states]
    streams = [torch.cuda.Stream() for _ in states]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream, one in zip(streams, states, strict=True):
            with torch.cuda.stream(stream):
                found.append(attend(one))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected[i % 4]) for i, out in enumerate(found))


@pytest.mark.parametrize("road", ROADS)
def test_the_host_waits_for_nothing(road: str) -> None:
    given = state(road, 0)
    out = attend(given, num_splits=1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        explain_attention(**given, causal=True)
        attend(given), attend(given, num_splits=1, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def one_of(given: Given, i: int) -> Given:
    """A sequence by itself; of lists with its own rows and keys alone."""
    if "cu_seqlens_k" in given:
        ends = {name: given[f"cu_seqlens_{name}"][i : i + 2].tolist() for name in "qk"}
        parts = {"q": slice(*ends["q"]), "k": slice(*ends["k"]), "v": slice(*ends["k"])}
        alone = {name: given[name][part] for name, part in parts.items()}
        starts = {f"cu_seqlens_{name}": torch.tensor([0, end - begin]).int().cuda()
                  for name, (begin, end) in ends.items()}  # fmt: skip
        return alone | starts
    shared = {"k", "v", "k_scale", "v_scale"} if "block_table" in given else set()
    return {name: x if name in shared else x[i : i + 1] for name, x in given.items()}


@pytest.mark.parametrize(
    "road", ["pages", "pages_8_bits", "pages_many_rows", "caches", "caches_many_rows", "on_end", "few", "many"]
)
@pytest.mark.parametrize("splits", SAME_BITS, ids=str)
def test_one_split_and_sizes_have_the_same_bits_alone(road: str, splits: dict[str, int]) -> None:
    """few, many: batches of which all keys count."""
    dense = {"few": 3, "many": 90}.get(road)
    given = state(road, 3) if dense is None else drawn((B, dense), (B, 700), torch.Generator().manual_seed(3))
    given = {name: x.cuda() for name, x in given.items()}
    out = attend(given, **splits)
    for i in range(B):
        alone = one_of(given, i)
        begin = int(given["cu_seqlens_q"][i]) if road == "on_end" else i
        mine = out[begin : begin + len(alone["q"])]
        assert torch.equal(attend(alone, **splits), mine), f"sequence {i}"


@pytest.mark.parametrize("eight_bits", [False, True], ids=["16", "8"])
@pytest.mark.parametrize("settings", [{}, {"window": (3000, 0)}, {"sinks": torch.arange(HQ).float()}])
@pytest.mark.parametrize("used", [0, 1, 1023, 1024, 1025, 9000, 40_000])
def test_a_long_sequence_in_splits_of_a_size(used: int, settings: dict[str, object], eight_bits: bool) -> None:
    """Right, by as many CTAs as it has room for splits, and the same bits alone and in five batches, whose tables are
    wider, and others in them longer or shorter.
    """
    draw, width = torch.Generator().manual_seed(used), -(-40_000 // PAGE)
    pools = drawn((1, 1), (3 * width, PAGE), draw)
    pools = {name: x.cuda() for name, x in (eight(pools) if eight_bits else pools).items()}
    settings = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in settings.items()}
    q, mine = pools.pop("q"), torch.randperm(width, generator=draw).int().cuda()

    def among(others: list[int], table_width: int, place: int = 0, **more: object) -> Tensor:
        counts = [*others[:place], used, *others[place:]]
        table = torch.randint(0, 3 * width, (len(counts), table_width), generator=draw).int().cuda()
        table[place, : min(width, table_width)] = mine[:table_width]
        rows = torch.randn(len(counts), 1, HQ, D, generator=draw).bfloat16().cuda()
        rows[place] = q[0]
        lengths = torch.tensor(counts).int().cuda()
        given = {"q": rows, **pools, "block_table": table, "seqused_k": lengths, **settings}
        return attention(**given, causal=True, **more)[place]

    size, narrow = {"fixed_split_size": 1024}, max(1, -(-used // PAGE))
    found = [among([], narrow, **size), among([], width, **size), among([], 4 * width, **size)]
    found += [among([5, 40_000], width, 1, **size), among([0] * 63, width, 40, **size)]
    found += [among([used, 9000, 1] * 40, width, 120, **size)]
    assert all(torch.equal(one, found[0]) for one in found[1:])
    right = among([], narrow).float()
    assert float((found[0].float() - right).norm()) <= NEAR * float(right.norm()) + 1e-6


def test_gathered_pages_take_one_copy() -> None:
    """Of all that the tables name; of 300 query rows for each KV head nothing reads pages where they lie."""
    pages, width = 8192, 2048
    k, v = (torch.zeros(pages, PAGE, HKV, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q = torch.zeros(B, 75, HQ, D, dtype=torch.bfloat16, device="cuda")
    table = torch.randint(0, pages, (B, width), device="cuda").int()
    given = {"block_table": table, "seqused_k": torch.full((B,), 9, device="cuda").int()}
    attention(q, k, v, **given)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention(q, k, v, **given)
    torch.cuda.synchronize()
    copy = 2 * B * width * PAGE * HKV * D * 2
    assert copy < torch.cuda.max_memory_allocated() - before < 1.1 * copy
