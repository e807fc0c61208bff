"""Benchmark of this project's kernels against every importable peer.

A peer is a baseline of a different library, or stock PyTorch. All candidates run in a single process, in interleaved
rounds. The results are a JSON file, a table and a picture.

    --suite forward          ours and peers over head dim, mask and length; results are checked before timing
    --suite headdims         like forward, for head dims outside the grid
    --suite latency          short and small calls, replayed from a CUDA graph
    --suite backward         gradients of one forward call, ours and peers over head dim, mask and length
    --suite train            like backward, with the forward call
    --suite decode           decode: few query rows against many keys, with K and V in memory, then in L2
    --suite fa2              kernels for every GPU since sm_80, forced, against torch's FlashAttention-2; also gradients
    --suite masks            bool masks by pattern, head dim and length, passed as users do; forward, then training
    --suite dropout          dropout of 0.1 by head dim, mask and length; forward, then training
    --suite eightbit         8-bit attention by recipe, kernels alone and complete calls, against 16 bits and FA3's FP8
    --suite accuracy         errors of 8-bit attention against fp64 by recipe and input, with FA3's FP8 and 8-bit caches
    --suite maskdecode       decode with KV caches that are partly masked by a bool mask
    --suite cache8           one query row against 8-bit KV caches, compared with the project's 16-bit decode
    --suite ragged           packed sequences; forward, then training; against torch's varlen and the FlashAttention
                             wheels
    --suite window           sliding windows by size and length; forward, then training
    --suite softcap          capped scores; forward, then training
    --suite sinks            sinks with and without a window; forward, then training
    --suite paged            one query row against a paged KV cache, compared with FA3, FlashInfer and decode of
                             contiguous caches
    --suite blocks           FlexAttention's block masks by pattern and length; forward, then training
    --suite multi            all GPUs of the host: context_parallel by length and rotation, Ulysses, blocks of DTensors
    --suite host             host time per call, and everyday calls in auto mode against stock
    --suite choice | grad    ours (forced) against the default of stock, forward | forward + backward: the source of the
                             ChoiceRows in torch_flashplug/registry/dispatch_table.py
    --suite grouped          forward + backward of grouped heads with few keys, ours (forced) against the default of
                             stock, replayed from a CUDA graph: with few KV blocks, SMs are idle
    --suite odd              like choice and grad, for calls that the Hopper kernels cannot read, on the kernels for
                             every GPU (fa2, forced); forward, then forward + backward

A benchmark is not a test: an error ends the run only if a result is wrong or an option is invalid.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tools.bench import baselines, ranks, report, workloads
from tools.bench.result_schema import GRADIENT_FLOP
from tools.bench.runner import Bench, auto_plan_of, facts_of, graphed, row_of, try_each
from tools.bench.suites import (
    accuracy,
    blocks,
    cached_decode,
    decode,
    dropout,
    eightbit,
    masked_decode,
    masks,
    multi_gpu,
    paged,
    varlen_window,
)
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


def _suite_of_gradients(bench: Bench, cases: list[Case], what: str) -> None:
    """Time the gradients of the calls: "bwd" excludes the forward call, and "train" includes the forward call."""
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

        names = [name for name in bench.providers if name not in baselines.SLOW | baselines.FORWARD_ONLY]
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
    "ragged": varlen_window.suite_ragged,
    "window": varlen_window.suite_window,
    "softcap": varlen_window.suite_softcap,
    "sinks": varlen_window.suite_sinks,
    "paged": paged.suite_paged,
    "blocks": blocks.suite_blocks,
    "multi": multi_gpu.suite_multi,
    "host": suite_host,
    "choice": suite_choice,
    "grad": suite_grad,
    "grouped": suite_grouped,
    "odd": suite_odd,
}


# Providers of each suite, unless --providers is passed. A suite without an entry uses all providers except ours_fa2.
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
    **{suite: varlen_window.WANTED for suite in ("ragged", "window", "softcap", "sinks")},
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument(
        "--rounds", type=int, default=7, help="interleaved rounds per case; at least 7 for results that are kept"
    )
    parser.add_argument("--filter", default="", help="comma-separated texts: run only cases with a text in the name")
    parser.add_argument(
        "--providers", default="", help="comma-separated providers (default: all that can be imported)"
    )
    parser.add_argument(
        "--out", type=Path, default=report.ROOT / "tools" / "results", help="folder of the JSON file and the PNG"
    )
    parser.add_argument("--budget-seconds", type=float, default=540.0, help="start no case after this time")
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with fp64 before timing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default="", help="commit name in the results (default: git describe)")
    return parser.parse_args()


def main() -> None:
    options = _options()
    if options.rounds < 7:
        print(f"--rounds {options.rounds}: fewer than 7 rounds say little. Use at least 7 for results that are kept.")
    if options.suite == "multi":
        ranks.start(options.device)
    clocks = report.read_clocks()
    names = set(options.providers.split(",")) if options.providers else WANTED.get(options.suite)
    found, absent = baselines.providers(names)
    deadline = time.monotonic() + options.budget_seconds
    bench = Bench(options.device, options.rounds, deadline, options.filter, not options.no_check, found, absent)
    # sdpa_kernel warns once per reason if a peer has no kernel. The rows already note such peers as "refused".
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        SUITES[options.suite](bench)
    num_ranks = ranks.end() if options.suite == "multi" else 1
    document = report.header(options.suite, clocks, options.commit or report.commit())
    document["gpu"] += f" x{num_ranks}" * (num_ranks > 1)
    document["clocks"]["under_load"] = bench.clocks
    document |= {"rounds": options.rounds, "absent": absent, "skipped": bench.skipped, "rows": bench.rows}
    if not bench.rows:
        raise SystemExit(
            f"suite {options.suite} measured no case: either no case name contains {options.filter!r}, or "
            f"--budget-seconds {options.budget_seconds} is too short"
        )
    console = Console(width=180)
    report.print_table(document, console)
    if options.suite in {"choice", "grad"}:
        report.print_classes(document, console)
    written = report.write_json(document, options.out)
    print("wrote", written)
    if picture := report.plot(document, baselines.labels(), written.with_suffix(".png")):
        print("wrote", picture)


if __name__ == "__main__":
    main()
