"""aten::_efficient_attention_forward and its backward on kernels of ours (src/hooks/efficient_attention_op.cpp): there
arrive lower-right causal masks that flash attention cannot run. Stock's kernel stays callable below, by its C++ name,
and gets operands that it can read.
"""

from __future__ import annotations

import logging

import torch

from ..dispatch import bindings, varlen_decision
from .op_owners import first_other_owner, spend_warning

_OPS = ("aten::_efficient_attention_forward", "aten::_efficient_attention_backward")
_log = logging.getLogger("torch_flashplug")


def install(device: str = "CUDA") -> None:
    """Put them in place, unless this torch has other schemas or another library has kernels there. "CPU" serves the
    tests' stand-in.
    """
    known = {schema.partition("(")[0]: schema for schema in bindings.names("schemas")}
    for name in _OPS:
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        if packet is None or str(packet.default._schema) != known[name]:
            _log.debug("efficient attention stays stock's: this torch has another %s", name)
            return
    if device != "CPU" and (place := first_other_owner(*_OPS)):
        _log.info("efficient attention stays with the library that has registered its kernels at %s", place)
        return
    spend_warning()
    if not varlen_decision.open_efficient(device):
        _log.debug("efficient attention stays stock's: %s", bindings.last_error())


def uninstall() -> None:
    varlen_decision.close_efficient()
