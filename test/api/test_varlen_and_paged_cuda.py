"""attention() with sequence lengths and pages, for behavior visible only on a GPU.

The tests replay captured graphs with new tables and lengths, use several streams, check that the host never waits, and
measure the memory of gathering.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from cuda_graphs import call_on_side_stream
from threads import run_threads
from torch import Tensor

from torch_flashplug import attention, explain_attention
from torch_flashplug.ops.quantize_reference import in_int8

pytestmark = pytest.mark.gpu

HQ, HKV, D, PAGE, WIDTH, B = 8, 2, 128, 16, 20, 4
SAME_BITS = ({"num_splits": 1}, {"fixed_split_size": 128})
NEAR = 0.01  # relative, root mean square
Operands = dict[str, Tensor]


def random_starts(total: int, parts: int, draw: torch.Generator) -> Tensor:
    """Return starts of sequences, which may be empty and may end before the last row."""
    return torch.cat((torch.zeros(1), torch.randint(0, total + 1, (parts,), generator=draw).sort()[0])).int()


def random_operands(rows: tuple[int, ...], keys: tuple[int, ...], draw: torch.Generator) -> Operands:
    sizes = {"q": (*rows, HQ, D), "k": (*keys, HKV, D), "v": (*keys, HKV, D)}
    return {name: torch.randn(size, generator=draw).bfloat16() for name, size in sizes.items()}


def make_paged_batch(rows: tuple[int, ...], draw: torch.Generator) -> Operands:
    """Return paged operands whose block-table entries beyond the last page are arbitrary."""
    operands = random_operands(rows, (B * WIDTH + 5, PAGE), draw)
    table = torch.randperm(B * WIDTH + 5, generator=draw)[: B * WIDTH].view(B, WIDTH).int()
    used = torch.randint(0, WIDTH * PAGE + 1, (B,), generator=draw).int()
    for i, count in enumerate(used.tolist()):
        table[i, -(-count // PAGE) :] = (-1, 2**31 - 1)[i % 2]
    return operands | {"block_table": table, "seqused_k": used}


def quantize(operands: Operands) -> Operands:
    for name in "kv":
        operands[name], operands[f"{name}_scale"] = in_int8(operands[name].float().transpose(1, 2))
        operands[name] = operands[name].transpose(1, 2)
    return operands


def make_kv_length_batch(rows: int, draw: torch.Generator) -> Operands:
    return random_operands((B, rows), (B, 300), draw) | {"seqused_k": torch.randint(0, 301, (B,), generator=draw).int()}


def make_packed_batch(draw: torch.Generator) -> Operands:
    starts = {name: random_starts(total, 9, draw) for name, total in (("cu_seqlens_q", 1000), ("cu_seqlens_k", 1200))}
    return random_operands((1000,), (1200,), draw) | starts


IMPLEMENTATIONS: dict[str, Callable[[torch.Generator], Operands]] = {
    "pages": lambda draw: make_paged_batch((B, 3), draw),
    "pages_8_bits": lambda draw: quantize(make_paged_batch((B, 1), draw)),
    "pages_many_rows": lambda draw: make_paged_batch((B, 40), draw),
    "pages_on_end": lambda draw: make_paged_batch((90,), draw) | {"cu_seqlens_q": random_starts(90, B, draw)},
    "pages_on_end_8_bits": lambda draw: (
        quantize(make_paged_batch((90,), draw)) | {"cu_seqlens_q": random_starts(90, B, draw)}
    ),
    "caches": lambda draw: make_kv_length_batch(2, draw),
    "caches_many_rows": lambda draw: make_kv_length_batch(70, draw),
    "on_end": make_packed_batch,
}


def make_state(implementation: str, seed: int) -> Operands:
    return {name: x.cuda() for name, x in IMPLEMENTATIONS[implementation](torch.Generator().manual_seed(seed)).items()}


def attend(operands: Operands, **more: object) -> Tensor:
    return attention(**operands, causal=True, **more)


def attend_in_fp32(operands: Operands) -> Tensor:
    """Return the result of fp32 math; 8-bit tensors are dequantized first."""
    wide = {name: x.float() if x.dtype == torch.bfloat16 else x for name, x in operands.items()}
    for name in "kv":
        if f"{name}_scale" in wide:
            wide[name] = wide[name].float() * wide.pop(f"{name}_scale").transpose(1, 2).unsqueeze(-1)
    return attend(wide)


def assert_near(got: Tensor, operands: Operands, near: float = NEAR) -> None:
    exact = attend_in_fp32(operands)
    assert got.isfinite().all()
    assert float((got.float() - exact).norm()) <= near * float(exact.norm()) + 1e-6


def copy_into(target: Operands, source: Operands) -> None:
    for name, x in source.items():
        target[name].copy_(x)


@pytest.mark.parametrize("splits", [{}, *SAME_BITS], ids=str)
@pytest.mark.parametrize("into", [False, True], ids=["made", "given"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_graph_replay_reads_current_tables_and_lengths(implementation: str, into: bool, splits: dict[str, int]) -> None:
    buffers = make_state(implementation, 0)
    out = torch.empty_like(buffers["q"]) if into else None

    def call() -> Tensor:
        return attend(buffers, **splits, out=out)

    call_on_side_stream(call, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    assert result is out or not into
    for seed in range(1, 6):
        current = make_state(implementation, seed)
        copy_into(buffers, current)
        result.fill_(math.nan)
        graph.replay()
        assert_near(result, current, 0.02 if "8_bits" in implementation else NEAR)


def test_graph_replay_reads_moved_pages() -> None:
    """Move pages as a server swaps pages; the result must have the same bits."""
    buffers = make_state("pages", 1)
    before = attend(buffers, num_splits=1)
    call_on_side_stream(lambda: attend(buffers, num_splits=1), 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(buffers, num_splits=1)
    pools, table = {name: buffers[name].clone() for name in "kv"}, buffers["block_table"].clone()
    for seed in range(3):
        order = torch.randperm(len(pools["k"]), generator=torch.Generator().manual_seed(seed)).cuda()
        is_page = (table >= 0) & (table < len(order))
        buffers["block_table"].copy_(torch.where(is_page, order[table.clamp(0, len(order) - 1).long()].int(), table))
        for name, pool in pools.items():
            buffers[name][order] = pool
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, before)


def test_training_step_graph_is_replayed_with_new_lengths() -> None:
    buffers = make_state("on_end", 0)
    leaves = [buffers[name].requires_grad_() for name in "qkv"]
    grad_out = torch.randn_like(buffers["q"])

    def call() -> tuple[Tensor, ...]:
        out = attend(buffers)
        return out, *torch.autograd.grad(out, leaves, grad_out)

    call_on_side_stream(call, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for seed in range(1, 4):
        current = make_state("on_end", seed)
        with torch.no_grad():
            copy_into(buffers, current)
            for result in results:
                result.fill_(math.nan)
        graph.replay()
        wide = {name: x.float().requires_grad_() if name in "qkv" else x for name, x in current.items()}
        out = attend(wide)
        exact = (out, *torch.autograd.grad(out, [wide[name] for name in "qkv"], grad_out.float()))
        for actual, expected in zip(results, exact, strict=True):
            assert float((actual.float() - expected).norm()) <= 2 * NEAR * float(expected.norm())


def test_threads_on_separate_streams_do_not_share_lists() -> None:
    """Run each call on a stream in a separate thread, with tables and lengths that change from call to call.

    No thread may read tile lists of another thread.
    """
    errors: list[str] = []

    def work(number: int) -> None:
        implementation = list(IMPLEMENTATIONS)[number % len(IMPLEMENTATIONS)]
        states = [make_state(implementation, 10 * number + i) for i in range(2)]
        buffers, expected = (
            {name: x.clone() for name, x in states[0].items()},
            [attend(operands) for operands in states],
        )
        torch.cuda.current_stream().synchronize()
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                for replay in range(40):
                    copy_into(buffers, states[replay % 2])
                    assert torch.equal(attend(buffers), expected[replay % 2]), f"turn {replay}"
            stream.synchronize()
            for operands, out in zip(states, expected, strict=True):
                assert_near(out, operands, 0.02)
        except Exception as error:
            errors.append(f"{number} {implementation}: {type(error).__name__}: {error}")

    run_threads(work, 12)
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_concurrent_streams_of_one_thread(implementation: str) -> None:
    """Use several streams from one thread without any wait."""
    states = [make_state(implementation, seed) for seed in range(4)]
    expected = [attend(operands) for operands in states]
    streams = [torch.cuda.Stream() for _ in states]
    torch.cuda.synchronize()
    outs = []
    for _ in range(20):
        for stream, operands in zip(streams, states, strict=True):
            with torch.cuda.stream(stream):
                outs.append(attend(operands))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected[i % 4]) for i, out in enumerate(outs))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_host_never_waits_for_the_device(implementation: str) -> None:
    operands = make_state(implementation, 0)
    out = attend(operands, num_splits=1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        explain_attention(**operands, causal=True)
        attend(operands), attend(operands, num_splits=1, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def select_sequence(operands: Operands, i: int) -> Operands:
    """Return the call for a single sequence; a packed sequence keeps only its rows and keys."""
    if "cu_seqlens_k" in operands:
        ends = {name: operands[f"cu_seqlens_{name}"][i : i + 2].tolist() for name in "qk"}
        parts = {"q": slice(*ends["q"]), "k": slice(*ends["k"]), "v": slice(*ends["k"])}
        alone = {name: operands[name][part] for name, part in parts.items()}
        starts = {f"cu_seqlens_{name}": torch.tensor([0, end - begin]).int().cuda()
                  for name, (begin, end) in ends.items()}  # fmt: skip
        return alone | starts
    shared = {"k", "v", "k_scale", "v_scale"} if "block_table" in operands else set()
    return {name: x if name in shared else x[i : i + 1] for name, x in operands.items()}


@pytest.mark.parametrize(
    "implementation",
    ["pages", "pages_8_bits", "pages_many_rows", "caches", "caches_many_rows", "on_end", "few", "many"],
)
@pytest.mark.parametrize("splits", SAME_BITS, ids=str)
def test_fixed_splits_are_batch_invariant(implementation: str, splits: dict[str, int]) -> None:
    """Include dense batches: `few` and `many` name the number of query rows."""
    dense = {"few": 3, "many": 90}.get(implementation)
    operands = (
        make_state(implementation, 3)
        if dense is None
        else random_operands((B, dense), (B, 700), torch.Generator().manual_seed(3))
    )
    operands = {name: x.cuda() for name, x in operands.items()}
    out = attend(operands, **splits)
    for i in range(B):
        alone = select_sequence(operands, i)
        begin = int(operands["cu_seqlens_q"][i]) if implementation == "on_end" else i
        expected = out[begin : begin + len(alone["q"])]
        assert torch.equal(attend(alone, **splits), expected), f"sequence {i}"


@pytest.mark.parametrize("eight_bits", [False, True], ids=["16", "8"])
@pytest.mark.parametrize("settings", [{}, {"window": (3000, 0)}, {"sinks": torch.arange(HQ).float()}])
@pytest.mark.parametrize("used", [0, 1, 1023, 1024, 1025, 9000, 40_000])
def test_fixed_split_size_of_a_long_sequence_is_batch_invariant(
    used: int, settings: dict[str, object], eight_bits: bool
) -> None:
    """Check a split size of 1024 with up to 40,000 keys.

    The result must be right. The number of CTAs follows the number of splits that fit in the table. The bits must be
    equal alone and in five batches with wider tables and with longer or shorter sequences.
    """
    draw, width = torch.Generator().manual_seed(used), -(-40_000 // PAGE)
    pools = random_operands((1, 1), (3 * width, PAGE), draw)
    pools = {name: x.cuda() for name, x in (quantize(pools) if eight_bits else pools).items()}
    settings = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in settings.items()}
    q, pages = pools.pop("q"), torch.randperm(width, generator=draw).int().cuda()

    def attend_in_batch(other_lengths: list[int], table_width: int, place: int = 0, **more: object) -> Tensor:
        counts = [*other_lengths[:place], used, *other_lengths[place:]]
        table = torch.randint(0, 3 * width, (len(counts), table_width), generator=draw).int().cuda()
        table[place, : min(width, table_width)] = pages[:table_width]
        rows = torch.randn(len(counts), 1, HQ, D, generator=draw).bfloat16().cuda()
        rows[place] = q[0]
        lengths = torch.tensor(counts).int().cuda()
        operands = {"q": rows, **pools, "block_table": table, "seqused_k": lengths, **settings}
        return attention(**operands, causal=True, **more)[place]

    size, narrow = {"fixed_split_size": 1024}, max(1, -(-used // PAGE))
    outs = [
        attend_in_batch([], narrow, **size),
        attend_in_batch([], width, **size),
        attend_in_batch([], 4 * width, **size),
    ]
    outs += [attend_in_batch([5, 40_000], width, 1, **size), attend_in_batch([0] * 63, width, 40, **size)]
    outs += [attend_in_batch([used, 9000, 1] * 40, width, 120, **size)]
    assert all(torch.equal(out, outs[0]) for out in outs[1:])
    expected = attend_in_batch([], narrow).float()
    assert float((outs[0].float() - expected).norm()) <= NEAR * float(expected.norm()) + 1e-6


def test_gathering_pages_allocates_a_single_copy() -> None:
    """Gather all pages named by the tables once.

    With 300 query rows for each KV head, no kernel reads pages in place.
    """
    pages, width = 8192, 2048
    k, v = (torch.zeros(pages, PAGE, HKV, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q = torch.zeros(B, 75, HQ, D, dtype=torch.bfloat16, device="cuda")
    table = torch.randint(0, pages, (B, width), device="cuda").int()
    arguments = {"block_table": table, "seqused_k": torch.full((B,), 9, device="cuda").int()}
    attention(q, k, v, **arguments)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention(q, k, v, **arguments)
    torch.cuda.synchronize()
    copy = 2 * B * width * PAGE * HKV * D * 2
    assert copy < torch.cuda.max_memory_allocated() - before < 1.1 * copy
