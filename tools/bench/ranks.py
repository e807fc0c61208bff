"""Synchronized ranks for benchmarks: process start, agreement on values, and times that are equal on all ranks.

A decision by the local clock of each rank could differ between ranks. Then one rank would wait forever in a collective.
So the first rank decides.
"""

from __future__ import annotations

import datetime
import faulthandler
import math
import os
import random
import sys
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from torch_flashplug.testing import Candidate, Timing, event_time

# Time limits of a collective and of a case. After HANG_S each rank prints the current traceback and exits.
GROUP_S, HANG_S = 45, 60
ROUND_MS, WARM_CALLS = 60.0, 2


def start(device: str) -> None:
    """Initialize the process group.

    A process without a rank first restarts as one process for each GPU, or as two processes on a CPU.
    """
    if "RANK" not in os.environ:
        ranks = torch.cuda.device_count() if device == "cuda" else 2
        more = ["--standalone", "--nproc_per_node", str(ranks), *sys.argv]
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *more])
    faulthandler.enable()
    restart_watchdog()
    timeout, local = datetime.timedelta(seconds=GROUP_S), int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", timeout=timeout, device_id=torch.device("cuda", local))
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timeout)


def restart_watchdog() -> None:
    faulthandler.dump_traceback_later(HANG_S, exit=True)


def end() -> int:
    """Destroy the process group and return the number of ranks on the first rank, which writes the results.

    Raises:
        SystemExit: on all remaining ranks, which have finished.
    """
    faulthandler.cancel_dump_traceback_later()
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    dist.destroy_process_group()
    if not first:
        raise SystemExit
    return ranks


def _tensor_of(value: float) -> Tensor:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return torch.tensor([value], dtype=torch.float64, device=device)


def from_first_rank(value: float) -> float:
    """Return the value of the first rank."""
    if not dist.is_initialized():
        return value
    tensor = _tensor_of(value)
    dist.broadcast(tensor, 0)
    return tensor.item()


def max_over_ranks(value: float) -> float:
    tensor = _tensor_of(value)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def _span(call: Callable[[], object], times: int, device: str) -> float:
    """Return the milliseconds per call on the slowest rank."""
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    return max_over_ranks(event_time(call, times) if device == "cuda" else _host_ms(call, times))


def _host_ms(call: Callable[[], object], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) * 1e3 / times


def time_on_ranks(candidates: Mapping[str, Candidate], rounds: int, device: str) -> dict[str, Timing]:
    """Time candidates in interleaved rounds on synchronized ranks, in the manner of `testing.time_interleaved`.

    All ranks shuffle with an equal seed, and the first rank decides the numbers of calls.
    """
    times, round_ms = {}, {name: [] for name in candidates}
    for name, candidate in candidates.items():
        with candidate.scope():
            for _ in range(WARM_CALLS):
                candidate.call()
            ms = _span(candidate.call, 1, device)
        times[name] = int(from_first_rank(min(20, max(1, math.ceil(ROUND_MS / max(ms, 1e-3))))))
    order = random.Random(0)
    for _ in range(rounds):
        restart_watchdog()
        for name in order.sample(list(candidates), len(candidates)):
            with candidates[name].scope():
                round_ms[name].append(_span(candidates[name].call, times[name], device))
    return {name: Timing(tuple(ms)) for name, ms in round_ms.items()}
