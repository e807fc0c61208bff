"""The flash attention ops of torch, registered over stock.

The tests cover packed sequences, nested tensors, windows and lower-right masks. They also cover calls that stay with
stock, and backwards of stock.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import compile_cpp
import interpreted_kernels
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, bias, sdpa_kernel

import torch_flashplug
from torch_flashplug import attention, sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.torch_hooks import flash_attention_op

SEED, CUDA = 20261126, pytest.mark.gpu
ROWS, KEYS = (70, 1, 130, 3), (70, 9, 140, 3)
aten = torch.ops.aten
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
FORWARD, BACKWARD = "aten::_flash_attention_forward", "aten::_flash_attention_backward"
INPLACE_OP = hasattr(aten, "_flash_attention_forward_no_dropout_inplace")


@pytest.fixture
def patched_device(kernels_on: str) -> Iterator[str]:
    with interpreted_kernels.installed_at(flash_attention_op, kernels_on):
        yield kernels_on


@pytest.fixture
def flash_device(patched_device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select flash for jagged tensors.

    Jagged tensors select a backend in Python; the selection on a GPU is flash.
    """
    if patched_device == "cpu":
        from torch.nested._internal import sdpa

        monkeypatch.setattr(sdpa, "_select_sdp_backend", lambda *_, **__: SDPBackend.FLASH_ATTENTION)
    return patched_device


def make_cu_seqlens(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def random_leaves(device: str, *sizes: tuple[int, ...]) -> list[Tensor]:
    draws = (torch.Generator().manual_seed(SEED + i) for i in range(len(sizes)))
    tensors = (torch.randn(size, generator=draw) for size, draw in zip(sizes, draws, strict=True))
    return [x.to(device, torch.bfloat16).requires_grad_() for x in tensors]


def make_packed_batch(device: str, heads: int = 2) -> list[Tensor]:
    return random_leaves(device, (sum(ROWS), 2, 64), (sum(KEYS), heads, 64), (sum(KEYS), heads, 64))


def attend_in_fp32(leaves: list[Tensor], do: Tensor, **settings: object) -> tuple[Tensor, ...]:
    """Return the output, LSE and gradients in fp32 from the reference math of attention()."""
    wide = [x.detach().float().requires_grad_() for x in leaves]
    with sdpa_backend("math"):
        out, lse = attention(*wide, **settings, return_lse=True)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, wide, do.float())


