"""Bool masks that programs change in place, in a graph or behind it: a backward has the one that its forward had."""

from __future__ import annotations

import pytest
import torch
from graphs import sdpa
from standin import Road
from test_masked_graphs import BATCH, HEADS, ROWS, check, mask_of, masked
from torch import Tensor
from torch._inductor import config as inductor_config

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition", "inductor"])
def test_an_input_that_the_graph_changes(road: Road, backend: str) -> None:
    """Behind the forward that read it, ahead of the backward that reads it again."""

    def after(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out = sdpa(q, k, v, mask)
        mask.logical_not_()
        return out

    def between(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out = sdpa(q, k, v, mask)
        mask[..., :20] = True
        return sdpa(out, k, v, mask)

    for function in (after, between):
        for mask in (mask_of(road, ROWS, ROWS), mask_of(road, BATCH, 1, ROWS, ROWS)):
            torch._dynamo.reset()
            compiled = torch.compile(function, fullgraph=True, backend=backend)
            with inductor_config.patch(force_disable_caches=True):
                check(road, lambda *args, function=function, mask=mask: function(*args, mask.clone()),
                      lambda *args, compiled=compiled, mask=mask: compiled(*args, mask.clone()))  # fmt: skip


def test_what_a_graph_keeps_of_a_broadcast_mask(road: Road) -> None:
    mask = mask_of(road, BATCH, 1, 1, ROWS).expand(BATCH, HEADS, ROWS, ROWS)
    kept = torch.ops.torch_flashplug.kept_mask(mask)
    assert torch.equal(kept, mask) and kept.untyped_storage().nbytes() == BATCH * ROWS
    assert kept.data_ptr() != mask.data_ptr() and kept.stride()[1:3] == (0, 0)


def test_a_mask_changed_before_the_backward(road: Road) -> None:
    """No gradients of another mask."""
    found = []
    for compiled in (masked, torch.compile(masked, fullgraph=True, backend="aot_eager")):
        inputs, mask = road.qkv(grad=True), mask_of(road, ROWS, ROWS)
        out = compiled(*inputs, mask)
        mask.logical_not_()
        found.append(torch.autograd.grad(out.float().square().sum(), inputs))
    torch.testing.assert_close(found[1], found[0], atol=6e-2, rtol=6e-2)
