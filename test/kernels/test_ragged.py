"""Sequences of different lengths on end: every tile once, wherever it lies. No GPU, and no attention."""

from __future__ import annotations

import random

import pytest
import torch
from trial_calls import starts, tile_lists

pytest.importorskip("cutlass", reason="the DSL is needed to import kernels")

from torch_flashplug.kernels.primitives import tile_scheduler as scheduler  # noqa: E402
from torch_flashplug.kernels.tiling import backward_tile_scheduler as key_order  # noqa: E402
from torch_flashplug.kernels.tiling import block_iterator as walk  # noqa: E402
from torch_flashplug.kernels.tiling import varlen as ragged  # noqa: E402

HEADS, KV_HEADS, SCRATCH = 4, 2, 64
LENGTHS = [[0], [1], [64, 0, 65, 128], [0, 0, 300], [5] * 40, [1000, 1, 0, 127, 128, 129]]
LENGTHS += [[random.Random(seed).choice([0, 1, 63, 64, 65, 200, 700]) for _ in range(9)] for seed in range(6)]


class Entries(ragged.VarlenTileList):
    """A list whose numbers are Python's."""

    def load(self, number: int) -> tuple[int, ...]:
        return tuple(self.entries[number].tolist())


def expected(own: list[int], others: list[int], queries: list[int], size: int) -> list[tuple[int, ...]]:
    """Entries in the order of sequences."""
    found, first, met, scratch = [], 0, 0, 0
    for sequence, (length, other) in enumerate(zip(own, others, strict=True)):
        found += [(b, sequence, first, length, met, other, scratch, max(other, 1)) for b in range(-(-length // size))]
        first, met, scratch = first + length, met + other, scratch - (-queries[sequence] // SCRATCH)
    return found


def lists(rows: list[int], keys: list[int], size: int, work=None) -> tuple[Entries, Entries]:
    """Of blocks of rows, and of keys."""
    of_rows = tile_lists()(starts(rows), starts(keys), starts(rows), size, sum(rows), work)
    of_keys = tile_lists()(starts(keys), starts(rows), starts(rows), size, sum(keys), work)
    return Entries(*of_rows), Entries(*of_keys)


@pytest.mark.parametrize("rows", LENGTHS, ids=str)
@pytest.mark.parametrize("size", [64, 128, 192])
def test_entries_are_the_blocks_that_sequences_have(rows, size):
    keys = rows[::-1]
    for (own, others), made in zip(((rows, keys), (keys, rows)), lists(rows, keys, size), strict=True):
        wanted = expected(own, others, rows, size)
        assert int(made.head[0]) == len(wanted) <= len(made.entries)
        assert [tuple(entry) for entry in made.entries[: len(wanted)].tolist()] == wanted
        assert all(entry == [0] * 7 + [1] for entry in made.entries[len(wanted) :].tolist())  # CTAs without a tile


def launches(made: tuple[Entries, Entries], section: int):
    """As kernels make them: of rows, then of keys, each with its number of heads."""
    counts = [int(each.head[0]) for each in made]
    order = scheduler.TileScheduler(True, counts[0], HEADS, HEADS, section)
    bound = walk.FullBlocks().at(walk.Sizes(0, 0), 64, 64)
    of_keys = key_order.BackwardTileScheduler(True, counts[1], KV_HEADS, KV_HEADS, section, bound)
    pieces = ragged.VarlenAddressing(*made)
    return (pieces.of_rows(order, None, KV_HEADS), HEADS), (pieces.of_keys(of_keys, None), KV_HEADS)


@pytest.mark.parametrize("rows", LENGTHS, ids=str)
@pytest.mark.parametrize("section", [1, 2, 4])
def test_every_block_of_every_head_is_a_tile_once_and_the_longest_come_first(rows, section):
    keys, size = rows[::-1], 64

    def work(block, own, met):
        return torch.minimum(met, (block + 1) * size)  # keys that rows see

    sides = (rows, keys), (keys, rows)
    for (launch, heads), (own, others) in zip(launches(lists(rows, keys, size, work), section), sides, strict=True):
        wanted = [entry[:6] for entry in expected(own, others, rows, size)]
        tiles = [launch.tile(number, HEADS // KV_HEADS) for number in range(launch.total)]
        places = [(t.block, t.sequence, t.own.start, t.own.length, t.others.start, t.others.length) for t in tiles]
        found = [(t.head, place) for t, place in zip(tiles, places, strict=True)]
        assert sorted(found) == sorted((head, entry) for head in range(heads) for entry in wanted)
        sizes = [(t.others.length, t.own.length) if launch.of_keys else (t.own.length, t.others.length) for t in tiles]
        assert [(t.sizes.Sq, t.sizes.Sk) for t in tiles] == sizes
        assert all(t.sizes.some_keys == max(t.sizes.Sk, 1) for t in tiles)
        lasting = [min(t.others.length, (t.block + 1) * size) for t in tiles if t.head == 0]
        assert lasting == sorted(lasting, reverse=True)


@pytest.mark.parametrize("rows", [[512] * 32, [16384], [4051, 2025, 1350, *[200] * 20], [4096, *[100] * 4]], ids=str)
@pytest.mark.parametrize("heads", [8, 10, 16, 21, 32])
@pytest.mark.parametrize("group", [1, 2])
def test_the_longest_tile_does_not_run_alone_for_long(rows, heads, group, monkeypatch):
    monkeypatch.setattr(ragged.cute.arch, "make_warp_uniform", lambda x: x)
    monkeypatch.setattr(ragged.cute.arch, "grid_dim", lambda: (132, 1, 1))
    monkeypatch.setattr(ragged.cutlass, "select_", lambda condition, this, other: this if condition else other)
    entries, head = tile_lists()(*[starts(rows)] * 3, 128, sum(rows), lambda block, own, met: (block + 1) * 128)
    tiles, heads = [(b + 1) * 128 for n in rows for b in range(-(-n // 128))], heads // group * group
    pieces = ragged.VarlenAddressing(Entries(entries, head.tolist()))
    section = pieces.section(group, heads, group)
    assert section % group == 0 and group <= section <= heads
    alone = (132 * max(tiles) / sum(tiles) - group) / heads  # of a launch, how long the longest tile would run alone
    last = heads - (-(-heads // section) - 1) * section
    assert alone > 0.09 or section == group
    assert alone < 0.11 or section == heads or last * sum(tiles) >= 0.85 * max(tiles) * 132
    if sum(tiles) >= 2 * max(tiles) * 132 / (heads // group // 2 * group):
        assert section < heads  # no larger than it must be
    assert pieces.section(heads, heads, group) == heads  # what L2 holds


@pytest.mark.parametrize("element_bytes", [1, 2])
@pytest.mark.parametrize("stride", [64, 8 * 128, 3 * 24 * 128])
def test_tma_stops_at_the_end_of_a_sequence(element_bytes, stride):
    """Coordinates of rows, and what the dims and strides of a descriptor make of them."""
    for start, length in ((0, 1), (5, 64), (17, 0), (2**30 - 1000, 999)):
        first, (end, last) = ragged.SequenceSlice(start, length).coordinates()
        assert end < ragged.REACH and last < 2 * ragged.REACH - 1 < 2**31  # inside of their dims
        for row in (0, 1, length, length + 127):
            elements = (first + row + end) * stride + last * ragged.around(stride, element_bytes)
            assert elements * element_bytes % 2**64 == (start + row) * stride * element_bytes % 2**64
            assert (first + row < ragged.REACH) == (row < length)
