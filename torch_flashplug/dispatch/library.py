"""Lookup and loading of the extension `_C`, and the C types of the functions in `_C`.

The kernel packs are found in the same way, because an install or a build puts packs into the same directories.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..codegen import linker

_keep: dict[str, object] = {}  # libraries that stay loaded, because kernel packs need the symbols


class NotBuilt(ImportError):
    """Error for a missing `_C`: neither an install nor a developer build has put the file into a known directory."""


def build_folders() -> list[Path]:
    """Return the directories to search for `_C` and the kernel packs, in the order of the search.

    An install puts the files beside library.py. A source tree has the files in the build directory. An editable
    install leaves the files in a folder named after the package on sys.path (site-packages), while library.py lies in
    the source tree.
    """
    package = Path(__file__).resolve().parents[1]
    tree = package.parent / "build" / "dev"
    on_path = (Path(entry) / package.name for entry in sys.path if entry)
    return [place for place in dict.fromkeys((package, tree, tree / "packs", *on_path)) if place.is_dir()]


def find_built(name: str) -> Path | None:
    """Return the full path of a built file, or None."""
    return next((place / name for place in build_folders() if (place / name).is_file()), None)


def _preload_tvm_ffi() -> None:
    """Load libtvm_ffi.so with global symbols for the packs, without importing tvm_ffi."""
    with contextlib.suppress(FileNotFoundError):
        _keep["tvm_ffi"] = ctypes.CDLL(str(linker.tvm_ffi_library()), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def lib() -> ctypes.CDLL:
    """Return `_C`, loaded at the first call.

    Raises:
        NotBuilt: no directory holds `_C`.
    """
    suffixes = [".so", *importlib.machinery.EXTENSION_SUFFIXES]
    path = next((file for file in (find_built(f"_C{suffix}") for suffix in suffixes) if file), None)
    if path is None:
        places = ", ".join(str(place) for place in build_folders())
        raise NotBuilt(f"torch_flashplug: _C.so is in none of {places}. Install the package, or run ./tools/dev build.")
    _preload_tvm_ffi()
    return _declare(ctypes.CDLL(str(path)))


_NUMBERS, _REALS, _STRING = ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_double), ctypes.c_char_p
_CALL = (_REALS, _NUMBERS, ctypes.c_int64)  # facts of the call, facts of the device, mode word
_TEXT = (_STRING, ctypes.c_int)  # a buffer for a text, and the size of the buffer
_ROW_KINDS = (
    "dtype",
    "family",
    "kernel",
    "choice",
    "stock_bug",
    "varlen",
    "feature",
    "argument",
    "cost_model",
    "layout",
)
# Types of the arguments of the C functions, for functions whose arguments ctypes cannot infer.
_ARGUMENT_TYPES: dict[str, tuple[object, ...]] = {
    "hold_error": (ctypes.py_object,),
    "direct_attention": (
        *[ctypes.py_object] * 3,
        ctypes.c_int64,
        *[ctypes.c_void_p] * 2,
    ),
    "may_meet_itself": (_NUMBERS,),
    "may_overlap": (_NUMBERS, _NUMBERS),
    "set_mode": (ctypes.c_int64,),
    "learn_node": (ctypes.c_int64,),
    "device_facts": (ctypes.c_int, _NUMBERS),
    "set_facts_override": (_NUMBERS,),
    "call_fact": (ctypes.c_int, _REALS, *_TEXT),
    "dtype": (ctypes.c_int, _NUMBERS, _NUMBERS, *_TEXT),
    "read_operands": (_NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, _REALS),
    "shape_obstacle": (_NUMBERS, ctypes.c_int),
    "mask_obstacle": (_NUMBERS, ctypes.c_int64, _NUMBERS, _NUMBERS, _NUMBERS),
    "bias_read": (_STRING, ctypes.c_int64, _NUMBERS, _NUMBERS, ctypes.c_int64, ctypes.c_int64, _NUMBERS, _NUMBERS),
    "stock_bug_text": (ctypes.c_int, *_TEXT),
    "scale": (ctypes.c_double,),
    "kernel_missing": _CALL,
    "is_plan_cached": _CALL,
    "plan_text": (*_CALL, ctypes.c_int, *_TEXT),
    "forced_error": (*_CALL, *_TEXT),
    "varlen_text": (_NUMBERS, ctypes.c_int, ctypes.c_int64, *_TEXT),
    "counters": (_NUMBERS, ctypes.c_int),
    "load_pack": (_STRING, _STRING),
} | {f"add_{row}_row": (ctypes.c_void_p, ctypes.c_size_t) for row in _ROW_KINDS}
# Types of the results. All other functions return an int, where 0 usually means success.
_RESULT_TYPES: dict[object, tuple[str, ...]] = {
    ctypes.c_int64: ("set_mode", "mode", "effective_mode", "missing_changes"),
    ctypes.c_void_p: ("direct_attention", "wrap_function"),
    None: (
        "clear_packs",
        "clear_rows",
        "counters",
        "device_facts",
        "enable_flash_op_decode",
        "hold_error",
        "learn_inference_keys",
        "load_pack",
        "read_operands",
        "set_compile_callback",
        "set_cpu_stub",
        "set_enabled",
        "set_facts_override",
        "set_learn_callback",
        "set_log_callback",
        "set_prepare_callback",
        "set_process_backend",
        "set_process_precision",
        "set_trace_callback",
        "set_varlen_rule",
        "unregister_efficient_op",
        "unregister_flash_op",
        "unregister_ops",
        "unregister_varlen_ops",
    ),
}


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of the arguments and results of the C functions."""
    for name, types in _ARGUMENT_TYPES.items():
        getattr(library, f"flashplug_{name}").argtypes = types
    for result, names in _RESULT_TYPES.items():
        for name in names:
            getattr(library, f"flashplug_{name}").restype = result
    return library


def ints(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def doubles(values: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    return (ctypes.c_double * len(values))(*values)


def text(call: Callable[[ctypes.Array[ctypes.c_char], int], int]) -> str:
    size = 4096
    while True:
        buffer = ctypes.create_string_buffer(size)
        needed = call(buffer, size)
        if needed <= size:
            return buffer.value.decode()
        size = needed
