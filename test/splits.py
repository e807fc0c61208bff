"""Calls with a forced number of KV splits, and the plans of such calls."""

from __future__ import annotations

from torch_flashplug import sdpa_backend
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings, table_structs
from torch_flashplug.registry.dtypes import ELEMENTS
from torch_flashplug.testing import Case

MOST = 255  # largest number of splits in a mode word
CAUSAL_TEXT = (
    "num_splits=4 is not possible, because no kernel splits the keys of this call (with is_causal, no kernel does). "
    "Use num_splits=1."
)


def forced(num_splits: int, backend: str = "fa3") -> int:
    """Return the mode word for a number of splits. With 0 the decode gate decides the number."""
    return sdpa_backend(backend, num_splits=num_splits).mode


def planned(
    case: Case, num_splits: int = 0, device: dict[str, int] = DEVICES["h100"], backend: str = "fa3", **facts: int
) -> dict:
    """Return the plan of a forced call. `facts` describes the operands (native.problem_facts())."""
    made = zip("qkv", ELEMENTS[case.dtype].operands)
    dtypes = {f"dtype_{operand}": table_structs.DTYPE_IDS[number] for operand, number in made}
    return bindings.plan(case.sizes() | dtypes | facts, device, forced(num_splits, backend))
