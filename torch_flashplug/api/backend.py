"""Public functions `enable`, `disable`, `sdpa_backend` and `explain`.

C++ decides how a call is served (src/dispatch/). This module switches the C++ dispatcher on and off, and describes the
decisions in words.
"""

from __future__ import annotations

import functools
import logging
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from .. import env
from ..deprecation import renamed_attribute
from ..dispatch import bindings
from ..ops.quantized_kv import QuantizedTensor, readable
from ..ops.sdpa import without_own_graph
from ..registry import dispatch_table, features, kernel_table, quant_recipes, stock_bugs
from ..registry.architectures import BACKENDS, FAMILIES, KERNEL_BACKENDS
from ..registry.dispatch_table import MAX_SPLITS
from ..torch_hooks import describe_call, hook_list, sdpa_composite, stock_workarounds, tracing
from ..torch_hooks.distributed import dtensor
from . import startup
from .attention_args import checked_scale, is_int
from .causal_bias import is_causal_bias, is_upper_left, plan_lower_right

_log = logging.getLogger("torch_flashplug")
# Results of bindings.install: torch lacks the symbols, or the choice function has an unknown signature.
_NOT_HOOKABLE = (2, 3)

_MIB = 1 << 20
# DeviceFacts for explain() on a machine without the named GPU. The numbers are from data sheets. Shared memory is the
# maximum of a CTA. The compute capability is the GPU's own; architectures.py names the kernels that run on a GPU.
DEVICES: dict[str, dict[str, int]] = {
    "h100": {"cc": 90, "sm_count": 132, "smem_bytes": 232448, "l2_bytes": 50 * _MIB, "memory_rate": 3352},
    "h200": {"cc": 90, "sm_count": 132, "smem_bytes": 232448, "l2_bytes": 60 * _MIB, "memory_rate": 4814},
    "a100": {"cc": 80, "sm_count": 108, "smem_bytes": 166912, "l2_bytes": 40 * _MIB, "memory_rate": 2039},
    "l4": {"cc": 89, "sm_count": 58, "smem_bytes": 101376, "l2_bytes": 48 * _MIB, "memory_rate": 300},
    "rtx4090": {"cc": 89, "sm_count": 128, "smem_bytes": 101376, "l2_bytes": 72 * _MIB, "memory_rate": 1008},
}

# ---- on and off ----


def _cache_mark() -> str:
    """Return a text about the state, besides the program, behind a traced graph.

    The text covers the dispatch tables, the flags of tracing, and the source of the tracing module.
    """
    table = zlib.crc32(
        repr((FAMILIES, kernel_table.KERNEL_ROWS, dispatch_table.CHOICE_ROWS, stock_bugs.STOCK_BUGS)).encode()
    )
    table = zlib.crc32(Path(tracing.__file__).read_bytes(), table)
    flags = ":".join(flag.get() for flag in env.FLAGS if flag.affects_graphs)
    return f"|torch_flashplug:{flags}:{table:08x}"


def enable(*, precision: str | None = None) -> None:
    """Route the F.scaled_dot_product_attention calls of the whole process through the dispatcher.

    `import torch_flashplug` calls this function already; `disable()` reverses the effect. If torch's choice function
    cannot be hooked, a Python implementation of F.sdpa is used instead (the composite hook). Bugs of stock attention
    are repaired for the calls served by stock, unless TORCH_FLASHPLUG_REPAIR=0. Graphs compiled earlier do not change.

    Args:
        precision: the precision permitted in products of all calls of the process outside of `sdpa_backend` blocks
            with a precision: "16bit", "qk8", "8bit" (or "fp8") or "e4m3". None keeps the present setting, which is
            16 bits at first, or the value of TORCH_FLASHPLUG_PRECISION.

    Raises:
        ValueError: the precision is unknown.
    """
    startup.load()
    if precision is not None:
        bindings.set_process_precision(quant_recipes.precision_number(precision, "enable"))
    bindings.set_enabled(True)
    if torch.version.cuda is None:
        _log.debug("torch is a CPU build: there is nothing to route")
    elif env.HOOK.get() == "composite" or bindings.install(bindings.CUDA_SLOT) in _NOT_HOOKABLE:
        sdpa_composite.install("CUDA")
    elif not bindings.installed(bindings.CUDA_SLOT):
        _log.warning("%s", bindings.last_error())
    if unrepaired := stock_workarounds.install():
        _log.warning("%s", unrepaired)
    for hook in hook_list.SWITCHED:
        hook.install()
    tracing.cache_tag.set_process_mark(_cache_mark())


