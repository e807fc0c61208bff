"""The demo's training: one GPT, the same batches under every attention; losses, gradients, speed, memory.

Every attention trains its own copies from the start, alone on the device: its losses, and the peak of memory that this
adds (weights, AdamW's state, activations). Tokens per second come from a pass of their own, where whole steps (forward,
backward, update) of one model run under each attention in turn: the median of interleaved rounds.

Curves of two attentions part even if both are right: they round differently, the random weights of a deep model make
any rounding as large as the gradient of its weights, and training makes differences grow. Two measurements tell that
from a wrong gradient:

* Gradients. Every attention computes dq, dk and dv of the same calls, with the q, k, v and dout of a step, and their
  errors are taken against fp64 math. Nothing is fed back, so nothing grows: a gradient wrong by 2 % has an error of
  2 %, where rounding makes less than 1 % or so. Gradients of the weights, against a model all in fp32, stand beside
  them: they say how much rounding grows on its way through the layers, and are no judge of an attention.
* Repeats. Every attention trains several times, from weights that are off by about 2^-20: bf16 hardly sees it, yet
  roundings change, and so the band of an attention's own runs is what rounding does. Run r of all attentions starts
  from the same weights. If rounding is all, runs of two attentions are draws of one distribution: their bands have no
  loss in common at as many steps as chance says, give or take a few (steps that follow each other go together).
  Where an attention learns something else, its runs leave together: bands part for most of the training. Only gross
  errors do that, such as gradients wrong by 30 %.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import torch_flashplug

from ..testing import Candidate, Masking, Timing, grads_math, paired_ratio, time_interleaved
from . import model as gpt
from .record import Call, OutputRecorder, Recorder, distinct
from .scopes import CPU_STOCK, STOCK, Scope, all_scopes, stock_backend
from .show import CPU_SHAPE, GPU_ROUNDS, calls_table
from .text import as_tokens, read_text, repeated

SEED = 0
LEARNING_RATE = 0.1  # over the width: AdamW moves all terms of a sum over the width alike, so their sum moves by this
PERTURBATION = 2.0**-20  # of weights, between repeats: far below a rounding to bf16, yet some weights round otherwise
GPU_REPEATS, CPU_REPEATS = 5, 2
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
GPU_RECIPE = Recipe(gpt.Shape(layers=8, heads=16, kv_heads=16, head_dim=128), batch=1, length=4096, steps=50)
CPU_RECIPE = Recipe(CPU_SHAPE, batch=2, length=128, steps=12)


@dataclass(frozen=True, slots=True)
class Run:
    """What the trainings under one attention left behind."""

    losses: Tensor  # (repeats, steps), on the CPU
    peak_bytes: int | None  # None where no allocator counts

    @property
    def mean(self) -> Tensor:
        return self.losses.mean(0)

    @property
    def band(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest loss of each step."""
        return self.losses.amin(0), self.losses.amax(0)

    def steps_apart(self, other: Run) -> int:
        """At how many steps the bands have no loss in common."""
        (low, high), (other_low, other_high) = self.band, other.band
        return int(((low > other_high) | (high < other_low)).sum())


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

    @torch.no_grad()
    def perturb(self, seed: int) -> None:
        """The same change of the weights under every attention."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for weight in self.model.parameters():
            noise = torch.randn(weight.shape, generator=generator, device=self.device)
            weight.mul_(1 + PERTURBATION * noise)


def windows(content: bytes, recipe: Recipe) -> Tensor:
    """Windows of the text at random places, (steps, B, S + 1)."""
    tokens = as_tokens(repeated(content, max(len(content), 2 * recipe.length)))
    generator = torch.Generator().manual_seed(SEED)
    starts = torch.randint(len(tokens) - recipe.length, (recipe.steps, recipe.batch, 1), generator=generator)
    return tokens[starts + torch.arange(recipe.length + 1)]


def _losses(model: gpt.ByteGPT, batches: Tensor, seed: int) -> Tensor:
    """Of one training, (steps,). A function of its own: its model is gone before the next one comes."""
    trainer = Trainer(model, batches.device.type)
    trainer.perturb(seed)
    return torch.stack([trainer.step(text) for text in batches]).cpu()


def _train(model: gpt.ByteGPT, batches: Tensor, repeats: int) -> Run:
    on_gpu = batches.is_cuda
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses = torch.stack([_losses(model, batches, seed) for seed in range(repeats)])
    return Run(losses, torch.cuda.max_memory_allocated() - before if on_gpu else None)


def train_all(
    model: gpt.ByteGPT, batches: Tensor, scopes: Mapping[str, Scope], repeats: int
) -> tuple[dict[str, Run], dict[str, str]]:
    """A Run for each scope, and for each of stock's backends that cannot train here the reason."""
    runs, absent = {}, {}
    for name, scope in scopes.items():
        try:
            with scope():
                runs[name] = _train(model, batches, repeats)
        except RuntimeError as error:  # no kernel, or too little memory; ours and stock's default have no such excuse
            if name not in STOCK | CPU_STOCK:
                raise
            absent[name] = str(error).split(".")[0]
    return runs, absent


