"""What a BlockMask that attention() has looked at is known by: whatever its mask_mod may read but globals."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from torch_flashplug import attention, block_lists
from torch_flashplug.ops import block_mask

ROWS = 200


class Holder:
    def __init__(self, of_row: Tensor):
        self.held = {"rows": [of_row]}

    def sees(self, _b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        of_row = self.held["rows"][0]
        return of_row[q] == of_row[k]


class Slots:
    __slots__ = ("of_row",)


class Module(torch.nn.Module):
    def __init__(self, of_row: Tensor):
        super().__init__()
        self.register_buffer("of_row", of_row)


def in_a_slot(of_row: Tensor) -> Callable:
    slots = Slots()
    slots.of_row = of_row
    return lambda b, h, q, k: slots.of_row[q] == slots.of_row[k]


def in_a_module(of_row: Tensor) -> Callable:
    inner = torch.nn.Sequential(Module(of_row))
    return lambda b, h, q, k: inner[0].of_row[q] == inner[0].of_row[k]


def in_an_object(of_row: Tensor) -> Callable:
    holder = Holder(of_row)
    return lambda b, h, q, k: (q >= k) & holder.sees(b, h, q, k)


def in_a_dict(of_row: Tensor) -> Callable:
    held = {"x": (of_row,)}
    return lambda b, h, q, k: held["x"][0][q] == held["x"][0][k]


def by_name(of_row: Tensor) -> Callable:
    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, of_row: Tensor = of_row) -> Tensor:
        return of_row[q] == of_row[k]

    return sees


HOLDS = {
    "closure": lambda of_row: lambda b, h, q, k: of_row[q] == of_row[k],
    "and_masks": lambda of_row: flex.and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: of_row[q] == of_row[k]),
    "or_masks": lambda of_row: flex.or_masks(flex.and_masks(HOLDS["closure"](of_row)), lambda b, h, q, k: q == k),
    "dict": in_a_dict,
    "partial": lambda of_row: functools.partial(lambda of_row, b, h, q, k: of_row[q] == of_row[k], of_row),
    "default": by_name,
    "object": in_an_object,
    "slots": in_a_slot,
    "module": in_a_module,
}


@pytest.mark.parametrize("holds", HOLDS)
def test_what_is_written_to_is_seen(holds: str) -> None:
    """Wherever the mask_mod has it, at the next call; and until then the mask is known again."""
    of_row = torch.arange(ROWS) // 100
    mask = flex.create_block_mask(HOLDS[holds](of_row), None, None, ROWS, ROWS, device="cpu")
    q = torch.randn(1, ROWS, 2, 16)
    lists = block_lists(mask)
    attention(q, q, q, block_mask=mask)
    assert block_lists(mask) is lists
    of_row[50:150] = 1
    again = flex.create_block_mask(HOLDS[holds](of_row), None, None, ROWS, ROWS, device="cpu")
    assert torch.equal(attention(q, q, q, block_mask=mask), attention(q, q, q, block_mask=again))
    assert block_lists(mask) is not lists


def test_numbers_that_change_are_seen() -> None:
    def of_width(held: list[int]) -> Callable:
        return lambda b, h, q, k: (q - k).abs() < held[0]

    width = [1000]
    mask = flex.create_block_mask(of_width(width), None, None, ROWS, ROWS, device="cpu")
    first = block_lists(mask)
    width[0] = 3000
    assert block_lists(mask) is not first


def test_more_than_is_worth_a_look_is_never_known() -> None:
    held = [[torch.zeros(())] for _ in range(block_mask._MOST_HELD)]

    def of_first(held: list[list[Tensor]]) -> Callable:
        return lambda b, h, q, k: held[0][0] + q >= k

    mask = flex.create_block_mask(of_first(held), None, None, ROWS, ROWS, device="cpu")
    assert block_lists(mask) is not block_lists(mask)
