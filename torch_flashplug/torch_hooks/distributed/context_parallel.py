"""Handlers of torch_flashplug for torch's context_parallel.

The handlers are two entries in torch's own handler table. torch passes the table to DTensor each time context
parallelism is switched on. Load balance, rotation and collectives are torch's code. The loop over steps is
ring_attention.py.

All torch names in this file are private. If a name differs from the known one, the file logs one warning and stock
serves the calls.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ...dispatch import bindings
from .. import tracing
from . import allgather_kv, ring_attention

_log = logging.getLogger("torch_flashplug")
_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_SEQUENCE_DIM = 2  # dim of the sequence
_STOCK_OP = torch.ops.aten._scaled_dot_product_flash_attention.default
_FORWARD, _BACKWARD = tracing.OVERRIDEABLE.default, tracing.OVERRIDEABLE_BACKWARD.default
_MODE_WITHOUT_PRECISION = (
    1 << bindings.PRECISION_SHIFT
) - 1  # bits of a mode word below the precision: ring steps use 16 bits
_NAMES = ("query", "key", "value", "attn_bias", "dropout_p", "is_causal")  # arguments of the op
_DEFAULTS = {"attn_bias": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
# Names in torch's module: the parameters of a function, the members of a class.
_NEEDED_NAMES = {
    "_create_rotater": ("pg", "seq_dim", "method"),
    "_cp_options": ("enable_load_balance", "rotate_method", "convert_to_f32"),
    "_RotateMethod": ("ALL_TO_ALL", "ALL_GATHER"),
    "_AllToAllRotater": ("exchange_buffers", "next_buffer"),
    "_AllGatherRotater": ("exchange_buffers", "next_buffer"),
}


def _handlers() -> dict:
    """Return the current table of custom op handlers of DTensor."""
    return sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher._custom_op_handlers


def is_on() -> bool:
    """Return whether context parallelism is on; the caller must have a DTensor."""
    return _STOCK_OP in _handlers()


def first_unknown_name(torch_module: object) -> str | None:
    """Return the first unknown part of torch's module, or None."""
    if not isinstance(getattr(torch_module, "custom_ops", None), dict):
        return "custom_ops is no dict"
    for name, needed_names in _NEEDED_NAMES.items():
        member = getattr(torch_module, name, None)
        names = tuple(inspect.signature(member).parameters) if inspect.isfunction(member) else dir(member)
        if missing := [part for part in needed_names if part not in names]:
            return f"{name} has no {', '.join(missing)}"
    return None


@functools.cache
def fallback_reason() -> str | None:
    """Return the reason for the fallback of rings to stock, or None, and warn once where torch has changed."""
    torch_module = sys.modules.get(_MODULE)
    if torch_module is None:
        return "torch's context_parallel module is unknown, so stock serves the call"
    if (changed := first_unknown_name(torch_module)) is None:
        return None
    _log.warning("context_parallel falls back to stock: in torch %s %s", torch.__version__, changed)
    return f"torch's context_parallel has changed: {changed}"


def register() -> None:
    """Put the handlers into torch's table, and into DTensor's table if context parallelism is on already."""
    if fallback_reason() is not None:
        return
    handlers = {_FORWARD: _forward, _BACKWARD: _backward}
    sys.modules[_MODULE].custom_ops.update(handlers)
    if is_on():
        _handlers().update(handlers)


def _are_sharded_over_rows(*tensors: Tensor) -> bool:
    shard = sys.modules["torch.distributed.tensor"].Shard
    return all(tuple(x.placements) == (shard(_SEQUENCE_DIM),) for x in tensors)


def _local(x: Tensor | None) -> Tensor | None:
    return x._local_tensor if hasattr(x, "_local_tensor") else x


def _wrap(x: Tensor | None, like: Tensor, placements: tuple | None = None) -> Tensor | None:
    if x is None:
        return None
    like_local = like._local_tensor
    if placements is None and (x.shape, x.stride(), x.dtype) == (
        like_local.shape,
        like_local.stride(),
        like_local.dtype,
    ):
        return type(like)(x, like._spec, requires_grad=x.requires_grad)  # from_local costs 0.1 ms of host time
    return type(like).from_local(x, like.device_mesh, placements or like.placements, run_check=False)


