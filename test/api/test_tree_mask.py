"""attention() with `tree_mask`: draft trees in caches and pages, against fp64 and against causal calls."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import torch_flashplug
from torch_flashplug import attention, explain_attention
from torch_flashplug.dispatch import bindings

B, HEADS, KV_HEADS, D, DV, PAGE = 3, 4, 2, 64, 32, 16
USED = (50, 7, 33)


def make_tree(rows: int, seed: int = 0) -> Tensor:
    """Return random trees (B, rows, rows): each row sees itself and the rows that a random parent sees."""
    draw = torch.Generator().manual_seed(seed)
    trees = torch.zeros(B, rows, rows, dtype=torch.bool)
    for tree in trees:
        for i in range(rows):
            parent = int(torch.randint(-1, max(i, 1), (1,), generator=draw)) if i else -1
            if parent >= 0:
                tree[i] = tree[parent]
            tree[i, i] = True
    return trees


def make_operands(rows: int, dtype: torch.dtype, used: tuple[int, ...] = USED) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, caches whose unused keys are NaN, and KV lengths."""
    draw = torch.Generator().manual_seed(rows)
    q = torch.randn(B, rows, HEADS, D, generator=draw).to(dtype)
    caches = [torch.randn(B, 64, KV_HEADS, d, generator=draw).to(dtype) for d in (D, DV)]
    for i, n in enumerate(used):
        for cache in caches:
            cache[i, n:] = math.nan
    return q, *caches, torch.tensor(used, dtype=torch.int32)


