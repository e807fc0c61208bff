"""Exhausted GPU memory inside of our ops, forward and backward.

torch.OutOfMemoryError must have the text of the allocator of torch, as in stock, and the next call must be right.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from torch_flashplug import attention, sdpa_backend

pytestmark = pytest.mark.gpu

FAILURES, SEED = 50, 20261127
MOST_TRIES = 4 * FAILURES  # a call that frees memory and retries may succeed with less memory than before
S = 2048
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def random_tensor(*sizes: int, seed: int) -> Tensor:
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*sizes, generator=draw, device="cuda", dtype=torch.bfloat16)


def qkv(kv_heads: int = 16, D: int = 64) -> list[Tensor]:
    return [random_tensor(4, heads, S, D, seed=i) for i, heads in enumerate((16, kv_heads, kv_heads))]


def attend_with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch.manual_seed(SEED)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)


def attend_by_backend(backend: str) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_backend(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return call


def attend_in_bshd(**settings: object) -> Call:
    return lambda q, k, v: attention(*(x.transpose(1, 2) for x in (q, k, v)), **settings)


def attend_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    cu = torch.tensor([0, S // 2, S, 3 * S, 4 * S], device="cuda").int()
    return attention(*rows, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=2 * S, max_seqlen_k=2 * S)


def attend_by_varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    cu = torch.tensor([0, S // 2, S, 3 * S, 4 * S], device="cuda").int()
    return varlen.varlen_attn(*rows, cu, cu, 2 * S, 2 * S)


def attend_pages(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    pools = [x.transpose(1, 2).reshape(-1, 128, *x.shape[1::2]) for x in (k, v)]
    table = torch.arange(len(pools[0]), device="cuda").int().flip(0).view(4, -1)
    used = torch.tensor([S, S - 5, 7, S // 2], device="cuda").int()
    return attention(q.transpose(1, 2), *pools, causal=True, block_table=table, seqused_k=used)


def attend_8_bit_cache(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scales = [torch.full((4, k.shape[1], S), 0.03, device="cuda") for _ in "kv"]
    rows = [(x.transpose(1, 2) / 0.03).round().clamp(-127, 127).to(torch.int8) for x in (k, v)]
    return attention(q.transpose(1, 2), *rows, k_scale=scales[0], v_scale=scales[1])


def attend_with_mask(mask: Callable[[], Tensor]) -> Call:
    kept: list[Tensor] = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not kept:
            kept.append(mask())
        return F.scaled_dot_product_attention(q, k, v, attn_mask=kept[0])

    return call


def attend_with_splits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run decode with split-KV, which allocates partial results."""
    queries = q.transpose(1, 2)[:, :128].reshape(-1, 1, *q.shape[1::2])
    rows = [x.transpose(1, 2)[:1, :512].expand(len(queries), -1, -1, -1) for x in (k, v)]
    return attention(queries, *rows, num_splits=4)


GRADIENTS: dict[str, tuple[Call, int]] = {  # the call, and the number of heads of k and v
    "plain": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), 16),
    "grouped": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), 4),
    "masked": (attend_with_mask(lambda: random_tensor(1, 1, S, S, seed=7) > -1), 16),
    "biased": (attend_with_mask(lambda: random_tensor(1, 16, S, S, seed=7)), 16),
    "dropout": (attend_with_dropout, 16),
    "stock": (attend_by_backend("stock"), 16),
    "fa3": (attend_by_backend("fa3"), 16),
    "fa2": (attend_by_backend("fa2"), 16),
    "math": (attend_by_backend("math"), 16),
    "window": (attend_in_bshd(window=(100, 20)), 16),
    "softcap": (attend_in_bshd(causal=True, softcap=20.0), 4),
    "on_end": (attend_packed, 16),
    "varlen": (attend_by_varlen, 16),
}
FORWARD_ONLY: dict[str, tuple[Call, int]] = {
    "pages": (attend_pages, 4),
    "cache": (attend_8_bit_cache, 4),
    "split": (attend_with_splits, 4),
}


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Limit memory to the current allocation plus `more` bytes."""
    torch.cuda.empty_cache()
    total_memory = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def fill_free_segments() -> list[Tensor]:
    """Allocate the free parts of segments in use, which the memory limit does not cover."""
    blocks = []
    for size in (2**24, 2**21, 2**18, 2**14):
        with memory_limit(0):
            while True:
                try:
                    blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break
    return blocks


def measure_needed_bytes(call: Callable[[], object]) -> int:
    """Return the memory allocated by a call from an empty cache."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    num_bytes = torch.cuda.max_memory_reserved() - before
    del result
    return num_bytes


def assert_recovers_from_failures(call: Callable[[], object], check: Callable[[object], None]) -> None:
    """Call repeatedly with memory for a random part of the needed bytes."""
    call()  # allocates everything that is created only once
    blocks = fill_free_segments()
    draw, failures, max_bytes = random.Random(SEED), 0, measure_needed_bytes(call)
    for _ in range(MOST_TRIES):
        try:
            with memory_limit(int(draw.random() * max_bytes)):
                call()
        except torch.OutOfMemoryError as error:
            assert str(error).startswith("CUDA out of memory. Tried to allocate"), error
            failures += 1
        check(call())
        if failures == FAILURES:
            return
    del blocks
    raise AssertionError(f"{failures} failures of {MOST_TRIES} calls")


def assert_results_close(got: object, expected: object) -> None:
    for actual_tensor, expected_tensor in zip(got, expected, strict=True):
        torch.testing.assert_close(actual_tensor, expected_tensor, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", [*GRADIENTS, *FORWARD_ONLY])
def test_forwards_raise_the_out_of_memory_error_of_stock(name: str) -> None:
    call, heads = (GRADIENTS | FORWARD_ONLY)[name]
    leaves = [x.requires_grad_(name in GRADIENTS) for x in qkv(heads)]
    with torch.set_grad_enabled(name in GRADIENTS):
        expected = call(*leaves).detach()
        assert_recovers_from_failures(
            lambda: call(*leaves), lambda out: assert_results_close([out.detach()], [expected])
        )


@pytest.mark.parametrize("name", GRADIENTS)
def test_backwards_raise_the_out_of_memory_error_of_stock(name: str) -> None:
    """Run out of memory on the thread of autograd."""
    call, heads = GRADIENTS[name]
    leaves = [x.requires_grad_() for x in qkv(heads)]
    out = call(*leaves)
    do = random_tensor(*out.shape, seed=11)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, do, retain_graph=True)

    expected = backward()
    assert_recovers_from_failures(backward, lambda grads: assert_results_close(grads, expected))


@pytest.mark.parametrize("stock", [False, True])
def test_out_of_memory_text_equals_stock(stock: bool) -> None:
    q, k, v = qkv()
    blocks = fill_free_segments()
    with memory_limit(0), sdpa_backend("stock" if stock else "auto"), pytest.raises(torch.OutOfMemoryError) as raised:
        F.scaled_dot_product_attention(q, k, v)
    del blocks
    assert "GPU 0 has a total capacity of" in str(raised.value) and "torch_flashplug" not in str(raised.value)
