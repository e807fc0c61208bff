"""Suite models: a stack of decoder layers of real size, with the plugin off and on (auto).

Calls are made from Python, without CUDA graphs. Before timing, the tensors of both runs are compared with an equal
stack in fp32: the output of each attention layer, the last hidden states, and all gradients. The error with the plugin
must be within the error budget, where the error without the plugin takes the place of plain torch. `energy_j` has
joules per call, if NVML can measure the energy.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.bench import baselines, energy
from tools.bench.decoder_stack import LLAMA_3_8B, SMALL, DecoderStack, KvCache, StackShape, random_stack
from tools.bench.result_schema import GRADIENT_FLOP
from tools.bench.runner import Bench, auto_plan_of, facts_of, row_of
from tools.bench.workloads import size_for
from torch_flashplug.testing import Candidate, Case, make_inputs, measure_error, time_interleaved
from torch_flashplug.testing.budget import GRAD_FACTOR, OUT_FACTOR

ROUND_MS = 50.0
PROVIDERS = ("ours_auto", "stock")


@dataclass(frozen=True, slots=True)
class StackCall:
    """Call of a stack: "prefill" and "train" of `length` tokens, or "decode" of one token with `length` keys."""

    name: str
    kind: str
    batch: int
    length: int

    def case(self, shape: StackShape) -> Case:
        """Return the attention call of each layer."""
        decodes = self.kind == "decode"
        return Case(
            self.name, self.batch, shape.heads, shape.kv_heads, 1 if decodes else self.length, self.length,
            shape.head_dim, shape.head_dim, causal=not decodes, layout="bhsd" if decodes else "bshd",
        )  # fmt: skip


CALLS = (
    StackCall("prefill_8k", "prefill", 1, 8192),
    StackCall("prefill_32k", "prefill", 1, 32768),
    StackCall("train_8k", "train", 1, 8192),
    StackCall("decode_8k", "decode", 1, 8192),
    StackCall("decode_64k", "decode", 1, 65536),
    StackCall("decode_8k_b16", "decode", 16, 8192),
)
MAX_LENGTH = max(call.length for call in CALLS)


def suite_models(bench: Bench) -> None:
    shape = SMALL if bench.device == "cpu" else LLAMA_3_8B
    for call in CALLS:
        case = size_for(call.case(shape), bench.device)
        if bench.take(case.name):
            _measure(bench, shape, call.kind, case)


@functools.cache
def _stack(shape: StackShape, device: str) -> DecoderStack:
    return random_stack(shape, MAX_LENGTH, device)


@dataclass(frozen=True, slots=True)
class Step:
    """Stack with the operands of a call."""

    stack: DecoderStack
    x: Tensor  # (B, S, hidden)
    cache: KvCache | None = None
    grad_out: Tensor | None = None  # (B, S, hidden); None: the call computes no gradients

    def __call__(self) -> tuple[Tensor, ...]:
        """Return the hidden states, and the gradients of all parameters and of x."""
        if self.grad_out is None:
            with torch.no_grad():
                return (self.stack(self.x, self.cache),)
        out = self.stack(self.x)
        return out, *torch.autograd.grad(out, (*self.stack.parameters(), self.x), self.grad_out)

    def in_fp32(self) -> Step:
        """Return an equal call in fp32, with KV heads copied for each query head."""
        stack = copy.deepcopy(self.stack).float()
        for layer in stack.layers:
            layer.attention.repeats_kv = True
        x = self.x.detach().float().requires_grad_(self.x.requires_grad)
        cache = None if self.cache is None else self.cache.float()
        return Step(stack, x, cache, None if self.grad_out is None else self.grad_out.float())

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a call by name, with the output of each attention layer."""
        tensors: dict[str, Tensor] = {}

        def keep(idx: int) -> Callable:
            return lambda _module, _args, out: tensors.update({f"attention {idx}": out.detach()})

        hooks = [layer.attention.register_forward_hook(keep(idx)) for idx, layer in enumerate(self.stack.layers)]
        try:
            out, *grads = self()
        finally:
            for hook in hooks:
                hook.remove()
        names = [f"gradient of {name}" for name, _ in self.stack.named_parameters()] + ["gradient of x"]
        return tensors | {"output": out.detach()} | dict(zip(names, grads, strict=False))


def _step(shape: StackShape, kind: str, case: Case, device: str) -> Step:
    stack = _stack(shape, device)
    generator = torch.Generator(device).manual_seed(2)
    sizes = case.B, case.Sq, shape.hidden
    x, grad_out = (torch.randn(sizes, device=device, generator=generator).to(case.torch_dtype) for _ in range(2))
    if kind == "train":
        return Step(stack, x.requires_grad_(), grad_out=grad_out)
    return Step(stack, x, KvCache.filled(shape, case.B, case.Sk, x) if kind == "decode" else None)


def _relative_errors(name: str, step: Step, scopes: dict[str, Callable]) -> dict[str, float]:
    """Return the largest relative error (RMS) over the tensors of the call, by provider.

    Errors with the plugin beyond the error budget end the run.
    """
    with baselines.plugin_off():
        exact = step.in_fp32().named_tensors()
    results = {}
    for provider, scope in scopes.items():
        with scope():
            results[provider] = step.named_tensors()
    errors = dict.fromkeys(results, 0.0)
    for tensor, exact_tensor in exact.items():
        size = float(exact_tensor.double().square().mean().sqrt())
        factor = GRAD_FACTOR if tensor.startswith("gradient") else OUT_FACTOR
        for provider, tensors in results.items():
            report = measure_error(tensors[tensor], exact_tensor, results["stock"][tensor], factor)
            if not (report.ok and bool(tensors[tensor].isfinite().all())):
                raise SystemExit(f"{name}: {tensor} of {provider} is wrong, nothing is timed: {report}")
            errors[provider] = max(errors[provider], report.rms / size)
    return errors


def _measure(bench: Bench, shape: StackShape, kind: str, case: Case) -> None:
    step = _step(shape, kind, case, bench.device)
    scopes = {name: bench.providers[name].scope for name in PROVIDERS if name in bench.providers}
    errors = _relative_errors(case.name, step, scopes) if bench.check and "stock" in scopes else {}
    candidates = {name: Candidate(step, scope) for name, scope in scopes.items()}
    timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
    meter, reason = energy.open_meter(bench.device)
    more = {"model": shape.model, "layers": shape.layers, "kind": kind, "errors": errors}
    if meter is None:
        bench.absent["energy"] = reason
    else:
        more["energy_j"] = energy.energy_per_call(meter, candidates, timings, bench.rounds, bench.device)
    facts = facts_of(case) | {"flop": GRADIENT_FLOP.get(kind, 1.0) * case.flop}  # of one attention layer
    plan = auto_plan_of(make_inputs(case, bench.device, requires_grad=kind == "train"), case)
    bench.add(row_of(case.name, timings, **facts, **more, auto_plan=plan))
