"""What attention() may be given, and what has kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import problem
from .cached import FORMATS, IN_WORDS
from .spec import ROWS_PER_WARPGROUP as FEW_ROWS

SIXTEEN_BITS, LARGEST_DIM = (torch.bfloat16, torch.float16), 256
Scale = Tensor | float


def check_rank(name: str, x: object, rank: int, what: str, of: str = "attention") -> None:
    if not isinstance(x, Tensor) or x.dim() != rank:
        given = f"{x.dim()}-D" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{of}: {name} is {given}; {what}")


def check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    """(batch, rows, heads, head dim)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rank(name, x, 4, "give a tensor (batch, rows, heads, head dim)")
    if not q.device == k.device == v.device:
        raise ValueError(f"attention: q, k, v are on {q.device}, {k.device}, {v.device}; give one device")
    (B, _, Hq, D), (_, Sk, Hkv, _) = q.shape, k.shape
    if k.shape != (B, Sk, Hkv, D) or v.shape[:3] != (B, Sk, Hkv) or (Hkv and Hq % Hkv) or (Hq and not Hkv):
        given = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"attention: {given} do not fit; give (B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, Dv)")


def as_sinks(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    """In the dtype of the LSE."""
    if sinks is None:
        return None
    if not isinstance(sinks, Tensor) or sinks.shape != q.shape[-2:-1] or sinks.is_complex():
        given = tuple(sinks.shape) if isinstance(sinks, Tensor) else type(sinks).__name__
        raise ValueError(f"attention: sinks are {given}; give a real tensor (Hq,) = ({q.shape[-2]},)")
    return sinks.to(q.device, torch.promote_types(torch.float32, q.dtype))


def check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether k and v have 8 bits."""
    if k.dtype not in FORMATS and v.dtype not in FORMATS:
        check_same(q, k, v)
        return False
    if k.dtype != v.dtype or not q.dtype.is_floating_point or q.dtype in FORMATS:
        given = f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}"
        raise ValueError(f"attention: {given}; k and v have one of {IN_WORDS}, and q 16 bits")
    if forward_ad._current_level >= 0:
        raise RuntimeError("attention: k and v in 8 bits have no derivative, forward mode's neither; give 16 bits")
    return True


def refuse_forward_mode() -> None:
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "attention: softcap, sinks, return_lse and lengths have no forward-mode derivative; use reverse mode"
        )


def check_same(q: Tensor, k: Tensor, v: Tensor) -> None:
    """But for what autocast makes the same."""
    if not q.dtype == k.dtype == v.dtype and not problem.is_autocast(q.device.type):
        raise ValueError(f"attention: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; give one dtype")
    if not all(x.dtype.is_floating_point for x in (q, k, v)):
        raise ValueError(f"attention: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; give floating-point ones")


def have_kernels(query: Tensor, key: Tensor, value: Tensor) -> bool:
    dims = (query.shape[3], value.shape[3])
    taken = query.is_cuda and query.dtype == key.dtype == value.dtype and query.dtype in SIXTEEN_BITS
    return taken and all(dim % 8 == 0 and dim <= LARGEST_DIM for dim in dims)


def are_few_rows(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether kernels of decode, which split the keys, take them: forward alone."""
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    few = key.shape[1] > 0 and query.shape[2] * (query.shape[1] // key.shape[1]) <= FEW_ROWS
    return few and not differentiated and have_kernels(query, key, value)


def scale_of(name: str, scale: Scale | None, x: Tensor) -> Tensor:
    """(B, Hkv, Sk) fp32, broadcast by strides of 0. x: (B, Hkv, Sk, ...)."""
    wanted = x.shape[:3]
    if scale is None:
        if x.dtype == torch.int8:
            raise ValueError(f"attention: {name} is None; int8 takes a number, (), (Hkv,), (B, Hkv) or (B, Hkv, Sk)")
        scale = 1.0
    if not isinstance(scale, Tensor | int | float) or (isinstance(scale, Tensor) and scale.is_complex()):
        raise TypeError(f"attention: {name} is {type(scale).__name__}; give a number or a tensor of real ones")
    if not isinstance(scale, Tensor):
        return torch.full((1, 1, 1), float(scale), dtype=torch.float32, device=x.device).expand(wanted)
    if scale.device != x.device and scale.dim() > 0:
        raise ValueError(f"attention: {name} is on {scale.device}, k and v are on {x.device}")
    shape = {0: (1, 1, 1), 1: (1, *scale.shape, 1), 2: (*scale.shape, 1), 3: tuple(scale.shape)}.get(scale.dim())
    if shape is None or any(size not in (1, full) for size, full in zip(shape, wanted, strict=True)):
        raise ValueError(
            f"attention: {name} {tuple(scale.shape)} does not fit B, Hkv, Sk = {tuple(wanted)}; "
            "give (), (Hkv,), (B, Hkv) or (B, Hkv, Sk)"
        )
    return scale.to(x.device, torch.float32).reshape(shape).expand(wanted)
