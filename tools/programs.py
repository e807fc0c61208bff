"""Runs unmodified models of transformers (program_models.py) without the plugin and with it, in both orders of one
process, and holds what comes out against stock run alone in a fresh process.

    python tools/programs.py    every program; writes programs-<gpu>.json (--device cpu --quick: on test/standin.py)

The reference is the same model with the same weights in fp32, attention by math in fp32. Errors are relative L2
distances to it, over all batches (SEEDS of them) at once: sqrt(sum |x - ref|^2 / sum |ref|^2).

    forward    logits (or last hidden states) of the rows that are no padding
    greedy     logits of every step of generate(), led along the reference's own tokens, so that one token chosen
               otherwise does not change all that follow; tokens_*: argmaxes that differ from the reference's
    train      gradients of the loss: of each matrix, and of all vectors as one (what a bias gets mostly cancels; alone
               it would be noise). `error_*` is the worst one's, `mean_*` the root mean square over them: all weigh the
               same, for embeddings have the large gradients and attention is in the small ones

A row violates the bar where an error with the plugin exceeds BAR times that of stock alone; that of stock's math in 16
bits, the formula's own, is told beside it. Weights, inputs and all other ops are equal on all sides, so errors differ
by attention's rounding alone, averaged over the SEEDS batches.
What stock alone has wrong by more than NOISE counts on neither side; both sides' are told: `wrong_stock`, `wrong_ours`.
Who shares a process decides what cuDNN's plan cache remembers, so each (order, program) has a process of its own, and
compiled scenarios another than eager ones. Times are taken last, by one process that has the GPU for itself; then
tools/growing.py times caches that grow by one key per token, which violate the bar beyond 0.3 ms.
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

import growing
import program_models
import records
import report
import torch
import transformers
from program_models import PROGRAMS, SCENARIOS, Record, Scenario, Squares, Task, Witness
from program_table import print_table, totals, violations
from rich.console import Console
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_flashplug import env
from torch_flashplug.demo.scopes import Scope, plugin_off
from torch_flashplug.dispatch import bindings
from torch_flashplug.testing import Candidate, paired_ratio, time_interleaved

NOISE = 0.3
ORDERS = ("stock_first", "plugin_first")
SECONDS = 300  # that one child may take

Reference = list[dict[str, Tensor]]  # by batch


# ---- in one process ----


def _reference(task: Task, exact: nn.Module, scenario: Scenario) -> Reference:
    """What a scenario gives in fp32. Dropout has none."""
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
        wanted = reference[seed] if reference else {}
        follow = wanted["output"].argmax(-1) if scenario.kind == "greedy" else None
        watched = watch and seed == 0
        witness = Witness("" if task.device == "cuda" else "h100")
        if watched:
            bindings.counters(reset=True)
        with witness if watched and not scenario.compiled else nullcontext():
            got = program_models.run(program, scenario, batch, follow)
        if watched:
            paths = bindings.counters()
            record |= {"served": paths["ours_fwd"]} if scenario.compiled else witness.record()
            record["backwards"] = {path: n for path, n in paths.items() if path.endswith("_bwd") and n}
        for name, pair in program_models.squares(got, wanted).items():
            total[name] = [a + b for a, b in zip(total.get(name, (0.0, 0.0)), pair, strict=True)]
        if follow is not None:
            record |= {"tokens": got["output"].argmax(-1).flatten().tolist(), "wanted": follow.flatten().tolist()}
    return record


def examine(task: Task, sides: Mapping[str, Scope]) -> Iterator[Record]:
    """One record a side and scenario: all scenarios of the first side, then those of the second. One that fails is a
    record like any other.
    """
    model = PROGRAMS[task.program].build(task.device)
    exact = copy.deepcopy(model).float()
    reference = functools.cache(functools.partial(_reference, task, exact))
    for side, scope in sides.items():
        for name, scenario in ((name, SCENARIOS[name]) for name in task.scenarios):
            model.train(scenario.dropout)
            try:
                wanted = reference(dataclasses.replace(scenario, compiled=False))
                with scope():
                    record = _examine(task, model, scenario, wanted, watch=side == "ours")
            except Exception as error:
                record = {"failed": f"{type(error).__name__}: {error}"[:600]}
                model.zero_grad()
            yield {"scenario": name, "side": side} | record


def _clock(task: Task, model: nn.Module, scenario: Scenario, sides: Mapping[str, Scope]) -> Record:
    """Times of a scenario, and of its attention by itself; of that, stock's time for what we serve."""
    call = functools.partial(program_models.run, model, scenario, task.batch(model, scenario, 0))
    # The host is the slower side, and its speed drifts: single calls, many rounds, the median of their ratios.
    limits = {"rounds": 7 if scenario.kind == "greedy" else 21, "min_calls": 1, "max_calls": 1, "warmup": 1}
    times = time_interleaved({side: Candidate(call, scope) for side, scope in sides.items()}, **limits)
    with Witness("") as witness:
        call()
    kinds = collections.Counter((program_models.call_key(arguments), served) for arguments, served in witness.calls)
    found = {(program_models.call_key(arguments), served): arguments for arguments, served in witness.calls}
    record = {f"{side}_ms": timing.ms for side, timing in times.items()}
    record |= {"ours_over_stock": paired_ratio(times["ours"], times["stock"])}
    record |= {"spread": max(timing.spread for timing in times.values())}
    record |= dict.fromkeys(("attention_stock_ms", "attention_ours_ms", "attention_stock_ms_served"), 0.0)
    for kind, count in kinds.items():
        for side, scope in sides.items():
            with scope():
                ms = count * program_models.attention_ms(found[kind], grad=scenario.kind == "train")
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
    """How this process gets at stock and at the plugin, in the order in which it is to."""
    if mode == "alone":  # TORCH_FLASHPLUG=0: the plugin was never there
        return {"stock": nullcontext, "math": functools.partial(sdpa_kernel, SDPBackend.MATH)}
    off: Scope = plugin_off
    if device == "cpu":
        sys.path.insert(0, str(report.ROOT / "test"))
        from standin import road_to

        off = stack.enter_context(road_to("cpu")).off
    sides = {"stock": off, "ours": nullcontext}
    return dict(reversed(sides.items())) if mode == "plugin_first" else sides


