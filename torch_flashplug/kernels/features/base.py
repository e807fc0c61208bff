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
from ...registry.dtypes import KERNEL_DTYPES
from ...registry.kernel_spec import KernelSpec
from ..mainloop.softmax import NoScaling
from ..primitives.dtype import ELEMENTS, Element
from ..score_stages.kv_bounds import KvBoundsStage
from ..score_stages.pipeline import ScorePipeline, ScoreStage
from ..tiling.block_iterator import BlockIterator, FullBlocks
from ..tiling.tile import DenseAddressing, TileAddressing


@dataclass(frozen=True)
class ProductOperands:
    """Operands of both products in global memory."""

    q: cute.Tensor  # (B, Hq, Sq, D)
    k: cute.Tensor  # (B, Hkv, Sk, D)
    v: cute.Tensor  # (B, Hkv, Sk, Dv), or (B, Hkv, Dv, Sk) if `v_is_transposed`
    scaling: object  # softmax.NoScaling or scaled_softmax.Scaling


class KernelFeatures:
    """Features of a kernel. The base class describes a kernel without features.

    The class of a feature (Feature.class_path) inherits from `KernelFeatures` and overrides the affected methods. The
    classes of all features of a kernel are combined in the order of features.py. The methods take the runtime arguments
    from the call.
    """

    tile_lengths_vary = False  # True if rows of a tile may see different numbers of keys
    has_small_tiles = False  # True if many tiles have a small number of rows
    has_score_derivative = False  # True if score modifications with a derivative apply to all scores
    v_is_transposed = False  # True if V has the shape (B, Hkv, Dv, Sk)

    def __init__(self, element: Element, spec: KernelSpec, transposed: bool):
        self.element, self.spec, self.transposed, self.listed_rows = element, spec, transposed, spec.listed_rows

    @staticmethod
    def from_spec(spec: KernelSpec, *, transposed: bool = False) -> KernelFeatures:
        """Return the features of a spec.

        Args:
            spec: the kernel spec.
            transposed: True if scores of the kernel are (keys, queries).
        """
        names = [feature.class_path_of(spec.kind) for feature in features.select(spec.features)]
        classes = [feature_class(name) for name in names if name]
        combined = type("CombinedFeatures", (*reversed(classes), KernelFeatures), {}) if classes else KernelFeatures
        return combined(ELEMENTS[KERNEL_DTYPES[spec.dtype].q], spec, transposed)

    def tile_addressing(self, call: object) -> TileAddressing:
        return DenseAddressing()

    def block_iterator(self, call: object) -> BlockIterator:
        return FullBlocks()

    def operands(self, call: object) -> ProductOperands:
        """Return the operands of both products."""
        return ProductOperands(call.q, call.k, call.v, NoScaling())

    def kv_loader(self, call: object) -> object:
        """Decode: return the KV loader (decode/kv_load.py), or None if K and V need no conversion."""

    def decode_grid(self, call: object) -> object:
        """Decode: return the assignment of CTAs to tiles (decode/pack_gqa.py), or None for equal numbers of splits."""

    def masking_stage(self, call: object) -> ScoreStage:
        """Return the stage to mask invisible scores. Every score pipeline contains such a stage."""
        return KvBoundsStage()

    def visits_group_together(self, call: object) -> bool:
        """Return True if a fused backward on Hopper visits the query heads of a group together.

        A score stage with data of a query head keeps the heads apart.
        """
        return self.block_iterator(call).visits_group_together and self.score_pipeline(call).is_shared_by_heads

    def score_pipeline(self, call: object) -> ScorePipeline:
        return ScorePipeline((self.masking_stage(call),))

    def launch_preprocess(self, call: object, stream: cuda.CUstream) -> None:
        """Launch the preprocess kernels, before the kernel."""

    # True if the kernel starts while the preprocess kernels still run, and waits in `wait_for_preprocess`.
    overlaps_preprocess = False

    def wait_for_preprocess(self) -> None:
        """Wait for the preprocess kernels. All threads call `wait_for_preprocess` before reading the results."""


def feature_class(path: str) -> type[KernelFeatures]:
    """Return the class of a feature.

    The module is imported only for kernels with the feature. A change of the module then recompiles no kernels without
    the feature (fingerprint.sources_of).
    """
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f".{module}", __package__), name)
