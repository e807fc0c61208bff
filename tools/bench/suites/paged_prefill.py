"""Suite pagedprefill: packed queries of prefill, chunks and decode over a paged KV cache.

The baselines are FlashAttention-3 on pages of 16 and of 256 rows, the project's kernel of packed sequences on
contiguous keys, and the same kernel behind a gather of all pages. Pages are in random order. Times are device times of
replayed CUDA graphs. The result of each candidate is checked against fp64.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.bench import baselines
from tools.bench.runner import Bench, complete_call, row_of, time_with_peers
from torch_flashplug import attention, sdpa_backend

SEED = 20261129
PAGES = {"ours_fa3": 16, "ours_page64": 64, "ours_page256": 256, "fa3": 16, "fa3_page256": 256}  # rows of a page
PAGE = 16  # rows of a page of the gather
PEERS = {"fa3", "fa3_page256"}
PROVIDERS = {"ours_fa3", "fa3"}  # default of --providers in bench.py
LARGEST_ERROR = 0.01  # largest allowed relative error against fp64: above, a result is wrong
ROUND_MS, GRAPH_MS, GRAPH_CALLS = 10.0, 2.0, 10
ROWS_CHECKED = 16  # checked rows: the last rows of the first sequence and of the last sequence
CAP = 50.0  # softcap of Gemma 2


@dataclass(frozen=True, slots=True)
class Call:
    """Causal call in bf16 with bottom-right alignment: the rows and the keys of each sequence."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    d: int
    heads: tuple[int, int]
    left: int = -1  # number of visible keys before the query's own position; -1: all
    softcap: float = 0.0
    sinks: bool = False

    @property
    def scores(self) -> int:
        """Number of visible scores of a head."""
        return sum(
            sum(min(keys - rows + row + 1, keys if self.left < 0 else self.left + 1) for row in range(rows))
            for rows, keys in self.lengths
        )

    @property
    def flop(self) -> float:
        return 4.0 * self.scores * self.heads[0] * self.d

    def facts(self) -> dict[str, object]:
        rows, keys = (max(length[side] for length in self.lengths) for side in (0, 1))
        mask = f"window_{self.left}" if self.left >= 0 else "causal"
        shape = [len(self.lengths), *self.heads, rows, keys, self.d, self.d]
        return {"shape": shape, "d": self.d, "s": keys, "mask": mask, "dtype": "bf16", "flop": self.flop}


HEADS = {64: (32, 8), 128: (32, 8), 256: (16, 4)}
LENGTHS = {
    "512_of_4k": ((512, 4096),),
    "2k_of_8k": ((2048, 8192),),
    "8k_of_32k": ((8192, 32768),),
    "16x512": ((512, 512),) * 16,
}


def calls() -> Iterator[Call]:
    """Yield prefills and chunks by head dim, then windows, softcaps and sinks, mixed batches, and few query rows."""
    for d, heads in HEADS.items():
        for name, lengths in LENGTHS.items():
            yield Call(f"{name}_d{d}", lengths, d, heads)
        yield Call(f"2k_of_8k_window_d{d}", LENGTHS["2k_of_8k"], d, heads, left=1023)
    for d in (128, 256):
        yield Call(f"2k_of_8k_softcap_d{d}", LENGTHS["2k_of_8k"], d, HEADS[d], softcap=CAP)
    yield Call("2k_of_8k_sinks_d64", LENGTHS["2k_of_8k"], 64, (64, 8), sinks=True)
    step = (9000 - 300) // 30
    yield Call("mixed_d128", ((2048, 2048), *((1, 300 + step * i) for i in range(31))), 128, HEADS[128])
    for rows in (1, 2, 4, 8):
        yield Call(f"rows{rows}_d128", ((rows, 4096),) * 32, 128, HEADS[128])