def in_pages(k: Tensor, v: Tensor, used: Tensor, page: int = PAGE) -> tuple[Tensor, Tensor, Tensor]:
    """Return pools of permuted pages with NaN in unused pages, and a table with invalid numbers after used pages."""
    counts = [-(-n // page) for n in used.tolist()]
    width, order = 64 // page, torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(9)).tolist()
    table = torch.full((B, width), -1, dtype=torch.int32)
    pools = [torch.full((len(order), page, *x.shape[2:]), math.nan, dtype=x.dtype) for x in (k, v)]
    for i, count in enumerate(counts):
        for j in range(count):
            table[i, j] = order.pop()
            for pool, x in zip(pools, (k, v), strict=True):
                pool[table[i, j]] = x[i, j * page : (j + 1) * page]
    return *pools, table


def expected(
    q: Tensor, k: Tensor, v: Tensor, used: Tensor, tree: Tensor, *, left: int = -1, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the output and the LSE in fp64, key by key."""
    rows = q.shape[1]
    out, lse = torch.zeros(B, rows, HEADS, DV, dtype=torch.float64), torch.zeros(B, HEADS, rows, dtype=torch.float64)
    for b, n in enumerate(used.tolist()):
        for h in range(HEADS):
            keys, values = (x[b, :n, h // (HEADS // KV_HEADS)].double() for x in (k, v))
            for r in range(rows):
                own = n - rows + r
                visible = [
                    key for key in range(n)
                    if (key < n - rows or tree[b, r, key - (n - rows)]) and (left < 0 or key >= own - left)
                ]  # fmt: skip
                scores = keys[visible] @ q[b, r, h].double() / math.sqrt(D)
                terms = scores if sinks is None else torch.cat([scores, sinks[h].double().view(1)])
                lse[b, h, r] = terms.logsumexp(0) if len(terms) else -math.inf
                if visible:
                    out[b, r, h] = torch.exp(scores - lse[b, h, r]) @ values[visible]
    return out, lse


def check_tree(device: str, dtype: torch.dtype, pages: int, left: int, with_sinks: bool) -> None:
    """Compare a call with fp64. A sequence has fewer keys than rows."""
    q, k, v, used = make_operands(9, dtype)
    tree, sinks = make_tree(9), torch.randn(HEADS, generator=torch.Generator().manual_seed(2)) if with_sinks else None
    right, right_lse = expected(q, k, v, used, tree, left=left, sinks=sinks)
    settings = {"tree_mask": tree, "seqused_k": used, "sinks": sinks}
    operands = (k[:, :60], v[:, :60])
    if pages:
        k, v, settings["block_table"] = in_pages(*operands, used, pages) if pages == 12 else in_pages(k, v, used, pages)
    settings = {name: x.to(device) for name, x in settings.items() if x is not None}
    window = None if left < 0 else (left, None)
    out, lse = attention(*(x.to(device) for x in (q, k, v)), **settings, window=window, return_lse=True)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-2
    torch.testing.assert_close(out.cpu().double(), right, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.cpu().double(), right_lse, atol=max(tolerance, 1e-6), rtol=tolerance)


CALLS = [(-1, False), (5, False), (-1, True), (5, True)]


@pytest.mark.parametrize("pages", [0, 16, 12])
@pytest.mark.parametrize(("left", "with_sinks"), CALLS)
def test_trees_are_right_against_fp64(pages: int, left: int, with_sinks: bool) -> None:
    check_tree("cpu", torch.float64, pages, left, with_sinks)


@pytest.mark.parametrize("pages", [0, 16])
@pytest.mark.parametrize(("left", "with_sinks"), CALLS)
def test_trees_run_on_kernels(kernels_on: str, pages: int, left: int, with_sinks: bool) -> None:
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend("fa3"):
        check_tree(kernels_on, torch.bfloat16, pages, left, with_sinks)
    assert bindings.counters(reset=True)["ours_fwd"] == 1


def test_a_chain_equals_a_causal_call() -> None:
    q, k, v, used = make_operands(6, torch.float64, (50, 9, 33))
    pool_k, pool_v, table = in_pages(k, v, used)
    chain = torch.ones(6, 6, dtype=torch.bool).tril().expand(B, 6, 6)
    settings = {"block_table": table, "seqused_k": used, "return_lse": True}
    for window in (None, (4, None)):
        tree = attention(q, pool_k, pool_v, **settings, tree_mask=chain, window=window)
        causal = attention(q, pool_k, pool_v, **settings, causal=True, window=window)
        for actual, exact in zip(tree, causal, strict=True):
            torch.testing.assert_close(actual, exact)


def test_an_empty_tree_leaves_the_earlier_keys() -> None:
    q, k, v, used = make_operands(4, torch.float64, (50, 4, 33))
    out, lse = attention(q, k, v, seqused_k=used, tree_mask=torch.zeros(B, 4, 4, dtype=torch.bool), return_lse=True)
    earlier = attention(q, k, v, seqused_k=used - 4)
    torch.testing.assert_close(out, earlier)
    assert not out[1].any() and bool((lse[1] == -math.inf).all())


def test_without_kv_lengths_the_tree_is_at_the_end_of_the_cache() -> None:
    q, k, v, _ = make_operands(5, torch.float64, (64, 64, 64))
    tree = make_tree(5, 3)
    whole = attention(q, k, v, tree_mask=tree)
    assert torch.equal(whole, attention(q, k, v, tree_mask=tree, seqused_k=torch.full((B,), 64, dtype=torch.int32)))


def test_out_and_8_bit_pages() -> None:
    q, k, v, used = make_operands(5, torch.float32)
    tree, numbers = make_tree(5, 3), torch.Generator().manual_seed(4)
    k8, v8 = (torch.randint(-127, 128, x.shape, generator=numbers, dtype=torch.int8) for x in (k, v))
    scales = [torch.rand(B, KV_HEADS, 64, generator=numbers) / 64 for _ in range(2)]
    wide = [x.double() * s.transpose(1, 2).unsqueeze(3).double() for x, s in zip((k8, v8), scales, strict=True)]
    right, _ = expected(q.double(), *wide, used, tree)
    out = torch.full((B, 5, HEADS, DV), math.nan)
    named = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    assert attention(q, k8, v8, tree_mask=tree, seqused_k=used, **named, out=out) is out
    torch.testing.assert_close(out.double(), right, atol=2e-5, rtol=2e-5)
    pool_k, pool_v, table = in_pages(k8.float(), v8.float(), used)
    pool_k, pool_v = (x.nan_to_num(99.0).to(torch.int8) for x in (pool_k, pool_v))
    *scale_pools, _ = in_pages(*(s.transpose(1, 2).unsqueeze(3) for s in scales), used)
    named = dict(zip(("k_scale", "v_scale"), (x.squeeze(3).transpose(1, 2) for x in scale_pools), strict=True))
    paged = attention(q, pool_k, pool_v, tree_mask=tree, seqused_k=used, block_table=table, **named)
    torch.testing.assert_close(paged, out, atol=1e-6, rtol=1e-6)


def test_empty_batches_and_empty_pools() -> None:
    q, k, v, used = make_operands(5, torch.float32)
    tree = make_tree(5)
    assert attention(q[:0], k[:0], v[:0], tree_mask=tree[:0], seqused_k=used[:0]).shape == (0, 5, HEADS, DV)
    table = torch.zeros(B, 2, dtype=torch.int32)
    pools = (k.new_empty(0, PAGE, KV_HEADS, D), v.new_empty(0, PAGE, KV_HEADS, DV))
    assert not attention(q, *pools, tree_mask=tree, seqused_k=used, block_table=table).any()
    assert not attention(q, k, v, tree_mask=tree, seqused_k=torch.zeros_like(used)).any()


def test_wrong_arguments_are_refused() -> None:
    q, k, v, used = make_operands(5, torch.float32)
    tree = make_tree(5)
    cu = torch.tensor([0, 5], dtype=torch.int32)
    for error, message, settings in (
        (ValueError, "causal or the right bound of window must be left out", {"causal": True}),
        (ValueError, "causal or the right bound of window must be left out", {"window": (3, 0)}),
        (ValueError, "softcap must be left out", {"softcap": 2.0}),
        (ValueError, "cu_seqlens_q must be left out", {"cu_seqlens_q": cu}),
        (ValueError, "num_splits must be left out", {"num_splits": 1}),
        (ValueError, r"tree_mask must be a bool tensor of shape \(B, Sq, Sq\) = \(3, 5, 5\)", {"tree_mask": tree[0]}),
        (ValueError, "tree_mask must be a bool tensor", {"tree_mask": tree.int()}),
        (ValueError, "tree_mask must be a bool tensor .* but got str", {"tree_mask": "chain"}),
        (ValueError, r"seqused_k must have shape \(batch,\)", {"seqused_k": used[:2]}),
        (ValueError, "block_table needs seqused_k", {"block_table": cu[None].expand(3, 2), "seqused_k": None}),
    ):
        with pytest.raises(error, match=message):
            attention(q, k, v, **({"tree_mask": tree, "seqused_k": used} | settings))
    with pytest.raises(RuntimeError, match="gradients are not supported with tree_mask"):
        attention(q.requires_grad_(), k, v, tree_mask=tree, seqused_k=used)


def test_plans_of_trees_say_that_pages_are_gathered() -> None:
    q, k, v, used = make_operands(5, torch.bfloat16)
    pool_k, pool_v, table = in_pages(k, v, used)
    for operands, settings, gathers in (((k, v), {}, False), ((pool_k, pool_v), {"block_table": table}, True)):
        with torch_flashplug.sdpa_backend("fa3"):
            plan = explain_attention(q, *operands, tree_mask=make_tree(5), seqused_k=used, **settings, device="h100")
        assert "mask" in plan.kernel and ("gathered first" in plan.copies) == gathers
