"""The seed of dropout: from the default generator to the op, and from the forward to the backward.

Forward and backward may run on different backends. Tests cover graphs, checkpoints and transforms.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from deterministic import deterministic_gradients
from device_backend import OPEN_GATE, DeviceBackend
from golden_plans import call as call_facts
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from traced_graphs import AUTO, FA3, MATH, Recorder

from torch_flashplug import sdpa_backend
from torch_flashplug.api import startup
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import dropout_reference, sdpa
from torch_flashplug.registry import dispatch_table, kernel_table
from torch_flashplug.testing.budget import assert_dropped_alike

OVERRIDEABLE_OP = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
OWN, OWN_BACKWARD = torch.ops.torch_flashplug.sdpa_fwd, torch.ops.torch_flashplug.sdpa_bwd
bits_of = torch.ops.torch_flashplug.dropout_mask
P = 0.3


def attend_in_fp64(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, *, causal: bool = False, p: float = P) -> Tensor:
    """Compute the attention in fp64 with a given dropout mask."""
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
    return scores.softmax(-1) * kept * dropout_reference.factor(p) @ v.double()


def dropout_mask_of(seed: Tensor, q: Tensor, k: Tensor, p: float = P) -> Tensor:
    return bits_of(seed, *q.shape[:3], k.shape[2], p)


def check(actual: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float = 3e-2) -> None:
    for result, exact in zip(actual, want, strict=True):
        assert float((result.detach().double() - exact.detach()).norm() / exact.detach().norm()) < tolerance


def attend_with_dropout(q: Tensor, k: Tensor, v: Tensor, p: float = P, **more: object) -> Tensor:
    with sdpa_backend("fa3"):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, **more)


# ---- seeds ----


def test_overrideable_op_returns_a_seed_like_the_efficient_op(device_backend: DeviceBackend) -> None:
    q, k, v = device_backend.qkv()
    torch.manual_seed(3)
    with sdpa_backend("fa3"):
        out, _, _, _, _, _, seed, offset, _ = OVERRIDEABLE_OP(q, k, v, None, P)
        _, _, _, _, _, _, none, nothing, _ = OVERRIDEABLE_OP(q, k, v)
    torch.manual_seed(3)
    assert torch.equal(seed, torch.empty_like(seed).random_())  # the next number of the default generator
    for number in (seed, offset):
        assert number.shape == () and number.dtype == torch.int64 and number.device == q.device
    assert seed >= 0 and offset == 0 and none is nothing is None
    check((out,), (attend_in_fp64(q, k, v, dropout_mask_of(seed, q, k)),))


@pytest.mark.parametrize("mode", [FA3, MATH])
def test_op_results_match_the_fake_implementation(device_backend: DeviceBackend, mode: int) -> None:
    inputs = device_backend.qkv()
    for p in (0.0, P):
        fakes, results = sdpa._forward_fake(*inputs, None, p, 0, None, mode), OWN(*inputs, None, p, 0, None, mode)
        for fake, real in zip(fakes, results, strict=True):
            assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)


def test_an_odd_seed_is_refused(device_backend: DeviceBackend) -> None:
    seed = torch.tensor(5, device=device_backend.device)
    for odd in (seed.int(), seed.expand(2)):
        with pytest.raises(RuntimeError, match="must be the int64 scalar tensor returned by a forward"):
            bits_of(odd, 1, 1, 8, 8, P)
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        bits_of(seed, 1, 1, 8, 8, 1.5)


def test_dropout_mask_op_passes_opcheck(device_backend: DeviceBackend) -> None:
    torch.library.opcheck(bits_of, (torch.tensor(5, device=device_backend.device), 2, 3, 17, 33, P))


# ---- backends of forward and backward ----


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("modes", list(itertools.product((FA3, MATH), repeat=2)), ids=str)
def test_any_backward_follows_any_forward(kernels_on: str, modes: tuple[int, int], causal: bool) -> None:
    """Kernels and math must drop the same probabilities for the same seed."""
    tensors = [tensor.to(kernels_on, torch.bfloat16) for tensor in torch.randn(4, 2, 2, 130, 64).unbind()]
    *inputs, grad = tensors
    bindings.counters(reset=True)
    settings = (P, int(causal), None)
    out, lse, seed, offset = OWN(*inputs, None, *settings, modes[0])
    grads = OWN_BACKWARD(grad, *inputs, None, out, lse, seed, offset, *settings, modes[1], False)[:3]
    names = {FA3: "ours", MATH: "math"}
    counts = {name: count for name, count in bindings.counters().items() if count}
    assert counts == {f"{names[modes[0]]}_fwd": 1, f"{names[modes[1]]}_bwd": 1}
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    expected = attend_in_fp64(*exact, dropout_mask_of(seed, *inputs[:2]), causal=causal)
    check((out, *grads), (expected, *torch.autograd.grad(expected, exact, grad.double())))


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [AUTO, FA3, MATH])
@pytest.mark.parametrize("dtype, d", [(torch.float32, 64), (torch.bfloat16, 264), (torch.bfloat16, 128)])
def test_calls_with_dropout_never_run_on_efficient_attention(dtype: torch.dtype, d: int, backward: int) -> None:
    """The efficient attention drops different bits, and no backward could reproduce them.

    Where our kernels cannot run, math serves both directions.
    """
    *inputs, grad = torch.randn(4, 1, 2, 200, d, device="cuda", dtype=dtype).unbind()
    bindings.counters(reset=True)
    out, lse, seed, offset = OWN(*inputs, None, P, 0, None, AUTO)
    grads = OWN_BACKWARD(grad, *inputs, None, out, lse, seed, offset, P, 0, None, AUTO, False)[:3]
    counts = bindings.counters()
    assert counts["efficient_fwd"] == counts["efficient_bwd"] == 0
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    expected = attend_in_fp64(*exact, dropout_mask_of(seed, *inputs[:2]))
    check((out, *grads), (expected, *torch.autograd.grad(expected, exact, grad.double())))


def test_plans_never_use_the_efficient_backward_after_dropout() -> None:
    """Plan a forward of our kernels without any backward kernel.

    Without dropout, the efficient attention of stock may compute the gradients.
    """
    forwards = tuple(row for row in kernel_table.KERNEL_ROWS if row.kind == "fwd")
    bindings.push_rows(forwards, (), dispatch_table.COST_MODEL)
    try:
        for p, follower in ((0.0, "The efficient backward of stock"), (P, "The math backward of stock")):
            call = call_facts((1, 4, 4), (256, 256), (64, 64), grad=1, dropout_p=p)
            plan = bindings.plan(call, DEVICES["h100"], sdpa_backend("fa3").mode)
            assert plan["backend"] == "fa3" and plan["gradients"].startswith(follower), plan
    finally:
        startup.push_tables()


# ---- gradients through F.sdpa ----


def check_gradients(
    device_backend: DeviceBackend, attention: Callable, *, leaf_names: str = "qkv", **more: object
) -> None:
    """Compare a call and its gradients with fp64, using the dropout mask of the first seed after manual_seed."""
    tensors = dict(zip("qkv", device_backend.qkv(), strict=True))
    leaves = {name: tensor.detach().requires_grad_(name in leaf_names) for name, tensor in tensors.items()}
    torch.manual_seed(5)
    seed = torch.empty((), dtype=torch.int64, device=device_backend.device).random_()
    torch.manual_seed(5)
    device_backend.pop_path_counts()
    out = attention(*leaves.values(), **more)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, [leaves[name] for name in leaf_names], grad)
    assert device_backend.pop_path_counts()["ours_fwd"] >= 1
    exact = {name: tensor.double().requires_grad_(name in leaf_names) for name, tensor in tensors.items()}
    expected = attend_in_fp64(
        *exact.values(), dropout_mask_of(seed, tensors["q"], tensors["k"]), causal=bool(more.get("is_causal"))
    )
    check(
        (out, *grads), (expected, *torch.autograd.grad(expected, [exact[name] for name in leaf_names], grad.double()))
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("leaf_names", ["qkv", "q", "kv", "v"])
def test_dropout_gradients_match_fp64(hooked_backend: DeviceBackend, leaf_names: str, causal: bool) -> None:
    check_gradients(hooked_backend, attend_with_dropout, leaf_names=leaf_names, is_causal=causal)


def test_deterministic_dropout_gradients_match_fp64(hooked_backend: DeviceBackend) -> None:
    with deterministic_gradients():
        check_gradients(hooked_backend, attend_with_dropout)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_repeats_dropout_bits(hooked_backend: DeviceBackend, reentrant: bool) -> None:
    check_gradients_of = functools.partial(checkpoint, use_reentrant=reentrant)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return check_gradients_of(attend_with_dropout, q, k, v)

    if reentrant:  # torch.autograd.grad does not support reentrant checkpoints
        grads = []
        for run in (attend_with_dropout, attention):
            leaves = hooked_backend.qkv(grad=True)
            torch.manual_seed(5)
            run(*leaves).float().square().sum().backward()
            grads.append([leaf.grad for leaf in leaves])
        for plain_grad, checkpoint_grad in zip(*grads, strict=True):
            torch.testing.assert_close(plain_grad, checkpoint_grad)
    else:
        check_gradients(hooked_backend, attention)


def test_calls_advance_the_generator_and_a_restored_state_repeats_draws(hooked_backend: DeviceBackend) -> None:
    q, k, v = hooked_backend.qkv()
    torch.manual_seed(9)
    first, second = attend_with_dropout(q, k, v), attend_with_dropout(q, k, v)
    assert not torch.equal(first, second)
    torch.manual_seed(9)
    devices = [0] if hooked_backend.device == "cuda" else []
    with torch.random.fork_rng(devices):
        assert torch.equal(attend_with_dropout(q, k, v), first)
    assert torch.equal(attend_with_dropout(q, k, v), first) and torch.equal(attend_with_dropout(q, k, v), second)


# ---- valid values of p ----


@pytest.mark.parametrize("p", [1.0, 1e-9])
def test_probability_one_returns_zeros_and_tiny_probability_drops_nothing(
    hooked_backend: DeviceBackend, p: float
) -> None:
    leaves = hooked_backend.qkv(grad=True)
    out = attend_with_dropout(*leaves, p=p)
    grads = torch.autograd.grad(out.float().sum(), leaves)
    assert hooked_backend.pop_path_counts()["ours_fwd"] == 1
    if p == 1.0:
        assert all((tensor == 0).all() for tensor in (out, *grads))
    else:
        check((out,), (attend_in_fp64(*leaves, torch.ones_like(leaves[0] @ leaves[1].mT), p=0.0),))


@pytest.mark.parametrize("p", [-0.5, 1.5, math.nan])
def test_invalid_probabilities_fall_back_to_stock(hooked_backend: DeviceBackend, p: float) -> None:
    """Expect an error or the result of stock. On a GPU, the kernels of stock end the process for such values."""
    q, k, v = hooked_backend.qkv()
    with pytest.raises(RuntimeError, match=r"forced and cannot run(.|\n)*must be from 0 to 1"):
        attend_with_dropout(q, k, v, p=p)
    if hooked_backend.device == "cuda":
        return

    def outcome() -> Tensor | str:
        try:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        except RuntimeError as error:
            return str(error)

    with hooked_backend.disabled():
        expected = outcome()
    actual = outcome()
    assert hooked_backend.pop_path_counts().get("ours_fwd", 0) == 0
    assert actual == expected if isinstance(expected, str) else torch.equal(actual, expected)


# ---- graphs and transforms ----


@pytest.mark.parametrize("more", [{}, {"causal": 1}, {"bias": 1}, {"mask": 1}], ids=lambda x: "".join(x) or "full")
@pytest.mark.parametrize("D", [64, 128, 144, 192])
@pytest.mark.parametrize("rows", [1, 64, 100, 128, 192, 512, 4096])
@pytest.mark.parametrize("batches", [1, 70000])
@pytest.mark.parametrize("order", [0, 1])
def test_forward_plans_are_equal_with_and_without_gradients(
    more: dict[str, int], D: int, rows: int, batches: int, order: int
) -> None:
    """Plan calls by the measured table, and where stock computes wrong gradients.

    A reentrant checkpoint first runs the forward without gradients. Both forwards must drop the same probabilities.
    """
    call = call_facts((batches, 2, 2), (rows, rows), (D, D), dropout=1, dropout_p=0.5, deterministic=order, **more)
    plans = [bindings.plan(call | {"grad": grad}, DEVICES["h100"]) for grad in (0, 1)]
    assert plans[0]["backend"] == plans[1]["backend"] and plans[0]["kernel"] == plans[1]["kernel"]


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 144, 200])
@pytest.mark.parametrize("keys", [64, 56])
def test_reentrant_checkpoint_in_auto_repeats_dropout_bits(keys: int, D: int) -> None:
    """Run a reentrant checkpoint in auto with 64 and 56 keys.

    Auto serves calls with 64 keys, because cuDNN gradients may then be NaN (test_low_lse.py). The first columns of the
    output are P with its dropout, so the gradient of v must be out^T grad_out.
    """
    q, k = (torch.randn(2, 4, rows, D, device="cuda", dtype=torch.bfloat16) for rows in (15, keys))
    v = torch.zeros_like(k)
    v[..., :keys] = torch.eye(keys, device="cuda", dtype=v.dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attend = functools.partial(F.scaled_dot_product_attention, dropout_p=P)
    out = checkpoint(attend, *leaves, use_reentrant=True)
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    exact = out.detach()[..., :keys].double().mT @ grad_out.double()
    assert float((v.grad.double() - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_dropout_draws_a_new_seed_for_each_call(hooked_backend: DeviceBackend, dynamic: bool) -> None:
    """Check a compiled call: our ops in both directions, and a new draw in every call.

    Gradients use the dropout mask of the forward.
    """
    recorder = Recorder()
    compiled = torch.compile(attend_with_dropout, fullgraph=True, backend=recorder, dynamic=dynamic)
    check_gradients(hooked_backend, compiled)
    assert recorder.forwards == [[("fwd", FA3)]] and recorder.backwards == [[("bwd", FA3)]]
    q, k, v = hooked_backend.qkv()
    with torch.no_grad():
        assert not torch.equal(compiled(q, k, v), compiled(q, k, v))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("D", [64, 100])
def test_symbolic_sizes_follow_the_measured_table(device_backend: DeviceBackend, D: int) -> None:
    """Leave graphs of symbolic sizes to stock if kernels may not support the call.

    Otherwise math would serve the call when the graph runs, with memory of Sq x Sk.
    """
    sizes = (1, 128, 1, dispatch_table.ANY, 1, dispatch_table.ANY, 0)
    row = dispatch_table.ChoiceRow("fwd", "square", 90, True, "dropout", *sizes, ratio=2.0, measured="test")
    bindings.push_rows(kernel_table.KERNEL_ROWS, (row,), OPEN_GATE)
    recorder = Recorder()
    attend = functools.partial(F.scaled_dot_product_attention, dropout_p=P)
    compiled = torch.compile(attend, fullgraph=True, backend=recorder, dynamic=True)
    with torch.no_grad():
        q, k, v = (
            torch.randn(2, 3, rows, D, device=device_backend.device, dtype=device_backend.dtype)
            for rows in (130, 140, 140)
        )
        torch._dynamo.mark_static(q, 3)
        compiled(q, k, v)
    plugin_ops = [("fwd", AUTO)]
    assert (recorder.forwards == [plugin_ops]) is (D == 64) and device_backend.pop_path_counts().get("ours_fwd", 0) == (
        D == 64
    )


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_checkpoint_repeats_dropout_bits(device_backend: DeviceBackend) -> None:
    """Compare the gradient with the dropout mask of the output.

    On a GPU, a graph with a checkpoint reads the generator at a different offset than eager calls, also in stock. The
    output is P, because v is the identity, so the dropout mask is read from the output.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(attend_with_dropout, q, k, v, use_reentrant=False)

    q, k = (
        torch.zeros(1, 2, 64, 64, device=device_backend.device, dtype=device_backend.dtype, requires_grad=True)
        for _ in range(2)
    )
    v = (
        torch.eye(64, device=device_backend.device, dtype=device_backend.dtype)
        .expand(1, 2, 64, 64)
        .clone()
        .requires_grad_()
    )
    kept = torch.compile(attention, fullgraph=True, backend=Recorder())(q, k, v)
    grad_out = torch.randn_like(kept)
    (grad_v,) = torch.autograd.grad(kept, v, grad_out)
    assert device_backend.pop_path_counts()["ours_fwd"] > 0 and 0 < (kept == 0).sum() < kept.numel()
    exact = kept.detach().double().mT @ grad_out.double()
    assert (grad_v.double() - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.usefixtures("fresh_dynamo")
def test_exported_dropout_repeats_the_draws_of_a_seed(device_backend: DeviceBackend) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_with_dropout(q, k, v)

    q, k, v = device_backend.qkv()
    module = torch.export.export(Attention(), (q, k, v)).module()
    torch.manual_seed(5)
    eager = attend_with_dropout(q, k, v)
    torch.manual_seed(5)
    assert torch.equal(module(q, k, v), eager)


def test_vmap_requires_different_randomness(device_backend: DeviceBackend) -> None:
    q, k, v = (torch.stack([tensor, tensor]) for tensor in device_backend.qkv())
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(attend_with_dropout)(q, k, v)
    out = torch.vmap(attend_with_dropout, randomness="different")(q, k, v)
    assert not torch.equal(out[0], out[1])


def test_dropout_check_detects_a_backward_with_different_bits() -> None:
    """Test the check used by the GPU tests: correct 16-bit numbers pass.

    One tile of 64 x 64 different bits must fail.
    """
    sizes, rounded = ((2, 4, 300, 64), (2, 2, 333, 64)), functools.partial(Tensor.to, dtype=torch.bfloat16)
    num_detected = 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        q, k, v, grad = (torch.randn(sizes[side], generator=generator) for side in (0, 1, 1, 0))
        probabilities = torch.softmax(2 * q @ k.repeat_interleave(2, 1).mT * 64**-0.5, -1)
        bits = torch.rand(probabilities.shape, generator=generator) >= P
        changed_bits = bits.clone()
        changed_bits[1, 3, 64:128, 128:192] = torch.rand(64, 64, generator=generator) >= P
        out = rounded(probabilities * bits * dropout_reference.factor(P) @ v.repeat_interleave(2, 1))
        by_bits = [
            (rounded(probabilities * kept).float() * dropout_reference.factor(P)).mT @ grad
            for kept in (bits, changed_bits)
        ]
        dv, wrong = (rounded(heads.unflatten(1, (2, 2)).sum(2)) for heads in by_bits)
        assert_dropped_alike(out, grad, dv, rounded(v))
        try:
            assert_dropped_alike(out, grad, wrong, rounded(v))
        except AssertionError as error:
            num_detected += str(error).startswith("batch 1, key head 1: ")
    assert num_detected >= 14  # a sum of random signs is sometimes small


@pytest.mark.gpu
def test_graph_replays_draw_new_dropout_bits() -> None:
    """The backward in the graph must use the dropout mask of the forward."""
    q, k = (torch.zeros(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v, grad = (torch.randn_like(q) for _ in range(2))
    v.requires_grad_()
    with sdpa_backend("fa3"):
        for _ in range(2):  # loads the kernels
            torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, dropout_p=P), v, grad)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=P)
            (dv,) = torch.autograd.grad(out, v, grad)
    outs = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        outs.append(out.clone())
        assert_dropped_alike(out, grad, dv, v)
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
