"""Stubs of vLLM 0.33.0 and SGLang 0.5.23: the names and signatures used by the adapters, as sources of modules.

test_server_contracts.py compares the sources with an installed package. `install()` makes the modules importable where
a test runs without the package.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

SOURCES = {
    "sglang.srt.arg_groups.choices": """
ATTENTION_BACKEND_CHOICES = ["fa3"]
add_attention_backend_choices = ATTENTION_BACKEND_CHOICES.extend
""",
    "sglang.srt.layers.attention.attention_registry": '''
ATTENTION_BACKENDS = {}


def register_attention_backend(name):
    """Return a decorator of a function that creates a backend."""

    def decorator(fn):
        ATTENTION_BACKENDS[name] = fn
        return fn

    return decorator
''',
    "sglang.srt.layers.attention.base_attn_backend": '''
class AttentionBackend:
    """Attention backend. `forward` chooses a method by the mode of the batch."""

    needs_cpu_seq_lens: bool = True

    def init_forward_metadata(self, forward_batch): ...

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ...

    def init_forward_metadata_in_graph(self, forward_batch): ...

    def init_cuda_graph_state(self, max_bs, max_num_tokens): ...

    def get_cuda_graph_seq_len_fill_value(self): ...

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """Call forward_decode or forward_extend."""
        is_decode = forward_batch.forward_mode.is_decode_or_idle()
        function = self.forward_decode if is_decode else self.forward_extend
        return function(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs): ...

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs): ...
''',
    "sglang.srt.layers.radix_attention": '''
from enum import Enum


class AttentionType(Enum):
    """Kinds of attention."""

    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class RadixAttention:
    """Attributes of a layer."""

    tp_q_head_num: int
    tp_k_head_num: int
    tp_v_head_num: int
    head_dim: int
    v_head_dim: int
    scaling: float
    layer_id: int
    logit_cap: float
    logit_capping_method: str
    sliding_window_size: int
    is_cross_attention: bool
    attn_type: AttentionType
    use_irope: bool
    k_scale: object
    v_scale: object
    xai_temperature_len: int
''',
    "sglang.srt.mem_cache.layout.paged_view": '''
def paged_kv_view(buf, page_size, head_num, head_dim):
    """Return a pool (rows, heads, head dim) as pages."""
    return buf.view(-1, page_size, head_num, head_dim)
''',
    "sglang.srt.mem_cache.memory_pool": '''
from dataclasses import dataclass


@dataclass
class KVWriteLoc:
    """Slots of new tokens."""

    loc: object
    swa_loc: object = None
    full_loc: object = None

    @classmethod
    def for_layer(cls, forward_batch, layer, *, swa_loc=None, full_loc=None):
        return cls(forward_batch.out_cache_loc, swa_loc, full_loc)
''',
    "sglang.srt.mem_cache.swa_memory_pool": '''
class SWAKVPool:
    """Pool with a part of its own for layers with a window."""

    def translate_loc_from_full_to_swa(self, kv_indices):
        return self.full_to_swa_index_mapping[kv_indices]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=1.0, v_scale=1.0):
        """Write keys and values."""

    def get_kv_buffer(self, layer_id):
        """Return the pools of a layer."""
''',
    "sglang.srt.model_executor.forward_batch_info": '''
from dataclasses import dataclass
from enum import IntEnum

import torch


class ForwardMode(IntEnum):
    """Mode of a step."""

    EXTEND = 1
    DECODE = 2

    def is_decode_or_idle(self):
        return self is ForwardMode.DECODE


@dataclass
class ForwardBatch:
    """Facts of a step."""

    forward_mode: ForwardMode
    batch_size: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens_cpu: torch.Tensor = None
    extend_prefix_lens_cpu: list = None
    extend_seq_lens_cpu: list = None
''',
    "sglang.srt.model_executor.model_runner": '''
class ModelRunner:
    """Attributes of a runner."""

    use_mla_backend: bool
    model_config: object
    spec_algorithm: object
    kv_cache_dtype: object
    kv_index_translator: object
    page_size: int
    req_to_token_pool: object
    token_to_kv_pool: object
''',
    "sglang.srt.plugins": '''
from importlib import metadata


def load_plugins_by_group(group, excluded_dists=None):
    """Return the functions of all entry points of a group by name."""
    return {entry_point.name: entry_point.load() for entry_point in metadata.entry_points(group=group)}


def load_plugins():
    """Call the plugins of the group sglang.srt.plugins."""
    for function in load_plugins_by_group("sglang.srt.plugins").values():
        function()
''',
    "vllm._custom_ops": '''
def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """Refuse to run: the kernel needs a GPU."""
    raise NotImplementedError
''',
    "vllm.envs": """
