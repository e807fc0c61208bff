"""Blocks of keys that add to dQ in order: a wrong turn would be waited for without end. No GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="the DSL is needed to import kernels")

from torch_flashplug.kernels.tiling import backward_tile_scheduler as key_order  # noqa: E402
from torch_flashplug.kernels.tiling import block_iterator as walk  # noqa: E402

BANDS = {"full": walk.FullBlocks, "causal": walk.CausalBlocks}
TILES = [(64, 128), (64, 64)]  # tile_m, tile_n: spec.BACKWARD_TILE, PARTS_TILE
LENGTHS = [(1, 1), (64, 128), (65, 129), (1000, 300), (300, 1000), (2048, 2048)]


def launched(mask: str, tile: tuple[int, int], lengths: tuple[int, int], section: int = 1):
    """Order of a launch of 3 x 2 KV heads, and its tiles one after the other."""
    bound = BANDS[mask]().at(walk.Sizes(*lengths), *tile)
    order = key_order.BackwardTileScheduler(True, -(-lengths[1] // tile[1]), 2, 6, section, bound, in_order=True)
    return order, [order.tile(number) for number in range(order.total)]


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("section", [1, 2, 4])
def test_turns_count_what_was_launched_before(mask, tile, lengths, section):
    """For every block of queries: the key blocks that see it, in launch order, have turns 0, 1, 2, ..."""
    order, tiles = launched(mask, tile, lengths, section)
    assert len(set(tiles)) == order.total
    for step in range(-(-lengths[0] // tile[0])):
        last_query, run = (step + 1) * tile[0] - 1, walk.QueryBlockRange(0, 0, 0)  # its positions are blocks
        seen = {}
        for n_block, head, batch in tiles:
            if mask == "full" or n_block * tile[1] <= last_query:
                turn = seen[head, batch] = seen.get((head, batch), -1) + 1
                assert order.turn(n_block, run, step) == turn


def test_without_an_order_the_longest_come_first():
    order, tiles = launched("causal", TILES[0], (1000, 1000))
    assert [n for n, *_ in tiles[:8]] == [*range(7, -1, -1)]
    free = key_order.BackwardTileScheduler(True, 8, 2, 6, 1, order.walk)
    assert [free.tile(number)[0] for number in range(8)] == [*range(8)]
