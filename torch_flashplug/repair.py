"""Switches the repair of stock's cuDNN attention (src/repair.cpp), for calls that stay with stock: it misreads
addresses and strides that are no multiples of 16 bytes, and its backward forgets how grad_out lies in memory.

Compiled graphs call the repaired kernels, too, but for those of Inductor's C++ wrapper, which calls stock's past the
dispatcher: while a graph is traced, its backward is given grad_out in the order that the plan will assume.
"""

from __future__ import annotations

import functools
import math
import warnings

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from . import env, native

_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


@functools.cache
def spend_override_warning() -> None:
    """torch warns once in a process when a kernel is registered over another one, which the repair does on purpose."""
    library = torch.library.Library("flashplug_warned", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            library.impl("twice", torch.clone, "CPU", allow_override=True)
    library._destroy()


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
    *passed_on, dropout_p, is_causal = rest
    if grad_out.stride() != out.stride():
        with mode:
            grad_out = _in_order_of(out, grad_out)
    of_its_own = math.nextafter(dropout_p, 0.0) if dropout_p else -0.0  # as its_neighbour in src/repair.cpp
    arguments = (grad_out, query, key, value, out, *passed_on, of_its_own, is_causal)
    return mode.__torch_dispatch__(_BACKWARD, (), arguments, {"scale": scale})


def in_graphs(on: bool) -> None:
    """Of graphs that are traced from now on."""
    if _BACKWARD.python_key_table.pop(ProxyTorchDispatchMode, None) is not None:
        _BACKWARD._dispatch_cache.clear()
    if on:
        _BACKWARD.py_impl(ProxyTorchDispatchMode)(_trace_backward)


def install() -> str:
    """Puts it in place; says why not, where it cannot be."""
    if env.REPAIR.get() == "0" or torch.version.cuda is None:
        return ""
    spend_override_warning()
    in_graphs(True)
    return "" if native.repair(True) else native.last_error()


def uninstall() -> None:
    """Stock's own kernels are in place again."""
    in_graphs(False)
    native.repair(False)
