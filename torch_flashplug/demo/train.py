"""The demo's training: one GPT, one seed, the same batches under every attention; losses, speed, memory.

Every attention trains its own copy from the start, alone on the device: its losses, and the peak of allocated memory
(weights, AdamW's state, activations). Tokens per second come from a second pass, where whole steps (forward, backward,
update) of one model run under each attention in turn: the median of interleaved rounds.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import torch_flashplug

from ..testing import Candidate, Timing, paired_ratio, time_interleaved
from . import model as gpt
from .record import Recorder, distinct
from .scopes import STOCK, Scope, all_scopes
from .show import CPU_ROUNDS, CPU_SHAPE, GPU_ROUNDS, calls_table
from .text import as_tokens, read_text, repeated

SEED = 0
LEARNING_RATE = 0.1  # over the width: AdamW moves all terms of a sum over the width alike, so their sum moves by this
BASE = "plugin off"  # what the others are compared with
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is trained, and on how much text: `steps` batches of `batch` texts of `length` bytes."""

    shape: gpt.Shape
    batch: int
    length: int
    steps: int


# As many KV heads as heads: the efficient backend knows no groups. No longer texts: math keeps 1 GiB of scores a layer.
GPU_RECIPE = Recipe(gpt.Shape(layers=8, heads=16, kv_heads=16, head_dim=128), batch=1, length=4096, steps=60)
CPU_RECIPE = Recipe(CPU_SHAPE, batch=4, length=128, steps=20)


@dataclass(frozen=True, slots=True)
class Run:
    """What one training left behind."""

    losses: Tensor  # (steps,), on the CPU
    peak_bytes: int | None  # None where no allocator counts


