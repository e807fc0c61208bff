"""Attention kernels for Hopper GPUs behind an unchanged torch.nn.functional.scaled_dot_product_attention.

Importing the package loads `_C`, passes the kernel tables and the environment flags to `_C`, and installs the
dispatcher. The import never imports cutlass. TORCH_FLASHPLUG=0 leaves torch untouched.
"""

from __future__ import annotations

from . import env
from .version import __version__ as __version__

# While `import torch` runs the entry points of plugins, no program has asked for the package yet. So torch must stay
# untouched. `_autoload.hook()` runs `__init__` a second time if the plugin is wanted.
inert = env.torch_is_loading_backends() and "inert" not in globals()

if not inert:
    env.check()

    from . import integrations as integrations
    from .api.attention import attention
    from .api.backend import disable, enable, explain, sdpa_backend
    from .api.explain_attention import explain_attention
    from .api.explain_varlen import explain_varlen
    from .api.kv_cache import append_kv
    from .api.varlen_plan import LengthsPlan, plan
    from .ops.block_mask import BlockLists, block_lists
    from .ops.quantized_kv import QuantizedTensor

    __all__ = [
        "BlockLists",
        "LengthsPlan",
        "QuantizedTensor",
        "append_kv",
        "attention",
        "block_lists",
        "disable",
        "enable",
        "explain",
        "explain_attention",
        "explain_varlen",
        "plan",
        "sdpa_backend",
    ]

    if not env.is_disabled():
        enable()
