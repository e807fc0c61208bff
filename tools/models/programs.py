"""Test of unmodified transformers models (program_models.py) without and with the plugin.

    python tools/models/programs.py                         every program; writes programs-<gpu>.json
    python tools/models/programs.py --device cpu --quick    on the CPU stub backend

Each process runs a model without and with the plugin, in both orders. The results are compared with stock alone in a
fresh process. The reference is the same model with equal weights in fp32, with the math backend for attention. An error
is the relative L2 distance to the reference over all SEEDS batches at once: sqrt(sum |x - ref|^2 / sum |ref|^2).

    forward    logits (or last hidden states) of all rows except padding
    greedy     logits of every step of generate(). Generation follows the tokens of the reference, because a single
               different token would change all later tokens. `tokens_*` counts the argmaxes that differ from the
               argmaxes of the reference.
    train      gradients of the loss, of each matrix and of all vectors as a single tensor. (The gradient of a bias
               mostly cancels, and would be noise alone.) `error_*` is the error of the worst tensor. `mean_*` is the
               root mean square over all tensors with equal weights, because embeddings have large gradients and
               attention has small gradients.

A row violates the limit if an error with the plugin exceeds BAR times the error of stock alone. The row also has the
error of stock's math backend in 16 bits, for comparison with the plain formula. Weights, inputs and all remaining ops
are equal on all sides. So errors differ only by the rounding of attention, averaged over the SEEDS batches.

A tensor with an error of stock alone above NOISE is not counted on any side. The rows list the wrong tensors of both
sides as `wrong_stock` and `wrong_ours`.

The calls that share a process decide the contents of cuDNN's plan cache. So each pair (order, program) has a separate
process, and compiled scenarios run in different processes than eager scenarios. Times are measured last, by a single
process with exclusive use of the GPU. Then growing_cache.py times caches that grow by one key per token. A time above
0.3 ms is a violation.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch
import transformers
from rich.console import Console
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tools.bench import report, result_schema
from tools.models import growing_cache, program_models
from tools.models.program_models import PROGRAMS, SCENARIOS, CallRecorder, Record, Scenario, Squares, Task
from tools.models.program_table import print_table, totals, violations
from torch_flashplug import env
from torch_flashplug.demo.scopes import Scope, plugin_off
from torch_flashplug.dispatch import bindings
from torch_flashplug.testing import Candidate, paired_ratio, time_interleaved

NOISE = 0.3
ORDERS = ("stock_first", "plugin_first")
SECONDS = 300  # time limit of a child process

Reference = list[dict[str, Tensor]]  # one dict for each batch


# ---- code of a child process ----


def _reference(task: Task, exact: nn.Module, scenario: Scenario) -> Reference:
    """Return the fp32 results of a scenario. A scenario with dropout has no reference."""
    if scenario.dropout:
        return []
    batches = (task.batch(exact, scenario, seed).cast(torch.float32) for seed in task.seeds(scenario))
    with sdpa_kernel(SDPBackend.MATH):
        return [program_models.run(exact, scenario, batch) for batch in batches]


def _examine(task: Task, model: nn.Module, scenario: Scenario, reference: Reference, watch: bool) -> Record:
    torch._dynamo.reset()  # a graph keeps the attention that it was traced with
    backend = "inductor" if task.device == "cuda" else "aot_eager"
    program = torch.compile(model, backend=backend, dynamic=False) if scenario.compiled else model
    total: Squares = {}
    record: Record = {"squares": total}
    for seed in task.seeds(scenario):
        batch = task.batch(model, scenario, seed)
        expected = reference[seed] if reference else {}
        follow = expected["output"].argmax(-1) if scenario.kind == "greedy" else None
        watched = watch and seed == 0
        recorder = CallRecorder("" if task.device == "cuda" else "h100")
        if watched:
            bindings.counters(reset=True)
        with recorder if watched and not scenario.compiled else nullcontext():
            got = program_models.run(program, scenario, batch, follow)
        if watched:
            paths = bindings.counters()
            record |= {"served": paths["ours_fwd"]} if scenario.compiled else recorder.record()
            record["backwards"] = {path: n for path, n in paths.items() if path.endswith("_bwd") and n}
        for name, pair in program_models.squares(got, expected).items():
            total[name] = [a + b for a, b in zip(total.get(name, (0.0, 0.0)), pair, strict=True)]
        if follow is not None:
            record |= {"tokens": got["output"].argmax(-1).flatten().tolist(), "wanted": follow.flatten().tolist()}
    return record


def examine(task: Task, sides: Mapping[str, Scope]) -> Iterator[Record]:
    """Yield a record for each side and scenario.

    All scenarios of the first side come first, and then all scenarios of the second side. A failed scenario also yields
    a record.
    """
    model = PROGRAMS[task.program].build(task.device)
    exact = copy.deepcopy(model).float()
    reference = functools.cache(functools.partial(_reference, task, exact))
    for side, scope in sides.items():
        for name, scenario in ((name, SCENARIOS[name]) for name in task.scenarios):
            model.train(scenario.dropout)
            try:
                expected = reference(dataclasses.replace(scenario, compiled=False))
                with scope():
                    record = _examine(task, model, scenario, expected, watch=side == "ours")
            except Exception as error:
                record = {"failed": f"{type(error).__name__}: {error}"[:600]}
                model.zero_grad()
            yield {"scenario": name, "side": side} | record


def _clock(task: Task, model: nn.Module, scenario: Scenario, sides: Mapping[str, Scope]) -> Record:
    """Return the times of a scenario, of the attention calls alone, and of stock on the calls served by the plugin."""
    call = functools.partial(program_models.run, model, scenario, task.batch(model, scenario, 0))
    # The host is slower than the GPU, and the speed of the host drifts. So single calls are timed in many rounds, and
    # the median of the ratios counts.
    limits = {"rounds": 7 if scenario.kind == "greedy" else 21, "min_calls": 1, "max_calls": 1, "warmup": 1}
    times = time_interleaved({side: Candidate(call, scope) for side, scope in sides.items()}, **limits)
    with CallRecorder("") as recorder:
        call()
    keys = [(program_models.call_key(arguments), served) for arguments, served in recorder.calls]
    kinds = collections.Counter(keys)
    arguments_by_kind = {key: arguments for key, (arguments, _) in zip(keys, recorder.calls, strict=True)}
    record = {f"{side}_ms": timing.ms for side, timing in times.items()}
    record |= {"ours_over_stock": paired_ratio(times["ours"], times["stock"])}
    record |= {"spread": max(timing.spread for timing in times.values())}
    record |= dict.fromkeys(("attention_stock_ms", "attention_ours_ms", "attention_stock_ms_served"), 0.0)
    for kind, count in kinds.items():
        for side, scope in sides.items():
            with scope():
                ms = count * program_models.attention_ms(arguments_by_kind[kind], grad=scenario.kind == "train")
            record[f"attention_{side}_ms"] += ms
            record["attention_stock_ms_served"] += ms * (kind[1] and side == "stock")
    return record


def measure(task: Task, sides: Mapping[str, Scope]) -> Iterator[Record]:
    model = PROGRAMS[task.program].build(task.device)
    for name, scenario in ((name, SCENARIOS[name]) for name in task.scenarios if name in program_models.TIMED):
        try:
            record = _clock(task, model, scenario, sides)
        except Exception as error:
            record = {"failed": f"{type(error).__name__}: {error}"[:600]}
        yield {"scenario": name, "side": "times"} | record


def _sides(mode: str, device: str, stack: ExitStack) -> dict[str, Scope]:
    """Return the scopes for stock and for the plugin in this process, in the order of the mode."""
    if mode == "alone":  # TORCH_FLASHPLUG=0: the plugin was never loaded
        return {"stock": nullcontext, "math": functools.partial(sdpa_kernel, SDPBackend.MATH)}
    off: Scope = plugin_off
    if device == "cpu":
        sys.path.insert(0, str(report.ROOT / "test" / "helpers"))
        from device_backend import use_device_backend

        off = stack.enter_context(use_device_backend("cpu")).disabled
    sides = {"stock": off, "ours": nullcontext}
    return dict(reversed(sides.items())) if mode == "plugin_first" else sides


def child(tasks: Sequence[Task], out: Path) -> None:
    """Run tasks in a child process, and write each record immediately, so that a crash loses no earlier record."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.backends.cudnn.allow_tf32 = False  # full fp32 in convolutions of the reference
    do = measure if tasks[0].mode == "times" else examine
    with ExitStack() as stack, out.open("a") as lines:
        sides = _sides(tasks[0].mode, tasks[0].device, stack)
        for task in tasks:
            try:
                for record in do(task, sides):
                    print(json.dumps({"program": task.program, **record}), file=lines, flush=True)
            except LookupError as missing:
                print(json.dumps({"program": task.program, "absent": str(missing)}), file=lines, flush=True)


