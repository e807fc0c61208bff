"""What torch's dispatcher knows of kernels that stand over one another, and what it says of them."""

from __future__ import annotations

import functools
import warnings

import torch

_OURS = "torch_flashplug:"  # kOwner of src/core/values.h, with the line of its registration
_TORCHS = "aten/src/ATen/"  # in the path of each file that torch's own kernels are registered in


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


def other_owner(op: str, key: str = "CUDA") -> str:
    """Return where another library has registered the kernel that an op runs at a dispatch key.

    The result is empty where that kernel is torch's or ours, where there is none, and where this torch does not tell.
    """
    try:
        dump = torch._C._dispatch_dump(op)
    except (RuntimeError, AttributeError):  # an op that nobody has defined, or a torch without that function
        return ""
    begin = f"{key}: registered at "
    place = next((line.removeprefix(begin) for line in dump.splitlines() if line.startswith(begin)), "")
    place = place.partition(" :: ")[0]
    return "" if place.startswith(_OURS) or _TORCHS in place else place


def first_other_owner(*ops: str, key: str = "CUDA") -> str:
    """Return the first place that other_owner() finds for these ops, or an empty string."""
    return next(filter(None, (other_owner(op, key) for op in ops)), "")
