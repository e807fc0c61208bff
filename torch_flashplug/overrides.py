"""What torch says of kernels that stand over its own."""

from __future__ import annotations

import functools
import warnings

import torch


@functools.cache
def spend_warning() -> None:
    """torch warns once in a process when a kernel is registered over another one, which we do on purpose."""
    library = torch.library.Library("flashplug_warned", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            library.impl("twice", torch.clone, "CPU", allow_override=True)
    library._destroy()
