"""Dense suites: calls without a mask tensor and with equal lengths, over head dim, causal mask and length.

The suites compare forward calls, gradients and training steps with every peer. Further suites measure host time, and
the classes of calls of the dispatch table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.nn.functional as F

from tools.bench import baselines, workloads
from tools.bench.result_schema import GRADIENT_FLOP, UNGROUPED
from tools.bench.runner import Bench, auto_plan_of, call_of, facts_of, gradient_check, graphed, row_of, try_each
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry.architectures import BACKENDS
from torch_flashplug.testing import (
    Candidate,
    Case,
    Inputs,
    Timing,
    make_inputs,
    time_host,
    time_interleaved,
)
from torch_flashplug.torch_hooks import describe_call

GRAPH_CALLS, GRAPH_MS = 10, 2.0  # number of calls in one CUDA graph, reduced if the calls would take more than GRAPH_MS
# Time per candidate and round, after an equal time that is not measured: power limits take effect within some 10 ms.
ROUND_MS = 20.0


def _tiles(case: Case, inputs: Inputs, ours: str) -> int:
    """Return the number of tiles for the case, in the kernel of `ours` ("ours_fa3" or "ours_fa2").

    `ChoiceRow.min_tiles` is a lower bound of this number.
    """
    facts = bindings.device_facts(inputs.q.device.index) if inputs.q.is_cuda else bindings.NO_DEVICE
    call = describe_call.describe(*inputs, None, 0.0, case.causal, case.scale)
    return bindings.plan(call, facts, BACKENDS.index(ours.removeprefix("ours_")))["tiles"]


def _suite_of_forwards(bench: Bench, cases: list[Case]) -> None:
    """Time all candidates on each case.

    On a GPU only the device time is measured, with replayed CUDA graphs. Suite host measures host time, and the host
    code of some peers takes longer than the kernels of these peers.
    """
    for case in cases:
        if not bench.take(case.name):
            continue
        inputs = make_inputs(case, bench.device)

        def build(provider, inputs=inputs, case=case):
            return lambda: provider.attend(*inputs, **case.sdpa_kwargs())

        with torch.no_grad():
            # The accumulation order matters only for gradients, so the deterministic providers are left out.
            timed = set(bench.providers) - baselines.SLOW
            names = [name for name in bench.providers if name in timed and not name.endswith(baselines.ONE_ORDER)]
            candidates, errors, refused = try_each(bench, case, inputs, names, build)
            calls = 1
            if bench.device == "cuda":
                calls = max(1, min(GRAPH_CALLS, int(GRAPH_MS / workloads.bound_ms(case))))
                candidates = {name: graphed(candidate, calls) for name, candidate in candidates.items()}
            timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
            timings = {name: Timing(tuple(ms / calls for ms in t.rounds)) for name, t in timings.items()}
        more = {"errors": errors, "refused": refused, "auto_plan": auto_plan_of(inputs, case)}
        bench.add(row_of(case.name, timings, **facts_of(case), bound_ms=workloads.bound_ms(case), **more))


def suite_forward(bench: Bench) -> None:
    _suite_of_forwards(bench, workloads.grid("fwd"))


def suite_headdims(bench: Bench) -> None:
    _suite_of_forwards(bench, workloads.head_dims())


def suite_latency(bench: Bench) -> None:
    _suite_of_forwards(bench, workloads.latency())


def _suite_against_stock(
    bench: Bench, cases: list[Case], grad: bool, ours: str = "ours_fa3", replayed: bool = False
) -> None:
    """Time the kernels of `ours` against stock on each case.

    Calls are made eagerly, as users do, or (`replayed`) from a CUDA graph, which excludes the host time.
    """
    for case in cases:
        if not bench.take(case.name):
            continue
        inputs = make_inputs(case, bench.device, requires_grad=grad)

        def build(provider, inputs=inputs, case=case):
            def call():
                out = provider.attend(*inputs, **case.sdpa_kwargs())
                return torch.autograd.grad(out, tuple(inputs), inputs.grad_out) if grad else out

            return call

        with torch.set_grad_enabled(grad):
            candidates, errors, refused = try_each(bench, case, inputs, (ours, "stock"), build)
            if replayed and bench.device == "cuda":
                candidates = {name: graphed(candidate, 1) for name, candidate in candidates.items()}
            timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=5.0)
        more = {"errors": errors, "refused": refused, "tiles": _tiles(case, inputs, ours), "grad": grad}
        bench.add(row_of(case.name, timings, **facts_of(case), **more))


def suite_choice(bench: Bench) -> None:
    _suite_against_stock(bench, workloads.choice_lattice(), grad=False)


def suite_grad(bench: Bench) -> None:
    _suite_against_stock(bench, workloads.choice_lattice(), grad=True)


def suite_grouped(bench: Bench) -> None:
    _suite_against_stock(bench, workloads.grouped_lattice(), grad=True, replayed=True)


def suite_odd(bench: Bench) -> None:
    for grad in (False, True):
        _suite_against_stock(bench, workloads.odd_lattice(), grad, ours="ours_fa2")


def _suite_of_gradients(bench: Bench, cases: list[Case], direction: str) -> None:
    """Time the gradients of the calls: "bwd" excludes the forward call, and "train" includes the forward call."""
    for case in cases:
        if not bench.take(case.name):
            continue
        inputs = make_inputs(case, bench.device, requires_grad=True)

        def build(provider, inputs=inputs, case=case):
            kept = []

            def call():
                out = kept[0] if kept else provider.attend(*inputs, **case.sdpa_kwargs())
                if direction == "bwd" and not kept:
                    kept.append(out)
                return torch.autograd.grad(out, tuple(inputs), inputs.grad_out, retain_graph=direction == "bwd")

            return call

        names = [name for name in bench.providers if name not in baselines.SLOW | baselines.FORWARD_ONLY]
        candidates, errors, refused = try_each(bench, case, inputs, names, build)
        timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
        facts = facts_of(case) | {"flop": GRADIENT_FLOP[direction] * case.flop}
        bench.add(row_of(case.name, timings, **facts, errors=errors, refused=refused))


def suite_backward(bench: Bench) -> None:
    _suite_of_gradients(bench, workloads.grid("bwd"), "bwd")


def suite_train(bench: Bench) -> None:
    _suite_of_gradients(bench, workloads.grid("train"), "train")


def _trained(bench: Bench, case: Case, names: list[str]) -> tuple[dict, dict, dict]:
    """Return the candidates, errors and refusals of forward and backward, with checked gradients."""
    inputs = make_inputs(case, bench.device, requires_grad=True)
    check = gradient_check(case, inputs) if bench.check else None
    return try_each(bench, case, inputs, names, partial(call_of, case, inputs, "train"), check)


def suite_groups(bench: Bench) -> None:
    """Time forward and backward of grouped heads, and ours with as many KV heads as query heads."""
    for large in workloads.groups():
        case = workloads.size_for(large, bench.device)
        if not bench.take(case.name):
            continue
        # Wheels without a backward refuse, and the row notes the reason.
        candidates, errors, refused = _trained(bench, case, list(bench.providers))
        ungrouped, _, _ = _trained(bench, workloads.ungrouped(case), ["ours_fa3"])  # a refusal is printed
        if ungrouped:
            candidates[UNGROUPED] = ungrouped["ours_fa3"]
        timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
        spread = {name: round(timing.spread, 4) for name, timing in timings.items()}
        ungrouped_ms = timings.pop(UNGROUPED).ms if ungrouped else None
        facts = facts_of(case) | {"flop": GRADIENT_FLOP["train"] * case.flop}
        row = row_of(case.name, timings, **facts, errors=errors, refused=refused)
        bench.add(row | {"spread": spread, "ungrouped_ms": ungrouped_ms})


def suite_fa2(bench: Bench) -> None:
    dims = (64, 96, 128, 256)
    _suite_of_forwards(bench, workloads.grid("fa2_fwd", dims))
    _suite_of_gradients(bench, workloads.grid("fa2_bwd", dims), "bwd")


@contextmanager
def _both(*scopes) -> Iterator[None]:
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope())
        yield


def _host_rows(bench: Bench) -> None:
    """Measure the host time of calls with a negligible kernel time.

    Masked calls with more than 64 rows also include the mask preprocessing.
    """
    modes = {
        "no_grad": (torch.no_grad, workloads.TINY, ""),
        "inference_mode": (torch.inference_mode, workloads.TINY, ""),
        "grad_forward": (torch.enable_grad, workloads.TINY, ""),
        "decode": (torch.no_grad, workloads.TINY_DECODE, ""),
        "masked": (torch.no_grad, workloads.TINY, "bool_mask"),
        "masked_grad_forward": (torch.enable_grad, workloads.TINY, "bool_mask"),
    }
    for mode, (scope, case, extra) in modes.items():
        if not bench.take(f"host_{mode}"):
            continue
        inputs = make_inputs(case, bench.device, requires_grad=mode.endswith("grad_forward"))
        kwargs = case.sdpa_kwargs() | workloads.extra_arguments(extra, case, bench.device)
        call = partial(F.scaled_dot_product_attention, *inputs, **kwargs)

        candidates = {
            name: Candidate(call, lambda scope=scope, name=name: _both(bench.providers[name].scope, scope))
            for name in ("ours_fa3", "ours_auto", "stock")
            if name in bench.providers and not (extra and name == "ours_fa3")
        }
        timings = time_host(candidates, rounds=max(15, bench.rounds), device=bench.device)
        plan = str(baselines.torch_flashplug.explain(*inputs, **kwargs).backend)
        bench.add(row_of(f"host_{mode}", timings, **facts_of(case), kind="host", auto_plan=plan))


def _everyday_rows(bench: Bench) -> None:
    """Measure the time that a user waits for, with the plugin in auto mode and without the plugin."""
    for everyday in workloads.EVERYDAY:
        if not bench.take(everyday.name):
            continue
        call = everyday.build(bench.device)
        names = [name for name in ("ours_auto", "stock") if name in bench.providers]
        candidates = {name: Candidate(call, bench.providers[name].scope) for name in names}
        timings = time_interleaved(candidates, rounds=max(15, bench.rounds), device=bench.device, round_ms=8.0)
        bench.add(row_of(everyday.name, timings, **facts_of(everyday.case), kind="everyday", grad=everyday.grad))


def suite_host(bench: Bench) -> None:
    _host_rows(bench)
    _everyday_rows(bench)
