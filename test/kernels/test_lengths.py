"""Sequences of different lengths on end, by kernels of ours on a GPU or interpreted: each as by itself, whatever lies
beside it; and the lists of tiles that are made for them on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from beside_fp64 import check_gradients
from orders import in_order
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops.attention import Window
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.dtypes import WHOLE
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import assert_bitwise_equal, assert_lse, assert_within_budget

SEED, HEADS, KV_HEADS = 20261125, 4, 2
AHEAD, BEHIND = 70, 5  # rows and keys that are no sequence's
OP = torch.ops.torch_flashplug.attention_fwd
SPECS = [spec for arch in (90, 80) for spec in kernel_table.specs(arch) if {"window", "ragged"} <= spec.features]
BACKENDS = {90: "fa3", 80: "fa2"}
# Rows and keys of each: none of either, one, more rows than keys, several tiles, many short ones.
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
class OnEnd:
    """A call: tensors (1, H, T, D), of sequences that have so many rows and keys."""

    lengths: tuple[tuple[int, int], ...]
    window: Window
    tensors: dict[str, Tensor]  # q, k, v, do, sinks, dlse
    softcap: float = 0.0
    ahead: int = AHEAD

    def ends(self, side: int) -> list[int]:
        return [*accumulate((one[side] for one in self.lengths), initial=self.ahead)]

    def parts(self, side: int) -> list[slice]:
        ends = self.ends(side)
        return [slice(a, b) for a, b in zip(ends, ends[1:])]

    def starts(self, side: int, device: str) -> Tensor:
        return torch.tensor(self.ends(side), dtype=torch.int32, device=device)


def drawn(lengths: str, window: str, dims: tuple[int, int], dtype: str, *, poison: bool = False) -> OnEnd:
    """Return a call. poison: NaN and inf in rows and keys of no sequence, also in what comes back for such rows; NaN
    in rows and keys of sequences that have none of the other.
    """
    of, draw = LENGTHS[lengths], torch.Generator().manual_seed(SEED + dims[0])
    T, Tk = (AHEAD + sum(one[side] for one in of) + BEHIND for side in (0, 1))
    (D, Dv), kind = dims, getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])
    sizes = {"q": (T, HEADS, D), "k": (Tk, KV_HEADS, D), "v": (Tk, KV_HEADS, Dv), "do": (T, HEADS, Dv)}
    tensors = {
        name: torch.randn(*size, generator=draw).to(kind).transpose(0, 1).unsqueeze(0) for name, size in sizes.items()
    }
    tensors |= {"sinks": torch.randn(HEADS, generator=draw), "dlse": torch.randn(1, HEADS, T, generator=draw)}
    call = OnEnd(of, WINDOWS[window], tensors)
    tensors["do"][:, :, T - BEHIND :] = 0.0
    tensors["dlse"][..., T - BEHIND :] = 0.0
    if poison:
        for rows, keys in zip(call.parts(0), call.parts(1), strict=True):
            if rows.start == rows.stop or keys.start == keys.stop:
                tensors["q"][:, :, rows] = math.nan
                tensors["k"][:, :, keys] = tensors["v"][:, :, keys] = math.nan
        for none in (slice(AHEAD), slice(-BEHIND, None)):
            tensors["q"][:, :, none] = tensors["do"][:, :, none] = math.nan
            tensors["k"][:, :, none] = tensors["v"][:, :, none] = tensors["dlse"][..., none] = math.inf
    return call


@dataclass(frozen=True)
class Found:
    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor]


def ours(call: OnEnd, device: str, *, grads: bool = False, backend: str = "fa3", order: bool = False) -> Found:
    given = {name: x.detach().to(device) for name, x in call.tensors.items()}
    leaves = {name: given[name].requires_grad_(grads) for name in ("q", "k", "v", "sinks")}
    cu = [call.starts(side, device) for side in (0, 1)]
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(backend), in_order(order):
        out, lse = OP(*leaves.values(), *cu, None, *call.window, call.softcap, None)
        found = {}
        if grads:
            wanted = torch.autograd.grad((out, lse), [*leaves.values()], (given["do"], given["dlse"]))
            found = dict(zip((f"d{name}" for name in leaves), wanted, strict=True))
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == 1 and counts["ours_bwd"] == grads and counts["math_fwd"] == counts["math_bwd"] == 0
    return Found(out.detach().cpu(), lse.detach().cpu(), {name: x.cpu() for name, x in found.items()})


def math_of(call: OnEnd, dtype: torch.dtype) -> Found:
    """Return the mathematics of each sequence by itself. Rows of no sequence are zeros, their LSE the sink, and what
    comes back for them is not read.
    """
    tensors = {name: x.nan_to_num(0.0, 0.0, 0.0).to(dtype) for name, x in call.tensors.items()}
    q, k, v, sinks = (tensors[name].requires_grad_() for name in ("q", "k", "v", "sinks"))
    out = torch.zeros(1, HEADS, q.shape[2], v.shape[3], dtype=dtype)
    lse = sinks.view(1, HEADS, 1).repeat(1, 1, q.shape[2])
    for rows, keys in zip(call.parts(0), call.parts(1), strict=True):
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        one = q[:, :, rows], *(x[:, :, keys].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        seen = call.window.seen(one[0].shape[2], one[1].shape[2], torch.device("cpu"))
        scores = one[0] @ one[1].mT * q.shape[3] ** -0.5
        if call.softcap:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        scores = scores.masked_fill(~seen, -math.inf)
        scores = torch.cat((scores, sinks.view(1, HEADS, 1, 1).expand(*scores.shape[:3], 1)), -1)
        weights, lse[:, :, rows] = scores.softmax(-1)[..., :-1], scores.logsumexp(-1)
        out[:, :, rows] = weights @ one[2]
    mine = slice(call.ends(0)[0], call.ends(0)[-1])
    loss = (out * tensors["do"]).sum() + (lse * tensors["dlse"])[..., mine].sum()
    wanted = torch.autograd.grad(loss, (q, k, v, sinks), allow_unused=True)
    grads = {name: torch.zeros_like(x) if g is None else g for name, x, g in
             zip(("dq", "dk", "dv", "dsinks"), (q, k, v, sinks), wanted, strict=True)}  # fmt: skip
    return Found(out.detach(), lse.detach(), grads)


def check(call: OnEnd, found: Found, label: str) -> None:
    dtype = call.tensors["q"].dtype
    exact, low, single = (math_of(call, one) for one in (torch.float64, dtype, torch.float32))
    assert_within_budget(f"{label} out", found.out, exact.out, low.out, seed=SEED)
    assert_lse(label, found.lse, exact.lse, single.lse, seed=SEED)
    clean = [call.tensors[name].nan_to_num(0.0, 0.0, 0.0) for name in ("q", "k", "v", "do")]
    check_gradients(label, found.grads, exact, low.grads, clean, call.tensors["sinks"])


@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.name)
def test_every_kernel(kernels_on: str, spec: KernelSpec, kernel_alone: Callable[[KernelSpec], None]) -> None:
    """Beside NaN and inf that are nobody's."""
    kernel_alone(spec)
    place = SPECS.index(spec)
    windows = [*WINDOWS]
    for lengths, window in (("mixed", windows[place % 5]), ("odd", windows[(place + 2) % 5])):
        call = drawn(lengths, window, (spec.d, spec.dv), spec.dtype, poison=True)
        if "softcap" in spec.features:
            call = replace(call, softcap=2.0)
        found = ours(call, kernels_on, grads=spec.is_backward, backend=BACKENDS[spec.arch])
        check(call, found, f"{spec.name()} {lengths} {window}")


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(kernels_on: str, lengths: str, window: str) -> None:
    """By the kernels that are planned for them."""
    nth = [*LENGTHS].index(lengths) + [*WINDOWS].index(window)
    dims = ((64, 64), (128, 128), (96, 80), (192, 128), (160, 136))[nth % 5]
    call = drawn(lengths, window, dims, WHOLE[nth % 2])
    check(call, ours(call, kernels_on, grads=True, backend=("fa3", "fa2")[nth % 3 == 2]), f"{lengths} {window}")


