"""Comparable times: candidates interleaved in one process, many rounds, medians, spread.

Absolute times change by several percent from run to run. Only ratios of neighboring rounds are reliable.
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
L2_BYTES_TO_FLUSH = 256 << 20  # larger than any known L2 cache
MAX_QUEUED = 200  # calls in flight for host times: below the depth of a launch queue, so the host never waits


@dataclass(frozen=True, slots=True)
class Candidate:
    """A call to time, and the scope of the calls; the scope is entered outside the timed span."""

    call: Call
    scope: Callable[[], AbstractContextManager] = nullcontext


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds per call, one entry per round, in the order of the rounds.

    Round i of two candidates ran side by side.
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
    """Return the median over rounds of numerator / denominator, so a clock drift between rounds cancels."""
    return statistics.median(a / max(b, 1e-12) for a, b in zip(numerator.rounds, denominator.rounds, strict=True))


def event_time(call: Call, calls: int, flush: torch.Tensor | None = None) -> float:
    """Return milliseconds per call on the GPU.

    With `flush`, the L2 cache is overwritten before each call, and only the calls are timed.
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
    """Yield all candidates in every round, each round in a new order (the same orders in every run).

    A GPU at the power limit is slower after a hot kernel than after a cool kernel. A candidate right after the slowest
    candidate measured 3 to 5 % faster on an H200 than the same kernel elsewhere in the round.
    """
    order = random.Random(0)
    for _ in range(rounds):
        yield from order.sample(names, len(names))


def captured(call: Call, calls: int = 10) -> Call:
    """Return a CUDA graph of `calls` calls; a replay shows device time alone.

    The caller divides the time of a replay by `calls`.
    """
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()

    return functools.partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, _call: Call) -> None:
    """Replay a graph; the partial keeps the call's tensors alive, because a graph keeps no tensor alive."""
    graph.replay()


def time_interleaved(
    candidates: Mapping[str, Candidate], *, rounds: int = 7, round_ms: float = 12.0, min_calls: int = 3,
    max_calls: int = 400, rest_ms: float = 0.0, flush_l2: bool = False, device: str = "cuda", warmup: int = 3,
) -> dict[str, Timing]:  # fmt: skip
    """Time each candidate once per round, all candidates side by side; a sample takes about `round_ms`.

    On "cuda", events time a batch of calls from submission to completion, as a user waits for the results. The host's
    time shows where the host is the slower side. Time `captured` calls to see the device alone. On "cpu", the wall
    clock times the calls.

    A GPU under steady load runs at the power limit, where equal kernels differ by 3 % from round to round. To compare
    two versions of a kernel, use rest_ms = 3 before each sample and round_ms = 1. The GPU then stays below the power
    limit, and equal kernels differ by 0.3 %.

    Args:
        candidates: calls to time, by name.
        rounds: number of rounds.
        round_ms: target duration of a candidate's sample in milliseconds.
        min_calls: least calls in a sample.
        max_calls: most calls in a sample.
        rest_ms: pause before each sample in milliseconds, on "cuda".
        flush_l2: whether to overwrite the L2 cache before each call, on "cuda".
        device: "cuda" or "cpu".
        warmup: calls before the first sample.

    Returns:
        the times of each candidate by name.
    """
    on_gpu = device.startswith("cuda")
    flush = torch.empty(L2_BYTES_TO_FLUSH, dtype=torch.uint8, device=device) if flush_l2 and on_gpu else None

    def sample(candidate: Candidate, calls: int) -> float:
        with candidate.scope():
            if not on_gpu:
                return _wall_time(candidate.call, calls)
            time.sleep(rest_ms * 1e-3)
            for _ in range(calls):  # the heat of the candidate itself, not of the previous candidate
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
    """Return milliseconds of host time per call: the wait of Python for the submission, not for the result."""
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
