"""Argument checks of `attention()`, normalization of arguments, and calls of ops with an `out` tensor."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..dispatch import bindings
from ..ops.attention import AttentionParams, Window
from ..ops.quantized_kv import FORMATS, IN_WORDS, multiplied_in
from ..registry.dispatch_table import (
    COST_MODEL,
    HEAD_DIM_STEP,
    MAX_GENERAL_HEAD_DIM,
    MAX_HEAD_DIM,
    MAX_SPLITS,
    SPLIT_UNIT,
)
from ..registry.dtypes import DTYPE_INFO, ELEMENTS_16BIT
from ..torch_hooks import describe_call, tracing

SIXTEEN_BITS = tuple(getattr(torch, DTYPE_INFO[name].torch_name) for name in ELEMENTS_16BIT)
_LARGEST = torch.finfo(torch.float32).max
_SCALE_TYPES = (float, int, torch.SymFloat, torch.SymInt, Tensor, numbers.Real)  # NumPy scalars are Real
_CAUSAL = (False, True, "bottom_right", "top_left")
Scale = Tensor | float
Scales = tuple[Scale | None, Scale | None]  # (k_scale, v_scale)
NO_SCALES: Scales = (None, None)
# Rule of dense operands in errors. Users of packed sequences forget cu_seqlens_q.
DENSE_RULE = "a tensor of shape (batch, length, heads, head dim), or (tokens, heads, head dim) with cu_seqlens_q"


def params_of(
    causal: bool | str, window: tuple[int | None, int | None] | None, softcap: float, scale: float | None,
    num_splits: int | None, fixed_split_size: int | None,
) -> AttentionParams:  # fmt: skip
    """Check the settings of a call and return them in the form that ops take."""
    return AttentionParams(  # by position, which is faster
        *window_of(causal, window),
        softcap_of(softcap),
        checked_scale(scale),
        normalize_num_splits(num_splits),
        split_size_of(fixed_split_size, num_splits),
    )


def check_bound(name: str, bound: object) -> None:
    if bound is None or isinstance(bound, torch.SymInt):
        return
    if not is_int(bound):
        raise TypeError(f"attention: {name} must be an int or None, but got {type(bound).__name__}.")
    if bound < 0:
        raise ValueError(f"attention: {name} must be 0 or more, or None, but got {bound}.")


def is_int(x: object) -> bool:
    """Return True for integers, including NumPy integers, but not for True and False."""
    return isinstance(x, int | numbers.Integral) and not isinstance(x, bool)


def normalize_num_splits(num_splits: int | None) -> int:
    """Return the checked number of splits as ops take it: 0 for None."""
    if num_splits is None:
        return 0
    if not is_int(num_splits) or not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(
            f"attention: num_splits must be an int from 1 to {MAX_SPLITS} or None, but got {num_splits!r}."
        )
    return int(num_splits)


def split_size_of(fixed_split_size: int | None, num_splits: int | None) -> int:
    """Return the checked split size as ops take it: 0 for None. A size excludes `num_splits`."""
    if fixed_split_size is None:
        return 0
    if not is_int(fixed_split_size) or not 1 <= fixed_split_size < 2**62 or fixed_split_size % SPLIT_UNIT:
        raise ValueError(
            f"attention: fixed_split_size must be a multiple of {SPLIT_UNIT} or None, but got {fixed_split_size!r}."
        )
    if num_splits is not None:
        raise ValueError(
            "attention: num_splits and fixed_split_size must not be passed together, "
            f"but got {num_splits} and {fixed_split_size}. Pass one of the two."
        )
    return int(fixed_split_size)


def softcap_of(softcap: float) -> float:
    return finite_number("softcap", softcap, 0.0, "0.0 (no softcap) or above")


def finite_number(name: str, x: float, least: float, rule: str) -> float:
    """Return a numeric setting as a float, or raise ValueError. `rule` names the valid numbers in words."""
    if isinstance(x, bool) or not isinstance(x, int | float) or not least <= x <= _LARGEST:
        raise ValueError(f"attention: {name} must be a finite number, {rule}, but got {x!r}.")
    return float(x)


def checked_scale(scale: float | None, function: str = "attention") -> float | None:
    """Return the scale. A tensor must be real and have no dims, as for F.scaled_dot_product_attention."""
    if scale is None or type(scale) is float:
        return scale
    is_tensor = isinstance(scale, Tensor)
    if not isinstance(scale, _SCALE_TYPES) or (is_tensor and (scale.dim() > 0 or scale.is_complex())):
        actual = f"a tensor of {scale.dtype} {tuple(scale.shape)}" if is_tensor else repr(scale)
        raise TypeError(f"{function}: scale must be a number or None (1 / sqrt(D)), but got {actual}.")
    return scale


def window_of(causal: bool | str, window: tuple[int | None, int | None] | None) -> Window:
    if not isinstance(causal, bool | str) or causal not in _CAUSAL:
        raise ValueError(f"attention: causal must be False, True, 'bottom_right' or 'top_left', but got {causal!r}.")
    left = right = -1
    if window is not None:
        if not isinstance(window, tuple | list) or len(window) != 2 or not all(map(_is_bound, window)):
            raise ValueError(
                "attention: window must be (left, right), each a number of keys, -1 or None, or None, "
                f"but got {window!r}."
            )
        left, right = (-1 if bound is None else int(bound) for bound in window)
    return Window(left, 0 if causal else right, causal != "top_left")


def _is_bound(bound: object) -> bool:
    return bound is None or (is_int(bound) and -1 <= bound < 2**62)


def check_split_size(params: AttentionParams, query: Tensor, value: Tensor, keys: int) -> None:
    """Raise ValueError if a split size makes too many splits, or too many partial results.

    The rule is that of `splits_of_size` in src/dispatch/split_heuristic.cpp and of `check_splits` in
    src/ops/attention_ops.cpp.

    Args:
        params: Settings of the call.
        query: Queries (B, Hq, Sq, D).
        value: Values (.., Hkv, .., Dv).
        keys: Capacity of a sequence in keys.
    """
    Hkv, Dv = value.shape[1], value.shape[3]
    size = params.fixed_split_size
    if not size or not is_few(query.shape[1], query.shape[2], Hkv):
        return
    if min(params.left, params.right) >= 0:
        keys = min(keys, params.left + params.right + query.shape[2] + SPLIT_UNIT - 1)
    if keys > MAX_SPLITS * size:
        least = -(-keys // (MAX_SPLITS * SPLIT_UNIT)) * SPLIT_UNIT
        raise ValueError(
            f"attention: fixed_split_size must be at least {least}, because {keys} keys (the capacity of a sequence) "
            f"may make at most {MAX_SPLITS} splits, but got {size}."
        )
    partials = query.shape[:3].numel() * max(-(-keys // size), 2) * (Dv + 2)
    if partials >= 2**31:
        raise ValueError(
            "attention: fixed_split_size must make at most 2^31 - 1 numbers of partial results, "
            f"but got {size}, which makes {partials}. Pass a larger size, or fewer sequences."
        )


def heads_fit(Hq: int, Hkv: int) -> bool:
    return not Hq % Hkv if Hkv else not Hq


def check_rank(name: str, x: object, rank: int, rule: str, function: str = "attention") -> None:
    if not isinstance(x, Tensor) or x.dim() != rank:
        actual = f"{x.dim()}-D" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{function}: {name} must be {rule}, but got {actual}.")


def check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check q, k and v of shape (batch, length, heads, head dim)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rank(name, x, 4, DENSE_RULE)
    check_fit(q, k, v, (*q.shape,), (*k.shape,), (*v.shape,))


def check_fit(q: Tensor, k: Tensor, v: Tensor, *sizes: tuple[int, ...]) -> None:
    """Raise ValueError if devices or sizes do not fit together.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        sizes: Shapes of q, k and v as (batch, length, heads, head dim). Packed sequences have a batch of 1 here, so
            that no view has to be created.
    """
    if not q.device == k.device == v.device:
        raise ValueError(f"attention: q, k and v must be on one device, but are on {q.device}, {k.device}, {v.device}.")
    of_q, of_k, of_v = sizes
    (B, _, Hq, D), (_, Sk, Hkv, _) = of_q, of_k
    if of_k != (B, Sk, Hkv, D) or of_v[:3] != (B, Sk, Hkv) or not heads_fit(Hq, Hkv):
        shapes = f"q {of_q}, k {of_k}, v {of_v}"
        raise ValueError(
            "attention: q, k and v must have shapes (B, Sq, Hq, D), (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv), "
            f"Hq a multiple of Hkv, but got {shapes}. Length comes before heads, and packed sequences have B = 1."
        )


def normalize_sinks(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the checked sinks on the device of q, in the dtype of the LSE."""
    if sinks is None:
        return None
    fits = isinstance(sinks, Tensor) and sinks.shape == q.shape[-2:-1] and sinks.is_floating_point()
    if not fits or (sinks.is_meta and not q.is_meta):
        is_tensor = isinstance(sinks, Tensor)
        actual = f"{sinks.dtype} {tuple(sinks.shape)} on {sinks.device}" if is_tensor else type(sinks).__name__
        raise ValueError(
            f"attention: sinks must be a floating-point tensor of shape (Hq,) = ({q.shape[-2]},), "
            f"on meta only if q is, but got {actual}."
        )
    return sinks.to(q.device, torch.promote_types(torch.float32, q.dtype))


