"""Packed sequences of equal lengths: numbers, then times beside the dense call and beside the base commit.

Call in the worktree (or in the merged tree), with the base tree as an argument:

    python gpu_scripts/packed.py [--base BASE_TREE] [--seconds 100]

The base tree (main before this branch) must have its own build/dev/_C.so. Without --base, the comparison with the base
is left out. Kernels outside of the packs are compiled at first use: some 26 kernels of 3 to 10 s. To leave this out of
the GPU's time, run `python gpu_scripts/packed.py --warm` first on a machine with the packs, or build the packs.

Expected: each line of "equal" says >= 0.97 (dense time / packed time). Lines of "mixed" say base / new >= 0.98.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time

import torch

import torch_flashplug
from torch_flashplug import attention, plan_varlen
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table

TOKENS, SEED = 16384, 20261129


def operands(tokens, heads, d, grad, generator):
    shapes = ((tokens, heads[0], d), (tokens, heads[1], d), (tokens, heads[1], d), (tokens, heads[0], d))
    q, k, v, do = (torch.randn(s, device="cuda", generator=generator).bfloat16() for s in shapes)
    return [x.requires_grad_(grad) for x in (q, k, v)], do


def starts_of(lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def zipf(total, number=32):
    shares = [1.0 / rank for rank in range(1, number + 1)]
    lengths = [max(1, int(total * share / sum(shares))) for share in shares]
    lengths[0] += total - sum(lengths)
    order = torch.randperm(number, generator=torch.Generator().manual_seed(SEED)).tolist()
    return [lengths[i] for i in order]


def jittered(total, number):
    mean, draw = total // number, torch.Generator().manual_seed(SEED)
    lengths = [mean + int(x) for x in torch.randint(-mean // 3, mean // 3, (number,), generator=draw)]
    lengths[-1] += total - sum(lengths)
    return lengths


# ---- numbers ----


def limits(rows, ns):
    """Let calls of at least so many rows and estimated ns have a dense kernel ahead."""
    dispatch_table.COST_MODEL = dataclasses.replace(dispatch_table.COST_MODEL, min_equal_rows=rows, min_equal_rows_of_gradients=rows, min_equal_ns=ns)
    startup.push_tables()


def exact(q, k, v, do, lengths, causal):
    """fp64 reference, sequence after sequence."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    group, outs, start = q.shape[1] // k.shape[1], [], 0
    for n in lengths:
        a, b, c = (x[start : start + n].transpose(0, 1) for x in leaves)
        b, c = (x.repeat_interleave(group, 0) for x in (b, c))
        scores = a @ b.mT * a.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool, device="cuda").tril(), -math.inf)
        outs.append((scores.softmax(-1) @ c).transpose(0, 1))
        start += n
    out = torch.cat([*outs, leaves[0].new_zeros(q.shape[0] - start, *q.shape[1:])])
    return [out.detach(), *torch.autograd.grad(out, leaves, do.double())]


