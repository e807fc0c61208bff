"""Bindings of _C.so: the C functions with Python types, by ctypes. C++ makes all decisions."""

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

CPU_SLOT, CUDA_SLOT = 0, 1  # pointers of torch's choice stub; the CPU stub backend of tests uses the pointer for CPU
# Precision of a mode word (Mode in src/core/core.h): the shift of the bits, and the values besides the number of a
# recipe.
PRECISION_SHIFT, PRECISION_OF_PROCESS, INPUT_PRECISION, PRECISION_AT_RUN = 16, 0, 0xFF, 0xFE
SCALE_IDS = {"positive": 0, "zero": 1, "negative": 2, "not finite": 3}  # numbers of Scale in src/core/call_facts.h
_BACKEND_BITS, PREFERENCE = 0x7F, 0x80  # bits of a mode word (Mode in src/core/core.h)
STOCK_BACKENDS = ("cudnn", "flash", "efficient")  # same order as StockBackend in src/stock/stock.h
# Members of struct MaskFacts in src/operands/operands.h, in the same order.
MASK_FLAGS = ("is_bool", "is_fp32", "has_query_dtype", "is_dense", "is_on_query_device")
DEVICE_FACTS = ("cc", "sm_count", "smem_bytes", "l2_bytes", "memory_rate")
NO_DEVICE = dict.fromkeys(DEVICE_FACTS, 0)
# Counters, in the order of enum class Path.
PATHS = (
    *("ours_fwd", "cudnn_fwd", "efficient_fwd", "math_fwd"),
    *("ours_bwd", "repaired_bwd", "efficient_bwd", "math_bwd"),
    *("routed_ours", "routed_stock", "dense_ahead", "balanced"),
)


# ---- hook ----


def install(slot: int = CUDA_SLOT) -> int:
    """Install the choice function of this project as a pointer of torch's choice stub.

    Returns:
        0, or a code of the reason for the failure. `last_error()` has the text of the reason.
    """
    return lib().flashplug_install(slot)


def uninstall(slot: int = CUDA_SLOT) -> int:
    """Restore the saved pointer of torch's choice stub exactly."""
    return lib().flashplug_uninstall(slot)


def installed(slot: int = CUDA_SLOT) -> bool:
    return bool(lib().flashplug_installed(slot))


def take_last_exit() -> str:
    """Return the exit of the choice hook for this thread's latest call, a name of names("exits"), and forget the exit.

    Return "" if no call came since the previous query.
    """
    number = lib().flashplug_take_last_exit()
    return names("exits")[number] if number >= 0 else ""


def last_error() -> str:
    return text(lib().flashplug_last_error)


def register_ops(dispatch_key: str = "CUDA", own_ops: bool = True) -> None:
    """Register the aten op at a dispatch key and, with own_ops, `sdpa_fwd` and `sdpa_bwd` of ops/sdpa.py."""
    if lib().flashplug_register_ops(dispatch_key.encode(), int(own_ops)) != 0:
        raise RuntimeError(
            f"torch_flashplug: could not register the ops for dispatch key {dispatch_key}: {last_error()}"
        )


def unregister_ops() -> None:
    lib().flashplug_unregister_ops()


def enable_stock_workarounds(*backends: str) -> bool:
    """Install the workarounds for the given STOCK_BACKENDS, and remove the workarounds for all others.

    Return False if the running torch lacks some of the backends.
    """
    return lib().flashplug_enable_stock_workarounds(sum(1 << STOCK_BACKENDS.index(name) for name in backends)) == 0


# ---- torch's ops for packed sequences ----


def register_varlen_ops(dispatch_key: str) -> None:
    """Register kernels for the ops of torch.nn.attention.varlen. The ops need not be defined yet."""
    if lib().flashplug_register_varlen_ops(dispatch_key.encode()) != 0:
        raise RuntimeError(
            f"torch_flashplug: could not register varlen_attn kernels for dispatch key {dispatch_key}: {last_error()}"
        )


def unregister_varlen_ops() -> None:
    lib().flashplug_unregister_varlen_ops()


def set_varlen_schema(op: str, schema: str) -> None:
    """Set the schema of a varlen op in the running torch."""
    if lib().flashplug_set_varlen_schema(op.encode(), schema.encode()) != 0:
        raise RuntimeError(f"torch_flashplug: {last_error()}")


