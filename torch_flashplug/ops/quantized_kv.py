"""Key and value in 8 bits, as a cache holds them: the mathematics of the op cached_fwd, and a tensor for them that
F.scaled_dot_product_attention takes as it is.

A number of 8 bits times the scale of its row, plus, of keys, a constant row of its head, is what a cache says. Keys may
be rotated first (quantised.rotate): no channel stands out then, and INT8 with a scale for each token is four to fifteen
times finer than e4m3. Queries are rotated likewise; and since a constant key moves all scores of a row alike, attention
is that of the keys without it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from .quantize_reference import rotate, unrotate

FORMATS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
IN_WORDS = ", ".join(map(str, FORMATS))
_SDPA = F.scaled_dot_product_attention  # torch's own, whatever takes its place
_NO_WRITES = "no QuantizedTensor is written in place; make one of new data8 and scale"
_aten = torch.ops.aten
_COPIES = {_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default}


def dequantised(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, Hkv, S, D) of FORMATS, and its scale (B, Hkv, S)."""
    return (x.float() * scale.unsqueeze(-1)).to(dtype)


_library = torch.library.Library("torch_flashplug", "FRAGMENT")
_library.define(
    "dequantise(Tensor query, Tensor x, Tensor scale) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)  # fmt: skip


def multiplied_in(query: Tensor) -> torch.dtype:
    """Of numbers that were 8 bits: fp16 has no room for what scales may make of them."""
    return torch.bfloat16 if query.dtype == torch.float16 else query.dtype


def _dequantise(query: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """As that query is multiplied. An op, and of the query, so that no gradient leaves it: there would be none of x."""
    return dequantised(x, scale, multiplied_in(query))


def _setup_context(ctx, inputs: tuple, output: Tensor) -> None:
    """Nothing is kept."""


def no_gradient(ctx, *grads: Tensor | None) -> tuple:
    raise RuntimeError(
        "attention with key and value in 8 bits has no gradient; call it under torch.no_grad(), or give 16 bits"
    )


def seen(Sq: int, Sk: int, device: torch.device) -> Tensor:
    """A causal mask (Sq, Sk), to the top left."""
    return torch.ones(Sq, Sk, dtype=torch.bool, device=device).tril()


def attend(
    query: Tensor, key: Tensor, value: Tensor, k_scale: Tensor, v_scale: Tensor, attn_mask: Tensor | None,
    rotated: bool, scale: float | None,
) -> Tensor:  # fmt: skip
    """What cached_fwd computes, by F.scaled_dot_product_attention on K and V in 16 bits: where no kernel reads 8, and
    on a CPU.
    """
    check(query, key, value, k_scale, v_scale)
    dtype = multiplied_in(query)
    q = (rotate(query.float()) if rotated else query).to(dtype)
    k, v = dequantised(key, k_scale, dtype), dequantised(value, v_scale, dtype)
    if attn_mask is not None and attn_mask.dtype == query.dtype:
        attn_mask = attn_mask.to(dtype)
    return _SDPA(q, k, v, attn_mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]).to(query.dtype)


def check(query: Tensor, key: Tensor, value: Tensor, k_scale: Tensor, v_scale: Tensor) -> None:
    """RuntimeError where the op has no meaning. Reads sizes: for real tensors only."""
    torch._check(
        query.dim() == key.dim() == value.dim() == 4,
        lambda: "query, key and value of cached_fwd have 4 dims: (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv)",
    )
    B, Hq, _, D = query.shape
    _, Hkv, Sk, _ = key.shape
    torch._check(
        key.shape == (B, Hkv, Sk, D) and value.shape[:3] == (B, Hkv, Sk) and Hkv > 0 and Hq % Hkv == 0,
        lambda: f"shapes do not fit: query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}",
    )
    torch._check(
        query.dtype.is_floating_point and query.dtype not in FORMATS and key.dtype == value.dtype in FORMATS,
        lambda: (
            f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; key and value have one of "
            f"{IN_WORDS}, the query 16 bits"
        ),
    )
    torch._check(
        all(s.shape == (B, Hkv, Sk) and s.dtype == torch.float32 for s in (k_scale, v_scale)),
        lambda: (
            f"scales are {k_scale.dtype} {tuple(k_scale.shape)} and {v_scale.dtype} {tuple(v_scale.shape)}; cached_fwd "
            f"takes float32 {(B, Hkv, Sk)}, broadcast by strides of 0"
        ),
    )


# ---- a tensor for F.sdpa ----


class QuantizedTensor(Tensor):
    """Keys or values (B, Hkv, S, D) of a cache in 8 bits, which say that they have `dtype`, 16 bits.

    F.scaled_dot_product_attention reads two of them, key and value, as they are, in eager code and in torch.compile;
    gradients of the query, dropout and everything else have them made 16 bits first. Nothing is written in place, and
    nothing is differentiated with respect to it. What it is made of:
    data8: (B, Hkv, S, D), one of FORMATS; scale: (B, Hkv, S) fp32; shift: (B, Hkv, 1, D) that was taken from all keys,
    or None; rotated: whether keys were rotated behind that (quantised.rotate).
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
            given = f"{data8.dtype} {tuple(data8.shape)}, scale {tuple(scale.shape)}"
            raise ValueError(f"{given}; give (B, Hkv, S, D) of {IN_WORDS}, and (B, Hkv, S)")
        B, Hkv, _, D = data8.shape
        if not dtype.is_floating_point or (shift is not None and shift.shape != (B, Hkv, 1, D)):
            shifted = None if shift is None else tuple(shift.shape)
            raise ValueError(f"dtype {dtype}, shift {shifted}; give one of 16 bits, and (B, Hkv, 1, D) or None")
        if any(x.device != data8.device for x in (scale, *([] if shift is None else [shift]))):
            raise ValueError("data8, scale and shift are on different devices; give one")
        self = Tensor._make_wrapper_subclass(cls, data8.shape, dtype=dtype, device=data8.device)
        self.data8, self.scale, self.shift, self.rotated = data8, scale.float(), shift, rotated
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:
        made = f"{self.data8.dtype}, {'rotated, ' * self.rotated}{'shifted, ' * (self.shift is not None)}"
        return f"QuantizedTensor({tuple(self.shape)}, {made}says {self.dtype}, device={self.device})"

    def dequantize(self) -> Tensor:
        """(B, Hkv, S, D) in the dtype that it says."""
        x = dequantised(self.data8, self.scale, torch.float32)
        x = unrotate(x) if self.rotated else x
        return (x if self.shift is None else x + self.shift.float()).to(self.dtype)

    def map(self, change: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """The same of changed data, scale and shift."""
        shift = None if self.shift is None else change(self.shift)
        return QuantizedTensor(change(self.data8), change(self.scale), self.dtype, shift, self.rotated)

    def _stable_hash_for_caching(self) -> str:
        """What torch.compile's cache asks of a subclass."""
        return f"{self.data8.dtype} {self.dtype} {self.rotated} {self.shift is None} {tuple(self.shape)}"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, bool]]:
        inner = ["data8", "scale"] + ["shift"] * (self.shift is not None)
        return inner, (self.dtype, self.rotated)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], made: tuple[torch.dtype, bool], outer_size: object, outer_stride: object
    ) -> QuantizedTensor:
        dtype, rotated = made
        return QuantizedTensor(inner["data8"], inner["scale"], dtype, inner.get("shift"), rotated)

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is _SDPA and (call := readable(*args, **(kwargs or {}))) is not None:
            return torch.ops.torch_flashplug.cached_fwd(*call)
        if func is Tensor.__setitem__ and isinstance(args[0], cls):
            raise RuntimeError(f"item assignment: {_NO_WRITES}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        """Copies, and moves to another device, are ones of what it is made of; any other operation is on 16 bits."""
        kwargs = kwargs or {}
        for place, said in enumerate(func._schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(said.name)
            if isinstance(given, cls) and said.alias_info is not None and said.alias_info.is_write:
                raise RuntimeError(f"{func}: {_NO_WRITES}")
        same = kwargs.get("dtype") in (None, args[0].dtype) if args and isinstance(args[0], cls) else False
        if func in _COPIES and same:
            kwargs = {name: said for name, said in kwargs.items() if name not in {"dtype", "memory_format"}}
            return args[0].map(lambda x: func(x, *args[1:], **kwargs))
        args, kwargs = tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, (args, kwargs))
        return func(*args, **kwargs)


def readable(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> tuple | None:  # fmt: skip
    """cached_fwd's arguments; None where it does not compute such a call of F.scaled_dot_product_attention: then it is
    one of 16 bits, with stock's errors.
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


_library.impl("dequantise", _dequantise, "CompositeExplicitAutograd")
torch.library.register_fake("torch_flashplug::dequantise", _dequantise, lib=_library)
torch.library.register_autograd("torch_flashplug::dequantise", no_gradient, setup_context=_setup_context, lib=_library)
