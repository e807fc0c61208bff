"""Functions with the names of flash_attn, and transformers on these functions.

The models are unmodified and use features that the attention "sdpa" cannot express.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from conftest import CUDA
from torch import Tensor

from torch_flashplug import attention
from torch_flashplug.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache


def random_tensor(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def make_operands(Sq: int = 7, Sk: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    return random_tensor(2, Sq, 4, 16), random_tensor(2, Sk, 2, 16, seed=1), random_tensor(2, Sk, 2, 16, seed=2)


def test_flash_attn_functions_equal_attention() -> None:
    q, k, v = make_operands()
    sinks = random_tensor(4)
    out, lse = flash_attn_func(q, k, v, causal=True, window_size=(3, 3), softcap=2.0, s_aux=sinks, softmax_scale=0.5,
                               deterministic=True, return_attn_probs=True)  # fmt: skip
    expected = attention(q, k, v, causal=True, window=(3, 0), softcap=2.0, sinks=sinks, scale=0.5, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    cu_q, cu_k = (torch.tensor([0, a, b], dtype=torch.int32) for a, b in ((4, 7), (2, 9)))
    out = flash_attn_varlen_func(q[0], k[0], v[0], cu_q, cu_k, 4, 7, causal=True)
    assert torch.equal(out, attention(q[0], k[0], v[0], causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k))


@pytest.mark.parametrize("lengths", [5, torch.tensor([5, 0], dtype=torch.int32)], ids=str)
def test_kvcache_function_appends_to_the_cache(lengths: int | Tensor) -> None:
    q, k, v = make_operands(2, 2)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # the memory layout of projected heads
    caches = random_tensor(2, 12, 2, 16, seed=3), random_tensor(2, 12, 2, 16, seed=4)
    before = [cache.clone() for cache in caches]
    out, lse = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True)
    for i, n in enumerate((5, 5) if isinstance(lengths, int) else lengths.tolist()):
        for cache, old, new in zip(caches, before, (k, v), strict=True):
            assert torch.equal(cache[i, n : n + 2], new[i])
            assert torch.equal(cache[i, :n], old[i, :n]) and torch.equal(cache[i, n + 2 :], old[i, n + 2 :])
        valid_caches = [x[i : i + 1, : n + 2] for x in caches]
        expected = attention(q[i : i + 1], *valid_caches, causal=True, return_lse=True)
        torch.testing.assert_close(out[i : i + 1], expected[0])
        torch.testing.assert_close(lse[i : i + 1], expected[1])


@pytest.mark.parametrize("lengths", [[5, 0], (5, 0), True, False, 5.0], ids=repr)
def test_kvcache_function_refuses_lengths_of_other_types(lengths: object) -> None:
    (q, k, v), caches = make_operands(2, 2), (random_tensor(2, 12, 2, 16), random_tensor(2, 12, 2, 16))
    before = [cache.clone() for cache in caches]

    message = rf"cache_seqlens must be an int or an int32 tensor of shape .*, but got {type(lengths).__name__}\."
    with pytest.raises(TypeError, match=message):
        flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths)

    assert all(torch.equal(cache, old) for cache, old in zip(caches, before, strict=True))


def test_kvcache_function_takes_a_numpy_int() -> None:
    (q, k, v), cache_seqlens = make_operands(2, 12), np.int64(5)

    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=cache_seqlens)

    assert torch.equal(out, flash_attn_with_kvcache(q, k, v, cache_seqlens=5))


def test_unsupported_arguments_are_refused() -> None:
    q, k, v = make_operands()
    for error, message, call in (
        (
            NotImplementedError,
            "flash_attn_func: dropout_p must be None, 0 or False, but got 0.1. Call torch",
            lambda: flash_attn_func(q, k, v, dropout_p=0.1),
        ),
        (
            NotImplementedError,
            "alibi_slopes must be None, 0 or False, but got a tensor. Call torch",
            lambda: flash_attn_func(q, k, v, alibi_slopes=random_tensor(4)),
        ),
        (
            NotImplementedError,
            "attention_chunk must be .* but got 4. Call the flash_attn package",
            lambda: flash_attn_func(q, k, v, attention_chunk=4),
        ),
        (
            NotImplementedError,
            "flash_attn_varlen_func: block_table must be .* with cu_seqlens_q, block_table and seqused_k",
            lambda: flash_attn_varlen_func(q, k, v, q, q, block_table=q),
        ),
        (
            ValueError,
            "block_table must be an int32",
            lambda: flash_attn_with_kvcache(q, k, v, block_table=random_tensor(2)),
        ),
        (TypeError, "must be those of flash_attn, but got 'sofcap'", lambda: flash_attn_func(q, k, v, sofcap=1.0)),
        # The first number is dropout_p in FlashAttention-2, and softmax_scale in FlashAttention-3.
        (
            TypeError,
            "flash_attn_func: .* passed by name, but got 3 more",
            lambda: flash_attn_func(q, k, v, 0.0, None, True),
        ),
        (TypeError, "passed by name, but got 1 more", lambda: flash_attn_with_kvcache(q, k, v, q, q, 1.0)),
        (
            TypeError,
            "flash_attn_varlen_func: .* but got 2 more by position",
            lambda: flash_attn_varlen_func(q, k, v, q, q, 1, 1, 0.0, None),
        ),
        (
            ValueError,
            "page_table must not be passed together",
            lambda: flash_attn_with_kvcache(q, k, v, block_table=q, page_table=q),
        ),
        (ValueError, "must be 0 or more, but got -4", lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=-4)),
        (ValueError, "k, v and cache_seqlens must be passed", lambda: flash_attn_with_kvcache(q, k, v, k, v)),
        (
            ValueError,
            "k, v and cache_seqlens must be passed",
            lambda: flash_attn_with_kvcache(q, k, v, v=v, cache_seqlens=1),
        ),
        (ValueError, "append_kv: .* sequences", lambda: flash_attn_with_kvcache(q, k, v, k[:1], v, cache_seqlens=1)),
        (
            ValueError,
            r"an int32 tensor of shape \(batch,\) = \(2,\), but got torch.int64 \(2,\)",
            lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor([1, 2])),
        ),
    ):
        with pytest.raises(error, match=message):
            call()
    flash_attn_func(q, k, v, dropout_p=0.0, num_splits=3, pack_gqa=True, attention_chunk=0, alibi_slopes=None)


# ---- transformers ----

transformers = pytest.importorskip("transformers")

from torch_flashplug.integrations import transformers as integration  # noqa: E402

SIZES = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "head_dim": 16},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "Gemma3": {"sliding_window": 4},
    "GptOss": {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    integration.install()
    yield request.param
    integration.uninstall()


def make_three_models(family: str, device: str) -> tuple[torch.nn.Module, torch.nn.Module, torch.nn.Module]:
    """Return three models with equal weights: on the plugin, on eager, and on eager in fp32."""
    config_of = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    model_class, models = getattr(transformers, f"{family}ForCausalLM"), []
    for implementation in (integration.FLASH, "eager", "eager"):
        torch.manual_seed(5)
        config = config_of(**SIZES, **FAMILIES[family], attn_implementation=implementation)
        models.append(model_class(config).to(device, torch.float32 if device == "cpu" else torch.bfloat16).train(False))
    models[2].float()
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    if family == "GptOss":
        for model in models:
            for layer in model.model.layers:
                torch.nn.init.normal_(layer.self_attn.sinks, generator=torch.Generator(device).manual_seed(1))
    return tuple(models)


def make_tokens(device: str, rows: int = 2, length: int = 13) -> Tensor:
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(1)).to(device)


def assert_as_close_as_eager(got: Tensor, eager: Tensor, right: Tensor) -> None:
    """Require at most twice the error of eager against fp32."""
    plugin_error, eager_error = (float((x.float() - right).norm() / right.norm()) for x in (got, eager))
    assert plugin_error < 1e-5 + 2 * eager_error


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_right_against_eager(device: str, family: str) -> None:
    """Check full batches, batches padded on the left, and training."""
    models = make_three_models(family, device)
    mask = torch.ones(2, 13, dtype=torch.long, device=device)
    mask[1, :5] = 0
    with torch.no_grad():
        assert_as_close_as_eager(*(model(make_tokens(device)).logits for model in models))
        padded = [model(make_tokens(device), attention_mask=mask).logits for model in models]
        assert_as_close_as_eager(*(out[0] for out in padded))
        assert_as_close_as_eager(*(out[1, 5:] for out in padded))
    for model in models:
        model(make_tokens(device), labels=make_tokens(device)).loss.backward()
    for plugin_param, eager, expected in zip(*(model.named_parameters() for model in models), strict=True):
        if "self_attn" in plugin_param[0]:
            assert_as_close_as_eager(plugin_param[1].grad, eager[1].grad, expected[1].grad)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=["", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens_equal_eager(device: str, family: str, cache: dict[str, object], padding: int) -> None:
    """A static cache has rows without written values."""
    plugin_model, eager, _ = make_three_models(family, device)
    assert plugin_model.config._attn_implementation == integration.FLASH
    settings = {"max_new_tokens": 8, "do_sample": False, "min_new_tokens": 8, **cache}
    mask = torch.ones(2, 13, dtype=torch.long, device=device)
    mask[1, :padding] = 0
    generated, expected = (
        model.generate(make_tokens(device), attention_mask=mask, **settings) for model in (plugin_model, eager)
    )
    assert device != "cpu" or torch.equal(generated, expected)


def test_packed_sequences_are_independent(device: str) -> None:
    plugin_model, *eager_models = make_three_models("Mistral", device)
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    rows = make_tokens(device, 1, 13)[0].tolist()
    batch = collate([{"input_ids": rows[:5]}, {"input_ids": rows[5:]}])
    batch = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items() if name != "labels"}
    with torch.no_grad():
        packed = plugin_model(**batch, use_cache=False).logits[0]
        for part in (slice(0, 5), slice(5, 13)):
            assert_as_close_as_eager(
                packed[part], *(model(make_tokens(device, 1, 13)[:, part]).logits[0] for model in eager_models)
            )


@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23), reason="has names of its own for paged caches"
)
@pytest.mark.parametrize("family", ["Llama", "GptOss"])
def test_continuous_batching_serves_prompts_from_a_paged_cache(device: str, family: str) -> None:
    """Serve prompts of different lengths from the paged cache of transformers.

    Each result must equal the result of the prompt alone.
    """
    plugin_model, _, exact = make_three_models(family, device)
    plugin_model = plugin_model if device == "cpu" else plugin_model.float().half()
    settings = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [[5, 6, 7, 8, 9], [3, 4], [10, 11, 12, 13, 14, 15, 16]]
    results = plugin_model.generate_batch(inputs=prompts, generation_config=settings)
    for prompt, result in zip(prompts, results.values(), strict=True):
        expected = exact.generate(torch.tensor([prompt], device=device), generation_config=settings)[0, len(prompt) :]
        assert len(result.generated_tokens) == 5 and (device != "cpu" or result.generated_tokens == expected.tolist())


def test_uninstall_leaves_no_trace() -> None:
    from transformers import AttentionInterface
    from transformers import modeling_flash_attention_utils as utils

    before = utils._lazy_imports, transformers.PreTrainedModel._check_and_adjust_attn_implementation
    integration.install()
    integration.install()
    assert utils._lazy_imports is not before[0] and integration.FLASH in AttentionInterface._global_mapping
    model = make_three_models("GptOss", "cpu")[1]
    model.set_attn_implementation(integration.FLASH)
    assert integration.FLASH not in model._compatible_flash_implementations
    integration.uninstall()
    integration.uninstall()
    assert (utils._lazy_imports, transformers.PreTrainedModel._check_and_adjust_attn_implementation) == before
    assert integration.FLASH not in AttentionInterface._global_mapping
