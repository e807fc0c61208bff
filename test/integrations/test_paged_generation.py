"""transformers on "flashplug": decode in the pages of generate_batch(), and values of a smaller head dim."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from conftest import CUDA

transformers = pytest.importorskip("transformers")

from transformers import modeling_flash_attention_utils as flash_utils  # noqa: E402
from transformers.generation.continuous_batching import initialization  # noqa: E402
from transformers.integrations.flash_attention import flash_attention_forward  # noqa: E402

from torch_flashplug import flash_attn  # noqa: E402
from torch_flashplug.integrations import transformers as integration  # noqa: E402

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
SIZES = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 600, "pad_token_id": 0, "bos_token_id": 1},
    "eos_token_id": 2,
}
LATENT = {  # the head dims of multi-head latent attention: 24 for queries and keys, 16 for values
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32},
    **{"num_key_value_heads": 4, "first_k_dense_replace": 2, "n_routed_experts": 8, "moe_intermediate_size": 16},
}
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    integration.uninstall()


@pytest.fixture
def calls(device: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple, dict]]:
    """Record the calls of the functions of flash_attn, with "flashplug" installed."""
    recorded = []

    def recording(name: str) -> object:
        function = getattr(flash_attn, name)

        @functools.wraps(function)
        def call(*arguments: object, **settings: object) -> object:
            recorded.append((name, arguments, settings))
            return function(*arguments, **settings)

        return call

    for name in FUNCTIONS:
        monkeypatch.setattr(flash_attn, name, recording(name))
    integration.install()
    return recorded


class WithGpu:
    """The module torch, except that a GPU is available."""

    cuda = SimpleNamespace(is_available=lambda: True)

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def make_models(family: str, device: str, **sizes: object) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return two models with equal weights, on the plugin and on eager."""
    config_class, model_class = (getattr(transformers, f"{family}{name}") for name in ("Config", "ForCausalLM"))
    models = []
    for implementation in (integration.FLASH, "eager"):
        torch.manual_seed(5)
        config = config_class(**(SIZES | sizes), attn_implementation=implementation)
        models.append(model_class(config).to(device, torch.float32 if device == "cpu" else torch.float16).eval())
    models[1].load_state_dict(models[0].state_dict())
    return tuple(models)


