"""Plans of calls with the causal masks of torch.nn.attention.bias, for explain().

Upper-left masks and square masks mean `is_causal` to F.sdpa. With a lower-right mask that is not square, torch itself
calls its flash or efficient attention op. torch_flashplug kernels are registered for both ops
(src/hooks/flash_attention_op.cpp, src/hooks/efficient_attention_op.cpp).
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ..dispatch import bindings
from ..registry import architectures, dispatch_table, features
from ..registry.architectures import BACKENDS, KERNEL_BACKENDS
from ..registry.dispatch_table import HEAD_DIM_STEP, MAX_GENERAL_HEAD_DIM
from ..torch_hooks import describe_call


def is_causal_bias(mask: object) -> bool:
    """Return whether `mask` is a `CausalBias`.

    torch.nn.attention.bias is not imported here, because that import loads all of torch._dynamo.
    """
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def is_upper_left(mask: Tensor) -> bool:
    return mask.variant.name == "UPPER_LEFT" or mask.seq_len_q == mask.seq_len_kv


def plan_lower_right(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, scale: float | None, facts: dict[str, int]
) -> dict[str, object]:
    """Return the fields of a `Plan` for a call with a lower-right mask.

    Args:
        query: queries (B, Hq, Sq, D).
        key: keys (B, Hkv, Sk, D).
        value: values (B, Hkv, Sk, Dv).
        dropout_p: the probability of dropout.
        scale: the factor of the scores; None for 1 / sqrt(D).
        facts: the facts of the GPU.
    """
    mode = bindings.effective_mode()
    stock_reason = _why_stock(query, key, value, dropout_p, facts, mode)
    if stock_reason:
        return {"backend": "stock", "reasons": dict.fromkeys(KERNEL_BACKENDS, f"{stock_reason}.")}
    described = describe_call.describe(query, key, value, None, 0.0, False, scale)
    described |= {"window": 1, "needs": features.bits(["window"]), "on_cuda": True}
    described |= {"left": query.shape[2] + key.shape[2], "right": 0, "bottom_right": True}
    backend_setting, reasons = bindings.backend_of(mode), {}
    # With different head dims, the efficient attention op decides by measured entries.
    if backend_setting == "auto" and query.shape[-1] != value.shape[-1]:
        kernel_plan = bindings.plan(described, facts, BACKENDS.index(backend_setting))
        return {name: kernel_plan[name] for name in ("backend", "kernel", "row", "copies", "gradients", "reasons")}
    for backend in (backend_setting,) if backend_setting in KERNEL_BACKENDS else KERNEL_BACKENDS:
        kernel_plan = bindings.plan(described, facts, BACKENDS.index(backend))
        if kernel_plan["backend"] == backend:
            fields = {name: kernel_plan[name] for name in ("backend", "kernel", "copies", "gradients")}
            return fields | {"reasons": reasons}
        reasons[backend] = kernel_plan["reasons"].get(backend, "")
    return {"backend": "stock", "reasons": reasons}


def _why_stock(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, facts: dict[str, int], mode: int
) -> str:  # fmt: skip
    """Return why stock serves the call before any kernel is considered; empty if kernels are considered."""
    backend_setting, dims = bindings.backend_of(mode), (query.shape[-1], value.shape[-1])
    is_grouped = query.shape[1] != key.shape[1]
    max_decode_rows = dispatch_table.COST_MODEL.max_decode_rows
    padded_dims = [-(-dim // HEAD_DIM_STEP) * HEAD_DIM_STEP for dim in dims]
    if not bindings.enabled():
        return "the plugin is disabled; call torch_flashplug.enable()"
    if backend_setting in {"math", "stock"}:
        return f"{backend_setting} is forced, so that stock serves calls with a lower-right mask"
    if not describe_call.kernels_allowed():
        return "torch.nn.attention.sdpa_kernel allows neither FLASH_ATTENTION nor OVERRIDEABLE"
    if dropout_p != 0.0 or query.dtype not in {torch.bfloat16, torch.float16}:
        return "with a lower-right mask, kernels support only bf16 and fp16 without dropout; stock serves this call"
    if query.shape[1] % max(key.shape[1], 1):
        return "the number of KV heads does not divide the number of query heads; stock attention rejects the call"
    if max(padded_dims) > MAX_GENERAL_HEAD_DIM or (dims[0] != dims[1] and (list(dims) != padded_dims or is_grouped)):
        return (
            f"stock serves lower-right masks with these heads; kernels support head dims up to {MAX_GENERAL_HEAD_DIM}"
        )
    if query.shape[1] // max(key.shape[1], 1) * query.shape[2] <= max_decode_rows:
        rows = f"at most {max_decode_rows} query rows for each KV head"
        return f"stock, which splits keys, serves lower-right masks with {rows}"
    if backend_setting == "auto" and not architectures.is_measured(facts["cc"]):
        return "auto selects only measured kernels, and measurements are from GPUs of compute capability 9.0"
    return ""
