"""Entry point of the group torch.backends: `import torch` calls `hook()` where the package is installed.

Without TORCH_FLASHPLUG=1, the entry point must leave no trace. Loading `_autoload` runs the package's `__init__`, but
`__init__` does nothing while torch is still being imported. Then `hook()` either runs `__init__` again, now completely,
or removes the package from `sys.modules`. After the removal, a later import of the package starts from the beginning.
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
    """Activate the plugin if TORCH_FLASHPLUG=1.

    No exception leaves the function, because an exception would break `import torch`.
    """
    package = __name__.rpartition(".")[0]
    if not getattr(sys.modules.get(package), "inert", False):
        return  # the program imported the package first, and the package imported torch
    try:
        if env.is_autoload():
            importlib.reload(sys.modules[package])
            return
    except Exception as error:
        text = f"torch_flashplug: the plugin was not activated: {type(error).__name__}: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    _forget(package)