def test_a_sequence_has_the_same_bits_in_any_batch(kernels_on: str) -> None:
    """Whatever comes before and behind it."""
    call = drawn("mixed", "causal", (64, 64), "bf16")
    whole = ours(call, kernels_on)
    rows, keys = call.parts(0)[0], call.parts(1)[0]
    cut = {"q": rows, "do": rows, "k": keys, "v": keys}
    tensors = {name: x[:, :, cut[name]] if name in cut else x for name, x in call.tensors.items()}
    tensors["dlse"] = tensors["dlse"][..., rows]
    alone = ours(replace(call, lengths=call.lengths[:1], tensors=tensors, ahead=0), kernels_on)
    assert_bitwise_equal("out", whole.out[:, :, rows], alone.out)
    assert_bitwise_equal("lse", whole.lse[..., rows], alone.lse)


def test_gradients_in_order_give_the_same_bits(kernels_on: str) -> None:
    call = drawn("mixed", "window", (64, 64), "bf16")
    first, second = (ours(call, kernels_on, grads=True, order=True) for _ in range(2))
    for name in first.grads:
        assert_bitwise_equal(name, second.grads[name], first.grads[name])


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize(
    "starts", [[0, 900, 20], [-5, 10, 10], [0, 2**31 - 1, 7], [50, 40, 30], [0, 0, 0], [0, 261] * 4], ids=str
)
def test_starts_that_do_not_grow_touch_nothing_else(kernels_on: str, starts: list[int], order: bool) -> None:
    """Numbers may be wrong; the interpreter, or compute-sanitizer, sees each access."""
    call = drawn("equal", "causal", (64, 64), "bf16")
    given = {name: x.to(kernels_on) for name, x in call.tensors.items()}
    leaves = [given[name].requires_grad_() for name in ("q", "k", "v", "sinks")]
    cu = torch.tensor(starts, dtype=torch.int32, device=kernels_on)
    with torch_flashplug.sdpa_backend("fa3"), in_order(order):
        out, lse = OP(*leaves, cu, cu, None, *call.window, call.softcap, None)
        grads = torch.autograd.grad((out, lse), leaves, (given["do"], given["dlse"]))
    assert out.shape == given["do"].shape and [x.shape for x in grads] == [x.shape for x in leaves]


