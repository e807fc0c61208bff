"""Configurations of models, completed with the defaults of the configuration classes in transformers.

Published files leave out values equal to a default. So a file alone may name neither heads nor head dims. transformers
is optional. Without transformers, or for a model type unknown to transformers, only the values in the file are known.
Nothing is downloaded, and no code of a model's repository runs.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping

_ABSENT = "transformers, which knows the defaults of many model types, is not installed"


def complete_config(config: Mapping[str, object]) -> dict[str, object] | None:
    """Return a configuration completed with the defaults of the configuration class, including all parts.

    Args:
        config: a configuration as read from a file.

    Returns:
        The configuration; None if no class is known, or if the class rejects the configuration.
    """
    try:
        with _quiet():
            config_class = _class_of(config)
            return None if config_class is None else _facts_of(config_class.from_dict(copy.deepcopy(dict(config))))
    except Exception:  # configuration classes check values, and raise exceptions of any type
        return None


def unknown_reason(config: Mapping[str, object]) -> str:
    """Return why the defaults of a configuration are unknown.

    Args:
        config: a configuration for which complete_config() returned None.
    """
    if _class_of({"model_type": "llama"}) is None:
        return _ABSENT
    kind = config.get("model_type")
    if kind is None:
        return "the configuration has no model_type, which would identify the defaults"
    takes = "rejects the values for" if _class_of(config) else "does not know"
    return f"transformers {takes} the model_type {str(kind)[:60]!r}"


def _class_of(config: Mapping[str, object]) -> type | None:
    """Return the class of a configuration; None if transformers or the class is missing."""
    kind = config.get("model_type")
    try:
        from transformers import CONFIG_MAPPING
    except Exception:  # a broken installation counts as a missing installation
        return None
    return CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the messages of transformers about a configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from transformers.utils import logging
        except Exception:
            yield
            return
        before = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)
        try:
            yield
        finally:
            logging.set_verbosity(before)


def _facts_of(config_object: object) -> dict[str, object]:
    """Return the values of a configuration object, under the object's own names and under the usual names."""
    facts = config_object.to_dict()
    for usual, attribute in config_object.attribute_map.items():
        if attribute in facts:
            facts.setdefault(usual, facts[attribute])
    for name in config_object.sub_configs:
        part = getattr(config_object, name, None)
        if hasattr(part, "to_dict") and hasattr(part, "sub_configs"):
            facts[name] = _facts_of(part)
    return facts
