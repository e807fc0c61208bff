"""One kernel of a pack by its name, past the dispatcher: for tests that must reach every row, and for the tuner.

Imports tvm_ffi when it is used, so that the rest of the package does not need its Python side.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from .cases import Case, Inputs


@cache
def load_pack(path: Path):
    """The pack as a tvm_ffi module: `load_pack(path)[kernel name]` is a function."""
    import tvm_ffi

    return tvm_ffi.load_module(str(path))


class DirectForward:
    """One forward kernel on one problem: `call()` launches it into `out` (B, Hq, Sq, Dv) and `lse` (B, Hq, Sq)."""

    def __init__(self, function: Callable, case: Case, inputs: Inputs):
        device = inputs.q.device
        out = torch.full((case.B, case.Sq, case.Hq, case.Dv), math.nan, dtype=case.torch_dtype, device=device)
        self.out = out.transpose(1, 2)
        self.lse = torch.full((case.B, case.Hq, case.Sq), math.nan, device=device)
        self._function = function
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        scale = case.D**-0.5 if case.scale is None else case.scale
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        tensors = (*(t.detach() for t in inputs), self.out, self.lse)
        self._args = (*tensors, scale * math.log2(math.e), scale, self._counter, sm_count)

    def call(self) -> None:
        self._function(*self._args, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
