"""Published model configurations and faulty files, as read by `warmup --model-config`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

import torch_flashplug
from torch_flashplug import __main__
from torch_flashplug.api import startup
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.cli import config_classes, explain, model_config, warmup
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry.architectures import BACKENDS

H100 = DEVICES["h100"]
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 14}
CLIP_VISION = {"model_type": "clip_vision_model", "hidden_size": 1024, "num_attention_heads": 16, "patch_size": 14}
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560},
    "vision_config": SIGLIP,
}
LLAVA = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
    "vision_config": CLIP_VISION,
}
QWEN2_VL = {
    **{"model_type": "qwen2_vl", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4},
    "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "patch_size": 14},
}
CLIP = {
    "model_type": "clip",
    "text_config": {"model_type": "clip_text_model", "hidden_size": 768, "num_attention_heads": 12},
    "vision_config": CLIP_VISION,
}
QWEN2_AUDIO = {
    "model_type": "qwen2_audio",
    "audio_config": {"model_type": "qwen2_audio_encoder", "d_model": 1280, "encoder_attention_heads": 20},
    "text_config": {"model_type": "qwen2", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32},
}
CAUSAL, FULL, MASK = frozenset({"causal"}), frozenset(), frozenset({"mask"})
# Facts of each layer: query and KV heads, head dim, features of the first calls, and whether the layer generates.
PUBLISHED = {
    "gemma3": (GEMMA3, {(8, 4, 256, CAUSAL, True), (16, 16, 72, FULL, False)}),
    "llava": (LLAVA, {(32, 32, 128, CAUSAL, True), (16, 16, 64, FULL, False)}),
    "qwen2_vl": (QWEN2_VL, {(28, 4, 128, CAUSAL, True), (16, 16, 80, FULL, False)}),
    "clip": (CLIP, {(12, 12, 64, CAUSAL, False), (16, 16, 64, FULL, False)}),
    "esm": ({"model_type": "esm", "hidden_size": 1280, "num_attention_heads": 20}, {(20, 20, 64, FULL, False)}),
    "qwen2_audio": (QWEN2_AUDIO, {(20, 20, 64, FULL, False), (32, 32, 128, CAUSAL, True)}),
    "bloom": ({"model_type": "bloom", "n_embed": 1024, "n_head": 16}, {(16, 16, 64, CAUSAL, True)}),
    "falcon": ({"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "multi_query": True},
               {(71, 1, 64, CAUSAL, True)}),
}  # fmt: skip


def layer_facts(config: dict[str, object]) -> set[tuple]:
    layers = model_config.attentions(config)
    return {(*layer.heads[0], layer.dims[0], layer.features[0], layer.has_decode_calls) for layer in layers}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_have_all_layers(name):
    config, expected = PUBLISHED[name]
    assert layer_facts(config) == expected


@pytest.mark.parametrize("name", ["clip", "esm", "qwen2_vl", "bloom", "qwen2_audio"])
def test_complete_files_need_no_transformers(name, monkeypatch):
    monkeypatch.setattr(config_classes, "_class_of", lambda _: None)
    config, expected = PUBLISHED[name]
    encoder = {"encoder_layers": 32}
    config = config | ({"audio_config": config["audio_config"] | encoder} if name == "qwen2_audio" else {})
    assert layer_facts(config) == expected


@pytest.mark.parametrize("kind", ["layoutlmv2", "layoutlmv3"])
def test_relative_positions_use_a_float_bias(kind):
    (layer,) = model_config.attentions({"model_type": kind, "hidden_size": 768, "num_attention_heads": 12})
    assert {frozenset({"bias"}), frozenset({"bias32"}), MASK} <= set(layer.features) and not layer.has_decode_calls


def test_default_lengths_limit_no_decoder():
    """The Llama class has a default of 2048 positions, which long prompts exceed."""
    (layer,) = model_config.attentions(LLAMA)
    assert layer.max_length > 100_000
    (text,) = (layer for layer in model_config.attentions(CLIP) if CAUSAL in layer.features)
    assert text.max_length == 77


def run_warmup(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[object, list[str], str]:
    """Return the exit code of the program, the printed names, and the text on standard error."""
    with pytest.raises(SystemExit) as end:
        __main__.main(["warmup", *map(str, words), "--list", "--device", "h100"])
    out, err = capsys.readouterr()
    return end.value.code, out.split(), err


def write_config(folder: Path, config: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"model_type": "nonesuch"}, "audio_config must name num_attention_heads, .* does not know the model_type"),
        ({"num_heads": 8}, "audio_config must name hidden_size, .* has no model_type"),
    ],
)
def test_unplannable_parts_are_reported(tmp_path, capsys, missing, message):
    config = {"model_type": "own", "text_config": LLAMA, "audio_config": missing}
    status, names, err = run_warmup(capsys, "--model-config", write_config(tmp_path, config))
    assert status == 1 and len(names) == 6 and len(err.splitlines()) == 1
    assert re.search(f"^warmup: --model-config: {message}", err)


def test_parts_without_transformers_are_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(config_classes, "_class_of", lambda _: None)
    status, names, err = run_warmup(capsys, "--model-config", write_config(tmp_path, GEMMA3))
    assert status == 1 and names
    assert "text_config must name num_attention_heads" in err and "is not installed" in err


def test_parts_without_attention_are_accepted(tmp_path, capsys):
    config = {"model_type": "tvp", "backbone_config": {"model_type": "resnet"}}
    status, names, err = run_warmup(capsys, "--model-config", write_config(tmp_path, config))
    assert status == 0 and names and "backbone_config (resnet) names no attention heads" in err


BAD_VALUES = {
    "heads_in_quotes": ({"num_attention_heads": "32"}, 'num_attention_heads must be a whole number .* got "32"'),
    "no_heads": ({"num_attention_heads": 0}, "num_attention_heads must be a whole number from 1 to .* got 0"),
    "negative_heads": ({"num_attention_heads": -32}, "num_attention_heads must be .* got -32"),
    "true_heads": ({"num_attention_heads": True}, "num_attention_heads must be .* got true"),
    "nan_heads": ({"num_attention_heads": float("nan")}, "num_attention_heads must be .* got NaN"),
    "many_heads": ({"num_attention_heads": 10**20}, "num_attention_heads must be .* got 100000"),
    "hidden_in_quotes": ({"hidden_size": "4096"}, 'hidden_size must be .* got "4096"'),
    "hidden_is_infinite": ({"hidden_size": float("inf")}, "hidden_size must be .* got Infinity"),
    "hidden_is_small": ({"hidden_size": 8, "model_type": "own"}, "hidden_size must be num_attention_heads or more"),
    "kv_heads_in_quotes": ({"num_key_value_heads": "8"}, 'num_key_value_heads must be .* got "8"'),
    "negative_kv_heads": ({"num_key_value_heads": -8}, "num_key_value_heads must be .* got -8"),
    "more_kv_heads": ({"num_key_value_heads": 64}, "num_attention_heads must be a multiple of num_key_value_heads, but "
                                                   "got 32 and 64"),
    "dropout_is_a_list": ({"attention_dropout": [0.1]}, r"attention_dropout must be .* from 0 to 1, but got \[0.1\]"),
    "dropout_is_a_word": ({"attention_dropout": "abc"}, 'attention_dropout must be .* got "abc"'),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values_out_of_range_are_reported(name):
    values, message = BAD_VALUES[name]
    with pytest.raises(ValueError, match=f"^--model-config: {message}"):
        model_config.attentions(LLAMA | values, training=True)
    with pytest.raises(ValueError, match=f"^--model-config: text_config.{message}"):
        model_config.attentions({"text_config": LLAMA | values}, training=True)


def test_missing_hidden_size_is_reported():
    with pytest.raises(ValueError, match="^--model-config: the model must name hidden_size, but has none of"):
        model_config.attentions({"num_attention_heads": 32})


BAD_FILES = {
    "1e400": ('{"hidden_size": 1e400, "num_attention_heads": 32}', "hidden_size must be .* got Infinity"),
    "deep": ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested at most 32 levels deep"),
    "less_deep": ('{"a":' * 100 + "1" + "}" * 100, "nested at most 32 levels deep"),
    "utf16": ("{}".encode("utf-16"), "a model's folder, but got .*: "),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_with_faults_end_with_one_line(tmp_path, name):
    text, message = BAD_FILES[name]
    file = tmp_path / "config.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message) as error:
        model_config.attentions(model_config.read(file))
    assert "\n" not in str(error.value)


def test_long_paths_are_shortened_in_errors():
    with pytest.raises(ValueError, match="a model's folder, but got .*: File name too long") as error:
        model_config.read(Path("a" * 5000))
    assert len(str(error.value)) < 400


def test_a_byte_order_mark_is_accepted(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    assert model_config.read(tmp_path) == LLAMA


LARGE = {
    "20_digits": ((1, 8, 10**20, 64), None, "query must have fewer than 2\\^58 elements"),
    "three_times": ((2147483647, 2147483647, 2147483647, 64), None, "query must have fewer"),
    "scores": ((1, 8, 2147483647, 64), None, "scores must have fewer"),
    "mask": ((1, 8, 64, 64), (1, 1, 10**20, 64), "attn_mask must have fewer"),
}


@pytest.mark.parametrize("name", LARGE)
def test_oversized_shapes_are_reported(name):
    shape, mask, message = LARGE[name]
    with pytest.raises(ValueError, match=f"^{message}"):
        explain.plan(explain.Shapes(shape, shape, shape, mask), device="h100")


def test_indivisible_heads_never_reach_the_dispatcher():
    """The dispatcher would divide by the quotient of the heads, which is 0."""
    startup.load()
    sizes = {"B": 1, "Hq": 32, "Hkv": 64, "Sq": 1, "Sk": 4096, "D": 128, "Dv": 128}
    asks = (bindings.plan, bindings.is_remembered)
    for ask in (*asks, lambda *call: bindings.forced_error(*call, 0), lambda *call: bindings.kernel_missing(*call, 0)):
        with pytest.raises(ValueError, match="^plan: Hq must be a multiple of Hkv, but got 32 and 64"):
            ask(sizes, H100)
    for heads, rows in (((32, 64), 1), ((4, 3), 512)):
        q, k = (torch.empty(1, n, rows, 128, dtype=torch.bfloat16, device="meta") for n in heads)
        assert torch_flashplug.explain(q, k, k, causal_lower_right(rows, rows + 1), device="h100").backend == "stock"
        plan = torch_flashplug.explain(q, k, k, enable_gqa=True, device="h100")
        assert plan.backend == "stock" and "must divide the number of heads" in plan.error


@pytest.fixture
def set_preferred_backend():
    """Return a function that sets the backend of this process until the test ends."""
    startup.load()
    yield lambda backend: bindings.set_process_backend(BACKENDS.index(backend))
    bindings.set_process_backend(0)


@pytest.mark.parametrize("device", ["h100", "a100"])
def test_process_backend_selects_the_kernels(tmp_path, set_preferred_backend, device):
    set_preferred_backend("fa2")
    names = warmup.kernels_of_models([write_config(tmp_path, LLAMA)], DEVICES[device])
    assert names and all("_sm80_" in name for name in names)


@pytest.mark.parametrize("backend", ["stock", "math"])
def test_stock_and_math_have_no_kernels(tmp_path, set_preferred_backend, backend):
    set_preferred_backend(backend)
    assert warmup.kernels_of_models([write_config(tmp_path, LLAMA)], H100) == []
    assert f"TORCH_FLASHPLUG_BACKEND={backend} passes all calls to torch" in warmup.no_kernel_reason(H100)


@pytest.mark.parametrize("device", ["a100", "l4", "rtx4090"])
def test_auto_names_the_backend_of_older_gpus(tmp_path, device):
    with pytest.raises(SystemExit) as end:
        __main__.main(["warmup", "--model-config", str(write_config(tmp_path, LLAMA)), "--list", "--device", device])
    assert "was not measured. Set TORCH_FLASHPLUG_BACKEND=fa2" in str(end.value)
