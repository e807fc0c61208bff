"""The custom ops torch_flashplug::sdpa_fwd and sdpa_bwd: schema, fake, autograd, and reference mathematics.

The kernels for dispatch key CUDA live in src/ops/sdpa_ops.cpp. This file owns everything a tracer needs to know about
the ops. This file also owns the mathematics for CPU tensors and for calls without a kernel: `_math_fwd` and `_math_bwd`
run on any device and take O(Sq * Sk) memory. No code in this file decides which backend runs.

Names of dims: B is the batch. Hq and Hkv are the heads of the query, and of key and value. Sq and Sk are the lengths.
D is the head dim of query and key, and Dv is the head dim of value and output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import bindings
from . import dropout_reference, mask_preprocess_reference, quantized_kv, reference

CAUSAL_NONE, CAUSAL_TOP_LEFT, CAUSAL_BOTTOM_RIGHT = 0, 1, 2

_SETTINGS = "float dropout_p, int causal_mode, float? scale, int mode"
_FORWARD_ARGS = f"Tensor query, Tensor key, Tensor value, Tensor? attn_bias, {_SETTINGS}"
_BACKWARD_ARGS = (
    "Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
    f"Tensor out, Tensor lse, Tensor seed, Tensor offset, {_SETTINGS}, bool bias_grad"
)
_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library("torch_flashplug", "DEF")
for _name in ("sdpa_fwd", "_math_fwd"):
    _library.define(f"{_name}({_FORWARD_ARGS}) -> (Tensor out, Tensor lse, Tensor seed, Tensor offset)", tags=_TAGS)
for _name in ("sdpa_bwd", "_math_bwd"):
    _library.define(f"{_name}({_BACKWARD_ARGS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)", tags=_TAGS)
_library.define(
    "_corrected_choice(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, "
    "float? scale, int chosen) -> (int choice, int fault)"
)
for _name in ("quantized_kv_fwd", "_quantized_kv_math"):  # implemented in quantized_kv.py
    _library.define(
        f"{_name}(Tensor query, Tensor key, Tensor value, Tensor k_scale, Tensor v_scale, Tensor? attn_mask, "
        "bool k_is_rotated, float? scale) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
    )
_library.define("_preprocess_mask(Tensor mask, int numbers) -> Tensor")  # implemented in mask_preprocess_reference.py
# Implemented in dropout_reference.py, for tests: the mask of the probabilities kept by a call with the seed.
_library.define(
    "dropout_mask(Tensor seed, int B, int Hq, int Sq, int Sk, float dropout_p) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)

namespace = torch.ops.torch_flashplug


def without_own_graph(function: Callable) -> Callable:
    """Mark a function so that Dynamo compiles no separate graph when uncompiled code calls the function.

    Dynamo may still inline the function into a graph.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
    return function


def held(function: Callable) -> Callable:
    """Apply both `bindings.held` and `without_own_graph` to a function."""
    return without_own_graph(bindings.held(function))


def mathematics(function: Callable) -> Callable:
    """Apply `held` and `without_own_graph` to a function, and disable autocast while the function runs.

    Matrix products then have the dtype written in the code. With autocast around a call, the products would have 16
    bits, and so would the LSE.
    """

    @functools.wraps(function)
    def run(first: Tensor, *more: object) -> object:
        device = first.device.type
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return function(first, *more)
        with torch.autocast(device, enabled=False):
            return function(first, *more)

    without_own_graph(function)
    return held(without_own_graph(run))


class ForwardArgs(NamedTuple):
    """Arguments of sdpa_fwd, in schema order."""

    query: Tensor  # (B, Hq, Sq, D)
    key: Tensor  # (B, Hkv, Sk, D)
    value: Tensor  # (B, Hkv, Sk, Dv)
    attn_bias: Tensor | None  # broadcasts to (B, Hq, Sq, Sk): bool (True: visible) or float; for _math_bwd also as kept
    dropout_p: float
    causal_mode: int
    scale: float | None  # None: 1 / sqrt(D)
    mode: int  # mode word: backend, num_splits, precision


