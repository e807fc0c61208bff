"""Switches the repair of stock's attention (src/hooks/stock_workarounds.cpp), for calls that stay with stock: cuDNN's
misreads addresses and strides that are no multiples of 16 bytes, at which flash and the efficient attention fail, and
cuDNN's backward forgets how grad_out lies in memory.

Compiled graphs call the repaired kernels, too, but for those of Inductor's C++ wrapper, which calls stock's past the
dispatcher. For these a backward is traced with grad_out in the order of out, and, without dropout, under the key of its
own; operands that stock misreads are not repaired there.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from .. import env
from ..dispatch import bindings
from .op_owners import first_other_owner, spend_warning

_log = logging.getLogger("torch_flashplug")
_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


def _in_order_of(out: Tensor, grad_out: Tensor) -> Tensor:
    """grad_out's numbers with its dims in memory as out's."""
    order = sorted(range(out.dim()), key=out.stride, reverse=True)
    packed = grad_out.permute(order).clone(memory_format=torch.contiguous_format)
    return packed.permute([order.index(dim) for dim in range(out.dim())])


def _trace_backward(
    mode: ProxyTorchDispatchMode,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    *rest: Tensor | float | bool | None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    # Here a graph is being traced, so that sympy is loaded. At the top it would double the time that our import takes.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    *passed_on, dropout_p, is_causal = rest
    if not all(statically_known_true(a == b) for a, b in zip(grad_out.stride(), out.stride())):
        with mode:
            grad_out = _in_order_of(out, grad_out)
    arguments = (grad_out, query, key, value, out, *passed_on, dropout_p or -0.0, is_causal)
    return mode.__torch_dispatch__(_BACKWARD, (), arguments, {"scale": scale})


def in_graphs(on: bool) -> None:
    """Of graphs that are traced from now on."""
    if _BACKWARD.python_key_table.pop(ProxyTorchDispatchMode, None) is not None:
        _BACKWARD._dispatch_cache.clear()
    if on:
        _BACKWARD.py_impl(ProxyTorchDispatchMode)(_trace_backward)


def _schema(name: str) -> str:
    """This torch's; empty where it has no such op."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    return "" if packet is None else str(packet.default._schema)


def _known() -> dict[str, str]:
    """Schemas of stock's ops that are repaired, by name, as src/core/schemas.h has them."""
    known = {schema.partition("(")[0]: schema for schema in bindings.names("schemas")}
    return {name: known[name] for name in known if any(f"_{backend}_" in name for backend in bindings.STOCK_BACKENDS)}


def _changed() -> list[str]:
    """Stock's ops that are not as src/core/schemas.h has them. src/stock/stock_kernels.cpp calls their functions by
    mangled names, which say nothing of results.
    """
    return [name for name, schema in _known().items() if _schema(name) != schema]


def other_owners() -> dict[str, str]:
    """Return, by backend, where another library has registered kernels that stock's attention ops run: FlashAttention-4
    of torch's registry, or cudnn.torch. They are not repaired, and nothing of ours is put over them.
    """
    ops = {backend: [name for name in _known() if f"_{backend}_" in name] for backend in bindings.STOCK_BACKENDS}
    owners = {backend: first_other_owner(*names) for backend, names in ops.items()}
    return {backend: place for backend, place in owners.items() if place}


def install() -> str:
    """Puts it in place; says why not, where it cannot be."""
    if env.REPAIR.is_on() is False or torch.version.cuda is None:
        return ""
    changed, owners = _changed(), other_owners()
    for name, place in owners.items():
        _log.info("%s attention is not repaired: another library has registered its kernels at %s", name, place)
    backends = [name for name in bindings.STOCK_BACKENDS if not any(f"_{name}_" in op for op in changed)]
    backends = [name for name in backends if name not in owners]
    spend_warning()
    in_graphs("cudnn" in backends)
    if not bindings.repair(*backends):
        return bindings.last_error()
    return f"stock is not repaired where this torch has other schemas: {', '.join(changed)}" if changed else ""


def uninstall() -> None:
    """Stock's own kernels are in place again."""
    in_graphs(False)
    bindings.repair()
