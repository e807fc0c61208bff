"""Every reason why a family's kernels do not take a call is met: one call for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from plans import Call, call, made_of

from torch_flashplug.api import startup
from torch_flashplug.api.backend import DEVICES, sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table, kernel_table
from torch_flashplug.registry.dispatch_table import ChoiceRow

PLAIN, LONG, FEW = call((1, 8, 8), (512, 512), (64, 64)), call((4, 16, 16), (4096, 4096), (64, 64)), (1, 1, 1)
FORWARDS = tuple(row for row in kernel_table.KERNEL_ROWS if row.kind == "fwd")
LARGE = tuple(row for row in FORWARDS if row.arch == 80 and row.specs()[0].smem_bytes() > DEVICES["l4"]["smem_bytes"])
NO_BIAS_GRADIENT = tuple(row for row in kernel_table.KERNEL_ROWS if row.kind != "dbias")
SHUT = dataclasses.replace(dispatch_table.GATE, occupancy=0.8)


@dataclass(frozen=True)
class Met:
    """A call that meets a reason: under which tables, where, in which mode, of which family."""

    call: Call
    device: str = "h100"
    mode: int = 0
    family: str = "fa3"
    kernels: tuple[kernel_table.KernelRow, ...] = kernel_table.KERNEL_ROWS
    rows: tuple[ChoiceRow, ...] = dispatch_table.CHOICE_ROWS


MET = {
    "none": Met(PLAIN),
    "device": Met(PLAIN | {"on_cuda": 0}),
    "arch": Met(PLAIN, "a100", sdpa_backend("fa3").mode),
    "dtype": Met(PLAIN | made_of("fp32")),
    "mixed dtype": Met(PLAIN | made_of("bf16", "fp16", "bf16")),
    "feature": Met(PLAIN | {"cache8": 1}),
    "scale": Met(PLAIN | {"scale": bindings.SCALE_IDS["not finite"]}),
    "probability": Met(PLAIN | {"dropout_p": 1.5}),
    "empty": Met(call((1, 8, 8), (512, 0), (64, 64))),
    "head dim step": Met(call((1, 8, 8), (512, 512), (60, 60)), mode=sdpa_backend("fa3").mode),
    "head dim": Met(call((1, 8, 8), (512, 512), (264, 264))),
    "features' dim": Met(call((1, 8, 8), (512, 512), (256, 256), bias32=1, dropout=1, dropout_p=0.5)),
    "last stride": Met(PLAIN | {"last_stride_v": 2}),
    "alignment": Met(PLAIN | {"align_k": 2}),
    "no kernel": Met(PLAIN, "l4", sdpa_backend("fa2").mode, "fa2", LARGE),
    "splits": Met(LONG | {"causal": 1}, mode=sdpa_backend("fa3", num_splits=4).mode),
    "unmeasured gpu": Met(PLAIN, "a100", family="fa2"),
    "no row": Met(PLAIN, rows=()),
    "slower": Met(call((4, 16, 16), (4096, 4096), (192, 128), causal=1, grad=1)),
    "decode gate": Met(call(FEW, (16, 640), (64, 64)), kernels=FORWARDS),
    "deterministic": Met(LONG | {"grad": 1, "deterministic": 1}, kernels=FORWARDS),
    "no backward": Met(LONG | {"grad": 1}, kernels=FORWARDS),
    "no bias gradient": Met(LONG | {"bias": 1, "grad": 1, "bias_grad": 1}, kernels=NO_BIAS_GRADIENT),
    "8 bits with gradients": Met(PLAIN | {"grad": 1}, mode=sdpa_backend("fa3", precision="8bit").mode),
}
ELSEWHERE = {"together"}  # asked of a table of its own, by test_facts


@pytest.fixture(autouse=True)
def own_table() -> Iterator[None]:
    yield
    startup.push_tables()


@pytest.mark.parametrize("why", [name for name in bindings.names("reasons") if name not in ELSEWHERE])
def test_every_reason_is_met(why: str) -> None:
    met = MET[why]
    bindings.push_rows(met.kernels, met.rows, SHUT)
    plan = bindings.plan(met.call, DEVICES[met.device], met.mode)
    assert plan["why"][met.family] == why
    assert bool(plan["reasons"].get(met.family)) == (plan["backend"] != met.family)


@pytest.mark.parametrize(
    "facts, said",
    [
        ({"dropout": 1, "dropout_p": 0.1, "Sq": 100}, "the nearest entry needs Sq >= 128 (here 100)"),
        ({"dropout": 1, "dropout_p": 0.1, "Dv": 32}, "class of calls (compute capability 9.0, no grad, D != Dv)"),
        ({"dropout": 1, "dropout_p": 1.5}, "dropout_p must be above 0 and at most 1, but got 1.5."),
        ({"bias32": 1, "dropout": 1, "dropout_p": 0.1, "D": 256}, "kernels with bias32 and dropout take at most 128"),
        ({"D": 264}, "kernels take at most 256"),
        ({"causal": 1, "D": 264}, "kernels take at most 256"),
        ({"causal": 1, "mask": 1}, "PyTorch does not define the combination (its math backend raises)"),
        ({"causal": 1, "bias": 1}, "PyTorch does not define the combination (its math backend raises)"),
    ],
)
def test_reasons_name_their_cause(facts: dict, said: str) -> None:
    assert said in bindings.plan(PLAIN | facts, DEVICES["h100"])["reasons"]["fa3"]


@pytest.mark.parametrize("p, said", [(-1e-8, "-1e-08"), (1.1, "1.1"), (4 / 3, "1.3333333333333333"), (2.0, "2")])
def test_probabilities_are_said_as_they_are(p: float, said: str) -> None:
    reasons = bindings.plan(PLAIN | {"dropout": 1, "dropout_p": p}, DEVICES["h100"])["reasons"]
    assert reasons["fa2"].startswith(f"dropout_p must be above 0 and at most 1, but got {said}. ")


def test_rescues_hold_for_what_they_were_seen_with() -> None:
    """Stock's NaN of scales below zero was seen without dropout."""
    dropped = {"dropout": 1, "dropout_p": 0.5, "D": 192, "Dv": 192}  # which nobody measured, too
    below = PLAIN | {"scale": bindings.SCALE_IDS["negative"]}
    for needs, backend in (({}, "fa3"), ({"causal": 1}, "fa3"), (dropped, "stock")):
        plan = bindings.plan(below | needs, DEVICES["h100"])
        assert plan["backend"] == backend and bool(plan["rescue"]) == (backend == "fa3")


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
        (60, {}, "a100", "", "multiples of 8"),  # none goes element by element
        # copied
        (64, {"align_k": 2}, "a100", "fwd_sm80_bf16_d64_mask_m64n128s1", "bwd_sm80_bf16_d64_mask_m64n64s1"),
    ],
)
def test_masks_of_every_gpus_kernels(d: int, facts: dict, device: str, kernel: str, gradients: str) -> None:
    """gradients: their kernel, or why there is none."""
    plan = bindings.plan(
        call((1, 8, 8), (512, 512), (d, d), mask=1, grad=1) | facts, DEVICES[device], sdpa_backend("fa2").mode
    )
    assert plan["kernel"] == kernel
    assert gradients in (plan["gradients"] if kernel else plan["reasons"]["fa2"])


