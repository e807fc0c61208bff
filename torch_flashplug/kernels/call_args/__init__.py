"""The kernel ABI in the DSL, generated from the rows of registry/kernel_args.py.

- `kernel_call`: The signature of a kernel, the struct of arguments, and the base class of kernels.
- `fake_tensors`: The tensor arguments for cute.compile.
"""
