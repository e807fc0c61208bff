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
from tools.fuzz.check import INTERPRETED, Verdict, answer, as_told, check, hooked, is_stocks, operands, settings
from torch_flashplug import env
from torch_flashplug.registry.quant_recipes import RECIPES

DEVICES = {"cuda": "cuda", "cpu": "cpu", INTERPRETED: "cpu"}  # device names of torch
WORK = {"cuda": 1 << 29, "cpu": 1 << 20, INTERPRETED: 1 << 25}  # multiply-adds of the two matrix products of a call
BLOCK = 8  # calls sent to a worker at a time
# Limits in seconds: a worker without progress, a worker before the first call, a call repeated in a separate process.
STALL, START, ALONE = 60.0, 180.0, 90.0
GRACE = 25.0  # seconds reserved at the end of a run to repeat the calls of findings
AT_ONCE = 3  # repeated calls that run at the same time
ASKED = 3  # number of findings of equal kind, mode and status that are repeated: alone in a process, and on stock
MODES = ("auto", "fa3", "fa2")  # 8-bit recipes (quant_recipes.py) are additional modes, if named with --modes
CACHED = 1 << 30  # bytes that a worker may keep between calls: neighboring workers also need GPU memory
SHORT = 200  # characters of the description kept for a known fault


# ---- workers ----


def work(conn: Connection, device: str, seed: int, number: int) -> None:
    """Run a worker process: receive blocks {index: modes}, and report the start and the verdict of each call.

    The process ends after a call that raised an exception. The CUDA context may be dead then, and stock keeps the state
    of the failure.
    """
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())
    with hooked(device) as off:
        conn.send(None)
        while True:
            for index, modes in conn.recv().items():
                conn.send((index, modes[0], None))
                posed = fuzz_tensors.pose(fuzz_calls.draw(seed, index, WORK[device]), DEVICES[device])
                answers = answer(posed)
                for mode in modes:
                    conn.send((index, mode, None))
                    verdict = check(posed, answers, mode, off)
                    conn.send((index, mode, verdict))
                    if verdict.status == "raised":
                        os._exit(1)
                del posed, answers
                if device == "cuda" and torch.cuda.memory_reserved() > CACHED:
                    torch.cuda.empty_cache()


@dataclass(slots=True)
class Hand:
    """Worker process, as the parent process sees the worker."""

    process: multiprocessing.process.BaseProcess
    conn: Connection
    number: int
    left: dict[int, list[str]] = field(default_factory=dict)  # calls of the current block that are not done
    doing: tuple[int, str] | None = None
    patience: float = field(default_factory=lambda: time.monotonic() + START)  # deadline for the next message


def hire(device: str, seed: int, number: int) -> Hand:
    """Start worker number `number`. Workers are assigned to the GPUs in round-robin order."""
    context = multiprocessing.get_context("spawn")
    parent_conn, worker_conn = context.Pipe()
    process = context.Process(target=work, args=(worker_conn, device, seed, number), daemon=True)
    process.start()
    worker_conn.close()
    return Hand(process, parent_conn, number)


