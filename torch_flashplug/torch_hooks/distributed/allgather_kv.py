"""Context parallelism without a ring: ops torch_flashplug::gathered_fwd and gathered_bwd.

context_parallel.use("gather"), called on all ranks, selects these ops. The ops gather keys and values of all ranks.
Each chunk of a rank's rows is one call. With is_causal, the call sees the keys up to the end of the chunk, causal to
the bottom right. Otherwise the call sees all keys. No merge is needed. Gradients of keys and values are summed by the
reduce-scatter to the owner. A rank holds all keys and values of a layer meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ...dispatch import bindings
from ...ops import attention, reference, sdpa
from . import ring_attention
from .ring_attention import Settings

# The first name exists since torch 2.13, the second name serves older versions.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_WINDOW = attention.Window(right=0, bottom_right=True)

_library = torch.library.Library("torch_flashplug", "FRAGMENT")
for _name in ("fwd", "bwd"):
    _schema = getattr(ring_attention.namespace, f"ring_{_name}").default._schema
    _library.define(
        str(_schema).removeprefix("torch_flashplug::").replace("ring_", "gathered_"), tags=ring_attention.TAGS
    )

namespace = torch.ops.torch_flashplug


class _Chunks:
    """Chunks of a sequence and the ranks of the chunks.

    With load balance, rank r of W has chunks r and 2 W - 1 - r. Without load balance, rank r has chunk r.
    """

    def __init__(self, settings: Settings, query: Tensor, key: Tensor) -> None:
        ring_attention.check(settings, query, key)
        self.group = dist.distributed_c10d._resolve_process_group(settings.group)
        self.num_ranks, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.settings = settings
        last = 2 * self.num_ranks - 1
        held = [(r, last - r) if settings.balanced else (r,) for r in range(self.num_ranks)]
        self.local_chunks, chunk_order = held[self.rank], [chunk for chunks in held for chunk in chunks]
        # Positions of the ordered chunks in the gathered tensor.
        self._positions = sorted(range(len(chunk_order)), key=chunk_order.__getitem__)
        self._chunk_order, self.num_chunks = chunk_order, len(chunk_order)

    def calls(self, rows: int, keys: int) -> Iterator[tuple[slice, slice]]:
        """Yield the rows of each chunk on this rank and the ordered keys visible to the chunk."""
        rows, keys = rows // len(self.local_chunks), keys * self.num_ranks // self.num_chunks
        for position, chunk in enumerate(self.local_chunks):
            num_visible = chunk + 1 if self.settings.is_causal else self.num_chunks
            yield slice(position * rows, (position + 1) * rows), slice(0, num_visible * keys)

    def gather(self, x: Tensor) -> Tensor:
        """Gather (B, H, S / W, D) from all ranks and return (B, H, S, D) in order."""
        parts = torch.stack(x.chunk(len(self.local_chunks), 2))  # (chunks of the rank, B, H, rows, D)
        gathered = parts.new_empty(self.num_chunks, *parts.shape[1:])
        _ALL_GATHER(gathered, parts, group=self.group)
        return torch.cat([gathered[position] for position in self._positions], dim=2)

    def scatter(self, sum_: Tensor, like: Tensor) -> Tensor:
        """Sum a tensor (B, H, S, D) over all ranks and return the rows of this rank in the layout of `like`."""
        chunks = sum_.chunk(self.num_chunks, 2)
        parts = torch.stack([chunks[number] for number in self._chunk_order])
        scattered = parts.new_empty(len(self.local_chunks), *parts.shape[1:])
        _REDUCE_SCATTER(scattered, parts, group=self.group)
        return reference.like(torch.cat(scattered.unbind(0), dim=2), like)


@contextlib.contextmanager
def _mode_scope(mode: int) -> Iterator[None]:
    before = bindings.set_mode(mode)
    try:
        yield
    finally:
        bindings.set_mode(before)


def _window(is_causal: bool) -> attention.Window:
    return _WINDOW if is_causal else attention.Window()


def _forward(query: Tensor, key: Tensor, value: Tensor, *setting_args: object) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE of the rows of this rank.

    Args:
        query: queries of this rank (B, Hq, S / W, D), where W is the number of ranks.
        key: keys of this rank (B, Hkv, S / W, D).
        value: values of this rank (B, Hkv, S / W, Dv).
        setting_args: the fields of `Settings`.

    Returns:
        The output (B, Hq, S / W, Dv) in the layout of the query, and the LSE (B, Hq, S / W) in fp32.
    """
    settings = Settings(*setting_args)
    ring_attention.check_balance_unchanged(settings)
    chunks = _Chunks(settings, query, key)
    keys, values = map(chunks.gather, (key, value))
    out = sdpa.empty_in_layout_of(query, (*query.shape[:3], value.shape[3]))
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    with _mode_scope(settings.mode):
        for rows, visible in chunks.calls(query.shape[2], key.shape[2]):
            operands = query[:, :, rows], keys[:, :, visible], values[:, :, visible]
            no_sinks, params = None, attention.AttentionParams(*_window(settings.is_causal), scale=settings.scale)
            results = namespace.attention_fwd(*operands, no_sinks, *attention.NO_LENGTHS, *params)
            for result, result_of_chunk in zip((out, lse), results):
                result[:, :, rows] = result_of_chunk
    return out, lse


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *setting_args: object
) -> tuple[Tensor, Tensor, Tensor]:
    settings = Settings(*setting_args)
    chunks = _Chunks(settings, query, key)
    keys, values = map(chunks.gather, (key, value))
    dq = torch.empty_like(query)
    sums = [torch.zeros_like(x, dtype=torch.float32 if settings.wide else x.dtype) for x in (keys, values)]
    with _mode_scope(settings.mode):
        for rows, visible in chunks.calls(query.shape[2], key.shape[2]):
            forward_results = out[:, :, rows], lse[:, :, rows].contiguous(), None, None
            operands = query[:, :, rows], keys[:, :, visible], values[:, :, visible], *forward_results
            op_settings = *_window(settings.is_causal), 0.0, settings.scale, False
            dq[:, :, rows], *kv_grads, _ = namespace.attention_bwd(grad_out[:, :, rows], None, *operands, *op_settings)
            for sum_, part in zip(sums, kv_grads):
                sum_[:, :, visible] += part
    return dq, *map(chunks.scatter, sums, (key, value))


ring_attention.register("gathered", _forward, _backward, _library)
