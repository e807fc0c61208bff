"""Calls that meet every reason why the kernels of a family cannot serve a call: a call for each reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from golden_plans import Call, call, operand_dtypes

from torch_flashplug.api import startup
from torch_flashplug.api.backend import DEVICES, sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table, kernel_table
from torch_flashplug.registry.dispatch_table import ChoiceRow

PLAIN, LONG, ONE_HEAD = call((1, 8, 8), (512, 512), (64, 64)), call((4, 16, 16), (4096, 4096), (64, 64)), (1, 1, 1)
FORWARDS = tuple(row for row in kernel_table.KERNEL_ROWS if row.kind == "fwd")
LARGE = tuple(row for row in FORWARDS if row.arch == 80 and row.specs()[0].smem_bytes() > DEVICES["l4"]["smem_bytes"])
NO_BIAS_GRADIENT = tuple(row for row in kernel_table.KERNEL_ROWS if row.kind != "dbias")
CLOSED_GATE = dataclasses.replace(dispatch_table.COST_MODEL, occupancy=0.8)


@dataclass(frozen=True)
class ReasonCase:
    """A call for a reason: the call, the device, the mode, the family with the reason, and the pushed tables."""

    call: Call
    device: str = "h100"
    mode: int = 0
    family: str = "fa3"
    kernels: tuple[kernel_table.KernelRow, ...] = kernel_table.KERNEL_ROWS
    rows: tuple[ChoiceRow, ...] = dispatch_table.CHOICE_ROWS


REASON_CASES = {
    "none": ReasonCase(PLAIN),
    "device": ReasonCase(PLAIN | {"on_cuda": 0}),
    "arch": ReasonCase(PLAIN, "a100", sdpa_backend("fa3").mode),
    "dtype": ReasonCase(PLAIN | operand_dtypes("fp32")),
    "mixed dtype": ReasonCase(PLAIN | operand_dtypes("bf16", "fp16", "bf16")),
    "feature": ReasonCase(PLAIN | {"cache8": 1}),
    "scale": ReasonCase(PLAIN | {"scale": bindings.SCALE_IDS["not finite"]}),
    "probability": ReasonCase(PLAIN | {"dropout_p": 1.5}),
    "empty": ReasonCase(call((1, 8, 8), (512, 0), (64, 64))),
    "head dim step": ReasonCase(call((1, 8, 8), (512, 512), (60, 60)), mode=sdpa_backend("fa3").mode),
    "head dim": ReasonCase(call((1, 8, 8), (512, 512), (520, 520))),
    "features' dim": ReasonCase(call((1, 8, 8), (512, 512), (256, 256), bias32=1, dropout=1, dropout_p=0.5)),
    "last stride": ReasonCase(PLAIN | {"last_stride_v": 2}),
    "alignment": ReasonCase(PLAIN | {"align_k": 2}),
    "no kernel": ReasonCase(PLAIN, "l4", sdpa_backend("fa2").mode, "fa2", LARGE),
    "splits": ReasonCase(LONG | {"causal": 1}, mode=sdpa_backend("fa3", num_splits=4).mode),
    "unmeasured gpu": ReasonCase(PLAIN, "a100", family="fa2"),
    "no row": ReasonCase(PLAIN, rows=()),
    "slower": ReasonCase(call((4, 16, 16), (4096, 4096), (192, 128), causal=1, grad=1)),
    "decode gate": ReasonCase(call(ONE_HEAD, (16, 640), (64, 64)), kernels=FORWARDS),
    "deterministic": ReasonCase(LONG | {"grad": 1, "deterministic": 1}, kernels=FORWARDS),
    "no backward": ReasonCase(LONG | {"grad": 1}, kernels=FORWARDS),
    "no bias gradient": ReasonCase(LONG | {"bias": 1, "grad": 1, "bias_grad": 1}, kernels=NO_BIAS_GRADIENT),
    "unmeasured gradients": ReasonCase(call((1, 8, 8), (512, 512), (512, 512), grad=1)),
    "8 bits with gradients": ReasonCase(PLAIN | {"grad": 1}, mode=sdpa_backend("fa3", precision="8bit").mode),
}
TESTED_IN_CALL_FACTS = {"together"}  # tested with a separate table in test_call_facts.py


@pytest.fixture(autouse=True)
def own_table() -> Iterator[None]:
    yield
    startup.push_tables()


@pytest.mark.parametrize("reason", [name for name in bindings.names("reasons") if name not in TESTED_IN_CALL_FACTS])
def test_every_reason_has_a_call(reason: str) -> None:
    met_reasons = REASON_CASES[reason]
    bindings.push_rows(met_reasons.kernels, met_reasons.rows, CLOSED_GATE)
    plan = bindings.plan(met_reasons.call, DEVICES[met_reasons.device], met_reasons.mode)
    assert plan["why"][met_reasons.family] == reason
    assert bool(plan["reasons"].get(met_reasons.family)) == (plan["backend"] != met_reasons.family)


@pytest.mark.parametrize(
    "facts, text",
    [
        ({"dropout": 1, "dropout_p": 0.1, "Sq": 100}, "the nearest entry needs Sq >= 128 (here 100)"),
        ({"dropout": 1, "dropout_p": 0.1, "Dv": 32}, "calls (compute capability 9.0, dropout as with grad, D != Dv)"),
        ({"dropout": 1, "dropout_p": 1.5}, "dropout_p must be from 0 to 1, but got 1.5."),
        ({"bias32": 1, "dropout": 1, "dropout_p": 0.1, "D": 256}, "kernels with bias32 and dropout take at most 128"),
        ({"D": 520}, "kernels take at most 512"),
        ({"causal": 1, "D": 520}, "kernels take at most 512"),
        ({"bias": 1, "D": 264}, "the kernels with bias take at most 256"),
        ({"dropout": 1, "dropout_p": 0.1, "Dv": 264}, "the kernels with dropout take at most 256"),
        ({"D": 264, "grad": 1}, "The auto mode serves gradients up to 256"),
        ({"D": 264}, "No measured entry covers this call"),
        ({"causal": 1, "mask": 1}, "PyTorch does not define the combination (its math backend raises)"),
        ({"causal": 1, "bias": 1}, "PyTorch does not define the combination (its math backend raises)"),
    ],
)
def test_reasons_name_the_cause(facts: dict, text: str) -> None:
    assert text in bindings.plan(PLAIN | facts, DEVICES["h100"])["reasons"]["fa3"]


@pytest.mark.parametrize("p, text", [(-1e-8, "-1e-08"), (1.1, "1.1"), (4 / 3, "1.3333333333333333"), (2.0, "2")])
def test_reason_prints_the_exact_dropout_probability(p: float, text: str) -> None:
    reasons = bindings.plan(PLAIN | {"dropout": 1, "dropout_p": p}, DEVICES["h100"])["reasons"]
    assert reasons["fa2"].startswith(f"dropout_p must be from 0 to 1, but got {text}. ")


def test_stock_bug_rows_apply_only_to_observed_features() -> None:
    """Stock returns NaN for scales below zero; this was observed without dropout."""
    dropped = {"dropout": 1, "dropout_p": 0.5, "D": 192, "Dv": 192}  # also a class without a measurement
    below = PLAIN | {"scale": bindings.SCALE_IDS["negative"]}
    for needs, backend in (({}, "fa3"), ({"causal": 1}, "fa3"), (dropped, "stock")):
        plan = bindings.plan(below | needs, DEVICES["h100"])
        assert plan["backend"] == backend and bool(plan["stock_bug"]) == (backend == "fa3")


@pytest.mark.parametrize(
    "d, facts, device, kernel, gradients",
    [
        (64, {}, "l4", "fwd_sm80_bf16_d64_mask_m64n128s1", "bwd_sm80_bf16_d64_mask_m64n64s1"),
        (96, {"deterministic": 1}, "a100", "fwd_sm80_bf16_d128_mask_m64n64s1", "detbwd_sm80_bf16_d128_mask_m64n64s1"),
        (96, {"deterministic": 1}, "l4", "fwd_sm80_bf16_d128_mask_m64n64s1", "detbwd_sm80_bf16_d128_mask_m64n64s1"),
        (128, {}, "a100", "fwd_sm80_bf16_d128_mask_m64n64s1", "bwd_sm80_bf16_d128_mask_m64n64s1"),
        (192, {}, "h100", "fwd_sm80_bf16_d256_mask_m64n64s1", "bwd_sm80_bf16_d256_mask_m64n64s1"),
        (192, {}, "l4", "fwd_sm80_bf16_d256_mask_m64n64s1", "The math backward of stock"),
        (64, {"grad": 0, "Sq": 4}, "l4", "decode_sm80_bf16_d64_mask_m64n64s3", ""),
        (192, {"grad": 0, "Sq": 4}, "a100", "decode_sm80_bf16_d256_mask_m64n64s1", ""),
        (60, {}, "a100", "", "multiples of 8"),  # no masked kernel is element-wise
        # copied
        (64, {"align_k": 2}, "a100", "fwd_sm80_bf16_d64_mask_m64n128s1", "bwd_sm80_bf16_d64_mask_m64n64s1"),
    ],
)
def test_masked_calls_on_sm80_kernels(d: int, facts: dict, device: str, kernel: str, gradients: str) -> None:
    """The parameter `gradients` is the kernel of the backward, or the reason why there is none."""
    plan = bindings.plan(
        call((1, 8, 8), (512, 512), (d, d), mask=1, grad=1) | facts, DEVICES[device], sdpa_backend("fa2").mode
    )
    assert plan["kernel"] == kernel
    assert gradients in (plan["gradients"] if kernel else plan["reasons"]["fa2"])


BIASED, DROPPED = {"bias": 1}, {"dropout_p": 0.1}
MASK_GRADIENT_REASON = "attn_mask requires a gradient, and no kernel that computes this gradient takes the call."


@pytest.mark.parametrize(
    "d, facts, device, kernel, gradients",
    [
        (64, BIASED, "l4", "fwd_sm80_bf16_d64_bias_m64n64s1", "bwd_sm80_bf16_d64_bias_m64n64s1"),
        (256, BIASED, "a100", "fwd_sm80_bf16_d256_bias_m64n64s1", "bwd_sm80_bf16_d256_bias_m64n64s1"),
        (256, BIASED, "l4", "", "kernels with bias take at most 128"),
        (96, BIASED | {"bias_grad": 1}, "a100", "fwd_sm80_bf16_d128_bias_m64n64s1", MASK_GRADIENT_REASON),
        (96, {"bias32": 1}, "a100", "fwd_sm80_bf16_d128_bias32_m64n64s1", "math backward of stock"),
        (64, BIASED | {"grad": 0, "Sq": 4}, "l4", "decode_sm80_bf16_d64_bias_m64n64s3", ""),
        (64, DROPPED, "l4", "fwd_sm80_bf16_d64_dropout_m64n128s1", "bwd_sm80_bf16_d64_dropout_m64n64s1"),
        (96, DROPPED | {"deterministic": 1}, "a100", "fwd_sm80_bf16_d128_dropout_m64n64s1", "math backward of stock"),
        (
            128,
            DROPPED | {"mask": 1},
            "a100",
            "fwd_sm80_bf16_d128_mask+dropout_m64n64s1",
            "bwd_sm80_bf16_d128_mask+dropout",
        ),
        (192, DROPPED, "a100", "fwd_sm80_bf16_d256_dropout_m64n64s1", "bwd_sm80_bf16_d256_dropout_m64n64s1"),
        (64, DROPPED | BIASED, "l4", "fwd_sm80_bf16_d64_bias+dropout_m64n64s1", "bwd_sm80_bf16_d64_bias+dropout"),
        (192, DROPPED | BIASED, "a100", "fwd_sm80_bf16_d256_bias+dropout_m64n64s1", "math backward of stock"),
        (64, DROPPED | {"bias32": 1}, "a100", "", "exactly this combination of features: bias32 and dropout."),
    ],
)
def test_biased_and_dropout_calls_on_sm80_kernels(
    d: int, facts: dict, device: str, kernel: str, gradients: str
) -> None:
    test_masked_calls_on_sm80_kernels(d, {"mask": 0} | facts, device, kernel, gradients)


def test_causal_call_with_unequal_lengths_has_a_note_on_the_alignment() -> None:
    """Users of flash-attn expect the bottom right."""
    notes = [
        bindings.plan(call((1, 8, 8), rows, (64, 64), causal=causal), DEVICES["h100"])["note"]
        for rows, causal in (((1, 512), 1), ((512, 64), 1), ((512, 512), 1), ((1, 512), 0))
    ]
    assert notes[0].startswith("is_causal aligns the mask to the top left") and "Sq 1, Sk 512" in notes[0]
    assert "causal_lower_right(Sq, Sk)" in notes[1] and notes[2:] == ["", ""]


def test_head_dim_above_the_limit_is_the_only_reason() -> None:
    """Neither padding nor a copy helps, so neither is the remedy."""
    reasons = bindings.plan(PLAIN | {"D": 516, "Dv": 516} | {f"align_{x}": 8 for x in "qkv"}, DEVICES["h100"])[
        "reasons"
    ]
    for text, limit in ((reasons["fa3"], 512), (reasons["fa2"], 256)):
        assert text.count(f"has head dim 516, but the kernels take at most {limit}") == 2
        assert "multiples" not in text and "aligned" not in text
