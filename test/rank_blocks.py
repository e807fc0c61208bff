"""Cases of context_parallel on several ranks (ranks.py): unusual calls inside and after the block.

rank_rings.py has the cases of rings.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rank_rings import SDPA, Way, part_of, ring, unshard
from ranks import Rank, assert_right, problem, whole
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_flashplug
from torch_flashplug.torch_hooks import tracing
from torch_flashplug.torch_hooks.distributed import context_parallel


def case_graph_of_another_balance(rank: Rank) -> None:
    """Check that a compiled graph raises if the load balance differs from the compiled load balance.

    The case covers rings and gathered keys.
    """
    case = problem(rank.world)
    inputs = whole(case, rank.device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 1.0, k, v, is_causal=True, enable_gqa=True)

    for method in ("ring", "gather"):
        context_parallel.use(method)
        try:
            with ring(rank, case.Sq, Way()):
                q, k, v, grad = part_of(rank, inputs, True)
                out = run(q, k, v)
            with ring(rank, case.Sq, Way(balanced=False)):
                with pytest.raises(RuntimeError, match="compiled with load balance, but the rows .* without load"):
                    run(*part_of(rank, inputs, False)[:3])
                grads = torch.autograd.grad(out, (q, k, v), grad)  # uses the load balance of the forward
            assert_right(case, inputs, *unshard(rank, [out], True), unshard(rank, grads, True))
        finally:
            context_parallel.use("ring")
            torch._dynamo.reset()


def case_backward_outside_of_the_block(rank: Rank) -> None:
    """Check that a backward outside of the block raises.

    Outside of the block, stock would differentiate a single causal call over rows in balanced order.
    """
    case = problem(rank.world)
    inputs = whole(case, rank.device)
    with ring(rank, case.Sq, Way()) as module:
        q, k, v, grad = part_of(rank, inputs, True)
        out = module(q, k, v, is_causal=True, enable_gqa=True)
    with pytest.raises(RuntimeError, match="inside the block"):
        torch.autograd.grad(out, (q, k, v), grad)


def case_backward_in_a_later_block(rank: Rank) -> None:
    """Check that a backward uses the row order of the forward, even if torch's options have changed."""
    case = problem(rank.world)
    inputs = whole(case, rank.device)
    with ring(rank, case.Sq, Way()) as module:
        q, k, v, grad = part_of(rank, inputs, True)
        out = module(q, k, v, is_causal=case.causal, enable_gqa=case.gqa)
    with ring(rank, case.Sq, Way("alltoall", balanced=False)):
        grads = torch.autograd.grad(out, (q, k, v), grad)
    assert_right(case, inputs, *unshard(rank, [out], True), unshard(rank, grads, True))


def case_error_in_the_block(rank: Rank) -> None:
    case = problem(rank.world)
    inputs = whole(case, rank.device)
    with pytest.raises(ZeroDivisionError), ring(rank, case.Sq, Way()):
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is SDPA
    rank.took()
    out = F.scaled_dot_product_attention(*inputs, **case.sdpa_kwargs())
    assert rank.took() == {"routed_ours": 1, "ours_fwd": 1}
    assert_right(case, inputs, out)


def case_others_in_the_block(rank: Rank) -> None:
    """Check calls in the block that are not rings.

    Tensors that are replicated or sharded over heads attend locally. A mixture raises an error with a remedy. Calls
    with a mask stay with stock.
    """
    case = problem(rank.world, (2 * rank.world, rank.world))
    inputs, mesh = whole(case, rank.device), rank.mesh(names=("cp",))
    with ring(rank, case.Sq, Way()):
        for placement in (Replicate(), Shard(1)):
            local = [x.detach() if placement.is_replicate() else x.detach().chunk(rank.world, 1)[rank.number].clone()
                     for x in (*inputs, inputs.grad_out)]  # fmt: skip
            q, k, v, grad = (DTensor.from_local(x, mesh, [placement]) for x in local)
            given = [x.requires_grad_() for x in (q, k, v)]
            out = SDPA(*given, **case.sdpa_kwargs())
            grads = torch.autograd.grad(out, given, grad)
            assert_right(case, inputs, out.full_tensor().detach(), [x.full_tensor() for x in grads])
        rows = [DTensor.from_local(x, mesh, [Shard(2)]) for x in part_of(rank, inputs, True)[:3]]
        with pytest.raises(RuntimeError, match="context_parallel block must be sharded over rows"):
            tracing.OVERRIDEABLE(rows[0], rows[1].redistribute(mesh, [Replicate()]), rows[2], None, 0.0, True)
        said = torch_flashplug.explain(*rows, is_causal=True, enable_gqa=True, device="h100")
        assert said.backend == "fa3" and f"the first of {rank.world} steps" in said.part, said
        mask = DTensor.from_local(torch.zeros(1, device=rank.device).expand(case.Sq, case.Sq), mesh, [Replicate()])
        assert torch_flashplug.explain(*rows, mask, enable_gqa=True, device="h100").backend == "stock"
        dropped = torch_flashplug.explain(*rows, dropout_p=0.1, enable_gqa=True, device="h100")
        assert dropped.backend == "stock" and "dropout" in dropped.reasons["fa3"]


def case_mesh_of_two_dims(rank: Rank) -> None:
    """Check that the explanation, and the error of a forced backend, name the mesh of two dims, which has no ring."""
    case = problem(rank.world)
    inputs, mesh = whole(case, rank.device), rank.mesh(rank.world, 1, names=("cp", "tp"))
    with ring(rank, case.Sq, Way()):
        parts = [x.detach() for x in part_of(rank, inputs, True)[:3]]
        rows = [DTensor.from_local(x, mesh, [Shard(2), Shard(1)]) for x in parts]
        said = torch_flashplug.explain(*rows, is_causal=True, enable_gqa=True, device="h100")
        assert said.backend == "stock" and "a mesh of several dims" in said.reasons["fa3"], said
        with pytest.raises(RuntimeError, match="a mesh of one dim|a mesh of several dims"):
            with torch_flashplug.sdpa_backend("fa3"):
                SDPA(*rows, is_causal=True, enable_gqa=True)
