"""Training part of the demo: one GPT trained on the same batches with every attention.

The demo prints losses, gradient errors, speed and memory. Every attention trains separate copies of the model from the
start, alone on the device. The training gives the losses and the added peak of memory (weights, AdamW's state,
activations). Tokens per second are measured in a separate pass. In that pass, whole steps (forward, backward, update)
of one model run with each attention in turn, and the result is the median of interleaved rounds.

The loss curves of two attentions diverge even if both attentions are correct, because of rounding. In a deep model with
random weights, a rounding error can be as large as the gradient of the weights, and training makes differences grow.
Two measurements distinguish rounding from a wrong gradient:

* Gradients. Every attention computes dq, dk and dv of the same calls, with the q, k, v and dout of a step. The errors
  are taken against fp64 math. Nothing is fed back, so that no error grows. A gradient wrong by 2 % has an error of 2 %,
  and rounding causes less than about 1 %. The gradients of the weights are compared with a model computed in fp32.
  Weight gradients show how rounding errors grow through the layers, and say nothing about a single attention call.
* Repeats. Every attention trains several times, from weights perturbed by about 2^-20. The perturbation is almost
  invisible in bf16, but changes roundings. So the band of the runs of an attention shows the effect of rounding. Run r
  of all attentions starts from the same weights. If only rounding differs, the runs of two attentions are samples of
  the same distribution. Then the number of steps with disjoint bands is about the number expected by chance. A
  deviation of a few steps is normal, because neighboring steps are correlated. If an attention learns something
  different, all runs of that attention leave the band together, and the bands are disjoint for most of the training.
  Only gross errors have this effect, such as gradients wrong by 30 %.
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
from .call_recorder import Call, OutputRecorder, Recorder, group_calls
from .inference import CPU_SHAPE, GPU_ROUNDS, calls_table
from .input_text import as_tokens, read_text, repeated
from .scopes import CPU_STOCK, STOCK, Scope, all_scopes, stock_backend

SEED = 0
# Divided by the width of the model. AdamW moves all terms of a sum over the width by the same amount, so that the sum
# moves by LEARNING_RATE.
LEARNING_RATE = 0.1
# Relative change of the weights between repeats. The change is far below a rounding to bf16, but some weights still
# round differently.
PERTURBATION = 2.0**-20
GPU_REPEATS, CPU_REPEATS = 5, 2
BASE = "plugin off"  # the reference of all comparisons
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Recipe:
    """Training recipe: the shape of the model, and `steps` batches of `batch` sequences of `length` bytes."""

    shape: gpt.Shape
    batch: int
    length: int
    steps: int


# The number of KV heads equals the number of heads, because the efficient backend does not support grouped heads. The
# sequences are not longer, because math keeps 1 GiB of scores per layer.
GPU_RECIPE = Recipe(gpt.Shape(layers=8, heads=16, kv_heads=16, head_dim=128), batch=1, length=4096, steps=50)
CPU_RECIPE = Recipe(CPU_SHAPE, batch=2, length=128, steps=12)


@dataclass(frozen=True, slots=True)
class Run:
    """Results of the trainings with one attention."""

    losses: Tensor  # (repeats, steps), on the CPU
    peak_bytes: int | None  # None if no allocator counts memory

    @property
    def mean(self) -> Tensor:
        return self.losses.mean(0)

    @property
    def band(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest loss of each step."""
        return self.losses.amin(0), self.losses.amax(0)

    def steps_apart(self, reference: Run) -> int:
        """Return the number of steps at which the bands of two runs are disjoint."""
        (low, high), (other_low, other_high) = self.band, reference.band
        return int(((low > other_high) | (high < other_low)).sum())


