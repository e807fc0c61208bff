"""Parts of the backward kernels.

- `pre_post_process`: The kernels before and after the backward: delta, and the conversion of dQ.
- `dq_product`: The product dS K of a step on Hopper, and its addition to the workspace.
- `dq_writer`: The warp that adds dQ up in global memory.
- `tile_grids`: The tiles of the split backward on Hopper.
- `wide_tile`: Operands and products of a tile on Hopper, for head dims above 256.
- `dbias_reduce`: The sum of the gradient of a broadcast bias.
- `workspace`: The workspace of dQ.
"""
