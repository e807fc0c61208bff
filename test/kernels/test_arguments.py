"""What C++ passes to a kernel (torch_flashplug/arguments.py) is what its signature takes: names, order, ranks, types.
No GPU.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from torch_flashplug import arguments, configs, features
from torch_flashplug.elements import ELEMENTS
from torch_flashplug.families import FAMILIES
from torch_flashplug.spec import KernelSpec
from torch_flashplug.testing import direct

pytest.importorskip("cutlass", reason="the DSL is needed to make kernels")

from torch_flashplug.kernels import builder  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CALLS = {"fwd": "ForwardCall", "decode": "DecodeCall", "bwd": "BackwardCall"}
MADE = {
    (spec.kind, spec.arch, spec.dtype, spec.mask): spec for family in FAMILIES for spec in configs.specs(family.arch)
}
CUTLASS = {"bf16": "BFloat16", "fp16": "Float16", "fp32": "Float32", "int32": "Int32"}


def signature(name: str) -> list[str]:
    """Names of the parameters of a class's __call__, which the DSL has wrapped."""
    tree = ast.parse((ROOT / "torch_flashplug" / "kernels" / "parts" / "arguments.py").read_text())
    (owner,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    (call,) = (node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__call__")
    return [argument.arg for argument in call.args.args[1:]]


@pytest.mark.parametrize("kind", CALLS)
def test_parameters_are_named_as_the_table_names_arguments(kind):
    assert signature(CALLS[kind]) == [*(one.name for one in arguments.OF_KIND[kind]), "stream"]


def test_direct_calls_go_by_the_table():
    values = {one.name: one.name for one in arguments.DECODE}
    assert direct.in_order(arguments.DECODE, values) == tuple(values)
    with pytest.raises(KeyError, match="lse"):
        direct.in_order(arguments.DECODE, {name: name for name in values if name != "lse"})
    with pytest.raises(KeyError, match="no argument window"):
        direct.in_order(arguments.DECODE, values | {"window": 3})
    extra = dataclasses.replace(arguments.DECODE[0], name="bias", optional=True)
    assert direct.in_order((*arguments.DECODE, extra), values) == (*values, None)


@pytest.mark.parametrize("spec", MADE.values(), ids=KernelSpec.name)
def test_kernels_are_compiled_for_the_ranks_and_types_of_the_table(spec):
    """And for None in the place of what their features do not bring."""
    operands = zip(("query", "key", "value", "output"), ELEMENTS[spec.dtype].operands)
    types = {name: CUTLASS[made_of] for name, made_of in (*operands, ("fp32", "fp32"), ("int32", "int32"))}
    *given, _ = builder(spec).fake_arguments()
    for one, value in zip(arguments.OF_KIND[spec.kind], given, strict=True):
        if one.optional and not features.bringing(one.name) & features.bits(spec.features):
            assert value is None, one.name
        elif one.scalar:
            assert type(value).__name__ == types[one.dtype], one.name
        else:
            assert (len(value.shape), value.element_type.__name__) == (one.rank, types[one.dtype]), one.name
