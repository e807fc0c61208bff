"""Bool masks: hidden blocks are not walked over, blocks of which all is seen need no mask, words say what the others
hide. Both come from the mask itself, digested ahead of the kernel.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda

from .digest import Digest, Digested
from .listed import Listed
from .scores.chain import Chain
from .scores.words import ListedBits
from .seams import Seams


class Mask(Seams):
    uneven = True

    def before(self, call: object, stream: cuda.CUstream) -> None:
        Digest(gradients=False)(call.mask, call.digest, stream)

    def walk(self, call: object) -> Listed:
        keys = Digested.create(call.mask, call.digest).lists(transposed=False)
        return Listed(keys, keys)

    def chain(self, call: object) -> Chain:
        digested = Digested.create(call.mask, call.digest)
        words = ListedBits(digested.words(transposed=False), digested.of_batch, digested.of_head)
        return Chain((*super().chain(call).stages, words))
