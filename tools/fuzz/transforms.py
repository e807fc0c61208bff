"""Ways in which a program calls attention.

The ways are: plain calls, torch.utils.checkpoint, a TorchDispatchMode, torch.func, and masks of
torch.nn.attention.bias. Each function returns the output and the gradients of all leaves that require a gradient.
`little_memory` limits the GPU memory for a call that runs before the checked call.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from tools.fuzz.tensors import CallTensors

Attention = Callable[..., Tensor]  # takes the leaves as positional arguments, in order
Leaves = Sequence[Tensor | None]
Result = tuple[Tensor, Sequence[Tensor]]
Between = Callable[[], None]  # called between forward and backward


def _differentiable(leaves: Leaves) -> list[Tensor]:
    return [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]


def plainly(attention: Attention, leaves: Leaves, grad_out: Tensor, between: Between) -> Result:
    inputs, out = _differentiable(leaves), attention(*leaves)
    between()
    return out, torch.autograd.grad(out, inputs, grad_out) if inputs else ()


def checkpointed(attention: Attention, leaves: Leaves, grad_out: Tensor, between: Between) -> Result:
    return plainly(lambda *tensors: checkpoint(attention, *tensors, use_reentrant=False), leaves, grad_out, between)


def checkpointed_reentrantly(attention: Attention, leaves: Leaves, grad_out: Tensor, between: Between) -> Result:
    """Use backward(), since a reentrant checkpoint refuses torch.autograd.grad()."""
    inputs = _differentiable(leaves)
    if not inputs:
        return plainly(attention, leaves, grad_out, between)
    out = checkpoint(attention, *leaves, use_reentrant=True)
    between()
    out.backward(grad_out)
    return out, [leaf.grad for leaf in inputs]


def checkpointed_selectively(attention: Attention, leaves: Leaves, grad_out: Tensor, between: Between) -> Result:
    """Save the results of attention ops, and recompute the results of all remaining ops."""

    def policy(_ctx: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "attention" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    def run(*tensors: Tensor | None) -> Tensor:
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        return checkpoint(attention, *tensors, use_reentrant=False, context_fn=contexts)

    return plainly(run, leaves, grad_out, between)


def counted(attention: Attention, leaves: Leaves, grad_out: Tensor, between: Between) -> Result:
    """Run both directions under a FLOP counter, which is a TorchDispatchMode."""
    with FlopCounterMode(display=False):
        return plainly(attention, leaves, grad_out, between)


def by_vjp(attention: Attention, leaves: Leaves, grad_out: Tensor, between: Between) -> Result:
    """Differentiate by torch.func.vjp()."""
    inputs = _differentiable(leaves)
    if not inputs:
        return plainly(attention, leaves, grad_out, between)

    def of_differentiable(*values: Tensor) -> Tensor:
        rest = iter(values)
        return attention(*(next(rest) if leaf is not None and leaf.requires_grad else leaf for leaf in leaves))

    out, pull = torch.func.vjp(of_differentiable, *(leaf.detach() for leaf in inputs))
    between()
    return out, pull(grad_out)


def by_vmap(attention: Attention, leaves: Leaves, grad_out: Tensor, between: Between) -> Result:
    """Differentiate every sequence of the batch separately, by torch.func.vmap() of vjp(). A mask has no gradient."""
    wants = [leaf is not None and leaf.requires_grad for leaf in leaves]
    if not any(wants):
        return plainly(attention, leaves, grad_out, between)

    def of_one(grad: Tensor, *tensors: Tensor | None) -> Result:
        def of_differentiable(*values: Tensor) -> Tensor:
            rest = iter(values)
            return attention(*(next(rest) if needs_grad else x for needs_grad, x in zip(wants, tensors, strict=True)))

        inputs = (x for needs_grad, x in zip(wants, tensors, strict=True) if needs_grad)
        out, pull = torch.func.vjp(of_differentiable, *inputs)
        between()
        return out, pull(grad)

    in_batch = [leaf is not None and len(leaf) == len(grad_out) for leaf in leaves]
    tensors = [
        x if x is None else x.detach() if is_batched else x.detach()[0]
        for is_batched, x in zip(in_batch, leaves, strict=True)
    ]
    in_dims = (0, *(0 if is_batched else None for is_batched in in_batch))
    return torch.func.vmap(of_one, in_dims=in_dims)(grad_out, *tensors)


@contextlib.contextmanager
def little_memory(tensors: CallTensors) -> Iterator[None]:
    """Limit the GPU memory of this process to a part of the memory that a call needs.

    The limit is at most twice the bytes of the operands, and depends on the seed of the call. The limit does not affect
    the free parts of blocks that the allocator has already reserved, so some calls succeed.
    """
    needed = 2 * sum(tensor.nbytes for tensor in (tensors.q, tensors.k, tensors.v, tensors.grad_out))
    torch.cuda.empty_cache()
    everything = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    limit = torch.cuda.memory_reserved() + random.Random(tensors.call.seed).randint(0, needed)
    torch.cuda.set_per_process_memory_fraction(limit / everything)
    try:
        yield
    except torch.OutOfMemoryError:  # the expected error; only a wrong result of a later call is a finding
        pass
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def by_causal_bias(attention: Attention, leaves: Leaves, grad_out: Tensor, between: Between) -> Result:
    """Pass the lower-right mask of torch.nn.attention.bias in place of a mask tensor."""
    from torch.nn.attention.bias import causal_lower_right  # imports all of torch._dynamo

    q, k, v, _ = leaves
    lower_right = causal_lower_right(q.shape[2], k.shape[2])
    return plainly(lambda *tensors: attention(*tensors, lower_right), (q, k, v), grad_out, between)


WAYS = {
    "": plainly,
    "checkpoint": checkpointed,
    "reentrant": checkpointed_reentrantly,
    "selective": checkpointed_selectively,
    "flop_counter": counted,
    "vjp": by_vjp,
    "vmap": by_vmap,
    "lower_right": by_causal_bias,
}
