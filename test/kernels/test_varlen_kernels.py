"""Packed sequences by plugin kernels, on a GPU or interpreted: each sequence gives the same result as alone.

Further tests cover the tile lists built on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from deterministic import deterministic_gradients
from fp64_gradients import Results, check_gradients
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops.attention import Window
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.dtypes import ELEMENTS_16BIT
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import assert_bitwise_equal, assert_lse, assert_within_budget

SEED, HEADS, KV_HEADS = 20261125, 4, 2
AHEAD, BEHIND = 70, 5  # rows and keys outside of all sequences
OP = torch.ops.torch_flashplug.attention_fwd
SPECS = [spec for arch in (90, 80) for spec in kernel_table.specs(arch) if {"window", "ragged"} <= spec.features
         and "paged" not in spec.features]  # fmt: skip
BACKENDS = {90: "fa3", 80: "fa2"}
# Rows and keys of each sequence: without rows or keys, a single one, more rows than keys, several tiles, many short
# sequences.
LENGTHS = {
    "mixed": ((150, 200), (0, 30), (70, 0), (1, 129), (0, 0), (130, 5)),
    "equal": ((128, 128), (128, 128)),
    "short": ((3, 3),) * 40,
    "one": ((300, 333),),
    "odd": ((63, 63), (64, 64), (65, 65), (127, 129), (1, 1)),
    "none": ((0, 40), (0, 0), (20, 0)),
}
WINDOWS = {
    "full": Window(),
    "causal": Window(-1, 0),
    "top_left": Window(-1, 0, bottom_right=False),
    "window": Window(40, 7),
    "left": Window(100, 0),
}


@dataclass(frozen=True)
class PackedCall:
    """Call with packed sequences: tensors (1, H, T, D), and the rows and keys of each sequence."""

    lengths: tuple[tuple[int, int], ...]
    window: Window
    tensors: dict[str, Tensor]  # q, k, v, do, sinks, dlse
    softcap: float = 0.0
    ahead: int = AHEAD

    def ends(self, side: int) -> list[int]:
        return [*accumulate((sequence[side] for sequence in self.lengths), initial=self.ahead)]

    def parts(self, side: int) -> list[slice]:
        ends = self.ends(side)
        return [slice(a, b) for a, b in zip(ends, ends[1:])]

    def cu_seqlens(self, side: int, device: str) -> Tensor:
        return torch.tensor(self.ends(side), dtype=torch.int32, device=device)


def make_packed_call(
    lengths: str, window: str, dims: tuple[int, int], dtype: str, *, poison: bool = False
) -> PackedCall:
    """Return a random call.

    Args:
        lengths: a key of `LENGTHS`.
        window: a key of `WINDOWS`.
        dims: head dims (D, Dv).
        dtype: "bf16" or "fp16".
        poison: put NaN and inf into rows and keys of no sequence, and into the output gradients of such rows. Put NaN
            into rows of sequences without keys, and into keys of sequences without rows.
    """
    sequences, generator = LENGTHS[lengths], torch.Generator().manual_seed(SEED + dims[0])
    T, Tk = (AHEAD + sum(sequence[side] for sequence in sequences) + BEHIND for side in (0, 1))
    (D, Dv), torch_dtype = dims, getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])
    sizes = {"q": (T, HEADS, D), "k": (Tk, KV_HEADS, D), "v": (Tk, KV_HEADS, Dv), "do": (T, HEADS, Dv)}
    tensors = {
        name: torch.randn(*size, generator=generator).to(torch_dtype).transpose(0, 1).unsqueeze(0)
        for name, size in sizes.items()
    }
    tensors |= {"sinks": torch.randn(HEADS, generator=generator), "dlse": torch.randn(1, HEADS, T, generator=generator)}
    call = PackedCall(sequences, WINDOWS[window], tensors)
    tensors["do"][:, :, T - BEHIND :] = 0.0
    tensors["dlse"][..., T - BEHIND :] = 0.0
    if poison:
        for rows, keys in zip(call.parts(0), call.parts(1), strict=True):
            if rows.start == rows.stop or keys.start == keys.stop:
                tensors["q"][:, :, rows] = math.nan
                tensors["k"][:, :, keys] = tensors["v"][:, :, keys] = math.nan
        for unused in (slice(AHEAD), slice(-BEHIND, None)):
            tensors["q"][:, :, unused] = tensors["do"][:, :, unused] = math.nan
            tensors["k"][:, :, unused] = tensors["v"][:, :, unused] = tensors["dlse"][..., unused] = math.inf
    return call


def run_kernels(
    call: PackedCall, device: str, *, grads: bool = False, backend: str = "fa3", order: bool = False
) -> Results:
    tensors = {name: x.detach().to(device) for name, x in call.tensors.items()}
    leaves = {name: tensors[name].requires_grad_(grads) for name in ("q", "k", "v", "sinks")}
    cu = [call.cu_seqlens(side, device) for side in (0, 1)]
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(backend), deterministic_gradients(order):
        out, lse = OP(*leaves.values(), *cu, None, *call.window, call.softcap, None)
        grads_by_name = {}
        if grads:
            gradients = torch.autograd.grad((out, lse), [*leaves.values()], (tensors["do"], tensors["dlse"]))
            grads_by_name = dict(zip((f"d{name}" for name in leaves), gradients, strict=True))
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == 1 and counts["ours_bwd"] == grads and counts["math_fwd"] == counts["math_bwd"] == 0
    return Results(out.detach().cpu(), lse.detach().cpu(), {name: x.cpu() for name, x in grads_by_name.items()})


def run_per_sequence_reference(call: PackedCall, dtype: torch.dtype) -> Results:
    """Return the reference of each sequence, computed separately.

    Rows of no sequence have an output of zeros and the sink as LSE, and their output gradients are not read.
    """
    tensors = {name: x.nan_to_num(0.0, 0.0, 0.0).to(dtype) for name, x in call.tensors.items()}
    q, k, v, sinks = (tensors[name].requires_grad_() for name in ("q", "k", "v", "sinks"))
    out = torch.zeros(1, HEADS, q.shape[2], v.shape[3], dtype=dtype)
    lse = sinks.view(1, HEADS, 1).repeat(1, 1, q.shape[2])
    for rows, keys in zip(call.parts(0), call.parts(1), strict=True):
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        operands = q[:, :, rows], *(x[:, :, keys].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        visible = call.window.to_mask(operands[0].shape[2], operands[1].shape[2], torch.device("cpu"))
        scores = operands[0] @ operands[1].mT * q.shape[3] ** -0.5
        if call.softcap:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        scores = scores.masked_fill(~visible, -math.inf)
        scores = torch.cat((scores, sinks.view(1, HEADS, 1, 1).expand(*scores.shape[:3], 1)), -1)
        weights, lse[:, :, rows] = scores.softmax(-1)[..., :-1], scores.logsumexp(-1)
        out[:, :, rows] = weights @ operands[2]
    used_rows = slice(call.ends(0)[0], call.ends(0)[-1])
    loss = (out * tensors["do"]).sum() + (lse * tensors["dlse"])[..., used_rows].sum()
    gradients = torch.autograd.grad(loss, (q, k, v, sinks), allow_unused=True)
    grads = {name: torch.zeros_like(x) if g is None else g for name, x, g in
             zip(("dq", "dk", "dv", "dsinks"), (q, k, v, sinks), gradients, strict=True)}  # fmt: skip
    return Results(out.detach(), lse.detach(), grads)


def check_results(call: PackedCall, results: Results, label: str) -> None:
    dtype = call.tensors["q"].dtype
    exact, low, single = (
        run_per_sequence_reference(call, precision) for precision in (torch.float64, dtype, torch.float32)
    )
    assert_within_budget(f"{label} out", results.out, exact.out, low.out, seed=SEED)
    assert_lse(label, results.lse, exact.lse, single.lse, seed=SEED)
    clean = [call.tensors[name].nan_to_num(0.0, 0.0, 0.0) for name in ("q", "k", "v", "do")]
    check_gradients(label, results.grads, exact, low.grads, clean, call.tensors["sinks"])


@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.name)
def test_every_varlen_kernel(kernels_on: str, spec: KernelSpec, kernel_alone: Callable[[KernelSpec], None]) -> None:
    """NaN and inf are stored in rows and keys of no sequence."""
    kernel_alone(spec)
    spec_idx = SPECS.index(spec)
    windows = [*WINDOWS]
    for lengths, window in (("mixed", windows[spec_idx % 5]), ("odd", windows[(spec_idx + 2) % 5])):
        call = make_packed_call(lengths, window, (spec.d, spec.dv), spec.dtype, poison=True)
        if "softcap" in spec.features:
            call = replace(call, softcap=2.0)
        results = run_kernels(call, kernels_on, grads=spec.is_backward, backend=BACKENDS[spec.arch])
        check_results(call, results, f"{spec.name()} {lengths} {window}")


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_sequences_of_each_length_mix_and_window(kernels_on: str, lengths: str, window: str) -> None:
    """The plan chooses the kernels."""
    nth = [*LENGTHS].index(lengths) + [*WINDOWS].index(window)
    dims = ((64, 64), (128, 128), (96, 80), (192, 128), (160, 136))[nth % 5]
    call = make_packed_call(lengths, window, dims, ELEMENTS_16BIT[nth % 2])
    check_results(
        call, run_kernels(call, kernels_on, grads=True, backend=("fa3", "fa2")[nth % 3 == 2]), f"{lengths} {window}"
    )


def test_sequence_is_bitwise_equal_in_any_batch(kernels_on: str) -> None:
    """Sequences before and behind do not matter."""
    call = make_packed_call("mixed", "causal", (64, 64), "bf16")
    in_batch = run_kernels(call, kernels_on)
    rows, keys = call.parts(0)[0], call.parts(1)[0]
    own_slice = {"q": rows, "do": rows, "k": keys, "v": keys}
    tensors = {name: x[:, :, own_slice[name]] if name in own_slice else x for name, x in call.tensors.items()}
    tensors["dlse"] = tensors["dlse"][..., rows]
    alone = run_kernels(replace(call, lengths=call.lengths[:1], tensors=tensors, ahead=0), kernels_on)
    assert_bitwise_equal("out", in_batch.out[:, :, rows], alone.out)
    assert_bitwise_equal("lse", in_batch.lse[..., rows], alone.lse)


def test_deterministic_gradients_are_bitwise_equal(kernels_on: str) -> None:
    call = make_packed_call("mixed", "window", (64, 64), "bf16")
    first_run, second_run = (run_kernels(call, kernels_on, grads=True, order=True) for _ in range(2))
    for name in first_run.grads:
        assert_bitwise_equal(name, second_run.grads[name], first_run.grads[name])


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize(
    "starts", [[0, 900, 20], [-5, 10, 10], [0, 2**31 - 1, 7], [50, 40, 30], [0, 0, 0], [0, 261] * 4], ids=str
)
def test_invalid_cu_seqlens_access_no_foreign_memory(kernels_on: str, starts: list[int], order: bool) -> None:
    """Results may be wrong, but the interpreter, or compute-sanitizer, checks each memory access."""
    call = make_packed_call("equal", "causal", (64, 64), "bf16")
    tensors = {name: x.to(kernels_on) for name, x in call.tensors.items()}
    leaves = [tensors[name].requires_grad_() for name in ("q", "k", "v", "sinks")]
    cu = torch.tensor(starts, dtype=torch.int32, device=kernels_on)
    with torch_flashplug.sdpa_backend("fa3"), deterministic_gradients(order):
        out, lse = OP(*leaves, cu, cu, None, *call.window, call.softcap, None)
        grads = torch.autograd.grad((out, lse), leaves, (tensors["do"], tensors["dlse"]))
    assert out.shape == tensors["do"].shape and [x.shape for x in grads] == [x.shape for x in leaves]


def test_kv_lengths_match_shorter_sequences(kernels_on: str, kernel_alone: Callable[[KernelSpec], None]) -> None:
    """Results equal the results of shorter sequences by the same kernel; keys behind the KV length are not read."""
    kernel_alone(KernelSpec.from_name("fwd_sm90_bf16_d64_window+ragged_m128n128s2"))
    call = make_packed_call("mixed", "causal", (64, 64), "bf16")
    used = [7, 0, 0, 129, 0, 3]
    cut = tuple((rows, n) for (rows, _), n in zip(call.lengths, used, strict=True))
    is_used = torch.zeros(call.tensors["k"].shape[2], dtype=torch.bool)
    is_used[:AHEAD] = True
    for keys, n in zip(call.parts(1), used, strict=True):
        is_used[keys.start : keys.start + n] = True
    shorter = {name: call.tensors[name][:, :, is_used] for name in ("k", "v")}
    expected = run_kernels(replace(call, lengths=cut, tensors=call.tensors | shorter), kernels_on)
    tensors = {name: x.clone().to(kernels_on) for name, x in call.tensors.items()}
    for name in ("k", "v"):
        tensors[name][:, :, ~is_used] = math.nan
    numbers = [call.cu_seqlens(0, kernels_on), call.cu_seqlens(1, kernels_on), torch.tensor(used).int().to(kernels_on)]
    with torch_flashplug.sdpa_backend("fa3"):
        out, lse = OP(
            tensors["q"], tensors["k"], tensors["v"], tensors["sinks"], *numbers, *call.window, call.softcap, None
        )
    assert_bitwise_equal("out", out.cpu(), expected.out)
    assert_bitwise_equal("lse", lse.cpu(), expected.lse)


def test_call_without_sinks_matches_infinitely_low_sinks(kernels_on: str) -> None:
    call = make_packed_call("mixed", "causal", (128, 128), "fp16")
    sinks = replace(call, tensors=call.tensors | {"sinks": torch.full((HEADS,), -math.inf)})
    expected = run_kernels(sinks, kernels_on)
    tensors = {name: x.to(kernels_on) for name, x in call.tensors.items()}
    cu = [call.cu_seqlens(side, kernels_on) for side in (0, 1)]
    with torch_flashplug.sdpa_backend("fa3"):
        out, lse = OP(tensors["q"], tensors["k"], tensors["v"], None, *cu, None, *call.window, call.softcap, None)
    assert_bitwise_equal("out", out.cpu(), expected.out)
    assert_bitwise_equal("lse", lse.cpu(), expected.lse)
