"""Trial of one GPU run: gradients of head dims 192 and (192, 128), fused and split, beside FlashAttention-4.

    python tools/tune/trials/d192.py [--seconds 110]

The fused backward of these head dims was never run on a GPU. First the numbers: small calls against fp64, with NaN in
all memory that the calls allocate, and repeated calls with equal bits of dK and dV. Then times: the variants take turns
in one process, and a line is printed for each call. Ratios are medians of the ratios of a round.

- `split`: the choice of auto today.
- `split_shared`: today's kernels with two or more tiles for a block of keys, by the limits of COST_MODEL.
- `fused`: kernels named bwd_sm90_bf16_d192..., reached without UNTIMED_ROWS of dispatch_table.py.
- `fa4`, `stock`: peers, if installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[3]))

import torch_flashplug as fp  # noqa: E402
from torch_flashplug.api import startup  # noqa: E402
from torch_flashplug.demo.scopes import plugin_off  # noqa: E402
from torch_flashplug.dispatch import bindings  # noqa: E402
from torch_flashplug.registry import dispatch_table, kernel_table, stock_bugs  # noqa: E402

# (B, Hq, Hkv), (Sq, Sk), (D, Dv), causal
CHECKED = (
    ((1, 2, 2), (700, 700), (192, 192), True),
    ((2, 6, 2), (333, 500), (192, 192), True),
    ((1, 12, 1), (1000, 1000), (192, 128), True),
    ((3, 40, 40), (200, 300), (192, 128), False),
    ((2, 64, 64), (130, 333), (192, 192), False),
    ((1, 96, 8), (515, 515), (192, 192), True),
    ((1, 3, 1), (257, 97), (136, 136), True),
)
TIMED = (
    ("Nemotron-4-340B", (1, 96, 8), (2047, 2047), (192, 192), True),
    ("DeepSeek-V2-Lite", (2, 16, 16), (3001, 3001), (192, 128), True),
    ("DeepSeek-V3", (1, 128, 128), (4096, 4096), (192, 128), True),
    ("MHA 16 x 1k", (16, 16, 16), (1024, 1024), (192, 192), True),
    ("MHA 4 x 4k", (4, 16, 16), (4096, 4096), (192, 192), True),
    ("MHA 4 x 4k full", (4, 16, 16), (4096, 4096), (192, 192), False),
    ("MLA 4 x 4k full", (4, 16, 16), (4096, 4096), (192, 128), False),
    ("MLA 1 x 16k", (1, 16, 16), (16384, 16384), (192, 128), True),
    ("Nemotron-4-340B, 4k", (1, 96, 8), (4096, 4096), (192, 192), True),
)
KINDS = {"split": "partbwd", "split_shared": "partbwd", "fused": "bwd"}  # kernels of the variants
Scope = Callable[[], contextlib.AbstractContextManager]


def say(*words: object) -> None:
    print(*words, flush=True)


@contextlib.contextmanager
def variant(name: str) -> Iterator[None]:
    """Serve calls by forced kernels for Hopper, with the tables of a variant."""
    choices, cost_model = dispatch_table.CHOICE_ROWS, dispatch_table.COST_MODEL
    if name == "fused":
        choices = tuple(row for row in choices if row not in dispatch_table.UNTIMED_ROWS)
    if name == "split_shared":
        cost_model = replace(cost_model, min_rows_saved=0, rows_per_sum=0)
    bindings.push_rows(kernel_table.KERNEL_ROWS, choices, cost_model, stock_bugs.STOCK_BUGS)
    try:
        with fp.sdpa_backend("fa3"):
            yield
    finally:
        startup.push_tables()


def assert_runs(name: str, operands: tuple[torch.Tensor, ...], causal: bool) -> None:
    """Raise an error if another kernel than the kernel of the variant has computed the last gradients."""
    q, k, v = operands
    answer = str(fp.explain(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]))
    counted = bindings.counters(reset=True)["ours_bwd"]
    if counted == 0 or f" {KINDS[name]}_sm90" not in answer:
        raise RuntimeError(f"{counted} gradients of kernels of this project; {answer}")


def draw(heads, lengths, dims, seed: int) -> list[torch.Tensor]:
    """Return q, k, v and dO with the strides of (B, S, H, D)."""
    generator, (B, Hq, Hkv), (Sq, Sk), (D, Dv) = torch.Generator("cuda").manual_seed(seed), heads, lengths, dims
    sizes = ((B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, Dv), (B, Sq, Hq, Dv))
    drawn = [torch.randn(size, generator=generator, device="cuda").bfloat16().transpose(1, 2) for size in sizes]
    return [*(x.requires_grad_() for x in drawn[:3]), drawn[3]]


def exact_gradients(q, k, v, grad_out, causal: bool) -> tuple[torch.Tensor, ...]:
    """Return the gradients of fp64 math."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in leaves[1:])
    scores = leaves[0] @ keys.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    return torch.autograd.grad(scores.softmax(-1) @ values, leaves, grad_out.double())