def disable() -> None:
    """Restore stock attention exactly, for eager calls and newly traced code.

    The backward of a call served earlier still works.
    """
    startup.load()
    bindings.set_enabled(False)
    if bindings.installed(bindings.CUDA_SLOT):
        bindings.uninstall(bindings.CUDA_SLOT)
    sdpa_composite.uninstall()
    stock_workarounds.uninstall()
    for hook in hook_list.SWITCHED:
        hook.uninstall()
    tracing.cache_tag.set_process_mark("")


# ---- sdpa_backend ----

SPLITS_SHIFT = 8  # in a mode word (Mode in src/core/core.h)


class _Entered(threading.local):
    """State to restore when the eager `sdpa_backend` blocks of this thread end.

    Each entry of `blocks` is a pair (mode word, compile cache tag). The innermost block is the last entry.
    """

    def __init__(self) -> None:
        self.blocks: list[tuple[int, object]] = []


_entered = _Entered()


# Backends with kernels for products in 8 bits.
_BACKENDS_8BIT = tuple(
    family.backend
    for family in FAMILIES
    if any(features.recipe_of(c.features) and c.supports("fwd", family.arch) for c in features.COMBINATIONS)
)


def _ours_in_words() -> str:
    return " or ".join(map(repr, KERNEL_BACKENDS))


class sdpa_backend:  # noqa: N801  (named like torch.nn.attention.sdpa_kernel)
    """Context manager and decorator that forces a backend for the attention calls of this thread.

    Blocks nest. A block inside a torch.compile region is compiled into the graph, for F.sdpa and attention(). Ops of
    torch itself, such as those of varlen_attn, instead obey the block around the run of the graph. A block entered
    outside of the region is read by the compiled attention ops at run time. But a graph whose attention was traced to
    stock keeps stock, as with torch.nn.attention.sdpa_kernel.

    A forced backend raises a RuntimeError with the reasons if the backend cannot run a call on a GPU.

    Args:
        backend: "auto", "fa3", "fa2", "math" or "stock". "fa3" are the kernels for Hopper. "fa2" are the kernels for
            every GPU of compute capability 8.0 or more; "auto" selects "fa2" kernels only for measured calls.
        num_splits: with "fa3" or "fa2", the number of CTAs among which the keys of a tile of query rows are split:
            1 to 255, and never more than the tile has KV blocks. 0 leaves the number to the decode gate.
        precision: with "auto", "fa3" or "fa2", the precision of the products. "16bit": the dtype of the operands.
            "qk8": scores in INT8. "8bit" (or "fp8"): scores in INT8, probabilities and values in e4m3. "e4m3": all
            products in e4m3. None: the precision permitted for the process (see `enable`). The quantized operands are
            made before each call, with rotation and scales (quant_recipes.py, quantize_reference.py). With "auto", and
            as a setting of the process, the precision is a permission: a call uses 8 bits only where 8 bits were
            measured to be faster than 16, and never where gradients are needed. With a forced backend, the precision is
            an order.

    Raises:
        ValueError: the backend or the precision is unknown, num_splits is out of range, or the backend does not
            support num_splits or the precision.
    """

    def __init__(self, backend: str, *, num_splits: int = 0, precision: str | None = None) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"sdpa_backend: backend must be one of {', '.join(BACKENDS)}, but got {backend!r}.")
        is_allowed = is_int(num_splits) and 0 <= num_splits <= MAX_SPLITS
        if not is_allowed or (num_splits and backend not in KERNEL_BACKENDS):
            allowed = f"0, or 1 to {MAX_SPLITS} with {_ours_in_words()}"
            raise ValueError(f"sdpa_backend: num_splits must be {allowed}, but got {num_splits!r} with {backend!r}.")
        field = (
            bindings.PRECISION_OF_PROCESS
            if precision is None
            else quant_recipes.precision_number(precision, "sdpa_backend")
        )
        if field and backend in ("math", "stock"):
            with_8bit = " or ".join(map(repr, ("auto", *_BACKENDS_8BIT)))
            raise ValueError(
                f"sdpa_backend: precision must be None or '16bit' with {backend!r}, but got {precision!r}. Use "
                f"{with_8bit} for 8 bits."
            )
        if precision is not None and not field:
            field = bindings.INPUT_PRECISION
        self.backend, self.num_splits, self.precision = backend, num_splits, precision
        self.mode = BACKENDS.index(backend) | num_splits << SPLITS_SHIFT | field << bindings.PRECISION_SHIFT

    @without_own_graph
    def __enter__(self) -> sdpa_backend:
        if torch.compiler.is_compiling():
            torch.ops.torch_flashplug.force(self.mode)
        else:
            _entered.blocks.append((bindings.set_mode(self.mode), tracing.cache_tag.push(f"|{self.mode}")))
        return self

    @without_own_graph
    def __exit__(self, *exception: object) -> None:
        if torch.compiler.is_compiling():
            torch.ops.torch_flashplug.force(tracing.POP)
        else:
            mode, tag = _entered.blocks.pop()
            bindings.set_mode(mode)
            tracing.cache_tag.pop(tag)

    def __call__(self, function: Callable) -> Callable:
        backend, num_splits, precision = self.backend, self.num_splits, self.precision

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            # Each call makes a new block, because Dynamo cannot enter a block made outside of the graph.
            with sdpa_backend(backend, num_splits=num_splits, precision=precision):
                return function(*args, **kwargs)

        return wrapper


