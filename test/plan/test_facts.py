"""What C++ and Python know of each other: names and positions, rows, the facts of a call and what it needs. The memory
of plans goes by all of them. No GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import cpp
import pytest
import torch
from plans import call, made_of
from torch.utils.dlpack import to_dlpack

from torch_flashplug.api import startup
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.codegen import compiler
from torch_flashplug.dispatch import bindings, library, table_structs
from torch_flashplug.registry import architectures, dispatch_table, features, kernel_args, kernel_table, stock_bugs
from torch_flashplug.registry import dtypes as elements
from torch_flashplug.registry.architectures import BACKENDS, FAMILIES, KERNEL_BACKENDS, Family
from torch_flashplug.registry.dispatch_table import ANY
from torch_flashplug.registry.kernel_spec import CLUSTER, KINDS
from torch_flashplug.registry.kernel_table import KernelRow


@pytest.fixture(autouse=True)
def own_table() -> Iterator[None]:
    startup.push_tables()
    yield
    startup.push_tables()


def test_ids_are_mirrored() -> None:
    """Names and positions have one Python home; C++ answers with the same."""
    homes = {"backends": BACKENDS[: -len(KERNEL_BACKENDS)], "features": features.NAMES, "kinds": KINDS, "operands": dispatch_table.OPERANDS,
             "call facts": stock_bugs.FACTS, "number types": kernel_args.DTYPES}  # fmt: skip
    assert {of: bindings.names(of) for of in homes} == homes


def dlpack_of(dtype: torch.dtype) -> tuple[int, int]:
    """Code and bits, as torch hands a tensor over: behind its address, its device and its rank."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    capsule = to_dlpack(torch.empty(1, dtype=dtype))
    code, bits = (ctypes.c_uint8 * 2).from_address(pointer(capsule, b"dltensor") + 20)
    return code, bits


def test_dtypes_are_mirrored() -> None:
    """Also what they are made of; of all others float64's size is as good as any."""
    torchs = {number.torch: getattr(torch, number.torch) for number in elements.NUMBERS.values()}
    known = bindings.dtypes()
    assert list(known) == [*torchs, "other"] and known["other"][0] == torch.float64.itemsize
    for number in elements.NUMBERS.values():
        dtype = torchs[number.torch]
        code, bits = dlpack_of(dtype)
        assert known[number.torch] == (number.bytes, code) == (dtype.itemsize, code) and bits == 8 * number.bytes


