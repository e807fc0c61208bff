"""Accumulation in place over the steps of a ring: ops torch_flashplug::ring_merge and ring_add.

ring_merge merges outputs with the LSE, and ring_add sums gradients. Each op is one Triton kernel on GPUs with Triton.
On CPUs and without Triton, plain torch computes the result.
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


def merge_in_torch(out: Tensor, lse: Tensor, step_out: Tensor, step_lse: Tensor, first: int) -> None:
    """Merge a step's output and LSE into `out` and `lse`, in place.

    Rows without visible keys in all steps keep the LSE -inf, and zeros.

    Args:
        out: accumulated output (B, H, S, D).
        lse: accumulated LSE (B, H, S), fp32.
        step_out: output of the step, for the rows of `out` from `first` on.
        step_lse: LSE of the step, for the rows of `lse` from `first` on.
        first: first row of the step.
    """
    out, lse = (x.narrow(2, first, step_out.shape[2]) for x in (out, lse))
    both = torch.logaddexp(lse, step_lse)
    share = torch.exp(step_lse - both).masked_fill(both == -math.inf, 0.0).unsqueeze(-1)
    before = out.float()
    out.copy_(before + share * (step_out.float() - before))
    lse.copy_(both)


def add_in_torch(total: Tensor, part: Tensor, first: int) -> None:
    """Add `part` to the rows of `total` (B, H, S, D) from `first` on, in place."""
    rows = total.narrow(2, first, part.shape[2])
    rows.copy_(rows.float() + part.float())


@functools.cache
def _triton() -> ModuleType | None:
    """Return the module with the Triton kernels if the kernels compile; Triton needs a C compiler at run time."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        from . import ring_merge_triton

        ring_merge_triton.try_out("cuda")
    except Exception as problem:  # each version of Triton fails in a different way
        _log.warning("ring steps are merged in plain torch, which is slower: Triton: %s", problem)
        return None
    return ring_merge_triton


def _can_use_triton(*tensors: Tensor) -> bool:
    """Return whether the rows of all tensors are contiguous and not empty, and Triton is usable."""
    return _triton() is not None and all(x.stride(3) == 1 and x.numel() > 0 for x in tensors)


def _merge(out: Tensor, lse: Tensor, step_out: Tensor, step_lse: Tensor, first: int) -> None:
    if not _can_use_triton(out, step_out) or not (lse.is_contiguous() and step_lse.is_contiguous()):
        return merge_in_torch(out, lse, step_out, step_lse, first)
    return _triton().merge(out, lse, step_out, step_lse, first)


def _add(total: Tensor, part: Tensor, first: int) -> None:
    return _triton().add(total, part, first) if _can_use_triton(total, part) else add_in_torch(total, part, first)


def _fake(*args: object) -> None:
    """Do nothing: an in-place op keeps the shape of the tensors."""


def _register() -> None:
    for name, in_torch, fused in (("ring_merge", merge_in_torch, _merge), ("ring_add", add_in_torch, _add)):
        _library.impl(name, in_torch, "CPU")
        _library.impl(name, fused, "CUDA")
        torch.library.register_fake(f"torch_flashplug::{name}", _fake, lib=_library)


_register()
