"""PTX interpreter: runs kernels of the packs on a CPU.

- `build_pack`: Program that links the interpreter and kernels into a pack.
"""
