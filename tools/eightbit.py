"""Suite eightbit: 8-bit attention by recipe, as kernels alone and as complete calls that include the quantization.

The baselines are the project's 16-bit kernels, FlashAttention-3's FP8 and cuDNN's FP8 kernel alone. The operands of
FlashAttention-3 are quantized with torch functions, by the largest entry of each head.

Times of kernels alone come from the profiler. These times contain all kernels that a call launches, except the
project's quantization kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import cudnn_fp8
import providers as who
import torch
import torch.nn.functional as F
import workloads
from harness import Bench, facts_of, refusal, row_of
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from torch_flashplug import sdpa_backend
from torch_flashplug.registry import quant_recipes
from torch_flashplug.testing import (
    Candidate,
    Case,
    Inputs,
    Masking,
    Timing,
    attention_math,
    make_inputs,
    time_interleaved,
)

QUANTISES = "quantise"  # text in the names of this project's quantization kernels
# Largest allowed relative errors on normally distributed inputs: above, a result is wrong.
LARGEST_ERROR = {"qk8": 0.03, "8bit": 0.06, "e4m3": 0.08}
ROUND_MS = 8.0  # time per candidate and round


def calls() -> Iterator[tuple[str, Case, str]]:
    for case in workloads.eight_bits():
        for recipe in quant_recipes.RECIPES:
            yield f"{recipe}_{case.name}", case, recipe


def suite_eightbit(bench: Bench) -> None:
    for name, case, recipe in calls():
        if bench.take(name):
            _measure(bench, name, case, recipe)


def our_call(inputs: Inputs, case: Case, precision: str) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with sdpa_backend("fa3", precision=precision):
            return F.scaled_dot_product_attention(*inputs, **case.sdpa_kwargs())

    return call


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
    function = who.wheel("fa3")
    if function is None:
        return None

    def attend(made: list[tuple[Tensor, Tensor]]) -> Tensor:
        (q, q_descale), (k, k_descale), (v, v_descale) = made
        descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        out = function(q, k, v, causal=case.causal, **descales)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    def operands() -> list[tuple[Tensor, Tensor]]:
        return [cast(x, case.Hkv) for x in inputs]

    return functools.partial(attend, operands()), lambda: attend(operands())


def _error(case: Case, inputs: Inputs, out: Tensor) -> float:
    """Return the relative error of the last rows of the first head against fp64."""
    rows = min(case.Sq, 256)
    few = inputs.q[:1, :1, -rows:], inputs.k[:1, :1], inputs.v[:1, :1]
    right = attention_math(*few, mask=Masking(2 * case.causal)).out  # only last rows: align to bottom right
    return float((out[:1, :1, -rows:].double() - right).norm() / right.norm())


def alone(calls: dict[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, Timing]:
    """Return the device time of each call's kernels, without the quantization kernels of this project.

    The calls are interleaved. The first round is not counted.
    """
    mark = torch.zeros(1, dtype=torch.int64, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(rounds + 1):
            for call in calls.values():
                mark.add_(1)
                for _ in range(repeats):
                    call()
        torch.cuda.synchronize()
    events = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    groups: list[float] = []
    for event in sorted(events, key=lambda event: event.time_range.start):
        if "CUDAFunctorOnSelf_add<long>" in event.name:
            groups.append(0.0)
        elif groups and QUANTISES not in event.name:
            groups[-1] += event.time_range.elapsed_us() / 1000 / repeats
    assert len(groups) == (rounds + 1) * len(calls), f"profiler recorded {len(groups)} groups of kernels"
    return {name: Timing(tuple(groups[i + len(calls) :: len(calls)])) for i, name in enumerate(calls)}


def _measure(bench: Bench, name: str, case: Case, recipe: str) -> None:
    inputs = make_inputs(case, bench.device)
    refused: dict[str, str] = {}
    with torch.no_grad():
        ours, whole = our_call(inputs, case, recipe), our_call(inputs, case, quant_recipes.PRECISION_16BIT)
        try:
            error = _error(case, inputs, ours())
        except RuntimeError as reason:  # the recipe has no kernel for the head dims of this case
            bench.skipped[name] = refusal(reason)
            return
        if error > LARGEST_ERROR[recipe]:
            raise SystemExit(f"{name}: wrong, nothing is timed: {error}")
        kernels, others = {"ours_fa3": ours}, {"ours_call": ours, "ours_16bit": whole}
        try:
            if fa3 := fa3_calls(inputs, case):
                fa3[0]()
                kernels["fa3_fp8"], others["fa3_fp8_call"] = fa3
        except (RuntimeError, ValueError) as reason:
            refused["fa3_fp8"] = refusal(reason)
        try:
            kernels["cudnn_fp8"] = cudnn_fp8.call(inputs, case)
        except (ImportError, RuntimeError) as reason:
            refused["cudnn_fp8"] = refusal(reason)
        repeats = max(2, int(ROUND_MS / (workloads.bound_ms(case) * 1.5)))
        timings = alone(kernels, bench.rounds, repeats) if bench.device == "cuda" else {}
        candidates = {peer: Candidate(call) for peer, call in others.items()}
        beside = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
    row = row_of(name, timings, **facts_of(case), recipe=recipe, error=error, refused=refused)
    row["all_ms"] |= {peer: timing.ms for peer, timing in beside.items()}
    bench.add(row)
