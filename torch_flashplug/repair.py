"""Switches the repair of stock's cuDNN attention (src/repair.cpp), for calls that stay with stock: it misreads
addresses and strides that are no multiples of 16 bytes, and its backward forgets how grad_out lies in memory.
"""

from __future__ import annotations

import functools
import warnings

import torch

from . import env, native


@functools.cache
def spend_override_warning() -> None:
    """torch warns once in a process when a kernel is registered over another one, which the repair does on purpose."""
    library = torch.library.Library("flashplug_warned", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            library.impl("twice", torch.clone, "CPU", allow_override=True)
    library._destroy()


def install() -> str:
    """Puts it in place; says why not, where it cannot be."""
    if env.REPAIR.get() == "0" or torch.version.cuda is None:
        return ""
    spend_override_warning()
    return "" if native.repair(True) else native.last_error()


def uninstall() -> None:
    """Stock's own kernel is in place again."""
    native.repair(False)