# ---- explain ----


_NAMES = len("stock would ")  # width of the first column
_UNKNOWN = -1  # stock's choice if stock's choice function was not called


@dataclass(frozen=True)
class Plan:
    """Decision of the dispatcher about one call, with the reasons.

    `str(plan)` is a text for people.
    """

    call: str  # the shapes and properties of the call, in one line
    backend: str  # "fa3", "fa2", "math" or "stock"
    kernel: str = ""  # name of the kernel; empty where no torch_flashplug kernel runs
    splits: int = 1  # number of parts into which the keys are split
    reasons: dict[str, str] = field(default_factory=dict)  # the reason of every backend without selection
    gate: str = ""  # the arithmetic of the decode gate
    row: str = ""  # the measured entry of the dispatch table behind the decision
    precision: str = ""  # the 8-bit recipe of the products; empty: the products have 16 bits
    why_not_8bit: str = ""  # why the products have 16 bits although 8 are permitted
    mask: str = ""  # how torch_flashplug kernels read a float mask
    copies: str = ""  # operands copied first, because no kernel reads the present layout
    stock_bug: str = ""  # what stock would do wrong with this call, where the stock bug decided
    # A note on the call: the alignment of is_causal where Sq and Sk differ, or the dense kernels of packed sequences.
    note: str = ""
    gradients: str = ""  # the backward of a torch_flashplug forward, and why; empty without gradients
    sharing: int = 1  # number of tiles of a KV block in the backward, which share the query heads of a KV head
    part: str = ""  # for a call on several devices, the described part of the call
    error: str = ""  # the error of the call, from a forced backend, from stock or from math
    stock_choice: str = ""  # stock's own choice of a backend (real CUDA tensors only)

    whole = renamed_attribute("Plan", "whole", "why_not_8bit")
    rescue = renamed_attribute("Plan", "rescue", "stock_bug")

    def __str__(self) -> str:
        choice = f" ({self.stock_choice})" if self.backend == "stock" and self.stock_choice else ""
        kernel = f"{self.kernel}, splits {self.splits}" if self.kernel else ""
        lines = [("call", self.call), ("part", self.part), ("backend", self.backend + choice)]
        lines += [("kernel", kernel), ("row", self.row), ("gate", self.gate)]
        lines.append(("note", self.note))
        if self.precision:
            lines.append(("precision", f"{self.precision}: {quant_recipes.describe(self.precision)}"))
        lines += [
            ("16 bits", self.why_not_8bit),
            ("operands", self.copies),
            ("mask", self.mask),
            ("stock would", self.stock_bug),
        ]
        shared = f"; {self.sharing} tiles share the query heads of a KV head" * (self.sharing > 1)
        lines += [("gradients", self.gradients + shared), ("raises", self.error)]
        lines += [(f"not {name}", reason) for name, reason in self.reasons.items()]
        if self.backend != "stock" and self.stock_choice:
            lines.append(("stock is", self.stock_choice))
        return "\n".join(f"{name:<{_NAMES}}{text}" for name, text in lines if text)


