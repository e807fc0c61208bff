"""torch.nn.attention.varlen on kernels of ours: what src/varlen.cpp, whose kernels stand at its private ops, cannot
know before torch's module is imported, and the bodies that torch would have run, for what is not ours.

In auto calls are ours on the GPUs where suite ragged found every class of them faster than stock (docs/benchmarks.md);
else where a block of sdpa_backend, or the process, asks for "fa3" or "fa2". The LSE of a row without keys is inf, as
stock has it; a gradient of the LSE is torch's to drop. A module of ours may not import torch.nn.attention.varlen: it
brings torch._dynamo, a second or more.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable

import torch

from .. import native, up_calls

_MODULE = "torch.nn.attention.varlen"
_OPS = ("_varlen_attn", "_varlen_attn_out", "_varlen_attn_backward")
_bodies = torch.library.Library("torch_flashplug", "FRAGMENT")
_once = threading.Lock()
_known: set[str] = set()


def install(device: str = "CUDA") -> None:
    """Ahead of torch's own import of the module, too. "CPU" serves the tests' stand-in."""
    up_calls.set_prepare(_prepare)
    native.open_varlen(device)


def uninstall() -> None:
    native.close_varlen()


def _prepare() -> None:
    """At the first call, so whoever makes it has imported the module."""
    with _once:
        for name in _OPS:
            packet = getattr(torch.ops.torch_attn, name, None)
            if packet is None or name in _known:
                continue
            schema = str(packet.default._schema)
            _bodies.define(f"_stock{name}({schema.partition('(')[2]}")
            _bodies.impl(f"_stock{name}", _body(name), "CompositeExplicitAutograd")
            native.know_varlen(name, schema)
            _known.add(name)


def _body(name: str) -> Callable:
    """torch's body, as it is when it is called."""

    @native.held
    @functools.wraps(getattr(sys.modules[_MODULE], name)._init_fn)
    def body(*given: object) -> object:
        return getattr(sys.modules[_MODULE], name)._init_fn(*given)

    return body