def error(a, b):
    return float(((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item())


def poison():
    """Fill the allocator's free blocks with NaN, so that what a kernel does not write shows."""
    blocks = [torch.full((size,), math.nan, device="cuda") for size in (1 << 24, 1 << 22, 1 << 20, 1 << 16, 4096) for _ in "abc"]
    del blocks


def check_numbers():
    worst, launched, table = 0.0, 0, dispatch_table.COST_MODEL
    limits(1, 0.0)
    generator = torch.Generator("cuda").manual_seed(int(time.time()))
    for d, heads in ((64, (8, 8)), (64, (8, 2)), (128, (8, 8)), (128, (8, 2)), (256, (4, 2))):
        for causal in (False, True):
            for lengths in ([512] * 8, [300] * 16, [2048] * 2, jittered(4096, 8), [512] * 7 + [300], [1024] * 3 + [512, 300], [4096, 0], [700] * 5 + [596]):
                tokens = 4096 if sum(lengths) <= 4096 else sum(lengths)
                (q, k, v), do = operands(tokens, heads, d, True, generator)
                cu = starts_of(lengths)
                if sum(lengths) < tokens:
                    do[sum(lengths) :] = 0
                right = exact(q, k, v, do, lengths, causal)
                for plan in (False, True):
                    settings = {"causal": causal, "cu_seqlens_q": cu}
                    if plan:
                        settings["plan"] = plan_varlen(q, k, v, **settings, gradients=True)
                    poison()
                    bindings.counters(reset=True)
                    out, lse = attention(q, k, v, **settings, return_lse=True)
                    grads = torch.autograd.grad(out, (q, k, v), do)
                    ahead = bindings.counters(reset=True)["dense_ahead"]
                    launched += ahead
                    errors = [error(a, b) for a, b in zip((out, *grads), right)]
                    worst = max(worst, *errors)
                    if not all(x < 6e-3 for x in errors):
                        print("WRONG", d, heads, causal, lengths[:6], plan, ahead, errors, flush=True)
    limits(table.min_equal_rows, table.min_equal_ns)
    print(f"numbers: worst relative error {worst:.2e} (bf16: 2e-3 to 4e-3 is right), {launched} dense kernels", flush=True)


def check_graph():
    """A graph captured with one kind of lengths and replayed with others."""
    generator = torch.Generator("cuda").manual_seed(SEED)
    bad, table = 0, dispatch_table.COST_MODEL
    limits(1, 0.0)
    for d in (64, 128):
        (q, k, v), do = operands(8192, (16, 4), d, True, generator)
        equal, other = starts_of([512] * 16), starts_of(jittered(8192, 16))
        shorter = equal.clamp(max=8000)
        for first in (equal, other):
            cu = first.clone()

            def layer():
                out, lse = attention(q, k, v, causal=True, cu_seqlens_q=cu, return_lse=True)
                return out, lse, *torch.autograd.grad(out, (q, k, v), do)

            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                layer()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = layer()
            for starts in (other, equal, shorter, other, equal, equal, shorter):
                cu.copy_(starts)
                with torch.no_grad():
                    for x in captured:
                        x.fill_(math.nan)
                graph.replay()
                expected = layer()
                same = [torch.equal(a, b) if i != 2 else torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2e-2) for i, (a, b) in enumerate(zip(captured, expected))]
                bad += not all(same)
                if not all(same):
                    print("GRAPH WRONG", d, same, flush=True)
    limits(table.min_equal_rows, table.min_equal_ns)
    print(f"graphs: {bad} wrong replays", flush=True)


# ---- times ----


def in_graph(call, repeats):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(), call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph.replay


def interleaved(calls, repeats, rounds=9):
    """Median ms of each call; the rounds take turns."""
    times = {name: [] for name in calls}
    for replay in calls.values():
        replay()
    for _ in range(rounds):
        for name, replay in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            begin.record()
            replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / repeats)
    return {name: statistics.median(x) for name, x in times.items()}


def cells():
    for d in (64, 128):
        for heads in ((32, 32), (32, 8)):
            for s in (512, 2048, 8192):
                for causal in (True, False):
                    for train in (False, True):
                        yield d, heads, s, causal, train


def packed_call(x, do, settings, train):
    def call():
        out = attention(*x, **settings)
        return torch.autograd.grad(out, x, do) if train else out

    return call


def dense_call(x, do, sequences, causal, train):
    batch = [y.detach().unflatten(0, (sequences, -1)).transpose(1, 2).requires_grad_(train) for y in x]
    do = do.unflatten(0, (sequences, -1)).transpose(1, 2)

    def call():
        out = torch.nn.functional.scaled_dot_product_attention(*batch, is_causal=causal, enable_gqa=batch[0].shape[1] != batch[1].shape[1])
        return torch.autograd.grad(out, batch, do) if train else out

    return call