def _needs_ring(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if all operands are sharded over rows, False if the part of each rank is a call of its own.

    The parts are calls of their own if the operands have equal placements: replicated, or sharded over batch or heads.

    Raises:
        RuntimeError: the placements of the operands are mixed or unsupported.
    """
    operands = (query, key, value)
    if _are_sharded_over_rows(*operands):
        return True
    have_equal_placements = all(x.placements == query.placements for x in (key, value))
    if have_equal_placements and all(p.is_replicate() or p.is_shard(0) or p.is_shard(1) for p in query.placements):
        return False
    placed = ", ".join(str(list(x.placements)) for x in operands)
    raise RuntimeError(
        "torch_flashplug: all operands in a context_parallel block must have equal placements: [Shard(2)] on a mesh of "
        f"one dim, or only Replicate(), Shard(0) and Shard(1), but got {placed}. For [Shard(2)] on a mesh of several "
        "dims, call .to_local() first."
    )


def _replicated(tensor: Tensor) -> tuple:
    return (sys.modules["torch.distributed.tensor"].Replicate(),) * tensor.device_mesh.ndim


_METHODS = {
    "ring": (ring_attention.namespace.ring_fwd, ring_attention.namespace.ring_bwd),
    "gather": (allgather_kv.namespace.gathered_fwd, allgather_kv.namespace.gathered_bwd),
}
_method = "ring"


def use(method: str) -> None:
    """Select how keys and values reach the rows of all ranks in context_parallel.

    "ring", the default, passes keys and values on step by step. "gather" collects keys and values of all ranks at once
    (allgather_kv.py). The selection applies to all later calls served by torch_flashplug, except calls of graphs
    compiled before. The two methods exchange different tensors, so all ranks must select the same method, also before a
    backward. With "gather", no rank may leave calls to stock.

    Args:
        method: "ring" or "gather".

    Raises:
        ValueError: method is neither "ring" nor "gather".
    """
    global _method  # noqa: PLW0603  (an option of the process, as torch's own options)
    if method not in _METHODS:
        raise ValueError(f"use: method must be one of {', '.join(_METHODS)}, but got {method!r}.")
    _method = method


def _is_traced(x: Tensor) -> bool:
    return isinstance(x, (FakeTensor, FunctionalTensor))


def _mode_of(x: Tensor) -> int:
    """Return the mode word of the sdpa_backend block around a forward or a trace.

    A backend of the process results in 0, because each step reads that backend.
    """
    mode = tracing.traced_mode() if _is_traced(x) else bindings.effective_mode()
    return 0 if bindings.is_preference(mode) else mode & _MODE_WITHOUT_PRECISION


def _settings(
    query: Tensor, is_causal: bool, scale: float | None, mode: int, balanced: bool
) -> ring_attention.Settings:
    """Return the settings of a ring.

    torch's options belong to the process. The rows of a rank do not change after a forward.
    """
    options, group = sys.modules[_MODULE]._cp_options, query.device_mesh.get_group()
    how = (options.rotate_method.name, balanced, options.convert_to_f32)
    return ring_attention.Settings(group.group_name, *how, bool(is_causal), scale, mode)


def _forward(op: object, args: tuple, kwargs: dict) -> tuple:
    named_args = _DEFAULTS | dict(zip(_NAMES, args)) | kwargs
    query, key, value, bias, dropout_p, is_causal = (named_args[name] for name in _NAMES)
    scale, local = named_args["scale"], tuple(map(_local, (query, key, value)))
    if not _needs_ring(query, key, value):
        op_args = (*local, _local(bias), dropout_p, is_causal, False)
        out, lse, _, _, max_q, max_k, *seeds, _ = _FORWARD(*op_args, scale=scale)
    elif bias is not None or dropout_p:
        raise NotImplementedError("torch_flashplug: context_parallel supports neither attn_mask nor dropout.")
    else:
        # The backward reads the mode and the load balance of the forward from max_q and max_k.
        max_q, max_k = _mode_of(local[0]), int(sys.modules[_MODULE]._cp_options.enable_load_balance)
        out, lse = _METHODS[_method][0](*local, *_settings(query, is_causal, scale, max_q, bool(max_k)))
        # No dropout seed is drawn, but a graph needs tensors as results.
        seeds = [out.new_empty(0, dtype=torch.int64) if _is_traced(out) else None for _ in range(2)]
    return (
        _wrap(out, query),
        _wrap(lse, query),
        None,
        None,
        max_q,
        max_k,
        *(_wrap(x, query, _replicated(query)) for x in seeds),
        None,
    )


def _backward(op: object, args: tuple, kwargs: dict) -> tuple:
    grad, query, key, value, bias, grad_input_mask, out, lse, _, _, max_q, max_k, dropout_p, is_causal, *seeds = args
    scale = kwargs.get("scale")
    if grad.placements != query.placements:
        grad = grad.redistribute(query.device_mesh, query.placements)
    local = tuple(map(_local, (grad, query, key, value)))
    forward_results = tuple(map(_local, (out, lse)))
    if _needs_ring(query, key, value):
        grads = _METHODS[_method][1](*local, *forward_results, *_settings(query, is_causal, scale, max_q, bool(max_k)))
        return (*(_wrap(x, query) for x in grads), None)
    op_args = (
        *local,
        _local(bias),
        grad_input_mask,
        *forward_results,
        None,
        None,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        *map(_local, seeds),
    )
    return tuple(_wrap(x, query) for x in _BACKWARD(*op_args, scale=scale))
