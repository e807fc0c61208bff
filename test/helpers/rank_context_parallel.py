"""Cases of context_parallel on several ranks (ranks.py).

Plugin kernels run the steps of the ring, and full results are within the error budget of a single device. Both ways of
torch to switch context parallelism on are covered.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ranks import Block, Rank, assert_within_budgets, make_case, make_full_inputs
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import (
    _ContextParallel,
    _enable_context_parallel_dispatcher,
    _HeadTailLoadBalancer,
    context_parallel_unshard,
    set_rotate_method,
)
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_context_parallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import torch_flashplug
from torch_flashplug import env
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import sdpa
from torch_flashplug.testing import Case, Inputs, assert_bitwise_equal
from torch_flashplug.torch_hooks.distributed import context_parallel as context_parallel_hooks
from torch_flashplug.torch_hooks.distributed import ring_attention as ring_module

SDPA = F.scaled_dot_product_attention


@dataclass(frozen=True)
class RingSettings:
    """Settings for switching a ring on."""

    rotate: str = "allgather"
    balanced: bool = True
    by_module: bool = False


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, enable_gqa: bool = False) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)


def _indices(rank: Rank, rows: int, balanced: bool) -> Tensor:
    """Return the row indices of the rank."""
    order = torch.arange(rows, device=rank.device)
    if balanced:
        order = _HeadTailLoadBalancer(rows, rank.world, rank.device)._generate_indices()[0].long()
    return order.chunk(rank.world)[rank.number]


def make_local_inputs(rank: Rank, inputs: Inputs, balanced: bool) -> list[Tensor]:
    """Return q, k, v and the output gradient of the rank, with the memory layout of the full tensors."""
    row_indices, parts = _indices(rank, inputs.q.shape[2], balanced), []
    for x in (*inputs, inputs.grad_out):
        part, rows_first = x.detach().index_select(2, row_indices), x.stride(1) < x.stride(2)
        parts.append(part.transpose(1, 2).contiguous().transpose(1, 2) if rows_first else part.contiguous())
    return [x.requires_grad_(number < 3) for number, x in enumerate(parts)]


@contextlib.contextmanager
def context_parallel_block(rank: Rank, rows: int, ring_settings: RingSettings) -> Iterator[nn.Module]:
    """Yield a module with attention in the ring, and restore the state of torch at the end.

    torch 2.11 forgets to restore a part of the state.
    """
    mesh, module = rank.mesh(names=("cp",)), Attend()
    set_rotate_method(ring_settings.rotate)
    options = torch_context_parallel._cp_options
    balanced, mode = options.enable_load_balance, torch_context_parallel._dispatch_mode
    options.enable_load_balance = ring_settings.balanced
    try:
        if ring_settings.by_module:
            torch_context_parallel._dispatch_mode = torch_context_parallel._DispatchMode.MODULE_WRAPPER
            parallelize_module(
                module, mesh, _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.SDPA)
            )
            _enable_context_parallel_dispatcher()
            yield module
        else:
            with context_parallel(mesh, buffers=[torch.zeros(1, 1, rows, 1, device=rank.device)], buffer_seq_dims=[2]):
                yield module
    finally:
        torch_context_parallel._disable_context_parallel_dispatcher_impl()
        torch_context_parallel._dispatch_mode, options.enable_load_balance = mode, balanced
        F.scaled_dot_product_attention = SDPA
        torch_context_parallel._replaced_functions.clear()
        set_rotate_method("allgather")


def unshard(rank: Rank, tensors: Sequence[Tensor], balanced: bool) -> list[Tensor]:
    before = torch_context_parallel._cp_options.enable_load_balance
    torch_context_parallel._cp_options.enable_load_balance = balanced
    try:
        return context_parallel_unshard(rank.mesh(names=("cp",)), [x.detach() for x in tensors], [2] * len(tensors))
    finally:
        torch_context_parallel._cp_options.enable_load_balance = before


def attend(case: Case, parts: Sequence[Tensor], module: nn.Module) -> tuple[Tensor, tuple[Tensor, ...]]:
    q, k, v, grad = parts
    out = module(q, k, v, is_causal=case.causal, enable_gqa=case.gqa)
    return out, torch.autograd.grad(out, (q, k, v), grad)


def num_ring_steps(rank: Rank, case: Case, ring_settings: RingSettings) -> int:
    """Return the number of ring steps of this rank.

    Without load balance, the ring skips keys behind the rows of the rank.
    """
    return rank.world if ring_settings.balanced or not case.causal else rank.number + 1


def check_ring(rank: Rank, case: Case, ring_settings: RingSettings) -> None:
    inputs = make_full_inputs(case, rank.device)
    rank.pop_path_counts()
    with context_parallel_block(rank, case.Sq, ring_settings) as module:
        out, grads = attend(case, make_local_inputs(rank, inputs, ring_settings.balanced), module)
    if rank.device_backend is not None:
        took = rank.pop_path_counts()
        num_steps = num_ring_steps(rank, case, ring_settings)
        assert took.get("ours_fwd") == num_steps and took.get("routed_ours") == 1 and "routed_stock" not in took, took
        assert took.get("ours_bwd", 0) + took.get("math_bwd", 0) == num_steps, took
    assert_within_budgets(
        case, inputs, *unshard(rank, [out], ring_settings.balanced), unshard(rank, grads, ring_settings.balanced)
    )


def case_both_apis(rank: Rank) -> None:
    for rotate, by_module, layout in itertools.product(("allgather", "alltoall"), (False, True), ("bshd", "bhsd")):
        check_ring(rank, make_case(rank.world, layout=layout), RingSettings(rotate, by_module=by_module))


def case_heads(rank: Rank) -> None:
    """Check MHA, GQA and several head counts."""
    for heads in ((2, 2), (4, 1), (3, 3)):
        check_ring(rank, make_case(rank.world, heads, batch=2, rows=32), RingSettings("alltoall"))


def case_not_balanced(rank: Rank) -> None:
    for rotate, causal in itertools.product(("allgather", "alltoall"), (True, False)):
        check_ring(rank, make_case(rank.world, causal=causal), RingSettings(rotate, balanced=False))
        check_ring(
            rank,
            make_case(rank.world, causal=causal, layout="bhsd"),
            RingSettings(rotate, balanced=False, by_module=True),
        )


def case_gathered(rank: Rank) -> None:
    """Check allgather instead of a ring: one call for each chunk of rows."""
    with pytest.raises(ValueError, match="method must be one of ring, gather"):
        context_parallel_hooks.use("mesh")
    context_parallel_hooks.use("gather")
    try:
        for causal, balanced in ((True, True), (True, False), (False, False)):
            for layout, heads in (("bshd", (4, 2)), ("bhsd", (2, 2))):
                case, ring_settings = (
                    make_case(rank.world, heads, causal=causal, layout=layout),
                    RingSettings(balanced=balanced),
                )
                inputs = make_full_inputs(case, rank.device)
                with context_parallel_block(rank, case.Sq, ring_settings) as module:
                    rank.pop_path_counts()
                    out, grads = attend(case, make_local_inputs(rank, inputs, balanced), module)
                    took = rank.pop_path_counts()
                assert (
                    took.get("routed_ours") == 1 and took.get("ours_fwd", 0) + took.get("math_fwd", 0) == 1 + balanced
                )
                assert_within_budgets(case, inputs, *unshard(rank, [out], balanced), unshard(rank, grads, balanced))
    finally:
        context_parallel_hooks.use("ring")


def case_forward_alone(rank: Rank) -> None:
    case = make_case(rank.world)
    inputs = make_full_inputs(case, rank.device)
    for rotate in ("allgather", "alltoall"):
        with context_parallel_block(rank, case.Sq, RingSettings(rotate)) as module, torch.no_grad():
            q, k, v, _ = make_local_inputs(rank, inputs, True)
            inputs_before = [x.clone() for x in (q, k, v)]
            out = module(q, k, v, is_causal=True, enable_gqa=True)
        assert_within_budgets(case, inputs, *unshard(rank, [out], True))
        for name, x, before in zip("qkv", (q, k, v), inputs_before):
            assert_bitwise_equal(name, x, before)


def case_checkpointed(rank: Rank) -> None:
    case = make_case(rank.world)
    inputs = make_full_inputs(case, rank.device)
    with context_parallel_block(rank, case.Sq, RingSettings("alltoall")) as module:
        q, k, v, grad = make_local_inputs(rank, inputs, True)
        out = checkpoint(module, q, k, v, is_causal=True, enable_gqa=True, use_reentrant=False)
        rank.pop_path_counts()
        grads = torch.autograd.grad(out, (q, k, v), grad)
        assert rank.pop_path_counts().get("ours_fwd") == rank.world  # the recomputation
    assert_within_budgets(case, inputs, *unshard(rank, [out], True), unshard(rank, grads, True))


def case_compiled(rank: Rank) -> None:
    """Check the block compiled into one graph; modules with hooks do not compile in stock torch either."""
    case = make_case(rank.world)
    inputs = make_full_inputs(case, rank.device)
    for rotate in ("allgather", "alltoall"):
        with context_parallel_block(rank, case.Sq, RingSettings(rotate)):
            q, k, v, grad = make_local_inputs(rank, inputs, True)

            @torch.compile(backend="aot_eager", fullgraph=True)
            def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(q * 1.0, k, v, is_causal=True, enable_gqa=True)

            rank.pop_path_counts()
            out = run(q, k, v)
            grads = torch.autograd.grad(out, (q, k, v), grad)
            assert rank.pop_path_counts().get("ours_fwd") == rank.world
        assert_within_budgets(case, inputs, *unshard(rank, [out], True), unshard(rank, grads, True))
        torch._dynamo.reset()


def case_forced(rank: Rank) -> None:
    """Check a forced backend on each step, with a backward following the backend of the forward.

    Forced stock stays stock.
    """
    case = make_case(rank.world)
    inputs = make_full_inputs(case, rank.device)
    for backend in ("fa3", "fa2"):
        with context_parallel_block(rank, case.Sq, RingSettings()) as module:
            parts = make_local_inputs(rank, inputs, True)
            with torch_flashplug.sdpa_backend(backend):
                out = module(*parts[:3], is_causal=True, enable_gqa=True)
            rank.pop_path_counts()
            grads = torch.autograd.grad(out, parts[:3], parts[3])
            took = rank.pop_path_counts()
        assert took.get("ours_bwd", 0) + took.get("math_bwd", 0) == rank.world, took
        assert_within_budgets(case, inputs, *unshard(rank, [out], True), unshard(rank, grads, True))
    # DTensor has a rule for the op only on GPUs
    refused = pytest.raises(NotImplementedError, match="flash_attention_for_cpu")
    with context_parallel_block(rank, case.Sq, RingSettings()) as module, torch_flashplug.sdpa_backend("stock"):
        with refused if rank.device == "cpu" else contextlib.nullcontext():
            module(*make_local_inputs(rank, inputs, True)[:3], is_causal=True, enable_gqa=True)
    assert "ours_fwd" not in rank.pop_path_counts()


def case_mode_of_the_forward(rank: Rank) -> None:
    """Check that backward steps use the mode of the forward after the end of the block.

    The ring of torch 2.14 loses the contents of max_q.
    """
    case = make_case(rank.world)
    inputs, backends, namespace = make_full_inputs(case, rank.device), [], ring_module.namespace

    def record_backend(*args: object) -> tuple:
        backends.append(bindings.backend_of(sdpa.BackwardArgs(*args).mode))
        return namespace.sdpa_bwd(*args)

    with context_parallel_block(rank, case.Sq, RingSettings()) as module:
        parts = make_local_inputs(rank, inputs, True)
        with torch_flashplug.sdpa_backend("fa2"):
            out = module(*parts[:3], is_causal=True, enable_gqa=True)
        with mock.patch.object(ring_module, "namespace", SimpleNamespace(sdpa_bwd=record_backend)):
            torch.autograd.grad(out, parts[:3], parts[3])
    assert backends == ["fa2"] * rank.world


def case_margin(rank: Rank) -> None:
    """Check that only launches of a ring leave SMs free for communication, forward and backward."""
    case = make_case(rank.world)
    inputs, margins, namespace = make_full_inputs(case, rank.device), [], ring_module.namespace

    def with_margin_recorded(op: Callable) -> Callable:
        def run(*args: object) -> tuple:
            margins.append(bindings.set_cta_margin(0))
            bindings.set_cta_margin(margins[-1])
            return op(*args)

        return run

    steps = SimpleNamespace(
        sdpa_fwd=with_margin_recorded(namespace.sdpa_fwd), sdpa_bwd=with_margin_recorded(namespace.sdpa_bwd)
    )
    with mock.patch.dict(os.environ, {env.RING_MARGIN.name: "8"}), mock.patch.object(ring_module, "namespace", steps):
        with context_parallel_block(rank, case.Sq, RingSettings()) as module:
            out, grads = attend(case, make_local_inputs(rank, inputs, True), module)
    assert margins == [8] * 2 * rank.world and bindings.set_cta_margin(0) == 0, margins
    assert_within_budgets(case, inputs, *unshard(rank, [out], True), unshard(rank, grads, True))


def case_deterministic(rank: Rank) -> None:
    """Check that results are bitwise equal, because ranks are accumulated in a fixed order."""
    case, runs = make_case(rank.world), []
    inputs = make_full_inputs(case, rank.device)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            with context_parallel_block(rank, case.Sq, RingSettings("alltoall")) as module:
                out, grads = attend(case, make_local_inputs(rank, inputs, True), module)
            runs.append((out.detach(), *grads))
    finally:
        torch.use_deterministic_algorithms(False)
    for name, grad_a, grad_b in zip(("out", "dq", "dk", "dv"), *runs):
        assert_bitwise_equal(name, grad_a, grad_b)


def case_fully_sharded(rank: Rank) -> None:
    """Check FSDP2 and context parallelism over the same ranks."""
    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block()).to(rank.device, torch.bfloat16)
    x = torch.randn(2, 32 * rank.world, 256).to(rank.device, torch.bfloat16)
    model(x).float().square().mean().backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    mesh = rank.mesh(names=("dp",))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rank.pop_path_counts()
    with context_parallel(rank.mesh(names=("cp",)), buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}):
        model(x).float().square().mean().backward()
    took = rank.pop_path_counts()
    assert took.get("ours_fwd") == 2 * rank.world and "routed_stock" not in took, took
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad.full_tensor(), expected[name], atol=2e-2, rtol=5e-2)


def case_changed_torch(rank: Rank) -> None:
    """Check that a changed private API of torch is detected, so that stock serves and no rank hangs."""
    module = context_parallel_hooks
    assert module.first_unknown_name(torch_context_parallel) is None
    assert "custom_ops" in module.first_unknown_name(SimpleNamespace())
    changed = SimpleNamespace(**{**vars(torch_context_parallel), "_create_rotater": lambda pg, method: None})
    assert module.first_unknown_name(changed) == "_create_rotater has no seq_dim"
