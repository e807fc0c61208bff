"""Tracing of attention calls by torch.compile and torch.export.

This module owns three parts. First, trace replacement: in a traced graph, the aten pair called by F.sdpa becomes
torch_flashplug::sdpa_fwd and sdpa_bwd, with the mode word as a constant and bool masks as given. Second, the op `force`
(sdpa_backend inside a compiled region). Third, the tag that separates compile caches. No code here selects a backend.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor
from torch._guards import CompileContext
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    _ProxyTensor,
    get_proxy_slot,
    proxy_call,
    set_proxy_slot,
)

from ..dispatch import bindings
from ..ops import sdpa

OVERRIDEABLE = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
OVERRIDEABLE_BACKWARD = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward

POP = -1  # argument of `force` that ends the innermost block

_library = torch.library.Library("torch_flashplug", "FRAGMENT")
_aten = torch.library.Library("aten", "IMPL")
_library.define("force(int mode) -> ()")
_library.define("kept_mask(Tensor mask) -> Tensor")


# ---- force: the mode of the sdpa_backend blocks around the traced call ----


class _Traced(threading.local):
    """sdpa_backend blocks entered by the trace of the current thread.

    A trace that failed inside a block leaves the blocks behind. `owner` identifies the trace of the blocks.
    """

    owner: weakref.ref[CompileContext] | None = None
    blocks: tuple[tuple[int, int], ...] = ()  # (mode word, thread's eager mode word to restore), innermost last


_traced = _Traced()


def _is_current() -> bool:
    context = CompileContext.try_get()
    return context is (_traced.owner() if _traced.owner is not None else None)


def _drop_blocks() -> None:
    if _traced.blocks:
        bindings.set_mode(_traced.blocks[0][1])
    _traced.blocks, _traced.owner = (), None


def _drop_blocks_at_compile_end(*unused) -> None:
    if _traced.owner is not None:
        _drop_blocks()


def _watch_compile_end() -> None:
    # torch._dynamo.reset() clears the list of callbacks, so every push checks the list again. The import is free:
    # Dynamo set the CompileContext and is loaded already.
    from torch._dynamo.callback import callback_handler

    if _drop_blocks_at_compile_end not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_drop_blocks_at_compile_end)


def _force(mode: int) -> None:
    if not _is_current():
        _drop_blocks()
        context = CompileContext.try_get()
        _traced.owner = None if context is None else weakref.ref(context)
    if mode != POP:
        # The C++ dispatch runs during tracing too and must see the same mode, because the C++ dispatch makes the
        # choices "stock" and "math".
        _traced.blocks += ((mode, bindings.set_mode(mode)),)
        if _traced.owner is not None:
            _watch_compile_end()
    elif _traced.blocks:
        bindings.set_mode(_traced.blocks[-1][1])
        _traced.blocks = _traced.blocks[:-1]


def traced_mode() -> int:
    """Return the mode word of the innermost sdpa_backend block of the running trace; 0 (auto) outside a block."""
    return _traced.blocks[-1][0] if _traced.blocks and _is_current() else 0


def _graph_mode() -> int:
    """Return the mode word stored in a graph.

    A graph that may need gradients multiplies in the operands' own 16 bits, because the tracer cannot tell whether
    gradients are needed. A graph without gradients and without a block around the trace uses the precision of the
    thread at run time.
    """
    word = traced_mode()
    precision = word >> bindings.PRECISION_SHIFT
    if torch.is_grad_enabled():
        precision = 0
    elif precision == bindings.PRECISION_OF_PROCESS:
        precision = bindings.PRECISION_AT_RUN
    return word & ((1 << bindings.PRECISION_SHIFT) - 1) | precision << bindings.PRECISION_SHIFT


def mode_of_block() -> int:
    """Return the mode word of the traced sdpa_backend block for the custom ops; 0 outside a block.

    With 0, the ops use the block around the run.
    """
    return _graph_mode() if _traced.blocks and _is_current() else 0


# Same mark as torch.compiler.assume_constant_result sets, without loading Dynamo: Dynamo then runs the function while
# tracing the block.
mode_of_block._dynamo_marked_constant = True


# ---- replacement of the aten ops in traced graphs ----


def _trace_forward(
    mode: ProxyTorchDispatchMode,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple:
    mask = _bool_mask_of(mode, attn_bias)
    if mask is not attn_bias and _may_change(mode, mask):
        with mode:
            mask = sdpa.namespace.kept_mask(mask)
    with mode:
        out, lse, seed, offset = sdpa.namespace.sdpa_fwd(
            query, key, value, mask, dropout_p, int(is_causal), scale, _graph_mode()
        )
    return out, lse, None, None, query.size(2), key.size(2), seed, offset, None


class AtenBackwardArgs(NamedTuple):
    """Positional arguments of OVERRIDEABLE_BACKWARD, in schema order."""

    grad_out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Tensor | None
    grad_input_mask: Sequence[bool]  # query, key, value, attn_bias
    out: Tensor
    lse: Tensor
    cum_seq_q: Tensor | None
    cum_seq_k: Tensor | None
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    seed: Tensor
    offset: Tensor


def _trace_backward(mode: ProxyTorchDispatchMode, *args, scale: float | None = None) -> tuple:
    backward = AtenBackwardArgs(*args)
    forward = _forward_args_of(mode, backward.offset)
    if forward is None:  # compiled autograd of an eager forward: mode in max_q, mask possibly preprocessed
        return proxy_call(mode, OVERRIDEABLE_BACKWARD.default, mode.pre_dispatch, args, {"scale": scale})
    mask = backward.attn_bias
    bias_grad = mask is not None and backward.grad_input_mask[3]
    if not bias_grad and _bool_mask_of(mode, mask) is not mask:
        mask = _tensor_of_node(mode, forward.attn_bias)
    with mode:
        dq, dk, dv, dbias = sdpa.namespace.sdpa_bwd(
            *sdpa.BackwardArgs(
                grad_out=backward.grad_out,
                query=backward.query,
                key=backward.key,
                value=backward.value,
                attn_bias=mask,
                out=backward.out,
                lse=backward.lse,
                seed=backward.seed,
                offset=backward.offset,
                dropout_p=backward.dropout_p,
                causal_mode=int(backward.is_causal),
                scale=scale,
                mode=forward.mode,
                bias_grad=bias_grad,
            )
        )
    return dq, dk, dv, dbias if bias_grad else None


_PASS_THROUGH = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _producer_node(mode: ProxyTorchDispatchMode, tensor: Tensor | None) -> torch.fx.Node | None:
    """Return the node of the traced graph that produced the tensor."""
    slot = None if tensor is None else get_proxy_slot(tensor, mode.tracer, None)
    node = None if slot is None else slot.proxy.node
    while node is not None and node.target in _PASS_THROUGH:
        node = node.args[0]
    return node


def _bool_mask_of(mode: ProxyTorchDispatchMode, bias: Tensor | None) -> Tensor | None:
    """Return the bool mask behind a bias that F.sdpa created by where(mask, 0, -inf); else the bias.

    No other node reads the float bias then, so the graph drops the float bias.
    """
    node = _producer_node(mode, bias)
    if node is None or node.target is not torch.ops.aten.where.self:
        return bias
    mask, shown, hidden = node.args
    mask_value = mask.meta.get("val") if isinstance(mask, torch.fx.Node) else None
    is_bool = isinstance(mask_value, Tensor) and mask_value.dtype == torch.bool
    if not is_bool or not _is_number(shown, 0.0) or not _is_number(hidden, -math.inf):
        return bias
    return _tensor_of_node(mode, mask)


def _tensor_of_node(mode: ProxyTorchDispatchMode, node: torch.fx.Node) -> Tensor:
    """Return a tensor of the graph for the node that produces the tensor."""
    tensor = node.meta["val"].detach()  # a new tensor for the node: the graph keeps none of its own tensors
    set_proxy_slot(tensor, mode.tracer, _ProxyTensor(mode.tracer.proxy(node), None))
    return tensor


def _may_change(mode: ProxyTorchDispatchMode, mask: Tensor) -> bool:
    """Return whether the mask is an input of a graph with gradients, so the caller may write to the mask.

    The write may come between forward and backward. With F.sdpa, the mask has become floats by then, and torch's
    checks cover these floats alone.
    """
    is_input = _producer_node(mode, mask).op == "placeholder"
    return is_input and torch.is_grad_enabled() and not torch.compiler.is_exporting()


def _is_number(node: object, number: float) -> bool:
    is_scalar = isinstance(node, torch.fx.Node) and node.target is torch.ops.aten.scalar_tensor.default
    return is_scalar and node.args[0] == number


def _forward_args_of(mode: ProxyTorchDispatchMode, offset: Tensor | None) -> sdpa.ForwardArgs | None:
    """Return the arguments of the sdpa_fwd node that produced `offset`, such as the mode.

    The backward is traced after the block of the forward has been left. The result is None if the forward is in no
    graph or in a different graph.
    """
    node = _producer_node(mode, offset)
    if node is None or node.op != "call_function" or not node.args or not isinstance(node.args[0], torch.fx.Node):
        return None
    forward = node.args[0]  # node is getitem(forward, 3)
    return sdpa.ForwardArgs(*forward.args) if forward.target is sdpa.namespace.sdpa_fwd.default else None


def _backward_meta(*args, scale: float | None = None) -> tuple:
    backward = AtenBackwardArgs(*args)
    bias = backward.attn_bias
    dbias = torch.empty_like(bias) if bias is not None and backward.grad_input_mask[3] else None
    return *map(torch.empty_like, (backward.query, backward.key, backward.value)), dbias


# ---- compile caches: a graph traced with the plugin must not serve a process without it, nor the reverse ----


class _CacheTag:
    """Parts of torch.compiler.config.cache_key_tag.

    Config values set at run time are per thread from torch 2.12 on. Defaults are for the whole process.
    """

    def __init__(self) -> None:
        entry = getattr(torch.compiler.config, "_config", {}).get("cache_key_tag")
        override = getattr(entry, "user_override", None)
        self._defaults = entry if isinstance(override, ContextVar) else None
        self._override = override if isinstance(override, ContextVar) else None
        self._mark = ""

    def set_process_mark(self, mark: str) -> None:
        """Replace the previous mark by `mark` for every thread; an empty mark removes the previous mark."""
        old, self._mark = self._mark, mark

        def edit(tag: str) -> str:
            return tag.replace(old, "").replace(mark, "") + mark

        if self._defaults is not None:
            for name in ("env_value_default", "default"):
                if isinstance(getattr(self._defaults, name, None), str):
                    setattr(self._defaults, name, edit(getattr(self._defaults, name)))
        tag = torch.compiler.config.cache_key_tag
        if tag != edit(tag):  # the current thread has a tag of its own
            torch.compiler.config.cache_key_tag = edit(tag)

    def push(self, suffix: str) -> object:
        """Append a suffix to the thread's tag and return the argument for pop()."""
        tag = torch.compiler.config.cache_key_tag
        if self._override is not None:
            return self._override.set(tag + suffix)
        torch.compiler.config.cache_key_tag = tag + suffix
        return tag

    def pop(self, pushed: object) -> None:
        if self._override is None:
            torch.compiler.config.cache_key_tag = pushed
            return
        with contextlib.suppress(ValueError):  # left in a different contextvars.Context: nothing to undo
            self._override.reset(pushed)


