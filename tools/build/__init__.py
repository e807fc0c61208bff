"""Build of kernel packs and wheels.

- `aot`: Compilation of the kernel table into kernel packs.
- `find_dependencies`: Search for the packages that the build of _C needs.
- `make_wheel`: Wheels of this checkout.
- `sass`: Registers, spills and instructions of kernels.
- `shared_object`: Reader for the requirements of a shared object.
"""