def hold_error(error: BaseException) -> None:
    """Hold an exception of an op's Python body for the C++ caller, because torch passes on a text at most."""
    lib().flashplug_hold_error(error)


def held(function: Callable) -> Callable:
    """Return a wrapper for the Python body of an op called by C++. The C++ caller gets the original exception."""

    @functools.wraps(function)
    def run(*arguments: object) -> object:
        try:
            return function(*arguments)
        except BaseException as error:
            hold_error(error)
            raise

    return run


def set_flash_schema(schema: str) -> bool:
    """Set the schema of a flash attention op of torch.

    Return False if the stock kernel cannot be called by the schema.
    """
    return bool(lib().flashplug_set_flash_schema(schema.encode()))


def register_flash_op(dispatch_key: str) -> bool:
    """Register kernels for torch's flash attention ops at a single dispatch key.

    Return False if the flash attention of the running torch cannot be called below the kernels.
    """
    return lib().flashplug_register_flash_op(dispatch_key.encode()) == 0


def unregister_flash_op() -> None:
    lib().flashplug_unregister_flash_op()


def enable_flash_op_decode(on: bool) -> None:
    """Set whether the flash attention op also serves decode calls."""
    lib().flashplug_enable_flash_op_decode(int(on))


# ---- attention() in one C function ----


def learn_inference_keys() -> None:
    """Note the dispatch keys of this thread as the keys of plain code in torch.inference_mode."""
    lib().flashplug_learn_inference_keys()


def direct_attention(
    probes: tuple[object, object], words: int, contents: tuple[int, int], plan_type: type
) -> Callable[..., object] | None:
    """Return a C function that serves plain calls of attention(), and returns None for all other calls.

    The function takes all arguments of attention() by position.

    Args:
        probes: A tensor of no subclass, and a parameter. Tensors are read in the places found in these objects.
        words: Size of the objects in C, in words.
        contents: Addresses of torch's tensors in the objects.
        plan_type: The class of plans.

    Returns:
        The function, or None if C++ cannot read tensors of the running torch.
    """
    function = lib().flashplug_direct_attention(*probes, plan_type, words, *contents)
    return ctypes.cast(function, ctypes.py_object).value if function else None


# ---- memory of tensors ----


