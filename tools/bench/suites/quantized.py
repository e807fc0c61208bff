"""8-bit suites: attention by recipe (eightbit), errors against fp64 (accuracy), and 8-bit KV caches (cache8).

Suite eightbit times kernels alone, and complete calls that include the quantization. `ours_ahead` is a complete call
with key and value that were quantized before, and `quantize_kv` is that part. The baselines are the project's
16-bit kernels, FlashAttention-3's FP8 and cuDNN's FP8 kernel alone. The operands of FlashAttention-3 are quantized with
torch functions, by the largest entry of each head. Times of kernels alone come from the profiler. These times contain
all kernels that a call launches, except the project's quantization kernels.

Suite accuracy compares errors of 8-bit attention on identical 16-bit inputs: the 8-bit kernels of this project, by
recipe, with several baselines. The baselines are the project's 16-bit kernels, FlashAttention-3's FP8, and 8-bit KV
caches. FlashAttention-3 runs with a scale for each head and with a scale for each tensor. `by_tensor` emulates FP8 with
a scale for each tensor, in fp64 except for the rounding to 8 bits. An error is the root mean square of the difference,
divided by the root mean square of the fp64 answer. Errors are taken over the last queries. Some inputs imitate the
activations that published models are said to have (testing/activations.py). The rest are recorded from the layers of
the demo's GPT after training. Kernels alone are timed on inputs with outliers: the result is a picture of error against
speed.

Suite cache8 decodes one query row against 8-bit KV caches in memory, and compares with the project's 16-bit decode. All
times are device times of replayed CUDA graphs. A graph visits so many copies of K and V that no copy is still in L2 at
the next visit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tools.bench import baselines, cudnn_fp8, workloads
from tools.bench.report import SHOWN
from tools.bench.runner import Bench, facts_of, graphed, refusal, row_of
from tools.bench.suites import decode
from torch_flashplug import QuantizedKV, QuantizedTensor, attention, quantize_kv, sdpa_backend
from torch_flashplug.demo.call_recorder import Call, Recorder
from torch_flashplug.demo.input_text import read_text
from torch_flashplug.demo.model import next_byte_loss
from torch_flashplug.demo.precision import CPU_RECIPE, GPU_RECIPE, train_model
from torch_flashplug.demo.train import random_windows
from torch_flashplug.ops.quantize_reference import in_int8, mean_of_finite, rotate
from torch_flashplug.registry import quant_recipes
from torch_flashplug.registry.quant_recipes import FORMAT_MAX
from torch_flashplug.testing import (
    Candidate,
    Case,
    Inputs,
    Masking,
    Timing,
    attention_math,
    make_inputs,
    new_case,
    time_interleaved,
)
from torch_flashplug.testing.activations import MODELS, activations
from torch_flashplug.testing.emulation_8bit import attend, quantize_by_amax

# ---- suite eightbit ----

QUANTIZATION_KERNELS = "quantize"  # text in the names of this project's quantization kernels
# Largest allowed relative errors on normally distributed inputs: above, a result is wrong.
LARGEST_ERROR = {"qk8": 0.03, "8bit": 0.06, "e4m3": 0.08}
ROUND_MS = 8.0  # time per candidate and round


def recipe_calls() -> Iterator[tuple[str, Case, str]]:
    for case in workloads.eight_bits():
        for recipe in quant_recipes.RECIPES:
            yield f"{recipe}_{case.name}", case, recipe


def suite_eightbit(bench: Bench) -> None:
    for name, case, recipe in recipe_calls():
        if bench.take(name):
            _measure_recipe(bench, name, case, recipe)


def our_call(inputs: Inputs, case: Case, precision: str) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with sdpa_backend("fa3", precision=precision):
            return F.scaled_dot_product_attention(*inputs, **case.sdpa_kwargs())

    return call


def quantize_call(inputs: Inputs, precision: str) -> Callable[[], QuantizedKV]:
    """Return the call that quantizes key and value once."""
    k, v = (x.transpose(1, 2) for x in (inputs.k, inputs.v))
    return lambda: quantize_kv(k, v, precision=precision)


def ahead_call(inputs: Inputs, case: Case, precision: str) -> Callable[[], Tensor]:
    """Return the call with key and value that were quantized before."""
    kv, q, causal = quantize_call(inputs, precision)(), inputs.q.transpose(1, 2), "top_left" if case.causal else False
    return lambda: attention(q, kv, causal=causal).transpose(1, 2)


def by_head(x: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Quantize a tensor (B, H, S, D) for FlashAttention-3, with a common scale for all heads that share a KV head.

    Returns:
        The values in e4m3, of shape (B, S, H, D), and the scales, of shape (B, kv_heads).
    """
    grouped = x.transpose(1, 2).unflatten(2, (kv_heads, -1))
    scale = grouped.abs().amax((1, 3, 4)).float() / quant_recipes.FORMAT_MAX["e4m3"]
    return (grouped / scale[:, None, :, None, None]).flatten(2, 3).to(torch.float8_e4m3fn), scale


