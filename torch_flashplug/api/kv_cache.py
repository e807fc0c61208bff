"""append_kv(): writes keys and values of new tokens into a KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_args import check_rank


@torch.no_grad()
def append_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, seqused_k: Tensor, block_table: Tensor | None = None
) -> Tensor:
    """Write new keys and values into caches in place, after the keys of each sequence, and return the new KV lengths.

    The host waits for nothing. A token without room in the cache, or with a page number outside the pool, is dropped,
    together with all later tokens of the sequence. Dropped tokens do not count in the result.

    Args:
        k (Tensor): New keys (B, Snew, Hkv, D), dtype of `k_cache`.
        v (Tensor): New values (B, Snew, Hkv, Dv), dtype of `v_cache`.
        k_cache (Tensor): Cache (B, S, Hkv, D), or with `block_table` a pool of pages (pages, rows of a page, Hkv, D).
            Written in place.
        v_cache (Tensor): Cache (B, S, Hkv, Dv), or with `block_table` a pool of pages (pages, rows of a page, Hkv, Dv).
            Written in place.
        seqused_k (Tensor): (B,) int32, the KV length of each sequence before the call.
        block_table (Tensor or None): (B, n) int32, the page numbers of each sequence, as in `attention()`.

    Returns:
        (B,) int32, the KV length of each sequence after the call.

    Raises:
        TypeError: A tensor has another number of dims, or is no tensor. Nothing is written then.
        ValueError: Shapes, dtypes or devices do not fit. Nothing is written then.
    """
    _check_appended(k, v, k_cache, v_cache, seqused_k, block_table)
    B, new, rows = k.shape[0], k.shape[1], k_cache.shape[1]
    of_sequence = 1 if block_table is None else block_table.shape[1]
    used = seqused_k.long().clamp(0, rows * of_sequence).unsqueeze(1)
    if not B * new * rows * of_sequence * len(k_cache):
        return used.squeeze(1).int()
    place = used + torch.arange(new, device=k.device)
    there, nth = place < rows * of_sequence, (place // rows).clamp(max=of_sequence - 1)
    if block_table is None:
        number = torch.arange(B, device=k.device).unsqueeze(1).expand(B, new)
    else:
        number = block_table.long().gather(1, nth)
        there = there & (number >= 0) & (number < len(k_cache))
    there = there.cumprod(1).bool()
    # A dropped token repeats the write of a token with a place, because the number of writes is fixed. If the call has
    # no token with a place, each write stores the current contents of some place.
    flat = (number.clamp(0, len(k_cache) - 1) * rows + place % rows).flatten()
    some = (
        there.flatten().int().argmax(0, keepdim=True)
    )  # shape (1,), because the host would wait for an index without dims
    flat = torch.where(there.flatten(), flat, flat[some])
    for x, cache in ((k, k_cache), (v, v_cache)):
        given, page, row = x.flatten(0, 1), flat // rows, flat % rows
        again = torch.where(there.any(), given[some], cache[page[some], row[some]])
        cache[page, row] = torch.where(there.flatten()[:, None, None], given, again)
    return (used.squeeze(1) + there.sum(1)).int()


def _check_appended(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, seqused_k: Tensor, block_table: Tensor | None
) -> None:  # fmt: skip
    tensors = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    for name, x in tensors.items():
        check_rank(name, x, 4, "a tensor of shape (batch or pages, rows, heads, head dim)", of="append_kv")
    numbers = {"seqused_k": (seqused_k, 1)} | ({} if block_table is None else {"block_table": (block_table, 2)})
    for name, (x, rank) in numbers.items():
        if not isinstance(x, Tensor) or x.dtype != torch.int32 or x.dim() != rank or x.shape[0] != k.shape[0]:
            given = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"append_kv: {name} must be an int32 tensor with one row for each of {k.shape[0]} sequences, "
                f"but got {given}."
            )
    if len({x.device for x in (*tensors.values(), *(x for x, _ in numbers.values()))}) > 1:
        named = tensors | {name: x for name, (x, _) in numbers.items()}
        devices = ", ".join(f"{name} on {x.device}" for name, x in named.items())
        raise ValueError(
            f"append_kv: all tensors, including seqused_k and block_table, must be on one device, but got {devices}."
        )
    fits = block_table is not None or len(k_cache) == len(k)
    fits = fits and all(x.shape[2:] == cache.shape[2:] for x, cache in ((k, k_cache), (v, v_cache)))
    if not fits or k.shape[:2] != v.shape[:2] or k_cache.shape[:2] != v_cache.shape[:2]:
        sizes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise ValueError(
            "append_kv: k and v (B, Snew, Hkv, D) must fit the caches (B, S, Hkv, D) or the pools of pages, "
            f"but got {sizes}."
        )
    if (k.dtype, v.dtype) != (k_cache.dtype, v_cache.dtype):
        dtypes = f"{k.dtype}, {v.dtype}, caches {k_cache.dtype}, {v_cache.dtype}"
        raise ValueError(f"append_kv: k and v must have the dtypes of the caches, but got {dtypes}. Cast k and v.")
