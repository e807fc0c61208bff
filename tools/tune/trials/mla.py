"""Decode with shared values (absorbed MLA): numbers, then times of both tiles, of separate values, and of FlashMLA.

    python tools/tune/trials/mla.py [--seconds 90] [--quick]

The script needs a Hopper GPU. Kernels outside of the packs are compiled at first use: about 10 kernels of 5 to 15 s.
`--quick` checks the numbers only. FlashMLA takes part if `import flash_mla` works (wheel sgl-flash-mla, kernels of
"legacy"). Each line is printed as soon as its numbers exist.

Predictions (H100): n32 2.4 to 2.8 TB/s at 16 and 64 heads from 300 MB on; 380 to 480 TFLOP/s at 128 heads with two
queries; n64 0.85 to 1.05 x the speed of n32. FlashMLA (H800, published): 3.0 TB/s, 660 TFLOP/s.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torch_flashplug import attention, sdpa_backend
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import kernel_table
from torch_flashplug.testing import Candidate, captured, time_interleaved

SCALE, DV, PAGE = 192**-0.5, 512, 64
TILES = {"n32": (32, 4), "n64": (64, 2)}  # tile_n and stages of the kernels with shared values
NEAR = {torch.bfloat16: 8e-3, torch.float16: 2e-3}  # largest relative error of an output
CALLS = 5  # calls of a graph


@contextlib.contextmanager
def tile(name: str) -> Iterator[None]:
    """Give the kernels with shared values a tile."""
    tile_n, stages = TILES[name]
    rows = [
        dataclasses.replace(row, tile_n=tile_n, stages=stages) if row.features == kernel_table.SHARED_VALUES else row
        for row in kernel_table.KERNEL_ROWS
    ]
    startup.push_tables(rows)
    try:
        with sdpa_backend("fa3"), torch.no_grad():
            yield
    finally:
        startup.push_tables()


def poison() -> None:
    """Fill free blocks of the allocator with NaN, so that outputs and workspaces begin with NaN."""
    blocks = [
        torch.full((size,), math.nan, device="cuda") for size in (1 << 25, 1 << 22, 1 << 18, 1 << 14) for _ in "abc"
    ]
    del blocks


def exact(q: Tensor, k: Tensor, lengths: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return output (B, Sq, Hq, Dv) and LSE (B, Hq, Sq) in fp64, for q (B, Sq, Hq, D) and k (B, Sk, 1, D)."""
    scores = torch.einsum("bqhd,bkd->bhqk", q.double(), k[:, :, 0].double()) * SCALE
    key, query = torch.arange(k.shape[1], device="cuda"), torch.arange(q.shape[1], device="cuda").view(-1, 1)
    visible = key < lengths.view(-1, 1, 1, 1)
    if causal:
        visible = visible & (key <= query + (lengths.view(-1, 1, 1, 1) - q.shape[1]))
    scores = scores.masked_fill(~visible, -math.inf)
    values = torch.nan_to_num(k[:, :, 0, :DV].double())
    return torch.einsum("bhqk,bkd->bqhd", scores.softmax(-1).nan_to_num(), values), scores.logsumexp(-1)


