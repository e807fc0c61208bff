"""Runner for tests on several ranks: one process per rank runs the cases of a module in sequence, with time limits.

On the CPU the ranks use gloo and the CPU stub backend. On GPUs the ranks use NCCL and the kernels.

    PYTHONPATH=.:test/helpers python -m ranks rank_context_parallel --ranks 2    # all cases of rank_context_parallel.py
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import importlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from device_backend import DeviceBackend, use_device_backend
from fp64_gradients import NAMES, check_gradients_of_case
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_flashplug import env
from torch_flashplug.testing import (
    Case,
    Inputs,
    assert_within_budget,
    make_inputs,
    new_case,
    oracle,
    plain,
)

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]
LIMIT_S = 85  # for all cases of a module; then each process prints its stack and ends
GROUP_S = 45  # limit of a collective
GRACE_S = 5  # for all remaining ranks, after a rank has ended with an error
PREFIX = "case_"


@dataclass(frozen=True)
class Rank:
    """Properties of the rank on which a case runs."""

    number: int
    world: int
    device: str
    device_backend: DeviceBackend | None  # None: the plugin is off on the rank

    def mesh(self, *sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        return init_device_mesh(self.device, sizes or (self.world,), mesh_dim_names=names)

    def pop_path_counts(self) -> dict[str, int]:
        return {} if self.device_backend is None else self.device_backend.pop_path_counts()


# ---- in the test ----


def run(
    module: str,
    world: int,
    device: str = "cpu",
    *,
    cases: Sequence[str] = (),
    settings: Mapping[int, Mapping[str, str]] | None = None,
) -> str:
    """Run cases on `world` ranks and return the output of the first rank.

    Args:
        module: module with the cases.
        world: number of ranks.
        device: "cpu" or "cuda".
        cases: names of cases; without names, all cases run.
        settings: environment variables of single ranks.

    Raises:
        AssertionError: a case failed; the message has the output of the failed ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ranks", module, *cases, "--worker", folder, "--device", device]
        processes = []
        for rank in range(world):
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(ROOT), str(HELPERS), os.environ.get("PYTHONPATH", ""))),
                "OMP_NUM_THREADS": "1",
                "NCCL_NVLS_ENABLE": "0",
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                **(settings or {}).get(rank, {}),
            }
            with (Path(folder) / f"output{rank}").open("wb") as output:
                processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output))
        codes = _wait(processes)
        output = [(Path(folder) / f"output{rank}").read_text(errors="replace")[-4000:] for rank in range(world)]
    failures = [
        f"rank {rank} ended with {code}:\n{text}" for rank, (code, text) in enumerate(zip(codes, output)) if code
    ]
    assert not failures, "\n".join(failures)
    return output[0]


def _wait(processes: list[subprocess.Popen]) -> list[int]:
    deadline = time.monotonic() + LIMIT_S + GRACE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.kill()
    return [process.wait() for process in processes]


# ---- on a rank ----


def _cases(module: str) -> dict[str, Callable[[Rank], None]]:
    members = vars(importlib.import_module(module)).items()
    return {name.removeprefix(PREFIX): function for name, function in members if name.startswith(PREFIX)}


@contextlib.contextmanager
def _backend_of_rank(device: str) -> Iterator[DeviceBackend | None]:
    if env.is_disabled():
        yield None
        return
    with use_device_backend(device) as device_backend:
        yield device_backend


def _work(module: str, folder: str, device: str, names: Sequence[str]) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, on_gpu = dist.FileStore(f"{folder}/store", world), device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    timeout, of_gpu = datetime.timedelta(seconds=GROUP_S), {"device_id": torch.device("cuda", rank)} if on_gpu else {}
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, **of_gpu)
    cases = _cases(module)
    for name in names or cases:
        begin = time.monotonic()
        try:
            with _backend_of_rank(device) as device_backend:
                cases[name](Rank(rank, world, device, device_backend))
            dist.barrier()
        except BaseException:
            traceback.print_exc()
            print(f"{name}: FAILED", flush=True)
            os._exit(1)  # further ranks may wait in a collective; the parent process ends them
        torch._dynamo.reset()
        print(f"{name}: ok, {time.monotonic() - begin:.1f} s", flush=True)
    os._exit(0)  # without the teardown of process groups, which may wait for ended ranks


# ---- numbers ----


def make_case(world: int, heads: tuple[int, int] = (4, 2), *, batch: int = 1, rows: int = 64, causal: bool = True,
            layout: str = "bshd", d: int = 64) -> Case:  # fmt: skip
    """Return a case with `rows` rows for each rank."""
    tags = ("causal",) * causal
    return new_case(f"{world}_ranks", (batch, *heads), (rows * world,) * 2, (d, d), *tags, layout=layout)


def make_full_inputs(case: Case, device: str) -> Inputs:
    """Return the full inputs, equal on all ranks."""
    on_cpu = make_inputs(case, "cpu")
    return Inputs(*(_copy_with_strides(x, device) for x in (*on_cpu, on_cpu.grad_out)))


def _copy_with_strides(x: Tensor, device: str) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def assert_within_budgets(case: Case, inputs: Inputs, out: Tensor, grads: Sequence[Tensor] = ()) -> None:
    """Check full results, on each rank, within the error budget of a single device."""
    assert_within_budget(f"{case.name} out", out, oracle(case, inputs).out, plain(case, inputs).out)
    if not grads:
        return
    check_gradients_of_case(case.name, case, inputs, dict(zip(NAMES, grads, strict=True)))


# ---- a program ----


class Block(nn.Module):
    """Attention of Llama with a residual connection."""

    def __init__(self, heads: int = 4, kv_heads: int = 2, d: int = 64) -> None:
        super().__init__()
        self.d = d
        self.wq, self.wo = (nn.Linear(heads * d, heads * d, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(heads * d, kv_heads * d, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.d)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.wo(out.transpose(1, 2).flatten(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module")
    parser.add_argument("cases", nargs="*", default=[], help="names (default: all)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.device_count() > 1 else "cpu")
    parser.add_argument("--worker", help="what run() gives each rank")
    options = parser.parse_args()
    if options.worker:
        _work(options.module, options.worker, options.device, options.cases)
    print(run(options.module, options.ranks, options.device, cases=options.cases))


if __name__ == "__main__":
    main()
