"""Build backend of the project: scikit-build-core, with torch taken from the target environment.

_C uses torch's stable ABI, so the headers of torch are enough. An isolated build finds the torch of the surrounding
environment (tools/build/find_dependencies.py). An isolated build cannot compile kernel packs, because the compiler is
not installed in the isolated environment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403

sys.path.insert(0, str(Path(__file__).resolve().parent / "build"))

import find_dependencies  # noqa: E402

NO_TORCH = """torch_flashplug is built against the torch that is installed, and here is none. Install torch first:
  pip install torch
  pip install .
If the build tool creates an isolated environment (uv, build), build without isolation:
  pip install "scikit-build-core>=1.0" cmake ninja apache-tvm-ffi
  pip install --no-build-isolation ."""
NO_COMPILER = """FLASHPLUG_PACKS asks for kernels to be compiled now, which isolated builds cannot do.
Build without isolation:
  pip install "scikit-build-core>=1.0" cmake ninja apache-tvm-ffi nvidia-cutlass-dsl-libs-cu13
  FLASHPLUG_PACKS=... pip install --no-build-isolation ."""


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """Return what the build needs besides torch. Ends the process where torch is missing."""
    return _requires(_build.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    """Return what the build needs besides torch. Ends the process where torch is missing."""
    return _requires(_build.get_requires_for_build_editable(config_settings))


def _requires(names: list[str]) -> list[str]:
    absent = find_dependencies.missing()
    if "torch" in absent:
        sys.exit(NO_TORCH)
    if os.environ.get("FLASHPLUG_PACKS"):
        sys.exit(NO_COMPILER)
    return [*names, *absent]
