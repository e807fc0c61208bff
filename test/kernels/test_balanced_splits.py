"""Balanced splits of paged KV caches, on a GPU or interpreted: results against fp64, and equal bits.

Long sequences have more splits than short sequences. Calls by default have equal numbers of splits, so the tests raise
the limit `max_balanced_sequences`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import interpreted_kernels
import pytest
import torch
from cuda_graphs import call_on_side_stream, capture_graph
from test_paged_kv_kernels import DTYPES, NEAR, NEAR_LSE, PagedCall, make_paged_call
from torch import Tensor

from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops.attention import Window
from torch_flashplug.registry import dispatch_table, kernel_table
from torch_flashplug.registry.kernel_args import DECODE
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import assert_bitwise_equal

SPECS = [spec for spec in kernel_table.specs(80, "decode") if "balanced" in spec.features]
FEW_ITEMS = 0.1  # for each CTA that the SMs hold at once: 13 items beside one for each sequence, with 2 KV heads
UNEVEN = (70, 0, 700, 33)
SINKS = torch.tensor([-3.0, 0.0, 2.0, 50.0] * 2)

Switch = Callable[..., None]


def push(rows: list[kernel_table.KernelRow], sequences: int, items: float) -> None:
    """Push kernels, and limits of balanced splits."""
    limits = {"max_balanced_sequences": sequences, "items_per_slot": items}
    bindings.push_rows(rows, dispatch_table.CHOICE_ROWS, replace(dispatch_table.COST_MODEL, **limits))


@pytest.fixture
def balanced() -> Iterator[Switch]:
    """Return a function that switches balanced splits on or off."""

    def switch(*, is_on: bool = True, items: float = FEW_ITEMS) -> None:
        push(list(kernel_table.KERNEL_ROWS), 512 if is_on else 0, items)

    switch()
    yield switch
    startup.push_tables()


def count_balanced(call: Callable[[], object]) -> int:
    """Return the number of launches with balanced splits."""
    before = bindings.counters()["balanced"]
    call()
    return bindings.counters()["balanced"] - before


def run(call: PagedCall, device: str, *, num_splits: int = 0, is_balanced: bool = True) -> tuple[Tensor, Tensor]:
    """Return output and LSE. Check whether the call has balanced splits."""
    operands = (call.q, call.k, call.v, call.numbers, call.used, None, None, call.sinks)
    tensors = [None if x is None else x.to(device) for x in operands]
    bindings.counters(reset=True)
    settings = (*call.window, call.softcap, None)
    out, lse = torch.ops.torch_flashplug.paged_fwd(
        *tensors, *settings, num_splits=num_splits, fixed_split_size=call.split_size
    )
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == 1 and counts["balanced"] == is_balanced, counts
    return out.cpu(), lse.cpu()


def assert_equal_results(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for name, actual_tensor, expected_tensor in zip(("out", "lse"), actual, expected, strict=True):
        assert_bitwise_equal(name, actual_tensor, expected_tensor)


def check_balanced(call: PagedCall, device: str) -> None:
    """Check a call against fp64, and that a second run has equal bits."""
    (out, lse), (expected_out, expected_lse) = run(call, device), call.reference()
    assert out.isfinite().all()
    assert float((out.double() - expected_out).norm() / expected_out.norm().clamp(min=1e-9)) < NEAR
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=NEAR_LSE)
    assert_equal_results(run(call, device), (out, lse))


@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.name)
def test_every_balanced_kernel(kernels_on: str, spec: KernelSpec) -> None:
    """The table has no other kernel with balanced splits."""
    row = next(row for row in kernel_table.KERNEL_ROWS if spec in row.specs())
    unbalanced_rows = [row for row in kernel_table.KERNEL_ROWS if not any("balanced" in tag for tag in row.features)]
    call = make_paged_call(UNEVEN, 16, (spec.d, spec.dv), Sq=1 if spec.tile_m == 16 else 5, dtype=DTYPES[spec.dtype])
    call = replace(call, softcap=3.0 if "softcap" in spec.features else 0.0)
    try:
        push([*unbalanced_rows, row], 512, FEW_ITEMS)
        check_balanced(call, kernels_on)
    finally:
        startup.push_tables()


@pytest.mark.parametrize(
    "used",
    [(0, 0), (1, 0), (1500, *(20,) * 5), (*(20,) * 5, 1500), (300, 900, 0, 1100, 64, 63, 65), tuple(range(0, 370, 10))],
    ids=str,
)
@pytest.mark.parametrize("items", [0.01, FEW_ITEMS, 0.5])
def test_uneven_lengths(kernels_on: str, used: tuple[int, ...], items: float, balanced: Switch) -> None:
    """Cover fewer items than blocks, more items, and more sequences than the lanes of a warp."""
    balanced(items=items)
    check_balanced(make_paged_call(used, 16), kernels_on)


@pytest.mark.parametrize("seed", range(4))
def test_random_lengths(kernels_on: str, seed: int, balanced: Switch) -> None:
    """Keys would be left out if the splits of all sequences exceeded the number of items."""
    draw = random.Random(seed)
    used = tuple(int(math.exp(draw.uniform(0, 7))) for _ in range(draw.randrange(2, 40)))
    balanced(items=draw.choice((0.02, 0.05, 0.2)))
    check_balanced(make_paged_call(used, 16, seed=seed), kernels_on)


@pytest.mark.parametrize("window", [(0, 0), (100, 0), (300, 3), (-1, -1)], ids=str)
@pytest.mark.parametrize("Sq", [1, 3, 12])
def test_windows_sinks_and_several_query_rows(
    kernels_on: str, Sq: int, window: tuple[int, int], balanced: Switch
) -> None:
    call = replace(make_paged_call(UNEVEN, 16, Sq=Sq), window=Window(*window))
    check_balanced(call, kernels_on)
    check_balanced(replace(call, sinks=SINKS), kernels_on)


@pytest.mark.parametrize("used", [(640,) * 3, (640, 600, 560), (64, 64)], ids=str)
def test_even_lengths_have_the_bits_of_equal_splits(kernels_on: str, used: tuple[int, ...], balanced: Switch) -> None:
    """The longest sequence has the splits that the host chooses. In each call, the page table has no spare entries."""
    call = make_paged_call(used, 16)
    check_balanced(call, kernels_on)
    actual = run(call, kernels_on)
    balanced(is_on=False)
    expected = run(call, kernels_on, is_balanced=False)
    if len(set(used)) == 1:
        assert_equal_results(actual, expected)


@pytest.mark.parametrize("settings", ["num_splits", "fixed_split_size", "one sequence"])
def test_promised_splits_are_not_balanced(kernels_on: str, settings: str, balanced: Switch) -> None:
    call = make_paged_call((700,) if settings == "one sequence" else UNEVEN, 16)
    call = replace(call, split_size=128 if settings == "fixed_split_size" else 0)
    num_splits = 1 if settings == "num_splits" else 0
    actual = run(call, kernels_on, num_splits=num_splits, is_balanced=False)
    balanced(is_on=False)
    assert_equal_results(actual, run(call, kernels_on, num_splits=num_splits, is_balanced=False))


def test_calls_are_not_balanced_by_default(kernels_on: str) -> None:
    run(make_paged_call(UNEVEN, 16), kernels_on, is_balanced=False)


def test_unused_keys_are_not_read(kernels_on: str, balanced: Switch) -> None:
    """Unused pages and keys behind the KV length are NaN."""
    call = make_paged_call(UNEVEN, 16)
    clean = run(call, kernels_on)
    is_used = torch.zeros(call.k.shape[0], call.k.shape[2], dtype=torch.bool)
    for numbers, count in zip(call.numbers.tolist(), call.used.tolist(), strict=True):
        for key in range(count):
            is_used[numbers[key // 16], key % 16] = True
    poisoned = {"k": call.k.clone(), "v": call.v.clone()}
    for x in poisoned.values():
        x.transpose(1, 2)[~is_used] = math.nan
    assert_equal_results(run(replace(call, **poisoned), kernels_on), clean)


def test_caches_without_pages(kernels_on: str, balanced: Switch) -> None:
    """A cache with KV lengths has one page for each sequence."""
    call = make_paged_call((0, 450, 37, 1000), 1000)
    check_balanced(call, kernels_on)


@pytest.mark.interpreted
@pytest.mark.parametrize("order", [1, 2])
def test_results_do_not_depend_on_the_order_of_operations(balanced: Switch, order: int) -> None:
    """Copies and products end between request and wait, in an order chosen by a seed."""
    call = make_paged_call(UNEVEN, 16, (128, 128))
    results = []
    for seed in (0, order):
        with interpreted_kernels.enabled(seed):
            balanced()
            results.append(run(call, "cpu"))
    assert_equal_results(*results)


@pytest.mark.interpreted
def test_one_workspace_serves_changing_lengths(balanced: Switch) -> None:
    """A kernel is launched again and again with the same arguments, as by a CUDA graph. The workspace begins as NaN."""
    name = "decode_sm80_bf16_d64_window+paged+balanced_m16n64s3"
    kernel = interpreted_kernels.load_kernel(interpreted_kernels.pack(), name)
    call = make_paged_call((700, 700, 700, 700), 16)
    B, Hq, Sq, D = call.q.shape
    items = 13 + B
    workspace = torch.full((Hq * Sq * items * (D + 2) + 2 * B,), math.nan)
    out, lse, lengths = torch.empty_like(call.q), torch.empty(B, Hq, Sq), call.used.clone()
    arguments = {"q": call.q, "k": call.k, "v": call.v, "o": out, "lse": lse, "partials": workspace}
    arguments |= {"scale": D**-0.5, "splits": items, "cluster": 1, "left": 1 << 20, "right": 0, "bottom_right": 1}
    arguments |= {"sinks": torch.empty(0), "block_table": call.numbers, "seqused_k": lengths}
    arguments |= {"split_size": 0, "even_splits": 2}
    for used in ((700, 0, 3, 20), (0, 0, 0, 0), (700, 700, 700, 700), (1, 2, 3, 700), (64, 128, 192, 256)):
        lengths.copy_(torch.tensor(used))
        out.fill_(math.nan), lse.fill_(math.nan)
        kernel(*(arguments.get(row.name) for row in DECODE), 0)
        expected_out, expected_lse = replace(call, used=lengths).reference()
        torch.testing.assert_close(out.double(), expected_out, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-3)


@pytest.mark.gpu
def test_cuda_graph_follows_the_lengths_of_each_replay(balanced: Switch) -> None:
    balanced(items=dispatch_table.COST_MODEL.items_per_slot)
    longest = 9000
    call = make_paged_call((longest,) * 17, 16, (128, 128))
    tensors = [x.cuda() for x in (call.q, call.k, call.v, call.numbers, call.used)]
    lengths = tensors[-1]

    def attend() -> Tensor:
        settings = (None, None, None, *call.window, 0.0, None)
        return torch.ops.torch_flashplug.paged_fwd(*tensors, *settings)[0]

    assert count_balanced(lambda: call_on_side_stream(attend)) == 1
    replay, draw = capture_graph(attend), random.Random(1)
    for _ in range(5):
        used = torch.tensor([draw.choice((0, 1, draw.randrange(longest), longest)) for _ in range(17)]).int()
        lengths.copy_(used)
        expected, _ = replace(call, used=used).reference()
        torch.testing.assert_close(replay().cpu().double(), expected, rtol=2e-2, atol=2e-2)