cache_tag = _CacheTag()


def kept_mask(mask: Tensor) -> Tensor:
    """Return a copy of the mask for the backward; dims that are broadcast are copied once.

    The copy is a custom op, because torch.compile may recompute a plain clone in the backward, from the mask's contents
    at that time.
    """
    broadcast = [isinstance(stride, int) and stride == 0 for stride in mask.stride()]
    stored = mask[tuple(slice(0, 1) if is_broadcast else slice(None) for is_broadcast in broadcast)]
    return stored.clone().expand(mask.shape)


def register() -> None:
    """Register the ops and the trace replacements; startup.load() calls register() once."""
    _library.impl("force", _force, "CompositeImplicitAutograd")
    _library.impl("kept_mask", kept_mask, "CompositeExplicitAutograd")
    for side_effect in (sdpa.namespace.force, sdpa.namespace.force.default):
        torch.fx.node.has_side_effect(side_effect)
    OVERRIDEABLE.default.py_impl(ProxyTorchDispatchMode)(_trace_forward)
    OVERRIDEABLE_BACKWARD.default.py_impl(ProxyTorchDispatchMode)(_trace_backward)
    # torch 2.11 has no meta function for the backward.
    if not torch._C._dispatch_has_kernel_for_dispatch_key(OVERRIDEABLE_BACKWARD.default.name(), "Meta"):
        _aten.impl(OVERRIDEABLE_BACKWARD.default.name(), _backward_meta, "Meta")
