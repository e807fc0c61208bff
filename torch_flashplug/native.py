"""The one ctypes binding of _C: finds it, loads it, and gives its C functions Python types.

Owns the lookup of built files and nothing else; decisions are made in C++.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .choices import CHOICE_KINDS
from .rescues import FACTS
from .spec import BACKENDS, DTYPES

if TYPE_CHECKING:
    from .choices import ChoiceRow, Gate
    from .configs import KernelRow
    from .rescues import Rescue

CPU_SLOT, CUDA_SLOT = 0, 1  # of torch's choice stub; the CPU slot serves the tests' stand-in
DTYPE_IDS = {"bf16": 0, "fp16": 1, "fp32": 2}  # any other: 3; order as DType in src/flashplug.h
MASK_IDS = {"full": 0, "causal": 1, "any": 2}
KIND_IDS = {kind: number for number, kind in enumerate(CHOICE_KINDS)}
OPERANDS = ("query", "key", "value")
# Names and order of the ints that describe a call; flashplug_plan_text reads them by position.
PROBLEM_FIELDS = (
    *("B", "Hq", "Hkv", "Sq", "Sk", "D", "Dv"),
    *("dtype_q", "dtype_k", "dtype_v"),
    *("last_stride_q", "last_stride_k", "last_stride_v"),
    *("align_q", "align_k", "align_v"),
    *("causal", "has_mask", "on_cuda", "grad", "deterministic", "scale"),
    *("odd_base_q", "odd_base_k", "odd_base_v"),
    *("odd_ones_q", "odd_ones_k", "odd_ones_v"),
    *("broadcast_q", "broadcast_k", "broadcast_v"),
)
SCALE_IDS = {"positive": 0, "zero": 1, "negative": 2, "not finite": 3}  # as Scale in src/flashplug.h
PROBLEM_DEFAULTS = {
    **dict.fromkeys(PROBLEM_FIELDS, 0),
    **dict.fromkeys(("last_stride_q", "last_stride_k", "last_stride_v"), 1),
    **dict.fromkeys(("align_q", "align_k", "align_v"), 16),
    "on_cuda": 1,
}
PROBLEM_SIZES = PROBLEM_FIELDS[:7]  # which have no default
_BACKEND_BITS, PREFERENCE = 0x7F, 0x80  # of a mode word (Mode in src/flashplug.h)
STOCK_BACKENDS = ("cudnn", "flash", "efficient")  # order as StockBackend in src/torch_symbols.h
FACTS_FIELDS = ("cc", "sm_count", "smem_bytes", "l2_bytes", "memory_rate")
NO_DEVICE = dict.fromkeys(FACTS_FIELDS, 0)
# Counters, in the order of enum class Path.
PATHS = (
    *("ours_fwd", "cudnn_fwd", "efficient_fwd", "math_fwd"),
    *("ours_bwd", "repaired_bwd", "efficient_bwd", "math_bwd"),
    *("routed_ours", "routed_stock"),
)
_keep: dict[str, object] = {}  # libraries that others need


class NotBuilt(ImportError):
    """_C is not where an install or a developer build puts it."""


def built_files() -> list[Path]:
    """Directories that may hold _C and the kernel packs, in the order they are tried.

    Beside this file in an install; in the build directory of a source tree; in the folder of our name on sys.path,
    which is where an editable install leaves them (site-packages) while this file lies in the tree.
    """
    package = Path(__file__).resolve().parent
    tree = package.parent / "build" / "dev"
    on_path = (Path(entry) / package.name for entry in sys.path if entry)
    return [place for place in dict.fromkeys((package, tree, tree / "packs", *on_path)) if place.is_dir()]


def find_built(name: str) -> Path | None:
    """Full path of a built file, or None."""
    return next((place / name for place in built_files() if (place / name).is_file()), None)


def _preload_tvm_ffi() -> None:
    """Makes libtvm_ffi.so global, which the packs need, without importing tvm_ffi."""
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or spec.origin is None:
        return
    library = Path(spec.origin).parent / "lib" / "libtvm_ffi.so"
    if library.is_file():
        _keep["tvm_ffi"] = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def lib() -> ctypes.CDLL:
    """_C, loaded once. Raises NotBuilt if there is none."""
    suffixes = [".so", *importlib.machinery.EXTENSION_SUFFIXES]
    path = next((found for found in (find_built(f"_C{suffix}") for suffix in suffixes) if found), None)
    if path is None:
        places = ", ".join(str(place) for place in built_files())
        raise NotBuilt(f"torch_flashplug: _C.so is in none of {places}; install the package, or run ./tools/dev build")
    _preload_tvm_ffi()
    return _declare(ctypes.CDLL(str(path)))


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    ints, text = ctypes.POINTER(ctypes.c_int64), ctypes.c_char_p
    for name in ("set_mode", "mode", "effective_mode", "missing_changes"):
        getattr(library, f"flashplug_{name}").restype = ctypes.c_int64
    for name in (
        "set_enabled",
        "set_process_backend",
        "set_standin",
        "unregister_ops",
        "device_facts",
        "set_facts_override",
        "clear_rows",
        "add_rescue",
    ):
        getattr(library, f"flashplug_{name}").restype = None
    for name in ("set_gate", "counters", "set_log_callback", "set_compile_callback", "load_pack", "clear_packs"):
        getattr(library, f"flashplug_{name}").restype = None
    library.flashplug_set_mode.argtypes = [ctypes.c_int64]
    library.flashplug_device_facts.argtypes = [ctypes.c_int, ints]
    library.flashplug_set_facts_override.argtypes = [ints]
    library.flashplug_add_kernel_row.argtypes = [ints, ctypes.POINTER(text)]
    library.flashplug_add_rescue.argtypes = [ctypes.c_int64, text, text]
    library.flashplug_add_choice_row.argtypes = [ints, ctypes.c_double, text]
    library.flashplug_set_gate.argtypes = [*[ctypes.c_int64] * 3, *[ctypes.c_double] * 7]
    library.flashplug_set_trace_callback.restype = None
    library.flashplug_wrap_function.restype = ctypes.c_void_p
    library.flashplug_kernel_missing.argtypes = [ints, ctypes.c_double, ints, ctypes.c_int64]
    call, out = (ints, ctypes.c_double, ints, ctypes.c_int64), (text, ctypes.c_int)
    library.flashplug_plan_text.argtypes = [*call, ctypes.c_int, *out]
    library.flashplug_forced_error.argtypes = [*call, *out]
    library.flashplug_counters.argtypes = [ints, ctypes.c_int]
    library.flashplug_load_pack.argtypes = [text, text]
    return library


def _ints(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _text(call: Callable[[ctypes.Array[ctypes.c_char], int], int]) -> str:
    size = 4096
    while True:
        buffer = ctypes.create_string_buffer(size)
        needed = call(buffer, size)
        if needed <= size:
            return buffer.value.decode()
        size = needed


# ---- hook ----


def install(slot: int = CUDA_SLOT) -> int:
    """Puts our choice function into a slot of torch's stub. 0: done; else a reason code, in words from last_error()."""
    return lib().flashplug_install(slot)


