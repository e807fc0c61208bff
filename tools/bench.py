"""Times our kernels beside every importable peer, in one process, in interleaved rounds; writes JSON, a table and a
picture.

    --suite forward          ours and peers over head dim, mask and length; numbers are checked first
    --suite headdims         the same for head dims beside the grid's
    --suite latency          short and small calls, replayed from a CUDA graph
    --suite backward         gradients of one forward, ours and peers over head dim, mask and length
    --suite train            the same with the forward
    --suite host             host time per call, and everyday calls in auto mode against stock
    --suite choice | grad    ours (forced) against stock's default, forward | forward + backward: what the ChoiceRows of
                             torch_flashplug/choices.py are filled from

A benchmark is not a test: it ends with an error only when numbers are wrong or an option is.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import providers as who
import report
import torch
import torch.nn.functional as F
import workloads
from rich.console import Console

from torch_flashplug import native
from torch_flashplug.configs import KERNEL_ROWS
from torch_flashplug.spec import BACKENDS, KernelSpec
from torch_flashplug.testing import (
    Candidate,
    Case,
    Inputs,
    Timing,
    captured,
    make_inputs,
    measure_error,
    oracle,
    paired_ratio,
    plain,
    time_host,
    time_interleaved,
)

OURS = ("ours_fa3", "ours_auto")
GRAPH_CALLS, GRAPH_MS = 10, 2.0  # calls in one CUDA graph: so many, fewer where they would take longer than this
ROUND_MS = 20.0  # of one candidate in one round, after as much of it untimed: power limits act within some 10 ms


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


def _row(name: str, timings: dict[str, object], **more) -> dict[str, object]:
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


def _facts(case: Case) -> dict[str, object]:
    return {
        "shape": [case.B, case.Hq, case.Hkv, case.Sq, case.Sk, case.D, case.Dv],
        "d": max(case.D, case.Dv),
        "s": case.Sq,
        "mask": "causal" if case.causal else "full",
        "dtype": case.dtype,
        "flop": case.flop,
    }


def _tiles(case: Case, device: str) -> int:
    """B * Hq * ceil(Sq / tile_m) of the kernel that would take the case: the number that ChoiceRow.min_tiles bounds."""
    sizes = {size: getattr(case, size) for size in ("B", "Hq", "Hkv", "Sq", "Sk", "D", "Dv")}
    facts = native.device_facts(torch.device(device).index or 0) if device == "cuda" else native.NO_DEVICE
    kernel = native.plan(sizes | {"causal": int(case.causal)}, facts, BACKENDS.index("fa3"))["kernel"]
    return case.B * case.Hq * -(-case.Sq // KernelSpec.from_name(kernel).tile_m) if kernel else 0


def _auto_plan(inputs: Inputs, case: Case) -> str:
    if who.torch_flashplug is None:
        return "-"
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


def _try_each(
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
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
            refused[name] = f"{type(error).__name__}: {(str(error) or '-').splitlines()[0][:160]}"
            if "CUDA error" in refused[name]:  # the context is gone: nothing measured after it would mean anything
                raise SystemExit(f"{case.name}: {name}: {error}") from error
            if provider.ours:
                print(f"{case.name}: {name} refused: {refused[name]}")
    return candidates, errors, refused


def _suite_of_forwards(bench: Bench, cases: list[Case]) -> None:
    """Ours and peers on each case; on a GPU device time alone, from replayed CUDA graphs: hosts are the business of
    suite host, and some peers' take longer than their kernels.
    """
    for case in cases:
        if not bench.take(case.name):
            continue
        inputs = make_inputs(case, bench.device)

        def build(provider, inputs=inputs, case=case):
            return lambda: provider.attend(*inputs, **case.sdpa_kwargs())

        with torch.no_grad():
            # Math and efficient are never near the front; the order of sums matters to gradients only.
            slow = {"math", "efficient"}
            names = [name for name in bench.providers if name not in slow and not name.endswith(who.ONE_ORDER)]
            candidates, errors, refused = _try_each(bench, case, inputs, names, build)
            calls = 1
            if bench.device == "cuda":
                calls = max(1, min(GRAPH_CALLS, int(GRAPH_MS / workloads.bound_ms(case))))
                candidates = {name: _graphed(candidate, calls) for name, candidate in candidates.items()}
            timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
            timings = {name: Timing(tuple(ms / calls for ms in t.rounds)) for name, t in timings.items()}
        more = {"errors": errors, "refused": refused, "auto_plan": _auto_plan(inputs, case)}
        bench.add(_row(case.name, timings, **_facts(case), bound_ms=workloads.bound_ms(case), **more))


def _graphed(candidate: Candidate, calls: int) -> Candidate:
    with candidate.scope():
        return Candidate(captured(candidate.call, calls))


def suite_forward(bench: Bench) -> None:
    _suite_of_forwards(bench, workloads.grid("fwd"))


def suite_headdims(bench: Bench) -> None:
    _suite_of_forwards(bench, workloads.head_dims())


def suite_latency(bench: Bench) -> None:
    _suite_of_forwards(bench, workloads.latency())


def _suite_against_stock(bench: Bench, grad: bool) -> None:
    ours_to = max(row.d_max for row in KERNEL_ROWS if (row.kind == "fwd") != grad)
    for case in workloads.choice_lattice():
        if max(case.D, case.Dv) > ours_to or not bench.take(case.name):
            continue
        inputs = make_inputs(case, bench.device, requires_grad=grad)

        def build(provider, inputs=inputs, case=case):
            def call():
                out = provider.attend(*inputs, **case.sdpa_kwargs())
                return torch.autograd.grad(out, tuple(inputs), inputs.grad_out) if grad else out

            return call

        with torch.set_grad_enabled(grad):
            candidates, errors, refused = _try_each(bench, case, inputs, ("ours_fa3", "stock"), build)
            timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=5.0)
        more = {"errors": errors, "refused": refused, "tiles": _tiles(case, bench.device)}
        bench.add(_row(case.name, timings, **_facts(case), **more))


def suite_choice(bench: Bench) -> None:
    _suite_against_stock(bench, grad=False)


def suite_grad(bench: Bench) -> None:
    _suite_against_stock(bench, grad=True)


# FLOP of a backward and of both together, over the forward's: five and seven products where that has two.
_GRADIENT_FLOP = {"bwd": 2.5, "train": 3.5}


def _suite_of_gradients(bench: Bench, what: str) -> None:
    """Gradients of the grid's calls: "bwd" alone, of one forward, or "train", both."""
    for case in workloads.grid(what):
        if not bench.take(case.name):
            continue
        inputs = make_inputs(case, bench.device, requires_grad=True)

        def build(provider, inputs=inputs, case=case):
            kept = []

            def call():
                out = kept[0] if kept else provider.attend(*inputs, **case.sdpa_kwargs())
                if what == "bwd" and not kept:
                    kept.append(out)
                return torch.autograd.grad(out, tuple(inputs), inputs.grad_out, retain_graph=what == "bwd")

            return call

        names = [name for name in bench.providers if name not in {"math", "efficient", "fa3"}]  # slow; forward only
        candidates, errors, refused = _try_each(bench, case, inputs, names, build)
        timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
        facts = _facts(case) | {"flop": _GRADIENT_FLOP[what] * case.flop}
        bench.add(_row(case.name, timings, **facts, errors=errors, refused=refused))


