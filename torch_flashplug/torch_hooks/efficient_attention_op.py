"""Registration of kernels for aten::_efficient_attention_forward and the backward op.

src/hooks/efficient_attention_op.cpp has the kernels.
Lower-right causal masks unsupported by flash attention reach these ops. Stock's kernel stays callable by the C++ name
and receives operands in a readable layout.
"""

from __future__ import annotations

import logging

import torch

from ..dispatch import bindings, varlen_decision
from .op_owners import first_other_owner, suppress_override_warning

_OPS = ("aten::_efficient_attention_forward", "aten::_efficient_attention_backward")
_log = logging.getLogger("torch_flashplug")


def install(device: str = "CUDA") -> None:
    """Register the kernels, unless torch's schemas differ or a different library has registered kernels.

    "CPU" serves the CPU stub backend of the tests.
    """
    schemas = {schema.partition("(")[0]: schema for schema in bindings.names("schemas")}
    for name in _OPS:
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        if packet is None or str(packet.default._schema) != schemas[name]:
            _log.debug("efficient attention falls back to stock: schema of %s is unknown", name)
            return
    if device != "CPU" and (place := first_other_owner(*_OPS)):
        _log.info("efficient attention: kernels are left to the library that registered kernels at %s", place)
        return
    suppress_override_warning()
    if not varlen_decision.register_efficient_ops(device):
        _log.debug("efficient attention falls back to stock: %s", bindings.last_error())


def uninstall() -> None:
    varlen_decision.unregister_efficient_op()