VLLM_BATCH_INVARIANT: bool = False
""",
    "vllm.plugins": '''
from importlib import metadata


def load_plugins_by_group(group):
    """Return the functions of all entry points of a group by name."""
    return {entry_point.name: entry_point.load() for entry_point in metadata.entry_points(group=group)}


def load_general_plugins():
    """Call the plugins of the group vllm.general_plugins."""
    for function in load_plugins_by_group("vllm.general_plugins").values():
        function()
''',
    "vllm.v1.attention.backend": '''
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import torch

M = TypeVar("M")


class AttentionType(str, Enum):
    """Kinds of attention."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


@dataclass(frozen=True)
class MultipleOf:
    """Rule for page sizes."""

    base: int


class AttentionCGSupport(Enum):
    """Batches that CUDA graphs may have."""

    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionMetadata:
    """Base class of the metadata of a step."""


@dataclass
class CommonAttentionMetadata:
    """Facts of a step, the same for all backends."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    seq_lens_cpu_upper_bound: torch.Tensor = None


class AttentionBackend:
    """Capabilities of a backend. `validate_configuration` is shorter than vLLM's."""

    supported_dtypes: list = []
    supported_kv_cache_dtypes: list = []
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return []

    @staticmethod
    def get_name(): ...

    @staticmethod
    def get_impl_cls(): ...

    @staticmethod
    def get_builder_cls(): ...

    @classmethod
    def supports_head_size(cls, head_size): ...

    @classmethod
    def supports_sink(cls): ...

    @classmethod
    def supports_sliding_window(cls): ...

    @classmethod
    def supports_batch_invariance(cls): ...

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls): ...

    @classmethod
    def supports_compute_capability(cls, capability): ...


class AttentionMetadataBuilder(Generic[M]):
    """Builder of the metadata of a step."""

    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        """Keep the arguments."""

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def build_for_cudagraph_capture(self, common_attn_metadata): ...


class AttentionImplBase(Generic[M]):
    """Base class of the attention of a layer."""

    supports_quant_query_input: bool = False


class AttentionImpl(AttentionImplBase[M], Generic[M]):
    """Attention of a layer."""

    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
        kv_cache_dtype="auto", logits_soft_cap=None, attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
    ): ...  # fmt: skip

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ): ...
''',
    "vllm.v1.attention.backends.registry": '''
class AttentionBackendEnum:
    """Backends by name. vLLM has an Enum in place of this class."""

    __members__: dict = {}


def register_backend(backend, class_path=None, is_mamba=False):
    """Add a backend; a name cannot be added twice."""
    if backend in AttentionBackendEnum.__members__:
        raise ValueError(f"Backend {backend} already exists")
    AttentionBackendEnum.__members__[backend] = class_path
''',
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importer of the modules in SOURCES and of their packages, before any installed package."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        is_package = any(module.startswith(f"{name}.") for module in SOURCES)
        if name not in SOURCES and not is_package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(SOURCES.get(module.__name__, ""), f"<stub of {module.__name__}>", "exec"), vars(module))


_finder = _Finder()


def install() -> None:
    """Let imports find the stubs."""
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undo `install()`. Imported modules stay in sys.modules."""
    sys.meta_path.remove(_finder)
