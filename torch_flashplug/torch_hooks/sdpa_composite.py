"""Python kernel for aten::scaled_dot_product_attention, for a torch without a replaceable choice function.

TORCH_FLASHPLUG_HOOK=composite selects this hook. The kernel asks the same C++ dispatch and calls the same aten op as
the default hook (`src/hooks/sdp_choice.cpp`). The hook has three limits. The host cost is the cost of Python.
torch.func.vmap falls back to stock, because functorch decomposes the composite op before this kernel. And
ExportedProgram.run_decompositions() leaves the composite op in the graph.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ..dispatch import bindings
from ..ops.sdpa import without_own_graph
from . import describe_call
from .distributed import dtensor
from .tracing import kept_mask

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_FUSED_OP = torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default
_MATH = torch.ops.aten._scaled_dot_product_attention_math.default

_libraries: dict[str, torch.library.Library] = {}  # by device type


def install(device: str = "CUDA") -> None:
    """Register the kernel for dispatch key `device` and the autograd key of `device`.

    "CPU" serves the CPU stub backend of the tests.
    """
    if device.lower() in _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    for key in (device, f"Autograd{device}"):
        library.impl(_SDPA.name(), _sdpa, key)
    _libraries[device.lower()] = library
    _clear_caches()


def uninstall() -> None:
    """Restore stock's composite op."""
    while _libraries:
        _libraries.popitem()[1]._destroy()
    _clear_caches()


def _clear_caches() -> None:
    _planned_backend.cache_clear()
    _SDPA._dispatch_cache.clear()  # torch caches the kernel of each dispatch key in Python


def installed() -> bool:
    return bool(_libraries)


@without_own_graph
def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run F.scaled_dot_product_attention on the backend that `_backend` selects: stock, math or the kernels."""
    backend = _backend(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, scale)
    if backend == "stock":
        settings = {"scale": scale, "enable_gqa": enable_gqa}
        return _SDPA.decompose(query, key, value, attn_mask, dropout_p, is_causal, **settings)
    if backend == "math":
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # the math op adds attn_mask to the scores
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        return _MATH(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool and describe_call.wants_grad(query, key, value):
        # The backward reads the mask, and the caller may change the mask before then. The op therefore gets a copy, as
        # in stock. In a functionalized trace nothing can change the mask.
        attn_mask = attn_mask if isinstance(attn_mask, FunctionalTensor) else kept_mask(attn_mask)
    # The op has no enable_gqa, because the shapes say whether heads are grouped.
    return _FUSED_OP(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]


def _backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    scale: float | None,
) -> str:
    mode, device = bindings.effective_mode(), query.device
    if describe_call.takes_math(mode):
        return "math" if _math_accepts(query, key, value, attn_mask) else "stock"
    if not describe_call.is_asked(mode):
        return "stock"
    part = dtensor.local_part(query, key, value, attn_mask, dropout_p)
    if part is not None:
        query, key, value = dtensor.local_meta_tensors(part, query, key, value)
    if describe_call.has_no_elements(query, key, value):  # stock's choice function divides by the number of heads
        return "math" if describe_call.math_takes_empty(attn_mask, is_causal) else "stock"
    if describe_call.outside_dispatcher(query, key, value, attn_mask, enable_gqa, mode):
        return "stock"
    if (forced := bindings.forced_kernels(mode)) is not None:
        return forced  # if no kernel can run the call, the aten op raises the reasons
    facts = describe_call.describe(query, key, value, attn_mask, dropout_p, is_causal, scale) | {
        "on_cuda": device.type in _libraries
    }
    planned = _planned_backend(tuple(facts.items()), device.index or 0, mode, bindings.missing_changes())
    if planned != "stock" or part is not None:
        return planned
    if not torch.backends.cuda.math_sdp_enabled():
        return "stock"
    call_args = (query, key, value, attn_mask, dropout_p, is_causal)
    choice = torch._fused_sdp_choice(*call_args, scale=scale, enable_gqa=enable_gqa)
    _, fault = describe_call.corrected_choice(choice, *call_args, scale)
    return "math" if fault else "stock"


def _math_accepts(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> bool:
    """Return whether the math op accepts the operands; stock raises for all other operands."""
    is_uniform = query.dtype == key.dtype == value.dtype and query.device == key.device == value.device
    has_valid_mask = attn_mask is None or attn_mask.dtype in {torch.bool, torch.float32, query.dtype}
    return is_uniform and has_valid_mask and min(tensor.dim() for tensor in (query, key, value)) > 1


@functools.lru_cache(maxsize=1024)
def _planned_backend(facts: tuple[tuple[str, int | float], ...], device_index: int, mode: int, changes: int) -> str:
    """Return the planned backend, or "stock" where a kernel is missing.

    Only a lookup can tell that a kernel is missing. `changes` counts the changes of missing kernels, so a new count
    makes the cache ask again.
    """
    call, device = dict(facts), bindings.device_facts(device_index)
    return "stock" if bindings.kernel_missing(call, device, mode) else bindings.plan(call, device, mode)["backend"]
