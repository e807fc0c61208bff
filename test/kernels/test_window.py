"""A sliding window's blocks, from plain numbers: each score that counts is in a block that is walked over, whole
sections hide nothing, no block comes twice. No GPU.
"""

from __future__ import annotations

import random

import pytest

pytest.importorskip("cutlass", reason="the DSL is needed to import kernels")

from torch_flashplug.kernels.features import window  # noqa: E402
from torch_flashplug.kernels.primitives import fragments  # noqa: E402
from torch_flashplug.kernels.score_stages import kv_bounds as visible  # noqa: E402
from torch_flashplug.kernels.tiling import backward_tile_scheduler as key_order  # noqa: E402
from torch_flashplug.kernels.tiling import block_iterator as walk  # noqa: E402
from torch_flashplug.kernels.tiling import tile as pieces  # noqa: E402

TILES = [(128, 128), (64, 64), (128, 48), (64, 128)]  # tile_m, tile_n


@pytest.fixture(params=range(40))
def drawn(request, monkeypatch):
    """A window and lengths, bound to a tile: (bound, Sq, Sk, whether query i sees key j)."""
    monkeypatch.setattr(window.cute.arch, "make_warp_uniform", lambda x: x)
    monkeypatch.setattr(window.cutlass, "select_", lambda condition, this, other: this if condition else other)
    draw = random.Random(request.param)
    Sq, Sk = draw.randint(1, 400), draw.randint(1, 400)
    left, right = (draw.choice((0, 1, draw.randint(0, 300), 10**6)) for _ in range(2))
    diagonal = draw.choice((0, Sk - Sq, draw.randint(-300, 300)))
    bound = window.BoundWindow(window.Reach(left, right, diagonal), walk.Sizes(Sq, Sk), *draw.choice(TILES))
    return bound, Sq, Sk, lambda i, j: i + diagonal - left <= j <= i + diagonal + right


def check(sections, blocks, seen, there, whole) -> None:
    """Sections follow each other; what some score needs is there, once; whole ones hide nothing."""
    positions = [(section, j) for section in sections for j in range(section.begin, section.end)]
    assert [j for _, j in positions] == list(range(positions[0][1], positions[0][1] + len(positions)))
    found = [blocks(j) for _, j in positions]
    assert len(set(found)) == len(found) and set(found) <= set(there) and {b for b in there if seen(b)} <= set(found)
    for section, j in positions:
        assert section.masked or whole(blocks(j))


def test_keys_of_queries(drawn):
    bound, Sq, Sk, sees = drawn
    num_blocks = -(-Sk // bound.tile_n)
    for block in range(-(-Sq // bound.tile_m)):
        tile = pieces.Tile(block, 0, 0, bound.sizes)
        runs = [(0, block * bound.tile_m, bound.tile_m, bound.keys(tile))]
        for rows in (64,) if bound.tile_m == 128 else ():
            for first in range(block * bound.tile_m, (block + 1) * bound.tile_m, rows):
                for uneven in (True, False):
                    others, run = bound.keys_of_part(tile, first, rows, uneven)
                    assert others + run.count == runs[0][-1].count and (uneven or others == 0)
                    runs.append((others, first, rows, run))
        blocks = [runs[0][-1].nth(j) for j in range(runs[0][-1].count)]
        for others, first, rows, run in runs:
            queries = range(first, min(first + rows, Sq))
            keys = lambda n: range(n * bound.tile_n, (n + 1) * bound.tile_n)  # noqa: E731
            seen = lambda n: any(sees(i, j) for i in queries for j in keys(n) if j < Sk)  # noqa: B023, E731
            whole = lambda n: all(j < Sk and sees(i, j) for i in queries for j in keys(n))  # noqa: B023, E731
            start = walk.BlockSubrange(True, 0, 1)
            check((start, *run.sections()), run.nth, seen, range(num_blocks), whole)
            end = walk.BlockSubrange(True, run.count - 1, run.count)
            check((*run.sections_before_last(), end), run.nth, seen, range(num_blocks), whole)
            for section in (start, *run.sections()):
                assert all((j < run.num_masked) == section.masked for j in range(section.begin, section.end))
            assert [run.nth(j) for j in range(run.count)] == blocks[others:]  # as the producer loads them
            assert [run.before(j + 1) for j in range(run.count)] == [run.nth(j) for j in range(run.count)]
            assert [run.after(j) for j in range(run.count - 1)] == [run.nth(j) for j in range(1, run.count)]
            assert [run.more(j) for j in range(run.count)] == [*[True] * (run.count - 1), False]
            assert run.last() == run.nth(run.count - 1)
            behind = run.nth(0) * bound.tile_n + run.columns_of_first(rows)  # keys of the first block that no row sees
            assert not any(sees(i, j) for i in queries for j in keys(run.nth(0)) if behind <= j < Sk)


def test_queries_of_keys_and_their_turns(drawn):
    bound, Sq, Sk, sees = drawn
    num_n, num_m = -(-Sk // bound.tile_n), -(-Sq // bound.tile_m)
    order = key_order.BackwardTileScheduler(True, num_n, 1, 1, 1, bound, in_order=True)
    turns = {}
    for n in (order.tile(number)[0] for number in range(order.total)):
        keys = range(n * bound.tile_n, (n + 1) * bound.tile_n)
        queries = lambda m: range(m * bound.tile_m, min((m + 1) * bound.tile_m, Sq))  # noqa: E731
        seen = lambda m: any(j < Sk and sees(i, j) for i in queries(m) for j in keys)  # noqa: B023, E731
        whole = lambda m: all(j < Sk and sees(i, j) for i in queries(m) for j in keys)  # noqa: B023, E731
        run = bound.queries(pieces.Tile(n, 0, 0, bound.sizes))
        if run.total(1) == 0:
            assert not any(seen(m) for m in range(num_m))
            continue
        check(run.sections(), run.nth, seen, range(num_m), whole)
        for section in run.sections():
            for j in range(section.begin, section.end):
                assert run.masked(walk.QueryBlockStep(0, j)) == section.masked
        for j in range(run.begin, run.end):
            turn = turns[j] = turns.get(j, -1) + 1
            assert order.turn(n, run, j) == turn


def test_bounds_are_those_of_the_definition(drawn):
    """What a stage hides by."""
    bound, Sq, Sk, sees = drawn
    for i in range(0, Sq, 7):
        begin, end = bound.window.keys(i)
        assert [begin <= j < end for j in range(Sk)] == [sees(i, j) for j in range(Sk)]
    for j in range(0, Sk, 7):
        begin, end = bound.window.queries(j)
        assert [begin <= i < end for i in range(Sq)] == [sees(i, j) for i in range(Sq)]


def test_scores_ahead_of_a_column():
    """A thread's, by the number of which keep_between sets bits."""
    for column in range(-40, 300):
        ahead = sum(fragments.column_of(c) < column for c in range(64))
        assert min(max(visible.scores_before(column), 0), 64) == ahead
