"""Key and value that are quantized once: the public function `quantize_kv`, and `attention()` with the result."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import forward_ad

from ..ops.attention import AttentionParams
from ..ops.quantize_ahead import QuantizedKV, namespace, sampled_keys
from ..registry.dispatch_table import HEAD_DIM_STEP, MAX_GENERAL_HEAD_DIM
from ..registry.quant_recipes import ALIASES, PRECISION_16BIT, RECIPES, precision_number, recipe_name
from ..torch_hooks import describe_call
from .attention_args import SIXTEEN_BITS, check_out, check_rank, heads_fit

_IN_WORDS = " or ".join(map(str, SIXTEEN_BITS))
_KV_RULE = "a tensor of shape (batch, length, heads, head dim)"


def quantize_kv(k: Tensor, v: Tensor, *, precision: str = "8bit") -> QuantizedKV:
    """Quantize key and value once, for several calls of `attention()` with the same key and value.

    `attention(q, quantize_kv(k, v, precision=p))` has the same bits as a call under `sdpa_backend("fa3", precision=p)`
    that quantizes its own operands, if D and Dv are multiples of 16. The query is quantized in each call. Scales and
    the constant key depend on all keys, so keys cannot be appended to the result.

    A kernel of the plugin does the work on a Hopper GPU. On other devices, `quantize_kv` and `attention()` run torch
    math on the same numbers, without a kernel. There are no gradients.

    Args:
        k (Tensor): Keys (B, Sk, Hkv, D) in bf16 or fp16, with at least one key.
        v (Tensor): Values (B, Sk, Hkv, Dv) in the dtype of `k`. With "qk8", the result refers to `v`, which must then
            stay unchanged.
        precision (str): Formats of the products: "8bit" (alias "fp8"), "qk8" or "e4m3", as for `sdpa_backend`.

    Returns:
        The quantized key and value, in the layout of the kernels.

    Raises:
        TypeError: `k` or `v` is no tensor of four dims.
        ValueError: A shape, dtype or device does not fit, or the precision is unknown or has 16 bits.
        RuntimeError: `k` or `v` requires a gradient, or the call is in forward-mode AD.
    """
    recipe = _checked_recipe(precision)
    for name, x in (("k", k), ("v", v)):
        check_rank(name, x, 4, _KV_RULE, "quantize_kv")
    _refuse_gradients("quantize_kv", k, v)
    k, v = describe_call.under_autocast(k.device.type, k, v)
    _check_pair(k, v)
    key, value = k.detach().transpose(1, 2), v.detach().transpose(1, 2)
    quantized = namespace.quantize_kv(key, value, precision_number(recipe))
    kept_value = value if RECIPES[recipe].values is None else None
    return QuantizedKV(quantized, sampled_keys(key), kept_value, k.shape[1], v.shape[3], recipe)


def quantized_attention(
    q: Tensor, kv: QuantizedKV, v: object, causal: bool | str, params: AttentionParams, conflicts: list[str],
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend to quantized key and value; return the output (B, Sq, Hq, Dv) and the LSE (B, Hq, Sq).

    Args:
        q: Queries (B, Sq, Hq, D).
        kv: Key and value.
        v: Argument `v` of attention(), which must be None.
        causal: Argument `causal` of attention().
        params: Settings of the call.
        conflicts: Names of other arguments of the call, none of which may accompany `kv`.
        out: The caller's output tensor, or None.
    """
    if v is not None:
        raise TypeError(f"attention: v must be left out if k is a QuantizedKV, but got {type(v).__name__}.")
    if conflicts:
        raise ValueError(
            "attention: a QuantizedKV must not be combined with other arguments than causal, scale, out and "
            f"return_lse, but got {', '.join(conflicts)}. Pass k and v in 16 bits."
        )
    check_rank("q", q, 4, _KV_RULE)
    _check_query(q, kv)
    if causal is True and q.shape[1] == kv.Sk:
        causal = "top_left"
    if causal not in (False, "top_left"):
        raise ValueError(
            "attention: causal must be False or 'top_left' with a QuantizedKV, unless q has as many rows as there are "
            f"keys, but got {causal!r} with {q.shape[1]} rows and {kv.Sk} keys. Pass k and v in 16 bits."
        )
    if out is not None:
        check_out(out, (q, kv.key_samples.transpose(1, 2), _value_like(kv)), kv.quantized, kv.value)
    _refuse_gradients("attention", q)
    (query,) = describe_call.under_autocast(q.device.type, q)
    number = precision_number(kv.precision)
    result, lse = namespace.quantized_attention_fwd(
        query.transpose(1, 2), kv.quantized, kv.key_samples, kv.value, kv.Sk, kv.Dv, number, causal == "top_left",
        params.scale,
    )  # fmt: skip
    result = result.transpose(1, 2)
    return (result if out is None else out.copy_(result)), lse


