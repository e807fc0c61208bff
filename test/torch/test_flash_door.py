"""torch's flash attention ops with kernels of ours over stock's: sequences on end, nested tensors, windows and masks to
the lower right; and stock where they are not, in its own backward, too.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cpp
import on_cpu
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
INTO = hasattr(aten, "_flash_attention_forward_no_dropout_inplace")


@pytest.fixture
def door(kernels_on: str) -> Iterator[str]:
    with on_cpu.installed_at(flash_attention_op, kernels_on):
        yield kernels_on


@pytest.fixture
def chosen(door: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Jagged tensors ask torch's choice in Python, which is flash on a GPU."""
    if door == "cpu":
        from torch.nested._internal import sdpa

        monkeypatch.setattr(sdpa, "_select_sdp_backend", lambda *_, **__: SDPBackend.FLASH_ATTENTION)
    return door


def starts(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def drawn(device: str, *sizes: tuple[int, ...]) -> list[Tensor]:
    draws = (torch.Generator().manual_seed(SEED + i) for i in range(len(sizes)))
    made = (torch.randn(size, generator=draw) for size, draw in zip(sizes, draws, strict=True))
    return [x.to(device, torch.bfloat16).requires_grad_() for x in made]


def on_end(device: str, heads: int = 2) -> list[Tensor]:
    return drawn(device, (sum(ROWS), 2, 64), (sum(KEYS), heads, 64), (sum(KEYS), heads, 64))


def right(leaves: list[Tensor], do: Tensor, **settings: object) -> tuple[Tensor, ...]:
    """Output, LSE and gradients in fp32, of attention()'s mathematics."""
    wide = [x.detach().float().requires_grad_() for x in leaves]
    with sdpa_backend("math"):
        out, lse = attention(*wide, **settings, return_lse=True)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, wide, do.float())


