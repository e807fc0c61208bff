"""The one ctypes binding of _C: its C functions with Python types. Decisions are made in C++."""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..registry import features
from ..registry.architectures import BACKENDS, KERNEL_BACKENDS
from . import table_structs
from .library import doubles, ints, lib, text

if TYPE_CHECKING:
    from ..registry import dispatch_table, kernel_table, stock_bugs

CPU_SLOT, CUDA_SLOT = 0, 1  # of torch's choice stub; the CPU slot serves the tests' stand-in
# Of a mode word (Mode in src/core/flashplug.h): where its precision lies, and what it may be beside a recipe's number.
PRECISION_SHIFT, PRECISION_OF_PROCESS, WHOLE_PRECISION, PRECISION_OF_THREAD = 16, 0, 0xFF, 0xFE
SCALE_IDS = {"positive": 0, "zero": 1, "negative": 2, "not finite": 3}  # as Scale in src/core/call_facts.h
_BACKEND_BITS, PREFERENCE = 0x7F, 0x80  # of a mode word (Mode in src/core/flashplug.h)
STOCK_BACKENDS = ("cudnn", "flash", "efficient")  # order as StockBackend in src/stock/torch_symbols.h
FACTS_FIELDS = ("cc", "sm_count", "smem_bytes", "l2_bytes", "memory_rate")
NO_DEVICE = dict.fromkeys(FACTS_FIELDS, 0)
# Counters, in the order of enum class Path.
PATHS = (
    *("ours_fwd", "cudnn_fwd", "efficient_fwd", "math_fwd"),
    *("ours_bwd", "repaired_bwd", "efficient_bwd", "math_bwd"),
    *("routed_ours", "routed_stock"),
)


# ---- hook ----


def install(slot: int = CUDA_SLOT) -> int:
    """Puts our choice function into a slot of torch's stub. 0: done; else a reason code, in words from last_error()."""
    return lib().flashplug_install(slot)


def uninstall(slot: int = CUDA_SLOT) -> int:
    """Puts the saved pointer back, exactly."""
    return lib().flashplug_uninstall(slot)


def installed(slot: int = CUDA_SLOT) -> bool:
    return bool(lib().flashplug_installed(slot))


def take_last_exit() -> str:
    """Where this thread's latest call left the router, one of names("exits"); "": none since it was asked last."""
    place = lib().flashplug_take_last_exit()
    return names("exits")[place] if place >= 0 else ""


def last_error() -> str:
    return text(lib().flashplug_last_error)


def register_ops(dispatch_key: str = "CUDA", own_ops: bool = True) -> None:
    """Registers the aten carrier at a dispatch key and, with own_ops, sdpa_fwd and sdpa_bwd of ops.py."""
    if lib().flashplug_register_ops(dispatch_key.encode(), int(own_ops)) != 0:
        raise RuntimeError(f"torch_flashplug: ops not registered at {dispatch_key}: {last_error()}")


def unregister_ops() -> None:
    lib().flashplug_unregister_ops()


def repair(*backends: str) -> bool:
    """Puts the repair of these STOCK_BACKENDS in place and takes it from the others; False: this torch lacks some of
    them.
    """
    return lib().flashplug_repair(sum(1 << STOCK_BACKENDS.index(name) for name in backends)) == 0


# ---- torch's own doors to attention on end ----


def open_varlen(dispatch_key: str) -> None:
    """Kernels of ours at the ops of torch.nn.attention.varlen, which need not be defined yet."""
    if lib().flashplug_open_varlen(dispatch_key.encode()) != 0:
        raise RuntimeError(
            f"torch_flashplug: could not register varlen_attn kernels for dispatch key {dispatch_key}: {last_error()}"
        )


def close_varlen() -> None:
    lib().flashplug_close_varlen()


def know_varlen(op: str, schema: str) -> None:
    """What one of these ops takes in the running torch."""
    if lib().flashplug_know_varlen(op.encode(), schema.encode()) != 0:
        raise RuntimeError(f"torch_flashplug: {last_error()}")


