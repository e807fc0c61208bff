"""Tuning of the cost model: the constants with which the dispatcher selects the number of KV splits.

The tool times decode calls with many numbers of splits. The dispatcher selects the number of splits by a rule with
constants (src/dispatch/split_heuristic.cpp). The tool finds the constants with the least loss against the best number
of splits.

    python tools/tune/tune.py gate --out results              on the GPU: times, then the fit
    python tools/tune/tune.py gate --times gate-h100.json     only the fit, to the times of one or several machines
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch_flashplug import sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table, kernel_table
from torch_flashplug.registry.dispatch_table import CostModel
from torch_flashplug.registry.kernel_spec import MAX_CLUSTER_SIZE
from torch_flashplug.registry.kernel_table import KernelRow
from torch_flashplug.testing import Case

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MOST_CTAS = 2  # largest number of CTAs per SM
WEIGHT = 1.5  # exponent of losses: a large loss counts more than several small losses of equal sum
STEPS = (0.5, 0.7, 0.85, 1.2, 1.4, 2.0)  # multiples at which each constant is tried
# The constants to fit. `read_efficiency` is not fitted: a kernel that only reads K and V reached this value.
CONSTANTS = ("cluster_ns", "cluster_rate", "combine_ns", "combine_rate")
Splits = tuple[int, bool]  # number of splits, and whether the splits form a cluster
Times = dict[str, dict[str, dict[Splits, float]]]  # case name -> K and V cold or warm -> splits -> microseconds


def planned(case: Case, facts: dict[str, int], num_splits: int = 0) -> tuple[Splits, int]:
    """Return the splits and the number of tiles that the dispatcher plans with the pushed kernel table."""
    mode = sdpa_backend("fa3", num_splits=num_splits).mode
    plan = bindings.plan(case.sizes(), facts, mode)
    return (plan["splits"], plan["cluster"] > 1), plan["tiles"]


def measure(facts: dict[str, int], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Measure every case with every possible number of splits.

    Splits that can form a cluster are also combined through global memory. K and V are read from memory, and then from
    L2 if both fit.

    Returns:
        The times in microseconds, by case name, state of K and V, and splits in the form of `written`.
    """
    import torch
    import torch.nn.functional as F  # noqa: N812

    from tools.bench import workloads
    from tools.bench.suites.decode import in_sequence, states_of
    from torch_flashplug.testing import Candidate, captured, make_inputs, time_interleaved

    times = {}
    for case in workloads.gate():
        times[case.name] = {}
        for state, (copies, turns) in states_of(case).items():
            inputs = [make_inputs(case, "cuda", seed) for seed in range(copies)]
            calls = [partial(F.scaled_dot_product_attention, *which, **case.sdpa_kwargs()) for which in inputs]
            runs = {}
            for limit, num_splits in itertools.product((MAX_CLUSTER_SIZE, 1), SPLITS):
                # With these constants the dispatcher selects a cluster if a cluster is possible.
                cost_model = replace(packing(dispatch_table.COST_MODEL), max_cluster=limit, combine_ns=1e9)
                bindings.push_rows(kernel_table.KERNEL_ROWS, (), cost_model)
                splits, tiles = planned(case, facts, num_splits)
                is_large = splits[0] * tiles > MOST_CTAS * facts["sm_count"]
                if splits[0] != num_splits or written(splits) in runs or is_large:
                    continue
                with torch.no_grad(), sdpa_backend("fa3", num_splits=num_splits):
                    runs[written(splits)] = Candidate(captured(in_sequence(calls), turns))
            timed = time_interleaved(runs, rounds=rounds, round_ms=2.0)
            times[case.name][state] = {n: 1e3 * t.ms / (copies * turns) for n, t in timed.items()}
            print(case.name, state, {n: round(us, 1) for n, us in times[case.name][state].items()}, flush=True)
    return times


def written(splits: Splits) -> str:
    return f"{splits[0]}{'c' * splits[1]}"


def read(text: str) -> Splits:
    return int(text.rstrip("c")), text.endswith("c")


def packing(cost_model: CostModel) -> CostModel:
    """Return a cost model that packs query rows if packing is possible, even if packing should be slower."""
    return replace(cost_model, max_decode_rows=cost_model.max_packed_rows)


def chosen(case: Case, rows: tuple[KernelRow, ...], cost_model: CostModel, facts: dict[str, int]) -> Splits:
    """Return the splits that the dispatcher selects with the given kernel rows and cost model."""
    bindings.push_rows(rows, (), packing(cost_model))
    return planned(case, facts)[0]


