"""A bool mask as kernels read it (kernels/parts/digest.py), made in plain torch, and the mask of one: for calls that
kernels were to take, and math must. Nothing synchronises.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .spec import LISTED
from .words import THREADS, TILE, bits, words

NONE, MASKED, WHOLE = range(3)  # blocks: nothing, some or all of it is seen


def digest(mask: Tensor, numbers: int) -> Tensor:
    """Of a (B or 1, Hq or 1, Sq, Sk) mask, int32 (B or 1, Hq or 1, numbers): with what gradients need where there is
    room for it.
    """
    planes = mask.flatten(0, 1)
    found = states(planes)
    made = [found, *_lists(found, never_empty=True), words(planes)]
    if sum(part.numel() for part in made) < numbers * len(planes):
        made += [*_lists(found.mT, never_empty=False), words(planes.mT)]
    return torch.cat([part.flatten() for part in made]).view(*mask.shape[:2], numbers)


def seen(digest: Tensor, Sq: int, Sk: int) -> Tensor:
    """The mask, (B or 1, Hq or 1, Sq, Sk)."""
    batches, heads, _ = digest.shape
    M, N = (-(-size // LISTED) for size in (Sq, Sk))
    rows, columns = -(-Sq // TILE), -(-Sk // TILE) + 1
    before = batches * heads * (M * N + 2 * (M + M * N))
    packed = digest.flatten()[before : before + batches * heads * rows * columns * THREADS]
    return bits(packed.view(batches, heads, rows, columns, THREADS), Sq, Sk)


def states(planes: Tensor) -> Tensor:
    """Of the blocks of (P, Sq, Sk) bool, int32 (P, M, N). Keys that do not exist are hidden, rows that do not are not
    asked.
    """
    P, Sq, Sk = planes.shape
    tail = (0, -Sk % LISTED, 0, -Sq % LISTED)
    there = F.pad(torch.ones(Sq, 1, dtype=torch.bool, device=planes.device), (0, 0, *tail[2:]))
    padded = F.pad(planes, tail)
    blocks = [x.unflatten(2, (-1, LISTED)).unflatten(1, (-1, LISTED)) for x in (padded, ~padded & there)]
    some, hidden = (x.any(-1).any(2) for x in blocks)
    return torch.where(some, torch.where(hidden, MASKED, WHOLE), NONE).int()


def _lists(states: Tensor, *, never_empty: bool) -> tuple[Tensor, Tensor]:
    """How many blocks of each line are masked and whole, (2, P * lines), and which, (2, P * lines, room)."""
    kinds = torch.stack([states.flatten(0, 1) == kind for kind in (MASKED, WHOLE)])
    counts = kinds.sum(-1, dtype=torch.int32)
    if never_empty:
        counts[0] += counts.sum(0) == 0
    return counts, kinds.int().argsort(dim=-1, descending=True, stable=True).int()
