"""What a spec's features are made of: the one place under kernels/ that asks for them. Kernels ask for pieces, a walk,
a chain of stages and an element type, and never what they are.
"""

from __future__ import annotations

import importlib

import cuda.bindings.driver as cuda

from ... import features
from ...spec import KernelSpec
from .element import ELEMENTS, Element
from .pieces import Dense, Pieces
from .scores.chain import Chain, Stage
from .scores.visible import Visible
from .walk import Band, Walk


class Seams:
    """Of one kernel; here of one without features. A feature's class (Feature.part) inherits from this one and changes
    what it must; those of a kernel are put together in the order of features.py. What a call brings is taken from its
    arguments.
    """

    uneven = False  # whether rows of a tile may see different numbers of keys
    short = False  # whether many tiles have few rows

    def __init__(self, element: Element, transposed: bool, listed_rows: int):
        self.element, self.transposed, self.listed_rows = element, transposed, listed_rows

    @staticmethod
    def of(spec: KernelSpec, *, transposed: bool = False) -> Seams:
        """transposed: the kernel's scores are (keys, queries)."""
        names = [feature.part_of(spec.kind) for feature in features.of(spec.features)]
        parts = [part_named(name) for name in names if name]
        kind = type("Seams", (*reversed(parts), Seams), {}) if parts else Seams
        return kind(ELEMENTS[spec.dtype], transposed, spec.listed_rows)

    def pieces(self, call: object) -> Pieces:
        return Dense()

    def walk(self, call: object) -> Walk:
        return Band()

    def visible(self, call: object) -> Stage:
        """Which scores count: what every chain has."""
        return Visible()

    def chain(self, call: object) -> Chain:
        return Chain((self.visible(call),))

    def before(self, call: object, stream: cuda.CUstream) -> None:
        """What is launched ahead of the kernel."""


def part_named(part: str) -> type[Seams]:
    """Imported for kernels that have it alone: no other is made again when it changes (compile.sources_of)."""
    module, _, name = part.rpartition(".")
    return getattr(importlib.import_module(f".{module}", __package__), name)
