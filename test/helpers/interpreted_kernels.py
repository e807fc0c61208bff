"""Kernels without a GPU: kernels of the packs run on CPU tensors in the interpreter (tools/ptx_interpreter).

A call takes its real path from F.sdpa to the last store of the kernel. Only the device is simulated.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import torch_flashplug
from torch_flashplug.codegen.kernel_request import CallConditions, KernelAnswer
from torch_flashplug.dispatch import bindings, library
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.kernel_table import Pack
from torch_flashplug.testing import Case, interpreted, load_pack

ROOT = Path(__file__).resolve().parents[2]
TARGET = "sm_90a"  # packs of sm_90a hold the kernels of both families
MOST_FLOP = 1.5e8  # of a case: half a second; half of this limit after a build of samples


def is_small(case: Case) -> bool:
    """Return True if the interpreter runs the case in about half a second.

    The estimate counts full tiles, and limits the number of tiles because each tile has a fixed cost.
    """
    rows, keys = (-(-length // 64) * 64 for length in (case.Sq, case.Sk))
    tiles = case.B * case.Hq * rows // 64
    max_flop = MOST_FLOP / (2 if not_built() else 1)
    return 2 * case.B * case.Hq * rows * keys * (case.D + case.Dv) <= max_flop and tiles <= 1000


NOT_BUILT = "in no pack, since samples of the table were built; ./tools/dev build makes the others"


@functools.cache
def not_built(target: str = TARGET) -> frozenset[str]:
    """Return the names of kernels that the packs of a target lack after a build of `kernel_table.TEST_SAMPLES`.

    After a full build the set is empty.
    """
    packs = [pack for pack in kernel_table.PACKS if pack.target == target]
    reports = [path.with_suffix(".json") for pack in packs if (path := library.find_built(pack.file))]
    built = {row["name"] for report in reports for row in json.loads(report.read_text())["kernels"]}
    all_specs, samples = (
        {spec.name() for pack in packs for spec in take(pack)} for take in (Pack.specs, Pack.test_sample)
    )
    return frozenset(all_specs - samples) if built == samples else frozenset()


def skip_unless_built(kernel: str, target: str = TARGET) -> None:
    """Skip the test where the kernel was not built."""
    if kernel in not_built(target):
        pytest.skip(f"{kernel}: {NOT_BUILT}")


compiles_on_demand = False  # True: tests compile missing kernels; set by conftest


def build(folder: Path, *kernels: str) -> Path:
    """Link kernels of TARGET with the interpreter.

    Args:
        folder: where the pack is written.
        kernels: the names of kernels. Built kernels are linked. If no named kernel was built, all are compiled on
            demand. Without a name, all built kernels are linked.

    Returns:
        The path of the pack.
    """
    names = [kernel for kernel in kernels if kernel not in not_built()]
    if kernels and not names:
        if not compiles_on_demand:
            skip_unless_built(kernels[0])
        names = list(kernels)
    command = [sys.executable, "tools/ptx_interpreter/build_pack.py", "--target", TARGET, "--out", str(folder)]
    command += ["--sample"] if not_built() else []
    command += [word for kernel in names for word in ("--spec", kernel)]
    command += ["--compile"] if compiles_on_demand else []
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    return Path(process.stdout.split()[-1])


@functools.cache
def pack() -> Path:
    return build(ROOT / "build" / "interpreted")


def set_order_seed(file: Path, number: int) -> None:
    """Set the order in which the kernels of a pack run independent operations; 0 runs each operation at once."""
    ctypes.CDLL(str(file)).interpreter_seed(ctypes.c_uint64(number))


@contextlib.contextmanager
def enabled(order: int = 0) -> Iterator[None]:
    """Run F.sdpa on CPU tensors by interpreted kernels, as on an H100.

    Args:
        order: seed for `set_order_seed()`.
    """
    pack_file = pack()

    def provide(name: str, cc: int, circumstances: CallConditions) -> KernelAnswer | str:
        if name not in not_built():
            return "interpreted kernels are the build's"
        if not compiles_on_demand:
            missing_kernels.append(name)
            return NOT_BUILT
        kernel_file = interpreted.build(name)
        set_order_seed(kernel_file, order)
        library = ctypes.CDLL(str(kernel_file))
        _loaded.append(library)
        return KernelAnswer.of_library(library, name)

    with interpreted.kernels(pack_file, provide):
        set_order_seed(pack_file, order)
        yield


missing_kernels: list[str] = []  # kernels of `not_built()` that a test asked for; the runner of a test empties the list
_loaded: list[ctypes.CDLL] = []  # kernels compiled on demand


def _enable() -> None:
    torch_flashplug.enable()
    assert bindings.install(bindings.CPU_SLOT) == 0, bindings.last_error()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Restore stock behavior, as if the plugin had never been enabled."""
    torch_flashplug.disable()
    bindings.uninstall(bindings.CPU_SLOT)
    try:
        yield
    finally:
        _enable()


