"""scikit-build-core as the build backend, but for one thing: a build in isolation, which would fetch a second torch and
build against that one, ends at once with the command that is right.
"""

from __future__ import annotations

import importlib.util
import sys

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403

COMMANDS = """torch_flashplug is built against the torch that is installed, and here none is. Build without isolation:
  pip install torch apache-tvm-ffi "nvidia-cutlass-dsl[cu13]" scikit-build-core cmake ninja
  pip install --no-build-isolation ."""


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    _end_isolation()
    return _build.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    _end_isolation()
    return _build.get_requires_for_build_editable(config_settings)


def _end_isolation() -> None:
    if importlib.util.find_spec("torch") is None:
        sys.exit(COMMANDS)
