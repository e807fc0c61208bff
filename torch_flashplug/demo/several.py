"""The demo on several GPUs, a process for each: a small Llama over bytes is trained with FSDP2 and context parallelism
(every rank has some rows of one long text), then with tensor parallelism (every rank has some heads), each time under
ours and under stock's attention, from the same weights and with the same texts. Losses, tokens per second, memory.

Without GPUs ranks are processes on the CPU, where torch's context_parallel knows no attention: there FSDP2 alone
divides texts among ranks.

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
from .model import Shape
from .scopes import Scope, all_scopes
from .text import as_tokens, read_text, repeated

SEED, WARM_STEPS = 0, 3
LEARNING_RATE = 0.1  # over the width, as in train.py
HANG_S = 120  # of one training: then each rank says where it is, and ends
BASE = "plugin off"
SHOWN = ("auto", BASE, "flash (FA2)")  # of scopes.py
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Recipe:
    """One text of `length` bytes a step, divided among the ranks."""

    shape: Shape
    length: int
    steps: int


# Long enough for GPUs to be what a step waits for: at 16k rows it is the host, whatever attends.
GPU_RECIPE = Recipe(Shape(layers=8, heads=16, kv_heads=4, head_dim=128), 32768, 30)
CPU_RECIPE = Recipe(Shape(layers=2, heads=4, kv_heads=2, head_dim=32), 64, 5)


class Program:
    """How a model, and the text of a step, lie on the ranks. A step of it returns the loss of the whole text."""

    def __init__(self, mesh: DeviceMesh, recipe: Recipe) -> None:
        self.mesh, self.device = mesh, mesh.device_type
        self.model = llama.build(recipe.shape, self.device, SEED)
        self.divide()
        divided = [x for x in self.model.parameters() if isinstance(x, DTensor)]
        whole = [x for x in self.model.parameters() if not isinstance(x, DTensor)]
        # Apart: an optimizer on a GPU takes all weights of a group at once, and DTensor mixes with nothing else.
        groups = [{"params": weights} for weights in (divided, whole) if weights]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE / recipe.shape.width)

    def divide(self) -> None:
        raise NotImplementedError

    def losses(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Iterator[Tensor]:
        """One, inside of what its backward has to be in."""
        raise NotImplementedError

    def step(self, text: Tensor) -> float:
        """text (length + 1,)."""
        tokens, labels = text[None, :-1].clone(), text[None, 1:].clone()
        for loss in self.losses(tokens, labels, torch.arange(tokens.shape[1], device=text.device)):
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            told = loss.detach().clone()
        dist.all_reduce(told)
        return told.item() / dist.get_world_size()

    def loss(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        logits = self.model(tokens, positions)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class ContextParallel(Program):
    def divide(self) -> None:
        llama.fully_shard(self.model, self.mesh)

    def losses(self, *given: Tensor) -> Iterator[Tensor]:
        from torch.distributed.tensor.experimental import context_parallel

        with context_parallel(self.mesh, buffers=list(given), buffer_seq_dims=[1, 1, 0], no_restore_buffers=set(given)):
            yield self.loss(*given)


class FullySharded(Program):
    """Each rank has a text of its own: a part of the step's."""

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

    def losses(self, *given: Tensor) -> Iterator[Tensor]:
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.loss(*given)
        yield loss


def programs(on_gpu: bool) -> dict[str, type[Program]]:
    first = {"FSDP2 + context parallel": ContextParallel} if on_gpu else {"FSDP2": FullySharded}
    return {**first, "tensor parallel": TensorParallel}


@dataclass(frozen=True, slots=True)
class Run:
    """What a training under one attention left behind."""

    losses: Sequence[float]
    step_s: float
    peak_bytes: int
    took: Mapping[str, int]  # paths of the attention calls of this rank


