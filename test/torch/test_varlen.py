"""torch.nn.attention.varlen on kernels of ours, asked for and in auto: numbers, gradients, graphs; and stock's own
body where they are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import on_cpu
import pytest
import stock_varlen
import torch
from torch import Tensor
from torch.nn.attention import varlen

import torch_flashplug
from torch_flashplug import attention
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings, packs
from torch_flashplug.torch_hooks import varlen_attn as varlen_hooks

SEED = 20261125
ROWS, KEYS = (70, 0, 130, 3), (70, 9, 140, 3)
TAKES = varlen.varlen_attn.__kwdefaults__  # torch 2.11's fewer than later ones'
GROUPED = {"enable_gqa": True} if "enable_gqa" in TAKES else {}
SINCE_2_13 = pytest.mark.skipif("seqused_k" not in TAKES, reason="torch's varlen_attn has no such argument here")


@pytest.fixture
def door(kernels_on: str) -> Iterator[str]:
    with on_cpu.installed_at(varlen_hooks, kernels_on):
        yield kernels_on


@pytest.fixture
def stock_on_cpu() -> Iterator[list[str]]:
    """What stock's body calls: says when, and computes nothing."""
    with stock_varlen.on_cpu() as asked:
        yield asked


def starts(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def operands(
    device: str, *, heads: tuple[int, int] = (4, 2), D: int = 64, dtype=torch.bfloat16, rows: tuple[int, ...] = ROWS
) -> list[Tensor]:
    sizes = ((sum(rows), heads[0]), (sum(KEYS), heads[1]), (sum(KEYS), heads[1]))
    draws = (torch.Generator().manual_seed(SEED + i) for i in range(3))
    return [torch.randn(*size, D, generator=draw).to(device, dtype) for size, draw in zip(sizes, draws)]


def given(device: str) -> tuple[Tensor, Tensor, int, int]:
    return starts(ROWS, device), starts(KEYS, device), max(ROWS), max(KEYS)


@pytest.mark.parametrize("backend", ["fa3", "auto"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 0), (5, 9)], ids=str)
def test_ours(door: str, window: tuple[int, int], backend: str) -> None:
    leaves = [x.requires_grad_() for x in operands(door)]
    cu_q, cu_k, *_ = lengths = given(door)
    settings = {"window_size": window, "scale": 0.2, **GROUPED}
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(backend):
        out, lse = varlen.varlen_attn(*leaves, *lengths, **settings, return_aux=varlen.AuxRequest(lse=True))
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    found = torch.autograd.grad(out, leaves, do)
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1 and out.is_contiguous() and lse.shape == (4, sum(ROWS))
    with torch_flashplug.sdpa_backend("math"):
        wide = [x.detach().float().requires_grad_() for x in leaves]
        right, of_keys = attention(
            *wide, window=window, scale=0.2, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True
        )
        exact = torch.autograd.grad(right, wide, do.float())
    torch.testing.assert_close(lse, of_keys.masked_fill(of_keys == -math.inf, math.inf), rtol=1e-4, atol=1e-4)
    for got, one in zip((out.detach(), *found), (right.detach(), *exact), strict=True):
        assert float((got - one).norm() / one.norm()) < 1e-2


@SINCE_2_13
def test_one_split_has_the_same_bits_in_any_batch(door: str) -> None:
    """As torch promises of num_splits=1, of a forward: a sequence alone and beside others."""
    q, k, v = operands(door)
    settings = {"num_splits": 1, "window_size": (-1, 0), **GROUPED}
    with torch.no_grad(), torch_flashplug.sdpa_backend("fa3"):
        bindings.counters(reset=True)
        all_of_them = varlen.varlen_attn(q, k, v, *given(door), **settings)
        rows, keys = slice(70, 200), slice(79, 219)
        cu = [starts((n,), door) for n in (130, 140)]
        alone = varlen.varlen_attn(q[rows], k[keys], v[keys], *cu, 130, 140, **settings)
    assert bindings.counters(reset=True)["ours_fwd"] == 2 and torch.equal(alone, all_of_them[rows])