# ---- code of the parent process ----


def start(tasks: Sequence[Task], threads: int, until: float, gpu: int = 0) -> list[Record]:
    """Run tasks in a new process, and return the records.

    If the process failed or exceeded the time limit, a further record describes the failure.
    """
    began, mode, why = time.monotonic(), tasks[0].mode, ""
    seconds = max(1.0, min(SECONDS, until - began))
    flags = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    flags |= {env.ENABLED.name: "0"} if mode == "alone" else {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "records"
        out.touch()
        command = [sys.executable, __file__, "--child", json.dumps([dataclasses.asdict(task) for task in tasks])]
        try:
            done = subprocess.run([*command, "--out", out, "--gpu", str(gpu)], env=os.environ | flags, timeout=seconds,
                                  capture_output=True, text=True, check=False)  # fmt: skip
            why = f"exit {done.returncode}: {done.stderr.strip()[-400:]}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            why = f"no end after {seconds:.0f} s"
        records = [json.loads(line) for line in out.read_text().splitlines() if line[-1] == "}"]
    status = why or next((record["absent"] for record in records if "absent" in record), f"{len(records)} records")
    more = " ..." * (len(tasks) > 1)
    print(f"{time.monotonic() - began:4.0f} s  {tasks[0].program}{more} {mode}: {status}", flush=True)
    program = records[-1]["program"] if records else tasks[0].program
    return [*records, {"program": program, "scenario": "*", "side": mode, "failed": why}] if why else records


def _error(pair: Sequence[float]) -> float:
    error = math.sqrt(pair[0] / pair[1]) if pair[1] else 0.0
    return math.inf if math.isnan(error) else error


def _apart(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x != y for x, y in zip(a, b, strict=True))


def _counted(alone: Squares) -> list[str]:
    """Return the names of the tensors that stock alone computes right, or of all nonzero tensors if none is right."""
    nonzero = [name for name, pair in alone.items() if pair[1]]
    return [name for name in nonzero if _error(alone[name]) <= NOISE] or nonzero


def new_row(program: str, order: str, alone: Record, stock: Record, ours: Record, low: Record | None = None) -> Record:
    """Return the report row of a scenario in one order.

    Args:
        program: the name of the program.
        order: the order of stock and plugin in the process.
        alone: the record of stock in a fresh process.
        stock: the record of stock in the process shared with the plugin.
        ours: the record of the plugin.
        low: the record of stock's math backend in the fresh process, or None if not measured.
    """
    row: Record = {"program": program, "scenario": ours["scenario"], "order": order}
    names = _counted(alone["squares"])
    sides = {"stock": alone, "ours": ours, "stock_here": stock} | ({"math": low} if low else {})
    for label, record in sides.items():
        errors = {name: _error(record["squares"][name]) for name in names}
        if errors:
            row[f"error_{label}"] = max(errors.values())
        if len(alone["squares"]) > 1:
            row[f"mean_{label}"] = math.sqrt(statistics.fmean(error * error for error in errors.values()))
            row[f"worst_{label}"] = max(errors, key=errors.__getitem__)
        if "wanted" in record:
            row[f"tokens_{label}"] = _apart(record["tokens"], record["wanted"])
    if "tokens" in ours:
        row["tokens_apart"] = _apart(ours["tokens"], alone["tokens"])
    for label, record in (("stock", alone), ("ours", ours)):
        if wrong := [name for name, pair in record["squares"].items() if _error(pair) > NOISE]:
            row[f"wrong_{label}"] = wrong
    return row | {name: ours[name] for name in ("dims", "calls", "served", "backwards", "reasons") if name in ours}


def assemble(records: Mapping[str, Mapping[str, list[Record]]], orders: Sequence[str]) -> Record:
    """Collect rows, absent programs and failures from the records.

    Args:
        records: the records by program and mode.
        orders: the orders of the run.
    """
    document: Record = {"rows": [], "absent": {}, "failed": []}
    for program, modes in records.items():
        by_key = {}
        for mode, record in ((mode, record) for mode, mode_records in modes.items() for record in mode_records):
            if "absent" in record:
                document["absent"][program] = record["absent"]
            elif "failed" in record:
                document["failed"].append({"order": mode} | record)
            else:
                by_key[mode, record["scenario"], record["side"]] = record
        for name, order in ((name, order) for name in PROGRAMS[program].scenarios for order in orders):
            keys = (("alone", name, "stock"), (order, name, "stock"), (order, name, "ours"))
            if any(key not in by_key for key in keys):
                continue
            row = new_row(program, order, *(by_key[key] for key in keys), by_key.get(("alone", name, "math")))
            if SCENARIOS[name].compiled:  # the eager scenario made equal calls, which could be recorded
                twin = by_key.get((order, name.removeprefix("compiled_"), "ours"), {})
                row |= {"dims": twin.get("dims", ""), "calls": twin.get("calls", row["served"])}
                row["reasons"] = {"compiled: a graph gives no reasons": row["calls"] - row["served"]}
            timed = by_key.get(("times", name, "times"), {})
            document["rows"].append(row | times_of(timed))
    return document


def times_of(timed: Record) -> Record:
    return {key: value for key, value in timed.items() if "_ms" in key or key in ("ours_over_stock", "spread")}


def run_all(options: argparse.Namespace, programs: Sequence[str], orders: Sequence[str]) -> Record:
    """Run all child processes. Compiled scenarios take longest and start first. Times are measured last."""
    asked = options.scenarios.split(",") if options.scenarios else list(SCENARIOS)
    tasks = [
        Task(mode, program, names, options.device, options.quick)
        for compiled in (True, False)
        for program in programs
        for names in [tuple(s for s in PROGRAMS[program].scenarios if s in asked and SCENARIOS[s].compiled == compiled)]
        for mode in ("alone", *orders)
        if names
    ]
    records: dict[str, dict[str, list[Record]]] = {program: collections.defaultdict(list) for program in programs}
    threads, until = max(1, (os.cpu_count() or 1) // options.workers), time.monotonic() + options.seconds
    gpus = itertools.cycle(range(max(1, torch.cuda.device_count())))
    with ThreadPoolExecutor(options.workers) as pool:
        done = pool.map(lambda task, gpu: start([task], threads, until, gpu), tasks, gpus)
        for task, task_records in zip(tasks, done, strict=True):
            records[task.program][task.mode] += task_records
    eager = [task for task in tasks if task.mode == "alone" and not SCENARIOS[task.scenarios[0]].compiled]
    if eager and options.device == "cuda" and not options.no_times:
        for record in start([dataclasses.replace(task, mode="times") for task in eager], threads, until):
            records[record["program"]]["times"].append(record)
    document = assemble(records, orders)
    if options.device == "cuda" and not options.no_times:
        document["growing"] = growing_cache.run_in_new_process()
    return document


def time_again(document: Record, programs: Sequence[str], seconds: float) -> Record:
    """Return the document of an earlier run with newly measured times.

    A row has no times if the new run measured none. `errors_of` names the run that measured the errors.
    """
    scenarios = {program: dict.fromkeys(row["scenario"] for row in document["rows"] if row["program"] == program)
                 for program in programs}  # fmt: skip
    tasks = [Task("times", program, tuple(names), "cuda", False) for program, names in scenarios.items() if names]
    records = {
        (record["program"], record.get("scenario")): record for record in start(tasks, 1, time.monotonic() + seconds)
    }
    rows = []
    for row in document["rows"]:
        old = times_of(row) if row["program"] in scenarios else {}
        kept = {name: entry for name, entry in row.items() if name not in old}
        rows.append(kept | times_of(records.get((row["program"], row["scenario"]), {})))
    failed = [record for record in records.values() if "failed" in record]
    errors = document.get("errors_of") or {name: document[name] for name in ("commit", "date", "gpu", "command")}
    again = {"errors_of": errors, "rows": rows, "absent": document["absent"], "growing": document.get("growing", [])}
    return again | {"failed": document["failed"] + failed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated programs (default all)")
    parser.add_argument("--orders", default=",".join(ORDERS))
    parser.add_argument("--scenarios", default="", help="comma-separated scenarios (default all)")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=report.ROOT / "tools" / "results")
    parser.add_argument("--quick", action="store_true", help="short sequences and one batch: errors are noisy")
    parser.add_argument("--no-times", action="store_true", help="measure errors and served calls, but no times")
    parser.add_argument("--again", type=Path, help="JSON of an earlier run: measure only the times of the rows again")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time limit: later processes count as failed")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--gpu", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        tasks = [Task(**fields | {"scenarios": tuple(fields["scenarios"])}) for fields in json.loads(options.child)]
        if torch.cuda.is_available():
            torch.cuda.set_device(options.gpu)
        child(tasks, options.out)
        return 0
    programs, orders = options.only.split(",") if options.only else list(PROGRAMS), options.orders.split(",")
    unknown = {*programs, *orders, *filter(None, options.scenarios.split(","))} - {*PROGRAMS, *ORDERS, *SCENARIOS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    clocks = report.read_clocks()
    if options.again:
        results = time_again(result_schema.read(options.again), programs, options.seconds)
    else:
        results = run_all(options, programs, orders)
    document = report.header("programs", clocks, report.commit()) | {"transformers": transformers.__version__}
    wrong = violations(results["rows"]) + growing_cache.violations(results.get("growing", []))
    document |= {"violations": wrong, "totals": totals(results["rows"])} | results
    print_table(document, Console(width=200))
    print("wrote", report.write_json(document, options.out))
    return 1 if document["violations"] or document["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
