"""Recipes of 8-bit attention: what scores and values are made of. A new one is a row here. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST = {"int8": 127.0, "e4m3": 448.0}  # numbers of a format
SIXTEEN = "16bit"  # precision of a call that no recipe is asked for


@dataclass(frozen=True, slots=True)
class Recipe:
    """Formats of both products: S = Q K^T is multiplied in `scores`, O = P V in `values`; None: those of the call."""

    scores: str
    values: str | None
    said: str  # in words


# By the name that users say, in the order of a mode word's numbers, from 1 on (Mode in src/flashplug.h).
RECIPES = {
    "qk8": Recipe("int8", None, "scores int8, probabilities and values as the call's"),
    "8bit": Recipe("int8", "e4m3", "scores int8, probabilities and values e4m3"),
    "e4m3": Recipe("e4m3", "e4m3", "scores, probabilities and values e4m3"),
}
ALIASES = {"fp8": "8bit"}  # what people search for


def named(precision: str) -> str:
    """Its own name. Raises ValueError where there is none."""
    name = ALIASES.get(precision, precision)
    if name != SIXTEEN and name not in RECIPES:
        raise ValueError(f"precision={precision!r}; use one of {', '.join((SIXTEEN, *RECIPES, *ALIASES))}")
    return name
