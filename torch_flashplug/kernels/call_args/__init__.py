"""The kernel ABI in the DSL. Arguments follow the order of registry/kernel_args.py.

- `operands`: Arguments that several kernel kinds share.
- `forward`: The forward.
- `backward`: The backward.
- `decode`: Decode.
- `dbias`: The gradient of a bias.
- `tile_backward`: The backward of one tile.
"""
