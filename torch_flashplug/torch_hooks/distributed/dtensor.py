"""DTensor support: sharding strategies of the custom ops, and facts about sharded operands for the C++ dispatch.

Decisions use sizes known alike on all ranks, never the sizes of a single rank. All ranks have to agree on the op, since
DTensor may redistribute the operands.

An import of torch.distributed.tensor takes a second. So no code here imports the module before the first DTensor shows
that the module is loaded.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...dispatch import bindings
from ...ops import sdpa
from .. import describe_call, tracing
from . import context_parallel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_BATCH, _HEADS, ROWS = range(3)  # dims of an operand that may be sharded
_OUTSIDE = (
    "query must not be sharded over rows outside a context_parallel block. Call forward and backward inside the block, "
    "or redistribute to Replicate(), Shard(0) or Shard(1) first."
)
_SEVERAL_DIMS = (
    "query must be sharded over rows on a mesh of 1 dim in a context_parallel block, but got a mesh of several dims. "
    "With tensor parallelism, pass local tensors (.to_local())."
)


class LocalPart(NamedTuple):
    """Operand sizes on one rank, for a call on several ranks."""

    sizes: tuple[tuple[int | None, ...], ...]  # of query, key and value
    is_step: bool  # the call is a step of a ring


def module():
    """Return the module torch.distributed.tensor if some code has imported the module; else None."""
    tensor_module = sys.modules.get("torch.distributed.tensor")
    return tensor_module if hasattr(tensor_module, "DTensor") else None


def is_dtensor(*tensors: Tensor | None) -> bool:
    """Return whether all tensors, apart from None, are DTensors."""
    tensor_module = module()
    return tensor_module is not None and all(
        tensor is None or isinstance(tensor, tensor_module.DTensor) for tensor in tensors
    )


def local_part(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float = 0.0
) -> LocalPart | None:
    """Return the operand sizes of one rank, or None for a call that falls back to stock.

    callbacks.set_trace_callback() calls the function without dropout_p.
    """
    if not is_dtensor(query, key, value, mask):
        return None
    register()
    if fallback_reason(query, key, value, mask, dropout_p) is not None:
        return None
    return LocalPart(tuple(map(_local_sizes, (query, key, value))), _is_step(query))


def local_meta_tensors(part: LocalPart, *operands: DTensor) -> list[Tensor]:
    """Return meta tensors in the sizes of the operands on one rank."""
    return [
        torch.empty(sizes, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
        for sizes, x in zip(part.sizes, operands)
    ]


def fallback_reason(query: DTensor, key: DTensor, value: DTensor, mask: DTensor | None, dropout_p: float) -> str | None:
    """Return the reason for the fallback of DTensors to stock; None: a kernel may serve the call."""
    if any(x.device_mesh != query.device_mesh or x.placements != query.placements for x in (key, value)):
        placements = ", ".join(f"{name} {list(x.placements)}" for name, x in zip("qkv", (query, key, value)))
        return f"query, key and value must have the same placements, but got {placements}. Redistribute the operands."
    if mask is not None and (
        mask.dtype.is_floating_point is False or describe_call.misfit(query, key, mask) is not None
    ):
        return "A bool DTensor attn_mask, or an attn_mask with unsuitable sizes, falls back to stock attention."
    if _is_step(query) and (mask is not None or dropout_p):
        return "context_parallel supports neither attn_mask nor gradients of dropout. Stock attention answers the call."
    if _is_step(query):
        return context_parallel.fallback_reason()
    if _is_sharded(query, ROWS):  # a forced backend raises: stock would gather the rows
        return None if bindings.forced_kernels(bindings.effective_mode()) else _sharded_rows_reason()
    if not all(p.is_replicate() or _shards(p, _BATCH) or _shards(p, _HEADS) for p in query.placements):
        return f"query placements must be Replicate(), Shard(0) or Shard(1), but got {list(query.placements)}."
    return _uneven_heads_reason(query, key)


def _shards(placement: Placement, dim: int) -> bool:
    return type(placement) is module().Shard and placement.dim == dim


def _is_sharded(tensor: DTensor, dim: int) -> bool:
    return any(_shards(placement, dim) for placement in tensor.placements)


def _is_step(query: DTensor) -> bool:
    return len(query.placements) == 1 and _is_sharded(query, ROWS) and context_parallel.is_on()


def _uneven_heads_reason(query: DTensor, key: DTensor) -> str | None:
    """Return the reason against heads that do not divide among the ranks, or None.

    DTensor permits uneven shards. The query heads of a rank would then meet key heads of a different rank.
    """
    ranks = math.prod(n for n, p in zip(query.device_mesh.shape, query.placements) if _shards(p, _HEADS))
    heads = _num_heads(query.shape, key.shape)
    if all(n is not None and n % ranks == 0 for n in heads):
        return None
    return f"The numbers of query and key heads must be multiples of {ranks} ranks, but got {heads[0]} and {heads[1]}."


def _num_heads(*shapes: tuple) -> list[int | None]:
    return [describe_call.hints(shape)[_HEADS] for shape in shapes]


def _local_sizes(tensor: DTensor) -> tuple[int | None, ...]:
    """Return the sizes of the largest part of a DTensor on a rank."""
    sizes = list(describe_call.hints(tensor.shape))
    for ranks, placement in zip(tensor.device_mesh.shape, tensor.placements):
        if type(placement) is module().Shard and sizes[placement.dim] is not None:
            sizes[placement.dim] = -(-sizes[placement.dim] // ranks)
    return tuple(sizes)


def forced_backend_error(query: DTensor) -> str:
    """Return the text of the error raised for a call with a forced backend; an empty text means no error."""
    return _sharded_rows_reason() if _is_sharded(query, ROWS) and not _is_step(query) else ""


def _sharded_rows_reason() -> str:
    """Return the reason against sharded rows outside a ring."""
    return _SEVERAL_DIMS if context_parallel.is_on() else _OUTSIDE


def describe(query: DTensor) -> str:
    """Return the description of the rank's part in explain()."""
    ranks = query.device_mesh.size()
    if _is_step(query):
        return f"context_parallel on {ranks} ranks: the first of {ranks} steps of this rank's rows"
    return f"DTensor on {ranks} ranks, placed {list(query.placements)}: this rank's part"


