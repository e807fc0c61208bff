"""torch's context_parallel on kernels of ours: two entries in torch's own table of handlers, which it gives to DTensor
each time context parallelism is switched on. Load balance, rotation and collectives are torch's.

All of torch's that is named here is private: where it is not what we know, one warning, and stock serves the calls.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys

import torch
from torch import Tensor

from .. import tracing

_log = logging.getLogger("torch_flashplug")
_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_SEQ = 2  # dim of the rows
_STOCKS = torch.ops.aten._scaled_dot_product_flash_attention.default
_FORWARD, _BACKWARD = tracing.OVERRIDEABLE.default, tracing.OVERRIDEABLE_BACKWARD.default
# Names of torch's, and the parameters that we give them.
_KNOWN = {
    "_templated_ring_attention": ("group", "seq_dim", "op", "query", "key", "value", "is_causal"),
    "_templated_ring_attention_backward": (
        *("group", "seq_dim", "op", "grad_out", "grad_out_name", "query", "key", "value", "out", "logsumexp"),
        "is_causal",
    ),
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
    for name, parameters in _KNOWN.items():
        function = getattr(torchs, name, None)
        has = tuple(inspect.signature(function).parameters) if callable(function) else ()
        if has[: len(parameters)] != parameters:
            return f"{name} takes {', '.join(has) or 'nothing'}"
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


def _step(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, dropout_p: float, scale: float | None):
    return _FORWARD(query, key, value, None, dropout_p, is_causal, False, scale=scale)


def _forward(op: object, args: tuple, kwargs: dict) -> tuple:
    defaults = (None, 0.0, False, False)
    query, key, value, bias, dropout_p, is_causal, _ = (*args, *defaults[len(args) - 3 :])
    scale = kwargs.get("scale")
    if not _check(query, key, value):
        given = map(_local, (query, key, value, bias))
        out, lse, _, _, max_q, max_k, seed, offset, _ = _FORWARD(*given, dropout_p, is_causal, False, scale=scale)
    elif bias is not None:
        raise NotImplementedError("torch_flashplug: context_parallel takes no attn_mask")
    else:
        out, lse, _, _, max_q, max_k, seed, offset, _ = sys.modules[_MODULE]._templated_ring_attention(
            query.device_mesh.get_group(), _SEQ, _step, *map(_local, (query, key, value)), is_causal=is_causal,
            dropout_p=dropout_p, scale=scale,
        )  # fmt: skip
    # While a graph is traced they are tensors, by which the backward finds its mode.
    drawn = (_wrap(x, query, _replicated(query)) for x in (seed, offset))
    return _wrap(out, query), _wrap(lse, query), None, None, max_q, max_k, *drawn, None


def _step_backward(
    *, query, key, value, out, logsumexp, is_causal, grad_out, carried, drawn, scale
) -> tuple[Tensor | None, ...]:
    wanted = [True, True, True, False]  # the ring adds up all three
    return _BACKWARD(grad_out, query, key, value, None, wanted, out, logsumexp, None, None, *carried, 0.0, is_causal,
                     *drawn, scale=scale)  # fmt: skip


def _backward(op: object, args: tuple, kwargs: dict) -> tuple:
    grad, query, key, value, bias, wanted, out, lse, _, _, max_q, max_k, dropout_p, is_causal, seed, offset = args
    scale, drawn = kwargs.get("scale"), (_local(seed), _local(offset))
    if grad.placements != query.placements:
        grad = grad.redistribute(query.device_mesh, query.placements)
    if not _check(query, key, value):
        given = map(_local, (grad, query, key, value, bias))
        grads = _BACKWARD(*given, wanted, _local(out), _local(lse), None, None, max_q, max_k, dropout_p, is_causal,
                          *drawn, scale=scale)  # fmt: skip
        return tuple(_wrap(x, query) for x in grads)
    dq, dk, dv, *_ = sys.modules[_MODULE]._templated_ring_attention_backward(
        query.device_mesh.get_group(), _SEQ, _step_backward, grad_out=_local(grad), grad_out_name="grad_out",
        query=_local(query), key=_local(key), value=_local(value), out=_local(out), logsumexp=_local(lse),
        # Under another name than max_q, which holds the forward's mode: torch 2.14 writes numbers of rows over max_q.
        is_causal=is_causal, carried=(max_q, max_k), drawn=drawn, scale=scale,
    )  # fmt: skip
    return (*(_wrap(x, query) for x in (dq, dk, dv)), None)
