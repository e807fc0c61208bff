"""Tile lists of packed sequences (varlen.py), created on the device by a small launch before the kernel.

No step waits for the host, and a CUDA graph follows the lengths of each replay. Calls with equal lengths may use the
same lists. A separate call creates the lists and does nothing else (TileListsThenKernel). The remaining calls find the
lists ready.

A single CTA creates each list. A warp processes 32 sequences at a time, a sequence per lane. Each lane then processes a
tile of the 32 sequences. A counting sort orders the tiles by the number of visited blocks, largest first. The first
pass counts tiles by class, and the second pass places each tile behind the start of its class.

Decreasing `cu_seqlens` values, or values beyond the tensor, are clamped. The result is then undefined, but no memory
outside the tensors is accessed.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32

from ..preprocess.varlen_tile_list import BLOCK, CLASSES, THREADS, TileListKernel, TileListSpec, VarlenInputs
from ..tiling.equal_lengths import overlaps_launches, wait_for_previous_launch
from ..tiling.varlen import ENTRY_INTS, HEADER_INTS, VarlenAddressing, VarlenTileList
from .base import KernelFeatures

assert CLASSES == THREADS, "a thread has a class"


class VarlenFeature(KernelFeatures):
    """Kernel feature for packed sequences."""

    has_small_tiles = overlaps_preprocess = True

    def wait_for_preprocess(self) -> None:
        wait_for_previous_launch()

    @property
    def tile_list_specs(self) -> tuple[TileListSpec, ...]:
        """Tile lists required by the tile addressing of the kernel kind."""
        key_list = TileListSpec("keys", True, self.spec.tile_n)
        workspace_list = TileListSpec("workspace", False, BLOCK, is_sorted=False)
        if not self.spec.is_backward:
            return (TileListSpec("rows", False, self.spec.tile_m),)
        rows = (TileListSpec("rows", False, self.spec.dq_tile_m),) if self.spec.is_split_backward else ()
        return (*rows, key_list, workspace_list)

    def varlen_inputs(self, call: object) -> VarlenInputs:
        return VarlenInputs(
            call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k, call.q.shape[2], call.k.shape[2],
            compares_lengths=call.tile_lists.shape[0] % 2, is_plan=Int32(call.num_ctas == 0),
        )  # fmt: skip

    def tile_addressing(self, call: object) -> VarlenAddressing:
        """Return the tile addressing. The lists lie one behind the next in the workspace of the call.

        Each list has a head of a sector, followed by the entries.
        """
        inputs, start, lists = self.varlen_inputs(call), call.tile_lists.iterator, {}
        for list_spec in self.tile_list_specs:
            capacity = (inputs.keys if list_spec.of_keys else inputs.rows) // list_spec.size + inputs.sequences
            first_entry = cute.make_ptr(Int32, (start + ENTRY_INTS).toint(), cute.AddressSpace.gmem, assumed_align=16)
            entries = cute.make_tensor(first_entry, cute.make_layout((capacity, ENTRY_INTS), stride=(ENTRY_INTS, 1)))
            header_start = start + inputs.header_start if overlaps_launches() else start
            header = cute.make_tensor(header_start, cute.make_layout(HEADER_INTS))
            lists[list_spec.name] = VarlenTileList(entries, header)
            start = start + (capacity + 1) * ENTRY_INTS
        skips_equal_lengths = inputs.compares_lengths if overlaps_launches() else 0  # dense kernels are for Hopper
        return VarlenAddressing(**lists, total_keys=inputs.keys, skips_equal_lengths=skips_equal_lengths)


class TileListsThenKernel:
    """Mixin ahead of a kernel class: launches the creation of the tile lists before everything else.

    A call without CTAs to run launches only the list creation.
    """

    @cute.jit
    def launch(self, call: object, stream: cuda.CUstream):
        features = self.features
        TileListKernel(features.tile_list_specs)(
            features.varlen_inputs(call), features.tile_addressing(call), features.block_iterator(call), stream
        )
        if call.num_ctas > 0:
            # `super` has explicit arguments, because the DSL compiles a copy of this function, and the copy belongs to
            # no class.
            super(TileListsThenKernel, self).launch(call, stream)  # noqa: UP008
