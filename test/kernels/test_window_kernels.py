"""Windows, sinks and a differentiated LSE by our kernels, on a GPU or interpreted.

Results and gradients are compared with fp64, for different lengths and alignments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

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
from torch_flashplug.testing import (
    Case,
    Inputs,
    assert_bitwise_equal,
    assert_lse,
    assert_within_budget,
    make_inputs,
    new_case,
)

SEED = 20261125
HEADS = (1, 4, 2)  # B, Hq, Hkv
OP = torch.ops.torch_flashplug.attention_fwd
KINDS = ({"window"}, {"window", "softcap"})
SPECS = [spec for arch in (90, 80) for spec in kernel_table.specs(arch) if spec.features in KINDS]
FORWARDS = [spec for spec in SPECS if not spec.is_backward]
BACKWARDS = [spec for spec in SPECS if spec.is_backward]
BACKENDS = {90: "fa3", 80: "fa2"}
# Windows and lengths (Sq, Sk): blocks masked out on either side, boundaries at edges of blocks, rows without visible
# keys at the beginning or at the end, a single query, a single key, no mask.
WINDOWS = (
    (Window(40, 0), (300, 333)),
    (Window(0, 70), (300, 333)),
    (Window(130, 10, bottom_right=False), (300, 333)),
    (Window(-1, 0), (360, 300)),
    (Window(-1, 0), (130, 400)),
    (Window(150, -1, bottom_right=False), (300, 280)),
    (Window(30, 0, bottom_right=False), (300, 150)),
    (Window(20, 10), (200, 500)),
    (Window(0, 0), (130, 130)),
    (Window(127, 0), (257, 257)),
    (Window(128, 0), (256, 256)),
    (Window(64, 64), (320, 320)),
    (Window(3, 0), (1, 200)),
    (Window(3, 2), (70, 1)),
    (Window(), (65, 129)),
)
BY_WINDOW = pytest.mark.parametrize(
    "nth", range(len(WINDOWS)), ids=lambda i: "-".join(map(str, (*WINDOWS[i][0], *WINDOWS[i][1])))
)


@dataclass(frozen=True)
class WindowCall:
    """A call, and the output gradients."""

    case: Case
    window: Window
    sinks: Tensor | None = None  # (Hq,)
    grad_lse: Tensor | None = None  # (B, Hq, Sq)
    softcap: float = 0.0

    @property
    def visible(self) -> Tensor:
        return self.window.to_mask(self.case.Sq, self.case.Sk, torch.device("cpu"))


def make_window_call(
    nth: int, dims: tuple[int, int], dtype: str, *, sinks: bool = True, dlse: bool = True
) -> WindowCall:
    window, seq = WINDOWS[nth]
    generator = torch.Generator().manual_seed(SEED + nth)
    case = new_case(f"{window} {seq} {dims}", HEADS, seq, dims, dtype=dtype)
    sinks_and_grad = (
        torch.randn(case.Hq, generator=generator) * 2,
        torch.randn(case.B, case.Hq, case.Sq, generator=generator),
    )
    return WindowCall(case, window, sinks_and_grad[0] if sinks else None, sinks_and_grad[1] if dlse else None)


def with_softcap(spec: KernelSpec, call: WindowCall) -> WindowCall:
    """Add a low softcap if the kernel has one."""
    return replace(call, softcap=2.0) if "softcap" in spec.features else call


def run_kernels(
    call: WindowCall, device: str, *, grads: bool = False, backend: str = "fa3", order: bool = False
) -> Results:
    """Return results and gradients of plugin kernels."""
    inputs = make_inputs(call.case, device, SEED)
    leaves = {name: getattr(inputs, name).requires_grad_(grads) for name in "qkv"}
    if call.sinks is not None:
        leaves["sinks"] = call.sinks.to(device).requires_grad_(grads)
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(backend), deterministic_gradients(order):
        out, lse = OP(*inputs, leaves.get("sinks"), None, None, None, *call.window, call.softcap, None)
        if grads:
            outputs, output_grads = [out, lse], [inputs.grad_out, call.grad_lse]
            if call.grad_lse is None:
                outputs, output_grads = outputs[:1], output_grads[:1]
            output_grads = [x.to(device) for x in output_grads]
            grads_by_name = dict(
                zip((f"d{name}" for name in leaves), torch.autograd.grad(outputs, [*leaves.values()], output_grads))
            )
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == 1 and counts["ours_bwd"] == grads and counts["math_fwd"] == counts["math_bwd"] == 0
    return Results(out.detach(), lse.detach(), grads_by_name if grads else {})


def inputs_on_cpu(call: WindowCall, device: torch.device) -> Inputs:
    """Return the inputs of the call on the CPU; devices draw different numbers from one seed."""
    inputs = make_inputs(call.case, device, SEED)
    return Inputs(*(x.cpu() for x in (*inputs, inputs.grad_out)))


def reference_results(call: WindowCall, inputs: Inputs, dtype: torch.dtype) -> Results:
    """Return the reference by definition, on the CPU, with each step rounded to `dtype`."""
    leaves = {name: getattr(inputs, name).to(dtype).requires_grad_() for name in "qkv"}
    group, blind = call.case.Hq // call.case.Hkv, ~call.visible.any(-1)
    k, v = (leaves[name].repeat_interleave(group, 1) for name in "kv")
    scores = leaves["q"] @ k.mT * call.case.D**-0.5
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~call.visible, -math.inf)
    if call.sinks is None:
        scores = scores.masked_fill(blind.unsqueeze(-1), 0.0)
    else:
        leaves["sinks"] = call.sinks.to(dtype).requires_grad_()
        of_head = leaves["sinks"].view(-1, 1, 1).expand(call.case.B, -1, call.case.Sq, 1)
        scores = torch.cat((scores, of_head), -1)
    lse, weights = scores.logsumexp(-1), scores.softmax(-1)
    if call.sinks is None:
        lse = lse.masked_fill(blind, -math.inf)
        weights = weights.masked_fill(blind.unsqueeze(-1), 0.0)
    else:
        weights = weights[..., :-1]
    out = weights @ v
    loss = (out * inputs.grad_out.to(dtype)).sum()
    if call.grad_lse is not None:
        loss = loss + (lse.masked_fill(lse == -math.inf, 0.0) * call.grad_lse.to(dtype)).sum()
    gradients = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
    return Results(out.detach(), lse.detach(), dict(zip((f"d{name}" for name in leaves), gradients)))


def check_results(call: WindowCall, results: Results) -> None:
    inputs, dtypes = inputs_on_cpu(call, results.out.device), (torch.float64, call.case.torch_dtype, torch.float32)
    exact, low, single = (reference_results(call, inputs, dtype) for dtype in dtypes)
    assert_within_budget(f"{call.case.name} out", results.out.cpu(), exact.out, low.out, seed=SEED)
    assert_lse(call.case.name, results.lse.cpu(), exact.lse, single.lse, seed=SEED)
    check_gradients(call.case.name, results.grads, exact, low.grads, (*inputs, inputs.grad_out), call.sinks)


@pytest.mark.parametrize("spec", FORWARDS, ids=KernelSpec.name)
def test_every_window_forward_kernel(
    kernels_on: str, spec: KernelSpec, kernel_alone: Callable[[KernelSpec], None]
) -> None:
    """Each kernel is tested with two windows, different for each kernel."""
    kernel_alone(spec)
    for nth in (FORWARDS.index(spec) % 8, 8 + FORWARDS.index(spec) % 7):
        call = with_softcap(spec, make_window_call(nth, (spec.d, spec.dv), spec.dtype, sinks=nth % 3 > 0))
        check_results(call, run_kernels(call, kernels_on, backend=BACKENDS[spec.arch]))


@pytest.mark.parametrize("spec", BACKWARDS, ids=KernelSpec.name)
def test_every_window_backward_kernel(
    kernels_on: str, spec: KernelSpec, kernel_alone: Callable[[KernelSpec], None]
) -> None:
    kernel_alone(spec)
    for nth in (BACKWARDS.index(spec) % 8, 8 + BACKWARDS.index(spec) % 7):
        call = with_softcap(
            spec, make_window_call(nth, (spec.d, spec.dv), spec.dtype, sinks=nth % 3 > 0, dlse=nth % 2 > 0)
        )
        check_results(
            call, run_kernels(call, kernels_on, grads=True, backend=BACKENDS[spec.arch], order=spec.is_deterministic)
        )


@BY_WINDOW
@pytest.mark.parametrize("backend", ["fa3", "fa2"])
def test_output_and_gradients_of_each_window(kernels_on: str, nth: int, backend: str) -> None:
    """The plan chooses the kernels."""
    dims = ((64, 64), (128, 128), (96, 80), (192, 128), (256, 256), (192, 192))[nth % 6]
    call = make_window_call(nth, dims, ELEMENTS_16BIT[nth % 2])
    check_results(call, run_kernels(call, kernels_on, grads=True, backend=backend))


@BY_WINDOW
def test_window_without_sinks_and_lse_gradient(kernels_on: str, nth: int) -> None:
    call = make_window_call(nth, (64, 64), "bf16", sinks=False, dlse=False)
    check_results(call, run_kernels(call, kernels_on, grads=True))


@pytest.mark.parametrize("backend", ["fa3", "fa2"])
def test_masked_rows_return_zero_output_and_the_sink_as_lse(kernels_on: str, backend: str) -> None:
    """The output is 0, and the LSE is -inf or the sink. A sink of -inf behaves like no sink."""
    call = make_window_call(3, (64, 64), "bf16")
    blind = ~call.visible.any(-1)
    assert blind[:60].all() and not blind[60:].any()
    no_sinks = torch.full((4,), -math.inf)
    with_sinks, without_sinks, with_infinite_sinks = (
        run_kernels(replace(call, sinks=sinks), kernels_on, backend=backend) for sinks in (call.sinks, None, no_sinks)
    )
    for results, expected_lse in ((with_sinks, call.sinks), (without_sinks, no_sinks), (with_infinite_sinks, no_sinks)):
        assert (results.out[:, :, blind] == 0).all()
        assert torch.allclose(results.lse.cpu()[:, :, blind], expected_lse.view(1, 4, 1).expand(1, 4, 60), rtol=1e-6)
    assert_bitwise_equal("sinks of -inf", with_infinite_sinks.out, without_sinks.out)


def test_sinks_far_above_or_below_the_scores(kernels_on: str) -> None:
    """The sink is all of a row's sum, or nothing."""
    call = replace(make_window_call(0, (64, 64), "bf16"), sinks=torch.tensor([200.0, -200.0, 1e30, -1e30]))
    results = run_kernels(call, kernels_on, grads=True)
    check_results(call, results)
    assert (results.out[:, 2] == 0).all() and results.out.isfinite().all()