@dataclass(slots=True)
class Question:
    """Repetition of a finding's call in a separate process, in the same mode or on stock without the plugin."""

    finding: dict[str, object]  # the finding that receives the answer, under the key `name`
    name: str
    command: list[str]
    process: subprocess.Popen | None = None
    until: float = 0.0

    def ask(self) -> None:
        environment = os.environ | ({env.ENABLED.name: "0"} if self.name == "stock" else {})
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(self.command, env=environment, **pipes)
        self.until = time.monotonic() + ALONE

    def answered(self) -> bool:
        if self.process.poll() is None:
            if late := time.monotonic() > self.until:
                self.process.kill()
                self.finding[self.name] = "hang"
            return late
        lines = self.process.communicate()[0].splitlines()
        ended = f"exit status {self.process.returncode}"
        verdict = next((json.loads(line) for line in reversed(lines) if line.startswith('{"status"')), None)
        if verdict is None:
            self.finding[self.name] = f"crash, {ended}: {' '.join(lines)[-300:]}"
        else:
            self.finding[self.name] = f"{verdict['status']} {verdict['detail'][:300]}".strip()
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
    hands: list[Hand] = field(default_factory=list)
    deaths: int = 0
    calls: Counter = field(default_factory=Counter)  # by mode, as `refused`; `kinds` is by kind of call
    refused: Counter = field(default_factory=Counter)
    kinds: Counter = field(default_factory=Counter)
    served: dict[str, Counter] = field(default_factory=dict)
    findings: list[dict[str, object]] = field(default_factory=list)
    stock: list[dict[str, object]] = field(default_factory=list)
    questions: deque[Question] = field(default_factory=deque)
    asking: list[Question] = field(default_factory=list)

    def record(self, index: int, mode: str, verdict: Verdict) -> None:
        call = fuzz_calls.draw(self.seed, index, WORK[self.device])
        self.calls[mode] += 1
        self.kinds[call.kind] += 1
        self.refused[mode] += verdict.status == "refused"
        self.served.setdefault(mode, Counter()).update(set(verdict.paths))
        if not verdict.bad:
            return
        into = self.stock if is_stocks(call, mode, verdict) else self.findings
        finding = {"mode": mode, "index": index, **dataclasses.asdict(verdict), "call": call.facts()}
        into.append(finding)
        alike = sum((a["call"]["kind"], a["mode"], a["status"]) == (call.kind, mode, verdict.status) for a in into)
        if alike <= ASKED:
            base = [sys.executable, __file__, "0", str(self.seed), "--call", str(index), "--device", self.device]
            for name, asked in (("alone", mode), ("stock", "stock")):
                finding[name] = "no time to ask"
                self.questions.append(Question(finding, name, [*base, "--modes", asked]))

    def ask(self) -> None:
        """Collect the answered questions, and start further questions, at most AT_ONCE at a time."""
        self.asking = [question for question in self.asking if not question.answered()]
        while self.questions and len(self.asking) < AT_ONCE:
            self.asking.append(self.questions.popleft())
            self.asking[-1].ask()

    def feed(self, hand: Hand) -> bool:
        """Send the unfinished calls of a dead worker, or else new calls. Return False if no calls are left."""
        first = [self.again.popleft()] if self.again else []
        hand.left = dict(first or [(index, list(self.modes)) for index in itertools.islice(self.todo, BLOCK)])
        hand.patience = time.monotonic() + STALL
        if hand.left:
            hand.conn.send(hand.left)
        return bool(hand.left)

    def hear(self, hand: Hand) -> bool:
        """Process a message of a worker. Return False if the worker has no more calls.

        Raises:
            EOFError: the worker is dead.
        """
        message = hand.conn.recv()
        hand.patience = time.monotonic() + STALL
        if message is not None:
            index, mode, verdict = message
            hand.doing = (index, mode) if verdict is None else None
            if verdict is None:
                return True
            self.record(index, mode, verdict)
            hand.left[index].remove(mode)
            if not hand.left[index]:
                del hand.left[index]
        return bool(hand.left) or self.feed(hand)

    def bury(self, hand: Hand, status: str) -> None:
        """Handle a worker that died or hangs: the current call is a finding, and the rest goes to a new worker."""
        hand.process.kill()
        hand.process.join()
        self.deaths += 1
        if hand.doing is not None:
            index, mode = hand.doing
            self.record(index, mode, Verdict(status, f"exit status {hand.process.exitcode}"))
            hand.left[index].remove(mode)
        self.again.extend((index, modes) for index, modes in hand.left.items() if modes)

    def run(self, workers: int, seconds: float) -> None:
        start = last_report = time.monotonic()
        self.hands = [hire(self.device, self.seed, number) for number in range(workers)]
        while self.hands and (time_now := time.monotonic()) < start + seconds - min(GRACE, seconds / 4):
            ready = wait([hand.conn for hand in self.hands], timeout=0.5)
            for hand in tuple(self.hands):
                try:
                    if hand.conn in ready and not self.hear(hand):
                        self.dismiss(hand)
                    elif hand.conn not in ready and time_now > hand.patience:
                        self.replace(hand, "hang")
                except (EOFError, OSError):
                    self.replace(hand, "crash")
            self.ask()
            if time_now > last_report + 10:
                last_report, total = time_now, self.calls.total()
                rate = f"{total} calls, {total / (time_now - start):.0f}/s"
                bad = f"{len(self.findings)} findings, {len(self.stock)} faults of stock"
                print(f"{time_now - start:5.0f} s  {rate}, {bad}, {self.deaths} dead workers", flush=True)
        for hand in tuple(self.hands):
            self.dismiss(hand)
        while (self.asking or self.questions) and time.monotonic() < start + seconds:
            self.ask()
            time.sleep(0.1)
        for question in self.asking:
            question.process.kill()

    def dismiss(self, hand: Hand) -> None:
        hand.process.kill()
        self.hands.remove(hand)

    def replace(self, hand: Hand, status: str) -> None:
        self.hands.remove(hand)
        self.bury(hand, status)
        if hand.doing is None and hand.left == {}:
            raise SystemExit(f"a worker died before its first call ({status}, exit status {hand.process.exitcode})")
        self.hands.append(hire(self.device, self.seed, hand.number))


# ---- what a run leaves behind ----


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
        print(f"   alone: {finding.get('alone', 'not asked')}\n   stock: {finding.get('stock', 'not asked')}")


def show_call(seed: int, index: int, mode: str, device: str) -> int:
    """Make a single call and print all details. The last printed line is the verdict in JSON."""
    call = fuzz_calls.draw(seed, index, WORK[device])
    print(call)
    posed = fuzz_tensors.pose(call, DEVICES[device])
    for name in ("q", "k", "v", "grad_out", "mask"):
        if (tensor := getattr(posed, name)) is None:
            continue
        print(f"{name:<9} {tuple(tensor.shape)} strides {tensor.stride()} offset {tensor.storage_offset()}")
    with hooked(device, mode) as off:
        if mode != "stock":
            with as_told(call, mode):
                preset = None if device == "cuda" else "h100"
                print(torch_flashplug.explain(*operands(posed), **settings(call), device=preset), flush=True)
        verdict = check(posed, answer(posed), mode, off)
    print(json.dumps(dataclasses.asdict(verdict)))
    return int(verdict.bad)


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
