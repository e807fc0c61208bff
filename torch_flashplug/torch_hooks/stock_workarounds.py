"""Switch for the stock workarounds (src/hooks/stock_workarounds.cpp) in calls that fall back to stock.

The cuDNN backend misreads addresses and strides that are not multiples of 16 bytes. The flash and efficient backends
fail for such operands. The backward of the cuDNN backend ignores the memory layout of grad_out.

Compiled graphs call the repaired kernels too, except graphs with Inductor's C++ wrapper, because the wrapper bypasses
the dispatcher. For such graphs, a backward is traced with grad_out in the memory order of out. Without dropout, the
traced backward passes dropout_p as -0.0, which gives the call a separate key in cuDNN's plan cache. Misread operands
are not repaired in such graphs.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from .. import env
from ..dispatch import bindings
from .op_owners import first_other_owner, suppress_override_warning

_log = logging.getLogger("torch_flashplug")
_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


def _copy_in_memory_order_of(out: Tensor, grad_out: Tensor) -> Tensor:
    """Return a copy of grad_out with dims in the memory order of out."""
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
    # A trace has loaded sympy already. An import of sympy at the top of the file would double the import time of
    # torch_flashplug.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    *passed_on, dropout_p, is_causal = rest
    if not all(statically_known_true(a == b) for a, b in zip(grad_out.stride(), out.stride())):
        with mode:
            grad_out = _copy_in_memory_order_of(out, grad_out)
    arguments = (grad_out, query, key, value, out, *passed_on, dropout_p or -0.0, is_causal)
    return mode.__torch_dispatch__(_BACKWARD, (), arguments, {"scale": scale})


def set_graph_workaround(is_enabled: bool) -> None:
    """Switch the replacement of the cuDNN backward in graphs traced from now on."""
    if _BACKWARD.python_key_table.pop(ProxyTorchDispatchMode, None) is not None:
        _BACKWARD._dispatch_cache.clear()
    if is_enabled:
        _BACKWARD.py_impl(ProxyTorchDispatchMode)(_trace_backward)


def _installed_schema(name: str) -> str:
    """Return the installed torch's schema of an op, or an empty string without such an op."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    return "" if packet is None else str(packet.default._schema)


def _repaired_schemas() -> dict[str, str]:
    """Return the schemas of the repaired stock ops by name, as src/core/schemas.h lists the schemas."""
    schemas = {schema.partition("(")[0]: schema for schema in bindings.names("schemas")}
    return {
        name: schemas[name] for name in schemas if any(f"_{backend}_" in name for backend in bindings.STOCK_BACKENDS)
    }


def _changed_ops() -> list[str]:
    """Return the stock ops with a schema different from src/core/schemas.h.

    src/stock/stock_kernels.cpp calls the functions of stock ops by mangled names, and a mangled name encodes no result
    types.
    """
    return [name for name, schema in _repaired_schemas().items() if _installed_schema(name) != schema]


def other_owners() -> dict[str, str]:
    """Return, by backend, the place where a different library has registered kernels for stock's attention ops.

    Such libraries are FlashAttention-4 of torch's registry and cudnn.torch. The kernels of such a library are neither
    repaired nor replaced.
    """
    ops = {
        backend: [name for name in _repaired_schemas() if f"_{backend}_" in name] for backend in bindings.STOCK_BACKENDS
    }
    owners = {backend: first_other_owner(*names) for backend, names in ops.items()}
    return {backend: place for backend, place in owners.items() if place}


def install() -> str:
    """Install the stock workarounds and return why some are missing; an empty text means success."""
    if env.REPAIR.is_on() is False or torch.version.cuda is None:
        return ""
    changed, owners = _changed_ops(), other_owners()
    for name, place in owners.items():
        _log.info("%s attention is not repaired: another library has registered its kernels at %s", name, place)
    backends = [name for name in bindings.STOCK_BACKENDS if not any(f"_{name}_" in op for op in changed)]
    backends = [name for name in backends if name not in owners]
    suppress_override_warning()
    set_graph_workaround("cudnn" in backends)
    if not bindings.enable_stock_workarounds(*backends):
        return bindings.last_error()
    return f"stock is not repaired: schemas differ from src/core/schemas.h: {', '.join(changed)}" if changed else ""


def uninstall() -> None:
    """Restore stock's own kernels."""
    set_graph_workaround(False)
    bindings.enable_stock_workarounds()
