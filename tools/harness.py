"""What every suite of a benchmark shares: a run's state, who can run a case, the JSON form of what was measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import providers as who
import report
import torch
from records import OURS, PLAIN
from torch import Tensor

from torch_flashplug.testing import (
    Candidate,
    Case,
    Inputs,
    Timing,
    captured,
    measure_error,
    oracle,
    paired_ratio,
    plain,
    time_interleaved,
)

MASKED_ROUND_MS = 10.0  # of what is beside a mask or dropout


@dataclass(slots=True)
class Bench:
    """One run: its options, who takes part, and what it has measured so far."""

    device: str
    rounds: int
    deadline: float
    wanted: str
    check: bool
    providers: dict[str, who.Provider]
    absent: dict[str, str]
    rows: list[dict[str, object]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    clocks: list[dict[str, str]] = field(default_factory=list)
    last_clocks: float = 0.0

    def take(self, name: str) -> bool:
        """Whether a case of that name is to be measured; notes the reason when time is up."""
        if not any(part in name for part in self.wanted.split(",")):
            return False
        if time.monotonic() > self.deadline:
            self.skipped[name] = "the time given with --budget-seconds is used up"
            return False
        return True

    def add(self, row: dict[str, object]) -> None:
        self.rows.append(row)
        ratio = row["ratio"]
        print(f"[{len(self.rows)}] {row['case']}: ratio {'-' if ratio is None else format(ratio, '.3f')}", flush=True)
        if time.monotonic() - self.last_clocks > 10:  # clocks under load, now and then: the query itself takes time
            self.clocks.append(report.read_clocks())
            self.last_clocks = time.monotonic()


def row_of(name: str, timings: dict[str, object], **more) -> dict[str, object]:
    """The JSON form of one case: ours, peers, ratio of the best peer to ours (paired over rounds), spreads."""
    ours = next((n for n in OURS if n in timings), None)
    one_order = {n.removesuffix(who.ONE_ORDER): t for n, t in timings.items() if n.endswith(who.ONE_ORDER)}
    peers = {n: t for n, t in timings.items() if n not in OURS and not n.endswith(who.ONE_ORDER)}
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
    return str(who.torch_flashplug.explain(*inputs, **case.sdpa_kwargs()).backend)


def _check_numbers(case: Case, inputs: Inputs, provider: who.Provider) -> dict[str, float]:
    """Errors of a provider's first heads against fp64. Ours beyond the budget ends the run; a peer's are only told."""
    group = case.Hq // case.Hkv
    few = Inputs(inputs.q[:1, :group], inputs.k[:1, :1], inputs.v[:1, :1], inputs.grad_out[:1, :group])
    with provider.scope(), torch.no_grad():
        got = provider.attend(*inputs, **case.sdpa_kwargs())[:1, :group]
    exact, low = oracle(case, few), plain(case, few)
    errors = measure_error(got, exact.out, low.out)
    if provider.ours and not errors.ok:
        raise SystemExit(f"{case.name}: {provider.name} is wrong, nothing is timed: {errors}")
    return {"max": errors.max, "rms": errors.rms}


def refusal(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {(str(error) or '-').splitlines()[0][:160]}"


def try_each(
    bench: Bench, case: Case, inputs: Inputs, names: Iterable[str], build: Callable
) -> tuple[dict, dict, dict]:
    """Candidates that can run the case (`build(provider)` makes one call), their errors, and why the others cannot."""
    candidates, errors, refused = {}, {}, {}
    for name in names:
        provider = bench.providers.get(name)
        if provider is None:
            continue
        call = build(provider)
        try:
            with provider.scope():
                call()
            if bench.check:
                errors[name] = _check_numbers(case, inputs, provider)
            candidates[name] = Candidate(call, provider.scope)
        # Every peer refuses a call in its own way: what one raises is noted, and the others are still measured.
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
            refused[name] = refusal(error)
            if "CUDA error" in refused[name]:  # the context is gone: nothing measured after it would mean anything
                raise SystemExit(f"{case.name}: {name}: {error}") from error
            if provider.ours:
                print(f"{case.name}: {name} refused: {refused[name]}")
    return candidates, errors, refused


def time_calls(
    bench: Bench, name: str, calls: Mapping[str, Candidate], wrong_in: Callable[[str], str | None]
) -> tuple[dict, dict[str, str], dict[str, str]]:
    """Timings of the calls that can run, what `wrong_in`, which makes one of its own, has against a peer's numbers, and
    why the others cannot. Ours being wrong ends the run.
    """
    candidates, wrong, refused = {}, {}, {}
    for peer, candidate in calls.items():
        try:
            with candidate.scope():
                if bench.check and (error := wrong_in(peer)):
                    wrong[peer] = error
                candidate.call()
        # What cannot run is noted, and the others are measured.
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


def whole_call(what: str, leaves: Sequence[Tensor], grad_out: Tensor, attend: Callable[[], Tensor]) -> object:
    """what: "fwd", or "train", gradients too."""
    if what == "fwd":
        with torch.no_grad():
            return attend()
    return torch.autograd.grad(attend(), leaves, grad_out)


def race(  # noqa: PLR0913
    bench: Bench, name: str, makers: Mapping[str, Callable], *, error_of: Callable, once: Callable,
    largest_error: float, round_ms: float, calls: int = 1,
) -> tuple[dict, Timing | None, dict[str, float], dict[str, str]]:  # fmt: skip
    """What `makers` make of a case, by name, as graphs of so many calls, interleaved: timings of one call, PLAIN's by
    itself, errors by `error_of` its output, and why others cannot. `once` makes a whole call of what was made. Ours
    being wrong ends the run.
    """
    candidates, errors, refused = {}, {}, {}
    for racer, make in makers.items():
        scope = who.ours("fa3") if racer.startswith("ours") else who.plugin_off
        try:
            with scope():
                attend = make()
                with torch.no_grad():
                    out = attend()
                    if racer != PLAIN:
                        errors[racer] = error_of(out)
                candidates[racer] = graphed(Candidate(partial(once, attend), scope), calls)
        except Exception as reason:  # what cannot run is noted, whatever it raises, and the others are measured
            refused[racer] = refusal(reason)
            if "CUDA error" in refused[racer]:
                raise SystemExit(f"{name}: {racer}: {reason}") from reason
    ours = {"ours_fa3": math.inf} | {racer: error for racer, error in errors.items() if racer.startswith("ours")}
    if not all(error <= largest_error for error in ours.values()):
        raise SystemExit(f"{name}: wrong, nothing is timed: {errors}, {refused}")
    timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=round_ms)
    timings = {racer: Timing(tuple(ms / calls for ms in t.rounds)) for racer, t in timings.items()}
    refused.pop(PLAIN, None)
    return timings, timings.pop(PLAIN, None), errors, refused
