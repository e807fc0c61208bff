"""docs/support.md, sentence by sentence, against what the dispatcher says: a table that no longer bears a sentence out
fails here. No GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from plans import Call, call, made_of

from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.dispatch.bindings import PREFERENCE
from torch_flashplug.registry import dispatch_table
from torch_flashplug.registry.architectures import BACKENDS

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "support.md").read_text().split())
AUTO, FA3, FA2 = (BACKENDS.index(name) for name in ("auto", "fa3", "fa2"))
FP32, FP64 = made_of("fp32"), made_of("fp64")


def served(problem: Call, device: str = "h100", mode: int = AUTO) -> str:
    return bindings.plan(problem, DEVICES[device], mode)["backend"]


def long(d: int, dv: int | None = None, **more: int) -> Call:
    return call((4, 16, 16), (4096, 4096), (d, dv or d), **more)


def few(rows: int, keys: int, d: int, group: int = 1, batch: int = 1, **more: int) -> Call:
    return call((batch, 32, 32 // group), (rows, keys), (d, d), **more)


EIGHTS = range(8, 257, 8)
# A sentence, and the calls that it is about: each with where it goes.
CLAIMS: dict[str, Iterator[tuple[str, str]]] = {
    "D and Dv up to 256 in steps of 8, full or causal, GQA and MQA": (
        (served(call((4, 16, kv), (4096, 4096), (d, dv), causal=causal), mode=FA3), "fa3")
        for d in EIGHTS for dv in {d, 64, 256} for kv in (16, 4, 1) for causal in (0, 1)
    ),
    "(decode: Sq x Hq / Hkv up to 64, 65 to 256 where packing should be faster): ours": (
        (served(few(rows, 8192, d, group)), "fa3")
        for rows, group in ((1, 32), (64, 1), (16, 4), (17, 1)) for d in (64, 96, 112, 128, 192, 256)
    ),
    "D = Dv below 33, and 33 to 56, 120 or 193 to 248 with more than 1024 keys, up to 16 packed rows: `fa2`": (
        (served(few(1, keys, d, group, 4)), "fa2" if group < 32 and (d < 33 or keys > 1024) else "fa3")
        for d in EIGHTS if d < 57 or d == 120 or 192 < d < 256 for keys in (512, 1024, 1032, 8192)
        for group in (4, 16, 32)
    ),
    "Stock: `is_causal` where tiles are few and keys more than one block": (
        (served(few(4, 4096, 128, 4, causal=1)), "stock"),
        (served(call((2, 8, 8), (64, 64), (64, 64), causal=1)), "fa3"),
    ),
    "Last dim not contiguous: every size; else up to 64 to 1024 keys": (
        *((served(call((2, 4, 4), (s, s), (64, 64), last_stride_k=2)), "fa2") for s in (128, 1024, 8192)),
        (served(call((2, 4, 4), (128, 128), (60, 60))), "fa2"),
        (served(call((2, 4, 4), (8192, 8192), (60, 60))), "stock"),
        (served(call((2, 4, 4), (8192, 8192), (60, 60)), mode=FA2), "fa2"),
    ),
    "misaligned addresses with one row or key": (
        (served(call((2, 4, 4), sizes, (64, 64), align_q=2, odd_base_q=1)), "fa2") for sizes in ((1, 8192), (4096, 1))
    ),
    "any strides: ours, gradients too": (
        (served(long(d, mask=1, grad=grad)), "fa3") for d in EIGHTS for grad in (0, 1)
    ),
    "Few query rows without gradients (decode) read the mask where it lies": (
        (served(call((1, 32, 8), (rows, 4096), (d, d), mask=1, grad=grad), mode=mode), "fa3")
        for d in EIGHTS for rows in (1, 16, 64, 65) for mode in (AUTO, FA3) for grad in (0, 1)
    ),
    "ours where D = Dv is up to 128 in steps of 8, gradients too, full or causal": (
        (served(long(d, dropout_p=0.1, grad=grad, **more), mode=mode), "fa3" if d <= 128 or mode == FA3 else "stock")
        for d in EIGHTS for grad in (0, 1) for more in ({}, {"causal": 1}) for mode in (AUTO, FA3)
    ),
    "of any length, up to D 256 where they are bool, up to 128 where they are of floats": (
        (served(call((1, 4, 4), (rows, 40), (d, d), dropout_p=0.1, grad=grad, **{mask: 1})),
         "fa3" if d <= most else "stock")
        for rows in (1, 40, 1000) for d in EIGHTS for grad in (0, 1)
        for mask, most in (("mask", 256), ("bias", 128), ("bias32", 128))
    ),
    "all of these are ours, short ones too, and wider ones where a kernel is": (
        (served(call((1, 4, 4), (rows, 64), (d, d), dropout_p=1.0, grad=grad, **more)), "fa3")
        for rows in (1, 64, 512) for d in EIGHTS for grad in (0, 1)
        for more in ({}, {"causal": 1}, {"mask": 1})
    ),
    "but for any of fewer than 128 rows or keys (causal: 512); and beside masks": (
        *((served(call((1, 4, 4), (512, 512), (64, 64), dropout_p=0.1, **more)), backend)
          for more, backend in (({}, "fa3"), ({"causal": 1}, "fa3"), ({"bias": 1}, "fa3"), ({"mask": 1}, "fa3"))),
        *((served(call((64, 16, 16), (rows, rows), (64, 64), dropout_p=0.1, grad=grad, causal=causal)), backend)
          for grad in (0, 1)
          for causal, rows, backend in ((0, 127, "stock"), (0, 128, "fa3"), (1, 511, "stock"), (1, 512, "fa3"))),
    ),
    "ours, gradients too, and the bias's own": (
        (served(long(d, **bias, grad=grad, bias_grad=own and grad)), "fa3")
        for d in EIGHTS for bias in ({"bias": 1}, {"bias32": 1}) for grad in (0, 1) for own in (0, 1)
    ),
    "Few query rows (decode) read it where it lies": (
        (served(call((1, 32, 8), (rows, 4096), (d, d), **bias)), "fa3")
        for d in EIGHTS for rows in (1, 16, 64, 65) for bias in ({"bias": 1}, {"bias32": 1})
    ),
    "fp32, fp64, D above 256": (
        (served(problem), "stock") for problem in (long(128, **FP32), long(128, **FP64), long(264))
    ),
    "**H100, H200 (9.0)**": ((served(long(128), device), "fa3") for device in ("h100", "h200")),
    "Auto is stock; opt in with `sdpa_backend(\"fa2\")`": (
        (served(long(128), device, mode), backend)
        for device in ("a100", "l4", "rtx4090") for mode, backend in ((AUTO, "stock"), (FA2, "fa2"))
    ),
    "dropout, full, causal, beside a bool mask or, up to D 128, a float one of the query's dtype, gradients too": (
        (served(long(d, dropout_p=0.1, grad=grad, **more), "a100", FA2 | PREFERENCE),
         "stock" if "bias" in more and d > 128 else "fa2")
        for d in EIGHTS for grad in (0, 1) for more in ({}, {"causal": 1}, {"mask": 1}, {"bias": 1})
    ),
    "With 99 KB gradients under masks and dropout, and 16-bit float masks, end at D 128": (
        (served(long(d, grad=grad, **mask), device, FA2 | PREFERENCE), backend)
        for d in EIGHTS for grad in (0, 1) for mask in ({"mask": 1}, {"bias": 1}) for device, backend in
        (("a100", "fa2"), ("l4", "fa2" if d <= 128 or (mask == {"mask": 1} and not grad) else "stock"))
    ),
    "those are gradients of D above 192, of Dv above 128, and of odd calls of D above 128": (
        (served(long(*dims, grad=1), "l4", FA2 | PREFERENCE), backend)
        for dims, backend in (((128, 128), "fa2"), ((192, 128), "fa2"), ((200, 128), "stock"), ((192, 192), "stock"),
                              ((124, 124), "fa2"), ((132, 124), "stock"))
    ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", CLAIMS)
def test_the_page_says_what_is(sentence: str) -> None:
    assert sentence in PAGE
    answers = list(CLAIMS[sentence])
    assert answers and [said for said, _ in answers] == [claimed for _, claimed in answers]


@pytest.mark.parametrize("cc", [100, 120])
def test_blackwell_is_stock_in_auto_and_fa2_by_opting_in(cc: int) -> None:
    assert "**10.x, 12.x (Blackwell)**" in PAGE
    facts = DEVICES["l4"] | {"cc": cc}

    assert [bindings.plan(long(128), facts, mode)["backend"] for mode in (AUTO, FA2)] == ["stock", "fa2"]


def test_numbers_of_the_gate_are_the_tables() -> None:
    assert f"Sq x Hq / Hkv up to {dispatch_table.GATE.rows}," in PAGE
    assert f"{dispatch_table.GATE.rows + 1} to {dispatch_table.GATE.wide_rows} where packing should be faster" in PAGE
