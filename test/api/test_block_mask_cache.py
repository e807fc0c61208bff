"""Identity of a BlockMask between calls of attention(): everything read by its mask_mod except globals."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from torch_flashplug import attention, prepare_block_mask
from torch_flashplug.ops import block_mask

ROWS = 200


class Holder:
    def __init__(self, group_of_row: Tensor):
        self.held = {"rows": [group_of_row]}

    def sees(self, _b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        group_of_row = self.held["rows"][0]
        return group_of_row[q] == group_of_row[k]


class Slots:
    __slots__ = ("of_row",)


class Module(torch.nn.Module):
    def __init__(self, group_of_row: Tensor):
        super().__init__()
        self.register_buffer("of_row", group_of_row)


def make_mod_with_slots(group_of_row: Tensor) -> Callable:
    slots = Slots()
    slots.of_row = group_of_row
    return lambda b, h, q, k: slots.of_row[q] == slots.of_row[k]


def make_mod_with_module(group_of_row: Tensor) -> Callable:
    inner = torch.nn.Sequential(Module(group_of_row))
    return lambda b, h, q, k: inner[0].of_row[q] == inner[0].of_row[k]


def make_mod_with_object(group_of_row: Tensor) -> Callable:
    holder = Holder(group_of_row)
    return lambda b, h, q, k: (q >= k) & holder.sees(b, h, q, k)


def make_mod_with_dict(group_of_row: Tensor) -> Callable:
    held = {"x": (group_of_row,)}
    return lambda b, h, q, k: held["x"][0][q] == held["x"][0][k]


def make_mod_with_default(group_of_row: Tensor) -> Callable:
    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, group_of_row: Tensor = group_of_row) -> Tensor:
        return group_of_row[q] == group_of_row[k]

    return sees


MASK_MOD_MAKERS = {
    "closure": lambda group_of_row: lambda b, h, q, k: group_of_row[q] == group_of_row[k],
    "and_masks": lambda group_of_row: flex.and_masks(
        lambda b, h, q, k: q >= k, lambda b, h, q, k: group_of_row[q] == group_of_row[k]
    ),
    "or_masks": lambda group_of_row: flex.or_masks(
        flex.and_masks(MASK_MOD_MAKERS["closure"](group_of_row)), lambda b, h, q, k: q == k
    ),
    "dict": make_mod_with_dict,
    "partial": lambda group_of_row: functools.partial(
        lambda group_of_row, b, h, q, k: group_of_row[q] == group_of_row[k], group_of_row
    ),
    "default": make_mod_with_default,
    "object": make_mod_with_object,
    "slots": make_mod_with_slots,
    "module": make_mod_with_module,
}


@pytest.mark.parametrize("maker", MASK_MOD_MAKERS)
def test_in_place_changes_of_mask_mod_tensors_are_detected(maker: str) -> None:
    """Detect in-place changes at the next call, wherever the mask_mod holds the tensor.

    Before a change, the block lists must be reused.
    """
    group_of_row = torch.arange(ROWS) // 100
    mask = flex.create_block_mask(MASK_MOD_MAKERS[maker](group_of_row), None, None, ROWS, ROWS, device="cpu")
    q = torch.randn(1, ROWS, 2, 16)
    lists = prepare_block_mask(mask)
    attention(q, q, q, block_mask=mask)
    assert prepare_block_mask(mask) is lists
    group_of_row[50:150] = 1
    again = flex.create_block_mask(MASK_MOD_MAKERS[maker](group_of_row), None, None, ROWS, ROWS, device="cpu")
    assert torch.equal(attention(q, q, q, block_mask=mask), attention(q, q, q, block_mask=again))
    assert prepare_block_mask(mask) is not lists


def test_changed_numbers_in_a_mask_mod_are_detected() -> None:
    def make_mod(held: list[int]) -> Callable:
        return lambda b, h, q, k: (q - k).abs() < held[0]

    width = [1000]
    mask = flex.create_block_mask(make_mod(width), None, None, ROWS, ROWS, device="cpu")
    first = prepare_block_mask(mask)
    width[0] = 3000
    assert prepare_block_mask(mask) is not first


def test_mask_mods_with_many_objects_are_never_cached() -> None:
    held = [[torch.zeros(())] for _ in range(block_mask._MOST_HELD)]

    def make_mod(held: list[list[Tensor]]) -> Callable:
        return lambda b, h, q, k: held[0][0] + q >= k

    mask = flex.create_block_mask(make_mod(held), None, None, ROWS, ROWS, device="cpu")
    assert prepare_block_mask(mask) is not prepare_block_mask(mask)
