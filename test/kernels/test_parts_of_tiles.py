"""Tall tiles and their parts, from plain numbers: a part walks over the blocks that it sees something of, in the order
of the tile's, and over none ahead of the first of them or behind the last. No GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from torch_flashplug.ops import mask_preprocess_reference
from torch_flashplug.registry.kernel_spec import LISTED, TALL
from torch_flashplug.registry.mask_layout import TILE

pytest.importorskip("cutlass", reason="the DSL is needed to import kernels")

from torch_flashplug.kernels.tiling import block_iterator as walk  # noqa: E402
from torch_flashplug.kernels.tiling import block_sparse as listed  # noqa: E402
from torch_flashplug.kernels.tiling import tile as pieces  # noqa: E402

SEED = 20261125


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed, "Int32", int)
    monkeypatch.setattr(listed.cute.arch, "make_warp_uniform", lambda x: x)
    monkeypatch.setattr(listed.cutlass, "select_", lambda condition, this, other: this if condition else other)
    monkeypatch.setattr(listed.SparseKvBlockRange192, "seen_by", listed.SparseKvBlockRange192.seen_by.__wrapped__)
    monkeypatch.setattr(listed.SparseBlockRange, "entry", entry)
    monkeypatch.setattr(listed.SparseBlockRange, "load", lambda run, of, position: of[run.row][position])


def entry(run: object, j: int, masked: SimpleNamespace, whole: SimpleNamespace) -> int:
    behind = j >= run.num_masked
    of, position = (whole, j - run.num_masked) if behind else (masked, j + run.skipped)
    return of.iterator[run.row][position]


def lists_of(mask: Tensor) -> SimpleNamespace:
    """Those of tall blocks that a digest of an (Sq, Sk) mask has."""
    tall = mask_preprocess_reference.tall(mask_preprocess_reference.states(mask[None]), len(mask))
    counts, (masked, whole) = (x.tolist() for x in mask_preprocess_reference._lists(tall, never_empty=True))
    masked = [[*row, 0] for row in masked]  # a look behind the last one finds what is stored there
    return SimpleNamespace(
        masked=SimpleNamespace(iterator=masked),
        whole=SimpleNamespace(iterator=whole),
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
        yield "stripes", (rows // TILE + keys // LISTED) % 3 == 0
        for share in (0.02, 0.5):
            parts = torch.rand(-(-Sq // TILE), -(-Sk // LISTED), generator=generator) < share
            whole = parts.repeat_interleave(TILE, 0).repeat_interleave(LISTED, 1)[:Sq, :Sk]
            yield f"blocks {share}", whole
            yield f"some of {share}", whole & (torch.rand(Sq, Sk, generator=generator) < 0.3)


MASKS = {f"{name} {tuple(mask.shape)}": mask for name, mask in masks()}


@pytest.mark.parametrize("name", MASKS)
def test_parts_walk_over_what_they_see(name: str) -> None:
    mask = MASKS[name]
    Sq, Sk = mask.shape
    lists, sizes = lists_of(mask), walk.Sizes(Sq, Sk)
    bound = listed.BlockSparse192Iterator(lists, lists).at(sizes, TALL, LISTED)
    for block in range(-(-Sq // TALL)):
        tile = pieces.Tile(block, 0, 0, sizes)
        run = bound.keys(tile)
        blocks = [run.nth(j) for j in range(run.count)]
        for first in range(block * TALL, (block + 1) * TALL, TILE):
            others, mine = bound.keys_of_part(tile, first, TILE, True)
            assert others + mine.count + mine.behind == run.count and mine.count > 0
            if first >= Sq:  # of rows that do not exist
                assert mine.count == 1
                continue
            found = [mine.nth(j) for j in range(mine.count)]
            assert found == blocks[others : others + mine.count]
            seen = [n for n in blocks if mask[first : first + TILE, n * LISTED : (n + 1) * LISTED].any()]
            assert set(seen) <= set(found)
            start = walk.BlockSubrange(True, 0, 1)
            for section in (start, *mine.sections()):
                for j in range(section.begin, section.end - 1):
                    assert mine.next(j, section) == found[j + 1]
            if not seen:
                assert mine.count == 1
            elif mine.num_masked > 0:
                assert found[0] == seen[0] and (run.num_masked < run.count or found[-1] == seen[-1])