class Trainer:
    """A copy of a model and its optimizer. Weights are fp32, matrix products and attention bf16 (autocast)."""

    def __init__(self, model: gpt.ByteGPT, device: str) -> None:
        self.device = device
        self.model = copy.deepcopy(model).to(device).train()
        rate = LEARNING_RATE / model.shape.width
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True)

    def loss(self, text: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            return gpt.next_byte_loss(self.model, text)

    def step(self, text: Tensor) -> Tensor:
        """Forward, backward and update on `text` (B, S + 1); the loss before the update."""
        loss = self.loss(text)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _batches(content: bytes, recipe: Recipe) -> Tensor:
    """Windows of the text at random places, (steps, B, S + 1)."""
    tokens = as_tokens(repeated(content, max(len(content), 2 * recipe.length)))
    generator = torch.Generator().manual_seed(SEED)
    starts = torch.randint(len(tokens) - recipe.length, (recipe.steps, recipe.batch, 1), generator=generator)
    return tokens[starts + torch.arange(recipe.length + 1)]


def _train(model: gpt.ByteGPT, batches: Tensor) -> Run:
    on_gpu = batches.is_cuda
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(model, batches.device.type)
    losses = torch.stack([trainer.step(text) for text in batches]).cpu()
    return Run(losses, torch.cuda.max_memory_allocated() if on_gpu else None)


def train_all(
    model: gpt.ByteGPT, batches: Tensor, scopes: Mapping[str, Scope]
) -> tuple[dict[str, Run], dict[str, str]]:
    """A run for each scope, and for each of stock's backends that cannot train here the reason."""
    runs, absent = {}, {}
    for name, scope in scopes.items():
        try:
            with scope():
                runs[name] = _train(model, batches)
        except RuntimeError as error:  # no kernel, or too little memory; ours and stock's default have no such excuse
            if name not in STOCK:
                raise
            absent[name] = str(error).split(".")[0]
    return runs, absent


def _time_all(model: gpt.ByteGPT, text: Tensor, scopes: Mapping[str, Scope], rounds: int) -> dict[str, Timing]:
    device = text.device.type
    trainer = Trainer(model, device)
    candidates = {name: Candidate(lambda: trainer.step(text), scope) for name, scope in scopes.items()}
    return time_interleaved(candidates, rounds=rounds, device=device, min_calls=1, round_ms=20.0, warmup=1)


def _show_calls(console: Console, model: gpt.ByteGPT, text: Tensor) -> None:
    """The attention calls of one step, and who takes them forward and backward."""
    with Recorder() as recorder:
        Trainer(model, text.device.type).loss(text)
    kinds = distinct(recorder.calls, torch_flashplug.explain)
    calls_table(console, kinds, text.is_cuda)
    for kind in kinds:
        plan = kind.plan
        if not text.is_cuda:
            took = "stock's CPU attention runs it, forward and backward, with the plugin or without"
        elif plan.backend == "stock":
            took = f"stock ({plan.stock_choice}) runs it, forward and backward"
        else:
            took = f"forward by {plan.backend}, {plan.kernel}; backward by {plan.gradients}"
        console.print(f"{kind.label()}: {took}.")


def _table(console: Console, recipe: Recipe, runs: Mapping[str, Run], timings: Mapping[str, Timing]) -> None:
    base = runs[BASE].losses
    table = Table(title=f"Training, {recipe.steps} steps of {recipe.batch} x {recipe.length} bytes")
    table.add_column("attention")
    for column in (
        "tokens / s",
        "spread",
        f"speed / {BASE}",
        "peak GiB",
        "loss",
        f"largest difference to {BASE}'s losses",
    ):
        table.add_column(column, justify="right")
    for name, run in runs.items():
        timing = timings[name]
        table.add_row(
            name,
            f"{recipe.batch * recipe.length / timing.ms * 1e3:.0f}",
            f"{timing.spread:.1%}",
            f"{paired_ratio(timings[BASE], timing):.3f}",
            "-" if run.peak_bytes is None else f"{run.peak_bytes / GIB:.2f}",
            f"{run.losses[0]:.3f} to {run.losses[-1]:.3f}",
            f"{(run.losses - base).abs().max():.1e}",
        )
    console.print(table)


def plot(runs: Mapping[str, Run], path: Path) -> str:
    """Draws the losses, and how far each is from stock's; says in a line where, or why not."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "No picture: matplotlib is not installed."
    figure = Figure(figsize=(13, 5))
    left, right = figure.subplots(1, 2)
    for name, run in runs.items():
        # Curves that agree lie on each other: ours is a broad band below the others.
        style = {"linewidth": 5, "alpha": 0.4} if name not in STOCK and name != BASE else {"linewidth": 1.2}
        left.plot(run.losses, label=name, **style)
        right.plot(run.losses - runs[BASE].losses, label=name, **style)
    left.set(title="Loss of the byte-level GPT", xlabel="step", ylabel="nats per byte")
    right.set(title=f"Loss minus the loss with the {BASE}", xlabel="step")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=110)
    return f"Loss curves: {path}"


def run(file: str | None = None, *, picture: str, rounds: int = 0, console: Console | None = None) -> None:
    """The whole training; prints, and writes the loss curves to `picture`. rounds 0: as many as the machine allows."""
    console = console or Console(width=max(Console().width, 120))
    on_gpu = torch.cuda.is_available()
    device, recipe = ("cuda", GPU_RECIPE) if on_gpu else ("cpu", CPU_RECIPE)
    rounds = rounds or (GPU_ROUNDS if on_gpu else CPU_ROUNDS)
    content, origin = read_text(file)
    where = torch.cuda.get_device_name() if on_gpu else "no GPU here: stock serves every call"
    console.print(
        f"[bold]torch_flashplug {torch_flashplug.__version__}[/] demo, training, torch {torch.__version__}; {where}"
    )
    model = gpt.build(recipe.shape, "cpu", torch.float32, SEED)
    batches = _batches(content, recipe).to(device)
    console.print(
        f"byte-level GPT, {recipe.shape.layers} layers, {recipe.shape.heads} heads over {recipe.shape.kv_heads} KV "
        f"heads of {recipe.shape.head_dim}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million fp32 "
        f"weights, bf16 autocast, AdamW; text: {origin}"
    )
    _show_calls(console, model, batches[0])
    scopes = all_scopes(on_gpu)
    runs, absent = train_all(model, batches, scopes)
    timings = _time_all(model, batches[0], {name: scopes[name] for name in runs}, rounds)
    _table(console, recipe, runs, timings)
    for name, reason in absent.items():
        console.print(f"not trained: {name} ({reason})")
    console.print(plot(runs, Path(picture)))
