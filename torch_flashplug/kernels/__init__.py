"""Kernels in CuTe DSL. Importing a kernel module needs the DSL; only codegen/compiler.py imports them."""

from __future__ import annotations

import importlib

from ..registry import features

# (kind, arch) -> module.class; the one place that knows which file builds which spec.
BUILDERS = {
    ("fwd", 80): ("fwd_sm80", "ForwardSm80"),
    ("fwd", 90): ("fwd_sm90", "ForwardSm90"),
    ("bwd", 80): ("bwd_sm80", "BackwardSm80"),
    ("detbwd", 80): ("bwd_sm80", "BackwardSm80"),
    ("bwd", 90): ("bwd_sm90", "BackwardSm90"),
    ("detbwd", 90): ("bwd_sm90", "BackwardSm90"),
    ("partbwd", 90): ("partbwd_sm90", "BackwardInPartsSm90"),
    ("tilebwd", 90): ("tilebwd_sm90", "TileBackwardSm90"),
    ("dbias", 90): ("dbias_sm90", "BiasGradientSm90"),
    ("decode", 80): ("decode_sm80", "DecodeSm80"),
    ("decode", 90): ("decode_sm90", "DecodeSm90"),
}


def builder(spec):
    """The kernel object for a spec: callable by cute.compile, with `fake_arguments()` beside it."""
    from .parts.seams import part_named

    module, name = BUILDERS[spec.kind, spec.arch]
    own = getattr(importlib.import_module(f".{module}", __name__), name)
    ahead = [part_named(feature.ahead) for feature in features.of(spec.features) if feature.ahead]
    return (type(name, (*ahead, own), {"__module__": own.__module__}) if ahead else own)(spec)
