"""Suite paged: decode of one query row per sequence with a paged KV cache in memory.

The baselines are FlashAttention-3 and FlashInfer on pages of 16 rows, and the project's decode with contiguous caches
and without KV lengths. Times are device times of replayed CUDA graphs. A graph visits so many page pools that no pool
is still in L2. Pages are in random order. The planning that a peer does once per step, for all layers, is not timed.

Batches of uneven KV lengths (`uneven_*`) are timed with equal splits and with balanced splits. No mode chooses balanced
splits yet, so the suite raises the limit of the cost model during the capture.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tools.bench import baselines, workloads
from tools.bench.runner import Bench, facts_of, graphed, refusal, row_of
from tools.bench.suites.decode import MAX_COPIES, ROUND_MS, copies_of, in_sequence, kv_bytes
from torch_flashplug import attention, sdpa_backend
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table, kernel_table
from torch_flashplug.testing import Candidate, Case, Inputs, Timing, make_inputs, time_interleaved

SEED = 20261126
PAGES = {"ours_fa2": 16, "ours_page64": 64, "ours_page256": 256}  # rows per page
PAGE = PAGES["ours_fa2"]  # the page size of the peers, and of ours in the comparison with the peers
LARGEST_ERROR = 0.01  # largest allowed relative error on normally distributed inputs: above, a result is wrong
SPLITS = {  # batch-invariant settings
    "ours_one_split": {"num_splits": 1},
    "ours_splits_of_4096": {"fixed_split_size": 4096},
}
UNEVEN_COPIES = 2  # copies of an uneven batch, each larger than L2
UNEVEN_PAGES = {"ours_fa2": 16, "ours_page64": 64}
BALANCED = {"ours_balanced": 16, "ours_balanced_page64": 64}  # with balanced splits, rows per page
MAX_SEQUENCES = 512  # with balanced splits
WORKSPACE_BYTES = 512 << 20  # workspace for the KV splits of FlashInfer, shared by all calls


def suite_paged(bench: Bench) -> None:
    for case in workloads.paged():
        if bench.take(case.name):
            _measure(bench, case)
    for batch in workloads.UNEVEN:
        if bench.take(batch.name):
            _measure_uneven(bench, batch)


@contextlib.contextmanager
def balanced_splits() -> Iterator[None]:
    """Let calls of several sequences have balanced splits."""
    cost_model = replace(dispatch_table.COST_MODEL, max_balanced_sequences=MAX_SEQUENCES)
    bindings.push_rows(kernel_table.KERNEL_ROWS, dispatch_table.CHOICE_ROWS, cost_model)
    try:
        with sdpa_backend("auto"):
            yield
    finally:
        startup.push_tables()


@dataclass(frozen=True, slots=True)
class Paged:
    """Operands of a call with a paged KV cache."""

    q: Tensor  # (B, 1, Hq, D)
    pools: tuple[Tensor, ...]  # page pools of keys and of values, each (pages, rows, Hkv, D)
    table: Tensor  # (B, pages per sequence)
    used: Tensor  # (B,)


def _paged_copy(inputs: Inputs, rows: int) -> Paged:
    """Copy keys and values into pages of `rows` rows."""
    (B, _, S, _), device = inputs.k.shape, inputs.k.device
    of_sequence = S // rows
    table = torch.randperm(B * of_sequence, generator=torch.Generator().manual_seed(SEED)).int().to(device)
    pools = []
    for x in (inputs.k, inputs.v):  # (B, Hkv, S, D) -> (pages, rows, Hkv, D)
        pages = x.transpose(1, 2).reshape(B * of_sequence, rows, x.shape[1], x.shape[3])
        pool = torch.empty_like(pages)
        pool[table.long()] = pages
        pools.append(pool)
    used = torch.full((B,), S, dtype=torch.int32, device=device)
    return Paged(inputs.q.transpose(1, 2), tuple(pools), table.view(B, of_sequence), used)


def _uneven_copy(batch: workloads.UnevenBatch, rows: int, device: str, seed: int) -> Paged:
    """Return random operands with pages of `rows` rows. The values do not depend on `rows`."""
    case, shared = batch.case, batch.shared // rows
    generator = torch.Generator(device).manual_seed(seed)
    counts = [-(-length // rows) for length in batch.lengths]
    first_pages = [0, *(shared for _ in counts[1:])]
    num_pages = sum(counts) - sum(first_pages)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(SEED)).int()
    table, used = torch.zeros(case.B, max(counts), dtype=torch.int32), 0
    pools = [torch.zeros(num_pages, rows, case.Hkv, case.D, dtype=case.torch_dtype, device=device) for _ in range(2)]
    for i, (count, first) in enumerate(zip(counts, first_pages, strict=True)):
        pages = order[used : used + count - first]
        table[i, :first], table[i, first:count] = table[0, :first], pages
        used += len(pages)
        num_keys = batch.lengths[i] - first * rows
        for pool in pools:
            keys = torch.zeros(len(pages) * rows, case.Hkv, case.D, dtype=case.torch_dtype, device=device)
            keys[:num_keys].normal_(generator=generator)
            pool[pages.long().to(device)] = keys.view(len(pages), rows, case.Hkv, case.D)
    q = torch.randn(case.B, 1, case.Hq, case.D, generator=generator, device=device).to(case.torch_dtype)
    return Paged(q, tuple(pools), table.to(device), torch.tensor(batch.lengths, dtype=torch.int32, device=device))


def _reference(x: Paged) -> Tensor:
    """Return the output (B, 1, Hq, D) in fp32, computed for each sequence."""
    outs, group = [], x.q.shape[2] // x.pools[0].shape[2]
    for q, pages, length in zip(x.q.float(), x.table, x.used.tolist(), strict=True):
        k, v = (pool[pages.long()].flatten(0, 1)[:length].float().repeat_interleave(group, 1) for pool in x.pools)
        weights = (torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.stack(outs)


# ---- candidates: each function takes operands and returns a function that computes (B, 1, Hq, D) ----

Attend = Callable[[], Tensor]


def _ours(x: Paged, **splits: int) -> Attend:
    return lambda: attention(x.q, *x.pools, causal=True, block_table=x.table, seqused_k=x.used, **splits)


def _with_lengths(inputs: Inputs) -> Attend:
    used = torch.full((len(inputs.q),), inputs.k.shape[2], dtype=torch.int32, device=inputs.k.device)
    q, k, v = (x.transpose(1, 2) for x in inputs)
    return lambda: attention(q, k, v, causal=True, seqused_k=used)


def _contiguous(inputs: Inputs) -> Attend:
    q, k, v = (x.transpose(1, 2) for x in inputs)
    return lambda: attention(q, k, v)


def _fa3(x: Paged, planned: bool) -> Attend:
    module = sys.modules[baselines.wheel("fa3").__module__]
    arguments = {"page_table": x.table, "cache_seqlens": x.used}
    if planned:
        (B, _, Hq, D), Hkv, keys = x.q.shape, x.pools[0].shape[2], x.table.shape[1] * PAGE
        arguments["scheduler_metadata"] = module.get_scheduler_metadata(B, 1, keys, Hq, Hkv, D, x.used, page_size=PAGE)
    return lambda: module.flash_attn_with_kvcache(x.q, *x.pools, **arguments)


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _flashinfer(x: Paged, tensor_cores: bool) -> Attend:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    device, counts = x.q.device, [-(-length // PAGE) for length in x.used.tolist()]
    starts = torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    indices = torch.cat([pages[:count] for pages, count in zip(x.table, counts, strict=True)])
    lists = {"indptr": starts, "indices": indices, "last_page_len": (x.used - 1) % PAGE + 1}
    kept = {f"paged_kv_{name}_buffer": values.clone() for name, values in lists.items()}
    step = BatchDecodeWithPagedKVCacheWrapper(
        _workspace(device), use_cuda_graph=True, use_tensor_cores=tensor_cores, **kept
    )
    facts = x.q.shape[2], *x.pools[0].shape[2:], PAGE
    step.plan(*lists.values(), *facts, q_data_type=x.q.dtype, kv_data_type=x.pools[0].dtype)
    rows = x.q[:, 0]
    return lambda: step.run(rows, x.pools)[:, None]


# Each peer has two variants, and the faster variant counts.
PEERS = {
    "fa3": functools.partial(_fa3, planned=False),
    "fa3_planned": functools.partial(_fa3, planned=True),
    "flashinfer": functools.partial(_flashinfer, tensor_cores=False),
    "flashinfer_mma": functools.partial(_flashinfer, tensor_cores=True),
}


def _makers(bench: Bench, inputs: list[Inputs]) -> dict[str, Callable[[], list[Attend]]]:
    """Return a function for each candidate that makes the candidate's calls, one for each copy of the operands."""
    paged_copies = {rows: [_paged_copy(copy, rows) for copy in inputs] for rows in PAGES.values()}
    of_all = {"ours_contiguous": (_contiguous, inputs)}
    of_all |= {name: (_ours, paged_copies[rows]) for name, rows in PAGES.items()}
    of_all |= {name: (functools.partial(_ours, **splits), paged_copies[PAGE]) for name, splits in SPLITS.items()}
    of_all |= {"ours_lengths": (_with_lengths, inputs)} | _peers(bench, paged_copies[PAGE])
    return _makers_of(of_all)


