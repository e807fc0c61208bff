"""Hopper attention kernels behind an unchanged torch.nn.functional.scaled_dot_product_attention.

Importing this package loads _C, pushes the table and the environment flags into it and installs the router (_start.py). It never imports cutlass.
"""

from __future__ import annotations

from . import env

__version__ = "0.1.0"

# torch found our entry point, but nobody asked for us: touch nothing (_autoload.py).
inert = env.torch_is_loading_backends() and not env.autoload()

if not inert:
    from ._start import start

    start()
