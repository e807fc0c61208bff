"""Direct launch of a kernel of a pack by name, without the dispatch.

The launch serves tests of every row of the kernel table, and the tuner. The module imports tvm_ffi on first use, so the
rest of the package does not need the Python side of tvm_ffi.
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
    """Load a pack as a tvm_ffi module; `load_pack(path)[kernel name]` is a function."""
    import tvm_ffi

    return tvm_ffi.load_module(str(path))


def order_arguments(arguments: Sequence[Argument], values: Mapping[str, object]) -> tuple:
    """Return values by name in the order of a table of kernel_args.py, with None for missing optional arguments.

    Raises:
        KeyError: a required argument is missing, or the kernel has no argument of a name.
    """
    names = {argument.name for argument in arguments}
    if unknown := set(values) - names:
        raise KeyError(
            f"order_arguments: values must name arguments of the kernel, {', '.join(sorted(names))}, but got "
            f"{', '.join(sorted(unknown))}."
        )
    return tuple(values.get(argument.name) if argument.is_optional else values[argument.name] for argument in arguments)


class DirectForward:
    """A forward kernel with the arguments of a case: `call()` writes `out` (B, Hq, Sq, Dv) and `lse` (B, Hq, Sq).

    Args:
        function: kernel of a pack. For tensors on the CPU, an interpreted kernel on few SMs, so each SM has several
            tiles.
        case: the attention problem.
        inputs: tensors of the case.
        **more: further arguments by name in kernel_args.FORWARD, for features missing in F.sdpa.
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
        self._args = order_arguments(FORWARD, {**tensors, **results, **numbers, "counter": self._counter, **more})

    def call(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self.out.is_cuda else None
        self._function(*self._args, ctypes.c_void_p(stream))