def fa3_calls(
    inputs: Inputs, case: Case, cast: Callable[[Tensor, int], tuple[Tensor, Tensor]] = by_head
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]] | None:
    """Return two calls of FlashAttention-3 in FP8: attention on ready operands, and attention with quantization.

    The result is None if the wheel is not installed.
    """
    function = baselines.wheel("fa3")
    if function is None:
        return None

    def attend(operands: list[tuple[Tensor, Tensor]]) -> Tensor:
        (q, q_descale), (k, k_descale), (v, v_descale) = operands
        descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        out = function(q, k, v, causal=case.causal, **descales)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    def operands() -> list[tuple[Tensor, Tensor]]:
        return [cast(x, case.Hkv) for x in inputs]

    return functools.partial(attend, operands()), lambda: attend(operands())


def _recipe_error(case: Case, inputs: Inputs, out: Tensor) -> float:
    """Return the relative error of the last rows of the first head against fp64."""
    rows = min(case.Sq, 256)
    few = inputs.q[:1, :1, -rows:], inputs.k[:1, :1], inputs.v[:1, :1]
    right = attention_math(*few, mask=Masking(2 * case.causal)).out  # only last rows: align to bottom right
    return float((out[:1, :1, -rows:].double() - right).norm() / right.norm())


def time_kernels(calls: dict[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, Timing]:
    """Return the device time of each call's kernels, without the quantization kernels of this project.

    The calls are interleaved. The first round is not counted.
    """
    mark = torch.zeros(1, dtype=torch.int64, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(rounds + 1):
            for call in calls.values():
                mark.add_(1)
                for _ in range(repeats):
                    call()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    groups: list[float] = []
    for event in sorted(events, key=lambda event: event.time_range.start):
        if "CUDAFunctorOnSelf_add<long>" in event.name:
            groups.append(0.0)
        elif groups and QUANTIZATION_KERNELS not in event.name:
            groups[-1] += event.time_range.elapsed_us() / 1000 / repeats
    assert len(groups) == (rounds + 1) * len(calls), f"profiler recorded {len(groups)} groups of kernels"
    return {name: Timing(tuple(groups[i + len(calls) :: len(calls)])) for i, name in enumerate(calls)}


def _measure_recipe(bench: Bench, name: str, case: Case, recipe: str) -> None:
    inputs = make_inputs(case, bench.device)
    refused: dict[str, str] = {}
    with torch.no_grad():
        ours, ours_16bit = our_call(inputs, case, recipe), our_call(inputs, case, quant_recipes.PRECISION_16BIT)
        try:
            error = _recipe_error(case, inputs, ours())
        except RuntimeError as reason:  # the recipe has no kernel for the head dims of this case
            bench.skipped[name] = refusal(reason)
            return
        if error > LARGEST_ERROR[recipe]:
            raise SystemExit(f"{name}: wrong, nothing is timed: {error}")
        ahead = ahead_call(inputs, case, recipe)
        if not torch.equal(ahead(), ours()):
            raise SystemExit(f"{name}: wrong, nothing is timed: key and value quantized ahead change the result")
        kernels, complete_calls = {"ours_fa3": ours}, {"ours_call": ours, "ours_16bit": ours_16bit}
        complete_calls |= {"ours_ahead": ahead, "quantize_kv": quantize_call(inputs, recipe)}
        try:
            if fa3 := fa3_calls(inputs, case):
                fa3[0]()
                kernels["fa3_fp8"], complete_calls["fa3_fp8_call"] = fa3
        except (RuntimeError, ValueError) as reason:
            refused["fa3_fp8"] = refusal(reason)
        try:
            kernels["cudnn_fp8"] = cudnn_fp8.call(inputs, case)
        except (ImportError, RuntimeError) as reason:
            refused["cudnn_fp8"] = refusal(reason)
        repeats = max(2, int(ROUND_MS / (workloads.bound_ms(case) * 1.5)))
        timings = time_kernels(kernels, bench.rounds, repeats) if bench.device == "cuda" else {}
        candidates = {peer: Candidate(call) for peer, call in complete_calls.items()}
        call_timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
    row = row_of(name, timings, **facts_of(case), recipe=recipe, error=error, refused=refused)
    row["all_ms"] |= {peer: timing.ms for peer, timing in call_timings.items()}
    bench.add(row)


# ---- suite cache8 ----

LARGEST_CACHE_ERROR = {"int8": 0.014, "e4m3": 0.06}  # largest allowed relative error on normally distributed inputs
CACHE_NAMES = {"int8": "ours_fa2", "e4m3": "ours_e4m3"}
SCALE_DIMS = {"e4m3": (-1,), "e4m3_head": (-2, -1)}  # dims of K and V along which the scale is constant


def in_e4m3(x: Tensor, shared: tuple[int, ...] = (-1,)) -> tuple[Tensor, Tensor]:
    """Quantize a tensor to e4m3 and return the values and the scales.

    All elements along the dims `shared` have a common scale. By default each row has a separate scale.
    """
    scale = x.float().abs().amax(shared, keepdim=True) / FORMAT_MAX["e4m3"]
    return (x.float() / scale).to(torch.float8_e4m3fn), scale.squeeze(-1).expand(x.shape[:3])


def cached(inputs: Inputs, kind: str) -> tuple[Tensor, QuantizedTensor, QuantizedTensor]:
    """Return the query, and key and value as quantized KV caches.

    Args:
        inputs: the tensors of the case.
        kind: "int8" for INT8, with keys in the form of `Int8Cache` (mean subtracted, then rotated); "e4m3" for e4m3
            with a scale for each token; "e4m3_head" for e4m3 with a scale for each head.
    """
    q, k, v = inputs
    if kind == "int8":
        shift = mean_of_finite(k.float())
        key = QuantizedTensor(*in_int8(rotate(k.float() - shift)), q.dtype, shift, rotated=True)
        return q, key, QuantizedTensor(*in_int8(v), q.dtype)
    key, value = (QuantizedTensor(*in_e4m3(x, SCALE_DIMS[kind]), q.dtype) for x in (k, v))
    return q, key, value


def suite_cache8(bench: Bench) -> None:
    for case in workloads.cached():
        if bench.take(case.name):
            _measure_cache(bench, case)


def _attend_cache(operands: tuple[Tensor, ...], gqa: bool) -> Tensor:
    return F.scaled_dot_product_attention(*operands, enable_gqa=gqa)


@torch.no_grad()
def _measure_cache(bench: Bench, case: Case) -> None:
    # Twice the copies, because an 8-bit cache has half the bytes.
    copies = min(decode.MAX_COPIES, 2 * decode.copies_of(case))
    inputs = [make_inputs(case, bench.device, seed) for seed in range(copies)]
    right = _attend_cache(tuple(x.float() for x in inputs[0]), case.gqa)
    calls = {"ours_16bit": [tuple(copy) for copy in inputs]}
    calls |= {CACHE_NAMES[kind]: [cached(copy, kind) for copy in inputs] for kind in CACHE_NAMES}
    errors, candidates = {}, {}
    for name, copies_of_call in calls.items():
        scope = functools.partial(sdpa_backend, "fa3" if name == "ours_16bit" else "auto")
        with scope():
            errors[name] = float((_attend_cache(copies_of_call[0], case.gqa).float() - right).norm() / right.norm())
        each = [functools.partial(_attend_cache, copy, case.gqa) for copy in copies_of_call]
        candidates[name] = graphed(Candidate(decode.in_sequence(each), scope), 1)
    cache_errors = {kind: errors[name] for kind, name in CACHE_NAMES.items()}
    wrong = {kind: error for kind, error in cache_errors.items() if error > LARGEST_CACHE_ERROR[kind]}
    if wrong:
        raise SystemExit(f"{case.name}: wrong, nothing is timed: {wrong}")
    timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=decode.ROUND_MS)
    timings = {name: Timing(tuple(ms / copies for ms in t.rounds)) for name, t in timings.items()}
    bench.add(row_of(case.name, timings, **facts_of(case), errors=errors) | {"kv_bytes": decode.kv_bytes(case)})


# ---- suite accuracy ----

SEED, HEADS, BLOCK = 20261125, 2, 128
ROWS = 256  # errors are taken over the last 256 queries of a head
CACHE_ROWS = 64  # query rows in one call with an 8-bit cache: with more rows, the cache kernel is not selected
LAYERS = 4
RECORDED = {  # training recipes of the GPT; the recorded call has the context of the last text
    "cuda": replace(GPU_RECIPE, shape=replace(GPU_RECIPE.shape, layers=LAYERS), batch=2, length=4096, steps=250),
    "cpu": replace(CPU_RECIPE, shape=replace(CPU_RECIPE.shape, layers=LAYERS), length=512, steps=5),
}
Calls = dict[str, Callable[[], Tensor]]


def accuracy_calls() -> Iterator[tuple[str, Case]]:
    """Yield pairs of an input source (a name in MODELS) and a case with few heads."""
    for D in (64, 128, 256):
        for S in (4096, 16384):
            for model in MODELS:
                yield model, new_case(f"{model}_d{D}_s{S}", (1, HEADS, HEADS), (S, S), (D, D))


def suite_accuracy(bench: Bench) -> None:
    for model, case in accuracy_calls():
        if bench.take(case.name):
            _measure_errors(bench, model, case, _inputs(*(x.to(bench.device) for x in activations(model, case, SEED))))
    for layer in range(LAYERS):
        if bench.take(f"recorded_layer{layer}"):
            call = recorded(bench.device)[layer]
            case = Case(f"recorded_layer{layer}", **call.shape, causal=call.causal)
            _measure_errors(bench, "recorded", case, _inputs(call.q, call.k, call.v))


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

    The result has the form of `by_head`, which computes a scale for each head.
    """
    cast, scale = cudnn_fp8.by_tensor(x)
    return cast.transpose(1, 2), scale.view(1, 1).repeat(x.shape[0], kv_heads)


def _kernels(case: Case, inputs: Inputs) -> Calls:
    """Return complete calls whose kernels can be timed.

    The calls are those of this project, and those of FlashAttention-3 if the FlashAttention-3 wheel is installed.
    """
    calls = {recipe: our_call(inputs, case, recipe) for recipe in quant_recipes.RECIPES}
    calls["ours_16bit"] = our_call(inputs, case, quant_recipes.PRECISION_16BIT)
    for name, cast in (("fa3_fp8", by_head), ("fa3_fp8_tensor", _by_tensor)):
        if both := fa3_calls(inputs, case, cast):
            calls[name] = both[0]
    return calls


def _others(case: Case, inputs: Inputs) -> Calls:
    def by_tensor() -> Tensor:
        operands = quantize_by_amax(*inputs, BLOCK)
        return attend(operands, quant_recipes.RECIPES["e4m3"], case.D**-0.5, causal=case.causal).out

    def cache(kind: str) -> Tensor:
        q, key, value = cached(replace(inputs, q=inputs.q[:, :, -ROWS:]), kind)
        visible = torch.ones(ROWS, case.Sk, dtype=torch.bool, device=q.device).tril(case.Sk - ROWS)
        masks = visible.split(CACHE_ROWS) if case.causal else [None] * (ROWS // CACHE_ROWS)
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
def _measure_errors(bench: Bench, source: str, few: Case, inputs: Inputs) -> None:
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
    timings = time_kernels(kernels, bench.rounds, repeats) if timed else {}
    row = row_of(few.name, {}, **facts_of(case), input=source, errors=errors, refused=refused)
    row["alone_ms"] = {name: timing.ms for name, timing in timings.items()}
    row["spread"] = {name: round(timing.spread, 4) for name, timing in timings.items()}
    bench.add(row)
    print("    " + ", ".join(f"{name} {100 * error:.3g} %" for name, error in errors.items()))
