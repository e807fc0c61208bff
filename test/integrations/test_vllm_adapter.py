"""integrations.vllm: steps of vLLM on CPU tensors against fp64, with the installed vLLM or with stubs."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from server_batches import (
    HKV,
    HQ,
    LAYERS,
    NUM_PAGES,
    PAGE_ROWS,
    D,
    Layer,
    Step,
    block_table,
    make_sequences,
    make_steps,
)
from server_modules import modules_of, why_not_importable
from torch import Tensor

# Memory order of a cache (pages, HKV, rows, 2 D) for layouts of vLLM: per-layer views of LBHNC, LBNHC and LHBNC.
LAYOUTS = {"LBHNC": (0, 1, 2, 3), "LBNHC": (0, 2, 1, 3), "LHBNC": (1, 0, 2, 3)}


@pytest.fixture(params=["stubs", "installed"])
def vllm_adapter(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Return the adapter, imported with stubs and with an installed vLLM."""
    with modules_of("vllm", request.param):
        if request.param == "installed" and (reason := why_not_importable("vllm.v1.attention.backend")):
            pytest.skip(reason)
        yield importlib.import_module("torch_flashplug.integrations.vllm")


def make_impl(adapter: ModuleType, layer: Layer, **changed: object) -> object:
    settings = {"num_heads": HQ, "head_size": D, "scale": layer.scale, "num_kv_heads": HKV}
    settings |= {"alibi_slopes": None, "sliding_window": layer.window, "kv_cache_dtype": "auto"}
    settings |= {"logits_soft_cap": layer.softcap or None, "sinks": layer.sinks} | changed
    impl = object.__new__(adapter.Impl)  # AttentionImpl.__new__ of vLLM needs the process groups of a server
    impl.__init__(**settings)
    return impl


def make_builder(adapter: ModuleType, page_rows: int = PAGE_ROWS) -> object:
    model_config = SimpleNamespace(get_num_attention_heads=lambda parallel_config: HQ)
    config = SimpleNamespace(model_config=model_config, parallel_config=None)
    spec = SimpleNamespace(block_size=page_rows, num_kv_heads=HKV)
    return adapter.Builder(spec, ["layer"], config, torch.device("cpu"))


def make_common(adapter: ModuleType, step: Step, padding: int = 0, **changed: object) -> object:
    """Return CommonAttentionMetadata of a step, with `padding` requests without tokens at the end."""
    counts, lengths = [*step.counts, *[0] * padding], [*step.kv_lengths(), *[0] * padding]
    table = torch.cat((block_table(step.sequences, 8), torch.full((padding, 8), -1, dtype=torch.int32)))
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    facts = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "num_reqs": len(counts),
        "num_actual_tokens": sum(counts),
        "max_query_len": max(counts),
        "max_seq_len": max(lengths),
        "block_table_tensor": table,
        "slot_mapping": torch.tensor(step.pool_rows()),
    }
    return adapter.CommonAttentionMetadata(**facts | changed)


def make_cache(layout: str) -> Tensor:
    order = LAYOUTS[layout]
    shape = (NUM_PAGES, HKV, PAGE_ROWS, 2 * D)
    cache = torch.full([shape[dim] for dim in order], math.nan)
    return cache.permute([order.index(dim) for dim in range(4)])


@pytest.mark.parametrize(
    ("layer", "layout"), [*((name, "LBHNC") for name in LAYERS), ("all", "LBNHC"), ("all", "LHBNC")], ids=str
)
def test_steps_equal_fp64(vllm_adapter: ModuleType, layer: str, layout: str) -> None:
    """Run chunked prefill, mixed batches and decode, each with two padding tokens at cache position -1."""
    layer = LAYERS[layer]
    impl, builder, cache = make_impl(vllm_adapter, layer), make_builder(vllm_adapter), make_cache(layout)
    for step in make_steps(make_sequences((41, 18, 70))):
        common = make_common(vllm_adapter, step, padding=2)
        q, k, v = (torch.cat((step.rows(name), torch.full((2, heads, D), math.nan))) for name, heads in
                   (("q", HQ), ("k", HKV), ("v", HKV)))  # fmt: skip
        out = torch.full_like(q, 7.0)
        metadata = builder.build(0, common)
        impl.do_kv_cache_update(None, k, v, cache, torch.cat((common.slot_mapping, torch.tensor([-1, -1]))))
        assert impl.forward(None, q, k, v, cache, metadata, out) is out
        torch.testing.assert_close(out[:-2].double(), step.expected(layer), rtol=1e-4, atol=1e-5)
        assert (out[-2:] == 7.0).all()