def child(tasks: Sequence[Task], out: Path) -> None:
    """Writes a line as soon as it is known: a process that dies keeps what it found."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.backends.cudnn.allow_tf32 = False  # convolutions of the reference are fp32
    do = measure if tasks[0].mode == "times" else examine
    with ExitStack() as stack, out.open("a") as lines:
        sides = _sides(tasks[0].mode, tasks[0].device, stack)
        for task in tasks:
            try:
                for record in do(task, sides):
                    print(json.dumps({"program": task.program, **record}), file=lines, flush=True)
            except LookupError as missing:
                print(json.dumps({"program": task.program, "absent": str(missing)}), file=lines, flush=True)


# ---- in all of them ----


def start(tasks: Sequence[Task], threads: int, until: float, gpu: int = 0) -> list[Record]:
    """Runs tasks in a new process; their records, and one more if it did not end well, or there was no time left."""
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
    said = why or next((record["absent"] for record in records if "absent" in record), f"{len(records)} records")
    more = " ..." * (len(tasks) > 1)
    print(f"{time.monotonic() - began:4.0f} s  {tasks[0].program}{more} {mode}: {said}", flush=True)
    program = records[-1]["program"] if records else tasks[0].program
    return [*records, {"program": program, "scenario": "*", "side": mode, "failed": why}] if why else records


def _error(pair: Sequence[float]) -> float:
    error = math.sqrt(pair[0] / pair[1]) if pair[1] else 0.0
    return math.inf if math.isnan(error) else error


def _apart(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x != y for x, y in zip(a, b, strict=True))


def _counted(alone: Squares) -> list[str]:
    """What stock alone has right; where that is nothing, all."""
    nonzero = [name for name, pair in alone.items() if pair[1]]
    return [name for name in nonzero if _error(alone[name]) <= NOISE] or nonzero


def new_row(program: str, order: str, alone: Record, stock: Record, ours: Record, low: Record | None = None) -> Record:
    """One line of the report: a scenario in one order. `alone` is stock in a fresh process, `low` its math there (None:
    not asked), `stock` is stock in this process.
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
    """Rows, absent programs and failures from the records, by program and mode."""
    document: Record = {"rows": [], "absent": {}, "failed": []}
    for program, modes in records.items():
        told = {}
        for mode, record in ((mode, record) for mode, found in modes.items() for record in found):
            if "absent" in record:
                document["absent"][program] = record["absent"]
            elif "failed" in record:
                document["failed"].append({"order": mode} | record)
            else:
                told[mode, record["scenario"], record["side"]] = record
        for name, order in ((name, order) for name in PROGRAMS[program].scenarios for order in orders):
            wanted = (("alone", name, "stock"), (order, name, "stock"), (order, name, "ours"))
            if any(key not in told for key in wanted):
                continue
            row = new_row(program, order, *(told[key] for key in wanted), told.get(("alone", name, "math")))
            if SCENARIOS[name].compiled:  # its eager twin made the same calls where they could be seen
                twin = told.get((order, name.removeprefix("compiled_"), "ours"), {})
                row |= {"dims": twin.get("dims", ""), "calls": twin.get("calls", row["served"])}
                row["reasons"] = {"compiled: a graph gives no reasons": row["calls"] - row["served"]}
            timed = told.get(("times", name, "times"), {})
            document["rows"].append(row | times_of(timed))
    return document


