"""The ops torch_flashplug::attention_fwd and attention_bwd: attention in a window, of sequences of different lengths on
end, with sinks and an LSE that has gradients. Schema, fake, autograd, and their mathematics on any device
(_attention_math_fwd and _bwd, whose memory is O(Sq * Sk)); kernels are called in src/ops/attention_ops.cpp.

Scores are softcap * tanh(score / softcap) where that is not 0 (Gemma 2, arXiv 2408.00118), ahead of what hides some.
Query i sees the keys from i + diagonal - left to i + diagonal + right; a bound of -1 is none. The diagonal is Sk - Sq
to the bottom right, else 0. A sink is a logit of a head that each of its rows' sums has beside those of keys, and that
brings no value (Xiao et al., arXiv 2309.17453; gpt-oss): it is part of the LSE. With p = exp(sink - LSE) its gradient
is -p delta, summed over rows, where delta = rowsum(dO O) - dLSE.

Packed sequences are one batch, (1, H, T, D): rows cu_q[i] to cu_q[i + 1] are those of sequence i, keys likewise, of
which only the first used_k[i] count where that is given (no gradients then). Rows and keys of no sequence lie ahead of
the first one or behind the last one. Nothing that they hold is read, neither in operands nor in what a backward gets.
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
# 1 and any size: kernels by kind, see Problem of src/core/call_facts.h; else only ones of few rows look at them.
SPLITS = "int num_splits=0, int fixed_split_size=0"
# For kernels, not for mathematics: of varlen_plan.py, and tracing.mode_of_block().
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
    left: int = -1
    right: int = -1
    bottom_right: bool = True

    def seen(self, Sq: int, Sk: int, device: torch.device) -> Tensor:
        """(Sq, Sk) bool."""
        own = torch.arange(Sq, device=device).unsqueeze(1) + (Sk - Sq if self.bottom_right else 0)
        behind = torch.arange(Sk, device=device) - own
        return self.inside(behind, Sq + Sk)

    def inside(self, behind: Tensor, all_keys: int) -> Tensor:
        """behind: how far keys are behind a query's own."""
        left, right = (bound if bound >= 0 else all_keys for bound in (self.left, self.right))
        return (behind >= -left) & (behind <= right)

    def seen_on_end(self, on_end: OnEnd, rows: int, keys: int) -> Tensor:
        """(rows, keys) bool, of sequences on end."""
        cu_q, cu_k, _ = on_end
        (of_row, row), (of_key, key) = (_places(cu, size) for cu, size in ((cu_q, rows), (cu_k, keys)))
        if len(cu_q) == 1:
            return torch.zeros(rows, keys, dtype=torch.bool, device=cu_q.device)
        if self.bottom_right:
            row = row + (on_end.used - cu_q.diff())[of_row.clamp(max=len(cu_q) - 2)]
        same = (of_row.unsqueeze(1) == of_key) & on_end.keys_that_count(keys)
        return same & self.inside(key - row.unsqueeze(1), rows + keys)


class OnEnd(NamedTuple):
    """Where the packed sequences of a batch begin and end."""

    cu_q: Tensor  # (sequences + 1,) int32
    cu_k: Tensor
    used_k: Tensor | None = None  # (sequences,) int32

    @property
    def used(self) -> Tensor:
        return self.cu_k.diff() if self.used_k is None else torch.minimum(self.cu_k.diff(), self.used_k)

    def rows_that_count(self, rows: int) -> Tensor:
        """Return (rows,) bool: which rows belong to a sequence. Reads no value on the host."""
        number = torch.arange(rows, device=self.cu_q.device)
        return (self.cu_q[0] <= number) & (number < self.cu_q[-1])

    def keys_that_count(self, keys: int) -> Tensor:
        sequence, key = _places(self.cu_k, keys)
        used = torch.cat((self.used, self.used.new_zeros(1)))  # of those of none
        return (sequence < len(self.cu_k) - 1) & (key < used[sequence])


