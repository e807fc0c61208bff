"""Tiles: their coordinates, and the blocks that each tile visits.

- `seqlen_info`: The lengths of the sequence of a tile.
- `block_iterator`: The KV or query blocks of a tile, in visiting order.
- `block_sparse`: Block iterators over block-sparse lists.
- `sliding_window`: Block iterators of a sliding window.
- `tile`: Tile coordinates, and addressing of dense tensors.
- `varlen`: Addressing of packed sequences.
- `equal_lengths`: Addressing of launches that have work only for some lengths.
- `backward_tile_scheduler`: The order of tiles in the backward.
"""
