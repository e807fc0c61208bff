"""The Python side of the C++ dispatcher.

- `library`: Finds and loads `_C`.
- `bindings`: The ctypes bindings of the C functions of `_C`.
- `callbacks`: The functions that C++ calls back.
- `table_structs`: The tables as C structs.
- `packs`: The installed kernel packs.
- `kernel_sets`: The kernels that the calls of a model need.
- `varlen_decision`: The decision about a call of torch.nn.attention.varlen.varlen_attn.
"""