def hold_error(error: BaseException) -> None:
    """What the body of an op raises, for C++ that has called the op: torch hands on nothing but a text, if that."""
    lib().flashplug_hold_error(error)


def held(function: Callable) -> Callable:
    """The body of an op that C++ calls; what it raises reaches the caller of C++ as it is."""

    @functools.wraps(function)
    def run(*given: object) -> object:
        try:
            return function(*given)
        except BaseException as error:
            hold_error(error)
            raise

    return run


def know_flash(schema: str) -> bool:
    """Of one of torch's flash attention ops; False: stock's kernel could not be called by it."""
    return bool(lib().flashplug_know_flash(schema.encode()))


def open_flash(dispatch_key: str) -> bool:
    """Kernels of ours over torch's flash attention, at that key alone; False: this torch's cannot be called below."""
    return lib().flashplug_open_flash(dispatch_key.encode()) == 0


def close_flash() -> None:
    lib().flashplug_close_flash()


def prefer_flash(on: bool) -> None:
    """Few rows are taken there, too."""
    lib().flashplug_prefer_flash(int(on))


# ---- switches ----


def set_enabled(on: bool) -> None:
    lib().flashplug_set_enabled(int(on))


def enabled() -> bool:
    return bool(lib().flashplug_enabled())


def set_mode(word: int) -> int:
    """Set this thread's mode word, that of a block which begins now. Return a token that restores the one before."""
    return lib().flashplug_set_mode(word)


def mode() -> int:
    """Return the mode word of this thread's innermost block; in a recomputation that of its forward."""
    return lib().flashplug_mode()


def effective_mode() -> int:
    """The process-wide backend if one is set, as a preference, else this thread's mode word."""
    return lib().flashplug_effective_mode()


def backend_of(mode_word: int) -> str:
    """One of BACKENDS."""
    return BACKENDS[mode_word & _BACKEND_BITS]


def names_backend(mode_word: int) -> bool:
    return mode_word & _BACKEND_BITS < len(BACKENDS)


def forced_kernels(mode_word: int) -> str | None:
    """One of KERNEL_BACKENDS where calls that it cannot run must raise."""
    backend = backend_of(mode_word)
    return backend if backend in KERNEL_BACKENDS and not is_preference(mode_word) else None


def is_preference(mode_word: int) -> bool:
    """It is the process-wide backend's."""
    return bool(mode_word & PREFERENCE)


def set_cta_margin(ctas: int) -> int:
    """So many SMs this thread's launches of persistent kernels leave to others; returns what it was before."""
    return lib().flashplug_set_cta_margin(ctas)


def set_process_backend(backend: int) -> None:
    """Backend id that goes ahead of every gate and block; calls that it cannot run stay stock. 0: none."""
    lib().flashplug_set_process_backend(backend)


def set_process_precision(number: int) -> None:
    """Of a recipe (recipes.number_of), for calls whose mode says none."""
    lib().flashplug_set_process_precision(number)


def set_standin(on: bool | int) -> None:
    """Tests only: CPU tensors are eligible. 1: math stands in for kernels; 2: a pack's symbols run on CPU memory."""
    lib().flashplug_set_standin(int(on))


def names(of: str) -> tuple[str, ...]:
    """A list of names as C++ knows them, by number or bit: backends, features, kinds, operands, call facts, number
    types; schemas of the ops whose arguments it takes from stacks; exits of the router; reasons why a family's
    kernels do not take a call.
    """
    found: list[str] = []
    while name := text(lambda out, size: lib().flashplug_name(of.encode(), len(found), out, size)):
        found.append(name)
    return tuple(found)


def dtypes() -> dict[str, tuple[int, int]]:
    """What C++ tells apart, by number: bytes of an element and DLPack's code. The last one stands for all others."""
    found: dict[str, tuple[int, int]] = {}
    size, code = ints([0]), ints([0])
    while name := text(lambda out, room: lib().flashplug_dtype(len(found), size, code, out, room)):
        found[name] = (size[0], code[0])
    return found


