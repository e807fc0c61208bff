"""What kernels read beside the lists of a block-sparse call (kernels/tiling/block_sparse.py), made from FlexAttention's
own tensors on their device: nothing synchronises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..registry.kernel_spec import LISTED, SHARE


def turns(lists: list[tuple[Tensor, Tensor]], Sq: int, Sk: int) -> list[Tensor]:
    """For the ordered backward: of each entry, how many SHAREs of later keys list the same block of queries.

    lists: (count (..., N), index (..., N, C)) of masked blocks, and of whole ones: the blocks of queries of each of N
    blocks of keys, none twice. What a list is padded with must be a block, too; its turns mean nothing.
    """
    shape, device = lists[0][1].shape, lists[0][1].device
    first_key = torch.arange(shape[-2], device=device)[:, None] * LISTED
    shares = ((Sk - first_key + SHARE - 1) // SHARE).clamp(0, LISTED // SHARE).int()  # of each block of keys
    seen = torch.zeros(*shape[:-1], -(-Sq // LISTED), dtype=torch.int32, device=device)
    for count, index in lists:
        listed = torch.arange(index.shape[-1], device=device) < count[..., None]
        seen.scatter_add_(-1, index.long(), listed * shares)
    later = seen.flip(-2).cumsum(-2, dtype=torch.int32).flip(-2) - seen
    return [later.gather(-1, index.long()) for _, index in lists]
