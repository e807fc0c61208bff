"""Suite accuracy: errors of 8-bit attention against fp64, on identical 16-bit inputs.

The suite compares the 8-bit kernels of this project, by recipe, with several baselines. The baselines are the project's
16-bit kernels, FlashAttention-3's FP8, and 8-bit KV caches. FlashAttention-3 runs with a scale for each head and with a
scale for each tensor. `by_tensor` emulates FP8 with a scale for each tensor, in fp64 except for the rounding to 8 bits.

An error is the root mean square of the difference, divided by the root mean square of the fp64 answer. Errors are taken
over the last queries. Some inputs imitate the activations that published models are said to have
(testing/activations.py). The rest are recorded from the layers of the demo's GPT after training. Kernels alone are
timed on inputs with outliers: the result is a picture of error against speed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import cudnn_fp8
import torch
import torch.nn.functional as F
import workloads
from cached_decode import cached
from eightbit import LARGEST_ERROR, ROUND_MS, alone, by_head, fa3_calls, our_call
from harness import Bench, facts_of, refusal, row_of
from report import SHOWN
from torch import Tensor

from torch_flashplug.demo.call_recorder import Call, Recorder
from torch_flashplug.demo.input_text import read_text
from torch_flashplug.demo.model import next_byte_loss
from torch_flashplug.demo.precision import CPU_RECIPE, GPU_RECIPE, train_model
from torch_flashplug.demo.train import random_windows
from torch_flashplug.registry import quant_recipes
from torch_flashplug.testing import Case, Inputs, Masking, attention_math, new_case
from torch_flashplug.testing.activations import MODELS, activations
from torch_flashplug.testing.emulation_8bit import attend, quantize_by_amax

SEED, HEADS, BLOCK = 20261125, 2, 128
ROWS = 256  # errors are taken over the last 256 queries of a head
CACHE_ROWS = 64  # query rows in one call with an 8-bit cache: with more rows, the cache kernel is not selected
LAYERS = 4
RECORDED = {  # training recipes of the GPT; the recorded call has the context of the last text
    "cuda": replace(GPU_RECIPE, shape=replace(GPU_RECIPE.shape, layers=LAYERS), batch=2, length=4096, steps=250),
    "cpu": replace(CPU_RECIPE, shape=replace(CPU_RECIPE.shape, layers=LAYERS), length=512, steps=5),
}
Calls = dict[str, Callable[[], Tensor]]


def calls() -> Iterator[tuple[str, Case]]:
    """Yield pairs of an input source (a name in MODELS) and a case with few heads."""
    for D in (64, 128, 256):
        for S in (4096, 16384):
            for model in MODELS:
                yield model, new_case(f"{model}_d{D}_s{S}", (1, HEADS, HEADS), (S, S), (D, D))


def suite_accuracy(bench: Bench) -> None:
    for model, case in calls():
        if bench.take(case.name):
            _measure(bench, model, case, _inputs(*(x.to(bench.device) for x in activations(model, case, SEED))))
    for layer in range(LAYERS):
        if bench.take(f"recorded_layer{layer}"):
            call = recorded(bench.device)[layer]
            case = Case(f"recorded_layer{layer}", **call.shape, causal=call.causal)
            _measure(bench, "recorded", case, _inputs(call.q, call.k, call.v))


def _inputs(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    return Inputs(q, k, v, grad_out=q)


@functools.cache
def recorded(device: str) -> list[Call]:
    """Return the attention calls of the trained demo GPT on the last training text, one call per layer."""
    recipe, (content, _) = RECORDED[device], read_text(None)
    model = train_model(recipe, content, device)
    with torch.no_grad(), Recorder() as recorder:
        loss = next_byte_loss(model, random_windows(content, recipe)[-1, :1].to(device))
    print(f"recorded: {recipe.steps} steps of {recipe.batch} x {recipe.length} bytes, loss {float(loss):.3f}")
    return recorder.calls


def _by_tensor(x: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Quantize a tensor for FlashAttention-3 with a single scale, repeated for all heads.

    The result has the form of `eightbit.by_head`, which computes a scale for each head.
    """
    cast, scale = cudnn_fp8.by_tensor(x)
    return cast.transpose(1, 2), scale.view(1, 1).repeat(x.shape[0], kv_heads)


