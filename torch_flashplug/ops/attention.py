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

Packed sequences are one batch (1, H, T, D). Rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] belong to sequence i, and so do
keys cu_seqlens_k[i] to cu_seqlens_k[i + 1]. If `seqused_k` is not None, only the first seqused_k[i] keys are visible,
and there are no gradients. Rows and keys outside of all sequences lie before the first sequence or after the last
sequence. The contents there are never read, neither in operands nor in the inputs of the backward.
"""

from __future__ import annotations

import math
from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor

from ..dispatch import bindings
from . import reference
from .sdpa import empty_results, mathematics, not_twice

NO_PLAN = (None, 0)  # plan and plan_key
NO_LENGTHS = (None, None, None)  # cu_seqlens_q, cu_seqlens_k and seqused_k

namespace = torch.ops.torch_flashplug


class Window(NamedTuple):
    """Sliding window: numbers of visible keys before and after a query's own key. -1 stands for no bound."""

    left: int = -1
    right: int = -1
    bottom_right: bool = True

    @property
    def is_bounded(self) -> bool:
        return (self.left, self.right) != (-1, -1)

    def to_mask(self, Sq: int, Sk: int, device: torch.device) -> Tensor:
        """Return the window as a bool mask (Sq, Sk), True for visible keys."""
        own_key = torch.arange(Sq, device=device).unsqueeze(1) + (Sk - Sq if self.bottom_right else 0)
        distance = torch.arange(Sk, device=device) - own_key
        return self.inside(distance, Sq + Sk)

    def inside(self, distance: Tensor, all_keys: int) -> Tensor:
        """Return a bool tensor, True for visible keys. `distance` is the offset from a query's own key to a key."""
        left, right = (bound if bound >= 0 else all_keys for bound in (self.left, self.right))
        return (distance >= -left) & (distance <= right)

    def to_varlen_mask(self, packed: PackedLengths, rows: int, keys: int) -> Tensor:
        """Return the window within packed sequences as a bool mask (rows, keys)."""
        cu_seqlens_q, cu_seqlens_k, _ = packed
        (of_row, row), (of_key, key) = (_places(cu, size) for cu, size in ((cu_seqlens_q, rows), (cu_seqlens_k, keys)))
        if len(cu_seqlens_q) == 1:
            return torch.zeros(rows, keys, dtype=torch.bool, device=cu_seqlens_q.device)
        if self.bottom_right:
            row = row + (packed.used - cu_seqlens_q.diff())[of_row.clamp(max=len(cu_seqlens_q) - 2)]
        same = (of_row.unsqueeze(1) == of_key) & packed.visible_keys(keys)
        return same & self.inside(key - row.unsqueeze(1), rows + keys)


class PackedLengths(NamedTuple):
    """Cumulative lengths of packed sequences, and the KV lengths."""

    cu_seqlens_q: Tensor  # (sequences + 1,) int32
    cu_seqlens_k: Tensor
    seqused_k: Tensor | None = None  # (sequences,) int32

    @property
    def used(self) -> Tensor:
        return (
            self.cu_seqlens_k.diff()
            if self.seqused_k is None
            else torch.minimum(self.cu_seqlens_k.diff(), self.seqused_k)
        )

    def rows_in_sequences(self, rows: int) -> Tensor:
        """Return (rows,) bool, True for rows of a sequence. Reads no value on the host."""
        number = torch.arange(rows, device=self.cu_seqlens_q.device)
        return (self.cu_seqlens_q[0] <= number) & (number < self.cu_seqlens_q[-1])

    def visible_keys(self, keys: int) -> Tensor:
        sequence, key = _places(self.cu_seqlens_k, keys)
        used = torch.cat((self.used, self.used.new_zeros(1)))  # 0 keys for the rows outside of all sequences
        return (sequence < len(self.cu_seqlens_k) - 1) & (key < used[sequence])


