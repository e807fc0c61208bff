"""Draft trees with a paged KV cache: numbers against fp64, then times beside causal decode of the same rows.

Run on a GPU, in the repository: `python tools/tune/trials/draft_trees.py` (about 40 s). The script ends with an error
after a wrong number. Predictions: a tree takes 3 times as long as causal decode, because the pages are gathered and the
mask is read; a kernel of one pass should take at most 1.1 times as long.
"""

from __future__ import annotations

import math
import statistics
import time

import torch
from torch import Tensor

from torch_flashplug import attention, explain_attention
from torch_flashplug.dispatch import bindings

PAGE, HQ, HKV = 16, 32, 8


def make_trees(B: int, rows: int, draw: torch.Generator) -> Tensor:
    trees = torch.zeros(B, rows, rows, dtype=torch.bool)
    for tree in trees:
        for i in range(rows):
            parent = int(torch.randint(-1, i, (1,), generator=draw)) if i else -1
            tree[i] = tree[parent] if parent >= 0 else False
            tree[i, i] = True
    return trees.cuda()


def make_call(B: int, rows: int, keys: tuple[int, int], D: int, seed: int) -> tuple[dict[str, Tensor], list]:
    """Return the operands of a call with NaN in all unused memory, and the keys and values of each sequence."""
    draw, host = torch.Generator("cuda").manual_seed(seed), torch.Generator().manual_seed(seed)
    used = torch.randint(*keys, (B,), generator=host).tolist()
    counts = [-(-n // PAGE) for n in used]
    order, at, sequences = torch.randperm(sum(counts) + 3, device="cuda", generator=draw), 0, []
    pools = [torch.full((len(order), PAGE, HKV, D), math.nan, device="cuda").bfloat16() for _ in range(2)]
    table = torch.full((B, max(counts) + 1), 2**31 - 1, dtype=torch.int32, device="cuda")
    for i, (n, count) in enumerate(zip(used, counts, strict=True)):
        pages_of_sequence, at = order[at : at + count], at + count
        table[i, :count] = pages_of_sequence.int()
        padded = torch.full((2, count * PAGE, HKV, D), math.nan, device="cuda").bfloat16()
        padded[:, :n] = torch.randn(2, n, HKV, D, device="cuda", generator=draw)
        for pool, x in zip(pools, padded, strict=True):
            pool[pages_of_sequence] = x.view(count, PAGE, HKV, D)
        sequences.append(padded[:, :n])
    q = torch.randn(B, rows, HQ, D, device="cuda", generator=draw).bfloat16()
    lengths = torch.tensor(used, dtype=torch.int32, device="cuda")
    call = {"q": q, "k": pools[0], "v": pools[1], "block_table": table, "seqused_k": lengths}
    return call, sequences


def check(B: int, rows: int, keys: tuple[int, int], D: int, left: int, seed: int) -> None:
    call, sequences = make_call(B, rows, keys, D, seed)
    trees = make_trees(B, rows, torch.Generator().manual_seed(seed))
    out = torch.full_like(call["q"], math.nan)
    window = None if left < 0 else (left, None)
    bindings.counters(reset=True)
    with torch.no_grad():
        _, lse = attention(**call, tree_mask=trees, window=window, out=out, return_lse=True)
    served = bindings.counters(reset=True)
    worst = [0.0, 0.0]
    for b, pair in enumerate(sequences):
        q = call["q"][b].double().transpose(0, 1)
        k, v = (x.double().transpose(0, 1).repeat_interleave(HQ // HKV, 0) for x in pair)
        n, key, row = k.shape[1], torch.arange(k.shape[1], device="cuda"), torch.arange(rows, device="cuda")[:, None]
        column = key - (n - rows)
        visible = trees[b].gather(1, column.clamp(0, rows - 1).expand(rows, n)) | (column < 0)
        visible = visible & ((key >= n - rows + row - left) | (left < 0))
        scores = (q @ k.transpose(1, 2) / math.sqrt(D)).masked_fill(~visible, -math.inf)
        sums = scores.logsumexp(-1)
        exact = torch.exp(scores - sums.unsqueeze(-1)).nan_to_num(0.0) @ v
        worst[0] = max(worst[0], float((out[b].double().transpose(0, 1) - exact).abs().max()))
        at = sums.isfinite()
        worst[1] = max(worst[1], float((lse[b].double() - sums)[at].abs().max()))
    paths = {name: count for name, count in served.items() if count}
    print(f"numbers B {B} rows {rows} D {D} left {left}: out {worst[0]:.2e}, lse {worst[1]:.1e}, {paths}", flush=True)
    assert worst[0] < 1.5e-2 and worst[1] < 1e-3


def time_calls() -> None:
    for B, rows, keys in ((1, 8, 8192), (16, 8, 4096), (64, 8, 2000), (16, 32, 4096)):
        call, _ = make_call(B, rows, (keys, keys + 1), 128, 1)
        trees = make_trees(B, rows, torch.Generator().manual_seed(1))
        variants = {"causal": {"causal": True}, "tree": {"tree_mask": trees}}
        graphs = {}
        with torch.no_grad():
            for name, settings in variants.items():
                attention(**call, **settings)
                graphs[name] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[name]):
                    for _ in range(10):
                        attention(**call, **settings)
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(15):
            for name, graph in graphs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record(), graph.replay(), end.record()
                end.synchronize()
                times[name].append(100 * start.elapsed_time(end))
        us = {name: statistics.median(x) for name, x in times.items()}
        plan = explain_attention(**call, tree_mask=trees)
        print(
            f"times B {B} rows {rows} keys {keys}: causal {us['causal']:.1f} us, tree {us['tree']:.1f} us "
            f"({us['tree'] / us['causal']:.2f} times), tree by {plan.backend} {plan.kernel}",
            flush=True,
        )


def main() -> None:
    seed = int(time.time()) % 100000
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, seed {seed}", flush=True)
    for D in (64, 128, 256):
        for rows in (1, 5, 8, 33):
            for left in (-1, 70):
                check(4, rows, (rows, 700), D, left, seed + rows)
    time_calls()


if __name__ == "__main__":
    main()