def device_name(function: str, device: str | None) -> str | None:
    """Return the key of DEVICES for the argument `device` of a function; upper and lower case are equal."""
    name = device.lower() if isinstance(device, str) else device
    if name is not None and name not in DEVICES:
        raise ValueError(
            f"{function}: device must be one of {', '.join(DEVICES)}, or None for the tensors' own device, but got "
            f"{device!r}."
        )
    return name


def check_tensors(function: str, **tensors: object) -> None:
    """Check that query, key and value of a function are tensors or QuantizedTensors."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor | QuantizedTensor):
            raise TypeError(f"{function}: {name} must be a torch.Tensor, but got {type(tensor).__name__}.")


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    device: str | None = None,
) -> Plan:
    """Return the plan of an F.scaled_dot_product_attention call without running the call.

    The plan depends on autograd, autocast and `sdpa_backend`, as the call itself does.

    Args:
        query: queries (B, Hq, Sq, D).
        key: keys (B, Hkv, Sk, D), or a `QuantizedTensor`.
        value: values (B, Hkv, Sk, Dv), or a `QuantizedTensor`.
        attn_mask: a bool or float mask of 2 to 4 dims that broadcasts to (B, Hq, Sq, Sk), a bias of
            torch.nn.attention.bias, or None.
        dropout_p: the probability of dropout.
        is_causal: whether the call is causal, aligned to the top-left corner of the scores.
        scale: the factor of the scores; None for 1 / sqrt(D).
        enable_gqa: whether Hq may be a multiple of Hkv.
        device: "h100", "h200", "a100", "l4" or "rtx4090" for the plan on that GPU. The tensors may then be on any
            device, including the meta device. None for the plan on the tensors' own device.

    Returns:
        The plan of the call.

    Raises:
        TypeError: query, key or value is no tensor, or the scale is no number.
        ValueError: the device is unknown.
    """
    device = device_name("explain", device)
    check_tensors("explain", query=query, key=key, value=value)
    checked_scale(scale, "explain")
    startup.load()
    settings = {"scale": scale, "enable_gqa": enable_gqa}
    unusual = _explain_unusual(query, key, value, attn_mask, dropout_p, is_causal, device, settings)
    if unusual is not None:
        return unusual
    hook_tensors = _as_hook_gets(query, key, value, attn_mask)
    if dtensor.local_part(*hook_tensors, dropout_p) is not None:
        parts = (None if x is None else x.to_local() for x in hook_tensors)
        plan = explain(*parts, dropout_p, is_causal, **settings, device=device)
        return replace(
            plan,
            part=dtensor.describe(hook_tensors[0]),
            error=dtensor.forced_backend_error(hook_tensors[0]) or plan.error,
        )
    device_type = "cuda" if device is not None else query.device.type
    tensors = describe_call.under_autocast(device_type, query, key, value, attn_mask)
    call = _SdpaCall(*tensors, dropout_p, is_causal, scale, enable_gqa, device)
    stock = call.stock_choice()
    return call.plan_of_math(stock) or call.plan_outside(stock) or call.plan_of_dispatcher(stock)


@dataclass(frozen=True)
class _StockChoice:
    """Stock's choice of a backend for a call."""

    number: int = _UNKNOWN  # a value of SDPBackend
    corrected: str = ""  # the choice as corrected by the dispatcher, in words
    error: str = ""  # the error of stock's choice function, if sdpa_kernel allows no backend that can run the call

    @property
    def is_math(self) -> bool:
        return self.number == SDPBackend.MATH.value

    @property
    def text(self) -> str:
        return _name(self.number)


