"""Agreement of kernel signatures with the kernel ABI in registry/kernel_args.py: names, order, ranks, types. No GPU.

C++ passes arguments by this table.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from torch_flashplug.registry import features, kernel_args, kernel_table
from torch_flashplug.registry.architectures import FAMILIES
from torch_flashplug.registry.dtypes import ELEMENTS, QUANTIZED_KV_DTYPES
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import direct_launch

pytest.importorskip("cutlass", reason="the DSL is needed to make kernels")

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32

from torch_flashplug.kernels import builder
from torch_flashplug.kernels.call_args.operands import KernelCall, fake_vector
from torch_flashplug.kernels.features.base import KernelFeatures
from torch_flashplug.kernels.primitives import dtype as made_of

ROOT = Path(__file__).resolve().parents[2]
CALLS = {"fwd": "forward.ForwardCall", "decode": "decode.DecodeCall", "bwd": "backward.BackwardCall"}
MADE = {
    (spec.kind, spec.arch, spec.dtype, spec.mask): spec
    for family in FAMILIES
    for spec in kernel_table.specs(family.arch)
}
CUTLASS = {"fp32": "Float32", "int32": "Int32", "int64": "Int64", "bool": "Uint8"}
CUTLASS |= {name: element.dtype.__name__ for name, element in made_of.ELEMENTS.items()}
CUTLASS |= dict.fromkeys(QUANTIZED_KV_DTYPES, "Uint8")  # 8-bit formats are passed as bytes


def signature(name: str) -> list[tuple[str, str]]:
    """Return names and types of the parameters of a class's __call__, which the DSL has wrapped."""
    module, name = name.split(".")
    tree = ast.parse((ROOT / "torch_flashplug" / "kernels" / "call_args" / f"{module}.py").read_text())
    (owner,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    (call,) = (node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__call__")
    return [(argument.arg, ast.unparse(argument.annotation)) for argument in call.args.args[1:]]


@pytest.mark.parametrize("kind", CALLS)
def test_kernel_parameters_match_the_kernel_abi_table(kind):
    expected = [
        (
            argument.name,
            (CUTLASS[argument.dtype] if argument.is_scalar else "cute.Tensor") + " | None" * argument.is_optional,
        )
        for argument in kernel_args.ARGUMENTS_BY_KIND[kind]
    ]
    assert signature(CALLS[kind]) == [*expected, ("stream", "cuda.CUstream")]


def test_direct_calls_order_arguments_by_the_kernel_abi_table():
    values = {argument.name: argument.name for argument in kernel_args.DECODE}
    assert direct_launch.order_arguments(kernel_args.DECODE, values) == tuple(values)
    with pytest.raises(KeyError, match="lse"):
        direct_launch.order_arguments(kernel_args.DECODE, {name: name for name in values if name != "lse"})
    with pytest.raises(KeyError, match="values must name arguments of the kernel, .*but got window"):
        direct_launch.order_arguments(kernel_args.DECODE, values | {"window": 3})
    extra = dataclasses.replace(kernel_args.DECODE[0], name="made_up", is_optional=True)
    assert direct_launch.order_arguments((*kernel_args.DECODE, extra), values) == (*values, None)


@pytest.mark.parametrize("spec", MADE.values(), ids=KernelSpec.name)
def test_kernels_compile_with_the_ranks_and_types_of_the_kernel_abi_table(spec):
    """Arguments of missing features are compiled as None."""
    operands = zip(("query", "key", "value", "output"), ELEMENTS[spec.dtype].operands)
    types = {name: CUTLASS[number] for name, number in operands} | CUTLASS
    kernel = builder(spec)
    assert kernel.fake_tensors().keys() == {
        argument.name for argument in kernel_args.ARGUMENTS_BY_KIND[spec.kind] if not argument.is_scalar
    }
    *values, _ = kernel.fake_arguments()
    for argument, value in zip(kernel_args.ARGUMENTS_BY_KIND[spec.kind], values, strict=True):
        if argument.is_optional and not features.bits_of_argument(argument.name) & features.bits(spec.features):
            assert value is None, argument.name
        elif argument.is_scalar:
            assert type(value).__name__ == types[argument.dtype], argument.name
        else:
            assert (len(value.shape), value.element_type.__name__) == (argument.rank, types[argument.dtype]), (
                argument.name
            )


class MadeUp(KernelCall):
    """Kernel with two optional arguments and no launch, callable without a GPU."""

    def __init__(self, spec: KernelSpec):
        self.spec, self.element = spec, KernelFeatures.of(spec).element

    def fake_tensors(self) -> dict[str, cute.Tensor]:
        return super().fake_tensors() | {"words": fake_vector(Int32, 16)}

    @cute.jit
    def __call__(self, words: cute.Tensor | None, left: Int32 | None, stream: cuda.CUstream):
        """Satisfy the spelling rules of the DSL."""


@pytest.mark.parametrize("mask, left_value, rejected_value", [("full", None, 3), ("causal", 3, None)])
def test_arguments_without_a_feature_are_none(mask, left_value, rejected_value, monkeypatch):
    """No kernel gets `words`, and only causal kernels get `left`; arguments compiled as None accept nothing else."""
    words = kernel_args._tensor("words", 1, "int32", "made up", is_optional=True)
    left = kernel_args._number("left", "int32", "made up", is_optional=True)
    monkeypatch.setitem(kernel_args.ARGUMENTS_BY_KIND, "fwd", (words, left))
    causal = dataclasses.replace(*features.select(["causal"]), arguments=("left",))
    further_features = (feature for feature in features.FEATURES if feature.name != "causal")
    monkeypatch.setattr(features, "FEATURES", (causal, *further_features))
    call = MadeUp(next(spec for spec in kernel_table.specs(90, "fwd") if spec.mask == mask))
    function = cute.compile(call, *call.fake_arguments(), options="--enable-tvm-ffi --gpu-arch sm_90a")
    function(None, left_value, 0)
    with pytest.raises(TypeError, match="words: None, left"):
        function(None, rejected_value, 0)
