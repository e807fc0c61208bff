"""Deterministic accumulation order of key blocks in dQ; a wrong rank would make the kernel wait forever. No GPU."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("cutlass", reason="the DSL is needed to import kernels")

from torch_flashplug.kernels.tiling import (
    backward_tile_scheduler,  # noqa: E402
    block_iterator,  # noqa: E402
    block_sparse,  # noqa: E402
)
from torch_flashplug.registry.kernel_spec import ORDER_BLOCK_N, SPARSE_BLOCK  # noqa: E402

BANDS = {"full": block_iterator.FullBlocks, "causal": block_iterator.CausalBlocks}
TILES = [(64, 128), (64, 64)]  # tile_m, tile_n: kernel_spec.BACKWARD_TILE, PARTS_TILE
LENGTHS = [(1, 1), (64, 128), (65, 129), (1000, 300), (300, 1000), (2048, 2048)]


def launch_tiles(mask: str, tile: tuple[int, int], lengths: tuple[int, int], l2_group_heads: int = 1):
    """Return the tile order of a launch with 3 x 2 KV heads, and its tiles in launch order."""
    bound = BANDS[mask]().bind(block_iterator.SeqlenInfo(*lengths), *tile)
    order = backward_tile_scheduler.BackwardTileScheduler(
        True, -(-lengths[1] // tile[1]), 2, 6, l2_group_heads, bound, in_order=True
    )
    return order, [order.tile(number) for number in range(order.total)]


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("l2_group_heads", [1, 2, 4])
def test_accumulation_ranks_follow_the_launch_order(mask, tile, lengths, l2_group_heads):
    """The key blocks that visit a block of queries have accumulation ranks 0, 1, 2, ... in launch order."""
    order, tiles = launch_tiles(mask, tile, lengths, l2_group_heads)
    assert len(set(tiles)) == order.total
    for step in range(-(-lengths[0] // tile[0])):
        last_query, block_range = (
            (step + 1) * tile[0] - 1,
            block_iterator.QueryBlockRange(0, 0, 0),
        )  # positions of the range are blocks
        last_ranks = {}
        for n_block, head, batch in tiles:
            if mask == "full" or n_block * tile[1] <= last_query:
                rank = last_ranks[head, batch] = last_ranks.get((head, batch), -1) + 1
                assert order.accumulation_rank(n_block, block_range, step) == rank


def random_block_lists(planes: int, Sq: int, Sk: int, seed: int) -> list[list[list[int]]]:
    """Return the query blocks, in any order, that each key block of each plane visits."""
    generator, num_query_blocks, num_key_blocks = random.Random(seed), -(-Sq // SPARSE_BLOCK), -(-Sk // SPARSE_BLOCK)

    def random_list() -> list[int]:
        return generator.sample(range(num_query_blocks), generator.randint(0, num_query_blocks))

    return [[random_list() for _ in range(num_key_blocks)] for _ in range(planes)]


def accumulation_rank(lists: list[list[int]], n_block: int, m_block: int, Sk: int) -> int:
    """Return the rank of a list entry: how many SHAREs of later keys list the same block of queries."""
    later_blocks = [n for n in range(n_block + 1, len(lists)) if m_block in lists[n]]
    return -(-sum(min(SPARSE_BLOCK, Sk - n * SPARSE_BLOCK) for n in later_blocks) // ORDER_BLOCK_N)


@pytest.mark.parametrize("tile_n", [128, 64])
@pytest.mark.parametrize("sizes", [(1, 1, 200, 100), (1, 2, 1000, 130), (2, 1, 700, 1300), (2, 3, 2048, 1984)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_accumulation_ranks_of_block_lists_follow_the_launch_order(sizes, tile_n, seed):
    """The tiles of keys that list a block of queries have accumulation ranks 0, 1, 2, ... in launch order."""
    batch, heads, Sq, Sk = sizes
    lists = random_block_lists(batch * heads, Sq, Sk, seed)
    bound = block_sparse.BoundBlockSparse(None, block_iterator.SeqlenInfo(Sq, Sk), 64, tile_n)
    order = backward_tile_scheduler.BackwardTileScheduler(
        True, -(-Sk // tile_n), heads, batch * heads, 1, bound, in_order=True
    )
    last_ranks = {}
    for tile_n_block, head, b in (order.tile(number) for number in range(order.total)):
        plane, n_block = b * heads + head, tile_n_block * tile_n // SPARSE_BLOCK
        m_blocks = lists[plane][n_block]
        ranks = [accumulation_rank(lists[plane], n_block, m_block, Sk) for m_block in m_blocks]
        block_range = SimpleNamespace(num_later_ranges=ranks.__getitem__)
        for entry, m_block in enumerate(m_blocks):
            rank = last_ranks[plane, m_block] = last_ranks.get((plane, m_block), -1) + 1
            assert order.accumulation_rank(tile_n_block, block_range, entry) == rank


def test_nondeterministic_launches_start_with_the_longest_tiles():
    order, tiles = launch_tiles("causal", TILES[0], (1000, 1000))
    assert [n for n, *_ in tiles[:8]] == [*range(7, -1, -1)]
    unordered = backward_tile_scheduler.BackwardTileScheduler(True, 8, 2, 6, 1, order.blocks)
    assert [unordered.tile(number)[0] for number in range(8)] == [*range(8)]
