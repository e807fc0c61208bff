"""Suite decode: few query rows against many keys, compared with every peer and with a kernel that only reads K and V.

Each case runs in two states. In state "cold" the calls of a graph visit many copies of K and V, so that no copy is
still in L2 at the next visit. In state "warm" a single copy stays in L2, if the copy fits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tools.bench import baselines, workloads
from tools.bench.runner import Bench, facts_of, graphed, row_of, try_each
from torch_flashplug.testing import Candidate, Case, Timing, make_inputs, time_interleaved

ROUND_MS = 3.0
COLD_BYTES = 240 << 20  # bytes of K and V read before a copy is reused: several times the size of any L2
WARM_BYTES = 32 << 20  # bytes of K and V that surely stay in L2
MAX_COPIES, WARM_CALLS = 48, 20
MATH_BYTES = 1 << 27  # the math backend is timed up to so many bytes of K and V: above, math is never near the fastest


def kv_bytes(case: Case) -> int:
    return 2 * case.B * case.Hkv * case.Sk * (case.D + case.Dv)


def copies_of(case: Case) -> int:
    """Return a number of copies of K and V so large that no copy is still in L2 at the next visit."""
    return max(2, min(MAX_COPIES, -(-COLD_BYTES // kv_bytes(case))))


def in_turn(calls: list[Callable[[], object]]) -> Callable[[], None]:
    def run():
        for call in calls:
            call()

    return run


def states_of(case: Case) -> dict[str, tuple[int, int]]:
    """Map each state of K and V to the number of copies that a graph visits and the number of repetitions."""
    warm = {"warm": (1, WARM_CALLS)} if kv_bytes(case) <= WARM_BYTES else {}
    return {"cold": (copies_of(case), 1)} | warm


def suite_decode(bench: Bench) -> None:
    for case in workloads.decode():
        for state in states_of(case):
            name = f"{case.name}_{state}"
            if bench.take(name):
                _measure(bench, case, state, name)


def _measure(bench: Bench, case: Case, state: str, name: str) -> None:
    from tools.bench.memory_bandwidth import reader  # imported late, because CPU builds of torch lack triton

    copies, turns = states_of(case)[state]
    inputs = [make_inputs(case, bench.device, seed) for seed in range(copies)]
    skipped = baselines.SLOW if kv_bytes(case) > MATH_BYTES else baselines.SLOW - {"math"}
    names = [peer for peer in bench.providers if peer not in skipped and not peer.endswith(baselines.ONE_ORDER)]
    with torch.no_grad():

        def build(provider, which=inputs[0]):
            return lambda: provider.attend(*which, **case.sdpa_kwargs())

        candidates, errors, refused = try_each(bench, case, inputs[0], names, build)
        for peer, candidate in candidates.items():
            calls = [build(bench.providers[peer], which) for which in inputs]
            candidates[peer] = graphed(Candidate(in_turn(calls), candidate.scope), turns)
        candidates["read"] = graphed(Candidate(in_turn([reader(which) for which in inputs])), turns)
        timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
    timings = {peer: Timing(tuple(ms / (copies * turns) for ms in t.rounds)) for peer, t in timings.items()}
    read = timings.pop("read")
    row = row_of(name, timings, **facts_of(case), errors=errors, refused=refused)
    plan = baselines.torch_flashplug.explain(*inputs[0], **case.sdpa_kwargs())
    row |= {"state": state, "kv_bytes": kv_bytes(case), "bound_ms": read.ms, "splits": plan.splits}
    bench.add(row | {"auto_plan": plan.backend})
