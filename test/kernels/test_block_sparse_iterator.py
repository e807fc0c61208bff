"""Tall tiles and their parts in block-sparse lists, on plain integers. No GPU.

A part visits all blocks with visible keys, in the order of the tile, and no block ahead of the first or behind the last
visible block.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from torch_flashplug.ops import mask_preprocess_reference
from torch_flashplug.registry.kernel_spec import SPARSE_BLOCK, SPARSE_BLOCK_M_192
from torch_flashplug.registry.mask_layout import TILE

pytest.importorskip("cutlass", reason="the DSL is needed to import kernels")

from torch_flashplug.kernels.tiling import (
    block_iterator,  # noqa: E402
    block_sparse,  # noqa: E402
)
from torch_flashplug.kernels.tiling import tile as tile_addressing  # noqa: E402

SEED = 20261125


@pytest.fixture(autouse=True)
def use_plain_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sparse, "Int32", int)
    monkeypatch.setattr(block_sparse.cute.arch, "make_warp_uniform", lambda x: x)
    monkeypatch.setattr(block_sparse.cutlass, "select_", lambda condition, yes, no: yes if condition else no)
    monkeypatch.setattr(
        block_sparse.SparseKvBlockRange192,
        "visible_positions",
        block_sparse.SparseKvBlockRange192.visible_positions.__wrapped__,
    )
    monkeypatch.setattr(block_sparse.SparseBlockRange, "entry", read_entry)
    monkeypatch.setattr(
        block_sparse.SparseBlockRange, "load", lambda block_range, lists, position: lists[block_range.row][position]
    )


def read_entry(block_range: object, j: int, masked: SimpleNamespace, whole: SimpleNamespace) -> int:
    is_full = j >= block_range.num_masked
    entries, position = (whole, j - block_range.num_masked) if is_full else (masked, j + block_range.skipped)
    return entries.iterator[block_range.row][position]


def tall_lists(mask: Tensor) -> SimpleNamespace:
    """Return the lists of tall blocks that preprocessing makes for an (Sq, Sk) mask."""
    tall = mask_preprocess_reference.tall(mask_preprocess_reference.states(mask[None]), len(mask))
    counts, (masked, full_blocks) = (x.tolist() for x in mask_preprocess_reference._lists(tall, never_empty=True))
    masked = [[*row, 0] for row in masked]  # a read behind the last entry returns the stored number
    return SimpleNamespace(
        partial=SimpleNamespace(iterator=masked),
        full=SimpleNamespace(iterator=full_blocks),
        row=lambda batch, head, row: row,
        counts=lambda row, parts: (counts[0][row], counts[0][row] + counts[1][row]),
    )


def masks() -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(SEED)
    for Sq, Sk in ((1, 1), (64, 130), (191, 700), (192, 128), (193, 128), (300, 1000), (577, 640), (1153, 900)):
        rows, keys = torch.arange(Sq)[:, None], torch.arange(Sk)
        yield "causal", keys <= rows
        yield "documents", (rows // 90 == keys // 90) & (keys <= rows)
        yield "window", (keys <= rows) & (rows - keys < 150)
        yield "all", keys + rows >= 0
        yield "none", keys + rows < 0
        yield "stripes", (rows // TILE + keys // SPARSE_BLOCK) % 3 == 0
        for share in (0.02, 0.5):
            parts = torch.rand(-(-Sq // TILE), -(-Sk // SPARSE_BLOCK), generator=generator) < share
            mask = parts.repeat_interleave(TILE, 0).repeat_interleave(SPARSE_BLOCK, 1)[:Sq, :Sk]
            yield f"blocks {share}", mask
            yield f"some of {share}", mask & (torch.rand(Sq, Sk, generator=generator) < 0.3)


MASKS = {f"{name} {tuple(mask.shape)}": mask for name, mask in masks()}


@pytest.mark.parametrize("name", MASKS)
def test_tile_parts_visit_exactly_their_visible_blocks(name: str) -> None:
    mask = MASKS[name]
    Sq, Sk = mask.shape
    lists, sizes = tall_lists(mask), block_iterator.SeqlenInfo(Sq, Sk)
    bound = block_sparse.BlockSparse192Iterator(lists, lists).bind(sizes, SPARSE_BLOCK_M_192, SPARSE_BLOCK)
    for block in range(-(-Sq // SPARSE_BLOCK_M_192)):
        tile = tile_addressing.Tile(block, 0, 0, sizes)
        block_range = bound.kv_blocks(tile)
        blocks = [block_range.nth(j) for j in range(block_range.count)]
        for first_row in range(block * SPARSE_BLOCK_M_192, (block + 1) * SPARSE_BLOCK_M_192, TILE):
            num_skipped, part_run = bound.kv_range_for_warpgroup(tile, first_row, TILE, True)
            assert (
                num_skipped + part_run.count + part_run.num_trailing_skipped == block_range.count and part_run.count > 0
            )
            if first_row >= Sq:  # nonexistent rows
                assert part_run.count == 1
                continue
            visited = [part_run.nth(j) for j in range(part_run.count)]
            assert visited == blocks[num_skipped : num_skipped + part_run.count]
            visible_blocks = [
                n for n in blocks if mask[first_row : first_row + TILE, n * SPARSE_BLOCK : (n + 1) * SPARSE_BLOCK].any()
            ]
            assert set(visible_blocks) <= set(visited)
            start = block_iterator.BlockSubrange(True, 0, 1)
            for subrange in (start, *part_run.subranges()):
                for j in range(subrange.begin, subrange.end - 1):
                    assert part_run.next(j, subrange) == visited[j + 1]
            if not visible_blocks:
                assert part_run.count == 1
            elif part_run.num_masked > 0:
                assert visited[0] == visible_blocks[0] and (
                    block_range.num_masked < block_range.count or visited[-1] == visible_blocks[-1]
                )
