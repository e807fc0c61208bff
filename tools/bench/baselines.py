"""Providers of attention in benchmarks: the plugin's backends, and all importable peers, as rows of data.

A new peer needs only a new row.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import torch_flashplug
from torch_flashplug.api import startup
from torch_flashplug.demo.scopes import plugin_off, stock_backend
from torch_flashplug.registry import kernel_spec, kernel_table

ONE_ORDER = "_det"  # suffix of the names of deterministic variants
Attend = Callable[..., torch.Tensor]  # (q, k, v, **F.sdpa keywords) in (B, H, S, D) -> (B, H, S, Dv)


@dataclass(frozen=True, slots=True)
class Provider:
    name: str
    attend: Attend
    scope: Callable[[], AbstractContextManager]
    ours: bool = False


def ours(backend: str) -> Callable[[], AbstractContextManager]:
    """Return a scope in which the plugin runs `backend` ("auto" or a forced backend)."""
    return lambda: torch_flashplug.sdpa_backend(backend)


STOCK = {
    "cudnn": ("cuDNN (torch)", SDPBackend.CUDNN_ATTENTION),
    "fa2": ("FlashAttention-2 (torch)", SDPBackend.FLASH_ATTENTION),
    "efficient": ("efficient attention (torch)", SDPBackend.EFFICIENT_ATTENTION),
    "math": ("math (torch)", SDPBackend.MATH),
}
# name -> (label, modules, arguments). The first importable module is used. FA3 splits keys only with num_splits=0.
WHEELS = {
    "fa3": ("FlashAttention-3", ("flash_attn_interface", "fa3_fwd_interface"), {"num_splits": 0}),
    "fa4": ("FlashAttention-4", ("flash_attn.cute.interface",), {}),
}
# Peers with the interface of F.sdpa: name -> (label, module, function, arguments). Only suite largedims has such peers.
SDPA_WHEELS = {"ffpa": ("FFPA (CuTe DSL)", "ffpa_attn", "ffpa_attn_func", {"backend": "cutedsl"})}
SLOW = {"efficient", "math"}  # never near the fastest
FORWARD_ONLY = {"fa3"}
FLASH = "flex_flash"  # FlexAttention on FlashAttention-4's kernels
TALL = "ours_tall"  # tiles of 192 rows for bool masks, even if the plan estimates a longer time
OURS = {"ours_auto": "auto", "ours_fa3": "fa3", "ours_fa2": "fa2", TALL: "fa3"}  # name -> backend


def labels() -> dict[str, str]:
    """Return the label of each provider in plots. Providers that cannot run on this machine also have a label."""
    ours = {name: f"torch_flashplug ({backend})" for name, backend in OURS.items()}
    both = ours | {TALL: "torch_flashplug (fa3, tall tiles)", "stock": "F.sdpa without the plugin"}
    peers = {name: label for name, (label, *_) in (STOCK | WHEELS | SDPA_WHEELS).items()}
    both |= {"flex": "FlexAttention (compiled)", FLASH: "FlexAttention (compiled, FLASH)"}
    return both | {f"{name}{ONE_ORDER}": both[name] for name in ("ours_fa3", "stock")} | peers


def wheel(name: str) -> Callable | None:
    """Return the `flash_attn_func` of a wheel, or None if the wheel is not installed."""
    return _import_wheel(WHEELS[name][1])[0]


def _wheel(function: Callable) -> Attend:
    """Wrap a `flash_attn_func`, which takes (B, S, H, D), in a function with the interface of F.sdpa."""

    def attend(q, k, v, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False):
        inputs = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        result = function(*inputs, softmax_scale=scale, causal=is_causal)
        return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)

    return attend


def _flex(*operands: torch.Tensor, **arguments: object) -> torch.Tensor:
    """Call FlexAttention as users do, with the arguments of FlexAttention."""
    return _compiled_flex()(*operands, **arguments)


@functools.cache
def _compiled_flex() -> Attend:
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    # A process that times many masks compiles again for each mask. By default torch stops to compile after eight times.
    config.recompile_limit = config.accumulated_recompile_limit = 1000
    return torch.compile(flex_attention, dynamic=False)


def _import_wheel(modules: tuple[str, ...], function: str = "flash_attn_func") -> tuple[Callable | None, str]:
    reasons = []
    for name in modules:
        try:
            return getattr(importlib.import_module(name), function), ""
        except Exception as error:  # a peer that raises any exception on import counts as absent
            reasons.append(f"{name}: {type(error).__name__}: {str(error)[:120]}")
    return None, "; ".join(reasons)


@contextmanager
def in_one_order(scope: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """Enter `scope` under torch.use_deterministic_algorithms, without the fill of new tensors.

    Users who care about speed switch the fill off.
    """
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with scope():
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


@contextmanager
def tall_tiles() -> Iterator[None]:
    """Enter a scope in which the plugin's kernels use the tiles with the most rows for bool masks."""
    rows = kernel_table.KERNEL_ROWS
    kernels = [
        replace(row, cost=1)
        if (row.features, row.tile_m) == (kernel_table.MASK, kernel_spec.SPARSE_BLOCK_M_192)
        else row
        for row in rows
    ]
    startup.push_tables(kernels)
    try:
        with torch_flashplug.sdpa_backend("fa3"):
            yield
    finally:
        startup.push_tables()


