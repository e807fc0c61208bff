"""Adding up what the steps of a ring find, in place: ops torch_flashplug::ring_merge, of outputs with their LSE, and
ring_add, of gradients. One kernel in Triton each, where that is; else, and on CPUs, plain torch.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from types import ModuleType

import torch
from torch import Tensor

_library = torch.library.Library("torch_flashplug", "FRAGMENT")
_library.define("ring_merge(Tensor(a!) out, Tensor(b!) lse, Tensor step_out, Tensor step_lse, int first) -> ()")
_library.define("ring_add(Tensor(a!) total, Tensor part, int first) -> ()")

namespace = torch.ops.torch_flashplug
_log = logging.getLogger("torch_flashplug")


def merged_in_torch(out: Tensor, lse: Tensor, step_out: Tensor, step_lse: Tensor, first: int) -> None:
    """out (B, H, S, D) and lse (B, H, S), fp32, become those of their keys and the step's, whose rows are theirs from
    `first` on. Rows that see no key anywhere keep LSE -inf, and zeros.
    """
    out, lse = (x.narrow(2, first, step_out.shape[2]) for x in (out, lse))
    both = torch.logaddexp(lse, step_lse)
    share = torch.exp(step_lse - both).masked_fill(both == -math.inf, 0.0).unsqueeze(-1)
    before = out.float()
    out.copy_(before + share * (step_out.float() - before))
    lse.copy_(both)


def added_in_torch(total: Tensor, part: Tensor, first: int) -> None:
    """total (B, H, S, D) gets part added, to its rows from `first` on."""
    rows = total.narrow(2, first, part.shape[2])
    rows.copy_(rows.float() + part.float())


@functools.cache
def _triton() -> ModuleType | None:
    """Its kernels, if they can be compiled here: Triton needs a C compiler at run time."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        from . import ring_merge_triton

        ring_merge_triton.try_out("cuda")
    except Exception as problem:  # each version fails in a way of its own
        _log.warning("steps of rings are merged in plain torch, which takes longer: Triton: %s", problem)
        return None
    return ring_merge_triton


def _are_rows(*tensors: Tensor) -> bool:
    """Of elements on end."""
    return _triton() is not None and all(x.stride(3) == 1 and x.numel() > 0 for x in tensors)


def _merged(out: Tensor, lse: Tensor, step_out: Tensor, step_lse: Tensor, first: int) -> None:
    if not _are_rows(out, step_out) or not (lse.is_contiguous() and step_lse.is_contiguous()):
        return merged_in_torch(out, lse, step_out, step_lse, first)
    return _triton().merge(out, lse, step_out, step_lse, first)


def _added(total: Tensor, part: Tensor, first: int) -> None:
    return _triton().add(total, part, first) if _are_rows(total, part) else added_in_torch(total, part, first)


def _nothing(*given: object) -> None:
    """What is changed in place has the shape that it had."""


def _register() -> None:
    for name, in_torch, fused in (("ring_merge", merged_in_torch, _merged), ("ring_add", added_in_torch, _added)):
        _library.impl(name, in_torch, "CPU")
        _library.impl(name, fused, "CUDA")
        torch.library.register_fake(f"torch_flashplug::{name}", _nothing, lib=_library)


_register()
