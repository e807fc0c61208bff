"""Device backends for tests: CUDA, and a CPU stub backend, real except for the kernel.

With the CPU stub, CPU tensors are eligible, each device looks like an H100, and the reference math runs in place of a
kernel launch (`our_forward` in src/ops/sdpa_ops.cpp). With both backends, auto mode selects plugin kernels wherever
possible, so that tests do not depend on the current dispatch table.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import torch_flashplug
from torch_flashplug.api import startup
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table, kernel_table, stock_bugs
from torch_flashplug.registry.dispatch_table import ANY, ChoiceRow
from torch_flashplug.torch_hooks import op_owners, sdpa_composite

SERVE_ALL = tuple(
    ChoiceRow(kind, "vectors", 90, grad, mask, 1, 256, 0, ANY, 0, ANY, 0, ratio=2.0, measured="test table")
    for kind in ("fwd", "decode")
    for grad in (False, True)
    for mask in ("full", "causal", "mask", "bias", "bias32")
)
OPEN_GATE = dataclasses.replace(dispatch_table.COST_MODEL, occupancy=0.0)


@dataclass(frozen=True)
class DeviceBackend:
    """Device backend of a test; counters start at zero."""

    device: str  # "cpu" (stub) or "cuda"
    hook: str = "choice_hook"  # or "composite_hook"
    dtype: torch.dtype = torch.bfloat16

    def qkv(
        self,
        *,
        rows: int = 128,
        keys: int | None = None,
        heads: int = 4,
        kv_heads: int | None = None,
        grad: bool = False,
    ) -> list[torch.Tensor]:
        """Return three leaf tensors (2, heads, rows, 64), laid out (batch, rows, heads, head dim) as projections do."""
        sizes = ((rows, heads), (keys or rows, kv_heads or heads), (keys or rows, kv_heads or heads))
        generator = torch.Generator().manual_seed(rows + heads)
        tensors = (
            torch.randn(2, n, h, 64, generator=generator).to(self.device, self.dtype).transpose(1, 2) for n, h in sizes
        )
        return [tensor.requires_grad_(grad) for tensor in tensors]

    def enable(self) -> None:
        torch_flashplug.enable()
        if self.device == "cpu" and self.hook == "choice_hook":
            assert bindings.install(bindings.CPU_SLOT) == 0, bindings.last_error()
        elif self.hook == "composite_hook":
            bindings.uninstall(bindings.CUDA_SLOT)
            sdpa_composite.install(self.device.upper())

    def disable(self) -> None:
        torch_flashplug.disable()
        if self.device == "cpu":
            bindings.uninstall(bindings.CPU_SLOT)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Restore stock behavior, as if the plugin had never been enabled."""
        self.disable()
        try:
            yield
        finally:
            self.enable()

    def pop_path_counts(self) -> dict[str, int]:
        """Return the nonzero counts of paths taken since the last call of this method."""
        return {path: count for path, count in bindings.counters(reset=True).items() if count}


@contextlib.contextmanager
def use_device_backend(device: str, hook: str = "choice_hook") -> Iterator[DeviceBackend]:
    """Install the hook for `device`, and restore everything at the end."""
    bindings.push_rows(
        kernel_table.KERNEL_ROWS, SERVE_ALL, OPEN_GATE, stock_bugs.STOCK_BUGS, dispatch_table.VARLEN_ROWS
    )
    if device == "cpu":
        op_owners.suppress_override_warning()
        bindings.set_facts_override(DEVICES["h100"])
        bindings.set_cpu_stub(True)
        bindings.register_ops("CPU")
        torch._fused_sdp_choice(*torch.empty(3, 1, 1, 8, 8).unbind())  # resolves the CPU entry of the stub in torch
    device_backend = DeviceBackend(device, hook)
    device_backend.enable()
    bindings.counters(reset=True)
    try:
        yield device_backend
    finally:
        device_backend.disable()
        torch_flashplug.enable()
        if device == "cpu":
            bindings.set_cpu_stub(False)
            bindings.set_facts_override(None)
            bindings.unregister_ops()
            bindings.register_ops("CUDA")
        startup.push_tables()
