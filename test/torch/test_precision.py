"""Which precision calls are asked to be multiplied in: by sdpa_backend, by enable, by the environment; what graphs keep
of it; what explain says.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from graphs import Recorder, causal, sdpa
from torch import Tensor

import torch_flashplug
from torch_flashplug import env, sdpa_backend
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry.quant_recipes import RECIPES, number_of

SHIFT = bindings.PRECISION_SHIFT


def qkv(device: str = "meta", *, D: int = 128, rows: int = 1024, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    made = (torch.randn(1, 4, rows, D, generator=generator).bfloat16().to(device) for _ in range(3))
    return [tensor.requires_grad_(grad) for tensor in made]


def explained(inputs: list[Tensor], **more: object) -> torch_flashplug.api.backend.Plan:
    return torch_flashplug.explain(*inputs, device="h100", **more)


@pytest.fixture
def process() -> Iterator[None]:
    """A process whose precision is 16 bits again in the end."""
    yield
    bindings.set_process_precision(0)


@pytest.mark.parametrize("name, said", [("qk8", "qk8"), ("8bit", "8bit"), ("e4m3", "e4m3"), ("fp8", "8bit")])
def test_a_forced_backend_obeys(name: str, said: str) -> None:
    with sdpa_backend("fa3", precision=name):
        plan = explained(qkv())
    assert plan.precision == said and said in plan.kernel and not plan.whole
    assert f"precision   {said}: scores" in str(plan)


@pytest.mark.parametrize("precision", [None, "16bit"])
def test_sixteen_bits_are_what_nobody_asks_for(precision: str | None) -> None:
    with sdpa_backend("fa3", precision=precision):
        plan = explained(qkv())
    assert plan.backend == "fa3" and not plan.precision and "bit" not in plan.kernel and not plan.whole


@pytest.mark.parametrize("name", RECIPES)
def test_auto_takes_it_as_a_permission(name: str) -> None:
    """Of 1024 keys no measured row says that 8 bits are faster."""
    with sdpa_backend("auto", precision=name):
        plan = explained(qkv())
    assert plan.backend == "fa3" and not plan.precision
    assert plan.whole.startswith("No measured entry covers this c") and "16 bits     No measured" in str(plan)
    assert plan.kernel == explained(qkv()).kernel and plan.row == explained(qkv()).row


def test_auto_takes_what_was_measured_to_be_faster() -> None:
    inputs = [torch.empty(1, 16, 16384, 128, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    with sdpa_backend("auto", precision="e4m3"):
        plan = explained(inputs)
        assert plan.precision == "e4m3" and "1.060 x the 16-bit kernel" in plan.row
        assert not explained(inputs, is_causal=True).precision
    assert not explained(inputs).precision and "x stock" in explained(inputs).row


def test_the_process_says_it_for_all(process: None) -> None:
    """It permits: also where a block asks for a backend, and fails nothing there."""
    torch_flashplug.enable(precision="qk8")
    long = [torch.empty(1, 8, 16384, 256, dtype=torch.bfloat16, device="meta")] * 3
    for backend in ("auto", "fa3"):
        with sdpa_backend(backend):
            assert explained(long).precision == "qk8"
            plan = explained(qkv())
            assert plan.whole and not plan.precision and not plan.error
            assert not explained(qkv(grad=True)).error
            with sdpa_backend(backend, precision="16bit"):
                assert not explained(long).precision
            torch_flashplug.enable()
            assert explained(long).precision == "qk8"
    with sdpa_backend("fa2"):
        assert not explained(long).error and not explained(long).precision
    with sdpa_backend("fa3", precision="e4m3"):
        assert explained(qkv()).precision == "e4m3"
    torch_flashplug.enable(precision="16bit")
    assert not explained(qkv()).whole


def test_the_environment_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.PRECISION.name, "fp8")
    assert startup._process_precision() == number_of("8bit")
    monkeypatch.setenv(env.PRECISION.name, "4bit")
    with pytest.raises(ValueError, match="TORCH_FLASHPLUG_PRECISION: precision must be one of 16bit, .* got '4bit'"):
        startup._process_precision()


def test_what_is_no_precision() -> None:
    with pytest.raises(ValueError, match="precision must be one of 16bit, qk8, 8bit, e4m3, fp8, but got '9bit'"):
        sdpa_backend("auto", precision="9bit")
    with pytest.raises(
        ValueError, match="must be None or '16bit' with 'math', but got '8bit'. Use 'auto', 'fa3' or 'fa2' for 8 bits"
    ):
        sdpa_backend("math", precision="8bit")
    sdpa_backend("stock", precision="16bit")
    with pytest.raises(ValueError, match="precision must be one of .*, but got 'int4'"):
        torch_flashplug.enable(precision="int4")


@pytest.mark.parametrize(
    "more, said",
    [
        ({"is_causal": True}, ""),
        ({"dropout_p": 0.1}, "exactly this combination of features: dropout and 8bit."),
        ({"attn_mask": torch.ones(1024, 1024, dtype=torch.bool, device="meta")}, ""),
        ({"attn_mask": torch.ones(1024, 1024, dtype=torch.bfloat16, device="meta")}, "features: bias and 8bit."),
    ],
)
def test_what_goes_beside_it(more: dict, said: str) -> None:
    with sdpa_backend("fa3", precision="8bit"):
        plan = explained(qkv(), **more)
    assert said in plan.error and bool(plan.error) == bool(said)
    with sdpa_backend("auto", precision="8bit"):
        plan = explained(qkv(), **more)
    assert plan.backend == "fa3" and not plan.precision and plan.whole


def test_wide_heads_and_gradients() -> None:
    with sdpa_backend("fa3", precision="8bit"):
        assert explained(qkv(D=256)).precision == "8bit"
        assert "8-bit attention has no backward" in explained(qkv(grad=True)).error
    with sdpa_backend("auto", precision="8bit"):
        plan = explained(qkv(grad=True))
    assert plan.backend == "fa3" and "8-bit attention has no backward" in plan.whole
    with sdpa_backend("fa2", precision="8bit"):
        assert "precision='8bit' is requested, but the kernels of this backend multiply in 16" in explained(qkv()).error


# ---- run ----


def run(kernels_on: str, inputs: list[Tensor], name: str | None, **more: object) -> Tensor:
    with torch.no_grad(), sdpa_backend("fa3", precision=name):
        return sdpa(*(x.to(kernels_on) for x in inputs), **more)


def test_blocks_and_process_reach_kernels(kernels_on: str, process: None) -> None:
    inputs = qkv("cpu", D=64, rows=70)
    whole, eight = run(kernels_on, inputs, None), run(kernels_on, inputs, "qk8")
    assert not torch.equal(whole, eight)
    bindings.set_process_precision(number_of("qk8"))
    assert torch.equal(run(kernels_on, inputs, "qk8"), eight)
    for name in (None, "16bit"):  # it permits, and so short a call is not faster
        assert torch.equal(run(kernels_on, inputs, name), whole)


@pytest.mark.usefixtures("fresh_dynamo")
def test_graphs_without_gradients_go_by_what_surrounds_them(kernels_on: str) -> None:
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
def test_graphs_with_gradients_multiply_in_sixteen_bits(kernels_on: str, process: None) -> None:
    inputs = [x.to(kernels_on).requires_grad_() for x in qkv("cpu", D=64, rows=70)]
    compiled = torch.compile(causal, fullgraph=True, backend=Recorder())
    with sdpa_backend("fa3"):
        want = causal(*inputs)
        want.sum().backward()
        grads = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    bindings.set_process_precision(number_of("8bit"))
    with sdpa_backend("auto"):
        got = compiled(*inputs)
        got.sum().backward()
    assert torch.equal(got, want)
    assert all(torch.equal(x.grad, grad) for x, grad in zip(inputs, grads, strict=True))


def test_our_op_alone_multiplies_in_what_its_mode_says(kernels_on: str, process: None) -> None:
    """Whoever calls it may want gradients: not by what surrounds it."""
    inputs = [x.to(kernels_on) for x in qkv("cpu", D=64, rows=70)]
    op = torch.ops.torch_flashplug.sdpa_fwd
    fa3 = bindings.BACKENDS.index("fa3")
    bindings.set_process_precision(number_of("qk8"))
    whole = op(*inputs, None, 0.0, 0, None, fa3)[0]
    assert torch.equal(whole, run(kernels_on, inputs, "16bit"))
    eight = op(*inputs, None, 0.0, 0, None, fa3 | number_of("8bit") << SHIFT)[0]
    assert torch.equal(eight, run(kernels_on, inputs, "8bit"))