def test_bounds_of_the_host_may_exceed_the_kv_lengths(vllm_adapter: ModuleType) -> None:
    """vLLM without seq_lens_cpu_upper_bound has one bound for all sequences; with the tensor, one for each."""
    layer, builder = LAYERS["causal"], make_builder(vllm_adapter)
    for bounds in (None, torch.tensor([60, 30])):
        step, cache = Step(make_sequences((41, 18)), [41, 18]), make_cache("LBHNC")
        impl, common = make_impl(vllm_adapter, layer), make_common(vllm_adapter, step, max_seq_len=99)
        common.seq_lens_cpu_upper_bound = bounds
        q, k, v = (step.rows(name) for name in "qkv")
        impl.do_kv_cache_update(None, k, v, cache, common.slot_mapping)
        out = impl.forward(None, q, k, v, cache, builder.build(0, common), torch.empty_like(q))
        torch.testing.assert_close(out.double(), step.expected(layer), rtol=1e-4, atol=1e-5)


def test_captured_decode_reads_new_lengths_and_pages(vllm_adapter: ModuleType) -> None:
    """A replay has the metadata of the capture, and new values in the persistent tensors; padding requests give 0."""
    layer, builder, cache = LAYERS["window"], make_builder(vllm_adapter), make_cache("LBNHC")
    impl, sequences = make_impl(vllm_adapter, layer), make_sequences((41, 18, 70))
    first = Step(sequences, [len(x.q) - 1 for x in sequences])
    impl.do_kv_cache_update(None, first.rows("k"), first.rows("v"), cache, torch.tensor(first.pool_rows()))
    used, table = torch.ones(4, dtype=torch.int32), torch.zeros(4, 8, dtype=torch.int32)
    captured = vllm_adapter.CommonAttentionMetadata(
        query_start_loc=torch.arange(5).int(), query_start_loc_cpu=torch.arange(5).int(), seq_lens=used, num_reqs=4,
        num_actual_tokens=4, max_query_len=1, max_seq_len=128, block_table_tensor=table,
        slot_mapping=torch.zeros(4, dtype=torch.int64),
    )  # fmt: skip
    metadata = builder.build_for_cudagraph_capture(captured)
    step = Step(sequences, [1, 1, 1])
    used[:3], used[3], table[:3] = torch.tensor(step.kv_lengths()), 0, block_table(sequences, 8)
    q, k, v = (torch.cat((step.rows(name), torch.ones(1, heads, D))) for name, heads in zip("qkv", (HQ, HKV, HKV)))
    impl.do_kv_cache_update(None, k, v, cache, torch.tensor([*step.pool_rows(), -1]))
    out = impl.forward(None, q, None, None, cache, metadata, torch.full_like(q, math.nan))
    torch.testing.assert_close(out[:3].double(), step.expected(layer), rtol=1e-4, atol=1e-5)
    assert (out[3] == 0).all()


def test_capture_of_several_tokens_for_each_sequence_is_refused(vllm_adapter: ModuleType) -> None:
    common = make_common(vllm_adapter, Step(make_sequences((41, 18)), [2, 2]))
    with pytest.raises(ValueError, match="one token for each sequence, but got 4 tokens and 2 sequences"):
        make_builder(vllm_adapter).build_for_cudagraph_capture(common)


def test_profiling_run_fills_the_output_with_zeros(vllm_adapter: ModuleType) -> None:
    out = torch.full((3, HQ, D), math.nan)
    assert make_impl(vllm_adapter, Layer()).forward(None, out, None, None, None, None, out) is out
    assert (out == 0).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"alibi_slopes": [1.0]}, "alibi_slopes is not supported"),
        ({"attn_type": "encoder_only"}, "attn_type encoder_only is not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8 is not supported"),
        ({"num_heads": 130}, "at most 64 query heads"),
    ],
    ids=str,
)
def test_layers_without_support_are_refused(vllm_adapter: ModuleType, changed: dict, message: str) -> None:
    with pytest.raises((NotImplementedError, ValueError), match=message):
        make_impl(vllm_adapter, Layer(), **changed)


