"""torch's context_parallel on kernels of ours: two entries in torch's own table of handlers, which it gives to DTensor
each time context parallelism is switched on. Load balance, rotation and collectives are torch's; the loop is
ring_attention.py's.

All of torch's that is named here is private: where it is not what we know, one warning, and stock serves the calls.
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
_SEQ = 2  # dim of the rows
_STOCKS = torch.ops.aten._scaled_dot_product_flash_attention.default
_FORWARD, _BACKWARD = tracing.OVERRIDEABLE.default, tracing.OVERRIDEABLE_BACKWARD.default
_WORD = (1 << bindings.PRECISION_SHIFT) - 1  # of a mode: all but its precision, since steps are of 16 bits
_NAMES = ("query", "key", "value", "attn_bias", "dropout_p", "is_causal")  # of the op, and what they are if not given
_DEFAULTS = {"attn_bias": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
# Names of torch's: parameters of a function, members of others.
_KNOWN = {
    "_create_rotater": ("pg", "seq_dim", "method"),
    "_cp_options": ("enable_load_balance", "rotate_method", "convert_to_f32"),
    "_RotateMethod": ("ALL_TO_ALL", "ALL_GATHER"),
    "_AllToAllRotater": ("exchange_buffers", "next_buffer"),
    "_AllGatherRotater": ("exchange_buffers", "next_buffer"),
}


def _handlers() -> dict:
    """Those of DTensor, as they are now."""
    return sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher._custom_op_handlers


def is_on() -> bool:
    """Whether context parallelism is. Asked where a DTensor is there."""
    return _STOCKS in _handlers()


def unknown(torchs: object) -> str | None:
    """What of torch's module is not as we know it; None: nothing."""
    if not isinstance(getattr(torchs, "custom_ops", None), dict):
        return "custom_ops is no dict"
    for name, wanted in _KNOWN.items():
        found = getattr(torchs, name, None)
        has = tuple(inspect.signature(found).parameters) if inspect.isfunction(found) else dir(found)
        if lacking := [part for part in wanted if part not in has]:
            return f"{name} has no {', '.join(lacking)}"
    return None


@functools.cache
def why_not() -> str | None:
    """Why rings are stock's; None: they may be ours. One warning where torch has changed."""
    torchs = sys.modules.get(_MODULE)
    if torchs is None:
        return "this torch's context_parallel is unknown; stock serves it"
    if (changed := unknown(torchs)) is None:
        return None
    _log.warning("context_parallel stays stock: in torch %s %s", torch.__version__, changed)
    return f"torch's context_parallel has changed: {changed}"


def register() -> None:
    """Into torch's table, and into DTensor's where context parallelism is on already."""
    if why_not() is not None:
        return
    ours = {_FORWARD: _forward, _BACKWARD: _backward}
    sys.modules[_MODULE].custom_ops.update(ours)
    if is_on():
        _handlers().update(ours)


def _on_rows(*tensors: Tensor) -> bool:
    shard = sys.modules["torch.distributed.tensor"].Shard
    return all(tuple(x.placements) == (shard(_SEQ),) for x in tensors)


def _local(x: Tensor | None) -> Tensor | None:
    return x._local_tensor if hasattr(x, "_local_tensor") else x


def _wrap(x: Tensor | None, like: Tensor, placements: tuple | None = None) -> Tensor | None:
    if x is None:
        return None
    own = like._local_tensor
    if placements is None and (x.shape, x.stride(), x.dtype) == (own.shape, own.stride(), own.dtype):
        return type(like)(x, like._spec, requires_grad=x.requires_grad)  # from_local takes the host 0.1 ms
    return type(like).from_local(x, like.device_mesh, placements or like.placements, run_check=False)


def _check(query: Tensor, *others: Tensor) -> bool:
    """Whether the rows are sharded; else operands have to be placed so that each rank's part is a call of its own."""
    operands = (query, *others)
    if _on_rows(*operands):
        return True
    alike = all(x.placements == query.placements for x in others)
    if alike and all(p.is_replicate() or p.is_shard(0) or p.is_shard(1) for p in query.placements):
        return False
    placed = ", ".join(str(list(x.placements)) for x in operands)
    raise RuntimeError(
        f"torch_flashplug: operands are placed {placed} in a context_parallel block; it takes all of them sharded over "
        "rows, [Shard(2)] on a mesh of one dim, or none: with tensor parallelism too, call .to_local() first"
    )


