"""The demo's serving: prompts of different lengths at once, read and then continued byte by byte. Padded to the
longest, as F.scaled_dot_product_attention takes them, beside on end and from a cache in pages, as
torch_flashplug.attention does: the same bytes, and how many a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import torch_flashplug

from . import model as gpt
from .scopes import plugin_off
from .text import as_tokens, read_text, repeated

ROWS = 64  # of a page
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q, k, v (..., heads, D) -> (..., heads, D)


@dataclass(frozen=True, slots=True)
class Load:
    """What is served: so many prompts of lengths between these, each continued by `steps` bytes."""

    shape: gpt.Shape
    prompts: int
    shortest: int
    longest: int
    steps: int

    def lengths(self) -> list[int]:
        """Few long ones and many short ones, in some order."""
        draw = torch.rand(self.prompts, generator=torch.Generator().manual_seed(0)) ** 3
        return (self.shortest + draw * (self.longest - self.shortest)).int().tolist()


GPU_LOAD = Load(gpt.Shape(layers=4, heads=16, kv_heads=4, head_dim=128), 64, 64, 4096, 64)
CPU_LOAD = Load(gpt.Shape(layers=2, heads=4, kv_heads=2, head_dim=32), 6, 5, 120, 8)


def _states(model: gpt.ByteGPT, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """The model's layers, with attention from outside: (..., width) of tokens (...)."""
    shape, x = model.shape, model.embed(tokens)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    for layer, block in enumerate(model.blocks):
        q, k, v = block.qkv(block.norm_attention(x)).unflatten(-1, (-1, shape.head_dim)).split(heads, dim=-2)
        of_heads = positions.unsqueeze(-1)
        out = attend(layer, gpt.rotate(q, of_heads), gpt.rotate(k, of_heads), v)
        x = x + block.out(out.flatten(-2))
        x = x + block.down(F.gelu(block.up(block.norm_mlp(x))))
    return x


def _next(model: gpt.ByteGPT, x: Tensor) -> Tensor:
    return model.head(model.norm(x)).argmax(-1)