def nearest(us_by_splits: dict[Splits, float], splits: Splits) -> Splits:
    """Return the timed splits nearest to the given splits.

    An equal way of combining (cluster or not) has priority over a near number of splits.
    """
    return min(us_by_splits, key=lambda n: (n[1] != splits[1], abs(math.log(n[0] / splits[0]))))


def loss(
    cases: list[Case], times: Times, rows: tuple[KernelRow, ...], cost_model: CostModel, facts: dict[str, int]
) -> float:
    """Return the mean of log(time / best time) ** WEIGHT."""
    losses = []
    for case in cases:
        splits = chosen(case, rows, cost_model, facts)
        for us_by_splits in times[case.name].values():
            losses.append(math.log(us_by_splits[nearest(us_by_splits, splits)] / min(us_by_splits.values())) ** WEIGHT)
    return statistics.fmean(losses)


def with_cost(rows: tuple[KernelRow, ...], i: int, cost: int) -> tuple[KernelRow, ...]:
    return (*rows[:i], replace(rows[i], cost=max(1, cost)), *rows[i + 1 :])


def times_of(document: dict) -> Times:
    return {
        name: {state: {read(n): us for n, us in us_by_splits.items()} for state, us_by_splits in states.items()}
        for name, states in document["us"].items()
    }


def losses(cases: list[Case], measured: list, rows: tuple[KernelRow, ...], cost_model: CostModel) -> float:
    """Return the mean loss over all machines, with equal weights."""
    return statistics.fmean(loss(cases, times, rows, cost_model, facts) for facts, times in measured)


def fit(cases: list[Case], measured: list) -> tuple[tuple[KernelRow, ...], CostModel, float]:
    """Return the kernel rows and the cost model with the least loss, and the loss.

    The search starts from the current rows and cost model. One constant or row is changed at a time, until no change
    reduces the loss.

    Args:
        cases: the timed cases.
        measured: pairs of device facts and times, one pair for each machine.
    """
    rows, cost_model = kernel_table.KERNEL_ROWS, dispatch_table.COST_MODEL
    decodes = [i for i, row in enumerate(rows) if row.kind == "decode"]
    best, gained = losses(cases, measured, rows, cost_model), True
    while gained:
        gained = False
        tries = [
            (rows, replace(cost_model, **{name: getattr(cost_model, name) * x})) for name in CONSTANTS for x in STEPS
        ]
        tries += [(with_cost(rows, i, round(rows[i].cost * x)), cost_model) for i in decodes for x in STEPS]
        for other_rows, other_model in tries:
            value = losses(cases, measured, other_rows, other_model)
            if value < best - 1e-5:
                rows, cost_model, best, gained = other_rows, other_model, value, True
    return rows, cost_model, best


def tune_gate(times_from: list[Path], out: Path, rounds: int) -> None:
    """Print the lines to paste into dispatch_table.py and kernel_table.py, and every call that still loses time."""
    from tools.bench import report, workloads

    if not times_from:
        facts = bindings.device_facts(0)
        us = measure(facts, rounds)
        document = report.header("gate", report.read_clocks(), report.commit())
        times_from = [report.write_json(document | {"rounds": rounds, "facts": facts, "us": us}, out)]
        print("wrote", times_from[0])
    documents = [json.loads(path.read_text()) for path in times_from]
    measured = [(document["facts"], times_of(document)) for document in documents]
    cases = [case for case in workloads.gate() if all(case.name in times for _, times in measured)]
    print(f"current constants: {losses(cases, measured, kernel_table.KERNEL_ROWS, dispatch_table.COST_MODEL):.5f}")
    rows, cost_model, least = fit(cases, measured)
    print(f"fitted: {least:.5f}\n{cost_model}")
    for row in rows:
        if row.kind == "decode":
            print(row)
    for case, (facts, times) in itertools.product(cases, measured):
        splits = chosen(case, rows, cost_model, facts)
        for state, us_by_splits in times[case.name].items():
            best, nearest_splits = min(us_by_splits, key=us_by_splits.__getitem__), nearest(us_by_splits, splits)
            if us_by_splits[nearest_splits] > 1.03 * us_by_splits[best]:
                slow, fast = (f"{written(n)} ({us_by_splits[n]:.1f} us)" for n in (nearest_splits, best))
                print(f"  {case.name} {state}, {facts['memory_rate']} B/ns: {written(splits)} as {slow}, best {fast}")
    bindings.push_rows(kernel_table.KERNEL_ROWS, dispatch_table.CHOICE_ROWS, dispatch_table.COST_MODEL)
