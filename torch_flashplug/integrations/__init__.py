"""What other parts of torch must be told about our ops, a module each: FLOP counting, vmap, varlen_attn."""

from . import flops, varlen, vmap

ALL = (flops, vmap)  # each has register(), called once by _start.load()
SWITCHED = (varlen,)  # each has install() and uninstall(), called by enable() and disable()
