"""Merging of ring attention steps: against fp64, in plain torch on a CPU and by kernels on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_flashplug import sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.testing import assert_bitwise_equal
from torch_flashplug.torch_hooks.distributed import ring_merge
from torch_flashplug.torch_hooks.distributed.ring_attention import Step, steps_of

B, H, S, D = 2, 3, 70, 72


def _random_tensor(*sizes: int, dtype: torch.dtype, device: str, rows_first: bool = True, seed: int = 0) -> Tensor:
    x = torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if rows_first else x


def _merge_in_fp64(out: Tensor, lse: Tensor, step_out: Tensor, step_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax over both sets of keys, in fp64."""
    shares = torch.stack((lse, step_lse)).double()
    both = torch.logsumexp(shares, 0)
    first, second = torch.exp(shares - both).nan_to_num(0.0).unsqueeze(-1)
    return first * out.double() + second * step_out.double(), both


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("first", [0, S // 2])
def test_merged_ring_steps_match_fp64(device: str, first: int, rows_first: bool, dtype: torch.dtype) -> None:
    kinds = {"device": device, "rows_first": rows_first}
    out = _random_tensor(B, H, S, D, dtype=dtype, **kinds)
    step_out = _random_tensor(B, H, S - first, D, dtype=torch.bfloat16, seed=1, **kinds)
    lse, step_lse = (8 * _random_tensor(B, H, n, 1, dtype=torch.float32, device=device, seed=n)[..., 0].contiguous()
                     for n in (S, S - first))  # fmt: skip
    lse[0, 0, -1], step_lse[0, 1, -1], step_lse[1, 2, -1] = -math.inf, -math.inf, -200.0
    out[0, 0, -1] = 0.0
    step_out[0, 1, -1] = 0.0
    lse[1, 0, -1] = step_lse[1, 0, -1] = -math.inf  # a row without visible keys
    out[1, 0, -1] = step_out[1, 0, -1] = 0.0
    exact, exact_lse = _merge_in_fp64(out[:, :, first:], lse[:, :, first:], step_out, step_lse)
    before, before_lse = out[:, :, :first].clone(), lse[:, :, :first].clone()
    ring_merge.namespace.ring_merge(out, lse, step_out, step_lse, first)
    # The LSE of 30 in fp32 is accurate to 2e-6, and so are the shares.
    rounding = max(torch.finfo(dtype).eps, 2e-5)
    torch.testing.assert_close(out[:, :, first:].double(), exact, atol=rounding, rtol=rounding)
    torch.testing.assert_close(lse[:, :, first:].double(), exact_lse, atol=2e-6, rtol=2e-6)
    assert torch.equal(out[:, :, :first], before) and torch.equal(lse[:, :, :first], before_lse)
    assert not out[1, 0, -1].any() and lse[1, 0, -1] == -math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, S // 2])
def test_added_ring_gradients_match_fp64(device: str, first: int, dtype: torch.dtype) -> None:
    total = _random_tensor(B, H, S, D, dtype=dtype, device=device)
    part = _random_tensor(B, H, S - S // 2, D, dtype=torch.bfloat16, device=device, rows_first=False, seed=2)
    exact = total.double()
    exact[:, :, first : first + part.shape[2]] += part.double()
    ring_merge.namespace.ring_add(total, part, first)
    torch.testing.assert_close(total.double(), exact, atol=torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("margin", [8, 131, 1000])
def test_cta_margin_changes_no_output_bit(kernels_on: str, margin: int) -> None:
    """Fewer CTAs, at last a single CTA, process all tiles."""
    q, k, v = (_random_tensor(2, 2, 300, 64, dtype=torch.bfloat16, device=kernels_on, seed=i) for i in range(3))
    with sdpa_backend("fa3"):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert bindings.set_cta_margin(margin) == 0
        try:
            actual = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        finally:
            assert bindings.set_cta_margin(0) == margin
    assert_bitwise_equal(f"margin {margin}", actual, expected)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("balanced", [True, False])
def test_ring_steps_visit_each_key_once(ranks: int, balanced: bool) -> None:
    """Check by chunks: the steps of all ranks visit each pair of the causal triangle once."""
    chunks = 2 * ranks if balanced else ranks

    def chunks_of_rank(rank: int) -> list[int]:
        return [rank, chunks - 1 - rank] if balanced else [rank]

    visited_pairs = []
    for rank in range(ranks):
        for step_idx, step in enumerate(steps_of(rank, ranks, True, balanced)):
            rows, keys = chunks_of_rank(rank), chunks_of_rank((rank - step_idx) % ranks)
            if step is None:
                continue
            rows, keys = rows[1:] if step.half_of_rows else rows, keys[:1] if step.half_of_keys else keys
            pairs = [(row, key) for row in rows for key in keys]
            assert step.is_causal or all(key < row for row, key in pairs)
            visited_pairs += [(row, key) for row, key in pairs if not step.is_causal or key <= row]
    assert sorted(visited_pairs) == [(row, key) for row in range(chunks) for key in range(row + 1)]
    assert steps_of(0, ranks, False, False) == [Step()] * ranks