def _relative(error: Tensor, exact: Tensor) -> float:
    return float(torch.linalg.vector_norm(error) / torch.linalg.vector_norm(exact))


def call_errors(trainer: Trainer, text: Tensor, scopes: Mapping[str, Scope]) -> dict[str, tuple[float, ...]]:
    """Relative L2 errors of dq, dk and dv under each scope, each the worst of all layers. All scopes get the q, k, v
    and dout of one step of BASE; exact is what fp64 math makes of them.
    """
    with scopes[BASE](), OutputRecorder() as watch:
        loss = trainer.loss(text)
    douts = torch.autograd.grad(loss, watch.outs)
    worst = dict.fromkeys(scopes, (0.0, 0.0, 0.0))
    for call, dout in zip(watch.calls, douts, strict=True):
        inputs = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
        exact = grads_math(*inputs, dout, mask=Masking(int(call.causal)))
        for name, scope in scopes.items():
            with scope():
                grads = torch.autograd.grad(Call(*inputs, call.kwargs).run(), inputs, dout)
            errors = (_relative(grad - right, right) for grad, right in zip(grads, exact, strict=True))
            worst[name] = tuple(map(max, worst[name], errors))
    return worst


def weight_errors(trainer: Trainer, text: Tensor, scopes: Mapping[str, Scope]) -> dict[str, float]:
    """Relative L2 error of the gradients of all weights under each scope; exact is the model all in fp32, with math."""
    weights = list(trainer.model.parameters())

    def gradients(loss: Tensor) -> Tensor:
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, weights)])

    with stock_backend(STOCK["math"]):
        exact = gradients(gpt.next_byte_loss(trainer.model, text))
    errors = {}
    for name, scope in scopes.items():
        with scope():
            errors[name] = _relative(gradients(trainer.loss(text)) - exact, exact)
    return errors


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


def _table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    table = Table(title=title)
    table.add_column("attention")
    for column in columns:
        table.add_column(column, justify="right")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _speed_table(recipe: Recipe, runs: Mapping[str, Run], timings: Mapping[str, Timing]) -> Table:
    rows = {
        name: (
            f"{recipe.batch * recipe.length / timing.ms * 1e3:.0f}",
            f"{timing.spread:.1%}",
            f"{paired_ratio(timings[BASE], timing):.3f}",
            "-" if runs[name].peak_bytes is None else f"{runs[name].peak_bytes / GIB:.2f}",
        )
        for name, timing in timings.items()
    }
    title = f"Training, steps of {recipe.batch} x {recipe.length} bytes"
    return _table(title, ("tokens / s", "spread", f"speed / {BASE}", "peak GiB"), rows)


def _loss_table(runs: Mapping[str, Run]) -> Table:
    base = runs[BASE]
    repeats, steps = base.losses.shape
    # Of all ways to deal 2 N losses to two attentions, two leave all of the one's below all of the other's.
    by_chance = steps * 2 / math.comb(2 * repeats, repeats)
    rows = {}
    for name, run in runs.items():
        low, high = run.band
        rows[name] = (
            f"{run.mean[0]:.3f} to {run.mean[-1]:.3f}",
            f"{(run.mean - base.mean).abs().max():.1e}",
            f"{(high - low).max():.1e}",
            str(run.steps_apart(base)),
        )
    columns = (
        "mean loss",
        f"mean against {BASE}'s, largest difference",
        "own runs, largest spread",
        f"steps outside {BASE}'s band (chance: {by_chance:.1f})",
    )
    return _table(f"Losses, {steps} steps, {repeats} runs of each attention", columns, rows)


