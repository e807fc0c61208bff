"""Kernels in CuTe DSL. Importing a kernel module needs nvidia-cutlass-dsl; nothing outside compile.py does that."""

from __future__ import annotations

import importlib

# (kind, arch) -> module.class; the one place that knows which file builds which spec.
BUILDERS = {
    ("fwd", 90): ("fwd_sm90", "ForwardSm90"),
    ("bwd", 90): ("bwd_sm90", "BackwardSm90"),
    ("detbwd", 90): ("bwd_sm90", "BackwardSm90"),
}

WIDE_BACKWARD = ("bwd_wide_sm90", "BackwardWideSm90")  # of every kind: its sums always have one order


def builder(spec):
    """The kernel object for a spec: callable by cute.compile, with `fake_arguments()` beside it."""
    module, name = WIDE_BACKWARD if spec.is_wide else BUILDERS[spec.kind, spec.arch]
    return getattr(importlib.import_module(f".{module}", __name__), name)(spec)
