"""Tile grids of the split backward: blocks of query rows for dQ, blocks of keys for dK and dV."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from ..primitives.tile_scheduler import TileScheduler
from ..tiling.backward_tile_scheduler import BackwardTileScheduler
from ..tiling.block_iterator import BlockIterator
from ..tiling.seqlen_info import SeqlenInfo
from ..tiling.tile import TileAddressing, TileGrid


def grid_of_rows(
    addressing: TileAddressing, block_iterator: BlockIterator, mQ: cute.Tensor, mK: cute.Tensor, tile_m: int,
    l2_group_heads: Int32,
) -> TileGrid:  # fmt: skip
    """Return the tile grid of all query heads.

    Args:
        addressing: tile addressing of the call.
        block_iterator: block iterator of the call.
        mQ: TMA coordinates of Q (rows, columns, heads, batch).
        mK: TMA coordinates of K, likewise.
        tile_m: query rows of a tile.
        l2_group_heads: query heads of an L2 group, for a dense batch.
    """
    (Sq, _, Hq, _), (Sk, _, Hkv, _) = mQ.shape, mK.shape
    num_m_blocks = addressing.blocks_of_rows(Sq, tile_m)
    longest_first = block_iterator.tile_lengths_vary or addressing.sequence_lengths_vary
    heads = Hq * addressing.batch(mQ)
    l2_group_heads = addressing.heads_per_l2_group(l2_group_heads, heads, Hq // Hkv)
    order = TileScheduler(longest_first, num_m_blocks, Hq, heads, l2_group_heads)
    return addressing.of_rows(order, SeqlenInfo(Sq, Sk), Hkv)


def grid_of_keys(
    addressing: TileAddressing, block_iterator: BlockIterator, mQ: cute.Tensor, mK: cute.Tensor, shares: Int32,
    tile: tuple[int, int], l2_group_heads: Int32,
) -> TileGrid:  # fmt: skip
    """Return the tile grid of all KV heads.

    Args:
        addressing: tile addressing of the call.
        block_iterator: block iterator of the call.
        mQ: TMA coordinates of Q (rows, columns, heads, batch).
        mK: TMA coordinates of K, likewise.
        shares: heads of dK and dV, a multiple of the KV heads.
        tile: query rows and keys of a tile.
        l2_group_heads: heads of an L2 group, for a dense batch.
    """
    sizes = SeqlenInfo(mQ.shape[0], mK.shape[0])
    num_n_blocks = addressing.blocks_of_keys(sizes.Sk, tile[1])
    all_shares = addressing.batch(mK) * shares
    l2_group_heads = addressing.heads_per_l2_group(l2_group_heads, all_shares, 1, of_keys=True)
    bound_iterator = block_iterator.bind(sizes, *tile)
    order = BackwardTileScheduler(True, num_n_blocks, shares, all_shares, l2_group_heads, bound_iterator)
    return addressing.of_keys(order, sizes)
