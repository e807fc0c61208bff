"""Shared parts of all benchmark suites: state of a run, trial of each provider, and JSON form of results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from tools.bench import baselines, report
from tools.bench.result_schema import OURS, WITHOUT_FEATURE
from torch_flashplug.testing import (
    Candidate,
    Case,
    ErrorReport,
    Inputs,
    Timing,
    captured,
    measure_error,
    oracle,
    oracle_grads,
    paired_ratio,
    plain,
    plain_grads,
    time_interleaved,
)
from torch_flashplug.testing.budget import GRAD_FACTOR, cancelled_sums

REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError)  # exceptions by which the plugin refuses a call
MASKED_ROUND_MS = 10.0  # time per candidate and round in suites with masks, dropout and similar features


@dataclass(slots=True)
class Bench:
    """State of a benchmark run: the options, the providers, and the rows measured so far."""

    device: str
    rounds: int
    deadline: float
    name_filter: str
    check: bool
    providers: dict[str, baselines.Provider]
    absent: dict[str, str]
    rows: list[dict[str, object]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    clocks: list[dict[str, str]] = field(default_factory=list)
    last_clocks: float = 0.0

    def take(self, name: str) -> bool:
        """Return True if the named case must be measured. If the time is used up, note the case as skipped."""
        if not any(part in name for part in self.name_filter.split(",")):
            return False
        if time.monotonic() > self.deadline:
            self.skipped[name] = "the time given with --budget-seconds is used up"
            return False
        return True

    def add(self, row: dict[str, object]) -> None:
        self.rows.append(row)
        ratio = row["ratio"]
        print(f"[{len(self.rows)}] {row['case']}: ratio {'-' if ratio is None else format(ratio, '.3f')}", flush=True)
        # Clocks are read under load, but at most every 10 s, because the query takes time.
        if time.monotonic() - self.last_clocks > 10:
            self.clocks.append(report.read_clocks())
            self.last_clocks = time.monotonic()


def row_of(name: str, timings: dict[str, object], **more) -> dict[str, object]:
    """Return the JSON form of a case: time of ours, times of peers, ratio and spreads.

    The ratio is the time of the best peer divided by the time of ours, paired over rounds.
    """
    ours = next((n for n in OURS if n in timings), None)
    one_order = {n.removesuffix(baselines.ONE_ORDER): t for n, t in timings.items() if n.endswith(baselines.ONE_ORDER)}
    peers = {n: t for n, t in timings.items() if n not in OURS and not n.endswith(baselines.ONE_ORDER)}
    best = min(peers, key=lambda n: peers[n].ms, default=None)
    ratio = paired_ratio(timings[best], timings[ours]) if ours and best else None
    auto = timings.get("ours_auto")
    return {
        "case": name,
        "ours_ms": timings[ours].ms if ours else None,
        "ours": ours,
        "peers_ms": {n: t.ms for n, t in peers.items()},
        "one_order_ms": {n: t.ms for n, t in one_order.items()},
        "ratio": ratio,
        "best_peer": best,
        "spread": {n: round(t.spread, 4) for n, t in timings.items()},
        "auto_ms": auto.ms if auto else None,
        "auto_over_stock": paired_ratio(auto, timings["stock"]) if auto and "stock" in timings else None,
        "all_ms": {n: t.ms for n, t in timings.items()},
        **more,
    }


def facts_of(case: Case) -> dict[str, object]:
    return {
        "shape": [case.B, case.Hq, case.Hkv, case.Sq, case.Sk, case.D, case.Dv],
        "d": max(case.D, case.Dv),
        "s": case.Sq,
        "mask": "causal" if case.causal else "full",
        "dtype": case.dtype,
        "flop": case.flop,
    }


def auto_plan_of(inputs: Inputs, case: Case) -> str:
    return str(baselines.torch_flashplug.explain(*inputs, **case.sdpa_kwargs()).backend)


def _first_kv_head(case: Case, inputs: Inputs) -> Inputs:
    """Return the part of the inputs with the first KV head of the first sequence, and its query heads."""
    group = case.Hq // case.Hkv
    return Inputs(inputs.q[:1, :group], inputs.k[:1, :1], inputs.v[:1, :1], inputs.grad_out[:1, :group])


def _end_if_wrong(case: Case, provider: baselines.Provider, tensor: str, errors: ErrorReport) -> None:
    """End the run if the errors are beyond the error budget."""
    if not errors.ok:
        raise SystemExit(f"{case.name}: {tensor} of {provider.name} is wrong, nothing is timed: {errors}")


def _check_numbers(case: Case, inputs: Inputs, provider: baselines.Provider) -> dict[str, float]:
    """Return the errors of the first heads of a provider against fp64.

    Errors of ours beyond the error budget end the run. Errors of a peer are only reported.
    """
    few = _first_kv_head(case, inputs)
    with provider.scope(), torch.no_grad():
        got = provider.attend(*inputs, **case.sdpa_kwargs())[:1, : few.q.shape[1]]
    exact, low = oracle(case, few), plain(case, few)
    errors = measure_error(got, exact.out, low.out)
    if provider.ours:
        _end_if_wrong(case, provider, "the output", errors)
    return {"max": errors.max, "rms": errors.rms}


def gradient_check(case: Case, inputs: Inputs) -> Callable[[baselines.Provider], dict[str, float]]:
    """Return a function that checks the output and the gradients of a provider against fp64.

    The function compares the first KV head, and its query heads. The reference is computed once for all providers.
    Gradients beyond the error budget end the run if kernels of the plugin ran. The errors of stock in auto mode, and of
    peers, are only reported.
    """
    few = _first_kv_head(case, inputs)
    exact, low = oracle_grads(case, few), plain_grads(case, few)
    sums = cancelled_sums(*few, few.grad_out, case.scale)

    def check(provider: baselines.Provider) -> dict[str, float]:
        errors = _check_numbers(case, inputs, provider)
        with provider.scope():
            grads = call_of(case, inputs, "train", provider)()
            must_be_right = provider.ours and auto_plan_of(inputs, case) != "stock"
        for name, grad, exact_grad, low_grad in zip(sums, grads, exact, low, strict=True):
            got = grad[:1, : exact_grad.shape[1]]
            report = measure_error(got, exact_grad, low_grad, GRAD_FACTOR, float(sums[name]))
            if must_be_right:
                _end_if_wrong(case, provider, name, report)
            errors[f"{name}_rms"] = report.rms
        return errors

    return check


def refusal(error: Exception) -> str:
    """Return an exception as a single line of text."""
    return f"{type(error).__name__}: {(str(error) or '-').splitlines()[0][:160]}"


def try_each(  # noqa: PLR0913
    bench: Bench, case: Case, inputs: Inputs, names: Iterable[str], build: Callable, check: Callable | None = None
) -> tuple[dict, dict, dict]:
    """Run each provider once, and return the candidates, the errors and the refusals.

    Args:
        bench: the run.
        case: the case to run.
        inputs: the tensors of the case.
        names: names of the providers to try.
        build: function that takes a provider and returns a call.
        check: function that takes a provider and returns the errors. By default, the output is checked.

    Returns:
        The candidates that can run the case, the errors of these candidates, and a reason per refusing provider.
    """
    candidates, errors, refused = {}, {}, {}
    check = check or partial(_check_numbers, case, inputs)
    for name in names:
        provider = bench.providers.get(name)
        if provider is None:
            continue
        call = build(provider)
        try:
            with provider.scope():
                call()
            if bench.check:
                errors[name] = check(provider)
            candidates[name] = Candidate(call, provider.scope)
        # Each peer refuses a call by an exception of a different type, or fails to compile. The exception is noted, and
        # the remaining providers are still measured.
        except Exception as error:
            if provider.ours and not isinstance(error, REFUSALS):
                raise
            refused[name] = refusal(error)
            if "CUDA error" in refused[name]:  # the CUDA context is lost, so later measurements would be meaningless
                raise SystemExit(f"{case.name}: {name}: {error}") from error
            if provider.ours:
                print(f"{case.name}: {name} refused: {refused[name]}")
    return candidates, errors, refused


def time_calls(
    bench: Bench, name: str, calls: Mapping[str, Candidate], wrong_in: Callable[[str], str | None]
) -> tuple[dict, dict[str, str], dict[str, str]]:
    """Check and time calls, and return the timings, the wrong results and the refusals.

    A wrong result of ours ends the run.

    Args:
        bench: the run.
        name: name of the case.
        calls: the candidates by name.
        wrong_in: function that makes a separate call of a named peer and returns a description of a wrong result, or
            None if the result is right.

    Returns:
        The timings of the calls that can run, the wrong results by peer, and the reasons of calls that cannot run.
    """
    candidates, wrong, refused = {}, {}, {}
    for peer, candidate in calls.items():
        try:
            with candidate.scope():
                if bench.check and (error := wrong_in(peer)):
                    wrong[peer] = error
                candidate.call()
        # A call that cannot run is noted, and the remaining calls are measured.
        except (RuntimeError, NotImplementedError) as error:
            refused[peer] = refusal(error)
            continue
        candidates[peer] = candidate
    if wrong.keys() & set(OURS):
        raise SystemExit(f"{name}: wrong, nothing is timed: {wrong}")
    timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=MASKED_ROUND_MS)
    return timings, wrong, refused


def graphed(candidate: Candidate, calls: int) -> Candidate:
    with candidate.scope():
        return Candidate(captured(candidate.call, calls))


def complete_call(direction: str, leaves: Sequence[Tensor], grad_out: Tensor, attend: Callable[[], Tensor]) -> object:
    """Run a call: the forward call for "fwd", or the forward call and the gradients for "train"."""
    if direction == "fwd":
        with torch.no_grad():
            return attend()
    return torch.autograd.grad(attend(), leaves, grad_out)


def call_of(case: Case, inputs: Inputs, direction: str, provider: baselines.Provider) -> Callable[[], object]:
    """Return a call of a provider: the forward call for "fwd", or the forward call and the gradients for "train"."""
    attend = partial(provider.attend, *inputs, **case.sdpa_kwargs())
    return partial(complete_call, direction, tuple(inputs), inputs.grad_out, attend)


def time_with_peers(  # noqa: PLR0913
    bench: Bench, name: str, makers: Mapping[str, Callable], *, error_of: Callable, once: Callable,
    largest_error: float, round_ms: float, calls: int = 1,
) -> tuple[dict, Timing | None, dict[str, float], dict[str, str]]:  # fmt: skip
    """Capture the candidates in CUDA graphs, check the candidates and time the graphs in interleaved rounds.

    A wrong result of ours ends the run.

    Args:
        bench: the run.
        name: name of the case.
        makers: functions that return the attention function of a candidate, by the candidate's name.
        error_of: function that returns the error of an output.
        once: function that takes an attention function and makes a complete call.
        largest_error: largest allowed error of ours.
        round_ms: time per candidate and round.
        calls: number of calls in each graph.

    Returns:
        The timings of a single call, the timing of WITHOUT_FEATURE (separately), the errors, and the reasons of
        refusals.
    """
    candidates, errors, refused = {}, {}, {}
    for peer, make in makers.items():
        scope = baselines.ours("fa3") if peer.startswith("ours") else baselines.plugin_off
        try:
            with scope():
                attend = make()
                with torch.no_grad():
                    out = attend()
                    if peer != WITHOUT_FEATURE:
                        errors[peer] = error_of(out)
                candidates[peer] = graphed(Candidate(partial(once, attend), scope), calls)
        except Exception as reason:  # any exception is noted as a refusal, and the remaining candidates are measured
            refused[peer] = refusal(reason)
            if "CUDA error" in refused[peer]:
                raise SystemExit(f"{name}: {peer}: {reason}") from reason
    ours = {"ours_fa3": math.inf} | {peer: error for peer, error in errors.items() if peer.startswith("ours")}
    if not all(error <= largest_error for error in ours.values()):
        raise SystemExit(f"{name}: wrong, nothing is timed: {errors}, {refused}")
    timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=round_ms)
    timings = {peer: Timing(tuple(ms / calls for ms in t.rounds)) for peer, t in timings.items()}
    refused.pop(WITHOUT_FEATURE, None)
    return timings, timings.pop(WITHOUT_FEATURE, None), errors, refused
