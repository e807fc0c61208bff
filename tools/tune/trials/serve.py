"""GPU trial of the server adapters: the exact calls of vLLM's and SGLang's adapters, without a server.

    python tools/tune/trials/serve.py                 numbers, CUDA graphs, then times; about two minutes on an H100
    python tools/tune/trials/serve.py --only numbers  only numbers and graphs

The commands run in the root of the repository.

Numbers are compared with fp64 on random sequences. Unused cache rows, outputs and padding tokens are NaN beforehand.
Host waits raise an error during the calls. Each time is the median of interleaved rounds.

Predictions (not measured, 2026-11-29): decode alone costs the same as a direct call of attention(); the mixed batch is
at least twice as fast in two calls as in one packed call, which gathers the pages of all sequences; the graph of decode
repeats the eager bits.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path.cwd()))  # the root of the repository

import torch_flashplug
from torch_flashplug.integrations.paged_batch import (
    LayerSettings,
    PagedBatch,
    PagedCall,
    attend,
    dense_call,
    split_batch,
    write_rows,
)

DEVICE, DTYPE = "cuda", torch.bfloat16
ERROR_LIMIT = 2e-2  # of the largest output
ROUNDS = 15


@dataclass
class Case:
    """Batch of a step: KV lengths with the new tokens, and the new tokens of each sequence."""

    lengths: list[int]
    counts: list[int]
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    page_rows: int = 16
    layout: str = "vllm"  # K and V of a token in adjacent halves; "sglang": two pools
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False


class Setup:
    """Random tensors of a case on the device."""

    def __init__(self, case: Case, seed: int = 0, padding: int = 2):
        draw = torch.Generator(DEVICE).manual_seed(seed)
        (Hq, Hkv), D, rows = case.heads, case.dim, case.page_rows
        self.case, self.tokens = case, sum(case.counts)
        pages = [-(-length // rows) for length in case.lengths]
        order = torch.randperm(sum(pages) + 5, generator=torch.Generator().manual_seed(seed))
        table = torch.full((len(pages), max(pages) + 3), 2**31 - 1, dtype=torch.int32)
        for i, numbers in enumerate(order[: sum(pages)].split(pages)):
            table[i, : len(numbers)] = numbers
        self.table = table.to(DEVICE)
        num_pages = len(order)
        if case.layout == "vllm":  # (pages, Hkv, rows, 2 D), as in the layout LBHNC
            cache = torch.full((num_pages, Hkv, rows, 2 * D), math.nan, device=DEVICE, dtype=DTYPE)
            self.pools = cache.transpose(1, 2).split(D, -1)
        else:
            shape = (num_pages, rows, Hkv, D)
            self.pools = tuple(torch.full(shape, math.nan, device=DEVICE, dtype=DTYPE) for _ in range(2))
        self.keys, self.values = (
            [torch.randn(n, Hkv, D, generator=draw, device=DEVICE, dtype=DTYPE) for n in case.lengths] for _ in range(2)
        )
        for i, length in enumerate(case.lengths):
            key = torch.arange(length)
            pool_rows = (table[i, key // rows].long() * rows + key % rows).to(DEVICE)
            pool_rows = torch.cat((pool_rows, torch.full((padding,), -1, device=DEVICE)))
            for x, pool in zip((self.keys[i], self.values[i]), self.pools, strict=True):
                write_rows(torch.cat((x, x.new_full((padding, Hkv, D), math.nan))), pool, pool_rows)
        self.q = torch.randn(self.tokens, Hq, D, generator=draw, device=DEVICE, dtype=DTYPE)
        sinks = torch.randn(Hq, generator=draw, device=DEVICE) if case.has_sinks else None
        window = (case.window - 1, 0) if case.window else (-1, -1)
        self.settings = LayerSettings(D**-0.5, window, case.softcap, sinks)
        self.used = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
        starts = torch.tensor([0, *case.counts], device=DEVICE).cumsum(0).int()
        facts = (starts, self.used, self.table, case.counts, case.lengths, rows, Hq // Hkv)
        self.batch = PagedBatch(*facts)

    def run(self, calls: tuple[PagedCall, ...], out: Tensor) -> Tensor:
        attend(self.q, *self.pools, calls, out, self.settings)
        return out

    def run_in_place(self, calls: tuple[PagedCall, ...], out: Tensor) -> Tensor:
        """Run packed calls under sdpa_backend("fa3"), where a kernel reads the pages of packed queries in place."""
        for call in calls:
            with torch_flashplug.sdpa_backend("auto" if call.rows_per_sequence else "fa3"):
                self.run((call,), out)
        return out

    def one_packed_call(self, out: Tensor) -> Tensor:
        """Return the output of a single call for the batch, which gathers all pages."""
        s, b = self.settings, self.batch
        lengths = {"cu_seqlens_q": b.cu_seqlens_q, "seqused_k": b.seqused_k, "block_table": self.table[:, :-3]}
        settings = {"window": s.window, "softcap": s.softcap, "sinks": s.sinks, "scale": s.scale}
        return torch_flashplug.attention(self.q, *self.pools, causal=True, **settings, **lengths, out=out)

    def expected(self) -> Tensor:
        """Return the outputs in fp64."""
        outs, first, (Hq, Hkv) = [], 0, self.case.heads
        for k, v, count in zip(self.keys, self.values, self.case.counts, strict=True):
            q, n = self.q[first : first + count].double(), len(k)
            k64, v64 = (x.double().repeat_interleave(Hq // Hkv, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k64) * self.settings.scale
            if self.case.softcap:
                scores = self.case.softcap * torch.tanh(scores / self.case.softcap)
            distance = torch.arange(n - count, n, device=DEVICE).unsqueeze(1) - torch.arange(n, device=DEVICE)
            hidden = (distance < 0) | (distance >= self.case.window) if self.case.window else distance < 0
            scores = scores.masked_fill(hidden, -math.inf)
            if self.settings.sinks is not None:
                sink = self.settings.sinks.double().view(-1, 1, 1).expand(-1, count, 1)
                scores = torch.cat((scores, sink), -1)
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :n], v64))
            first += count
        return torch.cat(outs)


def say(text: str) -> None:
    print(text, flush=True)


def random_cases(number: int) -> list[Case]:
    draw = torch.Generator().manual_seed(int(torch.seed() % 2**31))
    say(f"seed of the cases: {draw.initial_seed()}")

    def pick(options: list) -> object:
        return options[int(torch.randint(len(options), (1,), generator=draw))]

    cases = []
    for _ in range(number):
        B = int(torch.randint(1, 9, (1,), generator=draw))
        counts = [1] * B if pick([0, 1]) else [pick([1, 1, 1, 3, 40, 200]) for _ in range(B)]
        lengths = [count + pick([0, 1, 15, 16, 17, 300, 1000]) for count in counts]
        more = {"window": pick([0, 0, 30, 128]), "softcap": pick([0.0, 0.0, 20.0]), "has_sinks": pick([False, True])}
        heads, dim = pick([(8, 8), (16, 2), (32, 1)]), pick([64, 128, 256])
        cases.append(Case(lengths, counts, heads, dim, pick([16, 48, 64]), pick(["vllm", "sglang"]), **more))
    return cases


def check_numbers() -> bool:
    worst, failed = 0.0, 0
    for i, case in enumerate(random_cases(24)):
        setup = Setup(case, seed=i)
        out = torch.full_like(setup.q, math.nan)
        calls = split_batch(setup.batch)
        setup.run(calls, out)  # compiles kernels
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        setup.run(split_batch(setup.batch), out.fill_(math.nan))
        torch.cuda.set_sync_debug_mode("default")
        expected = setup.expected()
        in_place = setup.run_in_place(calls, torch.full_like(out, math.nan))
        errors = [float((x.double() - expected).abs().max() / expected.abs().max()) for x in (out, in_place)]
        error = math.nan if any(map(math.isnan, errors)) else max(errors)
        worst, bad = max(worst, error), not error < ERROR_LIMIT
        failed += bad
        if bad or i % 6 == 0:
            say(f"{'FAIL' if bad else 'ok  '} error {error:.1e} in {len(calls)} calls: {case}")
    say(f"numbers: {failed} failed of 24, largest error {worst:.1e} (limit {ERROR_LIMIT})")
    return not failed


def check_graph() -> bool:
    """Capture decode with the full tables, then replay with different lengths and pages, also with empty sequences."""
    setup = Setup(Case([900, 33, 16, 1], [1] * 4))
    used, table, out = setup.used.clone(), setup.table.clone(), torch.full_like(setup.q, math.nan)
    calls = (dense_call(used, table),)
    setup.run(calls, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        setup.run(calls, out)
    is_right = True
    for order, lengths in (([3, 2, 1, 0], [1, 16, 33, 900]), ([0, 0, 1, 1], [900, 5, 33, 0]), ([0] * 4, [0] * 4)):
        used.copy_(torch.tensor(lengths))
        table.copy_(setup.table[order])
        graph.replay()
        eager = setup.run((dense_call(used, table),), torch.full_like(out, math.nan))
        is_right &= bool(torch.equal(out, eager)) and bool((out[used == 0] == 0).all())
        out.fill_(math.nan)
    say(f"graph of decode: {'ok' if is_right else 'FAIL'}")
    return is_right


def medians(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median time of each function in microseconds, from interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_idx in range(ROUNDS + 3):
        for name, function in functions.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)  # the host runs ahead, so that only device time counts
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize()
            if round_idx >= 3:
                times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: statistics.median(x) for name, x in times.items()}


def padded_sdpa(setup: Setup) -> Callable[[], object]:
    """Return stock F.sdpa of the decode rows on padded caches with a mask, which a server without pages would call."""
    lengths, (Hq, Hkv), D = setup.case.lengths, setup.case.heads, setup.case.dim
    caches = [torch.zeros(len(lengths), Hkv, max(lengths), D, device=DEVICE, dtype=DTYPE) for _ in range(2)]
    mask = (torch.arange(max(lengths), device=DEVICE) < setup.used.unsqueeze(1))[:, None, None]
    q = setup.q.view(len(lengths), 1, Hq, D).transpose(1, 2)

    def call() -> Tensor:
        with torch_flashplug.sdpa_backend("stock"):
            return F.scaled_dot_product_attention(q, *caches, attn_mask=mask, enable_gqa=True)

    return call


def report_times() -> None:
    uneven = torch.linspace(300, 9000, 17).int().tolist()
    decodes = torch.linspace(300, 9000, 31).int().tolist()
    cases = {
        "decode 64 x 2000": Case([2000] * 64, [1] * 64),
        "decode 17 x 300..9000": Case(uneven, [1] * 17),
        "mixed: 31 decodes, prefill 2048": Case([*decodes, 2048], [*[1] * 31, 2048]),
        "mixed, pages of 64": Case([*decodes, 2048], [*[1] * 31, 2048], page_rows=64),
        "chunk 512 after 8192, 7 decodes": Case([*[4000] * 7, 8704], [*[1] * 7, 512]),
        "prefill 8 x 1024": Case([1024] * 8, [1024] * 8),
    }
    columns = ("adapter us", "in place", "one call", "padded sdpa", "one call / adapter")
    say(f"\n{'case':34s} " + " ".join(f"{name:>{len(name)}s}" for name in columns))
    for name, case in cases.items():
        setup = Setup(case)
        calls, out = split_batch(setup.batch), torch.empty_like(setup.q)
        functions = {
            "adapter": lambda: setup.run(calls, out),  # noqa: B023
            "in place": lambda: setup.run_in_place(calls, out),  # noqa: B023
            "one": lambda: setup.one_packed_call(out),  # noqa: B023
        }
        if set(case.counts) == {1}:
            functions["sdpa"] = padded_sdpa(setup)
        us = medians(functions)
        numbers = (us["adapter"], us["in place"], us["one"], us.get("sdpa", math.nan), us["one"] / us["adapter"])
        cells = (
            f"{x:{len(column)}.{1 + (column == columns[-1])}f}" for x, column in zip(numbers, columns, strict=True)
        )
        say(f"{name:34s} " + " ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("numbers", "times"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tools/tune/trials/serve.py: a CUDA device is needed.")
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with torch.no_grad():
        is_right = args.only == "times" or (check_numbers() & check_graph())
        if args.only != "numbers":
            report_times()
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