@SINCE_2_13
def test_keys_that_count(door: str) -> None:
    """The first of each, whatever the others hold."""
    q, k, v = operands(door)
    used = torch.tensor([50, 0, 140, 2], dtype=torch.int32, device=door)
    kept = torch.cat([torch.arange(a, a + n) for a, n in zip((0, 70, 79, 219), used.tolist(), strict=True)]).to(door)
    with torch.no_grad(), torch_flashplug.sdpa_backend("fa3"):
        cu = starts(tuple(used.tolist()), door)
        right = varlen.varlen_attn(
            q, k[kept], v[kept], starts(ROWS, door), cu, max(ROWS), 140, **GROUPED, window_size=(-1, 0)
        )
        others = torch.ones(len(k), dtype=torch.bool, device=door).index_fill_(0, kept, False)
        k[others] = v[others] = math.nan
        settings = {"window_size": (-1, 0), "seqused_k": used, **GROUPED}
        assert torch.equal(varlen.varlen_attn(q, k, v, *given(door), **settings), right)


@SINCE_2_13
def test_into_a_tensor(door: str) -> None:
    q, k, v = operands(door)
    out = torch.full_like(q, math.nan)
    with torch.no_grad(), torch_flashplug.sdpa_backend("fa3"):
        varlen.varlen_attn_out(out, q, k, v, *given(door), **GROUPED, window_size=(-1, 0))
        right = varlen.varlen_attn(q, k, v, *given(door), **GROUPED, window_size=(-1, 0))
    assert torch.equal(out, right)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled(door: str) -> None:
    leaves = [x.requires_grad_() for x in operands(door)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen.varlen_attn(q, k, v, *given(door), window_size=(-1, 0), **GROUPED)

    with torch_flashplug.sdpa_backend("fa3"):
        right = call(*leaves)
        exact = torch.autograd.grad(right.float().sum(), leaves)
        bindings.counters(reset=True)
        out = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
        found = torch.autograd.grad(out.float().sum(), leaves)
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1 and torch.equal(out, right)
    for got, one in zip(found, exact, strict=True):
        assert float((got - one).norm() / one.norm()) < 1e-2


@pytest.mark.parametrize("backend", ["auto", "stock", "math"])
def test_stock_otherwise(stock_on_cpu: list[str], backend: str) -> None:
    """Auto too, on a device that was not measured."""
    varlen_hooks.install("CPU")
    q = torch.randn(9, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    cu = starts((4, 5), "cpu")
    with torch_flashplug.sdpa_backend(backend):
        varlen.varlen_attn(q, q, q, cu, cu, 5, 5).sum().backward()
    assert stock_on_cpu == ["forward", "backward"]


def test_disable_leaves_no_trace(stock_on_cpu: list[str]) -> None:
    varlen_hooks.install("CPU")
    ops = [f"torch_attn::{name}" for name in ("_varlen_attn", "_varlen_attn_backward")]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert all(has(op, "CPU") and has(op, "CUDA") for op in ops)
    torch_flashplug.disable()
    try:
        assert not any(has(op, key) for op in ops for key in ("CPU", "CUDA"))
        q = torch.randn(9, 2, 64, dtype=torch.bfloat16)
        varlen.varlen_attn(q, q, q, *(starts((4, 5), "cpu"),) * 2, 5, 5)
        assert stock_on_cpu == ["forward"]
    finally:
        torch_flashplug.enable()
    assert has(ops[0], "CUDA")


def test_what_forced_kernels_do_not_take(door: str) -> None:
    q, k, v = operands(door)
    used, table = torch.ones(4, dtype=torch.int32, device=door), torch.zeros(4, 1, dtype=torch.int32, device=door)
    later = (
        ("block_table", (q, k[None], v[None]), {"seqused_k": used, "block_table": table}),
        ("num_splits=3", (q, k, v), {"num_splits": 3}),
    )
    with torch_flashplug.sdpa_backend("fa3"), torch.no_grad():
        for says, tensors, settings in (
            *(later if "seqused_k" in TAKES else ()),
            ("torch.float32", (q.float(), k.float(), v.float()), {}),
            (r"head dims \[60\]", (q[..., :60], k[..., :60], v[..., :60]), {}),
        ):
            with pytest.raises(RuntimeError, match=f"varlen_attn: the forced kernels do not support .*{says}"):
                varlen.varlen_attn(*tensors, *given(door), **GROUPED, **settings)


def test_a_preference_leaves_to_stock_what_it_cannot_run(stock_on_cpu: list[str]) -> None:
    varlen_hooks.install("CPU")
    bindings.set_process_backend(torch_flashplug.sdpa_backend("fa3").mode)
    try:
        q = torch.randn(9, 2, 60)
        varlen.varlen_attn(q, q, q, *(starts((4, 5), "cpu"),) * 2, 5, 5)
    finally:
        bindings.set_process_backend(0)
    assert stock_on_cpu == ["forward"]


def test_auto_leaves_to_stock_what_has_no_kernel(
    door: str, stock_on_cpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack that is not there: nothing is computed by mathematics, whose memory is that of all scores."""
    monkeypatch.setenv("TORCH_FLASHPLUG_JIT", "0")
    bindings.clear_packs()
    bindings.counters(reset=True)
    try:
        startup.push_tables()  # kernels are looked for again
        varlen.varlen_attn(*operands(door), *given(door), **GROUPED)
    finally:
        packs.register()
        startup.push_tables()
    assert not any(bindings.counters(reset=True).values()) and bindings.mode() == 0
    assert stock_on_cpu == ["forward"] * (door == "cpu")


@pytest.mark.parametrize(("rows", "keys"), [(0, 9), (9, 0)])
def test_nothing(door: str, rows: int, keys: int) -> None:
    """Forced: no rows, or no keys."""
    leaves = [torch.ones(n, 2, 64, dtype=torch.bfloat16, device=door, requires_grad=True) for n in (rows, keys, keys)]
    with torch_flashplug.sdpa_backend("fa3"):
        out = varlen.varlen_attn(*leaves, starts((rows,), door), starts((keys,), door), rows, keys)
        found = torch.autograd.grad(out.sum(), leaves)
    assert out.shape == (rows, 2, 64) and not any(bool(x.any()) for x in (out, *found))


def test_lse_of_rows_without_keys(door: str) -> None:
    """inf, where more rows than keys are causal; stock's backward takes it, should ours lack a kernel."""
    q, k, v = operands(door)
    cu_q, cu_k = starts((70, 0, 130, 3), door), starts((7, 76, 120, 19), door)
    aux = varlen.AuxRequest(lse=True)
    with torch.no_grad(), torch_flashplug.sdpa_backend("fa3"):
        out, lse = varlen.varlen_attn(
            q, k, v, cu_q, cu_k, 130, 120, window_size=(-1, 0), return_aux=aux, **GROUPED
        )
    blind = [*range(63), *range(70, 80)]
    assert bool((lse[:, blind] == math.inf).all()) and not out[blind].any()
    assert int(lse.isinf().sum()) == 4 * len(blind)


@pytest.mark.parametrize("backend", ["auto", "fa3", "stock"])
def test_errors_of_stock_keep_their_type_and_text(door: str, backend: str) -> None:
    with torch_flashplug.sdpa_backend(backend), pytest.raises(ValueError, match="size must have length 2, got 3$"):
        varlen.varlen_attn(*operands(door), *given(door), **GROUPED, window_size=(1, 2, 3))


def test_any_layout(door: str) -> None:
    """Projections in one tensor: output and gradients are laid out as torch's fakes say."""
    packed = torch.stack(operands(door, heads=(2, 2), rows=KEYS), 1).requires_grad_()
    cu = starts(KEYS, door)
    with torch_flashplug.sdpa_backend("fa3"):
        out = varlen.varlen_attn(*packed.unbind(1), cu, cu, 140, 140, window_size=(-1, 0))
        apart = varlen.varlen_attn(*(x.contiguous() for x in packed.unbind(1)), cu, cu, 140, 140, window_size=(-1, 0))
    assert out.is_contiguous() and torch.equal(out, apart)
    (found,) = torch.autograd.grad(out.float().square().sum(), packed)
    assert found.shape == packed.shape and bool(found.isfinite().all()) and bool(found.any())


def test_state_of_dropout_is_what_graphs_assert(door: str) -> None:
    """Aligned, of torch's size: Inductor checks both of an op that it does not know."""
    q, k, v = operands(door)
    with torch.no_grad(), torch_flashplug.sdpa_backend("fa3"):
        _, lse, drawn = torch.ops.torch_attn._varlen_attn(q, k, v, *given(door))
    assert drawn.shape == (2,) and drawn.dtype == torch.uint64 and drawn.data_ptr() % 16 == 0
    assert lse.is_contiguous()
