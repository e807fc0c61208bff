"""A bool mask as kernels read it (kernels/preprocess/mask.py), made in plain torch, and the mask of one: for calls that
kernels were to take, and math must. Nothing synchronises.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry.kernel_spec import LISTED, TALL
from ..registry.mask_layout import FLAGS, HALVES, KIND, MASKED, NONE, THREADS, TILE, WHOLE
from .bitmask import bits, words

MOST_NUMBERS = (2**31 - 1, 2**32 - 1)  # of a plane, and of all: can_be_digested of src/operands/mask.cpp


def digest(mask: Tensor, numbers: int) -> Tensor:
    """Of a (B or 1, Hq or 1, Sq, Sk) mask, int32 (B or 1, Hq or 1, numbers): with what gradients need where there is
    room for it. Turns, which ordered backwards write, are 0.
    """
    Sq, Sk = mask.shape[2:]
    rows = looked_at(Sq) if mask.stride(2) == 0 else Sq
    planes = mask[:, :, :rows].flatten(0, 1)
    found = states(planes)
    of_all = found if rows == Sq else found.expand(-1, -(-Sq // LISTED), -1)
    made = of_forwards(found, of_all, Sq, words(planes))
    if sum(part.numel() for part in made) < numbers * len(planes):
        columns = words(planes.mT)
        if rows < Sq:
            columns[..., -1, :] = columns[..., 0, :]
        made += of_gradients(of_all, columns)
    return torch.cat([part.flatten() for part in made]).view(*mask.shape[:2], numbers)


def of_forwards(found: Tensor, of_all: Tensor, Sq: int, rows: Tensor) -> list[Tensor]:
    """What forwards read: states, of all lines, lists of them, and words of queries' tiles."""
    return [found, *_lists(of_all & KIND, never_empty=True), *_lists(tall(of_all, Sq), never_empty=True), rows]


def of_gradients(of_all: Tensor, columns: Tensor) -> list[Tensor]:
    """And what gradients need behind it; words of keys' tiles."""
    return [*_lists((of_all & KIND).mT, never_empty=False), columns, torch.zeros_like(torch.cat([of_all, of_all]))]


def looked_at(Sq: int) -> int:
    """Rows of a mask that is the same for all queries."""
    return min(Sq, LISTED)


def seen(digest: Tensor, Sq: int, Sk: int) -> Tensor:
    """The mask, (B or 1, Hq or 1, Sq, Sk), of a digest."""
    batches, heads, numbers = digest.shape
    rows = looked_at(Sq) if numbers == numbers_of(looked_at(Sq), Sq, Sk) else Sq
    of_rows, of_columns = -(-rows // TILE), -(-Sk // TILE) + 1
    before = batches * heads * (-(-rows // LISTED) * -(-Sk // LISTED) + _lists_of_keys(Sq, Sk))
    packed = digest.flatten()[before : before + batches * heads * of_rows * of_columns * THREADS]
    found = bits(packed.view(batches, heads, of_rows, of_columns, THREADS), rows, Sk)
    return found if rows == Sq else found[:, :, :1].expand(-1, -1, Sq, -1)


def numbers_of(rows: int, Sq: int, Sk: int, *, gradients: bool = True) -> int:
    """Of a plane's digest, as src/operands/mask.cpp counts them."""
    lines, M, N = (-(-size // LISTED) for size in (rows, Sq, Sk))
    of_rows, of_columns = (-(-size // TILE) for size in (rows, Sk))
    forward = lines * N + _lists_of_keys(Sq, Sk) + of_rows * (of_columns + 1) * THREADS
    return forward + (2 * N * (M + 1) + of_columns * (of_rows + 1) * THREADS + 2 * M * N if gradients else 0)


def _lists_of_keys(Sq: int, Sk: int) -> int:
    """Numbers that these take: of blocks of LISTED and of TALL queries, masked and whole."""
    return 2 * sum(-(-Sq // rows) for rows in (LISTED, TALL)) * (-(-Sk // LISTED) + 1)


def states(planes: Tensor) -> Tensor:
    """Of the blocks of (P, Sq, Sk) bool, int32 (P, M, N). Keys that do not exist are hidden, rows that do not are not
    asked.
    """
    P, Sq, Sk = planes.shape
    tail = (0, -Sk % LISTED, 0, -Sq % LISTED)
    there = F.pad(torch.ones(Sq, 1, dtype=torch.bool, device=planes.device), (0, 0, *tail[2:]))
    padded = F.pad(planes, tail)
    blocks = [x.unflatten(2, (-1, LISTED)).unflatten(1, (-1, LISTED)) for x in (padded, ~padded & there)]
    some, hidden = (x.any(-1) for x in blocks)  # (P, M, LISTED, N)
    return state_of(*some.unflatten(2, (-1, TILE)).any(3).unbind(2), hidden.any(2))


def state_of(upper: Tensor, lower: Tensor, hides: Tensor) -> Tensor:
    """int32, of blocks: whether some of their upper and of their lower rows see something, and whether some do not."""
    masked = MASKED | (upper.int() | lower.int() << 1) << HALVES
    return torch.where(upper | lower, torch.where(hides, masked, WHOLE), NONE).int()


def tall(states: Tensor, Sq: int) -> Tensor:
    """Of blocks of TALL queries, (P, ceil(Sq / TALL), N): what their lines say where they say the same, and of a MASKED
    one, behind that, which of its parts of TILE queries see something.
    """
    begin = torch.arange(0, Sq, TALL, device=states.device)
    first, last = (states[:, (begin + i).clamp(max=Sq - 1) // LISTED] for i in (0, TALL - 1))
    upper, lower = (torch.where(of == WHOLE, 3, of >> HALVES) for of in (first, last))
    half = (begin % LISTED // TILE).view(-1, 1).to(states.dtype)
    masked = MASKED | ((upper | lower << 2) >> half & 7) << HALVES
    same = (first & KIND) == (last & KIND)
    return torch.where(same & (first & KIND != MASKED), first, masked).int()


def _lists(states: Tensor, *, never_empty: bool) -> tuple[Tensor, Tensor]:
    """How many blocks of each line are masked and whole, (2, P * lines), and which, (2, P * lines, room)."""
    lines = states.flatten(0, 1)
    kinds = torch.stack([lines & KIND == kind for kind in (MASKED, WHOLE)])
    counts = kinds.sum(-1, dtype=torch.int32)
    if never_empty:
        counts[0] += counts.sum(0) == 0
    entries = kinds.int().argsort(dim=-1, descending=True, stable=True)
    entries[0] |= lines.gather(-1, entries[0]).long() >> HALVES << FLAGS
    return counts, entries.int()
