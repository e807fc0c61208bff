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


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    numbers, string = ctypes.POINTER(ctypes.c_int64), ctypes.c_char_p
    reals = ctypes.POINTER(ctypes.c_double)
    for name in ("set_mode", "mode", "effective_mode", "missing_changes"):
        getattr(library, f"flashplug_{name}").restype = ctypes.c_int64
    for name in (
        "set_enabled",
        "set_process_backend",
        "set_process_precision",
        "set_cpu_stub",
        "unregister_ops",
        "device_facts",
        "set_facts_override",
        "clear_rows",
        "read_operands",
        "unregister_varlen_ops",
        "set_prepare_callback",
        "close_flash",
        "close_efficient",
        "enable_flash_op_decode",
        "hold_error",
    ):
        getattr(library, f"flashplug_{name}").restype = None
    for name in ("counters", "set_log_callback", "set_compile_callback", "load_pack", "clear_packs"):
        getattr(library, f"flashplug_{name}").restype = None
    library.flashplug_hold_error.argtypes = [ctypes.py_object]
    library.flashplug_set_mode.argtypes = library.flashplug_learn_node.argtypes = [ctypes.c_int64]
    library.flashplug_set_learn_callback.restype = None
    library.flashplug_device_facts.argtypes = [ctypes.c_int, numbers]
    library.flashplug_set_facts_override.argtypes = [numbers]
    for row in ("family", "kernel", "choice", "rescue", "varlen", "feature", "argument", "cost_model", "layout"):
        getattr(library, f"flashplug_add_{row}_row").argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.flashplug_set_trace_callback.restype = None
    library.flashplug_wrap_function.restype = ctypes.c_void_p
    call, out = (reals, numbers, ctypes.c_int64), (string, ctypes.c_int)
    library.flashplug_call_fact.argtypes = [ctypes.c_int, reals, *out]
    library.flashplug_dtype.argtypes = [ctypes.c_int, numbers, numbers, *out]
    library.flashplug_read_operands.argtypes = [numbers, numbers, numbers, numbers, reals]
    library.flashplug_shapes_fit.argtypes = [numbers, ctypes.c_int]
    library.flashplug_mask_obstacle.argtypes = [numbers, ctypes.c_int64, numbers, numbers, numbers]
    library.flashplug_stock_bug_text.argtypes = [ctypes.c_int, *out]
    library.flashplug_scale.argtypes = [ctypes.c_double]
    library.flashplug_kernel_missing.argtypes = call
    library.flashplug_is_plan_cached.argtypes = call
    library.flashplug_plan_text.argtypes = [*call, ctypes.c_int, *out]
    library.flashplug_forced_error.argtypes = [*call, *out]
    library.flashplug_varlen_text.argtypes = [numbers, ctypes.c_int, ctypes.c_int64, *out]
    library.flashplug_know_varlen_rule.restype = None
    library.flashplug_counters.argtypes = [numbers, ctypes.c_int]
    library.flashplug_load_pack.argtypes = [string, string]
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
