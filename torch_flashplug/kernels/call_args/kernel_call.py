"""Signature and arguments of the kernels, generated from the rows of torch_flashplug/registry/kernel_args.py.

src/launch/kernel_args.cpp packs the arguments in the order of the rows. The stream is last and is passed by
src/launch/launch.cpp. No other file repeats the order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, make_dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...registry import features
from ...registry.kernel_args import ARGUMENTS_BY_KIND, Argument
from ...registry.kernel_spec import KernelSpec
from ..primitives.dtype import Element
from ..primitives.fragments import LOG2_E
from .fake_tensors import FakeTensors

NUMBERS = {"fp32": Float32, "int32": Int32}
NEEDS_DQ, NEEDS_DKDV = 1, 2  # bits of the argument `needs_grad`: kNeedsDq, kNeedsDkDv of src/dispatch/dispatch.h


@dataclass(frozen=True)
class SoftmaxScale:
    """Softmax scale of a call."""

    log2: Float32  # scale * log2(e)
    natural: Float32  # scale


@dataclass(frozen=True)
class KernelArgs:
    """Arguments of a kernel launch, without the stream.

    `args_class` derives the class of a kernel kind, with a field for each row of kernel_args.py. The row gives the
    shape and the meaning. A field is None if no feature of the kernel uses the argument.
    """

    @property
    def scales(self) -> SoftmaxScale:
        """Softmax scale, natural and times log2(e). Decode kernels take only the natural scale."""
        log2 = self.scale_log2 if hasattr(self, "scale_log2") else self.scale * LOG2_E
        return SoftmaxScale(log2, self.scale)

    @property
    def bias_any_dtype(self) -> cute.Tensor | None:
        """Bias, in the dtype of the query or in fp32."""
        return self.bias32 if self.bias is None else self.bias

    @property
    def dbias_any_dtype(self) -> cute.Tensor | None:
        """Gradient of the bias, in the dtype of the bias."""
        return self.dbias32 if self.dbias is None else self.dbias


@functools.cache
def args_class(names: tuple[str, ...]) -> type[KernelArgs]:
    """Return the class of the arguments with these names."""
    return make_dataclass("KernelArgs", names, bases=(KernelArgs,), frozen=True)


def parameter(row: Argument) -> inspect.Parameter:
    """Return the parameter of `__call__` for a row of kernel_args.py."""
    dtype = NUMBERS[row.dtype] if row.is_scalar else cute.Tensor
    annotation = dtype | None if row.is_optional else dtype
    return inspect.Parameter(row.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)


def make_call(parameters: Sequence[inspect.Parameter]) -> Callable:
    """Return the `__call__` of a kernel class, which cute.compile compiles.

    The function calls `launch(KernelArgs, stream)` of the kernel class. The DSL reads the parameters from the
    signature, so no source has to spell out the parameters. The body has no control flow, so the DSL need not
    preprocess the body.

    Args:
        parameters: the parameters, without `self` and the stream.
    """
    names = tuple(x.name for x in parameters)

    def __call__(self, *arguments):
        *values, stream = arguments
        self.launch(args_class(names)(*values), stream)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    self_parameter, stream = (
        inspect.Parameter("self", kind),
        inspect.Parameter("stream", kind, annotation=cuda.CUstream),
    )
    __call__.__signature__ = inspect.Signature([self_parameter, *parameters, stream])
    return cute.jit(preprocess=False)(__call__)


class KernelCall:
    """Base class of the kernel objects compiled by cute.compile.

    A kernel class names a kernel kind: `class ForwardSm90(KernelCall, kind="fwd")`. The class then gets a `__call__`
    with the arguments of the kind, and defines `launch(call, stream)`.
    """

    spec: KernelSpec
    element: Element
    elementwise = False  # True if tensors may have any strides and any address

    def __init_subclass__(cls, kind: str = "", **options):
        super().__init_subclass__(**options)
        if kind:
            cls.__call__ = make_call([parameter(row) for row in ARGUMENTS_BY_KIND[kind]])

    def fake_arguments(self) -> tuple:
        """Return the arguments for cute.compile.

        An optional argument is None if no feature of the kernel uses the argument.
        """
        tensors = FakeTensors(self.element, self.spec, self.elementwise)
        used_names = {name for feature in features.select(self.spec.features) for name in feature.arguments}

        def fake_argument(row: Argument) -> object:
            if row.is_optional and row.name not in used_names:
                return None
            return NUMBERS[row.dtype](1) if row.is_scalar else tensors.create(row)

        return (*map(fake_argument, ARGUMENTS_BY_KIND[self.spec.kind]), cute.runtime.make_fake_stream())