def test_steps_without_support_are_refused(vllm_adapter: ModuleType) -> None:
    step = Step(make_sequences((41,)), [41])
    for causal in (False, torch.ones(1, dtype=torch.int32)):
        common = make_common(vllm_adapter, step, causal=causal)
        for build in (
            lambda x: make_builder(vllm_adapter).build(0, x),
            make_builder(vllm_adapter).build_for_cudagraph_capture,
        ):
            with pytest.raises(NotImplementedError, match="causal must be True"):
                build(common)
    impl, q = make_impl(vllm_adapter, Layer()), step.rows("q")
    with pytest.raises(NotImplementedError, match="a quantized output is not supported"):
        impl.forward(None, q, None, None, None, None, q, output_scale=torch.ones(1))
    with pytest.raises(ValueError, match="page size must be a multiple of 16, but got 8"):
        make_builder(vllm_adapter, page_rows=8)
    metadata = make_builder(vllm_adapter, page_rows=32).build(0, make_common(vllm_adapter, step))
    with pytest.raises(RuntimeError, match="pages must have the 32 rows .* pages of 16 rows"):
        impl.forward(None, q, None, None, make_cache("LBHNC"), metadata, q.clone())


def test_batch_invariance_asks_for_one_split(vllm_adapter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_impl(vllm_adapter, Layer()).settings.num_splits is None
    monkeypatch.setattr(vllm_adapter.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    assert make_impl(vllm_adapter, Layer()).settings.num_splits == 1


QUESTIONS = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False}
QUESTIONS |= {"has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False}
QUESTIONS |= {
    "device_capability": SimpleNamespace(major=9, minor=0),
    "attn_type": "decoder",
    "has_sliding_window": True,
}
QUESTIONS |= {"use_batch_invariant": True}


@pytest.mark.parametrize(
    ("changed", "reasons"),
    [
        ({}, []),
        ({"head_size": 256, "block_size": 64}, []),
        ({"head_size": 100}, ["head_size"]),
        ({"head_size": 264}, ["head_size"]),
        ({"dtype": torch.float32}, ["dtype"]),
        ({"kv_cache_dtype": "fp8"}, ["kv_cache_dtype"]),
        ({"block_size": 8}, ["block_size"]),
        ({"use_mla": True}, ["MLA"]),
        ({"use_sparse": True}, ["sparse"]),
        ({"use_mm_prefix": True}, ["multimodal"]),
        ({"device_capability": SimpleNamespace(major=8, minor=0)}, ["compute capability"]),
        ({"device_capability": SimpleNamespace(major=10, minor=0)}, ["compute capability"]),
        ({"attn_type": "encoder_only"}, ["attention type"]),
        ({"use_non_causal": True}, ["non-causal"]),
        ({"use_adaptive_verification": True}, ["adaptive verification"]),
        ({"use_rswa": True}, ["R-SWA"]),
    ],
    ids=str,
)
def test_vllm_collects_reasons_against_a_configuration(changed: dict, reasons: list[str]) -> None:
    with modules_of("vllm", "installed"):
        if reason := why_not_importable("vllm.v1.attention.backend"):
            pytest.skip(reason)
        backend = importlib.import_module("torch_flashplug.integrations.vllm").Backend
        actual = backend.validate_configuration(**QUESTIONS | changed)
    assert len(actual) == len(reasons) and all(part in text for part, text in zip(reasons, actual, strict=True))


def test_backend_names_its_classes(vllm_adapter: ModuleType) -> None:
    backend = vllm_adapter.Backend
    assert backend.get_name() == "FLASHPLUG"
    assert (backend.get_impl_cls(), backend.get_builder_cls()) == (vllm_adapter.Impl, vllm_adapter.Builder)
    assert not backend.forward_includes_kv_cache_update
    assert [x.base for x in backend.get_supported_kernel_block_sizes()] == [16]
    assert [backend.supports_head_size(size) for size in (0, 8, 72, 100, 256, 264)] == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]
    assert not any(getattr(vllm_adapter.Impl, "__abstractmethods__", ()))
    assert not any(getattr(vllm_adapter.Builder, "__abstractmethods__", ()))
