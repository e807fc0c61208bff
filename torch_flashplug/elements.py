"""What tensors and kernels are made of. A new element type is a row here (and in kDTypes of src/tensor_facts.h, where
no other kernel is made of it), and what kernels do with it: a row of kernels/parts/element.py. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Number:
    """What a tensor is made of."""

    torch: str  # its dtype
    bytes: int


# All that are told apart; kDTypes of src/tensor_facts.h mirrors them, test_facts holds the two together.
NUMBERS = {"bf16": Number("bfloat16", 2), "fp16": Number("float16", 2), "fp32": Number("float32", 4)}


@dataclass(frozen=True, slots=True)
class Element:
    """What a kernel's operands and output are made of: names of NUMBERS."""

    q: str
    k: str
    v: str
    o: str
    kinds: dict[int, tuple[str, ...]] | None = None  # of spec.KINDS, by architecture; None: any kernel is made of it

    @property
    def operands(self) -> tuple[str, str, str, str]:
        return self.q, self.k, self.v, self.o

    def of(self, kind: str, arch: int) -> bool:
        """Whether such kernels are made of it."""
        return self.kinds is None or kind in self.kinds.get(arch, ())

    def bytes(self, operand: str) -> int:
        """Of one entry of "q", "k", "v" or "o"."""
        return NUMBERS[getattr(self, operand)].bytes


ELEMENTS = {name: Element(name, name, name, name) for name in ("bf16", "fp16")}
DTYPES = tuple(ELEMENTS)


def elements_of(kind: str, arch: int) -> tuple[str, ...]:
    """Names of those that such kernels are made of."""
    return tuple(name for name, element in ELEMENTS.items() if element.of(kind, arch))


def misfit(name: str, kind: str, arch: int) -> str | None:
    """Why no such kernel is made of this one; None if it can be."""
    known = elements_of(kind, arch)
    return None if name in known else f"{name}: a {kind} of sm_{arch} is made of {' or '.join(known)} (elements.py)"
