"""Checks of the arguments of packed sequences: cu_seqlens and seqused_k."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_args import (
    check_dtypes,
    check_fit,
    check_rank,
    refuse_forward_mode,
)

Lengths = tuple[Tensor | None, Tensor | None, Tensor | None]  # cu_seqlens_q, cu_seqlens_k, seqused_k


def check_varlen(operands: tuple[Tensor, Tensor, Tensor], lengths: Lengths) -> bool:
    """Check packed operands and their lengths; return True if k and v have 8 bits. No length is read.

    Raises:
        TypeError: an operand is no 3-D tensor.
        ValueError: lengths, dtypes, devices or sizes do not fit.
        RuntimeError: forward-mode derivatives are computed.
    """
    for name, x in zip("qkv", operands, strict=True):
        check_rank(name, x, 3, "a tensor of shape (tokens, heads, head dim) with cu_seqlens_q")
    q, (cu_seqlens_q, cu_seqlens_k, seqused_k) = operands[0], lengths
    check_int32_vector("cu_seqlens_q", cu_seqlens_q, "sequences + 1", q.device)
    check_int32_vector("cu_seqlens_k", cu_seqlens_k, "sequences + 1", q.device)
    if seqused_k is not None:
        check_int32_vector("seqused_k", seqused_k, "sequences", q.device)
    if (
        cu_seqlens_q.shape != cu_seqlens_k.shape
        or not cu_seqlens_q.shape[0]
        or (seqused_k is not None and seqused_k.shape[0] + 1 != cu_seqlens_q.shape[0])
    ):
        shapes = ", ".join(str(tuple(x.shape)) for x in lengths if x is not None)
        raise ValueError(
            "attention: cu_seqlens_q, cu_seqlens_k and seqused_k must describe the same number of sequences, "
            f"but have shapes {shapes}. cu_seqlens have one number more than there are sequences."
        )
    is_quantized = check_dtypes(*operands)
    refuse_forward_mode()
    check_fit(*operands, *((1, *x.shape) for x in operands))  # the tokens are the length of a batch of 1
    return is_quantized


def check_int32_vector(name: str, x: object, size: str, device: torch.device) -> None:
    if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype != torch.int32 or x.device != device:
        actual = f"{x.dtype} {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"attention: {name} must be an int32 tensor of shape ({size},) on {device}, but got {actual}.")