class Trainer:
    """Copy of a model with an optimizer. Weights are fp32; matrix products and attention are bf16 (autocast)."""

    def __init__(self, model: gpt.ByteGPT, device: str) -> None:
        self.device = device
        self.model = copy.deepcopy(model).to(device).train()
        rate = LEARNING_RATE / model.shape.width
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True)

    def loss(self, text: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            return gpt.next_byte_loss(self.model, text)

    def step(self, text: Tensor) -> Tensor:
        """Run forward, backward and update on `text` (B, S + 1), and return the loss before the update."""
        loss = self.loss(text)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def perturb(self, seed: int) -> None:
        """Perturb the weights, in the same way for every attention."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for weight in self.model.parameters():
            noise = torch.randn(weight.shape, generator=generator, device=self.device)
            weight.mul_(1 + PERTURBATION * noise)


def random_windows(content: bytes, recipe: Recipe) -> Tensor:
    """Return windows of the text at random positions, (steps, B, S + 1)."""
    tokens = as_tokens(repeated(content, max(len(content), 2 * recipe.length)))
    generator = torch.Generator().manual_seed(SEED)
    starts = torch.randint(len(tokens) - recipe.length, (recipe.steps, recipe.batch, 1), generator=generator)
    return tokens[starts + torch.arange(recipe.length + 1)]


def _losses(model: gpt.ByteGPT, batches: Tensor, seed: int) -> Tensor:
    """Run one training, and return the losses (steps,).

    A separate function, so that the model is freed before the next training starts.
    """
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
    """Train in every scope.

    Returns:
        The `Run` of each scope, and the reason for each stock backend that cannot train on this machine.
    """
    runs, absent = {}, {}
    for name, scope in scopes.items():
        try:
            with scope():
                runs[name] = _train(model, batches, repeats)
        except RuntimeError as error:  # no kernel or too little memory; only named stock backends may fail so
            if name not in STOCK | CPU_STOCK:
                raise
            absent[name] = str(error).split(".")[0]
    return runs, absent


def _relative(error: Tensor, exact: Tensor) -> float:
    return float(torch.linalg.vector_norm(error) / torch.linalg.vector_norm(exact))


def call_errors(trainer: Trainer, text: Tensor, scopes: Mapping[str, Scope]) -> dict[str, tuple[float, ...]]:
    """Return the relative L2 errors of dq, dk and dv in each scope, each the largest error of all layers.

    All scopes receive the q, k, v and dout of one step of BASE. The exact gradients are computed by fp64 math.
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
    """Return the relative L2 error of the gradients of all weights in each scope.

    The exact gradients are those of the model computed in fp32 with math attention.
    """
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
    """Print the attention calls of one step, and the kernels that run forward and backward."""
    with Recorder() as recorder:
        Trainer(model, text.device.type).loss(text)
    groups = group_calls(recorder.calls, torch_flashplug.explain)
    calls_table(console, groups, text.is_cuda)
    for group in groups:
        plan = group.plan
        if not text.is_cuda:
            took = "stock's CPU attention runs it, forward and backward, with the plugin or without"
        elif plan.backend == "stock":
            took = f"stock ({plan.stock_choice}) runs it, forward and backward"
        else:
            took = f"forward by {plan.backend}, {plan.kernel}; backward by {plan.gradients}"
        console.print(f"{group.label()}: {took}.")


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
    # Of all ways to distribute 2 N losses among two attentions, two ways leave the bands disjoint.
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
    """Return the table of gradient errors, at the first batch, and at the last batch with weights trained by BASE."""
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
    columns = [f"{when}: {tensor}" for when in ("start", "end") for tensor in ("dq", "dk", "dv", "weights")]
    return _table("Errors of gradients (relative L2)", columns, rows)


def plot(runs: Mapping[str, Run], path: Path) -> str:
    """Plot the mean losses, and the band of each attention with the band of BASE.

    Returns:
        A line that says where the picture is, or why there is none.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "No picture: matplotlib is not installed."
    base, compared = runs[BASE], {name: run for name, run in runs.items() if name != BASE}
    columns = -(-(1 + len(compared)) // 2)
    figure = Figure(figsize=(4.5 * columns, 8))
    curves, *panels = figure.subplots(2, columns, squeeze=False).flat
    for name, run in runs.items():
        curves.plot(run.mean, label=name, linewidth=1.2)
    curves.set(title="Mean loss of the byte-level GPT", xlabel="step", ylabel="nats per byte")
    curves.legend(fontsize=8)
    for panel, (name, run) in zip(panels, compared.items()):
        panel.sharey(panels[0])
        for label, shown, color in ((BASE, base, "0.4"), (name, run, "C0")):
            low, high = shown.band
            panel.fill_between(range(len(low)), low - base.mean, high - base.mean, color=color, alpha=0.3, linewidth=0)
            panel.plot(shown.mean - base.mean, color=color, label=label, linewidth=1.2)
        panel.set(title=f"{name}: loss minus mean loss, {BASE}", xlabel="step")
        panel.legend(fontsize=8)
    for panel in panels[len(compared) :]:
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
    """Train with every attention, print the tables, and draw the loss curves.

    Args:
        file: the text to train on; None for the default text.
        picture: the file for the loss curves.
        rounds: number of timing rounds; 0 for the default. Without a GPU, nothing is timed, because stock torch serves
            every call.
        repeats: number of trainings with each attention; 0 for the default.
        console: where to print the tables.
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
    batches = random_windows(content, recipe).to(device)
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
