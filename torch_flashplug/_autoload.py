"""Entry point of group torch.backends: `import torch` calls hook() wherever this package is installed.

Without TORCH_FLASHPLUG=1 it must leave no trace. Loading this module runs the package's __init__, which stays inert
while torch itself is still being imported; hook() then forgets the inert package, so that a later import of it starts
afresh.
"""

from __future__ import annotations

import sys
import warnings


def hook() -> None:
    """Activates the plugin if TORCH_FLASHPLUG=1. Never raises: a failure here would break `import torch`."""
    try:
        package = __package__ or "torch_flashplug"
        from . import env

        if getattr(sys.modules[package], "inert", False):
            for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
                del sys.modules[name]
        elif env.autoload() and not env.disabled():
            import torch_flashplug  # noqa: F401  (already done by loading this module; here for the reader)
    except Exception as error:
        warnings.warn(f"torch_flashplug: not activated: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
