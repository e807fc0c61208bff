"""Check of a single random call: the answer in fp64, the call in one mode, and the faults of the results.

The measure is the error budget of torch_flashplug/testing. Rounding may still explain a result outside the budget
(`_chance`): if a result has only a few elements, plain torch may by chance round none of these elements. This module
starts no process: tools/fuzz/fuzz.py does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_flashplug
from tools.bench import report
from tools.fuzz.calls import DTYPES, Call
from tools.fuzz.tensors import CallTensors
from tools.fuzz.transforms import WAYS, little_memory
from torch_flashplug import env
from torch_flashplug.demo.scopes import plugin_off
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import dropout_reference
from torch_flashplug.ops.quantize_reference import Quantized, quantize
from torch_flashplug.ops.sdpa import empty_in_layout_of
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.registry.quant_recipes import RECIPES
from torch_flashplug.testing import Masking, assert_within_budget, attention_math, bias_grad_math, grads_math
from torch_flashplug.testing.budget import FP32_EPS, GRAD_FACTOR, OUT_FACTOR, cancelled_bias_sums, cancelled_sums
from torch_flashplug.testing.emulation_8bit import attend as emulate

SIGMAS = 5.0
RECIPE_ERROR = 0.012  # largest relative root-mean-square error of an 8-bit recipe
E4M3_STEP = 2.0**-3  # largest relative distance between neighboring e4m3 numbers
# Relative precision with which tensor cores add products, by the dtype of Q and K. INT8 is exact.
CUT = {"e4m3": 2.0**-13}
INTERPRETED = "interpreted"  # device name for our kernels on CPU tensors

Off = Callable[[], contextlib.AbstractContextManager]


# ---- the right answer, and the allowed distance from the right answer ----


@dataclass(slots=True)
class Answers:
    """Right answers of a call by name ("out", "dq", "dk", "dv", and "dm" for the mask).

    `exact` is in fp64. `plain` is computed step by step in the dtype of the call.
    """

    exact: dict[str, Tensor]
    plain: dict[str, Tensor]
    rule: Masking

    def drop(self, x: Tensor) -> Tensor:
        """Apply dropout to probabilities, or to the gradient of probabilities."""
        return x if self.rule.kept is None else x * self.rule.kept / self.rule.kept_share


def our_dropout_mask(tensors: CallTensors) -> Tensor:
    """Return the dropout mask that our op draws after manual_seed() with the seed of the call."""
    call = tensors.call
    torch.manual_seed(call.seed)
    seed = torch.empty((), dtype=torch.int64, device=tensors.q.device).random_()
    return torch.ops.torch_flashplug.dropout_mask(seed, call.B, call.Hq, call.Sq, call.Sk, call.dropout)


def answer(tensors: CallTensors, kept: Tensor | None = None) -> Answers:
    """Return the right answers of a call. For calls with dropout, `kept` selects the probabilities to keep."""
    call, qkv = tensors.call, (tensors.q, tensors.k, tensors.v)
    kept_share = dropout_reference.keep_probability(call.dropout) or 1.0
    mask = Masking(int(call.causal), tensors.mask, kept=kept, kept_share=kept_share)
    rule = {"scale": call.scale, "mask": mask}
    results = []
    for dtype in (torch.float64, torch.float32 if call.dtype == "fp64" else DTYPES[call.dtype]):
        if call.empty:  # no key is visible, so all results are 0
            shapes = {"out": tensors.grad_out.shape} | {f"d{x}": t.shape for x, t in leaves_of(tensors).items()}
            results.append({name: tensors.q.new_zeros(shape, dtype=dtype) for name, shape in shapes.items()})
            continue
        results.append({"out": attention_math(*qkv, dtype=dtype, **rule).out})
        if call.wants:
            results[-1] |= zip(("dq", "dk", "dv"), grads_math(*qkv, tensors.grad_out, dtype=dtype, **rule))
        if "m" in call.wants:
            results[-1]["dm"] = bias_grad_math(*qkv, tensors.grad_out, dtype=dtype, **rule)
    return Answers(*results, mask)


def _softmax_scale(call: Call) -> float:
    return call.D**-0.5 if call.scale is None else call.scale


def _cancelled(tensors: CallTensors) -> dict[str, Tensor | float]:
    sums: dict[str, Tensor | float] = dict.fromkeys(("out", "dq", "dk", "dv"), 0.0)
    if tensors.call.wants and not tensors.call.empty:
        sums |= cancelled_sums(tensors.q, tensors.k, tensors.v, tensors.grad_out, tensors.call.scale)
    if "m" in tensors.call.wants:
        sums["dm"] = 0.0 if tensors.call.empty else cancelled_bias_sums(tensors.v, tensors.grad_out, tensors.mask)
    return sums


def _chance(tensors: CallTensors, answers: Answers) -> dict[str, float]:
    """Return the error that random rounding can cause at the worst element of each result.

    The rounded quantities are P, dS and the output (to the dtype of the inputs) and the scores (to fp32). The error is
    SIGMAS standard deviations.
    """
    call, group, mask = tensors.call, tensors.call.Hq // tensors.call.Hkv, tensors.mask
    q, do = tensors.q.double(), tensors.grad_out.double()
    k, v = (tensor.double().repeat_interleave(group, dim=1) for tensor in (tensors.k, tensors.v))
    scale = _softmax_scale(call)
    scores = q @ k.mT * scale
    kind = torch.finfo(tensors.q.dtype)
    unit = kind.eps / 2 + 8 * FP32_EPS * float(scores.abs().amax())
    if call.causal:
        mask = torch.ones(call.Sq, call.Sk, dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    p = scores.softmax(-1).nan_to_num()
    kept = answers.drop(p)
    terms = do * (kept @ v)
    delta_error = (terms**2).sum(-1, keepdim=True)
    ds = p * (answers.drop(do @ v.mT) - terms.sum(-1, keepdim=True))
    squares = {
        "out": kept**2 @ v**2,
        "dq": scale**2 * (ds**2 @ k**2 + (p @ k) ** 2 * delta_error),
        "dk": scale**2 * (ds**2 + p**2 * delta_error).mT @ q**2,
        "dv": (kept**2).mT @ do**2,
    }
    for name in ("dk", "dv"):
        squares[name] = squares[name].unflatten(1, (-1, group)).sum(2)
    if "m" in call.wants:
        squares["dm"] = (ds**2 + p**2 * delta_error).sum_to_size(tensors.mask.shape)
    smallest = 4 * kind.smallest_normal * kind.eps
    return {name: SIGMAS * unit * float(square.amax()) ** 0.5 + smallest for name, square in squares.items()}


# ---- one call in one mode ----


@dataclass(slots=True)
class Outcome:
    """Outcome on a call.

    The status is "right", "wrong", "raised", or "refused" if a forced mode cannot run the call. For a worker process
    that dies or stalls, the status is "crash" or "hang".
    """

    status: str
    detail: str = ""
    paths: dict[str, int] = field(default_factory=dict)

    @property
    def bad(self) -> bool:
        return self.status not in {"right", "refused"}


# Arguments of sdpa_kernel. OVERRIDEABLE or flash also allows the plugin, so "efficient" leaves calls to stock.
ALLOWED = {
    "no_cudnn": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
}
NOT_SERVED = ("cannot run this call", "No available kernel", "No viable backend")  # a forced mode; sdpa_kernel


@contextlib.contextmanager
def in_mode(call: Call, mode: str) -> Iterator[None]:
    torch.use_deterministic_algorithms(call.deterministic)
    try:
        forced = mode not in {"auto", "stock"}
        with contextlib.ExitStack() as scopes:
            if mode in RECIPES:
                scopes.enter_context(torch_flashplug.sdpa_backend("fa3", precision=mode))
            elif forced:
                scopes.enter_context(torch_flashplug.sdpa_backend(mode))
            if call.allow:
                scopes.enter_context(sdpa_kernel(ALLOWED[call.allow]))
            scopes.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # stock warns about each fused kernel that did not run
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def _poison(tensors: CallTensors) -> None:
    """Leave NaN in the free blocks of the allocator, so that an element that is never written shows."""
    blocks = [torch.full_like(tensor, float("nan")) for tensor in (tensors.q, tensors.k, tensors.v, tensors.grad_out)]
    del blocks


def leaves_of(tensors: CallTensors) -> dict[str, Tensor | None]:
    """Return the operands by letter, as in `Call.wants`."""
    return {"q": tensors.q, "k": tensors.k, "v": tensors.v} | ({} if tensors.mask is None else {"m": tensors.mask})


def operands(tensors: CallTensors) -> list[Tensor | None]:
    """Return q, k, v and the mask as autograd leaves."""
    leaves = [tensor.detach().requires_grad_(x in tensors.call.wants) for x, tensor in leaves_of(tensors).items()]
    return leaves if tensors.mask is not None else [*leaves, None]


def settings(call: Call) -> dict[str, object]:
    arguments = {"dropout_p": call.dropout, "is_causal": call.causal}
    return arguments | {"scale": call.scale, "enable_gqa": call.Hq != call.Hkv}


def attend(tensors: CallTensors, grad_out: Tensor) -> dict[str, Tensor]:
    """Make a call, and return "out" and the requested gradients by name."""
    leaves = operands(tensors)
    _poison(tensors)
    if tensors.call.dropout:
        torch.manual_seed(tensors.call.seed)
    call = functools.partial(F.scaled_dot_product_attention, **settings(tensors.call))
    out, grads = WAYS[tensors.call.way](call, leaves, grad_out, functools.partial(_poison, tensors))
    return {"out": out.detach()} | {f"d{x}": grad for x, grad in zip(tensors.call.wants, grads)}


def _factor(name: str) -> float:
    return OUT_FACTOR if name == "out" else GRAD_FACTOR


def _fits(name: str, got: Tensor, answers: Answers, cancelled: Tensor | float) -> Tensor:
    """Evaluate the inequality of `assert_within_budget` without a device synchronization.

    A True result is final. A False result needs a second look.
    """
    exact = answers.exact[name]
    error, yardstick = got.double() - exact, answers.plain[name].double() - exact
    slack = torch.finfo(got.dtype).eps / 2, FP32_EPS * cancelled
    peaks, means = ([x.abs().amax() for x in (error, yardstick, exact)],
                    [x.square().mean().sqrt() for x in (error, yardstick, exact)])  # fmt: skip
    largest, rms = (a <= _factor(name) * b + slack[0] * c + slack[1] for a, b, c in (peaks, means))
    return largest & rms


def _check_budget(tensors: CallTensors, answers: Answers, name: str, got: Tensor, cancelled: float) -> Iterator[str]:
    if not tensors.call.empty:
        cancelled += _chance(tensors, answers)[name] / FP32_EPS
    budget = {"factor": _factor(name), "cancelled": cancelled, "seed": tensors.call.seed}
    try:
        assert_within_budget(name, got, answers.exact[name], answers.plain[name], **budget)
    except AssertionError as error:
        yield str(error)


def _strides(tensor: Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1]


def _layout_faults(tensors: CallTensors, run: dict[str, Tensor], paths: dict[str, int]) -> Iterator[str]:
    """Yield the results whose strides differ from the strides of torch's meta functions, if our kernels ran."""
    like = {"out": empty_in_layout_of(tensors.q, tuple(tensors.grad_out.shape))} if paths.get("ours_fwd") else {}
    like |= {f"d{x}": torch.empty_like(leaves_of(tensors)[x]) for x in tensors.call.wants if paths.get("ours_bwd")}
    for name, tensor in like.items():
        if _strides(tensor) != _strides(run[name]):
            yield f"{name} has strides {run[name].stride()}, but torch's meta functions promise {tensor.stride()}"


