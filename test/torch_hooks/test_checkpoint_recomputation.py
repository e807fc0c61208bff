"""Recomputations of torch.utils.checkpoint: each recomputation uses the mode of the forward.

The thread of the backward does not matter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torch_flashplug import sdpa_backend
from torch_flashplug.dispatch import bindings

MODES = ("auto", "fa3", "fa2", "math", "stock")
BLOCK_PLACES = ("around both", "around the forward", "another around the backward")


def run_on(thread: str, function: Callable[[], None]) -> None:
    """Run a function on this thread, or on a new thread outside of all blocks, like the device threads of autograd."""
    if thread == "same":
        function()
        return
    worker = threading.Thread(target=function)
    worker.start()
    worker.join()


def run_step(mode: str, place: str, forward: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> None:
    with sdpa_backend(mode):
        out = forward()
        if place == "around both":
            backward(out)
    if place == "around the forward":
        backward(out)
    if place == "another around the backward":
        with sdpa_backend("fa3" if mode != "fa3" else "math"):
            backward(out)


@pytest.mark.parametrize("thread", ["same", "another"])
@pytest.mark.parametrize("place", BLOCK_PLACES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_recomputation_uses_the_mode_of_the_forward(
    mode: str, reentrant: bool, nested: bool, place: str, thread: str
) -> None:
    modes: list[str] = []

    def layer(x: Tensor) -> Tensor:
        modes.append(bindings.backend_of(bindings.mode()))
        return (2 * x).sin()

    def two_layers(x: Tensor) -> Tensor:
        return 2 * checkpoint(layer, checkpoint(layer, 3 * x, use_reentrant=reentrant), use_reentrant=reentrant)

    x = torch.randn(4, requires_grad=True)
    run_step(
        mode,
        place,
        lambda: checkpoint(two_layers if nested else layer, 1 * x, use_reentrant=reentrant),
        lambda out: run_on(thread, out.sum().backward),
    )

    assert len(modes) >= 2 and set(modes) == {mode}
    assert bindings.mode() == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_of_a_forward_outside_any_block_stays_in_auto(reentrant: bool) -> None:
    modes: list[str] = []

    def layer(x: Tensor) -> Tensor:
        modes.append(bindings.backend_of(bindings.mode()))
        return x.sin()

    with sdpa_backend("math"):
        torch.ones(1, requires_grad=True).sin()  # a node of a different block
    out = checkpoint(layer, 1 * torch.ones(4, requires_grad=True), use_reentrant=reentrant)
    with sdpa_backend("math"):
        out.sum().backward()

    assert modes == ["auto", "auto"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_block_inside_a_recomputation_takes_precedence(reentrant: bool) -> None:
    modes: list[str] = []

    def layer(x: Tensor) -> Tensor:
        with sdpa_backend("fa2"):
            modes.append(bindings.backend_of(bindings.mode()))
        modes.append(bindings.backend_of(bindings.mode()))
        return x.sin()

    with sdpa_backend("stock"):
        out = checkpoint(layer, 1 * torch.ones(4, requires_grad=True), use_reentrant=reentrant)
    run_on("another", out.sum().backward)

    assert modes == ["fa2", "stock", "fa2", "stock"]


@pytest.mark.gpu
@pytest.mark.parametrize("place", BLOCK_PLACES)
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "nested"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("mode", MODES)
def test_checkpointed_gradients_equal_plain_gradients(mode: str, dropout_p: float, kind: str, place: str) -> None:
    """Compare on a GPU, where autograd evaluates nodes on a separate thread."""
    values = [torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 1 * F.scaled_dot_product_attention(1 * q, k, v, dropout_p=dropout_p, is_causal=True)

    def run(checkpoints: int) -> list[Tensor]:
        torch.manual_seed(3)
        leaves = [value.clone().requires_grad_() for value in values[:3]]
        step: Callable[..., Tensor] = attend
        for _ in range(checkpoints):
            inner = step

            def step(*args: Tensor, inner: Callable[..., Tensor] = inner) -> Tensor:
                return 1 * checkpoint(inner, *args, use_reentrant=kind != "not reentrant")

        run_step(
            mode,
            place if checkpoints else "around both",
            lambda: step(*(1 * leaf for leaf in leaves)),
            lambda out: out.backward(values[3]),
        )
        return [leaf.grad for leaf in leaves]

    expected_result, actual = run(0), run(2 if kind == "nested" else 1)

    for gradient, expected in zip(actual, expected_result):
        error = (gradient.double() - expected.double()).norm() / expected.double().norm()
        assert error < 1e-2  # different dropout bits give an error of 0.45