def _peers(bench: Bench, copies: list[Paged]) -> dict[str, tuple]:
    """Return the peers that are installed, with the copies of the operands."""
    absent = baselines.WHEELS.keys() - bench.providers.keys()
    return {name: (make, copies) for name, make in PEERS.items() if name.split("_")[0] not in absent}


def _makers_of(of_all: Mapping[str, tuple]) -> dict[str, Callable[[], list[Attend]]]:
    def make_all(make: Callable, copies: list) -> list[Attend]:
        return [make(copy) for copy in copies]

    return {name: functools.partial(make_all, *row) for name, row in of_all.items()}


def _uneven_makers(bench: Bench, copies: Mapping[int, list[Paged]]) -> dict[str, Callable[[], list[Attend]]]:
    """Return makers for an uneven batch. `copies` has the copies of the operands by the rows of a page."""
    of_all = {name: (_ours, copies[rows]) for name, rows in (UNEVEN_PAGES | BALANCED).items()}
    return _makers_of(of_all | _peers(bench, copies[PAGE]))


def _measure(bench: Bench, case: Case) -> None:
    copies = min(MAX_COPIES, copies_of(case))
    inputs = [make_inputs(case, bench.device, seed) for seed in range(copies)]
    _time(bench, case, _makers(bench, inputs), copies)


