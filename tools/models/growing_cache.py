"""Benchmark of decode with KV caches that grow by one key per token, with the plugin in auto mode or a chosen mode.

    python tools/models/growing_cache.py                    every head dim from 32 to 256 in steps of 8, and D != Dv
    python tools/models/growing_cache.py --backend stock    stock PyTorch on the same caches
    python tools/models/growing_cache.py --unequal          only D != Dv

The program prints a table, and exits with status 1 if a time is above LIMIT_MS.

A backend that plans every new length takes 36 to 120 ms per token (cuDNN through stock PyTorch). A call with a planned
length can be fast nevertheless. tools/models/programs.py runs this module in a separate process, because the plans of
cuDNN stay in the process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

LIMIT_MS = 0.3  # largest allowed median time of a token
WARMUP, TOKENS, SECONDS = 4, 24, 240


@dataclass(frozen=True)
class Cache:
    """KV cache of one sequence, before the first token is added."""

    d: int
    dv: int
    heads: int
    kv_heads: int
    keys: int


SIZES = ((16, 16, 500), (32, 8, 2000), (32, 1, 1100), (16, 4, 8000))  # heads, KV heads, keys
UNEQUAL = (  # pairs (D, Dv) that cover every kernel for unequal head dims
    (16, 64), (40, 32), (64, 48), (64, 128), (96, 64), (128, 64), (128, 192), (192, 128), (200, 64), (64, 224),
    (256, 128), (128, 256), (256, 240),
)  # fmt: skip
CACHES = [Cache(*dims, *sizes) for dims in (*((d, d) for d in range(32, 257, 8)), *UNEQUAL) for sizes in SIZES]


def median_ms(cache: Cache, device: str, tokens: int = TOKENS, backend: str | None = None) -> float:
    """Return the median time of F.sdpa for one token in ms, including host and device time.

    Args:
        cache: The cache before the first token.
        device: "cuda", or "cpu" in tests.
        tokens: Number of timed tokens.
        backend: A mode of `sdpa_backend`. None keeps the current mode.
    """
    import torch
    import torch.nn.functional as F

    import torch_flashplug

    assert torch_flashplug.dispatch.bindings.enabled(), "the plugin is disabled"
    room, dtype = cache.keys + WARMUP + tokens, torch.bfloat16
    q = torch.randn(1, cache.heads, 1, cache.d, device=device, dtype=dtype)
    k, v = (torch.randn(1, cache.kv_heads, room, d, device=device, dtype=dtype) for d in (cache.d, cache.dv))
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    times = []
    with torch.no_grad(), torch_flashplug.sdpa_backend(backend) if backend else nullcontext():
        for keys in range(cache.keys + 1, room + 1):
            wait()
            start = time.perf_counter()
            F.scaled_dot_product_attention(q, k[:, :, :keys], v[:, :, :keys], enable_gqa=cache.heads != cache.kv_heads)
            wait()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[WARMUP:])


CACHE_TEXT = "D {d}, Dv {dv}, {heads} heads on {kv_heads}, {keys} keys"


def violations(rows: list[dict]) -> list[str]:
    """Return a line for each cache whose tokens take too long."""
    text = f"growing cache {CACHE_TEXT}: {{ms:.3g}} ms per token, the limit is {{limit}} ms"
    return [text.format(**row, limit=LIMIT_MS) for row in rows if row["ms"] > LIMIT_MS]


def run_in_new_process() -> list[dict]:
    """Return the rows of a run in a new process."""
    done = subprocess.run(
        [sys.executable, __file__, "--json"], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(rows) != len(CACHES):
        count = f"{len(rows)} of {len(CACHES)} caches, exit {done.returncode}"
        raise RuntimeError(f"growing_cache.py: {count}: {done.stderr[-400:]}")
    return rows


def measured(device: str, caches: Sequence[Cache], backend: str | None) -> Iterator[dict]:
    for cache in caches:
        yield {**asdict(cache), "ms": median_ms(cache, device, backend=backend)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each cache")
    parser.add_argument("--backend", help="mode of sdpa_backend (default auto)")
    parser.add_argument("--unequal", action="store_true", help="only caches with D != Dv")
    parser.add_argument("--out", type=Path, help="file for all rows")
    options = parser.parse_args()
    rows = []
    caches = [cache for cache in CACHES if not options.unequal or cache.d != cache.dv]
    for row in measured("cuda", caches, options.backend):
        rows.append(row)
        print(json.dumps(row) if options.json else f"{{ms:8.3f}} ms  {CACHE_TEXT}".format(**row))
    if options.out:
        options.out.write_text(json.dumps(rows) + "\n")
    wrong = violations(rows)
    for line in () if options.json else wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