def times_of(timed: Record) -> Record:
    return {key: value for key, value in timed.items() if "_ms" in key or key in ("ours_over_stock", "spread")}


def run_all(options: argparse.Namespace, programs: Sequence[str], orders: Sequence[str]) -> Record:
    """Starts every child, those that compile first (they take longest), times last."""
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
        for task, found in zip(tasks, done, strict=True):
            records[task.program][task.mode] += found
    eager = [task for task in tasks if task.mode == "alone" and not SCENARIOS[task.scenarios[0]].compiled]
    if eager and options.device == "cuda" and not options.no_times:
        for record in start([dataclasses.replace(task, mode="times") for task in eager], threads, until):
            records[record["program"]]["times"].append(record)
    document = assemble(records, orders)
    if options.device == "cuda" and not options.no_times:
        document["growing"] = growing.in_own_process()
    return document


def time_again(document: Record, programs: Sequence[str], seconds: float) -> Record:
    """An earlier run's, with new times in its rows: none where none were found. Whose the errors are is said apart."""
    scenarios = {program: dict.fromkeys(row["scenario"] for row in document["rows"] if row["program"] == program)
                 for program in programs}  # fmt: skip
    tasks = [Task("times", program, tuple(names), "cuda", False) for program, names in scenarios.items() if names]
    found = {
        (record["program"], record.get("scenario")): record for record in start(tasks, 1, time.monotonic() + seconds)
    }
    rows = []
    for row in document["rows"]:
        old = times_of(row) if row["program"] in scenarios else {}
        kept = {name: entry for name, entry in row.items() if name not in old}
        rows.append(kept | times_of(found.get((row["program"], row["scenario"]), {})))
    failed = [record for record in found.values() if "failed" in record]
    errors = document.get("errors_of") or {name: document[name] for name in ("commit", "date", "gpu", "command")}
    again = {"errors_of": errors, "rows": rows, "absent": document["absent"], "growing": document.get("growing", [])}
    return again | {"failed": document["failed"] + failed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="these programs, separated by commas")
    parser.add_argument("--orders", default=",".join(ORDERS))
    parser.add_argument("--scenarios", default="", help="these, separated by commas")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=report.ROOT / "tools" / "results")
    parser.add_argument("--quick", action="store_true", help="short texts, one batch: errors are noisy")
    parser.add_argument("--no-times", action="store_true", help="errors and who served what, nothing else")
    parser.add_argument("--again", type=Path, help="an earlier run's JSON: the times of its rows alone, taken again")
    parser.add_argument("--seconds", type=float, default=3600.0, help="what has not ended by then is told as failed")
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
        found = time_again(records.read(options.again), programs, options.seconds)
    else:
        found = run_all(options, programs, orders)
    document = report.header("programs", clocks, report.commit()) | {"transformers": transformers.__version__}
    wrong = violations(found["rows"]) + growing.violations(found.get("growing", []))
    document |= {"violations": wrong, "totals": totals(found["rows"])} | found
    print_table(document, Console(width=200))
    print("wrote", report.write_json(document, options.out))
    return 1 if document["violations"] or document["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
