"""The public face: enable, disable, sdpa_backend, explain. Decisions are made in C++ (src/plan/); this file switches
them and words them.
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
from ..dispatch import bindings
from ..ops.quantized_kv import QuantizedTensor, readable
from ..ops.sdpa import never_a_frame
from ..registry import dispatch_table, kernel_table, quant_recipes, stock_bugs
from ..registry.architectures import BACKENDS, FAMILIES, KERNEL_BACKENDS
from ..torch_hooks import describe_call, hook_list, sdpa_composite, stock_workarounds, tracing
from ..torch_hooks.distributed import dtensor
from . import startup
from .causal_bias import is_causal_bias, is_upper_left, plan_lower_right

_log = logging.getLogger("torch_flashplug")
_NOT_HOOKABLE = (2, 3)  # of native.install: this torch lacks the symbols, or its choice function has another signature

_MIB = 1 << 20
# DeviceFacts for explain() on a machine without the GPU in question (data sheets; shared memory is what one CTA may ask
# for). A GPU's compute capability is its own; which kernels run there, architectures.py says.
DEVICES: dict[str, dict[str, int]] = {
    "h100": {"cc": 90, "sm_count": 132, "smem_bytes": 232448, "l2_bytes": 50 * _MIB, "memory_rate": 3352},
    "h200": {"cc": 90, "sm_count": 132, "smem_bytes": 232448, "l2_bytes": 60 * _MIB, "memory_rate": 4814},
    "a100": {"cc": 80, "sm_count": 108, "smem_bytes": 166912, "l2_bytes": 40 * _MIB, "memory_rate": 2039},
    "l4": {"cc": 89, "sm_count": 58, "smem_bytes": 101376, "l2_bytes": 48 * _MIB, "memory_rate": 300},
    "rtx4090": {"cc": 89, "sm_count": 128, "smem_bytes": 101376, "l2_bytes": 72 * _MIB, "memory_rate": 1008},
}

# ---- on and off ----


def _cache_mark() -> str:
    """What a traced graph depends on besides the program: the table, the flags that decide what is traced, and how."""
    table = zlib.crc32(
        repr((FAMILIES, kernel_table.KERNEL_ROWS, dispatch_table.CHOICE_ROWS, stock_bugs.RESCUES)).encode()
    )
    table = zlib.crc32(Path(tracing.__file__).read_bytes(), table)
    flags = ":".join(flag.get() for flag in env.FLAGS if flag.traced)
    return f"|torch_flashplug:{flags}:{table:08x}"


def enable(*, precision: str | None = None) -> None:
    """Routes F.scaled_dot_product_attention calls of the whole process through the dispatcher; import did so already.
    Undone by disable(). precision: what all calls of the process may be multiplied in that no sdpa_backend block gives
    one; None: as it is, 16 bits at first or TORCH_FLASHPLUG_PRECISION.

    Where torch's choice function cannot be hooked, a Python kernel on F.sdpa takes its place (Plan B). Stock's
    attention is repaired for the calls that stay with it (unless TORCH_FLASHPLUG_REPAIR=0). Graphs compiled before stay
    as they are.
    """
    startup.load()
    if precision is not None:
        bindings.set_process_precision(quant_recipes.number_of(precision))
    bindings.set_enabled(True)
    if torch.version.cuda is None:
        _log.debug("torch is a CPU build: there is nothing to route")
    elif env.HOOK.get() == "composite" or bindings.install(bindings.CUDA_SLOT) in _NOT_HOOKABLE:
        sdpa_composite.install("CUDA")
    elif not bindings.installed(bindings.CUDA_SLOT):
        _log.warning("%s", bindings.last_error())
    if unrepaired := stock_workarounds.install():
        _log.warning("%s", unrepaired)
    for satellite in hook_list.SWITCHED:
        satellite.install()
    tracing.cache_tag.set_process_mark(_cache_mark())


def disable() -> None:
    """Puts stock attention back exactly, for eager calls and newly traced code. Backwards of calls served before still
    work.
    """
    startup.load()
    bindings.set_enabled(False)
    if bindings.installed(bindings.CUDA_SLOT):
        bindings.uninstall(bindings.CUDA_SLOT)
    sdpa_composite.uninstall()
    stock_workarounds.uninstall()
    for satellite in hook_list.SWITCHED:
        satellite.uninstall()
    tracing.cache_tag.set_process_mark("")


# ---- sdpa_backend ----

SPLITS_SHIFT, MAX_SPLITS = 8, 255  # of a mode word (Mode in src/core/flashplug.h)


class _Entered(threading.local):
    """What this thread's eager sdpa_backend blocks must put back, innermost last: (mode word, compile cache tag)."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, object]] = []


