"""integrations.paged_batch: batches of a server as calls of attention(), against fp64 of each sequence."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import CUDA
from server_batches import (
    HKV,
    HQ,
    LAYERS,
    NUM_PAGES,
    PAGE_ROWS,
    D,
    Layer,
    Step,
    block_table,
    make_sequences,
    make_steps,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_flashplug.integrations import paged_batch
from torch_flashplug.integrations.paged_batch import PagedBatch, attend, split_batch, write_rows

DEVICES = ["cpu", CUDA]


def make_batch(step: Step, device: str, padding: int = 0, width: int = 8) -> PagedBatch:
    """Return a batch with `padding` empty sequences at the end."""
    counts = [*step.counts, *[0] * padding]
    lengths = [*step.kv_lengths(), *[0] * padding]
    table = torch.cat((block_table(step.sequences, width), torch.full((padding, width), -1, dtype=torch.int32)))
    return PagedBatch(
        cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).int().to(device),
        seqused_k=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table.to(device),
        row_counts=counts,
        kv_bounds=lengths,
        page_rows=PAGE_ROWS,
        group=HQ // HKV,
    )


def run_steps(layer: Layer, device: str, dtype: torch.dtype, padding: int) -> float:
    """Run all steps of three sequences, and return the largest error relative to the largest output."""
    sequences = make_sequences((41, 18, 70))
    pools = [torch.full((NUM_PAGES, PAGE_ROWS, HKV, D), math.nan, dtype=dtype, device=device) for _ in range(2)]
    settings = paged_batch.LayerSettings(
        layer.scale,
        (-1, -1) if layer.window is None else (layer.window - 1, 0),
        layer.softcap,
        None if layer.sinks is None else layer.sinks.to(device),
    )
    errors = []
    for step in make_steps(sequences):
        pool_rows = torch.tensor([*step.pool_rows(), *[-1] * padding], device=device)
        for name, pool in zip("kv", pools, strict=True):
            rows = step.rows(name).to(device, dtype)
            write_rows(torch.cat((rows, rows.new_full((padding, HKV, D), math.nan))), pool, pool_rows)
        q = step.rows("q").to(device, dtype)
        out = torch.full((len(q) + padding, HQ, D), math.nan, dtype=dtype, device=device)
        attend(q, *pools, split_batch(make_batch(step, device, padding)), out, settings)
        expected = step.expected(layer)
        errors.append(float((out[: len(q)].cpu().double() - expected).abs().max() / expected.abs().max()))
        assert out[len(q) :].isnan().all()  # padding stays as it was
    return max(errors)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_steps_of_a_server_equal_fp64(layer: Layer, padding: int) -> None:
    assert run_steps(layer, "cpu", torch.float32, padding) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_steps_of_a_server_equal_fp64_on_a_gpu(layer: Layer) -> None:
    assert run_steps(layer, "cuda", torch.bfloat16, 3) < 2e-2


def ranges_of(counts: list[int], bounds: list[int] | None = None, group: int = 2) -> list[tuple[int, int, int, int]]:
    """Return (first row, end, rows for each sequence, table width) of the calls of a batch."""
    bounds = bounds or [max(count, 20) for count in counts]
    batch = PagedBatch(
        cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).int(),
        seqused_k=torch.tensor(bounds, dtype=torch.int32),
        block_table=torch.zeros(len(counts), 1 << 16, dtype=torch.int32),
        row_counts=counts,
        kv_bounds=bounds,
        page_rows=PAGE_ROWS,
        group=group,
    )
    return [(c.rows.start, c.rows.stop, c.rows_per_sequence, c.block_table.shape[1]) for c in split_batch(batch)]


@pytest.mark.parametrize(
    ("counts", "group", "expected"),
    [
        ([1, 1, 1], 2, [(0, 3, 1, 2)]),
        ([1, 1, 0, 0], 2, [(0, 2, 1, 2)]),
        ([4, 4], 2, [(0, 8, 4, 2)]),
        ([40, 40], 2, [(0, 80, 0, 3)]),
        ([1, 1], 65, [(0, 2, 0, 2)]),
        ([1, 1, 50], 2, [(0, 2, 1, 2), (2, 52, 0, 4)]),
        ([50, 7, 1], 2, [(0, 57, 0, 4), (57, 58, 1, 2)]),
        ([1, 5, 1, 6, 1, 1], 2, [(0, 1, 1, 2), (1, 13, 0, 2), (13, 15, 1, 2)]),
        ([0, 0], 2, []),
        ([], 2, []),
    ],
    ids=str,
)
def test_ranges_of_decode_become_dense_calls(counts: list[int], group: int, expected: list[tuple]) -> None:
    assert ranges_of(counts, group=group) == expected


def test_packed_calls_gather_a_bounded_number_of_keys() -> None:
    limit = paged_batch.MAX_GATHERED_KEYS
    bounds = [16, 16, limit // 2, limit // 2, 16, 2 * limit, 32, 32]
    calls = ranges_of([5] * len(bounds), bounds, group=60)
    assert [(end - start) // 5 for start, end, _, _ in calls] == [2, 2, 1, 1, 2]
    assert all((end - start) // 5 * width * PAGE_ROWS <= limit or end - start == 5 for start, end, _, width in calls)


def test_tables_keep_all_columns_if_bounds_exceed_them() -> None:
    batch = make_batch(Step(make_sequences((40,)), [40]), "cpu", width=3)
    (call,) = split_batch(PagedBatch(**{name: getattr(batch, name) for name in batch.__slots__} | {"kv_bounds": [999]}))
    assert call.block_table.shape == (1, 3)


def test_dense_call_keeps_the_tensors_of_a_graph() -> None:
    used, table = torch.ones(4, dtype=torch.int32), torch.zeros(4, 9, dtype=torch.int32)
    call = paged_batch.dense_call(used, table)
    assert call.seqused_k is used and call.block_table is table and call.rows == slice(0, 4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "pool_rows",
    [[3, 40, 17], [-1, 40, -1, 17], [5, -1], [-1, -1], [], [0, -1, -1]],
    ids=str,
)
def test_writes_skip_negative_rows(device: str, pool_rows: list[int]) -> None:
    pool = torch.randn(4, 16, HKV, 2 * D, generator=torch.Generator().manual_seed(1)).to(device)[..., :D]
    x = torch.randn(len(pool_rows) + 2, HKV, D, generator=torch.Generator().manual_seed(2)).to(device)
    expected = pool.clone()
    for pool_row, row in zip(pool_rows, x, strict=False):
        if pool_row >= 0:
            expected[pool_row // 16, pool_row % 16] = row
    write_rows(x, pool, torch.tensor(pool_rows, dtype=torch.int64, device=device))
    assert torch.equal(pool, expected)


def test_writes_and_calls_read_no_tensor_on_the_host() -> None:
    """Check that no number is read: the host would wait for a GPU."""

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    batch, pool = make_batch(Step(make_sequences((40, 5)), [1, 5]), "cpu"), torch.zeros(4, 16, HKV, D)
    with Waits():
        split_batch(batch)
        write_rows(torch.ones(3, HKV, D), pool, torch.tensor([-1, 5, 6]))


@pytest.mark.parametrize(("rows", "is_valid"), [(1, False), (8, False), (16, True), (48, True)])
def test_page_sizes_must_be_multiples_of_16(rows: int, is_valid: bool) -> None:
    if is_valid:
        paged_batch.check_page_rows(rows, "")
    else:
        with pytest.raises(ValueError, match=f"page size must be a multiple of 16, but got {rows}. Do so."):
            paged_batch.check_page_rows(rows, "Do so.")


def test_groups_above_64_query_heads_are_refused() -> None:
    paged_batch.check_group(64, 1)
    with pytest.raises(ValueError, match="at most 64 query heads, but got 65 query heads and 1 KV heads"):
        paged_batch.check_group(65, 1)


def test_num_splits_of_a_layer_reaches_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    splits: list[object] = []
    monkeypatch.setattr(paged_batch, "attention", lambda *_, num_splits, **__: splits.append(num_splits))
    step = Step(make_sequences((40, 20)), [1, 9])
    tensors: tuple[Tensor, ...] = (step.rows("q"), *torch.zeros(2, NUM_PAGES, PAGE_ROWS, HKV, D))
    settings = paged_batch.LayerSettings(1.0, num_splits=1)
    attend(*tensors, split_batch(make_batch(step, "cpu")), torch.empty(10, HQ, D), settings)
    assert splits == [1, 1]
