"""Kernel features: the only place under kernels/ that maps the features of a spec to implementations.

Kernels request a tile addressing, a block iterator, score stages and an element type, and never ask for the class of
these objects.
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
    v: cute.Tensor  # (B, Hkv, Sk, Dv), or (B, Hkv, Dv, Sk) if `turned`
    scaling: object  # softmax.Unscaled or scaled.Scaling


class Seams:
    """Features of a kernel. The base class describes a kernel without features.

    The class of a feature (Feature.part) inherits from `Seams` and overrides the affected methods. The classes of all
    features of a kernel are combined in the order of features.py. The methods take the runtime arguments from the call.
    """

    uneven = False  # True if rows of a tile may see different numbers of keys
    short = False  # True if many tiles have few rows
    bent = False  # True if score modifications with a derivative apply to all scores
    turned = False  # True if V is given as (B, Hkv, Dv, Sk)

    def __init__(self, element: Element, spec: KernelSpec, transposed: bool):
        self.element, self.spec, self.transposed, self.listed_rows = element, spec, transposed, spec.listed_rows

    @staticmethod
    def of(spec: KernelSpec, *, transposed: bool = False) -> Seams:
        """Return the features of a spec.

        Args:
            spec: the kernel spec.
            transposed: True if scores of the kernel are (keys, queries).
        """
        names = [feature.part_of(spec.kind) for feature in features.of(spec.features)]
        parts = [part_named(name) for name in names if name]
        kind = type("Seams", (*reversed(parts), Seams), {}) if parts else Seams
        return kind(ELEMENTS[MADE_OF[spec.dtype].q], spec, transposed)

    def pieces(self, call: object) -> Pieces:
        return Dense()

    def walk(self, call: object) -> Walk:
        return Band()

    def operands(self, call: object) -> Given:
        """Return the operands of both products."""
        return Given(call.q, call.k, call.v, Unscaled())

    def stored(self, call: object) -> object:
        """Decode: return the KV loader (stored.Stored), or None if K and V need no conversion."""

    def visible(self, call: object) -> Stage:
        """Return the stage to mask invisible scores. Every chain contains such a stage."""
        return Visible()

    def chain(self, call: object) -> Chain:
        return Chain((self.visible(call),))

    def before(self, call: object, stream: cuda.CUstream) -> None:
        """Launch the preprocess kernels, ahead of the kernel."""

    follows = False  # True if the kernel starts while the preprocess kernels still run, and waits in `wait`

    def wait(self) -> None:
        """Wait for the preprocess kernels. All threads call `wait` before reading the results."""


def part_named(part: str) -> type[Seams]:
    """Return the class of a feature.

    The module is imported only for kernels with the feature. A change of the module then recompiles no kernels without
    the feature (compile.sources_of).
    """
    module, _, name = part.rpartition(".")
    return getattr(importlib.import_module(f".{module}", __package__), name)
