"""FLOP formulas for torch.utils.flop_counter, because ops without a formula count as 0 FLOPs."""

from __future__ import annotations

from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from ..ops import attention, quantize_ahead, sdpa
from . import tracing


def register() -> None:
    custom_ops = (sdpa.namespace.sdpa_fwd, sdpa.namespace.quantized_kv_fwd, attention.namespace.attention_fwd)
    for forward in (tracing.OVERRIDEABLE, *custom_ops):
        register_flop_formula(forward)(_forward)
    for backward in (tracing.OVERRIDEABLE_BACKWARD, sdpa.namespace.sdpa_bwd):
        register_flop_formula(backward)(_backward)
    register_flop_formula(attention.namespace.attention_fwd_out)(
        lambda out, *args, **settings: _forward(*args, **settings)
    )
    register_flop_formula(attention.namespace.attention_bwd)(_attention_backward)
    register_flop_formula(quantize_ahead.namespace.quantized_attention_fwd)(_quantized_attention)


def _forward(query: tuple, key: tuple, value: tuple, *unused, **unused_settings) -> int:
    return sdpa_flop_count(query, *_repeat_kv_heads(query, key, value))


def _backward(grad_out: tuple, query: tuple, key: tuple, value: tuple, *unused, **unused_settings) -> int:
    return sdpa_backward_flop_count(grad_out, query, *_repeat_kv_heads(query, key, value))


def _attention_backward(grad_out: tuple, grad_lse: tuple | None, *operands, **unused) -> int:
    return _backward(grad_out, *operands)


def _quantized_attention(
    query: tuple, quantized_kv: tuple, key_samples: tuple, value: tuple | None, keys: int, value_dim: int, *unused,
    **unused_settings,
) -> int:  # fmt: skip
    B, Hkv, _, D = key_samples
    return _forward(query, (B, Hkv, keys, D), (B, Hkv, keys, value_dim))


def _repeat_kv_heads(query: tuple, key: tuple, value: tuple) -> tuple[tuple, tuple]:
    """Return the shapes of key and value with the query's number of heads, as torch's formulas require."""
    return tuple((*shape[:1], query[1], *shape[2:]) for shape in (key, value))
