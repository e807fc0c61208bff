"""Tensors of a random call (calls.Call): random values in the layouts of the call, with NaN around the values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.fuzz.calls import DIMS, DTYPES, Call, Layout

TAIL = 64  # NaN elements after every operand


@dataclass(slots=True)
class CallTensors:
    """Tensors of a random call."""

    call: Call
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    first_grad: Tensor
    mask: Tensor | None
    guards: list[tuple[Tensor, int]]  # each buffer, and the number of elements that are not NaN


def _stored(shape: tuple[int, ...], layout: Layout) -> list[int]:
    return [min(n, 1) if dim in layout.expand else n for dim, n in zip(DIMS, shape)]


def lay_out(values: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return a view with the given values in the given layout, and the buffer of the view.

    In an expanded dim only the first entry of `values` is used.
    """
    stored = _stored(values.shape, layout)
    room = [n * step + more for n, step, more in zip(stored, (1, 1, 1, layout.step), (0, *layout.pad))]
    total = math.prod(room)
    buffer = values.new_full((layout.offset + total + TAIL,), float("nan"))
    axes = [DIMS.index(dim) for dim in layout.order]  # axis of each dim, in memory order
    grid = buffer[layout.offset : layout.offset + total].view([room[axis] for axis in axes])
    starts = [more // 2 for more in (0, *layout.pad)]
    view = grid.permute([axes.index(axis) for axis in range(4)])
    view = view[tuple(slice(a, a + n) for a, n in zip(starts[:3], stored))]
    view = view[..., starts[3] : starts[3] + stored[3] * layout.step : layout.step]
    view.copy_(values[tuple(slice(n) for n in stored)])
    view = view.expand(values.shape)
    if layout.ones and 1 in view.shape:
        strides = [layout.ones if n == 1 else stride for n, stride in zip(view.shape, view.stride())]
        view = view.as_strided(view.shape, strides, view.storage_offset())
    return view, buffer


def _mask_of(call: Call, randn: Callable[..., Tensor]) -> Tensor | None:
    if not call.mask:
        return None
    sizes = {"b": call.B, "h": call.Hq, "q": call.Sq, "k": call.Sk}
    shape = [size if dim in call.mask_dims else 1 for dim, size in sizes.items()]
    if call.mask == "lower_right":
        return torch.ones_like(randn(shape), dtype=torch.bool).tril(call.Sk - call.Sq)
    visible = randn(shape) < 0.5
    visible[..., :1] = True
    if call.mask == "blind":
        visible &= randn((*shape[:3], 1)) < 0.8
    if call.mask in {"bool", "blind"}:
        return visible
    bias = randn(shape).masked_fill(~visible, float("-inf") if call.mask == "inf" else 0.0)
    return bias if call.mask == "float32" else bias.to(DTYPES[call.dtype])


def make_tensors(call: Call, device: str) -> CallTensors:
    generator = torch.Generator(device=device).manual_seed(call.seed)
    randn = functools.partial(torch.randn, generator=generator, device=device)
    guards: list[tuple[Tensor, int]] = []

    def random_tensor(shape: tuple[int, ...], layout: Layout, first: float = 0.0) -> Tensor:
        """Return a random tensor. A nonzero `first` fills the first column, and the remaining columns become small."""
        values = randn(shape)
        if first:
            values = torch.cat([torch.full_like(values[..., :1], first), values[..., 1:] * 0.1], -1)
        view, buffer = lay_out(values.to(DTYPES[call.dtype]), layout)
        guards.append((buffer, math.prod(_stored(shape, layout))))
        return view

    if call.packed:
        heads = (call.Hq, call.Hkv, call.Hkv)
        q, k, v = random_tensor((call.B, sum(heads), call.Sq, call.D), call.q).split(heads, dim=1)
    else:
        score = call.low and call.low - math.log(call.Sk)
        q = random_tensor((call.B, call.Hq, call.Sq, call.D), call.q, float(bool(score)))
        k = random_tensor((call.B, call.Hkv, call.Sk, call.D), call.k, score * call.D**0.5)
        v = random_tensor((call.B, call.Hkv, call.Sk, call.Dv), call.v)
    grad_out = random_tensor((call.B, call.Hq, call.Sq, call.Dv), call.grad_out)
    mask = _mask_of(call, randn)
    if mask is not None:
        mask = lay_out(mask, call.mask_layout)[0]
    return CallTensors(call, q, k, v, grad_out, lay_out(grad_out, call.first_grad)[0], mask, guards)
