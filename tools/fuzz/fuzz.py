"""Fuzzer: seeded random calls of F.scaled_dot_product_attention, compared with fp64, with the plugin in each mode.

    python tools/fuzz/fuzz.py SECONDS SEED [--modes auto,fa3,fa2] [--calls N] [--workers W] [--only KIND,...]
    python tools/fuzz/fuzz.py 0 SEED --call INDEX [--modes auto]      a single call, with all details
    python tools/fuzz/fuzz.py SECONDS SEED --device interpreted       our kernels without a GPU (interpreter)

This module starts the worker processes and records the results. Any worker may die at any call. calls.py defines the
calls, and check.py checks each call. The exit code is 1 if there are findings of ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch_flashplug
from tools.bench import report
from tools.fuzz import calls as fuzz_calls
from tools.fuzz import tensors as fuzz_tensors
from tools.fuzz.check import INTERPRETED, Outcome, answer, check, in_mode, is_stock_fault, operands, plugin_on, settings
from torch_flashplug import env
from torch_flashplug.registry.quant_recipes import RECIPES

DEVICES = {"cuda": "cuda", "cpu": "cpu", INTERPRETED: "cpu"}  # device names of torch
WORK = {"cuda": 1 << 29, "cpu": 1 << 20, INTERPRETED: 1 << 25}  # multiply-adds of the two matrix products of a call
BLOCK = 8  # calls sent to a worker at a time
# Limits in seconds: a worker without progress, a worker before the first call, a call repeated in a separate process.
STALL, START, ALONE = 60.0, 180.0, 90.0
GRACE = 25.0  # seconds reserved at the end of a run to repeat the calls of findings
AT_ONCE = 3  # repeated calls that run at the same time
REPEATED = 3  # number of findings of equal kind, mode and status that are repeated: alone in a process, and on stock
MODES = ("auto", "fa3", "fa2")  # 8-bit recipes (quant_recipes.py) are additional modes, if named with --modes
CACHED = 1 << 30  # bytes that a worker may keep between calls: neighboring workers also need GPU memory
SHORT = 200  # characters of the description kept for a known fault


# ---- workers ----


def work(conn: Connection, device: str, seed: int, number: int) -> None:
    """Run a worker process: receive blocks {index: modes}, and report the start and the outcome of each call.

    The process ends after a call that raised an exception. The CUDA context may be dead then, and stock keeps the state
    of the failure.
    """
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())
    with plugin_on(device) as off:
        conn.send(None)
        while True:
            for index, modes in conn.recv().items():
                conn.send((index, modes[0], None))
                tensors = fuzz_tensors.make_tensors(fuzz_calls.draw(seed, index, WORK[device]), DEVICES[device])
                answers = answer(tensors)
                for mode in modes:
                    conn.send((index, mode, None))
                    outcome = check(tensors, answers, mode, off)
                    conn.send((index, mode, outcome))
                    if outcome.status == "raised":
                        os._exit(1)
                del tensors, answers
                if device == "cuda" and torch.cuda.memory_reserved() > CACHED:
                    torch.cuda.empty_cache()


@dataclass(slots=True)
class Worker:
    """Worker process, as the parent process sees the worker."""

    process: multiprocessing.process.BaseProcess
    conn: Connection
    number: int
    remaining: dict[int, list[str]] = field(default_factory=dict)  # calls of the current block that are not done
    current: tuple[int, str] | None = None
    deadline: float = field(default_factory=lambda: time.monotonic() + START)  # deadline for the next message


def start_worker(device: str, seed: int, number: int) -> Worker:
    """Start worker number `number`. Workers are assigned to the GPUs in round-robin order."""
    context = multiprocessing.get_context("spawn")
    parent_conn, worker_conn = context.Pipe()
    process = context.Process(target=work, args=(worker_conn, device, seed, number), daemon=True)
    process.start()
    worker_conn.close()
    return Worker(process, parent_conn, number)


@dataclass(slots=True)
class Repetition:
    """Repetition of a finding's call in a separate process, in the same mode or on stock without the plugin."""

    finding: dict[str, object]  # the finding that receives the answer, under the key `name`
    name: str
    command: list[str]
    process: subprocess.Popen | None = None
    until: float = 0.0

    def start(self) -> None:
        environment = os.environ | ({env.ENABLED.name: "0"} if self.name == "stock" else {})
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(self.command, env=environment, **pipes)
        self.until = time.monotonic() + ALONE

    def is_done(self) -> bool:
        if self.process.poll() is None:
            if late := time.monotonic() > self.until:
                self.process.kill()
                self.finding[self.name] = "hang"
            return late
        lines = self.process.communicate()[0].splitlines()
        ended = f"exit status {self.process.returncode}"
        outcome = next((json.loads(line) for line in reversed(lines) if line.startswith('{"status"')), None)
        if outcome is None:
            self.finding[self.name] = f"crash, {ended}: {' '.join(lines)[-300:]}"
        else:
            self.finding[self.name] = f"{outcome['status']} {outcome['detail'][:300]}".strip()
            self.finding[self.name] += "" if self.process.returncode in {0, 1} else f", then {ended}"
        return True


