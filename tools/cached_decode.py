"""Suite cache8: decode of one query row against 8-bit KV caches in memory, compared with the project's 16-bit decode.

All times are device times of replayed CUDA graphs. A graph visits so many copies of K and V that no copy is still in L2
at the next visit.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import workloads
from decode import MAX_COPIES, ROUND_MS, copies_of, in_turn, kv_bytes
from harness import Bench, facts_of, graphed, row_of
from torch import Tensor

from torch_flashplug import QuantizedTensor, sdpa_backend
from torch_flashplug.ops.quantize_reference import in_int8, mean_of_finite, rotate
from torch_flashplug.registry.quant_recipes import FORMAT_MAX
from torch_flashplug.testing import Candidate, Case, Inputs, Timing, make_inputs, time_interleaved

LARGEST_ERROR = {"int8": 0.014, "e4m3": 0.06}  # largest allowed relative error on normally distributed inputs
NAMES = {"int8": "ours_fa2", "e4m3": "ours_e4m3"}
SHARED = {"e4m3": (-1,), "e4m3_head": (-2, -1)}  # dims of K and V along which the scale is constant


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
    key, value = (QuantizedTensor(*in_e4m3(x, SHARED[kind]), q.dtype) for x in (k, v))
    return q, key, value


def suite_cache8(bench: Bench) -> None:
    for case in workloads.cached():
        if bench.take(case.name):
            _measure(bench, case)


def _attend(given: tuple[Tensor, ...], gqa: bool) -> Tensor:
    return F.scaled_dot_product_attention(*given, enable_gqa=gqa)


@torch.no_grad()
def _measure(bench: Bench, case: Case) -> None:
    copies = min(MAX_COPIES, 2 * copies_of(case))  # twice the copies, because an 8-bit cache has half the bytes
    inputs = [make_inputs(case, bench.device, seed) for seed in range(copies)]
    right = _attend(tuple(x.float() for x in inputs[0]), case.gqa)
    calls = {"ours_16bit": [tuple(one) for one in inputs]}
    calls |= {NAMES[kind]: [cached(one, kind) for one in inputs] for kind in NAMES}
    errors, candidates = {}, {}
    for name, given in calls.items():
        scope = functools.partial(sdpa_backend, "fa3" if name == "ours_16bit" else "auto")
        with scope():
            errors[name] = float((_attend(given[0], case.gqa).float() - right).norm() / right.norm())
        each = [functools.partial(_attend, one, case.gqa) for one in given]
        candidates[name] = graphed(Candidate(in_turn(each), scope), 1)
    wrong = {kind: errors[NAMES[kind]] for kind, most in LARGEST_ERROR.items() if errors[NAMES[kind]] > most}
    if wrong:
        raise SystemExit(f"{case.name}: wrong, nothing is timed: {wrong}")
    timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
    timings = {name: Timing(tuple(ms / copies for ms in t.rounds)) for name, t in timings.items()}
    bench.add(row_of(case.name, timings, **facts_of(case), errors=errors) | {"kv_bytes": kv_bytes(case)})
