"""torch.nn.attention.varlen on kernels of ours: what src/hooks/varlen_attn.cpp, whose kernels stand at its private ops,
cannot know before torch's module is imported, and the bodies that torch would have run, for what is not ours.

In auto calls are ours where VARLEN_ROWS (dispatch_table.py) has the kernel that torch would run; else where a block of
sdpa_backend, or the process, asks for "fa3" or "fa2". The LSE of a row without keys is inf, as stock has it; a gradient
of the LSE is torch's to drop. A module of ours may not import torch.nn.attention.varlen: it brings torch._dynamo, a
second or more.
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
_OLDEST_CUDNN = 91800  # that torch 2.14 and later use for it
_bodies = torch.library.Library("torch_flashplug", "FRAGMENT")
_once = threading.Lock()
_known: set[str] = set()
_log = logging.getLogger("torch_flashplug")


def install(device: str = "CUDA") -> None:
    """Put our kernels at the ops of torch's module, which need not be imported yet. "CPU" serves the tests' stand-in.

    Where another library's kernels stand there, as cudnn.torch's may, they stay in force and ours are not put in place.
    """
    callbacks.set_prepare(prepare)
    if place := other_owner(device):
        _log.info("varlen_attn stays with the library that has registered its kernels at %s", place)
        return
    bindings.open_varlen(device)


def uninstall() -> None:
    bindings.close_varlen()


def other_owner(device: str = "CUDA") -> str:
    """Return where another library has registered a kernel that one of these ops runs; empty: there is none."""
    return op_owners.first_other_owner(*(f"torch_attn::{name}" for name in _OPS), key=device)


def prepare() -> None:
    """At the first call, so whoever makes it has imported the module."""
    with _once:
        for name in _OPS:
            packet = getattr(torch.ops.torch_attn, name, None)
            if packet is None or name in _known:
                continue
            schema = str(packet.default._schema)
            _define(f"_stock{name}", schema, _body(name))
            if name == _BACKWARD:
                _define(f"_flash{name}", schema, _flash_backward(packet.default))
            varlen_decision.know_varlen_rule(_rule(schema))
            bindings.know_varlen(name, schema)
            _known.add(name)


def _define(name: str, schema: str, body: Callable) -> None:
    _bodies.define(f"{name}({schema.partition('(')[2]}")
    _bodies.impl(name, body, "CompositeExplicitAutograd")


def _rule(schema: str) -> str:
    """Return how this torch chooses the kernel of its body, as doors.know_varlen_rule() takes it."""
    if "int backend" in schema.lower().replace("symint", "int"):
        return "argument"
    if torch.__version__ < (2, 14):
        return "flash"
    if not hasattr(sys.modules[_MODULE], "_can_use_cudnn"):
        return "unknown"
    version = torch.backends.cudnn.version() if torch.version.cuda is not None else None
    return "shapes" if version is not None and version >= _OLDEST_CUDNN else "flash"


def _body(name: str) -> Callable:
    """torch's body, as it is when it is called."""

    @bindings.held
    @functools.wraps(getattr(sys.modules[_MODULE], name)._init_fn)
    def body(*given: object) -> object:
        return getattr(sys.modules[_MODULE], name)._init_fn(*given)

    return body


def _flash_backward(op: torch._ops.OpOverload) -> Callable:
    """Flash attention's backward of the same arguments, for forwards of ours: cuDNN's must not follow them."""
    names = [argument.name for argument in op._schema.arguments]

    @bindings.held
    def body(*given: object) -> tuple[torch.Tensor, ...]:
        told = dict(zip(names, given, strict=False))
        operands = [told[name] for name in ("grad_out", "query", "key", "value", "out", "lse", "cu_seq_q", "cu_seq_k")]
        left, right = told.get("window_size") or (-1, -1)
        unused = torch.empty(0, device=told["query"].device)
        return torch.ops.aten._flash_attention_backward(
            *operands,
            told["max_q"],
            told["max_k"],
            0.0,
            told["is_causal"],
            told["rng_state"],
            unused,
            scale=told.get("scale"),
            window_size_left=left,
            window_size_right=right,
        )

    return body