def _replicated(tensor: Tensor) -> tuple:
    return (sys.modules["torch.distributed.tensor"].Replicate(),) * tensor.device_mesh.ndim


_METHODS = {
    "ring": (ring_attention.namespace.ring_fwd, ring_attention.namespace.ring_bwd),
    "gather": (allgather_kv.namespace.gathered_fwd, allgather_kv.namespace.gathered_bwd),
}
_method = "ring"


def use(method: str) -> None:
    """How keys and values come to the rows of other ranks, in calls that are ours from here on, but for graphs that
    were compiled before: "ring", the default, step by step, or "gather", all at once (allgather_kv.py). What ranks
    exchange differs, so all of them have to say the same, also before a backward, and none may leave calls to stock.
    """
    global _method  # noqa: PLW0603  (as torch's own options, it is the process's)
    if method not in _METHODS:
        raise ValueError(f"method={method!r}; use one of {', '.join(_METHODS)}")
    _method = method


def _is_traced(x: Tensor) -> bool:
    return isinstance(x, (FakeTensor, FunctionalTensor))


def _mode_of(x: Tensor) -> int:
    """Of a forward: what surrounds it, or the trace. A backend of the process is read by each step."""
    mode = tracing.traced_mode() if _is_traced(x) else bindings.effective_mode()
    return 0 if bindings.is_preference(mode) else mode & _WORD


def _settings(
    query: Tensor, is_causal: bool, scale: float | None, mode: int, balanced: bool
) -> ring_attention.Settings:
    """torch's options are the process's; which rows a rank has does not change behind a forward."""
    options, group = sys.modules[_MODULE]._cp_options, query.device_mesh.get_group()
    how = (options.rotate_method.name, balanced, options.convert_to_f32)
    return ring_attention.Settings(group.group_name, *how, bool(is_causal), scale, mode)


def _forward(op: object, args: tuple, kwargs: dict) -> tuple:
    given = _DEFAULTS | dict(zip(_NAMES, args)) | kwargs
    query, key, value, bias, dropout_p, is_causal = (given[name] for name in _NAMES)
    scale, local = given["scale"], tuple(map(_local, (query, key, value)))
    if not _check(query, key, value):
        given = (*local, _local(bias), dropout_p, is_causal, False)
        out, lse, _, _, max_q, max_k, *drawn, _ = _FORWARD(*given, scale=scale)
    elif bias is not None or dropout_p:
        raise NotImplementedError("torch_flashplug: context_parallel takes no attn_mask and no dropout")
    else:
        # By these the backward finds its forward's mode, and how rows lie.
        max_q, max_k = _mode_of(local[0]), int(sys.modules[_MODULE]._cp_options.enable_load_balance)
        out, lse = _METHODS[_method][0](*local, *_settings(query, is_causal, scale, max_q, bool(max_k)))
        # Nothing is drawn, but graphs have to have tensors there.
        drawn = [out.new_empty(0, dtype=torch.int64) if _is_traced(out) else None for _ in range(2)]
    return (
        _wrap(out, query),
        _wrap(lse, query),
        None,
        None,
        max_q,
        max_k,
        *(_wrap(x, query, _replicated(query)) for x in drawn),
        None,
    )


def _backward(op: object, args: tuple, kwargs: dict) -> tuple:
    grad, query, key, value, bias, wanted, out, lse, _, _, max_q, max_k, dropout_p, is_causal, *drawn = args
    scale = kwargs.get("scale")
    if grad.placements != query.placements:
        grad = grad.redistribute(query.device_mesh, query.placements)
    local = tuple(map(_local, (grad, query, key, value)))
    known = tuple(map(_local, (out, lse)))
    if _check(query, key, value):
        grads = _METHODS[_method][1](*local, *known, *_settings(query, is_causal, scale, max_q, bool(max_k)))
        return (*(_wrap(x, query) for x in grads), None)
    given = (*local, _local(bias), wanted, *known, None, None, max_q, max_k, dropout_p, is_causal, *map(_local, drawn))
    return tuple(_wrap(x, query) for x in _BACKWARD(*given, scale=scale))
