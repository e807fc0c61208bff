"""Reference of mask preprocessing in plain torch: a bool mask in the format of kernels, and back.

`preprocess_mask()` writes the format of kernels/preprocess/mask.py: block states, block-sparse lists and
the bitmask. The code serves calls planned for kernels that the reference math must run in the end. The host waits for
nothing.

A plane is one (batch, head) pair of the mask. A line is one row of blocks of `SPARSE_BLOCK` query rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry.kernel_spec import SPARSE_BLOCK, SPARSE_BLOCK_M_192
from ..registry.mask_layout import EMPTY, FULL, INDEX_BITS, PARTIAL, STATE_BITS, STATE_MASK, TILE, TILE_WORDS
from .bitmask import bits, words

MOST_NUMBERS = (2**31 - 1, 2**32 - 1)  # of one plane, and of all planes (are_numbers_countable of operands/mask.cpp)


def preprocess_mask(mask: Tensor, numbers: int) -> Tensor:
    """Preprocess a mask (B or 1, Hq or 1, Sq, Sk) into int32 (B or 1, Hq or 1, numbers).

    The parts for gradients are included if `numbers` is large enough. The accumulation ranks, written by deterministic
    backward kernels, are 0.
    """
    Sq, Sk = mask.shape[2:]
    rows = looked_at(Sq) if mask.stride(2) == 0 else Sq
    planes = mask[:, :, :rows].flatten(0, 1)
    line_states = states(planes)
    all_states = line_states if rows == Sq else line_states.expand(-1, -(-Sq // SPARSE_BLOCK), -1)
    parts = of_forwards(line_states, all_states, Sq, words(planes))
    if sum(part.numel() for part in parts) < numbers * len(planes):
        columns = words(planes.mT)
        if rows < Sq:
            columns[..., -1, :] = columns[..., 0, :]
        parts += of_gradients(all_states, columns)
    return torch.cat([part.flatten() for part in parts]).view(*mask.shape[:2], numbers)


def of_forwards(line_states: Tensor, all_states: Tensor, Sq: int, rows: Tensor) -> list[Tensor]:
    """Return the parts for forwards: states, block-sparse lists of all lines, and `rows`, the bitmask by query tile."""
    lists = _lists(all_states & STATE_MASK, never_empty=True)
    return [line_states, *lists, *_lists(tall(all_states, Sq), never_empty=True), rows]


def of_gradients(all_states: Tensor, columns: Tensor) -> list[Tensor]:
    """Return the parts for gradients, which follow the forward parts. `columns` is the bitmask by key tile."""
    ranks = torch.zeros_like(torch.cat([all_states, all_states]))
    return [*_lists((all_states & STATE_MASK).mT, never_empty=False), columns, ranks]


def looked_at(Sq: int) -> int:
    """Return the number of rows preprocessed for a mask that is broadcast over queries."""
    return min(Sq, SPARSE_BLOCK)


def visible_scores(metadata: Tensor, Sq: int, Sk: int) -> Tensor:
    """Return the bool mask (B or 1, Hq or 1, Sq, Sk) of mask metadata."""
    batches, heads, numbers = metadata.shape
    rows = looked_at(Sq) if numbers == numbers_of(looked_at(Sq), Sq, Sk) else Sq
    of_rows, of_columns = -(-rows // TILE), -(-Sk // TILE) + 1
    before = batches * heads * (-(-rows // SPARSE_BLOCK) * -(-Sk // SPARSE_BLOCK) + _lists_of_keys(Sq, Sk))
    packed = metadata.flatten()[before : before + batches * heads * of_rows * of_columns * TILE_WORDS]
    mask = bits(packed.view(batches, heads, of_rows, of_columns, TILE_WORDS), rows, Sk)
    return mask if rows == Sq else mask[:, :, :1].expand(-1, -1, Sq, -1)


def numbers_of(rows: int, Sq: int, Sk: int, *, gradients: bool = True) -> int:
    """Return the size of the metadata of one plane in 32-bit numbers, as src/operands/mask.cpp does."""
    lines, M, N = (-(-size // SPARSE_BLOCK) for size in (rows, Sq, Sk))
    of_rows, of_columns = (-(-size // TILE) for size in (rows, Sk))
    forward = lines * N + _lists_of_keys(Sq, Sk) + of_rows * (of_columns + 1) * TILE_WORDS
    return forward + (2 * N * (M + 1) + of_columns * (of_rows + 1) * TILE_WORDS + 2 * M * N if gradients else 0)


def _lists_of_keys(Sq: int, Sk: int) -> int:
    """Return the size of the lists of key blocks: partial and full blocks, of 128 and of 192 query rows."""
    return 2 * sum(-(-Sq // rows) for rows in (SPARSE_BLOCK, SPARSE_BLOCK_M_192)) * (-(-Sk // SPARSE_BLOCK) + 1)


def states(planes: Tensor) -> Tensor:
    """Return the block states, int32 (P, M, N), of a bool mask (P, Sq, Sk).

    Keys beyond Sk are masked out. Rows beyond Sq do not count.
    """
    P, Sq, Sk = planes.shape
    tail = (0, -Sk % SPARSE_BLOCK, 0, -Sq % SPARSE_BLOCK)
    exists = F.pad(torch.ones(Sq, 1, dtype=torch.bool, device=planes.device), (0, 0, *tail[2:]))
    padded = F.pad(planes, tail)
    blocks = [x.unflatten(2, (-1, SPARSE_BLOCK)).unflatten(1, (-1, SPARSE_BLOCK)) for x in (padded, ~padded & exists)]
    visible, hidden = (x.any(-1) for x in blocks)  # (P, M, SPARSE_BLOCK, N)
    return state_of(*visible.unflatten(2, (-1, TILE)).any(3).unbind(2), hidden.any(2))


def state_of(upper: Tensor, lower: Tensor, hides_any: Tensor) -> Tensor:
    """Return block states, int32.

    Args:
        upper: True if a score in the upper half of the rows is visible.
        lower: True if a score in the lower half of the rows is visible.
        hides_any: True if a score of the block is masked out.
    """
    masked = PARTIAL | (upper.int() | lower.int() << 1) << STATE_BITS
    return torch.where(upper | lower, torch.where(hides_any, masked, FULL), EMPTY).int()


def tall(states: Tensor, Sq: int) -> Tensor:
    """Return the states of blocks of `SPARSE_BLOCK_M_192` query rows, (P, ceil(Sq / SPARSE_BLOCK_M_192), N).

    A block of `SPARSE_BLOCK_M_192` rows lies in two lines. The state is that of the lines if both agree, else
    `PARTIAL`. The higher bits of a `PARTIAL` state say which parts of `TILE` query rows have visible scores.
    """
    begin = torch.arange(0, Sq, SPARSE_BLOCK_M_192, device=states.device)
    first, last = (states[:, (begin + i).clamp(max=Sq - 1) // SPARSE_BLOCK] for i in (0, SPARSE_BLOCK_M_192 - 1))
    upper, lower = (torch.where(state == FULL, 3, state >> STATE_BITS) for state in (first, last))
    half = (begin % SPARSE_BLOCK // TILE).view(-1, 1).to(states.dtype)
    masked = PARTIAL | ((upper | lower << 2) >> half & 7) << STATE_BITS
    same = (first & STATE_MASK) == (last & STATE_MASK)
    return torch.where(same & (first & STATE_MASK != PARTIAL), first, masked).int()


def _lists(states: Tensor, *, never_empty: bool) -> tuple[Tensor, Tensor]:
    """Return counts (2, P * lines) and indices (2, P * lines, capacity) of partial and of full blocks in each line."""
    lines = states.flatten(0, 1)
    kinds = torch.stack([lines & STATE_MASK == kind for kind in (PARTIAL, FULL)])
    counts = kinds.sum(-1, dtype=torch.int32)
    if never_empty:
        counts[0] += counts.sum(0) == 0
    entries = kinds.int().argsort(dim=-1, descending=True, stable=True)
    entries[0] |= lines.gather(-1, entries[0]).long() >> STATE_BITS << INDEX_BITS
    return counts, entries.int()