def uninstall(slot: int = CUDA_SLOT) -> int:
    """Puts the saved pointer back, exactly."""
    return lib().flashplug_uninstall(slot)


def installed(slot: int = CUDA_SLOT) -> bool:
    return bool(lib().flashplug_installed(slot))


def last_error() -> str:
    return _text(lib().flashplug_last_error)


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


# ---- switches ----


def set_enabled(on: bool) -> None:
    lib().flashplug_set_enabled(int(on))


def enabled() -> bool:
    return bool(lib().flashplug_enabled())


def set_mode(word: int) -> int:
    """Sets this thread's mode word and returns the one before."""
    return lib().flashplug_set_mode(word)


def mode() -> int:
    return lib().flashplug_mode()


def effective_mode() -> int:
    """The process-wide backend if one is set, as a preference, else this thread's mode word."""
    return lib().flashplug_effective_mode()


def backend_of(mode_word: int) -> str:
    """One of BACKENDS."""
    return BACKENDS[mode_word & _BACKEND_BITS]


def forced_kernels(mode_word: int) -> str | None:
    """ "fa3" or "fa2" where calls that it cannot run must raise."""
    backend = backend_of(mode_word)
    return backend if backend in ("fa3", "fa2") and not mode_word & PREFERENCE else None


def set_process_backend(backend: int) -> None:
    """Backend id that goes ahead of every gate and block; calls that it cannot run stay stock. 0: none."""
    lib().flashplug_set_process_backend(backend)


def set_standin(on: bool | int) -> None:
    """Tests only: CPU tensors are eligible. 1: math stands in for kernels; 2: a pack's symbols run on CPU memory."""
    lib().flashplug_set_standin(int(on))


def backend_names() -> tuple[str, ...]:
    """Names by id, as C++ knows them."""
    names = []
    while name := _text(lambda out, size: lib().flashplug_backend_name(len(names), out, size)):
        names.append(name)
    return tuple(names)


# ---- device facts ----


def device_facts(index: int = 0) -> dict[str, int]:
    """{cc, sm_count, smem_bytes, l2_bytes, memory_rate} of a CUDA device, the last in bytes per ns; zeros where there
    is none. Makes no context.
    """
    out = _ints([0] * len(FACTS_FIELDS))
    lib().flashplug_device_facts(index, out)
    return dict(zip(FACTS_FIELDS, out, strict=True))


def set_facts_override(facts: Mapping[str, int] | None) -> None:
    """Tests: every device has these facts; None: the real ones again."""
    lib().flashplug_set_facts_override(_ints([facts[name] for name in FACTS_FIELDS]) if facts is not None else None)


# ---- table ----


def clear_rows() -> None:
    lib().flashplug_clear_rows()


