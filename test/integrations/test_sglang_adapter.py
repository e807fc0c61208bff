"""integrations.sglang: steps of SGLang on CPU tensors against fp64, with the installed SGLang or with stubs."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from server_batches import HKV, HQ, LAYERS, NUM_PAGES, PAGE_ROWS, D, Layer, Sequence, Step, make_sequences, make_steps
from server_modules import modules_of, why_not_importable
from torch import Tensor

CONTEXT = 96  # longest sequence of the server
MODULES = ("sglang.srt.layers.attention.base_attn_backend", "sglang.srt.mem_cache.swa_memory_pool")
FULL, WINDOW = 0, 1  # layers


@pytest.fixture(params=["stubs", "installed"])
def sglang_adapter(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Return the adapter, imported with stubs and with an installed SGLang."""
    with modules_of("sglang", request.param):
        if request.param == "installed" and (reason := why_not_importable(*MODULES)):
            pytest.skip(reason)
        yield importlib.import_module("torch_flashplug.integrations.sglang")


def make_pool(adapter: ModuleType, has_window_pool: bool) -> object:
    """Return a pool (rows, HKV, D) for each layer; the window layer may have rows in a different order."""

    class Pool(adapter.SWAKVPool if has_window_pool else object):
        def __init__(self) -> None:
            self.swa_layer_nums = 1
            self.buffers = {layer: torch.full((2, NUM_PAGES * PAGE_ROWS, HKV, D), math.nan) for layer in (FULL, WINDOW)}
            pages = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(9))
            self.full_to_swa_index_mapping = (pages.unsqueeze(1) * PAGE_ROWS + torch.arange(PAGE_ROWS)).flatten()

        def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None) -> None:
            pool_rows = loc_info.swa_loc if has_window_pool and layer.layer_id == WINDOW else loc_info.loc
            for pool, x in zip(self.buffers[layer.layer_id], (cache_k, cache_v), strict=True):
                pool[pool_rows] = x

        def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
            return tuple(self.buffers[layer_id])

        def translate_loc_from_full_to_swa(self, kv_indices: Tensor) -> Tensor:
            return self.full_to_swa_index_mapping[kv_indices]

    return Pool()


def make_runner(adapter: ModuleType, has_window_pool: bool = False, **changed: object) -> SimpleNamespace:
    facts = {
        "use_mla_backend": False,
        "model_config": SimpleNamespace(is_encoder_decoder=False, context_len=CONTEXT),
        "spec_algorithm": SimpleNamespace(is_speculative=lambda: False),
        "kv_cache_dtype": torch.bfloat16,
        "kv_index_translator": SimpleNamespace(is_translating=False),
        "page_size": PAGE_ROWS,
        "req_to_token_pool": SimpleNamespace(req_to_token=torch.zeros(10, CONTEXT, dtype=torch.int32)),
        "token_to_kv_pool": make_pool(adapter, has_window_pool),
    }
    return SimpleNamespace(**facts | changed)


def make_layer(adapter: ModuleType, layer: Layer, **changed: object) -> SimpleNamespace:
    facts = {
        "tp_q_head_num": HQ, "tp_k_head_num": HKV, "tp_v_head_num": HKV, "head_dim": D, "v_head_dim": D,
        "scaling": layer.scale, "layer_id": FULL if layer.window is None else WINDOW, "logit_cap": layer.softcap,
        "sliding_window_size": -1 if layer.window is None else layer.window - 1, "is_cross_attention": False,
        "logit_capping_method": "tanh", "attn_type": adapter.AttentionType.DECODER, "use_irope": False,
        "k_scale": None, "v_scale": None, "xai_temperature_len": -1,
    }  # fmt: skip
    return SimpleNamespace(**facts | changed)


def make_forward_batch(runner: SimpleNamespace, step: Step, is_decode: bool, **changed: object) -> SimpleNamespace:
    """Return the facts of a step; the requests have rows 3, 4, ... of req_to_token."""
    requests = torch.arange(3, 3 + len(step.sequences))
    for request, sequence in zip(requests, step.sequences, strict=True):
        pool_rows = sequence.pool_rows(0, sequence.used)
        runner.req_to_token_pool.req_to_token[request, : len(pool_rows)] = torch.tensor(pool_rows, dtype=torch.int32)
    lengths = torch.tensor(step.kv_lengths())
    facts = {
        "forward_mode": SimpleNamespace(is_decode_or_idle=lambda: is_decode, is_idle=lambda: False,
                                        is_decode=lambda: is_decode, is_mixed=lambda: False),
        "batch_size": len(step.sequences), "req_pool_indices": requests, "seq_lens": lengths,
        "seq_lens_cpu": lengths, "out_cache_loc": torch.tensor(step.pool_rows()), "out_cache_loc_is_physical": False,
        "extend_prefix_lens_cpu": None if is_decode else step.first_rows,
        "extend_seq_lens_cpu": None if is_decode else step.counts,
    }  # fmt: skip
    return SimpleNamespace(**facts | changed)