def test_stocks_efficient_attention_takes_dtypes_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is new here, and that kernels of ours are made of, is none of its own by that."""
    for name in elements.NUMBERS:
        monkeypatch.setitem(elements.ELEMENTS, name, elements.Element(name, name, name, name))
    bindings.push_rows((KernelRow("fwd", 90, 64, 64, ("full",), 64, 64, 2),), (), dispatch_table.GATE)

    def backward(name: str) -> str:
        dtypes = dict.fromkeys(("dtype_q", "dtype_k", "dtype_v"), table_structs.DTYPE_IDS[name])
        problem = call((1, 8, 8), (512, 512), (64, 64), grad=1, **dtypes)
        return bindings.plan(problem, DEVICES["h100"], BACKENDS.index("fa3"))["gradients"].partition(" follows. ")[0]

    known = {"bf16", "fp16", "fp32"}
    assert {name: backward(name) for name in elements.NUMBERS} == {
        name: "The efficient backward of stock" if name in known else "The math backward of stock"
        for name in elements.NUMBERS
    }


def test_a_feature_without_a_reader_does_not_compile() -> None:
    """Nor does a rule that names one which is not there."""
    head = '#include "core/call_facts.h"\nusing namespace flashplug;\n'
    reader = "[](const Attention& call) { return call.dropout_p < 0; }"
    assert cpp.compiles(head + f'constexpr Feature one{{"nobody", {reader}}};')
    assert cpp.compiles(head + 'static_assert(feature_bit("mask") == 2);')
    assert not cpp.compiles(head + 'constexpr Feature one{"nobody"};')
    assert not cpp.compiles(head + 'constexpr auto bit = feature_bit("nobody");')


def test_a_reason_without_words_does_not_compile() -> None:
    source = Path(__file__).parents[2] / "src"
    header, text = ((source / name).read_text() for name in ("core/flashplug.h", "dispatch/explain.cpp"))
    assert "#pragma once\n" in header and "  kNoBackward,\n" in header and '#include "core/flashplug.h"\n' in text
    header = header.replace("#pragma once\n", "")
    both = text.replace('#include "core/flashplug.h"\n', header)
    assert cpp.compiles(both)
    assert not cpp.compiles(both.replace("  kNoBackward,\n", "  kNoBackward,\n  kNoWords,\n"))


def test_rows_cross_whole_or_not_at_all() -> None:
    with pytest.raises(RuntimeError, match="table_structs.py must define the same rows, but differ"):
        bindings._push(library.lib().flashplug_add_gate_row, table_structs.RescueRow())


def test_a_kernel_takes_what_a_call_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that can do more as well, but the one that fits best before the one that is faster; and none that does to
    every call what this one does not need.
    """
    known = table_structs.of_kernels

    def of_kernels(row: KernelRow) -> Iterator[table_structs.KernelRow]:
        for kernel in known(row):
            kernel.takes |= features.bits({"dropout"}) if row.cost == 1 else 0
            yield kernel

    monkeypatch.setattr(table_structs, "of_kernels", of_kernels)
    plain, many, causal = (
        KernelRow("fwd", 90, 64, 64, (tag,), tile_m, 128, 2, cost)
        for tag, tile_m, cost in (("full", 128, 2000), ("full", 64, 1), ("causal", 192, 2000))
    )
    shape, forced = call((1, 8, 8), (512, 512), (64, 64)), BACKENDS.index("fa3")

    def kernel(**needs: float) -> str:
        return bindings.plan(shape | needs, DEVICES["h100"], forced)["kernel"]

    def reason(**needs: float) -> str:
        return bindings.plan(shape | needs, DEVICES["h100"], forced)["reasons"]["fa3"]

    for order in ((plain, many, causal), (causal, many, plain)):
        bindings.push_rows(order, (), dispatch_table.GATE)
        assert kernel() == plain.specs()[0].name()
        assert kernel(dropout=1, dropout_p=0.5) == many.specs()[0].name()
        assert kernel(causal=1) == causal.specs()[0].name()
        assert kernel(causal=1, dropout=1) == kernel(mask=1) == ""
        assert reason(causal=1, dropout=1, dropout_p=0.5).startswith(
            "No kernel of this backend has exactly this combination of features: causal and dropout."
        )
        assert "combination" not in reason(mask=1, dropout=1, dropout_p=0.5)
    bindings.push_rows((causal,), (), dispatch_table.GATE)
    assert kernel() == ""
    assert "each candidate applies a feature" in reason()


def test_another_family_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ plans kernels of an architecture that it has no name for: where they run, and nowhere else."""
    known, shape = table_structs.of_kernels, call((1, 8, 8), (512, 512), (64, 64))

    def of_kernels(row: KernelRow) -> Iterator[table_structs.KernelRow]:
        for kernel in known(row):
            kernel.family = len(FAMILIES) if row.tile_m == 64 else kernel.family
            yield kernel

    monkeypatch.setattr(table_structs, "FAMILIES", (*FAMILIES, Family("fa4", 100, later=False, gpus="exactly 10.0")))
    monkeypatch.setattr(table_structs, "of_kernels", of_kernels)
    older, newer = (KernelRow("fwd", 80, 64, 64, ("full",), tile_m, 64, 1) for tile_m in (128, 64))
    bindings.push_rows((older, newer), (), dispatch_table.GATE)
    gpu, fa4 = DEVICES["h100"] | {"cc": 100}, len(BACKENDS)
    plan = bindings.plan(shape, gpu, fa4)
    assert (plan["backend"], plan["kernel"]) == ("fa4", newer.specs()[0].name())
    assert bindings.plan(shape, gpu, BACKENDS.index("fa2"))["kernel"] == older.specs()[0].name()
    opt_in = {name: f"Opt in with TORCH_FLASHPLUG_BACKEND={name} or sdpa_backend('{name}')" for name in ("fa2", "fa4")}
    unasked = bindings.plan(shape, gpu)["reasons"]
    assert all(words in unasked[name] for name, words in opt_in.items())
    assert "exactly 9.0 (H100, H200)" in bindings.plan(shape, gpu, BACKENDS.index("fa3"))["reasons"]["fa3"]
    for device in ("h100", "a100"):
        elsewhere = bindings.plan(shape, DEVICES[device], fa4)
        assert elsewhere["backend"] == "stock" and elsewhere["reasons"]["fa4"].endswith(
            "the kernels of this backend need exactly 10.0. Stock attention serves this device."
        )


def test_what_kernels_use_stands_with_their_family(monkeypatch: pytest.MonkeyPatch) -> None:
    row = KernelRow("fwd", 80, 96, 96, ("full",), 64, 64, 1)

    def asked() -> tuple[int, int, bool]:
        return row.sector_bytes, row.max_cluster, row.rows_sector_aligned(row.specs()[0])

    assert asked() == (1, 1, False)
    used = dataclasses.replace(architectures.BY_ARCH[80], tma=True, clusters=True)
    monkeypatch.setitem(architectures.BY_ARCH, 80, used)
    assert asked() == (kernel_table.SECTOR_BYTES, CLUSTER, True)


def test_an_element_is_for_the_kernels_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that names none has all that there can be; any other is an error, of the compiler, too."""
    kinds, plain = {90: ("fwd",)}, {name for name, made in elements.ELEMENTS.items() if made.kinds is None}
    monkeypatch.setitem(elements.ELEMENTS, "half", elements.Element("fp16", "bf16", "bf16", "fp16", kinds))
    made_of = {
        (kind, arch): {spec.dtype for spec in KernelRow(kind, arch, 64, 64, ("full",), 64, 128, 2).specs()}
        for kind in ("fwd", "bwd") for arch in (90, 80)
    }  # fmt: skip
    assert made_of == {("fwd", 90): plain | {"half"}, ("fwd", 80): plain, ("bwd", 90): plain, ("bwd", 80): plain}
    chosen = KernelRow("bwd", 90, 64, 64, ("full",), 64, 128, 4, elements=("fp16",))
    assert [spec.dtype for spec in chosen.specs()] == ["fp16"]
    refused = "half: a bwd kernel of sm_90 must have the dtypes bf16 or fp16"
    with pytest.raises(ValueError, match=refused):
        dataclasses.replace(chosen, elements=("fp16", "half")).specs()
    with pytest.raises(ValueError, match=refused):
        compiler.compile_spec(dataclasses.replace(*chosen.specs(), dtype="half"), "sm_90a")