def _value_like(kv: QuantizedKV) -> Tensor:
    """Return a tensor with the dtype of the value and the last size of the value."""
    return kv.key_samples.new_empty((1, kv.Dv), device="meta")


def _checked_recipe(precision: object) -> str:
    names = (*RECIPES, *ALIASES)
    if not isinstance(precision, str) or precision not in names:
        hint = " Pass k and v to attention() for 16 bits." if precision == PRECISION_16BIT else ""
        raise ValueError(f"quantize_kv: precision must be one of {', '.join(names)}, but got {precision!r}.{hint}")
    return recipe_name(precision, "quantize_kv")


def _refuse_gradients(function: str, *tensors: Tensor) -> None:
    if describe_call.wants_grad(*tensors) or forward_ad._current_level >= 0:
        raise RuntimeError(
            f"{function}: gradients are not supported for key and value that are quantized ahead. Call {function}() "
            "under torch.no_grad(), or pass k and v in 16 bits to attention()."
        )


def _check_pair(k: Tensor, v: Tensor) -> None:
    if k.dtype != v.dtype or k.dtype not in SIXTEEN_BITS:
        raise ValueError(f"quantize_kv: k and v must have one dtype, {_IN_WORDS}, but got {k.dtype} and {v.dtype}.")
    if k.device != v.device:
        raise ValueError(f"quantize_kv: k and v must be on one device, but are on {k.device} and {v.device}.")
    shapes = f"{(*k.shape,)} and {(*v.shape,)}"
    if k.shape[:3] != v.shape[:3] or k.numel() == 0 or v.numel() == 0:
        raise ValueError(
            "quantize_kv: k and v must have shapes (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv) without empty dims, "
            f"but got {shapes}. Length comes before heads."
        )
    if any(x.shape[3] % HEAD_DIM_STEP or x.shape[3] > MAX_GENERAL_HEAD_DIM for x in (k, v)):
        raise ValueError(
            f"quantize_kv: head dims must be multiples of {HEAD_DIM_STEP} up to {MAX_GENERAL_HEAD_DIM}, "
            f"but got {shapes}."
        )


def _check_query(q: Tensor, kv: QuantizedKV) -> None:
    B, _, Hkv, D = kv.key_shape
    (query,) = describe_call.under_autocast(q.device.type, q)
    if query.dtype != kv.dtype:
        raise ValueError(
            f"attention: q must have the dtype of the quantized k and v, {kv.dtype}, but got {query.dtype}."
        )
    if q.device != kv.device:
        raise ValueError(
            f"attention: q must be on the device of the quantized k and v, {kv.device}, but is on {q.device}."
        )
    _, _, Hq, _ = q.shape
    if (q.shape[0], q.shape[3]) != (B, D) or not heads_fit(Hq, Hkv):
        raise ValueError(
            f"attention: q must have shape (B, Sq, Hq, D) with B = {B}, D = {D} and Hq a multiple of {Hkv} for the "
            f"quantized k and v, but got {(*q.shape,)}."
        )