def _faults(
    tensors: CallTensors, answers: Answers, runs: list[dict[str, Tensor]], paths: dict[str, int]
) -> Iterator[str]:
    """Yield a description of each fault in the results."""
    call = tensors.call
    for name, got in itertools.chain.from_iterable(run.items() for run in runs):
        if got.shape != answers.exact[name].shape or got.dtype != (tensors.mask if name == "dm" else tensors.q).dtype:
            yield f"{name} is {got.dtype} {tuple(got.shape)}"
            return
    unwritten = [buffer.isnan().sum() == buffer.numel() - stored for buffer, stored in tensors.guards]
    results = [(name, got) for run in runs for name, got in run.items() if got.numel()]
    unknown = call.dropout and not paths.get("ours_fwd")  # stock drops a different set
    if unknown:
        fits = [got.isfinite().all() for _, got in results]
    else:
        cancelled = _cancelled(tensors)
        fits = [_fits(name, got, answers, cancelled[name]) for name, got in results]
    flags = torch.stack(unwritten + fits).tolist()  # the only device synchronization
    if not all(flags[: len(unwritten)]):
        yield "an operand's buffer was written"
    for (name, got), fit in zip(results, flags[len(unwritten) :]):
        if unknown and not fit:
            yield f"{name} is not finite"
        elif not fit:
            yield from _check_budget(tensors, answers, name, got, float(cancelled[name]))
    if not call.way:  # backward() and transforms choose the layouts of gradients freely
        yield from _layout_faults(tensors, runs[-1], paths)
    if call.deterministic and not all(torch.equal(*pair) for pair in zip(*(run.values() for run in runs[-2:]))):
        yield "other bits the second time"