@dataclass(frozen=True, slots=True)
class Operands:
    """Operands of a call: packed queries (T, Hq, D), and packed keys and values (Tk, Hkv, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    starts: tuple[Tensor, Tensor]  # of queries and of keys
    used: Tensor
    sinks: Tensor | None


def _operands(call: Call, device: str) -> Operands:
    generator, (Hq, Hkv) = torch.Generator(device).manual_seed(SEED), call.heads
    T, Tk = (sum(length[side] for length in call.lengths) for side in (0, 1))
    q, k, v = (
        torch.randn(size, heads, call.d, device=device, generator=generator).bfloat16()
        for size, heads in ((T, Hq), (Tk, Hkv), (Tk, Hkv))
    )
    starts = tuple(
        torch.tensor((0, *(length[side] for length in call.lengths)), device=device).cumsum(0).int() for side in (0, 1)
    )
    sinks = torch.randn(Hq, device=device, generator=generator) if call.sinks else None
    return Operands(q, k, v, starts, starts[1].diff(), sinks)


def in_pages(x: Operands, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pools of keys and of values, (pages, rows, Hkv, D), and the block table. Unused rows are NaN."""
    lengths = x.used.tolist()
    n = -(-max(lengths) // rows)
    table = torch.randperm(len(lengths) * n, generator=torch.Generator().manual_seed(SEED)).view(-1, n)
    pools = [torch.full((len(lengths) * n, rows, *part.shape[1:]), torch.nan, dtype=part.dtype) for part in (x.k, x.v)]
    pools = [pool.to(x.q.device) for pool in pools]
    for pool, part in zip(pools, (x.k, x.v), strict=True):
        for pages, keys in zip(table, part.split(lengths), strict=True):
            padded = torch.full((n * rows, *keys.shape[1:]), torch.nan, dtype=keys.dtype, device=keys.device)
            padded[: len(keys)] = keys
            pool[pages.to(pool.device)] = padded.unflatten(0, (n, rows))
    return *pools, table.int().to(x.q.device)


# ---- candidates: each function takes a call and the operands, and returns a function that computes (T, Hq, D) ----

Attend = Callable[[], Tensor]


def _settings(call: Call, x: Operands) -> dict[str, object]:
    window = None if call.left < 0 else (call.left, None)
    return {"causal": True, "window": window, "softcap": call.softcap, "sinks": x.sinks, "cu_seqlens_q": x.starts[0]}


def _pages(rows: int, call: Call, x: Operands) -> Attend:
    k, v, table = in_pages(x, rows)
    settings = _settings(call, x)
    return lambda: attention(x.q, k, v, **settings, block_table=table, seqused_k=x.used)


def _gather(call: Call, x: Operands) -> Attend:
    attend = _pages(PAGE, call, x)

    def gather_then_attend() -> Tensor:
        with sdpa_backend("auto"):
            return attend()

    return gather_then_attend


def _contiguous(call: Call, x: Operands) -> Attend:
    settings = _settings(call, x)
    return lambda: attention(x.q, x.k, x.v, **settings, cu_seqlens_k=x.starts[1])


def _fa3(rows: int, call: Call, x: Operands) -> Attend:
    function = baselines.wheel("fa3")
    if function is None:
        raise ImportError("not installed")
    k, v, table = in_pages(x, rows)
    arguments = {"page_table": table, "cache_seqlens": x.used, "cu_seqlens_q": x.starts[0], "causal": True}
    arguments |= {"max_seqlen_q": max(rows for rows, _ in call.lengths), "softcap": call.softcap}
    if call.left >= 0:
        arguments["window_size"] = (call.left, 0)
    if x.sinks is not None:
        arguments["sinks"] = x.sinks.bfloat16()
    attend = sys.modules[function.__module__].flash_attn_with_kvcache

    def call_wheel() -> Tensor:
        result = attend(x.q, k, v, **arguments)
        return result[0] if isinstance(result, tuple) else result

    return call_wheel


FUNCTIONS = {
    **{name: functools.partial(_fa3 if name in PEERS else _pages, rows) for name, rows in PAGES.items()},
    **{"ours_contiguous": _contiguous, "ours_gather": _gather},
}


def _error(call: Call, x: Operands, out: Tensor) -> float:
    """Return the relative error of the last rows of two sequences against fp64."""
    results, right = [], []
    for sequence in {0, len(call.lengths) - 1}:
        (rows, _), (end, last_key) = call.lengths[sequence], (int(starts[sequence + 1]) for starts in x.starts)
        checked, keys = slice(end - min(ROWS_CHECKED, rows), end), slice(int(x.starts[1][sequence]), last_key)
        q, k, v = (part[None].double() for part in (x.q[checked], x.k[keys], x.v[keys]))
        settings = _settings(call, x) | {"sinks": None if x.sinks is None else x.sinks.double()}
        del settings["cu_seqlens_q"]
        with sdpa_backend("math"):
            right.append(attention(q, k, v, **settings)[0])
        results.append(out[checked].double())
    right = torch.cat(right)
    return float((torch.cat(results) - right).norm() / right.norm())


def _measure(bench: Bench, call: Call) -> None:
    x = _operands(call, bench.device)
    makers = {
        name: functools.partial(function, call, x)
        for name, function in FUNCTIONS.items()
        if name not in PEERS or "fa3" in bench.providers
    }
    timings, _, errors, refused = time_with_peers(
        bench, call.name, makers, error_of=functools.partial(_error, call, x),
        once=functools.partial(complete_call, "fwd", (), x.q), largest_error=LARGEST_ERROR, round_ms=ROUND_MS,
        calls=max(1, min(GRAPH_CALLS, int(GRAPH_MS / (call.flop / 4e11)))),
    )  # fmt: skip
    variants = {name: timing for name, timing in timings.items() if name not in {"ours_fa3", *PEERS}}
    timed = {name: timing for name, timing in timings.items() if name not in variants}
    row = row_of(call.name, timed, **call.facts(), errors=errors, refused=refused)
    row["all_ms"] |= {name: timing.ms for name, timing in variants.items()}
    bench.add(row)


def suite_pagedprefill(bench: Bench) -> None:
    for call in calls():
        if bench.take(call.name):
            _measure(bench, call)
