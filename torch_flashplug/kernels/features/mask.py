"""Bool masks as a kernel feature: empty blocks are skipped, full blocks need no mask, partial blocks use a bitmask.

Lists and bitmask are created from the mask by mask preprocessing, ahead of the kernel.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from ...registry.kernel_spec import TALL
from ..preprocess.mask import Digest, Digested, Turns
from ..score_stages.bitmask import ListedBits
from ..score_stages.pipeline import Stage
from ..tiling.block_sparse import Listed, TallListed
from .base import Seams


class Mask(Seams):
    """Kernel feature for bool masks."""

    uneven = True
    ordered = False  # True if KV blocks accumulate in a fixed order

    @cute.jit
    def before(self, call: object, stream: cuda.CUstream):
        """Launch mask preprocessing. A mask without elements was preprocessed earlier."""
        if call.mask.shape[3] > 0:
            Digest(tall=self.listed_rows == TALL)(call.mask, digested(call), stream)
        if cutlass.const_expr(self.ordered):
            Turns()(digested(call), stream)

    def walk(self, call: object) -> Listed:
        lists = digested(call).lists(self.transposed, self.ordered, self.listed_rows)
        kind = TallListed if self.listed_rows == TALL else Listed
        return kind(lists, lists)  # a kernel visits blocks in a single direction

    def visible(self, call: object) -> Stage:
        """Return the bitmask stage. The bitmask also masks keys beyond the last key."""
        of = digested(call)
        return ListedBits(of.words(self.transposed), of.of_batch, of.of_head, of.rows)


class OrderedMask(Mask):
    """Kernel feature for bool masks in a deterministic backward."""

    ordered = True


def digested(call: object) -> Digested:
    return Digested.create(call.digest, call.mask.shape[2], call.q.shape[2], call.k.shape[2])
