"""Configurations of models, with the defaults of their classes in transformers.

Published files leave out what equals a default: a file alone may name neither heads nor head dims. transformers is
optional; without it, or for model types that it does not know, a file says all that is known. Nothing is downloaded,
and no code of a model's repository runs.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping

_ABSENT = "transformers, which knows the defaults of many model types, is not installed"


def completed(config: Mapping[str, object]) -> dict[str, object] | None:
    """Return a configuration with the defaults of its class, and those of its parts with those of theirs.

    Args:
        config: a configuration as its file has it.

    Returns:
        The configuration; None where no class is known, or where the class does not take the configuration.
    """
    try:
        with _quiet():
            made = _class_of(config)
            return None if made is None else _facts_of(made.from_dict(copy.deepcopy(dict(config))))
    except Exception:  # classes check values, and raise what they like
        return None


def why_unknown(config: Mapping[str, object]) -> str:
    """Return why the defaults of a configuration are unknown.

    Args:
        config: a configuration that completed() returned None for.
    """
    if _class_of({"model_type": "llama"}) is None:
        return _ABSENT
    kind = config.get("model_type")
    if kind is None:
        return "it has no model_type, which would name its defaults"
    takes = "does not take the values of" if _class_of(config) else "does not know"
    return f"transformers {takes} its model_type {str(kind)[:60]!r}"


def _class_of(config: Mapping[str, object]) -> type | None:
    """Return the class of a configuration; None where transformers or the class is missing."""
    kind = config.get("model_type")
    try:
        from transformers import CONFIG_MAPPING
    except Exception:  # a broken installation is as good as none
        return None
    return CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing what a class thinks of a configuration."""
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


def _facts_of(made: object) -> dict[str, object]:
    """Return what a configuration object says, under its own names and under the usual ones."""
    facts = made.to_dict()
    for usual, own in made.attribute_map.items():
        if own in facts:
            facts.setdefault(usual, facts[own])
    for name in made.sub_configs:
        part = getattr(made, name, None)
        if hasattr(part, "to_dict") and hasattr(part, "sub_configs"):
            facts[name] = _facts_of(part)
    return facts
