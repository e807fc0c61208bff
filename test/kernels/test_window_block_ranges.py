"""Blocks of a sliding window, on plain integers. No GPU.

Each visible score is in a visited block, subranges of full blocks mask nothing out, and no block is visited twice.
"""

from __future__ import annotations

import random

import pytest

pytest.importorskip("cutlass", reason="the DSL is needed to import kernels")

from torch_flashplug.kernels.primitives import fragments  # noqa: E402
from torch_flashplug.kernels.score_stages import kv_bounds  # noqa: E402
from torch_flashplug.kernels.tiling import (
    backward_tile_scheduler,  # noqa: E402
    block_iterator,  # noqa: E402
    sliding_window,  # noqa: E402
)
from torch_flashplug.kernels.tiling import tile as tile_addressing  # noqa: E402

TILES = [(128, 128), (64, 64), (128, 48), (64, 128)]  # tile_m, tile_n


@pytest.fixture(params=range(40))
def bound_window(request, monkeypatch):
    """Return a window and lengths, bound to a tile: (bound, Sq, Sk, a predicate: query i sees key j)."""
    monkeypatch.setattr(sliding_window.cute.arch, "make_warp_uniform", lambda x: x)
    monkeypatch.setattr(sliding_window.cutlass, "select_", lambda condition, yes, no: yes if condition else no)
    rng = random.Random(request.param)
    Sq, Sk = rng.randint(1, 400), rng.randint(1, 400)
    left, right = (rng.choice((0, 1, rng.randint(0, 300), 10**6)) for _ in range(2))
    diagonal = rng.choice((0, Sk - Sq, rng.randint(-300, 300)))
    bound = sliding_window.BoundSlidingWindow(
        sliding_window.WindowReach(left, right, diagonal), block_iterator.SeqlenInfo(Sq, Sk), *rng.choice(TILES)
    )
    return bound, Sq, Sk, lambda i, j: i + diagonal - left <= j <= i + diagonal + right


def check_subranges(subranges, blocks, is_visible, candidates, is_full) -> None:
    """Check subranges: they are consecutive, visit each needed block once, and full subranges mask nothing out."""
    positions = [(subrange, j) for subrange in subranges for j in range(subrange.begin, subrange.end)]
    assert [j for _, j in positions] == list(range(positions[0][1], positions[0][1] + len(positions)))
    visited = [blocks(j) for _, j in positions]
    assert (
        len(set(visited)) == len(visited)
        and set(visited) <= set(candidates)
        and {b for b in candidates if is_visible(b)} <= set(visited)
    )
    for subrange, j in positions:
        assert subrange.masked or is_full(blocks(j))


