"""Kernels in CuTe DSL. Importing a kernel module needs the DSL; only codegen/compiler.py imports them.

- `sm90/`: Kernels for Hopper.
- `sm80/`: Kernels for sm_80 and newer.
- `features/`: One file for each feature.
- `preprocess/`: Kernels launched before the main kernel.
- `mainloop/`: Softmax and output accumulation.
- `backward/`: Parts of the backward kernels.
- `decode/`: Parts of the decode kernels.
- `score_stages/`: Score modification between the two products.
- `tiling/`: Tile coordinates and block iterators.
- `call_args/`: The kernel ABI in the DSL.
- `primitives/`: Building blocks that know nothing about attention.
"""

from __future__ import annotations

import importlib

from ..registry import features as feature_table

# (kind, arch) -> (module, class). Only this table knows the file and class that build a kernel spec.
BUILDERS = {
    ("fwd", 80): ("sm80.forward", "ForwardSm80"),
    ("fwd", 90): ("sm90.forward", "ForwardSm90"),
    ("bwd", 80): ("sm80.backward", "BackwardSm80"),
    ("detbwd", 80): ("sm80.backward", "BackwardSm80"),
    ("bwd", 90): ("sm90.backward", "BackwardSm90"),
    ("detbwd", 90): ("sm90.backward", "BackwardSm90"),
    ("partbwd", 90): ("sm90.backward_split", "SplitBackwardSm90"),
    ("tilebwd", 90): ("sm90.backward_tile", "TileBackwardSm90"),
    ("dbias", 90): ("sm90.backward_dbias", "BackwardDbiasSm90"),
    ("decode", 80): ("sm80.decode", "DecodeSm80"),
    ("decode", 90): ("sm90.decode", "DecodeSm90"),
}
# (kind, arch, feature) -> (module, class) of kernels with a mainloop for a feature.
BUILDERS_OF_FEATURES = {("decode", 90, "shared"): ("sm90.decode_shared", "SharedDecodeSm90")}


def builder_path(spec) -> tuple[str, str]:
    """Return the module and the class that build a kernel spec."""
    keys = [(spec.kind, spec.arch, feature.name) for feature in feature_table.select(spec.features)]
    paths = [BUILDERS_OF_FEATURES[key] for key in keys if key in BUILDERS_OF_FEATURES]
    return paths[0] if paths else BUILDERS[spec.kind, spec.arch]


def builder(spec):
    """Return the kernel object of a spec: callable by cute.compile, with the method `fake_arguments()`."""
    from .features.base import feature_class

    module, name = builder_path(spec)
    kernel_class = getattr(importlib.import_module(f".{module}", __name__), name)
    launch_mixins = [
        feature_class(feature.launch_class_path)
        for feature in feature_table.select(spec.features)
        if feature.launch_class_path
    ]
    if launch_mixins:
        kernel_class = type(name, (*launch_mixins, kernel_class), {"__module__": kernel_class.__module__})
    return kernel_class(spec)
