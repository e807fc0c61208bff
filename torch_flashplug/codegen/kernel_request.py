"""Request for a kernel that no pack holds, and the answer to the request."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelAnswer:
    """Answer to a request for a kernel that is in no pack.

    Attributes:
        function: the address of the kernel's host function, or 0.
        handle: a TVM-FFI function object loaded by the compiler, or 0.
        reason: the reason why there is no kernel.
        may_change: whether a later call may get a different answer.
        library: the object that must stay loaded.
    """

    function: int = 0
    handle: int = 0
    reason: str = ""
    may_change: bool = False
    library: object = None

    @classmethod
    def of_library(cls, library: ctypes.CDLL, name: str) -> KernelAnswer:
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
    def has_kernel(self) -> bool:
        """True if there is a kernel."""
        return bool(self.function or self.handle)


@dataclass(frozen=True, slots=True)
class CallConditions:
    """Conditions of a call that requests a kernel.

    Attributes:
        is_capturing: whether the call is recorded in a CUDA graph. Nothing is compiled then.
        must_wait: whether the call must wait, because stock's result would differ.
        needs_gradients: whether the call needs gradients. Backward kernels follow then.
    """

    is_capturing: bool = False
    must_wait: bool = False
    needs_gradients: bool = False
