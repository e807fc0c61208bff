"""torch.nn.attention.varlen on our kernels, forced and in auto.

The tests cover numbers, gradients and graphs, and the implementation of stock for all remaining calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import interpreted_kernels
import pytest
import stock_varlen_stubs
import torch
from torch import Tensor
from torch.nn.attention import varlen

import torch_flashplug
from torch_flashplug import attention
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings, packs
from torch_flashplug.torch_hooks import varlen_attn as varlen_attn_hook

SEED = 20261125
ROWS, KEYS = (70, 0, 130, 3), (70, 9, 140, 3)
VARLEN_KWARGS = varlen.varlen_attn.__kwdefaults__  # torch 2.11 has fewer arguments than later versions
GROUPED = {"enable_gqa": True} if "enable_gqa" in VARLEN_KWARGS else {}
SINCE_2_13 = pytest.mark.skipif(
    "seqused_k" not in VARLEN_KWARGS, reason="torch's varlen_attn has no such argument here"
)


@pytest.fixture
def patched_device(kernels_on: str) -> Iterator[str]:
    with interpreted_kernels.installed_at(varlen_attn_hook, kernels_on):
        yield kernels_on


@pytest.fixture
def stock_on_cpu() -> Iterator[list[str]]:
    """Record the calls made by the implementation of stock, and compute nothing."""
    with stock_varlen_stubs.registered_on_cpu() as stock_calls:
        yield stock_calls


def make_cu_seqlens(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def make_operands(
    device: str, *, heads: tuple[int, int] = (4, 2), D: int = 64, dtype=torch.bfloat16, rows: tuple[int, ...] = ROWS
) -> list[Tensor]:
    sizes = ((sum(rows), heads[0]), (sum(KEYS), heads[1]), (sum(KEYS), heads[1]))
    draws = (torch.Generator().manual_seed(SEED + i) for i in range(3))
    return [torch.randn(*size, D, generator=draw).to(device, dtype) for size, draw in zip(sizes, draws)]


def make_lengths(device: str) -> tuple[Tensor, Tensor, int, int]:
    return make_cu_seqlens(ROWS, device), make_cu_seqlens(KEYS, device), max(ROWS), max(KEYS)


@pytest.mark.parametrize("backend", ["fa3", "auto"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 0), (5, 9)], ids=str)
def test_varlen_attn_runs_on_kernels(patched_device: str, window: tuple[int, int], backend: str) -> None:
    leaves = [x.requires_grad_() for x in make_operands(patched_device)]
    cu_q, cu_k, *_ = lengths = make_lengths(patched_device)
    settings = {"window_size": window, "scale": 0.2, **GROUPED}
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(backend):
        out, lse = varlen.varlen_attn(*leaves, *lengths, **settings, return_aux=varlen.AuxRequest(lse=True))
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, leaves, do)
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1 and out.is_contiguous() and lse.shape == (4, sum(ROWS))
    with torch_flashplug.sdpa_backend("math"):
        wide = [x.detach().float().requires_grad_() for x in leaves]
        expected_out, expected_lse = attention(
            *wide, window=window, scale=0.2, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True
        )
        exact = torch.autograd.grad(expected_out, wide, do.float())
    torch.testing.assert_close(lse, expected_lse.masked_fill(expected_lse == -math.inf, math.inf), rtol=1e-4, atol=1e-4)
    for actual, expected in zip((out.detach(), *grads), (expected_out.detach(), *exact), strict=True):
        assert float((actual - expected).norm() / expected.norm()) < 1e-2


@SINCE_2_13
def test_one_split_is_batch_invariant(patched_device: str) -> None:
    """Compare a sequence alone and in a batch, as torch promises for the forward with num_splits=1."""
    q, k, v = make_operands(patched_device)
    settings = {"num_splits": 1, "window_size": (-1, 0), **GROUPED}
    with torch.no_grad(), torch_flashplug.sdpa_backend("fa3"):
        bindings.counters(reset=True)
        batch_out = varlen.varlen_attn(q, k, v, *make_lengths(patched_device), **settings)
        rows, keys = slice(70, 200), slice(79, 219)
        cu = [make_cu_seqlens((n,), patched_device) for n in (130, 140)]
        alone = varlen.varlen_attn(q[rows], k[keys], v[keys], *cu, 130, 140, **settings)
    assert bindings.counters(reset=True)["ours_fwd"] == 2 and torch.equal(alone, batch_out[rows])


@SINCE_2_13
def test_seqused_k_equals_sliced_keys(patched_device: str) -> None:
    """Fill keys beyond the KV length of each sequence with NaN."""
    q, k, v = make_operands(patched_device)
    used = torch.tensor([50, 0, 140, 2], dtype=torch.int32, device=patched_device)
    used_indices = torch.cat([torch.arange(a, a + n) for a, n in zip((0, 70, 79, 219), used.tolist(), strict=True)]).to(
        patched_device
    )
    with torch.no_grad(), torch_flashplug.sdpa_backend("fa3"):
        cu = make_cu_seqlens(tuple(used.tolist()), patched_device)
        expected = varlen.varlen_attn(
            q,
            k[used_indices],
            v[used_indices],
            make_cu_seqlens(ROWS, patched_device),
            cu,
            max(ROWS),
            140,
            **GROUPED,
            window_size=(-1, 0),
        )
        is_unused = torch.ones(len(k), dtype=torch.bool, device=patched_device).index_fill_(0, used_indices, False)
        k[is_unused] = v[is_unused] = math.nan
        settings = {"window_size": (-1, 0), "seqused_k": used, **GROUPED}
        assert torch.equal(varlen.varlen_attn(q, k, v, *make_lengths(patched_device), **settings), expected)


@SINCE_2_13
def test_varlen_attn_out_equals_varlen_attn(patched_device: str) -> None:
    q, k, v = make_operands(patched_device)
    out = torch.full_like(q, math.nan)
    with torch.no_grad(), torch_flashplug.sdpa_backend("fa3"):
        varlen.varlen_attn_out(out, q, k, v, *make_lengths(patched_device), **GROUPED, window_size=(-1, 0))
        expected = varlen.varlen_attn(q, k, v, *make_lengths(patched_device), **GROUPED, window_size=(-1, 0))
    assert torch.equal(out, expected)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_varlen_attn_equals_eager_mode(patched_device: str) -> None:
    leaves = [x.requires_grad_() for x in make_operands(patched_device)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen.varlen_attn(q, k, v, *make_lengths(patched_device), window_size=(-1, 0), **GROUPED)

    with torch_flashplug.sdpa_backend("fa3"):
        expected_out = call(*leaves)
        exact = torch.autograd.grad(expected_out.float().sum(), leaves)
        bindings.counters(reset=True)
        out = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
        grads = torch.autograd.grad(out.float().sum(), leaves)
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1 and torch.equal(out, expected_out)
    for actual, expected in zip(grads, exact, strict=True):
        assert float((actual - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("backend", ["auto", "stock", "math"])
def test_unforced_calls_run_stock(stock_on_cpu: list[str], backend: str) -> None:
    """Auto also uses stock on a device without measurements."""
    varlen_attn_hook.install("CPU")
    q = torch.randn(9, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    cu = make_cu_seqlens((4, 5), "cpu")
    with torch_flashplug.sdpa_backend(backend):
        varlen.varlen_attn(q, q, q, cu, cu, 5, 5).sum().backward()
    assert stock_on_cpu == ["forward", "backward"]


def test_disable_leaves_no_trace(stock_on_cpu: list[str]) -> None:
    varlen_attn_hook.install("CPU")
    ops = [f"torch_attn::{name}" for name in ("_varlen_attn", "_varlen_attn_backward")]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert all(has_kernel(op, "CPU") and has_kernel(op, "CUDA") for op in ops)
    torch_flashplug.disable()
    try:
        assert not any(has_kernel(op, key) for op in ops for key in ("CPU", "CUDA"))
        q = torch.randn(9, 2, 64, dtype=torch.bfloat16)
        varlen.varlen_attn(q, q, q, *(make_cu_seqlens((4, 5), "cpu"),) * 2, 5, 5)
        assert stock_on_cpu == ["forward"]
    finally:
        torch_flashplug.enable()
    assert has_kernel(ops[0], "CUDA")


def test_forced_kernels_refuse_unsupported_calls(patched_device: str) -> None:
    q, k, v = make_operands(patched_device)
    used, table = (
        torch.ones(4, dtype=torch.int32, device=patched_device),
        torch.zeros(4, 1, dtype=torch.int32, device=patched_device),
    )
    calls_since_2_13 = (
        ("block_table, but no seqused_k", (q, k[None], v[None]), {"block_table": table}),
        ("no cu_seq_k", (q, k, v), {"cu_seq_k": None, "seqused_k": used}),
        ("num_splits=256", (q, k, v), {"num_splits": 256}),
    )
    with torch_flashplug.sdpa_backend("fa3"), torch.no_grad():
        for message, tensors, settings in (
            *(calls_since_2_13 if "seqused_k" in VARLEN_KWARGS else ()),
            ("torch.float32", (q.float(), k.float(), v.float()), {}),
            (r"head dims \[60\]", (q[..., :60], k[..., :60], v[..., :60]), {}),
        ):
            lengths = dict(zip(("cu_seq_q", "cu_seq_k", "max_q", "max_k"), make_lengths(patched_device), strict=True))
            with pytest.raises(RuntimeError, match=f"varlen_attn: the forced kernels do not support .*{message}"):
                varlen.varlen_attn(*tensors, **(lengths | GROUPED | settings))


def test_preferred_family_leaves_unsupported_calls_to_stock(stock_on_cpu: list[str]) -> None:
    varlen_attn_hook.install("CPU")
    bindings.set_process_backend(torch_flashplug.sdpa_backend("fa3").mode)
    try:
        q = torch.randn(9, 2, 60)
        varlen.varlen_attn(q, q, q, *(make_cu_seqlens((4, 5), "cpu"),) * 2, 5, 5)
    finally:
        bindings.set_process_backend(0)
    assert stock_on_cpu == ["forward"]


def test_auto_falls_back_to_stock_without_a_kernel(
    patched_device: str, stock_on_cpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remove the kernel packs.

    The fallback must not be reference math, which needs memory for all scores.
    """
    monkeypatch.setenv("TORCH_FLASHPLUG_JIT", "0")
    bindings.clear_packs()
    bindings.counters(reset=True)
    try:
        startup.push_tables()  # kernels are searched again
        varlen.varlen_attn(*make_operands(patched_device), *make_lengths(patched_device), **GROUPED)
    finally:
        packs.register()
        startup.push_tables()
    assert not any(bindings.counters(reset=True).values()) and bindings.mode() == 0
    assert stock_on_cpu == ["forward"] * (patched_device == "cpu")


