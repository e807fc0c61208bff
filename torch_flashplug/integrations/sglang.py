"""Attention backend flashplug of SGLang: `sglang serve MODEL --attention-backend flashplug --page-size 64`.

SGLang imports the module when the backend is created. The entry point in `_autoload.py` only registers the name.

A table of SGLang, `req_to_token`, has the pool row of each token of a request. A page is `page_size` adjacent rows, so
the block table is every `page_size`-th row number, divided by the page size. Layers with a window may have a separate
pool, with different row numbers and a second block table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from . import paged_batch

DTYPES = (torch.bfloat16, torch.float16)
_REMEDY = "Select a different attention backend."


@dataclass(frozen=True, slots=True)
class Metadata:
    """Facts of a step, shared by the layers."""

    calls: tuple[paged_batch.PagedCall, ...]
    window_calls: tuple[paged_batch.PagedCall, ...]  # with the pages of the pool for layers with a window
    window_rows: Tensor | None  # rows of the new tokens in the same pool
    num_rows: int


def create(runner: object) -> Backend:
    """Return the backend for a model runner of SGLang."""
    refusals = {
        "MLA": runner.use_mla_backend,
        "cross attention": runner.model_config.is_encoder_decoder,
        "speculative decoding": runner.spec_algorithm.is_speculative(),
        f"a KV cache of {runner.kv_cache_dtype}": runner.kv_cache_dtype not in DTYPES,
        "unified KV memory": getattr(runner.kv_index_translator, "is_translating", False),
    }
    for name, is_refused in refusals.items():
        if is_refused:
            raise ValueError(f"flashplug: {name} is not supported. {_REMEDY}")
    paged_batch.check_page_rows(runner.page_size, "Pass --page-size 64.")
    return Backend(runner)


class Backend(AttentionBackend):
    """Attention to the paged KV cache of SGLang, for decode and prefill, in 16 bits."""

    needs_cpu_seq_lens = False  # row counts of prefill are on the host in any case

    def __init__(self, runner: object):
        super().__init__()
        self.page_rows = runner.page_size
        self.max_context_len = runner.model_config.context_len
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.has_window_pool = isinstance(self.token_to_kv_pool, SWAKVPool) and self.token_to_kv_pool.swa_layer_nums > 0
        self.forward_metadata: Metadata | None = None
        self.graph_tensors: tuple[Tensor, ...] = ()

    # ---- metadata of a step ----

    def init_forward_metadata(self, forward_batch: object) -> None:
        batch_size, is_decode = forward_batch.batch_size, forward_batch.forward_mode.is_decode_or_idle()
        if is_decode:
            counts, bounds = [1] * batch_size, self._bounds_of_decode(forward_batch)
        else:
            counts = list(map(int, forward_batch.extend_seq_lens_cpu))
            prefixes = map(int, forward_batch.extend_prefix_lens_cpu)
            bounds = [prefix + count for prefix, count in zip(prefixes, counts, strict=True)]
        tables = self._tables(forward_batch, max(bounds, default=1))
        lengths = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        batch = paged_batch.PagedBatch(
            cu_seqlens_q=lengths.to(self.req_to_token.device, non_blocking=True),
            seqused_k=forward_batch.seq_lens[:batch_size].to(torch.int32),
            block_table=tables[0],
            row_counts=counts,
            kv_bounds=bounds,
            page_rows=self.page_rows,
            group=paged_batch.MAX_GROUP,  # only sequences with a single row make a dense call
        )
        calls = paged_batch.split_batch(batch)
        window_calls = paged_batch.split_batch(replace(batch, block_table=tables[1])) if self.has_window_pool else calls
        self.forward_metadata = Metadata(calls, window_calls, self._window_rows(forward_batch), sum(counts))

    def _bounds_of_decode(self, forward_batch: object) -> list[int]:
        lengths = forward_batch.seq_lens_cpu
        if lengths is None:
            return [self.max_context_len] * forward_batch.batch_size
        return lengths[: forward_batch.batch_size].tolist()

    def _tables(self, forward_batch: object, max_keys: int) -> tuple[Tensor, ...]:
        """Return the block tables (B, n) int32 of the full pool and of the pool for layers with a window, if any."""
        requests = forward_batch.req_pool_indices[: forward_batch.batch_size]
        pool_rows = self.req_to_token[:, : max_keys : self.page_rows].index_select(0, requests)
        tables = [pool_rows]
        if self.has_window_pool:
            tables.append(self.token_to_kv_pool.translate_loc_from_full_to_swa(pool_rows))
        return tuple((table // self.page_rows).to(torch.int32) for table in tables)

    def _window_rows(self, forward_batch: object) -> Tensor | None:
        if not self.has_window_pool or forward_batch.out_cache_loc is None:
            return None
        return self.token_to_kv_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)

    # ---- CUDA graphs of decode: tensors with fixed addresses, refreshed inside the graph ----

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        pages = -(-self.max_context_len // self.page_rows)
        shapes = [(max_bs,), (max_bs, pages)] + [(max_bs, pages)] * self.has_window_pool
        self.graph_tensors = tuple(
            torch.zeros(shape, dtype=torch.int32, device=self.req_to_token.device) for shape in shapes
        )

    def init_forward_metadata_out_graph(self, forward_batch: object, in_capture: bool = False) -> None:
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise NotImplementedError("flashplug: CUDA graphs of prefill are not supported.")
        used, *tables = (x[: forward_batch.batch_size] for x in self.graph_tensors)
        calls = [(paged_batch.dense_call(used, table),) for table in tables]
        self.forward_metadata = Metadata(calls[0], calls[-1], None, forward_batch.batch_size)

    def init_forward_metadata_in_graph(self, forward_batch: object) -> None:
        used, *tables = (x[: forward_batch.batch_size] for x in self.graph_tensors)
        used.copy_(forward_batch.seq_lens[: forward_batch.batch_size])
        for table, pages in zip(tables, self._tables(forward_batch, self.max_context_len), strict=True):
            table.copy_(pages)
        self.forward_metadata = replace(self.forward_metadata, window_rows=self._window_rows(forward_batch))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    # ---- attention of a layer ----

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: object, forward_batch: object, save_kv_cache: bool = True,
        **more: object,
    ) -> Tensor:  # fmt: skip
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, more)

    forward_extend = forward_decode

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: object, forward_batch: object, save_kv_cache: bool,
        more: dict[str, object],
    ) -> Tensor:  # fmt: skip
        sinks = more.pop("sinks", None)
        _check_layer(layer, more)
        metadata, has_window = self.forward_metadata, layer.sliding_window_size > -1
        if save_kv_cache and k is not None:
            pool_rows = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=metadata.window_rows)
            self.token_to_kv_pool.set_kv_buffer(layer, pool_rows, k, v, layer.k_scale, layer.v_scale)
        heads = (layer.tp_k_head_num, layer.tp_v_head_num)
        k_pool, v_pool = (
            paged_kv_view(pool, self.page_rows, num_heads, head_dim)
            for pool, num_heads, head_dim in zip(
                self.token_to_kv_pool.get_kv_buffer(layer.layer_id), heads, (layer.head_dim, layer.v_head_dim)
            )
        )
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = q.new_empty(len(q), layer.tp_q_head_num, layer.v_head_dim)
        out[metadata.num_rows :].zero_()
        settings = paged_batch.LayerSettings(
            scale=float(layer.scaling),
            window=(layer.sliding_window_size, 0) if has_window else (-1, -1),
            softcap=float(layer.logit_cap),
            sinks=sinks,
        )
        paged_batch.attend(q, k_pool, v_pool, metadata.window_calls if has_window else metadata.calls, out, settings)
        return out.flatten(1)


def _check_layer(layer: object, more: dict[str, object]) -> None:
    """Raise NotImplementedError for features without support."""
    paged_batch.check_group(layer.tp_q_head_num, layer.tp_k_head_num)
    refusals = {name: value is not None and value is not False for name, value in more.items()}
    refusals |= {
        "cross attention": layer.is_cross_attention,
        f"attention type {layer.attn_type}": layer.attn_type != AttentionType.DECODER,
        "chunked attention (use_irope)": layer.use_irope,
        f"logit capping method {layer.logit_capping_method}": layer.logit_cap > 0
        and layer.logit_capping_method != "tanh",
        "a temperature of the scores (xai_temperature_len)": layer.xai_temperature_len > 0,
    }
    for name, is_refused in refusals.items():
        if is_refused:
            raise NotImplementedError(f"flashplug: {name} is not supported. {_REMEDY}")
