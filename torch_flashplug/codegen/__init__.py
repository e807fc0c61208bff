"""Compilation of kernels: from a kernel name to a loaded shared object.

- `fingerprint`: The hash of the sources of a kernel.
- `dsl`: The installation of the compiler (CuTe DSL).
- `compiler`: Compiles a kernel spec; the only module besides kernels/ that imports the compiler.
- `linker`: Links objects into a shared object.
- `pack_error.c`: The error reporters, linked into each shared object.
- `host_cpu`: The CPU features that compiled host code may use.
- `kernel_cache`: The compiled kernels on disk.
- `worker`: A process that compiles kernels for another process.
- `compile_pool`: The workers of this process.
- `kernel_request`: The request for a kernel that no pack holds, and the answer.
- `jit`: Kernels at their first use.
"""
