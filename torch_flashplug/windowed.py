"""The ops torch_flashplug::attention_fwd and attention_bwd: attention in a window, with sinks and an LSE that has
gradients. Schema, fake, autograd, and their mathematics on any device (_attention_math_fwd and _bwd, whose memory is
O(Sq * Sk)); kernels are called in src/own_ops.cpp.

Query i sees the keys from i + diagonal - left to i + diagonal + right; a bound of -1 is none. The diagonal is Sk - Sq
to the bottom right, else 0. A sink is a logit of a head that each of its rows' sums has beside those of keys, and that
brings no value (Xiao et al., arXiv 2309.17453; gpt-oss): it is part of the LSE. With p = exp(sink - LSE) its gradient
is -p delta, summed over rows, where delta = rowsum(dO O) - dLSE.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import native, reference
from .ops import empty_in_layout_of, never_a_frame

_WINDOW = "int left, int right, bool bottom_right, float? scale"
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library("torch_flashplug", "FRAGMENT")
for _name in ("attention_fwd", "_attention_math_fwd"):
    _library.define(
        f"{_name}(Tensor query, Tensor key, Tensor value, Tensor? sinks, {_WINDOW}) -> (Tensor out, Tensor lse)",
        tags=_TAGS,
    )
for _name in ("attention_bwd", "_attention_math_bwd"):
    _library.define(
        f"{_name}(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
        f"{_WINDOW}, bool wants_delta) -> (Tensor dq, Tensor dk, Tensor dv, Tensor delta)",
        tags=_TAGS,
    )

namespace = torch.ops.torch_flashplug


class Window(NamedTuple):
    left: int = -1
    right: int = -1
    bottom_right: bool = True

    def seen(self, Sq: int, Sk: int, device: torch.device) -> Tensor:
        """(Sq, Sk) bool."""
        own = torch.arange(Sq, device=device).unsqueeze(1) + (Sk - Sq if self.bottom_right else 0)
        behind = torch.arange(Sk, device=device) - own
        left, right = (bound if bound >= 0 else Sq + Sk for bound in (self.left, self.right))
        return (behind >= -left) & (behind <= right)


class BackwardArgs(NamedTuple):
    """Arguments of attention_bwd, in schema order."""

    grad_out: Tensor  # (B, Hq, Sq, Dv)
    grad_lse: Tensor | None  # (B, Hq, Sq)
    query: Tensor  # (B, Hq, Sq, D)
    key: Tensor  # (B, Hkv, Sk, D)
    value: Tensor  # (B, Hkv, Sk, Dv)
    out: Tensor  # (B, Hq, Sq, Dv)
    lse: Tensor  # (B, Hq, Sq) fp32 (fp64 for fp64), natural log
    left: int
    right: int
    bottom_right: bool
    scale: float | None  # None: 1 / sqrt(D)
    wants_delta: bool

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


# ---- shapes ----


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *more: object) -> tuple[Tensor, Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=reference.compute_dtype(query))
    return empty_in_layout_of(query, (*query.shape[:3], value.shape[3])), lse


def _backward_fake(*args) -> tuple[Tensor, ...]:
    a = BackwardArgs(*args)
    return (*map(torch.empty_like, a.operands), a.lse.new_empty(a.lse.shape if a.wants_delta else (0,)))


# ---- mathematics ----


def check(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: Window) -> None:
    """RuntimeError where the ops have no meaning. Reads sizes: for real tensors only."""
    shapes = tuple(tuple(x.shape) for x in (query, key, value))
    torch._check(
        all(len(shape) == 4 for shape in shapes) and native.shapes_fit(shapes, enable_gqa=True),
        lambda: "query, key and value are {}, {} and {}; give (B, Hq, Sq, D), (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), "
        "Hq a multiple of Hkv".format(*shapes),
    )
    torch._check(
        query.dtype == key.dtype == value.dtype and query.dtype.is_floating_point,
        lambda: f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; give one floating-point dtype",
    )
    torch._check(
        sinks is None or sinks.shape == query.shape[1:2],
        lambda: f"sinks are {tuple(sinks.shape)}; give (Hq,) = ({query.shape[1]},)",
    )
    torch._check(
        min(window[:2]) >= -1, lambda: f"a window {tuple(window[:2])} has bounds from -1 (none) on"
    )


@never_a_frame
def _math_forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *window: int | bool | float | None
) -> tuple[Tensor, Tensor]:
    *window, scale = window
    window = Window(*window)
    check(query, key, value, sinks, window)
    s = reference.scores_of(query, key, value, scale).where(window.seen(query.shape[2], key.shape[2], query.device))
    probabilities, lse = s.softmax()
    if sinks is not None:
        of_keys, lse = lse, torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
        share = torch.exp(of_keys - lse).masked_fill(of_keys == -math.inf, 0.0)
        probabilities = probabilities * share.unsqueeze(-1)
    out, _ = _forward_fake(query, key, value)
    return out.copy_(probabilities @ s.value), lse


@never_a_frame
def _math_backward(*args) -> tuple[Tensor, ...]:
    a = BackwardArgs(*args)
    window = Window(a.left, a.right, a.bottom_right)
    seen = window.seen(a.query.shape[2], a.key.shape[2], a.query.device)
    s = reference.scores_of(*a.operands, a.scale).where(seen)
    known = reference.Known(a.grad_out, a.out, a.lse, grad_lse=a.grad_lse)
    found = reference.gradients(s, *a.operands, known)
    return *found[:3], found.delta.contiguous() if a.wants_delta else a.lse.new_empty(0)


# ---- autograd ----


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    query, key, value, sinks, *settings = inputs
    ctx.save_for_backward(query, key, value, sinks, *output)
    ctx.settings = settings
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple:
    query, key, value, sinks, out, lse = ctx.saved_tensors
    unasked = (None,) * len(ctx.settings)
    if grad_out is None and grad_lse is None:
        return None, None, None, None, *unasked
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    tensors = (grad_out, grad_lse, query, key, value, out, lse)
    dq, dk, dv, delta = namespace.attention_bwd(*tensors, *ctx.settings, ctx.needs_input_grad[3])
    return dq, dk, dv, _of_sinks(sinks, lse, delta) if ctx.needs_input_grad[3] else None, *unasked


def _of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(Hq,)."""
    share = torch.exp(sinks.to(lse.dtype).unsqueeze(-1) - lse).masked_fill(lse == -math.inf, 0.0)
    return -(share * delta).sum((0, 2)).to(sinks.dtype)


def _double_backward(ctx, *grads: Tensor | None) -> tuple:
    raise RuntimeError(
        "torch_flashplug::attention_bwd has no derivative, so attention() cannot be differentiated twice; "
        "compute it with F.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    )


def _register() -> None:
    for name, math_of, fake in (
        ("attention_fwd", _math_forward, _forward_fake), ("attention_bwd", _math_backward, _backward_fake)
    ):  # fmt: skip
        of_math = f"_{name.replace('_', '_math_', 1)}"
        for op, key in ((name, "CPU"), (of_math, "CompositeExplicitAutograd")):
            _library.impl(op, math_of, key)
            torch.library.register_fake(f"torch_flashplug::{op}", fake, lib=_library)
    forward, backward = "torch_flashplug::attention_fwd", "torch_flashplug::attention_bwd"
    torch.library.register_autograd(forward, _backward, setup_context=_setup_context, lib=_library)
    torch.library.register_autograd(backward, _double_backward, lib=_library)


_register()
