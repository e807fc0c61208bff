"""The attention layers of a model, read from its configuration file (config.json of Hugging Face models).

Configurations of language, vision, audio and diffusion models have the same few facts under several names. Nothing is
downloaded, and no model is built.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from .kernel_sets import LENGTHS, Attention

Config = Mapping[str, object]

# Names of a fact, in the order in which they are looked for.
_HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "n_heads", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "n_kv_heads")
_HEAD_DIM = ("head_dim", "attention_head_dim", "d_kv", "d_head", "kv_channels")
_LENGTH = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "seq_length")
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
_ENCODERS = (
    "bert",
    "vit",
    "clip",
    "siglip",
    "dinov",
    "electra",
    "deberta",
    "wav2vec",
    "hubert",
    "wavlm",
    "beit",
    "deit",
)
_WIDE_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "bf16": "bf16", "fp16": "fp16"}


def read(path: Path) -> dict[str, object]:
    """Return a configuration.

    Args:
        path: a config.json, or the folder of a model.

    Raises:
        ValueError: the file is not there, or is no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model-config must be a config.json or a model's folder, but {file} gave: {error}"
        ) from None
    if not isinstance(config, dict):
        raise ValueError(f"--model-config must hold a JSON object, but {file} holds {type(config).__name__}")
    return config


def attentions(
    config: Config, *, dtype: str = "", training: bool = False, deterministic: bool = False
) -> list[Attention]:
    """Return the kinds of attention layers of a model.

    Args:
        config: the configuration, with those of parts (text_config, vision_config, ...) inside.
        dtype: "bf16" or "fp16"; empty: what the configuration says, and bf16 if it says float32 or nothing.
        training: whether gradients are wanted.
        deterministic: whether they are to be deterministic.

    Raises:
        ValueError: no part has attention heads.
    """
    found: list[Attention] = []
    for part in _parts(config):
        element = dtype or _WIDE_DTYPES.get(
            str(_first(part, "dtype", "torch_dtype") or _first(config, "dtype", "torch_dtype")), "bf16"
        )
        for layer in _layers(part, element, training, deterministic):
            if layer not in found:
                found.append(layer)
    if not found:
        raise ValueError(f"--model-config must name attention heads, but it has none of {', '.join(_HEADS)}")
    return found


def _parts(config: Config) -> Iterator[Config]:
    """Yield a configuration and those inside it that have attention heads."""
    if _first(config, *_HEADS) is not None:
        yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _parts(value)


def _first(config: Config, *names: str) -> object:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _number(config: Config, *names: str) -> int:
    """Return the first of these facts that is a number, of a list its first; 0 where there is none."""
    value = _first(config, *names)
    value = value[0] if isinstance(value, list) and value else value
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0


def _layers(config: Config, dtype: str, training: bool, deterministic: bool) -> Iterator[Attention]:
    heads = _number(config, *_HEADS)
    if not heads:
        return
    kv_heads = _number(config, *_KV_HEADS) or (1 if config.get("multi_query") else heads)
    decoder = _is_decoder(config)
    features = [frozenset({"causal"}), frozenset({"mask"})] if decoder else [frozenset(), frozenset({"mask"})]
    if config.get("is_encoder_decoder"):
        features.insert(0, frozenset())
    if "relative_attention_num_buckets" in config or config.get("alibi"):
        features += [frozenset({"bias"}), frozenset({"bias32"})]
    if training and any(float(config.get(name) or 0) > 0 for name in _DROPOUT):
        features += [wanted | {"dropout"} for wanted in features]
    for dims in _dims(config, heads):
        yield Attention(
            # Programs give K and V as they are, or repeated for the query heads.
            tuple(dict.fromkeys(((heads, kv_heads), (heads, heads)))),
            dims,
            dtype,
            tuple(features),
            decodes=decoder and not training,
            cross_attention=bool(config.get("is_encoder_decoder")),
            training=training,
            bias_grad="relative_attention_num_buckets" in config,
            deterministic=deterministic,
            max_length=min(_number(config, *_LENGTH) or LENGTHS[-1], LENGTHS[-1]),
        )


def _is_decoder(config: Config) -> bool:
    """Whether the model attends to earlier tokens alone."""
    if config.get("is_decoder") or config.get("is_encoder_decoder"):
        return True
    name = str(config.get("model_type", config.get("_class_name", ""))).lower()
    images = "patch_size" in config or "image_size" in config or "_class_name" in config
    return not images and not any(word in name for word in _ENCODERS)


def _dims(config: Config, heads: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of head dims (of query and key, of value)."""
    latent = _number(config, "qk_rope_head_dim"), _number(config, "qk_nope_head_dim"), _number(config, "v_head_dim")
    if latent[0] and latent[2]:  # multi-head latent attention
        yield latent[0] + latent[1], latent[2]
        return
    dim = _number(config, *_HEAD_DIM) or _number(config, *_HIDDEN) // heads
    for one in dict.fromkeys((dim, _number(config, "global_head_dim") or dim)):
        if one > 0:
            yield one, one
