"""Suite largedims: head dims above 256, forward, forward and backward, and decode, against stock and FFPA.

The project's kernels are forced, because auto mode serves no gradients of such head dims. Forwards and decode calls are
replayed from a CUDA graph. Training steps are called as users call them. The keys of a decode case exceed any L2.
"""

from __future__ import annotations

from functools import partial

from tools.bench import workloads
from tools.bench.result_schema import GRADIENT_FLOP
from tools.bench.runner import Bench, call_of, facts_of, gradient_check, graphed, row_of, try_each
from torch_flashplug.testing import Case, make_inputs, time_interleaved

PROVIDERS = {"ours_fa3", "stock", "ffpa"}
ROUND_MS = 20.0


def suite_largedims(bench: Bench) -> None:
    """Time each case in its direction."""
    for direction, cases in (
        ("fwd", workloads.large_head_dims("fwd")),
        ("train", workloads.large_head_dims("train")),
        ("fwd", workloads.large_head_dims_decode()),
    ):
        for large in cases:
            case = workloads.size_for(large, bench.device)
            if bench.take(case.name):
                _measure(bench, case, direction)


def _measure(bench: Bench, case: Case, direction: str) -> None:
    trains = direction == "train"
    inputs = make_inputs(case, bench.device, requires_grad=trains)
    check = gradient_check(case, inputs) if trains and bench.check else None
    build = partial(call_of, case, inputs, direction)
    candidates, errors, refused = try_each(bench, case, inputs, list(bench.providers), build, check)
    if not trains and bench.device == "cuda":
        candidates = {name: graphed(candidate, 1) for name, candidate in candidates.items()}
    timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
    facts = facts_of(case) | {"flop": GRADIENT_FLOP.get(direction, 1.0) * case.flop}
    bench.add(row_of(case.name, timings, **facts, errors=errors, refused=refused))
