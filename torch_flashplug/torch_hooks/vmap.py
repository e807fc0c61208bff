"""vmap rules for the aten pair called by F.sdpa and for the custom ops: the mapped dim is folded into the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..ops import attention, sdpa
from . import tracing

_FORWARD_TENSORS = 3  # query, key, value
_MAPPED_RESULTS = 2  # out and lse; seeds, offsets and sizes belong to the single folded call


def register() -> None:
    torch.library.register_vmap("torch_flashplug::sdpa_fwd", _own_forward)
    torch.library.register_vmap("torch_flashplug::sdpa_bwd", _own_backward)
    torch.library.register_vmap("torch_flashplug::quantized_kv_fwd", _cached_forward)
    torch.library.register_vmap("torch_flashplug::attention_fwd", _windowed_forward)
    torch.library.register_vmap("torch_flashplug::attention_bwd", _windowed_backward)
    torch.library.register_vmap(tracing.OVERRIDEABLE.default, _aten_forward)
    torch.library.register_vmap(tracing.OVERRIDEABLE_BACKWARD.default, _aten_backward)


class _Fold:
    """Converter of tensors between (B, ...) under vmap of size N and (N * B, ...) outside of vmap."""

    def __init__(self, info, dropout_p: float) -> None:
        if dropout_p > 0.0 and info.randomness != "different":
            raise RuntimeError(
                f"vmap: randomness must be 'different' for attention with dropout, but got {info.randomness!r}. Pass "
                "randomness='different' to torch.vmap."
            )
        self.size = info.batch_size

    def front(self, tensor: Tensor, dim: int | None) -> Tensor:
        return tensor.movedim(dim, 0) if dim is not None else tensor.expand(self.size, *tensor.shape)

    def in_(self, tensor: Tensor, dim: int | None) -> Tensor:
        return self.front(tensor, dim).flatten(0, 1)

    def bias(self, bias: Tensor | None, dim: int | None, batch: int) -> Tensor | None:
        """Return a bias of 2 to 4 dims as (N * B, heads or 1, Sq, Sk)."""
        if bias is None:
            return None
        bias = self.front(bias, dim)
        bias = bias.reshape(self.size, *(1,) * (5 - bias.dim()), *bias.shape[1:])
        return bias.expand(self.size, batch, *bias.shape[2:]).flatten(0, 1)

    def out(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.size, -1))

    def bias_grad(self, grad: Tensor, bias: Tensor, dim: int | None) -> Tensor:
        """Sum a bias gradient (N * B, ...) to (N, shape of a single bias)."""
        shape = self.front(bias, dim).shape
        return self.out(grad).sum_to_size(self.size, *(1,) * (5 - len(shape)), *shape[1:]).reshape(shape)


def _cached_forward(info, in_dims: tuple, *args) -> tuple[Tensor, int]:
    fold, (*tensors, mask, rotated, scale) = _Fold(info, 0.0), args
    folded = [fold.in_(tensor, dim) for tensor, dim in zip(tensors, in_dims)]
    mask = fold.bias(mask, in_dims[len(tensors)], folded[0].shape[0] // fold.size)
    return fold.out(sdpa.namespace.quantized_kv_fwd(*folded, mask, rotated, scale)), 0


def _windowed_forward(info, in_dims: tuple, *args) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    op, tensors = attention.namespace.attention_fwd, 7
    query, key, value, sinks, cu_q, *settings = args
    if cu_q is not None or (sinks is not None and in_dims[_FORWARD_TENSORS] is not None):
        return _one_by_one(op, info, in_dims, args, tensors)
    fold = _Fold(info, 0.0)
    folded = (fold.in_(x, dim) for x, dim in zip((query, key, value), in_dims))
    return tuple(map(fold.out, op(*folded, sinks, cu_q, *settings))), (0, 0)


def _one_by_one(op: Callable, info, in_dims: tuple, args: tuple, tensors: int) -> tuple[tuple, tuple]:
    """Run a separate call for each vmapped entry and stack the results.

    Separate calls are needed where the entries cannot share a batch, because sinks or sequence lengths differ.
    """
    fold = _Fold(info, 0.0)
    given = [None if x is None else fold.front(x, dim) for x, dim in zip(args[:tensors], in_dims)]
    results = [op(*(None if x is None else x[i] for x in given), *args[tensors:]) for i in range(fold.size)]
    return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])


def _windowed_backward(info, in_dims: tuple, *args) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    tensors, cu_q = 9, args[7]
    if cu_q is not None:
        return _one_by_one(attention.namespace.attention_bwd, info, in_dims, args, tensors)
    fold = _Fold(info, 0.0)
    folded = [None if x is None else fold.in_(x, dim) for x, dim in zip(args[:tensors], in_dims)]
    *grads, delta = attention.namespace.attention_bwd(*folded, *args[tensors:])
    whole = delta.dim() > 1
    return (*map(fold.out, grads), fold.out(delta) if whole else delta), (0, 0, 0, 0 if whole else None)


def _own_forward(info, in_dims: tuple, *args) -> tuple:
    return _forward(sdpa.namespace.sdpa_fwd, info, in_dims, args, {})


def _aten_forward(info, in_dims: tuple, *args, **settings) -> tuple:
    args = (*args, *(None, 0.0, False, False)[len(args) - _FORWARD_TENSORS :])
    return _forward(tracing.OVERRIDEABLE, info, in_dims, args, settings)


def _forward(op: Callable, info, in_dims: tuple, args: tuple, settings: dict) -> tuple:
    """Run a forward op with the mapped dim folded into the batch.

    Both forward ops start with the arguments query, key, value, bias, dropout_p.
    """
    bias, dropout_p = args[_FORWARD_TENSORS : _FORWARD_TENSORS + 2]
    fold = _Fold(info, dropout_p)
    query, key, value = (fold.in_(tensor, dim) for tensor, dim in zip(args[:_FORWARD_TENSORS], in_dims))
    bias = fold.bias(bias, in_dims[_FORWARD_TENSORS] if bias is not None else None, query.shape[0] // fold.size)
    results = op(query, key, value, bias, *args[_FORWARD_TENSORS + 1 :], **settings)
    mapped, others = results[:_MAPPED_RESULTS], results[_MAPPED_RESULTS:]
    return (*map(fold.out, mapped), *others), (0,) * len(mapped) + (None,) * len(others)


def _own_backward(info, in_dims: tuple, *args) -> tuple:
    a = sdpa.BackwardArgs(*args)
    dims = sdpa.BackwardArgs(*in_dims)
    fold = _Fold(info, a.dropout_p)
    tensors, bias = _fold_backward(fold, a, dims)
    grads = sdpa.namespace.sdpa_bwd(*tensors[:4], bias, *tensors[4:], *a[7:])
    return _unfold_backward(fold, grads, a.attn_bias if a.bias_grad else None, dims.attn_bias)


def _aten_backward(info, in_dims: tuple, *args, **settings) -> tuple:
    wanted = args[5]
    named = (*args[:5], *args[6:8], *args[14:16], args[12], int(args[13]), None, 0, bool(wanted[3]))
    a = sdpa.BackwardArgs(*named)
    dims = sdpa.BackwardArgs(*in_dims[:5], *in_dims[6:8], *in_dims[14:16], *(None,) * 5)
    fold = _Fold(info, a.dropout_p)
    tensors, bias = _fold_backward(fold, a, dims)
    grads = tracing.OVERRIDEABLE_BACKWARD(*tensors[:4], bias, wanted, *tensors[4:], *args[8:], **settings)
    return _unfold_backward(fold, grads, a.attn_bias if wanted[3] else None, dims.attn_bias)


def _fold_backward(fold: _Fold, a: sdpa.BackwardArgs, dims: sdpa.BackwardArgs) -> tuple[list[Tensor], Tensor | None]:
    """Return folded (grad_out, query, key, value, out, lse), and the folded bias."""
    names = ("grad_out", "query", "key", "value", "out", "lse")
    tensors = [fold.in_(getattr(a, name), getattr(dims, name)) for name in names]
    return tensors, fold.bias(a.attn_bias, dims.attn_bias, tensors[1].shape[0] // fold.size)


def _unfold_backward(fold: _Fold, grads: tuple, bias: Tensor | None, bias_dim: int | None) -> tuple:
    mapped = [None if grad is None else fold.out(grad) for grad in grads[:3]]
    if bias is not None:
        mapped.append(fold.bias_grad(grads[3], bias, bias_dim))
    else:
        mapped.append(grads[3])
    dims = tuple(
        0 if result is not None and (index < 3 or bias is not None) else None for index, result in enumerate(mapped)
    )
    return tuple(mapped), dims
