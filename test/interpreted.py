"""Kernels without a GPU: the packs' own kernels on CPU tensors, interpreted (tools/interpreted.py). Here the path of a
call is as it is, from F.sdpa to the kernel's last store; only the device is not one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torch_flashplug
from torch_flashplug import _start, native
from torch_flashplug.api import DEVICES
from torch_flashplug.testing import Case

ROOT = Path(__file__).resolve().parents[1]
TARGET = "sm_90a"  # whose packs hold the kernels of both families
MOST_FLOP = 3e8  # of a case: a second or less


def is_small(case: Case) -> bool:
    """Whether it is done in about a second."""
    tiles = case.B * case.Hq * -(-case.Sq // 64)
    return case.flop <= MOST_FLOP and tiles <= 2000


@functools.cache
def pack() -> Path:
    """Every kernel that is built for TARGET, linked with the interpreter; made of what the build left behind."""
    folder = ROOT / "build" / "interpreted"
    command = [sys.executable, "tools/interpreted.py", "--target", TARGET, "--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return Path(done.stdout.split()[-1])


@contextlib.contextmanager
def kernels(seed: int = 0) -> Iterator[None]:
    """F.sdpa on CPU tensors runs them, as on an H100. seed: in which order they do what they need not wait for; 0: at
    once.
    """
    file = pack()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FLASHPLUG_JIT", "0")  # what the pack lacks is an error
        native.set_facts_override(DEVICES["h100"])
        native.set_standin(2)
        native.clear_packs()
        native.load_pack(file, TARGET)
        native.register_ops("CPU")
        _start.push_tables()  # kernels are looked for again
        torch._fused_sdp_choice(*torch.empty(3, 1, 1, 8, 8).unbind())  # resolves the CPU slot of torch's stub
        torch_flashplug.enable()
        assert native.install(native.CPU_SLOT) == 0, native.last_error()
        ctypes.CDLL(str(file)).interpreter_seed(ctypes.c_uint64(seed))
        try:
            yield
        finally:
            native.uninstall(native.CPU_SLOT)
            native.set_standin(False)
            native.set_facts_override(None)
            native.unregister_ops()
            native.register_ops("CUDA")
            native.clear_packs()
            _start.register_packs()
            _start.push_tables()


# ---- one kernel, past the dispatcher ----


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    """DLPack's."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("rank", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Value(ctypes.Union):
    _fields_ = (("integer", ctypes.c_int64), ("real", ctypes.c_double), ("pointer", ctypes.c_void_p))


class _Any(ctypes.Structure):
    """TVM-FFI's."""

    _fields_ = (("type", ctypes.c_int32), ("padding", ctypes.c_int32), ("value", _Value))


_NONE, _INTEGER, _REAL, _POINTER, _TENSOR = 0, 1, 3, 4, 7
_CUDA = 2
_TYPES = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32), torch.int32: (0, 32)}


class Function:
    """A kernel of a pack, called with CPU tensors that it is told are a GPU's; raises RuntimeError with the
    interpreter's words.
    """

    def __init__(self, file: Path, name: str):
        self._library = ctypes.CDLL(str(file))
        self._call = self._library[f"__tvm_ffi_{name}"]
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def __call__(self, *values: object) -> None:
        kept: list[object] = []
        packed = (_Any * len(values))(*(self._packed(value, kept) for value in values))
        result = _Any()
        if self._call(None, packed, len(values), ctypes.byref(result)) != 0:
            raise RuntimeError(self._library.cudaGetErrorString(0).decode() or "the host code refused its arguments")

    def _packed(self, value: object, kept: list[object]) -> _Any:
        if value is None:
            return _Any(_NONE)
        if isinstance(value, ctypes.c_void_p):
            return _Any(_POINTER, 0, _Value(pointer=value.value))
        if isinstance(value, int):
            return _Any(_INTEGER, 0, _Value(integer=value))
        if isinstance(value, float):
            return _Any(_REAL, 0, _Value(real=value))
        assert isinstance(value, torch.Tensor)
        sizes, strides = ((ctypes.c_int64 * value.dim())(*numbers) for numbers in (value.shape, value.stride()))
        type_ = _Type(*_TYPES[value.dtype], 1)
        tensor = _Tensor(value.data_ptr(), (_CUDA, 0), value.dim(), type_, sizes, strides, 0)
        kept += [tensor, sizes, strides, value]
        return _Any(_TENSOR, 0, _Value(pointer=ctypes.addressof(tensor)))
