"""Callbacks from C++ to Python: kernels outside the packs, operands dispatched by Python, and log lines.

No exception may cross C, so each callback turns exceptions into an answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import enum
from collections.abc import Callable, Sequence

from ..codegen.kernel_request import CallConditions, KernelAnswer
from .library import lib

_COMPILE_TYPE = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    *(ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_char), ctypes.c_int),
)
_LOG_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p)
_TRACE_TYPE = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4, ctypes.POINTER(ctypes.c_int64 * 12))
_LEARN_TYPE = ctypes.CFUNCTYPE(None)
_PREPARE_TYPE = ctypes.CFUNCTYPE(None)
_WRAP_TYPE = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)


class CompileAnswer(enum.IntEnum):
    """Answers of the callback for kernels outside the packs: CompileAnswer of src/launch/launch.h."""

    KERNEL, NONE, NOT_YET = range(3)


class TraceAnswer(enum.IntEnum):
    """Answers of the callback for operands that Python dispatches: TraceAnswer of src/core/core.h."""

    STOCK, SIZES_KNOWN, SIZES_AT_RUN_TIME, PER_DEVICE, RING_STEP = range(5)


_keep: dict[str, object] = {}  # keeps the callbacks alive that C holds


def set_compile_callback(provide: Callable[[str, int, CallConditions], KernelAnswer | str] | None) -> None:
    """Set the callback for kernels outside the packs.

    Args:
        provide: takes the name of a kernel, the compute capability of the GPU (90 is 9.0) and the conditions of the
            call. Returns the kernel, or the reason for a missing kernel. A plain text is a permanent reason, and an
            exception of `provide` counts as a plain text. None removes the callback.
    """
    if provide is None:
        lib().flashplug_set_compile_callback(ctypes.cast(None, _COMPILE_TYPE))
        return

    def up_call(
        name: bytes,
        cc: int,
        bits: int,
        function: ctypes._Pointer,
        handle: ctypes._Pointer,
        why: ctypes._Pointer,
        why_bytes: int,
    ) -> int:
        conditions = CallConditions(*(bool(bits >> i & 1) for i in range(len(dataclasses.fields(CallConditions)))))
        try:
            answer = provide(name.decode(), cc, conditions)
        except BaseException as problem:
            answer = f"{type(problem).__name__}: {problem}"
        if isinstance(answer, str):
            answer = KernelAnswer(reason=answer)
        if answer.has_kernel:
            function[0], handle[0] = answer.function or None, answer.handle or None
            return CompileAnswer.KERNEL
        text = answer.reason.encode()[: why_bytes - 1] + b"\0"
        ctypes.memmove(why, text, len(text))
        return CompileAnswer.NOT_YET if answer.may_change else CompileAnswer.NONE

    _keep["compile"] = _COMPILE_TYPE(up_call)
    lib().flashplug_set_compile_callback(_keep["compile"])


def set_learn_callback(run_probe: Callable[[], None]) -> None:
    """Set the callback that runs a small backward with a call of learn_node().

    The first recomputation of a process that has entered sdpa_backend calls the callback once. Exceptions are dropped.
    """

    def up_call() -> None:
        with contextlib.suppress(BaseException):
            run_probe()

    _keep["learn"] = _LEARN_TYPE(up_call)
    lib().flashplug_set_learn_callback(_keep["learn"])


Sizes = Sequence[Sequence[int | None]]


def set_trace_callback(
    sizes_of: Callable[[object, object, object, object], Sizes | None],
    part_of: Callable[[object, object, object, object], tuple[Sizes, bool] | None] = lambda *tensors: None,
) -> None:
    """Set the callback for operands that Python dispatches.

    Stock serves the call if both functions return None, or if a function raises. The callback has no effect if the
    running torch lacks the symbol for finding the Python objects.

    Args:
        sizes_of: takes query, key, value and mask. Returns the known sizes of the first three, or None.
        part_of: takes the same tensors, after None of `sizes_of`. For tensors on several devices, returns the sizes of
            the op's operands on each device, and whether the op is a step of a ring; otherwise None.
    """
    address = lib().flashplug_wrap_function()
    if not address:
        return
    wrap = _WRAP_TYPE(address)

    def up_call(q: int, k: int, v: int, mask: int | None, out: ctypes._Pointer) -> int:
        tensors = (wrap(q), wrap(k), wrap(v), None if mask is None else wrap(mask))
        answer = TraceAnswer.SIZES_KNOWN
        try:
            sizes = sizes_of(*tensors)
            if sizes is None and (part := part_of(*tensors)) is not None:
                sizes, answer = part[0], TraceAnswer.RING_STEP if part[1] else TraceAnswer.PER_DEVICE
        except Exception:
            return TraceAnswer.STOCK
        if sizes is None:
            return TraceAnswer.STOCK
        flat = [size for operand in sizes for size in operand]
        if None in flat:
            return TraceAnswer.SIZES_AT_RUN_TIME if answer == TraceAnswer.SIZES_KNOWN else TraceAnswer.STOCK
        out.contents[:] = flat
        return answer

    _keep["trace"] = _TRACE_TYPE(up_call)
    lib().flashplug_set_trace_callback(_keep["trace"])


def set_prepare_callback(prepare: Callable[[], None]) -> None:
    """Set the callback for the first call of a varlen_attn op. C++ reports each schema still unknown afterward."""

    def up_call() -> None:
        try:
            prepare()
        except Exception:
            return

    _keep.setdefault("prepare", _PREPARE_TYPE(up_call))
    lib().flashplug_set_prepare_callback(_keep["prepare"])


def set_log_callback(write: Callable[[int, str], None] | None, plans: bool = False) -> None:
    """Set write(level, text) as the log function for warnings and, with `plans`, for each new decision (debug)."""
    if write is None:
        lib().flashplug_set_log_callback(ctypes.cast(None, _LOG_TYPE), 0)
        return

    def up_call(level: int, text: bytes) -> None:
        try:
            write(level, text.decode())
        except BaseException:
            return

    _keep["log"] = _LOG_TYPE(up_call)
    lib().flashplug_set_log_callback(_keep["log"], int(plans))
