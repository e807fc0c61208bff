"""What memory can do: a kernel that reads K and V and nothing else. Needs triton, which CPU builds of torch lack."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from torch_flashplug.testing import Inputs

WORDS, WARPS, CTAS_PER_SM = 4096, 8, 8


@triton.jit
def _read(k, v, out, words, block: tl.constexpr):
    """Every program reads its share of K and V, and leaves their sum so that nobody leaves the reading out."""
    lanes = tl.arange(0, block)
    total = tl.zeros((block,), tl.int32)
    for start in range(tl.program_id(0) * block, words, tl.num_programs(0) * block):
        inside = start + lanes < words
        total += tl.load(k + start + lanes, inside, 0) ^ tl.load(v + start + lanes, inside, 0)
    tl.store(out + tl.program_id(0), tl.sum(total))


def reader(inputs: Inputs) -> Callable[[], None]:
    """A call that reads all of K and V once: what memory can do."""
    k, v = (t.transpose(1, 2).reshape(-1).view(torch.int32) for t in (inputs.k, inputs.v))
    programs = min(
        triton.cdiv(k.numel(), WORDS),
        CTAS_PER_SM * torch.cuda.get_device_properties(k.device).multi_processor_count,
    )
    out = torch.empty(programs, dtype=torch.int32, device=k.device)
    return lambda: _read[(programs,)](k, v, out, k.numel(), WORDS, num_warps=WARPS)
