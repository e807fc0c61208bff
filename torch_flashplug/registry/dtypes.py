"""Dtypes of tensors and kernels.

A new dtype is a row here and a row of kernels/primitives/dtype.py, with the operations of kernels on the dtype. C++
gets the rows with the other tables. The module imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DtypeInfo:
    """A dtype of tensors."""

    torch_name: str  # name of the torch dtype
    num_bytes: int
    # DLDataTypeCode of DLPack, with which the launcher describes a tensor. Not a part of the text of a row, because
    # fingerprints of kernels contain the text (fingerprint.py), and the name determines the code.
    dlpack_code: int = field(repr=False)


_INT, _UINT, _FLOAT, _COMPLEX, _BOOL = 0, 1, 2, 5, 6  # codes of DLPack
# Dtypes of tensors that kernels read or write. The first row is the default of a call described by facts.
DTYPE_INFO = {
    "bf16": DtypeInfo("bfloat16", 2, 4),
    "fp16": DtypeInfo("float16", 2, _FLOAT),
    "fp32": DtypeInfo("float32", 4, _FLOAT),
    "int8": DtypeInfo("int8", 1, _INT),
    "e4m3": DtypeInfo("float8_e4m3fn", 1, 10),
    "e5m2": DtypeInfo("float8_e5m2", 1, 12),
}
# Further dtypes, which no kernel takes. Messages name them.
NAMED_DTYPES = {
    info.torch_name: info
    for info in (
        DtypeInfo("float64", 8, _FLOAT),
        *(DtypeInfo(f"int{8 * num_bytes}", num_bytes, _INT) for num_bytes in (2, 4, 8)),
        *(DtypeInfo(f"uint{8 * num_bytes}", num_bytes, _UINT) for num_bytes in (1, 2, 4, 8)),
        *(DtypeInfo(f"complex{8 * num_bytes}", num_bytes, _COMPLEX) for num_bytes in (4, 8, 16)),
        DtypeInfo("bool", 1, _BOOL),
        DtypeInfo("float8_e4m3fnuz", 1, 11),
        DtypeInfo("float8_e5m2fnuz", 1, 13),
    )
}


@dataclass(frozen=True, slots=True)
class KernelDtypes:
    """The dtypes of a kernel's operands and output, as names of DTYPE_INFO."""

    q: str
    k: str
    v: str
    o: str
    kinds: dict[int, tuple[str, ...]] | None = None  # kinds of kernels, by architecture; None: all kernels
    feature: str = ""  # feature (features.py) of all kernels with the dtypes, and of no more; empty: none

    @property
    def operands(self) -> tuple[str, str, str, str]:
        return self.q, self.k, self.v, self.o

    def supports(self, kind: str, arch: int, tag: str = "") -> bool:
        """Return whether kernels of a kind exist in the dtypes. `tag` has the features, as in names of kernels."""
        tags = tag.split("+") if tag else ()
        fits = self.feature in tags if self.feature else not changes_elements(tags)
        return fits and (self.kinds is None or kind in self.kinds.get(arch, ()))

    def num_bytes(self, operand: str) -> int:
        """Return the bytes of an element of "q", "k", "v" or "o"."""
        return DTYPE_INFO[getattr(self, operand)].num_bytes


SDPA_DTYPES = tuple(name for name, info in DTYPE_INFO.items() if info.num_bytes > 1)  # dtypes of F.sdpa

QUANTIZED_KV_FEATURE = "cache8"  # the feature of kernels that read 8-bit K and V
QUANTIZED_KV_DTYPES = ("int8", "e4m3", "e5m2")  # dtypes of a quantized KV cache
KERNEL_DTYPES = {name: KernelDtypes(name, name, name, name) for name in ("bf16", "fp16")} | {
    f"{q}_{kv}": KernelDtypes(q, kv, kv, q, {80: ("decode",)}, QUANTIZED_KV_FEATURE)
    for q in ("bf16", "fp16")
    for kv in QUANTIZED_KV_DTYPES
}
DTYPES = tuple(KERNEL_DTYPES)
ELEMENTS_16BIT = tuple(name for name, element in KERNEL_DTYPES.items() if not element.feature)  # no 8-bit dtypes


def changes_elements(tags: Iterable[str]) -> bool:
    """Return whether kernels with the given features have dtypes of a feature, such as 8-bit K and V."""
    return any(element.feature in tags for element in KERNEL_DTYPES.values())


def elements_of(kind: str, arch: int, tag: str = "") -> tuple[str, ...]:
    """Return the names of the elements of kernels of a kind. `tag` has the features, as in names of kernels."""
    return tuple(name for name, element in KERNEL_DTYPES.items() if element.supports(kind, arch, tag))


def unsupported_element_reason(name: str, kind: str, arch: int, tag: str = "") -> str | None:
    """Return the reason why no kernel of a kind has the element, or None if a kernel may have the element."""
    names = elements_of(kind, arch, tag)
    if name in names:
        return None
    with_features = f" with {tag}" * changes_elements(tag.split("+"))
    return f"{name}: a {kind} kernel of sm_{arch}{with_features} must have the dtypes {' or '.join(names)} (dtypes.py)"
