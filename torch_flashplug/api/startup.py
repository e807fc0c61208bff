"""Initialization of the plugin, once per process, before the dispatcher is switched on.

The steps: pass the tables and the flags to `_C`, register kernel packs and callbacks, implement the ops, and register
the tracing support.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .. import env
from ..codegen import compiler, jit
from ..codegen.kernel_request import CallConditions, KernelAnswer
from ..dispatch import bindings, callbacks, kernel_sets, packs
from ..registry import dispatch_table, kernel_table, quant_recipes, stock_bugs
from ..registry.architectures import BACKENDS
from ..registry.kernel_spec import KernelSpec
from ..torch_hooks import describe_call, hook_list, recomputation, tracing
from ..torch_hooks.distributed import dtensor
from . import direct_attention

_plan_log = logging.getLogger("torch_flashplug.plan")


def _process_backend() -> int:
    name = env.BACKEND.get()
    if name and name not in BACKENDS:
        raise ValueError(f"{env.BACKEND.name} must be one of {', '.join(BACKENDS)}, but got {name!r}.")
    return BACKENDS.index(name) if name else 0


def _process_precision() -> int:
    name = env.PRECISION.get()
    return quant_recipes.precision_number(name, env.PRECISION.name) if name else 0


def provide(name: str, cc: int, conditions: CallConditions) -> KernelAnswer:
    """Return a kernel that no open pack holds: from a compressed pack, from the disk cache, or compiled now.

    Args:
        name: the name of a `KernelSpec`.
        cc: the compute capability of the GPU; 90 is 9.0.
        conditions: the conditions of the call, such as a running graph capture.
    """
    target = compiler.target_of(cc)
    if packed := packs.provide(name, target):
        return packed
    spec = KernelSpec.from_name(name)
    # Stock cannot serve these calls meanwhile, because stock's result differs: different dropout masks, a different
    # order of sums, or a backward for a forward that ran on a torch_flashplug kernel.
    deterministic = torch.are_deterministic_algorithms_enabled()
    must_wait = conditions.must_wait or spec.is_backward or "dropout" in spec.features or deterministic
    conditions = replace(conditions, must_wait=must_wait)

    def following() -> list[str]:
        names = kernel_sets.kernels_needed_next(
            spec, bindings.device_facts(), conditions.needs_gradients, deterministic
        )
        packed = packs.packed_kernels(target)
        return [name for name in names if name not in packed]

    return jit.provide(name, target, conditions, following)


@dataclass
class _PushedTables:
    """Tables that `_C` has now."""

    kernels: Sequence[kernel_table.KernelRow] = kernel_table.KERNEL_ROWS


_pushed = _PushedTables()


def kernel_names() -> list[str]:
    """Return the names of the kernels of `_C`, in the order of the kernel table in `_C`."""
    return [spec.name() for row in _pushed.kernels for spec in row.specs()]


def push_tables(kernels: Sequence[kernel_table.KernelRow] | None = None) -> None:
    """Pass the measured tables to `_C`.

    Args:
        kernels: rows of the kernel table; None for all rows of `kernel_table.KERNEL_ROWS`.
    """
    kernels = kernel_table.KERNEL_ROWS if kernels is None else kernels
    _pushed.kernels = kernels
    bindings.push_rows(
        kernels,
        dispatch_table.CHOICE_ROWS,
        dispatch_table.COST_MODEL,
        stock_bugs.STOCK_BUGS,
        dispatch_table.VARLEN_ROWS,
    )


def _load_core() -> None:
    env.HOOK.get()  # an unknown value raises here, before anything is switched on
    push_tables()
    bindings.set_process_backend(_process_backend())
    bindings.set_process_precision(_process_precision())
    packs.register()
    callbacks.set_compile_callback(provide)
    callbacks.set_learn_callback(recomputation.run_probe)
    callbacks.set_trace_callback(describe_call.size_hints_of_traced, dtensor.local_part)
    plans = _plan_log.isEnabledFor(logging.DEBUG) or env.names_plugin_in_torch_logs()
    callbacks.set_log_callback(_plan_log.log, plans=plans)


@functools.cache
def load() -> None:
    """Initialize the plugin once, before anything is switched on.

    Stock torch behaves as before after this call: `backend.enable()` installs the dispatcher.
    """
    _load_core()
    bindings.register_ops("CUDA")
    direct_attention.install()
    tracing.register()
    for hook in hook_list.REGISTERED_ONCE:
        hook.register()
