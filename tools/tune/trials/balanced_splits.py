"""GPU trial of balanced splits: decode from paged KV caches with uneven KV lengths.

    python tools/tune/trials/balanced_splits.py                 numbers, then times; about 90 seconds
    python tools/tune/trials/balanced_splits.py --only numbers  only numbers
    python tools/tune/trials/balanced_splits.py --only times    only times

The commands run in the root of the repository. Missing kernels are compiled first.

Numbers are compared with fp64 on fresh random sequences. Free memory, unused pages and outputs are NaN beforehand.
Times are medians of interleaved rounds of CUDA graphs, in microseconds of a call. Every case is larger than L2.

Predictions for an H100 (not measured, docs/experiments/decode.md): 17 lengths from 300 to 9000 take 121 us, and 156
with equal splits; 60000 with 31 x 500 takes 118 us, and more than 500 with equal splits; zipf takes 231 us, and more
than 500 with equal splits. Even batches (64 x 2000 and the shared prefix) run at 0.985 to 1.0 x the speed of equal
splits. Auto needs 0.99 x for even batches, and 1.0 x for uneven batches. The number of items for each CTA (2, 3, 4, 6)
changes the times by 3 % at most.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path.cwd()))  # the root of the repository

from torch_flashplug import attention
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table, kernel_table

DEVICE, DTYPE, PAGE = "cuda", torch.bfloat16, 16
HEADS, DIM = (32, 8), 128
ERROR_LIMIT, LSE_LIMIT = 5e-3, 1e-3  # relative, root mean square; absolute
ROUNDS, CALLS = 15, 4  # rounds of each candidate; calls in a graph
ITEMS = (3.0, 2.0, 4.0, 6.0)  # values of items_per_slot
LENGTHS = {  # KV lengths, and the number of leading keys that all sequences share
    "uneven_17": ([300 + 8700 * i // 16 for i in range(17)], 0),
    "uneven_17_shuffled": (random.Random(1).sample([300 + 8700 * i // 16 for i in range(17)], 17), 0),
    "uneven_one_long": ([60000] + [500] * 31, 0),
    "uneven_zipf_64": (random.Random(2).sample([max(64, 32000 // (i + 1)) for i in range(64)], 64), 0),
    "uneven_prefix_24": ([4096 + 64 * i for i in range(24)], 4096),
    "even_64": ([2000] * 64, 0),
    "even_8": ([8192] * 8, 0),
}


def switch(items: float = 0.0) -> None:
    """Switch balanced splits on with a number of items for each CTA, or off with 0."""
    limits = {"max_balanced_sequences": 512, "items_per_slot": items} if items else {}
    cost_model = replace(dispatch_table.COST_MODEL, **limits)
    bindings.push_rows(kernel_table.KERNEL_ROWS, dispatch_table.CHOICE_ROWS, cost_model)


def poison() -> None:
    """Fill the free memory of torch with NaN, so that new outputs and workspaces begin as NaN."""
    for numbers in (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24):
        for tensor in [torch.empty(numbers, device=DEVICE) for _ in range(4)]:
            tensor.fill_(math.nan)


@dataclass
class Batch:
    """Operands of a call with a paged KV cache."""

    q: Tensor  # (B, Sq, Hq, D)
    pools: tuple[Tensor, Tensor]  # (pages, rows, Hkv, D)
    table: Tensor  # (B, n)
    lengths: Tensor  # (B,)

    @classmethod
    def create(cls, lengths: list[int], shared: int = 0, *, Sq: int = 1, dim: int = DIM, seed: int = 0) -> Batch:
        """Return a random batch. Pages are in random order, unused pages are NaN, and unused entries are invalid."""
        draw = torch.Generator(DEVICE).manual_seed(seed)
        (Hq, Hkv), width = HEADS, -(-max(*lengths, 1) // PAGE) + 1
        table, num_shared, next_page = (
            torch.full((len(lengths), width), 2**31 - 1, dtype=torch.int32),
            shared // PAGE,
            0,
        )
        used_pages = [-(-length // PAGE) for length in lengths]
        order = torch.randperm(sum(used_pages) + 5, generator=torch.Generator().manual_seed(seed)).int()
        for i, count in enumerate(used_pages):
            first = num_shared if i else 0
            table[i, :first] = table[0, :first]
            table[i, first:count] = order[next_page : next_page + count - first]
            next_page += count - first
        shape = (len(order), PAGE, Hkv, dim)
        pools = tuple(torch.randn(shape, generator=draw, device=DEVICE, dtype=DTYPE) for _ in range(2))
        for pool in pools:
            pool[order[next_page:].long().to(DEVICE)] = math.nan
        q = torch.randn(len(lengths), Sq, Hq, dim, generator=draw, device=DEVICE, dtype=DTYPE)
        return cls(q, pools, table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE))

    def attend(self, **settings: object) -> Tensor | tuple[Tensor, Tensor]:
        return attention(
            self.q, *self.pools, causal=True, block_table=self.table, seqused_k=self.lengths, **settings
        )  # fmt: skip

    def reference(self) -> tuple[Tensor, Tensor]:
        """Return output (B, Sq, Hq, D) and LSE (B, Hq, Sq) in fp64."""
        outs, lses, group = [], [], HEADS[0] // HEADS[1]
        for q, numbers, length in zip(self.q, self.table, self.lengths.tolist(), strict=True):
            pages = numbers[: -(-length // PAGE)].long()
            k, v = (pool[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for pool in self.pools)
            scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
            row, key = torch.arange(len(q), device=DEVICE)[:, None], torch.arange(length, device=DEVICE)
            scores.masked_fill_(key > row + length - len(q), -math.inf)
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), v))
            lses.append(scores.logsumexp(-1))
        return torch.stack(outs), torch.stack(lses)


def launches(call: Callable[[], object]) -> int:
    """Return the number of launches with balanced splits."""
    bindings.counters(reset=True)
    call()
    return bindings.counters(reset=True)["balanced"]


def check(name: str, batch: Batch) -> bool:
    """Compare a call with fp64, and ten runs with each other. Print a line."""
    poison()
    num_balanced = launches(batch.attend)
    poison()
    out, lse = batch.attend(return_lse=True)
    expected, expected_lse = batch.reference()
    error = float((out.double() - expected).norm() / expected.norm().clamp(min=1e-9))
    finite = expected_lse.isfinite()
    lse_error = float((lse.double() - expected_lse)[finite].abs().max()) if finite.any() else 0.0
    infinite = bool((lse[~finite] == -math.inf).all())
    repeats = all(torch.equal(out, batch.attend()) for _ in range(10))
    right = error < ERROR_LIMIT and lse_error < LSE_LIMIT and infinite and repeats and num_balanced == 1
    print(f"{'PASS' if right else 'FAIL'} {name}: error {error:.2g}, LSE {lse_error:.2g}, equal bits {repeats}, "
          f"balanced {num_balanced}", flush=True)  # fmt: skip
    return right


def check_graph(seed: int) -> bool:
    """Replay a graph with other lengths in the same buffers. Print a line."""
    batch, draw = Batch.create([9000] * 17, seed=seed), random.Random(seed)
    batch.attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = batch.attend()
    errors = []
    for _ in range(8):
        lengths = [draw.choice((0, 1, 9000, draw.randrange(9000))) for _ in range(17)]
        batch.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(math.nan)
        graph.replay()
        expected, _ = batch.reference()
        errors.append(float((out.double() - expected).norm() / expected.norm().clamp(min=1e-9)))
    right = max(errors) < ERROR_LIMIT and not any(map(math.isnan, errors))
    print(f"{'PASS' if right else 'FAIL'} graph with 8 sets of lengths: error {max(errors):.2g}", flush=True)
    return right


def check_even(seed: int) -> bool:
    """Compare even lengths with equal splits, bit for bit. Print a line."""
    batch, outs = Batch.create([2000] * 20, seed=seed), []
    for items in (ITEMS[0], 0.0):
        switch(items)
        outs.append(batch.attend())
    switch(ITEMS[0])
    right = torch.equal(*outs)
    print(f"{'PASS' if right else 'FAIL'} even lengths have the bits of equal splits", flush=True)
    return right


def check_numbers() -> bool:
    seed = int(time.time())
    print(f"numbers, seed {seed}", flush=True)
    switch(ITEMS[0])
    draw = random.Random(seed)
    results = [check(name, Batch.create(*LENGTHS[name], seed=seed)) for name in ("uneven_17", "uneven_prefix_24")]
    results.append(check("zeros", Batch.create([0, 3000, 0, 1, 15, 16, 17, 0], seed=seed)))
    results.append(check("all zero", Batch.create([0, 0, 0], seed=seed)))
    results.append(check("one long", Batch.create([30000, *[20] * 40], seed=seed)))
    for i in range(3):
        lengths = [int(math.exp(draw.uniform(0, 9))) for _ in range(draw.randrange(2, 200))]
        results.append(check(f"random {i}, {len(lengths)} sequences", Batch.create(lengths, seed=seed + i)))
    results.append(check("3 query rows", Batch.create([5000, 3, 700, 0], Sq=3, seed=seed)))
    results.append(check("8 query rows", Batch.create([5000, 3, 700, 0], Sq=8, seed=seed)))
    results.append(check("D 64", Batch.create([5000, 3, 700, 0], dim=64, seed=seed)))
    return all([*results, check_graph(seed), check_even(seed)])


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of a graph of `CALLS` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph.replay


def fa3_candidates(batch: Batch) -> dict[str, Callable[[], object]]:
    """Return calls of FlashAttention-3, without and with scheduler metadata; empty without the wheel."""
    try:
        import flash_attn_interface as fa3
    except ImportError as reason:
        print(f"  no FA3: {reason}", flush=True)
        return {}
    B, Sq, Hq, D = batch.q.shape
    arguments = {"page_table": batch.table.clamp(max=len(batch.pools[0]) - 1), "cache_seqlens": batch.lengths}
    keys = batch.table.shape[1] * PAGE
    calls = {"fa3": lambda: fa3.flash_attn_with_kvcache(batch.q, *batch.pools, causal=True, **arguments)}
    try:
        metadata = fa3.get_scheduler_metadata(
            B, Sq, keys, Hq, HEADS[1], D, batch.lengths, page_size=PAGE, causal=True
        )  # fmt: skip
    except Exception as reason:  # any error of a peer is noted
        print(f"  no metadata of FA3: {reason}", flush=True)
        return calls
    planned = arguments | {"scheduler_metadata": metadata}
    return calls | {"fa3_planned": lambda: fa3.flash_attn_with_kvcache(batch.q, *batch.pools, causal=True, **planned)}


def time_case(name: str) -> None:
    """Time a case and print a line: medians, and ratios to equal splits."""
    batch, graphs, expected = Batch.create(*LENGTHS[name]), {}, None
    for label, items in {"equal": 0.0, **{f"items_{items:g}": items for items in ITEMS}}.items():
        switch(items)
        out = batch.attend()
        expected = out if expected is None else expected
        error = float((out.double() - expected.double()).norm() / expected.double().norm())
        if not error < 2 * ERROR_LIMIT:
            raise SystemExit(f"{name}: {label} differs from equal splits by {error:.2g}")
        graphs[label] = captured(batch.attend)
    switch()
    for label, call in fa3_candidates(batch).items():
        try:
            result = call()
            out = result[0] if isinstance(result, tuple) else result
            error = float((out.double() - expected.double()).norm() / expected.double().norm())
            if error < 2 * ERROR_LIMIT:
                graphs[label] = captured(call)
            else:
                print(f"  {label} is wrong by {error:.2g}", flush=True)
        except Exception as reason:  # any error of a peer is noted
            print(f"  {label}: {reason}", flush=True)
    times = {label: [] for label in graphs}
    for turn in range(ROUNDS + 2):
        for label, replay in graphs.items():
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            replay()
            events[1].record()
            torch.cuda.synchronize()
            if turn >= 2:
                times[label].append(1e3 * events[0].elapsed_time(events[1]) / CALLS)
    medians = {label: statistics.median(rounds) for label, rounds in times.items()}
    columns = (f"{label} {us:.1f} ({medians['equal'] / us:.3f} x)" for label, us in medians.items())
    megabytes = 4e-6 * HEADS[1] * DIM * int(batch.lengths.sum())
    print(f"{name}, {megabytes:.0f} MB: {', '.join(columns)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("numbers", "times"))
    only = parser.parse_args().only
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    try:
        with torch.no_grad():
            if only != "times" and not check_numbers():
                raise SystemExit("numbers are wrong: nothing is timed")
            if only != "numbers":
                for name in LENGTHS:
                    time_case(name)
    finally:
        startup.push_tables()


if __name__ == "__main__":
    main()