# ---- a run ----


@dataclass(slots=True)
class Fuzz:
    """State of a run: the remaining calls, the workers, and the results."""

    seed: int
    device: str
    modes: tuple[str, ...]
    todo: Iterator[int]
    again: deque[tuple[int, list[str]]] = field(default_factory=deque)  # unfinished calls of dead workers
    workers: list[Worker] = field(default_factory=list)
    deaths: int = 0
    calls: Counter = field(default_factory=Counter)  # by mode, as `refused`; `kinds` counts each kind of call
    refused: Counter = field(default_factory=Counter)
    kinds: Counter = field(default_factory=Counter)
    served: dict[str, Counter] = field(default_factory=dict)
    findings: list[dict[str, object]] = field(default_factory=list)
    stock: list[dict[str, object]] = field(default_factory=list)
    repetitions: deque[Repetition] = field(default_factory=deque)
    running: list[Repetition] = field(default_factory=list)

    def record(self, index: int, mode: str, outcome: Outcome) -> None:
        call = fuzz_calls.draw(self.seed, index, WORK[self.device])
        self.calls[mode] += 1
        self.kinds[call.kind] += 1
        self.refused[mode] += outcome.status == "refused"
        self.served.setdefault(mode, Counter()).update(set(outcome.paths))
        if not outcome.bad:
            return
        into = self.stock if is_stock_fault(call, mode, outcome) else self.findings
        finding = {"mode": mode, "index": index, **dataclasses.asdict(outcome), "call": call.facts()}
        into.append(finding)
        alike = sum((a["call"]["kind"], a["mode"], a["status"]) == (call.kind, mode, outcome.status) for a in into)
        if alike <= REPEATED:
            base = [sys.executable, __file__, "0", str(self.seed), "--call", str(index), "--device", self.device]
            for name, repeated_mode in (("alone", mode), ("stock", "stock")):
                finding[name] = "no time to repeat"
                self.repetitions.append(Repetition(finding, name, [*base, "--modes", repeated_mode]))

    def repeat_findings(self) -> None:
        """Collect the finished repetitions, and start further repetitions, at most AT_ONCE at a time."""
        self.running = [repetition for repetition in self.running if not repetition.is_done()]
        while self.repetitions and len(self.running) < AT_ONCE:
            self.running.append(self.repetitions.popleft())
            self.running[-1].start()

    def send_calls(self, worker: Worker) -> bool:
        """Send the unfinished calls of a dead worker, or else new calls. Return False if no calls are left."""
        first = [self.again.popleft()] if self.again else []
        worker.remaining = dict(first or [(index, list(self.modes)) for index in itertools.islice(self.todo, BLOCK)])
        worker.deadline = time.monotonic() + STALL
        if worker.remaining:
            worker.conn.send(worker.remaining)
        return bool(worker.remaining)

    def receive(self, worker: Worker) -> bool:
        """Process a message of a worker. Return False if the worker has no more calls.

        Raises:
            EOFError: the worker is dead.
        """
        message = worker.conn.recv()
        worker.deadline = time.monotonic() + STALL
        if message is not None:
            index, mode, outcome = message
            worker.current = (index, mode) if outcome is None else None
            if outcome is None:
                return True
            self.record(index, mode, outcome)
            worker.remaining[index].remove(mode)
            if not worker.remaining[index]:
                del worker.remaining[index]
        return bool(worker.remaining) or self.send_calls(worker)

    def handle_death(self, worker: Worker, status: str) -> None:
        """Handle a worker that died or hangs: the current call is a finding, and the rest goes to a new worker."""
        worker.process.kill()
        worker.process.join()
        self.deaths += 1
        if worker.current is not None:
            index, mode = worker.current
            self.record(index, mode, Outcome(status, f"exit status {worker.process.exitcode}"))
            worker.remaining[index].remove(mode)
        self.again.extend((index, modes) for index, modes in worker.remaining.items() if modes)

    def run(self, workers: int, seconds: float) -> None:
        start = last_report = time.monotonic()
        self.workers = [start_worker(self.device, self.seed, number) for number in range(workers)]
        while self.workers and (time_now := time.monotonic()) < start + seconds - min(GRACE, seconds / 4):
            ready = wait([worker.conn for worker in self.workers], timeout=0.5)
            for worker in tuple(self.workers):
                try:
                    if worker.conn in ready and not self.receive(worker):
                        self.stop(worker)
                    elif worker.conn not in ready and time_now > worker.deadline:
                        self.replace(worker, "hang")
                except (EOFError, OSError):
                    self.replace(worker, "crash")
            self.repeat_findings()
            if time_now > last_report + 10:
                last_report, total = time_now, self.calls.total()
                rate = f"{total} calls, {total / (time_now - start):.0f}/s"
                bad = f"{len(self.findings)} findings, {len(self.stock)} faults of stock"
                print(f"{time_now - start:5.0f} s  {rate}, {bad}, {self.deaths} dead workers", flush=True)
        for worker in tuple(self.workers):
            self.stop(worker)
        while (self.running or self.repetitions) and time.monotonic() < start + seconds:
            self.repeat_findings()
            time.sleep(0.1)
        for repetition in self.running:
            repetition.process.kill()

    def stop(self, worker: Worker) -> None:
        worker.process.kill()
        self.workers.remove(worker)

    def replace(self, worker: Worker, status: str) -> None:
        self.workers.remove(worker)
        self.handle_death(worker, status)
        if worker.current is None and worker.remaining == {}:
            raise SystemExit(f"a worker died before its first call ({status}, exit status {worker.process.exitcode})")
        self.workers.append(start_worker(self.device, self.seed, worker.number))


