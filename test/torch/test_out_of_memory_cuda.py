"""The GPU's memory ends inside of our ops, forward and backward: torch.OutOfMemoryError with the text of torch's
allocator, as stock raises it, and the next call is right.
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
MOST_TRIES = 4 * FAILURES  # a call that frees and retries may be served with less than it took before
S = 2048
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def drawn(*sizes: int, seed: int) -> Tensor:
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*sizes, generator=draw, device="cuda", dtype=torch.bfloat16)


def qkv(kv_heads: int = 16, D: int = 64) -> list[Tensor]:
    return [drawn(4, heads, S, D, seed=i) for i, heads in enumerate((16, kv_heads, kv_heads))]


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch.manual_seed(SEED)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)


def forced(backend: str) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_backend(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return call


def of_rows(**settings: object) -> Call:
    return lambda q, k, v: attention(*(x.transpose(1, 2) for x in (q, k, v)), **settings)


def on_end(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    cu = torch.tensor([0, S // 2, S, 3 * S, 4 * S], device="cuda").int()
    return attention(*rows, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=2 * S, max_seqlen_k=2 * S)


def by_varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    cu = torch.tensor([0, S // 2, S, 3 * S, 4 * S], device="cuda").int()
    return varlen.varlen_attn(*rows, cu, cu, 2 * S, 2 * S)


def of_pages(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    pools = [x.transpose(1, 2).reshape(-1, 128, *x.shape[1::2]) for x in (k, v)]
    table = torch.arange(len(pools[0]), device="cuda").int().flip(0).view(4, -1)
    used = torch.tensor([S, S - 5, 7, S // 2], device="cuda").int()
    return attention(q.transpose(1, 2), *pools, causal=True, block_table=table, seqused_k=used)


def of_cache(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scales = [torch.full((4, k.shape[1], S), 0.03, device="cuda") for _ in "kv"]
    rows = [(x.transpose(1, 2) / 0.03).round().clamp(-127, 127).to(torch.int8) for x in (k, v)]
    return attention(q.transpose(1, 2), *rows, k_scale=scales[0], v_scale=scales[1])


def masked(mask: Callable[[], Tensor]) -> Call:
    kept: list[Tensor] = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not kept:
            kept.append(mask())
        return F.scaled_dot_product_attention(q, k, v, attn_mask=kept[0])

    return call


def split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Decode, with partial results of splits."""
    queries = q.transpose(1, 2)[:, :128].reshape(-1, 1, *q.shape[1::2])
    rows = [x.transpose(1, 2)[:1, :512].expand(len(queries), -1, -1, -1) for x in (k, v)]
    return attention(queries, *rows, num_splits=4)


GRADIENTS: dict[str, tuple[Call, int]] = {  # and how many heads k and v have
    "plain": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), 16),
    "grouped": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), 4),
    "masked": (masked(lambda: drawn(1, 1, S, S, seed=7) > -1), 16),
    "biased": (masked(lambda: drawn(1, 16, S, S, seed=7)), 16),
    "dropout": (dropped, 16),
    "stock": (forced("stock"), 16),
    "fa3": (forced("fa3"), 16),
    "fa2": (forced("fa2"), 16),
    "math": (forced("math"), 16),
    "window": (of_rows(window=(100, 20)), 16),
    "softcap": (of_rows(causal=True, softcap=20.0), 4),
    "on_end": (on_end, 16),
    "varlen": (by_varlen, 16),
}
FORWARD_ONLY: dict[str, tuple[Call, int]] = {"pages": (of_pages, 4), "cache": (of_cache, 4), "split": (split, 4)}


@contextmanager
def only(more: int) -> Iterator[None]:
    """So many bytes beside those that are taken now."""
    torch.cuda.empty_cache()
    everything = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / everything)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def fill() -> list[Tensor]:
    """Takes what the allocator has left of segments in use, which no limit holds back."""
    taken = []
    for size in (2**24, 2**21, 2**18, 2**14):
        with only(0):
            while True:
                try:
                    taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break
    return taken


def needed(call: Callable[[], object]) -> int:
    """What it takes of an empty cache."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    found = torch.cuda.max_memory_reserved() - before
    del kept
    return found


def fails_often(call: Callable[[], object], right: Callable[[object], None]) -> None:
    """With room for a random part of what it needs."""
    call()  # whatever is made once
    taken = fill()
    draw, failures, most = random.Random(SEED), 0, needed(call)
    for _ in range(MOST_TRIES):
        try:
            with only(int(draw.random() * most)):
                call()
        except torch.OutOfMemoryError as error:
            assert str(error).startswith("CUDA out of memory. Tried to allocate"), error
            failures += 1
        right(call())
        if failures == FAILURES:
            return
    del taken
    raise AssertionError(f"{failures} failures of {MOST_TRIES} calls")


def same(got: object, wanted: object) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", [*GRADIENTS, *FORWARD_ONLY])
def test_forwards_raise_what_stock_raises(name: str) -> None:
    call, heads = (GRADIENTS | FORWARD_ONLY)[name]
    leaves = [x.requires_grad_(name in GRADIENTS) for x in qkv(heads)]
    with torch.set_grad_enabled(name in GRADIENTS):
        wanted = call(*leaves).detach()
        fails_often(lambda: call(*leaves), lambda out: same([out.detach()], [wanted]))


@pytest.mark.parametrize("name", GRADIENTS)
def test_backwards_raise_what_stock_raises(name: str) -> None:
    """On autograd's thread."""
    call, heads = GRADIENTS[name]
    leaves = [x.requires_grad_() for x in qkv(heads)]
    out = call(*leaves)
    do = drawn(*out.shape, seed=11)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, do, retain_graph=True)

    wanted = backward()
    fails_often(backward, lambda grads: same(grads, wanted))


@pytest.mark.parametrize("stock", [False, True])
def test_the_text_is_stocks(stock: bool) -> None:
    q, k, v = qkv()
    taken = fill()
    with only(0), sdpa_backend("stock" if stock else "auto"), pytest.raises(torch.OutOfMemoryError) as raised:
        F.scaled_dot_product_attention(q, k, v)
    del taken
    assert "GPU 0 has a total capacity of" in str(raised.value) and "torch_flashplug" not in str(raised.value)
