"""Key and value in 8 bits: reference math of the op quantized_kv_fwd, and `QuantizedTensor`.

F.scaled_dot_product_attention takes a QuantizedTensor directly as key and value. The value of a cached element is its
8-bit number times the scale of the row; for keys, a constant row of the head is added. Keys may be rotated first
(`quantize_reference.rotate`), so that no channel has outliers: INT8 with a scale for each token is then 4 to 15 times
more accurate than e4m3. Queries are rotated in the same way. A constant key moves all scores of a row by the same
amount, so that attention can use the keys without the constant.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from ..registry.dtypes import DTYPE_INFO, QUANTIZED_KV_DTYPES
from .quantize_reference import rotate, unrotate

FORMATS = tuple(getattr(torch, DTYPE_INFO[name].torch_name) for name in QUANTIZED_KV_DTYPES)
IN_WORDS = ", ".join(map(str, FORMATS))
_SDPA = F.scaled_dot_product_attention  # torch's own function, even if the name is replaced later
_NO_WRITES = "a QuantizedTensor must not be written in place. Create a new one from data8 and scale."
_aten = torch.ops.aten
_COPIES = {_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default}


def dequantized(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 8-bit numbers (B, Hkv, S, D) of `FORMATS` times the scale (B, Hkv, S), in `dtype`."""
    return (x.float() * scale.unsqueeze(-1)).to(dtype)


