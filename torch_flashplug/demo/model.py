"""Byte-level GPT in plain torch.

All attention is F.scaled_dot_product_attention. This module does not depend on torch_flashplug. Inference uses a cache
(prefill, then decode), and training uses none.

The weights are random, from a fixed seed. So the demo shows arithmetic and speed, not language.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(slots=True)
class Cache:
    """Keys and values of every layer, each (1, Hkv, capacity, D); the first `length` positions are filled."""

    keys: list[Tensor]
    values: list[Tensor]
    length: int = 0

    @classmethod
    def empty(cls, shape: Shape, capacity: int, like: Tensor) -> Cache:
        def blank() -> Tensor:
            return like.new_zeros(1, shape.kv_heads, capacity, shape.head_dim)

        return cls([blank() for _ in range(shape.layers)], [blank() for _ in range(shape.layers)])

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (1, Hkv, S, D) to the cache of a layer, and return all keys and values of the layer.

        The caller must increase `length` after all layers are extended.
        """
        stop = self.length + k.shape[-2]
        self.keys[layer][:, :, self.length : stop] = k
        self.values[layer][:, :, self.length : stop] = v
        return self.keys[layer][:, :, :stop], self.values[layer][:, :, :stop]


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary position embedding to x (..., D) at positions, which broadcast to the dims before D."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = positions.unsqueeze(-1) * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    """Transformer block: pre-norm attention with grouped KV heads, then a two-layer MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_width = shape.kv_heads * shape.head_dim
        self.norm_attention, self.norm_mlp = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, shape.width + 2 * kv_width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, layer: int, cache: Cache | None) -> Tensor:
        x = x + self._attend(self.norm_attention(x), layer, cache)
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))

    def _attend(self, x: Tensor, layer: int, cache: Cache | None) -> Tensor:
        shape, rows, start = self.shape, x.shape[1], 0 if cache is None else cache.length
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        q, k, v = self.qkv(x).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2).split(heads, dim=1)
        positions = torch.arange(start, start + rows, device=x.device)
        q, k = rotate(q, positions), rotate(k, positions)
        if cache is not None:
            k, v = cache.extend(layer, k, v)
        grouped = shape.heads != shape.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=rows > 1, enable_gqa=grouped)
        return self.out(out.transpose(1, 2).flatten(-2))


class ByteGPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(BYTES, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the logits (B, S, 256) of the byte after each of `tokens` (B, S).

        With a cache, B is 1. The first call receives the prompt and an empty cache. Each later call receives one byte.
        The result is then the logits (1, 1, 256) of the byte after the last token.
        """
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, cache)
        if cache is not None:
            cache.length += tokens.shape[1]
            x = x[:, -1:]
        return self.head(self.norm(x))


def build(shape: Shape, device: str, dtype: torch.dtype, seed: int = 0) -> ByteGPT:
    """Return a model with random weights from `seed`, which are the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = ByteGPT(shape)
    model = model.to_empty(device=device).to(dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
                continue
            spread = 1.0 if name.startswith("embed") else weight.shape[-1] ** -0.5
            # Larger weights of queries and keys than usual, because attention with random weights would otherwise be
            # nearly uniform.
            spread *= 3.0 if name.endswith("qkv.weight") else 1.0
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    return model


def prefill(model: ByteGPT, prompt: Tensor, capacity: int) -> tuple[Tensor, Cache]:
    """Run the prompt (1, S) through the model once; return the logits after the prompt and the filled cache."""
    cache = Cache.empty(model.shape, capacity, model.embed.weight)
    return model(prompt, cache)[:, -1], cache


def decode(model: ByteGPT, logits: Tensor, cache: Cache, steps: int) -> tuple[Tensor, Tensor]:
    """Return `steps` greedily chosen bytes (steps,), and the logits (steps, 256) of each choice."""
    chosen, logits_of_choices = [], []
    for _ in range(steps):
        token = logits.argmax(-1)
        chosen.append(token)
        logits_of_choices.append(logits)
        logits = model(token[:, None], cache)[:, -1]
    return torch.cat(chosen), torch.cat(logits_of_choices)


def next_byte_loss(model: ByteGPT, text: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats, of each byte of `text` (B, S + 1) given all earlier bytes.

    The first byte of each row is not predicted.
    """
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
