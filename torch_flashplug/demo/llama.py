"""Llama over bytes in plain torch, in a form that torch can distribute over several GPUs.

q, k and v have separate weights. Positions are arguments, because a rank may hold any rows of a text. All attention is
F.scaled_dot_product_attention. This module does not depend on torch_flashplug.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .model import BYTES, Shape, rotate

COLUMNS, ROWS = (
    ("q", "k", "v", "gate", "up"),
    ("out", "down"),
)  # names of weights, by the dim that tensor parallelism divides


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, width = shape, shape.width
        sizes = {"q": (width, width), "out": (width, width), "down": (3 * width, width)}
        sizes |= dict.fromkeys(("k", "v"), (width, shape.kv_heads * shape.head_dim))
        sizes |= dict.fromkeys(("gate", "up"), (width, 3 * width))
        for name, (in_features, out_features) in sizes.items():
            self.add_module(name, nn.Linear(in_features, out_features, bias=False))
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        x = x + self.attend(self.norm_attention(x), positions)
        normed = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def attend(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Return the attention output for x (B, S, width).

        If positions is None, q and k are not rotated, because a rotation cannot mix DTensors with plain tensors.
        """
        heads = (linear(x).unflatten(-1, (-1, self.shape.head_dim)) for linear in (self.q, self.k, self.v))
        q, k, v = (x.transpose(1, 2) for x in heads)
        if positions is not None:
            q, k = rotate(q, positions), rotate(k, positions)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(-2))


class ByteLlama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits (B, S, 256) of the byte after each token.

        Args:
            tokens: (B, S).
            positions: (S,), the positions of the tokens.
        """
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))


def build(shape: Shape, device: str, seed: int = 0) -> ByteLlama:
    """Return a model in fp32, with the same weights on every rank."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = ByteLlama(shape)
    model = model.to_empty(device=device)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
            else:
                spread = 1.0 if name.startswith("embed") else weight.shape[-1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    return model


def tensor_parallel(block: Block, mesh: DeviceMesh, local: bool = True) -> None:
    """Divide the heads and the MLP of a block among the ranks.

    Args:
        block: the block to divide.
        mesh: the ranks.
        local: whether attention receives plain tensors instead of DTensors.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {name: ColwiseParallel(use_local_output=local) for name in COLUMNS}
    plan |= {name: RowwiseParallel(input_layouts=Shard(-1)) for name in ROWS}
    parallelize_module(block, mesh, plan)


def fully_shard(model: ByteLlama, mesh: DeviceMesh) -> None:
    """Shard the model with FSDP2. The products are computed in bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        shard(block, mesh=mesh, mp_policy=policy)
    shard(model, mesh=mesh, mp_policy=policy)
