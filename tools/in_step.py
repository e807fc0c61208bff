"""Ranks in step: starting them, what they agree on, times that mean the same on all of them. What they decided by their
own clocks they would not decide alike, and one would wait in a collective for the others.
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

GROUP_S, HANG_S = 45, 60  # of one collective; of one case, then each rank says where it is, and ends
ROUND_MS, WARM_CALLS = 60.0, 2


def start(device: str) -> None:
    """The process group; where this process is none of several yet, it becomes as many as there are GPUs, or two."""
    if "RANK" not in os.environ:
        ranks = torch.cuda.device_count() if device == "cuda" else 2
        more = ["--standalone", "--nproc_per_node", str(ranks), *sys.argv]
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *more])
    faulthandler.enable()
    watch()
    timeout, local = datetime.timedelta(seconds=GROUP_S), int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", timeout=timeout, device_id=torch.device("cuda", local))
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timeout)


def watch() -> None:
    faulthandler.dump_traceback_later(HANG_S, exit=True)


def end() -> int:
    """How many ranks there were: for the first, which writes what was found. The others are done."""
    faulthandler.cancel_dump_traceback_later()
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    dist.destroy_process_group()
    if not first:
        raise SystemExit
    return ranks


def _told(value: float) -> Tensor:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return torch.tensor([value], dtype=torch.float64, device=device)


def agreed(value: float) -> float:
    """What the first rank says."""
    if not dist.is_initialized():
        return value
    told = _told(value)
    dist.broadcast(told, 0)
    return told.item()


def largest(value: float) -> float:
    told = _told(value)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return told.item()


def _span(call: Callable[[], object], times: int, device: str) -> float:
    """Milliseconds per call on the slowest rank."""
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    return largest(event_time(call, times) if device == "cuda" else _host_ms(call, times))


def _host_ms(call: Callable[[], object], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) * 1e3 / times


def time_on_ranks(candidates: Mapping[str, Candidate], rounds: int, device: str) -> dict[str, Timing]:
    """As testing.time_interleaved, on ranks in step: orders are of one seed, numbers of calls the first rank's."""
    times, found = {}, {name: [] for name in candidates}
    for name, candidate in candidates.items():
        with candidate.scope():
            for _ in range(WARM_CALLS):
                candidate.call()
            ms = _span(candidate.call, 1, device)
        times[name] = int(agreed(min(20, max(1, math.ceil(ROUND_MS / max(ms, 1e-3))))))
    order = random.Random(0)
    for _ in range(rounds):
        watch()
        for name in order.sample(list(candidates), len(candidates)):
            with candidates[name].scope():
                found[name].append(_span(candidates[name].call, times[name], device))
    return {name: Timing(tuple(ms)) for name, ms in found.items()}
