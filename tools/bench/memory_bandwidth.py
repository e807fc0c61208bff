"""Measurement of memory bandwidth by a kernel with loads of K and V only.

The module needs triton, which CPU builds of torch lack.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from torch_flashplug.testing import Inputs

WORDS, WARPS = 4096, 16  # fastest of 24 shapes and two policies from 256 MB up (H100)


@triton.jit
def _read(k, v, out, words_k, words_v, block: tl.constexpr):
    """Read a part of K and V in each program, and store the sum, so that the compiler cannot remove the loads."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.load(k + at, at < words_k, 0, eviction_policy="evict_first")
    total ^= tl.load(v + at, at < words_v, 0, eviction_policy="evict_first")
    tl.store(out + tl.program_id(0), tl.sum(total))


def reader(inputs: Inputs) -> Callable[[], None]:
    """Return a function to read all of K and V once."""
    k, v = (t.transpose(1, 2).reshape(-1).view(torch.int32) for t in (inputs.k, inputs.v))
    programs = triton.cdiv(max(k.numel(), v.numel()), WORDS)
    out = torch.empty(programs, dtype=torch.int32, device=k.device)
    return lambda: _read[(programs,)](k, v, out, k.numel(), v.numel(), WORDS, num_warps=WARPS)
