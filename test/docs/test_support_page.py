"""Comparison of docs/support.md with the answers of the dispatcher, row by row. The tests need no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from golden_plans import Call, call, operand_dtypes

from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.dispatch.bindings import PREFERENCE
from torch_flashplug.registry import dispatch_table
from torch_flashplug.registry.architectures import BACKENDS

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "support.md").read_text().split())
AUTO, FA3, FA2 = (BACKENDS.index(name) for name in ("auto", "fa3", "fa2"))
FP32, FP64 = operand_dtypes("fp32"), operand_dtypes("fp64")


def served(problem: Call, device: str = "h100", mode: int = AUTO) -> str:
    return bindings.plan(problem, DEVICES[device], mode)["backend"]


def long_call(d: int, dv: int | None = None, **more: int) -> Call:
    return call((4, 16, 16), (4096, 4096), (d, dv or d), **more)


def decode_call(rows: int, keys: int, d: int, group: int = 1, batch: int = 1, **more: int) -> Call:
    return call((batch, 32, 32 // group), (rows, keys), (d, d), **more)


MULTIPLES_OF_8 = range(8, 257, 8)
# Text of the page -> the answers of the dispatcher and the expected backends, for each call that the text is about.
CLAIMS: dict[str, Iterator[tuple[str, str]]] = {
    "| bf16, fp16, D and Dv up to 256 in steps of 8, full or causal, GQA and MQA | `fa3`": (
        (served(call((4, 16, kv), (4096, 4096), (d, dv), causal=causal), mode=FA3), "fa3")
        for d in MULTIPLES_OF_8 for dv in {d, 64, 256} for kv in (16, 4, 1) for causal in (0, 1)
    ),
    "| up to 64 | D and Dv up to 256 in steps of 8 | `fa3` |": (
        (served(decode_call(rows, 8192, d, group)), "fa3")
        for rows, group in ((1, 32), (64, 1), (16, 4), (17, 1)) for d in (64, 96, 112, 128, 192, 256)
    ),
    "| up to 16 | D = Dv 33 to 56, 120 or 193 to 248, with more than 1024 keys | `fa2` |": (
        (served(decode_call(1, keys, d, group, 4)), "fa2" if group < 32 and (d < 33 or keys > 1024) else "fa3")
        for d in MULTIPLES_OF_8 if d < 57 or d == 120 or 192 < d < 256 for keys in (512, 1024, 1032, 8192)
        for group in (4, 16, 32)
    ),
    "| any, with `is_causal` | few tiles, and keys in more than one block of a tile | stock |": (
        (served(decode_call(4, 4096, 128, 4, causal=1)), "stock"),
        (served(call((2, 8, 8), (64, 64), (64, 64), causal=1)), "fa3"),
    ),
    "D or addresses do not fit, up to 64 to 1024 keys, by head dim and tiles | `fa2` where measured": (
        *((served(call((2, 4, 4), (s, s), (64, 64), last_stride_k=2)), "fa2") for s in (128, 1024, 8192)),
        (served(call((2, 4, 4), (128, 128), (60, 60))), "fa2"),
        (served(call((2, 4, 4), (8192, 8192), (60, 60))), "stock"),
        (served(call((2, 4, 4), (8192, 8192), (60, 60)), mode=FA2), "fa2"),
    ),
    "| misaligned addresses with one row or key | ends the CUDA context |": (
        (served(call((2, 4, 4), sizes, (64, 64), align_q=2, unaligned_base_q=1)), "fa2")
        for sizes in ((1, 8192), (4096, 1))
    ),
    "| `fa3` | bool masks of any strides, gradients too |": (
        (served(long_call(d, mask=1, grad=grad)), "fa3") for d in MULTIPLES_OF_8 for grad in (0, 1)
    ),
    "Few query rows without gradients (decode) read the mask where it lies": (
        (served(call((1, 32, 8), (rows, 4096), (d, d), mask=1, grad=grad), mode=mode), "fa3")
        for d in MULTIPLES_OF_8 for rows in (1, 16, 64, 65) for mode in (AUTO, FA3) for grad in (0, 1)
    ),
    "| D = Dv up to 128 in steps of 8, full or causal, gradients too | `fa3` |": (
        (served(long_call(d, dropout_p=0.1, grad=grad, **more), mode=mode),
         "fa3" if d <= 128 or mode == FA3 else "stock")
        for d in MULTIPLES_OF_8 for grad in (0, 1) for more in ({}, {"causal": 1}) for mode in (AUTO, FA3)
    ),
    "| bool mask, any length, D up to 256 | `fa3` | stock gets masks with dropout wrong | "
    "| float mask, any length, D up to 128 | `fa3` |": (
        (served(call((1, 4, 4), (rows, 40), (d, d), dropout_p=0.1, grad=grad, **{mask: 1})),
         "fa3" if d <= most else "stock")
        for rows in (1, 40, 1000) for d in MULTIPLES_OF_8 for grad in (0, 1)
        for mask, most in (("mask", 256), ("bias", 128), ("bias32", 128))
    ),
    "| `dropout_p` of 1: short calls, too, and wider ones where a kernel exists | `fa3` |": (
        (served(call((1, 4, 4), (rows, 64), (d, d), dropout_p=1.0, grad=grad, **more)), "fa3")
        for rows in (1, 64, 512) for d in MULTIPLES_OF_8 for grad in (0, 1)
        for more in ({}, {"causal": 1}, {"mask": 1})
    ),
    "| fewer than 128 rows or keys (causal: fewer than 512) | stock |": (
        *((served(call((1, 4, 4), (512, 512), (64, 64), dropout_p=0.1, **more)), backend)
          for more, backend in (({}, "fa3"), ({"causal": 1}, "fa3"), ({"bias": 1}, "fa3"), ({"mask": 1}, "fa3"))),
        *((served(call((64, 16, 16), (rows, rows), (64, 64), dropout_p=0.1, grad=grad, causal=causal)), backend)
          for grad in (0, 1)
          for causal, rows, backend in ((0, 127, "stock"), (0, 128, "fa3"), (1, 511, "stock"), (1, 512, "fa3"))),
    ),
    "float masks of any strides, with gradients of q, k, v and the mask itself": (
        (served(long_call(d, **bias, grad=grad, bias_grad=b and grad)), "fa3")
        for d in MULTIPLES_OF_8 for bias in ({"bias": 1}, {"bias32": 1}) for grad in (0, 1) for b in (0, 1)
    ),
    "| few query rows (decode) | `fa3`, which reads the float mask in place |": (
        (served(call((1, 32, 8), (rows, 4096), (d, d), **bias)), "fa3")
        for d in MULTIPLES_OF_8 for rows in (1, 16, 64, 65) for bias in ({"bias": 1}, {"bias32": 1})
    ),
    "| fp32, fp64, D above 512 | stock |": (
        (served(problem), "stock") for problem in (long_call(128, **FP32), long_call(128, **FP64), long_call(520))
    ),
    "| D = Dv 264 to 512 in steps of 8, full or causal, GQA, MQA, no gradients | `fa3` where measured |": (
        (served(long_call(d, causal=causal) | few), "stock" if few and causal else "fa3")
        for d in range(264, 513, 8) for causal in (0, 1) for few in ({}, {"B": 1, "Hq": 1, "Hkv": 1, "Sq": 8})
    ),
    "| D above 256 with gradients | stock | opt in with `sdpa_backend(\"fa3\")`": (
        (served(long_call(320, grad=1), "h100", mode), backend) for mode, backend in ((AUTO, "stock"), (FA3, "fa3"))
    ),
    "| D above 256 and D != Dv | stock |": ((served(long_call(320, 512)), "stock") for _ in (0,)),
    "| D above 256 with a float mask, dropout or an 8-bit precision | stock |": (
        (served(long_call(320, **facts)), "stock") for facts in ({"bias": 1}, {"dropout_p": 0.1})
    ),
    "| bool masks with D above 256 | stock |": ((served(long_call(512, mask=1)), "stock") for _ in (0,)),
    "**H100, H200 (9.0)**": ((served(long_call(128), device), "fa3") for device in ("h100", "h200")),
    "opt in with `sdpa_backend(\"fa2\")`, or with `TORCH_FLASHPLUG_BACKEND=fa2`": (
        (served(long_call(128), device, mode), backend)
        for device in ("a100", "l4", "rtx4090") for mode, backend in ((AUTO, "stock"), (FA2, "fa2"))
    ),
    "| dropout with a float mask of the query's dtype, up to D 128 | yes | yes |": (
        (served(long_call(d, dropout_p=0.1, grad=grad, **more), "a100", FA2 | PREFERENCE),
         "stock" if "bias" in more and d > 128 else "fa2")
        for d in MULTIPLES_OF_8 for grad in (0, 1) for more in ({}, {"causal": 1}, {"mask": 1}, {"bias": 1})
    ),
    "| gradients under masks or dropout, D above 128 | math | "
    "| 16-bit float masks, D above 128 | the call raises, or stays with stock under the variable |": (
        (served(long_call(d, grad=grad, **mask), device, FA2 | PREFERENCE), backend)
        for d in MULTIPLES_OF_8 for grad in (0, 1) for mask in ({"mask": 1}, {"bias": 1}) for device, backend in
        (("a100", "fa2"), ("l4", "fa2" if d <= 128 or (mask == {"mask": 1} and not grad) else "stock"))
    ),
    "| gradients of D above 192 or Dv above 128 | stock's efficient backward, or math; nothing raises | "
    "| gradients of calls that go element by element, D above 128 |": (
        (served(long_call(*dims, grad=1), "l4", FA2 | PREFERENCE), backend)
        for dims, backend in (((128, 128), "fa2"), ((192, 128), "fa2"), ((200, 128), "stock"), ((192, 192), "stock"),
                              ((124, 124), "fa2"), ((132, 124), "stock"))
    ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", CLAIMS)
def test_sentences_of_the_page_match_the_dispatcher(sentence: str) -> None:
    assert sentence in PAGE
    answers = list(CLAIMS[sentence])
    assert answers and [actual for actual, _ in answers] == [expected for _, expected in answers]


@pytest.mark.parametrize("cc", [100, 120])
def test_blackwell_is_stock_in_auto_and_fa2_by_opting_in(cc: int) -> None:
    assert "**10.x, 12.x (Blackwell)**" in PAGE
    facts = DEVICES["l4"] | {"cc": cc}

    assert [bindings.plan(long_call(128), facts, mode)["backend"] for mode in (AUTO, FA2)] == ["stock", "fa2"]


def test_numbers_of_the_gate_equal_the_tables() -> None:
    assert f"| up to {dispatch_table.COST_MODEL.max_decode_rows} |" in PAGE
    assert f"| {dispatch_table.COST_MODEL.max_decode_rows + 1} to {dispatch_table.COST_MODEL.max_packed_rows} |" in PAGE
