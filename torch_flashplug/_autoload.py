"""Entry point of group torch.backends: `import torch` calls hook() wherever this package is installed.

Without TORCH_FLASHPLUG=1 it must leave no trace. Loading this module runs the package's __init__, which stays inert
while torch itself is still being imported; hook() then runs it in earnest, or forgets it, so that a later import of the
package starts afresh.
"""

from __future__ import annotations

import importlib
import sys
import warnings

from . import env


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def hook() -> None:
    """Activates the plugin if TORCH_FLASHPLUG=1. Never raises: a failure here would break `import torch`."""
    package = __name__.rpartition(".")[0]
    if not getattr(sys.modules.get(package), "inert", False):
        return  # somebody imported the package, and that import brought torch in
    try:
        if env.autoload():
            importlib.reload(sys.modules[package])
            return
    except Exception as error:
        text = f"torch_flashplug: not activated: {type(error).__name__}: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    _forget(package)