def operands(B: int, heads: int, Sq: int, Sk: int, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q = torch.randn(B, Sq, heads, D, device="cuda", dtype=dtype)
    return q, torch.randn(B, Sk, 1, D, device="cuda", dtype=dtype)


def paged(k: Tensor) -> tuple[Tensor, Tensor]:
    """Return a pool of pages with the keys, in random order, and the block table."""
    B, n = k.shape[0], -(-k.shape[1] // PAGE)
    table = torch.randperm(B * n, device="cuda").int()
    full = torch.full((B, n * PAGE, 1, k.shape[3]), math.nan, device="cuda", dtype=k.dtype)
    full[:, : k.shape[1]] = k
    pool = torch.empty(B * n, PAGE, 1, k.shape[3], device="cuda", dtype=k.dtype)
    pool[table.long()] = full.view(B * n, PAGE, 1, -1)
    return pool, table.view(B, n)


def report(label: str, results: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], launched: int) -> None:
    (out, lse), (expected, expected_lse) = results, right
    error = float((out.double() - expected).norm() / expected.norm().clamp(min=1e-30))
    has_keys = expected_lse.isfinite()
    lse_error = float((lse.double() - expected_lse)[has_keys].abs().max()) / max(
        1.0, float(expected_lse[has_keys].abs().max())
    )
    ok = out.isfinite().all() and error < NEAR[out.dtype] and lse_error < 1e-5 and launched == 1
    print(f"{'ok   ' if ok else 'WRONG'} {label}: error {error:.2e}, LSE {lse_error:.2e}", flush=True)
    assert ok, label


def check_numbers() -> None:
    torch.manual_seed(int(time.time()))
    for name in TILES:
        for D in (576, 512):
            for dtype in (torch.bfloat16, torch.float16):
                for B, heads, Sq, Sk in (
                    (2, 16, 1, 1),
                    (3, 16, 4, 65),
                    (2, 128, 2, 1000),
                    (1, 64, 1, 8191),
                    (40, 16, 1, 97),
                ):
                    q, k = operands(B, heads, Sq, Sk, D, dtype)
                    if Sk == 1000:  # maxima that rise, and large scores
                        k *= torch.linspace(0.1, 8.0, Sk, device="cuda").view(1, -1, 1, 1).to(dtype)
                    lengths = torch.full((B,), Sk, device="cuda", dtype=torch.int32)
                    label = f"{name} D {D} {dtype} B {B}, {heads} heads x {Sq}, {Sk} keys"
                    with tile(name):
                        for causal in (False, True):
                            poison()
                            bindings.counters(reset=True)
                            results = attention(q, k, v_dim=DV, causal=causal, scale=SCALE, return_lse=True)
                            launched = bindings.counters(reset=True)["ours_fwd"]
                            report(f"{label}, causal {causal}", results, exact(q, k, lengths, causal), launched)
                        lengths = torch.randint(0, Sk + 1, (B,), device="cuda").int()
                        pool, table = paged(
                            torch.where(
                                (torch.arange(Sk, device="cuda") < lengths.view(-1, 1)).view(B, Sk, 1, 1), k, math.nan
                            )
                        )
                        poison()
                        bindings.counters(reset=True)
                        results = attention(
                            q,
                            pool,
                            v_dim=DV,
                            causal=True,
                            scale=SCALE,
                            block_table=table,
                            seqused_k=lengths,
                            return_lse=True,
                        )
                        launched = bindings.counters(reset=True)["ours_fwd"]
                        report(f"{label}, pages", results, exact(q, k, lengths, True), launched)
    q, k = operands(4, 64, 1, 4096, 512, torch.bfloat16)
    with sdpa_backend("fa3"), torch.no_grad():
        shared, apart = (attention(q, k, v, scale=SCALE).float() for v in (k[..., :DV], k[..., :DV].clone()))
    print(f"shared against a copy of V: {float((shared - apart).norm() / apart.norm()):.2e}", flush=True)


def flash_mla(q: Tensor, pool: Tensor, table: Tensor, lengths: Tensor, causal: bool) -> Callable[[], Tensor]:
    import flash_mla as peer

    schedule, _ = peer.get_mla_metadata()
    peer_call = lambda: peer.flash_mla_with_kvcache(  # noqa: E731
        q, pool, table, lengths, DV, schedule, None, SCALE, causal, use_legacy=True
    )[0]
    peer_call()
    return peer_call


def graph_of(call: Callable[[], Tensor]) -> Candidate:
    return Candidate(captured(call, CALLS))


def time_cell(B: int, heads: int, Sq: int, Sk: int, D: int = 576) -> None:
    q, k = operands(B, heads, Sq, Sk, D, torch.bfloat16)
    lengths, causal = torch.full((B,), Sk, device="cuda", dtype=torch.int32), Sq > 1
    right = exact(q[:1], k[:1], lengths[:1], causal)[0]
    pool, table = paged(k)
    calls = {f"{name} dense": (name, lambda: attention(q, k, v_dim=DV, causal=causal, scale=SCALE)) for name in TILES}
    calls["n32 pages"] = (
        "n32", lambda: attention(q, pool, v_dim=DV, causal=causal, scale=SCALE, block_table=table, seqused_k=lengths)
    )  # fmt: skip
    if D == DV and heads * Sq <= 64:
        values = k.clone()
        calls["separate V"] = ("n32", lambda: attention(q, k, values, causal=causal, scale=SCALE))
    candidates, notes = {}, []
    for name, (tile_name, call) in calls.items():
        with tile(tile_name):
            error = float((call()[:1].double() - right).norm() / right.norm())
            assert error < NEAR[torch.bfloat16], (name, error)
            candidates[name] = graph_of(call)
    if D == 576:
        try:
            call = flash_mla(q, pool, table, lengths, causal)
            error = float((call()[:1].double() - right).norm() / right.norm())
            notes += [] if error < 2 * NEAR[torch.bfloat16] else [f"FlashMLA is wrong by {error:.1e}"]
            candidates["FlashMLA"] = graph_of(call)
        except Exception as reason:  # the peer is optional
            notes.append(f"no FlashMLA: {type(reason).__name__} {str(reason)[:80]}")
    timings = time_interleaved(candidates, rounds=7, round_ms=8.0)
    num_bytes, flop = B * Sk * D * 2, 2 * B * heads * Sq * Sk * (D + DV)
    print(f"B {B}, {heads} heads x {Sq}, {Sk} keys, D {D} {' '.join(notes)}", flush=True)
    base = timings["n32 dense"].rounds
    for name, timing in timings.items():
        ms = timing.ms / CALLS
        ratio = statistics.median(a / b for a, b in zip(timing.rounds, base, strict=True))
        rate, speed = num_bytes / ms / 1e6, flop / ms / 1e9
        print(
            f"  {name:12} {ms * 1e3:9.1f} us {rate:7.0f} GB/s {speed:6.0f} TFLOP/s, time / n32 dense {ratio:.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="no cell is started later")
    parser.add_argument("--quick", action="store_true", help="check numbers only")
    options, start = parser.parse_args(), time.time()
    check_numbers()
    print(f"numbers are right, {time.time() - start:.0f} s", flush=True)
    cells = [
        (B, heads, Sq, Sk)
        for Sk in (4096, 16384)
        for B in (128, 64)
        for heads, Sq in ((16, 1), (64, 1), (128, 1), (128, 2))
    ]
    cells += [(1, 128, 1, 4096), (1, 16, 1, 8192), (8, 128, 1, 4096)]
    cells = [(*cell, 576) for cell in cells] + [(128, 64, 1, 4096, 512), (64, 16, 1, 16384, 512)]
    for cell in [] if options.quick else cells:
        if time.time() - start > options.seconds:
            print(f"out of time before {cell}", flush=True)
            continue
        time_cell(*cell)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
