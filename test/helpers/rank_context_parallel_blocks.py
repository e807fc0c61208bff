"""Cases of context_parallel on several ranks (ranks.py): non-ring calls in the block, and calls after the block.

The rings are tested in rank_context_parallel.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rank_context_parallel import SDPA, RingSettings, context_parallel_block, make_local_inputs, unshard
from ranks import Rank, assert_within_budgets, make_case, make_full_inputs
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_flashplug
from torch_flashplug.torch_hooks import tracing
from torch_flashplug.torch_hooks.distributed import context_parallel


def case_graph_of_a_different_load_balance(rank: Rank) -> None:
    """Check that a compiled graph raises if rows have a different load-balance layout, for a ring and for allgather."""
    case = make_case(rank.world)
    inputs = make_full_inputs(case, rank.device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 1.0, k, v, is_causal=True, enable_gqa=True)

    for method in ("ring", "gather"):
        context_parallel.use(method)
        try:
            with context_parallel_block(rank, case.Sq, RingSettings()):
                q, k, v, grad = make_local_inputs(rank, inputs, True)
                out = run(q, k, v)
            with context_parallel_block(rank, case.Sq, RingSettings(balanced=False)):
                with pytest.raises(RuntimeError, match="compiled with load balance, but the rows .* without load"):
                    run(*make_local_inputs(rank, inputs, False)[:3])
                grads = torch.autograd.grad(out, (q, k, v), grad)  # with the layout of the forward
            assert_within_budgets(case, inputs, *unshard(rank, [out], True), unshard(rank, grads, True))
        finally:
            context_parallel.use("ring")
            torch._dynamo.reset()


def case_backward_outside_of_the_block(rank: Rank) -> None:
    """Check that the backward raises outside of the block.

    Stock would differentiate a single causal call over rows in load-balanced order.
    """
    case = make_case(rank.world)
    inputs = make_full_inputs(case, rank.device)
    with context_parallel_block(rank, case.Sq, RingSettings()) as module:
        q, k, v, grad = make_local_inputs(rank, inputs, True)
        out = module(q, k, v, is_causal=True, enable_gqa=True)
    with pytest.raises(RuntimeError, match="inside the block"):
        torch.autograd.grad(out, (q, k, v), grad)


def case_backward_in_a_later_block(rank: Rank) -> None:
    """Check that a backward in a later block uses the row layout of the forward, whatever the torch options are."""
    case = make_case(rank.world)
    inputs = make_full_inputs(case, rank.device)
    with context_parallel_block(rank, case.Sq, RingSettings()) as module:
        q, k, v, grad = make_local_inputs(rank, inputs, True)
        out = module(q, k, v, is_causal=case.causal, enable_gqa=case.gqa)
    with context_parallel_block(rank, case.Sq, RingSettings("alltoall", balanced=False)):
        grads = torch.autograd.grad(out, (q, k, v), grad)
    assert_within_budgets(case, inputs, *unshard(rank, [out], True), unshard(rank, grads, True))


def case_error_in_the_block(rank: Rank) -> None:
    case = make_case(rank.world)
    inputs = make_full_inputs(case, rank.device)
    with pytest.raises(ZeroDivisionError), context_parallel_block(rank, case.Sq, RingSettings()):
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is SDPA
    rank.pop_path_counts()
    out = F.scaled_dot_product_attention(*inputs, **case.sdpa_kwargs())
    assert rank.pop_path_counts() == {"routed_ours": 1, "ours_fwd": 1}
    assert_within_budgets(case, inputs, out)


def case_calls_without_a_ring_in_the_block(rank: Rank) -> None:
    """Check DTensor calls in the block that no ring serves.

    Replicated tensors and tensors sharded over heads attend locally. A mixture raises an error with a remedy. Calls
    with masks stay with stock.
    """
    case = make_case(rank.world, (2 * rank.world, rank.world))
    inputs, mesh = make_full_inputs(case, rank.device), rank.mesh(names=("cp",))
    with context_parallel_block(rank, case.Sq, RingSettings()):
        for placement in (Replicate(), Shard(1)):
            local = [x.detach() if placement.is_replicate() else x.detach().chunk(rank.world, 1)[rank.number].clone()
                     for x in (*inputs, inputs.grad_out)]  # fmt: skip
            q, k, v, grad = (DTensor.from_local(x, mesh, [placement]) for x in local)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = SDPA(*leaves, **case.sdpa_kwargs())
            grads = torch.autograd.grad(out, leaves, grad)
            assert_within_budgets(case, inputs, out.full_tensor().detach(), [x.full_tensor() for x in grads])
        rows = [DTensor.from_local(x, mesh, [Shard(2)]) for x in make_local_inputs(rank, inputs, True)[:3]]
        with pytest.raises(RuntimeError, match="context_parallel block must be sharded over rows"):
            tracing.OVERRIDEABLE(rows[0], rows[1].redistribute(mesh, [Replicate()]), rows[2], None, 0.0, True)
        plan = torch_flashplug.explain(*rows, is_causal=True, enable_gqa=True, device="h100")
        assert plan.backend == "fa3" and f"the first of {rank.world} steps" in plan.part, plan
        mask = DTensor.from_local(torch.zeros(1, device=rank.device).expand(case.Sq, case.Sq), mesh, [Replicate()])
        assert torch_flashplug.explain(*rows, mask, enable_gqa=True, device="h100").backend == "stock"
        dropout_plan = torch_flashplug.explain(*rows, dropout_p=0.1, enable_gqa=True, device="h100")
        assert dropout_plan.backend == "stock" and "dropout" in dropout_plan.reasons["fa3"]


def case_mesh_of_two_dims(rank: Rank) -> None:
    """Check that no ring serves a mesh of two dims: the reason and the error of a forced backend name the mesh."""
    case = make_case(rank.world)
    inputs, mesh = make_full_inputs(case, rank.device), rank.mesh(rank.world, 1, names=("cp", "tp"))
    with context_parallel_block(rank, case.Sq, RingSettings()):
        parts = [x.detach() for x in make_local_inputs(rank, inputs, True)[:3]]
        rows = [DTensor.from_local(x, mesh, [Shard(2), Shard(1)]) for x in parts]
        plan = torch_flashplug.explain(*rows, is_causal=True, enable_gqa=True, device="h100")
        assert plan.backend == "stock" and "a mesh of several dims" in plan.reasons["fa3"], plan
        with pytest.raises(RuntimeError, match="a mesh of one dim|a mesh of several dims"):
            with torch_flashplug.sdpa_backend("fa3"):
                SDPA(*rows, is_causal=True, enable_gqa=True)
