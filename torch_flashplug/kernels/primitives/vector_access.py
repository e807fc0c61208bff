"""Vector views of global memory: consecutive elements of a thread at an address."""

from __future__ import annotations

import cutlass.cute as cute

QUAD = 4  # consecutive floats per lane


def vector_at(pointer: cute.Pointer, dtype, size: int) -> cute.Tensor:
    """Return `size` elements from a 16-byte aligned address."""
    aligned = cute.make_ptr(dtype, pointer.toint(), cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(aligned, cute.make_layout(size))
