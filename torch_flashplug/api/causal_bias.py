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
from ..registry import dispatch_table, features
from ..registry.architectures import BACKENDS, KERNEL_BACKENDS
from ..torch_hooks import describe_call

_DIM_STEP, _LARGEST_DIM = 8, 256  # as in varlen_common.cpp


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
    why = _why_stock(query, key, value, dropout_p, facts, mode)
    if why:
        return {"backend": "stock", "reasons": dict.fromkeys(KERNEL_BACKENDS, why)}
    described = describe_call.describe(query, key, value, None, 0.0, False, scale)
    described |= {"window": 1, "needs": features.bits(["window"]), "on_cuda": True}
    described |= {"left": query.shape[2] + key.shape[2], "right": 0, "bottom_right": True}
    asked, reasons = bindings.backend_of(mode), {}
    if asked == "auto" and query.shape[-1] != value.shape[-1]:  # the efficient attention op decides by measured entries
        made = bindings.plan(described, facts, BACKENDS.index(asked))
        return {name: made[name] for name in ("backend", "kernel", "row", "copies", "gradients", "reasons")}
    for backend in (asked,) if asked in KERNEL_BACKENDS else KERNEL_BACKENDS:
        made = bindings.plan(described, facts, BACKENDS.index(backend))
        if made["backend"] == backend:
            return {name: made[name] for name in ("backend", "kernel", "copies", "gradients")} | {"reasons": reasons}
        reasons[backend] = made["reasons"].get(backend, "")
    return {"backend": "stock", "reasons": reasons}


def _why_stock(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, facts: dict[str, int], mode: int
) -> str:  # fmt: skip
    """Return why stock serves the call before any kernel is considered; empty if kernels are considered."""
    asked, dims = bindings.backend_of(mode), (query.shape[-1], value.shape[-1])
    grouped = query.shape[1] != key.shape[1]
    few, whole = dispatch_table.GATE.rows, [-(-dim // _DIM_STEP) * _DIM_STEP for dim in dims]
    if not bindings.enabled():
        return "the plugin is disabled; call torch_flashplug.enable()"
    if asked in {"math", "stock"}:
        return f"{asked} is forced, so that stock serves calls with a lower-right mask"
    if not describe_call.kernels_allowed():
        return "torch.nn.attention.sdpa_kernel allows neither FLASH_ATTENTION nor OVERRIDEABLE"
    if dropout_p != 0.0 or query.dtype not in {torch.bfloat16, torch.float16}:
        return "with a lower-right mask, kernels support only bf16 and fp16 without dropout; stock serves this call"
    if query.shape[1] % max(key.shape[1], 1):
        return "the number of KV heads does not divide the number of query heads; stock attention rejects the call"
    if max(whole) > _LARGEST_DIM or (dims[0] != dims[1] and (list(dims) != whole or grouped)):
        return f"stock serves lower-right masks with these heads; kernels support head dims up to {_LARGEST_DIM}"
    if query.shape[1] // max(key.shape[1], 1) * query.shape[2] <= few:
        return f"stock, which splits keys, serves lower-right masks with at most {few} query rows for each KV head"
    if asked == "auto" and facts["cc"] != dispatch_table.GATE.measured_cc:
        return "auto selects only measured kernels, and measurements are from GPUs of compute capability 9.0"
    return ""
