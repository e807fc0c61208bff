"""Cases of plain tensors on several ranks (ranks.py); other parts of torch divide models, batches, heads or rows.

Each rank calls F.sdpa with plain local tensors.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import ROOT, Block, Rank, assert_within_budgets, make_case, make_full_inputs
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torch_flashplug import attention
from torch_flashplug.testing import assert_within_budget, attention_math, grads_math, new_case
from torch_flashplug.testing.budget import GRAD_FACTOR, cancelled_sums
from torch_flashplug.testing.oracle import Masking

sys.path.append(str(ROOT))

from tools.bench.suites.multi_gpu import AllToAll  # noqa: E402

CALLS = 2  # attention calls of the model: a call in each block


def make_model(rank: Rank) -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(*(Block(kv_heads=4) for _ in range(CALLS))).to(rank.device, torch.bfloat16)


def make_input(rank: Rank) -> Tensor:
    """Return a batch with an entry for each rank."""
    x = torch.randn(rank.world, 64, 256, generator=torch.Generator().manual_seed(12))
    return x.to(rank.device, torch.bfloat16)


def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def check_gradients(rank: Rank, model: nn.Module, x: Tensor) -> None:
    """Check the gradients of a training step against the full batch on a single device.

    The mean over ranks is the mean over batch entries. Where the plugin is on, plugin kernels serve all calls.
    """
    alone = make_model(rank)
    compute_loss(alone, make_input(rank)).backward()
    rank.pop_path_counts()
    compute_loss(model, x).backward()
    took = rank.pop_path_counts()
    assert rank.device_backend is None or (took.get("ours_fwd") == CALLS and "routed_stock" not in took), took
    for name, weight in model.named_parameters():
        grad = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
        exact = alone.get_parameter(name.removeprefix("module.")).grad
        assert (grad - exact).norm() <= 0.02 * exact.norm(), name


def case_distributed_data_parallel(rank: Rank) -> None:
    check_gradients(rank, DistributedDataParallel(make_model(rank)), make_input(rank)[rank.number].unsqueeze(0))


def case_fully_sharded(rank: Rank) -> None:
    model, mesh = make_model(rank), rank.mesh(names=("dp",))
    for block in model:
        fully_shard(block, mesh=mesh)
    check_gradients(rank, fully_shard(model, mesh=mesh), make_input(rank)[rank.number].unsqueeze(0))


def case_tensor_parallel_and_sharded(rank: Rank) -> None:
    """Check heads divided over the second dim of the mesh, and weights sharded over the first dim, of a single rank."""
    model, mesh = make_model(rank), rank.mesh(1, rank.world, names=("dp", "tp"))
    for block in model:
        plan = {name: ColwiseParallel() for name in ("wq", "wk", "wv")} | {
            "wo": RowwiseParallel(input_layouts=Shard(-1))
        }
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    check_gradients(rank, fully_shard(model, mesh=mesh["dp"]), make_input(rank))


def case_ulysses(rank: Rank) -> None:
    case = make_case(rank.world, (8, 4))
    inputs = make_full_inputs(case, rank.device)
    rank.pop_path_counts()
    parts = [x.detach().chunk(rank.world, 2)[rank.number].requires_grad_() for x in inputs]
    q, k, v = (AllToAll.apply(x, 1, 2) for x in parts)
    out = AllToAll.apply(F.scaled_dot_product_attention(q, k, v, **case.sdpa_kwargs()), 2, 1)
    grads = torch.autograd.grad(out, parts, inputs.grad_out.chunk(rank.world, 2)[rank.number])
    took = rank.pop_path_counts()
    assert rank.device_backend is None or (took.get("ours_fwd") == 1 and "routed_stock" not in took), took
    results = [_Gather.apply(x.detach(), 2) for x in (out, *grads)]
    assert_within_budgets(case, inputs, results[0], results[1:])


class _Gather(torch.autograd.Function):
    """Concatenation of the parts of all ranks along a dim; the gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        sum_ = grad.float().contiguous()
        dist.all_reduce(sum_)
        return sum_.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()].to(grad.dtype), None


def case_lengths(rank: Rank) -> None:
    """Check packed sequences with rows divided among ranks at arbitrary positions.

    Each rank has all keys from the start of its first sequence. The rows of a rank are the last rows of the visible
    keys.
    """
    lengths = [70, 9, 3, 40 * rank.world + 46]
    total = sum(lengths)
    lengths[-1] += -total % rank.world
    ends = torch.tensor(lengths).cumsum(0).tolist()
    total, starts = ends[-1], [0, *ends[:-1]]
    rows = total // rank.world
    row_range = rank.number * rows, (rank.number + 1) * rows
    local_sequences = [(a, b) for a, b in zip(starts, ends) if a < row_range[1] and b > row_range[0]]
    begin = local_sequences[0][0]
    row_ends = [0] + [min(b, row_range[1]) - row_range[0] for _, b in local_sequences]
    key_ends = [0] + [min(b, row_range[1]) - begin for _, b in local_sequences]
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=rank.device) for cu in (row_ends, key_ends))
    case = new_case("lengths", (1, 4, 2), (total, total), (64, 64), "causal")
    inputs = make_full_inputs(case, rank.device)
    packed = [x.detach()[0].transpose(0, 1) for x in (*inputs, inputs.grad_out)]  # (T, H, D)
    parts = [x[slice(*row_range)].contiguous().requires_grad_() for x in packed]
    q, (k, v) = parts[0], (_Gather.apply(x, 0)[begin : row_range[1]] for x in parts[1:3])
    out = attention(q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    grads = torch.autograd.grad(out, parts[:3], parts[3].detach())
    results = [_Gather.apply(x.detach().contiguous(), 0).transpose(0, 1).unsqueeze(0) for x in (out, *grads)]
    _check_sequences(inputs, list(zip(starts, ends)), results)


def _check_sequences(inputs, cuts: list[tuple[int, int]], results: list[Tensor]) -> None:
    """Check each sequence against attention of the sequence alone."""
    for a, b in cuts:
        q, k, v, grad = (x.detach()[:, :, a:b] for x in (*inputs, inputs.grad_out))
        limits = cancelled_sums(q, k, v, grad, None)
        exact = (attention_math(q, k, v, scale=None, mask=Masking(1)).out, *grads_math(q, k, v, grad, mask=Masking(1)))
        dtype = {"dtype": q.dtype, "mask": Masking(1)}
        low = (attention_math(q, k, v, scale=None, **dtype).out, *grads_math(q, k, v, grad, **dtype))
        for name, x, expected, plain in zip(("out", "dq", "dk", "dv"), results, exact, low):
            budget = {} if name == "out" else {"factor": GRAD_FACTOR, "cancelled": float(limits[name])}
            assert_within_budget(f"rows {a} to {b}, {name}", x[:, :, a:b], expected, plain, **budget)
