"""Tensors of torch.distributed: what decides itself what it does with attention gets stock's ops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from standin import Road
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_flashplug


@pytest.fixture
def mesh(device: str) -> Iterator[DeviceMesh]:
    """One rank is enough: what is asked is which ops a DTensor meets."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(device, (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("grad", [False, True])
def test_heads_sharded_as_dtensor(any_road: Road, mesh: DeviceMesh, grad: bool) -> None:
    plain = any_road.qkv(grad=grad)
    sharded = [distribute_tensor(tensor.detach(), mesh, [Shard(1)]).requires_grad_(grad) for tensor in plain]
    assert "subclass" in torch_flashplug.explain(*sharded).reasons["fa3"]
    if any_road.device == "cpu":  # where DTensor does not know stock's op: the one it is refused for is stock's
        with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention_for_cpu"):
            F.scaled_dot_product_attention(*sharded, is_causal=True)
        return
    out = F.scaled_dot_product_attention(*sharded, is_causal=True)
    assert any_road.took().get("ours_fwd", 0) == 0
    want = F.scaled_dot_product_attention(*plain, is_causal=True)
    torch.testing.assert_close(out.full_tensor(), want, atol=2e-2, rtol=2e-2)
    if grad:
        out.full_tensor().float().square().sum().backward()
        want.float().square().sum().backward()
        for one, other in zip(sharded, plain):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, atol=6e-2, rtol=6e-2)
