"""Order of the backward steps over the query heads of a group, on plain integers. No GPU."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("cutlass", reason="the DSL is needed to import kernels")

from torch_flashplug.kernels.score_stages import (  # noqa: E402
    bias,
    bias_read,
    bitmask,
    dropout,
    kv_bounds,
    sliding_window,
    softcap,
)
from torch_flashplug.kernels.score_stages.pipeline import ScorePipeline, ScoreStage  # noqa: E402
from torch_flashplug.kernels.tiling import block_iterator  # noqa: E402
from torch_flashplug.kernels.tiling import sliding_window as window_blocks  # noqa: E402
from torch_flashplug.kernels.tiling import tile as tile_addressing  # noqa: E402

TILES = [(64, 128), (64, 64)]  # tile_m, tile_n: kernel_spec.BACKWARD_TILE, PARTS_TILE


class Divisor(int):
    """Integer with the attribute of cute.FastDivmodDivisorV2."""

    @property
    def divisor(self) -> int:
        return int(self)


@pytest.fixture(params=range(60))
def tile_of_keys(request, monkeypatch):
    """Return the query blocks of a random KV tile, a predicate of full visibility, and the order of the heads."""
    for module in (block_iterator, window_blocks):
        monkeypatch.setattr(module.cutlass, "select_", lambda condition, yes, no: yes if condition else no)
    rng = random.Random(request.param)
    Sq, Sk, (tile_m, tile_n) = rng.randint(1, 700), rng.randint(1, 700), rng.choice(TILES)
    sizes, group = block_iterator.SeqlenInfo(Sq, Sk), rng.choice((1, 2, 3, 7, 8))
    left, right, diagonal = rng.choice((0, 130, 10**6)), rng.choice((0, 70, 10**6)), rng.choice((0, Sk - Sq))
    bound, sees = rng.choice(
        (
            (block_iterator.FullBlocks().bind(sizes, tile_m, tile_n), lambda i, j: True),
            (block_iterator.CausalBlocks().bind(sizes, tile_m, tile_n), lambda i, j: j <= i),
            (
                window_blocks.BoundSlidingWindow(
                    window_blocks.WindowReach(left, right, diagonal), sizes, tile_m, tile_n
                ),
                lambda i, j: i + diagonal - left <= j <= i + diagonal + right,
            ),
        )
    )
    n_block = rng.randrange(-(-Sk // tile_n))
    blocks = bound.query_blocks(tile_addressing.Tile(n_block, 0, 0, sizes))
    keys = range(n_block * tile_n, (n_block + 1) * tile_n)

    def is_full(block: int) -> bool:
        rows = range(block * tile_m, min((block + 1) * tile_m, Sq))
        return all(j < Sk and sees(i, j) for i in rows for j in keys)

    heads = rng.choice((1, group))
    return blocks, is_full, block_iterator.GroupOrder(Divisor(heads), group // heads)


def test_every_head_visits_every_block_once(tile_of_keys):
    blocks, is_full, order = tile_of_keys
    group, group_blocks = order.heads * order.sets, block_iterator.GroupQueryBlocks(blocks, order)
    steps = []
    for head_set in range(group_blocks.outer_heads(group)):
        head_blocks = group_blocks.of_head(head_set)
        positions = [(subrange, j) for subrange in head_blocks.subranges() for j in range(subrange.begin, subrange.end)]
        whole = head_blocks.all_blocks()
        assert [j for _, j in positions] == list(range(whole.begin, whole.end))
        for subrange, j in positions:
            block, head = head_blocks.step(j, head_set)
            assert head_blocks.nth(j) == block
            assert subrange.masked or is_full(block)
            steps.append((head_set, block, head))
    assert len(steps) == group_blocks.total(group)
    expected = [
        (head_set, block, head_set * order.heads + head)
        for head_set in range(order.sets)
        for block in range(blocks.end - 1, blocks.begin - 1, -1)
        for head in range(order.heads)
    ]
    assert steps == expected, "a set of heads visits each block, from the last block on, before the next block"


def test_next_block_is_the_block_of_the_next_step(tile_of_keys):
    blocks, _, order = tile_of_keys
    group_blocks = block_iterator.GroupQueryBlocks(blocks, order)
    for subrange in group_blocks.subranges():
        for j in range(subrange.begin, subrange.end):
            assert group_blocks.next(j, subrange) == group_blocks.nth(min(j + 1, subrange.end - 1))


def _subclasses(base: type) -> set[type]:
    return {subclass for direct in base.__subclasses__() for subclass in {direct, *_subclasses(direct)}}


def test_stages_with_data_of_a_head_are_not_shared_by_heads():
    """A stage that reads the query head would get the data of the wrong head if heads were visited together."""
    modules = (bias, bias_read, bitmask, dropout, kv_bounds, sliding_window, softcap)
    stages = {stage for stage in _subclasses(ScoreStage) if any(stage.__module__ == m.__name__ for m in modules)}
    of_head = {
        stage
        for stage in stages
        if stage.of_head is not ScoreStage.of_head or stage.begin_tile_load is not ScoreStage.begin_tile_load
    }
    assert {"DropoutStage", "BitmaskStage", "ColumnBias"} <= {stage.__name__ for stage in of_head}
    assert not [stage for stage in of_head if stage.is_shared_by_heads]
    shared = (kv_bounds.KvBoundsStage(), kv_bounds.CausalStage())
    assert ScorePipeline(shared).is_shared_by_heads
    assert not ScorePipeline((*shared, ScoreStage())).is_shared_by_heads
