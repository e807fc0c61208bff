"""Left-padded training calls under dispatch modes, transforms and selective checkpoints: every gradient is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from device_backend import DeviceBackend
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

Gradients = tuple[Tensor, Tensor, Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


def under_flop_counter(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad: Tensor) -> Gradients:
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    with FlopCounterMode(display=False):
        attend(*leaves, mask).backward(grad)
    return tuple(leaf.grad for leaf in leaves)


def under_selective_checkpoint(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad: Tensor) -> Gradients:
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]

    def policy(_ctx: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
        is_attention = "overrideable" in str(op)
        return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE

    out = checkpoint(
        lambda *operands: 1 * attend(*operands, mask),
        *leaves,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    out.backward(grad)
    return tuple(leaf.grad for leaf in leaves)


def loss(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad: Tensor) -> Tensor:
    return (attend(q, k, v, mask) * grad).float().sum()


def under_grad(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad: Tensor) -> Gradients:
    return torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v, mask, grad)


def under_vmap_of_grad(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad: Tensor) -> Gradients:
    pairs = [torch.stack([tensor, tensor.flip(0)]) for tensor in (q, k, v, mask, grad)]
    mapped = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*pairs)
    return tuple(gradient[0] for gradient in mapped)


TRANSFORMS: dict[str, Callable[..., Gradients]] = {
    "flop counter": under_flop_counter,
    "selective checkpoint": under_selective_checkpoint,
    "grad": under_grad,
    "vmap of grad": under_vmap_of_grad,
}


def reference_gradients(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad: Tensor) -> Gradients:
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    scores = (leaves[0] @ leaves[1].mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    (scores.softmax(-1).nan_to_num() @ leaves[2]).backward(grad.double())
    return tuple(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("length", [64, 128, 192])
def test_left_padded_gradients_run_on_kernels(device_backend: DeviceBackend, transform: str, length: int) -> None:
    """Stock gives NaN in dQ if the last block of 128 rows holds 64 rows."""
    q, k, v, grad = (
        torch.randn(2, 4, length, 64, device=device_backend.device, dtype=torch.bfloat16).requires_grad_(False)
        for _ in range(4)
    )
    rows = torch.arange(length, device=device_backend.device)
    padded = torch.tensor([length // 3, 5], device=device_backend.device).view(2, 1, 1, 1)
    mask = (rows >= padded) & (rows <= rows[:, None])
    device_backend.pop_path_counts()

    gradients = TRANSFORMS[transform](q, k, v, mask, grad)

    assert device_backend.pop_path_counts()["ours_fwd"] >= 1
    for gradient, expected in zip(gradients, reference_gradients(q, k, v, mask, grad)):
        error = (gradient.double() - expected).norm() / expected.norm()
        assert error < 1e-2
