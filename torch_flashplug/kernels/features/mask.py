"""Bool masks as a kernel feature: empty blocks are skipped, full blocks need no mask, partial blocks use a bitmask.

Lists and bitmask are created from the mask by mask preprocessing, before the kernel.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from ...registry.kernel_spec import SPARSE_BLOCK_M_192
from ..preprocess.mask import AccumulationRanks, MaskMetadata, MaskPreprocess
from ..score_stages.bitmask import BlockSparseBitmaskStage
from ..score_stages.pipeline import ScoreStage
from ..tiling.block_sparse import BlockSparse192Iterator, BlockSparseIterator
from .base import KernelFeatures


class MaskFeature(KernelFeatures):
    """Kernel feature for bool masks."""

    tile_lengths_vary = True
    ordered = False  # True if KV blocks accumulate in a fixed order

    @cute.jit
    def launch_preprocess(self, call: object, stream: cuda.CUstream):
        """Launch mask preprocessing. A mask without elements was preprocessed earlier."""
        if call.mask.shape[3] > 0:
            MaskPreprocess(tall=self.listed_rows == SPARSE_BLOCK_M_192)(call.mask, mask_metadata(call), stream)
        if cutlass.const_expr(self.ordered):
            AccumulationRanks()(mask_metadata(call), stream)

    def block_iterator(self, call: object) -> BlockSparseIterator:
        lists = mask_metadata(call).lists(self.transposed, self.ordered, self.listed_rows)
        iterator_class = BlockSparse192Iterator if self.listed_rows == SPARSE_BLOCK_M_192 else BlockSparseIterator
        return iterator_class(lists, lists)  # a kernel visits blocks in a single direction

    def masking_stage(self, call: object) -> ScoreStage:
        """Return the bitmask stage. The bitmask also masks keys beyond the last key."""
        metadata = mask_metadata(call)
        return BlockSparseBitmaskStage(
            metadata.words(self.transposed), metadata.of_batch, metadata.of_head, metadata.rows
        )


class DeterministicMaskFeature(MaskFeature):
    """Kernel feature for bool masks in a deterministic backward."""

    ordered = True


def mask_metadata(call: object) -> MaskMetadata:
    return MaskMetadata.create(call.mask_metadata, call.mask.shape[2], call.q.shape[2], call.k.shape[2])