def run_layer(
    backend: object, layer: SimpleNamespace, step: Step, batch: SimpleNamespace, sinks: Tensor | None
) -> Tensor:
    q, k, v = (step.rows(name) for name in "qkv")
    more = {} if sinks is None else {"sinks": sinks}
    return backend.forward(q.flatten(1), k, v, layer, batch, True, **more).unflatten(1, (HQ, D))


@pytest.mark.parametrize(
    ("layer", "has_window_pool"), [*((layer, False) for layer in LAYERS.values()), (LAYERS["all"], True)],
    ids=[*LAYERS, "pool for windows"],
)  # fmt: skip
def test_steps_equal_fp64(sglang_adapter: ModuleType, layer: Layer, has_window_pool: bool) -> None:
    """Run chunked prefill, mixed batches and decode on a full layer and on a layer with the settings of the test."""
    runner = make_runner(sglang_adapter, has_window_pool)
    backend = sglang_adapter.create(runner)
    layers = [(x, make_layer(sglang_adapter, x)) for x in (LAYERS["causal"], layer)]
    for step in make_steps(make_sequences((41, 18, 70))):
        is_decode = max(step.counts) == 1
        batch = make_forward_batch(runner, step, is_decode)
        backend.init_forward_metadata(batch)
        for settings, server_layer in layers:
            out = run_layer(backend, server_layer, step, batch, settings.sinks)
            torch.testing.assert_close(out.double(), step.expected(settings), rtol=1e-4, atol=1e-5)


def test_decode_without_lengths_on_the_host(sglang_adapter: ModuleType) -> None:
    runner, layer = make_runner(sglang_adapter), LAYERS["causal"]
    backend, sequences = sglang_adapter.create(runner), make_sequences((41, 18))
    server_layer = make_layer(sglang_adapter, layer)
    for step in (Step(sequences, [40, 17]), Step(sequences, [1, 1])):
        batch = make_forward_batch(runner, step, step.counts == [1, 1], seq_lens_cpu=None)
        backend.init_forward_metadata(batch)
        out = run_layer(backend, server_layer, step, batch, None)
    torch.testing.assert_close(out.double(), step.expected(layer), rtol=1e-4, atol=1e-5)


def replay(backend: object, batch: SimpleNamespace) -> None:
    """Call what a replay runs: the Python part, then the recorded operations of init_forward_metadata_in_graph."""
    backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata_in_graph(batch)


@pytest.mark.parametrize("has_window_pool", [False, True])
@pytest.mark.parametrize("layer", [LAYERS["causal"], LAYERS["window"]], ids=["causal", "window"])
def test_graph_of_decode_keeps_addresses(sglang_adapter: ModuleType, layer: Layer, has_window_pool: bool) -> None:
    runner = make_runner(sglang_adapter, has_window_pool)
    backend, sequences = sglang_adapter.create(runner), make_sequences((41, 18))
    server_layer = make_layer(sglang_adapter, layer)
    prefill = Step(sequences, [39, 16])
    batch = make_forward_batch(runner, prefill, is_decode=False)
    backend.init_forward_metadata(batch)
    run_layer(backend, server_layer, prefill, batch, None)
    backend.init_cuda_graph_state(4, 4)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1

    addresses = set()
    for _ in range(2):
        step = Step(sequences, [1, 1])
        batch = make_forward_batch(runner, step, is_decode=True)
        replay(backend, batch)
        calls = backend.forward_metadata.window_calls if layer.window else backend.forward_metadata.calls
        addresses.add((calls[0].seqused_k.data_ptr(), calls[0].block_table.data_ptr()))
        out = run_layer(backend, server_layer, step, batch, None)
        torch.testing.assert_close(out.double(), step.expected(layer), rtol=1e-4, atol=1e-5)
    assert len(addresses) == 1