# ---- output of a run ----


def _in_short(finding: dict) -> dict:
    """Shorten the texts of a known fault: the first wrong result is enough."""
    return {name: value[:SHORT] if isinstance(value, str) else value for name, value in finding.items()}


def write(fuzz: Fuzz, folder: Path) -> Path:
    """Write fuzz-<gpu>.json, with a line for each finding."""
    document = report.header("fuzz", {}, report.commit()) | {
        "seed": fuzz.seed, "calls": fuzz.calls, "served": fuzz.served, "refused": fuzz.refused, "kinds": fuzz.kinds,
        "findings": fuzz.findings, "stock": [_in_short(finding) for finding in fuzz.stock],
    }  # fmt: skip
    return report.write_json(document, folder)


def print_table(fuzz: Fuzz) -> None:
    console = Console(width=150)
    table = Table(title=f"Random calls of seed {fuzz.seed} on {report.gpu_name()}, torch {torch.__version__}")
    for column in ("mode", "calls", "ours fwd", "ours bwd", "refused", "findings", "stock's"):
        table.add_column(column, justify="right")
    for mode in fuzz.modes:
        served = fuzz.served.get(mode, Counter())
        bad = [sum(finding["mode"] == mode for finding in listed) for listed in (fuzz.findings, fuzz.stock)]
        cells = (fuzz.calls[mode], served["ours_fwd"], served["ours_bwd"], fuzz.refused[mode], *bad)
        table.add_row(mode, *map(str, cells))
    console.print(table)
    for finding in fuzz.findings[:20]:
        print(f"{finding['mode']} --call {finding['index']}: {finding['status']} {finding['detail'][:200]}")
        print(f"   {finding['call']}")
        print(f"   alone: {finding.get('alone', 'not repeated')}\n   stock: {finding.get('stock', 'not repeated')}")


def show_call(seed: int, index: int, mode: str, device: str) -> int:
    """Make a single call and print all details. The last printed line is the outcome in JSON."""
    call = fuzz_calls.draw(seed, index, WORK[device])
    print(call)
    tensors = fuzz_tensors.make_tensors(call, DEVICES[device])
    for name in ("q", "k", "v", "grad_out", "mask"):
        if (tensor := getattr(tensors, name)) is None:
            continue
        print(f"{name:<9} {tuple(tensor.shape)} strides {tensor.stride()} offset {tensor.storage_offset()}")
    with plugin_on(device, mode) as off:
        if mode != "stock":
            with in_mode(call, mode):
                preset = None if device == "cuda" else "h100"
                print(torch_flashplug.explain(*operands(tensors), **settings(call), device=preset), flush=True)
        outcome = check(tensors, answer(tensors), mode, off)
    print(json.dumps(dataclasses.asdict(outcome)))
    return int(outcome.bad)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--calls", type=int, help="largest number of calls in each mode")
    parser.add_argument("--workers", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--only", default=",".join(fuzz_calls.NAMES), help="comma-separated kinds of calls")
    parser.add_argument("--out", type=Path, help="folder for fuzz-<gpu>.json")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=DEVICES, help="interpreted: kernels, on the CPU")
    parser.add_argument("--call", type=int, help="index of a single call, made in the first of the modes")
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS under deterministic algorithms
    modes, only = tuple(options.modes.split(",")), options.only.split(",")
    allowed_modes = {*MODES, *RECIPES, *(("stock",) if options.call is not None else ())}
    if unknown := {*only} - {*fuzz_calls.NAMES} | {*modes} - allowed_modes:
        allowed = f"Kinds are {fuzz_calls.NAMES}, and modes are {sorted(allowed_modes)}."
        parser.error(f"unknown: {sorted(unknown)}. {allowed}")
    if options.call is not None:
        return show_call(options.seed, options.call, modes[0], options.device)
    todo = itertools.islice(fuzz_calls.indices(options.seed, only), options.calls)
    fuzz = Fuzz(options.seed, options.device, modes, todo)
    fuzz.run(options.workers, options.seconds)
    print_table(fuzz)
    if options.out:
        print(write(fuzz, options.out))
    return int(bool(fuzz.findings))


if __name__ == "__main__":
    sys.exit(main())
