"""Arguments that all Hopper kernels share: the tensors moved by TMA."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from ..primitives import sm90


@dataclass(frozen=True)
class TmaOperands:
    """Tensors that TMA loads or stores in a kernel, by name: TMA atoms and TMA coordinates.

    The launch creates the object with `create`, and the kernel takes the object as an argument. The kernel then pairs
    each tensor with its buffer in shared memory (`with_smem`).

    TMA coordinates have the shape (rows, columns, heads, batch). The coordinates of V as the right operand of P V have
    the shape (columns, rows, heads, batch), unless the caller passes V transposed.
    """

    names: cutlass.Constexpr[tuple[str, ...]]  # "q", "k", ...: in the order of the kernel's parameters
    atoms: tuple[cute.CopyAtom, ...]
    tensors: tuple[cute.Tensor, ...]  # TMA coordinates

    @staticmethod
    def create(**operands: tuple[cute.CopyAtom, cute.Tensor]) -> TmaOperands:
        """Return the operands, from the TMA atom and the TMA coordinates of each tensor by name."""
        atoms, tensors = zip(*operands.values(), strict=True)
        return TmaOperands(tuple(operands), atoms, tensors)

    def tensor(self, name: str) -> cute.Tensor:
        """Return the TMA coordinates of a tensor: (rows, columns, heads, batch)."""
        return self.tensors[self.names.index(name)]

    def with_smem(self, **buffers: cute.Tensor) -> tuple[sm90.TmaOperand, ...]:
        """Return the named tensors with their buffers in shared memory, in the order of the keywords.

        Args:
            buffers: the buffer (rows, columns, stage) of each tensor by name.
        """
        indices = map(self.names.index, buffers)
        return tuple(
            sm90.TmaOperand(self.atoms[i], self.tensors[i], buffer)
            for i, buffer in zip(indices, buffers.values(), strict=True)
        )