def _measure_uneven(bench: Bench, batch: workloads.UnevenBatch) -> None:
    copies = {
        rows: [_uneven_copy(batch, rows, bench.device, seed) for seed in range(UNEVEN_COPIES)]
        for rows in set(UNEVEN_PAGES.values())
    }
    right = _reference(copies[PAGE][0])
    _time(bench, batch.case, _uneven_makers(bench, copies), UNEVEN_COPIES, right)


@torch.no_grad()
def _time(
    bench: Bench, case: Case, makers: Mapping[str, Callable[[], list[Attend]]], copies: int,
    right: Tensor | None = None,
) -> None:  # fmt: skip
    """Check and time candidates, and add a row. Without `right`, the first candidate has the right output."""
    errors, refused, candidates = {}, {}, {}
    kept = []
    for name, make in makers.items():
        scope = balanced_splits if name in BALANCED else functools.partial(sdpa_backend, "auto")
        try:
            with scope():
                calls = make()
                calls[0]()  # a plan serves many calls, so the result of the second call is checked
                out = calls[0]().float()
            kept.append(calls)
            right = out if right is None else right
            errors[name] = float((out - right).norm() / right.norm())
            if not errors[name] <= LARGEST_ERROR:
                raise ValueError(f"wrong by {errors[name]:.2g}")
            candidates[name] = graphed(Candidate(in_sequence(calls), scope), 1)
        except Exception as reason:  # any exception of a peer is noted, and the remaining candidates are measured
            refused[name] = refusal(reason)
            if name not in PEERS or "CUDA error" in refused[name]:
                raise SystemExit(f"{case.name}: {name}: nothing is timed: {reason}") from reason
    timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
    timings = {name: Timing(tuple(ms / copies for ms in t.rounds)) for name, t in timings.items()}
    # Further variants of ours have no column.
    variants = {name: t.ms for name, t in timings.items() if name not in {"ours_fa2", *PEERS}}
    timed = {name: t for name, t in timings.items() if name not in variants}
    row = row_of(case.name, timed, **facts_of(case), errors=errors, refused=refused)
    row["all_ms"] |= variants
    bench.add(row | {"kv_bytes": kv_bytes(case)})
