"""Sequences of different lengths on end (varlen.py): their lists of tiles, made on the device ahead of the kernel, by
one small launch, so that nothing waits for the host, and a CUDA graph follows the lengths it is replayed with. Calls of
the same lengths may share lists: one makes them and does nothing else (AfterLists), the others find them.

A list is one CTA's. Its warps take 32 sequences at a time, a lane each; then a lane has a tile of theirs. Tiles are
sorted by the blocks that they walk over, the most first: counted by classes, then placed where their class begins.
Starts that are not monotone, or beyond what there is, are clamped: they may give wrong results, and no bad access.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32

from ...registry.kernel_spec import WARPGROUP
from ..preprocess.varlen_tile_list import BLOCK, CLASSES, THREADS, Given, TileLists, Wanted
from ..tiling.varlen import ENTRY, Ragged, TileList
from .base import Seams

assert CLASSES == THREADS, "a thread has a class"
















class Lengths(Seams):
    short = follows = True

    def wait(self) -> None:
        cute.arch.griddepcontrol_wait()

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """Lists that a kind of kernels asks its pieces for."""
        keys, scratch = Wanted("keys", True, self.spec.tile_n), Wanted("scratch", False, BLOCK, is_sorted=False)
        if not self.spec.is_backward:
            return (Wanted("rows", False, self.spec.tile_m),)
        return (Wanted("rows", False, WARPGROUP), keys, scratch) if self.spec.in_parts else (keys, scratch)

    def given(self, call: object) -> Given:
        return Given(call.lengths.cu_q, call.lengths.cu_k, call.lengths.used_k, call.q.shape[2], call.k.shape[2])

    def pieces(self, call: object) -> Ragged:
        """Each list lies in the call's scratch behind the one before: its head, a sector, then its entries."""
        given, start, lists = self.given(call), call.lengths.lists.iterator, {}
        for one in self.wanted:
            room = (given.keys if one.of_keys else given.rows) // one.size + given.sequences
            first = cute.make_ptr(Int32, (start + ENTRY).toint(), cute.AddressSpace.gmem, assumed_align=16)
            entries = cute.make_tensor(first, cute.make_layout((room, ENTRY), stride=(ENTRY, 1)))
            lists[one.name] = TileList(entries, cute.make_tensor(start, cute.make_layout(2)))
            start = start + (room + 1) * ENTRY
        return Ragged(**lists, total_keys=given.keys)


class AfterLists:
    """Ahead of a kernel's class: what is launched before all else, and alone where a call has no CTAs to run."""

    @cute.jit
    def launch(self, call: object, stream: cuda.CUstream):
        of = self.seams
        TileLists(of.wanted)(of.given(call), of.pieces(call), of.walk(call), stream)
        if call.num_ctas > 0:
            # By its name: the DSL compiles a copy of this function, which is in no class.
            super(AfterLists, self).launch(call, stream)  # noqa: UP008
