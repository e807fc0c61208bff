"""Lengths of one sequence: the numbers of query rows and of keys."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32


@dataclass(frozen=True)
class SeqlenInfo:
    """Sequence lengths of a tile's sequence."""

    Sq: Int32
    Sk: Int32

    may_be_empty = False  # True if the sequence may have no rows or no keys

    @property
    def seqlen_k_at_least_one(self) -> Int32:
        """Number of keys, at least one, so that there is always a block to process."""
        return self.Sk
