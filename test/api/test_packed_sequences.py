"""attention() of packed sequences: results and gradients equal those of separate sequences.

The tests also cover the tools of torch and refused calls. test_varlen_kernels.py checks the numbers of the kernels.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torch_flashplug import attention

FORWARD = torch.ops.torch_flashplug.attention_fwd
SETTINGS = {
    "none": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left", "window": (5, -1)},
    "window": {"window": (3, 2), "softcap": 1.5},
}


def random_tensor(*sizes: int, seed: int = 20261125) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


LENGTHS = {
    "some": ([5, 0, 3, 9], [7, 4, 0, 2]),
    "one": ([6], [6]),
    "none": ([0, 0], [0, 0]),
    "short": ([1] * 9, [2] * 9),
}


def make_cu_seqlens(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def run_per_sequence_reference(
    tensors: tuple[Tensor, ...], rows: list[int], keys: list[int], **arguments: object
) -> tuple[Tensor, Tensor]:
    """Run each sequence in a separate call."""
    q, k, v = (x.split(sizes) for x, sizes in zip(tensors, (rows, keys, keys), strict=True))
    results = [
        attention(*(x.unsqueeze(0) for x in sequence), **arguments, return_lse=True) for sequence in zip(q, k, v)
    ]
    return torch.cat([out[0] for out, _ in results]), torch.cat([lse[0] for _, lse in results], 1)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_packed_sequences_equal_separate_calls(device: str, lengths: str, setting: str) -> None:
    """Compare packed sequences with separate calls, including gradients.

    Rows after the last sequence are zero.
    """
    (rows, keys), sinks = LENGTHS[lengths], random_tensor(4).to(device)
    total = [random_tensor(sum(size) + 3, num_heads, 16, seed=i).to(device) for i, (size, num_heads) in
             enumerate(((rows, 4), (keys, 2), (keys, 2)))]  # fmt: skip
    arguments = {**SETTINGS[setting], "sinks": sinks.requires_grad_()}
    cu = {"cu_seqlens_q": make_cu_seqlens(rows).to(device), "cu_seqlens_k": make_cu_seqlens(keys).to(device)}
    packed, separate = ([x.clone().requires_grad_() for x in total] for _ in range(2))
    out, lse = attention(*packed, **arguments, **cu, return_lse=True)
    assert out.shape == (sum(rows) + 3, 4, 16) and lse.shape == (4, sum(rows) + 3) and out.is_contiguous()
    assert (out[sum(rows) :] == 0).all()
    expected_out, expected_lse = run_per_sequence_reference(tuple(x[:-3] for x in separate), rows, keys, **arguments)
    torch.testing.assert_close(out[: sum(rows)], expected_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse[:, : sum(rows)], expected_lse, rtol=1e-4, atol=1e-5)
    grad_out, grad_lse = torch.ones_like(out[: sum(rows)]), random_tensor(*expected_lse.shape).to(device)
    leaves = (*packed, sinks), (*separate, sinks)
    if not sum(rows):
        return
    grads = torch.autograd.grad((out[: sum(rows)], lse[:, : sum(rows)]), leaves[0], (grad_out, grad_lse))
    exact = torch.autograd.grad((expected_out, expected_lse), leaves[1], (grad_out, grad_lse))
    for actual, expected in zip(grads, exact, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_unused_rows_and_keys_may_hold_any_value(device: str) -> None:
    """Fill unused entries with NaN or infinity.

    Unused entries lie before the first sequence, after the last sequence, and beyond the KV length. Outputs and
    gradients of unused rows are zero.
    """
    q, k, v = (
        x.to(device)
        for x in (random_tensor(12, 4, 16), random_tensor(12, 2, 16, seed=1), random_tensor(12, 2, 16, seed=2))
    )
    cu, used = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([2, 6, 10], [3, 4]))
    expected, _ = run_per_sequence_reference(tuple(x[2:10] for x in (q, k[:, :], v)), [4, 4], [4, 4])
    unused = torch.tensor([0, 1, 10, 11], device=device)
    q[unused], k[unused], v[unused] = torch.nan, torch.inf, torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, cu_seqlens_q=cu, return_lse=True)
    torch.testing.assert_close(out[2:10], expected, rtol=1e-4, atol=1e-5)
    assert (out[unused] == 0).all() and (lse[:, unused] == -torch.inf).all()
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert grad.isfinite().all() and (grad[unused] == 0).all()
    with torch.no_grad():
        expected = attention(*leaves, cu_seqlens_q=cu, seqused_k=used)
        v[5] = k[5] = torch.nan  # the fourth key of the second sequence, beyond the KV length
        assert torch.equal(attention(*leaves, cu_seqlens_q=cu, seqused_k=used), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "dout"])
def test_bad_values_stay_within_a_sequence(device: str, which: int, bad: float) -> None:
    """NaN and infinity must stay within a sequence, in reference math too, where 0 * NaN is NaN."""

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.to(device).clone().requires_grad_() for x in tensors[:3]]
        out, lse = attention(*leaves, cu_seqlens_q=cu, causal=True, return_lse=True)
        return out, lse.T, *torch.autograd.grad(out, leaves, tensors[3].to(device))

    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    tensors = [random_tensor(12, heads, 16, seed=seed) for seed, heads in enumerate((4, 2, 2, 4))]
    expected_out = run(*tensors)
    tensors[which][4:] = bad
    for actual, expected in zip(run(*tensors), expected_out, strict=True):
        assert torch.equal(actual[:4], expected[:4])
    for actual in (run(*tensors)[result_idx] for result_idx in (0, 2, 3, 4)):
        assert (actual[9:] == 0).all()


def test_nan_values_reach_only_rows_with_the_key_visible(device: str) -> None:
    q, v = random_tensor(1, 100, 2, 16).to(device), random_tensor(1, 100, 2, 16, seed=1).to(device)
    expected, _ = attention(q, q, v, window=(3, 2), return_lse=True)
    for bad, row in ((math.inf, 20), (-math.inf, 50), (math.nan, 80)):
        v[0, row, 1, 7] = bad
    actual, _ = attention(q, q, v, window=(3, 2), return_lse=True)
    for bad, row in ((math.inf, 20), (-math.inf, 50), (math.nan, 80)):
        expected[0, row - 2 : row + 4, 1, 7] = bad
    torch.testing.assert_close(actual, expected, equal_nan=True)


def test_strided_caches_are_read_in_place(device: str) -> None:
    """Read caches with heads before rows, and caches that are slices of longer tensors.

    No copy is needed, and rows outside the slice are not read.
    """
    q, used = random_tensor(2, 3, 4, 16).to(device), torch.tensor([5, 9], dtype=torch.int32, device=device)
    full_caches = random_tensor(2, 2, 12, 16, seed=1).to(device), random_tensor(2, 2, 12, 16, seed=2).to(device)
    for caches in ([x.transpose(1, 2) for x in full_caches], [x.transpose(1, 2)[:, :9] for x in full_caches]):
        actual = attention(q, *caches, causal=True, seqused_k=used)
        for i, n in enumerate((5, 9)):
            expected = attention(q[i : i + 1], *(x[i : i + 1, :n] for x in caches), causal=True)
            torch.testing.assert_close(actual[i : i + 1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fresh_dynamo")
def test_kv_lengths_in_a_compiled_graph() -> None:
    """Use sizes that change between calls, and sizes of zero."""

    def call(q: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Tensor:
        return attention(q * 1.0, k, v, causal=True, seqused_k=used)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for Sq, S in ((3, 9), (2, 12), (4, 5)):
        q, k, v = (random_tensor(2, size, 2, 16, seed=i) for i, size in enumerate((Sq, S, S)))
        used = torch.tensor([2, S], dtype=torch.int32)
        torch.testing.assert_close(compiled(q, k, v, used), call(q, k, v, used))
    for Sq, S in ((3, 0), (0, 3)):
        q, k, v = (random_tensor(2, size, 2, 16) for size in (Sq, S, S))
        assert (call(q, k, v, torch.zeros(2, dtype=torch.int32)) == 0).all()


def test_cu_seqlens_k_defaults_to_cu_seqlens_q() -> None:
    q, k, v = (random_tensor(9, 2, 16, seed=i) for i in range(3))
    cu = make_cu_seqlens([4, 5])
    out = attention(q, k, v, causal=True, cu_seqlens_q=cu, max_seqlen_q=5, max_seqlen_k=5)
    torch.testing.assert_close(out, attention(q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu))


def test_kv_lengths_equal_sliced_keys(device: str) -> None:
    """Check KV lengths for packed sequences and for batches."""
    q, k, v = (
        x.to(device)
        for x in (random_tensor(9, 4, 16), random_tensor(12, 2, 16, seed=1), random_tensor(12, 2, 16, seed=2))
    )
    cu_q, cu_k, used = make_cu_seqlens([4, 5]), make_cu_seqlens([5, 7]), torch.tensor([3, 6], dtype=torch.int32)
    out, lse = attention(q, k, v, causal=True, cu_seqlens_q=cu_q.to(device), cu_seqlens_k=cu_k.to(device),
                         seqused_k=used.to(device), return_lse=True)  # fmt: skip
    kept = [0, 1, 2, *range(5, 11)]
    expected_out, expected_lse = run_per_sequence_reference((q, k[kept], v[kept]), [4, 5], [3, 6], causal=True)
    torch.testing.assert_close(out, expected_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)
    sizes = ((2, 3, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16))
    q, k, v = (random_tensor(*size, seed=i).to(device) for i, size in enumerate(sizes))
    out, lse = attention(q, k, v, window=(4, 0), sinks=torch.zeros(4), seqused_k=used.to(device), return_lse=True)
    assert out.shape == (2, 3, 4, 16) and lse.shape == (2, 4, 3)
    for i, n in enumerate((3, 6)):
        expected = attention(q[i : i + 1], k[i : i + 1, :n], v[i : i + 1, :n], window=(4, 0), sinks=torch.zeros(4),
                        return_lse=True)  # fmt: skip
        torch.testing.assert_close(out[i : i + 1], expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[i : i + 1], expected[1], rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="gradients are not supported with seqused_k"):
        attention(q.requires_grad_(), k, v, seqused_k=used.to(device)).sum().backward()


def test_packed_sequence_ops_pass_opcheck_and_compile(device: str) -> None:
    q, k, v = (
        x.to(device)
        for x in (random_tensor(9, 4, 16), random_tensor(9, 2, 16, seed=1), random_tensor(9, 2, 16, seed=2))
    )
    cu = make_cu_seqlens([4, 5]).to(device)
    operands = [x.transpose(0, 1).unsqueeze(0).requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(FORWARD, (*operands, None, cu, cu, None, -1, 0, True, 0.0, None))

    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return attention(q * 1.0, k, v, causal=True, cu_seqlens_q=cu)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for lengths in ([4, 5], [9, 0], [1, 8]):
        cu = make_cu_seqlens(lengths).to(device)
        torch.testing.assert_close(compiled(q, k, v, cu), call(q, k, v, cu))


def test_vmap_of_packed_sequences() -> None:
    q, k, v = (
        torch.stack([x, 2 * x])
        for x in (random_tensor(9, 2, 16), random_tensor(9, 2, 16, seed=1), random_tensor(9, 2, 16, seed=2))
    )
    cu = torch.stack([make_cu_seqlens([4, 5]), make_cu_seqlens([1, 8])])
    mapped = torch.func.vmap(lambda q, k, v, cu: attention(q, k, v, causal=True, cu_seqlens_q=cu))(q, k, v, cu)
    for i in range(2):
        torch.testing.assert_close(mapped[i], attention(q[i], k[i], v[i], causal=True, cu_seqlens_q=cu[i]))


def test_invalid_arguments_are_refused() -> None:
    q, k, v = (random_tensor(9, 2, 16, seed=i) for i in range(3))
    cu = make_cu_seqlens([4, 5])
    for error, message, tensors, arguments in (
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
        with pytest.raises(error, match=message):
            attention(*tensors, **arguments)