def may_meet_itself(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if two elements of a tensor may share an address."""
    return bool(lib().flashplug_may_meet_itself(ints((0, 0, 0, 0, len(sizes), *sizes, *strides))))


def may_overlap(x: Sequence[int], y: Sequence[int]) -> bool:
    """Return True if two tensors of a device may share bytes.

    A tensor is given by the members of TensorBytes in src/core/memory_overlap.h.
    """
    return bool(lib().flashplug_may_overlap(ints(x), ints(y)))


# ---- switches ----


def set_enabled(on: bool) -> None:
    lib().flashplug_set_enabled(int(on))


def enabled() -> bool:
    return bool(lib().flashplug_enabled())


def set_mode(word: int) -> int:
    """Set the mode word of this thread at the start of a block. Return a token for restoring the previous word."""
    return lib().flashplug_set_mode(word)


def mode() -> int:
    """Return the mode word of this thread's innermost block. In a recomputation, return the word of the forward."""
    return lib().flashplug_mode()


def effective_mode() -> int:
    """Return the process-wide backend as a preference, or the mode word of this thread if no such backend is set."""
    return lib().flashplug_effective_mode()


def backend_of(mode_word: int) -> str:
    """Return the backend of a mode word, a name of BACKENDS."""
    return BACKENDS[mode_word & _BACKEND_BITS]


def names_backend(mode_word: int) -> bool:
    return mode_word & _BACKEND_BITS < len(BACKENDS)


def forced_kernels(mode_word: int) -> str | None:
    """Return the forced backend of a mode word, a name of KERNEL_BACKENDS, or None if no backend is forced."""
    backend = backend_of(mode_word)
    return backend if backend in KERNEL_BACKENDS and not is_preference(mode_word) else None


def is_preference(mode_word: int) -> bool:
    """Return whether a mode word comes from the process-wide backend."""
    return bool(mode_word & PREFERENCE)


def set_cta_margin(ctas: int) -> int:
    """Set the number of SMs that persistent kernels launched by this thread leave free. Return the previous number."""
    return lib().flashplug_set_cta_margin(ctas)


def set_process_backend(backend: int) -> None:
    """Set the process-wide backend, which overrides every gate and block.

    Args:
        backend: position in BACKENDS; 0 for none. Calls that the backend cannot run fall back to stock.
    """
    lib().flashplug_set_process_backend(backend)


def set_process_precision(number: int) -> None:
    """Set the number of the recipe (quant_recipes.precision_number) for calls without a precision in the mode."""
    lib().flashplug_set_process_precision(number)


def set_cpu_stub(on: bool | int) -> None:
    """Set the CPU stub backend for tests, in which kernels may serve CPU tensors.

    Args:
        on: 0 for off, 1 for math in place of kernels, 2 for the symbols of a pack on CPU memory.
    """
    lib().flashplug_set_cpu_stub(int(on))


def names(vocabulary: str) -> tuple[str, ...]:
    """Return a list of names in C++, in the order of numbers or bits.

    kVocabulary in src/bindings.cpp has all lists: names of enumerators, of members that Python fills in by position, of
    obstacles of shapes and of masks, and schemas of the ops with arguments on stacks.
    """
    cpp_names: list[str] = []
    while name := text(lambda out, size: lib().flashplug_name(vocabulary.encode(), len(cpp_names), out, size)):
        cpp_names.append(name)
    return tuple(cpp_names)


def dtypes() -> dict[str, tuple[int, int]]:
    """Return the bytes and the DLPack code of each dtype in the tables of C++, in the order of numbers.

    The last entry, "other", stands for all dtypes without a row.
    """
    bytes_and_codes: dict[str, tuple[int, int]] = {}
    size, code = ints([0]), ints([0])
    while name := text(lambda out, capacity: lib().flashplug_dtype(len(bytes_and_codes), size, code, out, capacity)):
        bytes_and_codes[name] = (size[0], code[0])
    return bytes_and_codes


# ---- device facts ----


def device_facts(index: int = 0) -> dict[str, int]:
    """Return {cc, sm_count, smem_bytes, l2_bytes, memory_rate} of a CUDA device, without creating a context.

    `memory_rate` is in bytes per ns. All values are zero if the device does not exist.
    """
    out = ints([0] * len(DEVICE_FACTS))
    lib().flashplug_device_facts(index, out)
    return dict(zip(DEVICE_FACTS, out, strict=True))


def set_facts_override(facts: Mapping[str, int] | None) -> None:
    """Set the facts of every device for tests, or restore the real facts with None."""
    lib().flashplug_set_facts_override(ints([facts[name] for name in DEVICE_FACTS]) if facts is not None else None)


# ---- table ----


def clear_rows() -> None:
    lib().flashplug_clear_rows()


def _push(add: Callable[[ctypes.Structure, int], int], row: ctypes.Structure) -> None:
    if add(ctypes.byref(row), ctypes.sizeof(row)):
        raise RuntimeError(f"{last_error()} ({type(row).__name__})")


def push_rows(
    kernel_rows: Sequence[kernel_table.KernelRow],
    choice_rows: Sequence[dispatch_table.ChoiceRow],
    cost_model: dispatch_table.CostModel,
    stock_bug_rows: Sequence[stock_bugs.StockBug] = (),
    varlen_rows: Sequence[dispatch_table.VarlenRow] = (),
) -> None:
    """Replace the tables in C++."""
    clear_rows()
    tables = {
        "dtype": table_structs.of_dtypes(),
        "feature": table_structs.of_features(),
        "argument": table_structs.of_arguments(),
        "family": table_structs.of_families(),
        "kernel": (kernel for row in kernel_rows for kernel in table_structs.of_kernels(row)),
        "stock_bug": map(table_structs.of_stock_bug, stock_bug_rows),
        "choice": map(table_structs.of_choice, choice_rows),
        "varlen": map(table_structs.of_varlen, varlen_rows),
        "cost_model": (table_structs.of_cost_model(cost_model),),
        "layout": (table_structs.of_layout(),),
    }
    for name, table in tables.items():
        for row in table:
            _push(getattr(lib(), f"flashplug_add_{name}_row"), row)


# ---- the facts of a call ----


@functools.cache
def problem_facts() -> dict[str, float]:
    """Return the facts of a call with the default values, in the order of src/core/call_facts.h.

    The defaults describe a call with bf16, packed rows, no mask and no gradients, on a GPU. Sizes have no default and
    are negative here.
    """
    plain, facts = doubles([0.0]), {}
    while name := text(lambda out, size: lib().flashplug_call_fact(len(facts), plain, out, size)):
        facts[name] = plain[0]
    return facts


def _facts(problem: Mapping[str, float]) -> ctypes.Array[ctypes.c_double]:
    """Return all facts of a call as doubles.

    Names of features count as facts, too: a true value adds the feature to the needs of the call.
    """
    defaults = problem_facts()
    if unknown := set(problem) - set(defaults) - set(features.NAMES):
        raise TypeError(f"unknown facts of a call {sorted(unknown)}; use {', '.join((*defaults, *features.NAMES))}")
    needs = int(problem.get("needs", 0)) | features.bits(name for name in features.NAMES if problem.get(name))
    filled = {**defaults, **problem, "needs": needs}
    return doubles([filled[name] for name in defaults])


def with_operands(
    problem: Mapping[str, float],
    sizes: Sequence[Sequence[int]],
    strides: Sequence[Sequence[int]],
    addresses: Sequence[int],
    element_bytes: Sequence[int],
) -> dict[str, float]:
    """Return the facts of a call, completed by the facts of query, key and value.

    Args:
        problem: the known facts.
        sizes: four sizes of each operand.
        strides: four strides of each operand, in elements.
        addresses: the addresses of the operands in bytes.
        element_bytes: the bytes of an element of each operand.
    """
    facts = _facts(problem)
    flat = [ints([number for operand in x for number in operand]) for x in (sizes, strides)]
    lib().flashplug_read_operands(*flat, ints(addresses), ints(element_bytes), facts)
    return dict(zip(problem_facts(), facts, strict=True))


@functools.cache
def _shape_obstacles() -> tuple[str, ...]:
    return names("shape obstacles")


def shape_obstacle(sizes: Sequence[Sequence[int]], enable_gqa: bool) -> str:
    """Return the first rule of the kernels that the sizes of query, key and value break.

    The result is a name of names("shape obstacles"); "none" if the sizes break no rule.
    """
    flat = ints([size for operand in sizes for size in operand])
    return _shape_obstacles()[lib().flashplug_shape_obstacle(flat, int(enable_gqa))]


def shapes_fit(sizes: Sequence[Sequence[int]], enable_gqa: bool) -> bool:
    """Return whether stock neither rejects nor broadcasts the shapes of query, key and value."""
    return shape_obstacle(sizes, enable_gqa) == "none"


@functools.cache
def _mask_obstacles() -> tuple[str, ...]:
    return names("mask obstacles")


def mask_obstacle(
    flags: Mapping[str, bool], sizes: Sequence[int | None], strides: Sequence[int | None], scores: Sequence[int | None]
) -> str:
    """Return the first rule of the kernels that a mask breaks, a name of names("mask obstacles"); "none" if no rule.

    Args:
        flags: a value for each name of MASK_FLAGS.
        sizes: sizes of the mask; None for a size that depends on data.
        strides: strides of the mask, in elements.
        scores: sizes (B, Hq, Sq, Sk) of the scores.
    """
    size, stride, score = (ints([-1 if x is None else x for x in numbers]) for numbers in (sizes, strides, scores))
    ordered = ints([int(flags[name]) for name in MASK_FLAGS])
    return _mask_obstacles()[lib().flashplug_mask_obstacle(ordered, len(sizes), size, stride, score)]


def bias_read(
    kernel: str,
    sizes: Sequence[int],
    strides: Sequence[int],
    address: int,
    element_bytes: int,
    scores: Sequence[int],
) -> tuple[str, tuple[int, ...]]:
    """Return how a kernel reads a float mask, and the sizes of the copy if the kernel reads a copy.

    Args:
        kernel: name of the kernel.
        sizes: sizes of the mask.
        strides: strides of the mask, in elements.
        address: address of the mask in bytes.
        element_bytes: bytes of an element of the mask.
        scores: sizes (B, Hq, Sq, Sk) of the scores.

    Returns:
        "in place", "copied" or "repeated" (a copy that repeats the row shared by all queries), and four sizes.
    """
    copy = ints([0] * 4)
    mask = len(sizes), ints(sizes), ints(strides), address, element_bytes
    number = lib().flashplug_bias_read(kernel.encode(), *mask, ints(scores), copy)
    return ("in place", "copied", "repeated")[number], tuple(copy)


def kind_of_scale(scale: float | None) -> str:
    """Return the kind of a scale, a name of SCALE_IDS. Kernels take 32-bit floats and treat subnormals as 0."""
    number = 0 if scale is None else lib().flashplug_scale(scale)
    return tuple(SCALE_IDS)[number]


def fault_said(fault: int) -> str:
    """Return the text of a fault of a stock backend, by the number from ops.corrected_choice(), or "" for no fault."""
    return text(lambda out, size: lib().flashplug_stock_bug_text(fault, out, size))


# ---- plans ----


def _call_arguments(problem: Mapping[str, float], facts: Mapping[str, int] | None, mode_word: int) -> tuple:
    missing = {name for name, plain in problem_facts().items() if plain < 0} - set(problem)
    if missing:
        raise TypeError(f"problem must have {', '.join(sorted(missing))}, because such facts have no default")
    q_heads, kv_heads = problem["Hq"], problem["Hkv"]
    if kv_heads > 0 and q_heads % kv_heads:  # the dispatcher divides by the query heads per KV head
        raise ValueError(
            f"plan: Hq must be a multiple of Hkv, but got {q_heads:g} and {kv_heads:g}. "
            "Give KV heads that divide the query heads."
        )
    device = facts if facts is not None else NO_DEVICE
    return _facts(problem), ints([device[name] for name in DEVICE_FACTS]), mode_word


def plan_text(
    problem: Mapping[str, float], facts: Mapping[str, int] | None, mode_word: int = 0, remembered: bool = False
) -> str:
    """Return the plan of a call on a device as JSON.

    The members are {backend, kernel, splits, cluster, tiles, reasons{}, why{} (names of the reasons), precision,
    why_not_8bit, gate, row, stock_bug, note, copies, sharing, gradients}.

    Args:
        problem: facts of problem_facts() and names of the needed features; missing facts have the default values.
        facts: facts of the device; None for no device.
        mode_word: the mode word.
        remembered: True for the plan from this thread's plan cache, as calls use; False for a new plan.
    """
    arguments = _call_arguments(problem, facts, mode_word)
    return text(lambda out, size: lib().flashplug_plan_text(*arguments, int(remembered), out, size))


def plan(problem: Mapping[str, float], facts: Mapping[str, int] | None, mode_word: int = 0) -> dict:
    return json.loads(plan_text(problem, facts, mode_word))


def is_remembered(problem: Mapping[str, float], facts: Mapping[str, int] | None, mode_word: int = 0) -> bool:
    """Return whether this thread's plan cache holds the plan of exactly the given call."""
    return bool(lib().flashplug_is_plan_cached(*_call_arguments(problem, facts, mode_word)))


def missing_changes() -> int:
    """Return a number that increases with every change of an answer of kernel_missing()."""
    return lib().flashplug_missing_changes()


def kernel_missing(problem: Mapping[str, float], facts: Mapping[str, int] | None, mode_word: int) -> bool:
    """Return whether a planned kernel was not available, so that stock serves the call."""
    return bool(lib().flashplug_kernel_missing(*_call_arguments(problem, facts, mode_word)))


def forced_error(problem: Mapping[str, float], facts: Mapping[str, int] | None, mode_word: int) -> str:
    """Return the error text of a forced backend for a call that the backend cannot run."""
    arguments = _call_arguments(problem, facts, mode_word)
    return text(lambda out, size: lib().flashplug_forced_error(*arguments, out, size))


def counters(reset: bool = False) -> dict[str, int]:
    """Return the number of calls on each path since the last reset. Tests use the counters to assert paths."""
    out = ints([0] * len(PATHS))
    lib().flashplug_counters(out, int(reset))
    return dict(zip(PATHS, out, strict=True))


# ---- kernels ----


def load_pack(path: Path | None, target: str) -> None:
    """Register the kernel pack of a target (architectures.TARGETS). The first use of a kernel opens the pack.

    A path of None says that the pack is not installed, and messages say how to build the pack.
    """
    lib().flashplug_load_pack(str(path or "").encode(), target.encode())


def clear_packs() -> None:
    lib().flashplug_clear_packs()
