"""What C++ asks of Python: kernels outside the packs, operands that Python dispatches, what is to be logged.

No exception may cross C: each up-call turns it into an answer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from . import native

_COMPILE_TYPE = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_char_p, ctypes.c_int),
    *(ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_char), ctypes.c_int),
)
_LOG_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p)
_TRACE_TYPE = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3, ctypes.c_int)
_WRAP_TYPE = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)

_keep: dict[str, object] = {}  # callbacks that C holds


def set_compile(provide: Callable[[str, int], int | str] | None) -> None:
    """The up-call for kernels outside the packs.

    provide(name, cc) returns a tvm_ffi function handle that runs on GPUs of that compute capability (90 is 9.0), or a
    text that says why not; what it raises becomes such a text.
    """
    if provide is None:
        native.lib().flashplug_set_compile_callback(ctypes.cast(None, _COMPILE_TYPE))
        return

    def up_call(name: bytes, cc: int, handle: ctypes._Pointer, error: ctypes._Pointer, error_bytes: int) -> int:
        try:
            answer = provide(name.decode(), cc)
        except BaseException as problem:
            answer = f"{type(problem).__name__}: {problem}"
        if isinstance(answer, int):
            handle[0] = answer
            return 0
        text = str(answer).encode()[: error_bytes - 1] + b"\0"
        ctypes.memmove(error, text, len(text))
        return 1

    _keep["compile"] = _COMPILE_TYPE(up_call)
    native.lib().flashplug_set_compile_callback(_keep["compile"])


def set_trace(agrees: Callable[[object, object, object, bool], bool]) -> None:
    """The up-call for operands that Python dispatches: agrees(query, key, value, enable_gqa) says whether the call may
    be ours. Stock serves it where it raises. Without effect where this torch lacks the symbol that finds the objects.
    """
    address = native.lib().flashplug_wrap_function()
    if not address:
        return
    wrap = _WRAP_TYPE(address)

    def up_call(q: int, k: int, v: int, enable_gqa: int) -> int:
        try:
            return int(agrees(wrap(q), wrap(k), wrap(v), bool(enable_gqa)))
        except Exception:
            return 0

    _keep["trace"] = _TRACE_TYPE(up_call)
    native.lib().flashplug_set_trace_callback(_keep["trace"])


def set_log(write: Callable[[int, str], None] | None, plans: bool = False) -> None:
    """write(level, text) for warnings and, with plans, once for each new decision (debug)."""
    if write is None:
        native.lib().flashplug_set_log_callback(ctypes.cast(None, _LOG_TYPE), 0)
        return

    def up_call(level: int, text: bytes) -> None:
        try:
            write(level, text.decode())
        except BaseException:
            return

    _keep["log"] = _LOG_TYPE(up_call)
    native.lib().flashplug_set_log_callback(_keep["log"], int(plans))
