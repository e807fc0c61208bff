"""Tables and rules about kernels and calls. Standard library only.

- `features`: The features that a call can need and a kernel can support, with the reason texts of explain().
- `dtypes`: The dtypes of kernels, and the operands that each dtype brings.
- `architectures`: The backends (FA3, FA2, math) and the compute capabilities that each backend runs on.
- `kernel_args`: The kernel ABI: the arguments of each kernel kind, in order.
- `kernel_spec`: The identity of a kernel, and the budgets that make a tile shape legal.
- `kernel_table`: All kernels, and the kernel packs that hold them.
- `dispatch_table`: The measured classes of calls that auto mode serves.
- `stock_bugs`: The calls that stock PyTorch fails or gets wrong.
- `quant_recipes`: The recipes of 8-bit attention.
- `mask_layout`: The layout of bitmasks and block-sparse lists.
"""
