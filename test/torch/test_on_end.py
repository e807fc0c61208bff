"""attention() of sequences of different lengths on end: each as by itself, gradients too; what torch's tools make of
it, what it refuses. Kernels' numbers are test_lengths.py's.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torch_flashplug import attention

FORWARD = torch.ops.torch_flashplug.attention_fwd
SAID = {
    "none": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left", "window": (5, -1)},
    "window": {"window": (3, 2), "softcap": 1.5},
}


def drawn(*sizes: int, seed: int = 20261125) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


LENGTHS = {
    "some": ([5, 0, 3, 9], [7, 4, 0, 2]),
    "one": ([6], [6]),
    "none": ([0, 0], [0, 0]),
    "short": ([1] * 9, [2] * 9),
}


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def by_sequence(
    tensors: tuple[Tensor, ...], rows: list[int], keys: list[int], **arguments: object
) -> tuple[Tensor, Tensor]:
    """Each by itself."""
    q, k, v = (x.split(sizes) for x, sizes in zip(tensors, (rows, keys, keys), strict=True))
    found = [attention(*(x.unsqueeze(0) for x in one), **arguments, return_lse=True) for one in zip(q, k, v)]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("said", SAID)
def test_sequences_on_end(device: str, lengths: str, said: str) -> None:
    """As each of them by itself, gradients too; what is behind the last one is zeros."""
    (rows, keys), sinks = LENGTHS[lengths], drawn(4).to(device)
    total = [drawn(sum(size) + 3, of, 16, seed=i).to(device) for i, (size, of) in
             enumerate(((rows, 4), (keys, 2), (keys, 2)))]  # fmt: skip
    arguments = {**SAID[said], "sinks": sinks.requires_grad_()}
    cu = {"cu_seqlens_q": starts(rows).to(device), "cu_seqlens_k": starts(keys).to(device)}
    given, alone = ([x.clone().requires_grad_() for x in total] for _ in range(2))
    out, lse = attention(*given, **arguments, **cu, return_lse=True)
    assert out.shape == (sum(rows) + 3, 4, 16) and lse.shape == (4, sum(rows) + 3) and out.is_contiguous()
    assert (out[sum(rows) :] == 0).all()
    right, of_each = by_sequence(tuple(x[:-3] for x in alone), rows, keys, **arguments)
    torch.testing.assert_close(out[: sum(rows)], right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse[:, : sum(rows)], of_each, rtol=1e-4, atol=1e-5)
    ones, some = torch.ones_like(out[: sum(rows)]), drawn(*of_each.shape).to(device)
    leaves = (*given, sinks), (*alone, sinks)
    if not sum(rows):
        return
    found = torch.autograd.grad((out[: sum(rows)], lse[:, : sum(rows)]), leaves[0], (ones, some))
    exact = torch.autograd.grad((right, of_each), leaves[1], (ones, some))
    for got, one in zip(found, exact, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-5)


def test_what_is_none_of_a_sequence_may_be_anything(device: str) -> None:
    """Ahead of the first, behind the last, keys that do not count: not numbers even; zeros come out."""
    q, k, v = (x.to(device) for x in (drawn(12, 4, 16), drawn(12, 2, 16, seed=1), drawn(12, 2, 16, seed=2)))
    cu, used = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([2, 6, 10], [3, 4]))
    right, _ = by_sequence(tuple(x[2:10] for x in (q, k[:, :], v)), [4, 4], [4, 4])
    none = torch.tensor([0, 1, 10, 11], device=device)
    q[none], k[none], v[none] = torch.nan, torch.inf, torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, cu_seqlens_q=cu, return_lse=True)
    torch.testing.assert_close(out[2:10], right, rtol=1e-4, atol=1e-5)
    assert (out[none] == 0).all() and (lse[:, none] == -torch.inf).all()
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert grad.isfinite().all() and (grad[none] == 0).all()
    with torch.no_grad():
        right = attention(*leaves, cu_seqlens_q=cu, seqused_k=used)
        v[5] = k[5] = torch.nan  # the fourth of four
        assert torch.equal(attention(*leaves, cu_seqlens_q=cu, seqused_k=used), right)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "dout"])
def test_a_text_does_not_reach_another(device: str, which: int, bad: float) -> None:
    """By mathematics either: 0 times what is no number is none."""

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.to(device).clone().requires_grad_() for x in given[:3]]
        out, lse = attention(*leaves, cu_seqlens_q=cu, causal=True, return_lse=True)
        return out, lse.T, *torch.autograd.grad(out, leaves, given[3].to(device))

    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    given = [drawn(12, heads, 16, seed=seed) for seed, heads in enumerate((4, 2, 2, 4))]
    right = run(*given)
    given[which][4:] = bad
    for found, one in zip(run(*given), right, strict=True):
        assert torch.equal(found[:4], one[:4])
    for found in (run(*given)[at] for at in (0, 2, 3, 4)):
        assert (found[9:] == 0).all()


def test_what_is_no_number_reaches_the_rows_that_see_it(device: str) -> None:
    q, v = drawn(1, 100, 2, 16).to(device), drawn(1, 100, 2, 16, seed=1).to(device)
    right, _ = attention(q, q, v, window=(3, 2), return_lse=True)
    for bad, row in ((math.inf, 20), (-math.inf, 50), (math.nan, 80)):
        v[0, row, 1, 7] = bad
    found, _ = attention(q, q, v, window=(3, 2), return_lse=True)
    for bad, row in ((math.inf, 20), (-math.inf, 50), (math.nan, 80)):
        right[0, row - 2 : row + 4, 1, 7] = bad
    torch.testing.assert_close(found, right, equal_nan=True)


def test_a_cache_is_read_where_it_lies(device: str) -> None:
    """Heads before rows, or a part of longer ones: no copies, and no rows of others."""
    q, used = drawn(2, 3, 4, 16).to(device), torch.tensor([5, 9], dtype=torch.int32, device=device)
    whole = drawn(2, 2, 12, 16, seed=1).to(device), drawn(2, 2, 12, 16, seed=2).to(device)
    for caches in ([x.transpose(1, 2) for x in whole], [x.transpose(1, 2)[:, :9] for x in whole]):
        found = attention(q, *caches, causal=True, seqused_k=used)
        for i, n in enumerate((5, 9)):
            one = attention(q[i : i + 1], *(x[i : i + 1, :n] for x in caches), causal=True)
            torch.testing.assert_close(found[i : i + 1], one, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fresh_dynamo")
def test_batches_of_which_some_keys_count_in_graphs() -> None:
    """Of sizes that change, and of none."""

    def call(q: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Tensor:
        return attention(q * 1.0, k, v, causal=True, seqused_k=used)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for Sq, S in ((3, 9), (2, 12), (4, 5)):
        q, k, v = (drawn(2, size, 2, 16, seed=i) for i, size in enumerate((Sq, S, S)))
        used = torch.tensor([2, S], dtype=torch.int32)
        torch.testing.assert_close(compiled(q, k, v, used), call(q, k, v, used))
    for Sq, S in ((3, 0), (0, 3)):
        q, k, v = (drawn(2, size, 2, 16) for size in (Sq, S, S))
        assert (call(q, k, v, torch.zeros(2, dtype=torch.int32)) == 0).all()


def test_self_attention_on_end_needs_one_array() -> None:
    q, k, v = (drawn(9, 2, 16, seed=i) for i in range(3))
    cu = starts([4, 5])
    one = attention(q, k, v, causal=True, cu_seqlens_q=cu, max_seqlen_q=5, max_seqlen_k=5)
    torch.testing.assert_close(one, attention(q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu))


def test_keys_that_count(device: str) -> None:
    """Of sequences on end, and of batches."""
    q, k, v = (x.to(device) for x in (drawn(9, 4, 16), drawn(12, 2, 16, seed=1), drawn(12, 2, 16, seed=2)))
    cu_q, cu_k, used = starts([4, 5]), starts([5, 7]), torch.tensor([3, 6], dtype=torch.int32)
    out, lse = attention(q, k, v, causal=True, cu_seqlens_q=cu_q.to(device), cu_seqlens_k=cu_k.to(device),
                         seqused_k=used.to(device), return_lse=True)  # fmt: skip
    kept = [0, 1, 2, *range(5, 11)]
    right, of_keys = by_sequence((q, k[kept], v[kept]), [4, 5], [3, 6], causal=True)
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, of_keys, rtol=1e-4, atol=1e-5)
    sizes = ((2, 3, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16))
    q, k, v = (drawn(*size, seed=i).to(device) for i, size in enumerate(sizes))
    out, lse = attention(q, k, v, window=(4, 0), sinks=torch.zeros(4), seqused_k=used.to(device), return_lse=True)
    assert out.shape == (2, 3, 4, 16) and lse.shape == (2, 4, 3)
    for i, n in enumerate((3, 6)):
        one = attention(q[i : i + 1], k[i : i + 1, :n], v[i : i + 1, :n], window=(4, 0), sinks=torch.zeros(4),
                        return_lse=True)  # fmt: skip
        torch.testing.assert_close(out[i : i + 1], one[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[i : i + 1], one[1], rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="gradients are not supported with seqused_k"):
        attention(q.requires_grad_(), k, v, seqused_k=used.to(device)).sum().backward()


def test_opcheck_and_compile_on_end(device: str) -> None:
    q, k, v = (x.to(device) for x in (drawn(9, 4, 16), drawn(9, 2, 16, seed=1), drawn(9, 2, 16, seed=2)))
    cu = starts([4, 5]).to(device)
    operands = [x.transpose(0, 1).unsqueeze(0).requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(FORWARD, (*operands, None, cu, cu, None, -1, 0, True, 0.0, None))

    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return attention(q * 1.0, k, v, causal=True, cu_seqlens_q=cu)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for lengths in ([4, 5], [9, 0], [1, 8]):
        cu = starts(lengths).to(device)
        torch.testing.assert_close(compiled(q, k, v, cu), call(q, k, v, cu))


def test_vmap_on_end() -> None:
    q, k, v = (torch.stack([x, 2 * x]) for x in (drawn(9, 2, 16), drawn(9, 2, 16, seed=1), drawn(9, 2, 16, seed=2)))
    cu = torch.stack([starts([4, 5]), starts([1, 8])])
    found = torch.func.vmap(lambda q, k, v, cu: attention(q, k, v, causal=True, cu_seqlens_q=cu))(q, k, v, cu)
    for i in range(2):
        torch.testing.assert_close(found[i], attention(q[i], k[i], v[i], causal=True, cu_seqlens_q=cu[i]))


def test_what_is_refused_on_end() -> None:
    q, k, v = (drawn(9, 2, 16, seed=i) for i in range(3))
    cu = starts([4, 5])
    for error, says, given, arguments in (
        (ValueError, r"cu_seqlens_q must .*, but got torch.int64 \(3,\)", (q, k, v), {"cu_seqlens_q": cu.long()}),
        (ValueError, "cu_seqlens_q must be an int32 tensor .*, but got NoneType", (q, k, v), {"cu_seqlens_k": cu}),
        (ValueError, "the same number of sequences", (q, k, v), {"cu_seqlens_q": cu, "cu_seqlens_k": cu[:2]}),
        (ValueError, "the same number of sequences", (q, k, v), {"cu_seqlens_q": cu[:0]}),
        (ValueError, "the same number of sequences", (q, k, v), {"cu_seqlens_q": cu, "seqused_k": cu}),
        (ValueError, "seqused_k must be .*, but got list", (q, k, v), {"cu_seqlens_q": cu, "seqused_k": [1, 2]}),
        (ValueError, r"shape \(batch,\) = \(1,\), but got \(3,\)", (q[None], k[None], v[None]), {"seqused_k": cu}),
        (ValueError, "must be an int32 tensor .* on meta", (q, k, v), {"cu_seqlens_q": cu.to("meta")}),
        (TypeError, "q must be a tensor .* with cu_seqlens_q, but got 4-D", (q[None], k, v), {"cu_seqlens_q": cu}),
        (ValueError, "q, k and v must have shapes", (q, k[:5], v), {"cu_seqlens_q": cu}),
        (
            ValueError,
            "v_scale must be None unless k and v have one of torch.int8",
            (q, k, v),
            {"cu_seqlens_q": cu, "k_scale": 1.0},
        ),
        (
            ValueError,
            r"sinks must be .*, but got torch.float32 \(3,\)",
            (q, k, v),
            {"cu_seqlens_q": cu, "sinks": torch.zeros(3)},
        ),
    ):
        with pytest.raises(error, match=says):
            attention(*given, **arguments)