@pytest.mark.skipif(VERSION < (5, 23), reason="has names of its own for paged caches")
def test_decode_of_generate_batch_reads_pages(
    device: str, calls: list[tuple[str, tuple, dict]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that transformers gathers no pages for steps of single tokens.

    A prompt is longer than a page. The prompts are served together, so a table has unused entries.
    """
    if device == "cpu":
        monkeypatch.setattr(initialization, "torch", WithGpu())
    model, eager = make_models("Llama", device)
    settings = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 60, (n,), generator=draw).tolist() for n in (5, 255, 300)]
    # Without sizes, the cache takes most of the memory of the machine.
    sizes = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=1024)
    results = model.generate_batch(inputs=prompts, generation_config=settings, continuous_batching_config=sizes)
    names = [name for name, *_ in calls]
    decode_steps = [settings for name, _, settings in calls if name == "flash_attn_with_kvcache"]
    assert len(decode_steps) >= 2 * 4 and set(names) == {"flash_attn_varlen_func", "flash_attn_with_kvcache"}
    assert all(step["block_table"].shape[0] == 3 for step in decode_steps[:2])
    # No varlen call is a step of single tokens: a call with as many rows as sequences would be one.
    varlen_calls = [arguments for name, arguments, _ in calls if name == "flash_attn_varlen_func"]
    assert all(len(q) > 3 for q, *_ in varlen_calls)
    for prompt, result in zip(prompts, results.values(), strict=True):
        alone = torch.tensor([prompt], device=device)
        expected = eager.generate(alone, attention_mask=torch.ones_like(alone), generation_config=settings)
        tokens = expected[0, len(prompt) :].tolist()
        assert len(result.generated_tokens) == 5 and (device != "cpu" or result.generated_tokens == tokens)


def test_pages_are_requested_for_this_implementation_only() -> None:
    ask = initialization.is_flash_attention_requested
    integration.install()
    try:
        wrapped = initialization.is_flash_attention_requested
        for name, version, expected in (
            (integration.FLASH, [2, 3], True),
            (integration.FLASH, None, True),
            ("sdpa", [2, 3], False),
            ("flash_attention_4", [2, 3], False),
            ("flash_attention_3", [2, 3], True),
        ):
            config = SimpleNamespace(_attn_implementation=name)
            assert wrapped(config, version=version) is expected
            assert wrapped(requested_attention_implementation=name) == ("flash" in name)
        assert not ask(SimpleNamespace(_attn_implementation=integration.FLASH), version=[2, 3])
    finally:
        integration.uninstall()
    assert initialization.is_flash_attention_requested is ask


@pytest.mark.parametrize("padding", [0, 5])
def test_values_keep_their_head_dim(device: str, calls: list[tuple[str, tuple, dict]], padding: int) -> None:
    """Run a model with latent attention: full or padded batches, training and generation."""
    model, eager = make_models("DeepseekV3", device, **LATENT)
    tokens = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones_like(tokens)
    mask[1, :padding] = 0
    tolerance = 1e-5 if device == "cpu" else 2e-2
    with torch.no_grad():
        logits, expected = (x(tokens, attention_mask=mask).logits for x in (model, eager))
    torch.testing.assert_close(logits[:, padding:], expected[:, padding:], atol=tolerance, rtol=tolerance)
    assert calls and all(arguments[2].shape[-1] == LATENT["v_head_dim"] for _, arguments, _ in calls)
    for x in (model, eager):
        x(tokens, labels=tokens).loss.backward()
    grads = [x.model.layers[0].self_attn.kv_b_proj.weight.grad for x in (model, eager)]
    torch.testing.assert_close(*grads, atol=tolerance, rtol=100 * tolerance)
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "attention_mask": mask}
    generated = [x.generate(tokens, **settings) for x in (model, eager)]
    assert generated[0].shape == generated[1].shape and (device != "cpu" or torch.equal(*generated))


@pytest.mark.parametrize("is_causal", [None, False, True])
def test_smaller_values_equal_padded_values(is_causal: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with transformers' own function, which pads the values, for all arguments."""
    integration.install()
    try:
        draw = torch.Generator().manual_seed(3)
        query, key, value = (torch.randn(2, h, 9, d, generator=draw) for h, d in ((4, 24), (2, 24), (2, 16)))
        module = torch.nn.Linear(1, 1)
        module.config, module.is_causal = SimpleNamespace(_attn_implementation=integration.FLASH), True
        settings = {"scaling": 0.3, "sliding_window": 4, "softcap": 2.0, "s_aux": torch.randn(4, generator=draw)}
        monkeypatch.setattr(flash_utils, "fa_peft_integration_check", lambda q, k, v, *_: (q, k, v))
        mask = torch.ones(2, 9, dtype=torch.long)
        mask[0, :3] = 0
        for padding in (None, mask):
            ours, theirs = (
                attend(module, query, key, value, padding, is_causal=is_causal, **settings)[0]
                for attend in (integration.flash_attend, flash_attention_forward)
            )
            assert ours.shape == (2, 9, 4, 16)
            torch.testing.assert_close(ours, theirs)
    finally:
        integration.uninstall()


def test_signatures_of_transformers() -> None:
    """Check the names in transformers that the integration uses.

    An upgrade that renames an argument fails here, and not in a model.
    """
    forward = inspect.signature(flash_utils._flash_attention_forward).parameters
    names = ("attention_mask", "query_length", "is_causal", "softmax_scale", "target_dtype", "attn_implementation")
    assert set(names) <= set(forward)
    assert list(inspect.signature(flash_attention_forward).parameters)[:5] == [
        *("module", "query", "key", "value", "attention_mask"),
    ]
    asked = inspect.signature(initialization.is_flash_attention_requested).parameters
    assert next(iter(asked)) == "config" and "version" in asked
    assert all(hasattr(owner, name) for owner, name, _ in integration._WRAPPED)
