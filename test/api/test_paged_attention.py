"""attention() of paged KV caches and append_kv(), on any device: numbers, graphs and refused calls."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_flashplug
from torch_flashplug import append_kv, attention
from torch_flashplug.flash_attn import flash_attn_with_kvcache

ROWS, HKV, HQ, D = 16, 2, 4, 32
USED = (50, 0, 64, 17)


def random_tensor(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def pools(device: str) -> dict[str, Tensor]:
    """Return two pools of 20 pages, and the tables of four sequences. Entries outside all sequences are NaN."""
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:16].view(4, 4)
    tensors = {"k": random_tensor(20, ROWS, HKV, D, seed=1), "v": random_tensor(20, ROWS, HKV, D, seed=2)}
    has = torch.zeros(20, ROWS, dtype=torch.bool)
    for numbers, count in zip(order, USED, strict=True):
        for key in range(count):
            has[numbers[key // ROWS], key % ROWS] = True
    for pool in tensors.values():
        pool[~has] = math.nan
    tensors |= {"table": order.int(), "used": torch.tensor(USED).int()}
    return {name: x.to(device) for name, x in tensors.items()}


def gather_sequence(pools: dict[str, Tensor], i: int) -> tuple[Tensor, Tensor]:
    return tuple(pools[x][pools["table"][i].long()].flatten(0, 1)[: USED[i]].unsqueeze(0) for x in "kv")


@pytest.mark.parametrize("Sq", [1, 3])
def test_sequences_attend_to_separate_pages(device: str, pools: dict[str, Tensor], Sq: int) -> None:
    q, sinks = random_tensor(4, Sq, HQ, D).to(device), random_tensor(HQ, seed=5).to(device)
    settings = {"causal": True, "window": (20, None), "sinks": sinks, "return_lse": True}
    out, lse = attention(
        q, pools["k"], pools["v"], block_table=pools["table"], seqused_k=pools["used"], **settings
    )  # fmt: skip
    assert out.shape == (4, Sq, HQ, D) and lse.shape == (4, HQ, Sq) and (out[1] == 0).all()
    for i in (0, 2, 3):
        expected, expected_lse = attention(q[i : i + 1], *gather_sequence(pools, i), **settings)
        torch.testing.assert_close(out[i : i + 1], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[i : i + 1], expected_lse, rtol=1e-4, atol=1e-5)


def test_packed_queries_attend_to_paged_caches(device: str, pools: dict[str, Tensor]) -> None:
    """Use packed queries of different lengths, also with a single row."""
    pages = {"block_table": pools["table"], "seqused_k": pools["used"], "causal": True}
    cu, q = torch.tensor([0, 5, 5, 7, 8], device=device).int(), random_tensor(8, HQ, D).to(device)
    out = attention(q, pools["k"], pools["v"], cu_seqlens_q=cu, **pages)
    for i, (begin, end) in enumerate(((0, 5), (5, 5), (5, 7), (7, 8))):
        expected = attention(q[None, begin:end], *gather_sequence(pools, i), causal=True)
        torch.testing.assert_close(out[None, begin:end], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("starts", [(0, 1, 2, 3, 4), (0, 0, 1, 1, 2), (1, 2, 3, 3, 4), (0, 0, 0, 0, 0)], ids=str)
def test_max_seqlen_q_of_one_does_not_change_results(
    device: str, pools: dict[str, Tensor], starts: tuple[int, ...]
) -> None:
    """Pass max_seqlen_q=1, which allows split-KV.

    Sequences without a row, and rows outside all sequences, must give the same result as without max_seqlen_q.
    """
    pages = {"block_table": pools["table"], "seqused_k": pools["used"], "causal": True, "return_lse": True}
    cu, q = torch.tensor(starts, device=device).int(), random_tensor(4, HQ, D).to(device)
    actual, lse = attention(q, pools["k"], pools["v"], cu_seqlens_q=cu, max_seqlen_q=1, **pages)
    expected, expected_lse = attention(q, pools["k"], pools["v"], cu_seqlens_q=cu, **pages)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)


def test_8_bit_pages_equal_dequantized_pages(device: str, pools: dict[str, Tensor]) -> None:
    """Use 8-bit pools with a scale per row; an op without an 8-bit kernel dequantizes to 16 bits."""
    q = random_tensor(4, 1, HQ, D).to(device, torch.bfloat16)
    clean = {name: pools[name].nan_to_num() for name in "kv"}
    scales = {f"{name}_scale": x.abs().amax(-1).transpose(1, 2) / 127 for name, x in clean.items()}
    eight = {
        name: (x / scales[f"{name}_scale"].transpose(1, 2).unsqueeze(-1).clamp(min=1e-9)).round().to(torch.int8)
        for name, x in clean.items()
    }
    pages = {"block_table": pools["table"], "seqused_k": pools["used"]}
    out = attention(q, eight["k"], eight["v"], **pages, **scales)
    expected = attention(q, clean["k"].bfloat16(), clean["v"].bfloat16(), **pages)
    assert float((out.float() - expected.float()).norm() / expected.float().norm()) < 0.03


def test_gradients_of_paged_calls_are_refused(device: str, pools: dict[str, Tensor]) -> None:
    q = random_tensor(4, 1, HQ, D).to(device).requires_grad_()
    out = attention(q, pools["k"], pools["v"], block_table=pools["table"], seqused_k=pools["used"])
    with pytest.raises(RuntimeError, match="gradients are not supported with block_table"):
        out.sum().backward()
    arguments = {"block_table": pools["table"], "seqused_k": pools["used"]}
    arguments["cu_seqlens_q"] = torch.tensor([0, 1, 2, 3, 4], device=device).int()
    out = attention(q[:, 0], pools["k"], pools["v"], **arguments)
    with pytest.raises(RuntimeError, match="gradients are not supported with seqused_k"):
        out.sum().backward()


@pytest.mark.usefixtures("fresh_dynamo")
def test_paged_op_passes_opcheck_and_compiles(device: str, pools: dict[str, Tensor]) -> None:
    q, k, v = random_tensor(4, 2, HQ, D).to(device), pools["k"].nan_to_num(), pools["v"].nan_to_num()
    turned = (x.transpose(1, 2) for x in (q, k, v))
    arguments = (*turned, pools["table"], pools["used"], None, None, None, -1, 0, True, 0.0, None)
    torch.library.opcheck(torch.ops.torch_flashplug.paged_fwd, arguments)

    def call(q: Tensor) -> Tensor:
        return attention(q * 2.0, k, v, causal=True, block_table=pools["table"], seqused_k=pools["used"])

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(q), call(q))


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"seqused_k": None}, "block_table needs seqused_k"),
        ({"block_table": torch.zeros(4, 4)}, r"block_table must be an int32 tensor .*, but got torch.float32 \(4, 4\)"),
        ({"block_table": torch.zeros(3, 4).int()}, "must fit"),
        ({"cu_seqlens_k": torch.zeros(5).int()}, "cu_seqlens_k is not supported"),
        ({"seqused_k": torch.zeros(4)}, "seqused_k must be an int32 tensor .*, but got torch.float32"),
        ({"k_scale": 2.0}, "k_scale and v_scale must be None unless"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(changed: dict[str, object], says: str) -> None:
    pool, table, used = random_tensor(8, ROWS, HKV, D), torch.zeros(4, 4).int(), torch.ones(4).int()
    with pytest.raises(ValueError, match=says):
        attention(random_tensor(4, 1, HQ, D), pool, pool, **{"block_table": table, "seqused_k": used} | changed)


@pytest.mark.parametrize("lengths", [{}, {"cu_seqlens_q": (0, 2, 3)}, {"cu_seqlens_q": (0, 1, 2), "max_seqlen_q": 1}])
@pytest.mark.parametrize("number", [-1, 8])
def test_used_page_numbers_outside_the_pool_are_refused_on_a_cpu(number: int, lengths: dict[str, object]) -> None:
    """Page numbers after the KV length may have any value."""
    pool, q = random_tensor(8, ROWS, HKV, D), random_tensor(2, 1, HQ, D)
    if "cu_seqlens_q" in lengths:
        lengths = lengths | {"cu_seqlens_q": torch.tensor(lengths["cu_seqlens_q"]).int()}
        q = random_tensor(int(lengths["cu_seqlens_q"][-1]), HQ, D)
    table = torch.tensor([[3, number, number], [5, 6, number]]).int()
    attention(q, pool, pool, block_table=table, seqused_k=torch.tensor([ROWS, 2 * ROWS]).int(), **lengths)
    with pytest.raises(ValueError, match=f"page numbers from 0 to 7 for the first seqused_k keys, but got {number}"):
        attention(q, pool, pool, block_table=table, seqused_k=torch.tensor([ROWS, 2 * ROWS + 1]).int(), **lengths)


@pytest.mark.parametrize("packed", [False, True])
def test_scales_of_a_paged_cache_have_the_dims_of_pages(packed: bool) -> None:
    """The error names pages and rows of a page, because a paged cache has no batch size and no number of keys."""
    pool, table, used = torch.zeros(8, ROWS, HKV, D).to(torch.int8), torch.zeros(4, 4).int(), torch.ones(4).int()
    q = random_tensor(4, HQ, D) if packed else random_tensor(4, 1, HQ, D)
    lengths = {"cu_seqlens_q": torch.tensor([0, 1, 2, 3, 4]).int()} if packed else {}
    shapes = rf"\(pages, Hkv\) or \(pages, Hkv, rows\).* pages, Hkv, rows = \(8, {HKV}, {ROWS}\), but got \(3,\)"
    with pytest.raises(ValueError, match=f"v_scale must have shape .*{shapes}"):
        attention(q, pool, pool, block_table=table, seqused_k=used, k_scale=1.0, v_scale=torch.ones(3), **lengths)
    with pytest.raises(ValueError, match=r"k_scale must be a number or a tensor .*\(pages, Hkv, rows\) for int8"):
        attention(q, pool, pool, block_table=table, seqused_k=used, v_scale=1.0, **lengths)


@pytest.mark.parametrize("paged", [False, True])
def test_append_writes_after_the_kv_length(device: str, paged: bool) -> None:
    """Append new keys after the KV length, as far as the cache has capacity; nothing else may be written."""
    used = torch.tensor([3, 30, 31, 32]).int()
    sizes = (10, ROWS) if paged else (4, 2 * ROWS)
    caches = [torch.full((*sizes, HKV, D), -7.0) for _ in range(2)]
    table = torch.tensor([[4, 1], [0, 9], [3, 8], [6, 2]]).int() if paged else None
    new = [random_tensor(4, 2, HKV, D, seed=seed) for seed in (1, 2)]
    expected = [cache.clone() for cache in caches]
    for x, cache in zip(new, expected, strict=True):
        for i, count in enumerate(used.tolist()):
            for j in range(2):
                key_idx = count + j
                if key_idx < 2 * ROWS:
                    cache[(table[i, key_idx // ROWS], key_idx % ROWS) if paged else (i, key_idx)] = x[i, j]
    arguments = [None if x is None else x.to(device) for x in (*new, *caches, used, table)]
    counts = append_kv(*arguments)
    assert counts.tolist() == [5, 32, 32, 32] and counts.dtype == torch.int32
    for cache_of_call, exact in zip(arguments[2:4], expected, strict=True):
        assert torch.equal(cache_of_call.cpu(), exact)


def test_append_skips_rows_without_a_valid_position(device: str) -> None:
    """Skip rows without a valid position.

    Cases: page numbers outside the pool, a full sequence whose last page belongs to a second sequence, and a pool
    without pages.
    """
    new = torch.ones(2, 2, HKV, D, device=device)
    pool = torch.zeros(5, 4, HKV, D, device=device)
    for used, table, counts, written in (
        ((2, 0), ((3, 1), (-1, 2)), [4, 0], [(3, 2), (3, 3)]),
        ((3, 0), ((3, 9), (7, 2)), [4, 0], [(3, 3)]),
        ((3, 8), ((1, 2), (0, 1)), [5, 8], [(1, 3), (2, 0)]),
        ((8, 3), ((0, 1), (1, 2)), [8, 5], [(1, 3), (2, 0)]),
        ((8, 8), ((0, 1), (1, 2)), [8, 8], []),
    ):
        caches = [pool.clone() for _ in range(2)]
        numbers = [torch.tensor(x, device=device).int() for x in (used, table)]
        assert append_kv(new, new, *caches, *numbers).tolist() == counts
        expected = pool.clone()
        for place in written:
            expected[place] = 1.0
        assert torch.equal(caches[0], expected) and torch.equal(caches[1], expected)
    assert append_kv(new, new, pool[:0], pool[:0], *numbers).tolist() == [8, 8]


def make_append_arguments() -> tuple[Tensor, ...]:
    """Return arguments of append_kv."""
    numbers = (torch.tensor(x).int() for x in ((3, 0), ((3, 9), (1, 2))))
    return *(random_tensor(2, 2, HKV, D, seed=seed) for seed in (1, 2)), *torch.zeros(2, 5, 4, HKV, D), *numbers


def test_append_reads_no_tensor_on_the_host() -> None:
    """Check that no number is read: the host would wait for a GPU, and a CUDA graph cannot capture the read."""

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    with Waits():
        append_kv(*make_append_arguments())


@pytest.mark.usefixtures("fresh_dynamo")
def test_append_in_a_compiled_graph() -> None:
    plain, graphed = make_append_arguments(), make_append_arguments()
    counts = append_kv(*plain)
    assert torch.equal(torch.compile(append_kv, backend="aot_eager", fullgraph=True)(*graphed), counts)
    assert all(torch.equal(a, b) for a, b in zip(plain, graphed, strict=True)) and plain[2].any()


def test_cache_is_unchanged_after_an_error() -> None:
    q, new, cache = random_tensor(2, 1, HQ, D), random_tensor(2, 1, HKV, D), torch.zeros(2, 8, HKV, D)
    pool, table = torch.zeros(4, 4, HKV, D), torch.zeros(2, 2).long()
    for changed in (
        {"window_size": (-2, 1)}, {"num_splits": 256}, {"softcap": -1}, {"causal": 1}, {"s_aux": torch.zeros(3)},
        {"block_table": table}, {"block_table": table.int() + 4},
    ):  # fmt: skip
        cache_of_call = pool if "block_table" in changed else cache
        with pytest.raises(ValueError, match="attention: "):
            flash_attn_with_kvcache(q, cache_of_call, cache_of_call.clone(), new, new, cache_seqlens=4, **changed)
        assert not cache_of_call.any()


def test_empty_pools_have_no_keys(device: str) -> None:
    pool, table, used = random_tensor(0, ROWS, HKV, D).to(device), torch.zeros(2, 3).int(), torch.tensor([5, 0]).int()
    pages = {"block_table": table.to(device), "seqused_k": used.to(device), "return_lse": True}
    out, lse = attention(random_tensor(2, 1, HQ, D).to(device), pool, pool, **pages)
    assert not out.any() and (lse == -math.inf).all()


def test_append_refuses_mismatched_shapes_and_dtypes() -> None:
    cache, used = torch.zeros(2, 8, HKV, D), torch.zeros(2).int()
    with pytest.raises(ValueError, match="append_kv: k .* must fit the caches"):
        append_kv(random_tensor(2, 1, HKV, D + 8), random_tensor(2, 1, HKV, D), cache, cache, used)
    with pytest.raises(ValueError, match="k and v must have the dtypes of the caches"):
        append_kv(*(random_tensor(2, 1, HKV, D).half() for _ in range(2)), cache, cache, used)


def test_append_names_the_tensor_on_a_different_device() -> None:
    cache, used = torch.zeros(2, 8, HKV, D), torch.zeros(2, device="meta").int()
    with pytest.raises(ValueError, match="must be on one device, but got k on cpu, .*, seqused_k on meta"):
        append_kv(*(random_tensor(2, 1, HKV, D) for _ in range(2)), cache, cache, used)


def test_flash_attn_with_paged_kvcache(device: str, pools: dict[str, Tensor]) -> None:
    """Append to pages, then compare attention with a contiguous copy."""
    q, k, v = (random_tensor(4, 1, heads, D, seed=seed).to(device) for seed, heads in ((4, HQ), (5, HKV), (6, HKV)))
    room = torch.tensor([50, 0, 63, 17], device=device).int()
    caches = [pools[name].clone() for name in "kv"]
    out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=room, page_table=pools["table"], causal=True)
    for i, count in enumerate(room.tolist()):
        keys, values = (
            torch.cat((cache[pools["table"][i].long()].flatten(0, 1)[:count], x[i]))[None]
            for cache, x in zip((pools["k"], pools["v"]), (k, v), strict=True)
        )
        torch.testing.assert_close(out[i : i + 1], attention(q[i : i + 1], keys, values), rtol=1e-4, atol=1e-5)


def test_few_rows_with_kv_lengths_use_caches_as_pages(device: str) -> None:
    """Use few query rows and KV lengths, which split-KV kernels serve on a GPU."""
    q, k, v = (
        random_tensor(3, S, heads, 64, seed=S).to(device, torch.bfloat16) for S, heads in ((2, 8), (100, 2), (100, 2))
    )
    used = torch.tensor([100, 0, 33], device=device).int()
    with torch.no_grad():
        out, lse = attention(q, k, v, causal=True, seqused_k=used, return_lse=True)
        assert (out[1] == 0).all() and (lse[1] == -math.inf).all()
        for i in (0, 2):
            expected = attention(q[i : i + 1], k[i : i + 1, : used[i]], v[i : i + 1, : used[i]], causal=True)
            assert float((out[i].float() - expected[0].float()).norm() / expected.float().norm()) < 0.01
    assert torch_flashplug.attention is attention