def suite_backward(bench: Bench) -> None:
    _suite_of_gradients(bench, "bwd")


def suite_train(bench: Bench) -> None:
    _suite_of_gradients(bench, "train")


@contextmanager
def _both(*scopes) -> Iterator[None]:
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope())
        yield


def _host_rows(bench: Bench) -> None:
    """Host time of a call whose kernel takes no time to speak of."""
    modes = {
        "no_grad": (torch.no_grad, False),
        "inference_mode": (torch.inference_mode, False),
        "grad_forward": (torch.enable_grad, True),
    }
    for mode, (scope, requires_grad) in modes.items():
        if not bench.take(f"host_{mode}"):
            continue
        inputs = make_inputs(workloads.TINY, bench.device, requires_grad=requires_grad)
        q, k, v = inputs

        def call(q=q, k=k, v=v):
            return F.scaled_dot_product_attention(q, k, v)

        candidates = {
            name: Candidate(call, lambda scope=scope, name=name: _both(bench.providers[name].scope, scope))
            for name in ("ours_fa3", "ours_auto", "stock")
            if name in bench.providers
        }
        timings = time_host(candidates, rounds=max(15, bench.rounds), device=bench.device)
        plan = _auto_plan(inputs, workloads.TINY)
        bench.add(_row(f"host_{mode}", timings, **_facts(workloads.TINY), kind="host", auto_plan=plan))


