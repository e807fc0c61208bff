"""Suite paged: decode of one query row per sequence with a paged KV cache in memory.

The baselines are FlashAttention-3 and FlashInfer on pages of 16 rows, and the project's decode with contiguous caches
and without KV lengths. Times are device times of replayed CUDA graphs. A graph visits so many page pools that no pool
is still in L2. Pages are in random order. The planning that a peer does once per step, for all layers, is not timed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.bench import baselines, workloads
from tools.bench.runner import Bench, facts_of, graphed, refusal, row_of
from tools.bench.suites.decode import MAX_COPIES, ROUND_MS, copies_of, in_sequence, kv_bytes
from torch_flashplug import attention, sdpa_backend
from torch_flashplug.testing import Candidate, Case, Inputs, Timing, make_inputs, time_interleaved

SEED = 20261126
PAGES = {"ours_fa2": 16, "ours_page64": 64, "ours_page256": 256}  # rows per page
PAGE = PAGES["ours_fa2"]  # the page size of the peers, and of ours in the comparison with the peers
LARGEST_ERROR = 0.01  # largest allowed relative error on normally distributed inputs: above, a result is wrong
SPLITS = {  # batch-invariant settings
    "ours_one_split": {"num_splits": 1},
    "ours_splits_of_4096": {"fixed_split_size": 4096},
}
WORKSPACE_BYTES = 512 << 20  # workspace for the KV splits of FlashInfer, shared by all calls


def suite_paged(bench: Bench) -> None:
    for case in workloads.paged():
        if bench.take(case.name):
            _measure(bench, case)


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

    (B, pages), device = x.table.shape, x.q.device
    starts = torch.arange(B + 1, dtype=torch.int32, device=device) * pages
    lists = {"indptr": starts, "indices": x.table.flatten(), "last_page_len": torch.full_like(x.used, PAGE)}
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
    of_all |= {"ours_lengths": (_with_lengths, inputs)}
    absent = baselines.WHEELS.keys() - bench.providers.keys()
    of_all |= {name: (make, paged_copies[PAGE]) for name, make in PEERS.items() if name.split("_")[0] not in absent}

    def make_all(make: Callable, copies: list) -> list[Attend]:
        return [make(copy) for copy in copies]

    return {name: functools.partial(make_all, *row) for name, row in of_all.items()}


@torch.no_grad()
def _measure(bench: Bench, case: Case) -> None:
    copies = min(MAX_COPIES, copies_of(case))
    inputs = [make_inputs(case, bench.device, seed) for seed in range(copies)]
    right, errors, refused, candidates = None, {}, {}, {}
    scope = functools.partial(sdpa_backend, "auto")
    kept = []
    for name, make in _makers(bench, inputs).items():
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
