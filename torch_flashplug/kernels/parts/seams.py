"""What a spec's features are made of: the one place under kernels/ that knows them. Kernels ask for pieces, a walk, a
chain of stages and an element type, and never what they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...spec import KernelSpec
from .element import ELEMENTS, Element
from .pieces import Dense, Pieces
from .scores.chain import Chain, Stage
from .scores.visible import CausalVisible, Visible
from .walk import Band, CausalBand, Walk


@dataclass(frozen=True)
class Seams:
    """Of one kernel. What a call brings is taken from its arguments."""

    element: Element
    band: type[Band]
    visible: type[Stage]

    @classmethod
    def of(cls, spec: KernelSpec) -> Seams:
        band, visible = (CausalBand, CausalVisible) if "causal" in spec.features else (Band, Visible)
        return cls(ELEMENTS[spec.dtype], band, visible)

    @property
    def uneven(self) -> bool:
        """Whether rows of a tile may see different numbers of keys."""
        return self.band.uneven

    @property
    def short(self) -> bool:
        """Whether many tiles have few rows."""
        return False

    def pieces(self, call: object) -> Pieces:
        return Dense()

    def walk(self, call: object) -> Walk:
        return self.band()

    def chain(self, call: object) -> Chain:
        return Chain((self.visible(),))