def test_padded_rows_of_prefill_are_zero(sglang_adapter: ModuleType) -> None:
    runner, step = make_runner(sglang_adapter), Step(make_sequences((20,)), [20])
    backend, batch = sglang_adapter.create(runner), make_forward_batch(runner, step, is_decode=False)
    backend.init_forward_metadata(batch)
    q = torch.cat((step.rows("q"), torch.full((4, HQ, D), math.nan)))
    layer = make_layer(sglang_adapter, LAYERS["causal"])
    out = backend.forward(q.flatten(1), step.rows("k"), step.rows("v"), layer, batch, True).unflatten(1, (HQ, D))
    torch.testing.assert_close(out[:20].double(), step.expected(LAYERS["causal"]), rtol=1e-4, atol=1e-5)
    assert (out[20:] == 0).all()


def test_keys_stay_unwritten_on_request(sglang_adapter: ModuleType) -> None:
    runner, step = make_runner(sglang_adapter), Step(make_sequences((20,)), [20])
    backend, batch = sglang_adapter.create(runner), make_forward_batch(runner, step, is_decode=False)
    backend.init_forward_metadata(batch)
    q, k, v = (step.rows(name) for name in "qkv")
    backend.forward(q.flatten(1), k, v, make_layer(sglang_adapter, Layer()), batch, save_kv_cache=False)
    assert runner.token_to_kv_pool.buffers[FULL].isnan().all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"use_mla_backend": True}, "MLA is not supported"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True, context_len=CONTEXT)}, "cross attention"),
        ({"spec_algorithm": SimpleNamespace(is_speculative=lambda: True)}, "speculative decoding is not supported"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "a KV cache of torch.float8_e4m3fn is not supported"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "unified KV memory is not supported"),
        ({"page_size": 1}, "page size must be a multiple of 16, but got 1. Pass --page-size 64."),
    ],
    ids=["mla", "encoder_decoder", "speculative", "fp8_cache", "unified_memory", "page_of_one_row"],
)
def test_servers_without_support_are_refused(sglang_adapter: ModuleType, changed: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sglang_adapter.create(make_runner(sglang_adapter, **changed))


@pytest.mark.parametrize(
    ("changed", "more", "message"),
    [
        ({"is_cross_attention": True}, {}, "cross attention is not supported"),
        ({"use_irope": True}, {}, "chunked attention"),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, {}, "logit capping method sigmoid"),
        ({"xai_temperature_len": 4}, {}, "xai_temperature_len"),
        ({}, {"q_rope": torch.ones(1)}, "q_rope is not supported"),
        ({}, {"return_lse": True}, "return_lse is not supported"),
        ({"tp_q_head_num": 130}, {}, "at most 64 query heads"),
    ],
    ids=str,
)
def test_layers_without_support_are_refused(
    sglang_adapter: ModuleType, changed: dict, more: dict, message: str
) -> None:  # fmt: skip
    runner, step = make_runner(sglang_adapter), Step(make_sequences((20,)), [20])
    backend, batch = sglang_adapter.create(runner), make_forward_batch(runner, step, is_decode=False)
    backend.init_forward_metadata(batch)
    layer = make_layer(sglang_adapter, Layer(), **changed)
    with pytest.raises((NotImplementedError, ValueError), match=message):
        backend.forward(step.rows("q").flatten(1), None, None, layer, batch, True, **more)
    layer = make_layer(sglang_adapter, Layer(), attn_type=sglang_adapter.AttentionType.ENCODER_ONLY)
    with pytest.raises(NotImplementedError, match="attention type"):
        backend.forward(step.rows("q").flatten(1), None, None, layer, batch, True)


def test_graphs_of_prefill_are_refused(sglang_adapter: ModuleType) -> None:
    runner, sequences = make_runner(sglang_adapter), make_sequences((20,))
    batch = make_forward_batch(runner, Step(sequences, [20]), is_decode=False)
    with pytest.raises(NotImplementedError, match="CUDA graphs of prefill are not supported"):
        sglang_adapter.create(runner).init_forward_metadata_out_graph(batch)


def test_idle_ranks_have_no_calls(sglang_adapter: ModuleType) -> None:
    no_sequences: list[Sequence] = []
    step = SimpleNamespace(sequences=no_sequences, kv_lengths=list, pool_rows=list, first_rows=[], counts=[])
    runner = make_runner(sglang_adapter)
    backend = sglang_adapter.create(runner)
    backend.init_forward_metadata(make_forward_batch(runner, step, is_decode=True))
    assert backend.forward_metadata.calls == ()