@dataclass(frozen=True)
class _SdpaCall:
    """Call of F.scaled_dot_product_attention, after autocast, as `explain` describes the call."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    device: str | None  # a preset, or None for the tensors' own device

    @property
    def text(self) -> str:
        return _in_one_line(self.query, self.key, self.value, self.attn_mask, self.dropout_p, self.is_causal)

    @functools.cached_property
    def hook_tensors(self) -> tuple[Tensor | None, ...]:
        """Query, key, value and mask with the dims for the dispatcher."""
        return _as_hook_gets(self.query, self.key, self.value, self.attn_mask)

    @functools.cached_property
    def mode(self) -> int:
        """Mode word of the call. Only calls on CUDA tensors reach the hook, so elsewhere no backend can be forced."""
        return bindings.effective_mode() if self.device is not None or self.query.is_cuda else 0

    def refusal(self, by_math: bool) -> str:
        """Return the error of stock for the call, or "" for a call that stock accepts."""
        return describe_call.refusal(
            *self.hook_tensors, self.dropout_p, self.is_causal, self.enable_gqa, by_math=by_math
        )

    def stock_choice(self) -> _StockChoice:
        """Ask stock for a backend. The choice is unknown without a GPU, and for calls whose class decides itself."""
        query, key, value, attn_mask = self.hook_tensors
        can_ask = self.device is None and query.is_cuda and torch.backends.cuda.is_built()
        if not can_ask or describe_call.decides_itself(query, key, value):
            return _StockChoice()
        choice_args = describe_call.as_choice_hook_gets(self.query, self.key, self.value, self.attn_mask)
        # Stock's choice can abort the process for empty tensors.
        if describe_call.has_no_elements(query, key, value):
            is_math = describe_call.is_asked(self.mode) and describe_call.math_takes_empty(attn_mask, self.is_causal)
            choice = SDPBackend.MATH.value if is_math else _UNKNOWN
        else:
            settings = {"scale": self.scale, "enable_gqa": self.enable_gqa}
            try:  # the op calls stock's choice function directly, and bypasses the dispatcher's hook
                choice = torch._fused_sdp_choice(*choice_args, self.dropout_p, self.is_causal, **settings)
            except RuntimeError as error:
                return _StockChoice(error=str(error).splitlines()[0])
        if choice == _UNKNOWN:
            return _StockChoice()
        corrected, fault = describe_call.corrected_choice(
            choice, *choice_args, self.dropout_p, self.is_causal, self.scale
        )
        if sdpa_composite.installed() and corrected != choice:
            corrected = SDPBackend.MATH.value  # the only replacement that the composite hook can make
        return _StockChoice(choice, _corrected_text(choice, corrected, fault))

    def plan_of_math(self, stock: _StockChoice) -> Plan | None:
        """Return the plan of a call with math as the requested backend, or None."""
        if not describe_call.takes_math(self.mode):
            return None
        why = f"requested by {env.BACKEND.name}" if bindings.is_preference(self.mode) else "forced"
        reasons = dict.fromkeys((*KERNEL_BACKENDS, "stock"), f"math is {why}.")
        return Plan(self.text, "math", reasons=reasons, error=self.refusal(by_math=True), stock_choice=stock.text)

    def plan_outside(self, stock: _StockChoice) -> Plan | None:
        """Return the plan of a call that does not reach the dispatcher, such as a call of nested tensors, or None."""
        query, key, value, attn_mask = self.hook_tensors
        reason = describe_call.outside_dispatcher(query, key, value, attn_mask, self.enable_gqa, self.mode)
        if reason is describe_call.SUBCLASS and dtensor.is_dtensor(query, key, value, attn_mask):
            reason = dtensor.fallback_reason(query, key, value, attn_mask, self.dropout_p)
        if reason is None:
            return None
        is_forced = bindings.forced_kernels(bindings.effective_mode())
        note = "Stock serves such calls even with a forced backend." if is_forced else ""
        reasons = dict.fromkeys((*KERNEL_BACKENDS, "math"), sentences(reason, note))
        # The composite hook changes only calls of F.scaled_dot_product_attention.
        is_corrected = describe_call.is_asked(self.mode) and not sdpa_composite.installed()
        choice = stock.corrected if is_corrected else stock.text
        error = self.refusal(by_math=stock.is_math) or stock.error
        return Plan(self.text, "stock", reasons=reasons, error=error, stock_choice=choice)

    def plan_of_dispatcher(self, stock: _StockChoice) -> Plan:
        """Return the dispatcher's plan."""
        query, key, value, attn_mask = operands = self.hook_tensors
        facts = _facts_of(query, self.device)
        described = _described(self.device, *operands, self.dropout_p, self.is_causal, self.scale)
        kernel_plan = bindings.plan(described, facts, self.mode)
        fields = {name: kernel_plan[name] for name in Plan.__dataclass_fields__ if name in kernel_plan}
        requested_mode = bindings.effective_mode()
        fields["reasons"] |= _ignored(requested_mode, fields["reasons"], query) if self.mode != requested_mode else {}
        if attn_mask is not None and attn_mask.dtype != torch.bool and kernel_plan["kernel"]:
            fields["mask"] = describe_call.bias_in_words(query, key, attn_mask, kernel_plan["kernel"])
        forced_backend_fails = bindings.forced_kernels(self.mode) not in (None, kernel_plan["backend"])
        stock_serves = kernel_plan["backend"] == "stock" and not forced_backend_fails
        error = ""
        if forced_backend_fails:
            error = bindings.forced_error(described, facts, self.mode)
        elif stock_serves:
            error = self.refusal(by_math=stock.is_math) or stock.error
        is_corrected = describe_call.is_asked(self.mode) and stock_serves
        choice = stock.corrected if is_corrected else stock.text
        return Plan(self.text, **fields, error=error, stock_choice=choice)