def train(make: type[Program], mesh: DeviceMesh, recipe: Recipe, texts: Tensor) -> Run:
    on_gpu = mesh.device_type == "cuda"
    wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else lambda: None
    gc.collect()  # FSDP's modules are in cycles: the training before this one would count
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    program, losses, spans = make(mesh, recipe), [], []
    bindings.counters(reset=True)
    for text in texts:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        begin = time.perf_counter()
        losses.append(program.step(text))
        wait()
        spans.append(time.perf_counter() - begin)
    took = {path: n for path, n in bindings.counters().items() if n}
    peak = torch.tensor(torch.cuda.max_memory_allocated() if on_gpu else 0, device=mesh.device_type)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return Run(losses, statistics.median(spans[min(WARM_STEPS, len(spans) - 1) :]), int(peak), took)


def scopes_here(on_gpu: bool) -> dict[str, Scope]:
    return {name: scope for name, scope in all_scopes(on_gpu).items() if name in (SHOWN if on_gpu else SHOWN[:2])}


def table(name: str, recipe: Recipe, runs: Mapping[str, Run]) -> Table:
    found, base = Table(title=f"{name}: {recipe.steps} steps of {recipe.length} bytes"), runs[BASE]
    on_gpu = any(run.peak_bytes for run in runs.values())
    speeds = ("tokens / s", f"speed / {BASE}", "peak GiB") if on_gpu else ()
    columns = ("loss", f"furthest from {BASE}", *speeds, "calls: ours, stock's")
    found.add_column("attention")
    for column in columns:
        found.add_column(column, justify="right")
    for attention, run in runs.items():
        apart = max(abs(a - b) for a, b in zip(run.losses, base.losses, strict=True))
        ours, stock = run.took.get("routed_ours", 0), run.took.get("routed_stock", 0)
        rates = (f"{recipe.length / run.step_s:.0f}", f"{base.step_s / run.step_s:.3f}")
        measured = (*rates, f"{run.peak_bytes / GIB:.2f}") if on_gpu else ()
        found.add_row(
            attention, f"{run.losses[0]:.3f} to {run.losses[-1]:.3f}", f"{apart:.1e}", *measured,
            f"{ours}, {stock}" if ours + stock else "stock's, not asked",
        )  # fmt: skip
    return found


def plot(found: Mapping[str, Mapping[str, Run]], path: Path) -> str:
    """Losses by step, a panel for each program; says in a line where, or why not."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "No picture: matplotlib is not installed."
    figure = Figure(figsize=(5.5 * len(found), 4))
    for axis, (name, runs) in zip(figure.subplots(1, len(found), squeeze=False).flat, found.items()):
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
    """On each rank; the first one prints."""
    on_gpu, first = device == "cuda", dist.get_rank() == 0
    recipe = GPU_RECIPE if on_gpu else CPU_RECIPE
    content, origin = read_text(file)
    tokens = as_tokens(repeated(content, recipe.steps * recipe.length + 1)).to(device)
    texts = torch.stack([tokens[i * recipe.length : (i + 1) * recipe.length + 1] for i in range(recipe.steps)])
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    console = Console(width=120, quiet=not first)
    where = torch.cuda.get_device_name() if on_gpu else "process on the CPU (stock serves every call, nothing is timed)"
    console.print(
        f"[bold]torch_flashplug {torch_flashplug.__version__}[/] demo, {mesh.size()} x {where}, torch "
        f"{torch.__version__}; text: {origin}"
    )
    found: dict[str, dict[str, Run]] = {}
    for name, make in programs(on_gpu).items():
        found[name] = {}
        for attention, scope in scopes_here(on_gpu).items():
            with scope():
                found[name][attention] = train(make, mesh, recipe, texts)
        console.print(table(name, recipe, found[name]))
    if first:
        console.print(plot(found, picture))


def launch(file: str | None, gpus: int, picture: str) -> None:
    """Starts the ranks, and ends with an error where one does."""
    have = torch.cuda.device_count()
    if 0 < have < gpus:
        raise SystemExit(f"demo: --gpus {gpus}, but there are {have}")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus)]
    words = ["-m", "torch_flashplug.demo.several", "--picture", picture, *([file] if file else [])]
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
    with contextlib.suppress(RuntimeError):  # everything is said
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