def _places(cu: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Of each row the number of its sequence, of those of none as many as there are; and its number there."""
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
    plan: Tensor | None = None  # as of the forward
    plan_key: int = 0
    mode: int = 0  # likewise

    @property
    def seen(self) -> Tensor:
        on_end = None if self.cu_q is None else OnEnd(self.cu_q, self.cu_k)
        return _seen(self.query, self.key, on_end, Window(self.left, self.right, self.bottom_right))

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


# ---- shapes ----


def _backward_fake(*args) -> tuple[Tensor, ...]:
    a = BackwardArgs(*args)
    return (*map(torch.empty_like, a.operands), a.lse.new_empty(a.lse.shape if a.wants_delta else (0,)))


# ---- mathematics ----


def _seen(query: Tensor, key: Tensor, on_end: OnEnd | None, window: Window) -> Tensor:
    """(Sq, Sk) bool."""
    if on_end is None:
        return window.seen(query.shape[2], key.shape[2], query.device)
    return window.seen_on_end(on_end, query.shape[2], key.shape[2])


def _that_count(on_end: OnEnd | None, rows: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
    """Return rows and keys with zeros where they belong to no sequence.

    There they may be NaN or infinite, and matrix products would spread that.
    """
    if on_end is None:
        return rows, *keys
    mine = on_end.rows_that_count(rows.shape[2]).unsqueeze(-1)
    met = on_end.keys_that_count(keys[0].shape[2]).unsqueeze(-1)
    return rows.where(mine, 0.0), *(x.where(met, 0.0) for x in keys)


class _Rows(NamedTuple):
    """What a backward reads of each query row beside the query itself."""

    grad_out: Tensor  # (B, Hq, Sq, Dv)
    out: Tensor  # likewise
    lse: Tensor  # (B, Hq, Sq)
    grad_lse: Tensor | None  # likewise

    def of_sequences(self, on_end: OnEnd | None) -> _Rows:
        """Return these with neutral values where rows belong to no sequence.

        There all of them may be NaN or infinite. An LSE of -inf stands for a row without probabilities, whose sink
        has no share either.
        """
        if on_end is None:
            return self
        mine = on_end.rows_that_count(self.lse.shape[2])
        grad_out, out = (x.where(mine.unsqueeze(-1), 0.0) for x in self[:2])
        grad_lse = None if self.grad_lse is None else self.grad_lse.where(mine, 0.0)
        return _Rows(grad_out, out, self.lse.where(mine, -math.inf), grad_lse)


def check_lengths(query: Tensor, given: tuple[Tensor | None, Tensor | None, Tensor | None]) -> OnEnd | None:
    """Of what the host knows."""
    if all(x is None for x in given):
        return None
    cu_q, cu_k, used_k = given
    numbers = [x for x in given if x is not None]
    torch._check(
        cu_q is not None and cu_k is not None and all(x.dim() == 1 and x.dtype == torch.int32 for x in numbers)
        and len(cu_q) == len(cu_k) > 0 and (used_k is None or len(used_k) == len(cu_q) - 1) and query.shape[0] == 1,
        lambda: "sequences on end are one batch, with cu_q and cu_k (sequences + 1,), used_k (sequences,), of int32",
    )  # fmt: skip
    return OnEnd(*given)


def check(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: Window) -> None:
    """RuntimeError where the ops have no meaning. Reads sizes: for real tensors only."""
    shapes = tuple(tuple(x.shape) for x in (query, key, value))
    torch._check(
        all(len(shape) == 4 for shape in shapes) and bindings.shapes_fit(shapes, enable_gqa=True),
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


@mathematics
def _math_forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *more: Tensor | int | float | None
) -> tuple[Tensor, Tensor]:
    """more: of OnEnd, of Window, the softcap and the scale; splits, a plan and a mode, which are kernels'."""
    lengths, (*bounds, softcap, scale) = more[:3], more[3:8]
    window = Window(*bounds)
    check(query, key, value, sinks, window)
    on_end = check_lengths(query, lengths)
    query, key, value = _that_count(on_end, query, key, value)
    torch._check(0.0 <= softcap < math.inf, lambda: f"softcap is {softcap}; give a cap, or 0 for none")
    seen = _seen(query, key, on_end, window)
    s = reference.scores_of(query, key, value, scale).capped(softcap).where(seen)
    probabilities, lse = s.softmax()
    if sinks is not None:
        of_keys, lse = lse, torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
        share = torch.exp(of_keys - lse).masked_fill(of_keys == -math.inf, 0.0)
        probabilities = probabilities * share.unsqueeze(-1)
    out, _ = empty_results(query, key, value)
    return out.copy_(reference.product_of_seen(probabilities, s.value, seen)), lse


def _math_forward_out(out: Tensor, *given: object) -> Tensor:
    found, lse = _math_forward(*given)
    out.copy_(found)
    return lse


def _forward_out_fake(out: Tensor, *given: object) -> Tensor:
    return empty_results(*given)[1]


@mathematics
def _math_backward(*args) -> tuple[Tensor, ...]:
    a = BackwardArgs(*args)
    on_end = None if a.cu_q is None else OnEnd(a.cu_q, a.cu_k)
    operands = _that_count(on_end, *a.operands)
    s, seen = reference.scores_of(*operands, a.scale).capped(a.softcap), a.seen
    rows = _Rows(a.grad_out, a.out, a.lse, a.grad_lse).of_sequences(on_end)
    known = reference.Known(*rows[:3], grad_lse=rows.grad_lse, softcap=a.softcap)
    found = reference.gradients(s.where(seen), *operands, known, seen)
    return *found[:3], found.delta.contiguous() if a.wants_delta else a.lse.new_empty(0)


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
            "attention with seqused_k has no gradient; call it under torch.no_grad(), or give lengths that all count"
        )
    if grad_out is None and grad_lse is None:
        return None, None, None, None, *unasked
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    tensors, of_sinks = (grad_out, grad_lse, query, key, value, out, lse, cu_q, cu_k), ctx.needs_input_grad[3]
    *window, splits, split_size = ctx.settings
    kernels = (splits, split_size, plan, ctx.plan_key, ctx.mode)
    dq, dk, dv, delta = namespace.attention_bwd(*tensors, *window, of_sinks and cu_q is None, *kernels)
    if of_sinks and cu_q is not None:  # kernels leave delta by sequences, not by rows
        delta, lse = _delta(_Rows(grad_out, out, lse, grad_lse), OnEnd(cu_q, cu_k))
    return dq, dk, dv, _of_sinks(sinks, lse, delta) if of_sinks else None, *unasked


def _delta(rows: _Rows, on_end: OnEnd) -> tuple[Tensor, Tensor]:
    """Return delta = rowsum(dO O) - dLSE and the LSE, 0 and -inf where rows belong to no sequence.

    Delta is masked after the sum, which costs less than to mask dO and O. Such rows may hold NaN.
    """
    mine = on_end.rows_that_count(rows.lse.shape[2])
    delta = (rows.grad_out.to(rows.lse.dtype) * rows.out.to(rows.lse.dtype)).sum(-1)
    if rows.grad_lse is not None:
        delta = delta - rows.grad_lse
    return delta.where(mine, 0.0), rows.lse.where(mine, -math.inf)


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