def add_kernel_row(row: KernelRow) -> None:
    head = (KIND_IDS[row.kind], row.arch, row.d_max, row.dv_max, MASK_IDS[row.mask])
    specs = [row.spec(dtype) for dtype in DTYPES]
    smem_bytes = specs[0].smem_bytes()  # in every dtype the same
    tile = (row.tile_m, row.tile_n, row.stages, row.cost, int(row.elementwise), smem_bytes)
    names = (ctypes.c_char_p * len(specs))(*(spec.name().encode() for spec in specs))
    if lib().flashplug_add_kernel_row(_ints((*head, *tile)), names):
        raise RuntimeError("torch_flashplug: too many kernel rows; raise kMaxRows in src/flashplug.h")


def add_choice_row(row: ChoiceRow) -> None:
    head = (KIND_IDS[row.kind], row.arch, int(row.grad), MASK_IDS[row.mask])
    ranges = (row.d_min, row.d_max, row.min_sq, row.max_sq, row.min_sk, row.max_sk)
    limits = (row.min_tiles, row.tile_m, row.min_packed, row.max_packed)
    if lib().flashplug_add_choice_row(
        _ints((*head, *ranges, *limits, int(row.serve))), row.ratio, row.measured.encode()
    ):
        raise RuntimeError("torch_flashplug: too many choice rows; raise kMaxRows in src/flashplug.h")


def push_rows(
    kernel_rows: Sequence[KernelRow], choice_rows: Sequence[ChoiceRow], gate: Gate, rescues: Sequence[Rescue] = ()
) -> None:
    """Replaces the tables."""
    clear_rows()
    for kernel_row in kernel_rows:
        add_kernel_row(kernel_row)
    for rescue in rescues:
        facts = sum(1 << FACTS.index(fact) for fact in rescue.facts)
        lib().flashplug_add_rescue(facts, rescue.stock.encode(), rescue.evidence.encode())
    for choice_row in choice_rows:
        add_choice_row(choice_row)
    rates = (gate.cluster_ns, gate.cluster_rate, gate.combine_ns, gate.combine_rate, gate.read_share)
    lib().flashplug_set_gate(gate.rows, gate.wide_rows, gate.cluster, gate.wide_ns, gate.occupancy, *rates)


# ---- plans ----


def _call_arguments(problem: Mapping[str, int], facts: Mapping[str, int] | None, mode_word: int) -> tuple:
    unknown = set(problem) - set(PROBLEM_FIELDS) - {"dropout_p"}
    if unknown:
        raise TypeError(f"unknown problem fields {sorted(unknown)}; known are {PROBLEM_FIELDS} and dropout_p")
    missing = set(PROBLEM_SIZES) - set(problem)
    if missing:
        raise TypeError(f"problem lacks {sorted(missing)}; {PROBLEM_SIZES} have no default")
    filled = {**PROBLEM_DEFAULTS, **problem}
    device = facts if facts is not None else NO_DEVICE
    ints = _ints([int(filled[name]) for name in PROBLEM_FIELDS])
    return ints, float(problem.get("dropout_p", 0.0)), _ints([device[name] for name in FACTS_FIELDS]), mode_word


def plan_text(
    problem: Mapping[str, int], facts: Mapping[str, int] | None, mode_word: int = 0, remembered: bool = False
) -> str:
    """JSON {backend, kernel, splits, cluster, tiles, reasons{}, gate, row, rescue, gradients} of a call on a device.

    The call is described by PROBLEM_FIELDS and dropout_p; what is left out is bf16, packed, no mask, no grad.
    `remembered`: from this thread's memory of plans, as calls get theirs; else made anew.
    """
    arguments = _call_arguments(problem, facts, mode_word)
    return _text(lambda out, size: lib().flashplug_plan_text(*arguments, int(remembered), out, size))


def plan(problem: Mapping[str, int], facts: Mapping[str, int] | None, mode_word: int = 0) -> dict:
    return json.loads(plan_text(problem, facts, mode_word))


def missing_changes() -> int:
    """Goes up with every change of what kernel_missing answers."""
    return lib().flashplug_missing_changes()


def kernel_missing(problem: Mapping[str, int], facts: Mapping[str, int] | None, mode_word: int) -> bool:
    """The plan is ours, but its kernel was looked for in vain: stock serves the call."""
    return bool(lib().flashplug_kernel_missing(*_call_arguments(problem, facts, mode_word)))


def forced_error(problem: Mapping[str, int], facts: Mapping[str, int] | None, mode_word: int) -> str:
    """The text a forced backend raises for a call it cannot run."""
    arguments = _call_arguments(problem, facts, mode_word)
    return _text(lambda out, size: lib().flashplug_forced_error(*arguments, out, size))


def counters(reset: bool = False) -> dict[str, int]:
    """How many calls took each path since the last reset; tests assert which path ran from this."""
    out = _ints([0] * len(PATHS))
    lib().flashplug_counters(out, int(reset))
    return dict(zip(PATHS, out, strict=True))


# ---- kernels ----


def load_pack(path: Path | None, target: str) -> None:
    """Registers the kernel pack of a target (spec.TARGETS); it is opened when a kernel is first needed. None: it is not
    installed, and messages say how to build it.
    """
    lib().flashplug_load_pack(str(path or "").encode(), target.encode())


def clear_packs() -> None:
    lib().flashplug_clear_packs()
