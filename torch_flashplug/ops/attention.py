"""The ops torch_flashplug::attention_fwd and attention_bwd: windows, packed sequences, sinks and softcap.

This file has the schema, the fake and autograd rules, and the reference math on any device (`_attention_math_fwd` and
`_attention_math_bwd`, with O(Sq * Sk) memory). The kernels are called in src/ops/attention_ops.cpp. The LSE has
gradients.

If `softcap` is not 0, scores become softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118), before masking. The
visible keys of query i are those from i + diagonal - left to i + diagonal + right; a bound of -1 stands for no bound.
The diagonal is Sk - Sq for alignment to the bottom right, else 0. A sink is one logit of a head. The sum of each row
has the sink in addition to the keys, and the sink has no value (Xiao et al., arXiv 2309.17453; gpt-oss). The LSE
includes the sink. With p = exp(sink - LSE), the gradient of the sink is -p delta, summed over rows, where delta =
rowsum(dO O) - dLSE.

Packed sequences are one batch (1, H, T, D). Rows cu_q[i] to cu_q[i + 1] belong to sequence i, and keys cu_k[i] to
cu_k[i + 1]. If `used_k` is given, only the first used_k[i] keys are visible (no gradients then). Rows and keys outside
of all sequences lie before the first sequence or after the last sequence. The contents there are never read, neither in
operands nor in the inputs of the backward.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import bindings
from . import reference
from .sdpa import empty_results, mathematics, not_twice

_WINDOW = "int left, int right, bool bottom_right, float softcap, float? scale"
# num_splits=1 and any fixed_split_size select batch-invariant kernels (`Problem::batch_invariant` in
# src/core/call_facts.h). Other values have an effect in decode kernels only.
SPLITS = "int num_splits=0, int fixed_split_size=0"
# Arguments for kernels, unused by the reference math: the plan of varlen_plan.py, and the result of
# tracing.mode_of_block().
_KERNELS = ", Tensor? plan=None, SymInt plan_key=0, int block_mode=0"
NO_PLAN = (None, 0)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library("torch_flashplug", "FRAGMENT")
for _name, _more in (("attention_fwd", _KERNELS), ("_attention_math_fwd", "")):
    _library.define(
        f"{_name}(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? cu_q, Tensor? cu_k, "
        f"Tensor? used_k, {_WINDOW}, {SPLITS}{_more}) -> (Tensor out, Tensor lse)",
        tags=_TAGS,
    )
_library.define(
    "attention_fwd_out(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? cu_q, "
    f"Tensor? cu_k, Tensor? used_k, {_WINDOW}, {SPLITS}{_KERNELS}) -> Tensor lse",
    tags=_TAGS,
)
_library.define(
    f"_plan_lists(Tensor query, Tensor key, Tensor value, Tensor cu_q, Tensor cu_k, Tensor? used_k, {_WINDOW}, "
    "int num_splits, int fixed_split_size, bool gradients) -> (Tensor lists, int key)"
)
for _name, _more in (("attention_bwd", _KERNELS), ("_attention_math_bwd", "")):
    _library.define(
        f"{_name}(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
        f"Tensor? cu_q, Tensor? cu_k, {_WINDOW}, bool wants_delta, {SPLITS}{_more}) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor delta)",
        tags=_TAGS,
    )

namespace = torch.ops.torch_flashplug


class Window(NamedTuple):
    """Sliding window: numbers of visible keys before and after a query's own key. -1 stands for no bound."""

    left: int = -1
    right: int = -1
    bottom_right: bool = True

    def seen(self, Sq: int, Sk: int, device: torch.device) -> Tensor:
        """Return the window as a bool mask (Sq, Sk), True for visible keys."""
        own_key = torch.arange(Sq, device=device).unsqueeze(1) + (Sk - Sq if self.bottom_right else 0)
        distance = torch.arange(Sk, device=device) - own_key
        return self.inside(distance, Sq + Sk)

    def inside(self, distance: Tensor, all_keys: int) -> Tensor:
        """Return a bool tensor, True for visible keys. `distance` is the offset from a query's own key to a key."""
        left, right = (bound if bound >= 0 else all_keys for bound in (self.left, self.right))
        return (distance >= -left) & (distance <= right)

    def seen_on_end(self, packed: OnEnd, rows: int, keys: int) -> Tensor:
        """Return the window within packed sequences as a bool mask (rows, keys)."""
        cu_q, cu_k, _ = packed
        (of_row, row), (of_key, key) = (_places(cu, size) for cu, size in ((cu_q, rows), (cu_k, keys)))
        if len(cu_q) == 1:
            return torch.zeros(rows, keys, dtype=torch.bool, device=cu_q.device)
        if self.bottom_right:
            row = row + (packed.used - cu_q.diff())[of_row.clamp(max=len(cu_q) - 2)]
        same = (of_row.unsqueeze(1) == of_key) & packed.keys_that_count(keys)
        return same & self.inside(key - row.unsqueeze(1), rows + keys)


