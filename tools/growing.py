"""Times decoding from caches that grow by one key per token, as the plugin serves it in auto.

    python tools/growing.py    every head dim from 32 to 256 in steps of 8; a table, and exit status 1 beyond LIMIT_MS

A backend that plans every new length takes 36 to 120 ms a token (cuDNN through stock PyTorch), whatever one call with a
planned length takes. tools/programs.py runs this module in a process of its own: what cuDNN has planned stays there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

LIMIT_MS = 0.3  # of a token, in the median
WARMUP, TOKENS, SECONDS = 4, 24, 240


@dataclass(frozen=True)
class Cache:
    """A cache of one sequence, before its first token is added."""

    d: int
    heads: int
    kv_heads: int
    keys: int


CACHES = [
    Cache(d, *heads)
    for d in range(32, 257, 8)
    for heads in ((16, 16, 500), (32, 8, 2000), (32, 1, 1100), (16, 4, 8000))
]


def median_ms(cache: Cache, device: str, tokens: int = TOKENS) -> float:
    """Return the median time of F.sdpa of one token, host and device, in ms."""
    import torch
    import torch.nn.functional as F

    import torch_flashplug

    assert torch_flashplug.native.enabled(), "stock's times say nothing of the plugin"
    room, dtype = cache.keys + WARMUP + tokens, torch.bfloat16
    q = torch.randn(1, cache.heads, 1, cache.d, device=device, dtype=dtype)
    k, v = (torch.randn(1, cache.kv_heads, room, cache.d, device=device, dtype=dtype) for _ in range(2))
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    times = []
    with torch.no_grad():
        for keys in range(cache.keys + 1, room + 1):
            wait()
            start = time.perf_counter()
            F.scaled_dot_product_attention(q, k[:, :, :keys], v[:, :, :keys], enable_gqa=cache.heads != cache.kv_heads)
            wait()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[WARMUP:])


def violations(rows: list[dict]) -> list[str]:
    """Return a line for each cache whose tokens take too long."""
    said = "growing cache D {d}, {heads} heads on {kv_heads}, {keys} keys: {ms:.3g} ms a token, the limit is {limit}"
    return [said.format(**row, limit=LIMIT_MS) for row in rows if row["ms"] > LIMIT_MS]


def in_own_process() -> list[dict]:
    """Return the rows of a run in a new process."""
    done = subprocess.run(
        [sys.executable, __file__, "--json"], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(rows) != len(CACHES):
        found = f"{len(rows)} of {len(CACHES)} caches, exit {done.returncode}"
        raise RuntimeError(f"growing.py: {found}: {done.stderr[-400:]}")
    return rows


def measured(device: str) -> Iterator[dict]:
    for cache in CACHES:
        yield {**asdict(cache), "ms": median_ms(cache, device)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each cache")
    parser.add_argument("--out", type=Path, help="all rows in one file")
    options = parser.parse_args()
    rows = []
    for row in measured("cuda"):
        rows.append(row)
        print(json.dumps(row) if options.json else "{ms:8.3f} ms  D {d}, {heads}/{kv_heads}, {keys} keys".format(**row))
    if options.out:
        options.out.write_text(json.dumps(rows) + "\n")
    wrong = violations(rows)
    for line in () if options.json else wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
