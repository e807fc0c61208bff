"""Cases with the plugin enabled only on the first rank (TORCH_FLASHPLUG=0 on all remaining ranks).

The ranks run different kernels but exchange equal tensors. So the results are right, and no rank hangs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rank_plain import (  # noqa: F401  (cases)
    case_distributed_data_parallel,
    case_fully_sharded,
    case_tensor_parallel_and_sharded,
    case_ulysses,
)
from rank_rings import Way, check
from ranks import Rank, problem
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _wrap(like: DTensor, *found: Tensor) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(x, like.device_mesh, [Shard(2)], run_check=False) for x in found)


def _ring(op: object, args: tuple, kwargs: dict) -> tuple:
    query, key, value, _, is_causal = (*args, 0.0, False)[:5]
    local = (x.to_local() for x in (query, key, value))
    found = torchs._templated_ring_attention(query.device_mesh.get_group(), 2, _FORWARD, *local, is_causal=is_causal)
    return _wrap(query, *found)


def _ring_backward(op: object, args: tuple, kwargs: dict) -> tuple:
    grad, query, key, value, out, lse, dropout_p, is_causal = args
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    local = {name: x.to_local() for name, x in zip(names, (grad, query, key, value, out, lse))}
    found = torchs._templated_ring_attention_backward(
        query.device_mesh.get_group(), 2, _BACKWARD, grad_out_name="grad_out", is_causal=is_causal, dropout_p=dropout_p,
        **local,
    )  # fmt: skip
    return _wrap(query, *found)


@contextmanager
def _stocks_ring_on_a_cpu(rank: Rank) -> Iterator[None]:
    """Register ring handlers for the CPU op of stock.

    torch has handlers only for the GPU ops, but the ring loop of torch also supports the CPU op.
    """
    needed = rank.road is None and rank.device == "cpu"
    if needed:
        torchs.custom_ops.update({_FORWARD: _ring, _BACKWARD: _ring_backward})
    try:
        yield
    finally:
        if needed:
            del torchs.custom_ops[_FORWARD], torchs.custom_ops[_BACKWARD]


def case_rings(rank: Rank) -> None:
    with _stocks_ring_on_a_cpu(rank):
        for rotate in ("allgather", "alltoall"):
            for causal in (True, False):
                case = problem(rank.world, (2, 2), causal=causal, layout="bhsd")
                check(rank, case, Way(rotate, balanced=causal))
            check(rank, problem(rank.world, (2, 2), layout="bhsd"), Way(rotate, balanced=False, by_module=True))
