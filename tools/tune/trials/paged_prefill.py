"""Trial of the forward kernels that read the pages of packed queries in place. Needs a Hopper GPU and takes 1 to 2 min.

    python tools/tune/trials/paged_prefill.py [--seed N]

The first part checks numbers: results against fp64 for fresh random inputs, with NaN in every unused row, page and
output, equal bits in repeated runs, no wait of the host, and a CUDA graph replayed with other lengths. The second part
times the kernels on pages of 16, 64 and 256 rows beside the gather, contiguous keys, and FlashAttention-3 if installed.
Each line is printed as soon as it is known. A wrong number ends the script with exit status 1.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[3]))

from tools.bench.runner import graphed
from tools.bench.suites import paged_prefill as suite
from torch_flashplug import attention, explain_attention, sdpa_backend
from torch_flashplug.testing import Candidate, time_interleaved

LARGEST_ERROR, LARGEST_LSE_ERROR = 5e-3, 1e-3
MIXES = {
    "mixed": ((300, 300), (33, 1500), (1, 129), (0, 40), (5, 0), (0, 0), (20, 7), (128, 4096)),
    "edges": ((3, 15), (3, 16), (3, 17), (3, 127), (3, 128), (3, 129), (1, 1), (8, 255)),
}
WINDOWS = ({"causal": True}, {}, {"causal": True, "window": (70, None)}, {"window": (100, 33)})
CASES = (  # d, rows of a page, settings beside the window
    *((128, rows, {}) for rows in (16, 32, 64, 128, 256)),
    *((d, 16, {}) for d in (64, 256)),
    (128, 48, {"softcap": 20.0}),
    (256, 64, {"softcap": 20.0}),
    (64, 32, {"sinks": True}),
)
TIMED = ("2k_of_8k_d64", "512_of_4k_d128", "2k_of_8k_d128", "16x512_d128", "mixed_d128", "rows4_d128", "2k_of_8k_d256")


def say(text: str) -> None:
    print(text, flush=True)


class Poisoned:
    """Packed queries over pages in which every number without a use is NaN, or an invalid page number."""

    def __init__(self, lengths: tuple[tuple[int, int], ...], d: int, page_rows: int, draw: torch.Generator):
        device, self.lengths = "cuda", lengths
        self.ends = [*accumulate((rows for rows, _ in lengths), initial=2)]
        n = max(1, *(-(-keys // page_rows) for _, keys in lengths))
        table = torch.randperm(len(lengths) * n + 3, device=device, generator=draw)[: len(lengths) * n].view(-1, n)
        self.q = torch.randn(self.ends[-1] + 3, 8, d, device=device, generator=draw).bfloat16()
        self.q[:2] = self.q[self.ends[-1] :] = math.nan
        sizes = (len(lengths) * n + 3, page_rows, 2, d)
        self.k, self.v = (torch.full(sizes, math.nan, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.keys = []
        for sequence, (_, keys) in enumerate(lengths):
            of_sequence = [torch.randn(keys, 2, d, device=device, generator=draw).bfloat16() for _ in range(2)]
            self.keys.append(of_sequence)
            page = torch.arange(keys, device=device) // page_rows
            for pool, values in zip((self.k, self.v), of_sequence, strict=True):
                pool[table[sequence, page], torch.arange(keys, device=device) % page_rows] = values
            table[sequence, -(-keys // page_rows) :] = (-1, 2**31 - 1)[sequence % 2]
        self.sinks = torch.randn(8, device=device, generator=draw)
        self.table = table.int()
        self.used = torch.tensor([keys for _, keys in lengths], device=device).int()
        self.starts = torch.tensor(self.ends, device=device).int()

    def run(self, **settings: object) -> tuple[Tensor, Tensor]:
        out = torch.full_like(self.q, math.nan)
        lengths = {"cu_seqlens_q": self.starts, "seqused_k": self.used, "block_table": self.table}
        return attention(self.q, self.k, self.v, **settings, **lengths, out=out, return_lse=True)

    def errors(self, out: Tensor, lse: Tensor, **settings: object) -> tuple[float, float]:
        """Return the relative error of the output and the absolute error of the LSE, against fp64."""
        right = torch.zeros_like(out, dtype=torch.float64)
        right_lse = torch.full_like(lse, -math.inf, dtype=torch.float64)
        sinks = settings.get("sinks")
        if sinks is not None:
            settings["sinks"] = sinks.double()
            right_lse[:] = settings["sinks"].unsqueeze(1)
        for sequence, (begin, end) in enumerate(zip(self.ends, self.ends[1:])):
            if begin < end and self.lengths[sequence][1]:
                operands = (self.q[begin:end], *self.keys[sequence])
                with sdpa_backend("math"):
                    of_rows = attention(*(x[None].double() for x in operands), **settings, return_lse=True)
                right[begin:end], right_lse[:, begin:end] = of_rows[0][0], of_rows[1][0]
        distance = torch.where(lse == right_lse, 0.0, lse - right_lse).abs().max()
        return float((out.double() - right).norm() / right.norm()), float(distance)


def check(seed: int) -> bool:
    draw, is_right = torch.Generator("cuda").manual_seed(seed), True
    for number, (d, page_rows, more) in enumerate(CASES):
        for name, lengths in MIXES.items():
            call = Poisoned(lengths, d, page_rows, draw)
            settings = WINDOWS[number % len(WINDOWS)] | more
            settings |= {"sinks": call.sinks} if "sinks" in more else {}
            with sdpa_backend("fa3"):
                first = call.run(**settings)
                torch.cuda.set_sync_debug_mode("error")
                runs = [call.run(**settings) for _ in range(5)]
                torch.cuda.set_sync_debug_mode("default")
                kernel = explain_attention(
                    call.q, call.k, call.v, cu_seqlens_q=call.starts, seqused_k=call.used, block_table=call.table,
                    **settings,
                ).kernel  # fmt: skip
            repeats = all(torch.equal(a, b) for run in runs for a, b in zip(run, first, strict=True))
            error, lse_error = call.errors(*first, **settings)
            right = error < LARGEST_ERROR and lse_error < LARGEST_LSE_ERROR and repeats and "paged" in kernel
            is_right &= right
            label = f"{'right' if right else 'WRONG'}: D {d}, pages of {page_rows}, {name}, {settings.keys()}"
            say(f"{label}: error {error:.1e}, LSE {lse_error:.1e}, {repeats=}, {kernel}")
    return is_right & check_graph(draw)


def check_graph(draw: torch.Generator) -> bool:
    """Replay a graph with other lengths and another table; the last sequences are padding."""
    lengths = ((200, 300), (60, 900), (1, 129), (0, 0), (0, 0))
    replay_lengths = ((10, 10), (0, 0), (251, 1000), (0, 0), (0, 0))
    call, replay = (Poisoned(x, 128, 16, draw) for x in (lengths, replay_lengths))
    width = max(call.table.shape[1], replay.table.shape[1])
    pages = max(len(call.k), len(replay.k))
    held = {"table": torch.full((5, width), -1, device="cuda").int(), "used": call.used.clone()}
    held |= {"starts": call.starts.clone(), "q": call.q.clone()}
    held |= {name: torch.full((pages, *call.k.shape[1:]), math.nan, device="cuda").bfloat16() for name in "kv"}

    def fill(source: Poisoned) -> None:
        for name, target in held.items():
            values = getattr(source, name)
            target.fill_(-1 if name == "table" else 0) if target.dtype == torch.int32 else target.fill_(math.nan)
            target[tuple(map(slice, values.shape))] = values

    def run() -> tuple[Tensor, Tensor]:
        lengths = {"cu_seqlens_q": held["starts"], "seqused_k": held["used"], "block_table": held["table"]}
        return attention(held["q"], held["k"], held["v"], causal=True, **lengths, return_lse=True)

    with sdpa_backend("fa3"):
        fill(call)
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
    is_right = True
    for source in (replay, call, replay):
        fill(source)
        graph.replay()
        rows = len(source.q)
        error, lse_error = source.errors(results[0][:rows], results[1][:, :rows], causal=True)
        right = error < LARGEST_ERROR and lse_error < LARGEST_LSE_ERROR
        is_right &= right
        say(f"{'right' if right else 'WRONG'}: graph with {source.lengths}: error {error:.1e}, LSE {lse_error:.1e}")
    return is_right


def measure() -> None:
    say("times in us, and times over those of the kernel on pages of 16 rows (above 1: the kernel is faster)")
    for call in (call for call in suite.calls() if call.name in TIMED):
        x, candidates, refused = suite._operands(call, "cuda"), {}, {}
        for name, function in suite.FUNCTIONS.items():
            scope = functools.partial(sdpa_backend, "fa3" if name.startswith("ours") else "stock")
            try:
                with torch.no_grad(), scope():
                    attend = function(call, x)
                    error = suite._error(call, x, attend())
                    if not error <= suite.LARGEST_ERROR:
                        raise ValueError(f"wrong by {error:.2g}")
                    candidates[name] = graphed(Candidate(attend, scope), 1)
            except Exception as reason:  # a peer may be absent; the remaining candidates are timed
                refused[name] = str(reason).splitlines()[0][:60]
        timings = time_interleaved(candidates, rounds=7, device="cuda", round_ms=5.0)
        base = timings["ours_fa3"].ms if "ours_fa3" in timings else math.nan
        for name, timing in timings.items():
            rate = call.flop / timing.ms / 1e9
            say(f"{call.name:18} {name:16} {1e3 * timing.ms:9.1f} us  {timing.ms / base:6.3f}  {rate:6.0f} TFLOP/s")
        for name, reason in refused.items():
            say(f"{call.name:18} {name:16} not timed: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="seed of the inputs")
    seed = parser.parse_args().seed
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, seed {seed}")
    with torch.no_grad():
        if not check(seed):
            raise SystemExit("wrong numbers: nothing is timed")
        measure()


if __name__ == "__main__":
    main()
