"""Stack of decoder layers with random weights, in plain torch modules: the model of the suite `models`.

A layer is that of Llama: RMSNorm, rotary embedding, attention with grouped heads by F.scaled_dot_product_attention, and
a SwiGLU MLP. Embeddings of tokens and the language model head are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WEIGHT_STD = 0.02  # standard deviation of the weights, as in the training recipe of Llama


@dataclass(frozen=True, slots=True)
class StackShape:
    """Sizes of a stack of decoder layers."""

    model: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float = 500000.0
    norm_eps: float = 1e-5


LLAMA_3_8B = StackShape("Llama-3-8B", 4, 4096, 32, 8, 128, 14336)
SMALL = StackShape("small", 2, 128, 4, 2, 32, 256)  # for CPUs


@dataclass(frozen=True, slots=True)
class KvCache:
    """Preallocated keys and values (B, Hkv, S, D), one pair for each layer."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def filled(cls, shape: StackShape, batch: int, length: int, like: Tensor) -> KvCache:
        """Return a cache of N(0, 1) values, with the device and dtype of a tensor."""
        generator = torch.Generator(like.device).manual_seed(1)
        sizes = batch, shape.kv_heads, length, shape.head_dim

        def draw() -> Tensor:
            return torch.randn(sizes, device=like.device, dtype=like.dtype, generator=generator)

        return cls(tuple((draw(), draw()) for _ in range(shape.layers)))

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[2]

    def float(self) -> KvCache:
        """Return a copy in fp32."""
        return KvCache(tuple((k.float(), v.float()) for k, v in self.layers))


def _rotary_table(shape: StackShape, length: int) -> Tensor:
    """Return the cosines and sines (2, length, head_dim) of the rotary embedding."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-exponents)
    return torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2)


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * table[0] + torch.cat((-second, first), dim=-1) * table[1]


class Attention(nn.Module):
    """Causal self-attention with grouped heads; with a cache, the tokens are the last entries of the cache."""

    def __init__(self, shape: StackShape) -> None:
        super().__init__()
        self.shape = shape
        query_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.query = nn.Linear(shape.hidden, query_width, bias=False)
        self.key = nn.Linear(shape.hidden, kv_width, bias=False)
        self.value = nn.Linear(shape.hidden, kv_width, bias=False)
        self.output = nn.Linear(query_width, shape.hidden, bias=False)
        self.repeats_kv = False  # whether KV heads are copied for each query head; stock needs copies for fp32

    def forward(self, x: Tensor, table: Tensor, cached: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the output (B, S, hidden) for x (B, S, hidden)."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
                   for layer in (self.query, self.key, self.value))  # fmt: skip
        q, k = _rotate(q, table), _rotate(k, table)
        if cached is not None:
            tokens = x.shape[1]
            for cache, new in zip(cached, (k, v), strict=True):
                cache[:, :, -tokens:] = new
            k, v = cached
        if self.repeats_kv:
            k, v = (t.repeat_interleave(self.shape.heads // self.shape.kv_heads, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=cached is None, enable_gqa=not self.repeats_kv)
        return self.output(out.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """Attention and a SwiGLU MLP, each after RMSNorm and with a residual connection."""

    def __init__(self, shape: StackShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor, table: Tensor, cached: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the output (B, S, hidden) for x (B, S, hidden)."""
        x = x + self.attention(self.attention_norm(x), table, cached)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class DecoderStack(nn.Module):
    """Decoder layers, and a last RMSNorm."""

    def __init__(self, shape: StackShape, max_length: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.register_buffer("rotary_table", _rotary_table(shape, max_length))

    def forward(self, x: Tensor, cache: KvCache | None = None) -> Tensor:
        """Return the hidden states (B, S, hidden) for embeddings x (B, S, hidden).

        Args:
            x: embeddings of the tokens.
            cache: keys and values. A single token must be passed, and becomes the last entry of the cache.
        """
        if cache is not None and x.shape[1] != 1:
            raise ValueError(
                f"DecoderStack: x must have one token if a cache is passed, but got {x.shape[1]}. Pass one token."
            )
        first = 0 if cache is None else cache.length - 1
        table = self.rotary_table[:, first : first + x.shape[1]]
        for idx, layer in enumerate(self.layers):
            x = layer(x, table, None if cache is None else cache.layers[idx])
        return self.norm(x)


def random_stack(shape: StackShape, max_length: int, device: str, dtype: torch.dtype = torch.bfloat16) -> DecoderStack:
    """Return a stack with weights of a fixed seed."""
    with torch.device(device):
        stack = DecoderStack(shape, max_length).to(dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in stack.parameters():
            if parameter.dim() == 2:  # the weights of norms stay 1
                parameter.normal_(0.0, WEIGHT_STD, generator=generator)
    return stack