def assert_right(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    for got, one in zip(found, exact, strict=True):
        assert got.shape == one.shape and float((got.float() - one).norm() / one.norm()) < 1e-2


# ---- ours ----


@pytest.mark.parametrize("backend", ["auto", "fa3"])
@pytest.mark.parametrize(("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (False, (20, 9))], ids=str)
def test_sequences_on_end(door: str, causal: bool, window: tuple[int, int], backend: str) -> None:
    leaves, (cu_q, cu_k) = on_end(door), (starts(x, door) for x in (ROWS, KEYS))
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
    exact = right(leaves, do, causal=causal, window=window, scale=0.2, **lengths)
    torch.testing.assert_close(lse, exact[1], rtol=1e-4, atol=1e-4)
    assert_right((out.detach(), *grads), (exact[0], *exact[2:]))


def test_rows_without_keys(door: str) -> None:
    """LSE inf, as stock's."""
    q, k, v = (x.detach() for x in on_end(door))
    cu_q, cu_k = starts((100, 104), door), starts((90, 132), door)
    out, lse, *_ = aten._flash_attention_forward(q, k, v, cu_q, cu_k, 104, 132, 0.0, True, False)
    assert bool((lse[:, :10] == math.inf).all()) and int(lse.isinf().sum()) == 20 and not out[:10].any()


@pytest.mark.parametrize("backend", ["auto", "fa3"])
@pytest.mark.parametrize(("Sq", "window"), [(96, (None, None)), (160, (None, None)), (130, (30, 0)), (130, (9, 20))])
def test_windows_of_a_batch(door: str, Sq: int, window: tuple[int | None, int | None], backend: str) -> None:
    """(B, S, H, D), causal to the lower right where no window is said; grouped heads."""
    leaves = drawn(door, (2, Sq, 4, 64), (2, 130, 2, 64), (2, 130, 2, 64))
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
    exact = right(leaves, do, causal=causal, window=window)
    torch.testing.assert_close(lse, exact[1].masked_fill(exact[1] == -math.inf, math.inf), rtol=1e-4, atol=1e-4)
    assert_right((out.detach(), *grads), (exact[0], *exact[2:]))


@pytest.mark.skipif(not INTO, reason="this torch has no such op")
def test_into_a_tensor(door: str) -> None:
    q, k, v = (x.detach() for x in on_end(door))
    cu_q, cu_k = (starts(x, door) for x in (ROWS, KEYS))
    wanted, lse, *_ = aten._flash_attention_forward(q, k, v, cu_q, cu_k, 130, 140, 0.0, True, False)
    bindings.counters(reset=True)
    for out in (torch.full_like(q, math.nan), torch.full((2, len(q), 64), math.nan).to(q).transpose(0, 1)):
        found = aten._flash_attention_forward_no_dropout_inplace(out, q, k, v, cu_q, cu_k, 130, 140, 0.0, True, False)
        assert torch.equal(out, wanted) and torch.equal(found, lse)
    assert bindings.counters(reset=True)["ours_fwd"] == 2


def nested(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    cu = starts(lengths, x.device.type).long()
    return torch.nested.nested_tensor_from_jagged(x, cu, min_seqlen=min(lengths), max_seqlen=max(lengths))


def attend_jagged(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[tuple[int, ...], ...], **settings: bool) -> Tensor:
    jagged = (nested(x, of).transpose(1, 2) for x, of in zip((q, k, v), lengths, strict=True))
    return F.scaled_dot_product_attention(*jagged, **settings).transpose(1, 2).values()


@pytest.mark.parametrize("causal", [False, True])
def test_jagged_tensors(chosen: str, causal: bool) -> None:
    leaves = drawn(chosen, *[(sum(ROWS), 2, 64)] * 3)
    bindings.counters(reset=True)
    out = attend_jagged(*leaves, (ROWS,) * 3, is_causal=causal)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, leaves, do)
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1
    cu = starts(ROWS, chosen)
    exact = right(leaves, do, causal=causal, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert_right((out.detach(), *grads), (exact[0], *exact[2:]))


def test_jagged_tensors_of_other_lengths(chosen: str) -> None:
    leaves = on_end(chosen)
    bindings.counters(reset=True)
    out = attend_jagged(*leaves, (ROWS, KEYS, KEYS))
    do = torch.ones_like(out)
    grads = torch.autograd.grad(out, leaves, do)
    assert bindings.counters(reset=True)["ours_fwd"] == 1
    exact = right(leaves, do, cu_seqlens_q=starts(ROWS, chosen), cu_seqlens_k=starts(KEYS, chosen))
    assert_right((out.detach(), *grads), (exact[0], *exact[2:]))


@pytest.mark.usefixtures("fresh_dynamo")
def test_jagged_tensors_compiled(chosen: str) -> None:
    leaves = drawn(chosen, *[(sum(ROWS), 2, 64)] * 3)
    jagged = [nested(x, ROWS) for x in leaves]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

    eager = attend(*jagged).values()
    exact = torch.autograd.grad(eager.float().square().sum(), leaves)
    bindings.counters(reset=True)
    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(*(nested(x, ROWS) for x in leaves)).values()
    found = torch.autograd.grad(out.float().square().sum(), leaves)
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1 and torch.equal(out, eager)
    assert_right(found, tuple(x.float() for x in exact))


@CUDA
@pytest.mark.parametrize("Sq", [96, 160])
def test_lower_right_masks(Sq: int) -> None:
    """torch.nn.attention.bias, unmodified."""
    leaves = drawn("cuda", (2, 2, Sq, 64), (2, 2, 130, 64), (2, 2, 130, 64))
    bindings.counters(reset=True)
    out = F.scaled_dot_product_attention(*leaves, bias.causal_lower_right(Sq, 130))
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, leaves, do)
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1
    turned = [x.detach().transpose(1, 2) for x in leaves]
    exact = right(turned, do.transpose(1, 2), causal="bottom_right")
    assert_right((out.detach(), *grads), tuple(x.transpose(1, 2) for x in (exact[0], *exact[2:])))


@CUDA
def test_strided_nested_tensors() -> None:
    """Theirs is a kernel of its own, which asks flash attention."""
    leaves, cu = drawn("cuda", *[(sum(ROWS), 2, 64)] * 3), starts(ROWS, "cuda")
    given = [torch.nested.nested_tensor(list(x.detach().split(ROWS))).transpose(1, 2) for x in leaves]
    bindings.counters(reset=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.no_grad():
        out = F.scaled_dot_product_attention(*given, is_causal=True)
    assert bindings.counters(reset=True)["ours_fwd"] == 1
    found = torch.cat([x.transpose(0, 1) for x in out.unbind()])
    assert_right((found,), right(leaves, found, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)[:1])


@CUDA
def test_what_autograd_kept_on_the_cpu_is_stocks_to_differentiate() -> None:
    """The mark of our forward is lost with the copy: stock's backward reads our output and LSE."""
    leaves, cu = drawn("cuda", *[(sum(ROWS), 2, 64)] * 3), starts(ROWS, "cuda")
    bindings.counters(reset=True)
    with torch.autograd.graph.save_on_cpu():
        out = aten._flash_attention_forward(*leaves, cu, cu, 130, 130, 0.0, True, False)[0]
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == 1 and counts["ours_bwd"] == 0
    exact = right(leaves, torch.ones_like(out), causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert_right((out.detach(), *grads), (exact[0], *exact[2:]))


@CUDA
def test_plain_dense_flash_is_stocks_bit_for_bit() -> None:
    q, k, v = drawn("cuda", *[(2, 2, 130, 64)] * 3)
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
def test_disabled_is_stock_bit_for_bit() -> None:
    leaves, cu = drawn("cuda", *[(sum(ROWS), 2, 64)] * 3), starts(ROWS, "cuda")

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


# ---- stock's ----


def test_schemas_are_known() -> None:
    """Or the door stays closed in this torch."""
    for name in flash_attention_op._OPS:
        packet = getattr(aten, name, None)
        assert packet is None or bindings.know_flash(str(packet.default._schema))
    assert not bindings.know_flash(str(aten._flash_attention_forward.default._schema).replace("max_q", "most_q"))


@pytest.mark.skipif(torch.version.cuda is not None or not INTO, reason="stock's own library, or an older form of it")
def test_what_is_not_ours_is_stocks(tmp_path: Path) -> None:
    """In a process that has stock's library from its start."""
    library, here = tmp_path / "libtorch_cuda.so", Path(__file__).parents[1]
    options = ("-UTORCH_TARGET_VERSION", "-O1", "-shared", "-fPIC", "-Wl,-soname,libtorch_cuda.so", "-o", str(library))
    assert cpp.compiles((here / "stock_flash.cpp").read_text(), *options, "-lc10")
    paths = os.pathsep.join(map(str, (here.parent, here)))
    command, environment = [sys.executable, str(here / "over_stock_flash.py"), str(library)], os.environ
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and done.stdout.split()[-1] == "right", done.stderr[-4000:]


# ---- the registry ----


@pytest.mark.parametrize("first", ["activated", "disabled"])
def test_a_name_in_torchs_registry(first: str) -> None:
    """Activated, restored, enabled and disabled in any order, it is gone in the end, and back."""
    names = torch.nn.attention
    assert "FLASHPLUG" in names.list_flash_attention_impls()
    steps = [lambda: names.activate_flash_attention_impl("FLASHPLUG"), torch_flashplug.disable]
    for step in steps if first == "activated" else reversed(steps):
        step()
    assert names.current_flash_attention_impl() == "FLASHPLUG" and not bindings.enabled()
    names.restore_flash_attention_impl()
    torch_flashplug.enable()
    assert names.current_flash_attention_impl() is None and bindings.enabled()


def test_another_implementation_keeps_its_place(door: str) -> None:
    """One that is active when we come; activated by name, ours takes it."""

    class Other:
        def remove(self) -> None:
            pass

    names = torch.nn.attention
    flash_attention_op.uninstall()
    names.register_flash_attention_impl("OTHER", register_fn=Other)
    names.activate_flash_attention_impl("OTHER")
    try:
        flash_attention_op.install(door.upper())
        assert has_kernel(FORWARD, door.upper()) == (door == "cuda")  # stock's
        if door == "cpu":
            names.activate_flash_attention_impl("FLASHPLUG")
            flash_attention_op.install("CPU")
            assert has_kernel(FORWARD, "CPU")
    finally:
        names.restore_flash_attention_impl()
        names._registry._FLASH_ATTENTION_IMPLS.pop("OTHER")
