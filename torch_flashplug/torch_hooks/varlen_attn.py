"""Registration of varlen_attn kernels for torch.nn.attention.varlen, and the stock bodies for the fallback.

src/hooks/varlen_attn.cpp holds the kernels for the private ops of torch's module. This module supplies the facts
unknown to C++ before torch's module is imported, and the bodies of stock for calls that fall back to stock.

In the mode "auto", a call is served where VARLEN_ROWS (dispatch_table.py) lists the kernel stock would run. Other calls
are served where an sdpa_backend block or the process selects "fa3" or "fa2". The LSE of a row without keys is inf, as
in stock. torch drops a gradient of the LSE. No module of this package may import torch.nn.attention.varlen, because the
import loads torch._dynamo, which takes a second or more.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable

import torch

from ..dispatch import bindings, callbacks, varlen_decision
from . import op_owners

_MODULE = "torch.nn.attention.varlen"
_BACKWARD = "_varlen_attn_backward"
_OPS = ("_varlen_attn", "_varlen_attn_out", _BACKWARD)
_OLDEST_CUDNN = 91800  # oldest cuDNN used by torch 2.14 and later for varlen_attn
_stock_bodies = torch.library.Library("torch_flashplug", "FRAGMENT")
_prepare_lock = threading.Lock()
_prepared_ops: set[str] = set()
_log = logging.getLogger("torch_flashplug")


def install(device: str = "CUDA") -> None:
    """Register kernels for the ops of torch's module, which need not be imported yet.

    "CPU" serves the CPU stub backend of the tests. Kernels of a different library at the ops, such as cudnn.torch, stay
    in force, and no kernel is registered.
    """
    callbacks.set_prepare_callback(prepare)
    if place := other_owner(device):
        _log.info("varlen_attn: kernels are left to the library that registered kernels at %s", place)
        return
    bindings.register_varlen_ops(device)


def uninstall() -> None:
    bindings.unregister_varlen_ops()


def other_owner(device: str = "CUDA") -> str:
    """Return the place where a different library has registered a kernel for the ops; empty without such a kernel."""
    return op_owners.first_other_owner(*(f"torch_attn::{name}" for name in _OPS), key=device)


def prepare() -> None:
    """Define the stock bodies and report the schemas to C++ at the first call.

    The caller of the first call has imported torch's module.
    """
    with _prepare_lock:
        for name in _OPS:
            packet = getattr(torch.ops.torch_attn, name, None)
            if packet is None or name in _prepared_ops:
                continue
            schema = str(packet.default._schema)
            _define(f"_stock{name}", schema, _stock_body(name))
            if name == _BACKWARD:
                _define(f"_flash{name}", schema, _flash_backward(packet.default))
            varlen_decision.set_varlen_rule(_selection_rule(schema))
            bindings.set_varlen_schema(name, schema)
            _prepared_ops.add(name)


def _define(name: str, schema: str, body: Callable) -> None:
    _stock_bodies.define(f"{name}({schema.partition('(')[2]}")
    _stock_bodies.impl(name, body, "CompositeExplicitAutograd")


def _selection_rule(schema: str) -> str:
    """Return the rule by which the installed torch selects the kernel of the body, for set_varlen_rule()."""
    if "int backend" in schema.lower().replace("symint", "int"):
        return "argument"
    if torch.__version__ < (2, 14):
        return "flash"
    if not hasattr(sys.modules[_MODULE], "_can_use_cudnn"):
        return "unknown"
    version = torch.backends.cudnn.version() if torch.version.cuda is not None else None
    return "shapes" if version is not None and version >= _OLDEST_CUDNN else "flash"


def _stock_body(name: str) -> Callable:
    """Return a function with torch's body of an op, looked up again in every call."""

    @bindings.held
    @functools.wraps(getattr(sys.modules[_MODULE], name)._init_fn)
    def body(*args: object) -> object:
        return getattr(sys.modules[_MODULE], name)._init_fn(*args)

    return body


def _flash_backward(op: torch._ops.OpOverload) -> Callable:
    """Return the flash attention backward of the op for forwards run by torch_flashplug kernels.

    The backward of cuDNN must not follow such a forward.
    """
    names = [argument.name for argument in op._schema.arguments]

    @bindings.held
    def body(*args: object) -> tuple[torch.Tensor, ...]:
        values = dict(zip(names, args, strict=False))
        operands = [
            values[name] for name in ("grad_out", "query", "key", "value", "out", "lse", "cu_seq_q", "cu_seq_k")
        ]
        left, right = values.get("window_size") or (-1, -1)
        unused = torch.empty(0, device=values["query"].device)
        return torch.ops.aten._flash_attention_backward(
            *operands,
            values["max_q"],
            values["max_k"],
            0.0,
            values["is_causal"],
            values["rng_state"],
            unused,
            scale=values.get("scale"),
            window_size_left=left,
            window_size_right=right,
        )

    return body
