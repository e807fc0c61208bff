"""Deterministic accumulation order of key blocks in dQ; a wrong rank would make the kernel wait forever. No GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="the DSL is needed to import kernels")

from torch_flashplug.kernels.tiling import backward_tile_scheduler as key_order  # noqa: E402
from torch_flashplug.kernels.tiling import block_iterator as walk  # noqa: E402

BANDS = {"full": walk.FullBlocks, "causal": walk.CausalBlocks}
TILES = [(64, 128), (64, 64)]  # tile_m, tile_n: kernel_spec.BACKWARD_TILE, SPLIT_BACKWARD_TILE
LENGTHS = [(1, 1), (64, 128), (65, 129), (1000, 300), (300, 1000), (2048, 2048)]


def launch_tiles(mask: str, tile: tuple[int, int], lengths: tuple[int, int], section: int = 1):
    """Return the tile order of a launch with 3 x 2 KV heads, and its tiles in launch order."""
    bound = BANDS[mask]().bind(walk.SeqlenInfo(*lengths), *tile)
    order = key_order.BackwardTileScheduler(True, -(-lengths[1] // tile[1]), 2, 6, section, bound, in_order=True)
    return order, [order.tile(number) for number in range(order.total)]


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("section", [1, 2, 4])
def test_accumulation_ranks_follow_the_launch_order(mask, tile, lengths, section):
    """The key blocks that visit a block of queries have accumulation ranks 0, 1, 2, ... in launch order."""
    order, tiles = launch_tiles(mask, tile, lengths, section)
    assert len(set(tiles)) == order.total
    for step in range(-(-lengths[0] // tile[0])):
        last_query, run = (step + 1) * tile[0] - 1, walk.QueryBlockRange(0, 0, 0)  # positions of the range are blocks
        last_ranks = {}
        for n_block, head, batch in tiles:
            if mask == "full" or n_block * tile[1] <= last_query:
                rank = last_ranks[head, batch] = last_ranks.get((head, batch), -1) + 1
                assert order.accumulation_rank(n_block, run, step) == rank


def test_nondeterministic_launches_start_with_the_longest_tiles():
    order, tiles = launch_tiles("causal", TILES[0], (1000, 1000))
    assert [n for n, *_ in tiles[:8]] == [*range(7, -1, -1)]
    unordered = key_order.BackwardTileScheduler(True, 8, 2, 6, 1, order.blocks)
    assert [unordered.tile(number)[0] for number in range(8)] == [*range(8)]
