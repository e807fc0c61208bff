"""Kernels launched before the main kernel.

- `mask`: A bool mask becomes a bitmask and block-sparse lists.
- `varlen_tile_list`: The tile lists of packed sequences.
- `quantize`: Operands in 8 bits.
- `hadamard`: The Hadamard rotation of queries and keys.
"""
