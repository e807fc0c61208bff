"""Facts shared by C++ and Python: names and positions, table rows, the facts of a call and the needed features.

The cache of plans uses all facts as its key. No GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import re
from collections.abc import Iterator
from pathlib import Path

import compile_cpp
import pytest
import torch
from golden_plans import call, operand_dtypes
from torch.utils.dlpack import to_dlpack

from torch_flashplug.api import explain_varlen, startup
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.codegen import compiler
from torch_flashplug.codegen.kernel_request import CallConditions
from torch_flashplug.dispatch import bindings, callbacks, library, table_structs
from torch_flashplug.ops import mask_preprocess_reference
from torch_flashplug.registry import (
    architectures,
    dispatch_table,
    dtypes,
    features,
    kernel_args,
    kernel_spec,
    kernel_table,
    stock_bugs,
)
from torch_flashplug.registry.architectures import BACKENDS, FAMILIES, KERNEL_BACKENDS, Family
from torch_flashplug.registry.dispatch_table import ANY
from torch_flashplug.registry.kernel_spec import KINDS, MAX_CLUSTER_SIZE
from torch_flashplug.registry.kernel_table import KernelRow


@pytest.fixture(autouse=True)
def own_table() -> Iterator[None]:
    startup.push_tables()
    yield
    startup.push_tables()


def enumerators(enum_class: type[enum.IntEnum]) -> tuple[str, ...]:
    return tuple(member.name.lower().replace("_", " ") for member in enum_class)


def test_names_and_ids_agree_in_python_and_cpp() -> None:
    """Names and positions are defined once in Python, and C++ reports equal ones."""
    homes = {"backends": BACKENDS[: -len(KERNEL_BACKENDS)], "kinds": KINDS,
             "operand classes": dispatch_table.OPERAND_CLASSES, "call facts": stock_bugs.FACTS,
             "argument dtypes": kernel_args.DTYPES, "mask flags": bindings.MASK_FLAGS, "paths": bindings.PATHS,
             "device facts": bindings.DEVICE_FACTS, "stock backends": bindings.STOCK_BACKENDS,
             "scales": tuple(bindings.SCALE_IDS),
             "trace answers": enumerators(callbacks.TraceAnswer),
             "compile answers": enumerators(callbacks.CompileAnswer),
             "circumstances": tuple(field.name for field in dataclasses.fields(CallConditions)),
             "varlen windows": (*explain_varlen._WINDOWS.values(), "other")}  # fmt: skip
    assert {subject: bindings.names(subject) for subject in homes} == homes


def dlpack_of(dtype: torch.dtype) -> tuple[int, int]:
    """Return the DLPack type code and bits of a dtype.

    In the tensor that torch exports, both follow the address, the device and the rank.
    """
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    capsule = to_dlpack(torch.empty(1, dtype=dtype))
    code, bits = (ctypes.c_uint8 * 2).from_address(pointer(capsule, b"dltensor") + 20)
    return code, bits


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_dtypes_of_the_table_agree_with_torch() -> None:
    """C++ gets element sizes and DLPack codes; the entry for all unknown dtypes has the size of float64."""
    infos = {info.torch_name: info for info in (*dtypes.DTYPE_INFO.values(), *dtypes.NAMED_DTYPES.values())}
    cpp_dtypes = bindings.dtypes()
    assert list(cpp_dtypes) == [*infos, "other"] and cpp_dtypes["other"][0] == torch.float64.itemsize
    for name, info in infos.items():
        assert cpp_dtypes[name] == (info.num_bytes, info.dlpack_code)
        assert info.num_bytes == getattr(torch, name).itemsize
        assert (info.dlpack_code, 8 * info.num_bytes) == dlpack_of(getattr(torch, name))


def test_dtype_unknown_to_torch_is_an_error_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table_structs._DTYPES, "bf17", dtypes.DtypeInfo("bfloat17", 2, 4))
    with pytest.raises(RuntimeError, match="torch has no function aoti_torch_dtype_bfloat17"):
        startup.push_tables()


def test_stock_efficient_attention_supports_only_named_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new dtype with plugin kernels is not thereby supported by stock's efficient attention."""
    for name in dtypes.DTYPE_INFO:
        monkeypatch.setitem(dtypes.KERNEL_DTYPES, name, dtypes.KernelDtypes(name, name, name, name))
    bindings.push_rows((KernelRow("fwd", 90, 64, 64, ("full",), 64, 64, 2),), (), dispatch_table.COST_MODEL)

    def backward(name: str) -> str:
        operand_facts = dict.fromkeys(("dtype_q", "dtype_k", "dtype_v"), table_structs.DTYPE_IDS[name])
        problem = call((1, 8, 8), (512, 512), (64, 64), grad=1, **operand_facts)
        return bindings.plan(problem, DEVICES["h100"], BACKENDS.index("fa3"))["gradients"].partition(" follows. ")[0]

    supported = {"bf16", "fp16", "fp32"}
    assert {name: backward(name) for name in dtypes.DTYPE_INFO} == {
        name: "The efficient backward of stock" if name in supported else "The math backward of stock"
        for name in dtypes.DTYPE_INFO
    }


