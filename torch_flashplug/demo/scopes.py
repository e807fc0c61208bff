"""Stock torch beside the plugin, in one process: the scopes in which a comparison runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_flashplug

Scope = Callable[[], AbstractContextManager]
STOCK = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash (FA2)": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# Stock's backends without a GPU. The first is a CPU kernel of torch, which shares no code with FlashAttention-2.
CPU_STOCK = {"CPU flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


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
    with plugin_off(), sdpa_kernel(backend), warnings.catch_warnings():
        # torch warns once per reason where this backend has no kernel; the tables say so
        warnings.simplefilter("ignore")
        yield


def all_scopes(on_gpu: bool) -> dict[str, Scope]:
    """Return every way that the same model can run here, ours first. Without a GPU "auto" and "plugin off" are one."""
    ours: dict[str, Scope] = {"auto": nullcontext}
    if on_gpu:
        ours["fa3 forced"] = lambda: torch_flashplug.sdpa_backend("fa3")
    stock: dict[str, Scope] = {"plugin off": plugin_off}
    for name, backend in (STOCK if on_gpu else CPU_STOCK).items():
        stock[name] = lambda backend=backend: stock_backend(backend)
    return ours | stock
