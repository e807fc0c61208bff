"""What a spec's features are made of: the one place under kernels/ that asks for them. Kernels ask for pieces, a walk,
a chain of stages and an element type, and never what they are.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute

from ...registry import features
from ...registry.dtypes import ELEMENTS as MADE_OF
from ...registry.kernel_spec import KernelSpec
from ..mainloop.softmax import Unscaled
from ..primitives.dtype import ELEMENTS, Element
from ..score_stages.kv_bounds import Visible
from ..score_stages.pipeline import Chain, Stage
from ..tiling.block_iterator import Band, Walk
from ..tiling.tile import Dense, Pieces


@dataclass(frozen=True)
class Given:
    """Operands of both products in global memory."""

    q: cute.Tensor  # (B, Hq, Sq, D)
    k: cute.Tensor  # (B, Hkv, Sk, D)
    v: cute.Tensor  # (B, Hkv, Sk, Dv), or turned
    scaling: object  # softmax.Unscaled, or scaled.Scaling


class Seams:
    """Of one kernel; here of one without features. A feature's class (Feature.part) inherits from this one and changes
    what it must; those of a kernel are put together in the order of features.py. What a call brings is taken from its
    arguments.
    """

    uneven = False  # whether rows of a tile may see different numbers of keys
    short = False  # whether many tiles have few rows
    bent = False  # whether scores are, everywhere
    turned = False  # whether V is given as (B, Hkv, Dv, Sk)

    def __init__(self, element: Element, spec: KernelSpec, transposed: bool):
        self.element, self.spec, self.transposed, self.listed_rows = element, spec, transposed, spec.listed_rows

    @staticmethod
    def of(spec: KernelSpec, *, transposed: bool = False) -> Seams:
        """transposed: the kernel's scores are (keys, queries)."""
        names = [feature.part_of(spec.kind) for feature in features.of(spec.features)]
        parts = [part_named(name) for name in names if name]
        kind = type("Seams", (*reversed(parts), Seams), {}) if parts else Seams
        return kind(ELEMENTS[MADE_OF[spec.dtype].q], spec, transposed)

    def pieces(self, call: object) -> Pieces:
        return Dense()

    def walk(self, call: object) -> Walk:
        return Band()

    def operands(self, call: object) -> Given:
        """What is multiplied."""
        return Given(call.q, call.k, call.v, Unscaled())

    def stored(self, call: object) -> object:
        """Decode: how K and V lie in memory (stored.Stored); None: as they are multiplied."""

    def visible(self, call: object) -> Stage:
        """Which scores count: what every chain has."""
        return Visible()

    def chain(self, call: object) -> Chain:
        return Chain((self.visible(call),))

    def before(self, call: object, stream: cuda.CUstream) -> None:
        """What is launched ahead of the kernel."""

    follows = False  # whether the kernel starts while that still runs, and waits for it where it asks `wait`

    def wait(self) -> None:
        """All threads, ahead of what they read of it."""


def part_named(part: str) -> type[Seams]:
    """Imported for kernels that have it alone: no other is made again when it changes (compile.sources_of)."""
    module, _, name = part.rpartition(".")
    return getattr(importlib.import_module(f".{module}", __package__), name)
