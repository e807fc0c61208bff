"""Cases of context_parallel on several ranks (ranks.py): what else happens in its block, and behind it. Rings
themselves are rank_rings.py's.
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
    """Where rows lie otherwise than the graph was compiled for, it raises, by a ring and gathered."""
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
                grads = torch.autograd.grad(out, (q, k, v), grad)  # its forward's
            assert_right(case, inputs, *unshard(rank, [out], True), unshard(rank, grads, True))
        finally:
            context_parallel.use("ring")
            torch._dynamo.reset()


def case_backward_outside_of_the_block(rank: Rank) -> None:
    """Where stock differentiates one causal call over rows in balanced order."""
    case = problem(rank.world)
    inputs = whole(case, rank.device)
    with ring(rank, case.Sq, Way()) as module:
        q, k, v, grad = part_of(rank, inputs, True)
        out = module(q, k, v, is_causal=True, enable_gqa=True)
    with pytest.raises(RuntimeError, match="inside the block"):
        torch.autograd.grad(out, (q, k, v), grad)


def case_backward_in_a_later_block(rank: Rank) -> None:
    """Rows lie as in the forward's, whatever torch's options are by then."""
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
    """What is replicated or sharded over heads attends by itself; a mixture says what to do; masks stay stock's."""
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
    """No ring's: what is said, and raised of a forced backend, is about the mesh."""
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