def _moved(quantized: Quantized, scale: float, causal: bool, mask: Tensor | None, cut: float) -> float:
    """Return the allowed distance from the result of exact scores, as the root of the sum of squares over all elements.

    A score is a sum of products. The error of a score is `cut` times the sum of the magnitudes of the products, with a
    random sign for each key. A wrong score also changes the probability, and a different e4m3 number may then be the
    nearest. The chance of such a change is proportional to the error of the score.
    """
    group = quantized.q.shape[1] // quantized.k.shape[1]
    q, k, v = (x.double() for x in (quantized.q, quantized.k.repeat_interleave(group, 1), quantized.values()))
    k_scale = quantized.k_scale.double().repeat_interleave(quantized.block, 2)[:, :, : quantized.Sk]
    unit = k_scale.repeat_interleave(group, 1)
    unit = unit.unsqueeze(2) * quantized.q_scale.double().unsqueeze(3) * scale
    scores, off = q @ k.mT * unit, cut * (q.abs() @ k.abs().mT * unit).abs().amax(-1, keepdim=True)
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores[0, 0], dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    p = scores.softmax(-1).nan_to_num()
    v = v.repeat_interleave(group, 1)
    share = (p * (2 * off).expm1()).clamp(max=1.0) ** 2  # also valid if a different key has the maximum
    share = share + (2 * off / E4M3_STEP).clamp(max=1.0) * (p * E4M3_STEP) ** 2
    return float((share @ v**2 + share.sum(-1, keepdim=True) * (p @ v) ** 2).nan_to_num().sum() ** 0.5)


