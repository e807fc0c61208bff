"""Lengths of one sequence: the numbers of query rows and of keys."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32


@dataclass(frozen=True)
class Sizes:
    """Of the sequence that a tile belongs to."""

    Sq: Int32
    Sk: Int32

    may_be_empty = False  # whether it may have no rows, or no keys

    @property
    def some_keys(self) -> Int32:
        """Keys; where there are none, one, so that there is a block to take."""
        return self.Sk
