"""What other parts of torch must be told about our ops, a module each: FLOP counting, vmap, varlen_attn, DTensor
and context_parallel (on the first DTensor).
"""

from . import context_parallel, dtensor, flops, varlen, vmap

__all__ = ["ALL", "SWITCHED", "context_parallel", "dtensor", "flops", "varlen", "vmap"]

ALL = (flops, vmap)  # each has register(), called once by _start.load()
SWITCHED = (varlen,)  # each has install() and uninstall(), called by enable() and disable()