_entered = _Entered()


def _ours_in_words() -> str:
    return " or ".join(map(repr, KERNEL_BACKENDS))


class sdpa_backend:  # noqa: N801  (named like torch.nn.attention.sdpa_kernel)
    """Forces a backend for the attention calls of this thread inside a `with` block or a decorated function.

    `backend` is "auto", "fa3" (Hopper's kernels), "fa2" (those for every GPU of compute capability 8.0 or more, which
    auto takes only where they were measured), "math" or "stock". A forced backend that cannot run a call raises an
    error that lists the reasons. `num_splits`, with "fa3" or "fa2": among how many CTAs the keys of a tile of query
    rows are split, 1 to 255, never more than it has blocks of keys; 0: as the decode gate says.

    `precision`, with "auto" or a backend of ours: what products are multiplied in. "16bit": the operands' own; "qk8":
    scores in INT8; "8bit" (or "fp8"): scores in INT8, probabilities and values in e4m3; "e4m3": all in e4m3; None:
    what the process permits (enable). Operands are made ahead of each call, rotated and with scales (quant_recipes.py,
    quantize_reference.py). With "auto", and of the process, it is a permission: a call is multiplied in 8 bits only
    where that was measured to be faster than our 16, and never where gradients are wanted. Beside a forced backend it
    is an order.

    Blocks nest. Inside a torch.compile region the block is compiled in, for F.sdpa and attention() (ops of torch's
    own, as varlen_attn's, go by what surrounds the run of a graph); entered outside of one, it is read by the
    compiled attention ops when they run, but a graph whose attention went to stock when it was traced stays stock (as
    with torch.nn.attention.sdpa_kernel).
    """

    def __init__(self, backend: str, *, num_splits: int = 0, precision: str | None = None) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r}; use one of {', '.join(BACKENDS)}")
        if not 0 <= num_splits <= MAX_SPLITS or (num_splits and backend not in KERNEL_BACKENDS):
            allowed = f"use 1 to {MAX_SPLITS}, with {_ours_in_words()}"
            raise ValueError(f"num_splits={num_splits} with {backend!r}; {allowed}")
        field = bindings.PRECISION_OF_PROCESS if precision is None else quant_recipes.number_of(precision)
        if field and backend in ("math", "stock"):
            raise ValueError(f"precision={precision!r} with {backend!r}; use it with 'auto', {_ours_in_words()}")
        if precision is not None and not field:
            field = bindings.WHOLE_PRECISION
        self.backend, self.num_splits, self.precision = backend, num_splits, precision
        self.mode = BACKENDS.index(backend) | num_splits << SPLITS_SHIFT | field << bindings.PRECISION_SHIFT

    @never_a_frame
    def __enter__(self) -> sdpa_backend:
        if torch.compiler.is_compiling():
            torch.ops.torch_flashplug.force(self.mode)
        else:
            _entered.blocks.append((bindings.set_mode(self.mode), tracing.cache_tag.push(f"|{self.mode}")))
        return self

    @never_a_frame
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
            # A new block: Dynamo cannot enter one that was made outside of the graph.
            with sdpa_backend(backend, num_splits=num_splits, precision=precision):
                return function(*args, **kwargs)

        return wrapper


