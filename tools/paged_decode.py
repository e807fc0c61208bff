"""Suite paged: one query row of each sequence against keys and values in pages, from memory, beside our own decode of
rows on end, without lengths. Device time of replayed CUDA graphs, which go through so many pools that none is still in
L2. Pages lie in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import workloads
from decode import MAX_COPIES, ROUND_MS, copies_of, in_turn, kv_bytes
from harness import Bench, facts_of, graphed, row_of
from torch import Tensor

from torch_flashplug import attention, sdpa_backend
from torch_flashplug.testing import Candidate, Case, Inputs, Timing, make_inputs, time_interleaved

SEED = 20261126
PAGES = {"ours_fa2": 16, "ours_page64": 64, "ours_page256": 256}  # rows of one
LARGEST_ERROR = 0.01  # relative, of normal inputs: more is a wrong number


def suite_paged(bench: Bench) -> None:
    for case in workloads.paged():
        if bench.take(case.name):
            _measure(bench, case)


def _in_pages(inputs: Inputs, rows: int) -> Callable[[], Tensor]:
    """The same keys, in pages of so many rows."""
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
    q, given = inputs.q.transpose(1, 2), {"block_table": table.view(B, of_sequence), "seqused_k": used}
    return lambda: attention(q, *pools, causal=True, **given)


def _with_lengths(inputs: Inputs) -> Callable[[], Tensor]:
    used = torch.full((len(inputs.q),), inputs.k.shape[2], dtype=torch.int32, device=inputs.k.device)
    q, k, v = (x.transpose(1, 2) for x in inputs)
    return lambda: attention(q, k, v, causal=True, seqused_k=used)


def _on_end(inputs: Inputs) -> Callable[[], Tensor]:
    q, k, v = (x.transpose(1, 2) for x in inputs)
    return lambda: attention(q, k, v)


@torch.no_grad()
def _measure(bench: Bench, case: Case) -> None:
    copies = min(MAX_COPIES, copies_of(case))
    inputs = [make_inputs(case, bench.device, seed) for seed in range(copies)]
    makers = {name: functools.partial(_in_pages, rows=rows) for name, rows in PAGES.items()}
    makers |= {"ours_lengths": _with_lengths, "ours_on_end": _on_end}
    right, errors, candidates = None, {}, {}
    scope = functools.partial(sdpa_backend, "auto")
    kept = []
    for name, make in {"ours_on_end": makers.pop("ours_on_end"), **makers}.items():
        calls = [make(one) for one in inputs]
        kept.append(calls)
        with scope():
            out = calls[0]().float()
        right = out if right is None else right
        errors[name] = float((out - right).norm() / right.norm())
        candidates[name] = graphed(Candidate(in_turn(calls), scope), 1)
    if max(errors.values()) > LARGEST_ERROR:
        raise SystemExit(f"{case.name}: wrong, nothing is timed: {errors}")
    timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
    timings = {name: Timing(tuple(ms / copies for ms in t.rounds)) for name, t in timings.items()}
    bench.add(row_of(case.name, timings, **facts_of(case), errors=errors) | {"kv_bytes": kv_bytes(case)})