# ---- strategies: placements of operands and results that need no communication ----


@functools.cache
def register() -> None:
    """Register the sharding strategies; the caller has a DTensor, so torch.distributed.tensor is loaded."""
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(tracing.OVERRIDEABLE.default)(_aten_forward)
    register_sharding(tracing.OVERRIDEABLE_BACKWARD.default)(_aten_backward)
    register_sharding(sdpa.namespace.sdpa_fwd.default)(_custom_op_forward)
    register_sharding(sdpa.namespace.sdpa_bwd.default)(_custom_op_backward)
    context_parallel.register()


def _placements(query, key) -> Iterator[Placement]:  # arguments: DTensorSpec
    tensor = module()
    if any(_shards(placement, ROWS) for placement in query.placements):
        # Redistribution would run one causal call over rows in the changed order of a load balancer.
        raise RuntimeError(f"torch_flashplug: {_OUTSIDE}")
    yield tensor.Replicate()
    yield tensor.Shard(_BATCH)
    sharded = [n for n, *pair in zip(query.mesh.shape, query.placements, key.placements)
               if any(_shards(placement, _HEADS) for placement in pair)]  # fmt: skip
    ranks = math.prod(sharded) if sharded else query.mesh.size()
    if all(n is not None and n % ranks == 0 for n in _num_heads(query.tensor_meta.shape, key.tensor_meta.shape)):
        yield tensor.Shard(_HEADS)


def _bias_placement(bias, placement: Placement) -> Placement | None:
    """Return the placement of a bias; a broadcast dim is replicated on all ranks."""
    if bias is None:
        return None
    tensor, shape = module(), bias.tensor_meta.shape
    if placement.is_replicate():
        return placement
    dim = placement.dim - (4 - len(shape))
    return tensor.Shard(dim) if dim >= 0 and shape[dim] != 1 else tensor.Replicate()


def _bias_gradient_placement(bias, placement: Placement) -> Placement | None:
    """Return the placement of a bias gradient; over a broadcast dim each rank has a partial sum."""
    bias_placement = _bias_placement(bias, placement)
    is_summed = bias_placement is not None and bias_placement.is_replicate() and placement.is_shard()
    return module().Partial() if is_summed else bias_placement


def _replicated_or_none(*tensors: object) -> list[Placement | None]:
    """Return the placements of seeds, offsets and lengths: replicated, or None without a tensor."""
    return [None if x is None else module().Replicate() for x in tensors]


def _aten_forward(
    query, key, value, attn_bias=None, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None
):
    return [
        (
            [p, p, None, None, None, None, *_replicated_or_none(p, p), None],
            [p, p, p, _bias_placement(attn_bias, p), None, None, None],
        )
        for p in _placements(query, key)
    ]


def _aten_backward(*args, scale=None):
    backward = tracing.AtenBackwardArgs(*args)
    bias = backward.attn_bias
    lengths = _replicated_or_none(backward.cum_seq_q, backward.cum_seq_k)
    seeds = _replicated_or_none(backward.seed, backward.offset)
    return [
        (
            [p, p, p, _bias_gradient_placement(bias, p) if backward.grad_input_mask[3] else None],
            [p, p, p, p, _bias_placement(bias, p), None, p, p, *lengths, *(None,) * 4, *seeds],
        )
        for p in _placements(backward.query, backward.key)
    ]


def _custom_op_forward(query, key, value, attn_bias, *settings):
    return [
        ([p, p, *_replicated_or_none(p, p)], [p, p, p, _bias_placement(attn_bias, p), *(None,) * len(settings)])
        for p in _placements(query, key)
    ]


def _custom_op_backward(grad_out, query, key, value, attn_bias, out, lse, seed, offset, *settings):
    bias_grad = settings[-1]
    return [
        (
            [p, p, p, _bias_gradient_placement(attn_bias, p) if bias_grad else module().Replicate()],
            [
                p,
                p,
                p,
                p,
                _bias_placement(attn_bias, p),
                p,
                p,
                *_replicated_or_none(seed, offset),
                *(None,) * len(settings),
            ],
        )
        for p in _placements(query, key)
    ]
