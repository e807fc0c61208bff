"""integrations.transformers: an attention function without copies of K and V, for unmodified models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from conftest import CUDA

pytest.importorskip("transformers")

from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from torch_flashplug.integrations import transformers as integration

LENGTH, HEADS, KV_HEADS = 40, 8, 2


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(integration, "DEVICES", {request.param})
    integration.register()
    yield request.param
    integration.unregister()


@pytest.fixture
def recorded_heads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the numbers of heads of query and key for every call."""
    head_counts, stock = [], F.scaled_dot_product_attention

    def recording(query, key, value, **settings):
        head_counts.append((query.shape[1], key.shape[1]))
        return stock(query, key, value, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording)
    return head_counts


def make_model(device: str) -> LlamaForCausalLM:
    torch.manual_seed(20261124)
    sizes = {"hidden_size": 64 * HEADS, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    config = LlamaConfig(
        **sizes, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, attn_implementation="sdpa", pad_token_id=0
    )
    return LlamaForCausalLM(config).to(device, torch.bfloat16).eval()


def make_padded_batch(device: str) -> dict[str, torch.Tensor]:
    """Return two prompts, the second prompt shorter and padded on the left."""
    tokens = torch.randint(1, 100, (2, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones_like(tokens)
    mask[1, :15] = 0
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("training", [False, True])
def test_padded_batch_equals_sdpa(device: str, recorded_heads: list, training: bool) -> None:
    model, batch = make_model(device), make_padded_batch(device)
    model.train(training)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        logits = model(**batch).logits[:, 15:].float()
        logits.square().mean().backward()
        return logits.detach(), model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    expected = run()
    repeated, recorded_heads[:] = list(recorded_heads), []
    model.set_attn_implementation(integration.NAME)
    for actual, expected_tensor in zip(run(), expected, strict=True):
        torch.testing.assert_close(actual, expected_tensor, atol=2e-2 * float(expected_tensor.abs().max()), rtol=2e-2)
    assert (HEADS, KV_HEADS) not in repeated and set(recorded_heads) == {(HEADS, KV_HEADS)}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_equals_sdpa(device: str, recorded_heads: list, cache: str) -> None:
    model, batch = make_model(device), make_padded_batch(device)
    settings = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    expected = model.generate(**batch, **settings)
    model.set_attn_implementation(integration.NAME)
    recorded_heads.clear()
    actual = model.generate(**batch, **settings)
    assert actual.shape == expected.shape and set(recorded_heads) == {(HEADS, KV_HEADS)}
    if device == "cpu":  # two roundings may select two different tokens
        assert torch.equal(actual, expected)


def test_calls_without_a_mask_are_unchanged(device: str, recorded_heads: list) -> None:
    model, tokens = make_model(device), make_padded_batch(device)["input_ids"]
    expected = model(tokens).logits
    calls, recorded_heads[:] = list(recorded_heads), []
    model.set_attn_implementation(integration.NAME)
    assert torch.equal(model(tokens).logits, expected) and recorded_heads == calls


def test_unregister_removes_the_attention_function(device: str) -> None:
    assert integration.NAME in AttentionInterface().valid_keys()
    integration.unregister()
    assert integration.NAME not in AttentionInterface().valid_keys()
    with pytest.raises(ValueError, match=integration.NAME):
        make_model(device).set_attn_implementation(integration.NAME)
