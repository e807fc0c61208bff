"""Suite everyday: attention calls of published models, in auto mode, against stock's default and every peer.

The first times of a row are those that a user waits for: calls from Python, with the host time. `device_ms` has the
device times of the same calls, replayed from a CUDA graph. The host code of a peer may take longer than its kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from tools.bench import public_models, workloads
from tools.bench.public_models import ModelCall
from tools.bench.result_schema import GRADIENT_FLOP
from tools.bench.runner import (
    Bench,
    auto_plan_of,
    call_of,
    facts_of,
    gradient_check,
    graphed,
    refusal,
    row_of,
    try_each,
)
from torch_flashplug.testing import Candidate, Case, Timing, make_inputs, time_interleaved

ROUND_MS = 8.0
GRAPH_CALLS, GRAPH_MS = 10, 2.0  # number of calls in one CUDA graph, reduced if the calls would take more than GRAPH_MS


def suite_everyday(bench: Bench) -> None:
    for call in public_models.model_calls():
        case = workloads.size_for(call.case, bench.device)
        if bench.take(case.name):
            _measure(bench, call, case)


def _measure(bench: Bench, call: ModelCall, case: Case) -> None:
    trains = call.direction == "train"
    inputs = make_inputs(case, bench.device, requires_grad=trains)
    check = gradient_check(case, inputs) if trains and bench.check else None
    build = partial(call_of, case, inputs, call.direction)
    candidates, errors, refused = try_each(bench, case, inputs, list(bench.providers), build, check)
    timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
    device_ms, refused_graphs = _device_times(bench, candidates, timings)
    facts = facts_of(case) | {"flop": GRADIENT_FLOP.get(call.direction, 1.0) * case.flop}
    more = {"model": call.model, "kind": call.kind, "auto_plan": auto_plan_of(inputs, case), "device_ms": device_ms}
    bench.add(row_of(case.name, timings, **facts, **more, errors=errors, refused=refused | refused_graphs))


def _device_times(
    bench: Bench, candidates: Mapping[str, Candidate], timings: Mapping[str, Timing]
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the device times of calls replayed from CUDA graphs, and the reasons of calls that cannot be captured."""
    if bench.device == "cpu":
        return {}, {}
    replayed, calls, refused = {}, {}, {}
    for name, candidate in candidates.items():
        calls[name] = max(1, min(GRAPH_CALLS, int(GRAPH_MS / timings[name].ms)))
        try:
            replayed[name] = graphed(candidate, calls[name])
        except Exception as error:  # a call that cannot be captured has no device time; peers differ in the type
            refused[f"{name}, CUDA graph"] = refusal(error)
    replays = time_interleaved(replayed, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
    return {name: timing.ms / calls[name] for name, timing in replays.items()}, refused