@pytest.mark.parametrize("softcap", [0.5, 2.0, 50.0, 1e6])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_window_with_different_softcaps(kernels_on: str, d: int, softcap: float) -> None:
    """The softcaps include a low cap within reach of all scores, and a cap without effect."""
    call = replace(make_window_call(4, (d, d), ELEMENTS_16BIT[d // 64 % 2]), softcap=softcap)
    check_results(call, run_kernels(call, kernels_on, grads=True))


def test_blocks_outside_of_the_window_are_not_read(kernels_on: str) -> None:
    """NaN outside of the window does not spread."""
    call = make_window_call(0, (128, 128), "bf16")
    inputs = make_inputs(call.case, kernels_on, SEED)
    with torch_flashplug.sdpa_backend("fa3"):
        clean, _ = OP(*inputs, None, None, None, None, 40, 0, True, 0.0, None)
        for x in (inputs.k, inputs.v):
            x[:, :, :128] = math.nan
        with_nan, _ = OP(*inputs, None, None, None, None, 40, 0, True, 0.0, None)
    rows = slice(256, None)  # the blocks of the tile begin behind the first block
    assert_bitwise_equal("rows whose window is behind", with_nan[:, :, rows], clean[:, :, rows])


def test_deterministic_gradients_are_bitwise_equal(kernels_on: str) -> None:
    call = make_window_call(1, (128, 128), "bf16")
    first_run, second_run = (run_kernels(call, kernels_on, grads=True, order=True) for _ in range(2))
    for name in first_run.grads:
        assert_bitwise_equal(name, second_run.grads[name], first_run.grads[name])


@pytest.mark.parametrize("layout", ["bshd", "slice", "unaligned_unit_dim", "off_by_one", "expand0"])
def test_window_with_different_memory_layouts(kernels_on: str, layout: str) -> None:
    call = make_window_call(0, (64, 64), "bf16")
    call = replace(call, case=replace(call.case, layout=layout))
    check_results(call, run_kernels(call, kernels_on, grads=layout != "expand0"))


@pytest.mark.parametrize("scale", [0.5, -0.3, 0.0])
def test_softmax_scale_does_not_apply_to_sinks(kernels_on: str, scale: float) -> None:
    """A sink is not scaled."""
    call = make_window_call(0, (64, 64), "bf16")
    inputs = make_inputs(call.case, kernels_on, SEED)
    with torch_flashplug.sdpa_backend("fa3"):
        out, lse = OP(*inputs, call.sinks.to(kernels_on), None, None, None, *call.window, 0.0, scale)
    exact = torch.ops.torch_flashplug._attention_math_fwd(
        *(x.cpu().double() for x in inputs), call.sinks.double(), None, None, None, *call.window, 0.0, scale
    )
    assert float((out.cpu().double() - exact[0]).norm() / exact[0].norm()) < 5e-3
    assert float((lse.cpu().double() - exact[1]).abs().max()) < 1e-4
