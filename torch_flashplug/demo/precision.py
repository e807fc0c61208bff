"""The demo's fewer bits: a GPT that has learned a text reads it in 16 bits and in 8: what that costs in perplexity, and
which bytes it goes on with.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import torch_flashplug

from ..registry import quant_recipes
from . import model as gpt
from .record import Recorder, distinct
from .scopes import Scope
from .text import as_tokens, read_text, repeated
from .train import Recipe, Trainer, windows

GPU_RECIPE = Recipe(gpt.Shape(layers=4, heads=8, kv_heads=8, head_dim=128), batch=8, length=1024, steps=150)
CPU_RECIPE = Recipe(gpt.Shape(layers=2, heads=4, kv_heads=4, head_dim=64), batch=4, length=128, steps=20)
PROMPT, STEPS, SHOWN = 256, 64, 24  # bytes: read first, written, and of these shown


def learned(recipe: Recipe, content: bytes, device: str) -> gpt.ByteGPT:
    """A model that has trained on a text, in bf16."""
    torch.manual_seed(0)
    trainer = Trainer(gpt.build(recipe.shape, "cpu", torch.float32), device)
    for text in windows(content, recipe).to(device):
        trainer.step(text)
    return trainer.model.to(torch.bfloat16).eval()


def _scopes(precision: str, on_gpu: bool) -> dict[str, Scope]:
    """16 bits, and what is asked for, also where it is not faster; without a GPU there are no kernels to force."""
    backend = "fa3" if on_gpu else "auto"
    named = quant_recipes.named(precision)
    names = [quant_recipes.SIXTEEN] + [named] * (named != quant_recipes.SIXTEEN)
    return {name: lambda name=name: torch_flashplug.sdpa_backend(backend, precision=name) for name in names}


@torch.inference_mode()
def _read(model: gpt.ByteGPT, text: Tensor) -> tuple[float, Tensor]:
    """Perplexity of a text (B, S + 1), and the bytes (STEPS,) behind the beginning of its first row."""
    loss = gpt.next_byte_loss(model, text)
    logits, cache = gpt.prefill(model, text[:1, :PROMPT], PROMPT + STEPS)
    return float(loss.exp()), gpt.decode(model, logits, cache, STEPS)[0]


def run(precision: str, file: str | None = None, *, console: Console | None = None) -> None:
    """Trains, reads, prints. Raises ValueError for a precision that there is not."""
    console = console or Console(width=max(Console().width, 120))
    on_gpu = torch.cuda.is_available()
    device, recipe = ("cuda", GPU_RECIPE) if on_gpu else ("cpu", CPU_RECIPE)
    scopes = _scopes(precision, on_gpu)
    content, origin = read_text(file)
    model = learned(recipe, content, device)
    length = max(recipe.length, PROMPT)
    tokens = as_tokens(repeated(content, recipe.batch * length + 1)).to(device)
    text = torch.stack([tokens[i * length : (i + 1) * length + 1] for i in range(recipe.batch)])
    table = Table(title=f"A GPT after {recipe.steps} steps on {origin}, reading it")
    for column in ("precision", "perplexity", "calls in it", "goes on with", "equal bytes"):
        table.add_column(column, justify="left" if column in ("precision", "goes on with") else "right")
    first = None
    for name, scope in scopes.items():
        with scope():
            with Recorder() as recorder:
                perplexity, chosen = _read(model, text)
            kinds = distinct(recorder.calls, torch_flashplug.explain)
        calls = sum(kind.count for kind in kinds if (kind.plan.precision or quant_recipes.SIXTEEN) == name)
        first = chosen if first is None else first
        same = int((chosen == first).cumprod(0).sum())
        written = repr(bytes(chosen[:SHOWN].tolist()))
        table.add_row(name, f"{perplexity:.4f}", str(calls), written, f"{same} of {STEPS}")
    console.print(f"[bold]torch_flashplug {torch_flashplug.__version__}[/] demo, precision, torch {torch.__version__}")
    if not on_gpu:
        console.print("no GPU here: nothing multiplies in 8 bits, and the rows are alike")
    console.print(table)
    for name in scopes:
        if name != quant_recipes.SIXTEEN:
            console.print(f"{name}: {quant_recipes.in_words(name)}")