def _everyday_rows(bench: Bench) -> None:
    """What a user waits for, with the plugin on auto and without it."""
    for everyday in workloads.EVERYDAY:
        if not bench.take(everyday.name):
            continue
        call = everyday.build(bench.device)
        names = [name for name in ("ours_auto", "stock") if name in bench.providers]
        candidates = {name: Candidate(call, bench.providers[name].scope) for name in names}
        timings = time_interleaved(candidates, rounds=max(15, bench.rounds), device=bench.device, round_ms=8.0)
        bench.add(_row(everyday.name, timings, **_facts(everyday.case), kind="everyday", grad=everyday.grad))


def suite_host(bench: Bench) -> None:
    _host_rows(bench)
    _everyday_rows(bench)


SUITES = {
    "forward": suite_forward,
    "headdims": suite_headdims,
    "latency": suite_latency,
    "backward": suite_backward,
    "train": suite_train,
    "host": suite_host,
    "choice": suite_choice,
    "grad": suite_grad,
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument(
        "--rounds", type=int, default=7, help="interleaved rounds per case; at least 7 for results that are kept"
    )
    parser.add_argument("--filter", default="", help="only cases whose name contains one of these, separated by commas")
    parser.add_argument(
        "--providers", default="", help="only these, separated by commas (default: all that can be imported)"
    )
    parser.add_argument(
        "--out", type=Path, default=report.ROOT / "tools" / "results", help="folder of the JSON file and the PNG"
    )
    parser.add_argument("--budget-seconds", type=float, default=540.0, help="start no case after this time")
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with fp64 before timing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default="", help="commit to note (default: git describe)")
    return parser.parse_args()


def main() -> None:
    options = _options()
    if options.rounds < 7:
        print(f"--rounds {options.rounds}: fewer than 7 rounds say little; fine for a try, not for a result")
    clocks = report.read_clocks()
    wanted = set(options.providers.split(",")) if options.providers else None
    found, absent = who.providers(wanted)
    deadline = time.monotonic() + options.budget_seconds
    bench = Bench(options.device, options.rounds, deadline, options.filter, not options.no_check, found, absent)
    with warnings.catch_warnings():  # sdpa_kernel warns once per reason where a peer has no kernel; rows say "refused"
        warnings.simplefilter("ignore", UserWarning)
        SUITES[options.suite](bench)
    document = report.header(options.suite, clocks, options.commit or report.commit())
    document["clocks"]["under_load"] = bench.clocks
    document |= {"rounds": options.rounds, "absent": absent, "skipped": bench.skipped, "rows": bench.rows}
    if not bench.rows:
        raise SystemExit(f"no case of suite {options.suite} has {options.filter!r} in its name, or no time was given")
    console = Console(width=180)
    report.print_table(document, console)
    if options.suite in {"choice", "grad"}:
        report.print_classes(document, console)
    print("wrote", report.write_json(document, options.out))
    picture = report.plot(document, {name: provider.label for name, provider in found.items()}, options.out)
    if picture:
        print("wrote", picture)


if __name__ == "__main__":
    main()
