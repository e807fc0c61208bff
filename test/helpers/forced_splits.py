"""Calls with a forced number of splits, and the plans of such calls."""

from __future__ import annotations

from torch_flashplug import sdpa_backend
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings, table_structs
from torch_flashplug.registry.architectures import FAMILIES
from torch_flashplug.registry.dtypes import KERNEL_DTYPES
from torch_flashplug.testing import Case

MAX_SPLITS = 255  # maximum number of splits in a mode word
CAUSAL_TEXT = (
    "num_splits=4 is not possible, because no kernel splits the keys of this call (with is_causal, no kernel does). "
    "Use num_splits=1."
)


def forced_mode(num_splits: int, backend: str = "fa3") -> int:
    """Return the mode word of a forced backend with a number of splits; 0 splits: the gate decides."""
    return sdpa_backend(backend, num_splits=num_splits).mode


def plan_of_forced_call(
    case: Case, num_splits: int = 0, device: dict[str, int] | None = None, backend: str = "fa3", **facts: int
) -> dict:
    """Return the plan of a forced call.

    Args:
        case: sizes and dtype of the call.
        num_splits: forced number of splits; 0: the gate decides.
        device: device facts; None for the first preset that runs the kernels of the backend.
        backend: the forced backend.
        facts: further facts of the operands (`bindings.problem_facts()`).
    """
    family = next(family for family in FAMILIES if family.backend == backend)
    device = device or next(preset for preset in DEVICES.values() if family.runs_on(preset["cc"]))
    operand_dtypes = zip("qkv", KERNEL_DTYPES[case.dtype].operands)
    dtypes = {f"dtype_{operand}": table_structs.DTYPE_IDS[number] for operand, number in operand_dtypes}
    return bindings.plan(case.sizes() | dtypes | facts, device, forced_mode(num_splits, backend))