# ---- device facts ----


def device_facts(index: int = 0) -> dict[str, int]:
    """{cc, sm_count, smem_bytes, l2_bytes, memory_rate} of a CUDA device, the last in bytes per ns; zeros where there
    is none. Makes no context.
    """
    out = ints([0] * len(FACTS_FIELDS))
    lib().flashplug_device_facts(index, out)
    return dict(zip(FACTS_FIELDS, out, strict=True))


def set_facts_override(facts: Mapping[str, int] | None) -> None:
    """Tests: every device has these facts; None: the real ones again."""
    lib().flashplug_set_facts_override(ints([facts[name] for name in FACTS_FIELDS]) if facts is not None else None)


# ---- table ----


def clear_rows() -> None:
    lib().flashplug_clear_rows()


def _push(add: Callable[[ctypes.Structure, int], int], row: ctypes.Structure) -> None:
    if add(ctypes.byref(row), ctypes.sizeof(row)):
        raise RuntimeError(f"{last_error()} ({type(row).__name__})")


def push_rows(
    kernel_rows: Sequence[kernel_table.KernelRow],
    choice_rows: Sequence[dispatch_table.ChoiceRow],
    gate: dispatch_table.Gate,
    rescue_rows: Sequence[stock_bugs.Rescue] = (),
    varlen_rows: Sequence[dispatch_table.VarlenRow] = (),
) -> None:
    """Replaces the tables."""
    clear_rows()
    tables = {
        "feature": table_structs.of_features(),
        "argument": table_structs.of_arguments(),
        "family": table_structs.of_families(),
        "kernel": (kernel for row in kernel_rows for kernel in table_structs.of_kernels(row)),
        "rescue": map(table_structs.of_rescue, rescue_rows),
        "choice": map(table_structs.of_choice, choice_rows),
        "varlen": map(table_structs.of_varlen, varlen_rows),
        "gate": (table_structs.of_gate(gate),),
    }
    for name, table in tables.items():
        for row in table:
            _push(getattr(lib(), f"flashplug_add_{name}_row"), row)


# ---- the facts of a call ----


@functools.cache
def problem_facts() -> dict[str, float]:
    """What describes a call, in the order of src/core/call_facts.h, and what it is where it is not said: bf16, packed,
    no mask, no grad, on a GPU. Sizes are negative: they have to be said.
    """
    plain, facts = doubles([0.0]), {}
    while name := text(lambda out, size: lib().flashplug_fact(len(facts), plain, out, size)):
        facts[name] = plain[0]
    return facts


def _facts(problem: Mapping[str, float]) -> ctypes.Array[ctypes.c_double]:
    """Names of features are facts, too: true ones are what the call needs."""
    known = problem_facts()
    if unknown := set(problem) - set(known) - set(features.NAMES):
        raise TypeError(f"unknown facts of a call {sorted(unknown)}; known are {', '.join((*known, *features.NAMES))}")
    needs = int(problem.get("needs", 0)) | features.bits(name for name in features.NAMES if problem.get(name))
    filled = {**known, **problem, "needs": needs}
    return doubles([filled[name] for name in known])


def with_operands(
    problem: Mapping[str, float],
    sizes: Sequence[Sequence[int]],
    strides: Sequence[Sequence[int]],
    addresses: Sequence[int],
    element_bytes: Sequence[int],
) -> dict[str, float]:
    """The facts of a call and those that query, key and value tell: four sizes and strides each, where they begin in
    memory, in bytes, and the bytes of an element.
    """
    known = problem_facts()
    facts = _facts(problem)
    flat = [ints([number for operand in x for number in operand]) for x in (sizes, strides)]
    lib().flashplug_read_operands(*flat, ints(addresses), ints(element_bytes), facts)
    return dict(zip(known, facts, strict=True))


def shapes_fit(sizes: Sequence[Sequence[int]], enable_gqa: bool) -> bool:
    """Shapes of query, key and value that stock neither rejects nor broadcasts."""
    return bool(lib().flashplug_shapes_fit(ints([size for operand in sizes for size in operand]), int(enable_gqa)))


