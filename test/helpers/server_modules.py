"""Modules of vLLM and SGLang for tests of adapters: the installed package, or the stubs in server_stubs.py."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import server_stubs

_kept: dict[tuple[str, str], dict[str, ModuleType]] = {}  # a package is imported once: its ops are registered once


def _names(server: str) -> list[str]:
    adapter = f"torch_flashplug.integrations.{server}"
    return [name for name in sys.modules if name.split(".")[0] == server or name == adapter]


@contextlib.contextmanager
def modules_of(server: str, source: str) -> Iterator[None]:
    """Make `import vllm` or `import sglang` find the "installed" package or the "stubs", inside of the block."""
    outside = {name: sys.modules.pop(name) for name in _names(server)}
    sys.modules.update(_kept.get((server, source), {}))
    if source == "stubs":
        server_stubs.install()
    try:
        yield
    finally:
        if source == "stubs":
            server_stubs.uninstall()
        _kept[server, source] = {name: sys.modules.pop(name) for name in _names(server)}
        sys.modules.update(outside)


def why_not_importable(*modules: str) -> str:
    """Return why an installed package cannot be imported here, or "" if all modules can be imported."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # an import may fail in many ways where the parts for a GPU are missing
            return f"{module} cannot be imported here: {type(error).__name__}: {error}".splitlines()[0]
    return ""
