"""Attention kernels for Hopper GPUs behind an unchanged torch.nn.functional.scaled_dot_product_attention.

Importing the package loads `_C`, passes the kernel tables and the environment flags to `_C`, and installs the
dispatcher. The import never imports cutlass. TORCH_FLASHPLUG=0 leaves torch untouched.
"""

from __future__ import annotations

from . import deprecation, env
from .version import __version__ as __version__

# While `import torch`, vLLM or SGLang load the entry points of plugins, no program has asked for the package yet. So
# torch must stay untouched. `_autoload.hook()` runs `__init__` a second time if the plugin is wanted.
inert = (env.torch_is_loading_backends() or env.is_loaded_as_entry_point()) and "inert" not in globals()

if not inert:
    env.check()

    from . import integrations as integrations
    from .api.attention import attention
    from .api.backend import disable, enable, explain, sdpa_backend
    from .api.explain_attention import explain_attention
    from .api.explain_varlen import explain_varlen
    from .api.kv_cache import append_kv
    from .api.quantize_kv import quantize_kv
    from .api.varlen_plan import VarlenPlan, plan_varlen
    from .ops.block_mask import PreparedBlockMask, prepare_block_mask
    from .ops.quantize_ahead import QuantizedKV
    from .ops.quantized_kv import QuantizedTensor

    __all__ = [
        "PreparedBlockMask",
        "QuantizedKV",
        "QuantizedTensor",
        "VarlenPlan",
        "append_kv",
        "attention",
        "disable",
        "enable",
        "explain",
        "explain_attention",
        "explain_varlen",
        "plan_varlen",
        "prepare_block_mask",
        "quantize_kv",
        "sdpa_backend",
    ]

    if not env.is_disabled():
        enable()


def __getattr__(name: str) -> object:
    """Return a public object under the old name, with a DeprecationWarning."""
    new = deprecation.OLD_NAMES.get(name)
    if new is None or new not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    deprecation.warn_renamed(f"{__name__}.{name}", f"{__name__}.{new}")
    return globals()[new]