def test_rule_with_an_unknown_feature_does_not_compile() -> None:
    head = '#include "core/call_facts.h"\nusing namespace flashplug;\n'
    assert compile_cpp.compiles(head + 'static_assert(feature_bit("mask") == 2);')
    assert not compile_cpp.compiles(head + 'constexpr auto bit = feature_bit("nobody");')


def test_feature_without_a_reader_needs_no_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python names the feature of a call, and a kernel without the feature gives the reason of the new row."""
    feature = features.Feature(
        "dilated", "dilated", "with a dilated window", "no kernel has a dilated window of {left}."
    )
    monkeypatch.setattr(features, "FEATURES", (*features.FEATURES, feature))
    monkeypatch.setattr(features, "NAMES", (*features.NAMES, feature.name))
    startup.push_tables()
    dilated = call((1, 8, 8), (512, 512), (64, 64), dilated=1, left=7)
    plan = bindings.plan(dilated, DEVICES["h100"], BACKENDS.index("fa3"))
    assert plan["reasons"]["fa3"] == "no kernel has a dilated window of 7."
    assert "with a dilated window" in bindings.forced_error(dilated, DEVICES["h100"], BACKENDS.index("fa3"))


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([0, 1, 3], "position 2 has 'bias32' in place of 'bias'. Put a feature without a reader at the end"),
        ([0, 1, 2], "has a reader of 'bias32', but FEATURES of features.py has no such feature"),
        ([*range(len(features.FEATURES)), *[-1] * 64], "kMaxFeatures must be at least the length of FEATURES"),
    ],
)
def test_reader_without_a_feature_is_an_error_at_import(
    positions: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(table_structs.of_features())
    monkeypatch.setattr(table_structs, "of_features", lambda: [rows[i] for i in positions])
    with pytest.raises(RuntimeError, match=re.escape(message)):
        startup.push_tables()


def test_reason_without_a_text_does_not_compile() -> None:
    source = Path(__file__).parents[2] / "src"
    header, text = ((source / name).read_text() for name in ("dispatch/dispatch.h", "dispatch/explain.cpp"))
    assert "#pragma once\n" in header and "  kNoBackward,\n" in header and '#include "dispatch/dispatch.h"\n' in text
    header = header.replace("#pragma once\n", "")
    source_with_header = text.replace('#include "dispatch/dispatch.h"\n', header)
    assert compile_cpp.compiles(source_with_header)
    assert not compile_cpp.compiles(source_with_header.replace("  kNoBackward,\n", "  kNoBackward,\n  kNoWords,\n"))


def test_table_rows_of_a_wrong_size_are_rejected() -> None:
    with pytest.raises(RuntimeError, match="table_structs.py must define the same rows, but differ"):
        bindings._push(library.lib().flashplug_add_cost_model_row, table_structs.StockBugRow())


def test_selected_kernel_has_exactly_the_needed_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with more features than needed can serve a call, but an exact fit has priority over a faster kernel.

    No kernel serves a call if the kernel applies a feature unconditionally and the call does not need it.
    """
    original = table_structs.of_kernels

    def of_kernels(row: KernelRow) -> Iterator[table_structs.KernelRow]:
        for kernel in original(row):
            kernel.takes |= features.bits({"dropout"}) if row.cost == 1 else 0
            yield kernel

    monkeypatch.setattr(table_structs, "of_kernels", of_kernels)
    plain, with_dropout, causal = (
        KernelRow("fwd", 90, 64, 64, (tag,), tile_m, 128, 2, cost)
        for tag, tile_m, cost in (("full", 128, 2000), ("full", 64, 1), ("causal", 192, 2000))
    )
    shape, forced = call((1, 8, 8), (512, 512), (64, 64)), BACKENDS.index("fa3")

    def kernel(**needs: float) -> str:
        return bindings.plan(shape | needs, DEVICES["h100"], forced)["kernel"]

    def reason(**needs: float) -> str:
        return bindings.plan(shape | needs, DEVICES["h100"], forced)["reasons"]["fa3"]

    for order in ((plain, with_dropout, causal), (causal, with_dropout, plain)):
        bindings.push_rows(order, (), dispatch_table.COST_MODEL)
        assert kernel() == plain.specs()[0].name()
        assert kernel(dropout=1, dropout_p=0.5) == with_dropout.specs()[0].name()
        assert kernel(causal=1) == causal.specs()[0].name()
        assert kernel(causal=1, dropout=1) == kernel(mask=1) == ""
        assert reason(causal=1, dropout=1, dropout_p=0.5).startswith(
            "No kernel of this backend has exactly this combination of features: causal and dropout."
        )
        assert "combination" not in reason(mask=1, dropout=1, dropout_p=0.5)
    bindings.push_rows((causal,), (), dispatch_table.COST_MODEL)
    assert kernel() == ""
    assert "each candidate applies a feature" in reason()