# ---- explain ----


_NAMES = len("stock would ")  # width of the first column
_UNKNOWN = -1  # stock's choice, where it was not asked


@dataclass(frozen=True)
class Plan:
    """What the dispatcher does with one call, and why. str() is the text for people."""

    call: str  # the facts of the call, in one line
    backend: str  # "fa3", "fa2", "math" or "stock"
    kernel: str = ""  # name of the kernel; empty where it is not ours
    splits: int = 1  # parts that the keys are split into
    reasons: dict[str, str] = field(default_factory=dict)  # for every backend not taken, why
    gate: str = ""  # arithmetic of the decode gate
    row: str = ""  # the measured row that decided
    precision: str = ""  # the recipe of 8 bits that products are multiplied in; empty: the operands' 16
    whole: str = ""  # why 16 bits, where fewer are allowed
    mask: str = ""  # how kernels of ours read a mask of floats
    copies: str = ""  # which operands are copied first, since no such kernel reads them as they lie
    rescue: str = ""  # what stock would do with this call, where that decided
    gradients: str = ""  # which backward follows our forward, and why; empty where none is wanted
    sharing: int = 1  # tiles of a block of keys in it, which share the query heads of a KV head
    part: str = ""  # of a call on several devices: which part of it the plan is of
    error: str = ""  # what the call raises: a forced backend that cannot run it, or stock or math, which refuse it
    stock_choice: str = ""  # what stock's own choice is for this call (real CUDA tensors only)

    def __str__(self) -> str:
        taken = self.backend + (f" ({self.stock_choice})" if self.backend == "stock" and self.stock_choice else "")
        kernel = f"{self.kernel}, splits {self.splits}" if self.kernel else ""
        lines = [("call", self.call), ("part", self.part), ("backend", taken), ("kernel", kernel), ("row", self.row)]
        lines.append(("gate", self.gate))
        if self.precision:
            lines.append(("precision", f"{self.precision}: {quant_recipes.in_words(self.precision)}"))
        lines += [("16 bits", self.whole), ("operands", self.copies), ("mask", self.mask), ("stock would", self.rescue)]
        shared = f", the query heads of a KV head shared among {self.sharing} tiles" * (self.sharing > 1)
        lines += [("gradients", self.gradients + shared), ("raises", self.error)]
        lines += [(f"not {name}", reason) for name, reason in self.reasons.items()]
        if self.backend != "stock" and self.stock_choice:
            lines.append(("stock is", self.stock_choice))
        return "\n".join(f"{name:<{_NAMES}}{text}" for name, text in lines if text)


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
    """The plan for the same call of F.scaled_dot_product_attention, made without running it; autograd and sdpa_backend
    state count.

    `device` names a preset ("h100", "h200", "a100", "l4", "rtx4090"): the plan on that GPU, for tensors that may lie
    anywhere, on the meta device too.
    """
    if device is not None and device not in DEVICES:
        raise ValueError(
            f"device={device!r}; presets are {', '.join(DEVICES)}; leave it out for the tensors' own device"
        )
    startup.load()
    settings = {"scale": scale, "enable_gqa": enable_gqa}
    unusual = _explain_unusual(query, key, value, attn_mask, dropout_p, is_causal, device, settings)
    if unusual is not None:
        return unusual
    several = dtensor
    given = _as_hook_gets(query, key, value, attn_mask)
    if several.part_of(*given, dropout_p) is not None:
        parts = (None if x is None else x.to_local() for x in given)
        plan = explain(*parts, dropout_p, is_causal, **settings, device=device)
        return replace(plan, part=several.in_words(given[0]), error=several.refusal(given[0]) or plan.error)
    device_type = "cuda" if device is not None else query.device.type
    query, key, value, attn_mask = describe_call.under_autocast(device_type, query, key, value, attn_mask)
    call = _in_one_line(query, key, value, attn_mask, dropout_p, is_causal)
    asked = describe_call.as_router_gets(query, key, value, attn_mask)
    query, key, value, attn_mask = _as_hook_gets(query, key, value, attn_mask)
    choice, raised = _UNKNOWN, ""
    # Calls on other devices never come to the hook: nothing is forced there.
    wanted = bindings.effective_mode()
    mode = wanted if device is not None or query.is_cuda else 0
    known = device is None and query.is_cuda and torch.backends.cuda.is_built()
    known = known and not describe_call.decides_itself(query, key, value)
    if known and describe_call.has_no_elements(query, key, value):  # stock's choice may end the process
        if describe_call.is_asked(mode) and describe_call.math_takes_empty(attn_mask, is_causal):
            choice = SDPBackend.MATH.value
    elif known:
        # The op asks stock's choice function itself, past the router.
        try:
            choice = torch._fused_sdp_choice(*asked, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        except RuntimeError as error:  # sdpa_kernel allows nothing that can run it
            raised = str(error).splitlines()[0]
    refusal = functools.partial(describe_call.refusal, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    right = ""
    if choice != _UNKNOWN:
        becomes, fault = describe_call.right_choice(choice, *asked, dropout_p, is_causal, scale)
        in_math = sdpa_composite.installed() and becomes != choice  # all that Plan B can put in the place of stock's
        right = _right(choice, SDPBackend.MATH.value if in_math else becomes, fault)
    of_stock = functools.partial(refusal, by_math=choice == SDPBackend.MATH.value)
    if describe_call.takes_math(mode):
        why = f"asked for by {env.BACKEND.name}" if bindings.is_preference(mode) else "forced"
        reasons = dict.fromkeys((*KERNEL_BACKENDS, "stock"), f"math is {why}")
        return Plan(call, "math", reasons=reasons, error=refusal(by_math=True), stock_choice=_name(choice))
    outside = describe_call.outside_dispatcher(query, key, value, attn_mask, enable_gqa, mode)
    if outside is describe_call.SUBCLASS and several.is_dtensor(query, key, value, attn_mask):
        outside = several.why_not(query, key, value, attn_mask, dropout_p)
    if outside is not None:
        left = "; a forced backend leaves such calls to stock" if bindings.forced_kernels(wanted) else ""
        reasons = dict.fromkeys((*KERNEL_BACKENDS, "math"), outside + left)
        mended = describe_call.is_asked(mode) and not sdpa_composite.installed()  # Plan B sees its own calls alone
        stocks = right if mended else _name(choice)
        return Plan(call, "stock", reasons=reasons, error=of_stock() or raised, stock_choice=stocks)
    facts = _facts_of(query, device)
    described = _described(device, query, key, value, attn_mask, dropout_p, is_causal, scale)
    made = bindings.plan(described, facts, mode)
    fields = {name: made[name] for name in Plan.__dataclass_fields__ if name in made}
    fields["reasons"] |= _ignored(wanted, fields["reasons"], query) if mode != wanted else {}
    if attn_mask is not None and attn_mask.dtype != torch.bool and made["kernel"]:
        few, hopper = made["kernel"].startswith("decode"), "_sm90_" in made["kernel"]
        fields["mask"] = describe_call.bias_in_words(query, key, attn_mask, few, hopper)
    impossible = bindings.forced_kernels(mode) not in (None, made["backend"])
    stocks = made["backend"] == "stock" and not impossible
    error = bindings.forced_error(described, facts, mode) if impossible else (of_stock() or raised) if stocks else ""
    mended = describe_call.is_asked(mode) and stocks
    return Plan(call, **fields, error=error, stock_choice=right if mended else _name(choice))


def _as_hook_gets(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return what decides about a call's query, key, value and mask: Plan B stands ahead of torch's change of dims."""
    return tensors if sdpa_composite.installed() else describe_call.as_router_gets(*tensors)


def _ignored(mode: int, reasons: dict[str, str], query: Tensor) -> dict[str, str]:
    """Return the reason of the backend that a mode names in vain, since the tensors lie on no GPU."""
    why = f"; a forced backend changes nothing for tensors on {query.device.type}"
    return {name: said + why for name, said in reasons.items() if name == bindings.backend_of(mode)}


def _facts_of(query: Tensor, device: str | None) -> dict[str, int]:
    if device is not None:
        return DEVICES[device]
    return bindings.device_facts(query.device.index) if query.is_cuda else bindings.NO_DEVICE


def _described(device: str | None, *call: object) -> dict[str, float]:
    """problem.describe(), of a GPU where a preset is asked about."""
    return describe_call.describe(*call) | ({"on_cuda": True} if device is not None else {})


def _explain_unusual(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    device: str | None, settings: dict[str, object],
) -> Plan | None:  # fmt: skip
    """Of arguments that F.sdpa hands to Python: keys and values in 8 bits, masks of torch.nn.attention.bias."""
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
    """Of key and value in 8 bits: a kernel that reads them, whatever backend is asked for, or the call of 16 bits."""
    given = readable(query, key, value, attn_mask, dropout_p, is_causal, **settings)
    why = "dropout, gradients, or tensors of several dtypes or kinds"
    if given is not None:
        q, k, v, _, _, mask, rotated, scale = given
        described = _described(device, q, k, v, mask, 0.0, False, scale) | {"cache8": True}
        facts, reasons = _facts_of(query, device), {}
        for backend in KERNEL_BACKENDS:
            made = bindings.plan(described, facts, BACKENDS.index(backend))
            if made["backend"] == backend:
                read = f"key and value are read in {_dtype_name(k)}{', keys rotated' * rotated}; products have 16 bits"
                call = _in_one_line(query, key, value, attn_mask, dropout_p, is_causal)
                fields = {name: made[name] for name in ("kernel", "splits", "gate")}
                return Plan(call, backend, **fields, reasons=reasons, copies=read)
            # The first reason may be the dtypes themselves.
            reasons[backend] = made["reasons"].get(backend, "").rpartition("also: ")[2]
        why = reasons[KERNEL_BACKENDS[-1]]
        if query.shape[1] // max(key.shape[1], 1) * query.shape[2] > dispatch_table.GATE.rows:
            why = f"more than {dispatch_table.GATE.rows} query rows for each KV head"
    whole = [x.dequantize() if isinstance(x, QuantizedTensor) else x for x in (key, value)]
    plan = explain(query, *whole, attn_mask, dropout_p, is_causal, **settings, device=device)
    return replace(plan, whole=f"key and value are made 16 bits first ({why})")


def _name(choice: int) -> str:
    return "" if choice == _UNKNOWN else SDPBackend(choice).name


def _right(choice: int, right: int, fault: str) -> str:
    """What the router makes of stock's choice, and why."""
    if not fault:
        return _name(choice)
    wrong = f"{_name(choice)} {fault}"
    if right == choice:
        return f"{wrong}, and torch.nn.attention.sdpa_kernel allows none that is right"
    return f"{_name(right)}; {wrong}"


def _in_one_line(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
) -> str:
    given = (("q", query), ("k", key), ("v", value))
    parts = [f"{name} {'nested' if tensor.is_nested else list(tensor.shape)}" for name, tensor in given]
    parts.append(_dtype_name(query))
    parts += ["causal"] * is_causal
    parts += [f"mask {_dtype_name(attn_mask)} {list(attn_mask.shape)}"] if attn_mask is not None else []
    parts += [f"dropout {dropout_p}"] * (dropout_p != 0.0) + ["grad"] * describe_call.wants_grad(query, key, value)
    parts += ["grad of mask"] * (attn_mask is not None and describe_call.wants_grad(attn_mask))
    return ", ".join(parts)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
