"""Steps of a server for tests of adapters: sequences, their pages, and the expected outputs in fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

HQ, HKV, D = 4, 2, 16
PAGE_ROWS = 16
NUM_PAGES = 40


@dataclass
class Layer:
    """Settings of an attention layer."""

    window: int | None = None  # keys that a query sees, with its own key
    softcap: float = 0.0
    sinks: Tensor | None = None
    scale: float = 0.3


@dataclass
class Sequence:
    """Sequence of a server: all its rows, the pages, and the number of tokens in the cache."""

    q: Tensor  # (length, HQ, D)
    k: Tensor  # (length, HKV, D)
    v: Tensor
    pages: list[int]
    used: int = 0

    def pool_rows(self, first: int, end: int) -> list[int]:
        return [self.pages[key // PAGE_ROWS] * PAGE_ROWS + key % PAGE_ROWS for key in range(first, end)]

    def expected(self, first: int, end: int, layer: Layer) -> Tensor:
        """Return the outputs of rows `first` to `end` in fp64."""
        q, k, v = (x.double() for x in (self.q[first:end], self.k[:end], self.v[:end]))
        k, v = (x.repeat_interleave(HQ // HKV, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
        if layer.softcap:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        distance = torch.arange(first, end).unsqueeze(1) - torch.arange(end)
        hidden = distance < 0 if layer.window is None else (distance < 0) | (distance >= layer.window)
        scores = scores.masked_fill(hidden, -math.inf)
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks.double().view(-1, 1, 1).expand(-1, end - first, 1)), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :end], v)


@dataclass
class Step:
    """Rows of the sequences of a step, one after the other."""

    sequences: list[Sequence]
    counts: list[int]
    first_rows: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.first_rows = [sequence.used for sequence in self.sequences]
        for sequence, count in zip(self.sequences, self.counts, strict=True):
            sequence.used += count

    def _ranges(self) -> list[tuple[Sequence, int, int]]:
        rows = zip(self.sequences, self.first_rows, self.counts, strict=True)
        return [(sequence, first, first + count) for sequence, first, count in rows]

    def rows(self, name: str) -> Tensor:
        return torch.cat([getattr(sequence, name)[first:end] for sequence, first, end in self._ranges()])

    def pool_rows(self) -> list[int]:
        return [pool_row for sequence, first, end in self._ranges() for pool_row in sequence.pool_rows(first, end)]

    def kv_lengths(self) -> list[int]:
        return [end for _, _, end in self._ranges()]

    def expected(self, layer: Layer) -> Tensor:
        return torch.cat([sequence.expected(first, end, layer) for sequence, first, end in self._ranges()])


def make_sequences(lengths: tuple[int, ...], seed: int = 0) -> list[Sequence]:
    """Return random sequences whose pages are in random order."""
    draw = torch.Generator().manual_seed(seed)
    free = torch.randperm(NUM_PAGES, generator=draw).tolist()
    sequences = []
    for length in lengths:
        rows = [torch.randn(length, heads, D, generator=draw) for heads in (HQ, HKV, HKV)]
        sequences.append(Sequence(*rows, pages=[free.pop() for _ in range(-(-length // PAGE_ROWS))]))
    return sequences


def block_table(sequences: list[Sequence], width: int, unused: int = 2**31 - 1) -> Tensor:
    """Return the block table (B, width) int32 with invalid numbers after the pages of a sequence."""
    rows = [sequence.pages[:width] for sequence in sequences]
    return torch.tensor([row + [unused] * (width - len(row)) for row in rows], dtype=torch.int32).view(-1, width)


def make_steps(sequences: list[Sequence]) -> list[Step]:
    """Return steps of chunked prefill, of decode and prefill together, and of decode alone."""
    first, *others = sequences
    return [
        Step([first], [first.q.shape[0] - 3]),
        Step([first, *others], [1, *(min(len(x.q) - 1, 9) for x in others)]),
        Step([first, *others], [1, *(len(x.q) - x.used - 1 for x in others)]),
        Step([*others, first], [1] * len(sequences)),
    ]


LAYERS = {
    "causal": Layer(),
    "window": Layer(window=7),
    "softcap": Layer(softcap=2.0),
    "sinks": Layer(sinks=torch.tensor([-2.0, 0.0, 1.5, 4.0])),
    "all": Layer(window=20, softcap=3.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), scale=0.1),
}
