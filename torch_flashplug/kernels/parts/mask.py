"""Bool masks: hidden blocks are not walked over, blocks of which all is seen need no mask, words say what the others
hide. Both come from the mask itself, digested ahead of the kernel.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from .digest import Digest, Digested, Turns
from .listed import Listed
from .scores.chain import Chain
from .scores.words import ListedBits
from .seams import Seams


class Mask(Seams):
    uneven = True
    ordered = False  # whether blocks of keys add in order

    @cute.jit
    def before(self, call: object, stream: cuda.CUstream):
        """A mask without elements was digested before."""
        if call.mask.shape[3] > 0:
            Digest()(call.mask, digested(call), stream)
        if cutlass.const_expr(self.ordered):
            Turns()(digested(call), stream)

    def walk(self, call: object) -> Listed:
        lists = digested(call).lists(self.transposed, self.ordered)
        return Listed(lists, lists)  # a kernel walks in one direction

    def chain(self, call: object) -> Chain:
        of = digested(call)
        words = ListedBits(of.words(self.transposed), of.of_batch, of.of_head, of.rows)
        return Chain((*super().chain(call).stages, words))


class OrderedMask(Mask):
    ordered = True


def digested(call: object) -> Digested:
    return Digested.create(call.digest, call.mask.shape[2], call.q.shape[2], call.k.shape[2])
