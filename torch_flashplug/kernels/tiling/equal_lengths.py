"""Tile addressing of launches that have work only for some lengths of packed sequences.

Packed sequences of equal lengths are a dense batch. The host knows the numbers of rows and of sequences, and therefore
the only possible common length. Lengths are in device memory, so two kernels are launched: a dense kernel with work
only for equal lengths, and the kernel of packed sequences with work only for different lengths.

The launches of a call overlap (programmatic dependent launch), and a launch without work costs little. A kernel
waits for the previous launch with `wait_for_previous_launch`, and lets the next launch start in `has_work`.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.base_dsl import Arch

from ...registry.kernel_spec import WARP
from ..primitives.fragments import target_from
from .tile import DenseAddressing, TileAddressing


def overlaps_launches() -> bool:
    """Return whether the target has programmatic dependent launch."""
    return target_from(Arch.sm_90)


def wait_for_previous_launch() -> None:
    """Wait until the previous launch has ended and its results are visible."""
    if overlaps_launches():
        cute.arch.griddepcontrol_wait()


@cute.jit
def has_equal_lengths(cu_seqlens: cute.Tensor, length: Int32) -> Boolean:
    """Return True if each sequence has `length` rows or keys, and the first sequence starts at 0.

    A whole warp calls the function, and all lanes get the same result.
    """
    differs = Int32(0)
    for i in cutlass.range(cute.arch.lane_idx(), cu_seqlens.shape[0], WARP, unroll=1):
        differs = differs | (cu_seqlens[i] - i * length)
    return cute.arch.vote_all_sync(differs == 0)


@dataclass(frozen=True)
class ConditionalAddressing(TileAddressing):
    """Base class of tile addressing whose launch may have no work."""

    def lengths_have_work(self) -> Boolean:
        """Return True if the lengths give the launch work. All lanes of a warp take part, with the same result."""
        raise NotImplementedError

    def has_work(self) -> Boolean:
        """Return `lengths_have_work()`, and let the next launch start and wait for the end of the current launch."""
        if overlaps_launches():
            cute.arch.griddepcontrol_launch_dependents()
        return self.lengths_have_work()


@dataclass(frozen=True)
class EqualLengthsAddressing(ConditionalAddressing, DenseAddressing):
    """Tile addressing of packed sequences as a dense batch. There are no tiles unless all lengths are equal."""

    cu_seqlens_q: cute.Tensor  # (B + 1,) Int32
    cu_seqlens_k: cute.Tensor
    Sq: Int32
    Sk: Int32

    def lengths_have_work(self) -> Boolean:
        return has_equal_lengths(self.cu_seqlens_q, self.Sq) & has_equal_lengths(self.cu_seqlens_k, self.Sk)

    def blocks_of_rows(self, Sq: Int32, size: int) -> Int32:
        return self.blocks_with_work(DenseAddressing.blocks_of_rows(self, Sq, size))

    def blocks_of_keys(self, Sk: Int32, size: int) -> Int32:
        return self.blocks_with_work(DenseAddressing.blocks_of_keys(self, Sk, size))

    def blocks_with_work(self, count: Int32) -> Int32:
        """Return the number of blocks of a head: `count`, or 0 without work.

        The result is uniform for the compiler, too. ptxas would serialize every product otherwise.
        """
        return cute.arch.make_warp_uniform(cutlass.select_(self.has_work(), count, 0))