class Padded:
    """All prompts as long as the longest, behind a mask; a cache with room for that of each."""

    def __init__(self, model: gpt.ByteGPT, prompts: list[Tensor], steps: int):
        self.model, self.device = model, prompts[0].device
        self.used = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self.tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        room = (len(prompts), self.tokens.shape[1] + steps, model.shape.kv_heads, model.shape.head_dim)
        self.caches = [[model.embed.weight.new_zeros(room) for _ in range(2)] for _ in model.blocks]

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        turned = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*turned, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    def read(self) -> Tensor:
        length = self.tokens.shape[1]
        place = torch.arange(length, device=self.device)
        mask = (place.unsqueeze(1) >= place) & (place < self.used.view(-1, 1, 1, 1))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for cache, x in zip(self.caches[layer], (k, v), strict=True):
                cache[:, :length] = x
            return self._sdpa(q, k, v, mask)

        x = _states(self.model, self.tokens, place.expand_as(self.tokens), attend)
        return _next(self.model, x[torch.arange(len(x), device=self.device), self.used - 1])

    def step(self, tokens: Tensor) -> Tensor:
        batch, place = torch.arange(len(tokens), device=self.device), self.used
        mask = (torch.arange(self.caches[0][0].shape[1], device=self.device) <= place.unsqueeze(1))[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for cache, x in zip(self.caches[layer], (k, v), strict=True):
                cache[batch, place] = x[:, 0]
            return self._sdpa(q, *self.caches[layer], mask)

        x = _states(self.model, tokens.unsqueeze(1), place.unsqueeze(1), attend)
        self.used = self.used + 1
        return _next(self.model, x[:, 0])


class Paged:
    """Prompts on end, then from pages: no row is there for nothing."""

    def __init__(self, model: gpt.ByteGPT, prompts: list[Tensor], steps: int):
        self.model, self.device = model, prompts[0].device
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        self.tokens, self.lengths = torch.cat(prompts), lengths.to(self.device)
        self.starts = F.pad(lengths.cumsum(0), (1, 0)).int().to(self.device)
        self.used = torch.zeros(len(prompts), dtype=torch.int32, device=self.device)
        pages = -(-(lengths + steps) // ROWS)
        of_all = torch.randperm(int(pages.sum()), generator=torch.Generator().manual_seed(0)).int()
        self.table = torch.zeros(len(prompts), int(pages.max()), dtype=torch.int32)
        for i, mine in enumerate(of_all.split(pages.tolist())):
            self.table[i, : len(mine)] = mine
        self.table = self.table.to(self.device)
        room = (len(of_all), ROWS, model.shape.kv_heads, model.shape.head_dim)
        self.pools = [[model.embed.weight.new_zeros(room) for _ in range(2)] for _ in model.blocks]

    def read(self) -> Tensor:
        place = torch.arange(len(self.tokens), device=self.device)
        of = torch.repeat_interleave(torch.arange(len(self.lengths), device=self.device), self.lengths)
        place = place - self.starts[of]
        page, row = self.table[of, place // ROWS], place % ROWS

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for pool, x in zip(self.pools[layer], (k, v), strict=True):
                pool[page, row] = x
            return torch_flashplug.attention(q, k, v, causal=True, cu_seqlens_q=self.starts)

        x = _states(self.model, self.tokens, place, attend)
        self.used = self.lengths.int()
        return _next(self.model, x[self.starts[1:] - 1])

    def step(self, tokens: Tensor) -> Tensor:
        place = self.used.long()
        page, row = self.table.gather(1, (place // ROWS).unsqueeze(1)).squeeze(1), place % ROWS
        self.used = self.used + 1
        pages = {"block_table": self.table, "seqused_k": self.used}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for pool, x in zip(self.pools[layer], (k, v), strict=True):
                pool[page, row] = x[:, 0]
            return torch_flashplug.attention(q, *self.pools[layer], causal=True, **pages)

        x = _states(self.model, tokens.unsqueeze(1), place.unsqueeze(1), attend)
        return _next(self.model, x[:, 0])


SERVERS: dict[str, tuple[type[Padded | Paged], Callable[[], AbstractContextManager]]] = {
    "padded, F.sdpa without the plugin": (Padded, plugin_off),
    "padded, F.sdpa": (Padded, nullcontext),
    "on end and in pages, attention()": (Paged, nullcontext),
}


@torch.inference_mode()
def serve(
    kind: type[Padded | Paged], model: gpt.ByteGPT, prompts: list[Tensor], steps: int
) -> tuple[Tensor, list[float]]:
    """The bytes (prompts, steps) that come next, and the seconds of reading and of writing."""
    wait = torch.cuda.synchronize if prompts[0].is_cuda else lambda: None
    server, times, written = kind(model, prompts, steps), [], []
    for read in (True, False):
        wait()
        began = time.perf_counter()
        if read:
            written.append(server.read())
        else:
            for _ in range(steps - 1):
                written.append(server.step(written[-1]))
        wait()
        times.append(time.perf_counter() - began)
    return torch.stack(written, 1), times


def run(file: str | None = None, *, console: Console | None = None) -> None:
    """Serves, prints."""
    console = console or Console(width=max(Console().width, 120))
    on_gpu = torch.cuda.is_available()
    device, load = ("cuda", GPU_LOAD) if on_gpu else ("cpu", CPU_LOAD)
    model = gpt.build(load.shape, device, torch.bfloat16 if on_gpu else torch.float32)
    content, origin = read_text(file)
    lengths = load.lengths()
    text = as_tokens(repeated(content, sum(lengths))).to(device)
    prompts = list(text.split(lengths))
    title = f"{load.prompts} prompts of {min(lengths)} to {max(lengths)} bytes of {origin}, {load.steps} bytes each"
    table = Table(title=title, min_width=len(title))
    rates = ("read, bytes/s", "written, bytes/s") if on_gpu else ()
    for column in ("served", *rates, "equal bytes"):
        table.add_column(column, justify="left" if column == "served" else "right")
    first = None
    for name, (kind, scope) in SERVERS.items():
        with scope():
            serve(kind, model, prompts, 2)  # what is compiled, loaded or chosen once
            written, (reading, writing) = serve(kind, model, prompts, load.steps)
        first = written if first is None else first
        same = int((written == first).cumprod(1).sum())
        speeds = (sum(lengths) / reading, load.prompts * (load.steps - 1) / writing) if on_gpu else ()
        table.add_row(name, *(f"{speed:,.0f}" for speed in speeds), f"{same} of {written.numel()}")
    console.print(f"[bold]torch_flashplug {torch_flashplug.__version__}[/] demo, serving, torch {torch.__version__}")
    if not on_gpu:
        console.print("no GPU here: torch's CPU attention and plain math serve every call, and nothing is timed")
    console.print(table)
