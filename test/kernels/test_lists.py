"""Accumulation ranks of block-sparse lists for the deterministic backward. No GPU.

With a wrong rank the kernel would wait forever.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from torch_flashplug.ops.block_sparse_order import turns
from torch_flashplug.registry.kernel_spec import LISTED, SHARE

CALLS = [(1, 1, 200, 100), (1, 2, 1000, 130), (2, 1, 700, 1300), (2, 3, 2048, 1984)]  # batch, heads, Sq, Sk


def padded_lists(rows: list[list[int]], shape: tuple[int, ...], blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return counts and indices in the form of FlexAttention: each list is padded with all missing blocks."""
    filled = [[*row, *(m for m in range(blocks) if m not in row)] for row in rows]
    count = torch.tensor([len(row) for row in rows], dtype=torch.int32).view(shape)
    return count, torch.tensor(filled, dtype=torch.int32).view(*shape, blocks)


def random_block_lists(batch: int, heads: int, Sq: int, Sk: int, seed: int):
    """Return random lists of masked and full query blocks, in any order, for each block of keys of each plane."""
    draw, M, N = random.Random(seed), -(-Sq // LISTED), -(-Sk // LISTED)
    rows = []
    for _ in range(batch * heads * N):
        blocks = draw.sample(range(M), draw.randint(0, M))
        masked = draw.randint(0, len(blocks))
        rows.append((blocks[:masked], blocks[masked:]))
    return rows, M, N


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_accumulation_ranks_match_brute_force(call, seed):
    batch, heads, Sq, Sk = call
    rows, M, N = random_block_lists(*call, seed)
    lists = [padded_lists([row[kind] for row in rows], (batch, heads, N), M) for kind in (0, 1)]
    ranks = turns(lists, Sq, Sk)
    assert all(x.dtype == torch.int32 and x.shape == (batch, heads, N, M) for x in ranks)
    for number, row in enumerate(rows):
        plane, n = divmod(number, N)
        for kind in (0, 1):
            for entry, m in enumerate(row[kind]):
                later = [k for k in range(n + 1, N) if m in rows[plane * N + k][0] + rows[plane * N + k][1]]
                keys = sum(min(LISTED, Sk - k * LISTED) for k in later)
                assert ranks[kind].flatten(0, 1)[plane, n, entry] == -(-keys // SHARE)


@pytest.mark.parametrize("tile_n", [128, 64])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_accumulation_ranks_follow_the_launch_order(call, tile_n):
    """The tiles of keys that list a block of queries have ranks 0, 1, 2, ... in launch order."""
    key_order = pytest.importorskip(
        "torch_flashplug.kernels.tiling.backward_tile_scheduler", reason="the DSL is needed for kernels"
    )
    from torch_flashplug.kernels.tiling import block_iterator, block_sparse

    batch, heads, Sq, Sk = call
    rows, M, N = random_block_lists(*call, seed=7)
    lists = [padded_lists([row[kind] for row in rows], (batch, heads, N), M) for kind in (0, 1)]
    ranks = turns(lists, Sq, Sk)
    bound = block_sparse.BoundBlockSparse(None, block_iterator.SeqlenInfo(Sq, Sk), 64, tile_n)
    order = key_order.BackwardTileScheduler(True, -(-Sk // tile_n), heads, batch * heads, 1, bound, in_order=True)
    last_ranks = {}
    for n_block, head, b in (order.tile(number) for number in range(order.total)):
        n = n_block * tile_n // LISTED
        for kind, blocks in enumerate(rows[(b * heads + head) * N + n]):
            run = SimpleNamespace(num_later_ranges=ranks[kind][b, head, n].tolist().__getitem__)
            for entry, m in enumerate(blocks):
                rank = last_ranks[b, head, m] = last_ranks.get((b, head, m), -1) + 1
                assert order.accumulation_rank(n_block, run, entry) == rank
