"""Bitmasks in the format of kernels, packed on the device of the mask without waits.

kernels/score_stages/bitmask.py reads the format.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry.mask_layout import TILE, TILE_WORDS, WORD_BITS


def words(bits: Tensor) -> Tensor:
    """Pack bool (..., R, C) into a bitmask, int32 (..., ceil(R / 64), ceil(C / 64) + 1, 128).

    The result is the orientation `rows` of the kernels. For the transposed bits, the result is `columns`.
    """
    R, C = bits.shape[-2:]
    rows, columns = -(-R // TILE), -(-C // TILE) + 1
    padded = F.pad(bits, (0, columns * TILE - C, 0, rows * TILE - R))
    # Row 16 w + 8 r + l // 4 and column 8 i + l % 4 * 2 + j of a tile are bit r + 2 (2 i + j) of lane l of warp w.
    places = padded.view(-1, rows, 4, 2, 8, columns, 8, 4, 2)
    ordered = places.permute(0, 1, 5, 2, 4, 7, 6, 8, 3).reshape(*bits.shape[:-2], rows, columns, TILE_WORDS, WORD_BITS)
    return (ordered.int() << torch.arange(WORD_BITS, dtype=torch.int32, device=bits.device)).sum(-1, dtype=torch.int32)


def bits(words: Tensor, R: int, C: int) -> Tensor:
    """Unpack a bitmask made by `words()` into bool (..., R, C)."""
    *planes, rows, columns, _ = words.shape
    ordered = (words.unsqueeze(-1) >> torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)) & 1
    places = ordered.view(-1, rows, columns, 4, 8, 4, 8, 2, 2).permute(0, 1, 3, 8, 4, 2, 6, 5, 7)
    return places.reshape(*planes, rows * TILE, columns * TILE)[..., :R, :C].bool()