def test_new_kernel_family_needs_only_a_table_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ plans kernels of an architecture without a name in C++, only on GPUs of the same architecture."""
    original, shape = table_structs.of_kernels, call((1, 8, 8), (512, 512), (64, 64))

    def of_kernels(row: KernelRow) -> Iterator[table_structs.KernelRow]:
        for kernel in original(row):
            kernel.family = len(FAMILIES) if row.tile_m == 64 else kernel.family
            yield kernel

    monkeypatch.setattr(
        table_structs, "FAMILIES", (*FAMILIES, Family("fa4", 100, runs_on_later_gpus=False, gpus="exactly 10.0"))
    )
    monkeypatch.setattr(table_structs, "of_kernels", of_kernels)
    older, newer = (KernelRow("fwd", 80, 64, 64, ("full",), tile_m, 64, 1) for tile_m in (128, 64))
    bindings.push_rows((older, newer), (), dispatch_table.COST_MODEL)
    gpu, fa4 = DEVICES["h100"] | {"cc": 100}, len(BACKENDS)
    plan = bindings.plan(shape, gpu, fa4)
    assert (plan["backend"], plan["kernel"]) == ("fa4", newer.specs()[0].name())
    assert bindings.plan(shape, gpu, BACKENDS.index("fa2"))["kernel"] == older.specs()[0].name()
    opt_in = {name: f"Opt in with TORCH_FLASHPLUG_BACKEND={name} or sdpa_backend('{name}')" for name in ("fa2", "fa4")}
    auto_reasons = bindings.plan(shape, gpu)["reasons"]
    assert all(words in auto_reasons[name] for name, words in opt_in.items())
    assert "exactly 9.0 (H100, H200)" in bindings.plan(shape, gpu, BACKENDS.index("fa3"))["reasons"]["fa3"]
    # Auto mode serves both architectures, each on the GPUs of its own measurements.
    measured = Family("fa4", 100, runs_on_later_gpus=False, gpus="exactly 10.0", measured_cc=100)
    monkeypatch.setattr(table_structs, "FAMILIES", (*FAMILIES, measured))
    monkeypatch.setattr(table_structs, "_family", {80: 1, 100: len(FAMILIES)}.get)
    rows = tuple(
        dispatch_table.ChoiceRow(
            "fwd", "vectors", arch, False, "full", 1, 256, 0, ANY, 0, ANY, 0, ratio=2.0, measured="test table"
        )
        for arch in (80, 100)
    )
    bindings.push_rows((older, newer), rows, dispatch_table.COST_MODEL)
    assert bindings.plan(shape, gpu)["kernel"] == newer.specs()[0].name()
    assert bindings.plan(shape, DEVICES["h100"])["kernel"] == older.specs()[0].name()
    assert bindings.plan(shape, DEVICES["a100"])["backend"] == "stock"
    for device in ("h100", "a100"):
        plan_elsewhere = bindings.plan(shape, DEVICES[device], fa4)
        assert plan_elsewhere["backend"] == "stock" and plan_elsewhere["reasons"]["fa4"].endswith(
            "the kernels of this backend need exactly 10.0. Stock attention serves this device."
        )


def test_tma_and_clusters_are_properties_of_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    row = KernelRow("fwd", 80, 96, 96, ("full",), 64, 64, 1)

    def asked() -> tuple[int, int, bool]:
        return row.sector_bytes, row.max_cluster(row.specs()[0]), row.rows_sector_aligned(row.specs()[0])

    assert asked() == (1, 1, False)
    used = dataclasses.replace(architectures.BY_ARCH[80], has_tma=True, supports_clusters=True)
    monkeypatch.setitem(architectures.BY_ARCH, 80, used)
    assert asked() == (kernel_table.SECTOR_BYTES, MAX_CLUSTER_SIZE, True)


def test_element_type_is_limited_to_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table row without elements has all possible elements.

    An unknown element is an error in the table and in the compiler.
    """
    kinds, plain = {90: ("fwd",)}, {name for name, element in dtypes.KERNEL_DTYPES.items() if element.kinds is None}
    monkeypatch.setitem(dtypes.KERNEL_DTYPES, "half", dtypes.KernelDtypes("fp16", "bf16", "bf16", "fp16", kinds))
    operand_dtypes = {
        (kind, arch): {spec.dtype for spec in KernelRow(kind, arch, 64, 64, ("full",), 64, 128, 2).specs()}
        for kind in ("fwd", "bwd") for arch in (90, 80)
    }  # fmt: skip
    assert operand_dtypes == {("fwd", 90): plain | {"half"}, ("fwd", 80): plain, ("bwd", 90): plain, ("bwd", 80): plain}
    row_of_fp16 = KernelRow("bwd", 90, 64, 64, ("full",), 64, 128, 4, elements=("fp16",))
    assert [spec.dtype for spec in row_of_fp16.specs()] == ["fp16"]
    message = "half: a bwd kernel of sm_90 must have the dtypes bf16 or fp16"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(row_of_fp16, elements=("fp16", "half")).specs()
    with pytest.raises(ValueError, match=message):
        compiler.compile_spec(dataclasses.replace(*row_of_fp16.specs(), dtype="half"), "sm_90a")


