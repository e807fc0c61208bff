"""Kernels that run nothing, but record the arguments of their launch and fill their results with known numbers.

Calls on CPU tensors take the path of calls on an H100 up to the launch, as with interpreted kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from torch_flashplug.codegen.kernel_request import CallConditions, KernelAnswer
from torch_flashplug.registry import kernel_args
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import interpreted


class _Value(ctypes.Union):
    _fields_ = (("integer", ctypes.c_int64), ("real", ctypes.c_double), ("address", ctypes.c_void_p))


class _Argument(ctypes.Structure):
    """Packed argument of TVM-FFI."""

    _fields_ = (("kind", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", _Value))


class _Described(ctypes.Structure):
    """Description of a tensor, as in DLPack."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


_NONE, _INTEGER, _REAL, _TENSOR = 0, 1, 3, 7  # kinds of packed arguments
_DTYPES = {(4, 16): torch.bfloat16, (2, 16): torch.float16, (2, 32): torch.float32}
_DTYPES |= {(0, 32): torch.int32, (0, 64): torch.int64, (1, 8): torch.bool}
_READ = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "sinks")  # tensors whose numbers are recorded
_Kernel = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Argument), ctypes.c_int32, ctypes.c_void_p
)  # fmt: skip


def _tensor_of(described: _Described) -> Tensor:
    sizes, strides = ([numbers[i] for i in range(described.rank)] for numbers in (described.shape, described.strides))
    dtype = _DTYPES[described.code, described.bits]
    if 0 in sizes:
        return torch.empty(sizes, dtype=dtype)
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = (ctypes.c_char * (span * dtype.itemsize)).from_address(described.data)
    return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides)


class Recorder:
    """Launches since the last `take()`. Memory of the `known` tensors is recorded by name, and other memory as new."""

    def __init__(self) -> None:
        self.known: dict[str, Tensor] = {}
        self.reason = ""  # the reason for missing kernels; empty: there are kernels
        self._launches: list[tuple[str, dict[str, object]]] = []
        self._kernels: dict[str, object] = {}  # callbacks that C++ may call

    def take(self) -> list[tuple[str, dict[str, object]]]:
        """Return the names and arguments of the launches, and forget the launches."""
        launches, self._launches = self._launches, []
        return launches

    def provide(self, name: str, cc: int, conditions: CallConditions) -> KernelAnswer:
        """Return a kernel, as for set_compile_callback()."""
        if self.reason:
            return KernelAnswer(reason=self.reason)
        names = [argument.name for argument in kernel_args.ARGUMENTS_BY_KIND[KernelSpec.from_name(name).kind]]

        def launch(_: int, packed: ctypes._Pointer, count: int, result: int) -> int:
            assert count == len(names) + 1  # the last argument is the stream
            values = {argument: self._value(argument, packed[i]) for i, argument in enumerate(names)}
            self._launches.append((name, values))
            return 0

        self._kernels[name] = _Kernel(launch)
        return KernelAnswer(function=ctypes.cast(self._kernels[name], ctypes.c_void_p).value)

    def _value(self, name: str, argument: _Argument) -> object:
        if argument.kind == _NONE:
            return None
        if argument.kind == _INTEGER:
            return argument.value.integer
        if argument.kind == _REAL:
            return argument.value.real
        assert argument.kind == _TENSOR, argument.kind
        tensor = _tensor_of(_Described.from_address(argument.value.address))
        if name in ("o", "lse") and 0 not in tensor.stride():  # preprocessing has no results
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 251)
        shown = tensor.tolist() if name in _READ else self._place(tensor)
        return tensor.dtype, tuple(tensor.shape), tensor.stride(), shown

    def _place(self, tensor: Tensor) -> tuple[str, int]:
        for name, known in self.known.items():
            storage = known.untyped_storage()
            offset = tensor.data_ptr() - storage.data_ptr()
            if 0 <= offset < storage.nbytes():
                return name, offset
        return "new", 0


@contextlib.contextmanager
def recorded_launches() -> Iterator[Recorder]:
    """Serve CPU tensors by recording kernels, as if this machine had an H100."""
    recorder = Recorder()
    with interpreted.kernels(Path("no_pack.so"), recorder.provide):
        yield recorder
