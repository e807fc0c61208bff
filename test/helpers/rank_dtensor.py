"""Cases of DTensors on several ranks (ranks.py): plugin ops run on shards, or reject calls that would go wrong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ranks import Block, Rank, assert_within_budgets, make_case, make_full_inputs
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

import torch_flashplug
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import sdpa
from torch_flashplug.testing import Case, Inputs, assert_within_budget, attention_math
from torch_flashplug.testing.oracle import Masking
from torch_flashplug.torch_hooks import tracing

BATCH, HEADS, ROWS = Shard(0), Shard(1), Shard(2)


def _distribute(rank: Rank, inputs: Inputs, placement: Placement, grad: bool = True) -> list[DTensor]:
    mesh = rank.mesh()
    return [distribute_tensor(x.detach(), mesh, [placement]).requires_grad_(grad) for x in (*inputs, inputs.grad_out)]


def _attend(case: Case, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    out = F.scaled_dot_product_attention(q, k, v, **case.sdpa_kwargs())
    return out, torch.autograd.grad(out, (q, k, v), grad.detach())


def _gather_full(*tensors: DTensor) -> list[Tensor]:
    return [x.full_tensor().detach() for x in tensors]


def _assert_served_by_plugin(rank: Rank, calls: int = 1) -> None:
    took = rank.pop_path_counts()
    assert took.get("ours_fwd") == calls and took.get("routed_ours") == calls, took
    assert "routed_stock" not in took, took


def case_placements(rank: Rank) -> None:
    for placement in (HEADS, BATCH, Replicate()):
        for causal in (True, False):
            case = make_case(rank.world, (8, 4), batch=4, rows=32, causal=causal)
            inputs = make_full_inputs(case, rank.device)
            out, grads = _attend(case, *_distribute(rank, inputs, placement))
            _assert_served_by_plugin(rank)
            assert out.placements == (placement,)
            assert_within_budgets(case, inputs, *(_gather_full(out)), _gather_full(*grads))


def case_mesh_of_two_dims(rank: Rank) -> None:
    """Check batch sharded over the first dim of the mesh and heads over the second dim.

    Heads divide only among the ranks of the second mesh dim.
    """
    case = make_case(rank.world, (4, 2), batch=2, rows=32)
    inputs, mesh = make_full_inputs(case, rank.device), rank.mesh(rank.world // 2, 2)
    placed = [distribute_tensor(x.detach(), mesh, [BATCH, HEADS]).requires_grad_() for x in (*inputs, inputs.grad_out)]
    out, grads = _attend(case, *placed)
    _assert_served_by_plugin(rank)
    assert out.placements == (BATCH, HEADS)
    assert_within_budgets(case, inputs, *(_gather_full(out)), _gather_full(*grads))


def case_uneven_batch(rank: Rank) -> None:
    case = make_case(rank.world, batch=2 * rank.world - 1, rows=32)
    inputs = make_full_inputs(case, rank.device)
    out, grads = _attend(case, *_distribute(rank, inputs, BATCH))
    _assert_served_by_plugin(rank)
    assert_within_budgets(case, inputs, *(_gather_full(out)), _gather_full(*grads))


def case_heads_that_do_not_divide(rank: Rank) -> None:
    """Check that the op redistributes heads not divisible among the ranks.

    DTensor alone would pair query heads of a rank with key heads of a different rank.
    """
    for heads in ((6, 3), (4, 1)):
        case = make_case(rank.world, heads, rows=32)
        inputs = make_full_inputs(case, rank.device)
        q, k, v, grad = _distribute(rank, inputs, HEADS)
        plan = torch_flashplug.explain(q, k, v, **case.sdpa_kwargs(), device="h100")
        assert plan.backend == "stock" and "must be multiples of" in plan.reasons["fa3"], plan
        results = tracing.OVERRIDEABLE(q, k, v, None, 0.0, True)
        out, lse, max_q, max_k = results[0], results[1], results[4], results[5]
        args = (
            grad,
            q,
            k,
            v,
            None,
            [True, True, True, False],
            out,
            lse,
            None,
            None,
            max_q,
            max_k,
            0.0,
            True,
            None,
            None,
        )
        *grads, _ = tracing.OVERRIDEABLE_BACKWARD(*args)
        assert_within_budgets(case, inputs, *(_gather_full(out)), _gather_full(*grads))
        assert rank.pop_path_counts().get("ours_fwd") == 1


def case_attention_ops(rank: Rank) -> None:
    case = make_case(rank.world, (8, 4), rows=32)
    inputs = make_full_inputs(case, rank.device)
    for placement in (HEADS, Replicate()):
        q, k, v, grad = _distribute(rank, inputs, placement)
        F.scaled_dot_product_attention(q, k, v, **case.sdpa_kwargs())  # the first DTensor registers the strategies
        out = sdpa.namespace.sdpa_fwd(q, k, v, None, 0.0, sdpa.CAUSAL_TOP_LEFT, None, 0)[0]
        assert out.placements == (placement,)
        assert_within_budgets(
            case, inputs, *(_gather_full(out)), _gather_full(*torch.autograd.grad(out, (q, k, v), grad.detach()))
        )


def case_bias(rank: Rank) -> None:
    """Check a float mask broadcast over the sharded dim, and the gradient of the mask.

    Each rank has a partial sum of the gradient.
    """
    case = make_case(rank.world, (8, 4), batch=4, rows=32, causal=False)
    inputs, mesh = make_full_inputs(case, rank.device), rank.mesh()
    for placement, heads in ((HEADS, 1), (HEADS, 8), (BATCH, 1), (Replicate(), 8)):
        draw = torch.Generator().manual_seed(5)
        bias = torch.randn(1, heads, case.Sq, case.Sk, generator=draw).to(inputs.q)
        placed = placement if placement == HEADS and heads > 1 else Replicate()
        shard = distribute_tensor(bias, mesh, [placed]).requires_grad_()
        q, k, v, grad = _distribute(rank, inputs, placement)
        assert torch_flashplug.explain(q, k, v, shard, enable_gqa=True, device="h100").part
        out = F.scaled_dot_product_attention(q, k, v, shard, enable_gqa=True)
        (grad_bias,) = torch.autograd.grad(out, (shard,), grad.detach())
        mask = Masking(bias=bias)
        exact = attention_math(*inputs, scale=None, mask=mask).out
        low = attention_math(*inputs, scale=None, mask=mask, dtype=inputs.q.dtype).out
        assert_within_budget(f"bias of {heads} heads, {placement}", out.full_tensor().detach(), exact, low)
        alone = bias.detach().requires_grad_()
        expected = F.scaled_dot_product_attention(*(x.detach() for x in inputs), alone, enable_gqa=True)
        (expected,) = torch.autograd.grad(expected, (alone,), inputs.grad_out)
        torch.testing.assert_close(grad_bias.full_tensor(), expected, atol=3e-2, rtol=3e-2)


def case_rows_outside_of_a_ring(rank: Rank) -> None:
    """Check DTensors sharded over rows outside of a ring: stock gathers, and a forced backend raises on all ranks."""
    case = make_case(rank.world)
    q, k, v, _ = _distribute(rank, make_full_inputs(case, rank.device), ROWS)
    plan = torch_flashplug.explain(q, k, v, **case.sdpa_kwargs(), device="h100")
    assert plan.backend == "stock" and "redistribute" in plan.reasons["fa3"], plan
    with torch_flashplug.sdpa_backend("fa3"):
        assert "context_parallel" in torch_flashplug.explain(q, k, v, **case.sdpa_kwargs(), device="h100").error
        with pytest.raises(RuntimeError, match="inside the block, or redistribute"):
            F.scaled_dot_product_attention(q, k, v, **case.sdpa_kwargs())
    assert "ours_fwd" not in rank.pop_path_counts()


def case_explain(rank: Rank) -> None:
    """Check that the plan describes the local part of the rank."""
    case = make_case(rank.world, (8, 4), rows=32)
    q, k, v, _ = _distribute(rank, make_full_inputs(case, rank.device), HEADS)
    plan = torch_flashplug.explain(q, k, v, **case.sdpa_kwargs(), device="h100")
    assert plan.backend == "fa3" and f"[1, {8 // rank.world}, {case.Sq}, 64]" in plan.call, plan
    assert "this rank's part" in str(plan)
    misplaced_k = DTensor.from_local(k.to_local(), k.device_mesh, [BATCH])
    assert "must have the same placements" in torch_flashplug.explain(q, misplaced_k, v, device="h100").reasons["fa3"]
    plain = torch_flashplug.explain(q, k.full_tensor(), v, device="h100")
    assert plain.backend == "stock" and "subclass" in plain.reasons["fa3"]


def _block(rank: Rank) -> tuple[Block, Tensor]:
    torch.manual_seed(7)
    return Block(kv_heads=4).to(rank.device, torch.bfloat16), torch.randn(2, 64, 256).to(rank.device, torch.bfloat16)


def _tensor_parallel(rank: Rank, block: Block, local: bool) -> Block:
    column = {name: ColwiseParallel(use_local_output=local) for name in ("wq", "wk", "wv")}
    return parallelize_module(block, rank.mesh(), {**column, "wo": RowwiseParallel(input_layouts=Shard(-1))})


def case_tensor_parallel(rank: Rank) -> None:
    """Check tensor parallelism with local heads as plain tensors and with DTensors, in eager mode and compiled."""
    alone, x = _block(rank)
    expected = alone(x)
    expected.float().square().mean().backward()
    rank.pop_path_counts()
    for local in (True, False):
        for compiled in (False, True):
            block = _tensor_parallel(rank, _block(rank)[0], local)
            run_block = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
            out = run_block(x)
            out.float().square().mean().backward()
            took = rank.pop_path_counts()
            assert took.get("ours_fwd") == 1 and "routed_stock" not in took, took
            torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
            for name, weight in block.named_parameters():
                exact = alone.get_parameter(name.removeprefix("_orig_mod.")).grad
                torch.testing.assert_close(weight.grad.full_tensor(), exact, atol=2e-2, rtol=2e-2)
            torch._dynamo.reset()


def case_forced_stock(rank: Rank) -> None:
    """Check forced stock: DTensor has a rule for the stock op only on a GPU."""
    case = make_case(rank.world, (4, 4))
    q, k, v, _ = _distribute(rank, make_full_inputs(case, rank.device), HEADS)
    with torch_flashplug.sdpa_backend("stock"):
        if rank.device == "cuda":
            F.scaled_dot_product_attention(q, k, v, **case.sdpa_kwargs())
        else:
            with pytest.raises(NotImplementedError, match="flash_attention_for_cpu"):
                F.scaled_dot_product_attention(q, k, v, **case.sdpa_kwargs())
    assert "ours_fwd" not in rank.pop_path_counts()
    assert bindings.mode() == 0
