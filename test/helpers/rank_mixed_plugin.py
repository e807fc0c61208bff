"""Cases with the plugin only on the first rank (TORCH_FLASHPLUG=0 on all further ranks).

Kernels differ, but the exchanged data does not, so results are right and no rank waits forever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rank_context_parallel import RingSettings, check_ring
from rank_plain_tensors import (  # noqa: F401  (cases)
    case_distributed_data_parallel,
    case_fully_sharded,
    case_tensor_parallel_and_sharded,
    case_ulysses,
)
from ranks import Rank, make_case
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_context_parallel

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _wrap(like: DTensor, *tensors: Tensor) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(x, like.device_mesh, [Shard(2)], run_check=False) for x in tensors)


def _ring(op: object, args: tuple, kwargs: dict) -> tuple:
    query, key, value, _, is_causal = (*args, 0.0, False)[:5]
    local = (x.to_local() for x in (query, key, value))
    results = torch_context_parallel._templated_ring_attention(
        query.device_mesh.get_group(), 2, _FORWARD, *local, is_causal=is_causal
    )
    return _wrap(query, *results)


def _ring_backward(op: object, args: tuple, kwargs: dict) -> tuple:
    grad, query, key, value, out, lse, dropout_p, is_causal = args
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    local = {name: x.to_local() for name, x in zip(names, (grad, query, key, value, out, lse))}
    grads = torch_context_parallel._templated_ring_attention_backward(
        query.device_mesh.get_group(), 2, _BACKWARD, grad_out_name="grad_out", is_causal=is_causal, dropout_p=dropout_p,
        **local,
    )  # fmt: skip
    return _wrap(query, *grads)


@contextmanager
def _stock_ring_on_cpu(rank: Rank) -> Iterator[None]:
    """Register handlers for the CPU ops of stock.

    torch has handlers only for GPU ops, but its ring loop also works with the CPU ops.
    """
    needed = rank.device_backend is None and rank.device == "cpu"
    if needed:
        torch_context_parallel.custom_ops.update({_FORWARD: _ring, _BACKWARD: _ring_backward})
    try:
        yield
    finally:
        if needed:
            del torch_context_parallel.custom_ops[_FORWARD], torch_context_parallel.custom_ops[_BACKWARD]


def case_rings(rank: Rank) -> None:
    with _stock_ring_on_cpu(rank):
        for rotate in ("allgather", "alltoall"):
            for causal in (True, False):
                case = make_case(rank.world, (2, 2), causal=causal, layout="bhsd")
                check_ring(rank, case, RingSettings(rotate, balanced=causal))
            check_ring(
                rank, make_case(rank.world, (2, 2), layout="bhsd"), RingSettings(rotate, balanced=False, by_module=True)
            )