_OF_FORWARD = ForwardArgs._fields


class BackwardArgs(NamedTuple):
    """Arguments of sdpa_bwd, in schema order."""

    grad_out: Tensor  # (B, Hq, Sq, Dv)
    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Tensor | None
    out: Tensor  # (B, Hq, Sq, Dv)
    lse: Tensor  # (B, Hq, Sq) fp32 (fp64 for fp64), natural log
    seed: Tensor  # () int64; (0,) without dropout
    offset: Tensor  # () int64; (0,) without dropout
    dropout_p: float
    causal_mode: int
    scale: float | None
    mode: int
    bias_grad: bool

    @property
    def forward(self) -> ForwardArgs:
        return ForwardArgs(*(getattr(self, name) for name in _OF_FORWARD))


# ---- shapes and strides ----


def empty_in_layout_of(query: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an uninitialized tensor of `shape` whose dims have the memory order of the query's dims.

    torch's own meta function lays out SDPA outputs in this way.
    """
    if tuple(query.shape) == shape:
        return torch.empty_like(query)
    strides = [0] * len(shape)
    step = 1
    outer_first = sorted(range(len(shape)), key=query.stride, reverse=True)
    for dim in reversed(outer_first):
        strides[dim] = step
        step *= shape[dim]
    return query.new_empty_strided(shape, strides)


def empty_results(query: Tensor, key: Tensor, value: Tensor, *more: object) -> tuple[Tensor, Tensor]:
    """Return an uninitialized output and LSE."""
    lse = query.new_empty(query.shape[:3], dtype=reference.compute_dtype(query))
    return empty_in_layout_of(query, (*query.shape[:3], value.shape[3])), lse


def empty_gradients(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *more: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _output_shape(a: ForwardArgs) -> tuple[int, ...]:
    return (*a.query.shape[:3], a.value.shape[3])


def _drawn_shape(a: ForwardArgs) -> tuple[int, ...]:
    """Return the shape of seed and offset, which is (0,) without dropout because an empty tensor costs no launch."""
    return () if a.dropout_p > 0.0 else (0,)


def _forward_fake(*args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = ForwardArgs(*args)
    _check_ranks(a)
    lse = a.query.new_empty(a.query.shape[:3], dtype=reference.compute_dtype(a.query))
    seed, offset = (a.query.new_empty(_drawn_shape(a), dtype=torch.int64) for _ in range(2))
    return empty_in_layout_of(a.query, _output_shape(a)), lse, seed, offset


def _backward_fake(*args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = BackwardArgs(*args)
    dbias = torch.empty_like(a.attn_bias) if a.bias_grad else a.query.new_empty(0)
    return torch.empty_like(a.query), torch.empty_like(a.key), torch.empty_like(a.value), dbias


# ---- checks of the arguments ----


def _check_ranks(a: ForwardArgs) -> None:
    ranks = [tensor.dim() for tensor in a[:3]]
    torch._check(
        ranks == [4, 4, 4],
        lambda: f"sdpa_fwd: query, key and value must have 4 dims (batch, heads, length, head dim), but got {ranks}.",
    )


def check_arguments(a: ForwardArgs) -> None:
    """Check that a call is valid; the checks read sizes, so the tensors must be real.

    Raises:
        RuntimeError: the arguments are invalid. torch raises the same type for SDPA.
    """
    _check_ranks(a)
    q, k, v = a[:3]
    torch._check(
        q.dtype == k.dtype == v.dtype,
        lambda: f"Expected query, key, and value to have the same dtype, but got {q.dtype}, {k.dtype} and {v.dtype}",
    )
    torch._check(
        q.device == k.device == v.device,
        lambda: f"Expected query, key, and value to have the same device, but got {q.device}, {k.device}, {v.device}",
    )
    torch._check(
        q.dtype.is_floating_point, lambda: f"sdpa_fwd: query must be a floating-point tensor, but got {q.dtype}."
    )
    torch._check(
        bindings.shapes_fit((q.shape, k.shape, v.shape), enable_gqa=True),
        lambda: (
            "sdpa_fwd: the heads of key and value must divide the heads of query, and all other sizes must match, but "
            f"got query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}."
        ),
    )
    torch._check(
        0.0 <= a.dropout_p <= 1.0, lambda: f"dropout probability has to be between 0 and 1, but got {a.dropout_p}"
    )
    torch._check(
        a.causal_mode in (CAUSAL_NONE, CAUSAL_TOP_LEFT, CAUSAL_BOTTOM_RIGHT),
        lambda: f"sdpa_fwd: causal_mode must be 0 (none), 1 (top-left) or 2 (bottom-right), but got {a.causal_mode}.",
    )
    torch._check(
        bindings.names_backend(a.mode),
        lambda: f"sdpa_fwd: mode must name a backend of torch_flashplug/registry/architectures.py, but got {a.mode}.",
    )
    _check_bias(a)


def _check_bias(a: ForwardArgs) -> None:
    if a.attn_bias is None:
        return
    torch._check(a.causal_mode == CAUSAL_NONE, lambda: "Explicit attn_mask should not be set when is_causal=True")
    torch._check(
        a.attn_bias.dtype in (torch.bool, torch.float32, a.query.dtype),
        lambda: f"Expected attn_mask dtype to be bool or float or to match query dtype, but got {a.attn_bias.dtype}",
    )


# ---- reference mathematics of the ops: runs on any device, launches no torch_flashplug kernel ----


def _scores(a: ForwardArgs) -> reference.Scores:
    s = reference.scores_of(a.query, a.key, a.value, a.scale)
    bias = a.attn_bias
    if bias is not None and bias.dtype == torch.int32:
        bias = mask_preprocess_reference.visible_scores(bias, *s.scores.shape[-2:])
    elif bias is not None and bias.dtype == torch.uint8:
        bias = bias.bool()
    if bias is not None and bias.dtype == torch.bool:
        s = s.where(bias)
    elif bias is not None:
        s = s._replace(scores=s.scores + bias.to(s.scores.dtype))
    if a.causal_mode != CAUSAL_NONE:
        rows, keys = s.scores.shape[-2:]
        diagonal = keys - rows if a.causal_mode == CAUSAL_BOTTOM_RIGHT else 0
        s = s.where(torch.ones(rows, keys, dtype=torch.bool, device=s.scores.device).tril(diagonal))
    return s


def _dropout_factors(seed: Tensor, probabilities: Tensor, dropout_p: float) -> Tensor:
    """Return 0 for each dropped probability and 1 / (1 - p) for the rest, as kernels draw from the same seed."""
    kept = dropout_reference.dropout_mask(seed, *probabilities.shape, dropout_p)
    return kept.to(probabilities.dtype) * dropout_reference.factor(dropout_p)


def _dropout_mask(seed: Tensor, B: int, Hq: int, Sq: int, Sk: int, dropout_p: float) -> Tensor:
    torch._check(
        seed.numel() == 1 and seed.dtype == torch.int64,
        lambda: (
            f"dropout_mask: seed must be the int64 scalar tensor returned by a forward, but got {seed.dtype} of shape "
            f"{tuple(seed.shape)}."
        ),
    )
    torch._check(
        0.0 <= dropout_p <= 1.0, lambda: f"dropout_mask: dropout_p must be between 0 and 1, but got {dropout_p}."
    )
    return dropout_reference.dropout_mask(seed, B, Hq, Sq, Sk, dropout_p)


def _dropout_mask_fake(seed: Tensor, B: int, Hq: int, Sq: int, Sk: int, dropout_p: float) -> Tensor:
    return seed.new_empty((B, Hq, Sq, Sk), dtype=torch.bool)


@mathematics
def _math_forward(*args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = ForwardArgs(*args)
    check_arguments(a)
    seed, offset = (torch.zeros(_drawn_shape(a), dtype=torch.int64, device=a.query.device) for _ in range(2))
    s = _scores(a)
    probabilities, lse = s.softmax()
    if a.dropout_p > 0.0:
        seed.random_()
        probabilities = probabilities * _dropout_factors(seed, probabilities, a.dropout_p)
    out = empty_in_layout_of(a.query, _output_shape(a)).copy_(probabilities @ s.value)
    return out, lse, seed, offset


@mathematics
def _math_backward(*args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = BackwardArgs(*args)
    s = _scores(a.forward)
    factors = None
    if a.dropout_p > 0.0:
        factors = _dropout_factors(a.seed, s.scores, a.dropout_p)
    grads = reference.gradients(s, a.query, a.key, a.value, reference.BackwardInputs(a.grad_out, a.out, a.lse, factors))
    dbias = a.query.new_empty(0)
    if a.bias_grad:
        dbias = reference.like(grads.scores.sum_to_size(a.attn_bias.shape), a.attn_bias)
    return grads.query, grads.key, grads.value, dbias


# ---- quantized KV caches: key and value in 8 bits ----


def _cached_fake(query: Tensor, key: Tensor, value: Tensor, *more: object) -> Tensor:
    return empty_in_layout_of(query, (*query.shape[:3], value.shape[3]))


@mathematics
def _cached(query: Tensor, key: Tensor, value: Tensor, *more: object) -> Tensor:
    out = quantized_kv.attend(query, key, value, *more)
    return _cached_fake(query, key, value).copy_(out)


# ---- autograd for programs that call sdpa_fwd directly; F.sdpa uses libtorch's derivative of the aten op ----


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    a = ForwardArgs(*inputs)
    out, lse, seed, offset = output
    ctx.save_for_backward(a.query, a.key, a.value, a.attn_bias, out, lse, seed, offset)
    ctx.settings = (a.dropout_p, a.causal_mode, a.scale, a.mode)
    ctx.mark_non_differentiable(lse, seed, offset)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out: Tensor | None, *unused: Tensor | None) -> tuple:
    if grad_out is None:
        return (None,) * len(ForwardArgs._fields)
    bias_grad = ctx.needs_input_grad[3]
    dq, dk, dv, dbias = namespace.sdpa_bwd(grad_out, *ctx.saved_tensors, *ctx.settings, bias_grad)
    return dq, dk, dv, dbias if bias_grad else None, None, None, None, None


def not_twice(op: str) -> Callable:
    """Return a backward that raises, because a gradient of attention() has no derivative."""

    def refuse(ctx, *grads: Tensor | None) -> tuple:
        raise RuntimeError(
            f"torch_flashplug::{op} has no derivative, so attention() cannot be differentiated twice. Call "
            "F.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
        )

    return refuse


def _double_backward(ctx, *grads: Tensor | None) -> tuple:
    raise RuntimeError(
        "torch_flashplug::sdpa_bwd has no derivative, so attention cannot be differentiated twice. "
        "Compute the attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
    )


def _register() -> None:
    for name, forward in (("_math_fwd", True), ("_math_bwd", False), ("sdpa_fwd", True), ("sdpa_bwd", False)):
        key = "CompositeExplicitAutograd" if name.startswith("_math") else "CPU"
        _library.impl(name, _math_forward if forward else _math_backward, key)
        torch.library.register_fake(
            f"torch_flashplug::{name}", _forward_fake if forward else _backward_fake, lib=_library
        )
    for name, key in (("quantized_kv_fwd", "CPU"), ("_quantized_kv_math", "CompositeExplicitAutograd")):
        _library.impl(name, _cached, key)
        torch.library.register_fake(f"torch_flashplug::{name}", _cached_fake, lib=_library)
        torch.library.register_autograd(f"torch_flashplug::{name}", quantized_kv.no_gradient, lib=_library)
    _library.impl("_preprocess_mask", held(mask_preprocess_reference.preprocess_mask), "CompositeExplicitAutograd")
    _library.impl("dropout_mask", _dropout_mask, "CompositeExplicitAutograd")
    torch.library.register_fake("torch_flashplug::dropout_mask", _dropout_mask_fake, lib=_library)
    torch.library.register_autograd("torch_flashplug::sdpa_fwd", _backward, setup_context=_setup_context, lib=_library)
    torch.library.register_autograd("torch_flashplug::sdpa_bwd", _double_backward, lib=_library)


_register()
