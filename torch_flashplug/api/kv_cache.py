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
    B, num_new, rows = k.shape[0], k.shape[1], k_cache.shape[1]
    pages_per_sequence = 1 if block_table is None else block_table.shape[1]
    kv_lengths = seqused_k.long().clamp(0, rows * pages_per_sequence).unsqueeze(1)
    if not B * num_new * rows * pages_per_sequence * len(k_cache):
        return kv_lengths.squeeze(1).int()
    position = kv_lengths + torch.arange(num_new, device=k.device)
    fits_in_cache = position < rows * pages_per_sequence
    page_column = (position // rows).clamp(max=pages_per_sequence - 1)
    if block_table is None:
        page_index = torch.arange(B, device=k.device).unsqueeze(1).expand(B, num_new)
    else:
        page_index = block_table.long().gather(1, page_column)
        fits_in_cache = fits_in_cache & (page_index >= 0) & (page_index < len(k_cache))
    fits_in_cache = fits_in_cache.cumprod(1).bool()
    # The number of writes is fixed, so a dropped token repeats the write of a token that fits into the cache. If no
    # token of the call fits, each write stores the current contents of a position.
    flat_position = (page_index.clamp(0, len(k_cache) - 1) * rows + position % rows).flatten()
    is_kept = fits_in_cache.flatten()
    first_kept = is_kept.int().argmax(0, keepdim=True)  # shape (1,): the host would wait for an index without dims
    flat_position = torch.where(is_kept, flat_position, flat_position[first_kept])
    for x, cache in ((k, k_cache), (v, v_cache)):
        new_rows, page, row = x.flatten(0, 1), flat_position // rows, flat_position % rows
        repeated_row = torch.where(fits_in_cache.any(), new_rows[first_kept], cache[page[first_kept], row[first_kept]])
        cache[page, row] = torch.where(is_kept[:, None, None], new_rows, repeated_row)
    return (kv_lengths.squeeze(1) + fits_in_cache.sum(1)).int()


def _check_appended(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, seqused_k: Tensor, block_table: Tensor | None
) -> None:  # fmt: skip
    tensors = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    for name, x in tensors.items():
        check_rank(name, x, 4, "a tensor of shape (batch or pages, rows, heads, head dim)", function="append_kv")
    numbers = {"seqused_k": (seqused_k, 1)} | ({} if block_table is None else {"block_table": (block_table, 2)})
    for name, (x, rank) in numbers.items():
        if not isinstance(x, Tensor) or x.dtype != torch.int32 or x.dim() != rank or x.shape[0] != k.shape[0]:
            actual = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"append_kv: {name} must be an int32 tensor with one row for each of {k.shape[0]} sequences, "
                f"but got {actual}."
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
