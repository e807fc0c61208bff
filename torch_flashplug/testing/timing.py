"""Times that can be compared: candidates interleaved in one process, many rounds, medians, spread.

Absolute figures move by several per cent from run to run; only ratios of neighbouring rounds count.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

Call = Callable[[], object]
L2_BYTES_TO_FLUSH = 256 << 20  # more than any L2 we know
MAX_QUEUED = 200  # calls in flight while host time is taken: below the depth of a launch queue, so the host never waits


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something to time, and the scope its calls run in; the scope is entered outside the timed span."""

    call: Call
    scope: Callable[[], AbstractContextManager] = nullcontext


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds per call, one entry per round, in the order of the rounds (round i of two candidates ran side by
    side).
    """

    rounds: tuple[float, ...]

    @property
    def ms(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """(90th - 10th percentile) / median."""
        ordered = sorted(self.rounds)
        last = len(ordered) - 1
        return (ordered[round(0.9 * last)] - ordered[round(0.1 * last)]) / max(self.ms, 1e-12)


def paired_ratio(numerator: Timing, denominator: Timing) -> float:
    """Median over rounds of numerator / denominator: clocks that drift between rounds cancel."""
    return statistics.median(a / max(b, 1e-12) for a, b in zip(numerator.rounds, denominator.rounds, strict=True))


def event_time(call: Call, calls: int, flush: torch.Tensor | None = None) -> float:
    """Milliseconds per call on the GPU. With `flush`, L2 is overwritten before each call and only the calls are
    timed.
    """
    if flush is None:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / calls
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    for start, stop in events:
        flush.zero_()
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


def _wall_time(call: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e3


def _shuffled_rounds(names: list[str], rounds: int):
    """Every round visits all candidates, each round in another order (the same orders every time).

    A GPU at its power limit is slower after a hot kernel than after a cool one: whoever always followed the slowest
    peer measured 3 to 5 % faster on an H200 than the same kernel elsewhere in the round.
    """
    order = random.Random(0)
    for _ in range(rounds):
        yield from order.sample(names, len(names))


def captured(call: Call, calls: int = 10) -> Call:
    """A CUDA graph of `calls` calls; replaying it shows device time alone. Divide its time by `calls`."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()

    return functools.partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, _call: Call) -> None:
    """A graph keeps no tensor alive that its call held before."""
    graph.replay()


def time_interleaved(
    candidates: Mapping[str, Candidate], *, rounds: int = 7, round_ms: float = 12.0, min_calls: int = 3,
    max_calls: int = 400, rest_ms: float = 0.0, flush_l2: bool = False, device: str = "cuda", warmup: int = 3,
) -> dict[str, Timing]:  # fmt: skip
    """Times each candidate once per round, all side by side; one may take about `round_ms` of a round.

    On "cuda" events time a batch of calls from submission to completion, as a user waits for them (the host's time
    shows where the host is the slower side; time `captured` calls to see the device alone); on "cpu" the wall clock.

    A GPU under steady load runs at its power limit, where equal kernels differ by 3 % from round to round. To compare
    two versions of a kernel, rest_ms = 3 before each sample and a round_ms of 1 keep it below: they differ by 0.3 %.
    """
    on_gpu = device.startswith("cuda")
    flush = torch.empty(L2_BYTES_TO_FLUSH, dtype=torch.uint8, device=device) if flush_l2 and on_gpu else None

    def sample(candidate: Candidate, calls: int) -> float:
        with candidate.scope():
            if not on_gpu:
                return _wall_time(candidate.call, calls)
            time.sleep(rest_ms * 1e-3)
            for _ in range(calls):  # its own heat, not its predecessor's
                candidate.call()
            return event_time(candidate.call, calls, flush)

    counts = {}
    for name, candidate in candidates.items():
        with candidate.scope():
            for _ in range(warmup):
                candidate.call()
        once = max(sample(candidate, 2), 1e-4)
        counts[name] = max(min_calls, min(max_calls, int(round_ms / once)))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for name in _shuffled_rounds(list(candidates), rounds):
        samples[name].append(sample(candidates[name], counts[name]))
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def time_host(
    candidates: Mapping[str, Candidate], *, rounds: int = 15, calls: int = MAX_QUEUED, device: str = "cuda"
) -> dict[str, Timing]:
    """Milliseconds of host time per call: how long Python waits for a call to be submitted, not for its result."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for name in _shuffled_rounds(list(candidates), rounds):
        with candidates[name].scope():
            for _ in range(20):
                candidates[name].call()
            wait()
            samples[name].append(_wall_time(candidates[name].call, min(calls, MAX_QUEUED)))
            wait()
    return {name: Timing(tuple(values)) for name, values in samples.items()}
