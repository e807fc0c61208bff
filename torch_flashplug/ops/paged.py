"""The op torch_flashplug::paged_fwd: attention to a paged KV cache (vLLM, arXiv 2309.06180), forward only.

Each sequence has its pages, and the first used_k[i] keys of sequence i are visible. A decode kernel reads the pages in
place, in 16 or 8 bits (src/ops/attention_ops.cpp). For more query rows, and on a CPU, the pages are first gathered into
contiguous tensors for the kernels of packed sequences. There are no gradients.

A pool is (pages, Hkv, rows of a page, D). The argument `pages` (B, n) int32 is the block table: the page numbers of
each sequence. Page numbers outside the pool, and page numbers after the visible keys, may have any value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import NO_PLAN, SPLITS, namespace
from .quantized_kv import dequantised, multiplied_in
from .sdpa import empty_in_layout_of, empty_results, held, never_a_frame

_library = torch.library.Library("torch_flashplug", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
for _name in ("paged_fwd", "_paged_math"):
    _library.define(
        f"{_name}(Tensor query, Tensor key, Tensor value, Tensor pages, Tensor used_k, Tensor? k_scale, "
        "Tensor? v_scale, Tensor? sinks, int left, int right, bool bottom_right, float softcap, float? scale, "
        f"{SPLITS}, int block_mode=0) -> (Tensor out, Tensor lse)",
        tags=_TAGS,
    )
_library.define(
    "paged_fwd_out(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor pages, Tensor used_k, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? sinks, int left, int right, bool bottom_right, float softcap, "
    f"float? scale, {SPLITS}, int block_mode=0) -> Tensor lse",
    tags=_TAGS,
)


def gathered(pool: Tensor, pages: Tensor) -> Tensor:
    """Copy pages of a pool (pages, Hkv, rows of a page, ...) into (B * n * rows, Hkv, ...), sequence by sequence."""
    if not pool.shape[0]:
        return pool.new_zeros(pages.numel() * pool.shape[2], pool.shape[1], *pool.shape[3:])
    rows = pool.transpose(1, 2)
    rows = rows.view(torch.uint8) if rows.element_size() == 1 else rows  # index_select supports few 8-bit dtypes
    rows = rows.index_select(0, pages.flatten().long().clamp(0, pool.shape[0] - 1))
    return rows.view(pool.dtype).flatten(0, 1)


def _check(query: Tensor, key: Tensor, value: Tensor, pages: Tensor, used_k: Tensor) -> None:
    """Raise RuntimeError if the arguments do not fit together. Reads sizes, hence for real tensors only."""
    torch._check(
        query.dim() == key.dim() == value.dim() == 4 and key.shape[:3] == value.shape[:3]
        and query.shape[3] == key.shape[3] and key.shape[1] > 0 and query.shape[1] % key.shape[1] == 0,
        lambda: "paged_fwd: query, key and value must have shapes (B, Hq, Sq, D), (pages, Hkv, rows, D) and "
        "(pages, Hkv, rows, Dv), Hq a multiple of Hkv, "
        f"but got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}.",
    )  # fmt: skip
    torch._check(
        pages.dim() == 2 and used_k.shape == pages.shape[:1] == query.shape[:1]
        and pages.dtype == used_k.dtype == torch.int32,
        lambda: f"paged_fwd: pages and used_k must be int32 (B, n) and (B,) with B = {query.shape[0]}, "
        f"but got {pages.dtype} {tuple(pages.shape)} and {used_k.dtype} {tuple(used_k.shape)}.",
    )  # fmt: skip


@held
@never_a_frame
def _math(
    query: Tensor, key: Tensor, value: Tensor, pages: Tensor, used_k: Tensor, k_scale: Tensor | None,
    v_scale: Tensor | None, sinks: Tensor | None, *settings: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute paged_fwd by gathering all pages.

    `settings` are the fields of windowed.Window, softcap, scale, num_splits and fixed_split_size, and a mode other than
    0.
    """
    _check(query, key, value, pages, used_k)
    B, Hq, Sq, _ = query.shape
    keys = pages.shape[1] * key.shape[2]
    k, v = (gathered(x, pages) for x in (key, value))
    cast_query = query
    if k_scale is not None:
        dtype = multiplied_in(query)
        k, v = (dequantised(x, gathered(s, pages), dtype) for x, s in ((k, k_scale), (v, v_scale)))
        cast_query = query.to(dtype)
    sequence_idx = torch.arange(B + 1, dtype=torch.int32, device=query.device)
    q = cast_query.transpose(0, 1).flatten(1, 2).unsqueeze(0)
    packed_kv = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))
    visible = used_k.clamp(0, keys if len(key) else 0)
    result, lse = namespace.attention_fwd(
        q, *packed_kv, sinks, sequence_idx * Sq, sequence_idx * keys, visible, *settings[:7],
        *((*NO_PLAN, *settings[7:]) if settings[7:] else ()),
    )  # fmt: skip
    out = empty_in_layout_of(query, (B, Hq, Sq, value.shape[3]))
    out.copy_(result.squeeze(0).unflatten(1, (B, Sq)).transpose(0, 1))
    return out, lse.squeeze(0).unflatten(1, (B, Sq)).transpose(0, 1).contiguous()


def _math_out(out: Tensor, *args: object) -> Tensor:
    result, lse = _math(*args)
    out.copy_(result)
    return lse


def _out_fake(out: Tensor, *args: object) -> Tensor:
    return empty_results(*args)[1]


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    """Save nothing for the backward."""


def _backward(ctx, *grads: Tensor | None) -> tuple:
    raise RuntimeError(
        "attention: gradients are not supported with block_table. Call attention() under torch.no_grad()."
    )


def _register() -> None:
    _library.impl("paged_fwd", _math, "CPU")
    _library.impl("paged_fwd_out", _math_out, "CPU")
    torch.library.register_fake("torch_flashplug::paged_fwd_out", _out_fake, lib=_library)
    _library.impl("_paged_math", _math, "CompositeExplicitAutograd")
    for name in ("paged_fwd", "_paged_math"):
        torch.library.register_fake(f"torch_flashplug::{name}", empty_results, lib=_library)
    torch.library.register_autograd(
        "torch_flashplug::paged_fwd", _backward, setup_context=_setup_context, lib=_library
    )  # fmt: skip


_register()
