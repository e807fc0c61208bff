"""Kernels for Hopper: TMA, WGMMA and warp specialization.

- `common`: Arguments that all kernels share.
- `forward`: The forward.
- `backward`: The backward, one kernel.
- `backward_96_keys`: The backward of head dims 192 and (192, 128), one kernel.
- `backward_split`: The backward in two kernels, backward_dq and backward_dkdv.
- `backward_dq`: The gradient of the queries.
- `backward_dkdv`: The gradients of keys and values.
- `backward_wide`: The backward of head dims above 256 in three kernels, backward_wide_dq and backward_wide_dkdv.
- `backward_wide_dq`: The gradient of the queries, for head dims above 256.
- `backward_wide_dkdv`: The gradient of the keys, or of the values, for head dims above 256.
- `backward_tile`: The backward of calls that fit one tile.
- `backward_dbias`: The gradient of a float mask.
- `decode`: Few queries against many keys.
- `decode_shared`: The same, where V is the first columns of K.
"""