def poison() -> None:
    """Fill memory that the next calls allocate with NaN."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = [torch.full((1 << size,), torch.nan, device="cuda") for size in (18, 20, 22, 24, 26, 28)]
    torch.cuda.synchronize()
    del held


def check(name: str) -> bool:
    """Compare a variant with fp64, and repeat each call."""
    right = True
    for number, (heads, lengths, dims, causal) in enumerate(CHECKED):
        q, k, v, grad_out = draw(heads, lengths, dims, int(time.time()) + number)
        with variant(name):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads[1] != heads[2])
            runs = []
            for _ in range(20):
                poison()
                runs.append(torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True))
            torch.cuda.synchronize()
            assert_runs(name, (q, k, v), causal)
        exact = exact_gradients(q, k, v, grad_out, causal)
        errors = [float((x.double() - e).norm() / e.norm()) for x, e in zip(runs[0], exact, strict=True)]
        spread = max(float((run[0].double() - runs[0][0].double()).norm() / exact[0].norm()) for run in runs)
        same = all(torch.equal(run[i], runs[0][i]) for run in runs for i in (1, 2))
        good = max(errors) < 8e-3 and spread < 4e-3 and same  # bf16 rounds by 2e-3 on average
        right &= good
        texts = " ".join(f"{x:.1e}" for x in errors)
        say(f"{'ok' if good else 'WRONG'} {name} {heads} {lengths} {dims} causal={causal}: dq dk dv {texts}, "
            f"spread of dq {spread:.1e}, dk and dv repeat: {same}")  # fmt: skip
    return right


def fa4_function() -> Callable | None:
    try:
        return importlib.import_module("flash_attn.cute.interface").flash_attn_func
    except Exception as error:  # absent, or broken on this machine
        say(f"# no fa4: {type(error).__name__}: {str(error)[:100]}")
        return None


def time_call(label, heads, lengths, dims, causal, variants, fa4, rounds: int) -> None:
    """Time forward and backward apart, and print milliseconds and ratios."""
    q, k, v, grad_out = draw(heads, lengths, dims, 5)
    gqa = heads[1] != heads[2]
    by_seq = [x.transpose(1, 2) for x in (q, k, v)]

    def ours():
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)

    def peer():
        result = fa4(*by_seq, causal=causal)
        return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)

    runs: dict[str, tuple[Scope, Callable, Callable]] = {}
    for name in (*variants, "stock", *(["fa4"] if fa4 else [])):
        scope = {"stock": plugin_off, "fa4": contextlib.nullcontext}.get(name, lambda name=name: variant(name))
        forward = peer if name == "fa4" else ours
        try:
            with scope():
                out = forward()
                backward = lambda out=out: torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)  # noqa: E731
                bindings.counters(reset=True)
                backward()
                torch.cuda.synchronize()
                if name in KINDS:
                    assert_runs(name, (q, k, v), causal)
        except Exception as error:
            say(f"# {label}: no {name}: {type(error).__name__}: {str(error)[:120]}")
            continue
        runs[name] = scope, forward, backward
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (scope, forward, backward) in runs.items():
            with scope():
                times[name].append((event_ms(forward), event_ms(backward)))
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    flop = 2 * heads[0] * heads[1] * lengths[0] * lengths[1] * (3 * dims[0] + 2 * dims[1]) * (0.5 if causal else 1)
    parts = [
        f"{name} {forward:.3f} + {backward:.3f} ms ({flop / backward * 1e-9:.0f})"
        for name, (forward, backward) in medians.items()
    ]
    say(f"{label} {heads} {lengths[0]} {dims} causal={causal}: {', '.join(parts)}")
    for base in ("split", "fa4", "stock"):
        if base in medians:
            pairs = {name: zip(times[name], times[base], strict=True) for name in variants if name in medians}
            ratios = [
                f"{name} {statistics.median(sum(b) / sum(a) for a, b in rounds_of_both):.3f}"
                for name, rounds_of_both in pairs.items()
                if name != base
            ]
            say(f"    forward and backward, {base}'s time / time of: {', '.join(ratios)}")


def event_ms(call: Callable, calls: int = 4) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=110.0, help="no further call is timed after so many seconds")
    args = parser.parse_args()
    begin = time.monotonic()
    variants = ["split", "split_shared"]
    if check("fused"):
        variants.append("fused")
    say(f"# numbers checked after {time.monotonic() - begin:.0f} s")
    fa4 = fa4_function()
    for label, *sizes in TIMED:
        if time.monotonic() - begin > args.seconds:
            say("# time is up")
            break
        time_call(label, *sizes, variants, fa4, rounds=5)


if __name__ == "__main__":
    main()
