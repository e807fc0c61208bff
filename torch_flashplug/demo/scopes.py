"""Scopes for comparing stock torch with the plugin in one process."""

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
# Stock's backends without a GPU. "CPU flash" is a CPU kernel of torch that shares no code with FlashAttention-2.
CPU_STOCK = {"CPU flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


@contextmanager
def plugin_off() -> Iterator[None]:
    """Run stock torch as if torch_flashplug had never been enabled; enable the plugin again at the end."""
    torch_flashplug.disable()
    try:
        yield
    finally:
        torch_flashplug.enable()


@contextmanager
def stock_backend(backend: SDPBackend) -> Iterator[None]:
    """Run only the given backend of stock torch."""
    with plugin_off(), sdpa_kernel(backend), warnings.catch_warnings():
        # torch warns once per reason if the backend has no kernel. The tables of the demo report such cases.
        warnings.simplefilter("ignore")
        yield


def all_scopes(on_gpu: bool) -> dict[str, Scope]:
    """Return all scopes in which the same model can run on this machine, the scopes of the plugin first.

    Without a GPU, "auto" and "plugin off" run the same code.
    """
    ours: dict[str, Scope] = {"auto": nullcontext}
    if on_gpu:
        ours["fa3 forced"] = lambda: torch_flashplug.sdpa_backend("fa3")
    stock: dict[str, Scope] = {"plugin off": plugin_off}
    for name, backend in (STOCK if on_gpu else CPU_STOCK).items():
        stock[name] = lambda backend=backend: stock_backend(backend)
    return ours | stock
