"""One kernel of a pack by its name, past the dispatcher: for tests that must reach every row, and for the tuner.

Imports tvm_ffi when it is used, so that the rest of the package does not need its Python side.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from ..registry.kernel_args import FORWARD, Argument
from .cases import Case, Inputs


@cache
def load_pack(path: Path):
    """The pack as a tvm_ffi module: `load_pack(path)[kernel name]` is a function."""
    import tvm_ffi

    return tvm_ffi.load_module(str(path))


def in_order(taken: Sequence[Argument], values: Mapping[str, object]) -> tuple:
    """Values by name in the order of a table of kernel_args.py; None for optional ones that are not there. KeyError for
    others that are not, and for what the kernel does not take.
    """
    names = {one.name for one in taken}
    if unknown := set(values) - names:
        raise KeyError(f"no argument {', '.join(sorted(unknown))}; the kernel takes {', '.join(sorted(names))}")
    return tuple(values.get(one.name) if one.optional else values[one.name] for one in taken)


class DirectForward:
    """One forward kernel on one problem: `call()` launches it into `out` (B, Hq, Sq, Dv) and `lse` (B, Hq, Sq).

    `more`: arguments by their names in arguments.FORWARD, beside those of every call: what F.sdpa cannot say. Tensors
    on the CPU: a function that interprets the kernel, on as few SMs as give each several tiles.
    """

    def __init__(self, function: Callable, case: Case, inputs: Inputs, **more: object):
        device = inputs.q.device
        out = torch.full((case.B, case.Sq, case.Hq, case.Dv), math.nan, dtype=case.torch_dtype, device=device)
        self.out = out.transpose(1, 2)
        self.lse = torch.full((case.B, case.Hq, case.Sq), math.nan, device=device)
        self._function = function
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        scale = case.D**-0.5 if case.scale is None else case.scale
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
        tensors = {name: tensor.detach() for name, tensor in zip("qkv", inputs, strict=True)}
        results = {"o": self.out, "lse": self.lse}
        numbers = {"scale_log2": scale * math.log2(math.e), "scale": scale, "num_ctas": sm_count}
        self._args = in_order(FORWARD, {**tensors, **results, **numbers, "counter": self._counter, **more})

    def call(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self.out.is_cuda else None
        self._function(*self._args, ctypes.c_void_p(stream))