@pytest.mark.parametrize(("rows", "keys"), [(0, 9), (9, 0)])
def test_empty_rows_and_empty_keys(patched_device: str, rows: int, keys: int) -> None:
    """Force a backend with zero rows or zero keys."""
    leaves = [
        torch.ones(n, 2, 64, dtype=torch.bfloat16, device=patched_device, requires_grad=True)
        for n in (rows, keys, keys)
    ]
    with torch_flashplug.sdpa_backend("fa3"):
        out = varlen.varlen_attn(
            *leaves, make_cu_seqlens((rows,), patched_device), make_cu_seqlens((keys,), patched_device), rows, keys
        )
        grads = torch.autograd.grad(out.sum(), leaves)
    assert out.shape == (rows, 2, 64) and not any(bool(x.any()) for x in (out, *grads))


def test_lse_of_rows_without_keys(patched_device: str) -> None:
    """Check that the LSE is inf if a causal call has more rows than keys.

    The backward of stock accepts inf, in case our backward has no kernel.
    """
    q, k, v = make_operands(patched_device)
    cu_q, cu_k = make_cu_seqlens((70, 0, 130, 3), patched_device), make_cu_seqlens((7, 76, 120, 19), patched_device)
    aux = varlen.AuxRequest(lse=True)
    with torch.no_grad(), torch_flashplug.sdpa_backend("fa3"):
        out, lse = varlen.varlen_attn(q, k, v, cu_q, cu_k, 130, 120, window_size=(-1, 0), return_aux=aux, **GROUPED)
    blind = [*range(63), *range(70, 80)]
    assert bool((lse[:, blind] == math.inf).all()) and not out[blind].any()
    assert int(lse.isinf().sum()) == 4 * len(blind)


