"""Entry points: functions called by programs in an environment with the package.

| group | program | function |
|---|---|---|
| torch.backends | `import torch` | `hook()` |
| vllm.general_plugins | vLLM, in each process | `register_vllm()` |
| sglang.srt.plugins | SGLang, in each process | `register_sglang()` |

Without TORCH_FLASHPLUG=1, the first entry point must leave no trace. Loading `_autoload` runs the package's `__init__`,
but `__init__` does nothing while torch is still being imported. Then `hook()` either runs `__init__` again, now
completely, or removes the package from `sys.modules`. After the removal, a later import of the package starts from the
beginning. The entry points of servers register a name, and leave no further trace in the same way.
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


# ---- servers: only names are registered, and the adapters are imported when a user selects a name ----

VLLM_NAME, VLLM_CLASS = "FLASHPLUG", "torch_flashplug.integrations.vllm.Backend"
SGLANG_NAME = "flashplug"


def register_vllm() -> None:
    """Register `--attention-backend FLASHPLUG` with vLLM. A further call changes nothing."""
    from vllm.v1.attention.backends import registry

    if VLLM_NAME not in registry.AttentionBackendEnum.__members__:
        registry.register_backend(VLLM_NAME, VLLM_CLASS)
    _forget_inert_package()


def register_sglang() -> None:
    """Register `--attention-backend flashplug` with SGLang. A further call changes nothing."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention import attention_registry

    if SGLANG_NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([SGLANG_NAME])
    attention_registry.register_attention_backend(SGLANG_NAME)(_create_sglang_backend)
    _forget_inert_package()


def _create_sglang_backend(runner: object) -> object:
    return importlib.import_module("torch_flashplug.integrations.sglang").create(runner)


def _forget_inert_package() -> None:
    """Remove the package after an import for the entry point alone, so that a later import is complete."""
    package = __name__.rpartition(".")[0]
    if getattr(sys.modules.get(package), "inert", False):
        _forget(package)