def test_auto_selects_only_measured_element_types() -> None:
    kernels = (KernelRow("fwd", 90, 64, 64, ("full",), 64, 128, 2),)
    measured = dispatch_table.ChoiceRow(
        "fwd", "vectors", 90, False, "full", 1, 64, 1, ANY, 1, ANY, 0, 2.0, "test table"
    )
    for elements_, served in ((measured.elements, ("fa3", "fa3")), (("fp16",), ("stock", "fa3"))):
        bindings.push_rows(kernels, (dataclasses.replace(measured, elements=elements_),), dispatch_table.COST_MODEL)
        plain = call((1, 8, 8), (4096, 4096), (64, 64))
        plans = [bindings.plan(plain | operand_dtypes(name), DEVICES["h100"])["backend"] for name in ("bf16", "fp16")]
        assert tuple(plans) == served


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.backend)
def test_every_family_has_a_device_preset(family: Family) -> None:
    """explain() and the tests use device presets."""
    assert any(family.arch == facts["cc"] for facts in DEVICES.values()), (
        f"no preset of DEVICES (backend.py) is {family}"
    )


def test_family_supports_only_dtypes_of_its_own_kernels() -> None:
    """A dtype of a different family neither helps nor appears in the message."""
    hopper = KernelRow("fwd", 90, 64, 64, ("full",), 64, 128, 2, elements=("fp16",))
    bindings.push_rows((hopper, KernelRow("fwd", 80, 64, 64, ("full",), 64, 64, 1)), (), dispatch_table.COST_MODEL)
    plain, fa3, fa2 = call((1, 8, 8), (512, 512), (64, 64)), BACKENDS.index("fa3"), BACKENDS.index("fa2")
    names = [bindings.plan(plain, DEVICES["h100"], mode)["kernel"].partition("_d64")[0] for mode in (fa3, fa2)]
    assert names == ["", "fwd_sm80_bf16"]
    assert "dtype bfloat16, but the kernels take float16. Cast" in bindings.forced_error(plain, DEVICES["h100"], fa3)
    mixed = plain | {"dtype_k": 1}
    assert "Cast all of the tensors to float16" in bindings.forced_error(mixed, DEVICES["h100"], fa3)
    assert "Cast all of the tensors to bfloat16 or float16" in bindings.forced_error(mixed, DEVICES["h100"], fa2)


