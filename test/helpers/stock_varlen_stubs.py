"""CPU stubs for the stock ops in the bodies of varlen_attn; torch has no CPU kernels for such ops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def registered_on_cpu() -> Iterator[list[str]]:
    """Register CPU kernels of flash attention and cuDNN that compute nothing, and yield a list of the called ops."""
    called_ops, library = [], torch.library.Library("aten", "IMPL")

    def flash_forward(query: Tensor, *args: object, **settings: object) -> tuple[Tensor, ...]:
        called_ops.append("forward")
        empty = torch.empty(0, dtype=torch.uint64)
        return torch.zeros_like(query), torch.zeros(query.shape[1], query.shape[0]), empty, empty, empty.float()

    def cudnn_forward(query: Tensor, *args: object, **settings: object) -> tuple:
        called_ops.append("cudnn forward")
        lse, state = torch.zeros(query.shape[1], query.shape[0]), torch.empty(0, dtype=torch.int64)
        return torch.zeros_like(query), lse, None, None, 0, 0, state, state, None

    def flash_backward(grad_out: Tensor, *operands: Tensor, **settings: object) -> tuple[Tensor, ...]:
        called_ops.append("backward")
        return tuple(torch.zeros_like(x) for x in operands[:3])

    def cudnn_backward(*operands: Tensor, **settings: object) -> tuple[Tensor, ...]:
        called_ops.append("cudnn backward")
        return tuple(torch.zeros_like(x) for x in operands[1:4])

    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    library.impl("_cudnn_attention_forward", cudnn_forward, "CPU")
    library.impl("_cudnn_attention_backward", cudnn_backward, "CPU")
    try:
        yield called_ops
    finally:
        library._destroy()
