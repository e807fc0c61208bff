"""Block-sparse variant of `attention()`, for the argument `block_mask`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.block_mask import PreparedBlockMask, prepare_block_mask
from ..ops.block_sparse import namespace
from ..torch_hooks import describe_call, tracing
from .attention_args import check_dtypes, check_operands, refuse_forward_mode


def block_sparse_attention(
    operands: tuple[Tensor, Tensor, Tensor], block_mask: object, conflicts: list[str], scale: float | None,
    out_buffer: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend by block-sparse lists; return the output (B, Sq, Hq, Dv) and the LSE (B, Hq, Sq).

    Args:
        operands: q, k and v.
        block_mask: A BlockMask or a PreparedBlockMask.
        conflicts: Names of other arguments of the call, none of which may accompany `block_mask`.
        scale: Softmax scale, or None.
        out_buffer: The caller's output tensor, or None.
    """
    if conflicts:
        raise ValueError(
            "attention: block_mask must not be combined with other arguments, "
            f"but got {', '.join(conflicts)}. Express masks in mask_mod, or leave block_mask out."
        )
    check_operands(*operands)
    if check_dtypes(*operands):
        raise ValueError("attention: k and v must have 16 bits with block_mask, but got 8 bits. Convert k and v first.")
    refuse_forward_mode()
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    if not isinstance(block_mask, PreparedBlockMask):
        if torch.compiler.is_compiling():
            raise ValueError(
                "attention: block_mask must be the result of prepare_block_mask() inside of torch.compile. "
                "Call prepare_block_mask(block_mask) outside of the compiled function, and pass the result."
            )
        block_mask = prepare_block_mask(block_mask, gradients=needs_grad)
    q, k, _ = operands
    (B, Sq, Hq, _), Sk, (batches, heads, _) = q.shape, k.shape[1], block_mask.metadata.shape
    if (block_mask.Sq, block_mask.Sk) != (Sq, Sk) or batches not in (1, B) or heads not in (1, Hq):
        mask_shape = (batches, heads, block_mask.Sq, block_mask.Sk)
        raise ValueError(
            "attention: block_mask must have shape (B or 1, Hq or 1, Sq, Sk), where "
            f"B, Hq, Sq, Sk = {(B, Hq, Sq, Sk)}, but got {mask_shape}."
        )
    if block_mask.metadata.device != q.device:
        raise ValueError(
            f"attention: block_mask must be on the device of q, {q.device}, but is on {block_mask.metadata.device}."
        )
    if needs_grad and not block_mask.gradients:
        raise ValueError(
            "attention: block_mask must be made with gradients, because a tensor requires a gradient, but got the "
            "result of prepare_block_mask(gradients=False). Call prepare_block_mask(block_mask)."
        )
    inputs = (x.transpose(1, 2) for x in describe_call.under_autocast(q.device.type, *operands))
    out, lse = namespace.block_sparse_fwd(
        *inputs,
        block_mask.metadata,
        cost_ratio_192=block_mask.cost_ratio_192,
        scale=scale,
        block_mode=tracing.mode_of_block(),
    )
    out = out.transpose(1, 2)
    return (out if out_buffer is None else out_buffer.copy_(out)), lse
