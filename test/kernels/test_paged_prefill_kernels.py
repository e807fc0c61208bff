"""Forward kernels that read the pages of packed queries in place: results against fp64 of each sequence.

All memory without a key of some sequence is NaN: unused rows of pages, unused pages, and query rows of no sequence.
Block table entries behind the used pages are invalid numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

import torch_flashplug
from torch_flashplug import attention
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings, callbacks
from torch_flashplug.ops.attention import Window
from torch_flashplug.registry import dispatch_table, kernel_table
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import assert_bitwise_equal

SEED, HEADS, AHEAD, BEHIND = 20261129, (4, 2), 3, 5
OP = torch.ops.torch_flashplug.paged_fwd
SPECS = [spec for spec in kernel_table.specs(90, "fwd") if "paged" in spec.features]
SMALL = "fwd_sm90_bf16_d64_window+ragged+paged_m64n64s2"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NEAR, NEAR_LSE = 5e-3, 1e-3  # relative, root mean square; absolute
CAUSAL = Window(-1, 0)
# Rows and keys of each sequence: a prefill, chunks with earlier keys, few query rows, more rows than keys, and
# sequences without rows or keys.
SEQUENCES = {
    "mixed": ((70, 70), (33, 150), (1, 129), (0, 40), (5, 0), (0, 0), (20, 7)),
    "edges": ((3, 15), (3, 16), (3, 17), (3, 63), (3, 64), (3, 65), (1, 1)),
    "long": ((150, 300),),
    "few": ((1, 100), (2, 47), (4, 128), (8, 31), (3, 3)),
    "none": ((0, 0), (4, 0), (0, 20)),
}
WINDOWS = (CAUSAL, Window(), Window(20, 0), Window(40, 7), Window(-1, 0, bottom_right=False))


@dataclass(frozen=True)
class PrefillCall:
    """Packed queries (1, Hq, T, D), pools (pages, Hkv, rows, D), and the rows and keys of each sequence."""

    sequences: tuple[tuple[int, int], ...]
    q: Tensor
    k: Tensor
    v: Tensor
    numbers: Tensor  # (sequences, n)
    window: Window = field(default=CAUSAL)
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def starts(self) -> Tensor:
        return torch.tensor([*accumulate((rows for rows, _ in self.sequences), initial=AHEAD)], dtype=torch.int32)

    @property
    def used(self) -> Tensor:
        return torch.tensor([keys for _, keys in self.sequences], dtype=torch.int32)

    def run(self, device: str) -> tuple[Tensor, Tensor]:
        """Return output and LSE of the kernel."""
        operands = (self.q, self.k, self.v, self.numbers, self.used, None, None, self.sinks)
        tensors = [None if x is None else x.to(device) for x in operands]
        bindings.counters(reset=True)
        with torch_flashplug.sdpa_backend("fa3"):
            out, lse = OP(*tensors, *self.window, self.softcap, None, cu_seqlens_q=self.starts.to(device))
        assert bindings.counters(reset=True)["ours_fwd"] == 1
        return out.cpu(), lse.cpu()

    def visible_mask(self, sequence: int) -> Tensor:
        return self.window.to_mask(*self.sequences[sequence], self.q.device)

    def keys_of(self, pool: Tensor, sequence: int) -> Tensor:
        """Return keys or values of a sequence in fp64, repeated for query heads: (Hq, keys, D)."""
        keys, rows = self.sequences[sequence][1], pool.shape[2]
        pages = pool[self.numbers[sequence, : -(-keys // rows)].long()]
        return pages.transpose(0, 1).flatten(1, 2)[:, :keys].double().repeat_interleave(HEADS[0] // HEADS[1], 0)

    def reference(self) -> tuple[Tensor, Tensor]:
        """Return output and LSE in fp64, (1, Hq, T, Dv) and (1, Hq, T)."""
        out = self.q.new_zeros(*self.q.shape[:3], self.v.shape[3], dtype=torch.float64)
        lse = self.q.new_full(self.q.shape[:3], -math.inf, dtype=torch.float64)
        if self.sinks is not None:
            lse[:] = self.sinks.double().view(1, -1, 1)
        for i, (begin, (rows, keys)) in enumerate(zip(self.starts.tolist()[:-1], self.sequences, strict=True)):
            if rows == 0 or keys == 0:
                continue
            k, v = (self.keys_of(pool, i) for pool in (self.k, self.v))
            scores = self.q[0, :, begin : begin + rows].double() @ k.mT * self.q.shape[3] ** -0.5
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            scores = scores.masked_fill(~self.visible_mask(i), -math.inf)
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks.double().view(-1, 1, 1).expand(-1, rows, 1)), -1)
            out[0, :, begin : begin + rows] = scores.softmax(-1).nan_to_num()[..., :keys] @ v
            lse[0, :, begin : begin + rows] = scores.logsumexp(-1)
        return out, lse


def make_call(
    sequences: str, page_rows: int = 16, dims: tuple[int, int] = (64, 64), dtype: torch.dtype = torch.bfloat16,
    window: Window = CAUSAL, seed: int = SEED,
) -> PrefillCall:  # fmt: skip
    """Return a random call with pages in random order. All numbers without a use are NaN or invalid page numbers."""
    lengths, draw = SEQUENCES[sequences], torch.Generator().manual_seed(seed)
    n = max(1, *(-(-keys // page_rows) for _, keys in lengths))
    pages = len(lengths) * n + 3
    numbers = torch.randperm(pages, generator=draw)[: len(lengths) * n].view(len(lengths), n).int()
    T = AHEAD + sum(rows for rows, _ in lengths) + BEHIND
    q = torch.randn(1, T, HEADS[0], dims[0], generator=draw).to(dtype).transpose(1, 2)
    q[:, :, :AHEAD] = q[:, :, T - BEHIND :] = math.nan
    k, v = (torch.randn(pages, HEADS[1], page_rows, dim, generator=draw).to(dtype) for dim in dims)
    is_used = torch.zeros(pages, page_rows, dtype=torch.bool)
    for i, (_, keys) in enumerate(lengths):
        for key in range(keys):
            is_used[numbers[i, key // page_rows], key % page_rows] = True
        numbers[i, -(-keys // page_rows) :] = (-1, 2**31 - 1)[i % 2]
    for pool in (k, v):
        pool.transpose(1, 2)[~is_used] = math.nan
    return PrefillCall(lengths, q, k, v, numbers, window)


def check_call(call: PrefillCall, device: str) -> None:
    (out, lse), (expected_out, expected_lse) = call.run(device), call.reference()
    assert out.isfinite().all()
    assert float((out.double() - expected_out).norm() / expected_out.norm().clamp(min=1e-9)) < NEAR
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=NEAR_LSE)


@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.name)
def test_every_paged_prefill_kernel(
    kernels_on: str, spec: KernelSpec, kernel_alone: Callable[[KernelSpec], None]
) -> None:
    kernel_alone(spec)
    call = make_call("mixed", 32, (spec.d, spec.dv), DTYPES[spec.dtype])
    check_call(replace(call, softcap=3.0 if "softcap" in spec.features else 0.0), kernels_on)


@pytest.fixture
def small_kernel(kernels_on: str, kernel_alone: Callable[[KernelSpec], None]) -> str:
    """Return the device, with the kernel of the smallest tile as the only one."""
    kernel_alone(KernelSpec.from_name(SMALL))
    return kernels_on


@pytest.mark.parametrize("page_rows", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_page_sizes_and_lengths(small_kernel: str, sequences: str, page_rows: int) -> None:
    """Lengths surround the multiples of a page, and the last rows of a page are unused."""
    window = WINDOWS[([*SEQUENCES].index(sequences) + page_rows.bit_length()) % len(WINDOWS)]
    check_call(make_call(sequences, page_rows, window=window), small_kernel)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows_and_sinks(small_kernel: str, window: Window) -> None:
    """Windows end inside of a page."""
    call = make_call("mixed", 48, window=window)
    check_call(replace(call, sinks=torch.tensor([-3.0, 0.0, 2.0, 50.0])), small_kernel)


def test_head_dims_below_the_tile(small_kernel: str) -> None:
    check_call(make_call("mixed", dims=(56, 40)), small_kernel)


def test_sequences_share_pages(small_kernel: str) -> None:
    """Two sequences have the same pages, and a page occurs twice in a sequence."""
    call = make_call("long")
    numbers = call.numbers.repeat(2, 1)
    numbers[1, 5] = numbers[1, 2]
    rows = call.q[:, :, AHEAD:-BEHIND]
    q = torch.cat((call.q[:, :, :AHEAD], rows, rows, call.q[:, :, -BEHIND:]), 2)
    check_call(replace(call, q=q, numbers=numbers, sequences=call.sequences * 2), small_kernel)


def test_page_of_any_size_alone_in_the_table(small_kernel: str) -> None:
    """A sequence with a single page, as in a cache with KV lengths, may have any number of rows in the page."""
    check_call(make_call("few", 133), small_kernel)


def test_pages_with_interleaved_keys_and_values(small_kernel: str) -> None:
    """Memory is laid out (pages, rows, Hkv, D), with K and V of a row next to each other."""
    call = make_call("mixed")
    cache = torch.stack((call.k, call.v), -2).permute(0, 2, 1, 3, 4).contiguous()
    k, v = (cache[..., i, :].transpose(1, 2) for i in range(2))
    check_call(replace(call, k=k, v=v), small_kernel)


def test_invalid_numbers_access_no_foreign_memory(small_kernel: str) -> None:
    """Results may be wrong, but the interpreter, or compute-sanitizer, checks each memory access."""
    call = make_call("mixed")
    numbers = torch.full_like(call.numbers, -1)
    numbers[::2] = 2**31 - 1
    out, _ = replace(call, numbers=numbers, k=call.k.nan_to_num(), v=call.v.nan_to_num()).run(small_kernel)
    assert out.isfinite().all()


def test_lengths_beyond_the_table_are_clamped(small_kernel: str) -> None:
    call = make_call("long")
    full = call.numbers.shape[1] * 16
    numbers = torch.arange(call.numbers.numel(), dtype=torch.int32).view_as(call.numbers)
    call = replace(call, numbers=numbers, k=call.k.nan_to_num(), v=call.v.nan_to_num(), sequences=((150, full),))
    expected = call.run(small_kernel)
    operands = [x.to(small_kernel) for x in (call.q, call.k, call.v, numbers)]
    used = torch.tensor([2**31 - 1], dtype=torch.int32, device=small_kernel)
    with torch_flashplug.sdpa_backend("fa3"):
        results = OP(*operands, used, None, None, None, *call.window, 0.0, None, cu_seqlens_q=call.starts.to(used))
    for actual, clamped in zip(results, expected, strict=True):
        assert_bitwise_equal("clamped", actual.cpu(), clamped)


def test_output_tensor_of_the_caller(small_kernel: str) -> None:
    """The kernel writes every row of `out`, also rows of no sequence and padded sequences at the end."""
    call = make_call("mixed")
    call = replace(call, sequences=(*call.sequences, (0, 0)), numbers=torch.cat((call.numbers, call.numbers[:1])))
    q, k, v = (x.to(small_kernel).transpose(1, 2) for x in (call.q, call.k, call.v))
    out = torch.full((*q.shape[1:3], v.shape[3]), math.nan, dtype=q.dtype, device=small_kernel)
    pages = {"block_table": call.numbers.to(small_kernel), "seqused_k": call.used.to(small_kernel)}
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend("fa3"):
        returned, lse = attention(
            q[0], k, v, causal=True, cu_seqlens_q=call.starts.to(small_kernel), **pages, out=out, return_lse=True
        )
    assert bindings.counters(reset=True)["ours_fwd"] == 1 and returned is out
    expected_out, expected_lse = call.reference()
    torch.testing.assert_close(out.cpu().double(), expected_out[0].transpose(0, 1), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.cpu().double(), expected_lse[0], rtol=0, atol=NEAR_LSE)


def test_gather_is_the_default(kernels_on: str) -> None:
    """Without a forced backend, pages are gathered, and a kernel of packed sequences runs."""
    call = make_call("few")
    call = replace(call, k=call.k.nan_to_num(), v=call.v.nan_to_num())
    q, k, v = (x.to(kernels_on).transpose(1, 2) for x in (call.q, call.k, call.v))
    lengths = {"block_table": call.numbers, "seqused_k": call.used, "cu_seqlens_q": call.starts}
    lengths = {name: x.to(kernels_on) for name, x in lengths.items()}
    plans: list[str] = []
    callbacks.set_log_callback(lambda _, text: plans.append(text), plans=True)
    try:
        out = attention(q[0], k, v, causal=True, **lengths)
    finally:
        callbacks.set_log_callback(startup._plan_log.log, plans=False)
    assert "paged" not in "".join(re.findall(r'"kernel": "([^"]+)"', "".join(plans)))
    expected, _ = call.reference()
    torch.testing.assert_close(out.cpu().double(), expected[0].transpose(0, 1), rtol=2e-2, atol=2e-2)


def test_limit_of_rows_selects_the_kernel_in_auto(small_kernel: str) -> None:
    """`min_paged_rows` of the cost model opens auto mode to the kernels."""
    call = make_call("few")
    rows = [row for row in kernel_table.KERNEL_ROWS if row.kind != "fwd" or KernelSpec.from_name(SMALL) in row.specs()]
    limit = replace(dispatch_table.COST_MODEL, min_paged_rows=1)
    bindings.push_rows(rows, dispatch_table.CHOICE_ROWS, limit)
    operands = [x.to(small_kernel) for x in (call.q, call.k, call.v, call.numbers, call.used)]
    bindings.counters(reset=True)
    out, _ = OP(*operands, None, None, None, *CAUSAL, 0.0, None, cu_seqlens_q=call.starts.to(small_kernel))
    assert bindings.counters(reset=True)["ours_fwd"] == 1
    expected, _ = call.reference()
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-2, atol=2e-2)