BIASED, DROPPED = {"bias": 1}, {"dropout_p": 0.1}
WANTED = "attn_mask requires a gradient, and no kernel that computes this gradient takes the call."


@pytest.mark.parametrize(
    "d, facts, device, kernel, gradients",
    [
        (64, BIASED, "l4", "fwd_sm80_bf16_d64_bias_m64n64s1", "bwd_sm80_bf16_d64_bias_m64n64s1"),
        (256, BIASED, "a100", "fwd_sm80_bf16_d256_bias_m64n64s1", "bwd_sm80_bf16_d256_bias_m64n64s1"),
        (256, BIASED, "l4", "", "kernels with bias take at most 128"),
        (96, BIASED | {"bias_grad": 1}, "a100", "fwd_sm80_bf16_d128_bias_m64n64s1", WANTED),
        (96, {"bias32": 1}, "a100", "fwd_sm80_bf16_d128_bias32_m64n64s1", "math backward of stock"),
        (64, BIASED | {"grad": 0, "Sq": 4}, "l4", "decode_sm80_bf16_d64_bias_m64n64s3", ""),
        (64, DROPPED, "l4", "fwd_sm80_bf16_d64_dropout_m64n128s1", "bwd_sm80_bf16_d64_dropout_m64n64s1"),
        (96, DROPPED | {"deterministic": 1}, "a100", "fwd_sm80_bf16_d128_dropout_m64n64s1", "math backward of stock"),
        (128, DROPPED | {"mask": 1}, "a100", "fwd_sm80_bf16_d128_mask+dropout_m64n64s1", "bwd_sm80_bf16_d128_mask+dropout"),
        (192, DROPPED, "a100", "fwd_sm80_bf16_d256_dropout_m64n64s1", "bwd_sm80_bf16_d256_dropout_m64n64s1"),
        (64, DROPPED | BIASED, "l4", "fwd_sm80_bf16_d64_bias+dropout_m64n64s1", "bwd_sm80_bf16_d64_bias+dropout"),
        (192, DROPPED | BIASED, "a100", "fwd_sm80_bf16_d256_bias+dropout_m64n64s1", "math backward of stock"),
        (64, DROPPED | {"bias32": 1}, "a100", "", "exactly this combination of features: bias32 and dropout."),
    ],
)
def test_what_else_every_gpus_kernels_take(d: int, facts: dict, device: str, kernel: str, gradients: str) -> None:
    test_masks_of_every_gpus_kernels(d, {"mask": 0} | facts, device, kernel, gradients)
