"""num_splits=1 and fixed_split_size: results and gradients of a sequence are the same bits alone and in any batch, by
kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from torch_flashplug.dispatch import bindings
from torch_flashplug.ops.quantize_reference import in_int8
from torch_flashplug.testing import assert_bitwise_equal

OPS = torch.ops.torch_flashplug
HQ, HKV = 2, 1
CAUSAL, EVERYTHING = (-1, 0, True), (-1, -1, True)


def drawn(*sizes: int, seed: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).bfloat16()


def by_kernels(call: Callable[[], tuple[Tensor, ...]], directions: int = 1) -> tuple[Tensor, ...]:
    bindings.counters(reset=True)
    found = call()
    taken = bindings.counters(reset=True)
    assert taken["ours_fwd"] == 1 and taken["ours_bwd"] == directions - 1 and not taken["math_fwd"] + taken["math_bwd"]
    return tuple(x.cpu() for x in found)


def both(operands: list[Tensor], grads: list[Tensor], lengths: tuple[Tensor | None, ...], window: tuple) -> tuple:
    """Output, LSE, and gradients of query, key and value."""
    out, lse = OPS.attention_fwd(*operands, None, *lengths, None, *window, 0.0, None, 1)
    kept = (*grads, *operands, out, lse, *lengths)
    return out, lse, *OPS.attention_bwd(*kept, *window, 0.0, None, False, 1)[:3]


# ---- on end ----

MINE = 150
OTHERS = {"alone": ([], []), "short": ([4] * 9, [3] * 30), "long": ([], [400]), "none": ([0, 0], [0]),
          "many": ([1] * 70, [65, 64, 63])}  # fmt: skip


def of_end(before: list[int], behind: list[int], device: str, D: int, window: tuple) -> list[Tensor]:
    """What sequences of so many rows leave of the one in their middle."""
    start, rows = sum(before), MINE + sum(before) + sum(behind)
    heads = (HQ, HKV, HKV, HQ)
    whole = [drawn(1, of, rows, D, seed=7 + i) for i, of in enumerate(heads)]
    for i, (x, of) in enumerate(zip(whole, heads, strict=True)):
        x[:, :, start : start + MINE] = drawn(1, of, MINE, D, seed=100 + i)
    grad_lse = torch.zeros(1, HQ, rows)
    cu = torch.tensor([0, *before, MINE, *behind]).cumsum(0).int()
    *operands, grad_out, grad_lse, cu = (x.to(device) for x in (*whole, grad_lse, cu))
    found = by_kernels(lambda: both(operands, [grad_out, grad_lse], (cu, cu), window), 2)
    return [x[:, :, start : start + MINE] for x in found]


@pytest.mark.parametrize("window", [CAUSAL, (40, 3, True)], ids=str)
@pytest.mark.parametrize("D", [64, 128])
def test_sequences_on_end(kernels_on: str, D: int, window: tuple) -> None:
    found = {name: of_end(*others, kernels_on, D, window) for name, others in OTHERS.items()}
    for name, results in found.items():
        for what, got, alone in zip(("out", "lse", "dq", "dk", "dv"), results, found["alone"], strict=True):
            assert_bitwise_equal(f"{name} {what}", got, alone)


@pytest.mark.parametrize("window", [CAUSAL, EVERYTHING, (700, 0, True)], ids=str)
def test_fewer_queries_than_keys_on_end(kernels_on: str, window: tuple) -> None:
    """A tile has rows behind the last one, which see other keys than any row does."""
    found, own = [], [drawn(1, of, n, 64, seed=i) for i, (of, n) in enumerate(((HQ, 80), (HKV, 400), (HKV, 400)))]
    for more in ([], [(5, 7)], [(200, 3000)]):
        rest = [drawn(1, x.shape[1], sum(pair[min(i, 1)] for pair in more), 64, seed=9 + i) for i, x in enumerate(own)]
        operands = [torch.cat(pair, 2).to(kernels_on) for pair in zip(own, rest, strict=True)]
        cu = [torch.tensor([0, *n]).cumsum(0).int().to(kernels_on) for n in zip((80, 400), *more, strict=True)]
        results = by_kernels(lambda: OPS.attention_fwd(*operands, None, *cu, None, *window, 0.0, None, 1))  # noqa: B023
        found.append([x[:, :, :80] for x in results])
    assert_same(found)


# ---- batches ----


@pytest.mark.parametrize("rows", [70, 200])
def test_batches(kernels_on: str, rows: int) -> None:
    found = []
    for B in (1, 2, 5):
        operands = [drawn(B, of, rows, 64, seed=i) for i, of in enumerate((HQ, HKV, HKV, HQ))]
        for i, x in enumerate(operands):
            x[B // 2] = drawn(x.shape[1], rows, 64, seed=50 + i)
        *operands, grad_out = (x.to(kernels_on) for x in operands)
        grads = [grad_out, None]
        results = by_kernels(lambda: both(operands, grads, (None, None), CAUSAL), 2)  # noqa: B023
        found.append([x[B // 2] for x in results])
    for results in found[1:]:
        for what, got, alone in zip(("out", "lse", "dq", "dk", "dv"), results, found[0], strict=True):
            assert_bitwise_equal(what, got, alone)


# ---- pages ----


@dataclass(frozen=True)
class Asked:
    """Of a call of pages."""

    Sq: int = 8
    window: tuple = CAUSAL
    eight: bool = False
    softcap: float = 0.0
    sinks: Tensor | None = None


def beside_others(
    mine: int, batches: list[tuple[list[int], int]], asked: Asked, device: str, **splits: int
) -> list[tuple[Tensor, ...]]:  # fmt: skip
    """What a sequence of so many keys gets in batches of these lengths and widths of tables, its pages elsewhere."""
    found, pages = [], -(-mine // 16)
    for used, width in batches:
        place, B = used.index(mine), len(used)
        order = torch.randperm(B * width, generator=torch.Generator().manual_seed(B + width)).view(B, width).int()
        pools = [drawn(B * width, 16, 64, seed=90 + i).unsqueeze(1) for i in range(2)]
        q = drawn(B, HQ, asked.Sq, 64, seed=3)
        q[place] = drawn(HQ, asked.Sq, 64, seed=33)
        for i, pool in enumerate(pools):
            pool[order[place, :pages].long()] = drawn(pages, 1, 16, 64, seed=60 + i)
        scales = [None, None]
        if asked.eight:
            pools, scales = map(list, zip(*(in_int8(x.float()) for x in pools), strict=True))
        given = (q, *pools, order, torch.tensor(used).int(), *scales, asked.sinks)
        given = [None if x is None else x.to(device) for x in given]
        settings = (*asked.window, asked.softcap, None)
        out, lse = by_kernels(lambda: OPS.paged_fwd(*given, *settings, **splits))  # noqa: B023
        found.append((out[place], lse[place]))
    return found


def assert_same(found: list[tuple[Tensor, ...]]) -> None:
    for results in found[1:]:
        for what, got, alone in zip(("out", "lse"), results, found[0], strict=True):
            assert_bitwise_equal(what, got, alone)


@pytest.mark.parametrize("eight", [False, True], ids=["16", "8"])
@pytest.mark.parametrize("Sq", [1, 5])
@pytest.mark.parametrize("window", [CAUSAL, (50, 0, True)], ids=str)
def test_pages(kernels_on: str, Sq: int, eight: bool, window: tuple) -> None:
    """Others are shorter or longer."""
    batches = [([130], 9), ([130], 40), ([3, 130, 0], 9), ([130, 600], 38), ([20] * 9 + [130], 12)]
    assert_same(beside_others(130, batches, Asked(Sq, window, eight), kernels_on, num_splits=1))


ASKED = {  # some rows: two LSEs may be the same whatever the order of their sums
    "causal": Asked(), "24 rows": Asked(Sq=24), "window": Asked(window=(200, 0, True)), "softcap": Asked(softcap=3.0),
    "sinks": Asked(sinks=torch.tensor([0.5, -1.0])), "8 bits": Asked(eight=True),
}  # fmt: skip


@pytest.mark.parametrize("mine", [0, 1, 127, 128, 129, 600])
@pytest.mark.parametrize("asked", ASKED)
def test_pages_in_splits_of_a_size(kernels_on: str, asked: str, mine: int) -> None:
    """Tables have room for as many as the sequence needs, for 10, and for 36: so many that are alike would be
    added up in three orders.
    """
    width = max(1, -(-mine // 16))
    batches = [([mine], width), ([mine], 80), ([mine], 288), ([5, mine, 0], max(width, 9)), ([mine, 640], 80)]
    assert_same(beside_others(mine, batches, ASKED[asked], kernels_on, fixed_split_size=128))
