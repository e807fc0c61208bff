"""Tile lists of packed sequences: each tile exists once. No GPU, and no attention."""

from __future__ import annotations

import functools
import random
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("cutlass", reason="the DSL is needed to import kernels")

from torch_flashplug.kernels.primitives import tile_scheduler  # noqa: E402
from torch_flashplug.kernels.tiling import (
    backward_tile_scheduler,  # noqa: E402
    block_iterator,  # noqa: E402
    varlen,  # noqa: E402
)

HEADS, KV_HEADS, WORKSPACE_BLOCK = 4, 2, 64
LENGTHS = [[0], [1], [64, 0, 65, 128], [0, 0, 300], [5] * 40, [1000, 1, 0, 127, 128, 129]]
LENGTHS += [[random.Random(seed).choice([0, 1, 63, 64, 65, 200, 700]) for _ in range(9)] for seed in range(6)]


@functools.cache
def tile_lists():
    """Return the function `tiles` of docs/layouts.md."""
    page = Path(__file__).resolve().parents[2] / "docs" / "layouts.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names = {"torch": torch, "F": F}
    exec(next(block for block in blocks if block.startswith("def tiles(")), names)
    return names["tiles"]


def cu_seqlens_from(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


class PythonTileList(varlen.VarlenTileList):
    """Tile list with Python integers."""

    def load(self, number: int) -> varlen.TileListEntry:
        return varlen.TileListEntry(*self.entries[number].tolist())


def entries_of_sequences(
    own_lengths: list[int], kv_lengths: list[int], queries: list[int], size: int
) -> list[tuple[int, ...]]:
    """Return the expected entries in the order of sequences."""
    entries, start, kv_start, workspace_block = [], 0, 0, 0
    for sequence, (length, kv_length) in enumerate(zip(own_lengths, kv_lengths, strict=True)):
        entries += [
            (b, sequence, start, length, kv_start, kv_length, workspace_block, max(kv_length, 1))
            for b in range(-(-length // size))
        ]
        start, kv_start = start + length, kv_start + kv_length
        workspace_block -= -queries[sequence] // WORKSPACE_BLOCK
    return entries


def make_tile_lists(rows: list[int], keys: list[int], size: int, work=None) -> tuple[PythonTileList, PythonTileList]:
    """Return the tile lists of blocks of rows and of blocks of keys."""
    row_list = tile_lists()(cu_seqlens_from(rows), cu_seqlens_from(keys), cu_seqlens_from(rows), size, sum(rows), work)
    key_list = tile_lists()(cu_seqlens_from(keys), cu_seqlens_from(rows), cu_seqlens_from(rows), size, sum(keys), work)
    return PythonTileList(*row_list), PythonTileList(*key_list)


@pytest.mark.parametrize("rows", LENGTHS, ids=str)
@pytest.mark.parametrize("size", [64, 128, 192])
def test_tile_list_entries_are_the_blocks_of_sequences(rows, size):
    keys = rows[::-1]
    for (own_lengths, kv_lengths), tile_list in zip(
        ((rows, keys), (keys, rows)), make_tile_lists(rows, keys, size), strict=True
    ):
        expected_entries = entries_of_sequences(own_lengths, kv_lengths, rows, size)
        assert int(tile_list.header[0]) == len(expected_entries) <= len(tile_list.entries)
        assert [tuple(entry) for entry in tile_list.entries[: len(expected_entries)].tolist()] == expected_entries
        # CTAs without a tile
        assert all(entry == [0] * 7 + [1] for entry in tile_list.entries[len(expected_entries) :].tolist())


def make_launches(tile_lists_pair: tuple[PythonTileList, PythonTileList], l2_group_heads: int):
    """Return the launches of rows and of keys in kernel order, each with the number of heads."""
    counts = [int(tile_list.header[0]) for tile_list in tile_lists_pair]
    order = tile_scheduler.TileScheduler(True, counts[0], HEADS, HEADS, l2_group_heads)
    bound = block_iterator.FullBlocks().bind(block_iterator.SeqlenInfo(0, 0), 64, 64)
    key_order_of_launch = backward_tile_scheduler.BackwardTileScheduler(
        True, counts[1], KV_HEADS, KV_HEADS, l2_group_heads, bound
    )
    addressing = varlen.VarlenAddressing(*tile_lists_pair)
    return (addressing.of_rows(order, None, KV_HEADS), HEADS), (addressing.of_keys(key_order_of_launch, None), KV_HEADS)


@pytest.mark.parametrize("rows", LENGTHS, ids=str)
@pytest.mark.parametrize("l2_group_heads", [1, 2, 4])
def test_each_block_and_head_is_launched_once_with_the_longest_first(rows, l2_group_heads):
    keys, size = rows[::-1], 64

    def work(block, own_length, kv_length):
        return torch.minimum(kv_length, (block + 1) * size)  # keys visible to the rows

    sides = (rows, keys), (keys, rows)
    for (launch, heads), (own_lengths, kv_lengths) in zip(
        make_launches(make_tile_lists(rows, keys, size, work), l2_group_heads), sides, strict=True
    ):
        expected_entries = [entry[:6] for entry in entries_of_sequences(own_lengths, kv_lengths, rows, size)]
        tiles = [launch.tile(number, HEADS // KV_HEADS) for number in range(launch.total)]
        positions = [
            (
                t.block,
                t.sequence,
                t.own_slice.start,
                t.own_slice.length,
                t.opposite_slice.start,
                t.opposite_slice.length,
            )
            for t in tiles
        ]
        head_positions = [(t.head, position) for t, position in zip(tiles, positions, strict=True)]
        assert sorted(head_positions) == sorted((head, entry) for head in range(heads) for entry in expected_entries)
        sizes = [
            (t.opposite_slice.length, t.own_slice.length)
            if launch.of_keys
            else (t.own_slice.length, t.opposite_slice.length)
            for t in tiles
        ]
        assert [(t.sizes.Sq, t.sizes.Sk) for t in tiles] == sizes
        assert all(t.sizes.seqlen_k_at_least_one == max(t.sizes.Sk, 1) for t in tiles)
        visible_keys = [min(t.opposite_slice.length, (t.block + 1) * size) for t in tiles if t.head == 0]
        assert visible_keys == sorted(visible_keys, reverse=True)


@pytest.mark.parametrize("rows", [[512] * 32, [16384], [4051, 2025, 1350, *[200] * 20], [4096, *[100] * 4]], ids=str)
@pytest.mark.parametrize("heads", [8, 10, 16, 21, 32])
@pytest.mark.parametrize("group", [1, 2])
def test_longest_tile_rarely_runs_alone(rows, heads, group, monkeypatch):
    monkeypatch.setattr(varlen.cute.arch, "make_warp_uniform", lambda x: x)
    monkeypatch.setattr(varlen.cute.arch, "grid_dim", lambda: (132, 1, 1))
    monkeypatch.setattr(varlen.cutlass, "select_", lambda condition, yes, no: yes if condition else no)
    entries, head = tile_lists()(
        *[cu_seqlens_from(rows)] * 3, 128, sum(rows), lambda block, own_length, kv_length: (block + 1) * 128
    )
    tiles, heads = [(b + 1) * 128 for n in rows for b in range(-(-n // 128))], heads // group * group
    addressing = varlen.VarlenAddressing(PythonTileList(entries, head.tolist()))
    l2_group_heads = addressing.heads_per_l2_group(group, heads, group)
    assert l2_group_heads % group == 0 and group <= l2_group_heads <= heads
    # share of a launch during which the longest tile would run alone
    alone_share = (132 * max(tiles) / sum(tiles) - group) / heads
    last_group_heads = heads - (-(-heads // l2_group_heads) - 1) * l2_group_heads
    assert alone_share > 0.09 or l2_group_heads == group
    assert alone_share < 0.11 or l2_group_heads == heads or last_group_heads * sum(tiles) >= 0.85 * max(tiles) * 132
    if sum(tiles) >= 2 * max(tiles) * 132 / (heads // group // 2 * group):
        assert l2_group_heads < heads  # not larger than necessary
    assert addressing.heads_per_l2_group(heads, heads, group) == heads  # when L2 holds all heads


@pytest.mark.parametrize("element_bytes", [1, 2])
@pytest.mark.parametrize("stride", [64, 8 * 128, 3 * 24 * 128])
def test_tma_coordinates_stop_at_the_end_of_a_sequence(element_bytes, stride):
    """Row coordinates are applied to the dims and strides of a TMA descriptor."""
    for start, length in ((0, 1), (5, 64), (17, 0), (2**30 - 1000, 999)):
        row_coordinate, (end, sequence_coordinate) = varlen.SequenceSlice(start, length).coordinates()
        assert (
            end < varlen.MAX_TOTAL_ROWS and sequence_coordinate < 2 * varlen.MAX_TOTAL_ROWS - 1 < 2**31
        )  # within the dims
        for row in (0, 1, length, length + 127):
            elements = (row_coordinate + row + end) * stride + sequence_coordinate * varlen.wrap_stride(
                stride, element_bytes
            )
            assert elements * element_bytes % 2**64 == (start + row) * stride * element_bytes % 2**64
            assert (row_coordinate + row < varlen.MAX_TOTAL_ROWS) == (row < length)