def time_equal(deadline):
    lowest = {}
    generator = torch.Generator("cuda").manual_seed(SEED)
    # the shortest sequences and causal masks first: they have the largest overhead
    for d, heads, s, causal, train in sorted(cells(), key=lambda c: (c[2], not c[3])):
        if time.time() > deadline:
            print("out of time: later cells are left out", flush=True)
            break
        sequences = TOKENS // s
        x, do = operands(TOKENS, heads, d, train, generator)
        settings = {"causal": causal, "cu_seqlens_q": starts_of([s] * sequences)}
        plan = plan_varlen(*x, **settings, gradients=train)
        repeats = 2 if train or s > 4096 else 8
        bindings.counters(reset=True)
        packed_call(x, do, settings, train)()
        ahead = bindings.counters(reset=True)["dense_ahead"]
        calls = {
            "dense": dense_call(x, do, sequences, causal, train),
            "packed": packed_call(x, do, settings, train),
            "plan": packed_call(x, do, settings | {"plan": plan}, train),
        }
        ms = interleaved({name: in_graph(call, repeats) for name, call in calls.items()}, repeats)
        ratio, planned = ms["dense"] / ms["packed"], ms["dense"] / ms["plan"]
        key = "train" if train else "fwd"
        lowest[key] = min(lowest.get(key, 9.0), ratio)
        print(
            f"equal d{d} {heads[0]}/{heads[1]} s{s} {'causal' if causal else 'full'} {key}: dense {ms['dense'] * 1e3:.1f} us, "
            f"packed {ms['packed'] * 1e3:.1f}, ratio {ratio:.3f}, with plan {planned:.3f}, dense_ahead {ahead}",
            flush=True,
        )
    print("lowest ratios:", {k: round(v, 3) for k, v in lowest.items()}, flush=True)


KEEP = []
MIXED = {
    "zipf32": lambda: zipf(TOKENS),  # 16384 rows in 32 sequences: a dense kernel is launched in vain
    "zipf31": lambda: zipf(TOKENS, 31),  # 16384 is no multiple of 31: none is launched
    "jitter32": lambda: jittered(TOKENS, 32),
    "jitter8": lambda: jittered(TOKENS, 8),
}


def mixed_times():
    """Print the times of calls with other lengths as a line of JSON; runs in a process for each tree."""
    generator, result = torch.Generator("cuda").manual_seed(SEED), {}
    graphs = {}
    for d, heads in ((64, (32, 32)), (128, (16, 16)), (128, (32, 8))):
        for name, lengths in MIXED.items():
            for train in (False, True):
                x, do = operands(TOKENS, heads, d, train, generator)
                settings = {"causal": True, "cu_seqlens_q": starts_of(lengths())}
                key = f"{name} d{d} {heads[0]}/{heads[1]} {'train' if train else 'fwd'}"; KEEP.append((x, do, settings))
                graphs[key] = in_graph(packed_call(x, do, settings, train), 2 if train else 6), 2 if train else 6
    for key, (replay, repeats) in graphs.items():
        result[key] = interleaved({"x": replay}, repeats, 7)["x"]
    print("JSON" + json.dumps(result), flush=True)


def compare_with_base(base, rounds=2):
    trees = {"base": base, "new": os.path.dirname(os.path.dirname(torch_flashplug.__file__))}
    times = {name: {} for name in trees}
    for _ in range(rounds):
        for name, tree in trees.items():
            environment = os.environ | {"PYTHONPATH": tree}
            done = subprocess.run(
                [sys.executable, os.path.abspath(__file__), "--mixed"], cwd=tree, env=environment, capture_output=True, text=True
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("JSON")]
            if not lines:
                print(f"{name}: no times\n{done.stderr[-1500:]}", flush=True)
                return
            for key, ms in json.loads(lines[0][4:]).items():
                times[name].setdefault(key, []).append(ms)
    for key in times["base"]:
        old, new = (min(times[name][key]) for name in trees)
        print(f"mixed {key}: base {old * 1e3:.1f} us, new {new * 1e3:.1f}, base/new {old / new:.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", default="")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--warm", action="store_true", help="only run each call once, so that kernels are compiled")
    arguments = parser.parse_args()
    torch_flashplug.enable()
    with torch_flashplug.sdpa_backend("fa3"):
        if arguments.mixed:
            return mixed_times()
        print(torch.cuda.get_device_name(), torch.__version__, flush=True)
        begin = time.time()
        check_numbers()
        check_graph()
        print(f"checks took {time.time() - begin:.0f} s", flush=True)
        if not arguments.warm:
            time_equal(time.time() + arguments.seconds)
    if arguments.base and not arguments.warm:
        compare_with_base(arguments.base)


if __name__ == "__main__":
    main()