def _faults_of_recipe(tensors: CallTensors, runs: list[dict[str, Tensor]], mode: str) -> Iterator[str]:
    """Yield the faults of an 8-bit result, compared in fp64 with the recipe applied to the quantized operands.

    The allowed error covers a further rounding of the output, and the rounding of P for recipes with 16-bit P.
    """
    call, qkv, recipe = tensors.call, (tensors.q, tensors.k, tensors.v), RECIPES[mode]
    with in_mode(call, mode):
        spec = KernelSpec.from_name(torch_flashplug.explain(*qkv, attn_mask=tensors.mask, **settings(call)).kernel)
    padded = (F.pad(x, (0, spec.d - call.D)) for x in qkv[:2])
    quantized = quantize(*padded, tensors.v, recipe, spec.tile_n)
    right = emulate(quantized, recipe, _softmax_scale(call), causal=call.causal, mask=tensors.mask).out
    cut = CUT.get(recipe.scores)
    moved = _moved(quantized, _softmax_scale(call), call.causal, tensors.mask, cut) if cut else 0.0
    for run in runs:
        got = run["out"].double()
        if not torch.equal(got.isfinite(), right.isfinite()):
            yield "out is not finite where it should be finite, or the other way round"
        error, size = ((x.nan_to_num() ** 2).sum() ** 0.5 for x in (got - right, right))
        if error > RECIPE_ERROR * size + moved + 1e-6:
            yield f"out has a relative error of {float(error / size):.4f}"
    if not all(bool(buffer.isnan().sum() == buffer.numel() - stored) for buffer, stored in tensors.guards):
        yield "an operand's buffer was written"
    yield from _layout_faults(tensors, runs[-1], {"ours_fwd": 1})
    if not all(torch.equal(a, b) or a.isnan().any() for a, b in zip(*(run.values() for run in (runs[0], runs[-1])))):
        yield "other bits the second time"


