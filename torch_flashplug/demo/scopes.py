"""Stock torch beside the plugin, in one process: the scopes in which a comparison runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_flashplug


@contextmanager
def plugin_off() -> Iterator[None]:
    """Stock torch, as if torch_flashplug had never been enabled; enables it when left."""
    torch_flashplug.disable()
    try:
        yield
    finally:
        torch_flashplug.enable()


@contextmanager
def stock_backend(backend: SDPBackend) -> Iterator[None]:
    """One of stock's own backends, nothing else."""
    with plugin_off(), sdpa_kernel(backend):
        yield
