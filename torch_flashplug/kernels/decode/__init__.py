"""Parts of the decode kernels.

- `pack_gqa`: The query heads of one KV head, packed into one tile.
- `split_kv`: The combination of partial results of split-KV.
- `kv_load`: The loads of keys and values.
"""