class OnEnd(NamedTuple):
    """Cumulative lengths of packed sequences, and the KV lengths."""

    cu_q: Tensor  # (sequences + 1,) int32
    cu_k: Tensor
    used_k: Tensor | None = None  # (sequences,) int32

    @property
    def used(self) -> Tensor:
        return self.cu_k.diff() if self.used_k is None else torch.minimum(self.cu_k.diff(), self.used_k)

    def rows_that_count(self, rows: int) -> Tensor:
        """Return (rows,) bool, True for rows of a sequence. Reads no value on the host."""
        number = torch.arange(rows, device=self.cu_q.device)
        return (self.cu_q[0] <= number) & (number < self.cu_q[-1])

    def keys_that_count(self, keys: int) -> Tensor:
        sequence, key = _places(self.cu_k, keys)
        used = torch.cat((self.used, self.used.new_zeros(1)))  # 0 keys for the rows outside of all sequences
        return (sequence < len(self.cu_k) - 1) & (key < used[sequence])


def _places(cu: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the sequence of each row, and the position of the row in the sequence.

    A row outside of all sequences gets the number of sequences as sequence index.
    """
    number, starts = torch.arange(size, device=cu.device), cu.long()
    sequence = torch.searchsorted(starts[1:].contiguous(), number, right=True)
    sequence = torch.where(number < starts[0], len(cu) - 1, sequence)
    return sequence, number - starts[sequence]


class BackwardArgs(NamedTuple):
    """Arguments of attention_bwd, in schema order."""

    grad_out: Tensor  # (B, Hq, Sq, Dv)
    grad_lse: Tensor | None  # (B, Hq, Sq)
    query: Tensor  # (B, Hq, Sq, D)
    key: Tensor  # (B, Hkv, Sk, D)
    value: Tensor  # (B, Hkv, Sk, Dv)
    out: Tensor  # (B, Hq, Sq, Dv)
    lse: Tensor  # (B, Hq, Sq) fp32 (fp64 for fp64), natural log
    cu_q: Tensor | None  # (sequences + 1,) int32
    cu_k: Tensor | None
    left: int
    right: int
    bottom_right: bool
    softcap: float  # 0: none
    scale: float | None  # None: 1 / sqrt(D)
    wants_delta: bool
    num_splits: int = 0
    fixed_split_size: int = 0
    plan: Tensor | None = None  # the plan passed to the forward
    plan_key: int = 0
    mode: int = 0  # the mode passed to the forward

    @property
    def seen(self) -> Tensor:
        packed = None if self.cu_q is None else OnEnd(self.cu_q, self.cu_k)
        return _seen(self.query, self.key, packed, Window(self.left, self.right, self.bottom_right))

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


# ---- shapes ----


def _backward_fake(*args) -> tuple[Tensor, ...]:
    a = BackwardArgs(*args)
    return (*map(torch.empty_like, a.operands), a.lse.new_empty(a.lse.shape if a.wants_delta else (0,)))


# ---- reference math ----


def _seen(query: Tensor, key: Tensor, packed: OnEnd | None, window: Window) -> Tensor:
    """Return the bool mask (Sq, Sk) of a window, within packed sequences if `packed` is not None."""
    if packed is None:
        return window.seen(query.shape[2], key.shape[2], query.device)
    return window.seen_on_end(packed, query.shape[2], key.shape[2])


def _that_count(packed: OnEnd | None, rows: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
    """Return rows and keys with zeros outside of all sequences.

    The contents there may be NaN or infinite, and matrix products would spread such values.
    """
    if packed is None:
        return rows, *keys
    in_sequence = packed.rows_that_count(rows.shape[2]).unsqueeze(-1)
    is_visible = packed.keys_that_count(keys[0].shape[2]).unsqueeze(-1)
    return rows.where(in_sequence, 0.0), *(x.where(is_visible, 0.0) for x in keys)


class _Rows(NamedTuple):
    """Inputs of a backward for each query row, except the query."""

    grad_out: Tensor  # (B, Hq, Sq, Dv)
    out: Tensor  # (B, Hq, Sq, Dv)
    lse: Tensor  # (B, Hq, Sq)
    grad_lse: Tensor | None  # (B, Hq, Sq)

    def of_sequences(self, packed: OnEnd | None) -> _Rows:
        """Return the inputs with neutral values in rows outside of all sequences.

        The contents of such rows may be NaN or infinite. An LSE of -inf stands for a row without probabilities, in
        which the sink has no share either.
        """
        if packed is None:
            return self
        in_sequence = packed.rows_that_count(self.lse.shape[2])
        grad_out, out = (x.where(in_sequence.unsqueeze(-1), 0.0) for x in self[:2])
        grad_lse = None if self.grad_lse is None else self.grad_lse.where(in_sequence, 0.0)
        return _Rows(grad_out, out, self.lse.where(in_sequence, -math.inf), grad_lse)


def check_lengths(query: Tensor, lengths: tuple[Tensor | None, Tensor | None, Tensor | None]) -> OnEnd | None:
    """Check the lengths of packed sequences, as far as the host knows, and return `OnEnd` or None."""
    if all(x is None for x in lengths):
        return None
    cu_q, cu_k, used_k = lengths
    numbers = [x for x in lengths if x is not None]
    torch._check(
        cu_q is not None and cu_k is not None and all(x.dim() == 1 and x.dtype == torch.int32 for x in numbers)
        and len(cu_q) == len(cu_k) > 0 and (used_k is None or len(used_k) == len(cu_q) - 1) and query.shape[0] == 1,
        lambda: "attention_fwd: packed sequences must be one batch, with cu_q and cu_k (sequences + 1,) and used_k "
        "(sequences,) of int32.",
    )  # fmt: skip
    return OnEnd(*lengths)


def check(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: Window) -> None:
    """Raise RuntimeError if the arguments do not fit together. Reads sizes, hence for real tensors only."""
    shapes = tuple(tuple(x.shape) for x in (query, key, value))
    torch._check(
        all(len(shape) == 4 for shape in shapes) and bindings.shapes_fit(shapes, enable_gqa=True),
        lambda: (
            "attention_fwd: query, key and value must have shapes (B, Hq, Sq, D), (B, Hkv, Sk, D) and "
            "(B, Hkv, Sk, Dv), Hq a multiple of Hkv, but got {}, {} and {}.".format(*shapes)
        ),
    )
    torch._check(
        query.dtype == key.dtype == value.dtype and query.dtype.is_floating_point,
        lambda: (
            "attention_fwd: query, key and value must have one floating-point dtype, "
            f"but got {query.dtype}, {key.dtype} and {value.dtype}."
        ),
    )
    torch._check(
        sinks is None or sinks.shape == query.shape[1:2],
        lambda: f"attention_fwd: sinks must have shape (Hq,) = ({query.shape[1]},), but got {tuple(sinks.shape)}.",
    )
    torch._check(
        min(window[:2]) >= -1,
        lambda: f"attention_fwd: left and right must be -1 (no bound) or above, but got {tuple(window[:2])}.",
    )


@mathematics
def _math_forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *settings: Tensor | int | float | None
) -> tuple[Tensor, Tensor]:
    """Compute the output and the LSE of attention_fwd.

    `settings` has the fields of OnEnd and of Window, the softcap and the scale. Splits, plan and mode may follow; only
    kernels read them.
    """
    lengths, (*bounds, softcap, scale) = settings[:3], settings[3:8]
    window = Window(*bounds)
    check(query, key, value, sinks, window)
    packed = check_lengths(query, lengths)
    query, key, value = _that_count(packed, query, key, value)
    torch._check(
        0.0 <= softcap < math.inf,
        lambda: f"attention_fwd: softcap must be finite, 0 (no softcap) or above, but got {softcap}.",
    )
    visible = _seen(query, key, packed, window)
    s = reference.scores_of(query, key, value, scale).capped(softcap).where(visible)
    probabilities, lse = s.softmax()
    if sinks is not None:
        of_keys, lse = lse, torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
        share = torch.exp(of_keys - lse).masked_fill(of_keys == -math.inf, 0.0)
        probabilities = probabilities * share.unsqueeze(-1)
    out, _ = empty_results(query, key, value)
    return out.copy_(reference.product_of_visible(probabilities, s.value, visible)), lse


def _math_forward_out(out: Tensor, *args: object) -> Tensor:
    result, lse = _math_forward(*args)
    out.copy_(result)
    return lse


def _forward_out_fake(out: Tensor, *args: object) -> Tensor:
    return empty_results(*args)[1]


@mathematics
def _math_backward(*args) -> tuple[Tensor, ...]:
    a = BackwardArgs(*args)
    packed = None if a.cu_q is None else OnEnd(a.cu_q, a.cu_k)
    operands = _that_count(packed, *a.operands)
    s, visible = reference.scores_of(*operands, a.scale).capped(a.softcap), a.seen
    rows = _Rows(a.grad_out, a.out, a.lse, a.grad_lse).of_sequences(packed)
    inputs = reference.BackwardInputs(*rows[:3], grad_lse=rows.grad_lse, softcap=a.softcap)
    grads = reference.gradients(s.where(visible), *operands, inputs, visible)
    return *grads[:3], grads.delta.contiguous() if a.wants_delta else a.lse.new_empty(0)


# ---- autograd ----


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    query, key, value, sinks, cu_q, cu_k, used_k, *settings, plan, plan_key, mode = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, cu_q, cu_k, plan)
    ctx.plan_key, ctx.mode = plan_key, mode
    ctx.settings, ctx.some_keys = settings, used_k is not None
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple:
    query, key, value, sinks, out, lse, cu_q, cu_k, plan = ctx.saved_tensors
    unasked = (None,) * (3 + len(ctx.settings) + 3)
    if ctx.some_keys:
        raise RuntimeError(
            "attention: gradients are not supported with seqused_k. "
            "Call attention() under torch.no_grad(), or pass cu_seqlens_k with the lengths of all visible keys."
        )
    if grad_out is None and grad_lse is None:
        return None, None, None, None, *unasked
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    tensors, of_sinks = (grad_out, grad_lse, query, key, value, out, lse, cu_q, cu_k), ctx.needs_input_grad[3]
    *window, splits, split_size = ctx.settings
    kernels = (splits, split_size, plan, ctx.plan_key, ctx.mode)
    dq, dk, dv, delta = namespace.attention_bwd(*tensors, *window, of_sinks and cu_q is None, *kernels)
    if of_sinks and cu_q is not None:  # kernels store delta by sequence, not by row
        delta, lse = _delta(_Rows(grad_out, out, lse, grad_lse), OnEnd(cu_q, cu_k))
    return dq, dk, dv, _of_sinks(sinks, lse, delta) if of_sinks else None, *unasked


def _delta(rows: _Rows, packed: OnEnd) -> tuple[Tensor, Tensor]:
    """Return delta = rowsum(dO O) - dLSE and the LSE, with 0 and -inf in rows outside of all sequences.

    Rows outside of all sequences may hold NaN. Delta is masked after the sum, because masking dO and O costs more.
    """
    in_sequence = packed.rows_that_count(rows.lse.shape[2])
    delta = (rows.grad_out.to(rows.lse.dtype) * rows.out.to(rows.lse.dtype)).sum(-1)
    if rows.grad_lse is not None:
        delta = delta - rows.grad_lse
    return delta.where(in_sequence, 0.0), rows.lse.where(in_sequence, -math.inf)


def _of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sinks, (Hq,): -exp(sink - LSE) delta, summed over rows."""
    share = torch.exp(sinks.to(lse.dtype).unsqueeze(-1) - lse).masked_fill(lse == -math.inf, 0.0)
    return -(share * delta).sum((0, 2)).to(sinks.dtype)


def _no_lists(query: Tensor, *_: object) -> tuple[Tensor, int]:
    return query.new_empty(0, dtype=torch.int32), 0


def _register() -> None:
    _library.impl("_plan_lists", _no_lists, "CompositeExplicitAutograd")
    for name, math_of, fake in (
        ("attention_fwd", _math_forward, empty_results), ("attention_bwd", _math_backward, _backward_fake)
    ):  # fmt: skip
        of_math = f"_{name.replace('_', '_math_', 1)}"
        for op, key in ((name, "CPU"), (of_math, "CompositeExplicitAutograd")):
            _library.impl(op, math_of, key)
            torch.library.register_fake(f"torch_flashplug::{op}", fake, lib=_library)
    _library.impl("attention_fwd_out", _math_forward_out, "CPU")
    torch.library.register_fake("torch_flashplug::attention_fwd_out", _forward_out_fake, lib=_library)
    forward, backward = "torch_flashplug::attention_fwd", "torch_flashplug::attention_bwd"
    torch.library.register_autograd(forward, _backward, setup_context=_setup_context, lib=_library)
    torch.library.register_autograd(backward, not_twice("attention_bwd"), lib=_library)


_register()
