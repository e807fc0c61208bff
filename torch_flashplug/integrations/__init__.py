"""What other parts of torch must be told about our ops, a module each: FLOP counting, vmap."""

from . import flops, vmap

ALL = (flops, vmap)  # each has register(), called once by _start.load()