def test_auto_takes_elements_that_were_measured() -> None:
    kernels = (KernelRow("fwd", 90, 64, 64, ("full",), 64, 128, 2),)
    measured = dispatch_table.ChoiceRow("fwd", "vectors", 90, False, "full", 1, 64, 1, ANY, 1, ANY, 0, 2.0, "test table")
    for elements_, served in ((measured.elements, ("fa3", "fa3")), (("fp16",), ("stock", "fa3"))):
        bindings.push_rows(kernels, (dataclasses.replace(measured, elements=elements_),), dispatch_table.GATE)
        plain = call((1, 8, 8), (4096, 4096), (64, 64))
        plans = [bindings.plan(plain | made_of(name), DEVICES["h100"])["backend"] for name in ("bf16", "fp16")]
        assert tuple(plans) == served


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.backend)
def test_a_family_has_a_gpu_to_be_asked_about(family: Family) -> None:
    """explain and what the tests ask go by presets."""
    assert any(family.arch == facts["cc"] for facts in DEVICES.values()), f"no preset of DEVICES (backend.py) is {family}"


def test_a_family_is_made_of_what_its_own_kernels_are() -> None:
    """A dtype that another one has does not help, and is not said."""
    hopper = KernelRow("fwd", 90, 64, 64, ("full",), 64, 128, 2, elements=("fp16",))
    bindings.push_rows((hopper, KernelRow("fwd", 80, 64, 64, ("full",), 64, 64, 1)), (), dispatch_table.GATE)
    plain, fa3, fa2 = call((1, 8, 8), (512, 512), (64, 64)), BACKENDS.index("fa3"), BACKENDS.index("fa2")
    names = [bindings.plan(plain, DEVICES["h100"], mode)["kernel"].partition("_d64")[0] for mode in (fa3, fa2)]
    assert names == ["", "fwd_sm80_bf16"]
    assert "dtype bfloat16, but the kernels take float16. Cast" in bindings.forced_error(plain, DEVICES["h100"], fa3)
    mixed = plain | {"dtype_k": 1}
    assert "Cast all of the tensors to float16" in bindings.forced_error(mixed, DEVICES["h100"], fa3)
    assert "Cast all of the tensors to bfloat16 or float16" in bindings.forced_error(mixed, DEVICES["h100"], fa2)