# ---- a single kernel, called directly ----


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Managed(ctypes.Structure):
    """Managed tensor of DLPack without a deleter."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("rank", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_CUDA = (2, 0)
_TYPES = {
    **{torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32)},
    **{torch.int32: (0, 32), torch.int64: (0, 64), torch.uint8: (1, 8)},
}
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class _OnGpu:
    """CPU tensor with the device type of a GPU in DLPack; must outlive the imported tensor."""

    def __init__(self, tensor: torch.Tensor):
        sizes, strides = ((ctypes.c_int64 * tensor.dim())(*numbers) for numbers in (tensor.shape, tensor.stride()))
        type_ = _Type(*_TYPES[tensor.dtype], 1)
        self._managed = _Managed(tensor.data_ptr(), _CUDA, tensor.dim(), type_, sizes, strides)
        self.tensor = tensor

    def __dlpack__(self, **_: object) -> object:
        return _capsule(ctypes.addressof(self._managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA


def load_kernel(file: Path, name: str) -> Callable[..., None]:
    """Return a kernel of an interpreted pack, or a kernel compiled on demand.

    The kernel is called with CPU tensors, lists of tensors and numbers, in the order of its arguments. Loads and
    stores, except those of TMA, must stay within the tensors.
    """
    import tvm_ffi

    if not compiles_on_demand:
        skip_unless_built(name)
    elif name in not_built() and not hasattr(ctypes.CDLL(str(file)), f"__tvm_ffi_{name}"):
        file = interpreted.build(name)
    kernel, set_bounds = load_pack(file)[name], ctypes.CDLL(str(file)).interpreter_tensors

    def call(*values: object) -> None:
        gpu_tensors: list[_OnGpu] = []

        def to_argument(value: object) -> object:
            if isinstance(value, torch.Tensor):
                gpu_tensors.append(_OnGpu(value))
                return tvm_ffi.from_dlpack(gpu_tensors[-1])
            return [to_argument(item) for item in value] if isinstance(value, (list, tuple)) else value

        arguments = [to_argument(value) for value in values]
        memory = [gpu_tensor.tensor.untyped_storage() for gpu_tensor in gpu_tensors]
        bounds = [end for storage in memory for end in (storage.data_ptr(), storage.data_ptr() + storage.nbytes())]
        set_bounds((ctypes.c_uint64 * len(bounds))(*bounds), ctypes.c_size_t(len(memory)))
        try:
            kernel(*arguments)
        finally:
            set_bounds(None, ctypes.c_size_t(0))

    return call


@contextlib.contextmanager
def installed_at(hook: object, device: str) -> Iterator[None]:
    """Install an entry of `hook_list.SWITCHED` at the dispatch key of a device, and restore it afterwards."""
    hook.install(device.upper())
    yield
    hook.uninstall()
    hook.install()
