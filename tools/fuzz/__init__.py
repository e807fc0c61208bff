"""Fuzzer: random calls of F.scaled_dot_product_attention against fp64.

- `fuzz`: Program that starts the workers and records the results.
- `calls`: Random calls as data.
- `check`: Comparison of a call with fp64.
- `tensors`: Tensors of a call, in random layouts.
- `transforms`: Ways in which a program calls attention, such as vmap and checkpoint.
"""