def check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Check the dtypes of q, k and v; return True if k and v have 8 bits."""
    if k.dtype not in FORMATS and v.dtype not in FORMATS:
        check_same(q, k, v)
        return False
    if k.dtype != v.dtype or not q.dtype.is_floating_point or q.dtype in FORMATS:
        dtypes = f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype}"
        raise ValueError(
            f"attention: k and v must have one 8-bit dtype of {IN_WORDS}, and q 16 bits, but got {dtypes}."
        )
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "attention: gradients are not supported for 8-bit key and value, in forward mode either. "
            "Pass bf16 or fp16 tensors."
        )
    return True


def refuse_forward_mode() -> None:
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "attention: forward-mode derivatives are not supported with softcap, sinks, return_lse, num_splits, "
            "fixed_split_size, out, block_mask or sequence lengths. Use reverse mode."
        )


def check_same(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check for one floating-point dtype. Autocast casts operands of different dtypes, except fp64."""
    dtypes = {q.dtype, k.dtype, v.dtype}
    if len(dtypes) > 1 and (torch.float64 in dtypes or not describe_call.is_autocast(q.device.type)):
        raise ValueError(f"attention: q, k and v must have one dtype, but got {q.dtype}, {k.dtype}, {v.dtype}.")
    if not all(x.dtype.is_floating_point for x in (q, k, v)):
        raise ValueError(
            f"attention: q, k and v must have floating-point dtypes, but got {q.dtype}, {k.dtype}, {v.dtype}."
        )