def _wheel_providers() -> tuple[dict[str, Provider], dict[str, str]]:
    """Return the providers of installed wheels, and a reason for each wheel that cannot be imported."""
    available, absent = {}, {}
    flash = {name: (modules, "flash_attn_func", arguments) for name, (_, modules, arguments) in WHEELS.items()}
    like_sdpa = {name: ((module,), *call) for name, (_, module, *call) in SDPA_WHEELS.items()}
    for name, (modules, function_name, arguments) in (flash | like_sdpa).items():
        function, reason = _import_wheel(modules, function_name)
        if function is None:
            absent[name] = reason
            continue
        attend = functools.partial(function, **arguments)
        available[name] = Provider(name, _wheel(attend) if name in WHEELS else attend, nullcontext)
    return available, absent


def providers(names: set[str] | None = None) -> tuple[dict[str, Provider], dict[str, str]]:
    """Return the providers that can run on this machine, and a reason for each absent provider.

    Args:
        wanted: names that limit both results. By default, "ours_fa2", TALL, SDPA_WHEELS and the FlexAttention providers
            (which take no mask of F.sdpa) are left out.
    """
    available: dict[str, Provider] = {}
    sdpa = F.scaled_dot_product_attention
    for name, backend in OURS.items():
        available[name] = Provider(name, sdpa, tall_tiles if name == TALL else ours(backend), ours=True)
    available["stock"] = Provider("stock", sdpa, plugin_off)
    for name in ("ours_fa3", "stock"):  # deterministic variants, for gradients only
        again = available[name]
        scope = functools.partial(in_one_order, again.scope)
        available[f"{name}{ONE_ORDER}"] = replace(again, name=f"{name}{ONE_ORDER}", scope=scope)
    for name, (_, backend) in STOCK.items():
        available[name] = Provider(name, sdpa, lambda backend=backend: stock_backend(backend))
    installed, absent = _wheel_providers()
    available |= installed
    available["flex"] = Provider("flex", _flex, plugin_off)
    if "fa4" in available:
        available[FLASH] = Provider(FLASH, functools.partial(_flex, kernel_options={"BACKEND": "FLASH"}), plugin_off)
    else:
        absent[FLASH] = absent["fa4"]
    if names is None:
        special = {"ours_fa2", TALL, "flex", FLASH, *SDPA_WHEELS}
        available = {name: p for name, p in available.items() if name not in special}
        absent = {name: reason for name, reason in absent.items() if name not in special}
    else:
        available = {name: p for name, p in available.items() if name in names}
        absent = {name: reason for name, reason in absent.items() if name in names}
    return available, absent
