"""The facts of one F.sdpa call as native.plan() wants them, read from Python tensors. explain() and Plan B use it;
served calls are read in C++.

Mirrors the first questions of src/router.cpp and layout_of in src/tensor_facts.cpp. Reads hints of symbolic sizes, so
it never adds a guard.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.attention import SDPBackend

from . import native

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_OTHER_DTYPE = len(native.DTYPE_IDS)
_ALIGN_MAX = 16  # bytes; TMA needs no more


def wants_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def decides_itself(*tensors: Tensor) -> bool:
    """One of them is of a class that Python dispatches, and not only traces."""
    return any(
        type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
        and not isinstance(tensor, (FakeTensor, FunctionalTensor))
        for tensor in tensors
    )


def _fit(q: tuple, k: tuple, v: tuple, enable_gqa: bool) -> bool:
    """Shapes that stock neither rejects nor broadcasts."""
    heads_fit = q[1] == k[1] or (enable_gqa and k[1] > 0 and q[1] % k[1] == 0)
    return heads_fit and k[:3] == v[:3] and q[0] == k[0] and q[3] == k[3]


def may_be_ours(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """What the router asks about operands that Python dispatches, all of them 4-d. Where sizes depend on data the op
    decides at run time.
    """
    if decides_itself(query, key, value):
        return False
    q, k, v = shapes = [_hints(tensor.shape) for tensor in (query, key, value)]
    return None in (*q, *k, *v) or _fit(*shapes, enable_gqa)


def outside_dispatcher(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> str | None:
    """Why the dispatcher is not asked about this call at all; None if it is."""
    if not native.enabled():
        return "the plugin is disabled; call torch_flashplug.enable()"
    if any(tensor.dim() != 4 for tensor in (query, key, value)):
        return (
            "query, key and value need 4 dims (batch, heads, rows, head dim); stock attention takes or rejects others"
        )
    if not query.device == key.device == value.device:
        return "query, key and value are on different devices; stock attention rejects the call"
    if any(tensor.is_nested for tensor in (query, key, value)):
        return "nested tensors are stock attention's"
    if decides_itself(query, key, value):
        return "a tensor subclass (DTensor, ...) decides what it does with attention; stock's ops are what it knows"
    q, k, v = shapes = [_hints(tensor.shape) for tensor in (query, key, value)]
    if None in (*q, *k, *v):
        return "sizes depend on data; stock attention serves this call"
    if not _fit(*shapes, enable_gqa):
        return (
            "shapes need broadcasting or do not fit (query heads that differ from key heads need enable_gqa=True); "
            "stock attention decides"
        )
    if not (torch.backends.cuda.flash_sdp_enabled() or torch._C._get_overrideable_sdp_enabled()):
        return (
            "torch.nn.attention.sdpa_kernel allows neither FLASH_ATTENTION nor OVERRIDEABLE, "
            "the two that stand for this plugin"
        )
    return None


def describe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> dict[str, int | float]:
    """Fields of native.PROBLEM_FIELDS and dropout_p, for a call that outside_dispatcher() lets through; `on_cuda` as
    query says.
    """
    q, k, v = (_hints(tensor.shape) for tensor in (query, key, value))
    grad = wants_grad(query, key, value)
    problem: dict[str, int | float] = dict(
        zip(("B", "Hq", "Hkv", "Sq", "Sk", "D", "Dv"), (*q[:2], k[1], q[2], k[2], q[3], v[3]))
    )
    problem |= {
        "causal": is_causal,
        "has_mask": attn_mask is not None,
        "dropout_p": dropout_p,
        "scale": native.SCALE_IDS[kind_of_scale(scale)],
        "on_cuda": query.is_cuda,
    }
    problem |= {"grad": grad, "deterministic": grad and torch.are_deterministic_algorithms_enabled()}
    for letter, tensor in (("q", query), ("k", key), ("v", value)):
        problem[f"dtype_{letter}"] = native.DTYPE_IDS.get(_DTYPES.get(tensor.dtype, ""), _OTHER_DTYPE)
        problem[f"last_stride_{letter}"] = _hints(tensor.stride())[3] if tensor.shape[3] > 1 else 1
        problem |= {f"{fact}_{letter}": value for fact, value in _lies(tensor).items()}
    return problem


def kind_of_scale(scale: float | None) -> str:
    """One of native.SCALE_IDS (scale_of in src/tensor_facts.cpp): kernels take floats of 32 bits, subnormals as 0."""
    fp32 = torch.finfo(torch.float32)
    if scale is not None and not abs(scale) <= fp32.max:
        return "not finite"
    return "positive" if scale is None or scale >= fp32.tiny else "negative" if scale <= -fp32.tiny else "zero"


def gives_nan(scale: float | None, stock_choice: int) -> bool:
    """With a scale of zero or below cuDNN's and flash's kernels do (right_for_scale in src/router.cpp)."""
    backends = (SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value)
    return kind_of_scale(scale) in {"zero", "negative"} and stock_choice in backends


def _hints(sizes: tuple) -> tuple[int | None, ...]:
    return tuple(size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes)


def _lies(tensor: Tensor) -> dict[str, int]:
    """How an operand lies in memory (struct Layout in src/flashplug.h). The storages of tensors that are only traced
    will be aligned.
    """
    (offset,) = _hints((tensor.storage_offset(),))
    real = type(tensor) in {Tensor, torch.nn.Parameter} and not tensor.is_meta
    base = tensor.data_ptr() if real else offset * tensor.element_size()
    outer = [
        (size, stride * tensor.element_size())
        for size, stride in zip(_hints(tensor.shape[:3]), _hints(tensor.stride()[:3]))
    ]
    bits = _ALIGN_MAX | base
    for size, stride in outer:
        if size > 1:
            bits |= stride
    return {
        "align": bits & -bits,
        "odd_base": base % _ALIGN_MAX != 0,
        "odd_ones": any(size == 1 and stride % _ALIGN_MAX for size, stride in outer),
        "broadcast": any(size > 1 and stride == 0 for size, stride in outer),
    }
