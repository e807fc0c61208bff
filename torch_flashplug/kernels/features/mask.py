"""Bool masks: hidden blocks are not walked over, blocks of which all is seen need no mask, words say what the others
hide. Both come from the mask itself, digested ahead of the kernel.
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
    uneven = True
    ordered = False  # whether blocks of keys add in order

    @cute.jit
    def before(self, call: object, stream: cuda.CUstream):
        """A mask without elements was digested before."""
        if call.mask.shape[3] > 0:
            Digest(tall=self.listed_rows == TALL)(call.mask, digested(call), stream)
        if cutlass.const_expr(self.ordered):
            Turns()(digested(call), stream)

    def walk(self, call: object) -> Listed:
        lists = digested(call).lists(self.transposed, self.ordered, self.listed_rows)
        kind = TallListed if self.listed_rows == TALL else Listed
        return kind(lists, lists)  # a kernel walks in one direction

    def visible(self, call: object) -> Stage:
        """Words know of keys beyond the last, too."""
        of = digested(call)
        return ListedBits(of.words(self.transposed), of.of_batch, of.of_head, of.rows)


class OrderedMask(Mask):
    ordered = True


def digested(call: object) -> Digested:
    return Digested.create(call.digest, call.mask.shape[2], call.q.shape[2], call.k.shape[2])
