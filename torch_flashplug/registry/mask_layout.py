"""Numbers on which agree who digests a bool mask (kernels/preprocess/mask.py on the device,
mask_preprocess_reference.py in torch) and who reads what comes of it: words, one bit a score; states and lists, of
blocks. Standard library only.
"""

from __future__ import annotations

TILE, THREADS, BITS = 64, 128, 32  # rows and columns of a tile of scores; words of it; of each
NONE, MASKED, WHOLE = range(3)  # states of blocks: nothing, some or all of it is seen
KIND, HALVES = 3, 2  # bits of a state that say so, and how many; behind them, of a MASKED one: which TILE rows see some
FLAGS = 28  # bits of a block's number in a list of tall blocks, ahead of the same of its three parts
