"""Plain calls of `attention()` in one C function (src/ops/direct_attention.cpp), without ops and views of torch.

The C function answers None for every call that is not plain, such as a call with gradients, under a mode of torch, or
with invalid arguments. `attention()` then takes the general path, which raises all errors.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch

from ..dispatch import bindings
from .varlen_plan import VarlenPlan


def _refuse(*arguments: object) -> None:
    """Stand for the C function before `install()`, and where the running torch does not allow the function."""


attend: Callable[..., object] = _refuse  # takes all arguments of attention() by position


def install() -> None:
    """Replace `attend` by the C function, if possible.

    A new thread makes the objects from which C++ learns the layout of tensors, and the keys of inference mode. No mode
    of the importing program is active there.
    """

    def learn() -> None:
        global attend  # noqa: PLW0603
        with torch.inference_mode():
            bindings.learn_inference_keys()
        probes = (torch.empty(0), torch.nn.Parameter(torch.empty(0)))
        words = torch._C.TensorBase.__basicsize__ // ctypes.sizeof(ctypes.c_void_p)
        function = bindings.direct_attention(probes, words, tuple(probe._cdata for probe in probes), VarlenPlan)
        attend = function or _refuse

    thread = threading.Thread(target=learn)
    thread.start()
    thread.join()