@pytest.mark.parametrize("backend", ["auto", "fa3", "stock"])
def test_errors_of_stock_keep_their_type_and_text(patched_device: str, backend: str) -> None:
    with torch_flashplug.sdpa_backend(backend), pytest.raises(ValueError, match="size must have length 2, got 3$"):
        varlen.varlen_attn(
            *make_operands(patched_device), *make_lengths(patched_device), **GROUPED, window_size=(1, 2, 3)
        )


def test_outputs_and_gradients_have_the_layout_of_the_fakes(patched_device: str) -> None:
    """Use projections in one tensor: output and gradients have the layout of the fakes of torch."""
    packed = torch.stack(make_operands(patched_device, heads=(2, 2), rows=KEYS), 1).requires_grad_()
    cu = make_cu_seqlens(KEYS, patched_device)
    with torch_flashplug.sdpa_backend("fa3"):
        out = varlen.varlen_attn(*packed.unbind(1), cu, cu, 140, 140, window_size=(-1, 0))
        separate = varlen.varlen_attn(
            *(x.contiguous() for x in packed.unbind(1)), cu, cu, 140, 140, window_size=(-1, 0)
        )
    assert out.is_contiguous() and torch.equal(out, separate)
    (grad,) = torch.autograd.grad(out.float().square().sum(), packed)
    assert grad.shape == packed.shape and bool(grad.isfinite().all()) and bool(grad.any())


def test_dropout_state_passes_the_assertions_of_graphs(patched_device: str) -> None:
    """Inductor asserts the alignment and size of the dropout state for an unknown op."""
    q, k, v = make_operands(patched_device)
    with torch.no_grad(), torch_flashplug.sdpa_backend("fa3"):
        _, lse, dropout_state = torch.ops.torch_attn._varlen_attn(q, k, v, *make_lengths(patched_device))
    assert dropout_state.shape == (2,) and dropout_state.dtype == torch.uint64 and dropout_state.data_ptr() % 16 == 0
    assert lse.is_contiguous()
