"""Times our kernels beside every importable peer, in one process, in interleaved rounds; writes JSON, a table and a
picture.

    --suite forward          ours and peers over head dim, mask and length; numbers are checked first
    --suite headdims         the same for head dims beside the grid's
    --suite latency          short and small calls, replayed from a CUDA graph
    --suite backward         gradients of one forward, ours and peers over head dim, mask and length
    --suite train            the same with the forward
    --suite decode           few query rows against many keys, K and V from memory, then from L2
    --suite fa2              the kernels for every GPU since sm_80, forced, beside torch's FlashAttention-2: both ways
    --suite masks            bool masks by pattern, head dim and length, as users pass them, forward, then both
    --suite dropout          dropout of 0.1 by head dim, mask and length, forward, then both
    --suite eightbit         8-bit attention by recipe: kernels alone and whole calls, beside 16 bits and FA3's FP8
    --suite accuracy         errors of 8-bit attention against fp64 by recipe and input, beside FA3's FP8 and caches
    --suite maskdecode       few query rows against caches that a bool mask hides parts of
    --suite cache8           one query row against caches in 8 bits, beside our own decode of 16
    --suite ragged           sequences of different lengths on end, forward, then both, beside torch's varlen and the
                             FlashAttention wheels'
    --suite window           sliding windows by size and length, forward, then both
    --suite softcap          capped scores, forward, then both
    --suite sinks            sinks with and without a window, forward, then both
    --suite paged            one query row against keys in pages, beside FA3, FlashInfer and our decode of rows on end
    --suite blocks           FlexAttention's block masks by pattern and length, forward, then both
    --suite multi            all GPUs of the host: context_parallel by length and rotation, Ulysses, blocks of DTensors
    --suite host             host time per call, and everyday calls in auto mode against stock
    --suite choice | grad    ours (forced) against stock's default, forward | forward + backward: what the ChoiceRows of
                             torch_flashplug/registry/dispatch_table.py are filled from
    --suite grouped          forward + backward of grouped heads with few keys, ours (forced) against stock's default,
                             replayed from a CUDA graph: where few blocks of keys leave SMs idle
    --suite odd              the same for calls that Hopper's kernels cannot read, on those for every GPU (fa2, forced),
                             forward, then forward + backward

A benchmark is not a test: it ends with an error only when numbers are wrong or an option is.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import accuracy
import blocks
import cached_decode
import decode
import dropout
import eightbit
import in_step
import masked_decode
import masks
import multi
import paged_decode
import providers as who
import report
import torch
import torch.nn.functional as F
import windows
import workloads
from harness import Bench, auto_plan_of, facts_of, graphed, row_of, try_each
from records import GRADIENT_FLOP
from rich.console import Console

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

GRAPH_CALLS, GRAPH_MS = 10, 2.0  # calls in one CUDA graph: so many, fewer where they would take longer than this
ROUND_MS = 20.0  # of one candidate in one round, after as much of it untimed: power limits act within some 10 ms


def _tiles(case: Case, inputs: Inputs, ours: str) -> int:
    """Tiles of the kernel of `ours` ("ours_fa3", "ours_fa2") that would take the case: the number that
    ChoiceRow.min_tiles bounds.
    """
    facts = bindings.device_facts(inputs.q.device.index) if inputs.q.is_cuda else bindings.NO_DEVICE
    call = describe_call.describe(*inputs, None, 0.0, case.causal, case.scale)
    return bindings.plan(call, facts, BACKENDS.index(ours.removeprefix("ours_")))["tiles"]


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
            # The order of sums matters to gradients only.
            names = [name for name in bench.providers if name not in who.SLOW and not name.endswith(who.ONE_ORDER)]
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
    """As the user makes the calls, or replayed from a CUDA graph, where no host is waited for."""
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


def _suite_of_gradients(bench: Bench, cases: list[Case], what: str) -> None:
    """Gradients of the calls: "bwd" alone, of one forward, or "train", both."""
    for case in cases:
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

        names = [name for name in bench.providers if name not in who.SLOW | who.FORWARD_ONLY]
        candidates, errors, refused = try_each(bench, case, inputs, names, build)
        timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
        facts = facts_of(case) | {"flop": GRADIENT_FLOP[what] * case.flop}
        bench.add(row_of(case.name, timings, **facts, errors=errors, refused=refused))


def suite_backward(bench: Bench) -> None:
    _suite_of_gradients(bench, workloads.grid("bwd"), "bwd")


def suite_train(bench: Bench) -> None:
    _suite_of_gradients(bench, workloads.grid("train"), "train")


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
    """Host time of a call whose kernel takes no time to speak of; masked ones, of more than 64 rows, digest too."""
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
        plan = str(who.torch_flashplug.explain(*inputs, **kwargs).backend)
        bench.add(row_of(f"host_{mode}", timings, **facts_of(case), kind="host", auto_plan=plan))


def _everyday_rows(bench: Bench) -> None:
    """What a user waits for, with the plugin on auto and without it."""
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


SUITES = {
    "forward": suite_forward,
    "headdims": suite_headdims,
    "latency": suite_latency,
    "backward": suite_backward,
    "train": suite_train,
    "decode": decode.suite_decode,
    "fa2": suite_fa2,
    "masks": masks.suite_masks,
    "dropout": dropout.suite_dropout,
    "eightbit": eightbit.suite_eightbit,
    "accuracy": accuracy.suite_accuracy,
    "maskdecode": masked_decode.suite_maskdecode,
    "cache8": cached_decode.suite_cache8,
    "ragged": windows.suite_ragged,
    "window": windows.suite_window,
    "softcap": windows.suite_softcap,
    "sinks": windows.suite_sinks,
    "paged": paged_decode.suite_paged,
    "blocks": blocks.suite_blocks,
    "multi": multi.suite_multi,
    "host": suite_host,
    "choice": suite_choice,
    "grad": suite_grad,
    "grouped": suite_grouped,
    "odd": suite_odd,
}


# Who takes part unless --providers says so; in other suites all but ours_fa2.
WANTED = {
    "fa2": {"ours_fa2", "fa2"},
    "grouped": {"ours_fa3", "stock"},
    "odd": {"ours_fa2", "stock"},
    "masks": {"ours_fa3", "ours_auto", "ours_tall", "stock", "efficient", "flex", "flex_flash"},
    "dropout": {"ours_fa3", "stock", "cudnn", "fa2", "efficient"},
    "maskdecode": set(masked_decode.MASKED),
    "eightbit": {"ours_fa3", "fa3"},
    "accuracy": {"ours_fa3", "fa3"},
    "cache8": {"ours_fa2", "ours_fa3"},
    "paged": {"ours_fa2", "ours_fa3", "fa3"},
    "blocks": {"ours_fa3", "stock", "flex"},
    "multi": {"ours_auto", "stock"},
    **{suite: windows.WANTED for suite in ("ragged", "window", "softcap", "sinks")},
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
    if options.suite == "multi":
        in_step.start(options.device)
    clocks = report.read_clocks()
    found, absent = who.providers(set(options.providers.split(",")) if options.providers else WANTED.get(options.suite))
    deadline = time.monotonic() + options.budget_seconds
    bench = Bench(options.device, options.rounds, deadline, options.filter, not options.no_check, found, absent)
    with warnings.catch_warnings():  # sdpa_kernel warns once per reason where a peer has no kernel; rows say "refused"
        warnings.simplefilter("ignore", UserWarning)
        SUITES[options.suite](bench)
    ranks = in_step.end() if options.suite == "multi" else 1
    document = report.header(options.suite, clocks, options.commit or report.commit())
    document["gpu"] += f" x{ranks}" * (ranks > 1)
    document["clocks"]["under_load"] = bench.clocks
    document |= {"rounds": options.rounds, "absent": absent, "skipped": bench.skipped, "rows": bench.rows}
    if not bench.rows:
        raise SystemExit(f"no case of suite {options.suite} has {options.filter!r} in its name, or no time was given")
    console = Console(width=180)
    report.print_table(document, console)
    if options.suite in {"choice", "grad"}:
        report.print_classes(document, console)
    written = report.write_json(document, options.out)
    print("wrote", written)
    if picture := report.plot(document, who.labels(), written.with_suffix(".png")):
        print("wrote", picture)


if __name__ == "__main__":
    main()
