"""Multi-GPU part of the demo, with one process per GPU: training of a small Llama over bytes.

The model is trained with FSDP2 and context parallelism, where every rank has some rows of one long sequence. Then the
model is trained with tensor parallelism, where every rank has some heads. Each training runs with the plugin's
attention and with stock's attention, from the same weights and with the same data. The demo prints losses, tokens per
second and memory.

Without GPUs, the ranks are processes on the CPU. torch's context_parallel does not support attention on a CPU. So FSDP2
alone distributes the sequences among the ranks.

    python -m torch_flashplug demo --gpus 2
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import torch_flashplug

from .. import env
from ..dispatch import bindings
from . import llama
from .input_text import as_tokens, read_text, repeated
from .model import Shape
from .scopes import Scope, all_scopes

SEED, WARM_STEPS = 0, 3
LEARNING_RATE = 0.1  # divided by the width of the model, as in train.py
HANG_S = 120  # time limit of one step: each rank then prints a traceback and ends
BASE = "plugin off"
SHOWN = ("auto", BASE, "flash (FA2)")  # names from scopes.py
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Recipe:
    """Training recipe: each step trains on one sequence of `length` bytes, divided among the ranks."""

    shape: Shape
    length: int
    steps: int


# The sequence is long enough that a step is limited by the GPUs. At 16k rows, a step is limited by the host, with any
# attention.
GPU_RECIPE = Recipe(Shape(layers=8, heads=16, kv_heads=4, head_dim=128), 32768, 30)
CPU_RECIPE = Recipe(Shape(layers=2, heads=4, kv_heads=2, head_dim=32), 64, 5)


class Program:
    """Distribution of a model and of a step's sequence over the ranks.

    A step returns the loss of the whole sequence.
    """

    def __init__(self, mesh: DeviceMesh, recipe: Recipe) -> None:
        self.mesh, self.device = mesh, mesh.device_type
        self.model = llama.build(recipe.shape, self.device, SEED)
        self.divide()
        sharded = [x for x in self.model.parameters() if isinstance(x, DTensor)]
        replicated = [x for x in self.model.parameters() if not isinstance(x, DTensor)]
        # Separate groups, because an optimizer on a GPU processes all weights of a group in one call, and a call cannot
        # mix DTensors with plain tensors.
        groups = [{"params": weights} for weights in (sharded, replicated) if weights]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE / recipe.shape.width)

    def divide(self) -> None:
        raise NotImplementedError

    def losses(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Iterator[Tensor]:
        """Yield one loss, inside the context in which the backward must run."""
        raise NotImplementedError

    def step(self, sequence: Tensor) -> float:
        """Train on `sequence` (length + 1,), and return the mean loss of all ranks."""
        tokens, labels = sequence[None, :-1].clone(), sequence[None, 1:].clone()
        for loss in self.losses(tokens, labels, torch.arange(tokens.shape[1], device=sequence.device)):
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        return mean_loss.item() / dist.get_world_size()

    def loss(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        logits = self.model(tokens, positions)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class ContextParallel(Program):
    def divide(self) -> None:
        llama.fully_shard(self.model, self.mesh)

    def losses(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Iterator[Tensor]:
        from torch.distributed.tensor.experimental import context_parallel

        buffers = [tokens, labels, positions]
        with context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], no_restore_buffers=set(buffers)):
            yield self.loss(tokens, labels, positions)


class FullySharded(Program):
    """FSDP2 training, where each rank has a separate part of the step's sequence."""

    def divide(self) -> None:
        llama.fully_shard(self.model, self.mesh)

    def losses(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Iterator[Tensor]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        tokens, labels = (x.chunk(ranks, 1)[rank] for x in (tokens, labels))
        yield self.loss(tokens, labels, positions[: tokens.shape[1]])


class TensorParallel(Program):
    def divide(self) -> None:
        for block in self.model.blocks:
            llama.tensor_parallel(block, self.mesh)

    def losses(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Iterator[Tensor]:
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.loss(tokens, labels, positions)
        yield loss


def programs(on_gpu: bool) -> dict[str, type[Program]]:
    first = {"FSDP2 + context parallel": ContextParallel} if on_gpu else {"FSDP2": FullySharded}
    return {**first, "tensor parallel": TensorParallel}


@dataclass(frozen=True, slots=True)
class Run:
    """Results of a training with one attention."""

    losses: Sequence[float]
    step_s: float
    peak_bytes: int
    path_counts: Mapping[str, int]  # counters of the dispatch paths of this rank's attention calls


def train(make: type[Program], mesh: DeviceMesh, recipe: Recipe, sequences: Tensor) -> Run:
    on_gpu = mesh.device_type == "cuda"
    wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else lambda: None
    gc.collect()  # FSDP's modules form reference cycles, so that the memory of the previous training would count
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    program, losses, spans = make(mesh, recipe), [], []
    bindings.counters(reset=True)
    for sequence in sequences:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        begin = time.perf_counter()
        losses.append(program.step(sequence))
        wait()
        spans.append(time.perf_counter() - begin)
    path_counts = {path: n for path, n in bindings.counters().items() if n}
    peak = torch.tensor(torch.cuda.max_memory_allocated() if on_gpu else 0, device=mesh.device_type)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return Run(losses, statistics.median(spans[min(WARM_STEPS, len(spans) - 1) :]), int(peak), path_counts)


def shown_scopes(on_gpu: bool) -> dict[str, Scope]:
    return {name: scope for name, scope in all_scopes(on_gpu).items() if name in (SHOWN if on_gpu else SHOWN[:2])}


def table(name: str, recipe: Recipe, runs: Mapping[str, Run]) -> Table:
    rows_table, base = Table(title=f"{name}: {recipe.steps} steps of {recipe.length} bytes"), runs[BASE]
    on_gpu = any(run.peak_bytes for run in runs.values())
    speeds = ("tokens / s", f"speed / {BASE}", "peak GiB") if on_gpu else ()
    columns = ("loss", f"furthest from {BASE}", *speeds, "calls: ours, stock's")
    rows_table.add_column("attention")
    for column in columns:
        rows_table.add_column(column, justify="right")
    for attention, run in runs.items():
        apart = max(abs(a - b) for a, b in zip(run.losses, base.losses, strict=True))
        ours, stock = run.path_counts.get("routed_ours", 0), run.path_counts.get("routed_stock", 0)
        rates = (f"{recipe.length / run.step_s:.0f}", f"{base.step_s / run.step_s:.3f}")
        measured = (*rates, f"{run.peak_bytes / GIB:.2f}") if on_gpu else ()
        rows_table.add_row(
            attention, f"{run.losses[0]:.3f} to {run.losses[-1]:.3f}", f"{apart:.1e}", *measured,
            f"{ours}, {stock}" if ours + stock else "stock's, not counted",
        )  # fmt: skip
    return rows_table


def plot(runs_by_program: Mapping[str, Mapping[str, Run]], path: Path) -> str:
    """Plot the losses by step, with a panel for each program.

    Returns:
        A line that says where the picture is, or why there is none.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "No picture: matplotlib is not installed."
    figure = Figure(figsize=(5.5 * len(runs_by_program), 4))
    for axis, (name, runs) in zip(
        figure.subplots(1, len(runs_by_program), squeeze=False).flat, runs_by_program.items()
    ):
        for attention, run in runs.items():
            axis.plot(run.losses, label=attention, linewidth=1.2)
        axis.set(title=name, xlabel="step", ylabel="nats per byte")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=110)
    return f"Loss curves: {path}"


def show(file: str | None, picture: Path, device: str) -> None:
    """Run all trainings on this rank. The first rank prints the tables.

    Args:
        file: the text; None for the default text.
        picture: the file for the loss curves.
        device: "cuda" or "cpu".
    """
    on_gpu, first = device == "cuda", dist.get_rank() == 0
    recipe = GPU_RECIPE if on_gpu else CPU_RECIPE
    content, origin = read_text(file)
    tokens = as_tokens(repeated(content, recipe.steps * recipe.length + 1)).to(device)
    sequences = torch.stack([tokens[i * recipe.length : (i + 1) * recipe.length + 1] for i in range(recipe.steps)])
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    console = Console(width=120, quiet=not first)
    where = torch.cuda.get_device_name() if on_gpu else "process on the CPU (stock serves every call, nothing is timed)"
    console.print(
        f"[bold]torch_flashplug {torch_flashplug.__version__}[/] demo, {mesh.size()} x {where}, torch "
        f"{torch.__version__}; text: {origin}"
    )
    runs_by_program: dict[str, dict[str, Run]] = {}
    for name, make in programs(on_gpu).items():
        runs_by_program[name] = {}
        for attention, scope in shown_scopes(on_gpu).items():
            with scope():
                runs_by_program[name][attention] = train(make, mesh, recipe, sequences)
        console.print(table(name, recipe, runs_by_program[name]))
    if first:
        console.print(plot(runs_by_program, picture))


def launch(file: str | None, gpus: int, picture: str) -> None:
    """Start the ranks, and exit with an error if a rank does.

    Args:
        file: the text; None for the default text.
        gpus: the number of ranks.
        picture: the file for the loss curves.
    """
    have = torch.cuda.device_count()
    if 0 < have < gpus:
        raise SystemExit(f"demo: --gpus must be at most {have}, the number of GPUs here, but got {gpus}.")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus)]
    words = ["-m", "torch_flashplug.demo.multi_gpu", "--picture", picture, *([file] if file else [])]
    if code := subprocess.run([*run, *words], check=False).returncode:
        raise SystemExit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--picture", required=True)
    options = parser.parse_args()
    faulthandler.enable()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    timeout, of_gpu = datetime.timedelta(seconds=HANG_S), {}
    if device == "cuda":
        local = env.local_rank()
        torch.cuda.set_device(local)
        of_gpu = {"device_id": torch.device("cuda", local)}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout, **of_gpu)
    show(options.file, Path(options.picture), device)
    faulthandler.cancel_dump_traceback_later()
    with contextlib.suppress(RuntimeError):  # all results are printed already
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
