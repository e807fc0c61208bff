"""Accumulation ranks of block-sparse lists, for kernels (kernels/tiling/block_sparse.py).

The ranks are computed from FlexAttention's tensors on the device of the tensors, without waiting for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..registry.kernel_spec import LISTED, SHARE


def turns(lists: list[tuple[Tensor, Tensor]], Sq: int, Sk: int) -> list[Tensor]:
    """Return the accumulation rank of each list entry, for the deterministic backward.

    The rank of an entry is the number of `SHARE`s of later keys for which the same block of queries is listed.

    Args:
        lists: Pairs of count (..., N) and index (..., N, C), for partial blocks and for full blocks. A list has the
            blocks of queries of one of N blocks of keys, without duplicates. The padding of a list must consist of
            valid block indices; the ranks of padding are meaningless.
        Sq: Number of queries.
        Sk: Number of keys.
    """
    shape, device = lists[0][1].shape, lists[0][1].device
    first_key = torch.arange(shape[-2], device=device)[:, None] * LISTED
    shares = ((Sk - first_key + SHARE - 1) // SHARE).clamp(0, LISTED // SHARE).int()  # SHAREs of each block of keys
    seen = torch.zeros(*shape[:-1], -(-Sq // LISTED), dtype=torch.int32, device=device)
    for count, index in lists:
        listed = torch.arange(index.shape[-1], device=device) < count[..., None]
        seen.scatter_add_(-1, index.long(), listed * shares)
    later = seen.flip(-2).cumsum(-2, dtype=torch.int32).flip(-2) - seen
    return [later.gather(-1, index.long()) for _, index in lists]