def has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if forward kernels take the operands, and backward kernels, too, if gradients are wanted.

    Backward kernels of head dims above MAX_GENERAL_HEAD_DIM were not timed, so a call has to force them.
    """
    if _has_kernel_up_to(MAX_GENERAL_HEAD_DIM, query, key, value):
        return True
    allows_all = not is_differentiated(query, key, value) or _forces_fa3()
    return allows_all and _has_kernel_up_to(MAX_HEAD_DIM, query, key, value)


def _forces_fa3() -> bool:
    """Return True if an sdpa_backend block around the call, or around its trace, forces the kernels for Hopper."""
    return bindings.forced_kernels(tracing.mode_of_block() or bindings.effective_mode()) == "fa3"


_forces_fa3._dynamo_marked_constant = True


def _has_kernel_up_to(max_head_dim: int, query: Tensor, key: Tensor, value: Tensor) -> bool:
    head_dims = (query.shape[3], value.shape[3])
    has_dtype = query.is_cuda and query.dtype == key.dtype == value.dtype and query.dtype in SIXTEEN_BITS
    return has_dtype and all(dim % HEAD_DIM_STEP == 0 and dim <= max_head_dim for dim in head_dims)


def is_differentiated(*operands: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in operands)


def is_few(Hq: int, Sq: int, Hkv: int) -> bool:
    """Return True if the query rows of a KV head fit a tile of the decode kernels."""
    return Hkv > 0 and Sq * (Hq // Hkv) <= COST_MODEL.max_decode_rows


def values_of(k: object, v: Tensor | None, v_dim: int | None, *, is_quantized: bool) -> Tensor | None:
    """Return the values of a call: `v`, or with `v_dim` the first columns of the keys."""
    if v_dim is None:
        if v is None and not is_quantized:
            raise TypeError(
                "attention: v must be a tensor, but got None. Pass v, or v_dim for values that are the first columns "
                "of k."
            )
        return v
    if v is not None or is_quantized:
        given = "the result of quantize_kv() as k" if is_quantized else "v"
        raise ValueError(f"attention: v_dim must be None with {given}, but got {v_dim!r}. Pass one of the two.")
    if not isinstance(k, Tensor) or not k.dim():
        raise TypeError(f"attention: k must be a tensor with v_dim, but got {type(k).__name__}.")
    if not is_int(v_dim) or not 1 <= v_dim <= k.shape[-1]:
        raise ValueError(
            f"attention: v_dim must be an int from 1 to the head dim of k, {k.shape[-1]}, but got {v_dim!r}."
        )
    return k[..., :v_dim]


def is_shared_decode_call(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if decode kernels with shared values take the call: the values are the first columns of the keys.

    The rules are `may_share_values` of src/dispatch/plan.cpp and `shares_values` of src/core/call_facts.cpp. A traced
    call has no addresses to compare.
    """
    if torch.compiler.is_compiling() or max(query.shape[3], value.shape[3]) <= MAX_GENERAL_HEAD_DIM:
        return False
    rows = query.shape[2] * (query.shape[1] // max(key.shape[1], 1))
    mode = bindings.effective_mode()
    is_forced = bindings.backend_of(mode) == "fa3" and not bindings.is_preference(mode)
    is_permitted = is_forced or key.shape[2] >= COST_MODEL.min_shared_keys
    is_few = rows <= COST_MODEL.max_shared_rows and query.is_cuda and query.dtype in SIXTEEN_BITS
    differentiated = is_differentiated(query, key, value)
    return is_permitted and is_few and not differentiated and describe_call.shares_values(query, key, value)


def is_decode_call(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if the decode kernels, which split the keys, take the call: few query rows, forward only."""
    few = is_few(query.shape[1], query.shape[2], key.shape[1])
    # The op paged_fwd knows for which 8-bit dtypes a kernel exists, so that only the query counts there.
    read = (query, query, query) if key.dtype in FORMATS else (query, key, value)
    differentiated = is_differentiated(query, key, value)
    return few and not differentiated and _has_kernel_up_to(MAX_GENERAL_HEAD_DIM, *read)


def scale_of(name: str, scale: Scale | None, x: Tensor, paged: bool = False) -> Tensor:
    """Return a scale as fp32 (B, Hkv, Sk), broadcast by strides of 0, for `x` of shape (B, Hkv, Sk, ...).

    If `paged`, `x` holds pages, (pages, Hkv, rows, ...), and so does the scale.
    """
    batch, keys = ("pages", "rows") if paged else ("B", "Sk")
    full_shape = x.shape[:3]
    if scale is None:
        if x.dtype == torch.int8:
            raise ValueError(
                f"attention: {name} must be a number or a tensor of shape (), (Hkv,), ({batch}, Hkv) or "
                f"({batch}, Hkv, {keys}) for int8, but got None."
            )
        scale = 1.0
    if not isinstance(scale, Tensor | int | float) or (isinstance(scale, Tensor) and scale.is_complex()):
        raise TypeError(f"attention: {name} must be a number or a real tensor, but got {type(scale).__name__}.")
    if not isinstance(scale, Tensor):
        return torch.full((1, 1, 1), float(scale), dtype=torch.float32, device=x.device).expand(full_shape)
    if scale.device != x.device and scale.dim() > 0:
        raise ValueError(f"attention: {name} must be on the device of k and v, {x.device}, but is on {scale.device}.")
    shape = {0: (1, 1, 1), 1: (1, *scale.shape, 1), 2: (*scale.shape, 1), 3: tuple(scale.shape)}.get(scale.dim())
    if shape is None or any(size not in (1, full) for size, full in zip(shape, full_shape, strict=True)):
        raise ValueError(
            f"attention: {name} must have shape (), (Hkv,), ({batch}, Hkv) or ({batch}, Hkv, {keys}), where each dim "
            f"is 1 or that of {batch}, Hkv, {keys} = {tuple(full_shape)}, but got {tuple(scale.shape)}."
        )
    return scale.to(x.device, torch.float32).reshape(shape).expand(full_shape)


def normalize_kv_scales(
    eight: bool, scales: Scales, key: Tensor, value: Tensor, *, paged: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Return fp32 scales of 8-bit keys and values (B, Hkv, Sk, ...), or (None, None) for 16 bits."""
    if eight:
        return scale_of("k_scale", scales[0], key, paged), scale_of("v_scale", scales[1], value, paged)
    if any(x is not None for x in scales):
        raise ValueError(
            f"attention: k_scale and v_scale must be None unless k and v have one of {IN_WORDS}, "
            f"but got k and v of {key.dtype} and {value.dtype}. Leave the scales out."
        )
    return None, None


def dequantize_to_16bit(
    query: Tensor, key: Tensor, value: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Dequantize 8-bit keys and values and apply autocast, for ops without support for either."""
    if k_scale is not None:
        dequantize = torch.ops.torch_flashplug.dequantize
        key, value = dequantize(query, key, k_scale), dequantize(query, value, v_scale)
        query = query.to(multiplied_in(query))
    return describe_call.under_autocast(query.device.type, query, key, value)


# ---- an output tensor of the caller ----


def check_out(out: Tensor, operands: tuple[Tensor, Tensor, Tensor], *more: object) -> None:
    """Check `out` against operands that fit together. Later checks report operands that do not fit.

    Args:
        out: The caller's output tensor.
        operands: q, k and v.
        more: Other arguments of the call; tensors among them must not overlap `out`.
    """
    q, _, v = operands
    if not all(isinstance(x, Tensor) and x.dim() for x in operands):
        return
    eight = v.dtype in FORMATS
    dtype = q.dtype if eight else describe_call.under_autocast(q.device.type, q)[0].dtype
    expected = ((*q.shape[:-1], v.shape[-1]), dtype, q.device)
    if not isinstance(out, Tensor) or (tuple(out.shape), out.dtype, out.device) != expected:
        actual = f"{out.dtype} {tuple(out.shape)} on {out.device}" if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"attention: out must be {dtype} {expected[0]} on {q.device}, but got {actual}.")
    tensors = (out, *operands, *(x for x in more if isinstance(x, Tensor)))
    if not torch.compiler.is_compiling():
        if out.is_neg():
            raise ValueError(
                "attention: out must not be a lazily negated view (out.is_neg()). Pass a tensor that owns its memory."
            )
        if bindings.may_meet_itself(out.shape, out.stride()) or any(_overlap(out, x) for x in tensors[1:]):
            raise ValueError(
                "attention: out must own its memory, but shares memory with itself or an operand. Pass a new tensor."
            )
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            "attention: gradients are not supported with out, but a tensor of the call requires a gradient. "
            "Call attention() under torch.no_grad(), or without out."
        )
    refuse_forward_mode()


def _overlap(x: Tensor, y: Tensor) -> bool:
    if x.is_meta or y.is_meta or x.device != y.device or not (x.numel() and y.numel()):
        return False
    return bindings.may_overlap(_bytes_of(x), _bytes_of(y))


def _bytes_of(x: Tensor) -> tuple[int, ...]:
    """Return the members of TensorBytes in src/core/memory_overlap.h."""
    storage = x.untyped_storage()
    return x.data_ptr(), storage.data_ptr(), storage.nbytes(), x.element_size(), x.dim(), *x.shape, *x.stride()


def _is_plain(query: Tensor, more: tuple[object, ...]) -> bool:
    """Return True if a call involves no autograd, no tracer and no subclass of Tensor."""
    if torch.compiler.is_compiling() or type(query) is not Tensor:
        return False
    if not torch.is_grad_enabled():
        return True
    return not query.requires_grad and not any(isinstance(x, Tensor) and x.requires_grad for x in more)


def call_op_with_out(
    op: str, out_buffer: Tensor | None, query: Tensor, *op_args: object
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Call the op attention_fwd or paged_fwd and return the output and the LSE.

    Arguments are passed by position. Measured: 2026-11-28, CPU, torch 2.13: the keywords of attention_fwd cost 3.4 us
    for each call, 10 % of the Python host path of attention().

    Args:
        op: Name of the op.
        out_buffer: Tensor (B, Hq, Sq, Dv) for the output, or None for a new tensor.
        query: First argument of the op.
        op_args: Arguments after `query` in schema order, with the fields of `AttentionParams`, but without the mode.
    """
    namespace, mode = torch.ops.torch_flashplug, tracing.mode_of_block()
    if out_buffer is None or out_buffer.dtype != query.dtype:
        if _is_plain(query, op_args):
            # The Python autograd rule would take 6 us a call, only to find no work.
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = getattr(namespace, op)(query, *op_args, mode)
        else:
            out, lse = getattr(namespace, op)(query, *op_args, mode)
        return out if out_buffer is None else out_buffer.copy_(out), lse
    lse = getattr(namespace, f"{op}_out")(out_buffer, query, *op_args, mode)
    if not torch.compiler.is_compiling() and not out_buffer.is_inference():
        torch.autograd.graph.increment_version(out_buffer)  # no kernel of the op increments the version
    return out_buffer, lse
