"""Recipes of 8-bit attention: what scores and values are made of; and the numbers on which agree who makes operands of
them (quantize_reference.py) and who reads those. A new one is a row here. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

LARGEST = {"int8": 127.0, "e4m3": 448.0}  # numbers of a format
SIXTEEN = "16bit"  # precision of a call that no recipe is asked for

SAMPLES, ENDS = 64, 16  # keys of a head; of these, first and last ones: padding lies before or behind the others
CHANNEL_RMS = 2.0  # of values behind their mean and scale: e4m3 ends at 448, so that 224 times the rms fit
CLEAR_MEAN = 0.25  # a mean is taken from values where its square is so much of their variance: of 64 samples none is 0
# Of values: their variance, of their mean square; that, of the mean of all channels'. Samples may all be padding, and
# e4m3 has bits to spare: its normal numbers span 15 powers of two.
LEAST_VARIANCE, LEAST_CHANNEL = 2.0**-4, 2.0**-8
LARGEST_SQUARE = 2.0**118  # that sums of 256 channels stay finite
RAISED = 8  # powers of two by which probabilities are larger on their way to e4m3: small ones keep their bits
SLACK = 0.75  # and by which they may exceed that before O is brought to a new maximum: 448 is the end
# Keys whose probabilities times values tensor cores add up in 8 bits: they keep some 14 digits (DeepSeek-V3, arXiv
# 2412.19437, section 3.3.2). Of 8k keys whose values have a mean an H100 lost 10 %, of 128k 57 %.
LONGEST_SUM = 1024
SMALLEST_SCALE = 2.0**-40  # with 0, or what fp32 makes of less, a score that is hidden would be -inf * 0
# Signs of channels, a bit for each, lowest first: digits of pi.
ROTATION = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89)
# Of every sixteen keys, in the order in which V^T has them. Thread t of four owns scores of keys 2t, 2t + 1, 2t + 8 and
# 2t + 9; the left operand of a product of 8-bit numbers wants four of its own that follow each other (PTX ISA,
# fragments of wgmma's m64nNk32).
KEY_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Formats of both products: S = Q K^T is multiplied in `scores`, O = P V in `values`; None: those of the call."""

    scores: str
    values: str | None


# By the name that users say, in the order of a mode word's numbers, from 1 on (Mode in src/core/flashplug.h).
RECIPES = {
    "qk8": Recipe("int8", None),
    "8bit": Recipe("int8", "e4m3"),
    "e4m3": Recipe("e4m3", "e4m3"),
}
ALIASES = {"fp8": "8bit"}  # what people search for


def named(precision: str) -> str:
    """Its own name. Raises ValueError where there is none."""
    name = ALIASES.get(precision, precision)
    if name != SIXTEEN and name not in RECIPES:
        raise ValueError(f"precision={precision!r}; use one of {', '.join((SIXTEEN, *RECIPES, *ALIASES))}")
    return name


def number_of(precision: str) -> int:
    """In a mode word; 0: 16 bits. Raises ValueError where there is none of that name."""
    return (SIXTEEN, *RECIPES).index(named(precision))


def in_words(name: str) -> str:
    """What a recipe multiplies."""
    recipe = RECIPES[name]
    rest = "probabilities and values in 16 bits"
    if recipe.values is not None:
        rest = f"probabilities {recipe.values} x {2**RAISED}, values {recipe.values} per channel"
    return f"scores {recipe.scores} (rotated, shifted; a scale for each row, and each block of keys), {rest}"
