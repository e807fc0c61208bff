"""Attention backend FLASHPLUG of vLLM: `vllm serve MODEL --attention-backend FLASHPLUG`.

vLLM imports the module when the backend is selected. The entry point in `_autoload.py` only registers the name.

A step of vLLM has the lengths and the block table of all sequences (`CommonAttentionMetadata`), and the positions of
the new tokens in the cache. `Builder` divides the batch into calls of `attention()` once, and the layers share the
calls. The cache of a layer is a tensor (pages, Hkv, rows of a page, 2 D) in any memory order, with key and value of a
token next to each other. Kernels read the two halves as strided pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from ..registry.dispatch_table import HEAD_DIM_STEP, MAX_GENERAL_HEAD_DIM
from . import paged_batch

MEASURED_MAJOR = 9  # compute capability of Hopper; no different architecture ran the kernels


class Backend(AttentionBackend):
    """Capabilities of the backend. vLLM asks for each capability, and collects reasons against a configuration."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "FLASHPLUG"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[MultipleOf]:
        return [MultipleOf(paged_batch.PAGE_ROWS_STEP)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % HEAD_DIM_STEP == 0 and 0 < head_size <= MAX_GENERAL_HEAD_DIM

    @classmethod
    def supports_compute_capability(cls, capability: object) -> bool:
        return capability.major == MEASURED_MAJOR

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # the batch is divided by the row counts of the host


@dataclass
class Metadata(AttentionMetadata):
    """Facts of a step, shared by the layers."""

    num_actual_tokens: int
    page_rows: int
    calls: tuple[paged_batch.PagedCall, ...]


class Builder(AttentionMetadataBuilder[Metadata]):
    """Builder of the metadata of a step, without a wait for the device."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1  # sequences in decode come first, and become a single call

    def __init__(self, kv_cache_spec: object, layer_names: list[str], vllm_config: object, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page_rows = kv_cache_spec.block_size
        num_heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        self.group = -(-num_heads // kv_cache_spec.num_kv_heads)
        paged_batch.check_page_rows(self.page_rows, "Pass --block-size 16.")

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        common = common_attn_metadata
        _check_causal(common.causal)
        num_reqs = common.num_reqs
        starts = common.query_start_loc_cpu[: num_reqs + 1].tolist()
        bounds = common.seq_lens_cpu_upper_bound
        batch = paged_batch.PagedBatch(
            cu_seqlens_q=common.query_start_loc[: num_reqs + 1],
            seqused_k=common.seq_lens[:num_reqs],
            block_table=common.block_table_tensor[:num_reqs],
            row_counts=[end - start for start, end in zip(starts, starts[1:])],
            kv_bounds=[common.max_seq_len] * num_reqs if bounds is None else bounds[:num_reqs].tolist(),
            page_rows=self.page_rows,
            group=self.group,
        )
        return Metadata(common.num_actual_tokens, self.page_rows, paged_batch.split_batch(batch))

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Metadata:
        """Return the metadata of a graph of decode, with the persistent tensors of vLLM."""
        common = common_attn_metadata
        _check_causal(common.causal)
        if common.num_actual_tokens != common.num_reqs:
            raise ValueError(
                "flashplug: a captured batch must have one token for each sequence, "
                f"but got {common.num_actual_tokens} tokens and {common.num_reqs} sequences."
            )
        tensors = (common.seq_lens[: common.num_reqs], common.block_table_tensor[: common.num_reqs])
        return Metadata(common.num_actual_tokens, self.page_rows, (paged_batch.dense_call(*tensors),))


class Impl(AttentionImpl):
    """Attention of a layer."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ):
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        paged_batch.check_group(num_heads, self.num_kv_heads)
        for name, is_refused in (
            ("alibi_slopes", alibi_slopes is not None),
            (f"attn_type {attn_type}", attn_type != AttentionType.DECODER),
            (f"kv_cache_dtype {kv_cache_dtype}", kv_cache_dtype not in Backend.supported_kv_cache_dtypes),
        ):
            if is_refused:
                raise NotImplementedError(f"flashplug: {name} is not supported. Select a different attention backend.")
        self.settings = paged_batch.LayerSettings(
            scale=self.scale,
            window=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
            softcap=float(logits_soft_cap or 0.0),
            sinks=sinks,
            num_splits=1 if envs.VLLM_BATCH_INVARIANT else None,
        )

    def forward(  # noqa: PLR0913, PLR0917
        self,
        layer: object,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend to the pages of the cache; `do_kv_cache_update` wrote the keys and values of the step before."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("flashplug: a quantized output is not supported. Turn the fusion off.")
        if attn_metadata is None:  # vLLM's memory profiling
            return output.fill_(0)
        k_pool, v_pool = self._pools(kv_cache)
        if k_pool.shape[1] != attn_metadata.page_rows:
            raise RuntimeError(
                f"flashplug: pages must have the {attn_metadata.page_rows} rows of the KV cache spec, "
                f"but the cache of the layer has pages of {k_pool.shape[1]} rows."
            )
        num_tokens = attn_metadata.num_actual_tokens
        paged_batch.attend(query[:num_tokens], k_pool, v_pool, attn_metadata.calls, output[:num_tokens], self.settings)
        return output

    def do_kv_cache_update(
        self, layer: object, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the keys and values of the step into the cache: on a GPU by vLLM's kernel."""
        k_pool, v_pool = self._pools(kv_cache)
        if not key.is_cuda:
            paged_batch.write_rows(key, k_pool, slot_mapping)
            paged_batch.write_rows(value, v_pool, slot_mapping)
            return
        from vllm._custom_ops import reshape_and_cache_flash

        scales = (layer._k_scale, layer._v_scale)
        reshape_and_cache_flash(key, value, k_pool, v_pool, slot_mapping, self.kv_cache_dtype, *scales)

    def _pools(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cache (pages, Hkv, rows, 2 D) as two pools (pages, rows, Hkv, D)."""
        return kv_cache.transpose(1, 2).split(self.head_size, dim=-1)


def _check_causal(causal: bool | Tensor) -> None:
    if causal is not True:
        actual = "a flag for each sequence" if isinstance(causal, Tensor) else causal
        raise NotImplementedError(
            f"flashplug: causal must be True, but got {actual}. Select a different attention backend."
        )