def _kernels(case: Case, inputs: Inputs) -> Calls:
    """Return complete calls whose kernels can be timed.

    The calls are those of this project, and those of FlashAttention-3 if the FlashAttention-3 wheel is installed.
    """
    found = {recipe: our_call(inputs, case, recipe) for recipe in quant_recipes.RECIPES}
    found["ours_16bit"] = our_call(inputs, case, quant_recipes.PRECISION_16BIT)
    for name, cast in (("fa3_fp8", by_head), ("fa3_fp8_tensor", _by_tensor)):
        if both := fa3_calls(inputs, case, cast):
            found[name] = both[0]
    return found


def _others(case: Case, inputs: Inputs) -> Calls:
    def by_tensor() -> Tensor:
        made = quantize_by_amax(*inputs, BLOCK)
        return attend(made, quant_recipes.RECIPES["e4m3"], case.D**-0.5, causal=case.causal).out

    def cache(kind: str) -> Tensor:
        q, key, value = cached(replace(inputs, q=inputs.q[:, :, -ROWS:]), kind)
        seen = torch.ones(ROWS, case.Sk, dtype=torch.bool, device=q.device).tril(case.Sk - ROWS)
        masks = seen.split(CACHE_ROWS) if case.causal else [None] * (ROWS // CACHE_ROWS)
        parts = zip(q.split(CACHE_ROWS, 2), masks, strict=True)
        return torch.cat([F.scaled_dot_product_attention(rows, key, value, mask) for rows, mask in parts], 2)

    caches = {f"cache_{kind}": functools.partial(cache, kind) for kind in ("int8", "e4m3_head")}
    return {"by_tensor": by_tensor, **caches}


def _widened(case: Case, inputs: Inputs) -> tuple[Case, Inputs]:
    """Repeat the heads and batches of a case until the size of the grid is reached."""
    batches, copies = workloads.TOKENS // case.Sk, workloads.WIDTH // case.D // case.Hq
    wide = (x.transpose(1, 2).repeat(batches, 1, copies, 1).transpose(1, 2) for x in inputs)
    return replace(case, B=batches, Hq=case.Hq * copies, Hkv=case.Hkv * copies), _inputs(*wide)


def _errors(few: Case, inputs: Inputs, calls: Calls) -> tuple[dict[str, float], dict[str, str]]:
    """Return the error of each call, and the reason of each call that cannot run.

    A call may have more heads and batches than the case: the additional heads and batches are copies.
    """
    mask = Masking(2 * few.causal)  # only the last rows are compared, so a causal mask is aligned to the bottom right
    right = attention_math(inputs.q[:, :, -ROWS:], inputs.k, inputs.v, mask=mask).out
    errors, refused = {}, {}
    for name, call in calls.items():
        try:
            out = call()[:1, : few.Hq, -ROWS:]
        except (RuntimeError, ValueError) as reason:  # no kernel holds these head dims
            refused[name] = refusal(reason)
            continue
        errors[name] = float((out.double() - right).norm() / right.norm())
    return errors, refused


@torch.no_grad()
def _measure(bench: Bench, source: str, few: Case, inputs: Inputs) -> None:
    on_gpu = bench.device == "cuda"  # no kernel of this project runs on a CPU: stock would answer the calls
    timed = source == SHOWN and on_gpu
    case, wide = _widened(few, inputs) if timed else (few, inputs)
    kernels = _kernels(case, wide) if on_gpu else {}
    errors, refused = _errors(few, inputs, kernels | _others(few, inputs))
    wrong = {name: errors[name] for name, most in LARGEST_ERROR.items() if errors.get(name, 0.0) > most}
    if source == "normal" and wrong:
        raise SystemExit(f"{few.name}: wrong: {wrong}")
    repeats = max(2, int(ROUND_MS / (workloads.bound_ms(case) * 1.5)))
    kernels = {name: call for name, call in kernels.items() if name in errors}
    timings = alone(kernels, bench.rounds, repeats) if timed else {}
    row = row_of(few.name, {}, **facts_of(case), input=source, errors=errors, refused=refused)
    row["alone_ms"] = {name: timing.ms for name, timing in timings.items()}
    row["spread"] = {name: round(timing.spread, 4) for name, timing in timings.items()}
    bench.add(row)
    print("    " + ", ".join(f"{name} {100 * error:.3g} %" for name, error in errors.items()))
