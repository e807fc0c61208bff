"""Kernels for sm_80 and newer: cp.async and mma.sync.

- `forward`: The forward.
- `backward`: The backward.
- `decode`: Few queries against many keys.
"""
