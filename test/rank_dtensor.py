"""Cases of DTensors on several ranks (ranks.py): the plugin's ops run on shards, unless results would be wrong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ranks import Block, Rank, assert_right, problem, whole
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


def _placed(rank: Rank, inputs: Inputs, placement: Placement, grad: bool = True) -> list[DTensor]:
    mesh = rank.mesh()
    return [distribute_tensor(x.detach(), mesh, [placement]).requires_grad_(grad) for x in (*inputs, inputs.grad_out)]


def _attend(case: Case, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    out = F.scaled_dot_product_attention(q, k, v, **case.sdpa_kwargs())
    return out, torch.autograd.grad(out, (q, k, v), grad.detach())


def _full(*tensors: DTensor) -> list[Tensor]:
    return [x.full_tensor().detach() for x in tensors]


def _assert_ours(rank: Rank, calls: int = 1) -> None:
    took = rank.took()
    assert took.get("ours_fwd") == calls and took.get("routed_ours") == calls, took
    assert "routed_stock" not in took, took


def case_placements(rank: Rank) -> None:
    for placement in (HEADS, BATCH, Replicate()):
        for causal in (True, False):
            case = problem(rank.world, (8, 4), batch=4, rows=32, causal=causal)
            inputs = whole(case, rank.device)
            out, grads = _attend(case, *_placed(rank, inputs, placement))
            _assert_ours(rank)
            assert out.placements == (placement,)
            assert_right(case, inputs, *(_full(out)), _full(*grads))


def case_mesh_of_two_dims(rank: Rank) -> None:
    """Shard the batch over one mesh dim and the heads over the second mesh dim.

    The number of heads must be divisible only by the size of the second dim.
    """
    case = problem(rank.world, (4, 2), batch=2, rows=32)
    inputs, mesh = whole(case, rank.device), rank.mesh(rank.world // 2, 2)
    placed = [distribute_tensor(x.detach(), mesh, [BATCH, HEADS]).requires_grad_() for x in (*inputs, inputs.grad_out)]
    out, grads = _attend(case, *placed)
    _assert_ours(rank)
    assert out.placements == (BATCH, HEADS)
    assert_right(case, inputs, *(_full(out)), _full(*grads))


def case_uneven_batch(rank: Rank) -> None:
    case = problem(rank.world, batch=2 * rank.world - 1, rows=32)
    inputs = whole(case, rank.device)
    out, grads = _attend(case, *_placed(rank, inputs, BATCH))
    _assert_ours(rank)
    assert_right(case, inputs, *(_full(out)), _full(*grads))


def case_heads_that_do_not_divide(rank: Rank) -> None:
    """Check heads that do not divide among the ranks: the op redistributes the tensors.

    DTensor alone would pair query heads with key heads of a different rank.
    """
    for heads in ((6, 3), (4, 1)):
        case = problem(rank.world, heads, rows=32)
        inputs = whole(case, rank.device)
        q, k, v, grad = _placed(rank, inputs, HEADS)
        said = torch_flashplug.explain(q, k, v, **case.sdpa_kwargs(), device="h100")
        assert said.backend == "stock" and "must be multiples of" in said.reasons["fa3"], said
        results = tracing.OVERRIDEABLE(q, k, v, None, 0.0, True)
        out, lse, max_q, max_k = results[0], results[1], results[4], results[5]
        given = (
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
        *grads, _ = tracing.OVERRIDEABLE_BACKWARD(*given)
        assert_right(case, inputs, *(_full(out)), _full(*grads))
        assert rank.took().get("ours_fwd") == 1


def case_own_ops(rank: Rank) -> None:
    case = problem(rank.world, (8, 4), rows=32)
    inputs = whole(case, rank.device)
    for placement in (HEADS, Replicate()):
        q, k, v, grad = _placed(rank, inputs, placement)
        F.scaled_dot_product_attention(q, k, v, **case.sdpa_kwargs())  # the first DTensor call registers the strategies
        out = sdpa.namespace.sdpa_fwd(q, k, v, None, 0.0, sdpa.CAUSAL_TOP_LEFT, None, 0)[0]
        assert out.placements == (placement,)
        assert_right(case, inputs, *(_full(out)), _full(*torch.autograd.grad(out, (q, k, v), grad.detach())))


def case_bias(rank: Rank) -> None:
    """Check a float mask that is broadcast over the sharded dim, and the gradient of the mask.

    In this case each rank has a partial sum of the gradient.
    """
    case = problem(rank.world, (8, 4), batch=4, rows=32, causal=False)
    inputs, mesh = whole(case, rank.device), rank.mesh()
    for placement, heads in ((HEADS, 1), (HEADS, 8), (BATCH, 1), (Replicate(), 8)):
        draw = torch.Generator().manual_seed(5)
        bias = torch.randn(1, heads, case.Sq, case.Sk, generator=draw).to(inputs.q)
        placed = placement if placement == HEADS and heads > 1 else Replicate()
        shard = distribute_tensor(bias, mesh, [placed]).requires_grad_()
        q, k, v, grad = _placed(rank, inputs, placement)
        assert torch_flashplug.explain(q, k, v, shard, enable_gqa=True, device="h100").part
        out = F.scaled_dot_product_attention(q, k, v, shard, enable_gqa=True)
        (got,) = torch.autograd.grad(out, (shard,), grad.detach())
        mask = Masking(bias=bias)
        exact = attention_math(*inputs, scale=None, mask=mask).out
        low = attention_math(*inputs, scale=None, mask=mask, dtype=inputs.q.dtype).out
        assert_within_budget(f"bias of {heads} heads, {placement}", out.full_tensor().detach(), exact, low)
        alone = bias.detach().requires_grad_()
        want = F.scaled_dot_product_attention(*(x.detach() for x in inputs), alone, enable_gqa=True)
        (want,) = torch.autograd.grad(want, (alone,), inputs.grad_out)
        torch.testing.assert_close(got.full_tensor(), want, atol=3e-2, rtol=3e-2)


def case_rows_outside_of_a_ring(rank: Rank) -> None:
    """Check rows sharded outside of a ring: stock gathers the rows, and a forced backend raises with a remedy.

    The error must occur on all ranks.
    """
    case = problem(rank.world)
    q, k, v, _ = _placed(rank, whole(case, rank.device), ROWS)
    said = torch_flashplug.explain(q, k, v, **case.sdpa_kwargs(), device="h100")
    assert said.backend == "stock" and "redistribute" in said.reasons["fa3"], said
    with torch_flashplug.sdpa_backend("fa3"):
        assert "context_parallel" in torch_flashplug.explain(q, k, v, **case.sdpa_kwargs(), device="h100").error
        with pytest.raises(RuntimeError, match="inside the block, or redistribute"):
            F.scaled_dot_product_attention(q, k, v, **case.sdpa_kwargs())
    assert "ours_fwd" not in rank.took()


def case_explained(rank: Rank) -> None:
    """Check that the explained plan is the plan of the local shard."""
    case = problem(rank.world, (8, 4), rows=32)
    q, k, v, _ = _placed(rank, whole(case, rank.device), HEADS)
    said = torch_flashplug.explain(q, k, v, **case.sdpa_kwargs(), device="h100")
    assert said.backend == "fa3" and f"[1, {8 // rank.world}, {case.Sq}, 64]" in said.call, said
    assert "this rank's part" in str(said)
    other = DTensor.from_local(k.to_local(), k.device_mesh, [BATCH])
    assert "must have the same placements" in torch_flashplug.explain(q, other, v, device="h100").reasons["fa3"]
    plain = torch_flashplug.explain(q, k.full_tensor(), v, device="h100")
    assert plain.backend == "stock" and "subclass" in plain.reasons["fa3"]


def _block(rank: Rank) -> tuple[Block, Tensor]:
    torch.manual_seed(7)
    return Block(kv_heads=4).to(rank.device, torch.bfloat16), torch.randn(2, 64, 256).to(rank.device, torch.bfloat16)


def _tensor_parallel(rank: Rank, block: Block, local: bool) -> Block:
    column = {name: ColwiseParallel(use_local_output=local) for name in ("wq", "wk", "wv")}
    return parallelize_module(block, rank.mesh(), {**column, "wo": RowwiseParallel(input_layouts=Shard(-1))})


def case_tensor_parallel(rank: Rank) -> None:
    """Check tensor parallelism with local heads (plain tensors) and with DTensors, eager and compiled."""
    alone, x = _block(rank)
    want = alone(x)
    want.float().square().mean().backward()
    rank.took()
    for local in (True, False):
        for compiled in (False, True):
            block = _tensor_parallel(rank, _block(rank)[0], local)
            run = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
            out = run(x)
            out.float().square().mean().backward()
            took = rank.took()
            assert took.get("ours_fwd") == 1 and "routed_stock" not in took, took
            torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)
            for name, weight in block.named_parameters():
                exact = alone.get_parameter(name.removeprefix("_orig_mod.")).grad
                torch.testing.assert_close(weight.grad.full_tensor(), exact, atol=2e-2, rtol=2e-2)
            torch._dynamo.reset()


def case_forced_stock(rank: Rank) -> None:
    """Check forced stock, which raises on a CPU, because DTensor supports only the GPU op of stock."""
    case = problem(rank.world, (4, 4))
    q, k, v, _ = _placed(rank, whole(case, rank.device), HEADS)
    with torch_flashplug.sdpa_backend("stock"):
        if rank.device == "cuda":
            F.scaled_dot_product_attention(q, k, v, **case.sdpa_kwargs())
        else:
            with pytest.raises(NotImplementedError, match="flash_attention_for_cpu"):
                F.scaled_dot_product_attention(q, k, v, **case.sdpa_kwargs())
    assert "ours_fwd" not in rank.took()
    assert bindings.mode() == 0
