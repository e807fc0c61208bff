"""Bool masks changed in place, in a graph or after a graph: the backward must use the mask of the forward."""

from __future__ import annotations

import pytest
import torch
from device_backend import DeviceBackend
from test_masked_graphs import BATCH, HEADS, ROWS, check, make_mask, masked
from torch import Tensor
from torch._inductor import config as inductor_config
from traced_graphs import sdpa

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition", "inductor"])
def test_mask_input_changed_in_the_graph(device_backend: DeviceBackend, backend: str) -> None:
    """Change the mask after the forward reads the mask, and before the backward reads the mask again."""

    def after(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out = sdpa(q, k, v, mask)
        mask.logical_not_()
        return out

    def between(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out = sdpa(q, k, v, mask)
        mask[..., :20] = True
        return sdpa(out, k, v, mask)

    for function in (after, between):
        for mask in (make_mask(device_backend, ROWS, ROWS), make_mask(device_backend, BATCH, 1, ROWS, ROWS)):
            torch._dynamo.reset()
            compiled = torch.compile(function, fullgraph=True, backend=backend)
            with inductor_config.patch(force_disable_caches=True):
                check(device_backend, lambda *args, function=function, mask=mask: function(*args, mask.clone()),
                      lambda *args, compiled=compiled, mask=mask: compiled(*args, mask.clone()))  # fmt: skip


def test_kept_copy_of_a_broadcast_mask_is_compact(device_backend: DeviceBackend) -> None:
    mask = make_mask(device_backend, BATCH, 1, 1, ROWS).expand(BATCH, HEADS, ROWS, ROWS)
    kept = torch.ops.torch_flashplug.kept_mask(mask)
    assert torch.equal(kept, mask) and kept.untyped_storage().nbytes() == BATCH * ROWS
    assert kept.data_ptr() != mask.data_ptr() and kept.stride()[1:3] == (0, 0)


def test_a_mask_changed_before_the_backward(device_backend: DeviceBackend) -> None:
    """Gradients must not use the changed mask."""
    grads = []
    for compiled in (masked, torch.compile(masked, fullgraph=True, backend="aot_eager")):
        inputs, mask = device_backend.qkv(grad=True), make_mask(device_backend, ROWS, ROWS)
        out = compiled(*inputs, mask)
        mask.logical_not_()
        grads.append(torch.autograd.grad(out.float().square().sum(), inputs))
    torch.testing.assert_close(grads[1], grads[0], atol=6e-2, rtol=6e-2)