def test_keys_that_count(kernels_on: str, kernel_alone: Callable[[KernelSpec], None]) -> None:
    """As sequences of so many, by the same kernel; what the others hold is not read."""
    kernel_alone(KernelSpec.from_name("fwd_sm90_bf16_d64_window+ragged_m128n128s2"))
    call = drawn("mixed", "causal", (64, 64), "bf16")
    used = [7, 0, 0, 129, 0, 3]
    cut = tuple((rows, n) for (rows, _), n in zip(call.lengths, used, strict=True))
    counts = torch.zeros(call.tensors["k"].shape[2], dtype=torch.bool)
    counts[:AHEAD] = True
    for keys, n in zip(call.parts(1), used, strict=True):
        counts[keys.start : keys.start + n] = True
    shorter = {name: call.tensors[name][:, :, counts] for name in ("k", "v")}
    right = ours(replace(call, lengths=cut, tensors=call.tensors | shorter), kernels_on)
    given = {name: x.clone().to(kernels_on) for name, x in call.tensors.items()}
    for name in ("k", "v"):
        given[name][:, :, ~counts] = math.nan
    numbers = [call.starts(0, kernels_on), call.starts(1, kernels_on), torch.tensor(used).int().to(kernels_on)]
    with torch_flashplug.sdpa_backend("fa3"):
        out, lse = OP(given["q"], given["k"], given["v"], given["sinks"], *numbers, *call.window, call.softcap, None)
    assert_bitwise_equal("out", out.cpu(), right.out)
    assert_bitwise_equal("lse", lse.cpu(), right.lse)


def test_calls_without_sinks_or_gradients_of_the_lse(kernels_on: str) -> None:
    call = drawn("mixed", "causal", (128, 128), "fp16")
    sinks = replace(call, tensors=call.tensors | {"sinks": torch.full((HEADS,), -math.inf)})
    right = ours(sinks, kernels_on)
    given = {name: x.to(kernels_on) for name, x in call.tensors.items()}
    cu = [call.starts(side, kernels_on) for side in (0, 1)]
    with torch_flashplug.sdpa_backend("fa3"):
        out, lse = OP(given["q"], given["k"], given["v"], None, *cu, None, *call.window, call.softcap, None)
    assert_bitwise_equal("out", out.cpu(), right.out)
    assert_bitwise_equal("lse", lse.cpu(), right.lse)
