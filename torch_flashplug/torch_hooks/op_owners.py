"""Facts of torch's dispatcher about overridden kernels, and the warning about an override."""

from __future__ import annotations

import functools
import warnings

import torch

_OURS = "torch_flashplug:"  # kOwner of src/core/values.h; the line number of the registration follows
_TORCHS = "aten/src/ATen/"  # part of the path of each file that registers torch's own kernels


@functools.cache
def suppress_override_warning() -> None:
    """Use up torch's warning about overridden kernels.

    torch warns once in a process when a registration replaces a kernel. torch_flashplug replaces kernels on purpose.
    """
    library = torch.library.Library("flashplug_warned", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            library.impl("twice", torch.clone, "CPU", allow_override=True)
    library._destroy()


def other_owner(op: str, key: str = "CUDA") -> str:
    """Return the place where a different library has registered the kernel of an op for a dispatch key.

    The result is empty for a kernel of torch or torch_flashplug, without a kernel, and for a torch that does not tell.
    """
    try:
        dump = torch._C._dispatch_dump(op)
    except (RuntimeError, AttributeError):  # an undefined op, or a torch without `_dispatch_dump`
        return ""
    begin = f"{key}: registered at "
    place = next((line.removeprefix(begin) for line in dump.splitlines() if line.startswith(begin)), "")
    place = place.partition(" :: ")[0]
    return "" if place.startswith(_OURS) or _TORCHS in place else place


def first_other_owner(*ops: str, key: str = "CUDA") -> str:
    """Return the first place found by other_owner() for some ops, or an empty string."""
    return next(filter(None, (other_owner(op, key) for op in ops)), "")