def kind_of_scale(scale: float | None) -> str:
    """One of SCALE_IDS: kernels take floats of 32 bits, subnormals as 0."""
    number = 0 if scale is None else lib().flashplug_scale(scale)
    return tuple(SCALE_IDS)[number]


def fault_said(fault: int) -> str:
    """What a backend of stock's does to a call that has this fault, by what ops.right_choice() returns; "": none."""
    return text(lambda out, size: lib().flashplug_fault_said(fault, out, size))


# ---- plans ----


def _call_arguments(problem: Mapping[str, float], facts: Mapping[str, int] | None, mode_word: int) -> tuple:
    missing = {name for name, plain in problem_facts().items() if plain < 0} - set(problem)
    if missing:
        raise TypeError(f"problem lacks {', '.join(sorted(missing))}, which have no default")
    q_heads, kv_heads = problem["Hq"], problem["Hkv"]
    if kv_heads > 0 and q_heads % kv_heads:  # the dispatcher divides by query heads per KV head
        raise ValueError(
            f"plan: Hq must be a multiple of Hkv, but got {q_heads:g} and {kv_heads:g}. "
            "Give KV heads that divide the query heads."
        )
    device = facts if facts is not None else NO_DEVICE
    return _facts(problem), ints([device[name] for name in FACTS_FIELDS]), mode_word


def plan_text(
    problem: Mapping[str, float], facts: Mapping[str, int] | None, mode_word: int = 0, remembered: bool = False
) -> str:
    """JSON {backend, kernel, splits, cluster, tiles, reasons{}, why{} (their names), precision, whole, gate, row,
    rescue, copies, sharing, gradients} of a call on a device.

    The call is described by problem_facts() and the names of the features it needs; what is left out is as they say.
    `remembered`: from this thread's memory of plans, as calls get theirs; else made anew.
    """
    arguments = _call_arguments(problem, facts, mode_word)
    return text(lambda out, size: lib().flashplug_plan_text(*arguments, int(remembered), out, size))


def plan(problem: Mapping[str, float], facts: Mapping[str, int] | None, mode_word: int = 0) -> dict:
    return json.loads(plan_text(problem, facts, mode_word))


def is_remembered(problem: Mapping[str, float], facts: Mapping[str, int] | None, mode_word: int = 0) -> bool:
    """Whether this thread's memory of plans holds that of exactly this call."""
    return bool(lib().flashplug_is_remembered(*_call_arguments(problem, facts, mode_word)))


def missing_changes() -> int:
    """Goes up with every change of what kernel_missing answers."""
    return lib().flashplug_missing_changes()


def kernel_missing(problem: Mapping[str, float], facts: Mapping[str, int] | None, mode_word: int) -> bool:
    """The plan is ours, but its kernel was looked for in vain: stock serves the call."""
    return bool(lib().flashplug_kernel_missing(*_call_arguments(problem, facts, mode_word)))


def forced_error(problem: Mapping[str, float], facts: Mapping[str, int] | None, mode_word: int) -> str:
    """The text a forced backend raises for a call it cannot run."""
    arguments = _call_arguments(problem, facts, mode_word)
    return text(lambda out, size: lib().flashplug_forced_error(*arguments, out, size))


def counters(reset: bool = False) -> dict[str, int]:
    """How many calls took each path since the last reset; tests assert which path ran from this."""
    out = ints([0] * len(PATHS))
    lib().flashplug_counters(out, int(reset))
    return dict(zip(PATHS, out, strict=True))


# ---- kernels ----


def load_pack(path: Path | None, target: str) -> None:
    """Registers the kernel pack of a target (families.TARGETS); it is opened when a kernel is first needed. None: it is
    not installed, and messages say how to build it.
    """
    lib().flashplug_load_pack(str(path or "").encode(), target.encode())


def clear_packs() -> None:
    lib().flashplug_clear_packs()