def _as_hook_gets(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return query, key, value and mask with the dims for the dispatcher.

    The composite hook receives the caller's tensors: it runs before torch adds a batch dim to 3-D operands.
    """
    return tensors if sdpa_composite.installed() else describe_call.as_choice_hook_gets(*tensors)


def _ignored(mode: int, reasons: dict[str, str], query: Tensor) -> dict[str, str]:
    """Return the reason of a forced backend that has no effect, because the tensors are not on a GPU."""
    note = f"Forcing a backend has no effect for tensors on {query.device.type}."
    return {name: sentences(reason, note) for name, reason in reasons.items() if name == bindings.backend_of(mode)}


def _facts_of(query: Tensor, device: str | None) -> dict[str, int]:
    if device is not None:
        return DEVICES[device]
    return bindings.device_facts(query.device.index) if query.is_cuda else bindings.NO_DEVICE


def _described(device: str | None, *call: object) -> dict[str, float]:
    """Return the facts of a call from `describe_call.describe()`, on a GPU if `device` names a preset."""
    return describe_call.describe(*call) | ({"on_cuda": True} if device is not None else {})


def _explain_unusual(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    device: str | None, settings: dict[str, object],
) -> Plan | None:  # fmt: skip
    """Return the plan of a call whose arguments F.sdpa passes to Python; None for all other calls.

    Such arguments are 8-bit keys and values, and masks of torch.nn.attention.bias.
    """
    if isinstance(key, QuantizedTensor) or isinstance(value, QuantizedTensor):
        return _explain_cached(query, key, value, attn_mask, dropout_p, is_causal, device, settings)
    if not is_causal_bias(attn_mask):
        return None
    if is_upper_left(attn_mask):
        return explain(query, key, value, None, dropout_p, True, **settings, device=device)
    call = _in_one_line(query, key, value, None, dropout_p, False) + ", causal to the lower right"
    facts = _facts_of(query, device)
    return Plan(call, **plan_lower_right(query, key, value, dropout_p, settings["scale"], facts))


def _explain_cached(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    device: str | None, settings: dict[str, object],
) -> Plan:  # fmt: skip
    """Return the plan of a call with 8-bit key and value.

    A kernel for 8-bit operands serves the call, for any requested backend. If there is no such kernel, the plan is the
    plan of the call with dequantized 16-bit key and value.
    """
    op_args = readable(query, key, value, attn_mask, dropout_p, is_causal, **settings)
    reason = "The call has dropout, gradients, or tensors of different dtypes or classes."
    if op_args is not None:
        q, k, v, _, _, mask, rotated, scale = op_args
        described = _described(device, q, k, v, mask, 0.0, False, scale) | {"cache8": True}
        facts, reasons = _facts_of(query, device), {}
        for backend in KERNEL_BACKENDS:
            kernel_plan = bindings.plan(described, facts, BACKENDS.index(backend))
            if kernel_plan["backend"] == backend:
                stored = f"{_dtype_name(k)}{' (rotated)' * rotated}"
                read = f"Key and value are read as {stored}. The products have 16 bits."
                call = _in_one_line(query, key, value, attn_mask, dropout_p, is_causal)
                fields = {name: kernel_plan[name] for name in ("kernel", "splits", "gate")}
                return Plan(call, backend, **fields, reasons=reasons, copies=read)
            # The first reason can be the 8-bit dtypes, a known fact.
            reasons[backend] = kernel_plan["reasons"].get(backend, "").rpartition("Also: ")[2]
        reason = reasons[KERNEL_BACKENDS[-1]]
        if query.shape[1] // max(key.shape[1], 1) * query.shape[2] > dispatch_table.COST_MODEL.max_decode_rows:
            reason = f"The call has more than {dispatch_table.COST_MODEL.max_decode_rows} query rows for each KV head."
    dequantized = [x.dequantize() if isinstance(x, QuantizedTensor) else x for x in (key, value)]
    plan = explain(query, *dequantized, attn_mask, dropout_p, is_causal, **settings, device=device)
    return replace(plan, why_not_8bit=sentences("Key and value are converted to 16 bits first", reason))


def sentences(*texts: str) -> str:
    """Join texts as sentences, each with a period at the end. Empty texts are left out."""
    return " ".join(text if text.endswith(".") else f"{text}." for text in texts if text)


def _name(choice: int) -> str:
    return "" if choice == _UNKNOWN else SDPBackend(choice).name


def _corrected_text(choice: int, corrected: int, fault: str) -> str:
    """Return stock's choice as corrected by the dispatcher, with the reason, in words."""
    if not fault:
        return _name(choice)
    wrong = f"{_name(choice)} {fault}"
    if corrected == choice:
        return f"{wrong}, and torch.nn.attention.sdpa_kernel allows no correct backend"
    return f"{_name(corrected)}; {wrong}"


def _in_one_line(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
) -> str:
    named_tensors = (("q", query), ("k", key), ("v", value))
    parts = [f"{name} {'nested' if tensor.is_nested else list(tensor.shape)}" for name, tensor in named_tensors]
    parts.append(_dtype_name(query))
    parts += ["causal"] * is_causal
    parts += [f"mask {_dtype_name(attn_mask)} {list(attn_mask.shape)}"] if attn_mask is not None else []
    parts += [f"dropout {dropout_p}"] * (dropout_p != 0.0) + ["grad"] * describe_call.wants_grad(query, key, value)
    parts += ["grad of mask"] * (attn_mask is not None and describe_call.wants_grad(attn_mask))
    return ", ".join(parts)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
