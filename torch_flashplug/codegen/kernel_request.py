"""Request for a kernel that no pack holds, and the answer to the request."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Provided:
    """Answer to a request for a kernel that is in no pack.

    Attributes:
        function: the address of the kernel's host function, or 0.
        handle: a TVM-FFI function object loaded by the compiler, or 0.
        why: the reason why there is no kernel.
        later: whether a later call may get a different answer.
        library: the object that must stay loaded.
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
            name: the name of the kernel.

        Raises:
            AttributeError: the shared object has no such kernel.
        """
        function = getattr(library, f"__tvm_ffi_{name}")
        return cls(function=ctypes.cast(function, ctypes.c_void_p).value or 0, library=library)

    @property
    def is_there(self) -> bool:
        """True if there is a kernel."""
        return bool(self.function or self.handle)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Conditions of a call that requests a kernel.

    Attributes:
        capturing: whether the call is recorded in a CUDA graph. Nothing is compiled then.
        must_wait: whether the call must wait, because stock's result would differ.
        training: whether the call needs gradients. Backward kernels follow then.
    """

    capturing: bool = False
    must_wait: bool = False
    training: bool = False
