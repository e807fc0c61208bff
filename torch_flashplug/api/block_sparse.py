"""attention() by lists of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.block_mask import BlockLists, block_lists
from ..ops.block_sparse import namespace
from ..torch_hooks import describe_call, tracing
from .attention_args import check_dtypes, check_operands, refuse_forward_mode


def of_blocks(
    operands: tuple[Tensor, Tensor, Tensor], block_mask: object, beside: list[str], scale: float | None,
    into: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(B, Sq, Hq, Dv) and (B, Hq, Sq)."""
    if beside:
        raise ValueError(f"attention: block_mask beside {', '.join(beside)}; say it in mask_mod, or give no block_mask")
    check_operands(*operands)
    if check_dtypes(*operands):
        raise ValueError("attention: k and v in 8 bits beside block_mask are not built; give them in 16 bits")
    refuse_forward_mode()
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    if not isinstance(block_mask, BlockLists):
        if torch.compiler.is_compiling():
            raise ValueError("attention: inside of torch.compile give block_lists(block_mask), made outside of it")
        block_mask = block_lists(block_mask, gradients=wanted)
    q, k, _ = operands
    (B, Sq, Hq, _), Sk, (batches, heads, _) = q.shape, k.shape[1], block_mask.digest.shape
    if (block_mask.Sq, block_mask.Sk) != (Sq, Sk) or batches not in (1, B) or heads not in (1, Hq):
        given = (batches, heads, block_mask.Sq, block_mask.Sk)
        raise ValueError(f"attention: block_mask is {given}; give one of B, Hq, Sq, Sk = {(B, Hq, Sq, Sk)}, B or Hq 1")
    if block_mask.digest.device != q.device:
        raise ValueError(f"attention: block_mask is on {block_mask.digest.device}, q on {q.device}")
    if wanted and not block_mask.gradients:
        raise ValueError("attention: lists of blocks were made without gradients; make them by block_lists(block_mask)")
    given = (x.transpose(1, 2) for x in describe_call.under_autocast(q.device.type, *operands))
    out, lse = namespace.listed_fwd(*given, block_mask.digest, block_mask.tall, scale, tracing.mode_of_block())
    out = out.transpose(1, 2)
    return (out if into is None else into.copy_(out)), lse
