"""What C++ asks of Python: kernels outside the packs, operands that Python dispatches, what is to be logged.

No exception may cross C: each up-call turns it into an answer.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence

from ..codegen.provided import Circumstances, Provided
from .library import lib

_COMPILE_TYPE = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    *(ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_char), ctypes.c_int),
)
_KERNEL, _NONE, _NOT_YET = range(3)  # enum class Provided of src/core/flashplug.h
_CAPTURING, _REQUIRED, _TRAINING = 1, 2, 4  # enum Circumstances there
_LOG_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p)
_TRACE_TYPE = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4, ctypes.POINTER(ctypes.c_int64 * 12))
_LEARN_TYPE = ctypes.CFUNCTYPE(None)
_PREPARE_TYPE = ctypes.CFUNCTYPE(None)
_WRAP_TYPE = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)

_keep: dict[str, object] = {}  # callbacks that C holds


def set_compile(provide: Callable[[str, int, Circumstances], Provided | str] | None) -> None:
    """Set the up-call for kernels outside the packs.

    Args:
        provide: takes the name of a kernel, the compute capability of the GPU (90 is 9.0) and what the call allows.
            Returns the kernel, or why there is none, for good if it is a text alone. What provide raises counts as such
            a text. None takes the up-call away.
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
        given = Circumstances(*(bool(bits & bit) for bit in (_CAPTURING, _REQUIRED, _TRAINING)))
        try:
            answer = provide(name.decode(), cc, given)
        except BaseException as problem:
            answer = f"{type(problem).__name__}: {problem}"
        if isinstance(answer, str):
            answer = Provided(why=answer)
        if answer.is_there:
            function[0], handle[0] = answer.function or None, answer.handle or None
            return _KERNEL
        text = answer.why.encode()[: why_bytes - 1] + b"\0"
        ctypes.memmove(why, text, len(text))
        return _NOT_YET if answer.later else _NONE

    _keep["compile"] = _COMPILE_TYPE(up_call)
    lib().flashplug_set_compile_callback(_keep["compile"])


def set_learn(run_probe: Callable[[], None]) -> None:
    """Set the up-call that runs a small backward in which learn_node() is called. It is made once, by the first
    recomputation of a process that has entered sdpa_backend; what it raises is dropped.
    """

    def up_call() -> None:
        with contextlib.suppress(BaseException):
            run_probe()

    _keep["learn"] = _LEARN_TYPE(up_call)
    lib().flashplug_set_learn_callback(_keep["learn"])


_STOCKS, _SIZED, _SIZES_LATER, _PART, _STEP = range(5)  # enum class Traced of src/core/flashplug.h
Sizes = Sequence[Sequence[int | None]]


def set_trace(
    sizes_of: Callable[[object, object, object, object], Sizes | None],
    part_of: Callable[[object, object, object, object], tuple[Sizes, bool] | None] = lambda *given: None,
) -> None:
    """The up-call for operands that Python dispatches: sizes_of(query, key, value, mask) says the sizes of the first
    three, as far as they are known, or None. Then part_of is asked, which knows tensors that lie on several devices:
    the sizes of what the op gets on each of them, and whether it is a ring's step. None again: stock serves the call,
    as where one of them raises. Without effect where this torch lacks the symbol that finds the objects.
    """
    address = lib().flashplug_wrap_function()
    if not address:
        return
    wrap = _WRAP_TYPE(address)

    def up_call(q: int, k: int, v: int, mask: int | None, out: ctypes._Pointer) -> int:
        given, answer = (wrap(q), wrap(k), wrap(v), None if mask is None else wrap(mask)), _SIZED
        try:
            sizes = sizes_of(*given)
            if sizes is None and (part := part_of(*given)) is not None:
                sizes, answer = part[0], _STEP if part[1] else _PART
        except Exception:
            return _STOCKS
        if sizes is None:
            return _STOCKS
        flat = [size for operand in sizes for size in operand]
        if None in flat:
            return _SIZES_LATER if answer == _SIZED else _STOCKS
        out.contents[:] = flat
        return answer

    _keep["trace"] = _TRACE_TYPE(up_call)
    lib().flashplug_set_trace_callback(_keep["trace"])


def set_prepare(prepare: Callable[[], None]) -> None:
    """The up-call at the first call of one of varlen_attn's ops; what it did not make known, C++ says."""

    def up_call() -> None:
        try:
            prepare()
        except Exception:
            return

    _keep.setdefault("prepare", _PREPARE_TYPE(up_call))
    lib().flashplug_set_prepare_callback(_keep["prepare"])


def set_log(write: Callable[[int, str], None] | None, plans: bool = False) -> None:
    """write(level, text) for warnings and, with plans, once for each new decision (debug)."""
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