def test_query_tiles_visit_the_key_blocks_of_their_window(bound_window):
    bound, Sq, Sk, sees = bound_window
    num_blocks = -(-Sk // bound.tile_n)
    for block in range(-(-Sq // bound.tile_m)):
        tile = tile_addressing.Tile(block, 0, 0, bound.sizes)
        runs = [(0, block * bound.tile_m, bound.tile_m, bound.kv_blocks(tile))]
        for rows in (64,) if bound.tile_m == 128 else ():
            for first_row in range(block * bound.tile_m, (block + 1) * bound.tile_m, rows):
                for warpgroup_ranges_differ in (True, False):
                    num_skipped, block_range = bound.kv_range_for_warpgroup(
                        tile, first_row, rows, warpgroup_ranges_differ
                    )
                    assert num_skipped + block_range.count == runs[0][-1].count and (
                        warpgroup_ranges_differ or num_skipped == 0
                    )
                    runs.append((num_skipped, first_row, rows, block_range))
        blocks = [runs[0][-1].nth(j) for j in range(runs[0][-1].count)]
        for num_skipped, first_row, rows, block_range in runs:
            queries = range(first_row, min(first_row + rows, Sq))
            keys = lambda n: range(n * bound.tile_n, (n + 1) * bound.tile_n)  # noqa: E731
            is_visible = lambda n: any(sees(i, j) for i in queries for j in keys(n) if j < Sk)  # noqa: B023, E731
            is_full = lambda n: all(j < Sk and sees(i, j) for i in queries for j in keys(n))  # noqa: B023, E731
            start = block_iterator.BlockSubrange(True, 0, 1)
            check_subranges((start, *block_range.subranges()), block_range.nth, is_visible, range(num_blocks), is_full)
            end = block_iterator.BlockSubrange(True, block_range.count - 1, block_range.count)
            check_subranges(
                (*block_range.subranges_before_last(), end), block_range.nth, is_visible, range(num_blocks), is_full
            )
            for subrange in (start, *block_range.subranges()):
                assert all((j < block_range.num_masked) == subrange.masked for j in range(subrange.begin, subrange.end))
            assert [block_range.nth(j) for j in range(block_range.count)] == blocks[
                num_skipped:
            ]  # in the producer's order
            assert [block_range.before(j + 1) for j in range(block_range.count)] == [
                block_range.nth(j) for j in range(block_range.count)
            ]
            assert [block_range.after(j) for j in range(block_range.count - 1)] == [
                block_range.nth(j) for j in range(1, block_range.count)
            ]
            assert [block_range.has_next(j) for j in range(block_range.count)] == [
                *[True] * (block_range.count - 1),
                False,
            ]
            assert block_range.last() == block_range.nth(block_range.count - 1)
            first_hidden_key = block_range.nth(0) * bound.tile_n + block_range.columns_of_first(
                rows
            )  # keys hidden from all rows
            assert not any(sees(i, j) for i in queries for j in keys(block_range.nth(0)) if first_hidden_key <= j < Sk)


def test_key_blocks_visit_the_query_blocks_of_their_window_in_rank_order(bound_window):
    bound, Sq, Sk, sees = bound_window
    num_n, num_m = -(-Sk // bound.tile_n), -(-Sq // bound.tile_m)
    order = backward_tile_scheduler.BackwardTileScheduler(True, num_n, 1, 1, 1, bound, in_order=True)
    ranks = {}
    for n in (order.tile(number)[0] for number in range(order.total)):
        keys = range(n * bound.tile_n, (n + 1) * bound.tile_n)
        queries = lambda m: range(m * bound.tile_m, min((m + 1) * bound.tile_m, Sq))  # noqa: E731
        is_visible = lambda m: any(j < Sk and sees(i, j) for i in queries(m) for j in keys)  # noqa: B023, E731
        is_full = lambda m: all(j < Sk and sees(i, j) for i in queries(m) for j in keys)  # noqa: B023, E731
        block_range = bound.query_blocks(tile_addressing.Tile(n, 0, 0, bound.sizes))
        if block_range.total(1) == 0:
            assert not any(is_visible(m) for m in range(num_m))
            continue
        check_subranges(block_range.subranges(), block_range.nth, is_visible, range(num_m), is_full)
        for subrange in block_range.subranges():
            for j in range(subrange.begin, subrange.end):
                assert block_range.masked(block_iterator.QueryBlockStep(0, j)) == subrange.masked
        for j in range(block_range.begin, block_range.end):
            rank = ranks[j] = ranks.get(j, -1) + 1
            assert order.accumulation_rank(n, block_range, j) == rank


def test_window_bounds_match_the_definition(bound_window):
    """A stage masks scores by the bounds."""
    bound, Sq, Sk, sees = bound_window
    for i in range(0, Sq, 7):
        begin, end = bound.window.keys(i)
        assert [begin <= j < end for j in range(Sk)] == [sees(i, j) for j in range(Sk)]
    for j in range(0, Sk, 7):
        begin, end = bound.window.queries(j)
        assert [begin <= i < end for i in range(Sq)] == [sees(i, j) for i in range(Sq)]


def test_number_of_scores_before_a_column():
    """A thread's scores ahead of a column are as many as the bits that keep_between sets."""
    for column in range(-40, 300):
        ahead = sum(fragments.column_of(c) < column for c in range(64))
        assert min(max(kv_bounds.scores_before(column), 0), 64) == ahead
