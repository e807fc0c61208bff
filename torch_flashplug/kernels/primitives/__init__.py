"""The building blocks of kernels, which know nothing about attention.

- `sm90`: Hopper: pipelines, TMA, WGMMA, the dynamic tile scheduler, warpgroup order.
- `sm80`: Ampere and newer: cp.async, ldmatrix, mma.sync, swizzled tiles.
- `fragments`: The elements of a tile that a thread holds.
- `dtype`: Element types and conversions.
- `tile_scheduler`: The order of tiles in a launch.
- `vector_access`: Vector loads and stores in global memory.
"""
