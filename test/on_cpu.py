"""Kernels without a GPU: the kernels of the packs on CPU tensors, interpreted (tools/interpreted.py).

A call takes the real path, from F.sdpa to the last store of the kernel. Only the device is not real.
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
from torch_flashplug.codegen.provided import Circumstances, Provided
from torch_flashplug.dispatch import bindings, library
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.kernel_table import Pack
from torch_flashplug.testing import Case, interpreted, load_pack

ROOT = Path(__file__).resolve().parents[1]
TARGET = "sm_90a"  # the packs of this target hold the kernels of both families
MOST_FLOP = 1.5e8  # largest FLOP of a case, about half a second; half of MOST_FLOP if only samples were built


def is_small(case: Case) -> bool:
    """Return True if a case takes about half a second.

    The estimate counts whole tiles, and a fixed cost for each tile.
    """
    rows, keys = (-(-length // 64) * 64 for length in (case.Sq, case.Sk))
    tiles = case.B * case.Hq * rows // 64
    most = MOST_FLOP / (2 if not_built() else 1)
    return 2 * case.B * case.Hq * rows * keys * (case.D + case.Dv) <= most and tiles <= 1000


NOT_BUILT = "in no pack, since samples of the table were built; ./tools/dev build makes the others"


@functools.cache
def not_built(target: str = TARGET) -> frozenset[str]:
    """Return the kernels missing from the packs of a target if only samples (configs.SAMPLES) were built, else none."""
    packs = [pack for pack in kernel_table.PACKS if pack.target == target]
    reports = [path.with_suffix(".json") for pack in packs if (path := library.find_built(pack.file))]
    built = {row["name"] for report in reports for row in json.loads(report.read_text())["kernels"]}
    whole, samples = ({spec.name() for pack in packs for spec in take(pack)} for take in (Pack.specs, Pack.sample))
    return frozenset(whole - samples) if built == samples else frozenset()


def need(kernel: str, target: str = TARGET) -> None:
    """Skip the test if this kernel was not built."""
    if kernel in not_built(target):
        pytest.skip(f"{kernel}: {NOT_BUILT}")


compiles_on_demand = False  # whether tests compile missing kernels; set by conftest


def build(folder: Path, *kernels: str) -> Path:
    """Link kernels of TARGET with the interpreter.

    Args:
        folder: the folder for the pack.
        kernels: the names of kernels. Built kernels are linked. If no named kernel was built, all named kernels are
            compiled on demand. Without a name, all built kernels are linked.

    Returns:
        The path of the pack.
    """
    wanted = [kernel for kernel in kernels if kernel not in not_built()]
    if kernels and not wanted:
        if not compiles_on_demand:
            need(kernels[0])
        wanted = list(kernels)
    command = [sys.executable, "tools/interpreted.py", "--target", TARGET, "--out", str(folder)]
    command += ["--sample"] if not_built() else []
    command += [word for kernel in wanted for word in ("--spec", kernel)]
    command += ["--compile"] if compiles_on_demand else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return Path(done.stdout.split()[-1])


@functools.cache
def pack() -> Path:
    return build(ROOT / "build" / "interpreted")


def seed(file: Path, number: int) -> None:
    """Set the seed for the random order of asynchronous operations in the kernels of a pack.

    With seed 0, each asynchronous operation runs immediately.
    """
    ctypes.CDLL(str(file)).interpreter_seed(ctypes.c_uint64(number))


@contextlib.contextmanager
def kernels(order: int = 0) -> Iterator[None]:
    """Run F.sdpa on CPU tensors with interpreted kernels, as on an H100. `order` is the number for `seed`."""
    file = pack()

    def provide(name: str, cc: int, given: Circumstances) -> Provided | str:
        if name not in not_built():
            return "interpreted kernels are the build's"
        if not compiles_on_demand:
            lacked.append(name)
            return NOT_BUILT
        alone = interpreted.build(name)
        seed(alone, order)
        library = ctypes.CDLL(str(alone))
        _loaded.append(library)
        return Provided.of_library(library, name)

    with interpreted.kernels(file, provide):
        seed(file, order)
        yield


lacked: list[str] = []  # kernels of not_built() that a test needed; emptied before each test
_loaded: list[ctypes.CDLL] = []  # kernels that were compiled on demand


def _enable() -> None:
    torch_flashplug.enable()
    assert bindings.install(bindings.CPU_SLOT) == 0, bindings.last_error()


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Run stock, as if the plugin had never been enabled."""
    torch_flashplug.disable()
    bindings.uninstall(bindings.CPU_SLOT)
    try:
        yield
    finally:
        _enable()


# ---- a single kernel, called without the dispatcher ----


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Managed(ctypes.Structure):
    """Managed tensor of DLPack without a deleter: nothing needs to be freed."""

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
    """CPU tensor that reports a GPU as the device. The object must live as long as the imported tensor."""

    def __init__(self, tensor: torch.Tensor):
        sizes, strides = ((ctypes.c_int64 * tensor.dim())(*numbers) for numbers in (tensor.shape, tensor.stride()))
        type_ = _Type(*_TYPES[tensor.dtype], 1)
        self._managed = _Managed(tensor.data_ptr(), _CUDA, tensor.dim(), type_, sizes, strides)
        self.tensor = tensor

    def __dlpack__(self, **_: object) -> object:
        return _capsule(ctypes.addressof(self._managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA


def function(file: Path, name: str) -> Callable[..., None]:
    """Return a function that calls a kernel of an interpreted pack, or a kernel compiled on demand.

    The function takes the arguments of the kernel in order: CPU tensors, lists of tensors, and numbers. All loads and
    stores of the kernel, except TMA, must stay within the tensors.
    """
    import tvm_ffi

    if not compiles_on_demand:
        need(name)
    elif name in not_built() and not hasattr(ctypes.CDLL(str(file)), f"__tvm_ffi_{name}"):
        file = interpreted.build(name)
    kernel, hold_to = load_pack(file)[name], ctypes.CDLL(str(file)).interpreter_tensors

    def call(*values: object) -> None:
        taken: list[_OnGpu] = []

        def given(value: object) -> object:
            if isinstance(value, torch.Tensor):
                taken.append(_OnGpu(value))
                return tvm_ffi.from_dlpack(taken[-1])
            return [given(one) for one in value] if isinstance(value, (list, tuple)) else value

        arguments = [given(value) for value in values]
        memory = [one.tensor.untyped_storage() for one in taken]
        bounds = [end for one in memory for end in (one.data_ptr(), one.data_ptr() + one.nbytes())]
        hold_to((ctypes.c_uint64 * len(bounds))(*bounds), ctypes.c_size_t(len(memory)))
        try:
            kernel(*arguments)
        finally:
            hold_to(None, ctypes.c_size_t(0))

    return call


@contextlib.contextmanager
def installed_at(door: object, device: str) -> Iterator[None]:
    """Install a member of `hook_list.SWITCHED` at the dispatch key of a device, and restore the state afterwards."""
    door.install(device.upper())
    yield
    door.uninstall()
    door.install()
