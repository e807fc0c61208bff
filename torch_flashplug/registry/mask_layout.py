"""Constants of the metadata of a bool mask, shared by writers and readers. Standard library only.

Writers are kernels/preprocess/mask.py on the device, and mask_preprocess_reference.py in torch. The metadata consists
of the bitmask, with one bit for each score, and of states and lists of blocks.
"""

from __future__ import annotations

# Rows and columns of a tile of scores; words of a tile; bits of a word.
TILE, TILE_WORDS, WORD_BITS = 64, 128, 32
# States of blocks: empty (no score is visible), partial (some scores are visible), full (all scores are visible).
EMPTY, PARTIAL, FULL = range(3)
# Bits of a state for `EMPTY`, `PARTIAL` or `FULL`, and the number of these bits. The higher bits of a `PARTIAL` state
# say which parts of `TILE` rows have visible scores.
STATE_MASK, STATE_BITS = 3, 2
# Bits of a block's index in a list of blocks of `SPARSE_BLOCK_M_192` query rows. The higher bits say which of the three
# parts of `TILE` rows have visible scores.
INDEX_BITS = 28
