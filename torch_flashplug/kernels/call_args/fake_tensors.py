"""Tensor arguments for cute.compile: shapes with symbolic sizes, strides, and alignment."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from ...registry.kernel_args import Argument
from ...registry.kernel_spec import KernelSpec
from ..primitives.dtype import Element

UNIT = 16  # bytes of a vector load and of a cp.async copy


@dataclass(frozen=True)
class Layout:
    """Shape and strides of a tensor argument.

    The shape has the names of the dimensions. Dimensions with the same name have the same size in all arguments of a
    call. A "?" is a size of its own, and a number is a fixed size.
    """

    shape: str
    align: int | None = None  # bytes; None: an element
    last_stride: int | None = 1  # None: any stride
    divisibility: int = 1  # divisor of all other strides, in elements


def operand(shape: str) -> Layout:
    """Return the layout of an operand or a result: rows of whole 16-byte units, or elements at any address."""
    return Layout(shape, align=UNIT)


def vector(size: str = "?", align: int = 4) -> Layout:
    return Layout(size, align)


BIAS = Layout("? ? ? ?")
LAYOUTS = {
    "q": operand("B Hq Sq D"),
    "k": operand("B Hkv Sk D"),
    "v": operand("B Hkv Sk Dv"),
    "k_samples": operand("B Hkv samples D"),
    "o": operand("B Hq Sq Dv"),
    "do": operand("B Hq Sq Dv"),
    "dq": operand("B Hq Sq D"),
    # dK and dV have as many heads as K and V, or a multiple. With a multiple, a block of keys consists of several
    # tiles, which share the query heads of the block's KV head. Each tile writes the gradients of its own query heads,
    # and the caller sums the tiles.
    "dk": operand("B shares Sk D"),
    "dv": operand("B shares Sk Dv"),
    "lse": Layout("B Hq Sq", 4),
    "dlse": Layout("B Hq ?", 4, last_stride=None),
    "row_stats": Layout("B Hq 2 ?", UNIT, divisibility=4),
    "mask": Layout("? ? ? ?", 1, last_stride=None),
    "mask_metadata": Layout("? ? ?", UNIT),
    **dict.fromkeys(("bias", "bias32", "dbias", "dbias32"), BIAS),
    **dict.fromkeys(("k_scale", "v_scale"), Layout("? ? ?", 4, last_stride=None)),
    "sinks": Layout("?", 4, last_stride=None),
    "block_table": Layout("? ?"),
    **dict.fromkeys(("partials", "dq_workspace", "quant_workspace", "quantized_kv", "tile_lists"), vector(align=UNIT)),
    "counter": vector("1"),
    "seed": vector("1", align=8),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), vector("sequences_plus_1")),
    "seqused_k": vector(),
}
# In a paged KV cache the number of pages and the rows of a page are arbitrary.
POOLS = {"k": operand("pages Hkv page_rows D"), "v": operand("pages Hkv page_rows Dv")}
LAYOUTS_OF_FEATURE = {"paged": POOLS}  # layouts of kernels with a feature
# Layouts of a kernel kind that differ from LAYOUTS.
LAYOUTS_OF_KIND = {
    "decode": POOLS,
    "tilebwd": {"dk": operand("B Hkv Sk D"), "dv": operand("B Hkv Sk Dv")},
}


class FakeTensors:
    """Tensor arguments of a kernel for cute.compile."""

    def __init__(self, element: Element, spec: KernelSpec, elementwise: bool):
        """Initialize with all sizes unknown.

        Args:
            element: element type of the kernel.
            spec: the kernel spec.
            elementwise: True if operands may have any strides and any address.
        """
        self.element, self.spec, self.elementwise = element, spec, elementwise
        self.sizes: dict[str, object] = {}

    def dtype(self, row: Argument) -> type[cutlass.Numeric]:
        fixed = {"fp32": Float32, "int32": Int32, "int64": Int64, "bool": Uint8}
        operands = {"query": self.element.dtype, "output": self.element.dtype}
        return (fixed | operands | dict.fromkeys(("key", "value"), self.element.cached))[row.dtype]

    def layout(self, row: Argument, width: int) -> Layout:
        """Return the layout of an argument.

        Args:
            row: the row of kernel_args.py.
            width: bits of an element.
        """
        layouts = LAYOUTS | LAYOUTS_OF_KIND.get(self.spec.kind, {})
        for feature in self.spec.features & LAYOUTS_OF_FEATURE.keys():
            layouts |= LAYOUTS_OF_FEATURE[feature]
        layout = layouts[row.name]
        if layout is BIAS:
            # sm_80 kernels read the bias with cp.async. The other kernels take rows of any stride at any address.
            align = UNIT if self.spec.arch < 90 else width // 8
            return Layout(layout.shape, align, divisibility=align * 8 // width)
        if row.dtype in {"query", "key", "value", "output"}:
            if self.elementwise:
                return Layout(layout.shape, 2, last_stride=None)
            return Layout(layout.shape, layout.align, divisibility=UNIT * 8 // width)
        return layout

    def size(self, name: str) -> object:
        """Return the size of a dimension."""
        if name.isdigit():
            return int(name)
        if name == "?":
            return cute.sym_int()
        if name not in self.sizes:
            is_head_dim = name in {"D", "Dv"}
            self.sizes[name] = cute.sym_int(divisibility=8 if is_head_dim and not self.elementwise else 1)
        return self.sizes[name]

    def create(self, row: Argument) -> cute.Tensor:
        """Return the tensor argument of a row of kernel_args.py.

        Strides are 64-bit, because tensors may exceed 2^31 elements.
        """
        dtype = self.dtype(row)
        layout = self.layout(row, dtype.width)
        shape = tuple(map(self.size, layout.shape.split()))
        strides = [cute.sym_int64(divisibility=layout.divisibility) for _ in shape]
        if layout.last_stride is not None:
            strides[-1] = layout.last_stride
        return cute.runtime.make_fake_tensor(dtype, shape, tuple(strides), assumed_align=layout.align)
