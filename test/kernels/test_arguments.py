"""What C++ passes to a kernel (torch_flashplug/registry/kernel_args.py) is what its signature takes: names, order,
ranks, types. No GPU.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from torch_flashplug.registry import features, kernel_args, kernel_table
from torch_flashplug.registry.architectures import FAMILIES
from torch_flashplug.registry.dtypes import ELEMENTS, FORMATS
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import direct

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
CUTLASS |= dict.fromkeys(FORMATS, "Uint8")  # bytes, whatever they say


def signature(name: str) -> list[tuple[str, str]]:
    """Names and types of the parameters of a class's __call__, which the DSL has wrapped."""
    module, name = name.split(".")
    tree = ast.parse((ROOT / "torch_flashplug" / "kernels" / "call_args" / f"{module}.py").read_text())
    (owner,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    (call,) = (node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__call__")
    return [(argument.arg, ast.unparse(argument.annotation)) for argument in call.args.args[1:]]


@pytest.mark.parametrize("kind", CALLS)
def test_parameters_are_what_the_table_says(kind):
    expected = [
        (one.name, (CUTLASS[one.dtype] if one.scalar else "cute.Tensor") + " | None" * one.optional)
        for one in kernel_args.OF_KIND[kind]
    ]
    assert signature(CALLS[kind]) == [*expected, ("stream", "cuda.CUstream")]


def test_direct_calls_go_by_the_table():
    values = {one.name: one.name for one in kernel_args.DECODE}
    assert direct.in_order(kernel_args.DECODE, values) == tuple(values)
    with pytest.raises(KeyError, match="lse"):
        direct.in_order(kernel_args.DECODE, {name: name for name in values if name != "lse"})
    with pytest.raises(KeyError, match="values must name arguments of the kernel, .*but got window"):
        direct.in_order(kernel_args.DECODE, values | {"window": 3})
    extra = dataclasses.replace(kernel_args.DECODE[0], name="made_up", optional=True)
    assert direct.in_order((*kernel_args.DECODE, extra), values) == (*values, None)


@pytest.mark.parametrize("spec", MADE.values(), ids=KernelSpec.name)
def test_kernels_are_compiled_for_the_ranks_and_types_of_the_table(spec):
    """And for None in the place of what their features do not bring."""
    operands = zip(("query", "key", "value", "output"), ELEMENTS[spec.dtype].operands)
    types = {name: CUTLASS[made_of] for name, made_of in operands} | CUTLASS
    kernel = builder(spec)
    assert kernel.fake_tensors().keys() == {one.name for one in kernel_args.OF_KIND[spec.kind] if not one.scalar}
    *given, _ = kernel.fake_arguments()
    for one, value in zip(kernel_args.OF_KIND[spec.kind], given, strict=True):
        if one.optional and not features.bringing(one.name) & features.bits(spec.features):
            assert value is None, one.name
        elif one.scalar:
            assert type(value).__name__ == types[one.dtype], one.name
        else:
            assert (len(value.shape), value.element_type.__name__) == (one.rank, types[one.dtype]), one.name


class MadeUp(KernelCall):
    """Of two optional arguments, which it leaves alone: it launches nothing, and can be called here."""

    def __init__(self, spec: KernelSpec):
        self.spec, self.element = spec, KernelFeatures.of(spec).element

    def fake_tensors(self) -> dict[str, cute.Tensor]:
        return super().fake_tensors() | {"words": fake_vector(Int32, 16)}

    @cute.jit
    def __call__(self, words: cute.Tensor | None, left: Int32 | None, stream: cuda.CUstream):
        """As the DSL wants to have it spelled."""


@pytest.mark.parametrize("mask, given, refused", [("full", None, 3), ("causal", 3, None)])
def test_what_no_feature_brings_is_none(mask, given, refused, monkeypatch):
    """Here `words` always, and `left` but to causal kernels: it is compiled as such, and nothing else can be passed."""
    words = kernel_args._tensor("words", 1, "int32", "made up", optional=True)
    left = kernel_args._number("left", "int32", "made up", optional=True)
    monkeypatch.setitem(kernel_args.OF_KIND, "fwd", (words, left))
    causal = dataclasses.replace(*features.of(["causal"]), arguments=("left",))
    others = (feature for feature in features.FEATURES if feature.name != "causal")
    monkeypatch.setattr(features, "FEATURES", (causal, *others))
    call = MadeUp(next(spec for spec in kernel_table.specs(90, "fwd") if spec.mask == mask))
    function = cute.compile(call, *call.fake_arguments(), options="--enable-tvm-ffi --gpu-arch sm_90a")
    function(None, given, 0)
    with pytest.raises(TypeError, match="words: None, left"):
        function(None, refused, 0)