def _places(cu: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the sequence of each row, and the position of the row in the sequence.

    A row outside of all sequences gets the number of sequences as sequence index.
    """
    number, starts = torch.arange(size, device=cu.device), cu.long()
    sequence = torch.searchsorted(starts[1:].contiguous(), number, right=True)
    sequence = torch.where(number < starts[0], len(cu) - 1, sequence)
    return sequence, number - starts[sequence]


class AttentionParams(NamedTuple):
    """Checked settings of attention() in schema order: the arguments of ops that are no tensors.

    The schemas and the arguments of ops are made of these fields, so a new setting is a line here. `kSettings` in
    src/core/call_facts.h is the list for C++, and test_custom_ops compares the schemas of both lists.
    """

    left: int = -1
    right: int = -1
    bottom_right: bool = True
    softcap: float = 0.0  # 0.0: no softcap
    scale: float | None = None  # None: 1 / sqrt(D)
    # num_splits=1 and any fixed_split_size select batch-invariant kernels (`CallFacts::batch_invariant` in
    # src/core/call_facts.h). Other values have an effect in decode kernels only.
    num_splits: int = 0  # 0: the fastest number
    fixed_split_size: int = 0  # keys of a split; 0: no fixed size

    @property
    def window(self) -> Window:
        return Window(*self[:3])

    @property
    def requests_splits(self) -> bool:
        return self.num_splits != 0 or self.fixed_split_size != 0


NUM_PARAMS = len(AttentionParams._fields)
# Settings from num_splits on have a default in schemas, as a setting that is added later must have.
_NUM_REQUIRED = AttentionParams._fields.index("num_splits")


def _declare_params() -> tuple[list[str], list[str]]:
    """Return the declaration of each setting in schemas, without and with the default."""
    schema_types = {int: "int", bool: "bool", float: "float", float | None: "float?"}
    types, defaults = get_type_hints(AttentionParams), AttentionParams._field_defaults
    plain = {name: f"{schema_types[types[name]]} {name}" for name in AttentionParams._fields}
    return list(plain.values()), [f"{text}={defaults[name]}" for name, text in plain.items()]


_PLAIN, _WITH_DEFAULTS = _declare_params()
REQUIRED_PARAMS = ", ".join(_PLAIN[:_NUM_REQUIRED])  # int left, int right, ...
OPTIONAL_PARAMS = ", ".join(_WITH_DEFAULTS[_NUM_REQUIRED:])  # int num_splits=0, ...
_ALL_PARAMS = ", ".join(_PLAIN)
# Arguments for kernels, unused by the reference math: the plan of varlen_plan.py, and the result of
# tracing.mode_of_block().
_KERNELS = ", Tensor? plan=None, SymInt plan_key=0, int block_mode=0"
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library("torch_flashplug", "FRAGMENT")
_FORWARD = (
    "Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    f"Tensor? seqused_k, {REQUIRED_PARAMS}, {OPTIONAL_PARAMS}"
)
_library.define(f"attention_fwd({_FORWARD}{_KERNELS}) -> (Tensor out, Tensor lse)", tags=_TAGS)
_library.define(f"_attention_math_fwd({_FORWARD}) -> (Tensor out, Tensor lse)", tags=_TAGS)
_library.define(f"attention_fwd_out(Tensor(a!) out, {_FORWARD}{_KERNELS}) -> Tensor lse", tags=_TAGS)
_library.define(
    "_plan_lists(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    f"Tensor? seqused_k, {_ALL_PARAMS}, bool gradients) -> (Tensor lists, int key)"
)
for _name, _more in (("attention_bwd", _KERNELS), ("_attention_math_bwd", "")):
    _library.define(
        f"{_name}(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
        f"Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, {REQUIRED_PARAMS}, bool wants_delta, {OPTIONAL_PARAMS}{_more}) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor delta)",
        tags=_TAGS,
    )


class AttentionForwardArgs(NamedTuple):
    """Arguments of attention_fwd, in schema order, with the settings as one field."""

    query: Tensor  # (B, Hq, Sq, D)
    key: Tensor  # (B, Hkv, Sk, D)
    value: Tensor  # (B, Hkv, Sk, Dv)
    sinks: Tensor | None  # (Hq,)
    cu_seqlens_q: Tensor | None  # (sequences + 1,) int32
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None  # (sequences,) int32
    params: AttentionParams
    plan: Tensor | None = None
    plan_key: int = 0
    block_mode: int = 0

    @classmethod
    def from_op(cls, *args: Tensor | int | float | None) -> AttentionForwardArgs:
        """Return the arguments of a call of the op, which may lack defaults at the end."""
        tensors, end = 7, 7 + NUM_PARAMS
        return cls(*args[:tensors], AttentionParams(*args[tensors:end]), *args[end:])

    def to_op(self) -> tuple[Tensor | int | float | None, ...]:
        """Return the arguments of the op, by position."""
        return *self[:7], *self.params, self.plan, self.plan_key, self.block_mode


class BackwardArgs(NamedTuple):
    """Arguments of attention_bwd, with the settings as one field."""

    grad_out: Tensor  # (B, Hq, Sq, Dv)
    grad_lse: Tensor | None  # (B, Hq, Sq)
    query: Tensor  # (B, Hq, Sq, D)
    key: Tensor  # (B, Hkv, Sk, D)
    value: Tensor  # (B, Hkv, Sk, Dv)
    out: Tensor  # (B, Hq, Sq, Dv)
    lse: Tensor  # (B, Hq, Sq) fp32 (fp64 for fp64), natural log
    cu_seqlens_q: Tensor | None  # (sequences + 1,) int32
    cu_seqlens_k: Tensor | None
    params: AttentionParams
    wants_delta: bool
    plan: Tensor | None = None  # the plan passed to the forward
    plan_key: int = 0
    mode: int = 0  # the mode passed to the forward

    @classmethod
    def from_op(cls, *args: Tensor | int | float | None) -> BackwardArgs:
        """Return the arguments of a call of the op, which may lack defaults at the end.

        The op has `wants_delta` between the settings without a default and those with a default.
        """
        tensors, delta, end = 9, 9 + _NUM_REQUIRED, 10 + NUM_PARAMS
        params = AttentionParams(*args[tensors:delta], *args[delta + 1 : end])
        return cls(*args[:tensors], params, args[delta], *args[end:])

    def to_op(self) -> tuple[Tensor | int | float | None, ...]:
        """Return the arguments of the op, by position."""
        required, optional = self.params[:_NUM_REQUIRED], self.params[_NUM_REQUIRED:]
        return *self[:9], *required, self.wants_delta, *optional, self.plan, self.plan_key, self.mode

    @property
    def visible(self) -> Tensor:
        packed = None if self.cu_seqlens_q is None else PackedLengths(self.cu_seqlens_q, self.cu_seqlens_k)
        return _visible_mask(self.query, self.key, packed, self.params.window)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


# ---- shapes ----


def _backward_fake(*args) -> tuple[Tensor, ...]:
    a = BackwardArgs.from_op(*args)
    return (*map(torch.empty_like, a.operands), a.lse.new_empty(a.lse.shape if a.wants_delta else (0,)))


# ---- reference math ----


def _visible_mask(query: Tensor, key: Tensor, packed: PackedLengths | None, window: Window) -> Tensor:
    """Return the bool mask (Sq, Sk) of a window, within packed sequences if `packed` is not None."""
    if packed is None:
        return window.to_mask(query.shape[2], key.shape[2], query.device)
    return window.to_varlen_mask(packed, query.shape[2], key.shape[2])


def _zero_outside_sequences(packed: PackedLengths | None, rows: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
    """Return rows and keys with zeros outside of all sequences.

    The contents there may be NaN or infinite, and matrix products would spread such values.
    """
    if packed is None:
        return rows, *keys
    in_sequence = packed.rows_in_sequences(rows.shape[2]).unsqueeze(-1)
    is_visible = packed.visible_keys(keys[0].shape[2]).unsqueeze(-1)
    return rows.where(in_sequence, 0.0), *(x.where(is_visible, 0.0) for x in keys)


class _Rows(NamedTuple):
    """Inputs of a backward for each query row, except the query."""

    grad_out: Tensor  # (B, Hq, Sq, Dv)
    out: Tensor  # (B, Hq, Sq, Dv)
    lse: Tensor  # (B, Hq, Sq)
    grad_lse: Tensor | None  # (B, Hq, Sq)

    def of_sequences(self, packed: PackedLengths | None) -> _Rows:
        """Return the inputs with neutral values in rows outside of all sequences.

        The contents of such rows may be NaN or infinite. An LSE of -inf stands for a row without probabilities, in
        which the sink has no share either.
        """
        if packed is None:
            return self
        in_sequence = packed.rows_in_sequences(self.lse.shape[2])
        grad_out, out = (x.where(in_sequence.unsqueeze(-1), 0.0) for x in self[:2])
        grad_lse = None if self.grad_lse is None else self.grad_lse.where(in_sequence, 0.0)
        return _Rows(grad_out, out, self.lse.where(in_sequence, -math.inf), grad_lse)


def check_lengths(a: AttentionForwardArgs) -> PackedLengths | None:
    """Check the lengths of packed sequences, as far as the host knows, and return them; None for a dense batch."""
    lengths = (a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_k)
    if all(x is None for x in lengths):
        return None
    has_starts = a.cu_seqlens_q is not None and a.cu_seqlens_k is not None
    is_int32 = all(x.dim() == 1 and x.dtype == torch.int32 for x in lengths if x is not None)
    torch._check(
        has_starts and is_int32 and len(a.cu_seqlens_q) == len(a.cu_seqlens_k) > 0 and a.query.shape[0] == 1
        and (a.seqused_k is None or len(a.seqused_k) == len(a.cu_seqlens_q) - 1),
        lambda: "attention_fwd: packed sequences must be one batch, with cu_seqlens_q and cu_seqlens_k of shape "
        "(sequences + 1,) and seqused_k of shape (sequences,), all int32.",
    )  # fmt: skip
    return PackedLengths(*lengths)


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
def _math_forward(*args: Tensor | int | float | None) -> tuple[Tensor, Tensor]:
    """Compute the output and the LSE of attention_fwd. Only kernels read the splits, the plan and the mode."""
    a = AttentionForwardArgs.from_op(*args)
    softcap, window = a.params.softcap, a.params.window
    check(a.query, a.key, a.value, a.sinks, window)
    packed = check_lengths(a)
    query, key, value = _zero_outside_sequences(packed, a.query, a.key, a.value)
    torch._check(
        0.0 <= softcap < math.inf,
        lambda: f"attention_fwd: softcap must be finite, 0 (no softcap) or above, but got {softcap}.",
    )
    visible = _visible_mask(query, key, packed, window)
    s = reference.scores_of(query, key, value, a.params.scale).capped(softcap).where(visible)
    probabilities, lse = s.softmax()
    if a.sinks is not None:
        of_keys, lse = lse, torch.logaddexp(lse, a.sinks.to(lse.dtype).unsqueeze(-1))
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
    a = BackwardArgs.from_op(*args)
    packed = None if a.cu_seqlens_q is None else PackedLengths(a.cu_seqlens_q, a.cu_seqlens_k)
    operands = _zero_outside_sequences(packed, *a.operands)
    softcap, visible = a.params.softcap, a.visible
    s = reference.scores_of(*operands, a.params.scale).capped(softcap)
    rows = _Rows(a.grad_out, a.out, a.lse, a.grad_lse).of_sequences(packed)
    inputs = reference.BackwardInputs(*rows[:3], grad_lse=rows.grad_lse, softcap=softcap)
    grads = reference.gradients(s.where(visible), *operands, inputs, visible)
    return *grads[:3], grads.delta.contiguous() if a.wants_delta else a.lse.new_empty(0)


# ---- autograd ----


_NUM_INPUTS = len(AttentionForwardArgs._fields) - 1 + NUM_PARAMS  # of attention_fwd; only the first 4 have gradients


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    a = AttentionForwardArgs.from_op(*inputs)
    ctx.save_for_backward(a.query, a.key, a.value, a.sinks, *output, a.cu_seqlens_q, a.cu_seqlens_k, a.plan)
    ctx.params, ctx.plan_key, ctx.mode = a.params, a.plan_key, a.block_mode
    ctx.has_seqused_k = a.seqused_k is not None
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple:
    query, key, value, sinks, out, lse, cu_seqlens_q, cu_seqlens_k, plan = ctx.saved_tensors
    no_grads = (None,) * (_NUM_INPUTS - 4)
    if ctx.has_seqused_k:
        raise RuntimeError(
            "attention: gradients are not supported with seqused_k. "
            "Call attention() under torch.no_grad(), or pass cu_seqlens_k with the lengths of all visible keys."
        )
    if grad_out is None and grad_lse is None:
        return None, None, None, None, *no_grads
    grad_out, of_sinks = torch.zeros_like(out) if grad_out is None else grad_out, ctx.needs_input_grad[3]
    args = BackwardArgs(
        grad_out=grad_out, grad_lse=grad_lse, query=query, key=key, value=value, out=out, lse=lse,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, params=ctx.params,
        wants_delta=of_sinks and cu_seqlens_q is None, plan=plan, plan_key=ctx.plan_key, mode=ctx.mode,
    )  # fmt: skip
    dq, dk, dv, delta = namespace.attention_bwd(*args.to_op())
    if of_sinks and cu_seqlens_q is not None:  # kernels store delta by sequence, not by row
        delta, lse = _delta(_Rows(grad_out, out, lse, grad_lse), PackedLengths(cu_seqlens_q, cu_seqlens_k))
    return dq, dk, dv, _of_sinks(sinks, lse, delta) if of_sinks else None, *no_grads


def _delta(rows: _Rows, packed: PackedLengths) -> tuple[Tensor, Tensor]:
    """Return delta = rowsum(dO O) - dLSE and the LSE, with 0 and -inf in rows outside of all sequences.

    Rows outside of all sequences may hold NaN. Delta is masked after the sum, because masking dO and O costs more.
    """
    in_sequence = packed.rows_in_sequences(rows.lse.shape[2])
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