def _gradient_table(model: gpt.ByteGPT, batches: Tensor, scopes: Mapping[str, Scope]) -> Table:
    """At the first batch, then with weights that BASE trained, at the last batch."""
    trainer = Trainer(model, batches.device.type)

    def measure(text: Tensor) -> dict[str, list[str]]:
        of_calls, of_weights = call_errors(trainer, text, scopes), weight_errors(trainer, text, scopes)
        return {name: [f"{error:.2%}" for error in (*of_calls[name], of_weights[name])] for name in scopes}

    start = measure(batches[0])
    with scopes[BASE]():
        for text in batches:
            trainer.step(text)
    end = measure(batches[-1])
    rows = {name: start[name] + end[name] for name in scopes}
    columns = [f"{when}: {what}" for when in ("start", "end") for what in ("dq", "dk", "dv", "weights")]
    return _table("Errors of gradients (relative L2)", columns, rows)


def plot(runs: Mapping[str, Run], path: Path) -> str:
    """Draws the mean losses, and beside stock's band that of each attention; says in a line where, or why not."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "No picture: matplotlib is not installed."
    base, others = runs[BASE], {name: run for name, run in runs.items() if name != BASE}
    columns = -(-(1 + len(others)) // 2)
    figure = Figure(figsize=(4.5 * columns, 8))
    curves, *panels = figure.subplots(2, columns, squeeze=False).flat
    for name, run in runs.items():
        curves.plot(run.mean, label=name, linewidth=1.2)
    curves.set(title="Mean loss of the byte-level GPT", xlabel="step", ylabel="nats per byte")
    curves.legend(fontsize=8)
    for panel, (name, run) in zip(panels, others.items()):
        panel.sharey(panels[0])
        for label, shown, color in ((BASE, base, "0.4"), (name, run, "C0")):
            low, high = shown.band
            panel.fill_between(range(len(low)), low - base.mean, high - base.mean, color=color, alpha=0.3, linewidth=0)
            panel.plot(shown.mean - base.mean, color=color, label=label, linewidth=1.2)
        panel.set(title=f"{name}: loss minus mean loss, {BASE}", xlabel="step")
        panel.legend(fontsize=8)
    for panel in panels[len(others) :]:
        panel.set_axis_off()
    for axis in (curves, *panels):
        axis.grid(alpha=0.3)
    figure.suptitle(f"Mean, smallest and largest of {len(base.losses)} runs of each attention", fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=110)
    return f"Loss curves: {path}"


def run(
    file: str | None = None, *, picture: str, rounds: int = 0, repeats: int = 0, console: Console | None = None
) -> None:
    """Train under every attention, print the tables, and draw the loss curves.

    Args:
        file: the text to train on; None for the default text.
        picture: where the loss curves are written.
        rounds: of timing; 0 for the default. Without a GPU nothing is timed, since stock torch serves every call.
        repeats: trainings under each attention; 0 for the default.
        console: where the tables are printed.
    """
    console = console or Console(width=max(Console().width, 120))
    on_gpu = torch.cuda.is_available()
    device, recipe = ("cuda", GPU_RECIPE) if on_gpu else ("cpu", CPU_RECIPE)
    repeats = repeats or (GPU_REPEATS if on_gpu else CPU_REPEATS)
    content, origin = read_text(file)
    where = torch.cuda.get_device_name() if on_gpu else "no GPU here: stock serves every call, and nothing is timed"
    console.print(
        f"[bold]torch_flashplug {torch_flashplug.__version__}[/] demo, training, torch {torch.__version__}; {where}"
    )
    model = gpt.build(recipe.shape, device, torch.float32, SEED)
    batches = windows(content, recipe).to(device)
    console.print(
        f"byte-level GPT, {recipe.shape.layers} layers, {recipe.shape.heads} heads over {recipe.shape.kv_heads} KV "
        f"heads of {recipe.shape.head_dim}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million fp32 "
        f"weights, bf16 autocast, AdamW; text: {origin}"
    )
    _show_calls(console, model, batches[0])
    scopes = all_scopes(on_gpu)
    runs, absent = train_all(model, batches, scopes, repeats)
    scopes = {name: scopes[name] for name in runs}
    if on_gpu:
        timings = _time_all(model, batches[0], scopes, rounds or GPU_ROUNDS)
        console.print(_speed_table(recipe, runs, timings))
    console.print(_loss_table(runs))
    console.print(_gradient_table(model, batches, scopes))
    for name, reason in absent.items():
        console.print(f"not trained: {name} ({reason})")
    console.print(plot(runs, Path(picture)))