def test_limits_follow_the_element_type_of_the_call() -> None:
    """Limits of kernels of a different dtype are neither offered nor named.

    A call that must be cast may become any dtype.
    """
    wide, narrow = (
        KernelRow("fwd", 90, d, d, ("full",), 64, 128, 2, elements=(dtype,))
        for d, dtype in ((128, "fp16"), (64, "bf16"))
    )
    bindings.push_rows((wide, narrow), (), dispatch_table.COST_MODEL)

    def reason(name: str, d: int) -> str:
        operand_facts = dict.fromkeys(("dtype_q", "dtype_k", "dtype_v"), table_structs.DTYPE_IDS[name])
        problem = call((1, 8, 8), (512, 512), (d, d), **operand_facts)
        return bindings.plan(problem, DEVICES["h100"], BACKENDS.index("fa3"))["reasons"].get("fa3", "")

    assert reason("bf16", 96).startswith("query has head dim 96, but the kernels take at most 64.")
    assert reason("fp16", 96) == ""
    assert reason("fp16", 136).startswith("query has head dim 136, but the kernels take at most 128.")
    assert "head dim" not in reason("fp32", 128) and "take at most 128" in reason("fp32", 136)


def test_sectors_are_counted_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 72 columns of 4 bytes start at a sector; rows of 72 columns of 2 bytes or 76 columns of 4 bytes do not."""
    monkeypatch.setitem(dtypes.KERNEL_DTYPES, "fp32", dtypes.KernelDtypes("fp32", "fp32", "fp32", "fp32"))
    bindings.push_rows((KernelRow("fwd", 90, 80, 80, ("full",), 64, 64, 2),), (), dispatch_table.COST_MODEL)

    def kernel(d: int, name: str) -> str:
        operand_facts = dict.fromkeys(("dtype_q", "dtype_k", "dtype_v"), table_structs.DTYPE_IDS[name])
        problem = call((1, 8, 8), (512, 512), (d, d), **operand_facts)
        return bindings.plan(problem, DEVICES["h100"], BACKENDS.index("fa3"))["kernel"]

    assert [bool(kernel(d, name)) for d in (80, 72) for name in ("bf16", "fp32")] == [True, True, False, True]
    assert not kernel(76, "fp32")


def test_feature_combinations_match_the_kernel_table() -> None:
    """Each combination has a kernel of each named kind and architecture.

    A spec without a combination is refused.
    """
    row_combinations = {
        (spec.mask, spec.kind, spec.arch) for family in FAMILIES for spec in kernel_table.specs(family.arch)
    }
    named_combinations = {
        (tag, kind, arch)
        for tag, combination in features.TAGS.items()
        for arch, kinds in combination.kinds.items()
        for kind in kinds
    }
    assert row_combinations == named_combinations
    spec = next(spec for spec in kernel_table.specs(90, "decode"))
    message = dataclasses.replace(spec, mask="causal").check()
    assert "features causal; a decode of sm_90 must have full" in message


def test_only_arguments_of_features_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels without a feature get None for the arguments of the feature. No further arguments are optional."""
    optional_names = {
        argument.name
        for arguments in kernel_args.ARGUMENTS_BY_KIND.values()
        for argument in arguments
        if argument.is_optional
    }
    assert {name for feature in features.FEATURES for name in feature.arguments} == optional_names
    unowned = kernel_args._number("Sq", "int32", "a fact that no feature brings", is_optional=True)
    monkeypatch.setitem(kernel_args.ARGUMENTS_BY_KIND, "fwd", (unowned, *kernel_args.FORWARD))
    with pytest.raises(ValueError, match=r"argument Sq must belong to a feature"):
        startup.push_tables()