def assert_near(actual: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    for result, expected in zip(actual, exact, strict=True):
        assert result.shape == expected.shape and float((result.float() - expected).norm() / expected.norm()) < 1e-2


# ---- calls served by the plugin ----


@pytest.mark.parametrize("backend", ["auto", "fa3"])
@pytest.mark.parametrize(("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (False, (20, 9))], ids=str)
def test_packed_sequences_run_on_kernels(
    patched_device: str, causal: bool, window: tuple[int, int], backend: str
) -> None:
    leaves, (cu_q, cu_k) = make_packed_batch(patched_device), (make_cu_seqlens(x, patched_device) for x in (ROWS, KEYS))
    left, of_right = (None if bound < 0 else bound for bound in window)
    bindings.counters(reset=True)
    with sdpa_backend(backend):
        out, lse, state, unused, debug = aten._flash_attention_forward(
            *leaves, cu_q, cu_k, max(ROWS), max(KEYS), 0.0, causal, False,
            scale=0.2, window_size_left=left, window_size_right=of_right,
        )  # fmt: skip
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, leaves, do)
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1
    assert out.is_contiguous() and lse.shape == (2, sum(ROWS)) and not lse.requires_grad
    assert state.shape == (2,) and unused.shape == () and debug.shape == (0,) and debug.dtype == out.dtype
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    exact = attend_in_fp32(leaves, do, causal=causal, window=window, scale=0.2, **lengths)
    torch.testing.assert_close(lse, exact[1], rtol=1e-4, atol=1e-4)
    assert_near((out.detach(), *grads), (exact[0], *exact[2:]))


def test_lse_of_rows_without_keys_is_infinity(patched_device: str) -> None:
    """The LSE of rows without keys is inf, as in stock."""
    q, k, v = (x.detach() for x in make_packed_batch(patched_device))
    cu_q, cu_k = make_cu_seqlens((100, 104), patched_device), make_cu_seqlens((90, 132), patched_device)
    out, lse, *_ = aten._flash_attention_forward(q, k, v, cu_q, cu_k, 104, 132, 0.0, True, False)
    assert bool((lse[:, :10] == math.inf).all()) and int(lse.isinf().sum()) == 20 and not out[:10].any()


@pytest.mark.parametrize("backend", ["auto", "fa3"])
@pytest.mark.parametrize(("Sq", "window"), [(96, (None, None)), (160, (None, None)), (130, (30, 0)), (130, (9, 20))])
def test_windows_of_a_dense_batch(
    patched_device: str, Sq: int, window: tuple[int | None, int | None], backend: str
) -> None:
    """Check operands (B, S, H, D) with grouped heads; without a window, causal masking is bottom-right."""
    leaves = random_leaves(patched_device, (2, Sq, 4, 64), (2, 130, 2, 64), (2, 130, 2, 64))
    bindings.counters(reset=True)
    causal = window == (None, None)
    left, of_right = window
    with sdpa_backend(backend):
        out, lse, *_ = aten._flash_attention_forward(
            *leaves, None, None, Sq, 130, 0.0, causal, False, window_size_left=left, window_size_right=of_right
        )
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, leaves, do)
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1 and out.is_contiguous() and lse.shape == (2, 4, Sq)
    exact = attend_in_fp32(leaves, do, causal=causal, window=window)
    torch.testing.assert_close(lse, exact[1].masked_fill(exact[1] == -math.inf, math.inf), rtol=1e-4, atol=1e-4)
    assert_near((out.detach(), *grads), (exact[0], *exact[2:]))


@pytest.mark.skipif(not INPLACE_OP, reason="this torch has no such op")
def test_inplace_op_writes_the_output_tensor(patched_device: str) -> None:
    q, k, v = (x.detach() for x in make_packed_batch(patched_device))
    cu_q, cu_k = (make_cu_seqlens(x, patched_device) for x in (ROWS, KEYS))
    expected, lse, *_ = aten._flash_attention_forward(q, k, v, cu_q, cu_k, 130, 140, 0.0, True, False)
    bindings.counters(reset=True)
    for out in (torch.full_like(q, math.nan), torch.full((2, len(q), 64), math.nan).to(q).transpose(0, 1)):
        returned_lse = aten._flash_attention_forward_no_dropout_inplace(
            out, q, k, v, cu_q, cu_k, 130, 140, 0.0, True, False
        )
        assert torch.equal(out, expected) and torch.equal(returned_lse, lse)
    assert bindings.counters(reset=True)["ours_fwd"] == 2


def make_jagged(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    cu = make_cu_seqlens(lengths, x.device.type).long()
    return torch.nested.nested_tensor_from_jagged(x, cu, min_seqlen=min(lengths), max_seqlen=max(lengths))


def attend_jagged(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[tuple[int, ...], ...], **settings: bool) -> Tensor:
    jagged = (
        make_jagged(x, sequence_lengths).transpose(1, 2) for x, sequence_lengths in zip((q, k, v), lengths, strict=True)
    )
    return F.scaled_dot_product_attention(*jagged, **settings).transpose(1, 2).values()


@pytest.mark.parametrize("causal", [False, True])
def test_jagged_tensors_run_on_kernels(flash_device: str, causal: bool) -> None:
    leaves = random_leaves(flash_device, *[(sum(ROWS), 2, 64)] * 3)
    bindings.counters(reset=True)
    out = attend_jagged(*leaves, (ROWS,) * 3, is_causal=causal)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, leaves, do)
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1
    cu = make_cu_seqlens(ROWS, flash_device)
    exact = attend_in_fp32(leaves, do, causal=causal, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert_near((out.detach(), *grads), (exact[0], *exact[2:]))


def test_jagged_tensors_with_separate_key_lengths(flash_device: str) -> None:
    leaves = make_packed_batch(flash_device)
    bindings.counters(reset=True)
    out = attend_jagged(*leaves, (ROWS, KEYS, KEYS))
    do = torch.ones_like(out)
    grads = torch.autograd.grad(out, leaves, do)
    assert bindings.counters(reset=True)["ours_fwd"] == 1
    exact = attend_in_fp32(
        leaves, do, cu_seqlens_q=make_cu_seqlens(ROWS, flash_device), cu_seqlens_k=make_cu_seqlens(KEYS, flash_device)
    )
    assert_near((out.detach(), *grads), (exact[0], *exact[2:]))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_jagged_call_equals_eager_call(flash_device: str) -> None:
    leaves = random_leaves(flash_device, *[(sum(ROWS), 2, 64)] * 3)
    jagged = [make_jagged(x, ROWS) for x in leaves]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

    eager = attend(*jagged).values()
    exact = torch.autograd.grad(eager.float().square().sum(), leaves)
    bindings.counters(reset=True)
    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(*(make_jagged(x, ROWS) for x in leaves)).values()
    grads = torch.autograd.grad(out.float().square().sum(), leaves)
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1 and torch.equal(out, eager)
    assert_near(grads, tuple(x.float() for x in exact))


@CUDA
@pytest.mark.parametrize("Sq", [96, 160])
def test_lower_right_masks_run_on_kernels(Sq: int) -> None:
    """Check the masks of torch.nn.attention.bias, unmodified."""
    leaves = random_leaves("cuda", (2, 2, Sq, 64), (2, 2, 130, 64), (2, 2, 130, 64))
    bindings.counters(reset=True)
    out = F.scaled_dot_product_attention(*leaves, bias.causal_lower_right(Sq, 130))
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, leaves, do)
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1
    turned = [x.detach().transpose(1, 2) for x in leaves]
    exact = attend_in_fp32(turned, do.transpose(1, 2), causal="bottom_right")
    assert_near((out.detach(), *grads), tuple(x.transpose(1, 2) for x in (exact[0], *exact[2:])))


@CUDA
def test_strided_nested_tensors() -> None:
    """Strided nested tensors use a separate kernel of torch, which calls flash attention."""
    leaves, cu = random_leaves("cuda", *[(sum(ROWS), 2, 64)] * 3), make_cu_seqlens(ROWS, "cuda")
    nested_tensors = [torch.nested.nested_tensor(list(x.detach().split(ROWS))).transpose(1, 2) for x in leaves]
    bindings.counters(reset=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.no_grad():
        out = F.scaled_dot_product_attention(*nested_tensors, is_causal=True)
    assert bindings.counters(reset=True)["ours_fwd"] == 1
    actual = torch.cat([x.transpose(0, 1) for x in out.unbind()])
    assert_near((actual,), attend_in_fp32(leaves, actual, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)[:1])


@CUDA
def test_copied_saved_tensors_use_the_backward_of_stock() -> None:
    """Copy saved tensors, so that the mark of our forward is lost.

    The backward of stock then reads the output and LSE of our kernel.
    """
    leaves, cu = random_leaves("cuda", *[(sum(ROWS), 2, 64)] * 3), make_cu_seqlens(ROWS, "cuda")
    bindings.counters(reset=True)
    with torch.autograd.graph.save_on_cpu():
        out = aten._flash_attention_forward(*leaves, cu, cu, 130, 130, 0.0, True, False)[0]
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == 1 and counts["ours_bwd"] == 0
    exact = attend_in_fp32(leaves, torch.ones_like(out), causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert_near((out.detach(), *grads), (exact[0], *exact[2:]))


@CUDA
def test_dense_flash_call_equals_stock_bit_for_bit() -> None:
    q, k, v = random_leaves("cuda", *[(2, 2, 130, 64)] * 3)
    do = torch.ones_like(q)

    def run() -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), sdpa_backend("stock"):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out, *torch.autograd.grad(out, (q, k, v), do)

    over = run()
    torch_flashplug.disable()
    try:
        assert all(map(torch.equal, over, run()))
    finally:
        torch_flashplug.enable()


@CUDA
def test_disabled_plugin_equals_stock_bit_for_bit() -> None:
    leaves, cu = random_leaves("cuda", *[(sum(ROWS), 2, 64)] * 3), make_cu_seqlens(ROWS, "cuda")

    def run() -> Tensor:
        return aten._flash_attention_forward(*leaves, cu, cu, 130, 130, 0.0, True, False)[0]

    with sdpa_backend("stock"):
        through = run()
    bindings.counters(reset=True)
    torch_flashplug.disable()
    try:
        assert torch.equal(run(), through) and not bindings.counters(reset=True)["ours_fwd"]
    finally:
        torch_flashplug.enable()
    run()
    assert bindings.counters(reset=True)["ours_fwd"] == 1


# ---- calls served by stock ----


def test_schemas_of_flash_ops_are_known_to_cpp() -> None:
    """Check that C++ knows the schemas of this torch.

    Otherwise the plugin registers no flash attention op.
    """
    for name in flash_attention_op._OPS:
        packet = getattr(aten, name, None)
        assert packet is None or bindings.set_flash_schema(str(packet.default._schema))
    assert not bindings.set_flash_schema(str(aten._flash_attention_forward.default._schema).replace("max_q", "most_q"))


@pytest.mark.skipif(
    torch.version.cuda is not None or not INPLACE_OP, reason="stock's own library, or an older form of it"
)
def test_unsupported_calls_run_stock(tmp_path: Path) -> None:
    """Run in a process that loads the library of stock at start-up."""
    library, helpers = tmp_path / "libtorch_cuda.so", Path(__file__).parents[1] / "helpers"
    options = ("-UTORCH_TARGET_VERSION", "-O1", "-shared", "-fPIC", "-Wl,-soname,libtorch_cuda.so", "-o", str(library))
    assert compile_cpp.compiles((helpers / "stub_libtorch_cuda.cpp").read_text(), *options, "-lc10")
    paths = os.pathsep.join(map(str, (helpers.parents[1], helpers)))
    command, environment = [sys.executable, str(helpers / "flash_op_over_stock.py"), str(library)], os.environ
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and done.stdout.split()[-1] == "right", done.stderr[-4000:]


# ---- the registry ----


@pytest.mark.parametrize("first", ["activated", "disabled"])
def test_registry_of_torch_activates_and_restores_flashplug(first: str) -> None:
    """Activate, restore, enable and disable in any order.

    At the end, the name is neither active nor lost: the plugin is enabled again.
    """
    names = torch.nn.attention
    assert "FLASHPLUG" in names.list_flash_attention_impls()
    steps = [lambda: names.activate_flash_attention_impl("FLASHPLUG"), torch_flashplug.disable]
    for step in steps if first == "activated" else reversed(steps):
        step()
    assert names.current_flash_attention_impl() == "FLASHPLUG" and not bindings.enabled()
    names.restore_flash_attention_impl()
    torch_flashplug.enable()
    assert names.current_flash_attention_impl() is None and bindings.enabled()


def test_active_flash_implementation_is_kept(patched_device: str) -> None:
    """Keep an implementation that is active at installation.

    An activation of FLASHPLUG by name replaces the implementation.
    """

    class Other:
        def remove(self) -> None:
            pass

    names = torch.nn.attention
    flash_attention_op.uninstall()
    names.register_flash_attention_impl("OTHER", register_fn=Other)
    names.activate_flash_attention_impl("OTHER")
    try:
        flash_attention_op.install(patched_device.upper())
        assert has_kernel(FORWARD, patched_device.upper()) == (patched_device == "cuda")  # the kernel of stock
        if patched_device == "cpu":
            names.activate_flash_attention_impl("FLASHPLUG")
            flash_attention_op.install("CPU")
            assert has_kernel(FORWARD, "CPU")
    finally:
        names.restore_flash_attention_impl()
        names._registry._FLASH_ATTENTION_IMPLS.pop("OTHER")
