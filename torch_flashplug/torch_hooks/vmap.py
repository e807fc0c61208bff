"""vmap rules for the aten pair called by F.sdpa and for the custom ops: the mapped dim is folded into the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ..ops import attention, sdpa
from . import tracing

_FORWARD_TENSORS = 3  # query, key, value
_MAPPED_RESULTS = 2  # out and lse; seeds, offsets and sizes belong to the single folded call


def register() -> None:
    torch.library.register_vmap("torch_flashplug::sdpa_fwd", _custom_op_forward)
    torch.library.register_vmap("torch_flashplug::sdpa_bwd", _custom_op_backward)
    torch.library.register_vmap("torch_flashplug::quantized_kv_fwd", _quantized_kv_forward)
    torch.library.register_vmap("torch_flashplug::attention_fwd", _attention_forward)
    torch.library.register_vmap("torch_flashplug::attention_bwd", _attention_backward)
    torch.library.register_vmap(tracing.OVERRIDEABLE.default, _aten_forward)
    torch.library.register_vmap(tracing.OVERRIDEABLE_BACKWARD.default, _aten_backward)


class _BatchFold:
    """Converter of tensors between (B, ...) under vmap of size N and (N * B, ...) outside of vmap."""

    def __init__(self, info, dropout_p: float) -> None:
        if dropout_p > 0.0 and info.randomness != "different":
            raise RuntimeError(
                f"vmap: randomness must be 'different' for attention with dropout, but got {info.randomness!r}. Pass "
                "randomness='different' to torch.vmap."
            )
        self.size = info.batch_size

    def move_to_front(self, tensor: Tensor, dim: int | None) -> Tensor:
        return tensor.movedim(dim, 0) if dim is not None else tensor.expand(self.size, *tensor.shape)

    def fold_tensor(self, tensor: Tensor, dim: int | None) -> Tensor:
        return self.move_to_front(tensor, dim).flatten(0, 1)

    def fold_bias(self, bias: Tensor | None, dim: int | None, batch: int) -> Tensor | None:
        """Return a bias of 2 to 4 dims as (N * B, heads or 1, Sq, Sk)."""
        if bias is None:
            return None
        bias = self.move_to_front(bias, dim)
        bias = bias.reshape(self.size, *(1,) * (5 - bias.dim()), *bias.shape[1:])
        return bias.expand(self.size, batch, *bias.shape[2:]).flatten(0, 1)

    def unfold_tensor(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.size, -1))

    def unfold_bias_grad(self, grad: Tensor, bias: Tensor, dim: int | None) -> Tensor:
        """Sum a bias gradient (N * B, ...) to (N, shape of a single bias)."""
        shape = self.move_to_front(bias, dim).shape
        return self.unfold_tensor(grad).sum_to_size(self.size, *(1,) * (5 - len(shape)), *shape[1:]).reshape(shape)


def _quantized_kv_forward(info, in_dims: tuple, *args) -> tuple[Tensor, int]:
    fold, (*tensors, mask, rotated, scale) = _BatchFold(info, 0.0), args
    folded = [fold.fold_tensor(tensor, dim) for tensor, dim in zip(tensors, in_dims)]
    mask = fold.fold_bias(mask, in_dims[len(tensors)], folded[0].shape[0] // fold.size)
    return fold.unfold_tensor(sdpa.namespace.quantized_kv_fwd(*folded, mask, rotated, scale)), 0


def _attention_forward(info, in_dims: tuple, *args) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    op, tensors = attention.namespace.attention_fwd, 7
    query, key, value, sinks, cu_seqlens_q, *settings = args
    if cu_seqlens_q is not None or (sinks is not None and in_dims[_FORWARD_TENSORS] is not None):
        return _run_per_entry(op, info, in_dims, args, tensors)
    fold = _BatchFold(info, 0.0)
    folded = (fold.fold_tensor(x, dim) for x, dim in zip((query, key, value), in_dims))
    return tuple(map(fold.unfold_tensor, op(*folded, sinks, cu_seqlens_q, *settings))), (0, 0)


def _run_per_entry(op: Callable, info, in_dims: tuple, args: tuple, tensors: int) -> tuple[tuple, tuple]:
    """Run a separate call for each vmapped entry and stack the results.

    Separate calls are needed where the entries cannot share a batch, because sinks or sequence lengths differ.
    """
    fold = _BatchFold(info, 0.0)
    stacked = [None if x is None else fold.move_to_front(x, dim) for x, dim in zip(args[:tensors], in_dims)]
    results = [op(*(None if x is None else x[i] for x in stacked), *args[tensors:]) for i in range(fold.size)]
    return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])


def _attention_backward(info, in_dims: tuple, *args) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    tensors, cu_seqlens_q = 9, args[7]
    if cu_seqlens_q is not None:
        return _run_per_entry(attention.namespace.attention_bwd, info, in_dims, args, tensors)
    fold = _BatchFold(info, 0.0)
    folded = [None if x is None else fold.fold_tensor(x, dim) for x, dim in zip(args[:tensors], in_dims)]
    *grads, delta = attention.namespace.attention_bwd(*folded, *args[tensors:])
    has_delta = delta.dim() > 1
    return (*map(fold.unfold_tensor, grads), fold.unfold_tensor(delta) if has_delta else delta), (
        0,
        0,
        0,
        0 if has_delta else None,
    )


def _custom_op_forward(info, in_dims: tuple, *args) -> tuple:
    return _forward(sdpa.namespace.sdpa_fwd, info, in_dims, args, {})


def _aten_forward(info, in_dims: tuple, *args, **settings) -> tuple:
    args = (*args, *(None, 0.0, False, False)[len(args) - _FORWARD_TENSORS :])
    return _forward(tracing.OVERRIDEABLE, info, in_dims, args, settings)


def _forward(op: Callable, info, in_dims: tuple, args: tuple, settings: dict) -> tuple:
    """Run a forward op with the mapped dim folded into the batch.

    Both forward ops start with the arguments query, key, value, bias, dropout_p.
    """
    bias, dropout_p = args[_FORWARD_TENSORS : _FORWARD_TENSORS + 2]
    fold = _BatchFold(info, dropout_p)
    query, key, value = (fold.fold_tensor(tensor, dim) for tensor, dim in zip(args[:_FORWARD_TENSORS], in_dims))
    bias = fold.fold_bias(bias, in_dims[_FORWARD_TENSORS] if bias is not None else None, query.shape[0] // fold.size)
    results = op(query, key, value, bias, *args[_FORWARD_TENSORS + 1 :], **settings)
    mapped, unmapped = results[:_MAPPED_RESULTS], results[_MAPPED_RESULTS:]
    return (*map(fold.unfold_tensor, mapped), *unmapped), (0,) * len(mapped) + (None,) * len(unmapped)


def _custom_op_backward(info, in_dims: tuple, *args) -> tuple:
    backward_args, dims = sdpa.BackwardArgs(*args), sdpa.BackwardArgs(*in_dims)
    fold = _BatchFold(info, backward_args.dropout_p)
    grads = sdpa.namespace.sdpa_bwd(*_fold_backward(fold, backward_args, dims))
    return _unfold_backward(fold, grads, backward_args.attn_bias if backward_args.bias_grad else None, dims.attn_bias)


def _aten_backward(info, in_dims: tuple, *args, **settings) -> tuple:
    backward_args, dims = tracing.AtenBackwardArgs(*args), tracing.AtenBackwardArgs(*in_dims)
    fold = _BatchFold(info, backward_args.dropout_p)
    grads = tracing.OVERRIDEABLE_BACKWARD(*_fold_backward(fold, backward_args, dims), **settings)
    bias = backward_args.attn_bias if backward_args.grad_input_mask[3] else None
    return _unfold_backward(fold, grads, bias, dims.attn_bias)


_BackwardArgs = TypeVar("_BackwardArgs", sdpa.BackwardArgs, tracing.AtenBackwardArgs)


def _fold_backward(fold: _BatchFold, backward_args: _BackwardArgs, dims: _BackwardArgs) -> _BackwardArgs:
    """Return the arguments of a backward with folded tensors."""
    names = ("grad_out", "query", "key", "value", "out", "lse")
    folded = {name: fold.fold_tensor(getattr(backward_args, name), getattr(dims, name)) for name in names}
    bias = fold.fold_bias(backward_args.attn_bias, dims.attn_bias, folded["query"].shape[0] // fold.size)
    return backward_args._replace(**folded, attn_bias=bias)


def _unfold_backward(fold: _BatchFold, grads: tuple, bias: Tensor | None, bias_dim: int | None) -> tuple:
    mapped = [None if grad is None else fold.unfold_tensor(grad) for grad in grads[:3]]
    if bias is not None:
        mapped.append(fold.unfold_bias_grad(grads[3], bias, bias_dim))
    else:
        mapped.append(grads[3])
    dims = tuple(
        0 if result is not None and (index < 3 or bias is not None) else None for index, result in enumerate(mapped)
    )
    return tuple(mapped), dims