def test_tags_are_sets_of_features() -> None:
    assert {features.tag_of(features.TAGS[tag].features) for tag in features.TAGS} == set(features.TAGS)
    assert features.tag_of({"dropout", "causal"}) == "causal+dropout"
    assert features.unconditional_bits({"dropout", "causal"}) == features.bits({"causal"})


# One fact changed at a time, each in a call with a plan depending on the fact.
_LONG = call((4, 32, 16), (4096, 4096), (64, 64), grad=1)
_ONE_ROW, _MIXED = call((2, 4, 4), (1, 100), (64, 64)), call((2, 4, 4), (64, 64), (80, 64))
ONE_FACT = {
    **{size: (_LONG, 1) for size in ("B", "Sq", "D", "Dv")},
    **{heads: (_LONG, 16) for heads in ("Hq", "Hkv")},  # the number of KV heads must divide the number of query heads
    "Sk": (_LONG, -4095),
    **{f"dtype_{x}": (_LONG, 1) for x in "qkv"},
    **{f"last_stride_{x}": (_LONG, 1) for x in "qkv"},
    **{f"align_{x}": (_LONG, -8) for x in "qkv"},
    **{fact: (_LONG, 1) for fact in ("needs", "scale")},
    "deterministic": (call((4, 16, 16), (4096, 4096), (64, 64), grad=1), 1),
    "without_cudnn": (call((4, 16, 16), (4096, 4096), (192, 128), grad=1, causal=1), 1),
    "bias_grad": (call((4, 16, 16), (4096, 4096), (64, 64), grad=1, bias32=1), 1),
    **{fact: (_LONG, -1) for fact in ("on_cuda", "grad")},
    **{f"{fact}_{x}": (_ONE_ROW, 1) for fact in ("unaligned_base", "unaligned_unit_dim") for x in "qkv"},
    "broadcast_q": (_MIXED, 1),
    "dropout_p": (_LONG, 2),
}
# Facts of calls that auto does not select, with a forced backend.
_WINDOW = {"window": 1, "left": 128, "right": 0, "bottom_right": 1}
_IN_A_WINDOW = call((16, 8, 8), (4096, 4096), (64, 64), **_WINDOW)
ONE_FACT_OF_FORCED = {
    **{bound: (_IN_A_WINDOW, 8192) for bound in ("left", "right")},
    "bottom_right": (call((8, 8, 8), (320, 8192), (64, 64), **_WINDOW | {"left": 512}), -1),
    "sequences": (call((1, 8, 8), (16384, 16384), (128, 128), **_WINDOW, ragged=1, sequences=1), 1023),
    "batch_invariant": (call((1, 8, 8), (16384, 16384), (128, 128), **_WINDOW, ragged=1, sequences=1024), 1),
    "split_size": (call((1, 32, 8), (1, 8192), (128, 128)), 1024),
    "cost_ratio_192": (call((4, 16, 16), (8192, 8192), (64, 64), mask=1), 2.0),
    "shared_values": (call((4, 64, 1), (1, 4096), (576, 512)), 1),
}
FA3 = BACKENDS.index("fa3")


def test_every_fact_of_a_call_is_tested() -> None:
    """Exceptions: no rule reads whether keys and values are broadcast, and only kernels read the softcap."""
    covered = set(ONE_FACT) | set(ONE_FACT_OF_FORCED)
    assert set(bindings.problem_facts()) - covered == {"broadcast_k", "broadcast_v", "softcap"}


@pytest.mark.parametrize("fact", bindings.problem_facts())
def test_every_fact_is_part_of_the_plan_cache_key(fact: str) -> None:
    """Each fact, including a new fact, crosses from Python and is part of the key of the plan cache."""
    plain = {**bindings.problem_facts(), **_LONG}
    bindings.plan_text(plain, DEVICES["h100"], remembered=True)
    assert bindings.is_remembered(plain, DEVICES["h100"])
    assert not bindings.is_remembered(plain | {fact: 0 if plain[fact] else 1}, DEVICES["h100"])