def check(tensors: CallTensors, answers: Answers, mode: str, off: Off) -> Outcome:
    """Make the call in one mode and return the outcome. Inside `off()` the plugin is disabled."""
    call = tensors.call
    bindings.counters(reset=True)
    status, detail = "right", ""
    try:
        with in_mode(call, mode):
            if call.first == "stock":
                with off():
                    attend(tensors, tensors.first_grad)
                bindings.counters(reset=True)
            if call.first == "memory" and tensors.q.is_cuda:
                with little_memory(tensors):
                    attend(tensors, tensors.grad_out)
                bindings.counters(reset=True)
            grads = [tensors.first_grad] * (call.first == "same") + [tensors.grad_out] * (1 + call.deterministic)
            runs = [attend(tensors, grad) for grad in grads]
        if call.dropout and bindings.counters().get("ours_fwd"):
            answers = answer(tensors, our_dropout_mask(tensors))
        if mode in RECIPES and bindings.counters().get("ours_fwd"):
            faults = _faults_of_recipe(tensors, runs, mode)
        else:
            faults = _faults(tensors, answers, runs, bindings.counters())
        detail = "; ".join(dict.fromkeys(faults))[:1000]
        status = "wrong" if detail else "right"
    except Exception as error:  # all types, because an exception of the call is a finding
        status, detail = "raised", f"{type(error).__name__}: {error}"[:1000]
        may_refuse = mode in {"fa3", "fa2", *RECIPES} or call.allow
        if may_refuse and isinstance(error, RuntimeError) and any(words in detail for words in NOT_SERVED):
            status, detail = "refused", ""
    return Outcome(status, detail, {path: count for path, count in bindings.counters().items() if count})


def is_stock_fault(call: Call, mode: str, outcome: Outcome) -> bool:
    """Return True if a finding is a known fault of stock.

    Such calls belong to stock by design, and stock ran the call. The known faults are listed separately. Two faults are
    known: refusals under deterministic algorithms, and grouped heads in the FLOP formula of torch 2.11. All remaining
    faults are ours, or belong to a different backend of stock (stock_bugs.cpp).
    """
    unordered = call.deterministic and "deterministic" in outcome.detail
    uncounted = call.way == "flop_counter" and call.Hq != call.Hkv and "sdpa_flop_count" in outcome.detail
    refused = outcome.status == "raised" and (unordered or uncounted)
    return mode == "auto" and refused and not outcome.paths.get("ours_fwd")


@contextlib.contextmanager
def plugin_on(device: str, mode: str = "auto") -> Iterator[Off]:
    """Route calls to the plugin, and yield a context manager that disables the plugin.

    On CUDA the plugin receives the calls without help. For CPU tensors, test/helpers/device_backend.py provides a CPU
    stub backend. If kernels are interpreted, test/helpers/interpreted_kernels.py provides the backend. For mode "stock"
    the plugin is disabled permanently.
    """
    if mode == "stock":
        if not env.is_disabled():
            torch_flashplug.disable()
        yield contextlib.nullcontext
    elif device == "cuda":
        yield plugin_off
    else:
        if (tests := str(report.ROOT / "test" / "helpers")) not in sys.path:
            sys.path.append(tests)
        import interpreted_kernels
        from device_backend import use_device_backend

        if device == INTERPRETED:
            with interpreted_kernels.enabled(int(torch.randint(1, 1 << 30, ()))):
                yield interpreted_kernels.disabled
        else:
            with use_device_backend(device) as device_backend:
                yield device_backend.disabled
