"""The question for a kernel that no pack holds, and its answer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Provided:
    """The answer to a call whose kernel is in no pack.

    Attributes:
        function: the address of the kernel's host function, or 0.
        handle: a TVM-FFI function object that the compiler loaded, or 0.
        why: why there is no kernel.
        later: whether the answer may be another one at a later call.
        library: what must stay loaded.
    """

    function: int = 0
    handle: int = 0
    why: str = ""
    later: bool = False
    library: object = None

    @classmethod
    def of_library(cls, library: ctypes.CDLL, name: str) -> Provided:
        """Return a kernel of a loaded shared object.

        Args:
            library: the shared object.
            name: of the kernel.

        Raises:
            AttributeError: the shared object has no such kernel.
        """
        function = getattr(library, f"__tvm_ffi_{name}")
        return cls(function=ctypes.cast(function, ctypes.c_void_p).value or 0, library=library)

    @property
    def is_there(self) -> bool:
        """Whether there is a kernel."""
        return bool(self.function or self.handle)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a call that asks for a kernel allows.

    Attributes:
        capturing: the call is recorded in a CUDA graph; nothing is compiled.
        must_wait: stock cannot serve the call in the meantime with the same result.
        training: gradients are wanted, so that kernels of the backward follow.
    """

    capturing: bool = False
    must_wait: bool = False
    training: bool = False
