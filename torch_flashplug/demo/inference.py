"""Main part of the demo, with tables of the model's attention calls, the errors and the times."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import torch_flashplug

from ..registry.architectures import KERNEL_BACKENDS
from ..testing import Candidate, Masking, attention_math, measure_error, paired_ratio, time_interleaved
from . import model as gpt
from . import without_gpu
from .call_recorder import Call, CallGroup, Recorder, group_calls
from .input_text import as_tokens, read_text
from .scopes import STOCK, Scope, all_scopes, plugin_off

GPU_SHAPE, GPU_PROMPT, GPU_STEPS = gpt.Shape(layers=4, heads=16, kv_heads=4, head_dim=128), 8192, 64
CPU_SHAPE, CPU_PROMPT, CPU_STEPS = gpt.Shape(layers=2, heads=4, kv_heads=2, head_dim=64), 1024, 24
GPU_ROUNDS = 11
PLANNED_GPUS = (
    "h100",
    "h200",
    "a100",
)  # keys of api.backend.DEVICES: GPUs for which a machine without a GPU shows plans
ON_H100 = (  # the last sentence of the demo on a machine without a GPU
    f"On an H100 this demo reads the first {GPU_PROMPT} bytes with a model of {GPU_SHAPE.layers} layers and "
    f"{GPU_SHAPE.heads} heads of {GPU_SHAPE.head_dim} on these kernels, and prints the plan of each attention call, "
    f"its error against fp64 and the time of prefill and decode, each beside stock torch's."
)
SLOWDOWN_MARK = 1.03  # a ratio auto / stock above this value is marked


def calls_table(console: Console, groups: list[CallGroup], on_gpu: bool) -> None:
    """Print each group of calls with its plan for this machine, or, without a GPU, for each GPU of PLANNED_GPUS."""
    table = Table(title="Attention calls of the model, and how each is planned", show_lines=True)
    for column in ("call", "times", "where", "plan", "why"):
        table.add_column(column, overflow="fold", no_wrap=column in ("times", "where", "plan"))
    for group in groups:
        for where, plan in ({"here": group.plan} if on_gpu else plans_elsewhere(group.last)).items():
            served_by = plan.stock_choice if plan.backend == "stock" else plan.kernel
            why = [plan.row] if plan.row else []
            why += [f"not {backend}: {plan.reasons[backend]}" for backend in KERNEL_BACKENDS if backend in plan.reasons]
            why += [f"gradients: {plan.gradients}"] * bool(plan.gradients)
            name = plan.backend + (f"\n{served_by}" if served_by else "")
            table.add_row(group.label(), str(group.count), where, name, "\n".join(why))
    console.print(table)


def plans_elsewhere(call: Call) -> dict[str, object]:
    """Return the plans of a call for the GPUs of PLANNED_GPUS. Equal plans share an entry: "on h100, h200"."""
    plans = {}
    for device in PLANNED_GPUS:
        plan = torch_flashplug.explain(call.q, call.k, call.v, **call.kwargs, device=device)
        plans.setdefault((plan.backend, plan.kernel, plan.row, *plan.reasons.items()), ([], plan))[0].append(device)
    return {f"on {', '.join(devices)}": plan for devices, plan in plans.values()}


def _errors_table(console: Console, groups: list[CallGroup], scopes: dict[str, Scope]) -> None:
    """Print the RMS error of each call against fp64.

    The last column is the error of "auto" divided by the error of the best stock backend.
    """
    table = Table(title="RMS error against fp64 math (smaller is better)")
    table.add_column("call")
    for name in scopes:
        table.add_column(name, justify="right")
    table.add_column("auto / best stock", justify="right")
    for group in groups:
        call = group.last
        scale = call.kwargs.get("scale")
        exact = attention_math(call.q, call.k, call.v, scale=scale, mask=Masking(int(call.causal))).out
        errors: dict[str, float] = {}
        for name, scope in scopes.items():
            try:
                with scope(), torch.no_grad():
                    out = call.run()
                errors[name] = measure_error(out, exact, out).rms
            except (RuntimeError, ValueError):
                continue  # the backend has no kernel for the call
        best = min((name for name in STOCK if name in errors), key=errors.get, default=None)
        ratio = f"{errors['auto'] / errors[best]:.3f} ({best})" if best and errors[best] else "-"
        cells = [f"{errors[name]:.3e}" if name in errors else "no kernel" for name in scopes]
        table.add_row(group.label(), *cells, ratio)
    console.print(table)


def _compare_bytes(console: Console, ours: tuple[Tensor, Tensor], stock: tuple[Tensor, Tensor]) -> None:
    (chosen, logits), (expected, stock_logits) = ours, stock
    differ = (chosen != expected).nonzero()
    if not len(differ):
        console.print(f"Greedy bytes: all {len(chosen)} equal to stock's. First ones: {bytes(chosen[:16].tolist())!r}")
        return
    at = int(differ[0])
    top = stock_logits[at].float().topk(2).values
    largest_change = (logits[at].float() - stock_logits[at].float()).abs().max()
    console.print(
        f"Greedy bytes: equal to stock's up to byte {at}, then they part: "
        f"ours {int(chosen[at])}, stock {int(expected[at])}. Stock's two best logits there are "
        f"{float(top[0] - top[1]):.4f} apart, and rounding moved logits by up to {float(largest_change):.4f}."
    )


def _times_table(console: Console, runs: dict[str, dict[str, Candidate]], device: str, rounds: int) -> None:
    """Print the times of prefill and decode of the whole model in every scope, with ratios paired by round."""
    for phase, candidates in runs.items():
        timings = time_interleaved(candidates, rounds=rounds, device=device, min_calls=1, round_ms=20.0, warmup=1)
        base = timings["plugin off"]
        table = Table(title=f"{phase}, whole model, {rounds} rounds")
        for column in ("attention", "ms", "spread", "times plugin off"):
            table.add_column(column, justify="left" if column == "attention" else "right")
        for name, timing in timings.items():
            ratio = paired_ratio(timing, base)
            mark = "red" if name == "auto" and ratio > SLOWDOWN_MARK else "default"
            table.add_row(name, f"{timing.ms:.3f}", f"{timing.spread:.1%}", f"[{mark}]{ratio:.3f}[/]")
        console.print(table)


def _time_candidates(
    model: gpt.ByteGPT, prompt: Tensor, steps: int, scopes: dict[str, Scope]
) -> dict[str, dict[str, Candidate]]:
    """Return the candidates for timing, by phase and scope, without scopes that have no kernel for the phase."""
    capacity = prompt.shape[1] + steps
    logits, cache = gpt.prefill(model, prompt, capacity)
    filled = cache.length

    def run_prefill() -> None:
        gpt.prefill(model, prompt, capacity)

    def run_decode() -> None:
        cache.length = filled
        gpt.decode(model, logits, cache, steps)

    runs: dict[str, dict[str, Candidate]] = {}
    for phase, call in ((f"Prefill of {prompt.shape[1]} bytes", run_prefill), (f"Decode of {steps} bytes", run_decode)):
        runs[phase] = {}
        for name, scope in scopes.items():
            try:
                with scope():
                    call()
                runs[phase][name] = Candidate(call, scope)
            except (RuntimeError, ValueError):
                continue  # no kernel, as the table of errors reports
    return runs


@torch.inference_mode()
def run(file: str | None = None, *, rounds: int = 0, console: Console | None = None) -> None:
    """Run the whole demo and print the results.

    Args:
        file: the text for the model; None for the default text.
        rounds: the number of timing rounds on a GPU; 0 for the default. Without a GPU, nothing is timed.
        console: where to print.
    """
    console = console or Console(width=max(Console().width, 120))
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    shape, longest, steps = (GPU_SHAPE, GPU_PROMPT, GPU_STEPS) if on_gpu else (CPU_SHAPE, CPU_PROMPT, CPU_STEPS)
    content, origin = read_text(file)
    content = content[:longest]
    where = torch.cuda.get_device_name() if on_gpu else "no GPU here: torch's CPU attention serves every call"
    console.print(f"[bold]torch_flashplug {torch_flashplug.__version__}[/] demo, torch {torch.__version__}; {where}")
    console.print(
        f"byte-level GPT, {shape.layers} layers, {shape.heads} heads over {shape.kv_heads} KV heads of "
        f"{shape.head_dim}, bf16, random weights; prompt: the first {len(content)} bytes of {origin}, "
        f"then {steps} greedy bytes"
    )
    model = gpt.build(shape, device, torch.bfloat16)
    prompt = as_tokens(content).to(device)[None]
    with Recorder() as recorder:
        logits, cache = gpt.prefill(model, prompt, prompt.shape[1] + steps)
        ours = gpt.decode(model, logits, cache, steps)
    groups = group_calls(recorder.calls, torch_flashplug.explain)
    calls_table(console, groups, on_gpu)
    if not on_gpu:
        without_gpu.show(console, model, prompt, ON_H100)
        return
    scopes = all_scopes(on_gpu)
    _errors_table(console, groups, scopes)
    with plugin_off():
        logits, cache = gpt.prefill(model, prompt, prompt.shape[1] + steps)
        stock = gpt.decode(model, logits, cache, steps)
    _compare_bytes(console, ours, stock)
    _times_table(console, _time_candidates(model, prompt, steps, scopes), device, rounds or GPU_ROUNDS)
