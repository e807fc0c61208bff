"""Compilation of kernels: from a kernel's name to a shared object that is loaded.

fingerprint.py    what a kernel is made from, as a hash
dsl.py            the installation of the compiler (CuTe DSL)
compiler.py       a spec to a compiled kernel; the only module besides kernels/ that imports the compiler
linker.py         objects to a shared object; pack_error.c is linked into each
host_cpu.py       the CPU features that compiled host code may use
kernel_cache.py   compiled kernels on disk
worker.py         a process that compiles kernels for another one
compile_pool.py   the workers of this process
provided.py       the question for a kernel, and the answer
jit.py            kernels at their first use
"""
