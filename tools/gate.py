"""Constants of the decode gate: times calls of few query rows in many numbers of splits, and finds the constants under
which the dispatcher's own rule (src/decode.cpp) loses least against the best number of splits of each call.

    python tools/tune.py gate --out results              on the GPU: times, then the fit
    python tools/tune.py gate --times gate-h100.json     the fit again
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch_flashplug import choices, configs, native
from torch_flashplug.choices import Gate
from torch_flashplug.configs import KernelRow
from torch_flashplug.spec import BACKENDS
from torch_flashplug.testing import Case

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MOST_CTAS = 2  # for each SM
WEIGHT = 1.5  # a large loss counts for more than several small ones that add up to it
STEPS = (0.5, 0.7, 0.85, 1.2, 1.4, 2.0)  # a constant is tried at these multiples
CONSTANTS = ("cluster_ns", "cluster_rate", "combine_ns", "combine_rate", "read_rate")
Times = dict[str, dict[str, dict[int, float]]]  # case name -> K and V cold or warm -> splits -> microseconds


def measure(rounds: int) -> tuple[list[Case], Times]:
    """Every case in every number of splits that it can have, K and V from memory, then from L2 if they fit."""
    import torch
    import torch.nn.functional as F  # noqa: N812
    import workloads
    from decode import in_turn, states_of

    import torch_flashplug
    from torch_flashplug.testing import Candidate, captured, make_inputs, time_interleaved

    sms, times, cases = torch.cuda.get_device_properties(0).multi_processor_count, {}, workloads.gate()
    for case in cases:
        blocks, tiles = -(-case.Sk // 64), case.B * case.Hkv
        possible = [n for n in SPLITS if n == 1 or (n <= blocks and n * tiles <= MOST_CTAS * sms)]
        times[case.name] = {}
        for state, (copies, turns) in states_of(case).items():
            inputs = [make_inputs(case, "cuda", seed) for seed in range(copies)]
            calls = [partial(F.scaled_dot_product_attention, *which, **case.sdpa_kwargs()) for which in inputs]
            runs = {}
            for splits in possible:
                with torch.no_grad(), torch_flashplug.sdpa_backend("fa3", num_splits=splits):
                    runs[str(splits)] = Candidate(captured(in_turn(calls), turns))
            timed = time_interleaved(runs, rounds=rounds, round_ms=2.0)
            times[case.name][state] = {int(n): 1e3 * t.ms / (copies * turns) for n, t in timed.items()}
            print(case.name, state, {n: round(us, 1) for n, us in times[case.name][state].items()}, flush=True)
    return cases, times


def chosen(case: Case, rows: tuple[KernelRow, ...], gate: Gate, facts: dict[str, int]) -> int:
    """The splits that the dispatcher would take with this table."""
    native.push_rows(rows, (), gate)
    return native.plan(case.sizes(), facts, BACKENDS.index("fa3"))["splits"]


def loss(cases: list[Case], times: Times, rows: tuple[KernelRow, ...], gate: Gate, facts: dict[str, int]) -> float:
    """Mean of a power of log(time / best time); splits that were not timed count as the nearest that were."""
    losses = []
    for case in cases:
        splits = chosen(case, rows, gate, facts)
        for known in times[case.name].values():
            nearest = min(known, key=lambda n: abs(math.log(n / splits)))
            losses.append(math.log(known[nearest] / min(known.values())) ** WEIGHT)
    return statistics.fmean(losses)


def with_cost(rows: tuple[KernelRow, ...], i: int, cost: int) -> tuple[KernelRow, ...]:
    return (*rows[:i], replace(rows[i], cost=max(1, cost)), *rows[i + 1 :])


def fit(cases: list[Case], times: Times, facts: dict[str, int]) -> tuple[tuple[KernelRow, ...], Gate, float]:
    """Rows and gate with the least loss, from today's: one constant or row after another, until none gains."""
    rows, gate = configs.KERNEL_ROWS, choices.GATE
    decodes = [i for i, row in enumerate(rows) if row.kind == "decode"]
    best, gained = loss(cases, times, rows, gate, facts), True
    while gained:
        gained = False
        tries = [(rows, replace(gate, **{name: getattr(gate, name) * x})) for name in CONSTANTS for x in STEPS]
        tries += [(with_cost(rows, i, round(rows[i].cost * x)), gate) for i in decodes for x in STEPS]
        for other_rows, other_gate in tries:
            value = loss(cases, times, other_rows, other_gate, facts)
            if value < best - 1e-5:
                rows, gate, best, gained = other_rows, other_gate, value, True
    native.push_rows(configs.KERNEL_ROWS, choices.CHOICE_ROWS, choices.GATE)
    return rows, gate, best


def tune_gate(times_from: Path | None, out: Path, rounds: int) -> None:
    """Prints what to paste into choices.py and configs.py, and every call that still loses."""
    import report
    import workloads

    if times_from is None:
        facts = native.device_facts(0)
        cases, times = measure(rounds)
        document = report.header("gate", report.read_clocks(), report.commit())
        document |= {"rounds": rounds, "facts": facts, "us": times}
        print("wrote", report.write_json(document, out))
    else:
        document = json.loads(times_from.read_text())
        times = {
            name: {state: {int(n): us for n, us in known.items()} for state, known in states.items()}
            for name, states in document["us"].items()
        }
        cases, facts = [case for case in workloads.gate() if case.name in times], document["facts"]
    print(f"today: {loss(cases, times, configs.KERNEL_ROWS, choices.GATE, facts):.5f}")
    rows, gate, least = fit(cases, times, facts)
    print(f"fitted: {least:.5f}\n{gate}")
    for row in rows:
        if row.kind == "decode":
            print(row)
    for case in cases:
        splits = chosen(case, rows, gate, facts)
        for state, known in times[case.name].items():
            best = min(known, key=known.__getitem__)
            if splits not in known or known[splits] > 1.03 * known[best]:
                taken = f"splits {splits} ({known.get(splits, 0):.1f} us)"
                print(f"  {case.name} {state}: {taken}, best {best} ({known[best]:.1f} us)")
