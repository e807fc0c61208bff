"""What tensors and kernels are made of. A new element type is a row here (and in kDTypes of src/core/tensor_facts.h,
where no other kernel is made of it), and what kernels do with it: a row of kernels/primitives/dtype.py. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Number:
    """What a tensor is made of."""

    torch: str  # its dtype
    bytes: int


# All that are told apart; kDTypes of src/core/tensor_facts.h mirrors them, test_facts holds the two together.
NUMBERS = {
    "bf16": Number("bfloat16", 2),
    "fp16": Number("float16", 2),
    "fp32": Number("float32", 4),
    "int8": Number("int8", 1),
    "e4m3": Number("float8_e4m3fn", 1),
    "e5m2": Number("float8_e5m2", 1),
}


@dataclass(frozen=True, slots=True)
class Element:
    """What a kernel's operands and output are made of: names of NUMBERS."""

    q: str
    k: str
    v: str
    o: str
    kinds: dict[int, tuple[str, ...]] | None = None  # of spec.KINDS, by architecture; None: any kernel is made of it
    feature: str = ""  # of features.py, which kernels that are made of it have, and no others; empty: others alone

    @property
    def operands(self) -> tuple[str, str, str, str]:
        return self.q, self.k, self.v, self.o

    def of(self, kind: str, arch: int, tag: str = "") -> bool:
        """Whether such kernels are made of it; tag: of their features, in their names."""
        brought = tag.split("+") if tag else ()
        fits = self.feature in brought if self.feature else not brought_by_elements(brought)
        return fits and (self.kinds is None or kind in self.kinds.get(arch, ()))

    def bytes(self, operand: str) -> int:
        """Of one entry of "q", "k", "v" or "o"."""
        return NUMBERS[getattr(self, operand)].bytes


WIDE = tuple(name for name, number in NUMBERS.items() if number.bytes > 1)  # what F.sdpa takes

CACHED = "cache8"  # the feature of kernels that read K and V in 8 bits
FORMATS = ("int8", "e4m3", "e5m2")  # of a cache
ELEMENTS = {name: Element(name, name, name, name) for name in ("bf16", "fp16")} | {
    f"{q}_{kv}": Element(q, kv, kv, q, {80: ("decode",)}, CACHED) for q in ("bf16", "fp16") for kv in FORMATS
}
DTYPES = tuple(ELEMENTS)
WHOLE = tuple(name for name, element in ELEMENTS.items() if not element.feature)  # of 16 bits alone


def brought_by_elements(tags: Iterable[str]) -> bool:
    """Whether kernels with these features are made of elements of their own."""
    return any(element.feature in tags for element in ELEMENTS.values())


def elements_of(kind: str, arch: int, tag: str = "") -> tuple[str, ...]:
    """Names of those that such kernels are made of; tag: of their features."""
    return tuple(name for name, element in ELEMENTS.items() if element.of(kind, arch, tag))


def misfit(name: str, kind: str, arch: int, tag: str = "") -> str | None:
    """Why no such kernel is made of this one; None if it can be."""
    known = elements_of(kind, arch, tag)
    if name in known:
        return None
    beside = f" with {tag}" * brought_by_elements(tag.split("+"))
    return f"{name}: a {kind} of sm_{arch}{beside} is made of {' or '.join(known)} (dtypes.py)"