@pytest.mark.parametrize("field", [*ONE_FACT, *ONE_FACT_OF_FORCED])
def test_calls_with_different_facts_have_separate_cached_plans(field: str) -> None:
    """Calls that differ in a single fact do not share a cached plan."""
    plain, step = (ONE_FACT | ONE_FACT_OF_FORCED)[field]
    plain, mode = {**bindings.problem_facts(), **plain}, FA3 if field in ONE_FACT_OF_FORCED else 0
    changed = plain | {field: int(plain[field]) + step}
    plans = [bindings.plan_text(problem, DEVICES["h100"], mode) for problem in (plain, changed)]
    assert plans[0] != plans[1]
    remembered_plans = [
        bindings.plan_text(problem, DEVICES["h100"], mode, remembered=True) for problem in (plain, changed) * 2
    ]
    assert remembered_plans == plans * 2


MEMBER_TYPES = {
    "const char*": ctypes.c_char_p, "double": ctypes.c_double, "int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32,
    "Kind": ctypes.c_int32, "DType": ctypes.c_int32, "ArgumentDtype": ctypes.c_int32,
}  # fmt: skip
STRUCTS = {name: row for name, row in vars(table_structs).items() if name.endswith("Row") and isinstance(row, type)}


@pytest.mark.parametrize("name", STRUCTS)
def test_table_rows_match_the_members_of_cpp_structs(name: str) -> None:
    """Members have the order of src/core/tables.h. Sizes are checked where rows cross from Python to C++."""
    source = (Path(__file__).parents[2] / "src" / "core" / "tables.h").read_text()
    body = re.sub(r"//.*", "", re.search(rf"struct {name} {{\n(.*?)\n}};", source, re.DOTALL)[1])
    members = [
        (re.sub(r"\[.*\]", "", member.strip()), MEMBER_TYPES[kind])
        for kind, listed_names in re.findall(r"(const char\*|\w+) ([^;]+);", body)
        for member in listed_names.split(",")
    ]
    plain = [(member, getattr(kind, "_type_", kind) if issubclass(kind, ctypes.Array) else kind)
             for member, kind in STRUCTS[name]._fields_]  # fmt: skip
    assert plain == members


def test_head_dim_limit_is_the_largest_head_dim_of_the_kernel_table():
    """Kernels with shared values are permitted for few calls, and do not count."""
    specs = [spec for pack in kernel_table.PACKS for spec in pack.specs()]
    general = [spec for spec in specs if "shared" not in spec.features]
    assert max(dim for spec in general for dim in (spec.d, spec.dv)) == dispatch_table.MAX_HEAD_DIM
    assert all(dim % dispatch_table.HEAD_DIM_STEP == 0 for spec in specs for dim in (spec.d, spec.dv))


@pytest.mark.parametrize("block", [kernel_spec.SPARSE_BLOCK, 256])
def test_sizes_of_mask_metadata_follow_the_pushed_numbers(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ restates no number of a layout: a changed block size reaches C++ with the tables."""
    for module in (table_structs, mask_preprocess_reference):
        monkeypatch.setattr(module, "SPARSE_BLOCK", block)
    startup.push_tables()
    count_numbers = library.lib().flashplug_mask_metadata_size
    count_numbers.restype, count_numbers.argtypes = ctypes.c_int64, [*[ctypes.c_int64] * 3, ctypes.c_int]
    for sizes in ((1, 1, 1), (65, 65, 129), (4099, 4099, 333)):
        for gradients in (False, True):
            expected = mask_preprocess_reference.numbers_of(*sizes, gradients=gradients)
            assert count_numbers(*sizes, gradients) == expected


def test_limits_of_splits_follow_the_pushed_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, facts = call((1, 32, 8), (1, 1 << 20), (128, 128)), DEVICES["h100"]
    mode = BACKENDS.index("fa3") | 255 << 8
    assert bindings.plan(problem, facts, mode)["splits"] == dispatch_table.MAX_SPLITS
    monkeypatch.setattr(table_structs, "MAX_SPLITS", 20)
    startup.push_tables()
    assert bindings.plan(problem, facts, mode)["splits"] == 20