def test_limits_are_those_of_the_calls_element() -> None:
    """What kernels of another one hold is neither offered nor said; a call that is to be cast may become any."""
    wide, narrow = (
        KernelRow("fwd", 90, d, d, ("full",), 64, 128, 2, elements=(of,)) for d, of in ((128, "fp16"), (64, "bf16"))
    )
    bindings.push_rows((wide, narrow), (), dispatch_table.GATE)

    def reason(name: str, d: int) -> str:
        dtypes = dict.fromkeys(("dtype_q", "dtype_k", "dtype_v"), table_structs.DTYPE_IDS[name])
        problem = call((1, 8, 8), (512, 512), (d, d), **dtypes)
        return bindings.plan(problem, DEVICES["h100"], BACKENDS.index("fa3"))["reasons"].get("fa3", "")

    assert reason("bf16", 96).startswith("query has head dim 96, but the kernels take at most 64.")
    assert reason("fp16", 96) == ""
    assert reason("fp16", 136).startswith("query has head dim 136, but the kernels take at most 128.")
    assert "head dim" not in reason("fp32", 128) and "take at most 128" in reason("fp32", 136)


def test_sectors_are_counted_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """72 columns of 4 bytes begin with one, 72 of 2 do not; nor do 76 of 4."""
    monkeypatch.setitem(elements.ELEMENTS, "fp32", elements.Element("fp32", "fp32", "fp32", "fp32"))
    bindings.push_rows((KernelRow("fwd", 90, 80, 80, ("full",), 64, 64, 2),), (), dispatch_table.GATE)

    def kernel(d: int, name: str) -> str:
        dtypes = dict.fromkeys(("dtype_q", "dtype_k", "dtype_v"), table_structs.DTYPE_IDS[name])
        problem = call((1, 8, 8), (512, 512), (d, d), **dtypes)
        return bindings.plan(problem, DEVICES["h100"], BACKENDS.index("fa3"))["kernel"]

    assert [bool(kernel(d, name)) for d in (80, 72) for name in ("bf16", "fp32")] == [True, True, False, True]
    assert not kernel(76, "fp32")


def test_combinations_are_what_rows_have() -> None:
    """Each has a kernel of every kind and architecture that it names; a kernel without one is refused."""
    rows_of = {(spec.mask, spec.kind, spec.arch) for family in FAMILIES for spec in kernel_table.specs(family.arch)}
    named = {
        (tag, kind, arch) for tag, one in features.TAGS.items() for arch, kinds in one.kinds.items() for kind in kinds
    }
    assert rows_of == named
    spec = next(spec for spec in kernel_table.specs(90, "decode"))
    refused = dataclasses.replace(spec, mask="causal").check()
    assert "features causal; a decode of sm_90 must have full" in refused


