"""Recipes of 8-bit attention: the number formats of scores and values, and constants shared by writers and readers.

The functions for quantization (quantize_reference.py) and the kernels agree on the constants. A new recipe is one row
of `RECIPES`, and a feature (features.py) with the code of the kernels. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

FORMAT_MAX = {"int8": 127.0, "e4m3": 448.0}  # largest number of a format
PRECISION_16BIT = "16bit"  # precision of a call without a recipe

# Sampled keys of a head; first keys, and last keys, among the samples. Padding lies at the start or at the end.
SAMPLES, NUM_ENDS = 64, 16
CHANNEL_RMS = 2.0  # rms of values after the mean and the scale: e4m3 ends at 448, so that 224 times the rms fit
# A mean is subtracted from values if the square of the mean exceeds this part of the variance. No mean of 64 samples is
# exactly 0.
MIN_MEAN_SHIFT = 0.25
# Lower bounds for values: variance relative to the mean square of the channel, and mean square of the channel relative
# to the average over all channels. All samples of a channel may be padding, and e4m3 has bits to spare: the normal
# numbers of e4m3 span 15 powers of two.
MIN_VARIANCE, MIN_CHANNEL = 2.0**-4, 2.0**-8
MAX_SQUARE = 2.0**118  # keeps sums over 256 channels finite
PROB_SCALE_LOG2 = (
    8  # log2 of the factor of probabilities before the conversion to e4m3; small probabilities keep more bits
)
SLACK_LOG2 = 0.75  # log2 of the allowed excess over that factor before O is rescaled to a new maximum; e4m3 ends at 448
# Number of keys over which tensor cores accumulate products of 8-bit probabilities and values. The accumulators of
# tensor cores keep some 14 digits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). Without this bound an H100 lost 10 %
# with 8k keys whose values have a nonzero mean, and 57 % with 128k keys.
LONGEST_SUM = 1024
# A scale of 0, or a smaller scale rounded to 0 by fp32, would turn a masked score into -inf * 0, which is NaN.
MIN_SCALE = 2.0**-40
# Signs of channels: one bit for each channel, lowest bit first. The bits are digits of pi.
SIGN_BITS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89)
# Order of each sixteen keys in V^T. Thread t of four owns the scores of keys 2t, 2t + 1, 2t + 8 and 2t + 9, but the
# left operand of a product of 8-bit numbers needs four consecutive numbers for a thread (PTX ISA, fragments of wgmma's
# m64nNk32).
KEY_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
WORKSPACE_ALIGNMENT = 128  # alignment in bytes of every tensor in the workspace of quantized operands


@dataclass(frozen=True, slots=True)
class Recipe:
    """Formats of both products: `scores` for S = Q K^T, `values` for O = P V. None stands for the dtype of the call."""

    scores: str
    values: str | None


# Keys are the names used by callers. The order is that of the precision numbers in a mode word, starting at 1 (`Mode`
# in src/core/core.h).
RECIPES = {
    "qk8": Recipe("int8", None),
    "8bit": Recipe("int8", "e4m3"),
    "e4m3": Recipe("e4m3", "e4m3"),
}
ALIASES = {"fp8": "8bit"}  # a common name for 8-bit precision


def recipe_name(precision: str, function: str = "torch_flashplug") -> str:
    """Return the name of a recipe for a name or an alias. Raise ValueError of `function` for an unknown name."""
    name = ALIASES.get(precision, precision)
    if name != PRECISION_16BIT and name not in RECIPES:
        raise ValueError(
            f"{function}: precision must be one of {', '.join((PRECISION_16BIT, *RECIPES, *ALIASES))}, "
            f"but got {precision!r}."
        )
    return name


def precision_number(precision: str, function: str = "torch_flashplug") -> int:
    """Return the number of a precision in a mode word; 0 stands for 16 bits.

    Args:
        precision: a name or an alias.
        function: the function that the error names.

    Raises:
        ValueError: the name is unknown.
    """
    return (PRECISION_16BIT, *RECIPES).index(recipe_name(precision, function))


def describe(name: str) -> str:
    """Describe the number formats of a recipe in words."""
    recipe = RECIPES[name]
    rest = "probabilities and values in 16 bits"
    if recipe.values is not None:
        rest = f"probabilities {recipe.values} x {2**PROB_SCALE_LOG2}, values {recipe.values} per channel"
    return f"scores {recipe.scores} (rotated, shifted; a scale for each row, and each block of keys), {rest}"
