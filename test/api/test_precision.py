"""The requested precision of products: by sdpa_backend, by enable and by the environment.

The tests also cover the precision in graphs and the text of explain.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from traced_graphs import Recorder, causal, sdpa

import torch_flashplug
from torch_flashplug import env, sdpa_backend
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry.quant_recipes import RECIPES, precision_number

SHIFT = bindings.PRECISION_SHIFT


def qkv(device: str = "meta", *, D: int = 128, rows: int = 1024, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    tensors = (torch.randn(1, 4, rows, D, generator=generator).bfloat16().to(device) for _ in range(3))
    return [tensor.requires_grad_(grad) for tensor in tensors]


def explain_on_h100(inputs: list[Tensor], **more: object) -> torch_flashplug.api.backend.Plan:
    return torch_flashplug.explain(*inputs, device="h100", **more)


@pytest.fixture
def reset_process_precision() -> Iterator[None]:
    """Restore 16 bits after a test of the process precision."""
    yield
    bindings.set_process_precision(0)


@pytest.mark.parametrize(
    "name, precision_in_plan", [("qk8", "qk8"), ("8bit", "8bit"), ("e4m3", "e4m3"), ("fp8", "8bit")]
)
def test_forced_backend_uses_the_requested_precision(name: str, precision_in_plan: str) -> None:
    with sdpa_backend("fa3", precision=name):
        plan = explain_on_h100(qkv())
    assert plan.precision == precision_in_plan and precision_in_plan in plan.kernel and not plan.why_not_8bit
    assert f"precision   {precision_in_plan}: scores" in str(plan)


@pytest.mark.parametrize("precision", [None, "16bit"])
def test_default_precision_is_16_bits(precision: str | None) -> None:
    with sdpa_backend("fa3", precision=precision):
        plan = explain_on_h100(qkv())
    assert plan.backend == "fa3" and not plan.precision and "bit" not in plan.kernel and not plan.why_not_8bit


@pytest.mark.parametrize("name", RECIPES)
def test_auto_treats_precision_as_a_permission(name: str) -> None:
    """Use 1024 keys, for which no measured row is faster in 8 bits."""
    with sdpa_backend("auto", precision=name):
        plan = explain_on_h100(qkv())
    assert plan.backend == "fa3" and not plan.precision
    assert plan.why_not_8bit.startswith("No measured entry covers this c") and "16 bits     No measured" in str(plan)
    assert plan.kernel == explain_on_h100(qkv()).kernel and plan.row == explain_on_h100(qkv()).row


def test_auto_uses_8_bits_where_measured_faster() -> None:
    inputs = [torch.empty(1, 16, 16384, 128, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    with sdpa_backend("auto", precision="e4m3"):
        plan = explain_on_h100(inputs)
        assert plan.precision == "e4m3" and "1.060 x the 16-bit kernel" in plan.row
        assert not explain_on_h100(inputs, is_causal=True).precision
    assert not explain_on_h100(inputs).precision and "x stock" in explain_on_h100(inputs).row


def test_process_precision_applies_to_all_blocks(reset_process_precision: None) -> None:
    """The process setting is a permission: explicit blocks keep their backend, and no call fails."""
    torch_flashplug.enable(precision="qk8")
    long_inputs = [torch.empty(1, 8, 16384, 256, dtype=torch.bfloat16, device="meta")] * 3
    for backend in ("auto", "fa3"):
        with sdpa_backend(backend):
            assert explain_on_h100(long_inputs).precision == "qk8"
            plan = explain_on_h100(qkv())
            assert plan.why_not_8bit and not plan.precision and not plan.error
            assert not explain_on_h100(qkv(grad=True)).error
            with sdpa_backend(backend, precision="16bit"):
                assert not explain_on_h100(long_inputs).precision
            torch_flashplug.enable()
            assert explain_on_h100(long_inputs).precision == "qk8"
    with sdpa_backend("fa2"):
        assert not explain_on_h100(long_inputs).error and not explain_on_h100(long_inputs).precision
    with sdpa_backend("fa3", precision="e4m3"):
        assert explain_on_h100(qkv()).precision == "e4m3"
    torch_flashplug.enable(precision="16bit")
    assert not explain_on_h100(qkv()).why_not_8bit


def test_environment_sets_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.PRECISION.name, "fp8")
    assert startup._process_precision() == precision_number("8bit")
    monkeypatch.setenv(env.PRECISION.name, "4bit")
    with pytest.raises(ValueError, match="TORCH_FLASHPLUG_PRECISION: precision must be one of 16bit, .* got '4bit'"):
        startup._process_precision()


def test_invalid_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match="precision must be one of 16bit, qk8, 8bit, e4m3, fp8, but got '9bit'"):
        sdpa_backend("auto", precision="9bit")
    with pytest.raises(
        ValueError, match="must be None or '16bit' with 'math', but got '8bit'. Use 'auto' or 'fa3' for 8 bits"
    ):
        sdpa_backend("math", precision="8bit")
    sdpa_backend("stock", precision="16bit")
    with pytest.raises(ValueError, match="precision must be one of .*, but got 'int4'"):
        torch_flashplug.enable(precision="int4")


@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"is_causal": True}, ""),
        ({"dropout_p": 0.1}, "exactly this combination of features: dropout and 8bit."),
        ({"attn_mask": torch.ones(1024, 1024, dtype=torch.bool, device="meta")}, ""),
        ({"attn_mask": torch.ones(1024, 1024, dtype=torch.bfloat16, device="meta")}, "features: bias and 8bit."),
    ],
)
def test_precision_with_masks_and_dropout(arguments: dict, error: str) -> None:
    with sdpa_backend("fa3", precision="8bit"):
        plan = explain_on_h100(qkv(), **arguments)
    assert error in plan.error and bool(plan.error) == bool(error)
    with sdpa_backend("auto", precision="8bit"):
        plan = explain_on_h100(qkv(), **arguments)
    assert plan.backend == "fa3" and not plan.precision and plan.why_not_8bit


def test_precision_of_wide_heads_and_of_gradients_is_reported() -> None:
    with sdpa_backend("fa3", precision="8bit"):
        assert explain_on_h100(qkv(D=256)).precision == "8bit"
        assert "8-bit attention has no backward" in explain_on_h100(qkv(grad=True)).error
    with sdpa_backend("auto", precision="8bit"):
        plan = explain_on_h100(qkv(grad=True))
    assert plan.backend == "fa3" and "8-bit attention has no backward" in plan.why_not_8bit
    with sdpa_backend("fa2", precision="8bit"):
        assert (
            "precision='8bit' is requested, but the kernels of this backend multiply in 16"
            in explain_on_h100(qkv()).error
        )


# ---- calls that run ----


def run(kernels_on: str, inputs: list[Tensor], name: str | None, **more: object) -> Tensor:
    with torch.no_grad(), sdpa_backend("fa3", precision=name):
        return sdpa(*(x.to(kernels_on) for x in inputs), **more)


def test_blocks_and_process_reach_kernels(kernels_on: str, reset_process_precision: None) -> None:
    inputs = qkv("cpu", D=64, rows=70)
    in_16_bits, in_8_bits = run(kernels_on, inputs, None), run(kernels_on, inputs, "qk8")
    assert not torch.equal(in_16_bits, in_8_bits)
    bindings.set_process_precision(precision_number("qk8"))
    assert torch.equal(run(kernels_on, inputs, "qk8"), in_8_bits)
    for name in (None, "16bit"):  # 8 bits are permitted, but not faster for such a short call
        assert torch.equal(run(kernels_on, inputs, name), in_16_bits)


@pytest.mark.usefixtures("fresh_dynamo")
def test_graphs_without_gradients_use_the_surrounding_precision(kernels_on: str) -> None:
    inputs = [x.to(kernels_on) for x in qkv("cpu", D=64, rows=70)]
    compiled = torch.compile(causal, fullgraph=True, backend=Recorder())
    with torch.no_grad():
        for name in (None, "qk8", "16bit", "8bit"):
            with sdpa_backend("fa3", precision=name):
                assert torch.equal(compiled(*inputs), causal(*inputs)), name


@pytest.mark.usefixtures("fresh_dynamo")
def test_graphs_keep_the_precision_of_blocks_inside(kernels_on: str) -> None:
    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_backend("fa3", precision="qk8"):
            return sdpa(q, k, v)

    inputs = [x.to(kernels_on) for x in qkv("cpu", D=64, rows=70)]
    with torch.no_grad():
        assert torch.equal(torch.compile(inside, fullgraph=True, backend=Recorder())(*inputs), inside(*inputs))
        assert torch.equal(inside(*inputs), run(kernels_on, inputs, "qk8"))


@pytest.mark.usefixtures("fresh_dynamo")
def test_graphs_with_gradients_multiply_in_sixteen_bits(kernels_on: str, reset_process_precision: None) -> None:
    inputs = [x.to(kernels_on).requires_grad_() for x in qkv("cpu", D=64, rows=70)]
    compiled = torch.compile(causal, fullgraph=True, backend=Recorder())
    with sdpa_backend("fa3"):
        expected = causal(*inputs)
        expected.sum().backward()
        grads = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    bindings.set_process_precision(precision_number("8bit"))
    with sdpa_backend("auto"):
        actual = compiled(*inputs)
        actual.sum().backward()
    assert torch.equal(actual, expected)
    assert all(torch.equal(x.grad, grad) for x, grad in zip(inputs, grads, strict=True))


def test_direct_op_call_uses_the_precision_of_the_mode_argument(kernels_on: str, reset_process_precision: None) -> None:
    """The op must not read the surrounding mode, because any caller may need gradients."""
    inputs = [x.to(kernels_on) for x in qkv("cpu", D=64, rows=70)]
    op = torch.ops.torch_flashplug.sdpa_fwd
    fa3 = bindings.BACKENDS.index("fa3")
    bindings.set_process_precision(precision_number("qk8"))
    in_16_bits = op(*inputs, None, 0.0, 0, None, fa3)[0]
    assert torch.equal(in_16_bits, run(kernels_on, inputs, "16bit"))
    in_8_bits = op(*inputs, None, 0.0, 0, None, fa3 | precision_number("8bit") << SHIFT)[0]
    assert torch.equal(in_8_bits, run(kernels_on, inputs, "8bit"))