def test_arguments_of_features_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels without the feature get None for them; and there are no other optional ones."""
    known = {one.name for taken in kernel_args.OF_KIND.values() for one in taken if one.optional}
    assert {name for feature in features.FEATURES for name in feature.arguments} == known
    nobodys = kernel_args._number("Sq", "int32", "a fact that no feature brings", optional=True)
    monkeypatch.setitem(kernel_args.OF_KIND, "fwd", (nobodys, *kernel_args.FORWARD))
    with pytest.raises(ValueError, match=r"argument Sq must belong to a feature"):
        startup.push_tables()


def test_tags_are_sets_of_features() -> None:
    assert {features.tag_of(features.TAGS[tag].features) for tag in features.TAGS} == set(features.TAGS)
    assert features.tag_of({"dropout", "causal"}) == "causal+dropout"
    assert features.always({"dropout", "causal"}) == features.bits({"causal"})


# One fact changed at a time, each in a call whose plan it changes.
_LONG = call((4, 32, 16), (4096, 4096), (64, 64), grad=1)
_ONE_ROW, _MIXED = call((2, 4, 4), (1, 100), (64, 64)), call((2, 4, 4), (64, 64), (80, 64))
ONE_FACT = {
    **{size: (_LONG, 1) for size in ("B", "Sq", "D", "Dv")},
    **{heads: (_LONG, 16) for heads in ("Hq", "Hkv")},  # KV heads divide query heads
    "Sk": (_LONG, -4095),
    **{f"dtype_{x}": (_LONG, 1) for x in "qkv"},
    **{f"last_stride_{x}": (_LONG, 1) for x in "qkv"},
    **{f"align_{x}": (_LONG, -8) for x in "qkv"},
    **{fact: (_LONG, 1) for fact in ("needs", "scale")},
    "deterministic": (call((4, 16, 16), (4096, 4096), (64, 64), grad=1), 1),
    "bias_grad": (call((4, 16, 16), (4096, 4096), (64, 64), grad=1, bias32=1), 1),
    **{fact: (_LONG, -1) for fact in ("on_cuda", "grad")},
    **{f"{fact}_{x}": (_ONE_ROW, 1) for fact in ("odd_base", "odd_ones") for x in "qkv"},
    "broadcast_q": (_MIXED, 1),
    "dropout_p": (_LONG, 2),
}
# Of calls that auto does not take, forced.
_WINDOW = {"window": 1, "left": 128, "right": 0, "bottom_right": 1}
_IN_A_WINDOW = call((16, 8, 8), (4096, 4096), (64, 64), **_WINDOW)
ONE_FACT_OF_FORCED = {
    **{bound: (_IN_A_WINDOW, 8192) for bound in ("left", "right")},
    "bottom_right": (call((8, 8, 8), (320, 8192), (64, 64), **_WINDOW | {"left": 512}), -1),
    "sequences": (call((1, 8, 8), (16384, 16384), (128, 128), **_WINDOW, ragged=1, sequences=1), 1023),
    "batch_invariant": (call((1, 8, 8), (16384, 16384), (128, 128), **_WINDOW, ragged=1, sequences=1024), 1),
    "split_size": (call((1, 32, 8), (1, 8192), (128, 128)), 1024),
    "tall": (call((4, 16, 16), (8192, 8192), (64, 64), mask=1), 2.0),
}
FA3 = BACKENDS.index("fa3")


def test_no_fact_is_left_out() -> None:
    """But for broadcast keys and values, which no rule asks for, and a cap, which kernels alone do."""
    known = set(ONE_FACT) | set(ONE_FACT_OF_FORCED)
    assert set(bindings.problem_facts()) - known == {"broadcast_k", "broadcast_v", "softcap"}


@pytest.mark.parametrize("fact", bindings.problem_facts())
def test_every_fact_is_a_part_of_the_memory_of_plans(fact: str) -> None:
    """A new one from the day it exists: it crosses from Python, and a call that differs in nothing else is another."""
    plain = {**bindings.problem_facts(), **_LONG}
    bindings.plan_text(plain, DEVICES["h100"], remembered=True)
    assert bindings.is_remembered(plain, DEVICES["h100"])
    assert not bindings.is_remembered(plain | {fact: 0 if plain[fact] else 1}, DEVICES["h100"])


@pytest.mark.parametrize("field", [*ONE_FACT, *ONE_FACT_OF_FORCED])
def test_every_fact_of_a_call_is_remembered_with_its_plan(field: str) -> None:
    """Calls that differ in one fact alone: neither gets the plan that was made, and kept, for the other."""
    plain, step = (ONE_FACT | ONE_FACT_OF_FORCED)[field]
    plain, mode = {**bindings.problem_facts(), **plain}, FA3 if field in ONE_FACT_OF_FORCED else 0
    other = plain | {field: int(plain[field]) + step}
    made = [bindings.plan_text(problem, DEVICES["h100"], mode) for problem in (plain, other)]
    assert made[0] != made[1]
    found = [bindings.plan_text(problem, DEVICES["h100"], mode, remembered=True) for problem in (plain, other) * 2]
    assert found == made * 2


MEMBER_TYPES = {
    "const char*": ctypes.c_char_p, "double": ctypes.c_double, "int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32,
    "Kind": ctypes.c_int32, "DType": ctypes.c_int32, "NumberType": ctypes.c_int32,
}  # fmt: skip
STRUCTS = {name: row for name, row in vars(table_structs).items() if name.endswith("Row") and isinstance(row, type)}


@pytest.mark.parametrize("name", STRUCTS)
def test_rows_have_the_members_of_their_structs(name: str) -> None:
    """In the same order, as src/core/tables.h says them; their sizes are checked where they cross."""
    source = (Path(__file__).parents[2] / "src" / "core" / "tables.h").read_text()
    body = re.sub(r"//.*", "", re.search(rf"struct {name} {{\n(.*?)\n}};", source, re.DOTALL)[1])
    members = [
        (re.sub(r"\[.*\]", "", member.strip()), MEMBER_TYPES[kind])
        for kind, listed in re.findall(r"(const char\*|\w+) ([^;]+);", body)
        for member in listed.split(",")
    ]
    plain = [(member, getattr(kind, "_type_", kind) if issubclass(kind, ctypes.Array) else kind)
             for member, kind in STRUCTS[name]._fields_]  # fmt: skip
    assert plain == members
