"""Agreement of kernel signatures with the kernel ABI in registry/kernel_args.py: names, order, ranks, types. No GPU.

C++ passes arguments by this table.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing

import pytest

from torch_flashplug.registry import features, kernel_args, kernel_table
from torch_flashplug.registry.architectures import FAMILIES
from torch_flashplug.registry.dtypes import KERNEL_DTYPES, QUANTIZED_KV_DTYPES
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import direct_launch

pytest.importorskip("cutlass", reason="the DSL is needed to make kernels")

import cutlass.cute as cute

from torch_flashplug.kernels import builder
from torch_flashplug.kernels.call_args import fake_tensors
from torch_flashplug.kernels.call_args.kernel_call import KernelCall, SoftmaxScale, args_class
from torch_flashplug.kernels.features.base import KernelFeatures
from torch_flashplug.kernels.primitives import dtype as dsl_dtypes

COMPILED_SPECS = {
    (spec.kind, spec.arch, spec.dtype, spec.mask): spec
    for family in FAMILIES
    for spec in kernel_table.specs(family.arch)
}
CUTLASS = {"fp32": "Float32", "int32": "Int32", "int64": "Int64", "bool": "Uint8"}
CUTLASS |= {name: element.dtype.__name__ for name, element in dsl_dtypes.ELEMENTS.items()}
CUTLASS |= dict.fromkeys(QUANTIZED_KV_DTYPES, "Uint8")  # 8-bit formats are passed as bytes


@pytest.mark.parametrize("kind", kernel_args.ARGUMENTS_BY_KIND)
def test_kernel_parameters_match_the_kernel_abi_table(kind):
    """The DSL reads names and types from the signature of the function that it has wrapped."""
    spec = next(spec for spec in COMPILED_SPECS.values() if spec.kind == kind)
    expected = [
        (row.name, (CUTLASS[row.dtype] if row.is_scalar else "Tensor", row.is_optional))
        for row in kernel_args.ARGUMENTS_BY_KIND[kind]
    ]
    first, *parameters, stream = inspect.signature(type(builder(spec)).__call__).parameters.values()
    types = [(x.name, annotation_of(x)) for x in parameters]
    assert (first.name, types, stream.name) == ("self", expected, "stream")


def annotation_of(x: inspect.Parameter) -> tuple[str, bool]:
    """Return the name of the type of a parameter, and whether the parameter may be None."""
    options = typing.get_args(x.annotation) or (x.annotation,)
    return options[0].__name__, type(None) in options


def test_kernel_args_have_a_field_for_each_row_of_the_table():
    names = tuple(row.name for row in kernel_args.BACKWARD)
    call = args_class(names)(*names)
    assert all(getattr(call, name) == name for name in names)
    assert call.scales == SoftmaxScale("scale_log2", "scale")
    assert call.bias_any_dtype == "bias" and dataclasses.replace(call, bias=None).bias_any_dtype == "bias32"


def test_direct_calls_order_arguments_by_the_kernel_abi_table():
    values = {argument.name: argument.name for argument in kernel_args.DECODE}
    assert direct_launch.order_arguments(kernel_args.DECODE, values) == tuple(values)
    with pytest.raises(KeyError, match="lse"):
        direct_launch.order_arguments(kernel_args.DECODE, {name: name for name in values if name != "lse"})
    with pytest.raises(KeyError, match="values must name arguments of the kernel, .*but got window"):
        direct_launch.order_arguments(kernel_args.DECODE, values | {"window": 3})
    extra = dataclasses.replace(kernel_args.DECODE[0], name="made_up", is_optional=True)
    assert direct_launch.order_arguments((*kernel_args.DECODE, extra), values) == (*values, None)


@pytest.mark.parametrize("spec", COMPILED_SPECS.values(), ids=KernelSpec.name)
def test_kernels_compile_with_the_ranks_and_types_of_the_kernel_abi_table(spec):
    """Arguments of missing features are compiled as None."""
    operands = zip(("query", "key", "value", "output"), KERNEL_DTYPES[spec.dtype].operands)
    types = {name: CUTLASS[number] for name, number in operands} | CUTLASS
    *values, _ = builder(spec).fake_arguments()
    for argument, value in zip(kernel_args.ARGUMENTS_BY_KIND[spec.kind], values, strict=True):
        if argument.is_optional and not features.bits_of_argument(argument.name) & features.bits(spec.features):
            assert value is None, argument.name
        elif argument.is_scalar:
            assert type(value).__name__ == types[argument.dtype], argument.name
        else:
            assert (len(value.shape), value.element_type.__name__) == (argument.rank, types[argument.dtype]), (
                argument.name
            )


@pytest.mark.parametrize("mask, left_value, rejected_value", [("full", None, 3), ("causal", 3, None)])
def test_arguments_without_a_feature_are_none(mask, left_value, rejected_value, monkeypatch):
    """No kernel gets `words`, and only causal kernels get `left`; arguments compiled as None accept nothing else."""
    words = kernel_args._tensor("words", 1, "int32", "made up", is_optional=True)
    left = kernel_args._number("left", "int32", "made up", is_optional=True)
    monkeypatch.setitem(kernel_args.ARGUMENTS_BY_KIND, "fwd", (words, left))
    causal = dataclasses.replace(*features.select(["causal"]), arguments=("left",))
    further_features = (feature for feature in features.FEATURES if feature.name != "causal")
    monkeypatch.setattr(features, "FEATURES", (causal, *further_features))
    monkeypatch.setitem(fake_tensors.LAYOUTS, "words", fake_tensors.vector())

    class MadeUp(KernelCall, kind="fwd"):
        """Kernel with two optional arguments and no launch, callable without a GPU."""

        spec = next(spec for spec in kernel_table.specs(90, "fwd") if spec.mask == mask)
        element = KernelFeatures.from_spec(spec).element

        def launch(self, call, stream):
            """Launch nothing."""

    call = MadeUp()
    function = cute.compile(call, *call.fake_arguments(), options="--enable-tvm-ffi --gpu-arch sm_90a")
    function(None, left_value, 0)
    with pytest.raises(TypeError, match="words: None, left"):
        function(None, rejected_value, 0)
