"""Attention layers of a model, read from a configuration file (config.json of Hugging Face models).

Configurations of language, vision, audio and diffusion models have the same few facts under several names. Values
missing in a file come from config_classes. Nothing is downloaded, and no model is built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..dispatch.kernel_sets import LENGTHS, AttentionLayer
from . import config_classes

Config = Mapping[str, object]

# Names of each fact, in the order of the search.
_HIDDEN = ("hidden_size", "d_model", "n_embd", "n_embed", "embed_dim", "dim")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "n_heads", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "n_kv_heads")
_HEAD_DIM = ("head_dim", "attention_head_dim", "d_kv", "d_head", "kv_channels")
_LATENT = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")  # names of multi-head latent attention (MLA)
_GLOBAL_HEAD_DIM = ("global_head_dim",)
_LENGTH = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "seq_length")
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
_SMALL = (*_HEADS, *_KV_HEADS, *_HEAD_DIM, *_LATENT, *_GLOBAL_HEAD_DIM)
_MAY_BE_ZERO = {*_HEAD_DIM, *_LATENT}  # a head dim of 0 means the same as a missing head dim
_MAX_SMALL_NUMBER, _MAX_NUMBER = 1 << 16, 1 << 53
# If one of these facts is true, the scores have a float bias.
_RELATIVE = (
    *("has_relative_attention_bias", "has_spatial_attention_bias"),
    *("use_relative_position_bias", "use_shared_relative_position_bias"),
)
_NO_PARTS = {"quantization_config", "compression_config", "generation_config"}
_MAX_NESTED = 32
# Model types, with underscores. Text towers such as CLIP's are causal, but generate nothing.
_CAUSAL_TEXT = re.compile(r"^(clip|clipseg|owlvit|owlv2|groupvit|x_?clip|metaclip_2|aimv2)_text")
_ENCODERS = re.compile(
    "bert|vit|clip|dinov|electra|wav2vec|wavlm|beit|deit|canine|flava|funnel|longformer|nystromformer|roformer"
    "|splinter|layoutlm|layoutxlm|markuplm|big_bird|data2vec|unispeech|bridgetower|mpnet|tapas|jina|qformer|parakeet"
    "|siglip|lxmert|lightglue|superglue|fastspeech|patchtst|ernie(?!4)|(^|_)(align|bros|clap|dpr|esm|esmc|gte|lilt|luke|mra|neomme|sew|xlm|xmod|yoso)(_|$)"
    "|(vision|audio)(_model|_config|_tower)?$|_encoder(_config)?$"
)
_WIDE_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "bf16": "bf16", "fp16": "fp16"}


class Skip(NamedTuple):
    """Part of a model for which no kernels are planned.

    Attributes:
        message: the name of the part and the reason, in a sentence or two.
        is_fault: whether the part may have attention.
    """

    message: str
    is_fault: bool


def read(path: Path) -> dict[str, object]:
    """Return the configuration in a file.

    Args:
        path: a config.json, or the folder of a model.

    Raises:
        ValueError: the file is missing, or is not a JSON object.
    """
    file = path
    try:
        file = path / "config.json" if path.is_dir() else path
        config = json.loads(file.read_text(encoding="utf-8-sig"))  # with or without a byte order mark
        is_deep = _is_deep(config)
    except RecursionError:
        config, is_deep = {}, True
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"--model-config must be a config.json or a model's folder, but got {_short(str(file))}: {why}"
        ) from None
    if is_deep:
        raise ValueError(
            f"--model-config must be nested at most {_MAX_NESTED} levels deep, but {_short(str(file))} is nested "
            "deeper. Pass a model's config.json."
        )
    if not isinstance(config, dict):
        raise ValueError(f"--model-config must hold a JSON object, but {file} holds {type(config).__name__}.")
    return config


def _is_deep(config: object) -> bool:
    """Return whether objects and lists are nested deeper than in any real configuration."""
    layer = [config]
    for _ in range(_MAX_NESTED):
        inner = (value.values() if isinstance(value, dict) else value for value in layer)
        layer = [item for values in inner for item in values if isinstance(item, (dict, list))]
        if not layer:
            return False
    return True


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:100]}...{text[-60:]}"


def attentions(
    config: Config,
    *,
    dtype: str = "",
    training: bool = False,
    deterministic: bool = False,
    on_skip: Callable[[Skip], None] = lambda _: None,
) -> list[AttentionLayer]:
    """Return the kinds of attention layers of a model.

    Args:
        config: the configuration, with the configurations of parts (text_config, vision_config, ...) inside.
        dtype: "bf16" or "fp16". Empty: the dtype in the configuration, and bf16 for float32 or a missing dtype.
        training: whether the calls need gradients.
        deterministic: whether the gradients must be deterministic.
        on_skip: a function called with each part for which no kernels are planned, except a part named in the error.

    Raises:
        ValueError: no part can be planned, or a value is out of range.
    """
    _check_numbers(config)
    layers: list[AttentionLayer] = []
    skipped: list[Skip] = []
    for part in _parts(config, _Part({}, "", "", False), ""):
        if (skip := _skip_of(part)) is not None:
            skipped.append(skip)
            continue
        element = dtype or _WIDE_DTYPES.get(
            str(_first(part.facts, "dtype", "torch_dtype") or _first(config, "dtype", "torch_dtype")), "bf16"
        )
        for layer in _layers(part, element, training, deterministic):
            if layer not in layers:
                layers.append(layer)
    last = skipped.pop().message if skipped and not layers else ""
    for skip in skipped:
        on_skip(skip)
    if last:
        raise ValueError(last)
    if not layers:
        raise ValueError(f"--model-config must name attention heads, but has none of {', '.join(_HEADS)}.")
    return layers


class _Part(NamedTuple):
    """Configuration that may describe attention layers.

    Attributes:
        facts: the values of the configuration, with defaults where defaults are known.
        name: the path of the configuration in the file; empty at the top level.
        kind: the model type, or the outer model type with the key of the configuration, with underscores.
        is_known: whether defaults are known.
        length: the longest sequence according to the file alone; 0 if the file does not say.
    """

    facts: Config
    name: str
    kind: str
    is_known: bool
    length: int = 0

    @property
    def description(self) -> str:
        return self.name or "the model"

    def key(self, *names: str) -> str:
        """Return the first of the names present in the configuration; empty if no name is present."""
        return next((name for name in names if self.facts.get(name) is not None), "")

    def number(self, *names: str) -> int:
        """Return the first present fact, or the first item of a fact that is a list; 0 if no fact is present."""
        key = self.key(*names)
        return _number(self.facts, key, self.name) if key else 0


def _number(config: Config, key: str, name: str) -> int:
    value = config[key]
    value = value[0] if isinstance(value, list) and value else value
    least, most = int(key not in _MAY_BE_ZERO), _MAX_SMALL_NUMBER if key in _SMALL else _MAX_NUMBER
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and least <= value <= most and value == int(value)):
        raise ValueError(
            f"--model-config: {_path(name, key)} must be a whole number from {least} to {most}, but got "
            f"{_as_in_file(value)}. Correct the file."
        )
    return int(value)


def _path(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _as_in_file(value: object) -> str:
    return _short(json.dumps(value))


def _check_numbers(config: Config, name: str = "") -> None:
    """Check the range of each number, before any configuration class reads the numbers.

    Raises:
        ValueError: a number is out of range. The message names the key in the file.
    """
    part = _Part(config, name, "", False)
    if part.key(*_HEADS, "model_type"):
        for names in (_HEADS, _KV_HEADS, _HEAD_DIM, *((dim,) for dim in _LATENT), _GLOBAL_HEAD_DIM, _HIDDEN, _LENGTH):
            part.number(*names)
    for key, value in config.items():
        if isinstance(value, dict):
            _check_numbers(value, _path(name, key))


def _parts(config: Config, outer: _Part, key: str, raw: object = None) -> Iterator[_Part]:
    """Yield a configuration and the nested configurations.

    Configurations that are mere containers are left out, and so are configurations of other things than models.

    Args:
        config: the configuration.
        outer: the part that holds the configuration.
        key: the key of the configuration in `outer`; empty at the top level.
        raw: the configuration as read from the file, if `config` also has defaults.
    """
    name = _path(outer.name, key) if key else ""
    kind = str(config.get("model_type") or config.get("_class_name") or f"{outer.kind}_{key}")
    full = config if outer.is_known else config_classes.complete_config(config)
    raw = config if not outer.is_known else raw if isinstance(raw, dict) else {}
    facts = config if full is None else full
    length = _Part(raw, name, "", False).number(*_LENGTH)
    part = _Part(facts, name, kind.lower().replace("-", "_"), full is not None, length)
    if (
        outer.is_known and not config.get("model_type") and part.key(*_HEADS)
    ):  # for example the configuration of some layers
        part = part._replace(facts={**outer.facts, **config})
    inner = [
        nested
        for key, value in facts.items()
        if isinstance(value, dict) and key not in _NO_PARTS
        for nested in _parts(value, part, key, raw.get(key))
    ]
    is_part = facts.get("model_type") or (not outer.is_known and name.endswith(("_config", "_cfg")))
    if part.key(*_HEADS) or (is_part and not inner):
        yield part
    yield from inner


def _skip_of(part: _Part) -> Skip | None:
    """Return why a part cannot be planned; None if it can."""
    where = f"--model-config: {part.description}"
    if not part.key(*_HEADS):
        if part.is_known:
            kind = _short(str(part.facts.get("model_type")))
            return Skip(
                f"{where} ({kind}) names no attention heads, so that no kernels are planned for that part.", False
            )
        names = _HEADS
    elif part.key(*_HEAD_DIM, *_HIDDEN) or (part.key(_LATENT[0]) and part.key(_LATENT[2])):
        return None
    else:
        names = (*_HIDDEN, *_HEAD_DIM)
    why = "" if part.is_known else f"; {config_classes.unknown_reason(part.facts)}"
    return Skip(
        f"{where} must name {names[0]}, but has none of {', '.join(names)}{why}. Add the key, or describe the calls of "
        "that part with --shapes.",
        True,
    )


def _first(config: Config, *names: str) -> object:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _layers(part: _Part, dtype: str, training: bool, deterministic: bool) -> Iterator[AttentionLayer]:
    config = part.facts
    heads, kv_heads = _heads(part)
    causal, decodes = _is_causal_and_decodes(part)
    features = [frozenset({"causal"}) if causal else frozenset(), frozenset({"mask"})]
    if config.get("is_encoder_decoder"):
        features.insert(0, frozenset())
    has_relative_bias = _has_relative_bias(part)
    if has_relative_bias or config.get("alibi"):
        features += [frozenset({"bias"}), frozenset({"bias32"})]
    if training and any(_dropout(part, name) > 0 for name in _DROPOUT):
        features += [call_features | {"dropout"} for call_features in features]
    for dims in _dims(part, heads):
        yield AttentionLayer(
            # Programs pass K and V either with KV heads, or repeated for the query heads.
            tuple(dict.fromkeys(((heads, kv_heads), (heads, heads)))),
            dims,
            dtype,
            tuple(features),
            has_decode_calls=decodes and not training,
            has_cross_attention=bool(config.get("is_encoder_decoder")),
            needs_gradients=training,
            needs_bias_gradient=has_relative_bias,
            is_deterministic=deterministic,
            max_length=min(_length(part, decodes) or LENGTHS[-1], LENGTHS[-1]),
        )


def _length(part: _Part, decodes: bool) -> int:
    """Return the longest sequence; 0 if unknown. For models that generate text, a default is no limit."""
    return part.length if decodes else part.length or part.number(*_LENGTH)


def _heads(part: _Part) -> tuple[int, int]:
    """Return the number of query heads and the number of KV heads."""
    heads, kv_heads = part.number(*_HEADS), part.number(*_KV_HEADS)
    if kv_heads in {0, heads}:
        is_shared = part.facts.get("multi_query") and not part.facts.get("new_decoder_architecture")
        return heads, 1 if is_shared else heads
    if heads % kv_heads:
        raise ValueError(
            f"--model-config: {_path(part.name, part.key(*_HEADS))} must be a multiple of {part.key(*_KV_HEADS)}, but "
            f"got {heads} and {kv_heads}. Correct the file."
        )
    return heads, kv_heads


def _dropout(part: _Part, key: str) -> float:
    value = part.facts.get(key) or 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(
            f"--model-config: {_path(part.name, key)} must be a number from 0 to 1, but got {_as_in_file(value)}. "
            "Correct the file."
        )
    return float(value)


def _has_relative_bias(part: _Part) -> bool:
    """Return whether the scores have a learned float bias that depends on the distance of tokens."""
    if "relative_attention_num_buckets" in part.facts or any(part.facts.get(name) for name in _RELATIVE):
        return True
    by_default = re.match("layoutlmv[23]|layoutxlm", part.kind)
    return bool(by_default) and not part.key("has_relative_attention_bias", "has_spatial_attention_bias")


def _is_causal_and_decodes(part: _Part) -> tuple[bool, bool]:
    """Return whether the attention is causal, and whether decode calls follow the prefill."""
    config = part.facts
    if config.get("is_decoder") or config.get("is_encoder_decoder"):
        return True, True
    if config.get("use_bidirectional_attention") is True or config.get("is_causal") is False:
        return False, False
    if "patch_size" in config or "image_size" in config or "_class_name" in config:
        return False, False
    if _CAUSAL_TEXT.search(part.kind):
        return True, False
    is_audio_encoder = "encoder_layers" in config and "decoder_layers" not in config  # for example audio encoders
    decodes = "decoder" in part.kind or not (is_audio_encoder or _ENCODERS.search(part.kind))
    return decodes, decodes


def _dims(part: _Part, heads: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs (head dim of query and key, head dim of value)."""
    rope, nope, of_value = (part.number(name) for name in _LATENT)
    if rope and of_value:
        yield rope + nope, of_value
        return
    # Vision towers with depths have an embed_dim. Their hidden_size is then the width of the following layers.
    hidden = ("embed_dim", *_HIDDEN) if part.key("depth", "depths") else _HIDDEN
    dim = part.number(*_HEAD_DIM) or part.number(*hidden) // heads
    if not dim:
        raise ValueError(
            f"--model-config: {_path(part.name, part.key(*hidden))} must be {part.key(*_HEADS)} or more, but got "
            f"{part.number(*hidden)} and {heads}. Correct the file."
        )
    for head_dim in dict.fromkeys((dim, part.number(*_GLOBAL_HEAD_DIM) or dim)):
        yield head_dim, head_dim