_library = torch.library.Library("torch_flashplug", "FRAGMENT")
_library.define(
    "dequantize(Tensor query, Tensor x, Tensor scale) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)  # fmt: skip


def multiplied_in(query: Tensor) -> torch.dtype:
    """Return the dtype of dequantized numbers: bf16 for an fp16 query, as scaled numbers may exceed the fp16 range."""
    return torch.bfloat16 if query.dtype == torch.float16 else query.dtype


def _dequantize(query: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Dequantize `x` to the dtype in which the query is multiplied.

    The function is an op with the query as an argument, so that autograd stops here with an error: `x` has no gradient.
    """
    return dequantized(x, scale, multiplied_in(query))


def _setup_context(ctx, inputs: tuple, output: Tensor) -> None:
    """Save nothing for the backward."""


def no_gradient(ctx, *grads: Tensor | None) -> tuple:
    raise RuntimeError(
        "attention: gradients are not supported for 8-bit key and value. "
        "Call attention() under torch.no_grad(), or pass 16-bit tensors."
    )


def seen(Sq: int, Sk: int, device: torch.device) -> Tensor:
    """Return a causal mask (Sq, Sk), aligned to the top left."""
    return torch.ones(Sq, Sk, dtype=torch.bool, device=device).tril()


def attend(
    query: Tensor, key: Tensor, value: Tensor, k_scale: Tensor, v_scale: Tensor, attn_mask: Tensor | None,
    k_is_rotated: bool, scale: float | None,
) -> Tensor:  # fmt: skip
    """Compute quantized_kv_fwd by F.scaled_dot_product_attention on dequantized K and V.

    This path serves CPU tensors and calls without a kernel for 8 bits.
    """
    check(query, key, value, k_scale, v_scale)
    dtype = multiplied_in(query)
    q = (rotate(query.float()) if k_is_rotated else query).to(dtype)
    k, v = dequantized(key, k_scale, dtype), dequantized(value, v_scale, dtype)
    if attn_mask is not None and attn_mask.dtype == query.dtype:
        attn_mask = attn_mask.to(dtype)
    return _SDPA(q, k, v, attn_mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]).to(query.dtype)


def check(query: Tensor, key: Tensor, value: Tensor, k_scale: Tensor, v_scale: Tensor) -> None:
    """Raise RuntimeError if the arguments do not fit together. Reads sizes, hence for real tensors only."""
    torch._check(
        query.dim() == key.dim() == value.dim() == 4,
        lambda: (
            "quantized_kv_fwd: query, key and value must have 4 dims: "
            "(B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv)."
        ),
    )
    B, Hq, _, D = query.shape
    _, Hkv, Sk, _ = key.shape
    torch._check(
        key.shape == (B, Hkv, Sk, D) and value.shape[:3] == (B, Hkv, Sk) and Hkv > 0 and Hq % Hkv == 0,
        lambda: (
            "quantized_kv_fwd: query, key and value must have shapes (B, Hq, Sq, D), (B, Hkv, Sk, D) and "
            "(B, Hkv, Sk, Dv), Hq a multiple of Hkv, "
            f"but got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        ),
    )
    torch._check(
        query.dtype.is_floating_point and query.dtype not in FORMATS and key.dtype == value.dtype in FORMATS,
        lambda: (
            f"quantized_kv_fwd: key and value must have one dtype of {IN_WORDS}, and query 16 bits, "
            f"but got query, key and value of {query.dtype}, {key.dtype} and {value.dtype}."
        ),
    )
    torch._check(
        all(s.shape == (B, Hkv, Sk) and s.dtype == torch.float32 for s in (k_scale, v_scale)),
        lambda: (
            f"quantized_kv_fwd: k_scale and v_scale must be float32 {(B, Hkv, Sk)} (broadcast by strides of 0), "
            f"but got {k_scale.dtype} {tuple(k_scale.shape)} and {v_scale.dtype} {tuple(v_scale.shape)}."
        ),
    )


# ---- a tensor for F.sdpa ----


class QuantizedTensor(Tensor):
    """Keys or values (B, Hkv, S, D) of an 8-bit cache, presented as a tensor of the dtype `dtype`.

    F.scaled_dot_product_attention reads the 8 bits of a pair of these tensors, key and value, in eager code and in
    torch.compile. Calls with a gradient of the query, calls with dropout, and all other operations first dequantize to
    16 bits. In-place writes and gradients with respect to a QuantizedTensor are not supported.

    Args:
        data8 (Tensor): The 8-bit numbers (B, Hkv, S, D): int8, float8_e4m3fn or float8_e5m2.
        scale (Tensor): (B, Hkv, S), factor of each row; stored as fp32.
        dtype (torch.dtype): The floating-point dtype presented to callers. Kernels take bf16 and fp16.
        shift (Tensor or None): (B, Hkv, 1, D), a constant subtracted from all keys before quantization.
        rotated (bool): True if the keys were rotated by `torch_flashplug.ops.quantize_reference.rotate` after the
            subtraction of `shift`. The query must not be rotated: kernels rotate the query.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
        RuntimeError: An operation writes in place (raised by the operation).
    """

    data8: Tensor
    scale: Tensor
    shift: Tensor | None
    rotated: bool

    @staticmethod
    def __new__(
        cls, data8: Tensor, scale: Tensor, dtype: torch.dtype, shift: Tensor | None = None, rotated: bool = False
    ) -> QuantizedTensor:
        if data8.dtype not in FORMATS or data8.dim() != 4 or scale.shape != data8.shape[:3]:
            actual = f"data8 {data8.dtype} {tuple(data8.shape)}, scale {tuple(scale.shape)}"
            raise ValueError(
                f"QuantizedTensor: data8 must be (B, Hkv, S, D) of {IN_WORDS}, and scale (B, Hkv, S), but got {actual}."
            )
        B, Hkv, _, D = data8.shape
        if not dtype.is_floating_point or (shift is not None and shift.shape != (B, Hkv, 1, D)):
            shifted = None if shift is None else tuple(shift.shape)
            raise ValueError(
                "QuantizedTensor: dtype must be floating-point, and shift (B, Hkv, 1, D) or None, "
                f"but got dtype {dtype}, shift {shifted}."
            )
        if any(x.device != data8.device for x in (scale, *([] if shift is None else [shift]))):
            raise ValueError("QuantizedTensor: data8, scale and shift must be on one device, but are on several.")
        self = Tensor._make_wrapper_subclass(cls, data8.shape, dtype=dtype, device=data8.device)
        self.data8, self.scale, self.shift, self.rotated = data8, scale.float(), shift, rotated
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:
        properties = f"{self.data8.dtype}, {'rotated, ' * self.rotated}{'shifted, ' * (self.shift is not None)}"
        return f"QuantizedTensor({tuple(self.shape)}, {properties}says {self.dtype}, device={self.device})"

    def dequantize(self) -> Tensor:
        """Return the numbers (B, Hkv, S, D) as an ordinary tensor of `dtype`."""
        x = dequantized(self.data8, self.scale, torch.float32)
        x = unrotate(x) if self.rotated else x
        return (x if self.shift is None else x + self.shift.float()).to(self.dtype)

    def map(self, change: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """Return a QuantizedTensor with `change` applied to data, scale and shift."""
        shift = None if self.shift is None else change(self.shift)
        return QuantizedTensor(change(self.data8), change(self.scale), self.dtype, shift, self.rotated)

    def _stable_hash_for_caching(self) -> str:
        """Return a text for the cache keys of torch.compile, which requires this method of a subclass."""
        return f"{self.data8.dtype} {self.dtype} {self.rotated} {self.shift is None} {tuple(self.shape)}"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, bool]]:
        inner = ["data8", "scale"] + ["shift"] * (self.shift is not None)
        return inner, (self.dtype, self.rotated)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], metadata: tuple[torch.dtype, bool], outer_size: object, outer_stride: object
    ) -> QuantizedTensor:
        dtype, rotated = metadata
        return QuantizedTensor(inner["data8"], inner["scale"], dtype, inner.get("shift"), rotated)

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is _SDPA and (call := readable(*args, **(kwargs or {}))) is not None:
            return torch.ops.torch_flashplug.quantized_kv_fwd(*call)
        if func is Tensor.__setitem__ and isinstance(args[0], cls):
            raise RuntimeError(f"item assignment: {_NO_WRITES}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        """Apply copies and moves between devices to the parts; dequantize to 16 bits for any other operation."""
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            operand = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(operand, cls) and argument.alias_info is not None and argument.alias_info.is_write:
                raise RuntimeError(f"{func}: {_NO_WRITES}")
        same = kwargs.get("dtype") in (None, args[0].dtype) if args and isinstance(args[0], cls) else False
        if func in _COPIES and same:
            kwargs = {name: value for name, value in kwargs.items() if name not in {"dtype", "memory_format"}}
            return args[0].map(lambda x: func(x, *args[1:], **kwargs))
        args, kwargs = tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, (args, kwargs))
        return func(*args, **kwargs)


def readable(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> tuple | None:  # fmt: skip
    """Return the arguments of quantized_kv_fwd for a call of F.scaled_dot_product_attention, or None.

    None means that quantized_kv_fwd does not support the call. The call then runs in 16 bits, with the errors of stock
    PyTorch.
    """
    pair = isinstance(key, QuantizedTensor) and isinstance(value, QuantizedTensor)
    if not pair or isinstance(query, QuantizedTensor) or value.rotated or value.shift is not None:
        return None
    differentiated = any(x is not None and x.requires_grad for x in (query, attn_mask))
    if dropout_p != 0.0 or (differentiated and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
        return None
    if query.dim() != 4 or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        return None
    same = query.dtype == key.dtype == value.dtype and key.data8.dtype == value.data8.dtype
    heads = query.shape[1] == key.shape[1] or (enable_gqa and query.shape[1] % key.shape[1] == 0)
    if not same or not heads or key.shape[:3] != value.shape[:3] or (is_causal and attn_mask is not None):
        return None
    if is_causal:
        attn_mask = seen(query.shape[2], key.shape[2], query.device)
    return query, key.data8, value.data8, key.scale, value.scale, attn_mask, key.rotated, scale


_library.impl("dequantize", _dequantize, "CompositeExplicitAutograd")
torch.library.register_fake("torch_flashplug::dequantize", _dequantize, lib=_library)
torch.library.register_autograd("torch_flashplug::dequantize", no_gradient, setup_context=_setup_context, lib=_library)
