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
from torch_flashplug.kernels.tiling import tile as tile_addressing  # noqa: E402
from torch_flashplug.registry.kernel_spec import BACKWARD_TILE  # noqa: E402


class Divisor(int):
    """Integer with the attribute of cute.FastDivmodDivisorV2."""

    @property
    def divisor(self) -> int:
        return int(self)


@pytest.fixture(params=range(40))
def tile_of_keys(request, monkeypatch):
    """Return the query blocks of a random causal KV tile, its steps, and a predicate of full visibility."""
    monkeypatch.setattr(block_iterator.cutlass, "select_", lambda condition, yes, no: yes if condition else no)
    rng = random.Random(request.param)
    Sq, Sk, (tile_m, tile_n) = rng.randint(1, 700), rng.randint(1, 700), BACKWARD_TILE
    sizes, n_block = block_iterator.SeqlenInfo(Sq, Sk), rng.randrange(-(-Sk // tile_n))
    bound = block_iterator.CausalBlocks().bind(sizes, tile_m, tile_n)
    blocks = bound.query_blocks(tile_addressing.Tile(n_block, 0, 0, sizes))

    def is_full(block: int) -> bool:
        """Return whether all rows of a query block see all keys of the tile."""
        return (n_block + 1) * tile_n <= min(Sk, block * tile_m + 1)

    group = Divisor(rng.choice((2, 3, 7, 8)))
    return blocks, block_iterator.GroupQueryBlocks.create(blocks, group, n_block), is_full, n_block % group


def test_every_head_visits_every_block_once(tile_of_keys):
    """All heads visit a block, from the last block on, before the next block; full steps mask nothing out."""
    blocks, steps, is_full, first_head = tile_of_keys
    positions = [(subrange, j) for subrange in steps.subranges() for j in range(subrange.begin, subrange.end)]
    whole = steps.all_blocks()
    assert [j for _, j in positions] == list(range(whole.begin, whole.end))
    assert len(positions) == blocks.total(steps.group)
    visits = [tuple(steps.step(j)) for _, j in positions]
    heads = [(first_head + i) % steps.group for i in range(steps.group)]
    assert visits == [(block, head) for block in range(blocks.end - 1, blocks.begin - 1, -1) for head in heads]
    for (subrange, j), (block, _) in zip(positions, visits, strict=True):
        assert steps.nth(j) == block
        assert subrange.masked or is_full(block)
        assert steps.next(j, subrange) == steps.nth(min(j + 1, subrange.end - 1))


def test_only_dense_causal_kernels_visit_a_group_together():
    """Windows and block lists have tiles of equal length, or lists of their own for each query head."""
    iterators = {
        iterator.__name__ for iterator in _subclasses(block_iterator.BlockIterator) if iterator.visits_group_together
    }
    assert iterators == {"CausalBlocks"}


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
